"""Complete prompts as JSON of a schema, many at once, and say how many of the texts are that.

ferrum-rpc serve demo
python -m clients.structured --count 1000 --tokenizer ferrum_rpc_demo/demo/tokenizer.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import jsonschema

from clients.structured.schema import Schema
from ferrum_rpc.client import ExecutorClient, Greedy, Sample
from ferrum_rpc.errors import ExecutorError

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
"""What is asked for where no schema is named."""

AT_ONCE: Final = 32


async def complete(client: ExecutorClient, schema: Schema, prompt: Sequence[int], output: Greedy | Sample) -> str:
    """The text behind a prompt: the executor chooses each token as ``output`` says, of those that the schema leaves."""
    state, chosen, fed = schema.begin(), list[int](), list(prompt)
    async with client.sequence() as sequence:
        while not state.complete:
            mask = await client.register_token_mask(state.mask())  # no call, where the client knows it already
            answer = await sequence.prefill(fed, masked(output, mask))
            fed = [answer.token]
            state.push(answer.token)
            chosen += fed
    return schema.decode(chosen)


def masked(output: Greedy | Sample, mask: bytes) -> Greedy | Sample:
    """The same choice among fewer tokens."""
    if isinstance(output, Greedy):
        return Greedy(mask=mask)
    return Sample(output.temperature, top_p=output.top_p, seed=output.seed, mask=mask)


def output_of(temperature: float, seed: int) -> Greedy | Sample:
    """Greedy at temperature 0."""
    return Sample(temperature, top_p=0.95, seed=seed) if temperature else Greedy()


async def run(options: argparse.Namespace) -> int:
    """Complete as many prompts as were asked for; the exit status: 0 where all texts are of the schema."""
    wanted = SCHEMA if options.schema is None else json.loads(options.schema.read_text())
    check, slots = jsonschema.Draft202012Validator(wanted), asyncio.Semaphore(AT_ONCE)
    schema, began = Schema(wanted, options.tokenizer), time.perf_counter()
    async with ExecutorClient(options.target, session=True, timeout_s=options.timeout) as client:

        async def text_of(number: int) -> str:
            prompt = f"{options.prompt} {number}: "
            async with slots:
                return await complete(
                    client, schema, schema.encode(prompt), output_of(options.temperature, options.seed + number)
                )

        texts = await asyncio.gather(*map(text_of, range(options.count)))
    took = time.perf_counter() - began
    right = sum(map(check.is_valid, map(json.loads, texts)))
    for text in dict.fromkeys(texts[: options.show]):
        print(text)
    print(f"{right} of {len(texts)} texts are of the schema, {len(set(texts))} of them different; {took:.1f} s")
    return 0 if right == len(texts) else 1


def main() -> int:
    """The exit status: 0 where all texts are of the schema."""
    parser = argparse.ArgumentParser(prog="python -m clients.structured", description=__doc__)
    parser.add_argument("--target", default="localhost:50051", help="the executor")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json of its model")
    parser.add_argument("--schema", type=Path, help="a JSON schema (default: a person)")
    parser.add_argument("--prompt", default="The register of the parish, person number", help="begins each prompt")
    parser.add_argument("--count", type=int, default=100, help="texts")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=1, help="of the first text; the next has the next")
    parser.add_argument("--show", type=int, default=5, help="texts that are printed")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that a step may take")
    try:
        return asyncio.run(run(parser.parse_args()))
    except (ExecutorError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
