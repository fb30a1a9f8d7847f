"""The compiled library: finding it, and sharing torch's threads with it.

It is a package of its own, ``ferrum_rpc_kernels``, built where a C compiler is, and knows neither Python nor torch.
Compiled for OpenMP but linked to none: a second runtime beside torch's would keep
threads of its own, and with two cores and two sets of threads each would wait for the other. So torch's runtime is made
visible before the library is loaded, and both run on one set.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
from pathlib import Path
from typing import Any, Final

import torch

PACKAGE: Final = "ferrum_rpc_kernels"
LIBRARY: Final = "kernels.so"
_RUNTIME: Final = re.compile(r"^(?:\S+ +){5}(/.*/lib(?:gomp|omp|iomp5)[^/\s]*\.so[^/\s]*)$", re.MULTILINE)
"""A mapped runtime in /proc/self/maps: five columns, then the path, which may have spaces in it."""


class SpanArrays(ctypes.Structure):
    """``struct step`` of attention.h: what all layers of a step share. Pointers are to int32 arrays."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("spans", "block_size", "threads")),
        *((name, ctypes.c_void_p) for name in ("rows", "starts", "lengths", "table_start", "tables")),
    )


class RowTask(ctypes.Structure):
    """``struct rows`` of norm_rope_gate.h: one task for every row. Pointers are to the tensors' elements."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("task", "wide", "threads", "width", "heads", "head_dim")),
        ("eps", ctypes.c_float),
        ("count", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("hidden", "out", "delta", "weight", "head_norms", "cos", "sin")),
    )


class Matrix(ctypes.Structure):
    """``struct linear`` of linear.h: a packed weight."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("kind", "n", "k")),
        *((name, ctypes.c_void_p) for name in ("panels", "scales", "bias")),
    )


