"""What the executors of a fleet report, as one report."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as ListOf
from dataclasses import fields
from typing import Final, TypeVar

from ferrum_rpc.client.info import Counters, ExecutorState, ExecutorStatus, KvBlocks, MethodCount
from ferrum_rpc.core import Pressure

Sums = TypeVar("Sums", Counters, KvBlocks)

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

    def blocks(counts: Iterable[tuple[int, int]]) -> int:
        return sum(count * block_size // max(1, size) for count, block_size in counts)

    return Pressure(
        free_blocks=blocks((each.free_blocks, each.block_size) for each in reports),
        total_blocks=blocks((each.total_blocks, each.block_size) for each in reports),
        block_size=size,
        queued_items=sum(each.queued_items for each in reports),
        queued_tokens=sum(each.queued_tokens for each in reports),
        sequences=sum(each.sequences for each in reports),
        running_items=sum(each.running_items for each in reports),
    )


def merged_status(reports: ListOf[ExecutorStatus]) -> ExecutorStatus:
    """The best state, the longest time up, and the sums of all else. ``reports`` has at least one."""
    methods: dict[str, list[MethodCount]] = {}
    for each in (method for report in reports for method in report.methods):
        methods.setdefault(each.method, []).append(each)
    return ExecutorStatus(
        state=min((each.state for each in reports), key=BEST_FIRST.index),
        pressure=merged_pressure([each.pressure for each in reports]),
        counters=_summed(Counters, [each.counters for each in reports]),
        methods=tuple(
            MethodCount(
                name,
                calls=sum(each.calls for each in counts),
                errors=sum(each.errors for each in counts),
                items=sum(each.items for each in counts),
                item_errors=sum(each.item_errors for each in counts),
            )
            for name, counts in methods.items()
        ),
        uptime_s=max(each.uptime_s for each in reports),
        replay_bytes=sum(each.replay_bytes for each in reports),
        leases=sum(each.leases for each in reports),
        sessions=sum(each.sessions for each in reports),
        blocks=_summed(KvBlocks, [each.blocks for each in reports]),
    )


def _summed(kind: type[Sums], reports: ListOf[Sums]) -> Sums:
    return kind(**{field.name: sum(getattr(each, field.name) for each in reports) for field in fields(kind)})
