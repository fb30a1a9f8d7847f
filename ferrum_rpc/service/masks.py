"""Registered token masks, by the hash of their words."""

from __future__ import annotations

from typing import Final

import numpy as np

from ferrum_rpc.core import Sample
from ferrum_rpc.engine.commands import Operations
from ferrum_rpc.errors import InvalidRequest, TokenMaskUnknown
from ferrum_rpc.service.contents import ContentTable, Registered
from ferrum_rpc.service.records import Account, Resource

WORD_BYTES: Final = 4
WORD_BITS: Final = 32


class MaskTable(ContentTable):
    """The token masks of all callers."""

    resource = Resource.TOKEN_MASKS
    what = "token masks"
    limit = "max_token_masks"
    change = Operations.change_masks

    def register(self, account: Account, mask_id: bytes, words: bytes, vocab_size: int, field: str) -> Registered:
        """Register a mask, or mark it as used if it is registered. ``mask_id`` is the hash of the ``words``; ``field``
        names them in the request. Raises `InvalidRequest`, or `QueueFull` if there is no room; nothing has changed
        then."""
        if self.known(account, mask_id) is None:
            check_words(words, vocab_size, field)
        return self._add(account, mask_id, words)

    def pin(self, account: Account, kind: Sample, words: bytes, vocab_size: int) -> list[Registered]:
        """Pin the masks that an item names; with ``words`` its one mask is registered first. `unpin` must follow.
        Raises `TokenMaskUnknown`, or as `register`; nothing has changed then."""
        if words:
            found = [self.register(account, kind.mask, words, vocab_size, "output.token_mask")]
        else:
            named = [(each, self.known(account, each)) for each in kind.masks if each]
            if unknown := next((each for each, mask in named if mask is None), None):
                raise TokenMaskUnknown(
                    "you have registered no such token mask, or others have taken its place: register it again",
                    metadata={"token_mask_id": unknown.hex()},
                    field="output.token_mask_id" if kind.mask else "output.row_mask_ids",
                )
            found = [mask for _, mask in named if mask is not None]
        for mask in found:
            self._use(mask)
        return found


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
