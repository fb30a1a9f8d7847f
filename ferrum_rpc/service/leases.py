"""Leases: a scheduler's sequences are kept while it renews its lease, and freed after it has stopped.

There is one lease per scheduler. Any call on one of its sequences renews it; an idle scheduler sends a keep-alive every
sixth of its duration (etcd renews every third; a sixth survives lost messages and stalls of the client's loop). Times
are those of the monotonic clock. Like a handle, a lease belongs to its caller, and one of an earlier process is refused
as such.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from typing import Final

from ferrum_rpc.core import Caller, Limits
from ferrum_rpc.errors import (
    InstanceMismatch,
    InvalidRequest,
    LeaseExpired,
    LeaseUnknown,
    SequencesExhausted,
)
from ferrum_rpc.service.quotas import Quotas
from ferrum_rpc.service.records import LeaseRecord, Resource

TOMBSTONES: Final = 4096
SECRET_BYTES: Final = 16


class LeaseTable:
    """The live leases, and which others have expired."""

    def __init__(self, limits: Limits, quotas: Quotas, instance_id: str) -> None:
        self._limits = limits
        self._quotas = quotas
        self._instance = instance_id
        self._live: dict[str, LeaseRecord] = {}
        self._expired: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._live)

    def acquire(self, caller: Caller, ttl_s: float | None = None, client_name: str = "") -> LeaseRecord:
        """A new lease of ``ttl_s`` seconds, the default or the nearest allowed. Raises `InvalidRequest`,
        `SequencesExhausted` and `QuotaExceeded`."""
        limits = self._limits
        if ttl_s is not None and ttl_s <= 0:
            raise InvalidRequest("the ttl of a lease must be positive", field="ttl")
        if len(self._live) >= limits.max_leases:
            raise SequencesExhausted(
                f"{len(self._live)} of at most {limits.max_leases} leases are live; revoke some",
                metadata={"max_leases": limits.max_leases},
                retry_after_s=1.0,
            )
        account = self._quotas.account(caller)
        account.allocate(Resource.LEASES)
        ttl = limits.lease_ttl_s if ttl_s is None else min(max(ttl_s, limits.min_lease_ttl_s), limits.max_lease_ttl_s)
        lease = LeaseRecord(
            f"{self._instance}-{secrets.token_hex(SECRET_BYTES)}", account, client_name, ttl, time.monotonic() + ttl
        )
        self._live[lease.id] = lease
        return lease

    def find(self, lease_id: str, owner: str, *, field: str = "lease_id") -> LeaseRecord:
        """The owner's lease. Raises `LeaseExpired`, `LeaseUnknown`, or `InstanceMismatch` (another process's)."""
        lease = self._live.get(lease_id)
        if lease is not None and lease.account.caller.name == owner:
            return lease
        if self._expired.get(lease_id) == owner:
            raise LeaseExpired("the lease ran out and its sequences were freed; acquire a new one", field=field)
        if "-" in lease_id and lease_id.partition("-")[0] != self._instance:
            raise InstanceMismatch("the lease is of another process lifetime; acquire a new one", field=field)
        raise LeaseUnknown("no such lease", field=field)

    def renew(self, lease_id: str, owner: str) -> LeaseRecord:
        """Renew the owner's lease. Raises what `find` raises."""
        lease = self.find(lease_id, owner)
        lease.renew(time.monotonic())
        return lease

    def due(self, now: float) -> list[LeaseRecord]:
        """The expired leases that no call in flight pins. This scans all leases, which are few."""
        return [lease for lease in self._live.values() if lease.expires <= now and not lease.pinned]

    def remove(self, lease: LeaseRecord, *, expired: bool) -> bool:
        """Remove it; the caller ends its sequences. False if it was removed already."""
        if self._live.pop(lease.id, None) is None:
            return False
        lease.account.free(Resource.LEASES)
        if expired:
            self._expired[lease.id] = lease.account.caller.name
            if len(self._expired) > TOMBSTONES:
                self._expired.popitem(last=False)
        return True

    def extend(self, seconds: float) -> None:
        """Extend all leases by the time in which this process received nothing."""
        for lease in self._live.values():
            lease.expires += seconds
