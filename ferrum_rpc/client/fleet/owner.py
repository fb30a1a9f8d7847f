"""The executor of a fleet that has a sequence: one at a time.

The owner is chosen when the sequence is first fed. Another one is chosen if it drains, ends or loses the sequence; the
new owner first gets the tokens of the old one. The sequence has no handle in between, so nothing can be decoded at an
executor that is not its owner.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from collections.abc import Sequence as ListOf
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Final
from weakref import WeakValueDictionary

from ferrum_rpc.client import transfer
from ferrum_rpc.client.fleet.member import Member
from ferrum_rpc.client.fleet.members import Members, fitting
from ferrum_rpc.client.info import ExecutorInfo
from ferrum_rpc.client.moving import move
from ferrum_rpc.client.owner import Owner
from ferrum_rpc.client.retry import SEQUENCE_GONE, Backoff, Deadline
from ferrum_rpc.client.sender import Sender
from ferrum_rpc.client.state import SequenceState
from ferrum_rpc.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    DeviceLost,
    Draining,
    ExecutorError,
    InstanceMismatch,
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
"""Pauses between attempts to move to an executor that is full and does not say how long to wait."""

log = logging.getLogger("ferrum_rpc.client.fleet")


class FleetState:
    """The shared state of a fleet's sequences: its members, and the sender of each sequence."""

    def __init__(self, members: Members) -> None:
        self.members = members
        self.senders: WeakValueDictionary[SequenceState, Sender[FleetOwner]] = WeakValueDictionary()
        self._releasing: set[asyncio.Task[None]] = set()

    def release_at(self, member: Member, state: SequenceState) -> None:
        """Free what a member still holds of a sequence that has another owner now, in the background."""

        async def released() -> None:
            with suppress(ExecutorError):  # the end of its lease frees it then
                await member.connection.release([state])

        task = asyncio.create_task(released())
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)


