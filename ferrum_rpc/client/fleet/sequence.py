"""`FleetSequence`: a sequence that has one owner at a time among the executors of a fleet.

All that a `Sequence` does it does at its owner. What is added is who that is: chosen when it is first fed, another one
when the owner has drained, died or forgotten it, and then what it held is there before anything else is sent. It has no
handle in between, so nothing can be decoded at an executor that is not its owner.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as ListOf
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar, Final, Self
from weakref import WeakValueDictionary

from ferrum_rpc.client import transfer
from ferrum_rpc.client.fleet.member import Member
from ferrum_rpc.client.fleet.members import Members, fitting
from ferrum_rpc.client.info import ExecutorInfo
from ferrum_rpc.client.recovery import Result
from ferrum_rpc.client.retry import SEQUENCE_GONE, Backoff, Deadline
from ferrum_rpc.client.sequence import Sequence
from ferrum_rpc.client.state import SequenceState
from ferrum_rpc.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    DeviceLost,
    Draining,
    ExecutorError,
    InstanceMismatch,
    InvalidRequest,
    QuotaExceeded,
    SequencesExhausted,
    Starting,
    TransportError,
)
from ferrum_rpc.executor.v1.forward_pb2 import CACHE_MODE_BYPASS

MOVES_AT_ONCE: Final = 2
"""Away from one executor, which takes part in 4 transfers by default (`max_transfers`)."""

FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 1.0
"""Between attempts to move to an executor that is full, where it does not say how long to wait."""

log = logging.getLogger("ferrum_rpc.client.fleet")


class Home:
    """What the sequences of a fleet share: who is there, and whose state is whose."""

    def __init__(self, members: Members) -> None:
        self.members = members
        self.sequences: WeakValueDictionary[SequenceState, FleetSequence] = WeakValueDictionary()
        self._releasing: set[asyncio.Task[None]] = set()

    def let_go(self, member: Member, state: SequenceState) -> None:
        """Free what an executor still has of a sequence that is elsewhere now."""

        async def freed() -> None:
            with suppress(ExecutorError):  # found by the end of its lease then
                await member.connection.release([state])

        task = asyncio.create_task(freed())
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)


class FleetSequence(Sequence):
    """One sequence in the KV cache of one executor of a fleet. Made by `FleetClient.sequence`; used as a `Sequence`."""

    _rebuilds_of_a_call: ClassVar = 8
    _rebuilt_in_batches: ClassVar = True

    def __init__(self, home: Home, member: Member, state: SequenceState, *, rebuild: bool) -> None:
        super().__init__(member.connection, state, rebuild=rebuild)
        self._home = home
        self._member = member  # before it is first fed this one answers nothing but what all have in common
        self._prompted: ListOf[int] = ()
        self._chosen = False  # where it is to be fed first, until that is refused
        self._wanted: Member | None = None  # where a migration is to end
        self._becomes = 0  # how long it may be at last, where that is known
        self._had = 0  # the longest context of its owners
        self._asked: tuple[Deadline | None, set[Member]] = None, set()  # who has refused it in the call of a deadline
        home.sequences[state] = self

    @property
    def owner(self) -> Member | None:
        """The executor that has it; None: none, it is placed with the next call."""
        return None if self._unplaced or self._member.gone else self._member

    async def migrate(
        self, to: Member, *, transport: transfer.Transport = "grpc", timeout_s: float | None = None
    ) -> None:
        """Go on at another executor of the fleet, one of `Members.serving`, with the cache; nothing is computed. What
        was lost with its owner is fed there instead. Between two tokens of a stream the stream goes on there.

        After an error it is where it was, as it was. Raises `InvalidRequest` for who takes no sequences,
        `ContextLengthExceeded` where the context there is too short, and as `Sequence.move_to`, which also says what
        ``transport`` is."""
        if to not in self._home.members.serving:
            raise InvalidRequest(f"{to!r} takes no sequences of this fleet", field="to")
        if self.length > to.max_context:
            raise ContextLengthExceeded(
                f"the sequence has {self.length} tokens, and the context there is {to.max_context}",
                metadata={"max_context": to.max_context, "seq_len": self.length},
            )
        deadline = self._context.deadline(timeout_s)
        with self._claim("migrate", keeps_prompt=True):
            self._wanted, self._chosen = to, False
            try:
                await self._recovering(_nothing, deadline)
                if self._member is not to:
                    to.promise(-(-self.length // to.info.block_size))
                    await self._carry(to, transport, deadline)
            finally:
                self._wanted = None

    def _beside(self, state: SequenceState) -> Self:
        return type(self)(self._home, self._member, state, rebuild=self._rebuilds)

    async def _be_ready(self, tokens: ListOf[int], deadline: Deadline) -> ExecutorError | None:
        """Before ``tokens`` are fed by a batch: be at an owner that has all that the sequence holds. Returns why that
        cannot be."""
        with self._state.claim("forward"):
            self._prompted, self._chosen = tokens, False
            try:
                await self._recover(_nothing, deadline)
            except ExecutorError as error:
                return error
        return None

    @property
    def _ready(self) -> bool:
        """Whether `_be_ready` has nothing to do."""
        return not (self._unplaced or self._lost or self._member.gone or self._member.draining)

    # --- who the owner is -------------------------------------------------------------------------------------------

    async def _find_owner(self, deadline: Deadline, tokens: list[int] | None = None) -> None:
        if tokens is not None:
            self._prompted = tokens
        member = self._member
        if self._unplaced:
            if self._chosen and member.serving:
                return
        elif member.gone:
            if not self._rebuilds:
                raise InstanceMismatch(f"the executor at {member.target} is gone, with what it held")
            self._lose()
        elif member.hung or not member.draining or not await self._leave(deadline):
            return
        prompt = self._prompted if self._lost is None else self._lost.tokens
        if self._asked[0] is not deadline:
            self._asked = None, set()
        least = max(self._length(), len(prompt) + self._state.create.reserve_tokens)
        self._go(self._choose(await self._home.members.some(deadline, least), prompt))
        self._chosen = True

    def _choose(self, others: ListOf[Member], prompt: ListOf[int]) -> Member:
        wanted = self._wanted
        if wanted is not None and wanted in others:
            return wanted
        length, becomes = self._lengths(prompt)
        return self._home.members.choose(
            others, prompt, self._salt, length=length, becomes=becomes, refused=self._asked[1]
        )

    def _lengths(self, prompt: ListOf[int]) -> tuple[int, int]:
        """How long it is, and how long it may be at last."""
        length = self._length()
        becomes = max(self._becomes, len(prompt) + self._state.create.reserve_tokens)
        if length and not self._becomes:  # it may have become as long as it could where it was
            becomes = max(becomes, self._member.max_context)
        return length, becomes

    @property
    def _salt(self) -> bytes | None:
        """That of its prefixes; None where it uses none, or those with an adapter, whose fingerprint is not known."""
        create = self._state.create
        return None if create.adapter or create.cache_mode == CACHE_MODE_BYPASS else create.cache_salt

    def _go(self, member: Member) -> None:
        self._member.coming.discard(self)
        self._member, self._had = member, max(self._had, member.max_context)
        member.coming.add(self)
        self._be_at(member.connection)

    def _restart(self, tokens: list[int]) -> None:
        """The owner has it no more, or is to have it no longer."""
        state = self._state
        member = self._member
        if (member.draining or member.hung) and not member.gone and not self._unplaced:
            self._home.let_go(member, replace(state))
        self._connection.live.discard(state)
        state.creation = state.fork = None
        self._chosen = False
        super()._restart(tokens)

    async def _recover(
        self, send: Callable[[], Awaitable[Result]], deadline: Deadline, truncate_to: int | None = None
    ) -> Result:
        try:
            return await super()._recover(send, deadline, truncate_to)
        except BaseException as error:
            self._chosen = False
            self._leave_hung(error)
            raise

    def _leave_hung(self, error: object) -> bool:
        """Whether a call has ended by its deadline because the owner hangs, and what it held is fed elsewhere next."""
        member = self._member
        leaves = isinstance(error, DeadlineExceeded) and self._rebuilds and member.hung and not member.gone
        others = self._home.members.serving if leaves and not self._unplaced else ()
        if leaves := any(each.max_context >= self._length() for each in others):
            self._lose()
        return leaves

    async def _lost_behind(self, error: ExecutorError) -> bool:
        return self._leave_hung(error) or await super()._lost_behind(error)

    async def _info(self, deadline: Deadline) -> ExecutorInfo:
        return self._member.info

    async def _is_gone(self, error: ExecutorError) -> bool:
        member = self._member
        sent = not isinstance(error, TransportError) or error.metadata.get("grpc_code") is not None
        if isinstance(error, TransportError | DeviceLost | Starting | InstanceMismatch) and sent:
            await self._home.members.look(member)
        if isinstance(error, SEQUENCE_GONE) and not self._unplaced:
            return True
        return member.gone or isinstance(error, Draining)

    def _expect(self, tokens: int | None) -> None:
        self._becomes = 0 if tokens is None else self._length() + tokens

    async def _finds_room(self, error: ExecutorError, deadline: Deadline) -> bool:
        if isinstance(error, ContextLengthExceeded):
            return await self._more_context(deadline) is not None
        self._member.refused(error)
        self._chosen = False
        if not self._unplaced or self._wanted is not None or not (others := self._home.members.serving):
            return False
        if self._asked[0] is not deadline:
            self._asked = deadline, set()
        refused = self._asked[1]
        refused.add(self._member)
        prompt = self._prompted if self._lost is None else self._lost.tokens
        length, becomes = self._lengths(prompt)
        length = max(length, len(prompt))
        if length > max(each.max_context for each in others):
            return False
        return any(each not in refused and not each.full for each in fitting(others, length, becomes))

    async def _more_context(self, deadline: Deadline) -> ExecutorInfo | None:
        member, pause = self._member, Backoff(deadline, FIRST_PAUSE_S, LONGEST_PAUSE_S)
        if self._unplaced or not (self._rebuilds or self._state.handle):
            return None
        longer = await self._home.members.longer(member.max_context, deadline)
        if not longer and self._had > member.max_context:
            raise ContextLengthExceeded(
                f"the sequence has {self._length()} tokens, no executor that takes it a context of more than "
                f"{member.max_context}, and the one of {self._had} that it began with is gone",
                metadata={"max_context": member.max_context, "seq_len": self._length()},
            )
        if not longer:
            return None
        self._becomes, self._asked = max(self._becomes, member.max_context + 1), (None, set())
        while True:
            there = self._choose(longer, self._state.tokens or ())
            backoff = Backoff(deadline, first_s=0.005, longest_s=0.1)
            while member.leaving >= MOVES_AT_ONCE and await backoff.wait():
                pass
            refusal = None if self._state.handle is None else await self._moved(there, deadline)
            if self._state.handle is not None and refusal is None:
                return there.info
            if not isinstance(refusal, SequencesExhausted | QuotaExceeded):
                break
            others = await self._home.members.longer(member.max_context, deadline)
            if all(each.full for each in others) and not await pause.wait(refusal.retry_after_s):
                raise refusal  # it stays where it is, as it was
            longer = await self._home.members.longer(member.max_context, deadline) or longer
        if not self._rebuilds:
            return None
        self._home.let_go(member, replace(self._state))
        self._lose()
        return there.info

    async def _moved(self, there: Member, deadline: Deadline) -> ExecutorError | None:
        """Move it there; returns why it could not be moved."""
        try:
            await self._carry(there, "grpc", deadline)
        except ExecutorError as error:
            there.refused(error)
            log.info("a sequence could not be moved from %s to %s: %s", self._member.target, there.target, error)
            return error
        return None

    async def _leave(self, deadline: Deadline) -> bool:
        """The owner drains: move to another, or be fed there. False: it is served here a little longer, because others
        are being moved, no executor that holds all that it may become has a place for it, or what is in flight must end
        first."""
        member, state = self._member, self._state
        length = max(self._length(), self._becomes)
        others = [each for each in self._home.members.serving if each.max_context >= length and not each.full]
        if self._ahead is not None or self.in_doubt or not others:
            return False
        if state.handle is None or self._lost is not None:
            if self._rebuilds:
                self._lose()
            return self._rebuilds
        if member.leaving >= MOVES_AT_ONCE:
            return False
        refusal = await self._moved(self._choose(others, state.tokens or ()), deadline)
        if refusal is None or not self._rebuilds or isinstance(refusal, SequencesExhausted | QuotaExceeded):
            return False
        self._lose()
        return True

    async def _carry(self, there: Member, transport: transfer.Transport, deadline: Deadline) -> None:
        """Move the cache, and go on there. After an error it is here as it was."""
        member, state = self._member, self._state
        arrived = SequenceState(state.create, tokens=None if state.tokens is None else [])
        member.leaving += 1
        try:
            await self._move(Sequence(there.connection, arrived, rebuild=False), transport, deadline)
        except BaseException:
            self._home.let_go(there, arrived)
            raise
        finally:
            member.leaving -= 1
        self._home.let_go(member, replace(state))
        self._connection.live.discard(state)
        there.connection.live.discard(arrived)
        there.connection.live.add(state)
        state.handle, state.pieces, state.lease_id = arrived.handle, arrived.pieces, arrived.lease_id
        state.doubt = state.creation = state.fork = None
        self._go(there)


async def _nothing() -> None:
    """What is sent by a call that only has the sequence be somewhere."""
