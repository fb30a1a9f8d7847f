"""Exports and imports on the raw stubs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager
from hashlib import sha256
from typing import Any

from crc32c import crc32c

from ferrum_rpc.executor.v1 import forward_pb2, kv_transfer_pb2, types_pb2
from tests.support.inside import accounts, creating, imports_of, parking_jobs
from tests.support.serving import Served, serve_identity
from tests.support.wiring import full, item, pb, prefill, until

kt = kv_transfer_pb2
PROMPT = [*range(100, 131)]
BYPASS = forward_pb2.CreateOptions(cache_mode=forward_pb2.CACHE_MODE_BYPASS)


def moving(**options: Any) -> AbstractAsyncContextManager[Served]:
    """Serve the identity model whose rows depend on positions, as ends of transfers need it."""
    return serve_identity(positional=True, **{"kv_blocks": 64, "max_context": 128, **options})


async def fed(served: Served) -> types_pb2.KvHandle:
    """A sequence of `PROMPT` without the prefix cache."""
    return await prefill(served, PROMPT, create=BYPASS)


async def nothing_left(served: Served, *, but_leases: bool = False) -> None:
    """Of sequences, of transfers and of what was parked; and no account pays for anything, ``but_leases`` perhaps."""
    state = served.server.state

    def settled() -> bool:  # a cancelled call's handler returns its places a little later than its sequence's
        held = sum(sum(each.held) for each in accounts(state))
        return not (state.unnamed or creating(state) or parking_jobs(state)) and held == len(state.leases) * but_leases

    await until(settled)
    await served.check()
    free: list[Any] = []
    await served.between_steps(lambda runner: free.append((runner.kv.free_blocks, len(imports_of(runner)))))
    assert free == [(served.runner.kv.total_blocks, 0)]
    assert state.empty.is_set() and (state.parked.bytes, state.parked.sequences) == (0, 0)


async def expected_row(served: Served) -> bytes:
    """What a sequence that arrived must answer: the row of one that was fed here."""
    return await row(served, await fed(served))


async def exported(served: Any, handle: types_pb2.KvHandle, **fields: Any) -> list[kt.ExportKvResponse]:
    """All frames of an export."""
    return [frame async for frame in served.transfer.ExportKv(kt.ExportKvRequest(handle=handle, **fields))]


class Names:
    """``present``: the request id of headers that have no other. A server never forgets one that it answered."""

    present = "import"


def header(layout: kt.KvLayout, name: str = "", **create: Any) -> kt.ImportKvRequest:
    """Without the prefix cache, unless ``create`` says otherwise."""
    request_id = Names.present + name
    options = forward_pb2.CreateOptions(**{"cache_mode": forward_pb2.CACHE_MODE_BYPASS, **create})
    return kt.ImportKvRequest(header=kt.ImportKvHeader(layout=layout, request_id=request_id, create=options))


def chunks_of(frames: Iterable[kt.ExportKvResponse]) -> list[kt.KvChunk]:
    return [frame.chunk for frame in frames if frame.WhichOneof("frame") == "chunk"]


def parts(chunk: kt.KvChunk) -> list[bytes]:
    if chunk.parts:
        return [each.data.data for each in chunk.parts]
    return [each.data for each in (chunk.keys, chunk.values, chunk.key_scales, chunk.value_scales)]


def sealed(chunk: kt.KvChunk) -> kt.KvChunk:
    """The chunk with the checksum of what it has."""
    chunk.crc32c = 0
    for part in parts(chunk):
        chunk.crc32c = crc32c(part, chunk.crc32c)
    return chunk


def brought(chunks: Iterable[kt.KvChunk]) -> list[kt.ImportKvRequest]:
    """Chunks as frames of an import, and the trailer."""
    frames, digest = [], sha256()
    for chunk in chunks:
        for part in parts(chunk):
            digest.update(part)
        frames.append(kt.ImportKvRequest(chunk=chunk))
    return [*frames, kt.ImportKvRequest(trailer=kt.KvTrailer(sha256=digest.digest()))]


def as_import(frames: Iterable[kt.ExportKvResponse]) -> list[kt.ImportKvRequest]:
    """All frames of an export but the layout."""
    return [kt.ImportKvRequest.FromString(each.SerializeToString()) for each in frames if not each.HasField("layout")]


async def _each(frames: Iterable[kt.ImportKvRequest]) -> AsyncIterator[kt.ImportKvRequest]:
    for frame in frames:
        yield frame


async def imported(served: Any, *frames: kt.ImportKvRequest) -> kt.ImportKvResponse:
    """A whole stream of these frames."""
    return await served.transfer.ImportKv(_each(frames))


async def row(served: Any, handle: types_pb2.KvHandle, token: int = 9) -> bytes:
    """The logits behind one more token."""
    answer = await served.executor.Decode(pb.DecodeRequest(item=item([token], handle, output=full())))
    return answer.row_blocks[0].logits.logits.data


async def overflow(served: Any, record: Any) -> None:
    """Leave an infinity in the cache of a sequence's last token."""

    def spoil(runner: Any) -> None:
        [slot] = runner.kv.slots(record.sequence, record.length - 1, record.length)
        runner.store.values[1].flatten(0, 1)[int(slot), 0, 3] = float("inf")

    await served.between_steps(spoil)
