"""Text to tokens and back, also while the text is still growing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTE_VOCABULARIES = range(256, 301)
"""Vocabulary sizes that are taken to be one token per byte and a few special tokens."""


class TokenizerError(ValueError):
    """There is no tokenizer for this model, or it cannot be read."""


class Tokenizer(Protocol):
    """What the scheduler needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids; an incomplete character at an end becomes U+FFFD."""


class ByteTokenizer:
    """A token is a byte; what is above 255 is special and has no text."""

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """The bytes as UTF-8."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


class FileTokenizer:
    """A Hugging Face ``tokenizer.json``."""

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise TokenizerError(f"no tokenizer at {file}")
        try:
            from tokenizers import Tokenizer as Library
        except ImportError:
            raise TokenizerError("reading a tokenizer needs the package tokenizers: pip install tokenizers") from None
        try:
            self._library: Any = Library.from_file(str(file))
        except Exception as error:  # the package raises plain Exception
            raise TokenizerError(f"{file} is not a tokenizer: {error}") from None

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that the tokenizer adds."""
        ids: list[int] = self._library.encode(text).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text, without special tokens."""
        text: str = self._library.decode(list(tokens), skip_special_tokens=True)
        return text


def tokenizer_for(vocab_size: int, path: Path | None) -> Tokenizer:
    """The tokenizer at ``path``, or bytes for a vocabulary of that size. Raises `TokenizerError`."""
    if path is not None:
        return FileTokenizer(path)
    if vocab_size in BYTE_VOCABULARIES:
        return ByteTokenizer()
    raise TokenizerError(f"the model has {vocab_size} tokens, which are not bytes: say --tokenizer PATH")


class TextStream:
    """Decodes a growing list of tokens, piece by piece.

    Only the last character of a text can be incomplete: it is held back while it reads as U+FFFD. Tokens are decoded
    together with some that came before, because tokenizers treat the beginning of a text specially (as in the
    two-offset method of text-generation-inference).
    """

    LONGEST_WINDOW = 64
    """After so many tokens bytes without a character are shown as they are, which bounds the cost of a token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
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


def printable(text: str) -> str:
    """Text without control sequences: control characters other than newline become visible pictures."""
    return "".join(_picture(character) for character in text)


def _picture(character: str) -> str:
    code = ord(character)
    if character == "\n" or (code >= 32 and not 127 <= code < 160):
        return character
    if character == "\t":
        return " "
    return chr(0x2400 + code) if code < 32 else "\N{SYMBOL FOR DELETE}" if code == 127 else REPLACEMENT
