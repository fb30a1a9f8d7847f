"""A step as a transaction: validate, reserve, plan, run the model, select rows, copy out, commit.

This file combines sequences, blocks, tensors and the model. After any failure, lengths, references and cache contents
are as before: new blocks are freed, and old entries that the step overwrote in place are restored from an undo log.
Only the model thread may call a runner.

A step has two halves: `begin` queues it on the device, `finish` waits for its rows and commits. If the device works
asynchronously (``depth`` 2), the next step is begun in between. That changes no answer, because

- the device carries out all work in order, including the undo of a failed step: a step that is begun after another one
  reads and overwrites what that one wrote, or what its undo restored;
- steps in flight have different sequences. Until it is closed, a step holds the only reference to the blocks that it
  writes, replaced or may still restore, or one that keeps others from writing there (`kv.manager`);
- if the accounting of the cache would differ, the older step is finished first: for a sequence in both steps, if blocks
  are short (those that a step replaced are free when it commits), for a step that rolls back into blocks that a fork
  shares (its commit may need blocks for a promise), and for any operation but the release of other sequences.

The next step may continue runs of the step in flight (`Step.stops`), whose tokens are on the device only. Such a span
appends one token behind an open reservation (`KvManager.reserve_next`), and the layers read its token id on the device
(`compute.TokensBehind`). When the older step has ended, the tokens are written into the spans; spans whose run ended
with it are left out. Their K and V were written behind the sequence's end, and whatever follows overwrites them, in the
device's order. If the older step must be finished first, the tokens are known, and the spans are like all others.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import structlog
import torch

from ferrum_rpc.attention.geometry import BatchGeometry
from ferrum_rpc.attention.recurrent_steps import RecurrentStep
from ferrum_rpc.core import (
    LATE,
    CacheState,
    Rows,
    Span,
    SpanOutcome,
    SpanResult,
    Step,
    StepResult,
    TokenArray,
    named,
)
from ferrum_rpc.device import DEVICE_ERRORS
from ferrum_rpc.engine.checkpoint_files import CheckpointFiles
from ferrum_rpc.engine.compute import Compute, TokensBehind, clear_frames
from ferrum_rpc.engine.feeding import NO_ROWS, StateFeeding, WindowFeeding
from ferrum_rpc.engine.grammars.constraints import Constraints
from ferrum_rpc.engine.states import States
from ferrum_rpc.errors import DeviceLost, ExecutorError, KvBlocksExhausted, StepFailed
from ferrum_rpc.kv.manager import KvManager
from ferrum_rpc.kv.sequence import Reservation
from ferrum_rpc.kv.store import KvStore, Saved
from ferrum_rpc.kv.tiers import BlockFiles
from ferrum_rpc.sampling.accept import accepted
from ferrum_rpc.sampling.rows import Chosen
from ferrum_rpc.sampling.transfer import Marker

log = structlog.get_logger("ferrum_rpc.engine")

Stage = Callable[[str], None]
"""Called with a stage's name before it runs; tests and failpoints raise from it to show that everything rolls back.

