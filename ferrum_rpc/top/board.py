"""A row for each executor of a fleet: its state as a client of the fleet sees it, its figures, and its callers.

`Members` knows who is there, who hangs and who was restarted. The rows are made from its knowledge without a call, and
from the last answers about callers, so that an executor that does not answer delays no other one's row.
"""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

from ferrum_rpc.client import (
    Activity,
    DeadlineExceeded,
    Draining,
    ExecutorError,
    ExecutorInfo,
    ExecutorStatus,
    InvalidRequest,
    PermissionDenied,
    Starting,
    Unauthenticated,
    explained,
)
from ferrum_rpc.client.fleet import Member, Members
from ferrum_rpc.top.figures import StatusRates, StatusSample, hits_since_start, rates

RECENT_S: Final = 60.0
"""A restart is mentioned for so long."""


class RowState(enum.StrEnum):
    """An executor as a client that has the same targets sees it. MISMATCH: it serves another model than most of them.
    REFUSED: it refuses the credentials. INVALID: not a target, or the same executor as another target. UNKNOWN: it has
    not answered yet."""

    SERVING = "SERVING"
    STARTING = "STARTING"
    DRAINING = "DRAINING"
    HUNG = "HUNG"
    GONE = "GONE"
    MISMATCH = "MISMATCH"
    REFUSED = "REFUSED"
    INVALID = "INVALID"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class ExecutorRow:
    """An executor now. ``reason``: for its state, empty if nothing is to be said. ``restarts``: new processes at its
    target since the board exists. ``info``, ``status``, ``rates`` and ``activity`` are None where they are not
    known; ``activity`` is known to operators only."""

    target: str
    state: RowState
    reason: str
    restarts: int = 0
    info: ExecutorInfo | None = None
    status: ExecutorStatus | None = None
    rates: StatusRates | None = None
    activity: Activity | None = None

    def json(self) -> dict[str, Any]:
        """The row as JSON's types. The keys are always the same; docs/operations.md has their meanings."""
        info, status, measured = self.info, self.status, self.rates
        pressure, blocks = (None, None) if status is None else (status.pressure, status.blocks)
        return {
            "target": self.target,
            "state": self.state.value,
            "reason": self.reason,
            "restarts": self.restarts,
            "instance_id": info and info.instance_id,
            "model": info and info.model.name,
            "version": info and info.server_version,
            "uptime_s": status and status.uptime_s,
            "measured_s": measured and measured.measured_s,
            "steps_per_s": measured and measured.steps_per_s,
            "tokens_per_s": measured and measured.tokens_per_s,
            "rows_per_step": measured and measured.rows_per_step,
            "step_ms": measured and measured.step_ms,
            "busy_share": measured and measured.busy_share,
            "queued_items": pressure and pressure.queued_items,
            "queued_tokens": pressure and pressure.queued_tokens,
            "running_items": pressure and pressure.running_items,
            "used_blocks": blocks and blocks.used,
            "cached_blocks": blocks and blocks.cached,
            "free_blocks": blocks and blocks.free,
            "free_slots": pressure and pressure.free_slots,
            "total_slots": pressure and pressure.total_slots,
            "prefix_hit_share": measured and measured.prefix_hit_share,
            "prefix_hit_share_since_start": status and hits_since_start(status.counters),
            "sequences": pressure and pressure.sequences,
            "parked_sequences": blocks and blocks.parked_sequences,
            "leases": status and status.leases,
            "sessions": status and status.sessions,
            "errors_per_s": measured and measured.errors_per_s,
            "methods": [asdict(each) for each in measured.methods] if measured else [],
            "callers": self.activity and [asdict(each) for each in self.activity.callers],
            "slowest_calls": self.activity and [asdict(each) for each in self.activity.slowest_calls],
        }


