"""Requests of a session, and the combination of several callers' items into one frame.

A frame costs both sides far more than one more item in it. So items that wait at the same time share a frame, within
the executor's limits. Every item gets the same answer as in a frame of its own.
"""

from __future__ import annotations

import asyncio
import enum
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from ferrum_rpc.client.state import Item
from ferrum_rpc.client.transport import in_order, outcomes_of
from ferrum_rpc.core import RowBlock
from ferrum_rpc.errors import ExecutorError
from ferrum_rpc.executor.v1 import forward_pb2, session_pb2

Frame = session_pb2.SessionRequest

Result = TypeVar("Result")


class Kind(enum.IntEnum):
    """How a request is sent."""

    CONTROL = 0
    """A frame that is not a step: no limit applies."""
    FRAME = 1
    """A frame of its own."""
    LARGE = 2
    """An item in a frame of its own, because its rows come in row frames."""
    SHARED = 3
    """An item in a frame that it may share."""
    APART = 4
    """An item that goes on for several steps or waits for another, in a frame that it may share with its like: each is
    answered when it ends."""


@dataclass(frozen=True, slots=True)
class FrameCapacity:
    """The limits of one shared frame: items, their tokens, the bytes of their rows (of a model with this vocabulary and
    width) and of their messages."""

    items: int
    tokens: int
    row_bytes: int
    request_bytes: int
    vocab_size: int
    hidden_size: int


UNSHARED: Final = FrameCapacity(items=1, tokens=0, row_bytes=0, request_bytes=0, vocab_size=0, hidden_size=0)
"""The limits until the executor's are known."""


class StreamRequest(Generic[Result]):
    """A caller's request, which waits for the answer to ``items`` (`Forwarded`), or to a ``frame`` of another kind
    (`session_pb2.SessionResponse`). A single item may share a frame.

    ``resent``: it was sent before, and its answer may have to wait for the first one. ``expires``: its deadline on
    `time.monotonic`. ``message``: the frame, or that of the item. ``number``: its place in the queue. ``step``: the id
    of its frame, None while it waits. ``batch``: the refusal of an independent item is its outcome; else it is raised.
    """

    __slots__ = (
        "batch",
        "expires",
        "frame",
        "future",
        "items",
        "kind",
        "message",
        "number",
        "resent",
        "row_bytes",
        "size",
        "step",
    )

    def __init__(
        self,
        *,
        frame: Frame | None = None,
        items: Sequence[Item] = (),
        kind: Kind = Kind.FRAME,
        batch: bool = False,
    ) -> None:
        self.batch = batch
        self.frame = frame
        self.items = items
        self.kind = kind
        self.resent = frame is None and items[0].repeats
        self.row_bytes = 0
        self.message: Any = frame
        if frame is None:
            self.message = forward_pb2.ForwardItem()
            items[0].write(self.message)
        self.size: int = self.message.ByteSize()
        self.number: int
        self.step: int | None
        self.expires: float
        self.future: asyncio.Future[Result | None]

    def ByteSize(self) -> int:  # noqa: N802 - as of a message
        """Its bytes in a frame of its own, without the few that identify the frame."""
        return self.size


def group(waiting: Iterable[StreamRequest[Any]], capacity: FrameCapacity, now: float) -> list[StreamRequest[Any]]:
    """The first waiting request, and those after it that fit into its frame: of other sequences, and with deadlines
    near its own. A frame has the earliest deadline of its items; an item that this ends too early is sent again in a
    frame of its own. ``now`` is on `time.monotonic`."""
    chosen: list[StreamRequest[Any]] = []
    sequences: set[bytes] = set()
    tokens = row_bytes = request_bytes = 0
    soonest = latest = 0.0
    for request in waiting:
        item = request.items[0]
        handle = item.handle
        # Independent items are claimed in their order: one may follow another of the same frame.
        sequence = b"" if handle is None or item.goes_on else handle.id
        if chosen and (sequence in sequences or not soonest <= request.expires <= latest):
            continue
        tokens += len(item.tokens)
        row_bytes += request.row_bytes
        request_bytes += request.size
        if chosen and (
            tokens > capacity.tokens or row_bytes > capacity.row_bytes or request_bytes > capacity.request_bytes
        ):
            break
        if not chosen:
            left = max(0.0, request.expires - now)
            soonest, latest = now + left / 2, now + left * 2
        chosen.append(request)
        if len(chosen) >= capacity.items:
            break
        if sequence:
            sequences.add(sequence)
    return chosen


def frame_of(requests: Sequence[StreamRequest[Any]], now: float) -> Frame:
    """One frame for all of them, with the earliest of their deadlines. ``now`` is on `time.monotonic`."""
    frame = requests[0].frame
    if frame is None:
        frame = Frame()
        frame.forward.items.extend([request.message for request in requests])
        frame.forward.apart = requests[0].items[0].goes_on
    if frame.HasField("forward"):
        expires = min(map(_expires, requests))
        if expires != math.inf:
            left = max(0.0, expires - now)
            whole = int(left)
            frame.forward.timeout.seconds, frame.forward.timeout.nanos = whole, int((left - whole) * 1e9)
    return frame


_expires = operator.attrgetter("expires")


Outcomes = dict[int, forward_pb2.ForwardOutput | ExecutorError]
"""Outcomes of a frame's items, by their places in the frame."""


class SessionStep:
    """A step in flight. The futures of ``requests`` are done early where their callers gave up, and where the items are
    ``apart``. ``items``: of all of them, in their order; requests that share a frame have one each."""

    __slots__ = ("apart", "blocks", "cancelled", "items", "kind", "outcomes", "requests", "rows", "sent")

    def __init__(self, requests: Sequence[StreamRequest[Any]], sent: float, apart: bool) -> None:
        self.requests = requests
        self.items = [item for request in requests for item in request.items]
        self.apart = apart
        self.outcomes: Outcomes = {}  # of one request, and the blocks of their rows
        self.blocks: list[RowBlock] = []
        self.sent = sent
        self.kind = requests[0].kind
        self.rows: list[session_pb2.SessionRows] = []
        self.cancelled = False

    @property
    def given_up(self) -> bool:
        """Whether no caller waits for it any more."""
        return all(request.future.done() for request in self.requests)

    def outcomes_in(self, answer: session_pb2.SessionForwardAnswer) -> Outcomes:
        """The outcomes in an answer, or in a part of one. Raises `TransportError` for results of other items."""
        items, results = self.items, answer.results
        if not self.apart:
            return dict(enumerate(outcomes_of(results, items)))
        places = [result.item_index for result in in_order(results)]
        outcomes = outcomes_of(results, [items[place] for place in places if place < len(items)])
        return dict(zip(places, outcomes, strict=True))

    def note_tokens(self, run: session_pb2.RunTokens) -> None:
        """Pass on tokens of a run that have come ahead of its answer, to a caller that still waits."""
        if run.item_index < len(self.items):
            item = self.items[run.item_index]
            request = self.requests[run.item_index if len(self.requests) > 1 else 0]
            if item.on_tokens is not None and not request.future.done():
                item.on_tokens(run.first, list(run.token_ids))

    def kept(self, outcomes: Outcomes, blocks: list[RowBlock]) -> tuple[Outcomes, list[RowBlock]]:
        """Keep a part of one caller's batch. Returns all that was answered so far."""
        for outcome in outcomes.values():
            if not isinstance(outcome, ExecutorError) and outcome.HasField("rows"):
                outcome.rows.block += len(self.blocks)
        self.outcomes |= outcomes
        self.blocks += blocks
        return self.outcomes, self.blocks
