"""Loading the compiled C library, so that it shares torch's threads.

It is a package of its own, ``ferrum_rpc_kernels``, built by a C compiler, and depends neither on Python nor on torch.
It is compiled for OpenMP but linked to no runtime: a second runtime would have threads of its own, and the two sets
would wait for each other's cores. So torch's runtime is made visible before the library is loaded, and both share it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import math
import re
from pathlib import Path
from typing import Any, Final

import torch

from ferrum_rpc.usage import masked_isa

PACKAGE: Final = "ferrum_rpc_kernels"
LIBRARY: Final = "kernels.so"
_RUNTIME: Final = re.compile(r"^(?:\S+ +){5}(/.*/lib(?:gomp|omp|iomp5)[^/\s]*\.so[^/\s]*)$", re.MULTILINE)
"""A mapped runtime in /proc/self/maps: five columns, then the path, which may contain spaces."""


class SpanArrays(ctypes.Structure):
    """``struct span_arrays`` of kv_layout.h: the spans of a step, for all layers. Pointers are to int32 arrays."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("spans", "block_size", "threads")),
        *((name, ctypes.c_void_p) for name in ("rows", "starts", "lengths", "table_start", "tables")),
    )


class RowKindStruct(ctypes.Structure):
    """``struct row_kind`` of norm_rope_gate.h: a model's operations on rows."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("centred", "biased", "activation", "gated", "heads", "kv_heads")),
        *((name, ctypes.c_int32) for name in ("head_dim", "turned", "whole_rows")),
        *((name, ctypes.c_float) for name in ("eps", "residual", "limit", "slope")),
    )


class RowTask(ctypes.Structure):
    """``struct row_task`` of norm_rope_gate.h: one task for every row. Pointers are to a `RowKindStruct`, and to the
    tensors' elements."""

    _fields_ = (
        ("kind", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("task", "wide", "threads", "width")),
        ("count", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("hidden", "out", "delta", "norm", "cos", "sin")),
    )


class MatrixStruct(ctypes.Structure):
    """``struct matrix`` of linear.h: a packed weight."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("kind", "n", "k", "group", "width", "mixed")),
        ("factor", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("panels", "scales", "zeros", "factors", "bias", "order", "next")),
    )


class ExpertLayer(ctypes.Structure):
    """``struct expert_layer`` of experts.h. Pointers are to pointers to `MatrixStruct`, and to a `RowKindStruct`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("gate_ups", "downs", "kind")),
        *((name, ctypes.c_int32) for name in ("count", "chosen", "lanes")),
    )


