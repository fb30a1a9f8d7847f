"""What a router needs of the model's folder: the tokenizer, as a zip, and some fields of its configuration."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from ferrum_rpc.client import InvalidRequest

TOKENIZER: Final = "tokenizer.json"
FILES: Final = (
    TOKENIZER,
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tiktoken.model",
    "chat_template.json",
)
PATTERNS: Final = ("*.tiktoken", "*.jinja", "*.model")
"""The files of a tokenizer, as the router knows them."""

CHUNK_BYTES: Final = 64 << 10
SAMPLING_DEFAULTS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class FolderTokenizer:
    """The ``tokenizer.json`` of a folder. ``longest``: characters of its longest token, as far as the vocabulary shows
    them; a byte may be one."""

    def __init__(self, file: Path) -> None:
        from tokenizers import Tokenizer

        try:
            self._library: Any = Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises plain Exception
            raise InvalidRequest(f"{file} is not a tokenizer: {error}", field="tokenizer") from None
        self.longest = max(map(len, self._library.get_vocab()), default=1)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer adds. Other threads run meanwhile."""
        return list(self._library.encode_batch([text])[0].ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text, without special tokens."""
        return str(self._library.decode(list(tokens), skip_special_tokens=True))


class ModelFolder:
    """The folder of a model, of which only the tokenizer is needed. Raises `InvalidRequest` if it has none."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        if not (self.path / TOKENIZER).is_file():
            raise InvalidRequest(f"{self.path} has no {TOKENIZER}: name the model's folder", field="tokenizer")
        self.tokenizer = FolderTokenizer(self.path / TOKENIZER)
        self._config = self._json("config.json")
        self._zip: asyncio.Task[tuple[bytes, str]] | None = None

    def _json(self, name: str) -> dict[str, Any]:
        """A file's fields; none if there is no such file, or it is not JSON."""
        try:
            found = json.loads((self.path / name).read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def model_type(self) -> str:
        """As the configuration has it."""
        return str(self._config.get("model_type", ""))

    @property
    def architectures(self) -> list[str]:
        """As the configuration has them."""
        return [str(each) for each in self._config.get("architectures") or ()]

    @property
    def pad_token_id(self) -> int:
        """0 if there is none."""
        found = self._config.get("pad_token_id")
        return found if isinstance(found, int) else 0

    def sampling_defaults(self) -> str:
        """The model's defaults of sampling as JSON, for requests that do not set them; empty if it has none."""
        given = self._json("generation_config.json")
        found = {name: given[name] for name in SAMPLING_DEFAULTS if given.get(name) is not None}
        return json.dumps(found, separators=(",", ":")) if found else ""

    async def zipped(self) -> tuple[bytes, str]:
        """The files of the tokenizer as a zip, and its SHA-256 in hexadecimal. It is made once."""
        if self._zip is None or (self._zip.done() and self._zip.exception() is not None):
            self._zip = asyncio.create_task(asyncio.to_thread(self._make_zip))
        return await asyncio.shield(self._zip)

    def _make_zip(self) -> tuple[bytes, str]:
        names = dict.fromkeys(name for name in FILES if (self.path / name).is_file())
        for pattern in PATTERNS:
            names |= dict.fromkeys(sorted(each.name for each in self.path.glob(pattern) if each.is_file()))
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in names:
                archive.write(self.path / name, name)
        data = made.getvalue()
        return data, hashlib.sha256(data).hexdigest()


def in_chunks(data: bytes) -> Iterator[tuple[bytes, bool]]:
    """The pieces of a message that is too long, each with whether it is the last."""
    for at in range(0, len(data), CHUNK_BYTES):
        yield data[at : at + CHUNK_BYTES], at + CHUNK_BYTES >= len(data)
