"""Grammars: texts in one of several languages that say which tokens a row may yield, and the masks made of them."""

from __future__ import annotations

import enum
import hashlib
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

GRAMMAR_ID_BYTES: Final = 32


class GrammarKind(enum.Enum):
    """The language of a grammar's text; the values are those of the protos."""

    JSON_SCHEMA = 1
    REGEX = 2
    LARK = 3


class Grammar(NamedTuple):
    """A grammar as registered. ``text`` is UTF-8."""

    kind: GrammarKind
    text: bytes

    def id(self, tokenizer_sha256: bytes) -> bytes:
        """The id for executors whose tokenizer has this digest."""
        return hashlib.sha256(bytes((self.kind.value,)) + tokenizer_sha256 + self.text).digest()


class MaskRows(NamedTuple):
    """Masks of ``rows`` of an item, from the one ``at`` on: those of ``words``, int32 [n, ceil(V / 32)] on the host,
    from ``first`` on."""

    words: npt.NDArray[np.int32]
    first: int
    rows: int
    at: int = 0
