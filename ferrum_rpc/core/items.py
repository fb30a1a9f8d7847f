"""The work items of a scheduler's calls, and their answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from ferrum_rpc.core.outputs import OutputSpec
from ferrum_rpc.core.rows import Rows
from ferrum_rpc.core.steps import PREFIX, PrefixUse, Run, RunEnded, TokenArray
from ferrum_rpc.errors import ExecutorError


class HandleRef(NamedTuple):
    """The wire's KvHandle: opaque bytes, the length and the version of a sequence. Its repr omits the bytes, because
    without authentication anyone who has them may use the sequence."""

    id: bytes
    seq_len: int
    version: int

    def __repr__(self) -> str:
        return f"HandleRef(seq_len={self.seq_len}, version={self.version})"


@dataclass(frozen=True, slots=True)
class CreateOptions:
    """Properties of a new sequence. ``reserve_tokens``: tokens beyond the prompt for which blocks are reserved.
    ``prefix``: how it uses the prefix cache; None: not at all. ``lease_id``: the lease with which it ends; None: it
    ends after a time without use. ``fork``: it is forked from the sequence of the item's handle, and inherits its
    adapter, its use of the prefix cache, and its lease if none is named. ``adapter``: the name of its adapter; empty:
    none."""

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
    """The work item of every forward call, checked for form but not yet against any state.

    ``handle`` None requests a new sequence. ``truncate_to`` rolls back first, in the same transaction. ``follow``: the
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
        """The position of its first token in the sequence, if its handle is current."""
        if self.truncate_to is not None:
            return self.truncate_to
        return 0 if self.handle is None else self.handle.seq_len


class ItemAnswer(NamedTuple):
    """A committed work item: the sequence's handle after it, and its rows (None if none were requested, or if it was
    replayed without them). ``cached_tokens``, ``recomputed_tokens``: see `SpanResult`."""

    handle: HandleRef
    rows: Rows | None
    replayed: bool = False
    cached_tokens: int = 0
    ended: RunEnded | None = None
    recomputed_tokens: int = 0


ItemOutcome = ItemAnswer | ExecutorError
"""The outcome of a work item: an answer, or the refusal (its sequence is unchanged)."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a call. Without authentication all callers are `ANYBODY`: one name with all rights.

    Handles, leases and request ids belong to the name; those of another name read as unknown. ``operator``: may use
    ExecutorControl. ``shares``: there may be other callers, so it has a share of each table instead of all of it.
    ``trusted``: its imports are visible to all callers, as if they had been computed here.
    """

    name: str = ""
    operator: bool = True
    shares: bool = False
    trusted: bool = False


ANYBODY: Final = Caller()
