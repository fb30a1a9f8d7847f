"""Failpoints in the runner: which of its stages is which point, and what a device's out of memory looks like."""

from __future__ import annotations

from typing import Final

import torch

from ferrum_rpc.engine.runner import Stage
from ferrum_rpc.failpoints import Failpoint, Failpoints

POINT_OF_STAGE: Final = {
    "plan": Failpoint.AFTER_RESERVE,
    "forward": Failpoint.BEFORE_FORWARD,
    "select": Failpoint.AFTER_FORWARD,
    "commit": Failpoint.BEFORE_COMMIT,
    "truncate": Failpoint.TRUNCATE,
    "fork": Failpoint.FORK,
    "release": Failpoint.RELEASE,
    "reserve_kv": Failpoint.RESERVE,
}
"""By stage: the point stands between the stage before and this one."""


def failing_stage(failpoints: Failpoints) -> Stage:
    """A stage hook that reaches the points."""

    def stage(name: str) -> None:
        point = POINT_OF_STAGE.get(name)
        if point is not None:
            failpoints.reach(point, out_of_memory=torch.OutOfMemoryError)

    return stage