class FleetOwner(Owner):
    """The ``member`` of a ``fleet`` that has a sequence, or will have it."""

    rebuilds_of_a_call = 8
    rebuilds_in_batches = True

    def __init__(self, fleet: FleetState, member: Member, state: SequenceState) -> None:
        super().__init__(member.connection, state)
        self.fleet = fleet
        self.member = member  # before the sequence is first fed it is only asked what all members have in common
        self._wanted: Member | None = None  # the target of a migration
        self._prompt: ListOf[int] = ()  # what the call feeds
        self._chosen = False  # `member` was chosen for the first call, which it has not refused
        self._final_length = 0  # that the sequence may reach; 0: unknown
        self._longest_context = 0  # of its owners so far
        self._refusals: tuple[Deadline | None, set[Member]] = None, set()  # of the call with that deadline, by whom

    def of_sibling(self, state: SequenceState) -> FleetOwner:
        return FleetOwner(self.fleet, self.member, state)

    @property
    def executor(self) -> Member | None:
        return None if self.state.unplaced or self.member.gone else self.member

    @property
    def ready(self) -> bool:
        """Whether `find` has nothing to do, and no tokens need to be fed again."""
        return not (self.state.unplaced or self.state.lost or self.member.gone or self.member.draining)

    def place_anew(self, tokens: ListOf[int]) -> None:
        """Before ``tokens`` are fed: choose again for a sequence that no executor has."""
        self._prompt, self._chosen = tokens, False

    @contextmanager
    def wanting(self, to: Member) -> Iterator[None]:
        """While this lasts, the sequence goes ``to`` this member if it is placed anew."""
        self._wanted, self._chosen = to, False
        try:
            yield
        finally:
            self._wanted = None

    async def find(self, deadline: Deadline, tokens: list[int] | None = None) -> None:
        if tokens is not None:
            self._prompt = tokens
        member = self.member
        if self.state.unplaced:
            if self._chosen and member.serving:
                return
        elif member.gone:
            if not self.state.rebuilds:
                raise InstanceMismatch(f"the executor at {member.target} is gone, with what it held")
            self.lose()
        elif member.hung or not member.draining or not await self._leave_draining(deadline):
            return
        if self._refusals[0] is not deadline:
            self._refusals = None, set()
        least = max(self.state.seen_length, len(self._next_tokens) + self.state.create.reserve_tokens)
        self._go_to(self._choose(await self.fleet.members.some(deadline, least), self._next_tokens))
        self._chosen = True

    @property
    def _next_tokens(self) -> ListOf[int]:
        """The tokens to feed next: lost ones, or else those of the call, if known."""
        return self._prompt if self.state.lost is None else self.state.lost.tokens

    def _choose(self, others: ListOf[Member], prompt: ListOf[int]) -> Member:
        wanted = self._wanted
        if wanted is not None and wanted in others:
            return wanted
        length, becomes = self._lengths(prompt)
        return self.fleet.members.choose(
            others, prompt, self._salt, length=length, becomes=becomes, refused=self._refusals[1]
        )

    def _lengths(self, prompt: ListOf[int]) -> tuple[int, int]:
        """The length of the sequence, and the one that it may reach."""
        length = self.state.seen_length
        becomes = max(self._final_length, len(prompt) + self.state.create.reserve_tokens)
        if length and not self._final_length:  # it may have filled the context of its owner
            becomes = max(becomes, self.member.max_context)
        return length, becomes

    @property
    def _salt(self) -> bytes | None:
        """The salt of its prefixes. None: it uses no prefix cache, or an adapter, whose fingerprint is not known."""
        create = self.state.create
        return None if create.adapter or create.cache_mode == CACHE_MODE_BYPASS else create.cache_salt

    def _go_to(self, member: Member) -> None:
        self.member.coming.discard(self.state)
        self.member, self._longest_context = member, max(self._longest_context, member.max_context)
        member.coming.add(self.state)
        self.connection = member.connection

    def restart(self, tokens: list[int]) -> None:
        state, member = self.state, self.member
        if (member.draining or member.hung) and not member.gone and not state.unplaced:
            self.fleet.release_at(member, replace(state))
        self.connection.live.discard(state)
        state.creation = state.fork = None
        self._chosen = False
        super().restart(tokens)

    def failed(self, error: BaseException) -> bool:
        """A call has ended with this error. Returns whether its deadline passed because the owner hangs; what the owner
        held is fed elsewhere next."""
        self._chosen = False
        member, state = self.member, self.state
        leaves = isinstance(error, DeadlineExceeded) and state.rebuilds and member.hung and not member.gone
        others = self.fleet.members.serving if leaves and not state.unplaced else ()
        if leaves := any(each.max_context >= state.seen_length for each in others):
            self.lose()
        return leaves

    async def info(self, deadline: Deadline) -> ExecutorInfo:
        return self.member.info

    async def is_gone(self, error: ExecutorError) -> bool:
        member = self.member
        sent = not isinstance(error, TransportError) or error.metadata.get("grpc_code") is not None
        if isinstance(error, TransportError | DeviceLost | Starting | InstanceMismatch) and sent:
            await self.fleet.members.look(member)
        if isinstance(error, SEQUENCE_GONE) and not self.state.unplaced:
            return True
        return member.gone or isinstance(error, Draining)

    def expect(self, tokens: int | None) -> None:
        self._final_length = 0 if tokens is None else self.state.seen_length + tokens

    async def finds_capacity(self, error: ExecutorError, deadline: Deadline) -> bool:
        if isinstance(error, ContextLengthExceeded):
            return await self.more_context(deadline) is not None
        self.member.refused(error)
        self._chosen = False
        if not self.state.unplaced or self._wanted is not None or not (others := self.fleet.members.serving):
            return False
        if self._refusals[0] is not deadline:
            self._refusals = deadline, set()
        refused = self._refusals[1]
        refused.add(self.member)
        length, becomes = self._lengths(self._next_tokens)
        length = max(length, len(self._next_tokens))
        if length > max(each.max_context for each in others):
            return False
        return any(each not in refused and not each.full for each in fitting(others, length, becomes))

    async def more_context(self, deadline: Deadline) -> ExecutorInfo | None:
        state, member = self.state, self.member
        pause = Backoff(deadline, FIRST_PAUSE_S, LONGEST_PAUSE_S)
        if state.unplaced or not (state.rebuilds or state.handle):
            return None
        longer = await self.fleet.members.longer(member.max_context, deadline)
        if not longer and self._longest_context > member.max_context:
            raise ContextLengthExceeded(
                f"the sequence has {state.seen_length} tokens; the executors that accept it have a context of at most "
                f"{member.max_context}, and the one of {self._longest_context} that it began on is gone",
                metadata={"max_context": member.max_context, "seq_len": state.seen_length},
            )
        if not longer:
            return None
        self._final_length, self._refusals = max(self._final_length, member.max_context + 1), (None, set())
        while True:
            there = self._choose(longer, state.tokens or ())
            backoff = Backoff(deadline, first_s=0.005, longest_s=0.1)
            while member.leaving >= MOVES_AT_ONCE and await backoff.wait():
                pass
            refusal = None if state.handle is None else await self._moved(there, deadline)
            if state.handle is not None and refusal is None:
                return there.info
            if not isinstance(refusal, SequencesExhausted | QuotaExceeded):
                break
            others = await self.fleet.members.longer(member.max_context, deadline)
            if all(each.full for each in others) and not await pause.wait(refusal.retry_after_s):
                raise refusal  # the sequence stays with its owner, as it was
            longer = await self.fleet.members.longer(member.max_context, deadline) or longer
        if not state.rebuilds:
            return None
        self.fleet.release_at(member, replace(state))
        self.lose()
        return there.info

    async def _moved(self, there: Member, deadline: Deadline) -> ExecutorError | None:
        """Move the sequence there; returns why it could not be moved."""
        try:
            await self.carry(there, "grpc", deadline)
        except ExecutorError as error:
            there.refused(error)
            log.info("a sequence could not be moved from %s to %s: %s", self.member.target, there.target, error)
            return error
        return None

    async def _leave_draining(self, deadline: Deadline) -> bool:
        """The owner drains: move to another member, or be fed there. Returns False where the owner serves the sequence
        a little longer: others are being moved, no member that holds its final length has a place for it, or what is in
        flight must end first."""
        member, state = self.member, self.state
        length = max(state.seen_length, self._final_length)
        others = [each for each in self.fleet.members.serving if each.max_context >= length and not each.full]
        if state.seen is not None or state.in_doubt or not others:
            return False
        if state.handle is None or state.lost is not None:
            if state.rebuilds:
                self.lose()
            return state.rebuilds
        if member.leaving >= MOVES_AT_ONCE:
            return False
        refusal = await self._moved(self._choose(others, state.tokens or ()), deadline)
        if refusal is None or not state.rebuilds or isinstance(refusal, SequencesExhausted | QuotaExceeded):
            return False
        self.lose()
        return True

    async def carry(self, there: Member, transport: transfer.Transport, deadline: Deadline) -> None:
        """Move the cache, and continue there. After an error the owner has the sequence unchanged."""
        member, state = self.member, self.state
        arrived = SequenceState(state.create, tokens=None if state.tokens is None else [])
        member.leaving += 1
        try:
            await move(self, Sender(arrived, Owner(there.connection, arrived)), transport, deadline)
        except BaseException:
            self.fleet.release_at(there, arrived)
            raise
        finally:
            member.leaving -= 1
        self.fleet.release_at(member, replace(state))
        self.connection.live.discard(state)
        there.connection.live.discard(arrived)
        there.connection.live.add(state)
        state.handle, state.pieces, state.lease_id = arrived.handle, arrived.pieces, arrived.lease_id
        state.doubt = state.creation = state.fork = None
        self._go_to(there)
