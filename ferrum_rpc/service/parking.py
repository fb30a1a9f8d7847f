"""Parking: a sequence's cache goes to a file, as an export would, and comes back from it, as an import would.

Its record stays. Until the file is whole the sequence is in the engine; from then on it is in the file, until all of it
is in the engine again. A call that claims a parked sequence is submitted when it is back (`service.waits`): the
number that it will have in the engine is known from the moment at which it is parked.

Sequences that were not used for long are parked without being claimed: a call that claims one meanwhile ends that.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import structlog
from google.protobuf.message import DecodeError
from grpc.aio import EOF

from ferrum_rpc.core import Caller, HandleRef, StateRows
from ferrum_rpc.engine.api import Operation
from ferrum_rpc.engine.commands import Command, Operations, Result
from ferrum_rpc.errors import (
    Cancelled,
    ExecutorError,
    InternalError,
    InvalidRequest,
    KvBlocksExhausted,
    KvCorrupt,
    NotSupported,
    QuotaExceeded,
    StepFailed,
)
from ferrum_rpc.executor.v1 import kv_transfer_pb2 as pb
from ferrum_rpc.private_files import NotPrivateError
from ferrum_rpc.service.kv_stream import READ_BYTES, KvReceiver, KvStream, layout_of
from ferrum_rpc.service.meters import Direction
from ferrum_rpc.service.records import Parked, SequenceEnd, SequenceRecord
from ferrum_rpc.service.state import ServerState
from ferrum_rpc.service.supervisor import BackgroundTask
from ferrum_rpc.service.transaction import FAILED
from ferrum_rpc.wire.kv_stream import CacheLayout

log = structlog.get_logger("ferrum_rpc.parking")

CHUNK_OVERHEAD: Final = 512
"""Maximum bytes of a chunk in a file in addition to its tensors; a token's id in the layout takes at most 5."""

LOST: Final = {errno.ENOENT: "is gone", errno.EIO: "can be read no more"}
"""Errors of a file after which its sequence has ended; after others it stays parked."""

IDLE_TURN_S: Final = 1.0
SHORT_PART: Final = 0.05
"""Blocks are short where a smaller part of them is free."""


async def park(state: ServerState, handle: HandleRef, caller: Caller) -> tuple[HandleRef, int]:
    """Park a caller's sequence; a cancelled caller's stays as it is. Returns its handle and how many blocks are free
    now. Raises what a claim is refused with, `InvalidRequest` (it is empty), `SequencesExhausted` and `QuotaExceeded`
    (no room for its file), `StepFailed`, and `NotSupported`."""
    if not state.parked.offered:
        raise NotSupported(
            "ParkKv is not offered (capability PARK): the executor has no --kv-park-dir",
            metadata={"capability": "PARK", "method": "ParkKv"},
        )
    _ = layout_of(state)  # raises before anything is claimed
    record = state.handles.claim(handle, caller.name)
    if record.parked:
        record.busy = False
        return record.handle, 0
    job = Park(state, layout_of(state, record.adapter), record, claimed=True)
    task = state.parked.start(job.run())
    try:
        outcome = await asyncio.shield(task)
    except asyncio.CancelledError:
        job.end(Cancelled("the call was cancelled before the sequence was parked; nothing happened"))
        raise
    if isinstance(outcome, ExecutorError):
        raise outcome
    return record.handle, outcome


async def unpark(state: ServerState, record: SequenceRecord) -> ExecutorError | None:
    """Bring back a parked sequence that is claimed. Returns None when it is there, or the refusal: it is as it was
    then, but after a `KvCorrupt`, which ends it when its call does."""
    try:
        job = Unpark(state, layout_of(state, record.adapter), record)
    except ExecutorError as error:  # the executor has ended
        return error
    return await job.run()


