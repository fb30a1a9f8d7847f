"""The token ids that a sequence holds, committed with its length: what penalties count.

Written by the commit of a step and by nothing else, so that a step that fails leaves them as they were; a roll-back
only lowers the length that they are read up to.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ferrum_rpc.core import TokenArray

_LEAST: Final = 16


class TokenHistory:
    """Token ids by position. How many of them count is the sequence's length, which is not kept here."""

    __slots__ = ("_ids",)

    def __init__(self, ids: TokenArray | None = None) -> None:
        self._ids = np.empty(_LEAST, np.int32) if ids is None else ids

    def write(self, start: int, tokens: TokenArray) -> None:
        """Put ``tokens`` at the positions ``start ..``; those before are there."""
        end = start + len(tokens)
        if end > len(self._ids):
            larger = np.empty(max(end, 2 * len(self._ids)), np.int32)
            larger[:start] = self._ids[:start]
            self._ids = larger
        self._ids[start:end] = tokens

    def upto(self, length: int) -> TokenArray:
        """A view of the first ``length`` ids, int32 [length], valid until the next `write`."""
        return self._ids[:length]

    def fork(self, length: int) -> TokenHistory:
        """A copy of the first ``length`` ids."""
        return TokenHistory(self._ids[:length].copy())
