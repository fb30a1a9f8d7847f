"""Experts: an MLP of many parts, some of which compute a row, beside a part that computes every row.

The checkpoint's names are those of DeepSeek V2 and V3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ferrum_rpc.models.matrices import Channels, Floats, Matrix


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
    """``count`` experts of ``inner`` channels, with gates. The part that computes every row is as ``shared`` of
    them."""

    hidden: int
    inner: int
    activation: str
    count: int
    shared: int
    routing: Routing
    gated: bool = True

    def matrices(self) -> tuple[Matrix, Matrix]:
        """Of the part that computes every row."""
        return self._pair("", "mlp.shared_experts", self.shared * self.inner, adaptable=True)

    def others(self) -> tuple[Matrix, ...]:
        """What scores experts, and their matrices."""
        experts = [
            each
            for index in range(self.count)
            for each in self._pair(f"{index}.", f"mlp.experts.{index}", self.inner, adaptable=False)
        ]
        scores = Channels(self.count), Channels(self.hidden)
        return (Matrix("router", scores[:1], scores[1], ("mlp.gate",), adaptable=False, apart=True), *experts)

    def floats(self) -> tuple[Floats, ...]:
        """The biases of the choice."""
        if not self.routing.biased:
            return ()
        return (Floats("choice", "mlp.gate.e_score_correction_bias", (self.count,)),)

    def share(self, ranks: int) -> Experts:
        """Itself: ``ranks`` is 1 (`obstacle`)."""
        return self

    def obstacle(self, ranks: int) -> str:
        """Why so many ranks cannot share it; empty if they can."""
        return "its experts cannot be shared yet" if ranks > 1 else ""

    def _pair(self, role: str, name: str, inner: int, *, adaptable: bool) -> tuple[Matrix, Matrix]:
        """Gate and up side by side; down."""
        hidden, width = Channels(self.hidden), Channels(inner)
        names = f"{name}.gate_proj", f"{name}.up_proj"
        return (
            Matrix(f"{role}gate_up", (width, width), hidden, names, adaptable=adaptable),
            Matrix(f"{role}down", (hidden,), width, (f"{name}.down_proj",), adaptable=adaptable),
        )
