"""Registered token masks: which exist, who registered them, and which are dropped when others need their place.

A mask's id is the hash of its content, and the engine stores each content once. A caller may name only masks that it
has registered itself, so it cannot find out whether another caller has registered one. Only the engine has the words.
They are sent, and dropped, by commands in the queue of the steps, so a step never refers to a missing mask:

- a mask is sent before the first item that names it;
- a mask that a call in flight names is not dropped.

Otherwise the least recently used mask is dropped: one of the caller itself if it has its share of the table, else one
of the caller that has most, if that has more than this one. If none can be dropped, the refusal says when to come back.
The same applies if as many masks as the table holds, or `ON_WAY`, are still on their way to the engine, which takes
them between steps.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from ferrum_rpc.core import Limits, Sample
from ferrum_rpc.engine.api import Operation
from ferrum_rpc.engine.commands import Command, Operations
from ferrum_rpc.errors import ExecutorError, InvalidRequest, QueueFull, TokenMaskUnknown
from ferrum_rpc.service.records import RETRY_AFTER_S, Account, Resource

WORD_BYTES: Final = 4
WORD_BITS: Final = 32
ON_WAY: Final = 64
"""Masks that may be on their way to the engine, however small the table is."""


@dataclass(slots=True, eq=False)
class Registered:
    """A mask of one caller. ``uses``: calls in flight that name it."""

    id: bytes
    owner: CallerMasks
    uses: int = 0


@dataclass(slots=True, eq=False)
class CallerMasks:
    """One caller's masks by id. ``idle``: the unused ones, the least recently used first."""

    account: Account
    masks: dict[bytes, Registered] = field(default_factory=dict)
    idle: OrderedDict[bytes, Registered] = field(default_factory=OrderedDict)


