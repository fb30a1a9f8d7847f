"""The executor that has a sequence: always the same one here, one of several at a time in `client.fleet.owner`.

A `Sender` asks the owner before each call where it goes, and after each refusal whether another try is worth it.
"""

from __future__ import annotations

from ferrum_rpc.client.connection import Connection
from ferrum_rpc.client.executor_view import ExecutorView
from ferrum_rpc.client.info import ExecutorInfo
from ferrum_rpc.client.retry import SEQUENCE_GONE, Deadline
from ferrum_rpc.client.state import SequenceState
from ferrum_rpc.errors import ContextLengthExceeded, ExecutorError, QuotaExceeded, SequencesExhausted

FULL = (ContextLengthExceeded, SequencesExhausted, QuotaExceeded)
"""Refusals for want of capacity that another executor may have."""


class Owner:
    """The one executor that a sequence can have, behind a ``connection``. ``rebuilds_of_a_call``: times that one call
    may find the sequence lost and feed it again. ``rebuilds_in_batches``: what was lost is fed again before an item
    that was built on it goes out."""

    rebuilds_of_a_call = 1
    rebuilds_in_batches = False

    def __init__(self, connection: Connection, state: SequenceState) -> None:
        self.connection = connection
        self.state = state

    def beside(self, state: SequenceState) -> Owner:
        """The owner of a sequence that shares this one's cache."""
        return Owner(self.connection, state)

    @property
    def executor(self) -> ExecutorView | None:
        """The executor that has the sequence. None: no executor has anything of it."""
        return None if self.state.unplaced else self.connection.executor

    async def find(self, deadline: Deadline, tokens: list[int] | None = None) -> None:
        """Make `connection` that of the executor which the next call goes to. ``tokens``: what the call feeds, if that
        is known."""

    def expect(self, tokens: int | None) -> None:
        """At most ``tokens`` more are fed from here on. None: any number."""

    async def info(self, deadline: Deadline) -> ExecutorInfo:
        """What the executor is that the next call goes to."""
        return await self.connection.context.info(deadline)

    async def finds_capacity(self, error: ExecutorError, deadline: Deadline) -> bool:
        """A call was refused for want of capacity (`FULL`). Returns whether to make it again: another executor may have
        the capacity, and has the sequence now or will get it with that call."""
        return False

    async def more_context(self, deadline: Deadline) -> ExecutorInfo | None:
        """The context is full: go to an executor with a longer one. Returns what that is. None: there is none."""
        return None

    async def is_gone(self, error: ExecutorError) -> bool:
        """Whether an error means that the executor has lost the sequence."""
        made = self.state.handle is not None or self.state.parent is not None
        return made and isinstance(error, SEQUENCE_GONE)

    def failed(self, error: BaseException) -> bool:
        """A call has ended with this error. Returns whether the sequence is fed elsewhere next, though it may not be
        lost."""
        return False

    def lose(self, length: int | None = None) -> None:
        """The executor has lost the sequence: feed its first ``length`` tokens (default: all) again before anything
        else."""
        self.restart(self.state.held_tokens()[:length])
        if self.state.lost is not None and not self.state.lost.tokens:
            self.state.lost = None

    def restart(self, tokens: list[int]) -> None:
        """The executor has lost the sequence, or is to have it no longer: feed ``tokens`` again before anything
        else."""
        self.state.restart(tokens)
