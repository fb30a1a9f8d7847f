"""A gate whose inputs are cut off: the activation of gpt-oss's experts."""

from __future__ import annotations

from typing import NamedTuple


class Clamped(NamedTuple):
    """x * sigmoid(``slope`` * x) * (1 + up), where x is the gate, at most ``limit``, and up is cut off at both ends of
    -``limit`` .. ``limit``."""

    limit: float
    slope: float
