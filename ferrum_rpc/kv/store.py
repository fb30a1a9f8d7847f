"""The tensors behind the block pool: keys and values of every layer, in blocks of ``block_size`` slots.

A *slot* is one token's place: ``block * block_size + offset``. Who owns which block is not known here: the pool counts
references, an attention backend writes where the runner says, and block 0 (the null block) is where padding may be
written. All layers of one `CacheSpec` live in one allocation, so that what concerns all of them (copy-on-write, undo)
is one indexed operation instead of one per layer.

This file must not know sequences, tokens, hashes or the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ferrum_rpc.sampling.transfer import Marker, to_device, to_host

Int64Array = npt.NDArray[np.int64]

BlockContent = Callable[[], npt.NDArray[np.uint8]]
"""The content of a block, uint8 [block_bytes], on the host. A call waits until it is there, in any thread; raises the
device's failure."""


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What a layer keeps per token: a key and a value of ``head_dim`` numbers for each of ``kv_heads`` heads; not
    ``pairs``: a key, which is the value too. Bytes include what an attention backend keeps in addition."""

    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    pairs: bool = True

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.head_dim < 1:
            raise ValueError(f"kv_heads and head_dim must be at least 1, not {self.kv_heads} and {self.head_dim}")

    @property
    def slot_bytes(self) -> int:
        """Of a token's key and value."""
        return (1 + self.pairs) * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(slots=True, eq=False)
class Saved:
    """The former content of ``slots`` (int64 [n], on the store's device): of each buffer of the store [layers, 1 or 2,
    n, kv_heads, head_dim]. ``number`` names it where ranks keep their own parts."""

    slots: Tensor
    content: list[Tensor]
    number: int = 0


