"""What a scheduler asks for: work items, as a call brings them, and their answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from ferrum_rpc.core.outputs import OutputSpec
from ferrum_rpc.core.rows import Rows
from ferrum_rpc.core.steps import PREFIX, PrefixUse, Run, RunEnded, TokenArray
from ferrum_rpc.errors import ExecutorError


class HandleRef(NamedTuple):
    """The wire's KvHandle: opaque bytes, the length and the version of a sequence. Printed without the bytes: with them
    a caller may use the sequence, where callers do not authenticate."""

    id: bytes
    seq_len: int
    version: int

    def __repr__(self) -> str:
        return f"HandleRef(seq_len={self.seq_len}, version={self.version})"


@dataclass(frozen=True, slots=True)
class CreateOptions:
    """What holds for a new sequence. ``reserve_tokens``: blocks to hold beyond the prompt. ``prefix``: how it uses the
    prefix cache; None: not at all. ``lease_id``: the lease that it ends with; none: it ends when it is unused for long.
    ``fork``: it is made of the sequence of the item's handle, whose lease it has where none is named, whose adapter it
    has, and uses the prefix cache as that does. ``adapter``: the name of its adapter; empty: none."""

    reserve_tokens: int = 0
    prefix: PrefixUse | None = PREFIX
    lease_id: str = ""
    fork: bool = False
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Follow:
    """Wait for the item in flight. ``feed_chosen``: feed the token that it chose last. ``creation``: the request id of
    the creation that makes the sequence."""

    feed_chosen: bool = False
    creation: str = ""


class WorkItem(NamedTuple):
    """The one work item behind every forward call, checked for form but not yet against any state.

    ``handle`` None asks for a new sequence. ``truncate_to`` rolls back first, in the same transaction. ``follow``: the
    handle is the one that an item in flight will leave; without an id it is that of a creation.
    """

    item_id: int
    handle: HandleRef | None
    tokens: TokenArray
    truncate_to: int | None
    output: OutputSpec
    request_id: str
    create: CreateOptions
    run: Run | None = None
    follow: Follow | None = None

    @property
    def start(self) -> int:
        """Where its tokens stand in the sequence, if its handle is not stale."""
        if self.truncate_to is not None:
            return self.truncate_to
        return 0 if self.handle is None else self.handle.seq_len


class ItemAnswer(NamedTuple):
    """A committed work item: the sequence's handle after it, and its rows (None: none asked for, or replayed without
    its payload)."""

    handle: HandleRef
    rows: Rows | None
    replayed: bool = False
    cached_tokens: int = 0
    ended: RunEnded | None = None


ItemOutcome = ItemAnswer | ExecutorError
"""Per work item: an answer, or why it was refused (its sequence is unchanged)."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call. Where callers do not authenticate, all are `ANYBODY`: one name, allowed everything.

    Handles, leases and request ids belong to the name; another name's read as unknown. ``operator``: may use
    ExecutorControl. ``shares``: others may call beside it, so it has a share of each table and not all of it.
    ``trusted``: what it imports is for all callers, as if it had been computed here.
    """

    name: str = ""
    operator: bool = True
    shares: bool = False
    trusted: bool = False


ANYBODY: Final = Caller()
