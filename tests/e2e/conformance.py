"""llm-comply against a router, the worker and the demo model; not part of the suite.

    python -m tests.e2e.conformance LLM_COMPLY [TEST ...]

``LLM_COMPLY``: the program of an environment with ``pip install llm-comply==0.5.0``. Each of its tests runs alone, so
that the report can show which requests of it arrived at the worker and how their texts ended. The demo model ends no
text by itself and calls no tool, and the suites expect both: a request without a constraint gets one of a short
sentence, and one with the schema of a tool's calls gets one of its texts, which is checked against the schema.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections import Counter
from typing import Any, Final
from unittest import mock

import jsonschema

from ferrum_rpc.client import GrammarKind
from ferrum_rpc.fronts import requests
from ferrum_rpc.fronts.grammars import Constraint, constraint_of
from ferrum_rpc.fronts.servicer import EngineMethods
from tests.e2e.test_worker_router import everything

SUITES: Final = ("openai-chat", "open-responses", "anthropic")
CALL: Final = '[{"name": "get_weather", "parameters": {"location": "Rome"}}]'
SENTENCE: Final = Constraint(GrammarKind.REGEX, r"[A-Z][a-z]{1,8} [a-z]{1,8}\.")


def ending(sampling: Any, max_bytes: int) -> Constraint:
    """The constraint of a request. Without one, that of a sentence; with a schema of calls, one of its texts."""
    found = constraint_of(sampling, max_bytes)
    if sampling.json_schema:
        jsonschema.validate(json.loads(CALL), json.loads(sampling.json_schema))
        return Constraint(GrammarKind.REGEX, re.escape(CALL))
    return found or SENTENCE


class Arrived:
    """What arrives at the worker, and how its texts end."""

    def __init__(self) -> None:
        self.requests = 0
        self.ends: list[str] = []
        self._generate = EngineMethods.generate

    async def generate(self, methods: EngineMethods, request: Any, send: Any) -> None:
        self.requests += 1

        async def passed_on(message: Any) -> None:
            if message.HasField("complete"):
                constraint = request.sampling_params.WhichOneof("constraint") or "none"
                self.ends.append(f"{message.complete.finish_reason} (constraint: {constraint})")
            await send(message)

        await self._generate(methods, request, passed_on)


async def run(program: str, suite: str, url: str, *given: str) -> str:
    """What the program prints."""
    command = (program, "--base-url", f"{url}/v1", "--api-key", "none", "--model", "demo", "--format", suite, *given)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    return said.decode()


async def main(program: str, *wanted: str) -> None:
    """Run the suites and report each test."""
    arrived = Arrived()

    async def generate(methods: EngineMethods, request: Any, send: Any) -> None:
        await arrived.generate(methods, request, send)

    with mock.patch.object(EngineMethods, "generate", generate), mock.patch.object(requests, "constraint_of", ending):
        async with everything() as (_, _, url):
            for suite in SUITES:
                counts = Counter[str]()
                for test in re.findall(r"^  (\S+)", await run(program, suite, url, "--list"), re.MULTILINE):
                    if wanted and test not in wanted:
                        continue
                    arrived.requests, arrived.ends = 0, []
                    said = await run(program, suite, url, "--json", "--verbose", "--filter", test)
                    for found in json.loads(said)["results"]:
                        counts[found["status"]] += 1
                        print(f"{suite} {test}: {found['status']}, {arrived.requests} at the worker, {arrived.ends}")
                        print("\n".join(f"    {each}"[:400] for each in found.get("errors") or ()))
                        if wanted:
                            print(json.dumps(found, indent=1))
                print(suite, dict(counts), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
