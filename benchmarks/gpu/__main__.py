"""`python3 -m benchmarks.gpu`: the check. `... first-light`: everything, step by step. `... NAME [--rehearse]`: the
program of a step, which a rehearsal runs small and on a CPU.

First light runs with a bare Python, before any package of ours can be imported, so nothing else is imported here.
"""

from __future__ import annotations

import importlib
import sys
from typing import Final

PROGRAMS: Final = {
    **{"machine": "check", "serving": "serving", "attend": "attention"},
    **dict.fromkeys(("kernels", "states"), "kernel_times"),
}
"""By name, the module whose function of that name it is; such a function gives an exit status, or None."""


def main() -> int | None:
    """Run one of the programs; the exit status."""
    name, rest = "".join(sys.argv[1:2]), sys.argv[2:]
    if name == "first-light":
        from benchmarks.gpu.first_light import main as first_light

        return first_light(rest)
    if name in PROGRAMS:
        status: int | None = getattr(importlib.import_module(f"benchmarks.gpu.{PROGRAMS[name]}"), name)(
            rehearse="--rehearse" in rest
        )
        return status
    from benchmarks.gpu.check import main as check

    check(sys.argv[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
