"""Selection of an implementation: the first of a list that can be created here and passes its probe, with the reason.

What may be missing or wrong on a machine (a compiler, an instruction, a driver) is an obstacle that is named in the log
and in GetInfo, because an operator who finds the slow path in use wants to know why. The last of a list works
everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from ferrum_rpc.device import check_device
from ferrum_rpc.errors import DeviceLost, InvalidRequest

AUTO: Final = "auto"


class Unsuited(Exception):
    """An obstacle to a candidate."""


class BackendCandidate(NamedTuple):
    """``make`` returns it after small steps of it were tried, or raises the obstacle, `Unsuited` or anything else.
    ``reason``: why it is preferred; ``{}`` in it stands for the result of ``make``."""

    name: str
    make: Callable[[], Any]
    reason: str = ""


class Choice(NamedTuple):
    """The selected candidate; ``reason`` also names the obstacles of better ones."""

    name: str
    reason: str
    made: Any


def select(*candidates: BackendCandidate, what: str, field: str, requested: str = AUTO) -> Choice:
    """The first candidate that can be created, or the one that is ``requested`` by name. Raises `InvalidRequest` (of
    ``field``) if there is none of that name, or if it cannot be created, and `DeviceLost` if the device did not survive
    an attempt: the next candidate would fail with an error that names something else."""
    names = [AUTO, *(each.name for each in candidates)]
    if requested not in names:
        raise InvalidRequest(f"unknown {what} {requested!r}; known: {', '.join(names)}", field=field)
    obstacles: list[str] = []
    for name, make, reason in candidates:
        if requested in (AUTO, name):
            try:
                made = make()
            except (Unsuited, OSError) as error:  # a missing library's error names what to do
                obstacles.append(f"{name}: {error}")
            except Exception as error:  # whatever a compiler or a driver may raise: others run without them
                why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                try:
                    check_device()
                except torch.AcceleratorError:
                    raise DeviceLost(f"the device failed in a small step of {what} {name!r}: {why}") from error
                obstacles.append(f"{name}: a small step failed: {why}")
            else:
                why = reason.format(made) if requested == AUTO else "requested"
                return Choice(name, "; ".join(filter(None, (why, *obstacles))), made)
    raise InvalidRequest(f"{what} {requested!r} is not available: {'; '.join(obstacles)}", field=field)
