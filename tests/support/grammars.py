"""Masks of grammars as a caller makes them, by the grammar library in this process, to compare the executor's with."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from ferrum_rpc.client import ExecutorClient
from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import Accept, GrammarKind, Sample, Span

if TYPE_CHECKING:  # programs that import this need no torch
    from ferrum_rpc.engine.operations import TorchRunner

MODEL = Path(__file__).parents[2] / "ferrum_rpc_demo/demo"
END = 256
VOCABULARY = 264
DEMO = ModelSettings(path=str(MODEL), dtype="float32", kv_blocks=512)
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "married": {"type": "boolean"},
        "county": {"enum": ["Kent", "Surrey", "São Miguel"]},
        "sisters": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["name", "married", "county", "sisters"],
    "additionalProperties": False,
}
SOURCES = {
    GrammarKind.JSON_SCHEMA: json.dumps(PERSON),
    GrammarKind.REGEX: r"[a-f]{2,5}(, [a-f]{1,3}){0,4}\.?",
    GrammarKind.LARK: 'start: sum\nsum: product ("+" product)*\nproduct: NUMBER ("*" NUMBER)*\nNUMBER: /[0-9]{1,3}/',
}

AMBIGUOUS = 'start: s\ns: s s s | s s | "a" | '
"""Compiles at once; a mask takes ten times as long with each token."""

TOO_COMPLEX = {
    "a regular expression that is 1 MiB of alternatives": (GrammarKind.REGEX, "(ab|cd)" * 150_000),
    "many rules that refer to each other": (
        GrammarKind.LARK,
        "start: " + " | ".join(f"r{i}" for i in range(20_000)) + "\n"
        + "\n".join(f'r{i}: "a" r{(i * 7 + 1) % 20_000} | "b"' for i in range(20_000)),
    ),
    "a schema of 3,000 levels": (GrammarKind.JSON_SCHEMA, '{"type":"array","items":' * 3000 + "{}" + "}" * 3000),
    "intersections": (
        GrammarKind.JSON_SCHEMA,
        json.dumps({"allOf": [
            {"anyOf": [{"type": "string", "pattern": f"^.*{chr(97 + i)}{chr(97 + j)}.*$"} for j in range(4)]}
            for i in range(12)]}),
    ),
}  # fmt: skip
IMPOSSIBLE = {
    "references in a circle": (GrammarKind.JSON_SCHEMA, '{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/a"}}}'),
    "a rule that is itself": (GrammarKind.LARK, "start: start"),
    "no text at all": (GrammarKind.REGEX, r"[^\x00-\x{10FFFF}]"),
    "no start": (GrammarKind.LARK, "other: 'a'"),
}

_TOKENIZER = LLTokenizer((MODEL / "tokenizer.json").read_text(), n_vocab=VOCABULARY, eos_token=END)


def encode(text: str) -> list[int]:
    tokens: list[int] = _TOKENIZER.tokenize_str(text)
    return tokens


def decode(tokens: list[int]) -> str:
    text: str = _TOKENIZER.decode_str([token for token in tokens if token != END])
    return text


def compiled(kind: GrammarKind, text: str) -> str:
    match kind:
        case GrammarKind.JSON_SCHEMA:
            return str(LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_flexible": False}))
        case GrammarKind.REGEX:
            return str(LLMatcher.grammar_from_regex(text))
        case GrammarKind.LARK:
            return str(LLMatcher.grammar_from_lark(text))


@cache
def _begun(source: str) -> LLMatcher:
    """Of a grammar, before any token: compiling one takes longer than reading a text."""
    return LLMatcher(_TOKENIZER, source, log_level=0)


def allowed(source: str, tokens: list[int]) -> set[int] | None:
    """The tokens that may follow ``tokens``; None: these are not of the grammar."""
    ends = [at for at, token in enumerate(tokens) if token == END]
    first = ends[0] if ends else len(tokens)
    matcher = _begun(source).deep_copy()
    if first and not matcher.consume_tokens(tokens[:first]):
        return None
    if ends:
        return {END} if matcher.is_accepting() and ends == list(range(first, len(tokens))) else None
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return set(bits.nonzero()[0].tolist())


async def text_by_masks(
    client: ExecutorClient, prompt: list[int], source: str, temperature: float, seed: int
) -> list[int]:
    """A text with its end, by single steps and masks that the caller makes."""
    text: list[int] = []
    async with client.sequence() as sequence:
        while not text or text[-1] != END:
            mask = np.zeros(VOCABULARY, bool)
            mask[list(allowed(source, text) or ())] = True
            output = Sample(temperature, seed=seed, mask=await client.register_token_mask(mask))
            text.append((await sequence.prefill(text[-1:] or prompt, output)).token)
    return text


class Watched:
    """Compares each mask that a runner gives to a row with the caller's own. ``sources``: the grammars by their ids.
    ``rows``: how many were compared; ``without``: how many rows of constrained items had none."""

    def __init__(self, runner: TorchRunner) -> None:
        self.sources: dict[bytes, str] = {}
        self.rows = self.without = 0
        self._runner, self._words_of = runner, runner.compute.words_of
        runner.compute.words_of = self._compared

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.compute.words_of = self._words_of

    def _compared(self, span: Span, rows: int) -> Any:
        words = self._words_of(span, rows)
        kind = span.output.kind
        sample = kind.choice if isinstance(kind, Accept) else kind
        assert isinstance(sample, Sample)
        tokens = [*self._runner.kv.tokens(span.sequence)[: span.start].tolist(), *span.tokens.tolist()]
        for row in range(rows):
            length = span.end - rows + row + 1
            place = -1 if words is None else row - words.at
            found = words.words[words.first + place] if words is not None and 0 <= place < words.rows else None
            own = None
            if length >= sample.grammar_from:
                own = allowed(self.sources[sample.grammar[-32:]], tokens[sample.grammar_from : length])
            if own is None:  # before the text, or behind a token of a draft that is not allowed
                assert found is None
                self.without += 1
            else:
                assert found is not None
                bits = np.unpackbits(found.view(np.uint8), bitorder="little")
                assert set(bits.nonzero()[0].tolist()) == own, (tokens[sample.grammar_from : length], length)
                self.rows += 1
        return words
