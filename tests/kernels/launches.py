"""Which kernels are launched, in which grids, and which variants of them Triton compiles.

Triton compiles a kernel anew for other constants, other types and pointers that are not aligned to 16 bytes, and where
an integer becomes 1 or a multiple of 16.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

Variant = tuple[Any, ...]


class Launches:
    """``made``: the names and grids of all launches from now on; ``variants``: the names first. Not ``carried_out``:
    nothing is computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, carried_out: bool = True) -> None:
        self.made: list[tuple[str, Any]] = []
        self.variants: set[Variant] = set()
        for kind in (InterpretedFunction, JITFunction):
            monkeypatch.setattr(kind, "run", self._noting(kind.run if carried_out else None))

    def _noting(self, carry_out: Any) -> Any:
        def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
            given = getattr(kernel, "kwargs", vars(kernel))  # interpreted, compiled
            free, anywhere = (
                set(given.get(name) or ()) for name in ("do_not_specialize", "do_not_specialize_on_alignment")
            )
            names = [*inspect.signature(kernel.fn).parameters]
            key = [
                (name, _kind_of(each, name in free, name in anywhere))
                for name, each in zip(names, arguments, strict=False)
            ]
            self.made.append((kernel.fn.__name__, grid))
            self.variants.add((kernel.fn.__name__, *key, *sorted(constants.items())))
            return carry_out and carry_out(kernel, *arguments, grid=grid, warmup=warmup, **constants)

        return run


def _kind_of(argument: Any, free: bool, anywhere: bool) -> Any:
    if isinstance(argument, Tensor):
        return argument.dtype, anywhere or argument.data_ptr() % 16 == 0
    if isinstance(argument, int) and not free:
        return argument == 1, argument % 16 == 0
    return type(argument)
