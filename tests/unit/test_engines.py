"""Both engines, with a runner of nothing: what holds for the thread holds for a process of its own, whose death is an
answer. What their loop does is in test_loop_overlap.py."""

from __future__ import annotations

import asyncio
import os
import pickle
import select
import shutil
import signal
import struct
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ferrum_rpc.core import CacheState, FullLogits, OutputSpec, Run, RunEnd, SelectedTokens, Span, SpanResult
from ferrum_rpc.engine import liveness
from ferrum_rpc.engine.api import Operation, Submission
from ferrum_rpc.engine.channel import Messages
from ferrum_rpc.engine.commands import Command
from ferrum_rpc.engine.liveness import Liveness, runs_compiler
from ferrum_rpc.engine.process.parent import EngineDied, EngineProcess, Program
from ferrum_rpc.engine.thread import ModelThread
from ferrum_rpc.errors import (
    Cancelled,
    DeadlineExceeded,
    DeviceLost,
    Draining,
    ExecutorError,
    InvalidRequest,
    KvBlocksExhausted,
    StepFailed,
)
from tests.support.rows import tokens_of
from tests.support.waiting import until
from tests.unit.engine_program import (
    BREAK,
    COMPILE,
    COUNT,
    DIE,
    EXIT,
    FAIL,
    LARGE,
    LARGE_SHAPE,
    LOSE,
    REFUSE,
    SPIN,
    WAIT,
    TokenRunner,
    build,
)

PROGRAM = str(Path(__file__).with_name("engine_program.py"))
THREAD, PROCESS = "thread", "process"
BOTH = pytest.mark.parametrize("kind", [THREAD, PROCESS])


def span(sequence: int, token: int = 5, tokens: int = 1, **more: Any) -> Span:
    fed = np.full(tokens, token, dtype=np.int32)
    return Span(sequence, fed, 0, more.pop("output", OutputSpec()), **more)


class Harness:
    """An engine, and the two pipes of its gate. ``runner``: of a thread."""

    def __init__(self, folder: Path, kind: str = PROCESS, items: int = 8, tokens: int = 64, **more: Any) -> None:
        self.gate = folder / "gate"
        os.mkfifo(self.gate)
        os.mkfifo(self.gate.with_suffix(".reached"))
        self.failures: list[BaseException] = []
        self.ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.timings: list[Any] = []
        setup = more.pop("setup", str(self.gate))
        program = Program((sys.executable, PROGRAM), setup)
        self.runner: TokenRunner | None = None if kind == PROCESS or not setup else build(setup)
        made: Any = (
            partial(EngineProcess, program)
            if kind == PROCESS
            else partial(ModelThread, lambda: self.runner or build(setup))
        )
        self.engine = made(
            loop=asyncio.get_running_loop(),
            max_step_items=items,
            max_step_tokens=tokens,
            on_ready=self.ready.set_result,
            on_failed=self.failures.append,
            on_step=lambda step, waits: self.timings.append((step, waits)),
            **more,
        )

    def submit(self, *spans: Span, **more: Any) -> tuple[Submission, asyncio.Future[Any]]:
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        submission = Submission(spans, lambda outcomes, timing: done.set_result((outcomes, timing)), **more)
        self.engine.submit(submission)
        return submission, done

    async def outcome(self, *spans: Span) -> Any:
        return await only(self.submit(*spans)[1])

    async def do(self, method: str, *arguments: Any) -> Any:
        done: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self.engine.submit(Operation(Command(SimpleNamespace(__name__=method), *arguments), done.set_result))
        return await done

    async def held(self, *spans: Span) -> tuple[Submission, asyncio.Future[Any]]:
        """As `submit`; returns when their step stands at the gate."""
        submitted = self.submit(*spans)
        await self.reached()
        return submitted

    async def reached(self) -> None:
        await asyncio.to_thread(self.gate.with_suffix(".reached").read_bytes)

    async def open(self) -> None:
        await asyncio.to_thread(self.gate.write_bytes, b"x")


async def only(done: asyncio.Future[Any]) -> Any:
    """The outcome of a submission of one span."""
    (outcome,), _ = await done
    return outcome


@asynccontextmanager
async def harness(folder: Path, kind: str = PROCESS, **more: Any) -> AsyncIterator[Harness]:
    made = Harness(folder, kind, **more)
    made.engine.start()
    try:
        yield made
    finally:
        await made.engine.stop()


