"""What the machine could do at best, read in the same run: memory, matrix products, and what a cell asks of them.

The memory figure is a read of a buffer far larger than the caches, in huge pages where the kernel gives them; the
matrix figure is one bfloat16 product of a size that a prefill has. A limit is the best of all readings of a run: a
neighbour can make a reading worse, never better. A step can take no less than the longer of what its bytes and what its
products take (the roofline of Williams, Waterman and Patterson, 2009).
"""

from __future__ import annotations

import math
import mmap
import timeit
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch

from benchmarks.cases import DECODE, Cell
from ferrum_rpc.core import AttentionSpec
from ferrum_rpc.models.layout import layout
from ferrum_rpc.models.linear import PlainLinear, select_linear
from ferrum_rpc.models.parts.experts import Experts
from ferrum_rpc.models.spec import ModelSpec

BUFFER_BYTES: Final = 512 << 20
QUICK_BYTES: Final = 8 << 20
QUICK_SIDE: Final = 64
REPEATS: Final = 5
ROWS, IN, OUT = 512, 1024, 3072  # the product: a prompt of 512 tokens through the widest linear layer of the 0.6B shape
ELEMENT: Final = 2  # bytes of a bfloat16
STATE_ELEMENT: Final = 4  # of a float32


GPU_BYTES: Final = 1 << 30
GPU_SIDE: Final = 8192


class Machine:
    """Takes readings. ``quick``: of a size that a test can afford, which says nothing of the machine."""

    def __init__(self, threads: int, device: str = "cpu", *, quick: bool = False) -> None:
        torch.set_num_threads(threads)
        self.threads = threads
        self.readings: list[dict[str, float]] = []
        self._device = torch.device(device)
        self._held = _cpu_calls(quick) if device == "cpu" else None

    def read(self) -> None:
        """Two seconds or so. Which reduction reads fastest differs from machine to machine, and whose product is the
        fastest as well: the best of some. A GPU's buffers, 2.4 GiB, are there for the reading only: the sides need its
        memory."""
        reads, products = self._held or _gpu_calls(self._device)
        bytes_s = max(size / _best(call) for call, size in reads)
        flop_s = max(size / _best(call, repeats=4 * REPEATS) for call, size in products)
        if self._held is None:
            del reads, products
            torch.cuda.empty_cache()
        self.readings.append({"read_gb_s": round(bytes_s / 1e9, 4), "bf16_tflops": round(flop_s / 1e12, 6)})

    def limits(self) -> dict[str, Any]:
        """The best of all readings so far."""
        return {
            "read_gb_s": max(each["read_gb_s"] for each in self.readings),
            "bf16_tflops": max(each["bf16_tflops"] for each in self.readings),
            "threads": self.threads,
            "readings": list(self.readings),
        }


