"""What the machine could do at best, read in the same run: memory, matrix products, and what a cell asks of them.

The memory figure is a read of a buffer far larger than the caches, in huge pages where the kernel gives them; the
matrix figure is one bfloat16 product of a size that a prefill has. A limit is the best of all readings of a run: a
neighbour can make a reading worse, never better. A step can take no less than the longer of what its bytes and what its
products take (the roofline of Williams, Waterman and Patterson, 2009).
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Literal, TypedDict

import torch
from torch import Tensor

from benchmarks.cells import DECODE, Cell
from benchmarks.shapes import tensor_shapes
from ferrum_rpc.models.linear import PlainLinear, select_linear

BUFFER_BYTES: Final = 512 << 20
QUICK_BYTES: Final = 8 << 20
REPEATS: Final = 5
ROWS, IN, OUT = 512, 1024, 3072
"""The product: a prompt of 512 tokens through the widest linear layer of the 0.6B shape."""

CPU: Final = torch.device("cpu")
ELEMENT: Final = 2
"""Bytes of a bfloat16."""


class Reading(TypedDict):
    """One look at the machine."""

    read_gb_s: float
    bf16_tflops: float


class Limits(TypedDict):
    """The best of the readings."""

    read_gb_s: float
    bf16_tflops: float
    threads: int
    readings: list[Reading]


class Roof(TypedDict):
    """What a cell cannot pass: tokens a second, what bounds it, and what a step must read and compute."""

    tokens_per_s: float
    bound_by: Literal["memory", "matrix products"]
    step_gb: float
    step_gflop: float


class Machine:
    """Takes readings. ``quick``: of a buffer that a test can afford, which says nothing of memory."""

    def __init__(self, threads: int, *, quick: bool = False) -> None:
        torch.set_num_threads(threads)
        self.threads = threads
        self.readings: list[Reading] = []
        size = QUICK_BYTES if quick else BUFFER_BYTES
        buffer = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            buffer.madvise(mmap.MADV_HUGEPAGE)
        generator = torch.Generator().manual_seed(1)
        self._words = torch.frombuffer(buffer, dtype=torch.float32)
        block = torch.randn(1 << 20, generator=generator)
        self._words.copy_(block.repeat(len(self._words) // len(block)))
        self._doubles = torch.frombuffer(buffer, dtype=torch.float64)
        self._rows = torch.randn(ROWS, IN, generator=generator).bfloat16()
        weight = torch.randn(OUT, IN, generator=generator).bfloat16()
        self._products = [make(weight, None) for make in (PlainLinear, select_linear(CPU, weight.dtype)[2])]

    def read(self) -> Reading:
        """Two seconds or so. Which reduction reads fastest differs from machine to machine, and whose product is the
        fastest as well: the best of some."""
        readers: Sequence[tuple[Callable[[Tensor], Tensor], Tensor]] = (
            (torch.sum, self._words),
            (torch.amax, self._words),
            (torch.sum, self._doubles),
            (lambda words: torch.dot(words, words), self._words),
        )
        fastest = min(_best(partial(read, words)) for read, words in readers)
        product = min(_best(partial(multiply, self._rows), repeats=4 * REPEATS) for multiply in self._products)
        reading: Reading = {
            "read_gb_s": round(self._words.nbytes / fastest / 1e9, 2),
            "bf16_tflops": round(2 * ROWS * IN * OUT / product / 1e12, 3),
        }
        self.readings.append(reading)
        return reading

    def limits(self) -> Limits:
        """Of all readings so far."""
        return {
            "read_gb_s": max(each["read_gb_s"] for each in self.readings),
            "bf16_tflops": max(each["bf16_tflops"] for each in self.readings),
            "threads": self.threads,
            "readings": list(self.readings),
        }


def roof(cell: Cell, config: dict[str, Any], limits: Limits) -> Roof:
    """The cell's limit on this machine, of a bfloat16 model with ``config``. Attention's products are counted; softmax,
    norms and activations are not."""
    layers, heads, dim = config["num_hidden_layers"], config["num_attention_heads"], config["head_dim"]
    sizes = {name: shape[0] * shape[1] for name, shape in tensor_shapes(config).items() if len(shape) == 2}
    head = config["vocab_size"] * config["hidden_size"]
    linear = sum(size for name, size in sizes.items() if "layers." in name)
    kv_token = layers * 2 * config["num_key_value_heads"] * dim * ELEMENT
    tokens = cell.tokens_per_step
    rows = cell.batch  # one row of logits each, of a prefill too
    seen = cell.context * cell.batch if cell.kind == DECODE else cell.context * (cell.context + 1) // 2
    read = (linear + head) * ELEMENT + (kv_token * cell.context * cell.batch if cell.kind == DECODE else 0)
    flop = 2 * (linear * tokens + head * rows + 2 * layers * heads * dim * seen)
    memory_s, product_s = read / (limits["read_gb_s"] * 1e9), flop / (limits["bf16_tflops"] * 1e12)
    return {
        "tokens_per_s": round(tokens / max(memory_s, product_s), 2),
        "bound_by": "memory" if memory_s > product_s else "matrix products",
        "step_gb": round(read / 1e9, 3),
        "step_gflop": round(flop / 1e9, 3),
    }


def _best(run: Callable[[], object], repeats: int = REPEATS) -> float:
    """Seconds of the fastest run but for the first, which warms up."""
    run()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)
