"""What a grammar costs a decode step: the same sequences by a grammar, and by a mask that the caller has registered.

Runs of the client in one session against an executor in a process of its own, so that a step has what a server does
between two steps. The grammar is a JSON schema whose text is longer than a run, and tokens are sampled, so that each
sequence has a text of its own. A run begins at the same place in each round. Rounds of both alternate, so ratios are of
one run. A shape of `benchmarks/shapes.json` has random weights, and random words for tokens: what counts is how many
there are.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import tables
from benchmarks.cases import BUILT_IN, CACHE, SEED, SHAPES, checkpoint
from benchmarks.compare import SETTLE_S
from benchmarks.engines.grpc import executor
from benchmarks.record import Record, finish, out_of, read_options
from ferrum_rpc.client import ExecutorClient, GrammarKind, Run, Sample
from ferrum_rpc.client import Sequence as CachedSequence

BATCHES: Final = (1, 8, 32)
MASK, GRAMMAR = "a registered mask", "a grammar"
TARGET: Final = 1.05
"""A step by a grammar, in steps by a registered mask, at most."""

SERVED: Final = {"device": "cpu", "kv-blocks": 2048, "lease-ttl-s": 600.0}
PROMPT: Final = b"The register of the parish: "
PERSON: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer"},
        "children": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 3},
        "married": {"type": "boolean"},
    },
    "required": ["name", "age", "children", "married"],
    "additionalProperties": False,
}
SCHEMA: Final = {"type": "array", "minItems": 1000, "items": PERSON}


def with_words(shape: str) -> Path:
    """The folder of a shape's checkpoint with a tokenizer: all bytes, and as many random words as there are tokens."""
    folder, weights = CACHE / f"{shape}-words", checkpoint(shape)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        os.link(weights / name, folder / name)
    config = SHAPES[shape]
    ends = {config["bos_token_id"], config["eos_token_id"]}
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # how byte-level tokenizers write bytes
    others = [byte for byte in range(256) if byte not in printable]
    written = {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    words = dict.fromkeys(written[byte] for byte in range(256))
    dice = random.Random(SEED)
    while len(words) + len(ends) < config["vocab_size"]:
        space = written[ord(" ")] * (dice.random() < 0.5)
        words[space + "".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=dice.randint(2, 8)))] = None
    numbers = [number for number in range(config["vocab_size"]) if number not in ends]
    added = [
        {"id": end, "content": f"<{end}>", "special": True, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False}
        for end in sorted(ends)
    ]
    model = {"type": "BPE", "vocab": dict(zip(words, numbers, strict=False)), "merges": []}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {"version": "1.0", "added_tokens": added, "pre_tokenizer": level, "decoder": level, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


async def step_ms(
    client: ExecutorClient, sequences: Sequence[CachedSequence], outputs: Sequence[Sample], tokens: int
) -> float:
    """Milliseconds of a step, of a run of so many ``tokens`` of all sequences."""
    items = [
        sequence.item(PROMPT[-1:], output, truncate_to=len(PROMPT) - 1, run=Run(tokens))
        for sequence, output in zip(sequences, outputs, strict=True)
    ]
    began = time.perf_counter()
    answers = (await client.forward(items, timeout_s=600.0)).all_answers()
    took = time.perf_counter() - began
    if any(answer.tokens.size != tokens for answer in answers):
        raise RuntimeError("a run ended early")
    return 1e3 * took / tokens


def points(taken: dict[int, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """By batch, medians of the rounds, and of their ratios."""
    found = []
    for batch, rounds in taken.items():
        masks, grammars = ([each[side] for each in rounds] for side in (MASK, GRAMMAR))
        ratios = np.divide(grammars, masks)
        found.append(
            {
                "batch": batch,
                "mask_ms": round(float(np.median(masks)), 3),
                "grammar_ms": round(float(np.median(grammars)), 3),
                "ratio": {
                    "median": round(float(np.median(ratios)), 3),
                    "low": round(float(ratios.min()), 3),
                    "high": round(float(ratios.max()), 3),
                },
                "target": TARGET,
            }
        )
    return found


async def run(options: argparse.Namespace) -> Record:
    """Measure everything and write the file."""
    model = options.model if options.model in BUILT_IN else str(with_words(options.model))
    settings = {"model": options.model, **SERVED, "rounds": options.rounds, "tokens": options.tokens}
    record = Record(options.name, settings, options.out)
    taken: dict[int, list[dict[str, float]]] = {}
    async with AsyncExitStack() as stack:
        ours = await stack.enter_async_context(executor(model, SERVED))
        client = await stack.enter_async_context(ExecutorClient(ours.target, session=True, timeout_s=600.0))
        info = await client.info()
        allowed = np.ones(ours.vocab_size, bool)
        allowed[[end for end in info.model.eos_token_ids if end < ours.vocab_size]] = False
        mask = await client.register_token_mask(allowed)
        grammar = await client.register_grammar(GrammarKind.JSON_SCHEMA, SCHEMA)
        for batch in options.batches:
            sequences = [client.sequence() for _ in range(batch)]
            for sequence in sequences:
                await sequence.prefill(PROMPT)
            sides = {
                MASK: [Sample(seed=number, mask=mask) for number in range(batch)],
                GRAMMAR: [Sample(seed=each, grammar=grammar, grammar_from=len(PROMPT)) for each in range(batch)],
            }
            rounds: list[dict[str, float]] = []
            for _ in range(1 + options.rounds):
                rounds.append({})
                for side, outputs in sides.items():
                    await asyncio.sleep(SETTLE_S)
                    rounds[-1][side] = await step_ms(client, sequences, outputs, options.tokens)
            taken[batch] = rounds[1:]  # the first one warms up
            record.save(points=points(taken))
            await client.release(sequences)
    return record


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grammars", description="What a grammar costs a step.")
    parser.add_argument("--model", choices=("demo", *SHAPES), default="demo", help="demo, or a shape (demo)")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), help="sequences of a step (1 8 32)")
    parser.add_argument("--tokens", type=int, help="of a run (default: 32)")
    options = read_options(parser, argv, rounds=15)
    options.tokens = options.tokens or (4 if options.quick else 32)
    options.name = "grammars" if options.model in BUILT_IN else f"grammars-{options.model}"
    options.out = out_of(options, options.name)
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, show, save."""
    finish(run(parse(argv)), lambda values: tables.show(tables.grammars(values["points"])))


if __name__ == "__main__":
    main()