@BOTH
async def test_submissions_that_wait_become_one_step_within_its_budget(kind, tmp_path):
    made = Harness(tmp_path, kind, items=3, tokens=10)
    waiting = [made.submit(span(index)) for index in range(3)] + [made.submit(span(9, tokens=9))]
    assert (made.engine.queued_items, made.engine.queued_tokens) == (4, 12)
    made.engine.start()
    answers = [await done for _, done in waiting]
    assert await made.do("seen") == [([0, 1, 2], []), ([9], [])]
    assert (made.engine.queued_items, made.engine.queued_tokens) == (0, 0)
    counters = made.engine.counters
    assert (counters.steps, counters.tokens, counters.blocks_copied) == (2, 12, 4)
    assert made.engine.cache == CacheState(16, 10, 8, 1, total_slots=5, free_slots=4)
    described = await made.ready
    assert (described.info, described.device) == ("a model", "a device")
    for (outcome,), timing in answers[:3]:
        assert outcome.length == 1 and tokens_of(outcome.rows) == [5]
        assert (timing.step, timing.sequences, timing.tokens) == (1, 3, 3) and timing.queue_s >= 0
    assert [each for _, waits in made.timings for each in waits] == [timing.queue_s for _, timing in answers]
    assert [step._replace(queue_s=0.0) for step, _ in made.timings] == list(
        dict.fromkeys(timing._replace(queue_s=0.0) for _, timing in answers)
    )
    assert await made.engine.stop()


@BOTH
async def test_a_submission_is_never_split_and_atomic_groups_are_its_spans(kind, tmp_path):
    async with harness(tmp_path, kind, items=4) as made:
        _, held = await made.held(span(0, WAIT))
        _, first = made.submit(span(1))
        _, group = made.submit(span(2), span(3, REFUSE), all_or_nothing=True)
        await made.open()
        await asyncio.gather(held, first)
        ran, refused = (await group)[0]
        assert isinstance(ran, SpanResult) and isinstance(refused, KvBlocksExhausted)
        assert refused.metadata == {"needed_blocks": "3"} and refused.message == "as asked"
        assert await made.do("seen") == [([0], []), ([1, 2, 3], [(1, 3)])]


@BOTH
async def test_cancelled_before_the_claim_never_runs_and_after_it_completes(kind, tmp_path):
    async with harness(tmp_path, kind) as made:
        running, ran = await made.held(span(1, WAIT))
        queued, never = made.submit(span(2))
        operation: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        undone = Operation(Command(SimpleNamespace(__name__="bug")), operation.set_result)
        made.engine.submit(undone)
        assert not made.engine.cancel(running)
        assert made.engine.cancel(queued) and made.engine.cancel(undone)
        assert not made.engine.cancel(queued)
        assert (made.engine.queued_items, made.engine.queued_tokens) == (0, 0)
        await made.open()
        await ran
        await made.outcome(span(3))
        assert await made.do("seen") == [([1], []), ([3], [])]
        assert not never.done() and not operation.done() and not made.failures
        assert not made.engine.cancel(running)


async def test_every_piece_of_work_gives_its_place_back(tmp_path):
    """More work than there are places, a part of it cancelled, and each answer is its own."""
    async with harness(tmp_path, slots=8) as made:
        for turn in range(20):
            _, held = await made.held(span(0, WAIT))
            work = [made.submit(span(index, 100 + index)) for index in range(1, 6)]
            for submission, _ in work[turn % 2 :: 2]:
                assert made.engine.cancel(submission)
            await made.open()
            await held
            for submission, done in work[1 - turn % 2 :: 2]:
                assert tokens_of((await only(done)).rows) == submission.spans[0].tokens.tolist()
            assert await made.do("process")
        assert made.engine.queued_items == 0


@BOTH
async def test_a_deadline_that_has_passed_is_answered_without_a_step(kind, tmp_path):
    async with harness(tmp_path, kind) as made:
        (outcome,), timing = await made.submit(span(1), deadline=0.0)[1]
        assert isinstance(outcome, DeadlineExceeded) and timing is None
        assert await made.do("seen") == []


@BOTH
async def test_failures_and_refusals_are_answers_and_the_engine_lives(kind, tmp_path):
    async with harness(tmp_path, kind) as made:
        assert isinstance(await made.outcome(span(1, FAIL)), StepFailed)
        refusal = await made.do("refuse")
        assert isinstance(refusal, InvalidRequest) and refusal.field == "x"
        assert isinstance(await made.outcome(span(2)), SpanResult)
        assert not made.failures


