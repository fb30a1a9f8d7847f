"""A step that fails, wherever it fails, leaves everything as it was: books, cache contents and every later row.

Each test drives a runner that is made to fail, and a twin that never is. The twin is the oracle: after any number of
failures both must answer the same step with the same bits. Slots that nobody owns are filled with NaN on the way, so
that whatever a failed step left behind cannot be used by accident.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from operator import methodcaller
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import PREFIX, Accept, FullLogits, OutputSpec, Positions, Span, SpanResult, Step, StepResult
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.operations import TorchRunner
from ferrum_rpc.errors import ExecutorError, KvBlocksExhausted, StepFailed
from ferrum_rpc.kv.table import slots_for
from ferrum_rpc.native import library
from tests.support.inside import sequences
from tests.support.kv_world import everything
from tests.support.poison import poison
from tests.support.rows import answered

LAYERS = 2
STAGES = ("reserve", "plan", "forward", "select", "commit")
"""The runner's own stage names."""
PARTS = ("attention plan", "save", "copy", "write 0", "write 1", "attend 0", "attend 1", "logits")
"""Inside of the stages: at ``attend 1`` both layers' K and V are written, at ``write 1`` the second's V is not."""
POINTS = STAGES + PARTS

SIZE = 4
ROWS = OutputSpec(Positions.ALL, FullLogits())
LAST = OutputSpec(Positions.LAST, FullLogits())
SILENT = OutputSpec(Positions.NONE)

IDENTITY = ModelSettings(
    path="identity",
    device="cpu",
    block_size=SIZE,
    kv_blocks=24,
    identity_vocab_size=64,
    identity_layers=LAYERS,
    identity_positional=True,
)


class Sabotage(Exception):
    """Not an error of the project."""


