"""Sequences that a program parks: they go on with their next call, or where the executor lost them, anew."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from ferrum_rpc.client import ExecutorClient, FullLogits
from ferrum_rpc.client.info import Capability
from ferrum_rpc.errors import KvCorrupt, NotSupported
from ferrum_rpc.service.parked import ParkedFile
from tests.serving import serve_identity

PROMPT = [*range(60, 103)]

pytestmark = pytest.mark.asyncio


def files(folder: Path) -> list[Path]:
    return list((folder / "ferrum-parked").glob("ferrum-parked-*"))


async def test_a_parked_sequence_goes_on(tmp_path: Path) -> None:
    async with (
        serve_identity(positional=True, park_dir=tmp_path) as served,
        ExecutorClient(served.target) as client,
        client.sequence() as sequence,
        client.sequence() as twin,
    ):
        assert Capability.PARK in (await client.info()).capabilities
        for each in (sequence, twin):
            await each.prefill(PROMPT)
        freed, handle = await sequence.park(), sequence.handle
        assert (freed, await sequence.park(), sequence.handle) == (1, 0, handle), "the rest is the twin's as well"
        assert [each.parked for each in await client.list_sequences()] == [True, False]
        told = await client.status()
        assert (told.blocks.parked_sequences, told.counters.sequences_parked) == (1, 1)
        assert told.blocks.parked_bytes > 0
        rows = [(await each.decode(9, FullLogits())).logits for each in (sequence, twin)]
        assert (rows[0] == rows[1]).all()
        await sequence.park()
        assert files(tmp_path)
    assert not files(tmp_path)


@pytest.mark.parametrize("then", ["decode", "park", "export_to"])
async def test_a_call_waits_for_a_parking_that_was_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    begun, go, append = threading.Event(), threading.Event(), ParkedFile.append

    def held(*about: Any) -> None:
        begun.set()
        assert go.wait(10)
        append(*about)

    async with (
        serve_identity(positional=True, park_dir=tmp_path) as served,
        ExecutorClient(served.target) as client,
        client.sequence() as sequence,
    ):
        await sequence.prefill(PROMPT)
        monkeypatch.setattr(ParkedFile, "append", held)
        task = asyncio.create_task(sequence.park())
        await asyncio.to_thread(begun.wait, 10)
        task.cancel()
        await asyncio.wait({task})
        about = {"decode": (9,), "park": (), "export_to": (tmp_path / "file",)}[then]
        call = asyncio.create_task(getattr(sequence, then)(*about))
        assert not (await asyncio.wait({call}, timeout=0.05))[0]
        go.set()
        await call
        await sequence.decode(10)


async def test_what_was_lost_on_the_disk_is_made_anew(tmp_path: Path) -> None:
    async with (
        serve_identity(positional=True, park_dir=tmp_path) as served,
        ExecutorClient(served.target) as client,
        client.sequence(rebuild=True) as sequence,
    ):
        await sequence.prefill(PROMPT)
        await sequence.park()
        files(tmp_path)[0].unlink()
        with pytest.raises(KvCorrupt):
            await sequence.decode(9)
        await sequence.decode(9)
        assert sequence.length == len(PROMPT) + 1


async def test_an_executor_that_parks_nothing_says_so() -> None:
    async with serve_identity() as served, ExecutorClient(served.target) as client, client.sequence() as sequence:
        await sequence.prefill(PROMPT)
        with pytest.raises(NotSupported):
            await sequence.park()
