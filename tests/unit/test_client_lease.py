"""The client's lease: shared, renewed in time, and never lost in silence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ferrum_rpc.client import Capability, Lease, LeasePolicy, LeaseTrouble
from ferrum_rpc.client.lease import MAX_CLIENT_NAME, Leases
from ferrum_rpc.client.retry import Deadline, fate_unknown
from ferrum_rpc.errors import DeadlineExceeded, InstanceMismatch, LeaseExpired, LeaseUnknown, TransportError

PERIOD_S = 0.02
SOON = Deadline(None)
LOST = TransportError("lost", metadata={"grpc_code": "UNAVAILABLE"})


class Executor:
    """Grants leases of `PERIOD_S`. ``outcomes`` of renewals are taken in order; then all succeed."""

    def __init__(self, *outcomes: Exception | None, period_s: float = PERIOD_S) -> None:
        self.outcomes = list(outcomes)
        self.period_s = period_s
        self.granted: list[tuple[float | None, str]] = []
        self.renewed: list[tuple[float, str]] = []
        self.allowed: list[float] = []
        self.revoked: list[str] = []
        self.refusal: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self._told = asyncio.Condition()

    async def info(self, deadline: Deadline) -> Any:
        return SimpleNamespace(capabilities={Capability.LEASES})

    async def acquire_lease(self, ttl_s: float | None, client_name: str, deadline: Deadline) -> Lease:
        self.granted.append((ttl_s, client_name))
        await self.gate.wait()
        if self.refusal is not None:
            raise self.refusal
        return Lease(f"lease {len(self.granted)}", 6 * self.period_s, self.period_s)

    async def renew_lease(self, lease_id: str, deadline: Deadline) -> float:
        self.renewed.append((time.monotonic(), lease_id))
        self.allowed.append(deadline.remaining() or 0.0)
        outcome = self.outcomes.pop(0) if self.outcomes else None
        async with self._told:
            self._told.notify_all()
        if outcome is not None:
            raise outcome
        return 6 * self.period_s

    async def revoke_lease(self, lease_id: str, deadline: Deadline) -> int:
        self.revoked.append(lease_id)
        if self.refusal is not None:
            raise self.refusal
        return 0

    async def renewals(self, count: int) -> None:
        """Wait until so many were attempted."""
        async with asyncio.timeout(30), self._told:
            await self._told.wait_for(lambda: len(self.renewed) >= count)


def leases_of(executor: Executor, policy: LeasePolicy, **options: Any) -> Leases:
    leases: Any = Leases(executor, policy, **options)  # type: ignore[arg-type]
    for call in (executor.acquire_lease, executor.renew_lease, executor.revoke_lease):
        setattr(leases, call.__name__, call)
    return cast("Leases", leases)


@asynccontextmanager
async def keeping(
    executor: Executor, policy: LeasePolicy | None = None, on_trouble: Callable[[LeaseTrouble], None] | None = None
) -> AsyncIterator[Leases]:
    keeper = leases_of(executor, policy or LeasePolicy(), client_name="tester", on_trouble=on_trouble)
    try:
        yield keeper
    finally:
        await keeper.close(Deadline.after(1))


async def test_nothing_is_acquired_before_somebody_needs_it() -> None:
    async with keeping(executor := Executor()) as keeper:
        assert (keeper.state, keeper.lease_id, executor.granted) == (None, "", [])
        assert await keeper.current(SOON) == "lease 1"
        assert keeper.lease_id == "lease 1"
    assert executor.revoked == ["lease 1"]


async def test_creators_at_the_same_time_share_one_lease() -> None:
    executor = Executor()
    executor.gate.clear()
    async with keeping(executor, LeasePolicy(ttl_s=7)) as keeper:
        creators = [asyncio.create_task(keeper.current(SOON)) for _ in range(20)]
        await asyncio.sleep(0)
        creators[0].cancel()
        executor.gate.set()
        leases = await asyncio.gather(*creators, return_exceptions=True)
        assert isinstance(leases[0], asyncio.CancelledError)
        assert set(leases[1:]) == {keeper.lease_id}
        assert len(executor.granted) <= 2, "the cancelled one's, and the others'"
        assert executor.granted[0] == (7, "tester")


async def test_a_lease_that_is_not_granted_in_time_is_an_error_of_known_fate() -> None:
    executor = Executor()
    executor.gate.clear()
    async with keeping(executor) as keeper:
        with pytest.raises(DeadlineExceeded) as late:
            await keeper.current(Deadline.after(0.01))
        assert not fate_unknown(late.value), "nothing was sent"


async def test_creators_who_wait_together_are_refused_together_and_each_asks_once() -> None:
    executor = Executor()
    executor.refusal = LOST
    executor.gate.clear()
    async with keeping(executor) as keeper:
        creators = [asyncio.create_task(keeper.current(SOON)) for _ in range(20)]
        await asyncio.sleep(0)
        executor.gate.set()
        refusals = await asyncio.gather(*creators, return_exceptions=True)
        assert all(isinstance(each, TransportError) for each in refusals)
        assert len(executor.granted) == 1, "twenty do not find out in turn that nobody answers"
        executor.refusal = None
        assert await keeper.current(SOON) == "lease 2"


async def test_it_is_renewed_by_itself_long_before_it_ends() -> None:
    async with keeping(executor := Executor()) as keeper:
        await keeper.current(SOON)
        before = keeper.state
        await executor.renewals(4)
        await asyncio.sleep(0)
        state = keeper.state
        assert before is not None
        assert state is not None
        assert state.healthy
        assert before.expires_at < state.expires_at <= time.monotonic() + state.ttl_s
        assert all(0 < each <= PERIOD_S for each in executor.allowed), "an attempt ends before the next is due"


async def test_a_loop_that_stalls_for_a_third_of_the_lease_renews_at_once_and_loses_nothing() -> None:
    async with keeping(executor := Executor()) as keeper:
        await keeper.current(SOON)
        for stall in range(3):
            expires_at = keeper.state.expires_at if keeper.state is not None else 0.0
            time.sleep(2 * PERIOD_S)  # noqa: ASYNC251 - that is the point
            await executor.renewals(stall + 1)
            assert executor.renewed[stall][0] < expires_at
        assert keeper.lease_id == "lease 1"


async def test_a_lost_renewal_does_not_wait_for_its_next_turn() -> None:
    async with keeping(executor := Executor(LOST, LOST, period_s=0.8)) as keeper:
        await keeper.current(SOON)
        await executor.renewals(3)
        first, second, third = (at for at, _ in executor.renewed[:3])
        assert second - first < executor.period_s / 2
        assert third - second < executor.period_s / 2


async def test_trouble_is_told_once_an_episode() -> None:
    told: list[LeaseTrouble] = []
    executor = Executor(*[LOST] * 6, None, *[LOST] * 4)
    async with keeping(executor, on_trouble=told.append) as keeper:
        await keeper.current(SOON)
        await executor.renewals(2)
        assert told == [], "two attempts that fail are no trouble yet"
        await executor.renewals(6)
        await asyncio.sleep(0)
        assert keeper.state is not None
        assert not keeper.state.healthy
        await executor.renewals(12)
        assert keeper.state.healthy
        assert [(each.lost, each.lease_id) for each in told] == [(False, "lease 1")] * 2
        assert all(isinstance(each.error, TransportError) for each in told)


@pytest.mark.parametrize("error", [LeaseExpired("no"), LeaseUnknown("no"), InstanceMismatch("no")])
async def test_a_lease_that_is_gone_is_told_once_and_replaced_by_the_next_creation(error):
    told: list[LeaseTrouble] = []
    lost = asyncio.Event()

    def tell(trouble: LeaseTrouble) -> None:
        told.append(trouble)
        lost.set()

    async with keeping(Executor(error), on_trouble=tell) as keeper:
        await keeper.current(SOON)
        await lost.wait()
        assert keeper.state is None
        assert await keeper.current(SOON) == "lease 2"
        keeper.lost("lease 1", error)
        assert keeper.lease_id == "lease 2", "an answer about the old one says nothing of the new"
    assert [(each.lost, each.error) for each in told] == [(True, error)]


async def test_renewals_go_on_when_the_program_or_the_wire_raises_what_nobody_expected() -> None:
    def broken(trouble: LeaseTrouble) -> None:
        raise ZeroDivisionError

    async with keeping(executor := Executor(*[RuntimeError("?")] * 4), on_trouble=broken) as keeper:
        await keeper.current(SOON)
        await executor.renewals(6)
        await asyncio.sleep(0)
        assert keeper.state is not None
        assert keeper.state.healthy


@pytest.mark.parametrize("refusal", [None, LeaseExpired("no"), LOST])
async def test_closing_revokes_it_ends_the_renewals_and_raises_nothing(refusal):
    executor = Executor()
    async with keeping(executor) as keeper:
        await keeper.current(SOON)
        executor.refusal = refusal
    renewals = len(executor.renewed)
    await asyncio.sleep(3 * PERIOD_S)
    assert executor.revoked == ["lease 1"]
    assert len(executor.renewed) == renewals


async def test_a_client_without_a_name_has_one_and_none_is_too_long() -> None:
    unnamed = leases_of(Executor(), LeasePolicy())
    assert 0 < len(unnamed.client_name) <= MAX_CLIENT_NAME
    assert len(leases_of(Executor(), LeasePolicy(), client_name="x" * 999).client_name) == MAX_CLIENT_NAME


@pytest.mark.parametrize("wrong", [{"ttl_s": 0.0}, {"ttl_s": -1.0}, {"attempts": 0}])
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="invalid policy"):
        LeasePolicy(**wrong)
