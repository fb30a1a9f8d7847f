"""Compile the CUDA kernels for a GPU that need not be here, and say what a program of them takes.

Triton's compiler and assembler need no device. What the interpreter cannot show, they do: that the kernels are valid
Triton, that a program's shared memory fits, that its registers do not spill. `python -m tests.kernels.compiling`
prints a table; the tests hold its figures to the limits.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ferrum_rpc.attention.triton_kernels import attend_kernel, merge_kernel
from ferrum_rpc.attention.triton_plan import TileShape, padded_dim, tile_shapes
from ferrum_rpc.attention.triton_recurrent import COLUMNS, JOURNALED, journal_kernel, step_kernel
from ferrum_rpc.attention.triton_recurrent import WARPS as STEP_WARPS
from ferrum_rpc.attention.triton_recurrent_chunk import COLUMNS as CHUNK_COLUMNS
from ferrum_rpc.attention.triton_recurrent_chunk import TOKENS, TWO_STAGES, chunk_kernel, prepare_kernel
from ferrum_rpc.core import RecurrentShape
from ferrum_rpc.models.triton_fused_ops import add_norm_kernel, gate_kernel
from ferrum_rpc.models.triton_gates import AT_ONCE as GATES_AT_ONCE
from ferrum_rpc.models.triton_gates import HEADS_AT_ONCE, decays_kernel, gate_heads_kernel
from ferrum_rpc.models.triton_lora import (
    ALIGNMENT,
    COLUMN_BYTES,
    EXPAND_STAGES,
    LARGE_BYTES,
    RANKS,
    SHRINK_STAGES,
    SMALL,
    SPLITS,
    expand_kernel,
    shrink_kernel,
)
from ferrum_rpc.native.triton_heads import heads_kernel
from ferrum_rpc.sampling.draw import FINITE
from ferrum_rpc.sampling.triton_sample import AT_ONCE, TOGETHER, WARPS, sample_kernel

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Shared memory that one program may use, by compute capability (CUDA C++ programming guide, technical specifications
per compute capability)."""

LAUNCHER_NAMES = {"params", "specialization", "options", "grid", "warmup"}
"""A kernel with a parameter of such a name cannot be launched: Triton generates the launcher's code with variables of
these names. The interpreter has no launcher."""

FP8 = dict.fromkeys(("keys", "values"), "*fp8e4nv")
TRITON_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
POINTERS = dict.fromkeys(("sums", "stats", "norm", "cos", "sin", "key_scales", "value_scales", "sinks"), "*fp32")
POINTERS |= dict.fromkeys(("items", "merges", "tables"), "*i32") | {"slots": "*i64"}
FLOATS = ("factor", "cap", "eps", "residual")
STRIDES = ("query_", "kv_", "key_", "value_")


@dataclass(frozen=True, slots=True)
class Usage:
    """What one program takes: ``registers`` of each thread, how many bytes of them spill, bytes of ``shared`` memory;
    and which matrix instructions it has."""

    kernel: str
    shape: str
    registers: int
    spilled: int
    shared: int
    matrix: str


def usage(
    capability: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    group: int = 4,
    window: int = 0,
    cap: bool = False,
    sinks: bool = False,
    block_size: int = 16,
    rounded: bool = False,
    tiles: tuple[TileShape, ...] | None = None,
) -> list[Usage]:
    """Compile every launch shape of layers like this one for ``capability`` (90 is Hopper)."""
    common = {"KV_HEADS": 8, "GROUP": group, "HEAD_DIM": head_dim, "PADDED_DIM": padded_dim(head_dim)}
    common["HAS_SINKS"] = sinks
    found = []
    for tile in tiles or tile_shapes(head_dim, dtype.itemsize, SHARED_BYTES[capability]):
        constants: dict[str, Any] = common | {
            "BLOCK_SIZE": block_size,
            "ROWS": tile.rows,
            "KEYS": tile.keys,
            "WINDOW": window,
            "HAS_CAP": cap,
            "QUANTIZED": rounded,
            "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32",
        }
        name = f"{tile.rows}x{tile.keys}x{head_dim} {TRITON_TYPES[dtype]}{' of fp8' * rounded}"
        launch = tile.warps, tile.stages
        found.append(_compile(attend_kernel, name, capability, dtype, constants, launch, FP8 if rounded else {}))
    if rounded:
        return found  # the others are the same
    merging: dict[str, Any] = common | {"ROWS": 16, "PARTS": 32}
    found.append(_compile(merge_kernel, f"{head_dim} {TRITON_TYPES[dtype]}", capability, dtype, merging, (4, 3), {}))
    return found


