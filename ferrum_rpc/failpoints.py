"""Failpoints: named points at which a server can be made to fail, to test its promises about failures.

They are set in the configuration of a real server, like etcd's gofail points: the tested program is the shipped one.

    before_commit=error@3;after_forward=crash@10;before_forward=hang@p0.01

A rule is ``point=action``, optionally with a condition: ``@n`` only the n-th time the point is reached, ``@n+`` from
the n-th time on, ``@pX`` each time with probability X; without it, every time. A server without rules has no hook in
its forward pass.
"""

from __future__ import annotations

import difflib
import enum
import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import structlog

from ferrum_rpc.errors import DeviceLost
from ferrum_rpc.logs import drain

log = structlog.get_logger("ferrum_rpc.failpoints")


class Failpoint(enum.StrEnum):
    """Where. All are on the model thread but `BEFORE_REPLY`: that is on the event loop, after the change was committed
    and recorded, and what hangs or delays there stops the whole server.

    A point of an operation is before its change, which is indivisible; in `FORK` it is before each child, so that a
    later one fails after the earlier ones were made, in `EXPORT` before each piece that is read, and in `IMPORT` before
    the blocks are allocated, before each piece that is written, and before the sequence exists.
    """

    AFTER_RESERVE = "after_reserve"
    BEFORE_FORWARD = "before_forward"
    AFTER_FORWARD = "after_forward"
    BEFORE_COMMIT = "before_commit"
    BEFORE_REPLY = "before_reply"
    TRUNCATE = "truncate"
    FORK = "fork"
    RELEASE = "release"
    RESERVE = "reserve"
    EXPORT = "export"
    IMPORT = "import"


class Action(enum.StrEnum):
    """What. ``error``: an exception that no code expects. ``oom``: the device's out of memory. ``device_lost``: the
    device is gone for good. ``crash``: SIGKILL to the own process. ``hang``: the thread stops until
    `Failpoints.release`. ``delay:ms``: it stops for so many milliseconds."""

    ERROR = "error"
    OOM = "oom"
    DEVICE_LOST = "device_lost"
    CRASH = "crash"
    HANG = "hang"
    DELAY = "delay"


OF_THE_DEVICE: Final = frozenset({Action.OOM, Action.DEVICE_LOST})
"""Actions that do not apply on the event loop."""

_RULE: Final = re.compile(r"(?P<point>\w+)=(?P<action>\w+)(:(?P<delay>\d+))?(@(?P<when>p[0-9.]+|\d+\+?))?")


class FailpointError(RuntimeError):
    """The exception of ``error``: a class that no code handles on purpose."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: fires from the ``first`` to the ``last`` time (None: no end) with ``probability``."""

    point: Failpoint
    action: Action
    delay_s: float = 0.0
    first: int = 1
    last: int | None = None
    probability: float = 1.0


class Failpoints:
    """The rules of one server. ``hits`` and ``fired`` count by point; read them anywhere.

    Every point is reached from one thread only, so the counts need no lock.
    """

    def __init__(self, rules: Iterable[Rule] = (), seed: int = 0) -> None:
        self.rules = tuple(rules)
        self._rules: dict[str, list[Rule]] = {}
        for rule in self.rules:
            self._rules.setdefault(rule.point, []).append(rule)
        self.hits: dict[str, int] = dict.fromkeys(self._rules, 0)
        self.fired: dict[str, int] = dict.fromkeys(self._rules, 0)
        self._random = {point: random.Random(f"{seed} {point}") for point in self._rules}  # noqa: S311 - no secret
        self._released = threading.Event()

    def reach(self, point: str, *, out_of_memory: type[Exception] = MemoryError) -> None:
        """Called when the point is reached. Raises `FailpointError`, ``out_of_memory`` or `DeviceLost` if a rule says
        so."""
        rules = self._rules.get(point)
        if rules is None:
            return
        self.hits[point] += 1
        hit = self.hits[point]
        for rule in rules:
            if hit < rule.first or (rule.last is not None and hit > rule.last):
                continue
            if rule.probability == 1 or self._random[point].random() < rule.probability:
                self._fire(rule, hit, out_of_memory)

    def release(self) -> None:
        """End the current hang; later hangs return at once."""
        self._released.set()

    def _fire(self, rule: Rule, hit: int, out_of_memory: type[Exception]) -> None:
        self.fired[rule.point] += 1
        log.warning(
            "failpoint_fired",
            failpoint=rule.point.value,
            effect=rule.action.value,
            hit=hit,
            action="this failure was asked for; start without --failpoints to serve",
        )
        match rule.action:
            case Action.ERROR:
                raise FailpointError(f"failpoint {rule.point}")
            case Action.OOM:
                raise out_of_memory(f"failpoint {rule.point}")
            case Action.DEVICE_LOST:
                raise DeviceLost("the device was lost at a failpoint")
            case Action.CRASH:
                drain()  # or the line above would go with the process
                os.kill(os.getpid(), signal.SIGKILL)
            case Action.HANG:
                self._released.wait()
            case Action.DELAY:
                time.sleep(rule.delay_s)


NO_FAILPOINTS: Final = Failpoints()
"""No rules: reaching a point does nothing and counts nothing."""


def parse_failpoints(text: str) -> tuple[Rule, ...]:
    """The rules of a setting. Raises ValueError with the valid form."""
    return tuple(_rule(part.strip()) for part in text.split(";") if part.strip())


def _rule(text: str) -> Rule:
    match = _RULE.fullmatch(text)
    if match is None:
        raise ValueError(f"invalid failpoint {text!r}: must be point=action, or point=action@3, @3+ or @p0.1 for when")
    point = Failpoint(_one_of(match["point"], Failpoint, "failpoint"))
    action = Action(_one_of(match["action"], Action, "action"))
    if (action is Action.DELAY) != (match["delay"] is not None):
        raise ValueError(f"{text!r}: delay needs milliseconds (delay:100), and no other action takes any")
    if point is Failpoint.BEFORE_REPLY and action in OF_THE_DEVICE:
        raise ValueError(f"{text!r}: before_reply must error, crash, hang or delay: no device works there")
    first, last, probability = 1, None, 1.0
    when = match["when"] or "1+"
    if when.startswith("p"):
        probability = float(when[1:])
        if not 0 < probability <= 1:
            raise ValueError(f"{text!r}: a probability must be above 0 and at most 1")
    else:
        first = int(when.removesuffix("+"))
        last = None if when.endswith("+") else first
        if first < 1:
            raise ValueError(f"{text!r}: a hit must be at least 1")
    return Rule(point, action, int(match["delay"] or 0) / 1000, first, last, probability)


def _one_of(name: str, known: type[enum.StrEnum], what: str) -> str:
    names = [str(each) for each in known]
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    raise ValueError(
        f"unknown {what} {name!r}; " + (f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}")
    )
