"""What the engine and the process of a grammar send each other.

engine -> grammar   a `Grammar`, first; then (a list of `Ask`s, the texts that have ended)
grammar -> engine   its process id, first; None when it is compiled, or the error (message, whether it is too
                    complex); then lists of answers to asks: (serial, consumed, words as bytes or None, such an error or
                    None)
"""

from __future__ import annotations

from typing import Final, NamedTuple

READY: Final = b"ready"
"""What the first process sends when it has loaded the tokenizer; anything else is an error."""

LOST: Final = -1
"""In place of the number of consumed tokens: the kept state has fewer tokens than the request assumes."""


class Ask(NamedTuple):
    """A request for masks of ``text``: see `matching.Texts.match`. ``tokens`` is int32, as bytes. In the order of their
    ``serial``."""

    serial: int
    text: int
    keep: int
    tokens: bytes
    required: int
    first_mask: int
