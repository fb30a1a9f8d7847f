"""Token masks on the device: which tokens a row may yield, as registered words.

A mask is stored as it arrives, one bit per token: 19 kB with a vocabulary of 152k. The `Sampler` expands it over a row
when it is used. The service floor decides which masks exist and for how long; it sends a mask before it names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ferrum_rpc.core import Sample
from ferrum_rpc.sampling.transfer import to_device

WORD: Final = 32
"""Tokens of a word: bit t % 32 of word t / 32 allows token t."""

MIN_LOGIT: Final = torch.finfo(torch.float32).min
"""Minimum logit of an allowed token, so that no forbidden one equals it."""


class RowMask(NamedTuple):
    """The mask of a row of logits: ``words`` int32 [ceil(V / 32)], on their device."""

    row: int
    words: Tensor


class Masks:
    """The registered masks by id, on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._words: dict[bytes, Tensor] = {}

    def change(self, added: Sequence[tuple[bytes, bytes]], dropped: Sequence[bytes]) -> None:
        """Store ``added`` masks (ids and words), and remove ``dropped`` ones."""
        for each in dropped:
            self._words.pop(each, None)
        for each, words in added:
            host = torch.frombuffer(bytearray(words), dtype=torch.int32)
            self._words[each] = to_device(host, self._device)

    def replace(self, masks: Sequence[tuple[bytes, bytes]]) -> None:
        """Keep ``masks`` (ids and words) and no others."""
        self._words.clear()
        self.change(masks, ())

    def all(self) -> list[tuple[bytes, bytes]]:
        """The ids and words of all that there are. Waits for the device."""
        return [(each, words.cpu().numpy().tobytes()) for each, words in self._words.items()]

    def on_device(self, rows: Sequence[int], words: Sequence[npt.NDArray[np.int32]]) -> list[RowMask]:
        """Masks of ``rows``, whose ``words`` are int32 [n, ceil(V / 32)] in their order."""
        host = torch.from_numpy(np.concatenate(words))
        return list(map(RowMask, rows, to_device(host, self._device).unbind()))

    def of(self, kind: Sample, rows: int) -> list[Tensor | None]:
        """The words for each of an item's rows, None for a row without a mask. Raises KeyError for one that is not
        there."""
        if kind.mask:
            return [self._words[kind.mask]] * rows
        return [self._words[each] if each else None for each in kind.row_masks]


def forbid(logits: Tensor, masks: Sequence[RowMask]) -> None:
    """Set what the ``masks`` do not allow to -inf, in place, in rows of float32 ``logits`` [R, V]; what they allow, to
    `MIN_LOGIT` at least. Nothing waits for the device."""
    rows = [each.row for each in masks]
    words = torch.stack([each.words for each in masks])
    whole = rows == list(range(len(logits)))
    where = None if whole else to_device(torch.tensor(rows), logits.device)
    changed = (logits if where is None else logits.index_select(0, where)).clamp_(min=MIN_LOGIT)
    bits = (words[:, :, None] & _bits(logits.device)) != 0
    changed.masked_fill_(~bits.flatten(1)[:, : logits.shape[-1]], -torch.inf)
    if where is not None:
        logits.index_copy_(0, where, changed)


@cache
def _bits(device: torch.device) -> Tensor:
    """1 << i for each bit of a word, int32 [32]."""
    return to_device(torch.tensor([1 << bit for bit in range(WORD)]).to(torch.int32), device)
