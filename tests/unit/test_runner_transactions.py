"""A step that fails, wherever it fails, leaves everything as it was: books, cache contents and every later row.

Each test drives a runner that is made to fail, and a twin that never is. The twin is the oracle: after any number of
failures both must answer the same step with the same bits. Slots that nobody owns are filled with NaN on the way, so
that whatever a failed step left behind cannot be used by accident.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import (
    PREFIX,
    Accept,
    FullLogits,
    OutputSpec,
    Positions,
    Span,
    SpanResult,
    Step,
    StepResult,
    TopTokens,
)
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.operations import TorchRunner
from ferrum_rpc.errors import DeviceLost, ExecutorError, KvBlocksExhausted, StepFailed
from ferrum_rpc.kv.table import slots_for
from tests.checkpoints import make_checkpoint
from tests.kv.kv_world import everything
from tests.poison import poison

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
        plan, attend = attention.plan, attention.attend
        save, copy, write, logits = store.save, store.copy_blocks, attention.write, model.logits

        def planned(geometry: Any) -> Any:
            self("attention plan")
            return plan(geometry)

        def attended(layer: int, query: torch.Tensor, plan: Any) -> torch.Tensor:
            self(f"attend {layer}")
            return attend(layer, query, plan)

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

        attention.plan, attention.attend = planned, attended
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

    def span(
        self, sequence: int, count: int, start: int | None = None, output: OutputSpec = ROWS, ahead: int = 0
    ) -> Span:
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
                run(runner)
                refusals.append(None)
            except ExecutorError as error:
                refusals.append(error)
        assert type(refusals[0]) is type(refusals[1])
        self.runner.check()
        return refusals[0]

    def release(self, sequence: int) -> None:
        assert self.both(lambda runner: runner.release([sequence])) is None
        del self.lengths[sequence]

    # --- failing ----------------------------------------------------------------------------------------------------

    def fail(self, step: Step, point: str, nth: int = 1, error: BaseException | None = None) -> BaseException | None:
        """Run the step so that it fails at the n-th passage of a point, and see that nothing has changed.

        Returns what was raised. None: the step passes there less often, so it ran; then it runs on the twin as well.
        """
        before = self.snapshot()
        self.saboteur.arm(point, nth, error)
        try:
            result = self.forward(step)
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
        assert not fired
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
        kv, store = self.runner.kv, self.runner.store
        books = everything(kv)
        books["free"] = sorted(books["free"])
        bits = {}
        for sequence, state in kv._sequences.items():
            slots = slots_for(state.table.view(len(state.table)), 0, state.length, SIZE)
            content = store.save(slots).content
            bits[sequence] = [each.view(torch.uint8).numpy().tobytes() for each in content]
        return {"books": books, "bits": bits, "state": self.runner.cache_state()}

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

    @staticmethod
    def _poison(runner: TorchRunner) -> None:
        poison(runner)


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
# Each leaves the twins in some state and says which step is to fail in it.


def create(twins: Twins) -> Step:
    return Step((twins.span(1, 9),))


def create_with_reserved_room(twins: Twins) -> Step:
    twins.step(twins.span(1, 3))
    return Step((twins.span(2, 5, ahead=13), twins.span(1, 1)))


def append_within_a_block(twins: Twins) -> Step:
    twins.step(twins.span(1, 5))
    return Step((twins.span(1, 1),))


def append_new_blocks(twins: Twins) -> Step:
    twins.step(twins.span(1, 8))
    return Step((twins.span(1, 6),))


def append_with_promised_blocks(twins: Twins) -> Step:
    twins.step(twins.span(1, 6))
    assert twins.both(lambda runner: runner.reserve(1, 20)) is None
    twins.step(twins.span(1, 3))
    return Step((twins.span(1, 7),))


def roll_back_and_overwrite_in_place(twins: Twins) -> Step:
    twins.step(twins.span(1, 14))
    return Step((twins.span(1, 6, start=5),))


def roll_back_and_write_beyond_the_end(twins: Twins) -> Step:
    twins.step(twins.span(1, 10))
    return Step((twins.span(1, 12, start=2),))


def roll_back_to_nothing(twins: Twins) -> Step:
    twins.step(twins.span(1, 11))
    return Step((twins.span(1, 1, start=0),))


def roll_back_with_promised_blocks(twins: Twins) -> Step:
    twins.step(twins.span(1, 6, ahead=9))
    twins.step(twins.span(1, 5))
    return Step((twins.span(1, 3, start=7),))


def create_after_a_copy_of_what_was_promised(twins: Twins) -> Step:
    """The fork has its own block now, for which the promise held one: that is free before the step, not through it."""
    twins.step(twins.span(1, 4, ahead=5))
    twins.step(twins.span(1, 1))
    fork(twins, 1, [2])
    twins.step(twins.span(2, 1))
    return Step((twins.span(3, 1),))


def write_behind_a_shared_tail(twins: Twins) -> Step:
    twins.step(twins.span(1, 6))
    fork(twins, 1, [2])
    return Step((twins.span(2, 1),))


def all_forks_write_behind_a_shared_tail(twins: Twins) -> Step:
    twins.step(twins.span(1, 6))
    fork(twins, 1, [2, 3])
    return Step((twins.span(1, 1), twins.span(2, 3), twins.span(3, 1)))


def roll_back_into_what_a_fork_shares(twins: Twins) -> Step:
    twins.step(twins.span(1, 13))
    fork(twins, 1, [2], at=9)
    return Step((twins.span(1, 4, start=5), twins.span(2, 1)))


def roll_back_through_private_blocks_into_shared_ones(twins: Twins) -> Step:
    twins.step(twins.span(1, 6))
    fork(twins, 1, [2])
    twins.step(twins.span(1, 9), twins.span(2, 2))
    return Step((twins.span(1, 11, start=3), twins.span(2, 6, start=6)))


def one_span_is_refused_for_lack_of_blocks(twins: Twins) -> Step:
    twins.step(twins.span(1, 70))
    return Step((twins.span(2, 7), twins.span(1, 40), twins.span(3, 2)))


def everything_at_once(twins: Twins) -> Step:
    twins.step(twins.span(1, 13), twins.span(2, 6), twins.span(3, 4))
    fork(twins, 2, [4, 5])
    twins.both(lambda runner: runner.reserve(3, 9))
    return Step(
        (
            twins.span(1, 5, start=6),
            twins.span(2, 1),
            twins.span(6, 7, output=LAST, ahead=3),
            twins.span(3, 6),
            twins.span(4, 4, start=1, output=SILENT),
            twins.span(5, 1, output=LAST),
        )
    )


def accept_a_part_of_drafts(twins: Twins) -> Step:
    """Into new blocks that were promised, into a shared block, and over what is rolled back; beside a plain span."""
    twins.step(twins.span(1, 6), twins.span(2, 13), twins.span(3, 5))
    fork(twins, 1, [4], at=5)
    assert twins.both(lambda runner: runner.reserve(1, 12)) is None
    return Step((draft(twins, 1, 6, 2), draft(twins, 2, 3, 4), twins.span(3, 2), draft(twins, 4, 5, 1)))


def draft(twins: Twins, sequence: int, start: int, right: int) -> Span:
    """A draft of eight tokens, of which the first are ``right``."""
    runner, output = twins.twin, OutputSpec(Positions.ALL, Accept())
    tokens, probe = twins.span(sequence, 9, start, output).tokens, 1000
    runner.fork(sequence, [probe], start)
    for at in range(1, 9):
        step = Step((Span(probe, tokens[:at], start, LAST),))
        rows = twins._forward(runner, step).outcomes[0].rows
        best = int(rows.block["logits"][rows.first].argmax())
        tokens[at] = best if at <= right else (best + 1) % runner.info.vocab_size
    runner.release([probe])
    return Span(sequence, tokens, start, output)


def fork(twins: Twins, parent: int, children: list[int], at: int | None = None) -> None:
    assert twins.both(lambda runner: runner.fork(parent, children, at)) is None
    for child in children:
        twins.lengths[child] = twins.lengths[parent] if at is None else at


SCENARIOS = [
    create,
    create_with_reserved_room,
    append_within_a_block,
    append_new_blocks,
    append_with_promised_blocks,
    create_after_a_copy_of_what_was_promised,
    roll_back_and_overwrite_in_place,
    roll_back_and_write_beyond_the_end,
    roll_back_to_nothing,
    roll_back_with_promised_blocks,
    write_behind_a_shared_tail,
    all_forks_write_behind_a_shared_tail,
    roll_back_into_what_a_fork_shares,
    roll_back_through_private_blocks_into_shared_ones,
    one_span_is_refused_for_lack_of_blocks,
    accept_a_part_of_drafts,
    everything_at_once,
]


IN_PLACE = {
    roll_back_and_overwrite_in_place,
    roll_back_and_write_beyond_the_end,
    roll_back_to_nothing,
    roll_back_with_promised_blocks,
    roll_back_through_private_blocks_into_shared_ones,
    accept_a_part_of_drafts,
    everything_at_once,
}
"""Their steps write over committed tokens that only one sequence holds: the undo log is needed."""

SHARED = {
    write_behind_a_shared_tail,
    all_forks_write_behind_a_shared_tail,
    roll_back_into_what_a_fork_shares,
    roll_back_through_private_blocks_into_shared_ones,
    accept_a_part_of_drafts,
    everything_at_once,
}
"""Their steps write into a part of a block that others hold too: it is copied."""


def run_scenario(scenario: Callable[[Twins], Step], config: ModelSettings = IDENTITY) -> Counter[str]:
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


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_failure_at_any_point_leaves_everything_as_before(scenario: Callable[[Twins], Step]) -> None:
    passages = run_scenario(scenario)
    assert ("save" in passages) == (scenario in IN_PLACE)
    assert ("copy" in passages) == (scenario in SHARED)


def test_of_a_draft_the_cache_keeps_what_was_accepted() -> None:
    twins = Twins()
    result = twins.step(*accept_a_part_of_drafts(twins).spans)
    lengths = [outcome.length for outcome in result.outcomes if isinstance(outcome, SpanResult)]
    assert lengths == [6 + 3, 3 + 5, 7, 5 + 2]
    tokens = [each.rows.count for each in result.outcomes if isinstance(each, SpanResult) and each.rows is not None]
    assert tokens == [3, 5, 2, 2]
    assert len(twins.runner.kv.tokens(1)) == 9
    twins.finish()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=LAYERS)


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "int8")])
@pytest.mark.parametrize("scenario", [roll_back_through_private_blocks_into_shared_ones, everything_at_once])
def test_a_decoder_with_weights_is_as_before_too(
    checkpoint: Path, scenario: Callable[[Twins], Step], dtype: Any, kv_dtype: Any
) -> None:
    config = ModelSettings(str(checkpoint), device="cpu", dtype=dtype, kv_dtype=kv_dtype, block_size=SIZE, kv_blocks=24)
    run_scenario(scenario, config)


@pytest.mark.parametrize("scenario", [roll_back_through_private_blocks_into_shared_ones, everything_at_once])
def test_layers_in_c_that_stop_half_way_leave_everything_as_before(
    checkpoint: Path, scenario: Callable[[Twins], Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = Twins(ModelSettings(str(checkpoint), device="cpu", dtype="bfloat16", block_size=SIZE, kv_blocks=24))
    if twins.twin.compute._native is None:
        pytest.skip("layers do not run in C here")
    del twins.runner.attention.native_step
    library = twins.runner.model._loaded.layers._library
    run = library.ferrum_layers_run

    def stop_half_way(layers: int, weights: int, count: int, *step: Any) -> int:
        if twins.saboteur.point == "half way":
            run(layers, weights, count // 2, *step)
        twins.saboteur("half way")
        return int(run(layers, weights, count, *step))

    monkeypatch.setattr(library, "ferrum_layers_run", stop_half_way)
    step = scenario(twins)
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
@pytest.mark.parametrize("point", POINTS)
def test_what_is_raised_in_a_step_says_what_became_of_it(
    point: str, error: BaseException, expected: type[BaseException]
) -> None:
    if point == "reserve" and isinstance(error, ExecutorError):
        return  # the refusal of one span, see below
    twins = Twins()
    raised = twins.fail(everything_at_once(twins), point, nth=3 if point == "reserve" else 1, error=error)
    assert type(raised) is expected
    if isinstance(raised, StepFailed):
        assert raised.__cause__ is error
        assert str(error) not in raised.message, "internal texts stay inside"
    twins.finish()


@pytest.mark.parametrize("point", ["forward", "attend 1", "logits", "commit"])
def test_a_lost_device_is_named_and_the_books_are_as_before(point: str) -> None:
    """What was overwritten on a lost device is not restored: nobody will read it again."""
    twins = Twins()
    raised = twins.fail(create_with_reserved_room(twins), point, error=torch.AcceleratorError("device-side assert"))
    assert type(raised) is DeviceLost
    assert "assert" not in raised.message


def test_a_refusal_while_reserving_is_that_spans_alone() -> None:
    for nth in range(1, 7):
        twins = Twins()
        step = everything_at_once(twins)
        refusal = KvBlocksExhausted("none left", metadata={"free_blocks": 0})
        twins.saboteur.arm("reserve", nth, refusal)
        ours = twins.forward(step)
        twins.saboteur.disarm()
        assert ours.outcomes[nth - 1] is refusal
        rest = [span for index, span in enumerate(step.spans) if index != nth - 1]
        theirs = twins._forward(twins.twin, Step(tuple(rest)))
        assert all(isinstance(each, SpanResult) for each in theirs.outcomes)
        for span in rest:
            twins.lengths[span.sequence] = span.end
        twins.check()
        twins.finish()


def test_a_step_in_which_all_are_refused_runs_nothing() -> None:
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


def groups(twins: Twins) -> tuple[tuple[Span, ...], tuple[range, ...]]:
    """Two groups with a loner between them, over rollbacks, shared tails and creations. 24 blocks, 9 of them free."""
    twins.step(twins.span(1, 30), twins.span(2, 10), twins.span(3, 12))
    fork(twins, 1, [4])
    spans = (
        twins.span(1, 3, start=9),
        twins.span(5, 6, ahead=2),
        twins.span(3, 1),
        twins.span(2, 3, start=5),
        twins.span(4, 2),
    )
    return spans, (range(0, 2), range(3, 5))


def test_atomic_groups_fail_with_the_step_like_everybody() -> None:
    run_scenario(lambda twins: Step(*groups(twins)))


@pytest.mark.parametrize("refused", range(5))
def test_a_group_is_refused_whole_and_leaves_no_trace_while_the_others_run(refused: int) -> None:
    twins = Twins()
    spans, atomic = groups(twins)
    before = twins.snapshot()
    refusal = KvBlocksExhausted("none left", metadata={"free_blocks": 0})
    twins.saboteur.arm("reserve", refused + 1, refusal)
    ours = twins.forward(Step(spans, atomic))
    twins.saboteur.disarm()
    gone = next((set(group) for group in atomic if refused in group), {refused})
    assert ours.outcomes[refused] is refusal
    for index, (span, outcome) in enumerate(zip(spans, ours.outcomes, strict=True)):
        assert isinstance(outcome, ExecutorError) == (index in gone)
        if index in gone and not span.create:
            assert twins.snapshot()["bits"][span.sequence] == before["bits"][span.sequence]
            assert twins.runner.kv.length(span.sequence) == twins.lengths[span.sequence]
    rest = [span for index, span in enumerate(spans) if index not in gone]
    twins._forward(twins.twin, Step(tuple(rest)))
    for span in rest:
        twins.lengths[span.sequence] = span.end
    twins.check()
    twins.finish()


def test_what_a_refused_group_had_reserved_is_free_for_the_spans_that_follow() -> None:
    twins = Twins()
    twins.step(twins.span(1, 60))  # 15 of 24 blocks
    outcomes = twins.step(twins.span(2, 20), twins.span(3, 30), twins.span(4, 36), atomic=(range(2),)).outcomes
    assert [isinstance(each, ExecutorError) for each in outcomes] == [True, True, False]
    assert type(outcomes[1]) is KvBlocksExhausted, "20 tokens fit, 30 more do not"
    assert twins.runner.cache_state().free_blocks == 0
    twins.release(4)
    assert isinstance(twins.step(twins.span(3, 30)).outcomes[0], SpanResult)
    twins.finish()


@pytest.mark.parametrize("spare", [0, 1])
def test_what_is_copied_only_to_stay_findable_costs_no_other_span_its_blocks(spare: int) -> None:
    runner = build_runner(IDENTITY)

    def step(*spans: Span) -> None:
        assert all(isinstance(each, SpanResult) for each in runner.forward(Step(spans)).outcomes)

    def tokens(count: int) -> np.ndarray:
        return np.arange(count, dtype=np.int32) % 64

    with runner.context():
        step(Span(1, tokens(SIZE), 0, LAST, create=True, prefix=PREFIX))
        runner.truncate(1, 2)
        step(Span(2, tokens((runner.kv.free_blocks - 1 - spare) * SIZE), 0, LAST, create=True))
        step(Span(1, tokens(1), 2, LAST), Span(3, tokens(SIZE), 0, LAST, create=True))
    assert runner.cache_state().cached_blocks == spare
    runner.check()


def test_a_failure_after_a_group_was_refused_is_undone_too() -> None:
    def scenario(twins: Twins) -> Step:
        twins.step(twins.span(1, 50), twins.span(2, 7))  # 15 of 24 blocks
        fork(twins, 2, [3])
        spans = (twins.span(3, 1), twins.span(4, 12), twins.span(2, 60, start=3), twins.span(1, 9, start=30))
        return Step(spans, (range(1, 3),))

    run_scenario(scenario)
    twins = Twins()
    step = scenario(twins)
    outcomes = twins.step(*step.spans, atomic=step.atomic).outcomes
    assert [isinstance(each, SpanResult) for each in outcomes] == [True, False, False, True]


# --- any history ----------------------------------------------------------------------------------------------------


def random_step(twins: Twins, data: st.DataObject, new: int) -> tuple[Step, int]:
    """Up to four spans of different sequences, some of them new, some rolled back, some in groups."""
    known = sorted(twins.lengths)
    chosen = data.draw(st.permutations([*known, new, new + 1]), label="sequences")
    spans = []
    for sequence in chosen[: data.draw(st.integers(1, 4), label="spans")]:
        length = twins.lengths.get(sequence, 0)
        back = data.draw(st.sampled_from([0, 0, 1, 2, SIZE, 2 * SIZE + 1, 99]), label="back")
        count = data.draw(st.sampled_from([1, 1, 2, 3, SIZE, 2 * SIZE + 1]), label="count")
        ahead = data.draw(st.sampled_from([0, 0, 5]), label="ahead") if sequence not in twins.lengths else 0
        output = data.draw(st.sampled_from([ROWS, LAST, SILENT, OutputSpec(Positions.ALL, TopTokens(3))]))
        spans.append(twins.span(sequence, count, max(0, length - back), output, ahead))
    first = data.draw(st.integers(0, len(spans)), label="group from")
    last = data.draw(st.integers(first, len(spans)), label="group to")
    return Step(tuple(spans), (range(first, last),) if first < last else ()), new + 2


@given(data=st.data())
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_any_history_with_failures_is_the_history_without_them(data: st.DataObject) -> None:
    twins, new = Twins(), 1
    for _ in range(data.draw(st.integers(1, 8), label="operations")):
        known = sorted(twins.lengths)
        kind = data.draw(st.sampled_from(["step"] * 5 + ["fork", "truncate", "release", "reserve"] * bool(known)))
        sequence = data.draw(st.sampled_from(known)) if known else 0
        if kind == "step":
            step, new = random_step(twins, data, new)
            for _ in range(data.draw(st.integers(0, 2), label="failures")):
                point = data.draw(st.sampled_from(POINTS), label="point")
                nth = data.draw(st.integers(1, 4), label="passage") if point == "reserve" else 1
                if twins.fail(step, point, nth) is None:
                    break
            else:
                twins.step(*step.spans, atomic=step.atomic)
        elif kind == "fork":
            at = data.draw(st.integers(0, twins.lengths[sequence]), label="at")
            if twins.both(lambda runner, s=sequence, n=new, at=at: runner.fork(s, [n, n + 1], at)) is None:
                twins.lengths |= {new: at, new + 1: at}
            new += 2
        elif kind == "truncate":
            to = data.draw(st.integers(0, twins.lengths[sequence]), label="length")
            twins.both(lambda runner, s=sequence, to=to: runner.truncate(s, to))
            twins.lengths[sequence] = to
        elif kind == "reserve":
            tokens = data.draw(st.integers(0, 30), label="reserve")
            twins.both(lambda runner, s=sequence, n=tokens: runner.reserve(s, n))
        else:
            twins.release(sequence)
        twins.check()
    twins.finish()
