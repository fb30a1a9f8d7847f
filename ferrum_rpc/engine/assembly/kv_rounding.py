"""A cache in 8 bits: whether it can be had, and what rounding changes of the keys and values of this model.

How far it moves an answer depends on the model: keys with a few large channels lose more than others. So a few tokens
are run at the start, and the log has the error beside the choice, as it has for weights in 8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from ferrum_rpc.attention.backend import AttentionBackend
from ferrum_rpc.attention.eight_bits import FP8, SCALE_BYTES, from_rows, row_width
from ferrum_rpc.attention.geometry import BatchGeometry
from ferrum_rpc.core import AttentionSpec
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.kv.store import CacheSpec, KvStore
from ferrum_rpc.models.base import Model, StepInputs

AUTO: Final = "auto"
ROUNDED: Final = {"int8": torch.int8, "fp8": FP8}
"""``--kv-dtype`` -> the dtype of the cache, one of `eight_bits`."""

FP8_CAPABILITY: Final = (8, 9)
"""The first that converts to and from fp8 (e4m3), as the kernels do."""

TOKENS: Final = 16
"""That are run for the error."""

STRIDE: Final = 7919
"""Between two of their ids."""


def check_kv_dtype(kv_dtype: str, device: torch.device, *, elsewhere: bool = False) -> None:
    """Raise InvalidRequest where ``--kv-dtype`` cannot be had on ``device``, before a model is loaded. ``elsewhere``:
    that is not in this machine, and taken to be able to."""
    if kv_dtype == "int8" and device.type != "cpu":
        raise InvalidRequest(f"kv_dtype int8 needs a CPU, not {device.type}; use fp8", field="kv_dtype")
    if kv_dtype == "fp8" and device.type != "cuda":
        raise InvalidRequest(f"kv_dtype fp8 needs CUDA, not {device.type}; use int8", field="kv_dtype")
    if kv_dtype == "fp8" and not elsewhere:
        capability = torch.cuda.get_device_capability(device)
        if capability < FP8_CAPABILITY:
            found, least = (".".join(map(str, each)) for each in (capability, FP8_CAPABILITY))
            raise InvalidRequest(f"kv_dtype fp8 needs compute capability {least}, not {found}", field="kv_dtype")


def cache_layers(layers: Sequence[AttentionSpec], dtype: torch.dtype, kv_dtype: str) -> list[CacheSpec]:
    """What each of the layers of a model in ``dtype`` keeps of a token. Raises InvalidRequest where its heads cannot be
    rounded."""
    if kv_dtype in ROUNDED:
        for spec in layers:
            if spec.head_dim % SCALE_BYTES:
                raise InvalidRequest(
                    f"a cache in {kv_dtype} needs heads of a multiple of {SCALE_BYTES}, not of {spec.head_dim}",
                    field="kv_dtype",
                )
        dtype = ROUNDED[kv_dtype]
    return [CacheSpec(spec.kv_heads, row_width(spec.head_dim, dtype), dtype) for spec in layers]


def rounding_error(
    model: Model, attention: AttentionBackend, store: KvStore, max_context: int
) -> tuple[float, float, int]:
    """Root mean square of what rounding changes of keys and of values, relative to them, over all layers and so many
    tokens. They are written to the first blocks of ``store``, which is one of `eight_bits` and not in use yet."""
    blocks, size = store.keys[0].shape[:2]
    count = min(TOKENS, (blocks - 1) * size, max_context)
    geometry = BatchGeometry.build(size, [0], [count], [np.arange(1, 1 - (-count // size), dtype=np.int32)])
    device = store.keys[0].device
    plan, slots = attention.plan(geometry), torch.from_numpy(geometry.slots).to(device)
    squares = torch.zeros((2, 2), dtype=torch.float64, device=device)

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attention.write(layer, slots, key, value)
        for row, cached, exact in zip(squares, (store.keys, store.values), (key, value), strict=True):
            kept = from_rows(cached[layer].flatten(0, 1)[slots], torch.float32)
            row[0] += (kept - exact).square().sum()
            row[1] += exact.float().square().sum()
        return attention.attend(layer, query, plan)

    vocab = model.info("").vocab_size
    tokens = torch.arange(count) * STRIDE % vocab
    model.forward(StepInputs(tokens.to(device), torch.from_numpy(geometry.positions).to(device)), attend)
    keys, values = (squares[:, 0] / squares[:, 1].clamp_min(1e-300)).sqrt().tolist()
    return keys, values, count
