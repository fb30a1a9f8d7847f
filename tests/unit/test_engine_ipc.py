"""Messages between a server and its engine process arrive as they were sent, wherever the socket cuts them, and the
memory that both share."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ferrum_rpc import core
from ferrum_rpc.engine.channel import INLINE_BYTES, Messages, dump
from ferrum_rpc.engine.process.ipc import KEPT_BYTES, UNIT, SharedMemory, pack_span, unpack_span
from ferrum_rpc.errors import KvBlocksExhausted
from tests.support.rows import logit_rows, selected_rows, token_rows, top_token_rows

u32 = st.integers(0, 2**32 - 1)
kinds = st.one_of(
    st.builds(core.Greedy, st.booleans()),
    st.builds(core.TopTokens, st.integers(1, 1024)),
    st.builds(core.SelectedTokens, st.lists(u32, min_size=1, max_size=5).map(tuple)),
    st.builds(core.FullLogits, st.sampled_from(core.RowDType)),
)
spans = st.builds(
    core.Span,
    st.integers(0, 2**64 - 1),
    arrays.arrays(np.int32, st.integers(1, 9)),
    u32,
    st.builds(core.OutputSpec, st.sampled_from(core.Positions), kinds),
    st.booleans(),
    u32,
)
cuts = st.lists(st.integers(1, 200), max_size=40)


def fed(data: bytes, sizes: list[int], view: Any = None) -> list[Any]:
    """The messages of ``data`` that comes in pieces of ``sizes``, and then what is left."""
    messages, found, at = Messages(view or (lambda *_: b"")), [], 0
    for size in [*sizes, len(data)]:
        found += messages.feed(data[at : at + size])
        at += size
    return found


@settings(max_examples=30)
@given(st.lists(st.lists(spans, max_size=5), max_size=6), cuts)
def test_work_arrives_as_it_was_sent(sent: list[list[core.Span]], sizes: list[int]) -> None:
    arrived = fed(b"".join([dump(list(map(pack_span, each))) for each in sent]), sizes)
    for taken, wanted in zip(arrived, sent, strict=True):
        spans = [unpack_span(*each) for each in taken]
        for found, span in zip(spans, wanted, strict=True):
            assert found.tokens.tolist() == span.tokens.tolist() and found.tokens.dtype == np.int32
            assert found._replace(tokens=None) == span._replace(tokens=None)


def floats(*shape: int) -> st.SearchStrategy[Any]:
    return arrays.arrays(np.float32, shape, elements=st.floats(width=32, allow_nan=False))


def ids(*shape: int) -> st.SearchStrategy[Any]:
    return arrays.arrays(np.uint32, shape)


@st.composite
def blocks(draw: Callable[[Any], Any]) -> Any:
    rows, width = draw(st.integers(1, 5)), draw(st.sampled_from([1, 3, INLINE_BYTES // 4]))
    match draw(st.sampled_from(["tokens", "logprobs", "beside", "top", "selected", "f32", "bf16", "f16"])):
        case "tokens":
            return token_rows(draw(ids(rows)))
        case "logprobs":
            return token_rows(draw(ids(rows)), draw(floats(rows)))
        case "beside":
            found = {"token_ids": draw(ids(rows)), "selected_logprobs": draw(floats(rows, 4))}
            return core.RowBlock(core.RowKind.TOKENS, found)
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
    return list(block.columns.items())


@settings(max_examples=30)
@given(st.data(), st.lists(blocks(), min_size=1, max_size=3), cuts, st.booleans())
def test_answers_arrive_as_they_were_given(data: Any, held: list[Any], sizes: list[int], room: bool) -> None:
    """Rows of spans that share a block share it on the other side; large ones lie where they were put."""
    rows = st.builds(core.Rows, st.sampled_from(held), st.integers(0, 9), st.integers(0, 9))
    outcomes = st.one_of(
        st.builds(core.SpanResult, u32, st.none(), st.none()),
        st.builds(core.SpanResult, u32, rows, st.none(), u32, u32),
        st.just(KvBlocksExhausted("no room", metadata={"needed_blocks": 2}, retry_after_s=0.5)),
    )
    timings = st.none() | st.builds(core.StepTiming, u32, u32, u32, st.floats(0, 9), st.floats(0, 9))
    answers = data.draw(st.lists(st.tuples(u32, st.lists(outcomes, max_size=4).map(tuple), timings), max_size=4))
    placed: list[bytes] = []

    def place(buffer: memoryview) -> int | None:
        assert buffer.nbytes > INLINE_BYTES
        if not room:
            return None
        placed.append(bytes(buffer))
        return len(placed) - 1

    (found,) = fed(dump(answers, place), sizes, lambda at, count: placed[at][:count])
    again: dict[int, Any] = {}
    for (slot, told, timing), (sent_slot, sent, sent_timing) in zip(found, answers, strict=True):
        assert (slot, timing) == (sent_slot, sent_timing)
        for outcome, wanted in zip(told, sent, strict=True):
            if not isinstance(wanted, core.SpanResult):
                assert isinstance(outcome, KvBlocksExhausted) and vars(outcome) == vars(wanted)
                continue
            assert outcome._replace(rows=None) == wanted._replace(rows=None)
            assert (outcome.rows is None) == (wanted.rows is None)
            if wanted.rows is None:
                continue
            assert (outcome.rows.first, outcome.rows.count) == (wanted.rows.first, wanted.rows.count)
            block = outcome.rows.block
            assert again.setdefault(id(wanted.rows.block), block) is block
            assert type(block) is type(wanted.rows.block)
            for (name, column), (wanted_name, expected) in zip(columns(block), columns(wanted.rows.block), strict=True):
                assert name == wanted_name
                assert column.dtype == expected.dtype and column.shape == expected.shape
                np.testing.assert_array_equal(column, expected)


def test_an_answer_does_not_keep_what_was_read_with_it() -> None:
    """Recorded answers live long, and a read brings 64 KiB."""
    block = token_rows(np.array([7], dtype=np.uint32))
    (outcome,) = fed(dump(core.SpanResult(3, core.Rows(block, 0, 1)), lambda _: None), [])
    assert isinstance(outcome, core.SpanResult) and outcome.rows is not None
    assert memoryview(outcome.rows.block["token_ids"].base).nbytes == 4  # type: ignore[arg-type]


# --- memory -----------------------------------------------------------------------------------------------------------

SIZE = 12 * UNIT


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 4 * UNIT), st.integers(0, 99)), max_size=40))
def test_what_is_placed_lies_alone_until_it_is_not_looked_at_any_more(moves: list[tuple[bool, int, int]]) -> None:
    memory = SharedMemory.create(4, SIZE)
    held: dict[int, tuple[int, Any]] = {}
    try:
        for number, (place, count, which) in enumerate(moves):
            if place:
                at = memory.place(memoryview(bytes([number]) * count))
                if at is None:
                    assert held, "empty memory has room"
                    continue
                assert at % UNIT == 0 and at + count <= SIZE
                held[at] = number, memory.view(at, count)
            elif held:
                del held[sorted(held)[which % len(held)]]
            assert all((view[:: UNIT // 4] == number).all() for number, view in held.values())
        held.clear()
        assert memory.place(memoryview(bytes(SIZE))) == 0, "all of it is one piece again"
        assert bytes(memory.states) == bytes(4)
    finally:
        os.close(memory.fd)


def test_memory_beyond_what_is_kept_goes_back() -> None:
    memory = SharedMemory.create(4, 4 * KEPT_BYTES)
    assert memory.place(memoryview(b"x" * (3 * KEPT_BYTES))) == 0
    view = memory.view(0, 3 * KEPT_BYTES)
    assert os.stat(memory.fd).st_blocks * 512 >= 3 * KEPT_BYTES
    del view
    assert os.stat(memory.fd).st_blocks * 512 <= KEPT_BYTES + UNIT
    os.close(memory.fd)


def test_memory_is_one_for_both_and_its_lock_is_held_by_one() -> None:
    memory = SharedMemory.create(4)
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover - the other process
        try:
            mine = SharedMemory(memory.fd, 4)
            with mine:
                mine.states[2], mine.claimed[0], mine.busy_since[0] = 1, 5, 2.5
                os.write(told, b"x")
                signal.pause()
        finally:
            os._exit(1)
    os.read(ready, 1)
    assert (memory.states[2], memory.claimed[0], memory.busy_since[0]) == (1, 5, 2.5)
    assert not memory.try_enter(), "the other side has it"
    watched: Any = os.pidfd_open(child)
    os.kill(child, signal.SIGKILL)
    assert select.select([watched], [], [], 30)[0]
    os.waitpid(child, 0)
    assert memory.try_enter(), "the dead hold nothing"
    memory.__exit__()
    for fd in (watched, ready, told, memory.fd):
        os.close(fd)
