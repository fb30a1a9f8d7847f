"""Transfers of sequences between executors, and to and from files.

Frames pass through as bytes: those of an export and an import differ only in the first, so the client parses none of
the others. A broken transfer continues at the importer's next token, which it reports for its header alone.

A file is written under another name and renamed when it is whole.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Iterator, Set
from contextlib import aclosing, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Literal

import grpc
from google.protobuf.message import DecodeError

from ferrum_rpc.client.context import Context
from ferrum_rpc.client.info import Capability
from ferrum_rpc.client.retry import LONGEST_PAUSE_S, Backoff, Deadline, fate_unknown
from ferrum_rpc.core import HandleRef
from ferrum_rpc.errors import ExecutorError, InvalidRequest, KvCorrupt, NotSupported, QueueFull, SequenceBusy
from ferrum_rpc.executor.v1 import forward_pb2
from ferrum_rpc.executor.v1 import kv_transfer_pb2 as pb
from ferrum_rpc.wire.items import handle_from_proto, handle_to_proto
from ferrum_rpc.wire.kv_stream import FILE_MAGIC, FrameFile, widest_bytes

_SERVICE: Final = "/ferrum_rpc.executor.v1.KvTransfer/"
LAYOUT: Final = b"\x0a"
"""The first bytes of an export's first frame, and of no other."""
_OVERHEAD: Final = 4 << 10
"""A generous bound for the bytes of a chunk's message without its tensors."""

Transport = Literal["grpc", "nixl"]
TRANSPORTS: Final[dict[str, pb.KvTransport]] = {
    "grpc": pb.KV_TRANSPORT_UNSPECIFIED,
    "nixl": pb.KV_TRANSPORT_NIXL,
}

ATTEMPTS: Final = 5
"""How often a stream may break without new data before its error is raised."""

ENDED: Final = (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.CancelledError)
"""The errors that end a call, including a closed channel."""

Frames = Callable[[int], AsyncGenerator[bytes, None]]
"""``frames(first)``: the frames after the layout, of the tokens from ``first`` on, and their trailer."""


async def check_offered(context: Context, deadline: Deadline, transport: Transport = "grpc") -> None:
    """Raise `NotSupported` if the executor does not move sequences by this transport; `InvalidRequest` for an unknown
    transport."""
    if transport not in TRANSPORTS:
        raise InvalidRequest(f"transport must be one of {', '.join(TRANSPORTS)}, not {transport!r}", field="transport")
    offered = (await context.info(deadline)).capabilities
    if Capability.KV_TRANSFER not in offered:
        raise NotSupported("the executor does not move sequences (capability KV_TRANSFER)")
    if TRANSPORTS[transport] and Capability.KV_TRANSPORT_NIXL not in offered:
        raise NotSupported("an executor of the two does not move sequences by NIXL (capability KV_TRANSPORT_NIXL)")


async def layout_of(context: Context, handle: HandleRef, deadline: Deadline) -> pb.KvLayout:
    """The layout of a sequence's cache: an export without tokens. It is read to its end, since the executor counts a
    cancelled export as one that failed. One before revision 10 sends a trailer too."""
    async with aclosing(exported(context, handle, handle.seq_len, 0, deadline, "grpc", True)) as frames:
        layout, *_ = [frame async for frame in frames]
    return pb.ExportKvResponse.FromString(layout).layout


async def exported(  # noqa: PLR0917
    context: Context,
    handle: HandleRef,
    first_token: int,
    chunk_tokens: int,
    deadline: Deadline,
    transport: Transport = "grpc",
    layout_only: bool = False,
) -> AsyncGenerator[bytes, None]:
    """The frames of an export. Raises the `ExecutorError` that ends it."""
    method: Any = context.channel.unary_stream(f"{_SERVICE}ExportKv", pb.ExportKvRequest.SerializeToString)
    request = pb.ExportKvRequest(
        handle=handle_to_proto(handle),
        first_token=first_token,
        chunk_tokens=chunk_tokens,
        transport=TRANSPORTS[transport],
        layout_only=layout_only,
    )
    call: Any = None
    try:
        call = method(request, timeout=deadline.remaining(), metadata=context.metadata)
        async for frame in call:
            yield frame
    except ENDED as error:
        raise context.error_of(error) from None
    finally:
        if call is not None:
            call.cancel()