def row_usage(capability: int, dtype: torch.dtype) -> list[Usage]:
    """Compile what lies between the products, and the cache write, for the widths of an 8B model."""
    half, width = 64, 4096
    norming = {"WIDTH": width, "PADDED": width, "HAS_DELTA": True, "HAS_NORM": True, "CENTRED": False, "BIASED": False}
    heads = {"QUERIES": 32, "KV_HEADS": 8, "DIM": 2 * half, "HALF": half, "PADDED": half, "REST": 0, "AT_ONCE": 8}
    heads |= {"BLOCKS": 1, "QUERY_PROGRAMS": 4, "KEY_PROGRAMS": 1, "WHOLE": 0, "HAS_NORM": True, "HAS_ROPE": True}
    heads |= {"CACHE_ROW": 2 * half, "QUANTIZED": False}
    quantizing = heads | {"CACHE_ROW": 2 * half + 4, "QUANTIZED": True}
    kernels: list[tuple[str, Any, dict[str, Any], int]] = [
        ("", heads_kernel, heads, 4),
        (" to fp8", heads_kernel, quantizing, 4),
        ("", add_norm_kernel, norming, 8),
        ("", gate_kernel, {"WIDTH": 12288, "AT_ONCE": 1024, "ACTIVATION": 1, "GATED": True}, 4),
    ]
    name = TRITON_TYPES[dtype]
    return [
        _compile(kernel, name + to, capability, dtype, constants, (warps, 3), FP8 if to else {})
        for to, kernel, constants, warps in kernels
        if not to or capability >= 89
    ]


