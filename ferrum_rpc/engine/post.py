"""What a server and its engine process say to each other over a pair of pipes: frames of bytes.

    server -> engine   `Terms`, then WORK (a submission), OPERATION, OUTPUT (a specification that later work names by
                       its number), FREE (rows that nobody looks at any more), STOP
    engine -> server   READY or BROKEN, then a TURN for all that one turn of the engine's loop finished

A frame is a header of `HEADER` and a body. What every step has is packed by hand (a lone decode is 100 bytes and 4 µs);
what is rare (errors, operations, the model's description) is pickled: both ends are one program, and nobody else can
write to its pipes. Work is named by its slot in the shared page, which is free again when the engine has answered.
"""

from __future__ import annotations

import enum
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ferrum_rpc.core import (
    CacheState,
    DeviceInfo,
    ModelInfo,
    OutputSpec,
    RowBlock,
    RowKind,
    Rows,
    SelectedTokens,
    Span,
    SpanOutcome,
    SpanResult,
    StepTiming,
)
from ferrum_rpc.engine.work import EngineCounters, Submission

HEADER: Final = Struct("<IB")
"""Bytes of the body, and what it is."""

INLINE_BYTES: Final = 16 << 10
"""Larger arrays of rows go through the arena."""

ACTUAL: Final = 0xFFFF
"""The number of a specification that is written out where it is used."""

_WORK: Final = Struct("<IBddII")  # slot, all or nothing, deadline (NaN: none), arrived, caller, spans
_SPAN: Final = Struct("<QIIHBI")  # sequence, start, tokens, output's number, create, reserved
_TURN: Final = Struct("<QQQQd" + "IIIQ" + "III")  # counters, cache, numbers of blocks, answers, results
_ARRAY: Final = Struct("<BIIq")  # type, rows, columns (0: it has none), offset in the arena (-1: inline)
_ANSWER: Final = Struct("<IBQIIdd")  # slot, whether a step ran, its timing
_OUTCOME: Final = Struct("<BQiII")  # 1: an error; new length (or bytes of the error), block (-1: no rows), first, count
_SIZE: Final = Struct("<II")


@dataclass(frozen=True, slots=True)
class Terms:
    """What the engine process is told first: its length in 4 bytes, and its pickle."""

    setup: object
    max_step_items: int
    max_step_tokens: int


@dataclass(frozen=True, slots=True)
class Description:
    """What the server knows of the runner: a `Described`."""

    info: ModelInfo
    device: DeviceInfo


class Kind(enum.IntEnum):
    """What a frame is."""

    WORK = 1
    OPERATION = 2
    OUTPUT = 3
    FREE = 4
    STOP = 5
    READY = 6
    BROKEN = 7
    TURN = 8


class Slot(enum.IntEnum):
    """What a byte of `Page.states` says of a piece of work."""

    QUEUED = 0
    CLAIMED = 1
    CANCELLED = 2


_DTYPES: Final = tuple(np.dtype(name) for name in ("<u4", "<f4", "<u2", "<f2"))
_CODE: Final = {dtype: code for code, dtype in enumerate(_DTYPES)}
_KINDS: Final = tuple(RowKind)
_KIND: Final = {kind: number for number, kind in enumerate(_KINDS)}

Array = npt.NDArray[Any]


def frame(kind: Kind, *parts: bytes) -> bytes:
    """A frame of ``parts``."""
    body = b"".join(parts)
    return HEADER.pack(len(body), kind) + body


