"""Calls with an unknown outcome, and the request ids under which they may be made again. No IO."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final

from ferrum_rpc.client.retry import REFUSED_BEFORE_RUNNING, Deadline, fate_unknown
from ferrum_rpc.core import HandleRef

Repeat = Callable[[Deadline], Awaitable[list[HandleRef]]]
"""Sends a call of unknown outcome again; returns the handles of the sequences that it created."""

_IDS_AT_ONCE: Final = 64

_ids: Final[list[str]] = []
os.register_at_fork(after_in_child=_ids.clear)


def new_request_id() -> str:
    """128 random bits in hex, as in a UUID, drawn from the system `_IDS_AT_ONCE` at a time. For all threads."""
    try:
        return _ids.pop()
    except IndexError:
        drawn = os.urandom(16 * _IDS_AT_ONCE).hex()
        _ids.extend([drawn[at : at + 32] for at in range(32, len(drawn), 32)])
        return drawn[:32]


@dataclass(frozen=True, slots=True, eq=False)
class UnknownOutcome:
    """A call that may be made again under the same request id: its outcome is ``unknown``, or it was refused before it
    ran. ``repeat`` is set if it may have created sequences to which the client has no handle."""

    content: tuple[object, ...]
    request_id: str
    repeat: Repeat | None = None
    unknown: bool = True


def settled(known: UnknownOutcome | None, call: UnknownOutcome, error: BaseException) -> UnknownOutcome | None:
    """The unknown outcome after a ``call`` failed; ``known`` is the one before it.

    A refusal before the call ran concerns this attempt only: the call keeps its id, and is not repeated merely to
    release what it creates. Any other refusal settles the call, and no other one.
    """
    if fate_unknown(error):
        return call
    if isinstance(error, REFUSED_BEFORE_RUNNING):
        return known if known is not None and known.unknown else replace(call, repeat=None, unknown=False)
    return None if known is not None and known.request_id == call.request_id else known