def adapter_usage(capability: int, dtype: torch.dtype) -> list[Usage]:
    """Compile the kernels of adapters, in tiles of either size."""
    common = {"RANKS": RANKS, "COLUMNS": COLUMN_BYTES // dtype.itemsize}
    common |= {"PRECISION": "tf32x3" if dtype == torch.float32 else "tf32"}
    given = {"order": "*i64", "items": "*i64"} | dict.fromkeys(("at_slot", "x_row", "width"), "i32")
    given |= dict.fromkeys(("sums_split", "sums_row"), "i32")
    found = []
    for rows, splits in ((SMALL, SPLITS), (LARGE_BYTES // dtype.itemsize, 1)):
        constants: dict[str, Any] = common | {"ROWS": rows, "SPLITS": splits}
        name = f"{rows} {TRITON_TYPES[dtype]}"
        found.append(_compile(shrink_kernel, name, capability, dtype, constants, (4, SHRINK_STAGES), given))
        constants["ALIGNED"] = ALIGNMENT
        found.append(_compile(expand_kernel, name, capability, dtype, constants, (4, EXPAND_STAGES), given))
    return found


def recurrent_usage(capability: int, dtype: torch.dtype) -> list[Usage]:
    """Compile the kernels of recurrent layers, for heads like those of Qwen3.5."""
    shape, name = RecurrentShape(key_heads=16, value_heads=32, key_dim=128, value_dim=128, taps=4), TRITON_TYPES[dtype]
    heads: dict[str, Any] = {"KEY_HEADS": shape.key_heads, "VALUE_HEADS": shape.value_heads, "KEYS": shape.key_dim}
    heads |= {"GROUP": 2, "KEY_DIM": shape.key_dim, "VALUE_DIM": shape.value_dim}
    inputs = dict.fromkeys(("taps", "log_decay", "beta"), "*fp32") | {"jobs": "*i64", "stride": "i32"}
    of_channels = {"TAPS": shape.taps, "CHANNELS": shape.channels}
    stepping = heads | of_channels | {"WINDOW": shape.taps, "COLUMNS": COLUMNS}
    journal = {"CHANNELS": shape.channels, "AT_ONCE": JOURNALED, "VALUE_HEADS": shape.value_heads, "HEADS": 32}
    blocks = heads | {"TOKENS": TOKENS, "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32"}
    prepared = dict.fromkeys(("query", "key", "erased", "written", "total", "state"), "*fp32") | {"tokens": "i32"}
    stages = 1 + (SHARED_BYTES[capability] >= TWO_STAGES)
    gates = dict.fromkeys(("speed", "shift", "log_decay", "beta"), "*fp32")
    gates |= dict.fromkeys(("written_row", "decay_row", "count", "gate_row", "gate_head"), "i32")
    of_heads = {"HEADS": shape.value_heads, "WIDTH": shape.value_dim, "PADDED": shape.value_dim}
    of_heads |= {"AT_ONCE": HEADS_AT_ONCE}
    kernels: list[tuple[Any, str, dict[str, Any], tuple[int, int], dict[str, str]]] = [
        (step_kernel, "", stepping, (STEP_WARPS, 3), inputs),
        (journal_kernel, "", journal, (4, 3), inputs),
        (prepare_kernel, "", blocks | of_channels | {"VALUES": shape.value_dim}, (2, 3), inputs | prepared),
        (chunk_kernel, "", blocks | {"COLUMNS": CHUNK_COLUMNS}, (4, stages), prepared),
        (decays_kernel, "", {"HEADS": shape.value_heads, "AT_ONCE": GATES_AT_ONCE}, (4, 3), gates),
        (gate_heads_kernel, " with a norm", of_heads | {"HAS_NORM": True}, (4, 3), gates),
        (gate_heads_kernel, "", of_heads | {"HAS_NORM": False}, (4, 3), gates),
    ]
    return [
        _compile(kernel, f"{shape.key_dim} {name}{how}", capability, dtype, constants, launch, given)
        for kernel, how, constants, launch, given in kernels
    ]


def sample_usage(capability: int) -> Usage:
    """Compile the sampler."""
    constants: dict[str, Any] = {"AT_ONCE": AT_ONCE, "TOGETHER": TOGETHER, "LIMIT": FINITE}
    given = {"draws": "*fp64", "found": "*i64", "vocabulary": "i32"}
    return _compile(sample_kernel, f"{AT_ONCE} fp32", capability, torch.float32, constants, (WARPS, 3), given, ())


def _compile(  # noqa: PLR0917
    kernel: Any,
    shape: str,
    capability: int,
    dtype: torch.dtype,
    constants: dict[str, Any],
    launch: tuple[int, int],
    pointers: dict[str, str],
    aligned_to: tuple[list[str | int], ...] = (["tt.divisibility", 16],),
) -> Usage:
    """``aligned_to``: of what the launcher finds so, addresses and most strides."""
    if taken := LAUNCHER_NAMES & {*kernel.arg_names}:
        raise ValueError(f"{kernel.__name__} has a parameter with a name of Triton's launcher: {', '.join(taken)}")
    signature, aligned = {}, {}
    for index, name in enumerate(kernel.arg_names):
        given = POINTERS | pointers
        stride = name.startswith(STRIDES) and name not in given
        scalar = "fp32" if name in FLOATS else "i32" if stride else given.get(name, f"*{TRITON_TYPES[dtype]}")
        signature[name] = "constexpr" if name in constants else scalar
        odd = scalar == "fp32" or (stride and name.startswith("kv_") and pointers)
        if name not in constants and not odd:
            aligned[(index,)] = [*aligned_to]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = dict(zip(("num_warps", "num_stages"), launch, strict=True))
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    # spilled registers live in the stack frame, for which the kernels have no other use
    registers, stack = (int(re.search(rf"{word}:(\d+)", text)[1]) for word in ("REG", "STACK"))  # type: ignore[index]
    words = sorted(set(re.findall(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma", compiled.asm["ptx"])))
    return Usage(kernel.__name__, shape, registers, stack, compiled.metadata.shared, " ".join(words))


def main() -> None:
    """Print what every shape of common layers takes on one kind of GPU."""
    parser = argparse.ArgumentParser(description="Compile the CUDA kernels without a GPU.")
    parser.add_argument("--capability", type=int, default=90, choices=sorted(SHARED_BYTES))
    parser.add_argument("--head-dim", type=int, nargs="*", default=[64, 128, 256])
    capability, head_dims = (arguments := parser.parse_args()).capability, arguments.head_dim
    for head_dim, dtype in product(head_dims, (torch.bfloat16, torch.float32)):
        for each in usage(capability, head_dim, dtype):
            print(*asdict(each).values(), sep="\t")
    for dtype in (torch.bfloat16, torch.float32):
        for each in (*row_usage(capability, dtype), *adapter_usage(capability, dtype)):
            print(*asdict(each).values(), sep="\t")
    for each in recurrent_usage(capability, torch.bfloat16):  # in float32 the assembler takes minutes
        print(*asdict(each).values(), sep="\t")
    print(*asdict(sample_usage(capability)).values(), sep="\t")


if __name__ == "__main__":
    main()
