"""Whether structured texts are valid, and how many of their tokens come with a trip.

Texts of one JSON schema, greedy and sampled, by every way that `clients.structured` has, through the proxy of
`benchmarks.trips`. Each text is checked by `jsonschema`, which knows nothing of grammars.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jsonschema

from benchmarks.engines.grpc import executor
from benchmarks.record import Benchmark, Option, Record
from benchmarks.trips import SERVED, delayed
from clients.structured.program import AT_ONCE, SCHEMA, StructuredText, complete, complete_by_grammar, output_of
from clients.structured.schema import Schema
from ferrum_rpc.client import ExecutorClient, GrammarKind, Greedy, Run, Sample

MASKS, DRAFTS, GRAMMAR, GRAMMAR_DRAFTS = "masks", "masks, drafts", "a grammar", "a grammar, drafts"
WAYS: Final = (MASKS, DRAFTS, GRAMMAR, GRAMMAR_DRAFTS)
TEMPERATURES: Final = (0.0, 0.8)
DELAYS_MS: Final = (0.0, 10.0)  # each way
TEXTS: Final = 1000
DRAFT_TOKENS: Final = 8
PROMPT: Final = "The register of the parish, person number"
TOKENIZER: Final = Path(__file__).parents[1] / "ferrum_rpc_demo/demo/tokenizer.json"

Writer = Callable[[Sequence[int], Greedy | Sample], Awaitable[StructuredText]]  # writes the text behind a prompt


@dataclass(frozen=True, slots=True)
class TextsOfWay:
    """The ``texts`` of one way, of which so many are ``valid`` and ``different``, in ``seconds``."""

    texts: Sequence[StructuredText]
    valid: int
    different: int
    seconds: float


async def writers(client: ExecutorClient, schema: Schema) -> dict[str, Writer]:
    """By way. A run has as many tokens as the executor allows."""
    limits = (await client.info()).limits
    most = min(DRAFT_TOKENS, limits.max_draft_tokens)
    if limits.exact_span_tokens:  # a draft within it gives the very bits of single steps
        most = min(most, limits.exact_span_tokens - 1)
    grammar = await client.register_grammar(GrammarKind.JSON_SCHEMA, SCHEMA)
    run = Run(limits.max_run_tokens)
    return {
        MASKS: lambda prompt, output: complete(client, schema, prompt, output),
        DRAFTS: lambda prompt, output: complete(client, schema, prompt, output, most),
        GRAMMAR: lambda prompt, output: complete_by_grammar(client, grammar, prompt, output, run),
        GRAMMAR_DRAFTS: lambda prompt, output: complete(client, schema, prompt, output, most, grammar),
    }


async def texts(write: Writer, schema: Schema, temperature: float, count: int) -> TextsOfWay:
    """So many texts, `AT_ONCE` at a time."""
    slots, check = asyncio.Semaphore(AT_ONCE), jsonschema.Draft202012Validator(SCHEMA)

    async def text(number: int) -> StructuredText:
        async with slots:
            return await write(schema.encode(f"{PROMPT} {number}: "), output_of(temperature, number))

    began = time.perf_counter()
    found = await asyncio.gather(*map(text, range(count)))
    took = time.perf_counter() - began
    written = [schema.decode(each.tokens) for each in found]
    return TextsOfWay(found, sum(is_valid(check, each) for each in written), len(set(written)), took)


def is_valid(check: Any, text: str) -> bool:
    """Whether a text is JSON of the schema."""
    try:
        return bool(check.is_valid(json.loads(text)))
    except ValueError:
        return False


def point(way: str, temperature: float, delay_ms: float, found: TextsOfWay) -> dict[str, Any]:
    """One way's round in the file."""
    tokens, trips = sum(len(each.tokens) for each in found.texts), sum(each.trips for each in found.texts)
    drafted = sum(each.drafted for each in found.texts)
    return {
        "by": way,
        "temperature": temperature,
        "delay, ms": delay_ms,
        "valid": f"{found.valid:,} of {len(found.texts):,}",
        "different": found.different,
        "tokens": tokens,
        "tokens a trip": round(tokens / trips, 2),
        "accepted": f"{sum(each.accepted for each in found.texts) / drafted:.0%}" if drafted else None,
        "tokens/s": round(tokens / found.seconds, 1),
    }


async def run(options: argparse.Namespace) -> Record:
    """Measure everything and write the file."""
    drafts = f"of up to {DRAFT_TOKENS} tokens"
    told = f"{options.texts:,} of each way, {AT_ONCE} at a time"
    record = Record(options, model="demo", **SERVED, texts=told, drafts=drafts)
    schema, found = Schema(SCHEMA, TOKENIZER), list[dict[str, Any]]()
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        ours = await enter(executor("demo", SERVED))
        ways, delays = dict[float, dict[str, Writer]](), DELAYS_MS[-1:] if options.quick else DELAYS_MS
        for delay_ms in delays:
            target = await enter(delayed(ours.target, delay_ms / 1e3))
            client = await enter(ExecutorClient(target, session=True, timeout_s=600.0))
            ways[delay_ms] = await writers(client, schema)
        cells = [(delay, way, heat) for delay in delays for way in WAYS for heat in TEMPERATURES]
        few = 1 if options.quick else min(AT_ONCE, options.texts)
        first = [await texts(ways[delay][way], schema, heat, few) for delay, way, heat in cells]
        seconds = sum(each.seconds for each in first) * options.texts / few
        print(f"about {seconds / 60:.0f} minutes for {len(cells)} times {options.texts} texts", flush=True)
        for delay_ms, way, temperature in cells:
            taken = await texts(ways[delay_ms][way], schema, temperature, options.texts)
            found.append(point(way, temperature, delay_ms, taken))
            record.put("texts", found)
            print(f"{way}, {temperature}, {delay_ms} ms: {taken.valid} of {options.texts} are valid", flush=True)
    return record


BENCHMARK: Final = Benchmark(
    "structured",
    run,
    (Option("--texts", TEXTS, "of each way", 2),),
    rounds=1,
)
