"""Which event loop serves: uvloop where it is installed, asyncio's own otherwise.

A call of grpc.aio takes several turns of the loop, and its completion queue wakes it through a socket each time.
uvloop's turn costs about half: a flood of reset streams, which is little else, takes 70 us a stream instead of 140.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable
from typing import Final, Literal, NamedTuple

from ferrum_rpc.usage import ConfigError

Choice = Literal["auto", "asyncio", "uvloop"]

UVLOOP: Final = "uvloop"


class Loop(NamedTuple):
    """A choice, for a log line too."""

    name: str
    reason: str
    make: Callable[[], asyncio.AbstractEventLoop]


def choose_loop(choice: Choice) -> Loop:
    """Raises `ConfigError` where uvloop is asked for and not there."""
    there = importlib.util.find_spec(UVLOOP) is not None
    if choice == UVLOOP and not there:
        raise ConfigError("event_loop: uvloop is not installed; pip install 'ferrum-rpc[uvloop]', or say auto")
    if choice == "asyncio" or not there:
        return Loop("asyncio", "uvloop is not installed" if choice == "auto" else "asked for", asyncio.new_event_loop)
    import uvloop

    return Loop(UVLOOP, "it is installed" if choice == "auto" else "asked for", uvloop.new_event_loop)
