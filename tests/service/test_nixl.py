"""Transfers whose data another transport carries: the same checks and the same ends, and nothing stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from unittest import mock

import grpc
import pytest
import pytest_asyncio

from ferrum_rpc.errors import InvalidRequest, Reason
from ferrum_rpc.executor.v1 import info_pb2, types_pb2
from ferrum_rpc.service import nixl
from ferrum_rpc.wire.kv_stream import CacheLayout
from tests.support import transfers
from tests.support.nixl import Fabric
from tests.support.serving import LIMITS, Served, serve_identity
from tests.support.transfers import chunks_of, expected_row, exported, fed, header, imported, kt, row
from tests.support.wiring import refused, until

NIXL = kt.KV_TRANSPORT_NIXL
CHUNK, ROOM = 2048, 2
"""Bytes of a chunk of 8 tokens, and how many of them a slot has room for."""

pytestmark = pytest.mark.asyncio(loop_scope="module")


def serving(fabric: Fabric, **options: Any) -> Any:
    return transfers.moving(nixl_agent=fabric.agent, **options)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers() -> AsyncIterator[tuple[Fabric, Served, Served]]:
    fabric = Fabric()
    with mock.patch.object(nixl, "SLOT_BYTES", ROOM * CHUNK):
        async with serving(fabric) as source, serving(fabric) as target:
            assert CacheLayout.of(source.server.state.model).chunk_bytes(0, 8) == CHUNK
            yield fabric, source, target


@pytest.fixture
def fabric(servers: tuple[Fabric, Served, Served]) -> Fabric:
    return servers[0]


@pytest_asyncio.fixture(loop_scope="module")
async def source(servers: tuple[Fabric, Served, Served]) -> AsyncIterator[Served]:
    yield servers[1]
    await empty(servers[1])


@pytest_asyncio.fixture(loop_scope="module")
async def target(servers: tuple[Fabric, Served, Served], request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    transfers.Names.present = f"{abs(hash(request.node.name))} "
    fabric, _, target = servers
    with mock.patch.object(nixl, "READ_S", 30.0):
        yield target
    fabric.stuck = fabric.held = False
    fabric.dead.clear()
    await empty(target)


async def empty(served: Served) -> None:
    """Nor are slots taken, or notifications expected."""
    await served.reset()
    await transfers.nothing_left(served)
    carrier = carrier_of(served)
    await until(lambda: not slots_taken(carrier))
    assert not carrier.waiting and not reads(carrier)


def slots_taken(carrier: nixl.Nixl) -> int:
    return LIMITS.max_transfers - len(carrier._free)


def reads(carrier: nixl.Nixl) -> int:
    """Those that NIXL has not let go of."""
    return len(carrier._reads)


def carrier_of(served: Served) -> nixl.Nixl:
    carrier = served.server.state.nixl
    assert carrier is not None
    return carrier


def exporting(source: Served, handle: types_pb2.KvHandle, first_token: int = 0) -> Any:
    about = {"chunk_tokens": 8, "transport": NIXL, "first_token": first_token}
    return source.transfer.ExportKv(kt.ExportKvRequest(handle=handle, **about))


async def relayed(source: Served, target: Served, **about: Any) -> tuple[kt.ImportKvResponse, list[Any]]:
    """What is exported, imported as it comes; the answer, and the frames."""
    handle = await about.pop("fed", fed)(source)
    export = exporting(source, handle, about.pop("first_token", 0))
    seen: list[Any] = []
    layout = (await export.read()).layout

    async def frames() -> AsyncIterator[kt.ImportKvRequest]:
        yield header(layout, **about)
        while (frame := await export.read()) is not grpc.aio.EOF:
            seen.append(frame)
            yield kt.ImportKvRequest.FromString(frame.SerializeToString())

    try:
        return await target.transfer.ImportKv(frames()), seen
    finally:
        export.cancel()
        await source.release(handle)


async def staged(source: Served) -> tuple[Any, kt.KvLayout, list[kt.ImportKvRequest]]:
    """An export that waits for room, its layout, and the source and chunks that came of it."""
    export = exporting(source, await fed(source))
    layout = (await export.read()).layout
    frames = [await export.read() for _ in range(1 + ROOM)]
    return export, layout, [kt.ImportKvRequest.FromString(each.SerializeToString()) for each in frames]


async def arrives(source: Served, target: Served) -> None:
    answer, _ = await relayed(source, target)
    assert await row(target, answer.handle) == await expected_row(target)


# --- whole ------------------------------------------------------------------------------------------------------------


async def test_the_data_go_another_way_and_all_else_is_as_in_the_stream(source: Served, target: Served) -> None:
    answer, frames = await relayed(source, target)
    chunks = chunks_of(frames)
    assert len(chunks) == 8 > ROOM
    assert all(chunk.HasField("remote") and not chunk.keys.data and not chunk.values.data for chunk in chunks)
    plain = await exported(source, await fed(source), chunk_tokens=8)
    assert frames[-1] == plain[-1], "the trailer"
    for one, other in zip(chunks, chunks_of(plain), strict=True):
        assert (one.crc32c, one.layer, one.first_token) == (other.crc32c, other.layer, other.first_token)
        assert (one.keys.shape, one.keys.dtype) == (other.keys.shape, other.keys.dtype)
    assert (answer.handle.seq_len, answer.handle.version) == (len(transfers.PROMPT), 1)
    assert await row(target, answer.handle) == await expected_row(target)
    info = await target.info()
    assert info_pb2.CAPABILITY_KV_TRANSPORT_NIXL in info.capabilities


async def test_an_eight_bit_cache_goes_with_its_scales(fabric: Fabric) -> None:
    async with serving(fabric, kv_dtype="int8") as source, serving(fabric, kv_dtype="int8") as target:
        answer, frames = await relayed(source, target)
        assert chunks_of(frames)[0].HasField("key_scales")
        assert await row(target, answer.handle) == await expected_row(target)


async def test_what_is_there_need_not_travel_and_the_rest_may_come_in_either_way(source, target):
    plain = await exported(source, await fed(source), chunk_tokens=8)
    first = transfers.brought(chunks_of(plain)[:4])[:-1]
    assert (await imported(target, header(plain[0].layout), *first)).next_token == 16
    answer, frames = await relayed(source, target, first_token=16)
    assert {chunk.first_token for chunk in chunks_of(frames)} == {16, 24}
    assert await row(target, answer.handle) == await expected_row(target)


# --- bounds -----------------------------------------------------------------------------------------------------------


async def test_an_export_waits_for_room_and_not_for_ever(source: Served, target: Served) -> None:
    carrier = carrier_of(source)
    with mock.patch.object(carrier, "unread_s", 0.05):
        export, *_ = await staged(source)
        assert len(carrier.waiting) == ROOM
        error = await refused(export.read(), Reason.QUEUE_FULL)
    assert error.retry_after_s and "read nothing" in error.message
    await empty(source)


@pytest.mark.parametrize("how", ["cancelled", "reset"])
async def test_an_export_that_is_ended_while_it_waits_frees_its_slot(source: Served, how: str) -> None:
    export, *_ = await staged(source)
    if how == "cancelled":
        export.cancel()
    else:
        await source.reset()
        await refused(export.read(), Reason.HANDLE_RELEASED)
    await empty(source)


async def test_the_trailer_comes_when_all_was_read(fabric: Fabric, source: Served) -> None:
    handle = await fed(source)
    export = exporting(source, handle, first_token=24)
    frames = [await export.read() for _ in range(4)]
    trailer = asyncio.ensure_future(export.read())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not trailer.done()
    agent = fabric.agents[carrier_of(source).metadata.decode()]
    for chunk in chunks_of(frames):
        agent.notifications += [b"of another program", chunk.remote.notification, chunk.remote.notification]
    assert (await trailer).HasField("trailer")
    assert await export.read() is grpc.aio.EOF


# --- broken and taken up again ----------------------------------------------------------------------------------------


def lying(**fields: Any) -> Any:
    def lie(chunk: kt.KvChunk) -> None:
        for name, value in fields.items():
            setattr(chunk.remote, name, value)

    return lie


def with_data(chunk: kt.KvChunk) -> None:
    chunk.keys.data = bytes(CHUNK // 2)


def larger(chunk: kt.KvChunk) -> None:
    for tensor in (chunk.keys, chunk.values):
        tensor.shape[0] = 31
    chunk.remote.size = 31 * CHUNK // 8


LIES: dict[str, tuple[Any, Reason]] = {
    "less": (lying(size=CHUNK - 4), Reason.INVALID_REQUEST),
    "more": (lying(size=CHUNK + 1), Reason.INVALID_REQUEST),
    "data as well": (with_data, Reason.INVALID_REQUEST),
    "more than a slot has": (larger, Reason.INVALID_REQUEST),
    "beyond all memory": (lying(address=(1 << 64) - 8), Reason.INVALID_REQUEST),
    "elsewhere": (lying(address=4096), Reason.KV_CORRUPT),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_lie_about_the_memory_is_refused_and_nothing_is_read(fabric, source, target, lie):
    change, reason = LIES[lie]
    export, layout, [first, chunk, *_] = await staged(source)
    change(chunk.chunk)
    before = fabric.reads
    await refused(imported(target, header(layout), first, chunk), reason)
    assert fabric.reads == before
    export.cancel()
    await arrives(source, target)


async def test_a_stream_has_one_source_before_its_chunks(source: Served, target: Served) -> None:
    export, layout, [first, chunk, *_] = await staged(source)
    nowhere = kt.ImportKvRequest(source=kt.KvSource(transport=NIXL))
    unknown = kt.ImportKvRequest(source=kt.KvSource(transport=NIXL, agent=b"unknown"))
    for frames in ((chunk,), (first, first), (first, chunk, first), (nowhere,)):
        await refused(imported(target, header(layout), *frames), Reason.INVALID_REQUEST)
    await refused(imported(target, header(layout), unknown, chunk), Reason.KV_CORRUPT)
    export.cancel()


async def broken(target: Served, *frames: kt.ImportKvRequest) -> None:
    assert (await refused(imported(target, *frames), Reason.KV_CORRUPT)).number("next_token") == 0


async def test_what_was_changed_on_its_way_is_found(fabric: Fabric, source: Served, target: Served) -> None:
    export, layout, frames = await staged(source)
    fabric.spoil_at = fabric.reads + 1
    await broken(target, header(layout), *frames[:2])
    export.cancel()
    await arrives(source, target)


async def test_an_exporter_that_dies_is_forgotten_and_the_next_one_goes_on(fabric, source, target):
    export, layout, frames = await staged(source)
    assert (await imported(target, header(layout), *frames)).next_token == 8, "two layers of one chunk"
    export.cancel()
    export, layout, frames = await staged(source)
    fabric.dead.add(dead := carrier_of(source).metadata.decode())
    error = await refused(imported(target, header(layout), *frames[:2]), Reason.KV_CORRUPT)
    assert (error.number("next_token"), "Disconnect" in error.message) == (8, True)
    assert dead not in fabric.agents[carrier_of(target).metadata.decode()].known
    export.cancel()
    async with serving(fabric) as other:
        await arrives(other, target)


@pytest.mark.parametrize("how", ["cancelled", "late"])
@pytest.mark.parametrize("held", [False, True])
async def test_a_read_that_does_not_end_is_given_up_and_its_slot_when_it_is_free(fabric, source, target, how, held):
    export, layout, frames = await staged(source)
    fabric.stuck, fabric.held = True, held
    carrier = carrier_of(target)
    if how == "late":
        with mock.patch.object(nixl, "READ_S", 0.02):
            await broken(target, header(layout), *frames[:2])
    else:
        stream = target.transfer.ImportKv()
        for frame in (header(layout), *frames):
            await stream.write(frame)
        await until(lambda: bool(reads(carrier)))
        stream.cancel()
    await until(lambda: slots_taken(carrier) == reads(carrier) == held)
    fabric.stuck = fabric.held = False
    await until(lambda: not slots_taken(carrier))
    export.cancel()
    await arrives(source, target)


async def test_values_that_are_not_finite_are_refused_here_too(source: Served, target: Served) -> None:
    async def spoilt(served: Served) -> types_pb2.KvHandle:
        handle = await fed(served)
        await transfers.overflow(served, served.server.state.handles.live[handle.id])
        return handle

    error = await refused(relayed(source, target, fed=spoilt), Reason.KV_CORRUPT)
    assert error.metadata["not_finite"] == "values" and not target.server.state.unnamed


async def test_without_a_free_slot_nothing_is_started(source: Served, target: Served) -> None:
    """Slots of reads that NIXL did not let go of."""
    export, layout, frames = await staged(source)
    for served in (source, target):
        with mock.patch.object(carrier_of(served), "_free", []):
            call = exported(source, await fed(source), chunk_tokens=8, transport=NIXL) if served is source else None
            await refused(call or imported(target, header(layout), frames[0]), Reason.QUEUE_FULL)
    export.cancel()


# --- where it is not offered ------------------------------------------------------------------------------------------


async def test_where_it_is_not_offered_both_ends_say_so(source: Served) -> None:
    export, layout, frames = await staged(source)
    async with transfers.moving() as plain:
        handle = await fed(plain)
        strange = kt.ImportKvRequest(source=kt.KvSource(transport=99, agent=b"x"))
        for call, why in (
            (exported(plain, handle, transport=NIXL), "no --kv-transport nixl"),
            (exported(plain, handle, transport=99), "unknown transport 99"),
            (imported(plain, header(layout), frames[0]), "no --kv-transport nixl"),
            (imported(plain, header(layout, "strange"), strange), "unknown transport 99"),
        ):
            error = await refused(call, Reason.NOT_SUPPORTED)
            assert error.metadata["capability"] == nixl.CAPABILITY and error.message.endswith(why)
        await refused(imported(plain, header(layout, "other"), frames[1]), Reason.INVALID_REQUEST)
        info = await plain.info()
        assert info_pb2.CAPABILITY_KV_TRANSPORT_NIXL not in info.capabilities
    export.cancel()


async def test_a_server_does_not_start_with_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setenv("UCX_NET_DEVICES", "lo")

    async def start(import_module: Any, said: str) -> None:
        patched = mock.patch.object(nixl.importlib, "import_module", import_module)
        with patched, pytest.raises(InvalidRequest, match=said):
            async with serve_identity(nixl_agent=nixl.make_agent):
                pass

    await start(missing, r"needs the nixl package .* pip install .*\[nixl\]")

    class Api:
        nixl_agent_config = dict

        def nixl_agent(self, name: str, config: Any) -> Any:
            raise RuntimeError("NIXL_ERR_BACKEND")

    await start(lambda _: Api(), "UCX_NET_DEVICES=lo")
