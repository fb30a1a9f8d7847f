"""Text of tokens while it grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(Protocol):
    """What is needed of a tokenizer to read text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids; an incomplete character at an end becomes U+FFFD."""


class TextStream:
    """Decodes a growing list of tokens, piece by piece.

    Only the last character of a text can be incomplete: it is held back while it reads as U+FFFD. Tokens are decoded
    together with some that came before, because tokenizers treat the beginning of a text specially (as in the
    two-offset method of text-generation-inference).
    """

    LONGEST_WINDOW = 64
    """After so many tokens bytes without a character are shown as they are, which bounds the cost of a token."""

    def __init__(self, tokenizer: Detokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._window = 0  # first token that is decoded again
        self._clean = 0  # tokens up to the last point where every character was complete
        self._shown = 0  # characters of the window that were handed out

    def push(self, token: int) -> str:
        """The text that is complete with this token; empty if its character is not."""
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens[self._window :])
        complete = not text.endswith(REPLACEMENT) or len(self._tokens) - self._window >= self.LONGEST_WINDOW
        certain = len(text) if complete else len(text) - 1
        piece = text[self._shown : certain]
        self._shown = max(self._shown, certain)
        if complete:
            self._window, self._clean = self._clean, len(self._tokens)
            self._shown = len(self._tokenizer.decode(self._tokens[self._window :]))
        return piece

    def finish(self) -> str:
        """The text that was held back as incomplete."""
        text = self._tokenizer.decode(self._tokens[self._window :])
        piece, self._shown = text[self._shown :], len(text)
        return piece
