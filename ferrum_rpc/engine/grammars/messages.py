"""What the engine and the process of a grammar send each other: arrays of int64, each a message of a socket that keeps
their bounds. Masks are in memory that both share.

engine -> grammar   (kind, bytes of its text) first: the text is where the masks will be. Then (number of texts that
                    have ended, these, and for each ask the fields of `Ask` and its tokens)
grammar -> engine   (process id) first; then `COMPILED`; then the consumed tokens of each ask, in their order. In place
                    of any of the latter two may be `INVALID` or `TOO_COMPLEX`: the rest of this message is the error's,
                    in UTF-8 with zeros behind it, and the state of the text is gone

The steps of a run wait for these messages: they are arrays of one type, which take less time than pickles or structures
in a process whose code has left the processor's caches since the last step. What is read of the masks is what was
written before the message was sent: on every processor, the calls of the socket order the memory of both processes.
"""

from __future__ import annotations

import mmap
import socket
from array import array
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

READY: Final = b"ready"
"""What the first process sends when it has loaded the tokenizer; anything else is an error."""

MASK_ROWS: Final = 1024
"""Masks in the memory that the engine shares with a process. Memory is what the largest request touches."""

NUMBERS: Final = 8192
"""Numbers of a message, at most. The system sends messages of three times this size by default."""

NO_TEXT: Final = -1

COMPILED: Final = 0
INVALID: Final = -1
TOO_COMPLEX: Final = -2

_NUMBER: Final = 8


class Ask(NamedTuple):
    """A request for ``text``: go back to its first ``keep`` tokens and append the ``size`` that follow, as far as they
    are allowed. A text without a state begins with that of ``source``, if that is not `NO_TEXT`. The masks behind
    ``first_mask`` of these tokens and of more go to the rows from ``row`` on, unless fewer are allowed."""

    text: int
    source: int
    keep: int
    size: int
    first_mask: int
    row: int


def receive(connected: socket.socket) -> array[int]:
    """The next message; empty: the other end is gone. Raises as `socket.recv`."""
    return array("q", connected.recv(NUMBERS * _NUMBER))


def error(kind: int, message: str) -> array[int]:
    """What ends a message with an error."""
    data = message.encode(errors="replace")
    return array("q", [kind]) + array("q", data + bytes(-len(data) % _NUMBER))


def error_of(rest: array[int]) -> str:
    """The message of an error, of which its kind is not a part."""
    return rest.tobytes().rstrip(b"\0").decode(errors="replace")


def masks_in(memory: mmap.mmap, words: int) -> npt.NDArray[np.int32]:
    """The masks in memory that both processes have, int32 [MASK_ROWS, words]."""
    return np.frombuffer(memory, np.int32, MASK_ROWS * words).reshape(MASK_ROWS, words)
