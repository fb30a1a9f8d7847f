"""Experts: which of them compute a row, and the sum of their answers.

Rows are sorted by expert, so that each multiplies its rows at once. A row's answers are added in the order of its
experts, in float32 (or wider), and rounded once, with the part that computes every row if there is one. Sums and
products are operations of their own, and no function of torch is used whose bits depend on a number's place in a
tensor. So a row's bits do not depend on its neighbours where products do not. Where products and gates are our kernels
all experts are one call (``experts.c``), which computes the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ferrum_rpc.models.fused_ops import FusedOps, NativeFusedOps
from ferrum_rpc.models.linear import Linear, LinearFactory
from ferrum_rpc.models.native_linear import NativeLinear, PairFactory, PanelFactory
from ferrum_rpc.models.parts.experts import Experts, Routing
from ferrum_rpc.native import library

TOGETHER: Final = 1024
"""As in experts.c: rows that experts compute at a time."""


class ExpertRouter:
    """Scores of experts before they are normed, and the gate of the part that computes every row before its sigmoid,
    if that has one. The ``weight`` [experts (+ 1), hidden] and the ``bias`` have the model's dtype, and products are
    float32 (or wider). ``factory``: that of the model's other matrices."""

    def __init__(self, weight: Tensor, factory: LinearFactory, bias: Tensor | None = None) -> None:
        self._product: NativeLinear | None = None
        if isinstance(factory, PanelFactory):
            self._product = PairFactory(factory.space)(weight, bias)
        else:
            wide = torch.promote_types(weight.dtype, torch.float32)
            self._weight, self._bias = weight.to(wide), None if bias is None else bias.to(wide)

    @staticmethod
    def nbytes(part: Experts, factory: LinearFactory, dtype: torch.dtype) -> int:
        """Bytes that it holds."""
        router = part.router()
        rows, width = router.shape
        if isinstance(factory, PanelFactory):
            return PairFactory.nbytes(rows, width, dtype, bias=router.bias)
        return rows * (width + router.bias) * max(4, dtype.itemsize)

    @property
    def native(self) -> bool:
        """Whether the product is our kernel's."""
        return self._product is not None

    def __call__(self, rows: Tensor) -> Tensor:
        """[T, experts (+ 1)] of ``rows`` [T, hidden]."""
        if self._product is not None:
            return self._product.exact(rows)
        return F.linear(rows.to(self._weight.dtype), self._weight, self._bias)