class Park(KvStream):
    """One sequence on its way to its file. Where it is not ``claimed``, a call that claims it ends this."""

    direction: ClassVar[Direction] = Direction.PARK
    foreign: ClassVar[bool] = False

    def __init__(self, state: ServerState, layout: CacheLayout, record: SequenceRecord, *, claimed: bool) -> None:
        super().__init__(state, layout)
        self.record = record
        self._claimed, self._used = claimed, record.used
        if claimed:
            record.cut = self.end

    def end(self, error: ExecutorError) -> None:
        """Stop at the next piece."""
        self.ended = self.ended or error

    async def run(self) -> int | ExecutorError:
        """Park it. Returns how many blocks are free now, or why it is as it was."""
        state, record = self._state, self.record
        try:
            async with state.parked.slot(record.account):
                with self.metered():
                    return await self._park()
        except ExecutorError as error:
            return error
        except Exception as error:
            state.supervisor.note(BackgroundTask.PARK, error)
            return InternalError(FAILED)
        finally:
            if self._claimed:
                record.busy, record.cut = False, None
                if record.pending_end is not None:
                    state.supervisor.attempt(state.release, [record], record.pending_end)

    async def _park(self) -> int:
        state, record = self._state, self.record
        self._check()
        if record.length < 1:
            raise InvalidRequest("the sequence is empty; there is nothing to park", field="handle")
        parked, max_size = await self._store()
        state.parked.keep(record, parked, max_size)
        state.quotas.settle(record)
        if record.held_to <= record.length:
            record.held_to = 0  # used up
        state.counters.sequences_parked += 1
        number, record.sequence = record.sequence, state.handles.number()
        freed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        state.free([number], freed.set_result)
        result = await freed
        if isinstance(result, ExecutorError):
            raise result
        return int(result)

    async def _store(self) -> tuple[Parked, int]:
        """Make its file. Returns that, and how many bytes it was allowed."""
        state, layout, account, length = self._state, self._layout, self.record.account, self.record.length
        files, size, held = state.parked, self._tokens_of_a_chunk(), state.handles.number()
        try:
            if layout.states is not None:
                await self._ask(Command(Operations.hold_states, self.record.sequence, held))
            rows = await self._rows(held, size)
            chunks = layout.layers * -(-length // size) + len(rows)
            max_size = layout.token_bytes * length + CHUNK_OVERHEAD * (chunks + 2) + 5 * length
            max_size += sum([layout.row_bytes(each) for each in rows])
            path = files.allocate(account, max_size)
            try:
                parked = await self._write(path, size, held, rows)
                self._check()
            except BaseException:
                files.free(account, max_size)
                files.delete(path)
                raise
        finally:
            if layout.states is not None:
                state.engine.submit(Operation(Command(Operations.close_states, held), lambda _: None))
        return parked, max_size

    async def _write(self, path: Path, size: int, held: int, rows: Sequence[StateRows]) -> Parked:
        """Write the file: the frames of an export."""
        layout, record, block_size = self._layout, self.record, self._state.engine.cache.block_size
        tokens = await self._ask(Command(Operations.token_ids, record.sequence))
        imported_from = await self._ask(Command(Operations.imported_from, record.sequence))
        begin = await self._first_held(record.sequence, record.adapter)
        first = pb.ExportKvResponse(layout=layout.to_proto(tokens, block_size, begin)).SerializeToString()
        starts: dict[int, int] = {}
        try:
            with closing(await asyncio.to_thread(self._state.parked.create, path)) as file:
                await asyncio.to_thread(file.append, [first])
                async for start, frames in self._frames(begin, record.length, size, held, rows):
                    starts.setdefault(start, file.tell())
                    await asyncio.to_thread(file.append, frames)
                written = file.tell()
        except OSError as error:
            action = "make room on the disk of --kv-park-dir; the sequence stays in the cache"
            log.warning("parking_failed", path=str(path), error=error.strerror or str(error), action=action)
            raise StepFailed(f"the cache could not be written ({error.strerror}); nothing changed") from error
        return Parked(path, written, starts, imported_from)

    async def _ask(self, command: Command[Result], take: Callable[[Any], object] | None = None) -> Result:
        """The engine is not asked of a sequence that a call has used meanwhile: it may be free."""
        self._check()
        return await super()._ask(command, take)

    def _check(self) -> None:
        """Raise what has ended this."""
        record = self.record
        if not self._claimed and (
            record.busy or record.used != self._used or record.id not in self._state.handles.live
        ):
            self.end(Cancelled("the sequence was used"))
        if self.ended is not None:
            raise self.ended


class Unpark(KvReceiver):
    """One sequence on its way back. Its call has claimed it."""

    direction: ClassVar[Direction] = Direction.UNPARK
    foreign: ClassVar[bool] = False  # its values return to the bit, infinities too
    _begun = False

    def __init__(self, state: ServerState, layout: CacheLayout, record: SequenceRecord) -> None:
        super().__init__(state, layout)
        self.record = record

    async def run(self) -> ExecutorError | None:
        """See `unpark`."""
        state, record = self._state, self.record
        try:
            async with state.parked.slot(record.account):
                with self.metered():
                    state.quotas.charge(record, record.length, record.length)
                    await self._bring_back()
        except Exception as error:
            refusal = self._refusal(error)
            if self._begun:
                state.free([record.sequence])
                record.sequence = state.handles.number()
            state.quotas.settle(record)
            return refusal
        return None

    async def _bring_back(self) -> None:
        state, record = self._state, self.record
        parked = record.parked
        assert parked is not None  # noqa: S101 - it was claimed so
        with closing(await asyncio.to_thread(state.parked.read, parked.path)) as file:
            if not (frames := await asyncio.to_thread(file.next, 1)):
                raise KvCorrupt("the file is empty")
            layout = pb.ExportKvResponse.FromString(frames[0]).layout
            self._tokens = np.fromiter(layout.token_ids, np.int32, len(layout.token_ids))
            ahead = max(0, record.held_to - record.length)
            prefix = record.prefix and record.prefix._replace(imported_from=parked.imported_from)
            await self._fetch(prefix)
            begin = Command(Operations.begin_import, record.sequence, self._tokens, layout.first_token, ahead, prefix)
            self.next_token = await self._ask(begin)
            self._begun = True
            file.seek(parked.starts[max(each for each in parked.starts if each <= self.next_token)])
            waiting: list[bytes] = []

            async def read() -> Any:
                nonlocal waiting
                if not waiting:
                    waiting = await asyncio.to_thread(file.next, READ_BYTES)
                return pb.ExportKvResponse.FromString(waiting.pop(0)) if waiting else EOF

            if not await self.receive(read) or self.next_token < len(self._tokens):
                raise KvCorrupt("the file ends too early")
            await self._ask(Command(Operations.commit_import, record.sequence, self.moved))
        state.parked.drop(record)

    def _refusal(self, error: Exception) -> ExecutorError:
        """What the call is answered with. A file that is not what was written ends the sequence."""
        state, record = self._state, self.record
        about = {"sequence": record.label, "path": "" if record.parked is None else str(record.parked.path)}
        why = ""
        if isinstance(error, NotPrivateError):
            why = "is not what was written"
        elif isinstance(error, OSError):
            why = LOST.get(error.errno or 0, "")
            if not why:
                action = "see why; the sequence stays parked"
                log.error("parked_sequence_read_failed", **about, error=error.strerror or str(error), action=action)
                return StepFailed("the parked cache could not be read; the sequence stays parked")
        elif isinstance(error, KvCorrupt | InvalidRequest | DecodeError | ValueError):
            why = "is not what was written"
        if why:
            action = "look at the disk of --kv-park-dir, and whether anything else writes there"
            what = (error.strerror if isinstance(error, OSError) else None) or str(error)
            log.error("parked_sequence_lost", **about, reason=f"the file {why}", error=what, action=action)
            record.pending_end = record.pending_end or SequenceEnd.LOST
            return KvCorrupt(f"what was parked of this sequence {why}; it has ended, prefill it again")
        if isinstance(error, ExecutorError):
            state.counters.kv_exhausted += isinstance(error, KvBlocksExhausted)
            return error
        state.supervisor.note(BackgroundTask.PARK, error)
        return InternalError(FAILED)


NOT_THIS_ONE: Final = Cancelled, QuotaExceeded, KvBlocksExhausted
"""It was used, its caller has no room, or no block is free to feed again what it lacks. Others may be parked."""


class IdleParking:
    """Parks sequences that were not used for ``kv_park_idle_s``, the least recently used first, where blocks are short.
    `turn` is called every `IDLE_TURN_S` seconds."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._exhausted = 0
        self._task: asyncio.Task[None] | None = None

    def turn(self) -> None:
        """Look whether blocks are short: a call was refused for want of them since the last turn, or few are free."""
        state, exhausted = self._state, self._state.counters.kv_exhausted
        pressure = state.pressure()
        short = exhausted > self._exhausted or pressure.free_blocks < SHORT_PART * pressure.total_blocks
        self._exhausted = exhausted
        if short and (self._task is None or self._task.done()):
            self._task = state.parked.start(self._park_some(max(1, round(SHORT_PART * pressure.total_blocks))))

    async def _park_some(self, blocks: int) -> None:
        """Park until so many blocks are free, or no more sequences are idle."""
        state = self._state
        try:
            _ = layout_of(state)
        except NotSupported:  # ParkKv says why
            return
        before = time.monotonic() - state.limits.kv_park_idle_s
        idle = [each for each in state.handles.records() if self._is_idle(each, before)]
        idle.sort(key=lambda each: each.used)
        parked = 0
        for record in idle:
            if not self._is_idle(record, before) or record.id not in state.handles.live:
                continue
            outcome = await Park(state, layout_of(state, record.adapter), record, claimed=False).run()
            if isinstance(outcome, int):
                parked += 1
                blocks -= outcome
            elif not isinstance(outcome, NOT_THIS_ONE):
                log.warning("idle_sequences_not_parked", error=str(outcome), action="allow more --kv-park-bytes")
                break
            if blocks <= 0:
                break
        if parked:
            log.info("idle_sequences_parked", sequences=parked, action="nothing: their next calls bring them back")

    @staticmethod
    def _is_idle(record: SequenceRecord, before: float) -> bool:
        return record.used <= before and not record.busy and record.parked is None and record.length > 0
