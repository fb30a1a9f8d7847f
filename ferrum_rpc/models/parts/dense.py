"""An MLP that computes every row."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ferrum_rpc.models.matrices import Channels, Cut, Matrix
from ferrum_rpc.models.parts.clamped import Clamped


@dataclass(frozen=True, slots=True)
class Dense:
    """down(activation(gate x) * (up x)), or without a gate down(activation(up x)). ``names``: the checkpoint's modules
    of gate and up, or of both."""

    hidden: int
    inner: int
    activation: str | Clamped
    names: tuple[str, ...]
    down: str
    gated: bool = True
    bias: bool = False

    def matrices(self) -> tuple[Matrix, Matrix]:
        """Gate and up side by side; down."""
        hidden, inner = Channels(self.hidden), Channels(self.inner)
        return (
            Matrix("gate_up", (inner,) * (1 + self.gated), hidden, self.names, self.bias, Cut.ROWS),
            Matrix("down", (hidden,), inner, (self.down,), self.bias, Cut.COLUMNS),
        )

    @property
    def widths(self) -> tuple[int, ...]:
        """Of the rows that the activation makes."""
        return (self.inner,)

    def share(self, ranks: int) -> Dense:
        """What each of so many ranks has."""
        return replace(self, inner=self.inner // ranks)

    def obstacle(self, ranks: int) -> str:
        """Why so many ranks cannot share it; empty if they can."""
        return f"intermediate_size {self.inner} must be a multiple of it" if self.inner % ranks else ""
