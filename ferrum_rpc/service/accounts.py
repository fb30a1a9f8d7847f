"""What each caller holds, and how much it may: sequences and blocks.

A caller pays for the blocks that its sequences refer to, up to their length or what was reserved for them, and pays in
full for those that sequences share: what it would hold if they diverged. Without quotas nothing is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from ferrum_rpc.core import Limits
from ferrum_rpc.errors import QuotaExceeded
from ferrum_rpc.service.handles import Record


@dataclass(slots=True)
class Account:
    """One caller's."""

    sequences: int = 0
    blocks: int = 0


class Accounts:
    """Accounts by caller; a caller that holds nothing has none."""

    def __init__(self, limits: Limits) -> None:
        self._max_sequences = limits.max_sequences_per_caller
        self._max_blocks = limits.max_blocks_per_caller
        self._on = bool(self._max_sequences or self._max_blocks)
        self._accounts: dict[str, Account] = {}
        self.block_size = 1

    def __getitem__(self, owner: str) -> Account:
        return self._accounts.get(owner, Account())

    def open(self, owner: str, count: int) -> None:
        """``count`` new sequences. Raises `QuotaExceeded`."""
        if not self._on:
            return
        held = self[owner].sequences
        if self._max_sequences and held + count > self._max_sequences:
            raise QuotaExceeded(
                f"you hold {held} sequences of at most {self._max_sequences}; release some of your own",
                metadata={"max_sequences_per_caller": self._max_sequences, "sequences": held},
            )
        self._accounts.setdefault(owner, Account()).sequences += count

    def charge(self, record: Record, length: int) -> None:
        """The sequence is to grow to ``length`` tokens. Raises `QuotaExceeded`; `settle` must follow otherwise."""
        if not self._on:
            return
        account = self._accounts.setdefault(record.owner, Account())
        more = max(0, self._blocks(max(length, record.held_to)) - record.charged)
        if self._max_blocks and account.blocks + more > self._max_blocks:
            raise QuotaExceeded(
                f"your sequences refer to {account.blocks} blocks of at most {self._max_blocks} and {more} more are "
                "needed; release or roll back some of your own",
                metadata={"max_blocks_per_caller": self._max_blocks, "blocks": account.blocks, "needed_blocks": more},
            )
        account.blocks += more
        record.charged += more

    def settle(self, record: Record) -> None:
        """The call is over: the sequence is charged for what it has."""
        if self._on:
            due = self._blocks(max(record.length, record.held_to))
            self._accounts[record.owner].blocks += due - record.charged
            record.charged = due

    def close(self, record: Record) -> None:
        """The sequence is gone, or never was."""
        if not self._on:
            return
        account = self._accounts[record.owner]
        account.sequences -= 1
        account.blocks -= record.charged
        record.charged = 0
        if not account.sequences:
            del self._accounts[record.owner]

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)