class Frames:
    """Cuts what a pipe brings into frames."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[tuple[int, memoryview]]:
        """Kind and body of every frame that is complete now. A body is valid as long as somebody holds it."""
        whole = memoryview(self._rest + data if self._rest else data)
        at, end = 0, len(whole)
        while end - at >= HEADER.size:
            size, kind = HEADER.unpack_from(whole, at)
            body = at + HEADER.size
            if end - body < size:
                break
            at = body + size
            yield kind, whole[body:at]
        self._rest = bytes(whole[at:])


# --- work ---------------------------------------------------------------------------------------------------------


class Arrived(NamedTuple):
    """A submission, as it was sent. ``slot`` names it."""

    slot: int
    spans: tuple[Span, ...]
    all_or_nothing: bool
    deadline: float | None
    arrived: float
    caller: int


class WorkWriter:
    """The server's side: submissions to frames. It remembers which specifications the engine knows by number."""

    def __init__(self) -> None:
        self._numbers: dict[OutputSpec, int] = {}

    def write(self, slot: int, work: Submission) -> bytes:
        """Frames of one submission."""
        deadline = math.nan if work.deadline is None else work.deadline
        head = _WORK.pack(slot, work.all_or_nothing, deadline, work.arrived, work.caller, len(work.spans))
        known, parts = b"", [head]
        for sequence, tokens, start, output, create, reserved in work.spans:
            number = self._numbers.get(output)
            written = b""
            if number is None:
                if isinstance(output.kind, SelectedTokens) or len(self._numbers) == ACTUAL:
                    number, pickled = ACTUAL, pickle.dumps(output)
                    written = len(pickled).to_bytes(4, "little") + pickled
                else:
                    number = self._numbers[output] = len(self._numbers)
                    known += frame(Kind.OUTPUT, pickle.dumps(output))
            parts.append(_SPAN.pack(sequence, start, len(tokens), number, create, reserved))
            parts += (written, tokens.tobytes())
        return known + frame(Kind.WORK, *parts)


class WorkReader:
    """The engine's side."""

    def __init__(self) -> None:
        self._outputs: list[OutputSpec] = []

    def learn(self, body: memoryview) -> None:
        """An OUTPUT frame."""
        self._outputs.append(pickle.loads(body))  # noqa: S301 - by our own server

    def read(self, body: memoryview) -> Arrived:
        """A WORK frame."""
        slot, all_or_nothing, deadline, arrived, caller, count = _WORK.unpack_from(body)
        at, spans = _WORK.size, []
        for _ in range(count):
            sequence, start, tokens, number, create, reserved = _SPAN.unpack_from(body, at)
            at += _SPAN.size
            if number == ACTUAL:
                size = int.from_bytes(body[at : at + 4], "little")
                output = pickle.loads(body[at + 4 : at + 4 + size])  # noqa: S301 - by our own server
                at += 4 + size
            else:
                output = self._outputs[number]
            fed = np.frombuffer(body, np.int32, tokens, at)
            at += 4 * tokens
            spans.append(Span(sequence, fed, start, output, bool(create), reserved))
        return Arrived(
            slot,
            tuple(spans),
            bool(all_or_nothing),
            None if math.isnan(deadline) else deadline,
            arrived,
            caller,
        )


# --- answers --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Turn:
    """What one turn of the engine finished: ``answers`` of submissions, ``results`` of operations, both by slot.
    ``free``: slots of work that was cancelled and forgotten. ``news``: whatever else changed."""

    answers: list[tuple[int, tuple[SpanOutcome, ...], StepTiming | None]]
    results: list[tuple[int, object]]
    free: list[int]
    counters: EngineCounters
    cache: CacheState
    news: object = None


Place = Callable[[Array], int | None]
"""Puts a large array into the arena: where, or None where there is no room."""

Look = Callable[[int, np.dtype[Any], int], Array]
"""An array of the arena by its offset, type and number of elements."""


def write_turn(turn: Turn, place: Place) -> bytes:
    """A TURN frame."""
    counters = turn.counters
    blocks: dict[int, int] = {}
    packed: list[bytes] = []
    body: list[bytes] = []
    for slot, outcomes, timing in turn.answers:
        body.append(_ANSWER.pack(slot, timing is not None, *(timing or (0, 0, 0, 0.0, 0.0))))
        body.append(len(outcomes).to_bytes(4, "little"))
        for outcome in outcomes:
            if not isinstance(outcome, SpanResult):
                pickled = pickle.dumps(outcome)
                body += (_OUTCOME.pack(1, len(pickled), -1, 0, 0), pickled)
                continue
            length, rows = outcome
            if rows is None:
                body.append(_OUTCOME.pack(0, length, -1, 0, 0))
                continue
            number = blocks.get(id(rows.block))
            if number is None:
                number = blocks[id(rows.block)] = len(blocks)
                packed += _pack_block(rows.block, place)
            body.append(_OUTCOME.pack(0, length, number, rows.first, rows.count))
    for slot, result in turn.results:
        pickled = pickle.dumps(result)
        body += (_SIZE.pack(slot, len(pickled)), pickled)
    extra = pickle.dumps((turn.free, turn.news)) if turn.free or turn.news is not None else b""
    head = _TURN.pack(
        counters.steps,
        counters.tokens,
        counters.rows,
        counters.blocks_copied,
        counters.forward_s,
        *turn.cache,
        len(blocks),
        len(turn.answers),
        len(turn.results),
    )
    return frame(Kind.TURN, head, *packed, *body, extra)


