"""What each caller holds, and how much it may: a share of everything that callers could take from each other.

Where there are several callers, each has `Limits.caller_share` of every table. A single caller, or an operator, has all
of it: an operator could reset the executor anyway. Exact numbers of sequences and blocks, where they are set, hold for
every caller in place of the share.

An `Account` counts by `Resource`: what a caller gets is allocated in its account first, and freed there when it is free
again. It counts always, for 3 µs a call, so allocations and releases agree.

For blocks a caller pays for what its sequences refer to, up to their length or what was reserved for them, and in full
for those that sequences share: what it would hold if they diverged. They are counted where they are bounded.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from ferrum_rpc.core import Caller, Limits
from ferrum_rpc.errors import QueueFull
from ferrum_rpc.service.records import RETRY_AFTER_S, Account, Resource, SequenceRecord

UNCOUNTED_BYTES: Final = 1 << 14
"""Smaller answers are not counted: a connection's streams bound them."""

UNBOUNDED: Final = sys.maxsize
EMPTY_ACCOUNTS: Final = 1024
"""Beyond so many accounts, those of callers that hold nothing are dropped."""


class Quotas:
    """Accounts by caller's name."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._exact = {
            Resource.SEQUENCES: limits.max_sequences_per_caller,
            Resource.BLOCKS: limits.max_blocks_per_caller,
        }
        self._tables = {
            Resource.SEQUENCES: limits.max_sequences,
            Resource.LEASES: limits.max_leases,
            Resource.SESSIONS: limits.max_sessions,
            Resource.QUEUED_ITEMS: limits.max_queued_items,
            Resource.QUEUED_TOKENS: limits.max_queued_tokens,
            Resource.UNREAD_BYTES: limits.max_unread_bytes,
            Resource.TOKEN_MASKS: limits.max_token_masks,
            Resource.TRANSFERS: limits.max_transfers,
            Resource.PARKED_BYTES: limits.kv_park_bytes,
            Resource.WATCHERS: limits.max_watchers,
            Resource.RUNS: limits.max_running,  # those beyond wait, in the engine
        }
        # A call and an answer at the limits of their size must fit where nothing waits.
        self._least = {
            Resource.QUEUED_ITEMS: limits.max_batch_items,
            Resource.QUEUED_TOKENS: limits.max_batch_tokens,
            Resource.UNREAD_BYTES: max(limits.max_response_bytes, limits.max_session_response_bytes),
        }
        self._accounts: dict[str, Account] = {}
        self._opened = 0
        self._block_size = 1
        self._most = self._shares()

    def __len__(self) -> int:
        return len(self._accounts)

    def account(self, caller: Caller) -> Account:
        account = self._accounts.get(caller.name)
        if account is None:
            if len(self._accounts) >= EMPTY_ACCOUNTS:
                self._accounts = {name: each for name, each in self._accounts.items() if any(each.held)}
            self._opened += 1
            account = self._accounts[caller.name] = Account(caller, self._opened, self._most[caller.shares])
        elif account.caller is not caller:  # the file of tokens was read anew
            account.caller, account.most = caller, self._most[caller.shares]
        return account

    def limits(self, limits: Limits, caller: Caller) -> Limits:
        """``limits`` as they are for this caller: what it may hold of sequences and blocks stands in them."""
        most = self.account(caller).most
        sequences, blocks = (0 if most[each] == UNBOUNDED else most[each] for each in self._exact)
        return replace(limits, max_sequences_per_caller=sequences, max_blocks_per_caller=blocks)

    def cache(self, total_blocks: int, block_size: int) -> None:
        """The model is loaded: its cache has ``total_blocks`` of ``block_size`` tokens."""
        self._tables[Resource.BLOCKS], self._block_size = total_blocks, block_size
        self._most = self._shares()
        for account in self._accounts.values():
            account.most = self._most[account.caller.shares]

    def charge(self, record: SequenceRecord, length: int) -> None:
        """The sequence is to grow to ``length`` tokens. Raises `QuotaExceeded`; `settle` must follow otherwise."""
        account = record.account
        if account.most[Resource.BLOCKS] == UNBOUNDED:
            return
        more = max(0, self._blocks(max(length, record.held_to)) - record.charged)
        account.allocate(Resource.BLOCKS, more)
        record.charged += more

    def settle(self, record: SequenceRecord) -> None:
        """The call is over: the sequence is charged for what it has."""
        if record.charged:
            due = 0 if record.parked else self._blocks(max(record.length, record.held_to))
            record.account.free(Resource.BLOCKS, record.charged - due)
            record.charged = due

    def close(self, record: SequenceRecord) -> None:
        """The sequence is gone, or never was."""
        record.account.free(Resource.SEQUENCES)
        self.refund(record)

    @staticmethod
    def refund(record: SequenceRecord) -> None:
        """The sequence is charged for nothing."""
        record.account.free(Resource.BLOCKS, record.charged)
        record.charged = 0

    def _shares(self) -> tuple[Sequence[int], Sequence[int]]:
        """What one caller may hold: one that does not share, and one that does."""
        unshared, shared = [UNBOUNDED] * len(Resource), [UNBOUNDED] * len(Resource)
        for resource, size in self._tables.items():
            shared[resource] = max(math.ceil(size * self._limits.caller_share), self._least.get(resource, 1))
        for resource, exact in self._exact.items():
            if exact:
                unshared[resource] = shared[resource] = exact
        return unshared, shared

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)


class Unread:
    """Bytes of answers on their way, of one connection, one caller and in all.

    A client that asks for large answers and does not read them holds them in the server's memory, twice their size:
    gRPC takes as much from a handler as it gives, however little the client takes from gRPC. So the bytes of a
    large answer are allocated when its call is admitted, and freed when gRPC has sent the answer or the call is over.
    """

    def __init__(self, limits: Limits) -> None:
        largest = max(limits.max_response_bytes, limits.max_session_response_bytes)  # fits where nothing waits
        self.limit = max(limits.max_unread_bytes, largest)
        self._most_of_one = max(limits.max_unread_bytes // 2, largest)
        self._of: dict[str, int] = {}
        self.bytes = 0

    def allocate(self, peer: str, account: Account, size: int) -> Callable[[], None]:
        """Allocate an answer of up to ``size`` bytes, above `UNCOUNTED_BYTES`, to ``peer``; call what is returned
        once, when it has left. Raises `QueueFull`, having changed nothing."""
        mine = self._of.get(peer, 0)
        held, most = account.held[Resource.UNREAD_BYTES], account.most[Resource.UNREAD_BYTES]
        for waiting, bound, whose in (
            (mine, self._most_of_one, " to this connection"),
            (held, most, " to you"),
            (self.bytes, self.limit, ""),
        ):
            if waiting + size > bound:
                raise QueueFull(
                    f"{waiting} bytes of answers{whose} are not read yet; read them, or ask for less. "
                    "Nothing was started",
                    metadata={"max_unread_bytes": self.limit, "unread_bytes": self.bytes},
                    retry_after_s=RETRY_AFTER_S,
                )
        self.bytes += size
        self._of[peer] = mine + size
        account.allocate(Resource.UNREAD_BYTES, size)
        return partial(self._free, peer, account, size)

    def _free(self, peer: str, account: Account, size: int) -> None:
        self.bytes -= size
        left = self._of[peer] - size
        if left:
            self._of[peer] = left
        else:
            del self._of[peer]
        account.free(Resource.UNREAD_BYTES, size)
