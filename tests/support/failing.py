"""Methods that raise what nobody expects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


class Injected(MemoryError):
    """Nobody handles it on purpose."""


@contextmanager
def failing(
    owner: Any, name: str, times: float = 1, *, of: Callable[..., bool] = lambda *_: True, late: bool = False
) -> Iterator[None]:
    """``owner.name`` raises so many times, where ``of`` its arguments is true, and otherwise does what it does; a
    coroutine function's raises before there is a coroutine. ``late``: after its work. Fails where it was never reached.

    A plain function stands in its place: a mock of a coroutine function would not await what it stands for.
    """
    original, failed = getattr(owner, name), 0

    def run(*arguments: Any, **named: Any) -> Any:
        nonlocal failed
        fails = failed < times and of(*arguments)
        failed += fails
        if fails and not late:
            raise Injected(name)
        result = original(*arguments, **named)
        if fails:
            raise Injected(name)
        return result

    with mock.patch.object(owner, name, run):
        yield
    assert failed, f"{name} was never reached"
