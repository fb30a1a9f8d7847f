"""Complete prompts as JSON of a schema, many at once, and count the valid texts.

If the executor offers grammars it follows the schema itself, and each round trip brings a run of tokens. With
``--masks`` the masks are made here, token by token, as for an executor without grammars. With ``--draft-tokens``
several tokens come with a trip too: those that the schema forces and those that look-up guesses are verified together,
by the grammar or with a mask for each row. The texts are the same if spans of a draft's length give the bits of single
steps (`limits.exact_span_tokens`), otherwise within rounding.

    ferrum-rpc serve demo
    python -m clients.structured --count 1000 --tokenizer ferrum_rpc_demo/demo/tokenizer.json
    python -m clients.structured --count 1000 --tokenizer ferrum_rpc_demo/demo/tokenizer.json --draft-tokens 8
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import jsonschema

from clients.structured.schema import Schema
from ferrum_rpc.client import (
    Accept,
    Capability,
    ExecutorClient,
    ExecutorError,
    GrammarKind,
    Greedy,
    Run,
    RunEnd,
    Sample,
    explained,
)

SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "married": {"type": "boolean"},
        "county": {"enum": ["Kent", "Surrey", "Hertfordshire", "Derbyshire", "São Miguel"]},
        "income": {"anyOf": [{"type": "number", "minimum": 0, "maximum": 10000, "multipleOf": 0.5}, {"type": "null"}]},
        "sisters": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": ["name", "age", "married", "county", "income", "sisters"],
    "additionalProperties": False,
}
"""The schema by default."""

AT_ONCE: Final = 32


@dataclass(slots=True)
class StructuredText:
    """A text with its round ``trips``, and how many of its ``drafted`` tokens were ``accepted``."""

    tokens: list[int] = field(default_factory=list)
    trips: int = 0
    drafted: int = 0
    accepted: int = 0


async def complete(  # noqa: PLR0917 - as its callers write them
    client: ExecutorClient,
    schema: Schema,
    prompt: Sequence[int],
    output: Greedy | Sample,
    most: int = 0,
    grammar: bytes = b"",
) -> StructuredText:
    """The completion of a prompt: the executor chooses each token by ``output`` among those that the schema allows.
    ``most``: tokens of a draft. ``grammar``: the executor's, instead of masks that are made here."""
    state, text = schema.begin(), StructuredText()
    if grammar:
        output = replace(output, grammar=grammar, grammar_from=len(prompt))
    async with client.sequence() as sequence:
        while not state.complete:
            draft, words = state.ahead([*prompt, *text.tokens], most if text.tokens else 0)
            # no call for masks that the client has registered before
            masks = [await client.register_token_mask(each) for each in words if not grammar]
            if draft:
                answer = await sequence.verify([text.tokens[-1], *draft], accepting(output, masks))
            else:
                own = replace(output, mask=masks[0]) if masks else output
                answer = await sequence.prefill(text.tokens[-1:] or prompt, own)
            chosen = answer.tokens.tolist()
            state.push(chosen)
            text.tokens += chosen
            text.trips += 1
            text.drafted += len(draft)
            text.accepted += len(chosen) - 1
    return text


async def complete_by_grammar(
    client: ExecutorClient, grammar: bytes, prompt: Sequence[int], output: Greedy | Sample, run: Run
) -> StructuredText:
    """As `complete`, by a grammar that the executor follows: a trip for each ``run``."""
    output, text = replace(output, grammar=grammar, grammar_from=len(prompt)), StructuredText()
    async with client.sequence() as sequence:
        answer = await sequence.prefill(prompt, output, run=run)
        while True:
            text.tokens += answer.tokens.tolist()
            text.trips += 1
            if answer.run_cause is not None:
                raise answer.run_cause
            if answer.run_end is not RunEnd.MAX_TOKENS:
                break
            answer = await sequence.decode(text.tokens[-1], output, run=run)
    if answer.run_end is RunEnd.STOP_ID:
        text.tokens.pop()  # the end of the text
    return text


