"""`python -m benchmarks NAME [options]` runs a benchmark; without a name it lists them."""

from __future__ import annotations

import importlib
import sys
from typing import Final

NAMES: Final = (
    *("peers", "suite", "protocol", "trips", "streams", "grammars", "quantized"),
    *("memory", "prefix", "transfer", "ranks", "states", "report"),
)
"""Each is a module with a ``BENCHMARK``, or with a program that measures or writes something of its own."""


def main() -> None:
    """Run one of them."""
    name, *argv = sys.argv[1:] or [""]
    if name not in NAMES:
        sys.exit(f"python -m benchmarks NAME [--help]; NAME is one of {', '.join(NAMES)}")
    module = importlib.import_module(f"benchmarks.{name}")
    (module.BENCHMARK.main if hasattr(module, "BENCHMARK") else module.main)(argv)


if __name__ == "__main__":
    main()