class Saboteur:
    """Raises where it is told to, at the n-th passage, and counts passages."""

    def __init__(self) -> None:
        self.passages: Counter[str] = Counter()
        self.disarm()

    def arm(self, point: str, nth: int = 1, error: BaseException | None = None) -> None:
        self.point, self.fired = point, False
        self._left, self._error = nth, error or Sabotage()

    def disarm(self) -> None:
        self.point, self.fired = "", False
        self._left = 0

    def __call__(self, point: str) -> None:
        self.passages[point] += 1
        if point == self.point:
            self._left -= 1
            if self._left == 0:
                self.fired = True
                raise self._error

    def infiltrate(self, runner: TorchRunner) -> None:
        """Stand in the way of what the stages call."""
        attention, store, model = runner.attention, runner.store, runner.model
        name = "attend_latent" if runner.info.latent else "attend"
        plan, attend = attention.plan, getattr(attention, name)
        save, copy, write, logits = store.save, store.copy_blocks, attention.write, model.logits

        def planned(geometry: Any) -> Any:
            self("attention plan")
            return plan(geometry)

        def attended(layer: int, *given: Any) -> torch.Tensor:
            self(f"attend {layer}")
            return attend(layer, *given)

        def saved(slots: torch.Tensor) -> Any:
            self("save")
            return save(slots)

        def copied(pairs: torch.Tensor) -> None:
            copy(pairs)
            self("copy")

        def written(layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
            write(layer, slots, keys, keys)
            self(f"write {layer}")
            write(layer, slots, keys, values)

        def projected(hidden: torch.Tensor) -> torch.Tensor:
            self("logits")
            return logits(hidden)

        attention.plan = planned
        setattr(attention, name, attended)
        attention.native_step = lambda plan: None  # in C nobody stands between storing and attending
        store.save, store.copy_blocks, attention.write = saved, copied, written
        model.logits = projected


class Twins:
    """A runner that can be made to fail and one that cannot, in the same state; and what every sequence holds."""

    def __init__(self, config: ModelSettings = IDENTITY) -> None:
        self.saboteur = Saboteur()
        self.runner = build_runner(config, stage=self.saboteur)
        self.saboteur.infiltrate(self.runner)
        self.twin = build_runner(config)
        self.lengths: dict[int, int] = {}
        self._fed = 0
        for runner in (self.runner, self.twin):
            self._poison(runner)

    # --- steps ------------------------------------------------------------------------------------------------------

    def span(self, sequence, count, start=None, output=ROWS, ahead=0) -> Span:
        """``count`` new tokens at ``start`` (the end); a sequence that does not exist is created."""
        vocab = self.runner.info.vocab_size
        tokens = (np.arange(self._fed, self._fed + count) * 7 + 3) % vocab
        self._fed += count
        create = sequence not in self.lengths
        start = self.lengths.get(sequence, 0) if start is None else start
        return Span(sequence, tokens.astype(np.int32), start, output, create, ahead)

    def step(self, *spans: Span, atomic: tuple[range, ...] = ()) -> StepResult:
        """Run the step on both: the same outcomes, bit for bit."""
        step = Step(spans, atomic)
        ours = self.forward(step)
        self._ran(step, ours)
        return ours

    def _ran(self, step: Step, ours: StepResult) -> None:
        same_outcomes(ours, self._forward(self.twin, step))
        for span, outcome in zip(step.spans, ours.outcomes, strict=True):
            if isinstance(outcome, SpanResult):
                assert outcome.length == span.end or isinstance(span.output.kind, Accept)
                self.lengths[span.sequence] = outcome.length
        self.check()

    def forward(self, step: Step) -> StepResult:
        """Run the step on the runner that may fail."""
        return self._forward(self.runner, step)

    def both(self, run: Callable[[TorchRunner], object]) -> ExecutorError | None:
        """An operation between steps, on both; the refusal, if it is refused."""
        refusals: list[ExecutorError | None] = []
        for runner in (self.runner, self.twin):
            try:
                with runner.context():
                    run(runner)
                refusals.append(None)
            except ExecutorError as error:
                refusals.append(error)
        ours, theirs = refusals
        assert type(ours) is type(theirs) and (ours is None or theirs is None or ours.metadata == theirs.metadata)
        self.runner.check()
        return ours

    def fork(self, parent: int, children: list[int], at: int | None = None) -> None:
        assert self.both(lambda runner: runner.fork(parent, children, at)) is None
        self.lengths |= dict.fromkeys(children, self.lengths[parent] if at is None else at)

    def reserve(self, sequence: int, tokens: int) -> None:
        assert self.both(lambda runner: runner.reserve(sequence, tokens)) is None

    def release(self, sequence: int) -> None:
        assert self.both(lambda runner: runner.release([sequence])) is None
        del self.lengths[sequence]

    def draft(self, sequence: int, start: int, right: int) -> Span:
        """A draft of eight tokens, of which the first are ``right``."""
        runner, output = self.twin, OutputSpec(Positions.ALL, Accept())
        tokens, probe = self.span(sequence, 9, start, output).tokens, 1000
        with runner.context():
            runner.fork(sequence, [probe], start)
        for at in range(1, 9):
            [found] = answered(runner, Span(probe, tokens[:at], start, LAST))
            best = int(found["logits"].argmax())
            tokens[at] = best if at <= right else (best + 1) % runner.info.vocab_size
        runner.release([probe])
        return Span(sequence, tokens, start, output)

    # --- failing ----------------------------------------------------------------------------------------------------

    def fail(self, step: Any, point: str, nth: int = 1, error: BaseException | None = None) -> BaseException | None:
        """Run the step, or an operation, so that it fails at the n-th passage of a point, and see that nothing has
        changed.

        Returns what was raised. None: the step passes there less often, so it ran; then it runs on the twin as well.
        """
        before = self.snapshot()
        self.saboteur.arm(point, nth, error)
        try:
            result = self.forward(step) if isinstance(step, Step) else step(self.runner)
        except (ExecutorError, KeyboardInterrupt) as raised:
            assert self.saboteur.fired, raised
            assert self.snapshot() == before
            self.check()
            self._poison(self.runner)
            assert self.snapshot() == before
            return raised
        finally:
            fired = self.saboteur.fired
            self.saboteur.disarm()
        assert not fired and isinstance(step, Step)
        self._ran(step, result)
        return None

    def fail_everywhere(self, step: Step, passages: Mapping[str, int]) -> None:
        """Let the step fail at every passage of every point, one failure after the other."""
        for point, count in passages.items():
            for nth in range(1, count + 1):
                raised = self.fail(step, point, nth)
                assert type(raised) is StepFailed, (point, nth)
                assert type(raised.__cause__) is Sabotage

    # --- looking ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.runner.check()
        assert self.runner.cache_state() == self.twin.cache_state()
        for sequence, length in self.lengths.items():
            assert self.runner.kv.length(sequence) == self.twin.kv.length(sequence) == length

    def snapshot(self) -> dict[str, Any]:
        """Books (the order of the free list apart) and the bits of every committed token."""
        books = everything(self.runner.kv)
        books["free"] = sorted(books["free"])
        return {"books": books, "bits": self.contents(self.runner), "state": self.runner.cache_state()}

    def finish(self) -> None:
        """One more token for every sequence, in one step and one by one: the same bits as the twin's."""
        self._poison(self.runner)
        self._poison(self.twin)
        if self.lengths:
            self.step(*[self.span(sequence, 1) for sequence in self.lengths])
        for sequence in list(self.lengths):
            self.step(self.span(sequence, 2))
            self.release(sequence)
        assert self.runner.cache_state().free_blocks == self.runner.kv.total_blocks

    @staticmethod
    def _forward(runner: TorchRunner, step: Step) -> StepResult:
        with runner.context():
            return runner.forward(step)

    _poison = staticmethod(poison)

    @staticmethod
    def contents(runner: TorchRunner) -> dict[Any, list[bytes]]:
        """The bits of every committed token, by sequence."""
        found = {}
        for sequence, state in sequences(runner.kv).items():
            slots = slots_for(state.table.view(len(state.table)), 0, state.length, SIZE)
            content = runner.store.save(slots).content
            found[sequence] = [each.view(torch.uint8).numpy().tobytes() for each in content]
        return found


def same_outcomes(ours: StepResult, theirs: StepResult) -> None:
    for mine, other in zip(ours.outcomes, theirs.outcomes, strict=True):
        if isinstance(mine, ExecutorError):
            assert type(mine) is type(other)
            assert mine.metadata == other.metadata
            continue
        assert isinstance(other, SpanResult)
        assert mine.length == other.length
        assert (mine.rows is None) == (other.rows is None)
        if mine.rows is None:
            continue
        one, two = (each.rows.block.cut(each.rows.first, each.rows.first + each.rows.count) for each in (mine, other))
        assert one.kind is two.kind
        for name, column in one.columns.items():
            assert np.isfinite(column).all()
            assert (column.shape, column.tobytes()) == (two[name].shape, two[name].tobytes())
    assert ours.blocks_copied == theirs.blocks_copied


# --- scenarios ------------------------------------------------------------------------------------------------------

fork, reserve, draft = (partial(methodcaller, each) for each in ("fork", "reserve", "draft"))


class Scenario(NamedTuple):
    """What happens ``before``, and the ``step`` that is to fail then. A tuple is a span, as `Twins.span` takes it, a
    list of them a step. The rest are methods of `Twins`."""

    before: list[Any]
    step: list[Any]
    parts: str = ""
    """What of the cache must be kept for its failure: "save", committed tokens that only one sequence holds and that it
    writes over (the undo log is needed); "copy", a block that others hold too and that it writes into a part of."""
    atomic: tuple[range, ...] = ()

    def __call__(self, twins: Twins) -> Step:
        for each in self.before:
            if isinstance(each, list):
                twins.step(*(twins.span(*span) for span in each))
            else:
                each(twins)
        spans = tuple(twins.span(*each) if isinstance(each, tuple) else each(twins) for each in self.step)
        return Step(spans, self.atomic)


SCENARIOS = {
    "create with reserved room": Scenario([[(1, 3)]], [(2, 5, None, ROWS, 13), (1, 1)]),
    "append new blocks": Scenario([[(1, 8)]], [(1, 6)]),
    "append with promised blocks": Scenario([[(1, 6)], reserve(1, 20), [(1, 3)]], [(1, 7)]),
    # the fork has its own block now, for which the promise held one: that is free before the step, not through it
    "create after a copy of what was promised": Scenario(
        [[(1, 4, None, ROWS, 5)], [(1, 1)], fork(1, [2]), [(2, 1)]], [(3, 1)]
    ),
    "roll back and overwrite in place": Scenario([[(1, 14)]], [(1, 6, 5)], "save"),
    "roll back and write beyond the end": Scenario([[(1, 10)]], [(1, 12, 2)], "save"),
    "roll back to nothing": Scenario([[(1, 11)]], [(1, 1, 0)], "save"),
    "roll back with promised blocks": Scenario([[(1, 6, None, ROWS, 9)], [(1, 5)]], [(1, 3, 7)], "save"),
    "all forks write behind a shared tail": Scenario([[(1, 6)], fork(1, [2, 3])], [(1, 1), (2, 3), (3, 1)], "copy"),
    "roll back into what a fork shares": Scenario([[(1, 13)], fork(1, [2], at=9)], [(1, 4, 5), (2, 1)], "copy"),
    "roll back through private blocks into shared ones": Scenario(
        [[(1, 6)], fork(1, [2]), [(1, 9), (2, 2)]], [(1, 11, 3), (2, 6, 6)], "save copy"
    ),
    "one span is refused for lack of blocks": Scenario([[(1, 70)]], [(2, 7), (1, 40), (3, 2)]),
    # into new blocks that were promised, into a shared block, and over what is rolled back; beside a plain span
    "accept a part of drafts": Scenario(
        [[(1, 6), (2, 13), (3, 5)], fork(1, [4], at=5), reserve(1, 12)],
        [draft(1, 6, 2), draft(2, 3, 4), (3, 2), draft(4, 5, 1)],
        "save copy",
    ),
    "everything at once": Scenario(
        [[(1, 13), (2, 6), (3, 4)], fork(2, [4, 5]), reserve(3, 9)],
        [(1, 5, 6), (2, 1), (6, 7, None, LAST, 3), (3, 6), (4, 4, 1, SILENT), (5, 1, None, LAST)],
        "save copy",
    ),
}
LARGEST = ("roll back through private blocks into shared ones", "everything at once")


def run_scenario(scenario: Scenario, config: ModelSettings = IDENTITY) -> Counter[str]:
    """Rehearse, to learn how often each point is passed; then fail at every passage, and run the step at last."""
    rehearsal = Twins(config)
    step = scenario(rehearsal)
    rehearsal.saboteur.passages.clear()
    rehearsal.forward(step)
    passages = rehearsal.saboteur.passages
    assert set(passages) | {"save", "copy"} == set(POINTS)
    assert passages["reserve"] == len(step.spans)
    twins = Twins(config)
    step = scenario(twins)
    twins.fail_everywhere(step, passages)
    twins.step(*step.spans, atomic=step.atomic)
    twins.finish()
    return passages


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_failure_at_any_point_leaves_everything_as_before(name):
    passages = run_scenario(SCENARIOS[name])
    assert [each for each in ("save", "copy") if each in passages] == SCENARIOS[name].parts.split()


def test_of_a_draft_the_cache_keeps_what_was_accepted():
    twins = Twins()
    result = twins.step(*SCENARIOS["accept a part of drafts"](twins).spans)
    lengths = [outcome.length for outcome in result.outcomes if isinstance(outcome, SpanResult)]
    assert lengths == [6 + 3, 3 + 5, 7, 5 + 2]
    tokens = [each.rows.count for each in result.outcomes if isinstance(each, SpanResult) and each.rows is not None]
    assert tokens == [3, 5, 2, 2]
    assert len(twins.runner.kv.tokens(1)) == 9
    twins.finish()


DECODER: dict[str, Any] = {"num_hidden_layers": LAYERS, "intermediate_size": 128}
STATES = DECODER | {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 2 + ["linear_attention"] * 2}
"""The first layers attend: `PARTS` counts them."""

LATENTS: dict[str, Any] = {"num_hidden_layers": LAYERS}


@pytest.mark.parametrize(
    ("name", "family", "sizes", "options"),
    [
        (LARGEST[0], "llama", DECODER, {}),
        (LARGEST[1], "llama", DECODER, {"dtype": "bfloat16"}),
        *((each, "llama", DECODER, {"dtype": "bfloat16", "kv_dtype": "int8"}) for each in LARGEST),
        *((each, "qwen3_5", STATES, {"state_slots": 9}) for each in SCENARIOS),
        *((each, "deepseek_v3", LATENTS, {}) for each in LARGEST),
    ],
    ids=str,
)
def test_a_model_with_weights_is_as_before_too(name, family, sizes, options, checkpoint_of):
    cache = {"dtype": "float32", "block_size": SIZE, "kv_blocks": 24}
    config = ModelSettings(str(checkpoint_of(family, **sizes)), device="cpu", **cache | options)
    run_scenario(SCENARIOS[name], config)


@pytest.mark.parametrize("name", LARGEST)
def test_layers_in_c_that_stop_half_way_leave_everything_as_before(checkpoint_of, name, monkeypatch):
    folder = checkpoint_of("llama", **DECODER)
    config = ModelSettings(str(folder), device="cpu", dtype="bfloat16", block_size=SIZE, kv_blocks=24)
    twins = Twins(replace(config, quantize="int8"))  # which more CPUs multiply
    if not twins.twin.model.native:
        pytest.skip("layers do not run in C here")
    del twins.runner.attention.native_step
    run = library.load().ferrum_layers_run

    def stop_half_way(layers: int, weights: int, count: int, *step: Any) -> int:
        if twins.saboteur.point == "half way":
            run(layers, weights, count // 2, *step)
        twins.saboteur("half way")
        return int(run(layers, weights, count, *step))

    monkeypatch.setattr(library.load(), "ferrum_layers_run", stop_half_way)
    step = SCENARIOS[name](twins)
    twins.saboteur.passages.clear()
    twins.fail_everywhere(step, {"half way": 1})
    twins.step(*step.spans, atomic=step.atomic)
    assert twins.saboteur.passages["half way"] == 3
    assert not twins.saboteur.passages["attend 0"]
    twins.finish()


# --- what is raised -------------------------------------------------------------------------------------------------


ERRORS: list[tuple[BaseException, type[BaseException]]] = [
    (RuntimeError("shape mismatch"), StepFailed),
    (MemoryError("so much"), StepFailed),
    (torch.OutOfMemoryError("so much"), StepFailed),
    (KvBlocksExhausted("not here"), StepFailed),
    (KeyboardInterrupt("ctrl-c"), KeyboardInterrupt),
]


@pytest.mark.parametrize(("error", "expected"), ERRORS, ids=[type(error).__name__ for error, _ in ERRORS])
@pytest.mark.parametrize("point", ["reserve", "attend 1", "commit"])
def test_what_is_raised_in_a_step_says_what_became_of_it(point, error, expected):
    if point == "reserve" and isinstance(error, ExecutorError):
        return  # the refusal of one span, see below
    twins = Twins()
    raised = twins.fail(SCENARIOS["everything at once"](twins), point, nth=3 if point == "reserve" else 1, error=error)
    assert type(raised) is expected
    if isinstance(raised, StepFailed):
        assert raised.__cause__ is error
        assert str(error) not in raised.message, "internal texts stay inside"
    twins.finish()


def test_a_step_in_which_all_are_refused_runs_nothing():
    twins = Twins()
    twins.step(twins.span(1, 80))
    step = Step((twins.span(2, 70), twins.span(1, 40)))
    before = twins.snapshot()
    twins.saboteur.arm("plan")
    outcomes = twins.forward(step).outcomes
    assert [type(each) for each in outcomes] == [KvBlocksExhausted] * 2
    assert not twins.saboteur.fired
    assert twins.snapshot() == before


# --- atomic groups --------------------------------------------------------------------------------------------------


GROUPS = Scenario(
    [[(1, 30), (2, 10), (3, 12)], fork(1, [4])],
    [(1, 3, 9), (5, 6, None, ROWS, 2), (3, 1), (2, 3, 5), (4, 2)],
    atomic=(range(0, 2), range(3, 5)),
)
"""Two groups with a loner between them, over rollbacks, shared tails and creations. 24 blocks, 9 of them free."""


def test_atomic_groups_fail_with_the_step_like_everybody():
    run_scenario(GROUPS)


@pytest.mark.parametrize(
    ("scenario", "refused"), [*product([SCENARIOS["everything at once"]], range(6)), *product([GROUPS], range(5))]
)
def test_who_is_refused_leaves_no_trace_with_its_group_while_the_others_run(scenario, refused):
    twins = Twins()
    step = scenario(twins)
    before = twins.snapshot()
    refusal = KvBlocksExhausted("none left", metadata={"free_blocks": 0})
    twins.saboteur.arm("reserve", refused + 1, refusal)
    ours = twins.forward(step)
    twins.saboteur.disarm()
    gone = next((set(group) for group in step.atomic if refused in group), {refused})
    assert ours.outcomes[refused] is refusal
    for index, (span, outcome) in enumerate(zip(step.spans, ours.outcomes, strict=True)):
        assert isinstance(outcome, ExecutorError) == (index in gone)
        if index in gone and not span.create:
            assert twins.snapshot()["bits"][span.sequence] == before["bits"][span.sequence]
            assert twins.runner.kv.length(span.sequence) == twins.lengths[span.sequence]
    rest = [span for index, span in enumerate(step.spans) if index not in gone]
    twins._forward(twins.twin, Step(tuple(rest)))
    for span in rest:
        twins.lengths[span.sequence] = span.end
    twins.check()
    twins.finish()


def test_what_a_refused_group_had_reserved_is_free_for_the_spans_that_follow():
    twins = Twins()
    twins.step(twins.span(1, 60))  # 15 of 24 blocks
    outcomes = twins.step(twins.span(2, 20), twins.span(3, 30), twins.span(4, 36), atomic=(range(2),)).outcomes
    assert [isinstance(each, ExecutorError) for each in outcomes] == [True, True, False]
    assert type(outcomes[1]) is KvBlocksExhausted, "20 tokens fit, 30 more do not"
    assert twins.runner.cache_state().free_blocks == 0
    twins.release(4)
    assert isinstance(twins.step(twins.span(3, 30)).outcomes[0], SpanResult)
    twins.finish()


@pytest.mark.parametrize("atomic", [(), (range(2),)])
@pytest.mark.parametrize("spare", [0, 1])
def test_what_is_copied_only_to_stay_findable_costs_no_other_span_its_blocks(spare, atomic):
    runner = build_runner(IDENTITY)

    def step(*spans: Span) -> None:
        groups = atomic if len(spans) > 1 else ()
        assert all(isinstance(each, SpanResult) for each in runner.forward(Step(spans, atomic=groups)).outcomes)

    def tokens(count: int) -> np.ndarray:
        return np.arange(count, dtype=np.int32) % 64

    with runner.context():
        step(Span(1, tokens(SIZE), 0, LAST, create=True, prefix=PREFIX))
        runner.truncate(1, 2)
        step(Span(2, tokens((runner.kv.free_blocks - 1 - spare) * SIZE), 0, LAST, create=True))
        step(Span(1, tokens(1), 2, LAST), Span(3, tokens(SIZE), 0, LAST, create=True))
    assert runner.cache_state().cached_blocks == spare
    runner.check()


def test_a_failure_after_a_group_was_refused_is_undone_too():
    before = [[(1, 50), (2, 7)], fork(2, [3])]  # 15 of 24 blocks
    scenario = Scenario(before, [(3, 1), (4, 12), (2, 60, 3), (1, 9, 30)], atomic=(range(1, 3),))
    run_scenario(scenario)
    twins = Twins()
    step = scenario(twins)
    outcomes = twins.step(*step.spans, atomic=step.atomic).outcomes
    assert [isinstance(each, SpanResult) for each in outcomes] == [True, False, False, True]