Stages of a step: ``reserve`` (each span; again where it had to wait for blocks), ``plan``, ``forward`` (also of tokens
that are fed again), ``select``, and when its rows are there ``commit``. Operations: ``truncate``, ``fork`` (each
child), ``release``, ``reserve_kv``, ``export`` (each piece), ``import`` (its begin, each piece, its end), ``adapter``
(each piece).
"""

FLUSH_S: Final = 5.0
"""At its end, the second tier may take so long to be written."""


@dataclass(slots=True, eq=False)
class Pending:
    """A step under way, for `TorchRunner.finish`. By index of its spans: those that were ``refused``, and the
    ``reservations`` of the others, in their order, as are ``rows``; ``drafts``: which of those are to be accepted.
    ``chosen``: the tokens of these rows on the device.
    ``constrained``: its spans may name grammars; ``late``: those that were left out, because their masks were not there
    in time, or because their run has ended. The first spans continue those of ``behind``, with their ``stops``, as long
    as it has not ended. ``ended`` is what became of the step, once that is known."""

    began: float
    spans: tuple[Span, ...]
    refused: dict[int, ExecutorError]
    reservations: dict[int, Reservation]
    rows: Sequence[Rows | None] = ()
    drafts: Sequence[int] = ()
    chosen: Chosen = field(default_factory=list)
    stops: tuple[tuple[int, ...], ...] = ()
    behind: Pending | None = field(default=None, repr=False)
    constrained: bool = False
    late: Collection[int] = ()
    saved: Saved | None = None
    states: RecurrentStep | None = None
    mark: Marker | None = None
    closes_first: bool = False
    """Whether its commit may take blocks, so that no other step may reserve any before."""
    ended: StepResult | ExecutorError | None = None


class StepRunner:
    """Runs steps of one model over one paged cache. ``depth``: how many may be under way at once; more than one only
    where ``compute`` is late, and the model keeps no ``states``. ``max_tokens``: of a step."""

    def __init__(
        self,
        kv: KvManager,
        store: KvStore,
        compute: Compute,
        *,
        stage: Stage | None,
        depth: int,
        tier: BlockFiles | None,
        constraints: Constraints | None,
        states: States | None = None,
        max_tokens: int = sys.maxsize,
    ) -> None:
        self.kv = kv
        self.states = states
        self.feeding: StateFeeding | WindowFeeding | None = None
        self.window_feeding: WindowFeeding | None = None
        if states is not None:
            kv.prefixes.has_checkpoint = states.has_checkpoint
            self.feeding = StateFeeding(states, kv, compute, self._before_forward, self._undone, max_tokens=max_tokens)
        elif kv.has_window:
            self.feeding = self.window_feeding = WindowFeeding(
                kv,
                compute,
                stage=self._before_forward,
                make_way=self._settle,
                save_leaving=self._save_leaving,
                copy_blocks=store.copy_blocks,
                failed=self._undone,
                max_tokens=max_tokens,
            )
        self.store = store
        self.compute = compute
        self.depth = depth
        self.on_device = compute.model.device.type == "cuda"
        self.in_stages, self.look_every_s = compute.in_stages, compute.look_every_s
        self.follows = depth > 1 and compute.follows
        self.check_alive, self.ranks = compute.check_alive, compute.ranks
        self.constraints = constraints
        if constraints is not None:
            compute.words_of = constraints.words
        self._stage = stage
        self._under_way: list[Pending] = []
        self._newest: Pending | None = None
        self._ended_at = 0.0
        self._tier = tier
        self.checkpoint_files: CheckpointFiles | None = None
        if tier is not None:
            tier.on_change = kv.prefixes.note_tier
            kv.prefixes.tier = tier
            if states is not None:
                self.checkpoint_files = CheckpointFiles(states, tier)

    @contextmanager
    def context(self) -> Iterator[None]:
        """Inference mode is thread-local: the model thread enters it for its life. In the end the second tier gets what
        the prefix cache has."""
        with torch.inference_mode():
            yield
            if self._tier is not None:
                files = self.checkpoint_files
                states = () if files is None else files.kept()
                self._tier.end(self.kv.prefixes.blocks(), self.store.read_blocks, FLUSH_S, states)
                if files is not None:
                    files.close()

    def close(self) -> None:
        """See `Runner.close`."""
        if self.constraints is not None:
            self.constraints.close()
        self.compute.close()

    def end_hold(self, sequences: Sequence[int]) -> None:
        """Free the blocks that were reserved for runs that are over."""
        for sequence in sequences:
            self.kv.end_hold(sequence)

    def check(self) -> None:
        """Raise unless the accounting of the cache is consistent."""
        self.kv.check()
        if self.states is not None:
            self.states.check()

    def cache_state(self) -> CacheState:
        """How full the cache is."""
        state = self.kv.state()
        if self.states is not None:
            pool = self.states.pool
            slots = {"total_slots": pool.total, "free_slots": pool.free}
            state = state._replace(**slots, checkpoints=pool.checkpoints, checkpoints_dropped=pool.dropped)
        return state if self._tier is None else state._replace(tier_bytes=self._tier.held_bytes)

    # --- the step ---------------------------------------------------------------------------------------------------

    def forward(self, step: Step) -> StepResult:
        """Run ``step``: `begin`, then `finish`."""
        return self.finish(self.begin(step))

    def begin(self, step: Step) -> Pending:
        """Begin ``step``. Spans that cannot be reserved are refused, with their atomic group; the others run
        in one forward pass. Raises `StepFailed` when that cannot be, with everything as before, or `DeviceLost`."""
        began = time.perf_counter()
        behind: TokensBehind | None = None
        if self._under_way:
            if step.stops:
                behind = self._tokens_behind(step.spans[: len(step.stops)])
            self._make_way(step, behind)
        refused, reservations, copied = self._feed_and_reserve(step)
        if self._under_way and _short(refused):
            self._give_up(reservations)
            self._settle()
            refused, reservations, copied = self._feed_and_reserve(step)
        if copied and _short(refused):
            self._give_up(reservations)
            refused, reservations, _ = self._feed_and_reserve(step, keep=False)
        pending = Pending(began, step.spans, refused, reservations)
        if step.stops:
            pending.late = {each for each in range(len(step.stops)) if each not in reservations and each not in refused}
            if self._newest is not None and self._newest.ended is None:
                pending.behind, pending.stops = self._newest, step.stops
        if reservations:
            self._queue(pending, behind if pending.behind else None)
        self._under_way.append(pending)
        if self.follows:
            self._newest = pending
        return pending

    def ready(self, pending: Pending) -> bool:
        """Whether `finish` would not wait. Never waits, never raises."""
        if pending.ended is not None or pending.mark is None:
            return True
        try:
            return pending.mark.passed()
        except Exception:
            return True  # and `finish` raises it

    def finish(self, pending: Pending) -> StepResult:
        """Complete a step; those that were begun before it are completed first. Raises as `begin` does; then this step
        is undone, and no other."""
        while pending.ended is None:
            self._close(self._under_way[0])
        if isinstance(pending.ended, StepResult):
            return pending.ended
        raise pending.ended

    def _make_way(self, step: Step, behind: TokensBehind | None) -> None:
        """Finish the steps in flight if ``step`` must not be reserved together with them. ``behind``: the tokens of the
        runs that it continues."""
        if (
            len(self._under_way) >= self.depth
            or any(each.closes_first for each in self._under_way)
            or not self._taken().isdisjoint([span.sequence for span in step.spans[len(step.stops) :]])
            or (step.stops and behind is None)
            or not self._taken().isdisjoint([span.parent for span in step.spans])
        ):
            self._settle()

    def _taken(self) -> set[int]:
        """The sequences of the steps in flight."""
        return {each.spans[index].sequence for each in self._under_way for index in each.reservations}

    def _settle(self) -> None:
        """Complete all steps in flight, for `finish` to return or raise. Raises `DeviceLost`."""
        while self._under_way:
            pending = self._under_way[0]
            self._close(pending)
            if isinstance(pending.ended, DeviceLost):
                raise pending.ended

    def _close(self, pending: Pending) -> None:
        """Wait for the oldest step in flight, and commit it or roll it back."""
        self._under_way.remove(pending)
        if pending.reservations or pending.mark is not None:
            try:
                if pending.mark is not None:
                    pending.mark.wait()
                if pending.drafts:
                    _accept(pending)
                if self._stage is not None:
                    self._stage("commit")
            except BaseException as error:
                pending.ended = self._failure(pending, error)
                return
        if pending.constrained:
            self._ask_for_next(pending)  # first: the masks are made while the host goes on
        refused, late, reservations = pending.refused, pending.late, pending.reservations
        commit: Callable[[Reservation, TokenArray], int] = self.kv.commit
        rows = iter(pending.rows)
        states, windowed = self.states, self.window_feeding is not None
        if pending.states is not None:
            pending.states.commit([place for place, index in enumerate(reservations) if index in late])
        followed = bool(self._under_way) and self._under_way[0].behind is pending
        if followed:
            commit = self.kv.commit_first
        copied = searched = 0
        outcomes: list[SpanOutcome] = []
        for index, span in enumerate(pending.spans):
            if index in refused:
                outcomes.append(refused[index])
                continue
            if index in late:
                if index in reservations:
                    self._roll_back(reservations[index])
                    next(rows)
                outcomes.append(LATE)
                continue
            reservation = reservations[index]
            length = commit(reservation, span.tokens)
            again = 0 if states is None else states.commit(span.sequence, length)
            if windowed:
                again = self.kv.take_recomputed(span.sequence)
            outcomes.append(named(SpanResult, (length, next(rows), None, reservation.cached, again)))
            copied += len(reservation.copies)
            searched += reservation.searched
        if followed:
            self._pass_tokens_on(pending.spans, outcomes, self._under_way[0])
        self.kv.trim_spares()
        now = time.perf_counter()
        forward_s = now - max(pending.began, self._ended_at)  # before, the device was another step's
        pending.ended = StepResult(tuple(outcomes), forward_s, copied, searched)
        self._ended_at = now

    def _ask_for_next(self, pending: Pending) -> None:
        """Ask for the masks behind what a step has chosen, and forget sequences that were not made."""
        constraints, spans = self.constraints, pending.spans
        assert constraints is not None  # noqa: S101 - the caller looked
        for index in (*pending.refused, *pending.late):
            if spans[index].create:
                constraints.forget((spans[index].sequence,))
        for index, chosen in zip(pending.reservations, pending.rows, strict=True):
            if chosen is not None and index not in pending.late:
                constraints.chosen(spans[index], chosen)
        constraints.flush()

    def _give_up(self, reservations: dict[int, Reservation]) -> None:
        for reservation in reservations.values():
            self._roll_back(reservation)

    def _roll_back(self, reservation: Reservation) -> None:
        if self.states is not None:
            self.states.rollback(reservation.sequence)
        self.kv.rollback(reservation)

    def _feed_and_reserve(
        self, step: Step, *, keep: bool = True
    ) -> tuple[dict[int, ExecutorError], dict[int, Reservation], bool]:
        """`_reserve`, after what is missing was fed again. Forks that were fed and not reserved are released."""
        if self.feeding is None:
            return self._reserve(step, keep=keep)
        try:
            while self.feeding.feed(step.spans):
                pass
            return self._reserve(step, keep=keep)
        finally:
            self.kv.end_begun()

    def _reserve(
        self, step: Step, *, keep: bool = True
    ) -> tuple[dict[int, ExecutorError], dict[int, Reservation], bool]:
        """Reserve span by span: those that were refused and those that were not, by index, and whether a block was
        copied only to stay findable (also for a span that was refused after that, with its group). A refused member
        takes its atomic group back at once, so that the group's blocks are there for the spans that follow. ``keep``:
        see `KvManager.reserve`."""
        refused: dict[int, ExecutorError] = {}
        reservations: dict[int, Reservation] = {}
        copied = False
        constraints, states = self.constraints, self.states
        stage, reserve = self._stage, self.kv.reserve
        spans = list(enumerate(step.spans))
        forks = [each for each in spans if each[1].parent is not None]
        if forks:  # first: their parents may be fed in the same step
            spans = forks + [each for each in spans if each[1].parent is None]
        try:
            if step.stops:
                spans = self._reserve_runs(step, spans, refused, reservations)
            for index, span in spans:
                sequence, tokens, start, _, create, ahead, run, parent, prefix, _ = span
                if index in refused:
                    continue
                try:
                    if stage is not None:
                        stage("reserve")
                    if constraints is not None and (refusal := constraints.refusal(span)) is not None:
                        raise copy.copy(refusal)
                    count, hold = len(tokens), 0 if run is None else run.max_tokens - 1
                    prompt = span.prompt if count > 1 else None
                    reserved = reserve(sequence, start, count, create, ahead, hold, parent, prefix, prompt, keep)
                    if states is not None:
                        self._reserve_states(states, span, reserved)
                    reservations[index] = reserved
                    if reserved.kept:
                        copied = True
                except ExecutorError as error:
                    group = next((each for each in step.atomic if index in each), range(index, index + 1))
                    if states is not None and len(group) > 1 and "needed_slots" in error.metadata:
                        error = states.refusal([step.spans[each] for each in group])
                    error.position = index - group.start
                    for member in group:
                        refused[member] = error
                        if member in reservations:
                            self._roll_back(reservations.pop(member))
        except BaseException as error:
            self._give_up(reservations)
            self.kv.trim_spares()
            if isinstance(error, Exception):
                log.exception("step_failed", stage="reserve", action="report this stack trace: it is a bug")
                raise StepFailed(f"the step could not be reserved ({type(error).__name__})") from error
            raise
        if forks:
            reservations = dict(sorted(reservations.items()))
        return refused, reservations, copied

    # --- states of recurrent layers ---------------------------------------------------------------------------------

    def _reserve_states(self, states: States, span: Span, reserved: Reservation) -> None:
        """The slots of a span whose blocks are reserved; these are given back if there are none, or a copy fails."""
        try:
            states.reserve(span, reserved, publishes=self.kv.publishes(span.sequence))
        except BaseException:
            self.kv.rollback(reserved)
            raise

    # --- a step that continues runs of the step before it -----------------------------------------------------------

    def _reserve_runs(
        self,
        step: Step,
        spans: list[tuple[int, Span]],
        refused: dict[int, ExecutorError],
        reservations: dict[int, Reservation],
    ) -> list[tuple[int, Span]]:
        """Reserve the next tokens of the runs that ``step`` continues behind those of the step in flight. Returns the
        ``spans`` that are to be reserved like all others: if that step has ended, also those of runs that go on."""
        before, count = self._newest, len(step.stops)
        assert before is not None  # noqa: S101 - it continues the runs of one
        if before.ended is not None:
            outcomes = before.ended.outcomes if isinstance(before.ended, StepResult) else ()
            going = _tokens_chosen(before.spans, outcomes, step.spans, step.stops)
            return [each for each in spans if each[0] >= count or each[0] in going]
        for index, span in enumerate(step.spans[:count]):
            if self._stage is not None:
                self._stage("reserve")
            try:
                reservations[index] = self.kv.reserve_next(span.sequence)
            except KvBlocksExhausted as error:  # the step in flight is finished first
                refused[index] = error
                break
        return [each for each in spans if each[0] >= count]

    def _tokens_behind(self, spans: Sequence[Span]) -> TokensBehind | None:
        """The tokens that the step in flight chooses for ``spans``. None: they are not all on the device, or what that
        step writes of one of the sequences is not appended, so it must be finished first."""
        before = self._newest
        if before is None or before.ended is not None:
            return None
        firsts, parts, total = dict[int, int](), list[torch.Tensor](), 0
        for block, tokens in before.chosen:
            firsts[id(block)] = total
            parts.append(tokens)
            total += len(tokens)
        reserved = zip(before.reservations.values(), before.rows, strict=True)
        places, rows = {each.sequence: (each.start, row) for each, row in reserved}, list[int]()
        for span in spans:
            start, found = places.get(span.sequence, (0, None))
            if found is None or (first := firsts.get(id(found.block))) is None or start < self.kv.length(span.sequence):
                return None
            rows.append(first + found.first + found.count - 1)
        return TokensBehind(parts, np.array(rows, np.int64))

    def _pass_tokens_on(self, spans: Sequence[Span], outcomes: Sequence[SpanOutcome], following: Pending) -> None:
        """After the end of a step of ``spans`` (without ``outcomes``: it failed), write its tokens into the spans of
        the step that continues its runs. Spans of runs that have ended are left out."""
        following.behind = None
        going = _tokens_chosen(spans, outcomes, following.spans, following.stops)
        gone = [index for index in range(len(following.stops)) if index in following.reservations.keys() - going]
        if gone:
            kept = [index not in gone for index in following.reservations]
            following.rows = [row for row, keep in zip(following.rows, kept, strict=True) if keep]
            following.drafts = [place - len(gone) for place in following.drafts]  # what continues runs is first
            following.late = {*following.late, *gone}
            for index in gone:
                self.kv.rollback(following.reservations.pop(index))

    def _queue(self, pending: Pending, behind: TokensBehind | None) -> None:
        """The forward pass over reserved spans, up to the copies of its rows; on any failure the cache is as before."""
        began = time.monotonic()
        pending.constrained = self.constraints is not None and self.constraints.active
        if pending.constrained and self.compute.masks_first:
            self._leave_out(pending, began)
            if not pending.reservations:
                return
        spans: list[Span] = []
        starts, lengths, tables, overwritten = [], [], [], []
        copies: list[tuple[int, int]] = []
        for index, reservation in pending.reservations.items():
            span = pending.spans[index]
            if reservation.cached:
                cached, sequence = reservation.cached, span.sequence
                tokens, start = span.tokens[cached:], span.start + cached
                span = Span(sequence, tokens, start, span.output, adapter=span.adapter)
            spans.append(span)
            starts.append(span.start)
            lengths.append(len(span.tokens))
            tables.append(reservation.table)
            if reservation.copies:
                copies += reservation.copies
            if reservation.overwritten.size:
                overwritten.append(reservation.overwritten)
        stage = self._stage
        try:
            if stage is not None:
                stage("plan")
            self._save_leaving()
            geometry = BatchGeometry.build(self.kv.block_size, starts, lengths, tables)
            if overwritten:
                pending.saved = self.store.save(np.concatenate(overwritten))
            if copies:
                self.store.copy_blocks(np.array(copies, dtype=np.int64))
            self._before_forward()
            hidden = self._forward(pending, spans, geometry, behind)
            if stage is not None:
                stage("select")
            if pending.constrained and not self.compute.masks_first:
                spans = self._without_late(pending, spans, began)
            pending.rows, pending.drafts = self.compute.select(spans, hidden, self.kv.counts)
            pending.mark = self.compute.mark()
            if self.depth > 1:
                pending.chosen = self.compute.chosen
                length, reserved = self.kv.length, pending.reservations.values()
                pending.closes_first = any(r.replaced and r.start < length(r.sequence) for r in reserved)
        except BaseException as error:
            raise self._failure(pending, error) from error

    def _forward(
        self, pending: Pending, spans: Sequence[Span], geometry: BatchGeometry, behind: TokensBehind | None
    ) -> torch.Tensor:
        if self.states is not None:
            pending.states = self.states.begin([each.sequence for each in spans])
        return self.compute.forward(spans, geometry, behind, pending.states)

    def _leave_out(self, pending: Pending, began: float) -> None:
        """Leave spans out of a step that has not begun on the device, if their masks are late."""
        assert self.constraints is not None  # noqa: S101 - the caller looked
        late = self.constraints.late([pending.spans[index] for index in pending.reservations], began)
        pending.late = {index for index in pending.reservations if pending.spans[index].sequence in late}
        for index in pending.late:
            self._roll_back(pending.reservations.pop(index))

    def _without_late(self, pending: Pending, spans: Sequence[Span], began: float) -> list[Span]:
        """The spans of a step that computes, without rows of those whose masks are late. These are steps of runs, which
        append a token, so nothing needs to be restored."""
        assert self.constraints is not None  # noqa: S101 - the caller looked
        late = self.constraints.late(spans, began)
        if late:
            of_masks = [index for index in pending.reservations if pending.spans[index].sequence in late]
            pending.late = {*pending.late, *of_masks}
        return [span._replace(output=NO_ROWS) if span.sequence in late else span for span in spans]

    def _save_leaving(self) -> None:
        """Save evicted blocks of the prefix cache in the second tier, if there is one, before any block is written."""
        if self._tier is not None and (leaving := self.kv.prefixes.take_leaving()):
            self._tier.write(leaving, self.store.read_blocks)

    def _before_forward(self) -> None:
        if self._stage is not None:
            self._stage("forward")

    def _undone(self, error: Exception, reserved: Sequence[Reservation] = ()) -> ExecutorError:
        """The error of a forward pass of no step, after its reservations were undone."""
        return self._failure(Pending(0.0, (), {}, dict(enumerate(reserved))), error)

    def _failure(self, pending: Pending, error: BaseException) -> ExecutorError:
        """Undo a reserved step, and return its callers' error. Raises errors that are not a failure of the step."""
        if not isinstance(error, DEVICE_ERRORS):
            try:
                clear_frames(error)
                self.compute.recover()
                if pending.saved is not None:
                    self.store.restore(pending.saved)
                if pending.states is not None and self.states is not None:
                    self.states.store.undo(pending.states)
            except DEVICE_ERRORS as gone:
                error = gone
            except Exception as failed:  # the cache has changed, so no call may be answered as if it had not
                error = DeviceLost(f"a failed step could not be undone ({type(failed).__name__})")
                error.__cause__ = failed
        if self._under_way and self._under_way[0].behind is pending:
            self._pass_tokens_on(pending.spans, (), self._under_way[0])
        self._give_up(pending.reservations)
        self.kv.trim_spares()
        answer: ExecutorError
        if isinstance(error, DEVICE_ERRORS):
            answer = DeviceLost(error.message if isinstance(error, DeviceLost) else "the device failed during a step")
        elif isinstance(error, Exception):
            log.exception(
                "step_failed",
                sequences=len(pending.reservations),
                tokens=sum(each.end - each.start for each in pending.reservations.values()),
                action="rolled back, and its callers got the error; if it was memory, lower --max-batch-tokens",
            )
            answer = StepFailed(f"the forward pass failed ({type(error).__name__}); nothing changed")
        else:
            raise error
        answer.__cause__ = error
        return answer


