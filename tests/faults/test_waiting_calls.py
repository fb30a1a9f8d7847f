"""R30: what piles up of calls while the event loop stands still and nobody has asked who calls; and of frames of
sessions that are begun and never ended."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.faults.hostile import ALICE, MIB, NOISE, SERVICE, SESSION, WITHOUT
from tests.faults.slow_bodies import SlowBodies
from tests.support.process import dial, serving
from tests.support.tokens import bearer, write_tokens

CONNECTIONS, STREAMS = 16, 256
SESSIONS = 16
STILL_MS = 2_000


async def test_calls_that_nobody_has_accepted_take_no_more_than_promised(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path, f"alice {ALICE}")
    flags = ("--tokens", str(tokens), "--failpoints", f"before_reply=delay:{STILL_MS}@1")
    async with serving(*flags) as server, dial(server.target) as client:
        alice = client.by(ALICE)
        await alice.status()
        before = most = server.rss_bytes()
        still = asyncio.ensure_future(alice.prefill([1, 2]))
        await server.event("failpoint_fired")
        connections = [
            SlowBodies("127.0.0.1", server.port, f"{SERVICE}BatchPrefill", STREAMS, MIB) for _ in range(CONNECTIONS)
        ]
        tasks = [asyncio.create_task(each.run()) for each in connections]
        while not still.done():
            await asyncio.wait([still], timeout=0.05)
            most = max(most, server.rss_bytes())
        assert all(len(each.open) == STREAMS for each in connections)
        for each in tasks:
            each.cancel()
        await asyncio.wait(tasks)
        assert most - before <= WITHOUT + NOISE, f"{(most - before) / MIB:.0f} MiB"


async def test_frames_that_do_not_end_are_bounded_by_sessions_and_a_message(tmp_path: Path) -> None:
    """Without a token nothing is kept; with one, a message for each session."""
    tokens = write_tokens(tmp_path, f"alice {ALICE}")
    flags = ("--tokens", str(tokens), "--max-sessions", str(SESSIONS))
    async with serving(*flags) as server, dial(server.target) as client:
        for token in (False, True):
            before = most = server.rss_bytes()
            metadata = bearer(ALICE) if token else ()
            hostile = SlowBodies("127.0.0.1", server.port, SESSION, 4 * SESSIONS, MIB - 64, metadata=metadata)
            task = asyncio.create_task(hostile.run())
            sent, held = -1, 0
            while sent < held or held < SESSIONS * MIB // 2 * token:  # until no more comes
                sent = held
                for _ in range(20):
                    await client.by(ALICE).status()
                    most = max(most, server.rss_bytes())
                held = sum(MIB - 65 - each.left for each in hostile.open.values())
            task.cancel()
            await asyncio.wait([task])
            assert most - before <= SESSIONS * MIB * token + NOISE, f"{token}: {(most - before) / MIB:.0f} MiB"