class MaskTable:
    """The masks of all callers. ``submit`` queues an operation of the engine."""

    def __init__(self, limits: Limits, submit: Callable[[Operation], None]) -> None:
        self._most = limits.max_token_masks
        self._submit = submit
        self._owners: dict[str, CallerMasks] = {}
        self._holders: Counter[bytes] = Counter()  # by id: how many callers have registered it
        self._count = 0
        self._on_way: Counter[str] = Counter()  # by caller: masks that the engine has not taken yet

    def __len__(self) -> int:
        """The number of masks of all callers, to which the limit applies."""
        return self._count

    def register(self, account: Account, mask_id: bytes, words: bytes, vocab_size: int, field: str) -> Registered:
        """Register a mask, or mark it as used if it is registered. ``mask_id`` is the hash of the ``words``; ``field``
        names them in the request. Raises `InvalidRequest`, or `QueueFull` if there is no room; nothing has changed
        then."""
        name = account.caller.name
        owner = self._owners.get(name)
        if owner is not None and (known := owner.masks.get(mask_id)) is not None:
            self._use(known)
            self._unuse(known)
            return known
        check_words(words, vocab_size, field)
        dropped = self._make_room(account, owner)
        owner = self._owners.setdefault(name, CallerMasks(account))  # it may have gone with its last mask
        mask = owner.masks[mask_id] = owner.idle[mask_id] = Registered(mask_id, owner)
        account.held[Resource.TOKEN_MASKS] += 1
        self._count += 1
        self._holders[mask_id] += 1
        added = [(mask_id, words)] if self._holders[mask_id] == 1 else []
        if added or dropped:
            self._on_way[name] += 1
            command = Command(Operations.change_masks, added, dropped)
            self._submit(Operation(command, partial(self._changed, name, mask_id)))
        return mask

    def pin(self, account: Account, kind: Sample, words: bytes, vocab_size: int) -> list[Registered]:
        """Pin the masks that an item names; with ``words`` its one mask is registered first. `unpin` must follow.
        Raises `TokenMaskUnknown`, or as `register`; nothing has changed then."""
        if words:
            found = [self.register(account, kind.mask, words, vocab_size, "output.token_mask")]
        else:
            named = [each for each in kind.masks if each]
            owner = self._owners.get(account.caller.name)
            masks = {} if owner is None else owner.masks
            if unknown := next((each for each in named if each not in masks), None):
                raise TokenMaskUnknown(
                    "you have registered no such token mask, or others have taken its place: register it again",
                    metadata={"token_mask_id": unknown.hex()},
                    field="output.token_mask_id" if kind.mask else "output.row_mask_ids",
                )
            found = [masks[each] for each in named]
        for mask in found:
            self._use(mask)
        return found

    def unpin(self, masks: Iterable[Registered]) -> None:
        """Unpin the masks of a call that has ended."""
        for mask in masks:
            self._unuse(mask)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _use(self, mask: Registered) -> None:
        if not mask.uses:
            mask.owner.idle.pop(mask.id, None)
        mask.uses += 1

    def _unuse(self, mask: Registered) -> None:
        mask.uses -= 1
        if not mask.uses and mask.owner.masks.get(mask.id) is mask:
            mask.owner.idle[mask.id] = mask

    def _make_room(self, account: Account, mine: CallerMasks | None) -> list[bytes]:
        """Drop one mask if another needs its place. Returns what the engine has to drop."""
        most = min(self._most, account.most[Resource.TOKEN_MASKS])
        if self._on_way[account.caller.name] >= max(most, ON_WAY) or self._on_way.total() >= max(self._most, ON_WAY):
            raise _full(f"{self._on_way.total()} token masks are on their way to the engine", most)
        held = 0 if mine is None else len(mine.masks)
        victim: CallerMasks | None
        if held >= account.most[Resource.TOKEN_MASKS]:
            victim = mine
        elif self._count >= self._most:
            others = [each for each in self._owners.values() if each is mine or len(each.masks) > held]
            victim = max((each for each in others if each.idle), key=lambda each: len(each.masks), default=None)
        else:
            return []
        if victim is None or not victim.idle:
            raise _full(f"there are {self._count} token masks, and calls in flight name all that might go", most)
        oldest = next(iter(victim.idle.values()))
        return [oldest.id] if self._forget(oldest) else []

    def _forget(self, mask: Registered) -> bool:
        """Remove the mask from the caller. True if no other caller has it."""
        owner = mask.owner
        del owner.masks[mask.id]
        owner.idle.pop(mask.id, None)
        if not owner.masks:
            del self._owners[owner.account.caller.name]
        owner.account.free(Resource.TOKEN_MASKS)
        self._count -= 1
        self._holders[mask.id] -= 1
        if self._holders[mask.id]:
            return False
        del self._holders[mask.id]
        return True

    def _changed(self, name: str, mask_id: bytes, result: object) -> None:
        """The engine has stored the mask, or refused it: then it is as if no caller had ever registered it."""
        self._on_way[name] -= 1
        if not self._on_way[name]:
            del self._on_way[name]
        if isinstance(result, ExecutorError):
            for owner in list(self._owners.values()):
                if (mask := owner.masks.get(mask_id)) is not None:
                    self._forget(mask)


def _full(why: str, most: int) -> QueueFull:
    return QueueFull(f"{why}; nothing was started", metadata={"max_token_masks": most}, retry_after_s=RETRY_AFTER_S)


def check_words(words: bytes, vocab_size: int, field: str) -> None:
    """Raise `InvalidRequest` for words that are not a mask of the vocabulary, or that allow none of its tokens."""
    count, rest = divmod(vocab_size, WORD_BITS)
    wanted = count + (rest > 0)
    if len(words) != wanted * WORD_BYTES:
        raise InvalidRequest(
            f"a mask over {vocab_size} tokens has {wanted} words, not {len(words) // WORD_BYTES}",
            field=field,
            metadata={"words": wanted, "vocab_size": vocab_size},
        )
    array = np.frombuffer(words, "<u4")
    if not array[:count].any() and not (rest and int(array[count]) & ((1 << rest) - 1)):
        raise InvalidRequest("a mask must allow at least one token", field=field)
