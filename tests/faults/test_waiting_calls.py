"""R30: what piles up of calls while the event loop stands still and nobody has asked who calls; and of frames of
sessions that are begun and never ended."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.faults.hostile import MIB, NOISE, SERVICE, TOKEN, WITHOUT
from tests.faults.process import dial, serving
from tests.faults.slow_bodies import SlowBodies
from tests.wiring import item, pb

CONNECTIONS, STREAMS = 16, 256
SESSIONS = 16
STILL_MS = 2_000


async def test_calls_that_nobody_has_accepted_take_no_more_than_promised(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("alice a-token-of-alice\n")
    tokens.chmod(0o600)
    flags = ("--tokens", str(tokens), "--failpoints", f"before_reply=delay:{STILL_MS}@1")
    async with serving(*flags, fresh=True) as server, dial(server.target) as client:
        await client.executor.GetStatus(pb.GetStatusRequest(), metadata=TOKEN)
        before = most = server.rss_bytes()
        still = asyncio.ensure_future(client.executor.Prefill(pb.PrefillRequest(item=item([1, 2])), metadata=TOKEN))
        await server.event("failpoint_fired")
        connections = [
            SlowBodies("127.0.0.1", server.port, f"{SERVICE}BatchPrefill", STREAMS, MIB) for _ in range(CONNECTIONS)
        ]
        tasks = [asyncio.create_task(each.run()) for each in connections]
        while not still.done():
            await asyncio.wait([still], timeout=0.05)
            most = max(most, server.rss_bytes())
        assert all(len(each._open) == STREAMS for each in connections)
        for each in tasks:
            each.cancel()
        await asyncio.wait(tasks)
        assert most - before <= WITHOUT + NOISE, f"{(most - before) / MIB:.0f} MiB"


async def test_frames_that_do_not_end_are_bounded_by_sessions_and_a_message(tmp_path: Path) -> None:
    """Without a token nothing is kept; with one, a message for each session."""
    tokens = tmp_path / "tokens"
    tokens.write_text("alice a-token-of-alice\n")
    tokens.chmod(0o600)
    flags = ("--tokens", str(tokens), "--max-sessions", str(SESSIONS))
    async with serving(*flags, fresh=True) as server, dial(server.target) as client:
        for token in (False, True):
            before = most = server.rss_bytes()
            path, metadata = f"{SERVICE}Session", TOKEN if token else ()
            hostile = SlowBodies("127.0.0.1", server.port, path, 4 * SESSIONS, MIB - 64, metadata=metadata)
            task = asyncio.create_task(hostile.run())
            sent, held = -1, 0
            while sent < held or held < SESSIONS * MIB // 2 * token:  # until no more comes
                sent = held
                for _ in range(20):
                    await client.executor.GetStatus(pb.GetStatusRequest(), metadata=TOKEN)
                    most = max(most, server.rss_bytes())
                held = sum(MIB - 65 - each.left for each in hostile._open.values())
            task.cancel()
            await asyncio.wait([task])
            assert most - before <= SESSIONS * MIB * token + NOISE, f"{token}: {(most - before) / MIB:.0f} MiB"
