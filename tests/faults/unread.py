"""R22: the dead hold nothing. And the clients that ask for large answers and do not read, a program of its own:

    python -m tests.faults.unread TARGET TOKENS CALLS SESSIONS SCHEDULERS

asks for the rows of so many tokens in each call and each step, and writes texts with each scheduler. It says ``asked``
when it has, and stops itself.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import AsyncExitStack, suppress
from typing import Any, Final

from ferrum_rpc.client import Greedy, RowLogprobs
from ferrum_rpc.executor.v1 import output_pb2, session_pb2
from ferrum_rpc.scheduler import Scheduler, TextRequest, TokenStream
from tests.faults.figures import Figure, Figures, at_least, at_most
from tests.faults.sizes import Size
from tests.support.process import ServerProcess, dial, program, serving
from tests.support.raw_session import RawSession
from tests.support.waiting import until
from tests.support.wiring import full, item, pb

MIB: Final = 1 << 20
VOCABULARY: Final = 8192
STEPS: Final = 4
TEXTS: Final = 8
"""Of a scheduler."""
TEXT_TOKENS: Final = 64
READ_TOKENS: Final = 12
"""Of each text: behind them two runs are in flight."""
LOGPROBS: Final = 256
LEASE_S: Final = 2.0
BOUND: Final = 100
"""MiB that may wait in all."""
HELD: Final = 3.0
"""Times that bound which the server may take: the rows, their message, and what gRPC takes of it."""
LEFT: Final = 50
"""MiB that may be left, and in how many seconds without a call."""
LEFT_S: Final = 2.0
BUSY_S: Final = 20.0
"""The same where tests share two cores."""


async def r22_the_dead_hold_nothing(size: Size) -> Figures:
    """Answers that a stopped client does not read are bounded, and gone when it is."""
    tokens = size.unread_mib * MIB // (4 * VOCABULARY)
    flags = ("--identity-vocab-size", str(VOCABULARY), "--identity-layers", "1", "--max-unread-bytes", f"{BOUND}MiB")
    limits = ("--max-response-bytes", "40MiB", "--max-session-response-bytes", "40MiB", "--replay-bytes", "1MiB")
    lives = ("--lease-ttl-s", str(LEASE_S), "--idle-ttl-s", str(LEASE_S))
    figures: list[Figure] = []
    facts: dict[str, object] = {"an answer": f"{size.unread_mib} MiB", "may wait": f"{BOUND} MiB"}
    async with serving(*flags, *limits, *lives, kv_blocks=65_536, fresh=size.absolute) as server:
        await _asked_and_killed(server, tokens, 1, 1)  # what libraries and allocators keep, they keep from now on
        await _settled(server, 0, LEFT_S)
        for name, asked in (
            ("unary calls", (size.unread_calls, 0, 0)),
            ("sessions", (0, size.unread_sessions, 0)),
            ("schedulers", (0, 0, size.unread_sessions)),
        ):
            before = server.rss_bytes()
            most, refused = await _asked_and_killed(server, tokens, *asked)
            left, seconds = await _settled(server, before, LEFT_S if size.absolute else BUSY_S)
            figures += [
                at_most(f"memory of {name} that nobody reads", (most - before) / MIB, HELD * BOUND, "MiB"),
                at_most(f"memory left after {name}", left / MIB, LEFT, "MiB"),
            ]
            if name != "schedulers":  # their runs' answers are smaller than what may wait
                figures.append(at_least(f"refused of {name}", refused, 1))
            facts[name] = {
                "asked": asked[0] + asked[1] * STEPS + asked[2] * TEXTS,
                "refused": refused,
                "seconds until gone": seconds,
            }
        async with dial(server.target) as client:
            status, over = await client.status(), time.monotonic() + (LEFT_S if size.absolute else BUSY_S)
            while status.sessions and time.monotonic() < over:  # the last client died just now
                status = await client.status()
            figures.append(at_most("sessions left", status.sessions, 0))
            facts["sequences that wait for the end of their lease"] = status.pressure.sequences
            sequences, _ = await client.released(LEASE_S + BUSY_S)
            figures.append(at_most("sequences left once leases and idle times end", sequences, 0))
    return Figures("The dead hold nothing", *figures, facts=facts)


async def _asked_and_killed(
    server: ServerProcess, tokens: int, calls: int, sessions: int, schedulers: int = 0
) -> tuple[int, int]:
    """The most memory that the server had while a client did not read, and how many of its calls were refused."""
    arguments = (server.target, tokens, calls, sessions, schedulers)
    async with dial(server.target) as client, program("tests.faults.unread", *arguments, says="asked"):
        most = server.rss_bytes()
        # It stands still: what is still to come out of the engine's queue, comes. Then nothing changes any more.
        idle = 0
        while idle < 5:
            pressure = (await client.status()).pressure
            idle = idle + 1 if not pressure.queued_items else 0
            most = max(most, server.rss_bytes())
            await asyncio.sleep(0.05)
        status = await client.status()
    return most, status.counters.queue_full


async def _settled(server: ServerProcess, before: int, patience_s: float) -> tuple[int, float]:
    """What is left of the memory after the time that it may take, without any call meanwhile; and when it was gone."""
    seconds = patience_s
    with suppress(TimeoutError):
        seconds = await until(lambda: server.rss_bytes() - before <= LEFT * MIB, patience_s, every_s=0.02)
    return server.rss_bytes() - before, seconds


async def main(target: str, tokens: int, calls: int, sessions: int, schedulers: int) -> None:
    """Ask, unary calls on one connection, sessions and schedulers on theirs, and stand still."""
    asked = item([1] * tokens, output=full(positions=output_pb2.POSITIONS_ALL))
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(dial(target))
        waiting: list[Any] = []
        for _ in range(calls):
            call = client.channel.stream_unary("/ferrum_rpc.executor.v1.ModelExecutor/Prefill")()
            await call.write(pb.PrefillRequest(item=asked).SerializeToString())
            waiting.append(call)
        for _ in range(sessions):
            client = await stack.enter_async_context(dial(target))
            session = RawSession(client.executor.Session())
            await session.open(steps_in_flight=STEPS)
            for _ in range(STEPS):
                _, answer = await session.send(forward=session_pb2.SessionForward(items=[asked]))
                waiting.append(answer)
        output = Greedy(logprob=True, logprobs=RowLogprobs(LOGPROBS))
        request = TextRequest(prompt=[1, 2], max_tokens=TEXT_TOKENS, output=output, stop=())
        streams: list[TokenStream] = []
        for _ in range(schedulers):
            scheduler = await stack.enter_async_context(Scheduler(target))
            streams += [scheduler.submit(request) for _ in range(TEXTS)]
        for stream in streams:
            for _ in range(READ_TOKENS):
                await anext(stream)
        print("asked", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