def _short(refused: dict[int, ExecutorError]) -> bool:
    """Whether a span was refused for lack of blocks."""
    return bool(refused) and any(isinstance(each, KvBlocksExhausted) for each in refused.values())


def _tokens_chosen(
    before: Sequence[Span], outcomes: Sequence[SpanOutcome], spans: Sequence[Span], stops: Sequence[tuple[int, ...]]
) -> set[int]:
    """Write the tokens that a step of the spans ``before`` has chosen into the ``spans`` of the next step that continue
    its runs. Returns the indices of those whose runs go on."""
    going = set[int]()
    results = {span.sequence: each for span, each in zip(before, outcomes, strict=False)}
    for index, ids in enumerate(stops):
        outcome = results.get(spans[index].sequence)
        if isinstance(outcome, SpanResult) and (rows := outcome.rows) is not None:
            token = int(rows.block["token_ids"][rows.first + rows.count - 1])
            if token not in ids:
                spans[index].tokens[0] = token
                going.add(index)
    return going


def _accept(pending: Pending) -> None:
    """Cut the drafts of a step whose rows are there: spans to the tokens that the cache keeps, rows to those that were
    chosen."""
    places, spans = list(pending.reservations), list(pending.spans)
    kept, pending.rows = accepted([spans[place].tokens for place in places], pending.rows, pending.drafts)
    for at, count in kept.items():
        span = spans[places[at]]
        spans[places[at]] = span._replace(tokens=span.tokens[:count])
    pending.spans = tuple(spans)
