"""Paged attention on a CPU by our own C kernel: K and V are read once, in place.

What torch offers needs the blocks gathered first, so that every byte of the cache is read, written and read again; at
32 sequences that is more than half of a decode step. The kernel (``native/src/paged.c``) follows the block table. It
takes the spans that are bound by memory: single tokens and short runs, as in decode and verification. Longer ones are
bound by arithmetic. In bfloat16 they go to a second kernel (``native/src/flash.c``), 7 times as fast as torch's at 512
tokens, where the CPU multiplies bfloat16 in vectors; else to `TorchPagedAttention`, which is the oracle of both.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ferrum_rpc.attention.geometry import BatchGeometry, Int32Array
from ferrum_rpc.attention.torch_paged import Plan, TorchPagedAttention
from ferrum_rpc.core import AttentionSpec
from ferrum_rpc.native import library

SHORT: Final = 32
"""Tokens of the longest span that the kernel takes. Measured on two cores with AVX-512 and no matrix unit, bf16 and
fp32: 2 to 5 times as fast as gathering at one token, 1.5 at 8, even at 64."""

DTYPES: Final = (torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True, eq=False)
class NativePlan:
    """``short`` and ``long`` point into ``arrays``; None where there is no such span. ``rest`` is torch's work."""

    short: library.Step | None
    long: library.Step | None
    rest: Plan | None
    arrays: list[Int32Array]


class NativePagedAttention:
    """See the module. ``keys[l]`` and ``values[l]``: [num_blocks, block_size, kv_heads, head_dim] on the CPU, bfloat16
    or float32, one shape and dtype for all layers; queries have that dtype. ``isa``: an instruction set by name, for
    tests; else the best of the machine. Raises OSError where the kernel is not built or does not take such heads."""

    name = "native"
    exact_span_tokens = SHORT

    def __init__(
        self, specs: Sequence[AttentionSpec], keys: list[Tensor], values: list[Tensor], isa: str | None = None
    ) -> None:
        obstacle = tensor_obstacle(specs, keys[0].device, keys[0].dtype)
        if obstacle is not None:
            raise OSError(obstacle)
        self._library = library.load()
        self._specs, self._keys, self._values = tuple(specs), keys, values
        self._torch = TorchPagedAttention(specs, keys, values)
        named = None if isa is None else isa.encode(), specs[0].head_dim
        if not self._library.ferrum_attention_supported(*named):
            raise OSError(f"heads of {specs[0].head_dim} are no multiple of a vector of {isa or 'this machine'}")
        self._kernel = self._library.ferrum_attention_new(*named)
        self._flash = None
        if keys[0].dtype == torch.bfloat16 and self._library.ferrum_flash_supported(specs[0].head_dim):
            self._flash = self._library.ferrum_flash_new()
        self._wide = int(keys[0].dtype == torch.float32)
        self._slot_bytes = keys[0][0, 0].nbytes
        self._block_size = keys[0].shape[1]
        self._layers = (library.AttentionLayer * len(specs))(
            *(
                library.AttentionLayer(key.data_ptr(), value.data_ptr(), *_mask(spec))
                for spec, key, value in zip(specs, keys, values, strict=True)
            )
        )

    def __del__(self) -> None:
        if getattr(self, "_kernel", None):
            self._library.ferrum_attention_free(self._kernel)
        if getattr(self, "_flash", None):
            self._library.ferrum_flash_free(self._flash)

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        name: bytes = self._library.ferrum_attention_name(self._kernel)
        return name.decode()

    def plan(self, geometry: BatchGeometry) -> NativePlan:
        """See `AttentionBackend`. Nothing in it grows with the spans but copies of a few integers."""
        arrays: list[Int32Array] = []
        if geometry.tokens <= SHORT:  # then so is every span
            return NativePlan(self._step(geometry, None, arrays), None, None, arrays)
        long = geometry.lengths - geometry.starts > SHORT
        if not long.any():
            return NativePlan(self._step(geometry, None, arrays), None, None, arrays)
        chosen = np.flatnonzero(~long)
        short = self._step(geometry, chosen, arrays) if len(chosen) else None
        longer = np.flatnonzero(long)
        if self._flash is None:
            return NativePlan(short, None, self._torch.plan(geometry, longer.tolist()), arrays)
        return NativePlan(short, self._step(geometry, longer, arrays), None, arrays)

    def _step(
        self, geometry: BatchGeometry, chosen: npt.NDArray[np.intp] | None, arrays: list[Int32Array]
    ) -> library.Step:
        """The ``chosen`` spans, or all; what it points into is put into ``arrays``."""
        spans: tuple[Int32Array, ...] = (
            geometry.query_start,
            geometry.starts,
            geometry.lengths,
            geometry.table_start,
        )
        addresses: Sequence[int] = geometry.addresses if chosen is None else ()
        if chosen is not None:  # of tables only where they begin is looked at: they may lie with gaps
            spans = tuple(np.ascontiguousarray(each[chosen]) for each in spans)
            addresses = [each.ctypes.data for each in (*spans, geometry.entries)]
        arrays += [*spans, geometry.entries]
        spec = self._specs[0]
        return library.Step(
            len(spans[1]),
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            self._block_size,
            torch.get_num_threads(),
            *addresses,
        )

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """See `AttentionBackend`."""
        dense = key[0].is_contiguous() and value[0].is_contiguous() if len(key) else False
        if not dense or not key.dtype == value.dtype == self._keys[layer].dtype:
            self._torch.write(layer, slots, key, value)
            return
        self._library.ferrum_store(
            self._keys[layer].data_ptr(),
            self._values[layer].data_ptr(),
            slots.data_ptr(),
            len(slots),
            key.data_ptr(),
            value.data_ptr(),
            key.stride(0) * key.itemsize,
            value.stride(0) * value.itemsize,
            self._slot_bytes,
        )

    def attend(self, layer: int, query: Tensor, plan: NativePlan) -> Tensor:
        """Causal attention of ``query`` [T, heads, head_dim]; see `AttentionBackend`."""
        spec = self._specs[layer]
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        if query.stride()[1:] != (spec.head_dim, 1):
            query = query.contiguous()
        if plan.rest is not None:
            self._torch.attend_into(layer, query, plan.rest, output)
        tensors = (
            query.data_ptr(),
            query.stride(0),
            self._keys[layer].data_ptr(),
            self._values[layer].data_ptr(),
            output.data_ptr(),
        )
        mask, status = _mask(spec), 0
        if plan.long is not None:
            status |= self._library.ferrum_flash(self._flash, ctypes.addressof(plan.long), *tensors, *mask)
        if plan.short is not None:
            step = ctypes.addressof(plan.short)
            status |= self._library.ferrum_attend(self._kernel, step, *tensors, self._wide, *mask)
        if status:
            raise MemoryError("no memory for the attention kernel's buffers")
        return output

    def native_step(self, slots: Tensor, plan: NativePlan) -> library.AttentionStep | None:
        """See `NativeAttention`."""
        if self._wide or plan.rest is not None:
            return None
        short, long = (None if each is None else ctypes.addressof(each) for each in (plan.short, plan.long))
        return library.AttentionStep(
            self._kernel, self._flash, short, long, ctypes.addressof(self._layers), slots.data_ptr()
        )


