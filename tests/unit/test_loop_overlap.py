"""The loop with a runner that may have two steps under way: when it begins the next, and who is told what, and when.

Nothing here has threads: callers are asked for work where the loop looks for it, and answered where it delivers.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from queue import Empty
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import (
    CacheState,
    FullLogits,
    Greedy,
    OutputSpec,
    Positions,
    Run,
    Span,
    SpanResult,
    Step,
    StepResult,
)
from ferrum_rpc.engine import loop as engine_loop
from ferrum_rpc.engine.api import Finished, Operation, Runner, Submission, WorkState
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.liveness import Liveness
from ferrum_rpc.engine.loop import EngineLoop, Work
from ferrum_rpc.engine.overlap import LOOK_S, MARGIN, Overlap
from ferrum_rpc.errors import DeviceLost, ExecutorError, KvBlocksExhausted, StepFailed
from tests.fake_async_device import LOOKS, late_runner
from tests.unit.test_runner_transactions import Sabotage


class Script:
    """An inbox. A None looks empty once; at its end the loop is told to stop."""

    def __init__(self, *works: Submission | Operation | None) -> None:
        self.left: deque[Submission | Operation | None] = deque(works)

    def empty(self) -> bool:
        if self.left and self.left[0] is None:
            self.left.popleft()
            return True
        return not self.left

    def get(self, block: bool = True, timeout: float | None = None) -> Work:
        while self.left:
            if (work := self.left.popleft()) is not None:
                return work
        if not block:
            raise Empty
        return None


class Loop(EngineLoop):
    """Delivers at once; ``told`` has what became of it all, in order."""

    def __init__(self, runner: Any, inbox: Any, items: int = 1) -> None:
        super().__init__(
            lambda: runner,
            inbox=inbox,
            lock=threading.Lock(),
            max_step_items=items,
            max_step_tokens=1 << 20,
            max_running=1,
            on_ready=lambda _: None,
            on_failed=lambda error: self.told.append(("failed", error)),
        )
        self.told: list[Any] = []

    def run(self) -> Loop:
        self._run()
        self._refuse_rest()
        return self

    def _deliver(self, finished: Finished) -> None:
        for each in finished:
            each()

    def _cancelled(self, work: Submission | Operation) -> bool:
        if work.state is WorkState.CANCELLED:
            self.told.append(("dropped", work))
        return work.state is WorkState.CANCELLED

    def _claimed(self, work: Submission | Operation) -> None:
        work.state = WorkState.CLAIMED

    def _on_step_done(self, step: Any, waits: Sequence[float]) -> None:
        pass


class Fake:
    """A runner of nothing, two steps under way. ``log``: what it was asked; ``acts``: by that, what happens then."""

    def __init__(self, depth: int = 2, ready: bool = False) -> None:
        self.info: Any = None
        self.device: Any = None
        self.depth = depth
        self.log: list[str] = []
        self.acts: dict[str, Callable[[], object]] = {}
        self._ready = ready
        self._looks = 0

    ranks = list
    look_every_s = None
    follows = False
    in_stages = False
    constraints = None
    on_device = False

    def close(self) -> None:
        pass

    def context(self) -> AbstractContextManager[object]:
        return nullcontext()

    def begin(self, step: Step) -> Step:
        self._do(f"begin {step.spans[0].sequence}")
        return step

    def ready(self, pending: Step) -> bool:
        self._looks += 1
        return self._ready or self._looks > LOOKS

    def finish(self, pending: Step) -> StepResult:
        self._looks = 0
        self._do(f"finish {pending.spans[0].sequence}")
        return StepResult(tuple(SpanResult(span.end, None) for span in pending.spans), 0.001)

    def cache_state(self) -> CacheState:
        return CacheState(16, 10, 10, 0)

    def _do(self, what: str) -> None:
        self.log.append(what)
        self.acts.get(what, lambda: None)()


def fail(error: BaseException) -> Callable[[], object]:
    def act() -> None:
        raise error

    return act


def submission(loop: list[Loop], runner: Fake, sequence: int) -> Submission:
    """One span; its answer goes to the loop's ``told`` and to the runner's log."""

    def done(outcomes: Any, timing: Any) -> None:
        runner.log.append(f"answer {sequence}")
        loop[0].told.append((sequence, outcomes[0]))

    return Submission((Span(sequence, np.zeros(1, dtype=np.int32), 0, OutputSpec()),), done)


def run(runner: Fake, *sequences: int | None) -> Loop:
    """Submissions of a span each; None: nothing is there when it is looked for."""
    loop: list[Loop] = []
    script = Script(*(each if each is None else submission(loop, runner, each) for each in sequences))
    loop.append(Loop(runner, script))
    return loop[0].run()


def test_the_next_step_is_begun_before_the_first_is_finished_and_answers_keep_their_order() -> None:
    runner = Fake()
    run(runner, 1, None, 2, 3, 4)
    assert runner.log == [
        *("begin 1", "begin 2", "finish 1", "answer 1", "begin 3", "finish 2", "answer 2"),
        *("begin 4", "finish 3", "answer 3", "finish 4", "answer 4"),
    ]


def test_nobody_waits_for_work_that_is_not_there() -> None:
    runner = Fake()
    run(runner, 1, None, None, 2, None, None, 3)
    assert runner.log == [f"{what} {each}" for each in (1, 2, 3) for what in ("begin", "finish", "answer")]


@pytest.mark.parametrize(("depth", "ready"), [(1, False), (2, True)])
def test_one_after_the_other_where_there_is_one_or_the_first_is_ready(depth: int, ready: bool) -> None:
    runner = Fake(depth, ready)
    run(runner, 1, 2, 3)
    assert runner.log == [f"{what} {each}" for each in (1, 2, 3) for what in ("begin", "finish", "answer")]


def test_in_stages_the_next_step_is_begun_whenever_it_comes() -> None:
    """The first stage idles until then."""
    runner = Fake()
    runner.in_stages = True
    run(runner, 1, None, None, None, 2, None, 3)
    assert runner.log[:6] == ["begin 1", "begin 2", "finish 1", "answer 1", "begin 3", "finish 2"]


@pytest.mark.parametrize(("depth", "firsts"), [(2, [1, 4]), (3, [1, 3, 5]), (8, [1, 2, 3, 4, 5, 6])])
def test_stages_share_what_waits(depth: int, firsts: list[int]) -> None:
    """All of it in one step would be in one stage at a time."""
    runner, loop = Fake(depth), list[Loop]()
    runner.in_stages = True
    first, *others = [submission(loop, runner, each) for each in range(1, 7)]
    loop.append(Loop(runner, Script(first, *others), items=6))
    loop[0].run()
    assert [each for each in runner.log if each.startswith("begin")] == [f"begin {each}" for each in firsts]


def test_runs_share_stages_too() -> None:
    """Though all of them began in one step, which is never split."""
    config = replace(CONFIG, identity_max_context=64)
    runner = late_runner(config, in_stages=True)
    begun: list[int] = []
    begin = runner.begin
    runner.begin = lambda step: (begun.append(len(step.spans)), begin(step))[1]  # type: ignore[method-assign]
    told: list[Any] = []
    prompt = np.array([1, 2, 3], np.int32)
    output = OutputSpec(Positions.LAST, Greedy())
    spans = [Span(each, prompt, 0, output, create=True, run=Run(4)) for each in range(6)]
    Loop(runner, Script(Submission(tuple(spans), lambda *answer: told.append(answer))), items=6).run()
    assert begun == [6, 3, 3, 3, 3, 3, 3]
    [(outcomes, _)] = told
    assert all(isinstance(each, SpanResult) and each.rows is not None and each.rows.count == 4 for each in outcomes)


@pytest.mark.parametrize("point", ["begin", "finish"])
@pytest.mark.parametrize("which", [1, 2, 3])
def test_a_step_that_fails_is_its_own_callers_affair(point: str, which: int) -> None:
    runner = Fake()
    runner.acts[f"{point} {which}"] = fail(StepFailed("no"))
    told = dict(run(runner, 1, None, 2, 3).told)
    assert {each: type(told[each]) is StepFailed for each in told} == {each: each == which for each in (1, 2, 3)}


@pytest.mark.parametrize("error", [DeviceLost("gone"), RuntimeError("bug"), SystemExit(3)])
@pytest.mark.parametrize("point", ["finish 1", "begin 2", "finish 2"])
def test_a_device_that_is_lost_is_lost_to_both_steps_and_to_the_queue(point: str, error: BaseException) -> None:
    runner = Fake()
    runner.acts[point] = fail(error)
    told = run(runner, 1, None, 2, 3).told
    gone = {1, 2, 3} if point != "finish 2" else {2, 3}
    assert sorted(each for each, _ in told if each != "failed") == [1, 2, 3], "each once"
    assert {each for each, outcome in told if isinstance(outcome, DeviceLost)} - {"failed"} == gone
    assert [each for each in told if each[0] == "failed"] == [("failed", error)]
    first = next(index for index, each in enumerate(told) if each[0] == "failed")
    assert all(not isinstance(outcome, DeviceLost) for _, outcome in told[:first]), "whoever hears of it finds it so"


def test_an_operation_that_loses_the_device_answers_what_is_under_way() -> None:
    runner, loop = Fake(), []
    answers: list[object] = []
    script = Script(
        submission(loop, runner, 1), None, Operation(lambda runner: fail(DeviceLost("gone"))(), answers.append)
    )
    loop.append(Loop(runner, script))
    told = loop[0].run().told
    assert [type(each) for each in answers] == [DeviceLost]
    assert [each for each, outcome in told if isinstance(outcome, DeviceLost) and each != "failed"] == [1]
    assert runner.log == ["begin 1", "answer 1"]


def test_what_is_cancelled_while_a_step_is_under_way_never_begins() -> None:
    runner, loop = Fake(), []
    two = submission(loop, runner, 2)
    runner.acts["begin 1"] = lambda: setattr(two, "state", WorkState.CANCELLED)
    script = Script(submission(loop, runner, 1), None, two, submission(loop, runner, 3))
    loop.append(Loop(runner, script))
    told = loop[0].run().told
    assert ("dropped", two) in told and "begin 2" not in runner.log
    assert [each for each in runner.log if each.startswith("answer")] == ["answer 1", "answer 3"]


def test_a_steps_time_is_its_own_and_a_hang_of_either_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the length of a step: the second's begins when the first has ended, however long that took."""
    now = [1000.0]
    monkeypatch.setattr(engine_loop, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(Overlap, "due", lambda self, now: True)
    liveness = Liveness(max_step_s=60)
    loop: list[Loop] = []
    seen: dict[str, str | None] = {}

    def takes(name: str, seconds: float) -> Callable[[], object]:
        def act() -> None:
            now[0] += seconds
            seen[name] = liveness.hang_reason(now[0], loop[-1].busy_since)

        return act

    runner = Fake()
    runner.acts = {"begin 2": takes("begin 2", 25), "finish 1": takes("finish 1", 30)}
    runner.acts |= {"finish 2": takes("finish 2", 50), "begin 3": takes("begin 3", 61), "finish 3": takes("3", 1)}

    def play(*sequences: int | None) -> None:
        mine: list[Loop] = []
        mine.append(Loop(runner, Script(*(each and submission(mine, runner, each) for each in sequences))))
        loop.append(mine[0])
        mine[0].run()

    play(1, None, 2, None, None, 3)
    assert seen["begin 2"] is seen["finish 1"] is seen["finish 2"] is None
    assert "its step has taken 61 s" in str(seen["begin 3"])
    assert liveness.hang_reason(now[0], loop[-1].busy_since) is None
    runner.log.clear()
    runner.acts = {"begin 2": takes("begin 2", 61)}
    play(1, None, 2)
    assert runner.log[:2] == ["begin 1", "begin 2"] and seen["begin 2"] is not None, "in the time of the first"


@pytest.mark.parametrize("on_device", [True, False])
def test_a_device_is_waited_for_from_when_the_oldest_step_is_its(
    on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while the host begins a step and the device has none: kernels may be compiled then."""
    now = [1000.0]
    monkeypatch.setattr(engine_loop, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(Overlap, "due", lambda self, now: True)
    loop: list[Loop] = []
    seen: dict[str, float] = {}

    def takes(name: str) -> Callable[[], object]:
        def act() -> None:
            now[0] += 10
            seen[name] = loop[0].waiting_since

        return act

    runner = Fake()
    runner.on_device = on_device
    runner.acts = {name: takes(name) for name in ("begin 1", "begin 2", "finish 1", "finish 2")}
    loop.append(Loop(runner, Script(submission(loop, runner, 1), None, submission(loop, runner, 2))))
    loop[0].run()
    assert runner.log[:3] == ["begin 1", "begin 2", "finish 1"]
    since = {"begin 1": 0.0, "begin 2": 1010.0, "finish 1": 1010.0, "finish 2": 1030.0}
    assert seen == (since if on_device else dict.fromkeys(since, 0.0))
    assert loop[0].waiting_since == 0.0


# --- the overlap ------------------------------------------------------------------------------------------------------


def test_the_next_step_is_due_when_the_last_ones_length_leaves_time_to_begin_it() -> None:
    overlap = Overlap()
    assert overlap.due(5.0), "nothing is known: at once"
    overlap.begun(10.0, 10.25, idle=True)
    assert overlap.turn == 10.0 and overlap.due(10.25)
    overlap.begun(10.5, 11.0, idle=False)
    assert overlap.turn == 10.0
    overlap.finished(20.0)
    assert overlap.turn == 20.0
    due = 30.0 - MARGIN * 0.5 - LOOK_S
    assert not overlap.due(due - 1e-3) and overlap.due(due + 1e-3)
    overlap.finished(21.0)
    assert overlap.turn == 21.0 and overlap.due(22.0 - MARGIN * 0.5), "the last one's length, whatever came before"


# --- any history ------------------------------------------------------------------------------------------------------

CONFIG = ModelSettings(
    path="identity",
    device="cpu",
    block_size=4,
    kv_blocks=24,
    identity_vocab_size=32,
    identity_layers=1,
    identity_positional=True,
)
STAGES = ("reserve", "plan", "forward", "select", "commit", "truncate", "fork", "release")


class Caller:
    """Has a sequence, and one piece of work out at a time; what fails is asked for again, as it was."""

    def __init__(self, callers: Callers) -> None:
        self.callers, self.sequence, self.length = callers, callers.number(), 0
        self.created = False
        self.doing: Any = None
        self.done: list[tuple[Any, Any]] = []
        self.idle = True

    def work(self) -> Submission | Operation:
        self.idle = False
        data = self.callers.data
        if self.doing is None:
            kinds = ["step"] * 5 + ["truncate", "fork"] * self.created
            self.doing = data.draw(st.sampled_from(kinds)), data.draw(st.integers(0, 9)), data.draw(st.integers(1, 6))
        kind, back, count = self.doing
        sequence, start = self.sequence, max(0, self.length - back)
        if kind == "step":
            tokens = ((np.arange(count) + back + self.length) * 7 % 32).astype(np.int32)
            spans = (Span(sequence, tokens, start, OutputSpec(Positions.ALL, FullLogits()), not self.created),)
            return Submission(spans, lambda outcomes, timing: self.answered(spans[0], outcomes[0], timing))
        if kind == "truncate":
            return Operation(lambda runner: runner.truncate(sequence, start), lambda got: self.answered(start, got))
        child = self.callers.number()

        def move(runner: Any) -> int:
            """To a child of its own, and leave the parent behind."""
            length: int = runner.fork(sequence, [child], start)
            self.callers.orphans.append(sequence)
            self.sequence = child
            return length

        return Operation(move, lambda got: self.answered(start, got))

    def answered(self, asked: Any, got: Any, timing: Any = None) -> None:
        assert not self.idle, "each once"
        self.idle = True
        if isinstance(got, StepFailed | KvBlocksExhausted):
            self.callers.refused += 1
            return
        if isinstance(got, SpanResult):
            assert got.rows is not None and got.length == asked.end and timing.queue_s >= 0
            self.created, self.length = True, got.length
            self.done.append((asked, got.rows.detached().block))
        else:
            assert got == asked, got
            self.length = got
        self.doing = None


class Callers:
    """An inbox of `Caller`s that are asked when the loop looks, for as many pieces of work as there are left."""

    def __init__(self, data: st.DataObject, count: int, turns: int) -> None:
        self.data, self.turns, self.refused = data, turns, 0
        self._numbers = itertools.count(1)
        self.orphans: list[int] = []
        self.callers = [Caller(self) for _ in range(count)]
        self._next: Work = None

    def number(self) -> int:
        return next(self._numbers)

    def empty(self) -> bool:
        if self._next is None and self.data.draw(st.booleans(), label="arrives"):
            self._next = self._draw()
        return self._next is None

    def get(self, block: bool = True, timeout: float | None = None) -> Work:
        if self._next is None and not block:
            raise Empty
        work, self._next = self._next or self._draw(), None
        return work

    def _draw(self) -> Work:
        if self.orphans and self.data.draw(st.booleans(), label="release"):
            orphan = self.orphans.pop()

            def released(got: object) -> None:
                if isinstance(got, StepFailed):
                    self.orphans.append(orphan)

            return Operation(lambda runner: runner.release([orphan]), released)
        idle = [each for each in self.callers if each.idle]
        if not idle or not self.turns:
            return None
        self.turns -= 1
        return self.data.draw(st.sampled_from(idle), label="caller").work()


@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_any_callers_get_the_rows_of_a_runner_of_their_own(data: st.DataObject) -> None:
    """Whatever fails meanwhile is answered as failed, and asked for again."""
    fails = data.draw(st.sets(st.integers(1, 60), max_size=12), label="passages that fail")
    passages = itertools.count(1)

    def stage(name: str) -> None:
        if next(passages) in fails:
            raise Sabotage(name)

    runner = late_runner(CONFIG, stage, data.draw(st.booleans(), label="in stages"))
    callers = Callers(data, count=data.draw(st.integers(1, 4), label="callers"), turns=25)
    loop = Loop(runner, callers, items=data.draw(st.integers(1, 4), label="items")).run()
    assert loop._failure is None, loop._failure
    assert all(each.idle for each in callers.callers)
    runner.check()
    fails.clear()
    for caller in callers.callers:
        serial: Runner = build_runner(CONFIG)
        replay(serial, caller)
        assert not caller.created or runner.kv.length(caller.sequence) == caller.length
    runner.release([*callers.orphans, *(each.sequence for each in callers.callers if each.created)])
    assert runner.cache_state().free_blocks == runner.kv.total_blocks


def replay(serial: Any, caller: Caller) -> None:
    """The spans of a caller alone, one after the other: the same bits. A fork is the sequence itself, cut."""
    for index, (span, block) in enumerate(caller.done):
        with serial.context():
            [outcome] = serial.forward(Step((span._replace(sequence=1, create=index == 0),))).outcomes
        assert not isinstance(outcome, ExecutorError), outcome
        mine = outcome.rows.detached().block["logits"]
        assert np.isfinite(mine).all() and mine.tobytes() == block["logits"].tobytes()