class LayerWeights(ctypes.Structure):
    """``struct layer_weights`` of layer.c. Pointers are to `Matrix`, and to the tensors' elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "output", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("input_norm", "post_norm", "head_norms")),
        *((name, ctypes.c_int32) for name in ("rotating", "head_dim", "lanes")),
        ("eps", ctypes.c_float),
    )


class AttentionLayer(ctypes.Structure):
    """``struct attention_layer`` of attention.h: a layer's kernels, its cache, and what its rows see of it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("paged", "flash", "keys", "values")),
        *((name, ctypes.c_int32) for name in ("heads", "kv_heads", "head_dim", "wide", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


class AttentionStep(ctypes.Structure):
    """``struct attention_step`` of attention.h: attention of a step in all layers. Pointers are to two `SpanArrays`, to
    an `AttentionLayer` for each layer, and to the tokens' slots, int64."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("short_spans", "long_spans", "layers", "slots"))


STRUCTS: Final = (SpanArrays, RowTask, Matrix, LayerWeights, AttentionLayer, AttentionStep)
ABI_VERSION: Final = 4
"""As in abi.c, which exports it with the sizes of `STRUCTS`."""

BUILD: Final = "install ferrum-rpc-kernels where a C compiler is (in a checkout: `make setup`)"

ADD_NORM, ROTATE, GATE = 0, 1, 2
"""``enum task`` of norm_rope_gate.h."""

PAIRS, BYTES = 0, 1
"""``enum kind`` of linear.h."""

FLASH_UNIT: Final = 16
"""What attention_prefill.c needs a head's width to be a multiple of."""

HUGE_PAGE: Final = 2 << 20
_MADV_HUGEPAGE: Final = 14  # linux/mman.h


def find() -> str:
    """The path of the library. Raises OSError where there is none."""
    package = importlib.util.find_spec(PACKAGE)
    for folder in (package and package.submodule_search_locations) or ():
        if (file := Path(folder, LIBRARY)).exists():
            return str(file)
    raise OSError(f"it is not installed: {BUILD}")


@functools.cache
def load() -> Any:
    """The library with its functions typed. Raises OSError that says why there is none, and what to do."""
    path = find()
    runtime = _openmp_of_torch()
    if runtime is not None:
        ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(path)  # raises where a symbol is missing, such as OpenMP's
    _compare(library)
    _type_rows_and_attention(library)
    _type_products(library)
    return library


def _compare(library: ctypes.CDLL) -> None:
    """Raises OSError where the library is not of the sources that this file was written for."""
    expected = [ABI_VERSION, *map(ctypes.sizeof, STRUCTS)]
    found = [library.ferrum_abi(each) for each in range(len(expected))] if hasattr(library, "ferrum_abi") else []
    if found != expected:
        raise OSError(f"it was built from other sources (it has {found}, and this code needs {expected}): {BUILD}")


def _type_rows_and_attention(library: ctypes.CDLL) -> None:
    pointer, integer = ctypes.c_void_p, ctypes.c_int32
    library.ferrum_attention_supported.argtypes = (ctypes.c_char_p, integer)
    library.ferrum_attention_supported.restype = integer
    _type_new(library.ferrum_attention_new, ctypes.c_char_p, integer)
    library.ferrum_attention_free.argtypes = (pointer,)
    library.ferrum_attention_free.restype = None
    library.ferrum_attention_name.argtypes = (pointer,)
    library.ferrum_attention_name.restype = ctypes.c_char_p
    long = ctypes.c_int64
    library.ferrum_attend.argtypes = (pointer, integer, pointer, long, pointer)
    library.ferrum_attend.restype = integer
    library.ferrum_store.argtypes = (pointer, pointer, long, pointer, pointer, long, long)
    library.ferrum_store.restype = None
    library.ferrum_flash_supported.argtypes = (integer,)
    library.ferrum_flash_supported.restype = integer
    if library.ferrum_flash_supported(FLASH_UNIT):
        _type_new(library.ferrum_flash_new)
        library.ferrum_flash_free.argtypes = (pointer,)
        library.ferrum_flash_free.restype = None
    library.ferrum_rows_lanes.argtypes = (integer,)
    library.ferrum_rows_lanes.restype = integer
    library.ferrum_rows.argtypes = (pointer, integer)
    library.ferrum_rows.restype = None


def _type_products(library: ctypes.CDLL) -> None:
    pointer, integer, long = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    library.ferrum_linear_supported.argtypes = (integer,)
    library.ferrum_linear_supported.restype = integer
    if library.ferrum_linear_supported(PAIRS) or library.ferrum_linear_supported(BYTES):
        _type_new(library.ferrum_linears_new)
        library.ferrum_linears_free.argtypes = (pointer,)
        library.ferrum_linears_free.restype = None
        rows = (pointer, long, long)
        library.ferrum_linear.argtypes = (pointer, pointer, *rows, pointer, integer, integer)
        library.ferrum_linear.restype = integer
        library.ferrum_linear_largest.argtypes = (pointer, pointer, *rows, pointer, integer)
        library.ferrum_linear_largest.restype = integer
        _type_new(library.ferrum_layers_new, pointer)
        library.ferrum_layers_free.argtypes = (pointer,)
        library.ferrum_layers_free.restype = None
        library.ferrum_layer_before.argtypes = (*(pointer,) * 6, long, pointer, integer)
        library.ferrum_layer_before.restype = integer
        library.ferrum_layer_after.argtypes = (*(pointer,) * 4, long, pointer, integer)
        library.ferrum_layer_after.restype = integer
        library.ferrum_layers_run.argtypes = (*(pointer,) * 3, integer, *(pointer,) * 4, long, integer)
        library.ferrum_layers_run.restype = integer


def _type_new(function: Any, *arguments: type) -> None:
    """A function that allocates, and answers NULL where it cannot."""
    function.argtypes, function.restype, function.errcheck = arguments, ctypes.c_void_p, _allocated


def _allocated(handle: int | None, function: Any, arguments: tuple[Any, ...]) -> int:
    if handle is None:
        raise MemoryError("no memory for a kernel")
    return handle


def prefer_huge_pages(tensor: torch.Tensor) -> None:
    """Ask for pages of 2 MB under a large tensor that was not written to yet. Reading weights in order, they gained
    5 % (40 against 38 GB/s on two cores); a cache's new tokens, which touch a page in 56 places each, were stored in a
    fifth of the time. No Linux, or a kernel that says no: as it was."""
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
