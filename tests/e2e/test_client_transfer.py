"""Sequences that a program moves to another executor, to a file and back, or parks at their executor."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import numpy as np
import pytest
import pytest_asyncio

from ferrum_rpc.client import ExecutorClient, FullLogits, Sequence, SequenceMisuseError, transfer
from ferrum_rpc.client.client import connection_of
from ferrum_rpc.client.info import Capability
from ferrum_rpc.errors import (
    InstanceMismatch,
    InvalidRequest,
    KvBlocksExhausted,
    KvCorrupt,
    LayoutMismatch,
    NotSupported,
    TransportError,
)
from ferrum_rpc.service import nixl
from ferrum_rpc.service.parked import ParkedFile
from tests.support.clients import connected, without
from tests.support.nixl import Fabric
from tests.support.serving import Served
from tests.support.transfers import overflow
from tests.support.wiring import until

PROMPT = [*range(60, 103)]


dialled = partial(connected, session=False, kv_blocks=64, max_context=256)
There = tuple[Served, ExecutorClient, Served, ExecutorClient]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two() -> AsyncIterator[There]:
    async with dialled() as one, dialled(max_request_bytes=16 << 10) as other:
        yield *one, *other


@pytest_asyncio.fixture(loop_scope="module")
async def there(two: There) -> AsyncIterator[There]:
    """Two executors and a client of each; nothing of a test is left at either."""
    yield two
    await nothing_left(two[0], two[2])


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def fed(client: ExecutorClient, **options: Any) -> Sequence:
    sequence = client.sequence(**options)
    await sequence.prefill(PROMPT)
    return sequence


async def row(sequence: Sequence) -> np.ndarray:
    return (await sequence.decode(9, FullLogits())).logits


async def expected(client: ExecutorClient) -> np.ndarray:
    async with await fed(client) as sequence:
        return await row(sequence)


async def nothing_left(*servers: Served) -> None:
    for served in servers:
        await served.check()
        assert served.runner.kv.free_blocks == served.runner.kv.total_blocks
        assert not served.server.state.unnamed


async def test_a_sequence_moves_and_goes_on_there_and_the_source_is_free(there: There) -> None:
    """Each export is read to its end: the executor counts one that is cancelled before its trailer as failed."""
    _, client, _, other = there
    export, begun, ended = transfer.exported, [], []

    async def exported(*given: Any) -> AsyncIterator[bytes]:
        begun.append(given)
        async for frame in export(*given):
            yield frame
        ended.append(given)

    source, target = await fed(client), other.sequence(keep_tokens=True)
    async with target:
        with mock.patch.object(transfer, "exported", exported):
            await source.move_to(target)
        assert source.released and (target.length, target.version, target.tokens) == (len(PROMPT), 1, PROMPT)
        np.testing.assert_array_equal(await row(target), await expected(client))
    assert begun == ended and len(begun) == 2


@pytest.mark.parametrize("side", ["exported", "imported"])
async def test_a_stream_that_breaks_goes_on_where_it_stopped(there: There, side: str) -> None:
    _, client, _, other = there
    original, broken, asked = getattr(transfer, side), [], []

    def exported(context: Any, handle: Any, first: int, *rest: Any) -> Any:
        asked.append(first)

        async def frames() -> AsyncIterator[bytes]:
            count = 0
            async for frame in original(context, handle, first, *rest):
                if first < handle.seq_len and len(broken) < 3 and (count := count + 1) > 4:
                    broken.append(count)
                    raise TransportError("broken", metadata={"grpc_code": "UNAVAILABLE"})
                yield frame

        return frames()

    async def imported(context: Any, header: Any, frames: Any, deadline: Any) -> Any:
        answer = await original(context, header, frames, deadline)
        if len(broken) < 3 and frames is not None:
            broken.append(1)
            raise TransportError("the answer is lost", metadata={"grpc_code": "UNAVAILABLE"})
        return answer

    source = await fed(client)
    async with other.sequence(cache_salt=side.encode()) as target:
        replacement = exported if side == "exported" else imported
        with mock.patch.object(transfer, side, replacement), mock.patch.object(transfer, "chunk_tokens", of_seven):
            await source.move_to(target)
        assert len(broken) == (3 if side == "exported" else 1)
        if side == "exported":
            assert [each for each in asked if each < len(PROMPT)] == [0, 7, 14, 21]
        np.testing.assert_array_equal(await row(target), await expected(client))


async def of_seven(*_: Any) -> int:
    return 7


async def test_a_move_that_is_refused_leaves_the_source_and_can_be_made_again(there: There) -> None:
    _, client, _, other = there
    async with other.sequence() as hog, await fed(client) as source:
        await hog.prefill([1] * 240)
        target = other.sequence()
        with pytest.raises(KvBlocksExhausted):
            await source.move_to(target)
        assert (source.length, source.released, target.length) == (len(PROMPT), False, 0)
        await hog.release()
        await source.move_to(target)
        await target.release()


@pytest.mark.parametrize("how", ["cancelled", "the source is gone"])
async def test_a_release_gives_up_what_an_unfinished_move_has_brought(there: There, how: str) -> None:
    _, client, away, other = there
    begun = asyncio.Event()

    async def exported(*given: Any) -> Any:
        number = 0
        async with aclosing(export(*given)) as frames:
            async for frame in frames:
                number += 1
                if given[2] < len(PROMPT) and number == 5:
                    begun.set()
                    if how == "cancelled":
                        await asyncio.Event().wait()
                    raise InstanceMismatch("the source is another life")
                yield frame

    export = transfer.exported
    async with await fed(client) as source:
        target = other.sequence(cache_salt=how.encode())
        with mock.patch.object(transfer, "exported", exported), mock.patch.object(transfer, "chunk_tokens", of_seven):
            move = asyncio.create_task(source.move_to(target))
            await asyncio.wait_for(begun.wait(), 30)
            if how == "cancelled":
                [arriving] = [record.cut.__self__ for record in away.server.state.unnamed]
                await until(lambda: arriving.next_token > 0)  # else nothing of it was kept, and nothing is left
                move.cancel()
            await asyncio.wait({move})
        assert move.cancelled() or isinstance(move.exception(), InstanceMismatch)
        assert away.server.state.unfinished_imports()
        await target.release()
        assert not away.server.state.unfinished_imports()


async def test_a_move_to_a_client_whose_lease_is_gone_takes_another(there: There) -> None:
    _, client, _, other = there
    async with other.sequence() as first, await fed(client) as source, other.sequence() as target:
        await first.prefill(PROMPT[:3])
        gone = other.lease
        await other.revoke_lease(gone.lease_id)
        await source.move_to(target)
        assert target.length == len(PROMPT) and other.lease.lease_id != gone.lease_id


async def test_a_source_that_cannot_be_released_has_moved_all_the_same(there: There) -> None:
    _, client, _, other = there
    source = await fed(client)
    async with other.sequence() as target:
        with mock.patch.object(connection_of(client), "release", return_value=[TransportError("no answer")]):
            await source.move_to(target)
        assert target.length == len(PROMPT) and not source.released
    await source.release()


async def test_a_file_brings_a_sequence_back_as_often_as_one_likes(there: There, tmp_path: Path) -> None:
    _, client, _, other = there
    path = tmp_path / "sequence.kv"
    async with await fed(client) as source:
        await source.export_to(path)
        assert os.listdir(tmp_path) == [path.name] and path.stat().st_mode & 0o777 == 0o600
        np.testing.assert_array_equal(await row(source), await expected(client))
    for _ in range(2):
        async with other.sequence() as sequence:
            await sequence.import_from(path)
            assert sequence.length == len(PROMPT)
            np.testing.assert_array_equal(await row(sequence), await expected(client))
            with pytest.raises(SequenceMisuseError, match="make a new one"):
                await sequence.import_from(path)


@pytest.mark.parametrize("by", ["move", "file"])
async def test_values_that_are_not_finite_do_not_travel_and_the_tokens_are_fed_there(there, tmp_path, by) -> None:
    here, client, away, other = there
    path, streams, original = tmp_path / "sequence.kv", [], transfer.imported
    counting = mock.patch.object(transfer, "imported", lambda *about: streams.append(about[2]) or original(*about))
    async with await fed(client, keep_tokens=True) as source, other.sequence(keep_tokens=True) as target:
        [record] = here.server.state.handles.records()
        await overflow(here, record)
        before = away.server.state.engine.counters.tokens
        with counting:
            if by == "move":
                await source.move_to(target)
            else:
                await source.export_to(path)
                await target.import_from(path)
        assert [each is not None for each in streams] == [False, True], "once"
        assert not away.server.state.unnamed
        assert away.server.state.engine.counters.tokens - before == len(PROMPT)
        assert (target.length, target.tokens, source.released) == (len(PROMPT), PROMPT, by == "move")
        np.testing.assert_array_equal(await row(target), await expected(other))


async def test_a_file_that_was_changed_is_found_before_anything_is_sent(there: There, tmp_path: Path) -> None:
    *_, other = there
    path, bad = tmp_path / "sequence.kv", tmp_path / "bad.kv"
    async with await fed(other) as source:
        await source.export_to(path)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 4
    for content, error in (
        (bytes(flipped), KvCorrupt),
        (whole[:-1], KvCorrupt),
        (whole[: len(whole) // 2], KvCorrupt),
        (whole + b"more", KvCorrupt),
        (whole[: len(transfer.FILE_MAGIC)], KvCorrupt),
        (b"x" + whole[1:], InvalidRequest),
        (b"", InvalidRequest),
    ):
        bad.write_bytes(content)
        async with other.sequence() as sequence:
            with pytest.raises(error):
                await sequence.import_from(bad)
            assert sequence.version == 0
    async with await fed(other) as source:
        for missing in (tmp_path / "none" / "x.kv", tmp_path):
            with pytest.raises(InvalidRequest, match="cannot write"):
                await source.export_to(missing)
    async with other.sequence() as sequence:
        with pytest.raises(InvalidRequest, match="cannot read"):
            await sequence.import_from(tmp_path / "none")
    assert set(os.listdir(tmp_path)) == {"sequence.kv", "bad.kv"}


async def test_another_model_refuses_it_and_an_older_executor_is_not_asked(there: There) -> None:
    _, client, *_ = there
    async with dialled(layers=3) as (_, other), await fed(client) as source:
        with pytest.raises(LayoutMismatch) as caught:
            await source.move_to(other.sequence())
        assert "layers" in caught.value.metadata["differs"].split(",")
        without(other, Capability.KV_TRANSFER)
        with pytest.raises(NotSupported):
            await source.move_to(other.sequence())


async def test_a_stream_that_ends_while_it_is_closed_tells_why(there: There, monkeypatch: pytest.MonkeyPatch) -> None:
    """What grpc.aio raises then is no error of the executor."""
    _, client, *_ = there

    async def close(_: Any) -> None:
        raise grpc.aio.InternalError("Failed to execute the batch")

    monkeypatch.setattr("grpc.aio._call.StreamUnaryCall.done_writing", close)
    async with await fed(client) as sequence, dialled(layers=3) as (_, another):
        with pytest.raises(LayoutMismatch):
            await sequence.move_to(another.sequence())


async def test_another_transport_carries_it_where_both_offer_it(there: There) -> None:
    """Also when its importer gives up while the export waits for room: what was read stays, and the rest follows."""
    _, plain, *_ = there
    fabric = Fabric()
    with mock.patch.object(nixl, "SLOT_BYTES", 4096), mock.patch.object(transfer, "chunk_tokens", of_seven):
        async with (
            dialled(nixl_agent=fabric.agent) as (here, client),
            dialled(nixl_agent=fabric.agent) as (away, other),
        ):
            assert Capability.KV_TRANSPORT_NIXL in (await client.info()).capabilities
            source, target = await fed(client), other.sequence()
            with pytest.raises(NotSupported, match="KV_TRANSPORT_NIXL"):
                await source.move_to(plain.sequence(), transport="nixl")
            with pytest.raises(InvalidRequest, match="one of grpc, nixl") as caught:
                await source.move_to(target, transport="x")  # type: ignore[arg-type]
            assert caught.value.field == "transport"
            assert not source.released
            fabric.spoil_at = 5
            async with asyncio.timeout(10), target:
                await source.move_to(target, transport="nixl")
                assert source.released and fabric.reads == 5 + 2 * 7 - 4
                np.testing.assert_array_equal(await row(target), await expected(other))
            await nothing_left(here, away)


# --- parking ----------------------------------------------------------------------------------------------------------


def files(folder: Path) -> list[Path]:
    return list((folder / "ferrum-parked").glob("ferrum-parked-*"))


async def test_a_parked_sequence_goes_on(tmp_path: Path) -> None:
    async with dialled(park_dir=tmp_path) as (_, client), client.sequence() as sequence, client.sequence() as twin:
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
async def test_a_call_waits_for_a_parking_that_was_cancelled(tmp_path, monkeypatch, then) -> None:
    begun, go, append = threading.Event(), threading.Event(), ParkedFile.append

    def held(*about: Any) -> None:
        begun.set()
        assert go.wait(10)
        append(*about)

    async with dialled(park_dir=tmp_path) as (_, client), client.sequence() as sequence:
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
    async with dialled(park_dir=tmp_path) as (_, client), client.sequence(rebuild=True) as sequence:
        await sequence.prefill(PROMPT)
        await sequence.park()
        files(tmp_path)[0].unlink()
        with pytest.raises(KvCorrupt):
            await sequence.decode(9)
        await sequence.decode(9)
        assert sequence.length == len(PROMPT) + 1


async def test_an_executor_that_parks_nothing_says_so(there: There) -> None:
    async with await fed(there[1]) as sequence:
        with pytest.raises(NotSupported):
            await sequence.park()
