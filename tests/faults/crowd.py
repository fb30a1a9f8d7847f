"""R23: no caller starves another. And the crowd itself, a program of its own:

    python -m tests.faults.crowd TARGET CALLERS SESSIONS

says ``begun`` when all of it is at it, and after a line on its standard input what its steps took, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from grpc_health.v1 import health_pb2, health_pb2_grpc

from ferrum_rpc.executor.v1 import session_pb2
from tests.faults.figures import Figure, Figures, at_most, quantile
from tests.faults.process import Dialled, dial, program, serving
from tests.faults.raw_session import raw_session
from tests.faults.sizes import Size
from tests.faults.waiting import until
from tests.wiring import item, pb, prefill

CALLERS: Final = 64
SESSIONS: Final = 8
DEPTH: Final = 4
"""Steps in flight of a session."""
SLOWER: Final = 3.0
HEALTH_S: Final = 0.05
PAUSE_S: Final = 0.005


async def r23_no_caller_starves_another(size: Size) -> Figures:
    """An outsider on a connection of its own, beside unary callers on one connection and sessions on theirs."""
    async with serving() as server, dial(server.target) as client:
        health = health_pb2_grpc.HealthStub(client.channel)
        handle = await prefill(client, [1, 2, 3, 4])
        decode = pb.DecodeRequest(item=item([1], handle, truncate_to=4))

        async def a_decode() -> None:
            decode.item.handle.CopyFrom((await client.executor.Decode(decode)).output.handle)

        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "Decode": a_decode,
            "GetStatus": client.status,
            "health": lambda: health.Check(health_pb2.HealthCheckRequest()),
        }
        alone = await _timed(calls, size.outsider_calls)
        async with program("tests.faults.crowd", server.target, str(CALLERS), str(SESSIONS), stdin=True) as crowd:
            assert crowd.stdin is not None and crowd.stdout is not None
            assert await crowd.stdout.readline() == b"begun\n"
            beside = await _timed(calls, size.outsider_calls)
            crowd.stdin.write(b"\n")
            told = json.loads(await crowd.stdout.readline())
    session = told["session_p99"]
    figures: list[Figure] = [
        at_most(
            f"p99 of an outsider's {name}, in p99s of a session's step",
            quantile(beside[name], 0.99) / session,
            SLOWER,
            "x",
        )
        for name in ("Decode", "GetStatus")
    ]
    if size.absolute:
        figures.append(at_most("p99 of a health check", quantile(beside["health"], 0.99), HEALTH_S, "s"))
    facts: dict[str, object] = {
        "callers": CALLERS,
        "sessions": f"{SESSIONS} of {DEPTH} steps in flight",
        "steps of callers, of sessions": (told["calls"], told["steps"]),
        "p50 and p99 ms of callers": (told["caller_p50"] * 1e3, told["caller_p99"] * 1e3),
        "p50 and p99 ms of sessions": (told["session_p50"] * 1e3, session * 1e3),
    }
    for name, waits in beside.items():
        facts[f"p50 and p99 ms of {name}"] = (quantile(waits, 0.5) * 1e3, quantile(waits, 0.99) * 1e3)
        facts[f"p99 ms of {name}, alone"] = quantile(alone[name], 0.99) * 1e3
    return Figures("R23", "No caller starves another", tuple(figures), facts)


async def _timed(calls: dict[str, Callable[[], Awaitable[Any]]], count: int) -> dict[str, list[float]]:
    waits: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(count):
        for name, call in calls.items():
            at = time.perf_counter()
            await call()
            waits[name].append(time.perf_counter() - at)
        await asyncio.sleep(PAUSE_S)
    return waits


class Crowd:
    """Callers and sessions that decode as fast as they are answered."""

    def __init__(self) -> None:
        self.calls: list[float] = []
        self.steps: list[float] = []
        self.over = False

    async def caller(self, client: Dialled) -> None:
        """One that calls, on a sequence of its own."""
        handle = await prefill(client, [1, 2, 3, 4])
        while not self.over:
            request = pb.DecodeRequest(item=item([1], handle, truncate_to=4))
            at = time.perf_counter()
            handle = (await client.executor.Decode(request)).output.handle
            self.calls.append(time.perf_counter() - at)

    async def session(self, target: str) -> None:
        """One with several sequences, a step in flight on each."""
        async with dial(target) as client, raw_session(client.executor, steps_in_flight=DEPTH) as session:

            async def lane() -> None:
                items = [item([1, 2, 3, 4])]
                while not self.over:
                    at = time.perf_counter()
                    answer = await session.ask(forward=session_pb2.SessionForward(items=items))
                    self.steps.append(time.perf_counter() - at)
                    items = [item([1], answer.forward.results[0].output.handle, truncate_to=4)]

            await asyncio.gather(*[lane() for _ in range(DEPTH)])

    def told(self) -> dict[str, float]:
        """What the first second's start-up is not part of."""
        calls, steps = (waits[len(waits) // 10 :] for waits in (self.calls, self.steps))
        return {
            "calls": len(self.calls),
            "steps": len(self.steps),
            "caller_p50": quantile(calls, 0.5),
            "caller_p99": quantile(calls, 0.99),
            "session_p50": quantile(steps, 0.5),
            "session_p99": quantile(steps, 0.99),
        }


async def main(target: str, callers: int, sessions: int) -> None:
    """The crowd, until a line is read."""
    crowd = Crowd()
    async with dial(target) as client:
        tasks = [asyncio.create_task(crowd.caller(client)) for _ in range(callers)]
        tasks += [asyncio.create_task(crowd.session(target)) for _ in range(sessions)]
        await until(lambda: len(crowd.calls) >= 4 * callers and len(crowd.steps) >= 4 * sessions, 60.0, every_s=PAUSE_S)
        print("begun", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        crowd.over = True
        await asyncio.gather(*tasks)
    print(json.dumps(crowd.told()), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
