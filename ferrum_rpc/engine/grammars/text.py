"""A sequence's text as its grammar's process is asked about it: what is wanted, and what the process has of it."""

from __future__ import annotations

from array import array

import numpy as np

from ferrum_rpc.core import MaskRows, TokenArray
from ferrum_rpc.errors import ExecutorError


class GrammarText:
    """The last request for masks of a text: of its ``tokens`` the first ``required`` must be allowed, and the masks of
    ``rows`` rows are wanted, which stand behind ``first_mask`` tokens and more. ``outcome``: these masks, of fewer rows
    where a later token is not allowed; or the refusal; None: it is not there yet.

    ``number``: its name in the process. ``known``: the leading tokens that its state there has too, as soon as what was
    sent is answered. ``origin``: a text that may begin alike, from whose state that one can be copied. ``busy``: what
    was sent is not answered; ``stale``: and it was another request. ``tries``: how often the process ended at this
    request."""

    __slots__ = (
        *("busy", "first_mask", "key", "known", "number", "origin", "outcome"),
        *("required", "rows", "stale", "tokens", "tries"),
    )

    def __init__(self, number: int, key: bytes, origin: GrammarText | None) -> None:
        self.number, self.key, self.origin = number, key, origin
        self.tokens = array("i")
        self.required = self.first_mask = self.rows = self.known = self.tries = 0
        self.busy = self.stale = False
        self.outcome: MaskRows | ExecutorError | None = None

    def is_of(self, tokens: TokenArray, required: int, first_mask: int) -> bool:
        """Whether the last request was this."""
        return (self.required, self.first_mask) == (required, first_mask) and np.array_equal(self.tokens, tokens)

    def request(self, tokens: TokenArray, required: int, first_mask: int) -> None:
        """Another request, of ``tokens`` int32 [n]."""
        same = self.common(tokens)
        self.known = min(self.known, same)
        del self.tokens[same:]
        self.tokens.frombytes(tokens[same:].tobytes())
        self.required, self.first_mask, self.rows = required, first_mask, max(0, len(tokens) - first_mask + 1)
        self.outcome, self.tries, self.stale = None, 0, self.busy

    def append(self, token: int) -> None:
        """Another request: the mask behind one more token."""
        self.tokens.append(token)
        self.required = self.first_mask = len(self.tokens)
        self.rows = 1
        self.outcome, self.tries, self.stale = None, 0, self.busy

    def common(self, tokens: TokenArray) -> int:
        """How many of its leading tokens are those of ``tokens``."""
        both = min(len(self.tokens), len(tokens))
        differ = np.flatnonzero(np.asarray(self.tokens)[:both] != tokens[:both])
        return int(differ[0]) if differ.size else both

    def lose_state(self) -> None:
        """The process has no state of it any more, and answers nothing that was sent."""
        self.known, self.busy, self.stale = 0, False, False
