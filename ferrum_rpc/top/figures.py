"""What an executor does, from two of its answers to GetStatus: rates over the time between them. No IO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from ferrum_rpc.client import Counters, ExecutorStatus, MethodCount


class StatusSample(NamedTuple):
    """An answer, and the time at which it came, in seconds of a monotonic clock."""

    status: ExecutorStatus
    at: float


@dataclass(frozen=True, slots=True)
class MethodRates:
    """Calls of one RPC, and work items in them, a second. Names as in `MethodCount`."""

    method: str
    calls_per_s: float
    errors_per_s: float
    items_per_s: float
    item_errors_per_s: float


@dataclass(frozen=True, slots=True)
class StatusRates:
    """Work of an executor over ``measured_s`` seconds.

    ``tokens_per_s``: tokens computed, without those found in the prefix cache. ``rows_per_step``: rows returned by a
    step, mean. ``step_ms``: milliseconds of a forward pass, mean; ``busy_share``: the share of the time inside forward
    passes. ``prefix_hit_share``: of the tokens looked up in the prefix cache, the share found there. ``errors_per_s``:
    calls that failed, and items refused inside answered calls. A mean or a share of nothing is None.
    """

    measured_s: float
    steps_per_s: float
    tokens_per_s: float
    rows_per_step: float | None
    step_ms: float | None
    busy_share: float
    prefix_hit_share: float | None
    errors_per_s: float
    methods: tuple[MethodRates, ...]


def rates(before: StatusSample | None, now: StatusSample) -> StatusRates | None:
    """The rates between two answers. None without an earlier one, and if a counter went back: another process counts
    from 0, and the difference means nothing."""
    if before is None or (seconds := now.at - before.at) <= 0 or _went_back(before.status, now.status):
        return None
    old, new = before.status.counters, now.status.counters
    steps, forward_s = new.steps - old.steps, new.forward_s - old.forward_s
    searched, cached = new.searched_tokens - old.searched_tokens, new.cached_tokens - old.cached_tokens
    counts = {each.method: each for each in before.status.methods}
    methods = tuple(_method_rates(counts, each, seconds) for each in now.status.methods)
    return StatusRates(
        measured_s=seconds,
        steps_per_s=steps / seconds,
        tokens_per_s=max(0, new.tokens - old.tokens - cached) / seconds,
        rows_per_step=(new.rows - old.rows) / steps if steps else None,
        step_ms=1e3 * forward_s / steps if steps else None,
        busy_share=forward_s / seconds,
        prefix_hit_share=cached / searched if searched else None,
        errors_per_s=sum(each.errors_per_s + each.item_errors_per_s for each in methods),
        methods=methods,
    )


def hits_since_start(counters: Counters) -> float | None:
    """The share of all searched tokens that were found in the prefix cache. None if none was searched."""
    return counters.cached_tokens / counters.searched_tokens if counters.searched_tokens else None


def _went_back(before: ExecutorStatus, now: ExecutorStatus) -> bool:
    counts = {each.method: each for each in now.methods}
    return (
        now.uptime_s < before.uptime_s
        or _less(now.counters, before.counters)
        or any(each.method not in counts or _less(counts[each.method], each) for each in before.methods)
    )


def _less(new: Counters | MethodCount, old: Counters | MethodCount) -> bool:
    """Whether a count is less than it was."""
    names = [each.name for each in fields(old) if each.name != "method"]
    return any(getattr(new, name) < getattr(old, name) for name in names)


def _method_rates(before: Mapping[str, MethodCount], now: MethodCount, seconds: float) -> MethodRates:
    old = before.get(now.method) or MethodCount(now.method, 0, 0, 0, 0)
    return MethodRates(
        now.method,
        (now.calls - old.calls) / seconds,
        (now.errors - old.errors) / seconds,
        (now.items - old.items) / seconds,
        (now.item_errors - old.item_errors) / seconds,
    )
