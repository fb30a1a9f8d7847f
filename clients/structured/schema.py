"""A schema as masks of the tokens that may follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from ferrum_rpc.scheduler import looked_up

Words = npt.NDArray[np.int32]
"""A mask, for `ExecutorClient.register_token_mask`."""


class Schema:
    """Texts that are JSON of ``schema``, in tokens of the Hugging Face ``tokenizer.json``."""

    def __init__(self, schema: dict[str, Any], tokenizer: Path) -> None:
        self._tokenizer = LLTokenizer(tokenizer.read_text())
        # no white space between the parts: a model that may write it may do so for ever
        self._grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults={"whitespace_flexible": False})

    def begin(self) -> SchemaState:
        """The state of a text without any token."""
        return SchemaState(LLMatcher(self._tokenizer, self._grammar))

    def encode(self, text: str) -> list[int]:
        """Tokens of a prompt."""
        tokens: list[int] = self._tokenizer.tokenize_str(text)
        return tokens

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens."""
        text: str = self._tokenizer.decode_str(tokens)
        return text


class SchemaState:
    """The state of a text in its schema."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def complete(self) -> bool:
        """Whether nothing may follow."""
        return bool(self._matcher.is_stopped())

    def mask(self) -> Words:
        """The tokens that may follow."""
        return np.frombuffer(self._matcher.compute_bitmask(), np.int32)

    def ahead(self, text: list[int], most: int) -> tuple[list[int], list[Words]]:
        """A draft of up to ``most`` tokens that may follow ``text``, and the masks of the rows that verify it, one more
        than tokens. The state does not change.

        It holds the tokens that the schema forces, and between them valid guesses of prompt look-up. It ends before a
        token that completes the text, which the last row chooses."""
        draft, masks, matcher = list[int](), [self.mask()], self._matcher
        while len(draft) < most:
            guess = matcher.compute_ff_tokens() or looked_up([*text, *draft], most, shortest=2, longest=2)
            guess = guess[: most - len(draft)]
            possible = guess[: matcher.validate_tokens(guess)]
            for token in possible:
                matcher.consume_token(token)
                if self.complete:
                    matcher.rollback(1)
                    possible = []
                    break
                draft.append(token)
                masks.append(self.mask())
            if not possible or len(possible) < len(guess):
                break
        matcher.rollback(len(draft))
        return draft, masks

    def push(self, tokens: list[int]) -> None:
        """Append tokens. Raises ValueError for one that may not follow."""
        if not self._matcher.consume_tokens(tokens):
            raise ValueError(f"tokens {tokens} may not follow: {self._matcher.get_error()}")