def _mask(spec: AttentionSpec) -> tuple[int, float, float]:
    """Window, scale and soft cap as the kernels take them: 0 where there is none."""
    return spec.window or 0, spec.scale, spec.softcap or 0.0


def tensor_obstacle(specs: Sequence[AttentionSpec], device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot take such a cache, or None."""
    if device.type != "cpu":
        return f"it runs on a CPU, not on {device.type}"
    if dtype not in DTYPES:
        return f"it reads bfloat16 and float32, not {str(dtype).removeprefix('torch.')}"
    if len({(spec.heads, spec.kv_heads, spec.head_dim) for spec in specs}) != 1:
        return "the layers' heads differ"
    return None


def probe(specs: Sequence[AttentionSpec], device: torch.device, dtype: torch.dtype) -> tuple[str | None, str]:
    """``(obstacle, isa)``: why the kernel cannot be used, after a small step whose answer must be torch's."""
    generator = torch.Generator().manual_seed(0)
    spec = specs[0]
    obstacle = tensor_obstacle(specs, device, dtype)
    if obstacle is not None:
        return obstacle, ""
    shape = (6, 4, spec.kv_heads, spec.head_dim)
    keys, values = ([torch.randn(shape, generator=generator).to(dtype)] for _ in range(2))
    query = torch.randn((4, spec.heads, spec.head_dim), generator=generator).to(dtype)
    tables: list[Any] = [np.array(each, dtype=np.int32) for each in ((5, 1), (3, 2, 4))]
    geometry = BatchGeometry.build(4, [6, 9], [1, 3], tables)
    try:
        native = NativePagedAttention([spec], keys, values)
    except OSError as error:
        return str(error), ""
    oracle = TorchPagedAttention([spec], keys, values)
    answer = native.attend(0, query, native.plan(geometry))
    expected = oracle.attend(0, query, oracle.plan(geometry))
    tolerance = 8 * torch.finfo(dtype).eps
    if not torch.allclose(answer.float(), expected.float(), rtol=tolerance, atol=tolerance):
        return "its answer is not torch's", ""
    return None, native.isa