@pytest.mark.parametrize(
    ("kind", "token", "told"),
    [
        (PROCESS, DIE, EngineDied),
        (PROCESS, LOSE, DeviceLost),
        (THREAD, LOSE, DeviceLost),
        (THREAD, BREAK, ValueError),
        (THREAD, EXIT, SystemExit),
    ],
)
async def test_its_end_answers_the_running_the_queued_and_the_later(kind, token, told, tmp_path):
    async with harness(tmp_path, kind, items=1) as made:
        _, held = await made.held(span(0, WAIT))
        waiting = [made.submit(span(index, token))[1] for index in range(3)]
        await made.open()
        await held
        for done in waiting:
            assert isinstance(await only(done), DeviceLost)
        assert isinstance(await made.outcome(span(9)), DeviceLost)
        assert isinstance(await made.do("seen"), DeviceLost)
        (failure,) = made.failures
        assert type(failure) is told
        await until(lambda: made.engine.hang_reason(0.0) == "it has ended")
        assert made.engine.queued_items == 0
        assert made.runner is None or made.runner.seen() == [([0], []), ([0], [])]


@pytest.mark.parametrize(
    ("kind", "bug", "told"),
    [
        (THREAD, "bug", ValueError("as asked")),
        (PROCESS, "bug", ValueError("as asked")),
        (PROCESS, "foreign_bug", RuntimeError("Foreign: as asked")),
    ],
)
async def test_a_bug_in_an_operation_ends_it_and_says_what_it_was(kind, bug, told, tmp_path):
    async with harness(tmp_path, kind) as made:
        assert isinstance(await made.do(bug), DeviceLost)
        assert isinstance(await made.outcome(span(1)), DeviceLost)
        (failure,) = made.failures
        assert repr(failure) == repr(told)


@BOTH
async def test_a_build_that_fails_is_told_and_nobody_waits_for_ever(kind, tmp_path):
    async with harness(tmp_path, kind, setup="") as made:
        assert isinstance(await made.outcome(span(1)), DeviceLost)
        (failure,) = made.failures
        assert isinstance(failure, ExecutorError) and str(failure) == "no such model"


@BOTH
async def test_stop_finishes_what_is_queued_and_refuses_what_comes_later(kind, tmp_path):
    async with harness(tmp_path, kind, items=1) as made:
        waiting = [made.submit(span(index))[1] for index in range(3)]
        assert await made.engine.stop()
        for done in waiting:
            assert isinstance(await only(done), SpanResult)
        assert isinstance(await made.outcome(span(9)), Draining)
        assert not made.failures


@pytest.mark.parametrize(
    ("fed", "liveness", "says"),
    [
        (span(1, WAIT), Liveness(stall_timeout_s=1.0), "neither moved on nor computed"),
        (span(SPIN), Liveness(device_timeout_s=0.5, max_step_s=30), "the device has not finished"),
    ],
    ids=["it waits", "it spins for a device"],
)
async def test_one_that_hangs_is_told_and_killed_at_the_end(fed, liveness, says, tmp_path):
    async with harness(tmp_path, liveness=liveness) as made:
        await made.ready
        _, done = made.submit(fed)
        await until(lambda: made.engine.hang_reason(time.monotonic()) is not None)
        assert says in str(made.engine.hang_reason(time.monotonic()))
        assert not await made.engine.stop()
        assert isinstance(await only(done), Draining)


async def test_a_thread_that_hangs_is_told_from_one_that_waits_for_work_and_left_behind_at_the_end(tmp_path):
    async with harness(tmp_path, THREAD, liveness=Liveness(stall_timeout_s=1.0)) as made:
        with pytest.raises(TimeoutError):  # idle for longer than the stall timeout
            await until(lambda: made.engine.hang_reason(time.monotonic()) is not None, 1.5)
        _, done = await made.held(span(1, WAIT))
        try:
            await until(lambda: made.engine.hang_reason(time.monotonic()) is not None)
            assert not await made.engine.stop()
        finally:
            await made.open()
        assert isinstance(await only(done), SpanResult)
        assert await made.engine.stop()
        assert made.engine.hang_reason(time.monotonic()) == "it has ended"


async def test_a_step_that_waits_for_a_compiler_of_its_process_is_no_hang(tmp_path, monkeypatch):
    asked = list[int]()
    monkeypatch.setattr(liveness, "runs_compiler", lambda process: asked.append(process) or True)
    async with harness(tmp_path, THREAD, liveness=Liveness(stall_timeout_s=0.5)) as made:
        _, done = await made.held(span(1, WAIT))
        try:
            await until(lambda: made.engine.hang_reason(time.monotonic()) is not None or bool(asked))
            assert made.engine.hang_reason(time.monotonic()) is None and set(asked) == {os.getpid()}
        finally:
            await made.open()
        await done


