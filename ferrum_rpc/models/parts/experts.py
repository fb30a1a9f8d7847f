"""Experts: an MLP of many parts, some of which compute a row, beside a part that computes every row.

The checkpoint's names are those that the experts of DeepSeek V2 and V3, Qwen3-Next and Qwen3.5 have in common. Ranks
share the channels of every expert, so each adds what its part of the same experts finds, in the same order. What scores
experts is whole on each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ferrum_rpc.models.matrices import Channels, Cut, Floats, Matrix


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts compute a row. Each has a score: of the ``softmax`` over all, or its own ``sigmoid``. ``chosen``
    have the largest scores; with ``groups`` of neighbours only of the ``open_groups`` best. A group's score is the
    largest of its experts; of sigmoids the sum of the two largest. ``biased``: an expert is chosen by its score plus a
    bias. The answers are multiplied with the scores, ``normed``: divided by their sum, and with ``scale``."""

    scores: Literal["softmax", "sigmoid"]
    chosen: int
    groups: int = 1
    open_groups: int = 1
    biased: bool = False
    normed: bool = False
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Experts:
    """``count`` experts of ``inner`` channels, with gates. The part that computes every row has ``shared`` channels;
    ``shared_name`` is its module. ``shared_gate``: the module of one row of weights; the answer of that part is
    multiplied with the sigmoid of its product."""

    hidden: int
    inner: int
    activation: str
    count: int
    shared: int
    routing: Routing
    shared_name: str = "mlp.shared_experts"
    shared_gate: str | None = None
    gated: bool = True

    def matrices(self) -> tuple[Matrix, Matrix]:
        """Of the part that computes every row."""
        return self._pair("", self.shared_name, self.shared, adaptable=True)

    def others(self) -> tuple[Matrix, ...]:
        """The router, and the matrices of experts."""
        experts = [
            each
            for index in range(self.count)
            for each in self._pair(f"{index}.", f"mlp.experts.{index}", self.inner, adaptable=False)
        ]
        return self.router(), *experts

    def router(self) -> Matrix:
        """What scores experts, and makes the gate of the part that computes every row."""
        heights, names = [self.count], ["mlp.gate"]
        if self.shared_gate is not None:
            heights, names = [*heights, 1], [*names, self.shared_gate]
        rows = tuple(map(Channels, heights))
        return Matrix("router", rows, Channels(self.hidden), tuple(names), adaptable=False, apart=True)

    def floats(self) -> tuple[Floats, ...]:
        """The biases of the choice."""
        if not self.routing.biased:
            return ()
        return (Floats("choice", "mlp.gate.e_score_correction_bias", (self.count,)),)

    @property
    def widths(self) -> tuple[int, ...]:
        """Of the rows that the activation makes."""
        return self.inner, self.shared

    def share(self, ranks: int) -> Experts:
        """What each of so many ranks has."""
        return replace(self, inner=self.inner // ranks, shared=self.shared // ranks)

    def obstacle(self, ranks: int) -> str:
        """Why so many ranks cannot share it; empty if they can."""
        if self.inner % ranks:
            return f"moe_intermediate_size {self.inner} must be a multiple of it"
        return f"its shared experts' {self.shared} channels must be a multiple of it" if self.shared % ranks else ""

    def _pair(self, role: str, name: str, inner: int, *, adaptable: bool) -> tuple[Matrix, Matrix]:
        """Gate and up side by side; down."""
        hidden, width = Channels(self.hidden), Channels(inner)
        names = f"{name}.gate_proj", f"{name}.up_proj"
        return (
            Matrix(f"{role}gate_up", (width, width), hidden, names, cut=Cut.ROWS, adaptable=adaptable),
            Matrix(f"{role}down", (hidden,), width, (f"{name}.down_proj",), cut=Cut.COLUMNS, adaptable=adaptable),
        )
