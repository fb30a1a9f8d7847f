"""Quotas: what each caller holds, and its share of every shared resource.

With several callers, each has `Limits.caller_share` of every table. A single caller, or an operator, may hold
everything; an operator could reset the executor anyway. Exact numbers of sequences and blocks, if set, apply to every
caller in place of the share.

An `Account` counts by `Resource`: an allocation is charged to the caller's account first, and credited when it is
freed. Accounting is always on and costs 3 µs per call, so allocations and releases agree.

A caller is charged for the blocks that its sequences may refer to, up to their length or their reservation, without
those behind the window of a model that has one in every layer, and in full for shared ones: what it would hold if they
diverged. They are counted where they are bounded.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from ferrum_rpc.core import Caller, Limits, blocks_held
from ferrum_rpc.errors import QueueFull
from ferrum_rpc.service.records import RETRY_AFTER_S, Account, Resource, SequenceRecord

UNCOUNTED_BYTES: Final = 1 << 14
"""Smaller answers are not counted: the number of streams of a connection bounds them."""

UNBOUNDED: Final = sys.maxsize
_BLOCKS: Final = int(Resource.BLOCKS)  # a member costs 0.1 µs to look up and to index by, and every item asks for it
EMPTY_ACCOUNTS: Final = 1024
"""Above this number, accounts of callers that hold nothing are dropped."""


class Quotas:
    """Accounts by the caller's name."""

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
            Resource.GRAMMARS: limits.max_grammars,
            Resource.TRANSFERS: limits.max_transfers,
            Resource.PARKED_BYTES: limits.kv_park_bytes,
            Resource.WATCHERS: limits.max_watchers,
            Resource.RUNS: limits.max_running,  # those beyond wait, in the engine
        }
        # A call and an answer at the limits of their size must fit where nothing waits.
        self._minimum = {
            Resource.QUEUED_ITEMS: limits.max_batch_items,
            Resource.QUEUED_TOKENS: limits.max_batch_tokens,
            Resource.UNREAD_BYTES: max(limits.max_response_bytes, limits.max_session_response_bytes),
        }
        self._accounts: dict[str, Account] = {}
        self._opened = 0
        self._block_size = 1
        self._window_tokens: int | None = None
        self._per_caller = self._shares()

    def __len__(self) -> int:
        return len(self._accounts)

    def account(self, caller: Caller) -> Account:
        account = self._accounts.get(caller.name)
        if account is None:
            if len(self._accounts) >= EMPTY_ACCOUNTS:
                self._accounts = {each.caller.name: each for each in self.holding()}
            self._opened += 1
            account = self._accounts[caller.name] = Account(caller, self._opened, self._per_caller[caller.shares])
        elif account.caller is not caller:  # the file of tokens was read anew
            account.caller, account.most = caller, self._per_caller[caller.shares]
        return account

    def holding(self) -> list[Account]:
        """The accounts of callers that hold something."""
        return [each for each in self._accounts.values() if any(each.held)]

    def limits(self, limits: Limits, caller: Caller) -> Limits:
        """``limits`` for this caller, with its own limits of sequences and blocks."""
        most = self.account(caller).most
        sequences, blocks = (0 if most[each] == UNBOUNDED else most[each] for each in self._exact)
        return replace(limits, max_sequences_per_caller=sequences, max_blocks_per_caller=blocks)

    def cache(self, total_blocks: int, block_size: int, total_slots: int, window_tokens: int | None = None) -> None:
        """Set the size of the cache once the model is loaded: ``total_blocks`` of ``block_size`` tokens, and
        ``total_slots``, of which each sequence needs one; 0: it needs none. ``window_tokens``: see `DeviceInfo`."""
        self._tables[Resource.BLOCKS], self._block_size = total_blocks, block_size
        self._window_tokens = window_tokens
        if total_slots:
            self._tables[Resource.SEQUENCES] = min(self._limits.max_sequences, total_slots)
        self._per_caller = self._shares()
        for account in self._accounts.values():
            account.most = self._per_caller[account.caller.shares]

    def blocks(self, record: SequenceRecord) -> int:
        """The most blocks that the sequence holds, or those of its import while that is incomplete."""
        length = record.length or record.held_from
        return 0 if record.parked else self._blocks(record, length, length)

    def charge(self, record: SequenceRecord, start: int, end: int) -> None:
        """Charge for a sequence that is to grow to ``end`` tokens, of which those from ``start`` on are to be written.
        Raises `QuotaExceeded`; otherwise `settle` must follow."""
        account = record.account
        if account.most[_BLOCKS] == UNBOUNDED:
            return
        more = max(0, self._blocks(record, start, end) - record.charged)
        account.allocate(Resource.BLOCKS, more)
        record.charged += more

    def settle(self, record: SequenceRecord) -> None:
        """Charge the sequence for what it holds after the call."""
        record.go_back(record.length)
        if record.charged:
            due = self.blocks(record)
            record.account.free(Resource.BLOCKS, record.charged - due)
            record.charged = due

    @staticmethod
    def refund(record: SequenceRecord) -> None:
        """Free the blocks that the sequence is charged for."""
        record.account.free(Resource.BLOCKS, record.charged)
        record.charged = 0

    def _shares(self) -> tuple[Sequence[int], Sequence[int]]:
        """The limits of one caller: of one that does not share, and of one that does."""
        unshared, shared = [UNBOUNDED] * len(Resource), [UNBOUNDED] * len(Resource)
        for resource, size in self._tables.items():
            shared[resource] = max(math.ceil(size * self._limits.caller_share), self._minimum.get(resource, 1))
        for resource, exact in self._exact.items():
            if exact:
                unshared[resource] = shared[resource] = exact
        return unshared, shared

    def _blocks(self, record: SequenceRecord, start: int, end: int) -> int:
        if record.held_to:
            start, end = min(start, record.held_from), max(end, record.held_to)
        return blocks_held(start, end, self._block_size, self._window_tokens)


class Unread:
    """Bytes of answers being sent, per connection, per caller and in total.

    A client that requests large answers and does not read them holds them in the server's memory, twice their size:
    gRPC accepts everything from a handler, however little the client reads. So capacity for a large answer is allocated
    when its call is admitted, and released when gRPC has sent the answer or the call is over.
    """

    def __init__(self, limits: Limits) -> None:
        largest = max(limits.max_response_bytes, limits.max_session_response_bytes)  # fits where nothing waits
        self.limit = max(limits.max_unread_bytes, largest)
        self._max_per_connection = max(limits.max_unread_bytes // 2, largest)
        self._of: dict[str, int] = {}
        self.bytes = 0

    def allocate(self, peer: str, account: Account, size: int) -> Callable[[], None]:
        """Allocate capacity for an answer of up to ``size`` bytes, above `UNCOUNTED_BYTES`, to ``peer``. Call the
        returned function once, when the answer has been sent. Raises `QueueFull`; nothing has changed then."""
        mine = self._of.get(peer, 0)
        held, most = account.held[Resource.UNREAD_BYTES], account.most[Resource.UNREAD_BYTES]
        for waiting, bound, whose in (
            (mine, self._max_per_connection, " to this connection"),
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
