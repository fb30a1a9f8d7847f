"""How OpenMP's threads wait between two pieces of work: a moment awake, then asleep.

libgomp's own default spins for milliseconds. A spinning thread takes the core that the event loop, or whoever else,
needs, and then the thread that it waits for: with a second busy process a decode step of 30 ms took 230 to 500. Asleep
at once, a step of 200 pieces pays for 200 wake-ups: 48 ms instead of 27. A moment is a little more than what lies
between two pieces of a step, and about what a wake-up costs.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Final

SPIN_VARIABLE: Final = "GOMP_SPINCOUNT"
SPINS: Final = 4000
"""Rounds of libgomp's loop, some 15 ns each."""

DECIDING: Final = ("OMP_WAIT_POLICY", SPIN_VARIABLE)
"""Whoever sets one of these decides otherwise."""


def wait_briefly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Must be called before torch is loaded: the runtime reads its variables once."""
    if not any(name in environment for name in DECIDING):
        environment[SPIN_VARIABLE] = str(SPINS)


def waits(environment: MutableMapping[str, str] = os.environ) -> str:
    """How threads wait in this process, for a record."""
    return ", ".join(f"{name}={environment[name]}" for name in DECIDING if name in environment) or "libgomp's default"
