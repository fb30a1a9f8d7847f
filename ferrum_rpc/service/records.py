"""What the server keeps of a caller, a lease and a sequence, as data.

A sequence names its lease and the account that pays for it; a lease names its sequences.
The tables that hold them (`handles`, `leases`, `quotas`) import this module and not each other.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ferrum_rpc.core import Caller, HandleRef, PrefixUse, named
from ferrum_rpc.errors import ExecutorError, QuotaExceeded
from ferrum_rpc.prefix_hash import caller_digest

RENEWALS_PER_TTL: Final = 6

RETRY_AFTER_S: Final = 0.05
"""What a refusal for want of capacity suggests to wait: about a step."""


class Resource(enum.IntEnum):
    """What callers share. The name, in lower case, is what a refusal calls it."""

    SEQUENCES = 0
    BLOCKS = 1
    LEASES = 2
    SESSIONS = 3
    QUEUED_ITEMS = 4
    QUEUED_TOKENS = 5
    UNREAD_BYTES = 6
    TOKEN_MASKS = 7
    TRANSFERS = 8
    PARKED_BYTES = 9
    WATCHERS = 10
    RUNS = 11


@dataclass(slots=True, eq=False)
class Account:
    """One caller's. ``held`` and ``most`` are indexed by `Resource`; ``number`` names the account in the engine, and
    ``digest`` the caller in keys of the prefix cache."""

    caller: Caller
    number: int
    most: Sequence[int]
    held: list[int] = field(default_factory=lambda: [0] * len(Resource))
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.digest = caller_digest(self.caller.name)

    def allocate(self, resource: Resource, amount: int = 1) -> None:
        """``amount`` more are the caller\'s until `free`. Raises `QuotaExceeded`, having changed nothing."""
        held, most = self.held[resource], self.most[resource]
        if held + amount > most:
            name = resource.name.lower()
            raise QuotaExceeded(
                f"you hold {held} {name} of at most {most} and {amount} more are needed; release some of your own",
                metadata={f"max_{name}_per_caller": most, name: held, f"needed_{name}": amount},
            )
        self.held[resource] = held + amount

    def free(self, resource: Resource, amount: int = 1) -> None:
        self.held[resource] -= amount


@dataclass(slots=True, eq=False)
class LeaseRecord:
    """A renewal is due before ``expires`` (monotonic seconds). ``account``: its owner's, which it counts in.
    ``members``: the sequences that end with it, those being created included."""

    id: str
    account: Account
    client_name: str
    ttl_s: float
    expires: float
    members: dict[SequenceRecord, None] = field(default_factory=dict)

    @property
    def renew_every_s(self) -> float:
        """How often its holder should renew it."""
        return self.ttl_s / RENEWALS_PER_TTL

    @property
    def owner(self) -> str:
        return self.account.caller.name

    def renew(self, now: float) -> None:
        self.expires = now + self.ttl_s

    @property
    def pinned(self) -> bool:
        """Whether a call on one of its sequences is in flight. A run is none: it can be cut at its next step."""
        return any(record.busy and record.cut is None for record in self.members)


class SequenceEnd(enum.Enum):
    """Why a sequence is gone. The value is the word of metrics and logs."""

    RELEASED = "released"
    REVOKED = "lease_revoked"
    EXPIRED = "lease_expired"
    IDLE = "idle"
    RESET = "reset"
    ABANDONED = "abandoned"
    LOST = "cache_lost"


@dataclass(frozen=True, slots=True)
class Parked:
    """A sequence's cache, out of the engine: the file ``path`` of ``size`` bytes. ``starts``: where the chunks from a
    token on begin, and the trailer. ``imported_from``: from which token on it was imported, or computed from what was;
    None: none of it."""

    path: Path
    size: int
    starts: Mapping[int, int]
    imported_from: int | None


@dataclass(slots=True, eq=False)
class Adapter:
    """A loaded adapter: its ``number`` in the engine, and how many ``sequences`` have it. ``fingerprint``: of the model
    with it, 32 bytes."""

    name: str
    number: int
    rank: int
    nbytes: int
    fingerprint: bytes
    sequences: int = 0


def no_follower() -> None:
    """In the place of a sequence's follower."""


@dataclass(slots=True, eq=False)
class SequenceRecord:
    """A live sequence as the service floor sees it: the engine's number, and the content of its next handle.

    ``busy``: a call on it is in flight, its creation included; nothing else may end it then. ``pending_end``: why it
    ends when that call is over; ``on_freed`` are called when its blocks are free. ``used``: when it was last used
    (monotonic seconds). ``charged``: the blocks that its owner's ``account`` pays for. ``held_to``: the length up to
    which blocks were reserved. ``origin``: the session that created it. ``prefix``: how it uses the prefix cache.
    ``adapter``: what it is computed with, besides the model.

    ``parked``: where its cache is, if not in the engine; ``sequence`` is then the number that it has there when it is
    back. ``order``: its place among all, in the order of their creation.

    While a forward on it is in flight, ``follower`` is called when it is over: `no_follower` where another item may
    wait for it and none does, None where none may. ``cut`` ends its run; of a transfer's sequence it ends the transfer.
    ``chosen``: the version at which a forward left it, the token that this chose last, and whether that is a stop id of
    its run.
    """

    sequence: int
    id: bytes
    account: Account
    length: int = 0
    version: int = 0
    busy: bool = False
    pending_end: SequenceEnd | None = None
    lease: LeaseRecord | None = None
    used: float = 0.0
    charged: int = 0
    held_to: int = 0
    origin: object | None = None
    prefix: PrefixUse | None = None
    adapter: Adapter | None = None
    parked: Parked | None = None
    order: int = 0
    follower: Callable[[], object] | None = None
    cut: Callable[[ExecutorError], object] | None = None
    chosen: tuple[int, int, bool] | None = None
    on_freed: list[Callable[[], None]] = field(default_factory=list)

    def touch(self, now: float | None = None) -> None:
        """It was used: its lease is renewed, or its idle time begins anew. ``now``: on `time.monotonic`, for a caller
        that touches many and asks once."""
        if now is None:
            now = time.monotonic()
        self.used = now
        if self.lease is not None:
            self.lease.renew(now)

    @property
    def owner(self) -> str:
        """Its caller's name."""
        return self.account.caller.name

    @property
    def label(self) -> str:
        """What operators call it: no handle."""
        return f"sequence-{self.order}"

    @property
    def handle(self) -> HandleRef:
        """The handle that the caller must pass back next."""
        return named(HandleRef, (self.id, self.length, self.version))
