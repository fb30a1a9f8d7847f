"""Waits inside a library, which end neither with a signal nor with the rank that is waited for: a thread has them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def in_a_thread(call: Callable[[], Result]) -> Future[Result]:
    """What ``call`` comes to. Whoever waits for it no longer leaves the thread behind; it keeps no process alive."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="ferrum-ranks-wait", daemon=True).start()
    return future
