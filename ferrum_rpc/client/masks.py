"""The client's token masks: registered once, and again after the executor evicted them.

Registered masks are kept, within `KNOWN_BYTES`, so that an item whose mask is unknown at the executor, after a restart
or an eviction, is sent again automatically.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ferrum_rpc.client.context import Context
from ferrum_rpc.client.retry import Deadline
from ferrum_rpc.core import Accept, Greedy, OutputSpec, Positions, Sample
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.executor.v1 import model_executor_pb2
from ferrum_rpc.wire.masks import id_of, pack_mask, words_to_proto

KNOWN_BYTES: Final = 64 << 20
"""Bytes of words that a client keeps; the oldest are dropped first. 3,500 masks of a 152k vocabulary."""

Mask = npt.NDArray[np.bool_] | npt.NDArray[np.int32] | npt.NDArray[np.uint32]
"""Allowed tokens: bools [V], or words [ceil(V / 32)] whose bit t % 32 of word t / 32 allows token t."""


class KnownMasks:
    """The words of masks by their id. The clients of a fleet share one, so that each can register all masks again."""

    def __init__(self) -> None:
        self._words: OrderedDict[bytes, bytes] = OrderedDict()
        self._bytes = 0

    def get(self, mask_id: bytes) -> bytes | None:
        """The words, if they are known."""
        return self._words.get(mask_id)

    def keep(self, mask_id: bytes, words: bytes) -> None:
        """Keep a mask that is now registered."""
        if mask_id not in self._words:
            self._bytes += len(words)
        self._words[mask_id] = words
        self._words.move_to_end(mask_id)
        while self._bytes > KNOWN_BYTES:
            self._bytes -= len(self._words.popitem(last=False)[1])


class TokenMasks:
    """The masks of one client, a subset of those ``known``."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.known = KnownMasks()

    async def register(self, mask: Mask, deadline: Deadline) -> bytes:
        """Register a mask, unless this client has before; its id."""
        try:
            words = pack_mask(mask)
        except ValueError as error:
            raise InvalidRequest(str(error), field="words") from None
        mask_id = id_of(words)
        if self.known.get(mask_id) is None:
            await self._register(mask_id, words, deadline)
        self.known.keep(mask_id, words)
        return mask_id

    async def register_again(self, outputs: Iterable[OutputSpec], deadline: Deadline) -> bool:
        """Register the masks of outputs that this client has kept. False: it has none of them."""
        named = {each for output in outputs for each in masks_of(output)}
        known = [(each, words) for each in named if (words := self.known.get(each)) is not None]
        await asyncio.gather(*(self._register(*each, deadline) for each in known))
        return bool(known)

    async def _register(self, mask_id: bytes, words: bytes, deadline: Deadline) -> None:
        request = model_executor_pb2.RegisterTokenMaskRequest(words=words_to_proto(words), sha256=mask_id)
        await self._context.call(self._context.executor.RegisterTokenMask, request, deadline)


def masks_of(output: OutputSpec) -> tuple[bytes, ...]:
    """The masks that an output names."""
    kind = output.kind.choice if isinstance(output.kind, Accept) else output.kind
    if not isinstance(kind, Greedy | Sample):
        return ()
    return tuple(filter(None, (kind.mask, *kind.row_masks)))


def with_masks(output: OutputSpec, masks: Iterable[bytes]) -> OutputSpec:
    """An output with other masks for its rows, if it has any."""
    kind: Any = output.kind
    if not isinstance(kind, Greedy | Sample) or not kind.row_masks:
        return output
    return replace(output, kind=replace(kind, row_masks=tuple(masks)))


def row_masks_of(output: OutputSpec, tokens: int) -> tuple[bytes, ...]:
    """The masks for the rows of ``tokens`` tokens to feed, to be split with the tokens. Raises `InvalidRequest` for
    another number of masks."""
    kind = output.kind
    masks = kind.row_masks if isinstance(kind, Greedy | Sample) else ()
    if masks and len(masks) != output.row_count(tokens, 0):
        raise InvalidRequest(f"{len(masks)} masks for {output.row_count(tokens, 0)} rows", field="output.row_mask_ids")
    return masks if output.positions is Positions.ALL else ()
