"""What a grammar costs a decode step: the same sequences by a grammar, and by a mask that the caller has registered.

The schema's text is longer than a run, and tokens are sampled, so that each sequence has a text of its own. A run
begins at the same place in each round; rounds of both alternate. A shape of `shapes.json` has random weights,
and random words for tokens: what counts is how many there are.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from benchmarks.cases import BUILT_IN, SHAPES, with_words
from benchmarks.compare import alternate, median, shares
from benchmarks.engines.grpc import connected
from benchmarks.record import Benchmark, Option, Record, shape_of
from benchmarks.table import target
from ferrum_rpc.client import ExecutorClient, GrammarKind, Run, Sample
from ferrum_rpc.client import Sequence as CachedSequence

BATCHES: Final = (1, 8, 32)
MASK, GRAMMAR = "a registered mask", "a grammar"
TARGET: Final = 1.05  # a step by a grammar, in steps by a registered mask, at most
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


async def step_ms(
    client: ExecutorClient, sequences: Sequence[CachedSequence], outputs: Sequence[Sample], tokens: int, _: int
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


def points(taken: dict[int, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """By batch, medians of the rounds, and of their ratios."""
    found = []
    for batch, sides in taken.items():
        masks, grammars = sides[MASK], sides[GRAMMAR]
        row = {"batch": batch, "by a registered mask, ms": median(masks), "by a grammar, ms": median(grammars)}
        goal = target("", None, TARGET, least=False)
        found.append(row | {"ratio": shares(grammars, masks), "target": goal})
    return found


async def run(options: argparse.Namespace) -> Record:
    """Measure everything and write the file."""
    model = options.model if options.model in BUILT_IN else str(with_words(options.model))
    record = Record(options, model=options.model, **SERVED, tokens=f"{options.tokens} of a run")
    taken: dict[int, dict[str, list[float]]] = {}
    async with connected(model, SERVED) as (ours, client):
        info = await client.info()
        allowed = np.ones(ours.vocab_size, bool)
        allowed[[end for end in info.model.eos_token_ids if end < ours.vocab_size]] = False
        mask = await client.register_token_mask(allowed)
        grammar = await client.register_grammar(GrammarKind.JSON_SCHEMA, SCHEMA)
        for batch in options.batches:
            sequences = [client.sequence() for _ in range(batch)]
            for sequence in sequences:
                await sequence.prefill(PROMPT)
            outputs = {
                MASK: [Sample(seed=number, mask=mask) for number in range(batch)],
                GRAMMAR: [Sample(seed=each, grammar=grammar, grammar_from=len(PROMPT)) for each in range(batch)],
            }
            takes = {side: partial(step_ms, client, sequences, each, options.tokens) for side, each in outputs.items()}
            for rounds in (1, options.rounds):  # the first one warms up
                taken[batch], _ = await alternate(takes, rounds)
            record.put("steps", points(taken))
            await client.release(sequences)
    return record


BENCHMARK: Final = Benchmark(
    "grammars",
    run,
    (
        Option("--model", "demo", "demo, or a shape", choices=("demo", *SHAPES)),
        Option("--batches", list(BATCHES), "sequences of a step"),
        Option("--tokens", 32, "of a run", 4),
    ),
    rounds=15,
    variant=shape_of,
)
