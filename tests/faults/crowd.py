"""R23: no caller starves another. And the crowd itself, a program of its own:

    python -m tests.faults.crowd TARGET CALLERS SESSIONS TEXTS [SCHEDULERS] [TOKEN]

of callers, sessions, and so many texts at a time, of a scheduler or several. It says ``begun`` when all of it is at it,
and after a line on its standard input what its steps took, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

from ferrum_rpc.client import ExecutorClient, GrammarKind, Sample
from ferrum_rpc.scheduler import STEPS_IN_FLIGHT, Scheduler, TextRequest
from tests.faults.figures import Figure, Figures, at_most, milliseconds, quantile
from tests.faults.models import Model
from tests.faults.sizes import Size
from tests.support.grammars import SOURCES, encode
from tests.support.process import Dialled, dial, dialled, next_line, program
from tests.support.raw_session import raw_session
from tests.support.waiting import until
from tests.support.wiring import decode, item, prefill

CALLERS: Final = 64
SESSIONS: Final = 8
DEPTH: Final = 4
"""Steps in flight of a session."""
DEEP: Final = 12
TEXTS: Final = 48
"""Of a scheduler at a time, more than it may have runs."""
PROMPT: Final = encode("In the beginning God created the heaven and the earth. ") * 8
TEXT_TOKENS: Final = 64
SLOWER: Final = 3.0
HEALTH_S: Final = 0.05
PAUSE_S: Final = 0.005


async def r23_no_caller_starves_another(size: Size, model: Model | None = None) -> Figures:
    """An outsider on a connection of its own: alongside unary callers on one connection and sessions on theirs, and
    alongside a scheduler with long prompts, runs and grammars."""
    many = await _outsider(size, model or Model({"path": "identity"}), CALLERS, SESSIONS, 0)
    texts = await _outsider(size, model or Model({"path": "demo"}), 0, 0, TEXTS)
    figures: list[Figure] = []
    facts: dict[str, object] = {"callers": CALLERS, "sessions": f"{SESSIONS} of {DEPTH} steps in flight"}
    for where, step, (alone, waits, report) in (
        ("", "a session's step", many),
        (" alongside a scheduler", "a step of its texts", texts),
    ):
        figures += [
            at_most(
                f"p99 of an outsider's {name}{where}, in p99s of {step}",
                quantile(waits[name], 0.99) / report["step_p99"],
                SLOWER,
                "x",
            )
            for name in ("Decode", "GetStatus")
        ]
        if size.absolute:
            figures.append(at_most(f"p99 of a health check{where}", quantile(waits["health"], 0.99), HEALTH_S, "s"))
        facts[f"crowd{where}"] = {name: round(value, 4) for name, value in report.items()}
        for name, seconds in waits.items():
            facts[f"p50 and p99 ms of {name}{where}"] = milliseconds(seconds, 0.5, 0.99)
            [facts[f"p99 ms of {name}{where}, alone"]] = milliseconds(alone[name], 0.99)
    return Figures("No caller starves another", *figures, facts=facts)


Waits = dict[str, list[float]]


async def _outsider(
    size: Size, model: Model, callers: int, sessions: int, texts: int
) -> tuple[Waits, Waits, dict[str, float]]:
    """Seconds of an outsider's calls, alone and alongside a crowd, and what the crowd reports of its own."""
    async with dialled(*model.flags(), model=model.path) as (server, client):
        handle = await prefill(client, [1, 2, 3, 4])

        async def a_decode() -> None:
            nonlocal handle
            handle = await decode(client, [1], handle, truncate_to=4)

        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "Decode": a_decode,
            "GetStatus": client.status,
            "health": client.health_check,
        }
        alone = await _timed(calls, size.outsider_calls)
        async with crowded(server.target, callers, sessions, texts) as report:
            beside = await _timed(calls, size.outsider_calls)
    return alone, beside, report


@asynccontextmanager
async def crowded(target: str, *arguments: object) -> AsyncIterator[dict[str, float]]:
    """A crowd, from when all of it is at work. Its report is there at the end."""
    report: dict[str, float] = {}
    async with program("tests.faults.crowd", target, *arguments, stdin=True, says="begun") as crowd:
        assert crowd.stdin is not None
        yield report
        crowd.stdin.write(b"\n")
        report |= json.loads(await next_line(crowd))


