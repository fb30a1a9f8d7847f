"""The loop with a runner that may have two steps under way: when it begins the next, and who is told what, and when.

Nothing here has threads: callers are asked for work where the loop looks for it, and answered where it delivers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from queue import Empty
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import CacheState, Greedy, OutputSpec, Positions, Run, Span, SpanResult, Step, StepResult
from ferrum_rpc.engine import loop as engine_loop
from ferrum_rpc.engine.api import Finished, Operation, Submission, WorkState
from ferrum_rpc.engine.liveness import Liveness
from ferrum_rpc.engine.loop import EngineLoop, Work
from ferrum_rpc.engine.overlap import LOOK_S, MARGIN, Overlap
from ferrum_rpc.errors import DeviceLost, StepFailed
from tests.support.fake_async_device import LOOKS, late_runner


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

    def __init__(self, runner: Any, inbox: Any, items: int = 1, places: int = 1) -> None:
        super().__init__(
            lambda: runner,
            inbox=inbox,
            lock=threading.Lock(),
            max_step_items=items,
            max_step_tokens=1 << 20,
            max_running=places,
            on_ready=lambda _: None,
            on_failed=lambda error: self.told.append(("failed", error)),
        )
        self.told: list[Any] = []
        if isinstance(runner, Fake):
            runner.loop = self

    def run(self) -> Loop:
        self._run()
        self._refuse_rest()
        return self

    def run_well(self) -> Loop:
        """Nothing was lost, and no run keeps its place."""
        self.run()
        assert self._failure is None, self._failure
        assert self._places.count == 0 and not self._runs._expected
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
    """A runner of nothing, two steps under way. ``log``: what it was asked; ``acts``: by that, what happens then;
    ``loop``: whose it is."""

    loop: Loop

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
    feeding = None
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


def submission(runner: Fake, sequence: int) -> Submission:
    """One span; its answer goes to the loop's ``told`` and to the runner's log."""

    def done(outcomes: Any, timing: Any) -> None:
        runner.log.append(f"answer {sequence}")
        runner.loop.told.append((sequence, outcomes[0]))

    return Submission((Span(sequence, np.zeros(1, dtype=np.int32), 0, OutputSpec()),), done)


def run(runner: Fake, *sequences: int | None) -> Loop:
    """Submissions of a span each; None: nothing is there when it is looked for."""
    return Loop(runner, Script(*(each if each is None else submission(runner, each) for each in sequences))).run()


def test_the_next_step_is_begun_before_the_first_is_finished_and_answers_keep_their_order():
    runner = Fake()
    run(runner, 1, None, 2, 3, 4)
    assert runner.log == [
        *("begin 1", "begin 2", "finish 1", "answer 1", "begin 3", "finish 2", "answer 2"),
        *("begin 4", "finish 3", "answer 3", "finish 4", "answer 4"),
    ]


@pytest.mark.parametrize(
    ("runner", "works"),
    [(Fake(1), (1, 2, 3)), (Fake(2, ready=True), (1, 2, 3)), (Fake(), (1, None, None, 2, None, None, 3))],
    ids=["there is one at a time", "the first is ready", "nothing waits yet"],
)
def test_steps_go_one_after_the_other_where(runner, works):
    run(runner, *works)
    assert runner.log == [f"{what} {each}" for each in (1, 2, 3) for what in ("begin", "finish", "answer")]


def test_in_stages_the_next_step_is_begun_whenever_it_comes():
    """The first stage idles until then."""
    runner = Fake()
    runner.in_stages = True
    run(runner, 1, None, None, None, 2, None, 3)
    assert runner.log[:6] == ["begin 1", "begin 2", "finish 1", "answer 1", "begin 3", "finish 2"]


@pytest.mark.parametrize(("depth", "firsts"), [(2, [1, 4]), (3, [1, 3, 5]), (8, [1, 2, 3, 4, 5, 6])])
def test_stages_share_what_waits(depth, firsts):
    """All of it in one step would be in one stage at a time."""
    runner = Fake(depth)
    runner.in_stages = True
    Loop(runner, Script(*(submission(runner, each) for each in range(1, 7))), items=6).run()
    assert [each for each in runner.log if each.startswith("begin")] == [f"begin {each}" for each in firsts]


def test_runs_share_stages_too():
    """Though all of them began in one step, which is never split."""
    config = ModelSettings("identity", device="cpu", block_size=4, kv_blocks=24, identity_max_context=64)
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
def test_a_step_that_fails_is_its_own_callers_affair(point, which):
    runner = Fake()
    runner.acts[f"{point} {which}"] = fail(StepFailed("no"))
    told = dict(run(runner, 1, None, 2, 3).told)
    assert {each: type(told[each]) is StepFailed for each in told} == {each: each == which for each in (1, 2, 3)}


@pytest.mark.parametrize("error", [DeviceLost("gone"), RuntimeError("bug"), SystemExit(3)])
@pytest.mark.parametrize("point", ["finish 1", "begin 2", "finish 2"])
def test_a_device_that_is_lost_is_lost_to_both_steps_and_to_the_queue(point, error):
    runner = Fake()
    runner.acts[point] = fail(error)
    told = run(runner, 1, None, 2, 3).told
    gone = {1, 2, 3} if point != "finish 2" else {2, 3}
    assert sorted(each for each, _ in told if each != "failed") == [1, 2, 3], "each once"
    assert {each for each, outcome in told if isinstance(outcome, DeviceLost)} - {"failed"} == gone
    assert [each for each in told if each[0] == "failed"] == [("failed", error)]
    first = next(index for index, each in enumerate(told) if each[0] == "failed")
    assert all(not isinstance(outcome, DeviceLost) for _, outcome in told[:first]), "whoever hears of it finds it so"


def test_an_operation_that_loses_the_device_answers_what_is_under_way():
    runner, answers = Fake(), list[object]()
    loses = Operation(lambda _: fail(DeviceLost("gone"))(), answers.append)
    told = Loop(runner, Script(submission(runner, 1), None, loses)).run().told
    assert [type(each) for each in answers] == [DeviceLost]
    assert [each for each, outcome in told if isinstance(outcome, DeviceLost) and each != "failed"] == [1]
    assert runner.log == ["begin 1", "answer 1"]


def test_what_is_cancelled_while_a_step_is_under_way_never_begins():
    runner = Fake()
    one, two, three = (submission(runner, each) for each in (1, 2, 3))
    runner.acts["begin 1"] = lambda: setattr(two, "state", WorkState.CANCELLED)
    told = Loop(runner, Script(one, None, two, three)).run().told
    assert ("dropped", two) in told and "begin 2" not in runner.log
    assert [each for each in runner.log if each.startswith("answer")] == ["answer 1", "answer 3"]


def test_a_steps_time_is_its_own_and_a_hang_of_either_is_told(monkeypatch):
    """By the length of a step: the second's begins when the first has ended, however long that took."""
    now = [1000.0]
    monkeypatch.setattr(engine_loop, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(Overlap, "due", lambda self, now: True)
    liveness, runner = Liveness(max_step_s=60), Fake()
    seen: dict[str, str | None] = {}

    def takes(name: str, seconds: float) -> Callable[[], object]:
        def act() -> None:
            now[0] += seconds
            seen[name] = liveness.hang_reason(now[0], runner.loop.busy_since)

        return act

    runner.acts = {"begin 2": takes("begin 2", 25), "finish 1": takes("finish 1", 30)}
    runner.acts |= {"finish 2": takes("finish 2", 50), "begin 3": takes("begin 3", 61), "finish 3": takes("3", 1)}
    run(runner, 1, None, 2, None, None, 3)
    assert seen["begin 2"] is seen["finish 1"] is seen["finish 2"] is None
    assert "its step has taken 61 s" in str(seen["begin 3"])
    assert liveness.hang_reason(now[0], runner.loop.busy_since) is None
    runner.log.clear()
    runner.acts = {"begin 2": takes("begin 2", 61)}
    run(runner, 1, None, 2)
    assert runner.log[:2] == ["begin 1", "begin 2"] and seen["begin 2"] is not None, "in the time of the first"


@pytest.mark.parametrize("on_device", [True, False])
def test_a_device_is_waited_for_from_when_the_oldest_step_is_its(on_device, monkeypatch):
    """Not while the host begins a step and the device has none: kernels may be compiled then."""
    now = [1000.0]
    monkeypatch.setattr(engine_loop, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(Overlap, "due", lambda self, now: True)
    runner, seen = Fake(), dict[str, float]()

    def takes(name: str) -> Callable[[], object]:
        def act() -> None:
            now[0] += 10
            seen[name] = runner.loop.waiting_since

        return act

    runner.on_device = on_device
    runner.acts = {name: takes(name) for name in ("begin 1", "begin 2", "finish 1", "finish 2")}
    run(runner, 1, None, 2)
    assert runner.log[:3] == ["begin 1", "begin 2", "finish 1"]
    since = {"begin 1": 0.0, "begin 2": 1010.0, "finish 1": 1010.0, "finish 2": 1030.0}
    assert seen == (since if on_device else dict.fromkeys(since, 0.0))
    assert runner.loop.waiting_since == 0.0


# --- the overlap ------------------------------------------------------------------------------------------------------


def test_the_next_step_is_due_when_the_last_ones_length_leaves_time_to_begin_it():
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