class RecurrentWeightsStruct(ctypes.Structure):
    """``struct recurrent_weights`` of layer.h. Pointers are to the tensors' elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "speed", "shift", "norm")),
        *((name, ctypes.c_int32) for name in ("key_heads", "value_heads", "key_dim", "value_dim", "taps")),
        *((name, ctypes.c_int32) for name in ("step_lanes", "decay_lanes", "gate_lanes")),
        ("eps", ctypes.c_float),
    )


class LayerWeights(ctypes.Structure):
    """``struct layer_weights`` of layer.h. Pointers are to `MatrixStruct`, to the tensors' elements, and to
    `RecurrentWeightsStruct`."""

    _fields_ = (
        ("products", ctypes.c_void_p * 4),
        *((name, ctypes.c_void_p) for name in ("before_mixer", "after_mixer", "before_mlp", "after_mlp", "qk_norm")),
        ("recurrent", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("slot", "rope", "lanes", "parallel", "place", "gate_lanes")),
        ("kind", RowKindStruct),
    )


class AttentionLayer(ctypes.Structure):
    """``struct attention_layer`` of kv_layout.h: a layer's kernels, its cache and its mask."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("decode", "prefill", "keys", "values", "sinks")),
        *((name, ctypes.c_int32) for name in ("heads", "kv_heads", "head_dim", "wide", "rounded", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


class AttentionStep(ctypes.Structure):
    """``struct attention_step`` of attention.h: attention of a step in all layers. Pointers are to two `SpanArrays`, to
    an `AttentionLayer` for each layer, and to the tokens' slots, int64."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("short_spans", "long_spans", "layers", "slots"))


class Draw(ctypes.Structure):
    """``struct draw`` of sample.h: the sampling parameters of a row."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("seed", "position")),
        *((name, ctypes.c_float) for name in ("temperature", "top_p", "min_p")),
        ("top_k", ctypes.c_int32),
    )


class PenaltyStruct(ctypes.Structure):
    """``struct penalty`` of sample.h: a row's penalties for the tokens before it. The pointer is to pairs of
    int32."""

    _fields_ = (
        ("counts", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("row", "count")),
        *((name, ctypes.c_float) for name in ("repetition", "presence", "frequency")),
    )


class RowMaskStruct(ctypes.Structure):
    """``struct row_mask`` of sample.h: the tokens that a row allows. The pointer is to int32."""

    _fields_ = (("words", ctypes.c_void_p), ("row", ctypes.c_int64))


class LimitsStruct(ctypes.Structure):
    """``struct limits`` of sample.h: the bounds that filters set on a shard of a row."""

    _fields_ = (
        *((name, ctypes.c_float) for name in ("largest", "temperature", "least", "least_weight")),
        ("ties", ctypes.c_int64),
        ("target", ctypes.c_double),
    )


class LoraPart(ctypes.Structure):
    """``struct lora_part`` of lora.h: one matrix of a fused product. The pointer is to the tensor's elements."""

    _fields_ = (("b", ctypes.c_void_p), *((name, ctypes.c_int32) for name in ("first", "columns", "start", "rank")))


class LoraChange(ctypes.Structure):
    """``struct lora_change`` of lora.h: an adapter's change of a product."""

    _fields_ = (
        ("a", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("n", "k", "rank", "parts")),
        ("part", LoraPart * 4),
    )


class LoraStep(ctypes.Structure):
    """``struct lora_step`` of lora.h. Pointers are to ``struct lora_rows``, and to bfloat16."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "sums")),
        *((name, ctypes.c_int32) for name in ("count", "rank", "lanes")),
    )


class RecurrentLayer(ctypes.Structure):
    """``struct recurrent_layer`` of recurrent.h: a recurrent layer and the rows of a step. Pointers are to the tensors'
    elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "inputs")),
        ("input_bytes", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("log_decay", "beta", "output")),
        *((name, ctypes.c_int32) for name in ("key_heads", "value_heads", "key_dim", "value_dim")),
        *((name, ctypes.c_int32) for name in ("taps", "wide", "lanes", "threads")),
    )


class RecurrentJob(ctypes.Structure):
    """``struct recurrent_job`` of recurrent.h: a sequence's part of a step, in one layer. Pointers are to the tensors'
    elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("state", "channels", "gates")),
        *((name, ctypes.c_int64) for name in ("rows", "folded", "floor", "start", "row", "count")),
    )


class DecayRows(ctypes.Structure):
    """``struct decay_rows`` of recurrent_rows.h. Pointers are to the tensors' elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("written", "decay", "speed", "shift", "log_decay", "beta")),
        *((name, ctypes.c_int64) for name in ("rows", "row_bytes")),
        *((name, ctypes.c_int32) for name in ("heads", "wide", "lanes")),
    )


