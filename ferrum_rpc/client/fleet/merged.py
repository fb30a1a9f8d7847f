"""What the executors of a fleet report, as one report."""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from dataclasses import fields, replace
from typing import Final, TypeVar

from ferrum_rpc.client.info import Counters, ExecutorState, ExecutorStatus, KvBlocks, MethodCount
from ferrum_rpc.core import Pressure

Sums = TypeVar("Sums", Counters, KvBlocks, MethodCount, ExecutorStatus)

BEST_FIRST: Final = (
    ExecutorState.SERVING,
    ExecutorState.STARTING,
    ExecutorState.DRAINING,
    ExecutorState.HUNG,
    ExecutorState.FAILED,
    ExecutorState.UNKNOWN,
)
"""A fleet is in the first of these states that one of its executors is in."""


def merged_pressure(reports: ListOf[Pressure]) -> Pressure:
    """The sums, in blocks of the smallest block size. ``reports`` has at least one."""
    size = min(each.block_size for each in reports)
    return Pressure(*map(sum, zip(*reports, strict=True)))._replace(
        block_size=size,
        free_blocks=sum(each.free_blocks * each.block_size // max(1, size) for each in reports),
        total_blocks=sum(each.total_blocks * each.block_size // max(1, size) for each in reports),
    )


def merged_status(reports: ListOf[ExecutorStatus]) -> ExecutorStatus:
    """The best state, the longest time up, and the sums of all else. ``reports`` has at least one."""
    methods: dict[str, list[MethodCount]] = {}
    for each in (method for report in reports for method in report.methods):
        methods.setdefault(each.method, []).append(each)
    return replace(
        _summed(reports),
        state=min((each.state for each in reports), key=BEST_FIRST.index),
        uptime_s=max(each.uptime_s for each in reports),
        pressure=merged_pressure([each.pressure for each in reports]),
        counters=_summed([each.counters for each in reports]),
        methods=tuple(map(_summed, methods.values())),
        blocks=_summed([each.blocks for each in reports]),
    )


def _summed(reports: ListOf[Sums]) -> Sums:
    """The first report, with the sums of the numbers in all."""
    first = reports[0]
    numbers = [each.name for each in fields(first) if isinstance(getattr(first, each.name), int | float)]
    return replace(first, **{name: sum(getattr(each, name) for each in reports) for name in numbers})
