"""What callers ask of a session, and how the items of several callers become one frame.

A frame costs both sides far more than one item more in it. Items that wait at the same time therefore share a frame,
within the executor's limits. It changes nothing but the time: every item gets the
answer that it would have got in a frame of its own.
"""

from __future__ import annotations

import asyncio
import enum
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ferrum_rpc.client.row_frames import blocks_with_frames
from ferrum_rpc.client.state import Item
from ferrum_rpc.client.transport import Forwarded, outcomes_of, timing_of
from ferrum_rpc.errors import ExecutorError, TransportError
from ferrum_rpc.executor.v1 import session_pb2
from ferrum_rpc.wire.status import error_from_status

Frame = session_pb2.SessionRequest

Answered = tuple[session_pb2.SessionResponse, list[session_pb2.SessionRows]]
"""The frame that answers a step, and the row frames that came before it."""


Result = TypeVar("Result")


class Kind(enum.IntEnum):
    """How an ask travels."""

    URGENT = 0
    """A frame that is no step: it is bounded by nothing."""
    FRAME = 1
    """A frame of its own."""
    LARGE = 2
    """An item in a frame of its own, because its rows come in row frames."""
    SHARED = 3
    """An item in a frame that it may share."""


@dataclass(frozen=True, slots=True)
class FrameCapacity:
    """What one shared frame may hold: items, their tokens, the bytes of their rows (of a vocabulary of ``vocab_size``)
    and of their messages."""

    items: int
    tokens: int
    row_bytes: int
    request_bytes: int
    vocab_size: int


class Ask(Generic[Result]):
    """What one caller waits for: the answer to a ``frame`` (`Answered`), or to ``items`` (`Forwarded`). One item
    without a frame of its own may share one.

    ``again``: it was sent before, and its answer may have to wait for that of the first time. ``expires``: when its
    deadline passes, on `time.monotonic`. ``number``: its place in the queue. ``step``: the id of the frame that it was
    sent in, None while it waits.
    """

    __slots__ = ("again", "expires", "frame", "future", "items", "kind", "number", "row_bytes", "size", "step")

    def __init__(self, *, frame: Frame | None = None, items: Sequence[Item] = (), kind: Kind = Kind.FRAME) -> None:
        self.frame = frame
        self.items = items
        self.kind = kind
        self.again = frame is None and items[0].repeats
        self.row_bytes = 0
        self.size = items[0].proto.ByteSize() if frame is None else frame.ByteSize()
        self.number: int
        self.step: int | None
        self.expires: float
        self.future: asyncio.Future[Result | None]

    def ByteSize(self) -> int:  # noqa: N802 - as of a message
        """Bytes that it takes in a frame of its own, but for some that say which frame it is."""
        return self.size


def together(waiting: Iterable[Ask[Any]], capacity: FrameCapacity, now: float) -> list[Ask[Any]]:
    """The first that waits, and those behind it that fit into its frame: of other sequences, and with deadlines that
    are near its own. A frame has the earliest deadline of its items; an item that this cuts short is sent again alone.
    ``now`` is on `time.monotonic`."""
    chosen: list[Ask[Any]] = []
    sequences: set[bytes] = set()
    tokens = row_bytes = request_bytes = 0
    soonest = latest = 0.0
    for ask in waiting:
        item = ask.items[0]
        handle = item.handle
        sequence = b"" if handle is None else handle.id
        if chosen and (sequence in sequences or not soonest <= ask.expires <= latest):
            continue
        tokens += len(item.tokens)
        row_bytes += ask.row_bytes
        request_bytes += ask.size
        if chosen and (
            tokens > capacity.tokens or row_bytes > capacity.row_bytes or request_bytes > capacity.request_bytes
        ):
            break
        if not chosen:
            left = max(0.0, ask.expires - now)
            soonest, latest = now + left / 2, now + left * 2
        chosen.append(ask)
        if len(chosen) >= capacity.items:
            break
        if sequence:
            sequences.add(sequence)
    return chosen


def frame_of(asks: Sequence[Ask[Any]], now: float) -> Frame:
    """One frame for all of them, with the earliest of their deadlines. ``now`` is on `time.monotonic`."""
    first = asks[0]
    frame = first.frame
    if frame is None:
        frame = Frame()
        frame.forward.items.extend([ask.items[0].proto for ask in asks])
    if frame.HasField("forward"):
        expires = min(map(_expires, asks))
        if expires != math.inf:
            left = max(0.0, expires - now)
            whole = int(left)
            frame.forward.timeout.seconds, frame.forward.timeout.nanos = whole, int((left - whole) * 1e9)
    return frame


def answers(
    asks: Sequence[Ask[Any]], response: session_pb2.SessionResponse, rows: list[session_pb2.SessionRows]
) -> Sequence[Answered | Forwarded | ExecutorError]:
    """The answer to each of them, from the answer to their frame."""
    if response.HasField("error"):
        return [error_from_status(response.error) for _ in asks]
    first, answer = asks[0], response.forward
    if not first.items:
        return [(response, rows)]
    try:
        outcomes = outcomes_of(answer.results, [item for ask in asks for item in ask.items])
        blocks = blocks_with_frames(answer.row_blocks, rows)
    except ExecutorError as error:
        return [error for _ in asks]
    pressure, timing = answer.pressure, timing_of(answer)
    if first.frame is not None:
        return [Forwarded(outcomes, blocks, pressure, timing)]
    return [
        each if isinstance(each, ExecutorError) else Forwarded((each,), blocks, pressure, timing) for each in outcomes
    ]


def other_answer(what: str) -> TransportError:
    """An answer that is not to what was asked."""
    return TransportError(f"the executor's answer is not to what was asked: {what}", metadata={"grpc_code": "INTERNAL"})


_expires = operator.attrgetter("expires")