class GatedRows(ctypes.Structure):
    """``struct gated_rows`` of recurrent_rows.h. Pointers are to the tensors' elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("heads", "gates", "out", "norm")),
        *((name, ctypes.c_int64) for name in ("rows", "row_bytes", "head_bytes")),
        *((name, ctypes.c_int32) for name in ("count", "dim", "wide", "lanes", "threads")),
        ("eps", ctypes.c_float),
    )


STRUCTS: Final = (
    *(SpanArrays, RowKindStruct, RowTask, MatrixStruct, ExpertLayer, RecurrentWeightsStruct, LayerWeights),
    *(AttentionLayer, AttentionStep, Draw),
    *(PenaltyStruct, RowMaskStruct, LimitsStruct, LoraPart, LoraChange, LoraStep, RecurrentLayer, RecurrentJob),
    *(DecayRows, GatedRows),
)
ABI_VERSION: Final = 34
"""As in abi.c, which exports it with the sizes of `STRUCTS`."""

BUILD: Final = "install ferrum-rpc-kernels where a C compiler is (in a checkout: `make setup`)"

ADD_NORM, ROTATE, GATE = 0, 1, 2
"""``enum task`` of norm_rope_gate.h."""

PAIRS, BYTES, NIBBLES, FACTORED, MXFP4, IQ4 = 0, 1, 2, 3, 4, 5
"""``enum kind`` of linear.h."""

MOST_TAPS: Final = 64
"""As in recurrent.h."""

REDUCE: Final = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
"""``reduce_rows`` of layer.c, as a callback into Python."""

ATTEND: Final = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p
)
"""``attend_layer`` of attention.h, for a function of Python."""

GROUP_ABORTED, GROUP_UNEQUAL = 1, 2
"""``enum group_status`` of group.h, of which 0 is success."""

_P, _I, _L, _S = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_char_p
_ROWS: Final = (_P, _L, _L)  # first row, row stride in elements, number of rows

FUNCTIONS: Final[dict[str, tuple[Any, ...]]] = {
    "ferrum_decode_supported": (_I, _S, _I),
    "ferrum_decode_new": (_P, _S, _I),
    "ferrum_decode_free": (None, _P),
    "ferrum_decode_name": (_S, _P),
    "ferrum_attend": (_I, _P, _I, _P, _L, _P),
    "ferrum_store": (None, _P, _P, _L, _P, _P, _L, _L),
    "ferrum_prefill_supported": (_I, _S, _I),
    "ferrum_prefill_new": (_P, _S),
    "ferrum_prefill_free": (None, _P),
    "ferrum_rows_lanes": (_I, _I),
    "ferrum_rows": (None, _P, _I),
    "ferrum_linear_supported": (_I, _I),
    "ferrum_linear_prepared": (_I, _I),
    "ferrum_linears_new": (_P,),
    "ferrum_linears_free": (None, _P),
    "ferrum_linear": (_I, _P, _P, *_ROWS, _P, _I, _I),
    "ferrum_linear_heads": (_I, _P, _P, _I, _P, *(_L,) * 3, _P, _L, _L, _I),
    "ferrum_linear_largest": (_I, _P, _P, *_ROWS, _P, _I),
    "ferrum_experts_new": (_P, _P),
    "ferrum_experts_free": (None, _P),
    "ferrum_experts": (_I, _P, _P, _P, _L, *(_P,) * 5, _I),
    "ferrum_mix": (None, _P, _L, _I),
    "ferrum_quantize": (None, _P, _L, _I, _P, _P, _P, _P, _I),
    "ferrum_layers_new": (_P, _P, _P, _P),
    "ferrum_layers_free": (None, _P),
    "ferrum_layers_run": (_I, _P, _P, _I, *(_P,) * 4, _I, *(_P,) * 4, _L, _I),
    "ferrum_lora_lanes": (_I,),
    "ferrum_lora": (None, _P, _I, _P, _L, _P, _I),
    "ferrum_recurrent_step": (_I, _P, _P, _I),
    "ferrum_recurrent_chunk": (_I, _P, _L, _P),
    "ferrum_decay_rows": (None, _P),
    "ferrum_gated_rows": (None, _P),
    "ferrum_group_bytes": (_L, _I),
    "ferrum_group_new": (_P, _P, _I, _I, _I),
    "ferrum_group_free": (None, _P),
    "ferrum_group_close": (None, _P),
    "ferrum_group_abort": (None, _P),
    "ferrum_group_renew": (_I, _P, _L),
    "ferrum_group_reduce": (_I, _P, _P, _L, _I),
    "ferrum_group_reduce_pairs": (_I, _P, _P, _L),
    "ferrum_group_gather": (_I, _P, _P, _L, _P),
    "ferrum_group_send": (_I, _P, _P, _L, _I),
    "ferrum_group_receive": (_I, _P, _P, _L, _I),
    "ferrum_sampler_new": (_P,),
    "ferrum_sampler_free": (None, _P),
    "ferrum_penalise": (None, _P, _L, _P, _L, _I),
    "ferrum_mask": (None, _P, _P, _L, _P, _L, _I),
    "ferrum_best": (_I, _P, _P, _L, _L, _L, _P, _P, _I),
    "ferrum_weigh": (_I, _P, _P, _L, _L, _P, _P, _P, _P, _I),
    "ferrum_sample": (_I, _P, _P, _L, _L, _P, _P, _I),
}
"""The library's functions: the result type, then the argument types. A name in ``_new`` allocates, and returns NULL if
memory is short."""

HUGE_PAGE: Final = 2 << 20
_MADV_HUGEPAGE: Final = 14  # linux/mman.h


def find() -> str:
    """The path of the library. Raises OSError if there is none."""
    package = importlib.util.find_spec(PACKAGE)
    for folder in (package and package.submodule_search_locations) or ():
        if (file := Path(folder, LIBRARY)).exists():
            return str(file)
    raise OSError(f"it is not installed: {BUILD}")


@functools.cache
def load() -> Any:
    """The library with its functions typed. Raises OSError with the reason and the action if it cannot be loaded, and
    `ConfigError` for a value of `FERRUM_ISA` that it does not know."""
    masked_isa()
    path = find()
    runtime = _openmp_of_torch()
    if runtime is not None:
        ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(path)  # raises if a symbol is missing, such as OpenMP's
    _compare(library)
    for name, (result, *arguments) in FUNCTIONS.items():
        if (function := getattr(library, name, None)) is not None:  # some are built for x86-64 only
            function.restype, function.argtypes = result, arguments
            if name.endswith("_new"):
                function.errcheck = _check_allocated
    return library


@functools.cache
def is_built() -> bool:
    """Whether `load` returns the library."""
    try:
        load()
    except OSError:
        return False
    return True


def recurrent_lanes(key_dim: int, value_dim: int, taps: int) -> int:
    """As `row_lanes`, of the states of recurrent layers with such heads and convolutions."""
    return row_lanes(math.gcd(key_dim, value_dim)) if taps <= MOST_TAPS else 0


def row_lanes(elements: int) -> int:
    """Floats in the widest vectors of this machine that divide ``elements``; 0 if none do, or without the library."""
    lanes: int = load().ferrum_rows_lanes(elements) if is_built() else 0
    return lanes


def _compare(library: ctypes.CDLL) -> None:
    """Raises OSError if the library was built from other sources than this file's declarations."""
    expected = [ABI_VERSION, *map(ctypes.sizeof, STRUCTS)]
    found = [library.ferrum_abi(each) for each in range(len(expected))] if hasattr(library, "ferrum_abi") else []
    if found != expected:
        raise OSError(f"it was built from other sources (it has {found}, and this code needs {expected}): {BUILD}")


