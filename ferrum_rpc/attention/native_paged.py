"""Paged attention on a CPU by C kernels: K and V are read once, in place.

Torch needs the blocks gathered first, so every byte of the cache is read, written and read again; at 32 sequences that
is more than half of a decode step. ``attention_decode.c`` reads through the block table. It computes the spans that are
bound by memory: single tokens and short runs, as in decode and verification. Longer spans are bound by arithmetic. In
bfloat16, on a CPU with AVX2 or more, ``attention_prefill.c`` computes them; otherwise `TorchPagedAttention`, which is
the oracle of both.
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

from ferrum_rpc.attention.eight_bits import to_rows
from ferrum_rpc.attention.geometry import BatchGeometry
from ferrum_rpc.attention.sinks import Sinks, held, random_sinks
from ferrum_rpc.attention.torch_paged import TorchPagedAttention, TorchPlan
from ferrum_rpc.core import AttentionSpec
from ferrum_rpc.native import cpu, library
from ferrum_rpc.selection import Unsuited

SHORT: Final = 32
"""Tokens of the longest span that the kernel takes. Measured on two cores with AVX-512 and no matrix unit, bf16 and
fp32: 2 to 5 times as fast as gathering at one token, 1.5 at 8, even at 64."""

DTYPES: Final = (torch.bfloat16, torch.float32)


class _Spans:
    """The ``chosen`` spans of a step, or all, at an ``address`` for the kernels; this object keeps the arrays alive."""

    __slots__ = ("_held", "address")

    def __init__(self, geometry: BatchGeometry, chosen: npt.NDArray[np.intp] | None = None) -> None:
        by_span = geometry.by_span
        if chosen is not None:  # only the starts of tables are read, so gaps between tables are allowed
            by_span = np.ascontiguousarray(by_span[:, chosen])
        arrays = torch.from_numpy(by_span), torch.from_numpy(geometry.blocks)  # numpy takes 1 us for an array's address
        first, row = arrays[0].data_ptr(), by_span.strides[0]
        step = library.SpanArrays(
            geometry.spans if chosen is None else len(chosen),
            geometry.block_size,
            torch.get_num_threads(),
            first,
            first + row,
            first + 2 * row,
            first + 3 * row,
            arrays[1].data_ptr(),
        )
        self.address = ctypes.addressof(step)
        self._held = step, arrays


@dataclass(frozen=True, slots=True, eq=False)
class NativePlan:
    """``step`` points into ``held``; ``rest`` is the plan of torch, for long spans that no kernel takes."""

    step: library.AttentionStep
    rest: TorchPlan | None
    held: tuple[Tensor, _Spans | None, _Spans | None]


class NativePagedAttention:
    """See the module. ``keys[l]`` and ``values[l]``: [num_blocks, block_size, kv_heads, head_dim] on the CPU, bfloat16
    or float32; a layer's queries have its dtype. Or int8, rows of `eight_bits`, which the kernels dequantize; then
    ``dtype`` is that of the queries. ``isa``: an instruction set by name, for tests; else the best of the machine, and
    portable C for short spans only.
    ``takes_long_spans``: whether the kernel, not torch, also computes long spans. Only then are a long span's bits
    independent of where its prompt is cut, and only then does a key that is NaN show in no row that does not see it.
    Raises OSError if the kernel is not built or does not support such heads."""

    name = "native"
    exact_span_tokens = SHORT

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        keys: list[Tensor],
        values: list[Tensor],
        isa: str | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        sinks: Sinks = (),
    ) -> None:
        self._dtypes = [dtype if key.dtype == torch.int8 else key.dtype for key in keys]
        for key, computed in zip(keys, self._dtypes, strict=True):
            cpu.require(key.device, computed, *DTYPES)
        self._library = library.load()
        self._torch = TorchPagedAttention(specs, keys, values, dtype, sinks=sinks)
        self._sinks = held(specs, sinks, keys[0].device)
        self._kernels: dict[int, int] = {}
        name = None if isa is None else isa.encode()
        for spec in specs:
            if not self._library.ferrum_decode_supported(name, spec.head_dim):
                raise OSError(f"heads of {spec.head_dim} must be a multiple of a vector of {isa or 'this machine'}")
            if spec.head_dim not in self._kernels:
                self._kernels[spec.head_dim] = self._library.ferrum_decode_new(name, spec.head_dim)
        self._narrow = all(computed == torch.bfloat16 for computed in self._dtypes)
        self._prefill = None
        self.takes_long_spans = all(
            takes_long_spans(computed, spec.head_dim, isa) for computed, spec in zip(self._dtypes, specs, strict=True)
        )
        if self.takes_long_spans:
            self._prefill = self._library.ferrum_prefill_new(name)
        self._layers = (library.AttentionLayer * len(specs))(
            *(
                library.AttentionLayer(
                    self._kernels[spec.head_dim],
                    self._prefill,
                    key.data_ptr(),
                    value.data_ptr(),
                    None if sink is None else sink.data_ptr(),
                    spec.heads,
                    spec.kv_heads,
                    spec.head_dim,
                    computed == torch.float32,
                    key.dtype == torch.int8,
                    spec.window or 0,
                    spec.scale,
                    spec.softcap or 0.0,
                )
                for spec, key, value, sink, computed in zip(specs, keys, values, self._sinks, self._dtypes, strict=True)
            )
        )
        self._addresses = [ctypes.addressof(layer) for layer in self._layers]

    def __del__(self) -> None:
        for kernel in getattr(self, "_kernels", {}).values():
            self._library.ferrum_decode_free(kernel)
        if getattr(self, "_prefill", None):
            self._library.ferrum_prefill_free(self._prefill)

    @property
    def isa(self) -> str:
        """The instruction set in use, of the first layer."""
        name: bytes = self._library.ferrum_decode_name(self._layers[0].decode)
        return name.decode()

    def plan(self, geometry: BatchGeometry) -> NativePlan:
        """Its cost grows with the spans only by copies of a few integers."""
        long = None if geometry.tokens <= SHORT else geometry.lengths - geometry.starts > SHORT
        short_spans = long_spans = rest = None
        if long is None or not long.any():
            short_spans = _Spans(geometry)
        else:
            chosen = np.flatnonzero(long)
            if len(chosen) < geometry.spans:
                short_spans = _Spans(geometry, np.flatnonzero(~long))
            if self.takes_long_spans:
                long_spans = _Spans(geometry, chosen)
            else:
                rest = self._torch.plan(geometry, chosen.tolist())
        slots = torch.from_numpy(geometry.slots)
        step = library.AttentionStep(
            None if short_spans is None else short_spans.address,
            None if long_spans is None else long_spans.address,
            self._addresses[0],
            slots.data_ptr(),
        )
        return NativePlan(step, rest, (slots, short_spans, long_spans))

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        dense = (key.shape[2], 1)
        kind = self._dtypes[layer]
        if key.stride()[1:] != dense or value.stride()[1:] != dense or not key.dtype == value.dtype == kind:
            self._torch.write(layer, slots, key, value)
            return
        self._library.ferrum_store(
            self._addresses[layer],
            slots.data_ptr(),
            slots.shape[0],
            key.data_ptr(),
            value.data_ptr(),
            key.stride(0) * key.itemsize,
            value.stride(0) * value.itemsize,
        )

    def attend(self, layer: int, query: Tensor, plan: NativePlan) -> Tensor:
        """Causal attention of ``query`` [T, heads, head_dim]; see `AttentionBackend`."""
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        if query.stride()[1:] != (query.shape[2], 1):
            query = query.contiguous()
        if plan.rest is not None:
            self._torch.attend_into(layer, query, plan.rest, output)
        step = ctypes.addressof(plan.step)
        if self._library.ferrum_attend(step, layer, query.data_ptr(), query.stride(0), output.data_ptr()):
            raise MemoryError("no memory for the attention kernel's buffers")
        return output

    def native_step(self, plan: NativePlan) -> library.AttentionStep | None:
        return plan.step if self._narrow and plan.rest is None else None


def takes_long_spans(dtype: torch.dtype, head_dim: int, isa: str | None = None) -> bool:
    """Whether the kernel, not torch, also computes long spans of such queries; ``isa`` as in `NativePagedAttention`."""
    name = None if isa is None else isa.encode()
    return dtype == torch.bfloat16 and bool(library.load().ferrum_prefill_supported(name, head_dim))


def probe(specs: Sequence[AttentionSpec], device: torch.device, dtype: torch.dtype, quantized: bool = False) -> str:
    """The instruction set that the kernel uses, after a small step that must agree with torch, over a cache in
    ``dtype``, or ``quantized`` to int8. Raises OSError or Unsuited."""
    cpu.require(device, dtype, *DTYPES)
    generator = torch.Generator().manual_seed(0)
    keys, values = (
        [torch.randn((6, 4, spec.kv_heads, spec.head_dim), generator=generator).to(dtype) for spec in specs]
        for _ in range(2)
    )
    if quantized:
        keys, values = ([to_rows(each) for each in layers] for layers in (keys, values))
    tables: list[Any] = [np.array(each, dtype=np.int32) for each in ((5, 1), (3, 2, 4))]
    geometry = BatchGeometry.build(4, [6, 9], [1, 3], tables)
    sinks = random_sinks(specs, generator)
    native = NativePagedAttention(specs, keys, values, dtype=dtype, sinks=sinks)
    oracle = TorchPagedAttention(specs, keys, values, dtype, sinks=sinks)
    ours, expected = native.plan(geometry), oracle.plan(geometry)
    tolerance = 8 * torch.finfo(dtype).eps
    for layer in {spec: layer for layer, spec in enumerate(specs)}.values():
        spec = specs[layer]
        query = torch.randn((4, spec.heads, spec.head_dim), generator=generator).to(dtype)
        answer, exact = native.attend(layer, query, ours).float(), oracle.attend(layer, query, expected).float()
        if not torch.allclose(answer, exact, rtol=tolerance, atol=tolerance):
            raise Unsuited("its result differs from torch's")
    return native.isa