async def _timed(calls: dict[str, Callable[[], Awaitable[Any]]], count: int) -> Waits:
    waits: Waits = {name: [] for name in calls}
    for _ in range(count):
        for name, call in calls.items():
            at = time.perf_counter()
            await call()
            waits[name].append(time.perf_counter() - at)
        await asyncio.sleep(PAUSE_S)
    return waits


class Crowd:
    """Callers, sessions and texts that decode as fast as they are answered."""

    def __init__(self) -> None:
        self.calls: list[float] = []
        self.steps: list[float] = []
        self.over = False

    async def caller(self, client: Dialled) -> None:
        """One that calls, on a sequence of its own, whose truncations are deep: recurrent states must be fed again."""
        handle = await prefill(client, [1, 2, 3, 4])
        while not self.over:
            at = time.perf_counter()
            back = {} if handle.seq_len < DEEP else {"truncate_to": 4}
            handle = await decode(client, [1], handle, **back)
            self.calls.append(time.perf_counter() - at)

    async def session(self, target: str) -> None:
        """One with several sequences, a step in flight on each."""
        async with dial(target) as client, raw_session(client.executor, steps_in_flight=DEPTH) as session:

            async def lane() -> None:
                next_item = item([1, 2, 3, 4])
                while not self.over:
                    at = time.perf_counter()
                    [result] = await session.step(next_item)
                    self.steps.append(time.perf_counter() - at)
                    next_item = item([1], result.output.handle, truncate_to=4)

            await asyncio.gather(*[lane() for _ in range(DEPTH)])

    async def texts(self, target: str, count: int, token: str | None) -> None:
        """Texts of a scheduler, one of three by a grammar. A step of theirs is the time between two tokens."""
        connect = partial(ExecutorClient, session=True, steps_in_flight=STEPS_IN_FLIGHT, tokens_ahead=True, token=token)
        async with Scheduler(target, connect=connect) as scheduler:
            grammar = await scheduler.register_grammar(GrammarKind.LARK, SOURCES[GrammarKind.LARK])

            async def lane(number: int) -> None:
                while not self.over:
                    prompt = [*PROMPT[number:], *PROMPT[:number]]
                    output = Sample(1.0, seed=number)
                    if not number % 3:
                        output = Sample(1.0, seed=number, grammar=grammar, grammar_from=len(prompt))
                    request = TextRequest(prompt=prompt, max_tokens=TEXT_TOKENS, output=output)
                    async with scheduler.submit(request) as stream:
                        at, more = 0.0, False
                        async for each in stream:
                            now = time.perf_counter()
                            if at and not more:
                                self.steps.append(now - at)
                            at, more = now, each.more
                            if self.over:
                                break

            await asyncio.gather(*map(lane, range(count)))

    def told(self) -> dict[str, float]:
        """What the first second's start-up is not part of."""
        calls, steps = (waits[len(waits) // 10 :] for waits in (self.calls, self.steps))
        return {
            f"{name}_{figure}": value
            for name, waits in (("call", calls), ("step", steps))
            if waits
            for figure, value in (("count", len(waits)), ("p50", quantile(waits, 0.5)), ("p99", quantile(waits, 0.99)))
        }


async def main(  # noqa: PLR0917 - as they are on the command line
    target: str, callers: int, sessions: int, texts: int, schedulers: int = 1, token: str | None = None
) -> None:
    """The crowd, until a line is read."""
    crowd = Crowd()
    async with dial(target) as client:
        tasks = [asyncio.create_task(crowd.caller(client)) for _ in range(callers)]
        tasks += [asyncio.create_task(crowd.session(target)) for _ in range(sessions)]
        shares = [len(range(first, texts, schedulers)) for first in range(schedulers)]
        tasks += [asyncio.create_task(crowd.texts(target, share, token)) for share in shares if share]
        least = 4 * sessions + texts
        await until(lambda: len(crowd.calls) >= 4 * callers and len(crowd.steps) >= least, 60.0, every_s=PAUSE_S)
        print("begun", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        crowd.over = True
        await asyncio.gather(*tasks)
    print(json.dumps(crowd.told()), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:6]), *sys.argv[6:]))