async def imported(
    context: Context, header: pb.ImportKvHeader, frames: AsyncGenerator[bytes, None] | None, deadline: Deadline
) -> pb.ImportKvResponse:
    """Send a header and frames; returns the importer's answer. Raises the `ExecutorError` that ends it, and the errors
    of the frames."""
    method: Any = context.channel.stream_unary(
        f"{_SERVICE}ImportKv", response_deserializer=pb.ImportKvResponse.FromString
    )
    try:
        call: Any = method(timeout=deadline.remaining(), metadata=context.metadata)
    except ENDED as failure:
        raise context.error_of(failure) from None
    sending = asyncio.create_task(send(call, header, frames))
    call.add_done_callback(lambda _: sending.cancel())  # else the exporter may wait for an importer that reads no more
    try:
        await asyncio.wait({sending})
        error = None if sending.cancelled() else sending.exception()
        if isinstance(error, ExecutorError):  # let sent frames arrive: the next stream continues after them
            await _close(call)
            await call
        if error is not None and not isinstance(error, asyncio.InvalidStateError):
            raise error
        answer: pb.ImportKvResponse = await call  # raises the reason of its end
    except ENDED as failure:
        raise context.error_of(failure) from None
    finally:
        sending.cancel()
        call.cancel()
        await asyncio.gather(sending, return_exceptions=True)  # what it ended with was raised, or matters no more
    context.note_pressure(answer.pressure)
    return answer


async def send(call: Any, header: pb.ImportKvHeader, frames: AsyncGenerator[bytes, None] | None) -> None:
    """Send all of a stream, or stop if it is answered before its end, as its initial metadata show."""
    await call.write(pb.ImportKvRequest(header=header).SerializeToString())
    if frames is not None:
        answered, coming = asyncio.ensure_future(call.initial_metadata()), None
        async with aclosing(frames):
            try:
                while not answered.done():
                    coming = asyncio.ensure_future(anext(frames, None))
                    await asyncio.wait({coming, answered}, return_when=asyncio.FIRST_COMPLETED)
                    if not coming.done() or (frame := await coming) is None:
                        break
                    await call.write(frame)
            finally:
                await _cancelled(answered, coming)
    await _close(call)


