"""Sequences that a program moves to another executor, or to a file and back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import numpy as np
import pytest
import pytest_asyncio

from ferrum_rpc.client import ExecutorClient, FullLogits, Sequence, SequenceMisuseError, transfer
from ferrum_rpc.client import sync as sync_client
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
from tests.service.nixl import Fabric
from tests.service.transfers import overflow
from tests.serving import Served, serve_identity
from tests.wiring import until

PROMPT = [*range(60, 103)]


@asynccontextmanager
async def dialled(**options: Any) -> AsyncIterator[tuple[Served, ExecutorClient]]:
    async with (
        serve_identity(positional=True, **{"kv_blocks": 64, "max_context": 256, **options}) as served,
        ExecutorClient(served.target) as client,
    ):
        yield served, client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def there() -> AsyncIterator[tuple[Served, ExecutorClient, Served, ExecutorClient]]:
    async with dialled() as one, dialled(max_request_bytes=16 << 10) as other:
        yield *one, *other


pytestmark = pytest.mark.asyncio(loop_scope="module")

There = tuple[Served, ExecutorClient, Served, ExecutorClient]


async def fed(client: ExecutorClient, **options: Any) -> Sequence:
    sequence = client.sequence(**options)
    await sequence.prefill(PROMPT)
    return sequence


async def row(sequence: Sequence) -> np.ndarray:
    return (await sequence.decode(9, FullLogits())).logits.copy()


async def expected(client: ExecutorClient) -> np.ndarray:
    async with await fed(client) as sequence:
        return await row(sequence)


async def nothing_left(*servers: Served) -> None:
    for served in servers:
        await served.check()
        assert served.runner.kv.free_blocks == served.runner.kv.total_blocks
        assert not served.server.state.unnamed


async def test_a_sequence_moves_and_goes_on_there_and_the_source_is_free(there: There) -> None:
    here, client, away, other = there
    source, target = await fed(client), other.sequence(keep_tokens=True)
    async with target:
        await source.move_to(target)
        assert source.released and (target.length, target.version) == (len(PROMPT), 1)
        assert target.tokens == PROMPT
        np.testing.assert_array_equal(await row(target), await expected(client))
    await nothing_left(here, away)


async def test_a_move_reads_each_export_to_its_end(there: There) -> None:
    """The executor counts one that is cancelled before its trailer as a failed transfer."""
    here, client, away, other = there
    export, begun, ended = transfer.exported, [], []

    async def exported(*given: Any) -> AsyncIterator[bytes]:
        begun.append(given)
        async for frame in export(*given):
            yield frame
        ended.append(given)

    source, target = await fed(client), other.sequence()
    async with target:
        with mock.patch.object(transfer, "exported", exported):
            await source.move_to(target)
    assert begun == ended and len(begun) == 2
    await nothing_left(here, away)


@pytest.mark.parametrize("side", ["exported", "imported"])
async def test_a_stream_that_breaks_goes_on_where_it_stopped(there: There, side: str) -> None:
    here, client, away, other = there
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
    await nothing_left(here, away)


async def of_seven(*_: Any) -> int:
    return 7


async def test_a_move_that_is_refused_leaves_the_source_and_can_be_made_again(there: There) -> None:
    here, client, away, other = there
    async with other.sequence() as hog, await fed(client) as source:
        await hog.prefill([1] * 240)
        target = other.sequence()
        with pytest.raises(KvBlocksExhausted):
            await source.move_to(target)
        assert (source.length, source.released, target.length) == (len(PROMPT), False, 0)
        await hog.release()
        await source.move_to(target)
        await target.release()
    await nothing_left(here, away)


@pytest.mark.parametrize("how", ["cancelled", "the source is gone"])
async def test_a_release_gives_up_what_an_unfinished_move_has_brought(there: There, how: str) -> None:
    here, client, away, other = there
    begun = asyncio.Event()

    async def exported(*given: Any) -> Any:
        async with aclosing(export(*given)) as frames:
            async for number, frame in aenumerate(frames):
                if given[2] < len(PROMPT) and number == 4:
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
        assert away.server.state.unfinished_imports()[0] == 1
        await target.release()
        assert away.server.state.unfinished_imports() == (0, 0)
    await nothing_left(here, away)


async def aenumerate(frames: AsyncIterator[Any]) -> AsyncIterator[tuple[int, Any]]:
    number = 0
    async for frame in frames:
        yield number, frame
        number += 1


async def test_a_move_to_a_client_whose_lease_is_gone_takes_another(there: There) -> None:
    here, client, away, other = there
    async with other.sequence() as first, await fed(client) as source, other.sequence() as target:
        await first.prefill(PROMPT[:3])
        gone = other.lease
        assert gone is not None
        await other.revoke_lease(gone.lease_id)
        await source.move_to(target)
        assert target.length == len(PROMPT) and other.lease is not None and other.lease.lease_id != gone.lease_id
    await nothing_left(here, away)


async def test_a_source_that_cannot_be_released_has_moved_all_the_same(there: There) -> None:
    here, client, away, other = there
    source = await fed(client)
    async with other.sequence() as target:
        with mock.patch.object(source._sender.owner.connection, "release", return_value=[TransportError("no answer")]):
            await source.move_to(target)
        assert target.length == len(PROMPT) and not source.released
    await source.release()
    await nothing_left(here, away)


async def test_a_file_brings_a_sequence_back_as_often_as_one_likes(there: There, tmp_path: Path) -> None:
    here, client, away, other = there
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
    await nothing_left(here, away)


@pytest.mark.parametrize("by", ["move", "file"])
async def test_values_that_are_not_finite_do_not_travel_and_the_tokens_are_fed_there(
    there: There, tmp_path: Path, by: str
) -> None:
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
    await nothing_left(here, away)


async def test_a_file_that_was_changed_is_found_before_anything_is_sent(there: There, tmp_path: Path) -> None:
    *_, away, other = there
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
    await nothing_left(away)


async def test_another_model_refuses_it_and_an_older_executor_is_not_asked(there: There) -> None:
    here, client, *_ = there
    async with dialled(layers=3) as (_, other), await fed(client) as source:
        with pytest.raises(LayoutMismatch) as caught:
            await source.move_to(other.sequence())
        assert "layers" in caught.value.metadata["differs"].split(",")
        info = await other.info()
        without = info.capabilities - {Capability.KV_TRANSFER}
        object.__setattr__(info, "capabilities", without)
        with pytest.raises(NotSupported):
            await source.move_to(other.sequence())
    await nothing_left(here)


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


async def test_threads_have_files_too(there: There, tmp_path: Path) -> None:
    here, _, away, _ = there

    def program() -> tuple[int, int]:
        with (
            sync_client.ExecutorClient(here.target) as one,
            sync_client.ExecutorClient(away.target) as two,
            one.sequence() as source,
            two.sequence() as target,
        ):
            source.prefill(PROMPT)
            source.export_to(tmp_path / "x")
            target.import_from(tmp_path / "x")
            return source.decode(9).token, target.decode(9).token

    one, two = await asyncio.to_thread(program)
    assert one == two
    await nothing_left(here, away)