def roof(cell: Cell, spec: ModelSpec, limits: Mapping[str, Any]) -> dict[str, Any]:
    """What the cell cannot pass on this machine, of a bfloat16 model: tokens a second, what bounds it, and what a step
    must move (GB) and compute (GFLOP). Attention's products are counted; softmax, norms, activations and the recurrence
    are not. Of experts those are read that rows choose at random, and each row computes its own."""
    shapes = {name: placement.shape for name, placement in layout(spec).items()}
    sizes = {name: math.prod(shape) for name, shape in shapes.items() if "layers." in name and len(shape) == 2}
    of_experts = sum(size for name, size in sizes.items() if ".experts." in name)
    linear = sum(sizes.values()) - of_experts
    routing = next((layer.mlp for layer in spec.layers if isinstance(layer.mlp, Experts)), None)
    chosen = routing.routing.chosen / routing.count if routing else 0.0
    head = spec.vocab_size * spec.hidden_size
    layers = spec.attention_specs
    kv_token = sum((1 if layer.latent else 2) * layer.kv_heads * layer.head_dim for layer in layers) * ELEMENT
    tokens, known = cell.tokens_per_step, cell.shared
    rows = cell.batch  # one row of logits each, of a prefill too
    seen = cell.context * cell.batch if cell.kind == DECODE else _pairs(cell.context) - _pairs(known)
    weights = linear + head + of_experts * (1 - (1 - chosen) ** (tokens - known))
    read = weights * ELEMENT * cell.callers + kv_token * (cell.context * cell.batch if cell.kind == DECODE else known)
    states = sum(each.value_heads * each.key_dim * each.value_dim for each in spec.recurrent_shapes) * STATE_ELEMENT
    moved = read + 2 * states * cell.batch  # a state is also written
    flop = 2 * (
        (linear + of_experts * chosen) * (tokens - known)
        + head * rows
        + sum(layer.heads * _channels(layer) for layer in layers) * seen
    )
    memory_s, product_s = moved / (limits["read_gb_s"] * 1e9), flop / (limits["bf16_tflops"] * 1e12)
    return {
        "tokens_per_s": round(tokens / max(memory_s, product_s), 2),
        "bound_by": "memory" if memory_s > product_s else "matrix products",
        "step_gb": round(moved / 1e9, 3),
        "step_gflop": round(flop / 1e9, 3),
    }


def _channels(layer: AttentionSpec) -> int:
    """Of a head's key and value."""
    return layer.latent.key_dim + layer.latent.value_dim if layer.latent else 2 * layer.head_dim


def _pairs(tokens: int) -> int:
    """Of a token and one that it sees."""
    return tokens * (tokens + 1) // 2


Calls = list[tuple[Callable[[], object], float]]  # what is timed, and bytes or operations of it


def _cpu_calls(quick: bool) -> tuple[Calls, Calls]:
    buffer = mmap.mmap(-1, QUICK_BYTES if quick else BUFFER_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        buffer.madvise(mmap.MADV_HUGEPAGE)
    generator = torch.Generator().manual_seed(1)
    words = torch.frombuffer(buffer, dtype=torch.float32)
    block = torch.randn(1 << 20, generator=generator)
    words.copy_(block.repeat(len(words) // len(block)))
    doubles = torch.frombuffer(buffer, dtype=torch.float64)
    rows, inner, outer = (QUICK_SIDE,) * 3 if quick else (ROWS, IN, OUT)
    tokens = torch.randn(rows, inner, generator=generator).bfloat16()
    weight = torch.randn(outer, inner, generator=generator).bfloat16()
    products = [make(weight, None) for make in (PlainLinear, select_linear(torch.device("cpu"), weight.dtype)[2])]
    readers = (partial(torch.sum, words), partial(torch.amax, words), partial(torch.sum, doubles))
    dot = partial(torch.dot, words, words)
    return [(each, words.nbytes) for each in (*readers, dot)], [
        (partial(each, tokens), 2 * rows * inner * outer) for each in products
    ]


def _gpu_calls(device: torch.device) -> tuple[Calls, Calls]:
    """The better of a large copy (read and written) and a large read; a large square product. Each ends on the host."""
    source, target = (torch.empty(GPU_BYTES // ELEMENT, dtype=torch.bfloat16, device=device).normal_() for _ in "ab")
    left, right = (torch.randn(GPU_SIDE, GPU_SIDE, dtype=torch.bfloat16, device=device) for _ in "ab")

    def ended(call: Callable[[], object]) -> Callable[[], object]:
        def whole() -> None:
            call()
            torch.cuda.synchronize(device)

        return whole

    copy, read = ended(lambda: target.copy_(source)), ended(lambda: source.view(torch.int32).amax())
    return [(copy, 2 * GPU_BYTES), (read, GPU_BYTES)], [(ended(lambda: left @ right), 2 * GPU_SIDE**3)]


def _best(run: Callable[[], object], repeats: int = REPEATS) -> float:
    """Seconds of the fastest run but for the first, which warms up."""
    run()
    return min(timeit.repeat(run, number=1, repeat=repeats))
