"""What a server and its engine process say to each other arrives as it was said, wherever the pipe cuts it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ferrum_rpc.core import (
    CacheState,
    FullLogits,
    Greedy,
    OutputSpec,
    Positions,
    RowDType,
    Rows,
    SelectedTokens,
    Span,
    SpanResult,
    StepTiming,
    TopTokens,
)
from ferrum_rpc.engine.post import (
    INLINE_BYTES,
    Frames,
    Kind,
    Turn,
    WorkReader,
    WorkWriter,
    frame,
    read_turn,
    write_turn,
)
from ferrum_rpc.engine.work import EngineCounters, Submission
from ferrum_rpc.errors import KvBlocksExhausted, StepFailed
from tests.rows import logit_rows, selected_rows, token_rows, top_token_rows

u32 = st.integers(0, 2**32 - 1)
kinds = st.one_of(
    st.builds(Greedy, st.booleans()),
    st.builds(TopTokens, st.integers(1, 1024)),
    st.builds(SelectedTokens, st.lists(u32, min_size=1, max_size=5).map(tuple)),
    st.builds(FullLogits, st.sampled_from(RowDType)),
)
spans = st.builds(
    Span,
    st.integers(0, 2**64 - 1),
    arrays.arrays(np.int32, st.integers(1, 9)),
    u32,
    st.builds(OutputSpec, st.sampled_from(Positions), kinds),
    st.booleans(),
    u32,
)
submissions = st.builds(
    lambda spans, *rest: Submission(tuple(spans), lambda *_: None, *rest),
    st.lists(spans, max_size=5),
    st.booleans(),
    st.none() | st.floats(0, 1e9),
    u32,
)

cuts = st.lists(st.integers(1, 200), max_size=40)


def fed(data: bytes, sizes: list[int]) -> list[tuple[int, bytes]]:
    """The frames of ``data`` that comes in pieces of ``sizes``, and then what is left."""
    frames, found, at = Frames(), [], 0
    for size in [*sizes, len(data)]:
        found += [(kind, bytes(body)) for kind, body in frames.feed(data[at : at + size])]
        at += size
    return found


@given(st.lists(submissions, max_size=6), cuts)
def test_work_arrives_as_it_was_sent(sent: list[Submission], sizes: list[int]) -> None:
    writer, reader = WorkWriter(), WorkReader()
    data = b"".join(writer.write(slot, each) for slot, each in enumerate(sent))
    arrived = []
    for kind, body in fed(data, sizes):
        if kind == Kind.OUTPUT:
            reader.learn(memoryview(body))
        else:
            assert kind == Kind.WORK
            arrived.append(reader.read(memoryview(body)))
    assert [each.slot for each in arrived] == list(range(len(sent)))
    for each, wanted in zip(arrived, sent, strict=True):
        for name in ("all_or_nothing", "deadline", "arrived", "caller"):
            assert getattr(each, name) == getattr(wanted, name)
        for found, span in zip(each.spans, wanted.spans, strict=True):
            assert found.tokens.tolist() == span.tokens.tolist() and found.tokens.dtype == np.int32
            assert found._replace(tokens=None) == span._replace(tokens=None)


def floats(*shape: int) -> st.SearchStrategy[Any]:
    return arrays.arrays(np.float32, shape, elements=st.floats(width=32, allow_nan=False))


def ids(*shape: int) -> st.SearchStrategy[Any]:
    return arrays.arrays(np.uint32, shape)


@st.composite
def blocks(draw: Callable[[Any], Any]) -> Any:
    rows, width = draw(st.integers(1, 5)), draw(st.sampled_from([1, 3, INLINE_BYTES // 4]))
    match draw(st.sampled_from(["tokens", "logprobs", "top", "selected", "f32", "bf16", "f16"])):
        case "tokens":
            return token_rows(draw(ids(rows)))
        case "logprobs":
            return token_rows(draw(ids(rows)), draw(floats(rows)))
        case "top":
            return top_token_rows(draw(ids(rows, 4)), draw(floats(rows, 4)), draw(floats(rows)))
        case "selected":
            return selected_rows(draw(floats(rows, 4)), draw(floats(rows)))
        case "f32":
            return logit_rows(np.arange(rows * width, dtype=np.float32).reshape(rows, width))
        case "bf16":
            return logit_rows(np.arange(rows * width).astype(np.uint16).reshape(rows, width))
        case _:
            return logit_rows(np.arange(rows * width).astype(np.float16).reshape(rows, width))


def columns(block: Any) -> list[Any]:
    return list(block.columns.values())


@given(st.data(), st.lists(blocks(), min_size=1, max_size=3), cuts, st.booleans())
def test_answers_arrive_as_they_were_given(data: Any, held: list[Any], sizes: list[int], room: bool) -> None:
    """Rows of spans that share a block share it on the other side; large ones lie where they were put."""
    outcomes = st.one_of(
        st.builds(SpanResult, u32, st.none()),
        st.builds(SpanResult, u32, st.builds(Rows, st.sampled_from(held), st.integers(0, 9), st.integers(0, 9))),
        st.just(KvBlocksExhausted("no room", metadata={"needed_blocks": 2}, retry_after_s=0.5)),
    )
    timings = st.none() | st.builds(StepTiming, u32, u32, u32, st.floats(0, 9), st.floats(0, 9))
    answers = data.draw(st.lists(st.tuples(u32, st.lists(outcomes, max_size=4).map(tuple), timings), max_size=4))
    results = data.draw(st.lists(st.tuples(u32, st.sampled_from([None, 7, "x", StepFailed("no")])), max_size=3))
    turn = Turn(
        answers,
        results,
        data.draw(st.lists(u32, max_size=3)),
        EngineCounters(1, 2, 3, 4, 0.5),
        CacheState(16, 10, 9, 2**40),
        data.draw(st.sampled_from([None, {"fork": 2}])),
    )
    arena: list[Any] = []

    def place(array: Any) -> int | None:
        assert array.nbytes > INLINE_BYTES
        if not room:
            return None
        arena.append(array)
        return len(arena) - 1

    ((kind, body),) = fed(write_turn(turn, place), sizes)
    assert kind == Kind.TURN
    found = read_turn(memoryview(body), lambda offset, dtype, count: arena[offset].reshape(-1))
    assert (found.free, found.counters, found.cache, found.news) == (turn.free, turn.counters, turn.cache, turn.news)
    for (slot, result), (sent_slot, sent) in zip(found.results, results, strict=True):
        assert slot == sent_slot and repr(result) == repr(sent)
    again: dict[int, Any] = {}
    for (slot, told, timing), (sent_slot, sent, sent_timing) in zip(found.answers, answers, strict=True):
        assert (slot, timing) == (sent_slot, sent_timing)
        for outcome, wanted in zip(told, sent, strict=True):
            if not isinstance(wanted, SpanResult):
                assert isinstance(outcome, KvBlocksExhausted) and vars(outcome) == vars(wanted)
                continue
            assert outcome.length == wanted.length and (outcome.rows is None) == (wanted.rows is None)
            if wanted.rows is None:
                continue
            assert (outcome.rows.first, outcome.rows.count) == (wanted.rows.first, wanted.rows.count)
            block = outcome.rows.block
            assert again.setdefault(id(wanted.rows.block), block) is block
            assert type(block) is type(wanted.rows.block)
            for column, expected in zip(columns(block), columns(wanted.rows.block), strict=True):
                assert column.dtype == expected.dtype and column.shape == expected.shape
                np.testing.assert_array_equal(column, expected)


def test_an_empty_frame_is_one() -> None:
    assert fed(frame(Kind.STOP) * 2, [3]) == [(Kind.STOP, b""), (Kind.STOP, b"")]


def test_an_answer_does_not_keep_what_was_read_with_it() -> None:
    """Recorded answers live long, and a read brings 64 KiB."""
    block = token_rows(np.array([7], dtype=np.uint32))
    turn = Turn([(1, (SpanResult(3, Rows(block, 0, 1)),), None)], [], [], EngineCounters(), CacheState(1, 1, 1, 1))
    body = memoryview(write_turn(turn, lambda _: None))[5:]
    ((_, (outcome,), _),) = read_turn(body, lambda *_: np.zeros(0)).answers
    assert isinstance(outcome, SpanResult) and outcome.rows is not None
    assert outcome.rows.block["token_ids"].base is None  # type: ignore[union-attr]
