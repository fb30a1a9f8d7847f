"""Exporting and importing sequences: streams of chunks, each read or written by the engine between two steps.

An export reads a copy of the sequence that it makes at once, as a fork does: integers only, and copy-on-write keeps the
blocks as they are. An import is a sequence that nothing names until all of it has come: its blocks are taken first, and
the last operation makes it one like others. What a broken stream brought stays, under the lease or for the idle time,
and the next stream with the same request id goes on behind it.

Both are busy sequences in ``ServerState.unnamed``; ``cut`` ends them, whatever the reason.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Final

from ferrum_rpc.core import Caller, CreateOptions, HandleRef, TokenArray
from ferrum_rpc.engine.commands import Command, Operations
from ferrum_rpc.errors import (
    Cancelled,
    Draining,
    ExecutorError,
    InternalError,
    InvalidRequest,
    KvCorrupt,
    NotSupported,
    SequenceBusy,
    StepFailed,
)
from ferrum_rpc.executor.v1 import kv_transfer_pb2 as pb
from ferrum_rpc.service.admission import check_length, prefix_use
from ferrum_rpc.service.handles import gone
from ferrum_rpc.service.kv_ops import Handles, KvOperation, OperationCall
from ferrum_rpc.service.kv_stream import KvReceiver, KvStream, layout_of
from ferrum_rpc.service.meters import Direction
from ferrum_rpc.service.nixl import StagedChunks, offered
from ferrum_rpc.service.records import Account, Adapter, SequenceRecord
from ferrum_rpc.service.replay import Entry
from ferrum_rpc.service.state import RETRY_ELSEWHERE_S, Lifecycle, ServerState
from ferrum_rpc.service.transaction import FAILED
from ferrum_rpc.wire.items import handle_from_proto
from ferrum_rpc.wire.kv_stream import CacheLayout

NOTHING_KEPT: Final = "its stream was refused or broke, and nothing of it was kept"


class Export(KvStream):
    """One export: the copy that it reads, until it is closed."""

    direction: ClassVar[Direction] = Direction.EXPORT
    _closed = False
    _staging: StagedChunks | None = None
    _adapter: Adapter | None = None

    def __init__(self, state: ServerState, account: Account, layout: CacheLayout) -> None:
        super().__init__(state, layout)
        self.record = record = state.handles.mint(account)
        record.busy, record.origin, record.cut = True, self, self._cut

    async def frames(self, request: pb.ExportKvRequest) -> AsyncGenerator[Any, None]:
        """The frames of the stream."""
        state = self._state
        handle, first = handle_from_proto(request.handle), request.first_token
        size = self._tokens_of_a_chunk(request.chunk_tokens)
        if request.transport:
            if self._layout.by_name:
                raise NotSupported("a cache that is not K and V alike in all layers is moved in the stream only")
            self._staging = StagedChunks(offered(state.nixl, request.transport), size * self._layout.widest_bytes)
        await OperationCall(state, handle, self.record.account.caller, self._copy)
        length = handle.seq_len
        if first > length:
            raise InvalidRequest(
                f"first_token is {first}, and the sequence has {length} tokens",
                field="first_token",
                metadata={"seq_len": length},
            )
        tokens = await self._ask(Command(Operations.token_ids, self.record.sequence))
        rows = await self._rows(self.record.sequence, size)
        held = await self._first_held(self.record.sequence, self._adapter)
        yield pb.ExportKvResponse(layout=self._layout.to_proto(tokens, state.engine.cache.block_size, held))
        if request.layout_only:
            return
        if self._staging is not None:
            yield pb.ExportKvResponse(source=self._staging.source)
        async for _, frames in self._frames(max(first, held), length, size, self.record.sequence, rows, self._staging):
            for frame in frames:
                yield frame
        state.counters.sequences_exported += first < length

    def close(self) -> None:
        """The stream is over: free the copy."""
        self._closed = True
        if self._staging is not None:
            self._staging.close(self.ended)
        if self.record in self._state.unnamed:
            self._state.drop(self.record)

    def _copy(self, source: SequenceRecord) -> KvOperation:
        """What makes the copy, while the source is claimed."""
        state, record = self._state, self.record
        if source.length < 1:
            raise InvalidRequest("the sequence is empty; there is nothing to export", field="handle")
        state.quotas.charge(record, source.length, source.length)
        record.touch()

        def commit() -> Handles:
            self._layout, self._adapter = layout_of(state, source.adapter), source.adapter
            state.unnamed[record] = None
            if self._closed:
                self.close()
            return (source.handle,)

        command = Command(Operations.begin_export, source.sequence, record.sequence)
        return KvOperation(command, commit, partial(state.quotas.refund, record))

    def _cut(self, error: ExecutorError) -> None:
        self.ended = self.ended or error
        self.close()


class ImportStage(enum.Enum):
    """The stages of an import. The engine's answer to a beginning or a commit changes the stage even if the stream has
    ended."""

    NEW = "it has no blocks"
    BEGINNING = "the engine allocates its blocks"
    OPEN = "its blocks take what comes"
    COMMITTING = "the engine makes it a sequence"
    OVER = "it is a sequence, or never will be"


class Import(KvReceiver):
    """One import, over all of its streams: ``next_token`` is the first that is missing. Made when its first header is
    there. ``forget`` is called when it is over. Set before it begins: ``entry``, where its answer is recorded, and
    ``sent_from``, the first token that its streams have. Raises what `ServerState.mint` does."""

    direction: ClassVar[Direction] = Direction.IMPORT
    entry: Entry
    sent_from = 0
    _stage = ImportStage.NEW
    _cached = 0  # tokens that no stream had to bring

    def __init__(  # noqa: PLR0917
        self,
        state: ServerState,
        layout: CacheLayout,
        caller: Caller,
        tokens: TokenArray,
        options: CreateOptions,
        adapter: Adapter | None,
        forget: Callable[[], object],
    ) -> None:
        super().__init__(state, layout)
        self._tokens, self._options, self._forget = tokens, options, forget
        length, ahead = len(tokens), options.reserve_tokens
        check_length(length, None, 0, state.model, ahead)
        lease = state.leases.find(options.lease_id, caller.name) if options.lease_id else None
        account = state.quotas.account(caller)
        held_to = length + ahead
        prefix = prefix_use(options.prefix, account, adapter, imported_from=None if caller.trusted else 0)
        if caller.trusted and prefix is not None:  # for everybody, so nothing of it may be what its name alone may find
            prefix = prefix._replace(caller=b"")
        [self.record] = state.mint(1, account, lease, length, None, held_to, prefix, adapter, start=length)
        self.record.cut = self._cut
        state.unnamed[self.record] = None

    @property
    def busy(self) -> bool:
        """Whether a stream is on it, or an operation that a stream has left behind."""
        return self.record.origin is not None or self._in_engine

    @property
    def _in_engine(self) -> bool:
        """Whether the engine begins or commits it now."""
        return self._stage in {ImportStage.BEGINNING, ImportStage.COMMITTING}

    async def abandon(self) -> None:
        """Give it up: its blocks are free when this returns. Raises `SequenceBusy` where the last operation is under
        way, which makes it a sequence."""
        if self._stage is ImportStage.COMMITTING:
            raise SequenceBusy("all of it has come, and it is being made a sequence")
        freed = asyncio.Event()
        self.record.on_freed.append(freed.set)
        self._cut(Cancelled("the import was given up"))
        await freed.wait()

    @contextmanager
    def stream(self) -> Iterator[None]:
        """A stream is on it. One that fails before anything of it was kept ends it, and so do values that are not
        finite. So does a failed operation where the import holds one of the few slots for states, which otherwise is
        held for a caller that may never try again."""
        self.record.origin = self
        try:
            with self.metered():
                yield
        except BaseException as error:
            if (isinstance(error, KvCorrupt) and error.not_finite) or (
                isinstance(error, StepFailed) and self._layout.states is not None
            ):
                self._cut(error)
            elif not self._in_engine and self.next_token == self._cached:
                self._cut(Cancelled(NOTHING_KEPT))
            raise
        finally:
            self.record.origin = None
            if self._stage is not ImportStage.OVER:
                self.record.touch()
                if self._state.lifecycle is Lifecycle.DRAINING:
                    self._cut(Draining("the executor takes no new sequences", retry_after_s=RETRY_ELSEWHERE_S))

    async def begin(self) -> None:
        """Take its blocks, unless it has them. Raises `KvBlocksExhausted`, and is over then."""
        if self._stage is ImportStage.NEW:
            await self._fetch(self.record.prefix)
            whole = self.record.sequence, self._tokens, self.sent_from
            command = Command(Operations.begin_import, *whole, self._options.reserve_tokens, self.record.prefix)
            await self._change(ImportStage.BEGINNING, command, self._on_begun)

    async def commit(self) -> HandleRef:
        """Make it a sequence, which returns its handle: a stream was received to its end. Raises `InvalidRequest` where
        tokens are missing."""
        if self.next_token < len(self._tokens):
            raise InvalidRequest(
                f"{self.next_token} tokens of {len(self._tokens)} have come",
                field="trailer",
                metadata={"next_token": self.next_token},
            )
        command = Command(Operations.commit_import, self.record.sequence, self.moved)
        await self._change(ImportStage.COMMITTING, command, self._on_committed)
        self._state.failpoints.reach("before_reply")
        return self.record.handle

    async def _change(self, stage: ImportStage, command: Command[Any], take: Callable[[Any], object]) -> None:
        if self.ended is not None:
            raise self.ended
        self._stage = stage
        await self._ask(command, take)

    def _on_begun(self, result: Any) -> None:
        if isinstance(result, ExecutorError):
            self._end(result)
            return
        self._stage, self.next_token, self._cached = ImportStage.OPEN, result, result
        if self.record.origin is None:
            self.ended = self.ended or Cancelled(NOTHING_KEPT)
        if self.ended is not None:
            self._end(self.ended)

    def _on_committed(self, result: Any) -> None:
        state, record = self._state, self.record
        if isinstance(result, ExecutorError):
            self._stage = ImportStage.OPEN
            if record.pending_end is not None:
                self._cut(gone(record.pending_end))
            return
        self._stage = ImportStage.OVER
        self._forget()
        state.counters.sequences_imported += 1
        state.unnamed.pop(record, None)
        record.cut, record.length, record.reached, record.version = None, result, result, 1
        if record.held_to == result:
            record.held_to = 0
        try:
            state.publish(record)
            state.quotas.settle(record)
            if record.pending_end is not None:
                state.release([record], record.pending_end)
            state.replay.finish(self.entry, (record.handle,))
        except Exception:  # its handle cannot be answered
            state.supervisor.attempt(state.abandon, [record])
            state.supervisor.attempt(state.replay.finish, self.entry, InternalError(FAILED))
            raise

    def _cut(self, error: ExecutorError) -> None:
        if self._stage is ImportStage.COMMITTING:  # a lease or a reset that ends it ends the sequence then
            return
        self.ended = self.ended or error
        if self._stage is not ImportStage.BEGINNING:
            self._end(error)

    def _end(self, error: ExecutorError) -> None:
        """It never comes to be: all that it took is free again."""
        if self._stage is ImportStage.OVER:
            return
        has_blocks = self._stage is ImportStage.OPEN
        self._stage, self.ended = ImportStage.OVER, self.ended or error
        self._forget()
        self._state.replay.finish(self.entry, error)
        if has_blocks:
            self._state.drop(self.record)
        else:
            self._state.unnamed.pop(self.record, None)
            self._state.discard(self.record)
