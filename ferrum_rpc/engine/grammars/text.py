"""A sequence's text as its grammar's process is asked about it: what is wanted, and what the process has of it."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ferrum_rpc.core import TokenArray
from ferrum_rpc.errors import ExecutorError

Words = npt.NDArray[np.int32]
"""Masks, int32 [rows, ceil(V / 32)]."""

NOT_SENT: Final = -1

_SPARE: Final = 64


class GrammarText:
    """The last request for masks of a text: of its ``tokens`` the first ``required`` must be allowed, and the masks of
    the rows behind ``first_mask`` tokens and of more are wanted. ``outcome``: these masks, of fewer rows where a later
    token is not allowed; or the refusal; None: it is not there yet.

    ``number``: its name in the process. ``known``: the leading tokens that are also those of its state there.
    ``origin``: a text that may begin alike, from whose state that one can be copied. ``kept``, ``sent``, ``row``: what
    was sent and is not answered goes from ``kept`` to ``sent`` tokens, and its masks to ``row``. ``stale``: it was
    another request. ``asked``: when (`time.monotonic`). ``tries``: how often the process ended at this request."""

    __slots__ = (
        "_same",
        "_tokens",
        "asked",
        "first_mask",
        "kept",
        "key",
        "known",
        "length",
        "number",
        "origin",
        "outcome",
        "required",
        "row",
        "sent",
        "stale",
        "tries",
    )

    def __init__(self, number: int, key: bytes, origin: GrammarText | None) -> None:
        self.number, self.key, self.origin = number, key, origin
        self.length = self.required = self.first_mask = self.known = self._same = 0
        self._tokens = np.empty(_SPARE, np.int32)
        self.outcome: Words | ExecutorError | None = None
        self.kept, self.sent, self.row, self.stale = 0, NOT_SENT, NOT_SENT, False
        self.asked, self.tries = 0.0, 0

    @property
    def tokens(self) -> TokenArray:
        """A view, int32 [length]."""
        return self._tokens[: self.length]

    @property
    def mask_count(self) -> int:
        """Rows whose masks are wanted."""
        return max(0, self.length - self.first_mask + 1)

    def is_of(self, tokens: TokenArray, required: int, first_mask: int) -> bool:
        """Whether the last request was this."""
        return (self.required, self.first_mask) == (required, first_mask) and np.array_equal(self.tokens, tokens)

    def request(self, tokens: TokenArray, required: int, first_mask: int) -> None:
        """Another request, of ``tokens`` int32 [n]."""
        same = self.common(tokens)
        self.known, self._same = min(self.known, same), min(self._same, same)
        if len(tokens) > len(self._tokens):
            self._tokens, same = np.empty(len(tokens) + len(tokens) // 4 + _SPARE, np.int32), 0
        self._tokens[same : len(tokens)] = tokens[same:]
        self.length, self.required, self.first_mask = len(tokens), required, first_mask
        self._renew()

    def append(self, token: int) -> None:
        """Another request: the mask behind one more token."""
        if self.length == len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.empty(self.length // 4 + _SPARE, np.int32)))
        self._tokens[self.length] = token
        self._same = min(self._same, self.length)
        self.length += 1
        self.required = self.first_mask = self.length
        self._renew()

    def common(self, tokens: TokenArray) -> int:
        """How many of its leading tokens are those of ``tokens``."""
        both = min(self.length, len(tokens))
        differ = np.flatnonzero(self._tokens[:both] != tokens[:both])
        return int(differ[0]) if differ.size else both

    def was_sent(self, kept: int, sent: int, row: int) -> None:
        """Tokens from ``kept`` to ``sent`` are on their way to the state, and masks to ``row``."""
        self.kept, self.sent, self.row, self.known, self._same = kept, sent, row, kept, sent

    def was_answered(self, consumed: int) -> None:
        """The state has ``consumed`` more tokens."""
        self.known = min(self.kept + consumed, self._same)
        self.stale, self.sent, self.row = False, NOT_SENT, NOT_SENT

    def lose_state(self) -> None:
        """The process has no state of it any more, and answers nothing that was sent."""
        self.known, self.stale, self.sent, self.row = 0, False, NOT_SENT, NOT_SENT

    def _renew(self) -> None:
        self.outcome, self.tries = None, 0
        self.stale = self.sent != NOT_SENT
