"""The stream of a sequence's cache: frames of chunks, each read or written by the engine between two steps.

Exports and `parking.Park` send one, imports and `parking.Unpark` receive one (`KvReceiver`). Its frames are those of
`wire.kv_stream`; the data of chunks are in them, or travel by NIXL (`nixl`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from hashlib import sha256
from typing import Any, ClassVar, Final

import grpc

from ferrum_rpc.core import MovedStates, PrefixUse, StateRows, TokenArray
from ferrum_rpc.engine.api import Operation
from ferrum_rpc.engine.commands import Command, Operations, Result
from ferrum_rpc.errors import Cancelled, ExecutorError, InternalError, InvalidRequest, KvCorrupt
from ferrum_rpc.executor.v1 import kv_transfer_pb2 as pb
from ferrum_rpc.service.meters import Direction
from ferrum_rpc.service.nixl import ChunkReader, StagedChunks
from ferrum_rpc.service.records import Adapter, SequenceRecord
from ferrum_rpc.service.state import ServerState
from ferrum_rpc.service.supervisor import BackgroundTask
from ferrum_rpc.service.tier import fetch_prefix
from ferrum_rpc.service.transaction import FAILED
from ferrum_rpc.wire.kv_stream import (
    CacheLayout,
    chunk_from_proto,
    chunk_to_proto,
    remote_chunk_to_proto,
    rows_to_proto,
)
from ferrum_rpc.wire.state_stream import StateReceiver, rows_of
from ferrum_rpc.wire.tensor import is_finite

CHUNK_BYTES: Final = 512 << 10
"""Of the tensors of a chunk: a message of the default limit has room for one."""

READ_BYTES: Final = 2 << 20
"""What one operation reads of a cache, or writes of its states, about: a step waits for it."""

INLINE_BYTES: Final = 64 << 10
"""Checksums of more are computed in a thread."""


def layout_of(state: ServerState, adapter: Adapter | None = None) -> CacheLayout:
    """That of the caches of sequences with an adapter, or without. Raises `NotSupported`."""
    if adapter is None:
        return CacheLayout.of(state.model)
    return CacheLayout.of(state.model, adapter.name, adapter.fingerprint)


class KvStream:
    """The cache of ``record`` on its way. ``ended``: what ended it too early. ``direction``: what it is counted as.
    ``foreign``: it goes to or comes from somewhere else, so the sequence counts as used meanwhile, chunks have
    checksums, the trailer has the digest of all of them, and what comes must be finite."""

    foreign: ClassVar[bool] = True
    direction: ClassVar[Direction]
    record: SequenceRecord
    ended: ExecutorError | None = None

    def __init__(self, state: ServerState, layout: CacheLayout) -> None:
        self._state = state
        self._layout = layout
        self._meter = state.transfers[self.direction]
        self._bytes = 0

    def metered(self) -> AbstractContextManager[None]:
        """It is under way, or one of its streams is. Ending it is no failure where its caller does."""
        return self._meter.transfer(lambda: self._bytes, Cancelled)

    def _moved(self, size: int) -> None:
        self._bytes += size
        self._meter.bytes += size

    async def _ask(self, command: Command[Result], take: Callable[[Any], object] | None = None) -> Result:
        """Have the engine do it. ``take`` is called with the answer, also where nothing waits for it any more. Raises
        what the engine refuses, and what has ended the transfer."""
        if self.ended is not None:
            raise self.ended
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def done(result: object) -> None:
            try:
                if take is not None:
                    take(result)
            except Exception as error:
                self._state.supervisor.note(BackgroundTask.CALLBACK, error)
                result = InternalError(FAILED)
            if not answered.done():
                answered.set_result(result)

        self._state.engine.submit(Operation(command, done))
        result: Result = await answered
        if self.ended is not None:
            raise self.ended
        if isinstance(result, ExecutorError):
            raise result
        self._touch()
        return result

    def _touch(self) -> None:
        if self.foreign:
            self.record.touch()

    async def _first_held(self, sequence: int, adapter: Adapter | None) -> int:
        """The first token whose cache can be read. What the sequence lacks of it is fed again first, a piece at a
        time."""
        if self._layout.states is not None or self._state.device.free_truncation_tokens is None:
            return 0
        number = 0 if adapter is None else adapter.number
        while await self._ask(Command(Operations.feed_again, sequence, number)):
            pass
        return await self._ask(Command(Operations.held_from, sequence))

    async def _rows(self, held: int, size: int) -> list[StateRows]:
        """What moves of the states that are held under this number, besides the chunks of ``size`` tokens."""
        if self._layout.states is None:
            return []
        moved = await self._ask(Command(Operations.state_lengths, held))
        return [*rows_of(self._layout.states, moved, size * self._layout.widest_bytes)]

    async def _frames(  # noqa: PLR0917
        self,
        first: int,
        length: int,
        size: int,
        held: int,
        rows: Sequence[StateRows],
        staging: StagedChunks | None = None,
    ) -> AsyncIterator[tuple[int, list[bytes]]]:
        """The chunks of the tokens ``first .. length``, of ``size`` tokens each, those ``rows`` of the states that are
        ``held``, and the trailer: as many frames at a time as are read by one operation, with the first token of those
        chunks. With ``staging`` one at a time: their data wait there, and the trailer until all of it has been read."""
        layout, number, digest = self._layout, self.record.sequence, sha256() if self.foreign else None
        for start in range(first, length, size):
            end = min(start + size, length)
            step = max(1, READ_BYTES // (layout.widest_bytes * (end - start)))
            for layer in range(0, layout.layers, step):
                layers = range(layer, min(layer + step, layout.layers))
                pieces = await self._ask(Command(Operations.read_kv, number, start, end, layers))
                self._moved(found := sum([layout.chunk_bytes(each, end - start) for each in layers]))
                if staging is None:
                    yield start, await _off_loop(found, _chunks, layout, digest, layers, start, end, pieces)
                    continue
                for each, parts in zip(layers, pieces, strict=True):
                    crc32c = await _off_loop(found, _summed, digest, parts)
                    remote = await staging.put(parts)
                    yield start, [remote_chunk_to_proto(layout, each, start, end - start, remote, crc32c)]
        for group in _grouped(layout, rows):
            read = await self._ask(Command(Operations.read_states, held, group))
            self._moved(found := sum(map(len, read)))
            yield length, await _off_loop(found, _of_rows, layout, digest, group, read)
        if staging is not None:
            await staging.emptied()
        trailer = pb.KvTrailer(sha256=b"" if digest is None else digest.digest())
        yield length, [pb.ExportKvResponse(trailer=trailer).SerializeToString()]

    def _tokens_of_a_chunk(self, wanted: int = 0) -> int:
        """How many: as ``wanted``, but of no more bytes than go into a message."""
        block_size = self._state.engine.cache.block_size
        limit = max(1, CHUNK_BYTES // self._layout.widest_bytes)
        if limit > block_size:
            limit -= limit % block_size
        return min(wanted, limit) if wanted else limit


class KvReceiver(KvStream):
    """A sequence that is built of chunks. ``next_token`` is the first that is missing; ``moved``: its states, once the
    trailer has come."""

    next_token = 0
    moved = MovedStates()
    _tokens: TokenArray

    async def _fetch(self, prefix: PrefixUse | None) -> None:
        """Have what the second tier has of it in the prefix cache. Raises what has ended the stream."""
        state, record = self._state, self.record
        if prefix is not None and state.engine.cache.tier_bytes:
            await fetch_prefix(state, record.account, self._goes_on, record.sequence, 0, self._tokens, prefix)
            if self.ended is not None:
                raise self.ended

    def _goes_on(self) -> bool:
        self._touch()
        return self.ended is None

    async def receive(self, read: Callable[[], Awaitable[Any]], reader: ChunkReader | None = None) -> bool:
        """Take the frames behind the header; ``reader`` reads what they do not bring themselves. True: the trailer came
        and is right, so the stream can be committed. Raises `InvalidRequest`, `KvCorrupt` and `NotSupported`."""
        digest, before = sha256() if self.foreign else None, self.next_token
        group: tuple[int, int] | None = None  # the tokens of the chunks that come, layer by layer
        layer, rows = 0, list[tuple[StateRows, bytes]]()  # those that are not written yet
        states = None if self._layout.states is None else StateReceiver(self._layout.states, len(self._tokens))
        while (frame := await read()) is not grpc.aio.EOF:
            kind = frame.WhichOneof("frame")
            if kind == "trailer":
                if digest is not None and frame.trailer.sha256 != digest.digest():
                    self.next_token = before
                    raise KvCorrupt(
                        "the digest of the stream is not that of its chunks; nothing of it was kept",
                        metadata={"next_token": before},
                        field="trailer.sha256",
                    )
                if states is not None:
                    self.moved = states.end()
                    await self._write_rows(states.moved, rows)
                return True
            if kind == "source" and reader is not None and group is None:
                reader.connect(frame.source)
                continue
            if kind != "chunk":
                raise InvalidRequest("only chunks and the trailer may follow the header", field="frame")
            if states is not None and self._has_rows(frame.chunk):
                if layer or self.next_token < len(self._tokens):
                    name = frame.chunk.parts[0].tensor[:64]
                    message = f"a chunk of {name!r}, which is no tensor of tokens, must come behind all tokens"
                    raise InvalidRequest(message, field="chunk", metadata={"next_token": self.next_token})
                await self._receive_rows(frame.chunk, states, digest, rows)
                continue
            group = await self._receive_chunk(frame.chunk, layer, group, digest, reader)
            layer += 1
            if layer == self._layout.layers:
                layer, self.next_token = 0, max(self.next_token, group[1])
        if self.ended is not None:
            raise self.ended
        return False

    async def _receive_chunk(
        self, chunk: pb.KvChunk, layer: int, group: tuple[int, int] | None, digest: Any, reader: ChunkReader | None
    ) -> tuple[int, int]:
        """Check a chunk and write it. Returns its tokens, which have to be those of ``layer`` 0 of its ``group``."""
        if chunk.layer != layer:  # its tensors depend on it
            raise self._disordered()
        tokens, parts = chunk_from_proto(self._layout, layer, chunk)
        start, end = chunk.first_token, chunk.first_token + tokens
        follows = start <= self.next_token if group is None else start == group[1]
        if not (follows if layer == 0 else (start, end) == group):
            raise self._disordered()
        if end > len(self._tokens):
            raise InvalidRequest(f"the sequence has {len(self._tokens)} tokens, not {end}", field="chunk")
        if chunk.HasField("remote"):
            parts = await self._read(reader, chunk.remote, layer, tokens)
        self._moved(sum(map(len, parts)))
        if digest is not None:
            where = f"layer {layer} of the tokens from {start} on"
            kinds = [(name, dtype) for name, dtype, *_ in self._layout.parts(layer, 1)]
            await self._check(digest, kinds, parts, chunk, where, {"layer": layer, "first_token": start})
        await self._write(layer, start, end, parts)
        return start, end

    def _disordered(self) -> InvalidRequest:
        return InvalidRequest(
            "chunks must come in the order of tokens without gaps, and for the same tokens in the order of layers",
            field="chunk",
            metadata={"next_token": self.next_token},
        )

    def _has_rows(self, chunk: pb.KvChunk) -> bool:
        """Whether a chunk is not one of tokens."""
        return bool(chunk.parts) and chunk.parts[0].tensor not in self._layout.token_tensors

    async def _receive_rows(
        self, chunk: pb.KvChunk, states: StateReceiver, digest: Any, waiting: list[tuple[StateRows, bytes]]
    ) -> None:
        """Check rows of a tensor of the sequence, and write them with those ``waiting`` once they are many."""
        try:
            rows, tensor, data = states.take(chunk)
        except InvalidRequest:
            if digest is not None:  # damaged on its way, it is not its caller's fault
                found = _summed(sha256(), [part.data.data for part in chunk.parts])
                self._compare(found, chunk, f"rows from {chunk.first_row} on", {})
            raise
        self._moved(len(data))
        if digest is not None:
            where, kinds = f"rows from {chunk.first_row} on", [(tensor.name, tensor.dtype)]
            await self._check(digest, kinds, (data,), chunk, where, {"tensor": tensor.name})
        if rows.tensor != "lengths":
            waiting.append((rows, data))
        self._touch()
        if sum(len(each) for _, each in waiting) >= READ_BYTES:
            await self._write_rows(states.moved, waiting)

    async def _write_rows(self, moved: MovedStates, waiting: list[tuple[StateRows, bytes]]) -> None:
        """Write rows of images of these lengths."""
        if waiting:
            await self._ask(Command(Operations.write_states, self.record.sequence, moved, [*waiting]))
            waiting.clear()

    async def _check(  # noqa: PLR0917
        self,
        digest: Any,
        kinds: Sequence[tuple[str, Any]],
        parts: Sequence[bytes],
        chunk: pb.KvChunk,
        where: str,
        about: dict[str, Any],
    ) -> None:
        """Raise `KvCorrupt` unless a chunk is what was sent, and can be used. ``kinds``: names and types of its
        ``parts``; ``about``: what metadata say of ``where`` they belong."""
        found, not_finite = await _off_loop(sum(map(len, parts)), _checked, digest, kinds, parts)
        self._compare(found, chunk, where, about)
        if not_finite:
            raise KvCorrupt(
                f"{not_finite} of {where} are not finite: sending them again does not help, prefill the sequence here; "
                "nothing of it was kept",
                metadata={"not_finite": not_finite, **about},
                field=f"chunk.{not_finite}",
            )

    def _compare(self, found: int, chunk: pb.KvChunk, where: str, about: dict[str, Any]) -> None:
        if found != chunk.crc32c:
            raise KvCorrupt(
                f"the checksum of {where} is not that of its bytes",
                metadata={"next_token": self.next_token, **about},
                field="chunk.crc32c",
            )

    async def _read(
        self, reader: ChunkReader | None, remote: pb.KvRemote, layer: int, tokens: int
    ) -> tuple[bytes, ...]:
        """The parts of a chunk that the stream does not bring."""
        if reader is None:
            raise InvalidRequest("a chunk has no data", field="chunk.remote")
        data, parts, at = await reader.read(remote, self.next_token), [], 0
        for *_, size in self._layout.parts(layer, tokens):
            parts.append(data[at : at + size])
            at += size
        return tuple(parts)

    async def _write(self, layer: int, start: int, end: int, parts: tuple[bytes, ...]) -> None:
        """Write what is missing of a chunk."""
        skipped = max(0, self.next_token - start)
        if start + skipped >= end:
            self._touch()
            return
        if skipped:
            parts = tuple([each[len(each) // (end - start) * skipped :] for each in parts])
        await self._ask(Command(Operations.write_kv, self.record.sequence, start + skipped, end, layer, parts))


async def _off_loop(size: int, compute: Callable[..., Result], *arguments: Any) -> Result:
    """What ``compute`` returns of ``size`` bytes, in a thread if they are many."""
    return await asyncio.to_thread(compute, *arguments) if size > INLINE_BYTES else compute(*arguments)


def _chunks(  # noqa: PLR0917
    layout: CacheLayout, digest: Any, layers: Sequence[int], start: int, end: int, pieces: Sequence[tuple[Any, ...]]
) -> list[bytes]:
    """The frames of what was read of the positions ``start .. end``. They go into the digest."""
    return [
        chunk_to_proto(layout, layer, start, end - start, parts, _summed(digest, parts))
        for layer, parts in zip(layers, pieces, strict=True)
    ]


def _grouped(layout: CacheLayout, rows: Iterable[StateRows]) -> Iterator[list[StateRows]]:
    """The same in lists of about `READ_BYTES`."""
    group, size = list[StateRows](), 0
    for each in rows:
        more = layout.row_bytes(each)
        if group and size + more > READ_BYTES:
            yield group
            group, size = [], 0
        group.append(each)
        size += more
    if group:
        yield group


def _of_rows(layout: CacheLayout, digest: Any, rows: Sequence[StateRows], pieces: Sequence[Any]) -> list[bytes]:
    """The frames of rows of states. They go into the digest."""
    tensors = layout.state_tensors
    return [
        rows_to_proto(tensors[each.name], each.first, data, _summed(digest, (data,)))
        for each, data in zip(rows, pieces, strict=True)
    ]


def _checked(digest: Any, kinds: Sequence[tuple[str, Any]], parts: Sequence[bytes]) -> tuple[int, str]:
    """The checksum of a chunk, whose bytes go into the digest, and which of its parts is not finite."""
    finite = zip(kinds, parts, strict=True)
    return _summed(digest, parts), next((name for (name, dtype), part in finite if not is_finite(dtype, part)), "")


def _summed(digest: Any, parts: Sequence[Any]) -> int:
    """The checksum of a chunk, whose bytes go into the digest. 0 without one."""
    if digest is None:
        return 0
    from crc32c import crc32c  # an executor that moves no caches needs none

    value = 0
    for part in parts:
        digest.update(part)
        value = crc32c(part, value)
    return value
