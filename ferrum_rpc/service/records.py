"""The server's records of callers, leases and sequences, as data.

A sequence refers to its lease and to the account that it is charged to; a lease refers to its sequences. The tables of
records (`handles`, `leases`, `quotas`) import this module and not each other.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from ferrum_rpc.core import Caller, HandleRef, PrefixUse, named
from ferrum_rpc.engine.api import Submission
from ferrum_rpc.errors import ExecutorError, QuotaExceeded
from ferrum_rpc.prefix_hash import caller_digest

RENEWALS_PER_TTL: Final = 6

RETRY_AFTER_S: Final = 0.05
"""The retry delay of a refusal for lack of capacity: about a step."""


class Resource(enum.IntEnum):
    """A resource that callers share. Refusals use its name in lower case."""

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
    GRAMMARS = 12


@dataclass(slots=True, eq=False)
class Account:
    """The account of a caller. ``held`` and ``most`` are indexed by `Resource`; ``number`` identifies the account in
    the engine, and ``digest`` the caller in keys of the prefix cache."""

    caller: Caller
    number: int
    most: Sequence[int]
    held: list[int] = field(default_factory=lambda: [0] * len(Resource))
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.digest = caller_digest(self.caller.name)

    def allocate(self, resource: Resource, amount: int = 1) -> None:
        """Charge ``amount`` to the caller until `free`. Raises `QuotaExceeded`, with nothing changed."""
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
    """A lease that ends at ``expires`` (monotonic seconds) unless renewed. ``account``: its owner's, which it counts
    in. ``members``: the sequences that end with it, including those being created."""

    id: str
    account: Account
    client_name: str
    ttl_s: float
    expires: float
    members: dict[SequenceRecord, None] = field(default_factory=dict)

    @property
    def renew_every_s(self) -> float:
        """The interval at which its holder should renew it."""
        return self.ttl_s / RENEWALS_PER_TTL

    def renew(self, now: float) -> None:
        self.expires = now + self.ttl_s

    @property
    def pinned(self) -> bool:
        """Whether a call on one of its sequences is in flight, other than a run, which can be interrupted."""
        return any(record.busy and record.cut is None for record in self.members)


class SequenceEnd(enum.Enum):
    """Why a sequence ended. The value appears in metrics and logs."""

    RELEASED = "released"
    REVOKED = "lease_revoked"
    EXPIRED = "lease_expired"
    IDLE = "idle"
    RESET = "reset"
    ABANDONED = "abandoned"
    LOST = "cache_lost"


@dataclass(frozen=True, slots=True)
class Parked:
    """A sequence's cache in the file ``path`` of ``size`` bytes. ``starts``: the offsets of its chunks by first token,
    and of the trailer. ``imported_from``: the first token whose cache was imported, or computed from an import; None:
    no such token."""

    path: Path
    size: int
    starts: Mapping[int, int]
    imported_from: int | None


@dataclass(slots=True, eq=False)
class Adapter:
    """A loaded adapter: its ``number`` in the engine, and the number of ``sequences`` that use it. ``fingerprint``: of
    the model with it, 32 bytes."""

    name: str
    number: int
    rank: int
    nbytes: int
    fingerprint: bytes
    sequences: int = 0


def no_follower() -> None:
    """The value of a sequence's ``follower`` while there is none."""


class Successor(Protocol):
    """A follower that is in the engine. ``begun``: it is part of the step after the last one of what it follows, whose
    answer comes next. Then it takes the sequence over, which stays busy."""

    begun: bool

    def take_over(self, committed: bool) -> None:
        """What it follows is over. If that could not be ``committed``, this one must not be either."""

    def withdraw(self, cause: ExecutorError) -> None:
        """Have it wait outside of the engine, or interrupt it if it has begun."""


@dataclass(slots=True, eq=False)
class SequenceRecord:
    """A live sequence on the service floor: the engine's number, and the content of its next handle.

    ``busy``: a call on it is in flight, its creation included; only that call may end it then. ``pending_end``: why it
    ends when that call is over; ``on_freed`` are called when its blocks are free. ``used``: when it was last used
    (monotonic seconds). ``charged``: the blocks charged to its owner's ``account``. ``held_from``, ``held_to``: the
    lengths between which blocks were reserved. ``reached``: the length that its last forward left; of a model whose
    layers all have a window, what lies behind that may be gone. ``origin``: the session that created it. ``prefix``:
    how it uses the prefix cache. ``adapter``: the adapter with which it is computed.

    ``parked``: the place of its cache, if not in the engine; ``sequence`` is then its number there after it is
    restored. ``order``: its rank in the order of creation.

    ``follower`` is called when the forward in flight is over: `no_follower` if an item may follow and none does, None
    if none may. ``submission``: the forward's, once the engine has it. ``successor``: the follower, if the engine may
    begin it as soon as that submission ends. ``cut`` interrupts its run, or the transfer of a transfer's sequence.
    ``chosen``: the version after a forward, the last token that this chose, and whether that is a stop id of its run.
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
    held_from: int = 0
    held_to: int = 0
    reached: int = 0
    origin: object | None = None
    prefix: PrefixUse | None = None
    adapter: Adapter | None = None
    parked: Parked | None = None
    order: int = 0
    follower: Callable[[], object] | None = None
    submission: Submission | None = None
    successor: Successor | None = None
    cut: Callable[[ExecutorError], object] | None = None
    chosen: tuple[int, int, bool] | None = None
    on_freed: list[Callable[[], None]] = field(default_factory=list)

    def go_back(self, length: int) -> None:
        """It had ``length`` tokens: what was reserved counts from there, if that is less than before."""
        if self.held_to and length < self.held_from:
            self.held_to -= self.held_from - length
            self.held_from = length

    def touch(self, now: float | None = None) -> None:
        """Renew its lease, or restart its idle time. ``now``: of `time.monotonic`, for a caller that touches many
        sequences."""
        if now is None:
            now = time.monotonic()
        self.used = now
        if self.lease is not None:
            self.lease.renew(now)

    @property
    def label(self) -> str:
        """Its name for operators, which is not a handle."""
        return f"sequence-{self.order}"

    @property
    def handle(self) -> HandleRef:
        """The handle that the caller must pass back next."""
        return named(HandleRef, (self.id, self.length, self.version))
