"""`python3 -m benchmarks.gpu`: the check. `python3 -m benchmarks.gpu first-light`: everything, step by step.

First light runs with a bare Python, before any package of ours can be imported, so nothing else is imported here.
"""

from __future__ import annotations

import sys


def main() -> int:
    """Run one of the two programs."""
    if sys.argv[1:2] == ["first-light"]:
        from benchmarks.gpu.first_light import main as first_light

        return first_light(sys.argv[2:])
    from benchmarks.gpu.check import main as check

    check()
    return 0


if __name__ == "__main__":
    sys.exit(main())