def _check_allocated(handle: int | None, function: Any, arguments: tuple[Any, ...]) -> int:
    if handle is None:
        raise MemoryError("no memory for a kernel")
    return handle


def prefer_huge_pages(tensor: torch.Tensor) -> None:
    """Request pages of 2 MB for a large tensor that was not written to yet. Sequential reads of weights gained 5 % (40
    against 38 GB/s on two cores); a cache's new tokens, which touch a page in 56 places each, were stored in a fifth of
    the time. Without Linux, or if the kernel refuses, nothing changes."""
    start = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    end = (tensor.data_ptr() + tensor.nbytes) // HUGE_PAGE * HUGE_PAGE
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if start < end and madvise is not None:
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_HUGEPAGE)


def mapped_runtimes(maps: str) -> list[str]:
    """Paths of the OpenMP runtimes in the text of /proc/self/maps, one for each mapping."""
    return _RUNTIME.findall(maps)


def _openmp_of_torch() -> Path | None:
    """The OpenMP runtime that torch computes with, if /proc shows it."""
    torch.get_num_threads()  # torch is loaded, and so is its runtime
    try:
        found = mapped_runtimes(Path("/proc/self/maps").read_text())
    except OSError:
        found = [str(path) for path in (Path(torch.__file__).parent / "lib").glob("libomp*")]
    of_torch = [path for path in found if "torch" in path]
    return Path((of_torch or found)[0]) if found else None
