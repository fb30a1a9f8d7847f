"""What callers send through a session, and how the items of several callers become one frame.

A frame costs both sides far more than one item more in it. Items that wait at the same time therefore share a frame,
within the executor's limits. Every item gets the answer that it would have got in a frame of its own.
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
from ferrum_rpc.client.transport import Forwarded, in_order, outcomes_of
from ferrum_rpc.core import RowBlock
from ferrum_rpc.errors import ExecutorError, TransportError
from ferrum_rpc.executor.v1 import forward_pb2, session_pb2
from ferrum_rpc.wire.items import timing_from_proto
from ferrum_rpc.wire.rows import rows_from_proto
from ferrum_rpc.wire.status import error_from_status

Frame = session_pb2.SessionRequest

Result = TypeVar("Result")


class Kind(enum.IntEnum):
    """How a request travels."""

    CONTROL = 0
    """A frame that is no step: it is bounded by nothing."""
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
    """What one shared frame may hold: items, their tokens, the bytes of their rows (of a model with this vocabulary
    and this width) and of their messages."""

    items: int
    tokens: int
    row_bytes: int
    request_bytes: int
    vocab_size: int
    hidden_size: int


UNSHARED: Final = FrameCapacity(items=1, tokens=0, row_bytes=0, request_bytes=0, vocab_size=0, hidden_size=0)
"""Until it is known what a frame may hold."""


class StreamRequest(Generic[Result]):
    """What one caller waits for: the answer to ``items`` (`Forwarded`), or to a ``frame`` of another kind
    (`session_pb2.SessionResponse`). One item without a frame of its own may share one.

    ``resent``: it was sent before, and its answer may have to wait for that of the first time. ``expires``: when its
    deadline passes, on `time.monotonic`. ``number``: its place in the queue. ``step``: the id of the frame that it was
    sent in, None while it waits. ``batch``: the refusal of an item that is apart is its outcome; else it is raised.
    """

    __slots__ = (
        "batch",
        "expires",
        "frame",
        "future",
        "items",
        "kind",
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
        self.size = items[0].proto.ByteSize() if frame is None else frame.ByteSize()
        self.number: int
        self.step: int | None
        self.expires: float
        self.future: asyncio.Future[Result | None]

    def ByteSize(self) -> int:  # noqa: N802 - as of a message
        """Bytes that it takes in a frame of its own, but for some that say which frame it is."""
        return self.size


def group(waiting: Iterable[StreamRequest[Any]], capacity: FrameCapacity, now: float) -> list[StreamRequest[Any]]:
    """The first that waits, and those behind it that fit into its frame: of other sequences, and with deadlines that
    are near its own. A frame has the earliest deadline of its items; an item that this cuts short is sent again in a
    frame of its own. ``now`` is on `time.monotonic`."""
    chosen: list[StreamRequest[Any]] = []
    sequences: set[bytes] = set()
    tokens = row_bytes = request_bytes = 0
    soonest = latest = 0.0
    for request in waiting:
        item = request.items[0]
        handle = item.handle
        # Those that are apart are claimed in their order: one may follow another of the same frame.
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
        frame.forward.items.extend([request.items[0].proto for request in requests])
        frame.forward.apart = requests[0].items[0].goes_on
    if frame.HasField("forward"):
        expires = min(map(_expires, requests))
        if expires != math.inf:
            left = max(0.0, expires - now)
            whole = int(left)
            frame.forward.timeout.seconds, frame.forward.timeout.nanos = whole, int((left - whole) * 1e9)
    return frame


_expires = operator.attrgetter("expires")


def results_of(
    requests: Sequence[StreamRequest[Any]], response: session_pb2.SessionResponse, rows: list[session_pb2.SessionRows]
) -> Sequence[session_pb2.SessionResponse | Forwarded | ExecutorError]:
    """The result of each of them, from the answer to their frame and the row frames that came before it."""
    if response.HasField("error"):
        return [error_from_status(response.error) for _ in requests]
    first, answer = requests[0], response.forward
    if not first.items:
        return [response]
    try:
        outcomes = outcomes_of(answer.results, [item for request in requests for item in request.items])
        blocks = rows_from_proto(answer.row_blocks, rows)
    except ExecutorError as error:
        return [error for _ in requests]
    pressure, timing = answer.pressure, timing_from_proto(answer)
    if first.frame is not None:
        return [Forwarded(outcomes, blocks, pressure, timing)]
    return [
        each if isinstance(each, ExecutorError) else Forwarded((each,), blocks, pressure, timing) for each in outcomes
    ]


Parts = list[tuple[int, forward_pb2.ForwardOutput | ExecutorError]]
"""Outcomes of a frame's items, each with its place in the frame."""


def part_of(requests: Sequence[StreamRequest[Any]], answer: session_pb2.SessionForwardAnswer) -> Parts:
    """What one part of an answer says of the items of a frame. Raises `TransportError` for the results of others."""
    items = [item for request in requests for item in request.items]
    results = in_order(answer.results)
    places = [result.item_index for result in results]
    outcomes = outcomes_of(results, [items[place] for place in places if place < len(items)])
    return list(zip(places, outcomes, strict=True))


def joined_parts(parts: Parts, items: Sequence[Item]) -> list[forward_pb2.ForwardOutput | ExecutorError]:
    """The outcomes of all items of a frame, in their order. Raises `TransportError` where some are missing."""
    found = dict(parts)
    if len(found) != len(items):
        raise TransportError(
            f"the executor answered {len(found)} of {len(items)} items", metadata={"grpc_code": "INTERNAL"}
        )
    return [found[place] for place in range(len(items))]


class SessionStep:
    """A step in flight. The futures of ``requests`` are done early where their callers gave up, and where the items are
    ``apart``."""

    __slots__ = ("apart", "blocks", "cancelled", "kind", "parts", "requests", "rows", "sent")

    def __init__(self, requests: Sequence[StreamRequest[Any]], sent: float, apart: bool) -> None:
        self.requests = requests
        self.apart = apart
        self.parts: Parts = []  # of one request, and the blocks of their rows
        self.blocks: list[RowBlock] = []
        self.sent = sent
        self.kind = requests[0].kind
        self.rows: list[session_pb2.SessionRows] = []
        self.cancelled = False

    @property
    def given_up(self) -> bool:
        """Whether no caller waits for it any longer."""
        return all(request.future.done() for request in self.requests)


def answer_batch(
    step: SessionStep, parts: Parts, blocks: list[RowBlock], answer: session_pb2.SessionForwardAnswer
) -> ExecutorError | None:
    """Keep a part of one caller's batch, and answer it with the last one. Returns why that cannot be."""
    for _, outcome in parts:
        if step.blocks and not isinstance(outcome, ExecutorError) and outcome.HasField("rows"):
            outcome.rows.block += len(step.blocks)
    step.parts += parts
    step.blocks += blocks
    request = step.requests[0]
    if not answer.more and not request.future.done():
        try:
            outcomes = joined_parts(step.parts, request.items)
        except ExecutorError as error:
            return error
        request.future.set_result(Forwarded(outcomes, step.blocks, answer.pressure, timing_from_proto(answer)))
    return None