class ExpertRows:
    """The experts of a layer: for each the products ``gate_ups`` and ``downs``. ``choice``: the biases of the choice
    [experts], if there are any."""

    def __init__(
        self,
        part: Experts,
        router: ExpertRouter,
        choice: Tensor | None,
        gate_ups: Sequence[Linear],
        downs: Sequence[Linear],
    ) -> None:
        self._routing, self._router, self._choice = part.routing, router, choice
        self._gated = part.shared_gate is not None
        self._gate_ups, self._downs = gate_ups, downs
        native = [each for each in (*gate_ups, *downs) if isinstance(each, NativeLinear)]
        self._in_c = NativeExperts(native, part.routing.chosen) if len(native) == 2 * len(downs) else None

    @property
    def native(self) -> bool:
        """Whether a row's bits do not depend on its neighbours."""
        return self._router.native and self._in_c is not None

    def add(self, rows: Tensor, shared: Tensor | None, ops: FusedOps) -> Tensor:
        """Their answers for ``rows`` [T, hidden], and ``shared`` [T, hidden], which every row has, if there is such a
        part; the same shape."""
        scores, gate = self._router(rows).tensor_split([len(self._downs)], 1)
        experts, weights = route(scores, self._routing, self._choice)
        if self._in_c is not None and isinstance(ops, NativeFusedOps):
            gates = _sigmoid(gate).contiguous() if self._gated else None
            return self._in_c(rows, experts, weights, shared, gates, ops)
        chosen = experts.shape[1]
        order = experts.flatten().argsort(stable=True)
        sorted_rows = rows.index_select(0, order // chosen)
        answers, first = torch.empty_like(sorted_rows), 0
        for expert, count in enumerate(experts.flatten().bincount(minlength=len(self._downs)).tolist()):
            if count:
                own = slice(first, first + count)
                gated = ops.gate(self._gate_ups[expert](sorted_rows[own]))
                answers[order[own]] = self._downs[expert](gated)
                first += count
        each = answers.view(len(rows), chosen, -1)
        total = each[:, 0] * weights[:, :1]
        for place in range(1, chosen):
            total += each[:, place] * weights[:, place : place + 1]
        if shared is not None:
            total += shared * _sigmoid(gate) if self._gated else shared
        return total.to(rows.dtype)


class NativeExperts:
    """Experts in one call. ``products``: those to gate and up, then those back."""

    def __init__(self, products: Sequence[NativeLinear], chosen: int) -> None:
        self._space, self._chosen, self._count = products[0].space, chosen, len(products) // 2
        self._addresses = (ctypes.c_void_p * len(products))(*(each.address for each in products))
        self._products = products

    def __call__(  # noqa: PLR0917 - as `Layer`'s calls
        self,
        rows: Tensor,
        experts: Tensor,
        weights: Tensor,
        shared: Tensor | None,
        gate: Tensor | None,
        ops: NativeFusedOps,
    ) -> Tensor:
        """As `ExpertRows.add`: of bfloat16 ``rows`` [T, hidden] what their ``experts`` int64 [T, chosen] find, times
        ``weights`` float32, and ``shared`` if there is such a part, times ``gate`` [T, 1] if there is one."""
        first = ctypes.addressof(self._addresses)
        layer = library.ExpertLayer(
            first,
            first + self._count * ctypes.sizeof(ctypes.c_void_p),
            ctypes.addressof(ops.kind),
            self._count,
            self._chosen,
            ops.lanes,
        )
        found = torch.empty_like(rows)
        status = self._space.library.ferrum_experts(
            self._space.experts,
            ctypes.addressof(layer),
            rows.data_ptr(),
            len(rows),
            experts.data_ptr(),
            weights.data_ptr(),
            None if shared is None else shared.data_ptr(),
            None if gate is None else gate.data_ptr(),
            found.data_ptr(),
            torch.get_num_threads(),
        )
        if status:
            raise MemoryError("no memory for the buffers of experts")
        return found


def route(logits: Tensor, routing: Routing, choice: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of each row of ``logits`` [T, experts] the experts that compute it, int64 [T, chosen] in ascending order, and
    what their answers are multiplied with [T, chosen], in the dtype of the logits."""
    scores = logits.softmax(-1) if routing.scores == "softmax" else _sigmoid(logits)
    preferred = scores if choice is None else scores + choice
    if routing.groups > 1:
        groups = preferred.view(len(logits), routing.groups, -1)
        if routing.scores == "softmax":
            best = groups.amax(-1)
        else:
            first, second = groups.topk(2, -1).values.unbind(-1)
            best = first + second
        closed = torch.ones_like(best, dtype=torch.bool)
        closed.scatter_(1, best.topk(routing.open_groups, -1).indices, value=False)
        preferred = groups.masked_fill(closed[..., None], -torch.inf).flatten(1)
    experts = preferred.topk(routing.chosen, -1).indices.sort(-1).values
    weights = scores.gather(1, experts)
    if routing.normed:
        total = weights[:, :1].clone()
        for place in range(1, routing.chosen):
            total += weights[:, place : place + 1]
        weights = weights / (total + 1e-20)
    return experts, weights * routing.scale


def _sigmoid(rows: Tensor) -> Tensor:
    """Of each number by itself: bits of `torch.sigmoid` depend on its place."""
    return torch.stack((rows, torch.zeros_like(rows)), -1).softmax(-1)[..., 0]
