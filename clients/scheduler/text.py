"""Text to tokens and back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from ferrum_rpc.scheduler import REPLACEMENT, Detokenizer

BYTE_VOCABULARIES = range(256, 301)
"""Vocabulary sizes that are taken to be one token per byte and a few special tokens."""


class TokenizerError(ValueError):
    """There is no tokenizer for this model, or it cannot be read."""


class Tokenizer(Detokenizer, Protocol):
    """What the program needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""


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
