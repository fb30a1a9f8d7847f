"""The tensors behind the block pool: keys and values of every layer, in blocks of ``block_size`` slots.

A *slot* is one token's place: ``block * block_size + offset``. Who owns which block is not known here: the pool counts
references, an attention backend writes where the runner says, and block 0 (the null block) is where padding may be
written. All layers live in one allocation, so that what concerns all of them (copy-on-write, undo) is one indexed
operation instead of one per layer.

This file must not know sequences, tokens, hashes or the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

KEY, VALUE = 0, 1
"""Index of the second axis of the store's buffer."""


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """What stood in ``slots`` (int64 [n]): ``content`` [layers, 2, n, kv_heads, head_dim]."""

    slots: Tensor
    content: Tensor


class KvStore:
    """``keys[l]`` and ``values[l]``: [num_blocks, block_size, kv_heads, head_dim] of layer ``l``, views of one buffer.

    The memory is not initialised: on a CPU its pages are touched when they are first written, so that a large pool
    costs nothing until it is used. Nothing may read a slot that was not written.
    """

    def __init__(
        self,
        layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        for name, value in (
            ("layers", layers),
            ("num_blocks", num_blocks),
            ("block_size", block_size),
            ("kv_heads", kv_heads),
            ("head_dim", head_dim),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._buffer = torch.empty(
            (layers, 2, num_blocks, block_size, kv_heads, head_dim), dtype=dtype, device=device, requires_grad=False
        )
        self._slots = self._buffer.view(layers, 2, num_blocks * block_size, kv_heads, head_dim)
        self.keys: list[Tensor] = [self._buffer[layer, KEY] for layer in range(layers)]
        self.values: list[Tensor] = [self._buffer[layer, VALUE] for layer in range(layers)]

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.keys)

    @property
    def dtype(self) -> torch.dtype:
        """Element type of keys and values."""
        return self._buffer.dtype

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self._buffer.device

    @property
    def buffer(self) -> Tensor:
        """All of it: [layers, 2, num_blocks, block_size, kv_heads, head_dim]."""
        return self._buffer

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block: K and V of all layers."""
        return self._buffer.nbytes // self.num_blocks

    def copy_blocks(self, pairs: Tensor) -> None:
        """Copy block ``pairs[i, 0]`` to ``pairs[i, 1]`` (int64 [n, 2], where the store is), in all layers. All reads
        come before all writes."""
        self._buffer.index_copy_(2, pairs[:, 1], self._buffer.index_select(2, pairs[:, 0]))

    def save(self, slots: Tensor) -> Saved:
        """The content of ``slots`` (int64 [n]) in all layers, for `restore`: the undo log of an overwriting step."""
        return Saved(slots, self._slots.index_select(2, slots))

    def restore(self, saved: Saved) -> None:
        """Put back what `save` returned, bit for bit."""
        self._slots.index_copy_(2, saved.slots, saved.content)

    def fill_slots(self, slots: Tensor, value: float) -> None:
        """Set K and V of ``slots`` to ``value`` in all layers. ``slots``: int64 [n], or a bool mask [num_slots].

        For tests: slots that nobody owns are poisoned with NaN, and no output may change.
        """
        indices = slots.nonzero().squeeze(1) if slots.dtype == torch.bool else slots
        self._slots.index_fill_(2, indices.to(self.device), value)