def accepting(output: Greedy | Sample, masks: Iterable[bytes]) -> Accept:
    """The same choice for each row of a draft, by its own mask if there are any."""
    greedy = Sample(0.0, grammar=output.grammar, grammar_from=output.grammar_from)
    sampling = output if isinstance(output, Sample) else greedy
    return Accept(replace(sampling, row_masks=tuple(masks)))


def output_of(temperature: float, seed: int) -> Greedy | Sample:
    """Greedy at temperature 0."""
    return Sample(temperature, top_p=0.95, seed=seed) if temperature else Greedy()


async def run(options: argparse.Namespace) -> int:
    """Complete the prompts. Returns the exit status: 0 if all texts are valid."""
    wanted = SCHEMA if options.schema is None else json.loads(options.schema.read_text())
    check, slots = jsonschema.Draft202012Validator(wanted), asyncio.Semaphore(AT_ONCE)
    schema, began = Schema(wanted, options.tokenizer), time.perf_counter()
    async with ExecutorClient(options.target, session=True, timeout_s=options.timeout) as client:
        limits = (await client.info()).limits
        most = min(options.draft_tokens, limits.max_draft_tokens)
        if limits.exact_span_tokens:  # a draft within it gives the very bits of single steps
            most = min(most, limits.exact_span_tokens - 1)

        grammar = b""
        if not options.masks and Capability.GRAMMAR in (await client.info()).capabilities:
            grammar = await client.register_grammar(GrammarKind.JSON_SCHEMA, wanted)
        run = Run(limits.max_run_tokens)

        async def text_of(number: int) -> StructuredText:
            prompt = schema.encode(f"{options.prompt} {number}: ")
            output = output_of(options.temperature, options.seed + number)
            async with slots:
                if grammar and not most:
                    return await complete_by_grammar(client, grammar, prompt, output, run)
                return await complete(client, schema, prompt, output, most, grammar)

        found = await asyncio.gather(*map(text_of, range(options.count)))
    took, texts = time.perf_counter() - began, [schema.decode(each.tokens) for each in found]
    right = sum(map(check.is_valid, map(json.loads, texts)))
    for text in dict.fromkeys(texts[: options.show]):
        print(text)
    print(f"{right} of {len(texts)} texts are of the schema, {len(set(texts))} of them different; {took:.1f} s")
    tokens, trips = sum(len(each.tokens) for each in found), sum(each.trips for each in found)
    accepted, drafted = sum(each.accepted for each in found), sum(each.drafted for each in found)
    drafts = f"; {accepted} of {drafted} drafted tokens accepted" if drafted else ""
    by = "a grammar of the executor" if grammar else "masks made here"
    print(f"{tokens / trips:.2f} tokens a trip, by {by}{drafts}")
    return 0 if right == len(texts) else 1


def main() -> int:
    """The command. Returns the exit status: 0 if all texts are valid."""
    parser = argparse.ArgumentParser(prog="python -m clients.structured", description=__doc__)
    parser.add_argument("--target", default="localhost:50051", help="the executor")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json of its model")
    parser.add_argument("--schema", type=Path, help="a JSON schema (default: a person)")
    parser.add_argument("--prompt", default="The register of the parish, person number", help="begins each prompt")
    parser.add_argument("--count", type=int, default=100, help="texts")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=1, help="of the first text; the next has the next")
    parser.add_argument("--draft-tokens", type=int, default=0, help="of a draft; 0: no speculation")
    parser.add_argument("--masks", action="store_true", help="make the masks here, also if grammars are offered")
    parser.add_argument("--show", type=int, default=5, help="texts that are printed")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that a step may take")
    arguments = parser.parse_args()
    try:
        return asyncio.run(run(arguments))
    except ExecutorError as error:
        print(f"error: {error.reason}: {explained(error, arguments.target)}", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
