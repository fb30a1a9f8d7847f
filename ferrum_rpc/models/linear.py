"""Matrix products with resident weights, and the choice of how they are held.

On a CPU the layout of a weight decides the speed: oneDNN reads a weight that it packed once at 31 GB/s on one core
where ``F.linear`` on the plain one reaches 15 (bf16, one row), and makes eight float32 rows 2.6 times as fast
(16.5 against 43 ms). The packing entry points are those that torch's own compiler uses; they are not public, so a probe
runs them at start, compares the product with ``F.linear``, and falls back with a reason.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ferrum_rpc.errors import InvalidRequest

Linear = Callable[[Tensor], Tensor]
"""x [..., in] -> x W^T + b [..., out], in the weight's dtype."""

LinearFactory = Callable[[Tensor, Tensor | None], Linear]
"""(weight [out, in], bias [out] or None) -> Linear. The weight may be dropped by the caller afterwards."""

AUTO = "auto"


class PlainLinear:
    """The weight as it came from the checkpoint. Any device and dtype."""

    __slots__ = ("_bias", "_weight")
    name = "plain"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return F.linear(x, self._weight, self._bias)


class PackedLinear:
    """The weight in oneDNN's blocked layout: one layout serves every number of rows. CPU only."""

    __slots__ = ("_bias", "_weight")
    name = "onednn"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return product


def select_linear(device: torch.device, dtype: torch.dtype, requested: str = AUTO) -> tuple[str, str, LinearFactory]:
    """``(name, reason, factory)`` for this device and dtype. ``requested``: ``auto``, ``plain`` or ``onednn``.

    Raises InvalidRequest for another name, or for ``onednn`` where the probe fails.
    """
    if requested not in (AUTO, PlainLinear.name, PackedLinear.name):
        names = ", ".join((AUTO, PlainLinear.name, PackedLinear.name))
        raise InvalidRequest(f"unknown linear backend {requested!r}; there are: {names}", field="linear_backend")
    if requested == PlainLinear.name:
        return PlainLinear.name, "requested", PlainLinear
    obstacle = _packing_obstacle(device, dtype)
    if obstacle is None:
        return PackedLinear.name, "oneDNN packs this dtype and the packed product agrees", PackedLinear
    if requested == PackedLinear.name:
        raise InvalidRequest(f"linear backend {requested!r} is not available: {obstacle}", field="linear_backend")
    return PlainLinear.name, obstacle, PlainLinear


def _packing_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why packed weights cannot be used, or None if they can."""
    if device.type != "cpu":
        return f"weights are packed on a CPU only, not on {device.type}"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"oneDNN does not pack {dtype}"
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((48, 64), generator=generator).to(dtype)
    bias = torch.randn(48, generator=generator).to(dtype)
    tolerance = 4 * torch.finfo(dtype).eps * 64**0.5
    try:
        packed = PackedLinear(weight, bias)
        for rows in (1, 7):
            x = torch.randn((rows, 64), generator=generator).to(dtype)
            expected = F.linear(x.double(), weight.double(), bias.double())
            if not torch.allclose(packed(x).double(), expected, rtol=tolerance, atol=tolerance):
                return "the packed product disagrees with F.linear"
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        return f"oneDNN packing is not available: {str(error).splitlines()[0][:120]}"
    return None