async def test_a_step_that_waits_for_a_compiler_is_waited_for_at_the_end(tmp_path, monkeypatch):
    tmp_path.joinpath("ptxas").symlink_to(str(shutil.which("cat")))
    looks: list[bool] = []

    def look(process: int) -> bool:
        looks.append(runs_compiler(process))
        return looks[-1]

    monkeypatch.setattr(liveness, "runs_compiler", look)
    async with harness(tmp_path, liveness=Liveness(stall_timeout_s=1.0)) as made:
        await made.ready
        process = await made.do("process")
        _, done = made.submit(span(1, COMPILE))
        await until(lambda: runs_compiler(process))
        stopping = asyncio.ensure_future(made.engine.stop())
        await until(lambda: looks[-2:] == [True, True])  # silent for longer than a hang
        await made.open()
        assert await stopping
        assert isinstance(await only(done), SpanResult)


async def test_one_that_is_stopped_while_it_waits_for_work_is_in_trouble(tmp_path):
    async with harness(tmp_path, liveness=Liveness(stall_timeout_s=0.2)) as made:
        process = await made.do("process")
        await until(lambda: made.engine.hang_reason(time.monotonic()) is None)
        os.kill(process, signal.SIGSTOP)
        try:
            _, done = made.submit(span(1))
            await until(lambda: made.engine.hang_reason(time.monotonic()) is not None)
        finally:
            os.kill(process, signal.SIGCONT)
        await done
        await until(lambda: made.engine.hang_reason(time.monotonic()) is None)


async def test_what_cannot_be_read_ends_it_and_answers_what_it_owes(tmp_path, monkeypatch):
    feed = Messages.feed
    async with harness(tmp_path) as made:
        _, running = await made.held(span(1, WAIT))
        _, queued = made.submit(span(2))
        broken = struct.pack("<II", 4, 0) + b"none"
        monkeypatch.setattr(Messages, "feed", lambda messages, data: feed(messages, broken + data))
        await made.open()
        for each in (running, queued):
            assert isinstance(await only(each), DeviceLost)
        assert isinstance(made.failures[0], pickle.UnpicklingError)


async def test_large_rows_arrive_whole_and_their_memory_is_used_again(tmp_path):
    full = OutputSpec(kind=FullLogits())
    async with harness(tmp_path) as made:
        kept = await made.outcome(span(7, LARGE, output=full))
        expected = np.arange(np.prod(LARGE_SHAPE), dtype=np.float32).reshape(LARGE_SHAPE)
        first = kept.rows.block["logits"]
        np.testing.assert_array_equal(first, expected + 7)
        places = set()
        for sequence in range(20):
            outcome = await made.outcome(span(sequence, LARGE, output=full))
            logits = outcome.rows.block["logits"]
            np.testing.assert_array_equal(logits, expected + sequence)
            assert not np.shares_memory(logits, first)
            places.add(logits.__array_interface__["data"][0])
            del outcome, logits
        assert len(places) <= 2, "freed rows lie where the next ones go"
        np.testing.assert_array_equal(first, expected + 7)


async def test_more_than_a_pipe_holds_goes_over_in_order(tmp_path):
    async with harness(tmp_path, items=4, tokens=1 << 20) as made:
        _, held = await made.held(span(0, WAIT))
        specs = [OutputSpec(kind=SelectedTokens(tuple(range(index, index + 500)))) for index in range(4)]
        work = [made.submit(span(index, 5, tokens=50_000, output=specs[index % 4]))[1] for index in range(1, 41)]
        await made.open()
        await held
        for done in work:
            assert (await only(done)).length == 50_000
        assert [sequence for step, _ in await made.do("seen") for sequence in step] == list(range(41))


def test_it_dies_with_its_server(tmp_path):
    """Even where it computes: nobody is left to stop it."""
    reading, writing = os.pipe()
    server = os.fork()
    if server == 0:  # pragma: no cover - the child
        try:
            os.close(reading)

            async def be_a_server() -> None:
                made = Harness(tmp_path)
                made.engine.start()
                pid = await made.do("process")
                await made.held(span(1, WAIT))
                os.write(writing, str(pid).encode())
                threading.Event().wait()

            asyncio.run(be_a_server())
        finally:
            os._exit(1)
    os.close(writing)
    engine = int(os.read(reading, 100))
    watched = os.pidfd_open(engine)
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
    assert select.select([watched], [], [], 30)[0], "the engine process outlived its server"


