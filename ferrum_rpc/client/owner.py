"""The executor that has a sequence: always the same one here, one of several over time in `client.fleet.owner`.

A `Sender` asks the owner before each call for the executor, and after each refusal whether to try again.
"""

from __future__ import annotations

from ferrum_rpc.client.connection import Connection
from ferrum_rpc.client.executor_view import ExecutorView
from ferrum_rpc.client.info import ExecutorInfo
from ferrum_rpc.client.retry import SEQUENCE_GONE, Deadline
from ferrum_rpc.client.state import SequenceState
from ferrum_rpc.errors import ContextLengthExceeded, ExecutorError, QuotaExceeded, SequencesExhausted

FULL = (ContextLengthExceeded, SequencesExhausted, QuotaExceeded)
"""Refusals for lack of capacity that another executor may have."""


class Owner:
    """The single executor of a sequence, at a ``connection``. ``rebuilds_of_a_call``: how often one call may find the
    sequence lost and feed it again. ``rebuilds_in_batches``: lost sequences are fed again before their items are
    sent."""

    rebuilds_of_a_call = 1
    rebuilds_in_batches = False

    def __init__(self, connection: Connection, state: SequenceState) -> None:
        self.connection = connection
        self.state = state

    def of_sibling(self, state: SequenceState) -> Owner:
        """The owner of a sequence that shares this one's cache."""
        return Owner(self.connection, state)

    @property
    def executor(self) -> ExecutorView | None:
        """The executor that has the sequence. None: no executor has any of it."""
        return None if self.state.unplaced else self.connection.executor

    async def find(self, deadline: Deadline, tokens: list[int] | None = None) -> None:
        """Set `connection` to that of the executor for the next call. ``tokens``: the tokens of the call, if known."""

    def expect(self, tokens: int | None) -> None:
        """Announce that at most ``tokens`` more will be fed. None: any number."""

    async def info(self, deadline: Deadline) -> ExecutorInfo:
        """The description of the executor for the next call."""
        return await self.connection.context.info(deadline)

    async def finds_capacity(self, error: ExecutorError, deadline: Deadline) -> bool:
        """Handle a refusal for lack of capacity (`FULL`). Returns whether to make the call again: another executor may
        have the capacity, and has the sequence now or gets it with that call."""
        return False

    async def more_context(self, deadline: Deadline) -> ExecutorInfo | None:
        """Move to an executor with a longer context. Returns its maximum context. None: there is none."""
        return None

    async def is_gone(self, error: ExecutorError) -> bool:
        """Whether an error means that the executor has lost the sequence."""
        made = self.state.handle is not None or self.state.parent is not None
        return made and isinstance(error, SEQUENCE_GONE)

    def failed(self, error: BaseException) -> bool:
        """Handle the error of a call. Returns whether the sequence is fed to another executor next, though it may not
        be lost."""
        return False

    def lose(self, length: int | None = None) -> None:
        """Note that the executor has lost the sequence: its first ``length`` tokens (default: all) are fed again before
        anything else."""
        self.restart(self.state.held_tokens()[:length])
        if self.state.lost is not None and not self.state.lost.tokens:
            self.state.lost = None

    def restart(self, tokens: list[int]) -> None:
        """Note that the sequence is lost, or leaves its executor: ``tokens`` are fed again before anything else."""
        self.state.restart(tokens)
