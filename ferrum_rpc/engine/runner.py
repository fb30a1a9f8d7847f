"""A step as a transaction: validate, reserve, plan, run the model, select rows, copy out, commit.

The one place where sequences, blocks, tensors and the model meet. Whatever fails on the way, lengths, references and
cache contents are as before: new blocks go back, and old entries that the step overwrote in place are restored from an
undo log that was taken first. Only the model thread may call a runner.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Final

import numpy as np
import structlog
import torch

from ferrum_rpc.attention.backend import AttentionBackend
from ferrum_rpc.attention.geometry import BatchGeometry
from ferrum_rpc.core import CacheState, DeviceInfo, ModelInfo, Rows, Span, SpanOutcome, SpanResult, Step, StepResult
from ferrum_rpc.engine.compute import Compute
from ferrum_rpc.errors import DeviceLost, ExecutorError, StepFailed
from ferrum_rpc.kv.manager import KvManager
from ferrum_rpc.kv.sequence import Reservation
from ferrum_rpc.kv.store import KvStore, Saved
from ferrum_rpc.models.base import Model

log = structlog.get_logger("ferrum_rpc.engine")

Stage = Callable[[str], None]
"""Called with a stage's name before it runs; tests and failpoints raise from it to show that everything rolls back.

Stages of a step: ``reserve`` (each span), ``plan``, ``forward``, ``select``, ``commit``. Operations: ``truncate``,
``fork`` (each child), ``release``, ``reserve_kv``.
"""

GONE: Final = (torch.AcceleratorError, DeviceLost)
"""What means that the device is gone: the runtime's own error class, whose faults nearly all make every later call fail
too. Out of memory is none of them (`torch.OutOfMemoryError`; the allocation did not happen and the device goes on), nor
is a plain RuntimeError: if the device did not survive that, the undo or the next step meets it again as one."""


def no_stage(_: str) -> None:
    """Stages without tests."""
    return None


def no_beat() -> None:
    """A step that nobody watches."""
    return None


class TorchRunner:
    """Runs steps of one model over one paged cache."""

    def __init__(
        self,
        model: Model,
        kv: KvManager,
        store: KvStore,
        attention: AttentionBackend,
        *,
        info: ModelInfo,
        device: DeviceInfo,
        stage: Stage = no_stage,
        compute: Compute | None = None,
    ) -> None:
        self.info = info
        self.device = device
        self.model = model
        self.kv = kv
        self.store = store
        self.attention = attention
        self.compute = Compute(model, attention) if compute is None else compute
        self.beat: Callable[[], None] = no_beat
        self._stage = stage

    def context(self) -> AbstractContextManager[object]:
        """Inference mode is thread-local: the model thread enters it for its life."""
        return torch.inference_mode()

    # --- the step ---------------------------------------------------------------------------------------------------

    def forward(self, step: Step) -> StepResult:
        """Run ``step``. Spans that cannot be reserved are refused alone (or with their atomic group); the others run in
        one forward pass. Raises `StepFailed` when the pass fails, with everything as before, or `DeviceLost`."""
        began = time.perf_counter()
        outcomes: list[SpanOutcome | None] = [None] * len(step.spans)
        reservations = self._reserve(step, outcomes)
        copied = 0
        if reservations:
            live = list(reservations)  # in the order of the spans: that is how they were reserved
            open_reservations = list(reservations.values())
            rows = self._run([step.spans[index] for index in live], open_reservations)
            for index, reservation, answer in zip(live, open_reservations, rows, strict=True):
                outcomes[index] = SpanResult(self.kv.commit(reservation), answer)
                copied += len(reservation.copies)
        return StepResult(
            outcomes=tuple([each for each in outcomes if each is not None]),
            forward_s=time.perf_counter() - began,
            blocks_copied=copied,
        )

    def _reserve(self, step: Step, outcomes: list[SpanOutcome | None]) -> dict[int, Reservation]:
        """Reserve span by span. A refused member takes its atomic group back at once, so that the group's blocks are
        there for the spans that follow."""
        reservations: dict[int, Reservation] = {}
        stage, reserve = self._stage, self.kv.reserve
        for index, span in enumerate(step.spans):
            if outcomes[index] is not None:
                continue
            try:
                stage("reserve")
                reservations[index] = reserve(
                    span.sequence, span.start, len(span.tokens), span.create, ahead=span.reserve_tokens
                )
            except ExecutorError as error:
                group = next((each for each in step.atomic if index in each), range(index, index + 1))
                error.position = index - group.start
                for member in group:
                    outcomes[member] = error
                    if member in reservations:
                        self.kv.rollback(reservations.pop(member))
            except BaseException as error:
                self._undo(None, list(reservations.values()), error)
                if isinstance(error, Exception):
                    log.exception("step_failed", stage="reserve", action="report this stack trace: it is a bug")
                    raise StepFailed(f"the step could not be reserved ({type(error).__name__})") from error
                raise
        return reservations

    def _run(self, spans: Sequence[Span], reservations: Sequence[Reservation]) -> list[Rows | None]:
        """The forward pass over reserved spans; on any failure the cache is as before the step."""
        saved: Saved | None = None
        try:
            self._stage("plan")
            geometry = BatchGeometry.build(
                self.kv.block_size,
                [span.start for span in spans],
                [len(span.tokens) for span in spans],
                [reservation.table for reservation in reservations],
            )
            overwritten = [each.overwritten for each in reservations if each.overwritten.size]
            if overwritten:
                saved = self.store.save(self.compute.to_device(np.concatenate(overwritten)))
            self.store.copy_blocks([pair for each in reservations for pair in each.copies])
            self._stage("forward")
            hidden = self.compute.forward(spans, geometry, self.beat)
            self._stage("select")
            rows = self.compute.select(spans, geometry, hidden)
            self._stage("commit")
            return rows
        except BaseException as error:
            self._undo(saved, reservations, error)
            if isinstance(error, GONE):
                raise DeviceLost("the device failed during a step") from error
            if isinstance(error, Exception):
                log.exception(
                    "step_failed",
                    sequences=len(spans),
                    tokens=sum(len(span.tokens) for span in spans),
                    action="the step was rolled back and its callers told; if it was memory, lower --max-batch-tokens",
                )
                raise StepFailed(f"the forward pass failed ({type(error).__name__}); nothing changed") from error
            raise

    def _undo(self, saved: Saved | None, reservations: Sequence[Reservation], error: BaseException) -> None:
        if saved is not None and not isinstance(error, GONE):
            self.store.restore(saved)
        for reservation in reservations:
            self.kv.rollback(reservation)

    # --- integer operations, in the same queue ----------------------------------------------------------------------

    def truncate(self, sequence: int, length: int) -> int:
        """Roll back to ``length``; returns it. Raises `TruncateBeyondLength`."""
        with self._operation("truncate"):
            self._stage("truncate")
            self.kv.truncate(sequence, length)
        return length

    def fork(self, parent: int, children: Sequence[int], at: int | None) -> int:
        """Make ``children`` of the first ``at`` tokens of ``parent``, all or none; returns their length."""
        made: list[int] = []
        with self._operation("fork"):
            try:
                for child in children:
                    self._stage("fork")
                    self.kv.fork(parent, child, at)
                    made.append(child)
            except BaseException:
                for child in made:
                    self.kv.release(child)
                if made:  # a truncation to where it stands gives back the spare that its shared block needed
                    self.kv.truncate(parent, self.kv.length(parent))
                raise
        return self.kv.length(parent) if at is None else at

    def reserve(self, sequence: int, tokens: int) -> None:
        """Promise blocks for the next ``tokens`` tokens. Raises `KvBlocksExhausted`."""
        with self._operation("reserve_kv"):
            self._stage("reserve_kv")
            self.kv.ensure_capacity(sequence, tokens)

    def release(self, sequences: Sequence[int]) -> None:
        """Free sequences."""
        with self._operation("release"):
            self._stage("release")
            for sequence in sequences:
                self.kv.release(sequence)

    @contextmanager
    def _operation(self, name: str) -> Iterator[None]:
        """What nobody expected becomes `StepFailed`: the cache's calls change everything or nothing."""
        try:
            yield
        except ExecutorError:
            raise
        except GONE as error:
            raise DeviceLost(f"the device failed during a {name}") from error
        except Exception as error:
            log.exception("operation_failed", operation=name, action="report this stack trace: it is a bug")
            raise StepFailed(f"the {name} failed ({type(error).__name__}); nothing changed") from error

    def check(self) -> None:
        """Raise unless the cache's books agree."""
        self.kv.check()

    def cache_state(self) -> CacheState:
        """How full the cache is."""
        return self.kv.state()