def read_turn(body: memoryview, look: Look) -> Turn:
    """A TURN frame's body."""
    steps, tokens, rows, copied, forward_s, *cache, blocks, answers, results = _TURN.unpack_from(body)
    reader = _Reader(body, _TURN.size, look)
    held = [reader.block() for _ in range(blocks)]
    answered = [reader.answer(held) for _ in range(answers)]
    done = [reader.result() for _ in range(results)]
    free, news = reader.rest()
    counters = EngineCounters(steps, tokens, rows, copied, forward_s)
    return Turn(answered, done, free, counters, CacheState(*cache), news)


class _Reader:
    """Reads a TURN's body from ``at`` on."""

    def __init__(self, body: memoryview, at: int, look: Look) -> None:
        self._body, self._at, self._look = body, at, look

    def block(self) -> RowBlock:
        number, count = self._body[self._at : self._at + 2]
        self._at += 2
        return RowBlock.of(_KINDS[number], *[self._array() for _ in range(count)])

    def _array(self) -> Array:
        code, rows, columns, offset = _ARRAY.unpack_from(self._body, self._at)
        self._at += _ARRAY.size
        dtype, count = _DTYPES[code], rows * (columns or 1)
        if offset >= 0:
            found = self._look(offset, dtype, count)
        else:
            found = np.frombuffer(self._body, dtype, count, self._at).copy()  # or it would keep all that was read
            self._at += found.nbytes
        return found.reshape(rows, columns) if columns else found

    def answer(self, blocks: Sequence[RowBlock]) -> tuple[int, tuple[SpanOutcome, ...], StepTiming | None]:
        slot, ran, *timing = _ANSWER.unpack_from(self._body, self._at)
        self._at += _ANSWER.size
        count = int.from_bytes(self._body[self._at : self._at + 4], "little")
        self._at += 4
        outcomes = tuple([self._outcome(blocks) for _ in range(count)])
        return slot, outcomes, StepTiming(*timing) if ran else None

    def _outcome(self, blocks: Sequence[RowBlock]) -> SpanOutcome:
        failed, length, block, first, count = _OUTCOME.unpack_from(self._body, self._at)
        self._at += _OUTCOME.size
        if failed:
            error: SpanOutcome = self._pickled(length)
            return error
        return SpanResult(length, None if block < 0 else Rows(blocks[block], first, count))

    def result(self) -> tuple[int, object]:
        slot, size = _SIZE.unpack_from(self._body, self._at)
        self._at += _SIZE.size
        return slot, self._pickled(size)

    def rest(self) -> tuple[list[int], object]:
        if self._at == len(self._body):
            return [], None
        found: tuple[list[int], object] = self._pickled(len(self._body) - self._at)
        return found

    def _pickled(self, size: int) -> Any:
        found = pickle.loads(self._body[self._at : self._at + size])  # noqa: S301 - by our own engine
        self._at += size
        return found


def _pack_block(block: RowBlock, place: Place) -> list[bytes]:
    parts = [bytes((_KIND[block.kind], len(block.columns)))]
    for array in block.columns.values():
        columns = array.shape[1] if array.ndim == 2 else 0
        offset = place(array) if array.nbytes > INLINE_BYTES else None
        parts.append(_ARRAY.pack(_CODE[array.dtype], len(array), columns, -1 if offset is None else offset))
        if offset is None:
            parts.append(array.tobytes())
    return parts