class KvStore:
    """``keys[l]`` and ``values[l]``: [num_blocks, block_size, kv_heads, head_dim] of layer ``l``, in the dtype of
    ``layers[l]``. Those of a layer that has another one in ``sources`` are the other one's. They are views of
    ``buffers``, one [layers, 2, num_blocks, ...] for each different spec; of one without pairs [layers, 1, num_blocks,
    ...], and both are the same view.

    The memory is not initialised: on a CPU its pages are touched when they are first written, so that a large pool
    costs nothing until it is used. Nothing may read a slot that was not written, but those of the null block, which are
    zero at first: kernels that read whole tiles of keys may read them behind a window, and give them no weight.
    """

    def __init__(
        self,
        layers: Sequence[CacheSpec],
        num_blocks: int,
        block_size: int,
        device: torch.device,
        *,
        sources: Sequence[int] = (),
    ) -> None:
        for name, value in (("layers", len(layers)), ("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        sources = sources or range(len(layers))
        if any(
            layers[source] != layer or sources[source] != source for layer, source in zip(layers, sources, strict=True)
        ):
            raise ValueError("a layer and the one whose keys and values it has must have the same spec")
        own = [layer for layer, source in enumerate(sources) if source == layer]
        by_spec = {
            spec: torch.empty(
                (count, 1 + spec.pairs, num_blocks, block_size, spec.kv_heads, spec.head_dim),
                dtype=spec.dtype,
                device=device,
            )
            for spec, count in Counter([layers[layer] for layer in own]).items()
        }
        self.buffers = tuple(by_spec.values())
        for buffer in self.buffers:
            buffer[:, :, 0] = 0
        self._slots = [buffer.flatten(2, 3) for buffer in self.buffers]
        unused = {spec: iter(buffer) for spec, buffer in by_spec.items()}
        of_layer = {layer: next(unused[layers[layer]]) for layer in own}
        self._parts: list[Tensor] = [*of_layer.values()]
        self.keys: list[Tensor] = [of_layer[source][0] for source in sources]
        self.values: list[Tensor] = [of_layer[source][-1] for source in sources]
        self._device = device

    def copy_blocks(self, pairs: Int64Array) -> None:
        """Copy block ``pairs[i, 0]`` to ``pairs[i, 1]`` (int64 [n, 2]) in all layers. All reads come before all
        writes."""
        there = to_device(torch.from_numpy(pairs), self._device)
        for buffer in self.buffers:
            buffer.index_copy_(2, there[:, 1], buffer.index_select(2, there[:, 0]))

    def save(self, slots: Int64Array) -> Saved:
        """The content of ``slots`` (int64 [n]) in all layers, for `restore`: the undo log of an overwriting step."""
        there = to_device(torch.from_numpy(slots), self._device)
        return Saved(there, [each.index_select(2, there) for each in self._slots])

    def restore(self, saved: Saved) -> None:
        """Put back what `save` returned, bit for bit."""
        for each, content in zip(self._slots, saved.content, strict=True):
            each.index_copy_(2, saved.slots, content)

    def read(self, slots: Int64Array, layer: int, width: int) -> tuple[npt.NDArray[np.uint8], ...]:
        """The bytes of ``slots`` (int64 [n]) in a layer, of those that have their own, each uint8 [bytes], on the host:
        K and V, [n, kv_heads, width], and if a row has more than ``width`` numbers, the rest of K and of V. Without
        pairs K alone."""
        rows = []
        for each in self._parts[layer]:
            of_layer = each.flatten(0, 1)
            if of_layer.is_cpu:
                rows.append(_bytes(of_layer)[slots])
            else:
                rows.append(_bytes(of_layer.index_select(0, to_device(torch.from_numpy(slots), self._device))))
        end = width * self._parts[layer].itemsize
        parts = [each[..., :end] for each in rows]
        if rows[0].shape[-1] > end:
            parts += [each[..., end:] for each in rows]
        return tuple([each.reshape(-1) for each in parts])

    def write(self, slots: Int64Array, layer: int, width: int, parts: Sequence[Any]) -> None:
        """Write what `read` returned, or other buffers of as many bytes, to ``slots`` (int64 [n]) in a layer."""
        found = self._parts[layer]
        for index, each in enumerate(found):
            rows, own = each.flatten(0, 1), parts[index :: len(found)]
            content = [np.frombuffer(part, np.uint8).reshape(len(slots), rows.shape[1], -1) for part in own]
            joined = content[0] if len(content) == 1 else np.concatenate(content, -1)
            if rows.is_cpu:
                _bytes(rows)[slots] = joined
            else:
                there = to_device(torch.from_numpy(slots), self._device)
                rows.index_copy_(0, there, torch.from_numpy(joined.copy()).view(rows.dtype).to(rows.device))

    @property
    def own_block_bytes(self) -> int:
        """Of a block, in all layers that are here."""
        return sum(each[:, :, 0].nbytes for each in self.buffers)

    @property
    def block_bytes(self) -> int:
        """Of a block, in all layers."""
        return self.own_block_bytes

    def read_block(self, block: int) -> npt.NDArray[np.uint8]:
        """The content of a block in all layers, uint8 [block_bytes], on the host."""
        if self._device.type != "cpu":
            return self._gather([block])[0]()
        parts = [_bytes(each[:, :, block]).flatten() for each in self.buffers]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def write_block(self, block: int, content: bytes) -> None:
        """Restore what `read_block` returned."""
        if self._device.type != "cpu":
            self._scatter([block], [content])
            return
        data, at = np.frombuffer(content, np.uint8), 0
        for each in self.buffers:
            there = _bytes(each[:, :, block])
            there[...] = data[at : at + there.nbytes].reshape(there.shape)
            at += there.nbytes

    def read_blocks(self, blocks: Sequence[int]) -> list[BlockContent]:
        """What ``blocks`` have now, whatever is written there afterwards. On a GPU they are gathered and copied at
        once, and nothing waits for it here."""
        if self._device.type == "cpu":
            return [partial(_itself, self.read_block(block)) for block in blocks]
        return self._gather(blocks)

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        """As `write_block` of each. On a GPU nothing waits for it."""
        if self._device.type != "cpu":
            self._scatter(blocks, contents)
            return
        for block, content in zip(blocks, contents, strict=True):
            self.write_block(block, content)

    def _gather(self, blocks: Sequence[int]) -> list[BlockContent]:
        if not blocks:
            return []
        places = to_device(torch.tensor(blocks), self._device)
        parts = [each.movedim(2, 0).index_select(0, places).flatten(1).view(torch.uint8) for each in self.buffers]
        [host] = to_host([parts[0] if len(parts) == 1 else torch.cat(parts, 1)])
        mark = Marker(self._device)
        return [partial(_arrived, mark, each) for each in host.numpy()]

    def _scatter(self, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        size = len(blocks), self.own_block_bytes
        host = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        for row, content in zip(host.numpy(), contents, strict=True):
            row[...] = np.frombuffer(content, np.uint8)
        there, places, at = host.to(self._device, non_blocking=True), to_device(torch.tensor(blocks), self._device), 0
        for each in self.buffers:
            by_block = each.movedim(2, 0)
            end = at + by_block[0].nbytes
            part = there[:, at:end].contiguous().view(each.dtype)
            by_block.index_copy_(0, places, part.view(len(blocks), *by_block.shape[1:]))
            at = end


def _itself(content: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return content


def _arrived(mark: Marker, content: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    mark.wait()
    return content


def _bytes(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor, uint8 [..., bytes of its last axis]: the memory itself where it is the host's.

    What is copied of that, numpy copies in this thread. torch has all its threads do a part, which costs a hundred
    times as much where the cores are busy with something else.
    """
    content: npt.NDArray[np.uint8] = tensor.view(torch.uint8).cpu().numpy()
    return content