class ExecutorBoard:
    """The rows of ``members``, which only watches. Rates are those between two calls of `rows`."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._samples: dict[str, StatusSample] = {}  # by target: the last one of its process
        self._rates: dict[str, StatusRates | None] = {}
        self._instances: dict[str, str] = {}
        self._restarts = Counter[str]()
        self._activities: dict[str, Activity | None] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}

    def ask(self, timeout_s: float) -> list[asyncio.Task[None]]:
        """Begin to ask each executor for its callers and slowest calls, unless it has not answered the last time yet.
        Returns all that is under way."""
        for member in self._members.there:
            if (last := self._asking.get(member.target)) is None or last.done():
                self._asking[member.target] = asyncio.create_task(self._ask(member, timeout_s))
        return list(self._asking.values())

    async def _ask(self, member: Member, timeout_s: float) -> None:
        try:
            self._activities[member.target] = await member.client.activity(timeout_s=timeout_s)
        except ExecutorError:  # the caller is no operator, the executor is older, or its row has the reason
            self._activities[member.target] = None

    async def close(self) -> None:
        """Ask no more."""
        for each in self._asking.values():
            each.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)

    def rows(self) -> list[ExecutorRow]:
        """A row for each executor of the targets, in their order; those of a name by address. A name that leads to no
        executor has a row itself."""
        there = {each.target: each for each in self._members.there}
        common = _most(there.values())
        return [
            self._there(there[target], common) if target in there else self._away(target)
            for target in self._targets(there)
        ]

    def _targets(self, there: Iterable[str]) -> list[str]:
        listed = [each for each in self._members.targets if each in self._members.named]
        names = [each for each in self._members.targets if each not in listed and each in self._members.troubles]
        found = sorted((self._members.named | set(there)) - set(listed), key=_order)
        return list(dict.fromkeys([*listed, *found, *names]))

    def _there(self, member: Member, common: Member | None) -> ExecutorRow:
        target, instance = member.target, member.info.instance_id
        if self._instances.setdefault(target, instance) != instance:
            self._instances[target] = instance
            self._restarts[target] += 1
            self._forget(target)
        if member.status is None:
            self._forget(target)
        elif (sample := StatusSample(member.status, member.status_at)) != (before := self._samples.get(target)):
            self._samples[target], self._rates[target] = sample, rates(before, sample)
        state, reason = _state(member, common)
        uptime_s = RECENT_S if member.status is None else member.status.uptime_s
        if not reason and self._restarts[target] and uptime_s < RECENT_S:
            reason = f"it was restarted {uptime_s:.0f} s ago"
        measured, activity = self._rates.get(target), self._activities.get(target)
        return ExecutorRow(
            target, state, reason, self._restarts[target], member.info, member.status, measured, activity
        )

    def _away(self, target: str) -> ExecutorRow:
        self._forget(target)
        state, reason = _trouble(self._members.troubles.get(target))
        return ExecutorRow(target, state, reason, self._restarts[target])

    def _forget(self, target: str) -> None:
        """Rates start again."""
        self._samples.pop(target, None)
        self._rates.pop(target, None)
        self._activities.pop(target, None)


def _most(members: Iterable[Member]) -> Member | None:
    """One of those with the model that most of them serve; of as many, the model of the earliest."""
    listed = list(members)
    models = Counter(each.model for each in listed)
    return max(listed, key=lambda each: models[each.model], default=None)


def _state(member: Member, common: Member | None) -> tuple[RowState, str]:
    if member.ending is not None:
        return _trouble(member.ending)
    if member.hung:
        return RowState.HUNG, member.trouble
    if member.draining:
        return RowState.DRAINING, "it accepts no new sequences, and ends when it has none"
    if common is not None and member.model != common.model:
        own, others = member.info.model, common.info.model
        what = (own.name, others.name) if own.name != others.name else (f"another {own.name}", others.name)
        if own.fingerprint == others.fingerprint:
            what = f"a cache of {own.kv_dtype}", others.kv_dtype
        return RowState.MISMATCH, f"it serves {what[0]}, and {common.target} {what[1]}"
    return RowState.SERVING, "" if member.listed else "it is no longer listed, and gets no new sequences"


def _trouble(error: ExecutorError | None) -> tuple[RowState, str]:
    match error:
        case None:
            return RowState.UNKNOWN, "it has not answered yet"
        case Starting():
            return RowState.STARTING, "its model is loading"
        case Draining():
            return RowState.GONE, "it was draining, and has ended"
        case DeadlineExceeded():
            return RowState.HUNG, "it does not answer"
        case Unauthenticated() | PermissionDenied():
            return RowState.REFUSED, explained(error)
        case InvalidRequest():
            return RowState.INVALID, explained(error)
    return RowState.GONE, explained(error)


def _order(target: str) -> tuple[tuple[int, int | str], ...]:
    """Numbers in addresses by their value."""
    return tuple((0, int(each)) if each.isdecimal() else (1, each) for each in target.replace(":", ".").split("."))
