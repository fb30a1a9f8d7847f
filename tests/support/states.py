"""A runner of the identity model that looks to callers like one of a model with recurrent states: its sequences need
slots, and tokens are fed again behind a deep truncation. No state is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ferrum_rpc.core import LATE, SpanOutcome, SpanResult
from ferrum_rpc.errors import KvBlocksExhausted

STATE_BYTES = 1 << 20
FREE_TRUNCATION_TOKENS = 4
CHECKPOINT_TOKENS = 8


def with_states(slots: int, *, more: int = 0) -> Callable[[Any], Any]:
    """For ``made`` of `serve_model`: that many slots. ``more``: those that it tells of, and that others have taken when
    an item comes."""

    def made(runner: Any) -> Any:
        kv, finish = runner.kv, runner.finish
        reserve, state = kv.reserve, kv.state
        again: dict[int, int] = {}  # by sequence: tokens that are fed again with the step under way

        def reserved(sequence: int, start: int, count: int, create: bool, *options: Any) -> Any:
            if create and state().sequences >= slots:
                raise KvBlocksExhausted("no slot is free", metadata={"needed_slots": 1, "free_slots": 0})
            deep = not create and kv.length(sequence) - start > FREE_TRUNCATION_TOKENS
            reservation = reserve(sequence, start, count, create, *options)
            again[sequence] = start % CHECKPOINT_TOKENS if deep else 0
            return reservation

        def told(sequence: int, outcome: SpanOutcome) -> SpanOutcome:
            if not isinstance(outcome, SpanResult) or outcome is LATE:
                return outcome
            return outcome._replace(recomputed_tokens=again.pop(sequence, 0))

        def finished(pending: Any) -> Any:
            result, sequences = finish(pending), [span.sequence for span in pending.spans]
            return result._replace(outcomes=tuple(map(told, sequences, result.outcomes)))

        def slotted() -> Any:
            known = state()
            return known._replace(total_slots=slots + more, free_slots=slots + more - known.sequences)

        kv.reserve, kv.state, runner.finish = reserved, slotted, finished
        runner.info = replace(runner.info, state_bytes=STATE_BYTES)
        runner.device = replace(
            runner.device, free_truncation_tokens=FREE_TRUNCATION_TOKENS, checkpoint_tokens=CHECKPOINT_TOKENS
        )
        return runner

    return made
