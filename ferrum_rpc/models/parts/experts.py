"""Experts: an MLP of many parts, some of which compute a row, perhaps beside a part that computes every row.

The checkpoint's names are those that the experts of most families have in common, unless a field says other ones. Ranks
share the channels of every expert, so each adds what its part of the same experts finds, in the same order; the first
rank alone adds the biases of what they find. What scores experts is whole on each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ferrum_rpc.models.matrices import Channels, Cut, Floats, Matrix
from ferrum_rpc.models.parts.clamped import Clamped


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
    """``count`` experts of ``inner`` channels, with gates. The part that computes every row has ``shared`` channels, or
    0: there is none; ``shared_name`` is its module. ``shared_gate``: the module of one row of weights; the answer of
    that part is multiplied with the sigmoid of its product. ``router_name``: the module that scores experts. ``names``:
    an expert's modules of gate and up, or of both, whose rows take turns. ``bias``: router and experts have biases."""

    hidden: int
    inner: int
    activation: str | Clamped
    count: int
    shared: int
    routing: Routing
    shared_name: str = "mlp.shared_experts"
    shared_gate: str | None = None
    gated: bool = True
    router_name: str = "mlp.gate"
    names: tuple[str, ...] = ("gate_proj", "up_proj")
    bias: bool = False

    def matrices(self) -> tuple[Matrix, ...]:
        """Of the part that computes every row: gate and up side by side; down."""
        if not self.shared:
            return ()
        names = tuple(f"{self.shared_name}.{each}_proj" for each in ("gate", "up"))
        hidden, width = Channels(self.hidden), Channels(self.shared)
        return (
            Matrix("gate_up", (width, width), hidden, names, cut=Cut.ROWS),
            Matrix("down", (hidden,), width, (f"{self.shared_name}.down_proj",), cut=Cut.COLUMNS),
        )

    def others(self) -> tuple[Matrix, ...]:
        """The router, and the matrices of experts."""
        return self.router(), *(each for index in range(self.count) for each in self.expert(index))

    def expert(self, index: int) -> tuple[Matrix, Matrix]:
        """Of one expert: gate and up side by side; down."""
        hidden, width, module = Channels(self.hidden), Channels(self.inner), f"mlp.experts.{index}"
        names = tuple(f"{module}.{each}" for each in self.names)
        gate_up = Matrix(
            f"{index}.gate_up",
            (width, width),
            hidden,
            names,
            self.bias,
            Cut.ROWS,
            adaptable=False,
            interleaved=(2,) if len(names) == 1 else (),
        )
        down = f"{module}.down_proj"
        return gate_up, Matrix(f"{index}.down", (hidden,), width, (down,), self.bias, Cut.COLUMNS, adaptable=False)

    def router(self) -> Matrix:
        """What scores experts, and makes the gate of the part that computes every row."""
        heights, names = [self.count], [self.router_name]
        if self.shared_gate is not None:
            heights, names = [*heights, 1], [*names, self.shared_gate]
        rows = tuple(map(Channels, heights))
        return Matrix("router", rows, Channels(self.hidden), tuple(names), self.bias, adaptable=False, apart=True)

    def floats(self) -> tuple[Floats, ...]:
        """The biases of the choice."""
        if not self.routing.biased:
            return ()
        return (Floats("choice", "mlp.gate.e_score_correction_bias", (self.count,)),)

    @property
    def widths(self) -> tuple[int, ...]:
        """Of the rows that the activation makes."""
        return (self.inner, self.shared) if self.shared else (self.inner,)

    def share(self, ranks: int) -> Experts:
        """What each of so many ranks has."""
        return replace(self, inner=self.inner // ranks, shared=self.shared // ranks)

    def obstacle(self, ranks: int) -> str:
        """Why so many ranks cannot share it; empty if they can."""
        if self.inner % ranks:
            return f"its experts' {self.inner} channels must be a multiple of it"
        return f"its shared experts' {self.shared} channels must be a multiple of it" if self.shared % ranks else ""