# --- runs -------------------------------------------------------------------------------------------------------------


@BOTH
async def test_a_run_goes_on_by_itself_and_passes_its_tokens_on(kind, tmp_path):
    async with harness(tmp_path, kind) as made:
        chosen: list[Any] = []
        spans = span(1), span(2, COUNT, run=Run(4)), span(3, 1500, run=Run(9, (1503,)))
        _, done = made.submit(*spans, on_tokens=chosen.extend)
        outcomes, timing = await done
        assert [tokens_of(each.rows) for each in outcomes] == [[5], [1001, 1002, 1003, 1004], [1501, 1502, 1503]]
        assert [each.length for each in outcomes] == [1, 4, 3]
        assert [each.ended and each.ended.end for each in outcomes] == [None, RunEnd.MAX_TOKENS, RunEnd.STOP_ID]
        assert sorted(chosen) == [(1, n, 1001 + n) for n in range(4)] + [(2, n, 1501 + n) for n in range(3)]
        assert timing.step == made.engine.counters.steps == 4 and made.engine.counters.running == 0
        assert timing.forward_s == pytest.approx(0.004)
        assert await made.do("given_back") == [3, 2]
        assert [step.sequences for step, _ in made.timings] == [3, 2, 2, 1]
        assert [len(waits) for _, waits in made.timings] == [1, 0, 0, 0]


@BOTH
async def test_a_run_is_cut_where_it_stands(kind, tmp_path):
    async with harness(tmp_path, kind) as made:
        first, done = await made.held(span(1, WAIT), span(2, COUNT, run=Run(30)), span(3, COUNT, run=Run(3)))
        assert not made.engine.cancel(first)
        made.engine.interrupt(first, 1, Cancelled("as asked"))
        await made.open()
        outcomes, _ = await done
        assert tokens_of(outcomes[1].rows) == [1001] and tokens_of(outcomes[2].rows) == [1001, 1002, 1003]
        assert outcomes[1].ended.end is RunEnd.CUT and isinstance(outcomes[1].ended.cause, Cancelled)
        made.engine.interrupt(first, None, Cancelled("too late"))
        assert await made.outcome(span(4)) is not None


def behind(sequence: int, start: int, most: int) -> Span:
    """A run that feeds the token which what it follows chooses last."""
    return Span(sequence, np.zeros(1, np.int32), start, OutputSpec(), run=Run(most))


@BOTH
async def test_a_run_begins_in_the_step_after_the_one_that_it_follows(kind, tmp_path):
    async with harness(tmp_path, kind) as made:
        order: list[str] = []
        first, done = await made.held(span(1, COUNT, run=Run(2)), span(2, WAIT))
        done.add_done_callback(lambda _: order.append("done"))
        _, follows = made.submit(behind(1, 2, 3), behind=(first, 0), begins=lambda: order.append("begins"))
        _, wrong = made.submit(behind(2, 5, 3), behind=(first, 1), begins=lambda: order.append("wrong"))
        withdrawn, never = made.submit(behind(2, 1, 3), behind=(first, 1), begins=lambda: order.append("wrong"))
        assert made.engine.cancel(withdrawn)
        assert (made.engine.queued_items, made.engine.queued_tokens) == (0, 0)
        await made.open()
        outcomes, timing = await follows
        assert tokens_of((await done)[0][0].rows) == [1001, 1002] and tokens_of(outcomes[0].rows) == [1003, 1004, 1005]
        assert timing.step == made.engine.counters.steps == 5
        assert await wrong == ((), None) and not never.done()
        await asyncio.sleep(0)  # its callback may be scheduled only
        assert order == ["begins", "done"]
        assert [sequences for sequences, _ in await made.do("seen")] == [[1, 2]] + [[1]] * 4
        _, late = made.submit(behind(1, 5, 3), behind=(first, 0), begins=lambda: order.append("wrong"))
        assert await late == ((), None), "what it follows was over"
        assert (made.engine.queued_items, made.engine.queued_tokens) == (0, 0)


async def test_runs_and_what_follows_them_are_answered_when_the_engine_dies(tmp_path):
    async with harness(tmp_path) as made:
        first, done = await made.held(span(1, COUNT, run=Run(9)), span(2, WAIT))
        _, fatal = made.submit(span(3, DIE))
        _, follows = made.submit(behind(1, 9, 3), behind=(first, 0), begins=lambda: None)
        await made.open()
        for each in (done, fatal, follows):
            outcomes, _ = await each
            assert all(isinstance(outcome, DeviceLost) for outcome in outcomes)
