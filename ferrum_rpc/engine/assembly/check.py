"""Run a few tokens at the start: is the model computed correctly, and what error does an 8-bit cache add?

A model of transformers runs in two pieces over our cache and attention, and in one by transformers with its own
attention. This refuses whatever the description of a family did not show, for example a head that does more than
multiply.

The error of quantized keys and values depends on the model: keys with a few large channels lose more than others. So
the log reports the error with the choice, as it does for 8-bit weights.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from ferrum_rpc.attention.backend import AttentionBackend
from ferrum_rpc.attention.eight_bits import from_rows
from ferrum_rpc.attention.geometry import BatchGeometry
from ferrum_rpc.core import OutputSpec, Positions, Span
from ferrum_rpc.device import check_device
from ferrum_rpc.engine.compute import Compute
from ferrum_rpc.errors import ExecutorError, InvalidRequest, NotSupported
from ferrum_rpc.kv.store import KvStore
from ferrum_rpc.models.base import Model, StepInputs
from ferrum_rpc.models.hf.describe import first_line
from ferrum_rpc.models.hf.model import HfModel

TOKENS: Final = 12
CUT: Final = 7
STRIDE: Final = 7919
"""Between two of their ids."""

TOLERANCES: Final = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.3}
"""Largest error of the median row of a piece, in standard deviations of the logits. The median is used because rounding
may send a token of a row or two to another expert. A wrong position, mask or scale exceeds this in every family."""


TOLERANCE_ROUNDED: Final = 0.3
"""The same with an 8-bit cache."""

ROUNDED_TOKENS: Final = 16
"""Number of tokens that measure the quantization error."""


def check_parity(model: HfModel, compute: Compute, store: KvStore, max_context: int) -> tuple[str, str]:
    """Returns the result and its reason for the log. Writes to the first blocks of a store that is not in use yet.
    Raises NotSupported if the logits differ, and InvalidRequest if a step fails."""
    try:
        count, errors = _errors(model, compute, store, max_context)
    except (ExecutorError, torch.AcceleratorError):
        raise
    except Exception as error:  # what a configuration may still be wrong in, once there are numbers
        check_device()
        message = f"{model.spec.architecture}: its first step failed: {first_line(error)}"
        raise InvalidRequest(message, field="model") from error
    tolerance = TOLERANCES[model.dtype]
    if store.keys[0].dtype != model.dtype:  # rounded; an error of its own, which the log has
        tolerance = TOLERANCE_ROUNDED
    if not all(each <= tolerance for each in errors):  # one that is no number among them
        raise NotSupported(
            f"{model.spec.architecture} cannot be served through transformers: over a paged cache its logits of "
            f"{count} tokens differ from its own by {max(errors):.2g} standard deviations, more than {tolerance:g}",
            field="architectures",
        )
    reason = f"over the cache as alone: the logits of {count} tokens differ by {max(errors):.1e} standard deviations"
    return "parity", reason


def _errors(model: HfModel, compute: Compute, store: KvStore, max_context: int) -> tuple[int, list[float]]:
    """Returns the number of tokens and the errors of their pieces."""
    blocks, size = store.keys[0].shape[:2]
    count = min(TOKENS, (blocks - 1) * size, max_context)
    tokens = np.arange(1, 1 + count * STRIDE, STRIDE) % model.spec.vocab_size
    ids, positions = compute.to_device(tokens, np.arange(count))
    expected = model.plain_logits(StepInputs(ids, positions))
    table = np.arange(1, 1 - (-count // size), dtype=np.int32)
    errors = []
    for start, end in ((0, min(CUT, count)), (min(CUT, count), count)):
        if start < end:
            span = Span(0, tokens[start:end].astype(np.int32), start, OutputSpec(Positions.NONE))
            geometry = BatchGeometry.build(size, [start], [end - start], [table])
            rows = model.logits(compute.forward([span], geometry)) - expected[start:end]
            errors.append(float(rows.square().mean(-1).sqrt().median() / expected.std().clamp_min(1e-30)))
    return count, errors


def rounding_error(
    model: Model, attention: AttentionBackend, store: KvStore, max_context: int
) -> tuple[float, float, int]:
    """Relative root mean square error of quantized keys and of values, over all layers and ``tokens`` tokens. Writes to
    the first blocks of ``store``, which is one of `eight_bits` and not in use yet."""
    blocks, size = store.keys[0].shape[:2]
    count = min(ROUNDED_TOKENS, (blocks - 1) * size, max_context)
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
