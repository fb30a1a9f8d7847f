"""Who has a sequence: one executor here, one at a time of several in `client.fleet.owner`.

A `Sender` asks the owner before each call where it goes, and after each refusal whether it is worth another try.
"""

from __future__ import annotations

from ferrum_rpc.client.connection import Connection
from ferrum_rpc.client.executor_view import ExecutorView
from ferrum_rpc.client.info import ExecutorInfo
from ferrum_rpc.client.retry import SEQUENCE_GONE, Deadline
from ferrum_rpc.client.state import SequenceState
from ferrum_rpc.errors import ContextLengthExceeded, ExecutorError, QuotaExceeded, SequencesExhausted

FULL = (ContextLengthExceeded, SequencesExhausted, QuotaExceeded)
"""Refusals for want of room that another executor may have."""


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
        """The executor that has the sequence; None: none has anything of it."""
        return None if self.state.unplaced else self.connection.executor

    async def find(self, deadline: Deadline, tokens: list[int] | None = None) -> None:
        """Before a call, which feeds ``tokens`` if that is known: be where the sequence is, or is to be."""

    def expect(self, tokens: int | None) -> None:
        """So many tokens at most are fed from here on; None: any number."""

    async def info(self, deadline: Deadline) -> ExecutorInfo:
        """What the executor is that has it."""
        return await self.connection.context.info(deadline)

    async def finds_room(self, error: ExecutorError, deadline: Deadline) -> bool:
        """Whether another executor may have the room for which a call was refused (`FULL`), and the sequence is there,
        or is placed there with the call made again."""
        return False

    async def more_context(self, deadline: Deadline) -> ExecutorInfo | None:
        """The context is full: go where there is a longer one. Returns what the executor there is; None: nowhere."""
        return None

    async def is_gone(self, error: ExecutorError) -> bool:
        """Whether an error says that the executor has the sequence no more."""
        made = self.state.handle is not None or self.state.parent is not None
        return made and isinstance(error, SEQUENCE_GONE)

    def failed(self, error: BaseException) -> bool:
        """A call has ended with this error. Whether the sequence is fed elsewhere next, though it may not be gone."""
        return False

    def lose(self, length: int | None = None) -> None:
        """The executor has it no more: its first ``length`` tokens (default: all) are fed again before what is next."""
        self.restart(self.state.held_tokens()[:length])
        if self.state.lost is not None and not self.state.lost.tokens:
            self.state.lost = None

    def restart(self, tokens: list[int]) -> None:
        """The executor has it no more, or is to have it no longer: ``tokens`` are fed again before what is next."""
        self.state.restart(tokens)
