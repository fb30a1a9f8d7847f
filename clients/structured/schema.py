"""A schema as masks: what the tokens so far leave open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer


class Schema:
    """Texts that are JSON of ``schema``, in tokens of the Hugging Face ``tokenizer.json``."""

    def __init__(self, schema: dict[str, Any], tokenizer: Path) -> None:
        self._tokenizer = LLTokenizer(tokenizer.read_text())
        # without spaces and newlines between the parts: a model that may write them may do so for ever
        self._grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults={"whitespace_flexible": False})

    def begin(self) -> State:
        """The state of a text without any token."""
        return State(LLMatcher(self._tokenizer, self._grammar))

    def encode(self, text: str) -> list[int]:
        """Tokens of a prompt."""
        tokens: list[int] = self._tokenizer.tokenize_str(text)
        return tokens

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens."""
        text: str = self._tokenizer.decode_str(tokens)
        return text


class State:
    """Where a text stands in its schema."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def complete(self) -> bool:
        """Whether nothing may follow."""
        return bool(self._matcher.is_stopped())

    def mask(self) -> npt.NDArray[np.int32]:
        """The tokens that may follow, as words for `ExecutorClient.register_token_mask`."""
        return np.frombuffer(self._matcher.compute_bitmask(), np.int32)

    def push(self, token: int) -> None:
        """A token follows. Raises ValueError for one that may not."""
        if not self._matcher.consume_token(token):
            raise ValueError(f"token {token} may not follow: {self._matcher.get_error()}")
