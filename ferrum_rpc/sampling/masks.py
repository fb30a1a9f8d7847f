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

from ferrum_rpc.core import MaskRows, Sample
from ferrum_rpc.sampling.transfer import to_device

WORD: Final = 32
"""Tokens of a word: bit t % 32 of word t / 32 allows token t."""

MIN_LOGIT: Final = torch.finfo(torch.float32).min
"""Minimum logit of an allowed token, so that no forbidden one equals it."""


class RowMask(NamedTuple):
    """The masks of the rows of logits from ``row`` on: ``words`` int32 [n, ceil(V / 32)], on their device."""

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
            self._words[each] = to_device(host[None], self._device)

    def replace(self, masks: Sequence[tuple[bytes, bytes]]) -> None:
        """Keep ``masks`` (ids and words) and no others."""
        self._words.clear()
        self.change(masks, ())

    def all(self) -> list[tuple[bytes, bytes]]:
        """The ids and words of all that there are. Waits for the device."""
        return [(each, words.cpu().numpy().tobytes()) for each, words in self._words.items()]

    def on_device(self, items: Sequence[tuple[int, MaskRows]]) -> list[RowMask]:
        """The masks of items, each with its first row of the logits. What adjoins in memory and in the logits, which
        mostly is all of a step, is one; all go to the device together."""
        parts: list[tuple[int, npt.NDArray[np.int32], int, int]] = []
        for row, (words, first, rows, at) in items:
            if parts:
                begin, block, start, end = parts[-1]
                if block is words and end == first and row + at - begin == first - start:
                    parts[-1] = begin, block, start, first + rows
                    continue
            parts.append((row + at, words, first, first + rows))
        found = [words[first:end] for _, words, first, end in parts]
        sent = to_device(torch.from_numpy(found[0] if len(found) == 1 else np.concatenate(found)), self._device)
        sizes = [len(each) for each in found]
        each_sent = torch.split(sent, sizes) if len(sizes) > 1 else (sent,)
        return [RowMask(row, words) for (row, *_), words in zip(parts, each_sent, strict=True)]

    def of(self, kind: Sample, first: int, rows: int) -> list[RowMask]:
        """The registered masks of an item's ``rows``, which are those of the logits from ``first`` on. Raises KeyError
        for one that is not there."""
        if kind.mask:
            words = self._words[kind.mask]
            return [RowMask(first, words if rows == 1 else words.expand(rows, -1))]
        return [RowMask(row, self._words[each]) for row, each in enumerate(kind.row_masks, first) if each]


def forbid(logits: Tensor, masks: Sequence[RowMask]) -> None:
    """Set what the ``masks`` do not allow to -inf, in place, in rows of float32 ``logits`` [R, V]; what they allow, to
    `MIN_LOGIT` at least. Nothing waits for the device."""
    rows = [row for first, words in masks for row in range(first, first + len(words))]
    words = torch.cat([each.words for each in masks])
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
