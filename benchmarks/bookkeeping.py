"""What a sequence costs in a step besides computing: the slope of the server's bookkeeping in the size of the batch.

By the identity model and the stages of `benchmarks.profile_stages`: requests to spans, admission, blocks, commit,
answers to protobuf. A step's fixed costs cancel out. It must be flat in how long the sequences are and in how many
others live: each is varied alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypedDict

from benchmarks.profile_stages import Profile, profile, steps_of
from benchmarks.workload import IDENTITY, IDENTITY_CONTEXT, Workload

TARGET_US: Final = 30.0
"""Microseconds for a sequence and a step, at most."""


@dataclass(frozen=True, slots=True)
class Size:
    """``batch`` sequences of ``context`` tokens in a step, of ``live`` ones."""

    batch: int
    context: int
    live: int


SIZES: Final = (
    Size(64, IDENTITY_CONTEXT, 64),
    Size(64, 1024, 64),
    Size(64, IDENTITY_CONTEXT, 1000),
)
QUICK_SIZES: Final = (Size(4, 16, 12),)


class Slope(TypedDict):
    """``one_us`` and ``all_us``: bookkeeping of a step of one sequence, and of the whole batch. ``stages_us``: the
    slope of each stage, largest first."""

    batch: int
    context: int
    live: int
    one_us: float
    all_us: float
    per_sequence_us: float
    target_us: float
    stages_us: dict[str, float]


async def slopes(sizes: Sequence[Size], steps: int) -> list[Slope]:
    """A server for each size, and steps of one sequence and of the batch."""
    found = []
    for size in sizes:
        batches = (1, size.batch)
        work = Workload(IDENTITY, IDENTITY, size.context, size.live, steps_of(batches, steps))
        one, many = await profile(work, batches, "greedy", steps, 1)
        found.append(slope(size, one, many))
    return found


def slope(size: Size, one: Profile, batch: Profile) -> Slope:
    """From the two profiles."""
    more = size.batch - 1
    grown = {name: (value - one.bookkeeping.get(name, 0.0)) / more for name, value in batch.bookkeeping.items()}
    one_us, all_us = sum(one.bookkeeping.values()), sum(batch.bookkeeping.values())
    return {
        "batch": size.batch,
        "context": size.context,
        "live": size.live,
        "one_us": round(one_us, 1),
        "all_us": round(all_us, 1),
        "per_sequence_us": round((all_us - one_us) / more, 2),
        "target_us": TARGET_US,
        "stages_us": {name: round(value, 2) for name, value in sorted(grown.items(), key=lambda each: -each[1])},
    }