async def _cancelled(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel tasks and wait until all have ended, even if the caller is cancelled meanwhile: frames can only be closed
    once no task reads them."""
    for each in tasks:
        if each is not None:
            each.cancel()
    ended = asyncio.gather(*filter(None, tasks), return_exceptions=True)
    cancelled = False
    while not ended.done():
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError


async def _close(call: Any) -> None:
    """Half-close the stream. If the call ends at this moment, its answer has the reason, and grpc.aio's own error is
    ignored."""
    with suppress(grpc.aio.InternalError):
        await call.done_writing()


async def brought(  # noqa: PLR0917
    context: Context,
    layout: pb.KvLayout,
    frames: Frames,
    create: forward_pb2.CreateOptions,
    request_id: str,
    deadline: Deadline,
) -> HandleRef:
    """Import ``frames`` and return the new sequence's handle. A stream that breaks on either side is continued, a few
    times without progress, and any number of times with progress."""
    header = pb.ImportKvHeader(layout=layout, create=create, request_id=request_id)
    backoff, reached, failures = Backoff(deadline, 0.05, LONGEST_PAUSE_S), 0, 0
    while True:
        try:
            answer = await imported(context, header, None, deadline)
            if answer.next_token > reached:
                reached, failures = answer.next_token, 0
            if not answer.HasField("handle"):
                answer = await imported(context, header, frames(answer.next_token), deadline)
            if answer.HasField("handle"):
                return handle_from_proto(answer.handle)
            raise KvCorrupt("the frames ended too early", metadata={"next_token": answer.next_token})
        except ExecutorError as error:
            failures += 1
            again = fate_unknown(error) or isinstance(error, KvCorrupt | SequenceBusy | QueueFull)
            if isinstance(error, KvCorrupt) and error.not_finite:  # a retry would fail in the same way
                again = False
            if not again or failures > ATTEMPTS or not await backoff.wait():
                raise


async def abandoned(context: Context, request_id: str, deadline: Deadline) -> list[HandleRef]:
    """Abandon an import. Returns the handle of the new sequence if it was complete already."""
    header, backoff = pb.ImportKvHeader(request_id=request_id, abandon=True), Backoff(deadline, 0.05, LONGEST_PAUSE_S)
    while True:
        try:
            answer = await imported(context, header, None, deadline)
        except ExecutorError as error:
            again = fate_unknown(error) or isinstance(error, SequenceBusy | QueueFull)
            if not again or not await backoff.wait():
                raise
        else:
            return [handle_from_proto(answer.handle)] if answer.HasField("handle") else []


async def chunk_tokens(context: Context, layout: pb.KvLayout, deadline: Deadline) -> int:
    """The tokens of a chunk that fits the executor's messages."""
    info = await context.info(deadline)
    of_a_token = widest_bytes(layout) or info.model.kv_bytes_per_token // max(1, layout.layers)
    return max(1, (info.limits.max_request_bytes - _OVERHEAD) // max(1, of_a_token))


# --- files ------------------------------------------------------------------------------------------------------------


async def write_file(path: Path, frames: AsyncGenerator[bytes, None]) -> None:
    """Write all frames of an export to a file that only this user can read. Raises `InvalidRequest` if it cannot be
    written; then, and if the frames end early, there is no file."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(FILE_MAGIC)
            written = FrameFile(file)
            async with aclosing(frames):
                async for frame in frames:
                    await asyncio.to_thread(written.append, (frame,))
            await asyncio.to_thread(os.fsync, file.fileno())
        part.replace(path)
    except OSError as error:
        raise InvalidRequest(f"cannot write {path}: {error.strerror or error}", field="path") from None
    finally:
        part.unlink(missing_ok=True)


def read_layout(path: Path) -> pb.KvLayout:
    """The layout of a file, after checking all of it. Raises `KvCorrupt`, and `InvalidRequest` for any other kind of
    file."""
    digest, layout, whole = sha256(), None, False
    for frame in _read(path):
        kind = frame.WhichOneof("frame")
        if whole or (kind == "layout") != (layout is None):
            raise _corrupt(path)
        if kind == "layout":
            layout = frame.layout
        elif kind == "chunk":
            _digest(digest, frame.chunk)
        else:
            whole = frame.trailer.sha256 == digest.digest()
            if not whole:
                raise _corrupt(path)
    if layout is None or not whole:
        raise _corrupt(path)
    return layout


async def file_frames(path: Path, first: int) -> AsyncGenerator[bytes, None]:
    """The chunks of a file with tokens from ``first`` on, and their trailer."""
    digest, frames, of_tokens = sha256(), _read(path), set[str]()
    while (frame := await asyncio.to_thread(next, frames, None)) is not None:
        kind, chunk = frame.WhichOneof("frame"), frame.chunk
        if kind == "layout":
            of_tokens = {each.name for each in frame.layout.tensors if each.layers}
        if kind == "chunk" and _goes_beyond(chunk, first, of_tokens):
            _digest(digest, chunk)
            yield frame.SerializeToString()
    yield pb.ExportKvResponse(trailer=pb.KvTrailer(sha256=digest.digest())).SerializeToString()


def _read(path: Path) -> Iterator[pb.ExportKvResponse]:
    try:
        with path.open("rb") as file:
            if file.read(len(FILE_MAGIC)) != FILE_MAGIC:
                raise InvalidRequest(f"{path} is not an exported sequence of a known version", field="path")
            frames = FrameFile(file)
            try:
                while found := frames.next(1):
                    yield from map(pb.ExportKvResponse.FromString, found)
            except (DecodeError, KvCorrupt):
                raise _corrupt(path) from None
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror or error}", field="path") from None


def _goes_beyond(chunk: pb.KvChunk, first: int, of_tokens: Set[str]) -> bool:
    """Whether a chunk has tokens from ``first`` on, or none: then it has rows of states. ``of_tokens``: the tensors
    that have a row for each token, if the layout lists tensors."""
    if not chunk.parts:
        return chunk.first_token + chunk.keys.shape[0] > first
    [part, *_] = chunk.parts
    return part.tensor not in of_tokens or chunk.first_token + part.data.shape[0] > first


def _digest(digest: Any, chunk: pb.KvChunk) -> None:
    named = [each.data for each in chunk.parts]
    for part in named or (chunk.keys, chunk.values, chunk.key_scales, chunk.value_scales):
        digest.update(part.data)


def _corrupt(path: Path) -> KvCorrupt:
    return KvCorrupt(f"{path} is not what was written", field="path")
