"""The tokens that a grammar allows, as a function of the text's tokens so far.

The states of texts are only kept to save time: a text is given by its tokens, and a state is moved to it by the tokens
that differ. Nothing here has limits of its own but those of the library, which make a grammar fail at the same place
every time; the process around it has the others (`worker`).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final, NamedTuple

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ferrum_rpc.core import Grammar, GrammarKind

MAX_STATES: Final = 512
"""Texts of one grammar whose states are kept; the least recently used are dropped first, and computed again."""

TRIAL_TOKENS: Final = 8
"""Masks that are computed when a grammar is compiled, along a text that it allows."""

LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""Compiling: tens of milliseconds. A mask: some 15 ms. States of the lexer: some 100 MiB."""

_WORD: Final = 32
_SIZES: Final = ("too many", "too large", "too complex", "too big", "fuel", "limit", "exceed", "memory")


class GrammarError(Exception):
    """``too_complex``: a limit was reached. Otherwise the grammar is invalid, or allows no text."""

    def __init__(self, message: str, *, too_complex: bool) -> None:
        super().__init__(message)
        self.too_complex = too_complex


class Vocabulary:
    """The tokens of a model of ``size`` tokens whose Hugging Face ``tokenizer.json`` this is. ``ends``: the ids that
    end a text, at least one. Raises an exception of the library for a tokenizer that it does not support, or that has
    more tokens than the model."""

    def __init__(self, tokenizer: str, size: int, ends: tuple[int, ...]) -> None:
        self.library = LLTokenizer(tokenizer, n_vocab=size, eos_token=ends[0])
        self.ends = ends
        words = np.zeros(-(-size // _WORD), np.uint32)
        for token in ends:
            words[token // _WORD] |= np.uint32(1 << token % _WORD)
        self.end_words = words.view(np.int32)


class Matched(NamedTuple):
    """The first ``consumed`` tokens of a text are allowed; ``words``: the masks that were requested of them, int32
    [masks, ceil(V / 32)]."""

    consumed: int
    words: np.ndarray[Any, np.dtype[np.int32]]


class Texts:
    """The texts of one grammar. Raises `GrammarError` if it cannot be compiled, or allows no text."""

    def __init__(self, vocabulary: Vocabulary, grammar: Grammar) -> None:
        self._vocabulary = vocabulary
        self._compiled = LLMatcher(vocabulary.library, _source(grammar), log_level=0, limits=LIMITS)
        _check(self._compiled)
        self._states: OrderedDict[int, _State] = OrderedDict()
        self._try()

    def match(self, text: int, keep: int, tokens: list[int], required: int, first_mask: int) -> Matched | None:
        """Move the state of ``text`` to its first ``keep`` tokens and these ``tokens``. The masks of the rows behind
        ``first_mask`` of these tokens and of more, as far as they are allowed; none if fewer than ``required`` are.
        None: fewer than ``keep`` tokens are known. Raises `GrammarError`; then the state is gone."""
        state = self._states.pop(text, None)
        if keep > (0 if state is None else state.length):
            return None
        if state is None:
            state = _State(self._compiled.deep_copy(), self._vocabulary)
        state.cut(keep)
        last = len(tokens)
        consumed = state.consume(tokens[: min(first_mask, last)])
        words = []
        while consumed >= first_mask:
            words.append(state.mask())
            if consumed == last or not state.consume(tokens[consumed : consumed + 1]):
                break
            consumed += 1
        if consumed < required:
            words = []
        self._states[text] = state
        if len(self._states) > MAX_STATES:
            self._states.popitem(last=False)
        return Matched(keep + consumed, np.array(words, np.int32))

    def drop(self, text: int) -> None:
        """Forget the state of a text."""
        self._states.pop(text, None)

    def _try(self) -> None:
        """Follow a text for some tokens, so that most grammars that allow none, or only at great cost, are refused
        when they are registered."""
        state = _State(self._compiled.deep_copy(), self._vocabulary)
        for _ in range(TRIAL_TOKENS):
            bits = np.unpackbits(state.mask().view(np.uint8), bitorder="little")
            if not state.consume([int(bits.nonzero()[0][-1])]) or state.ended:
                return


class _State:
    """The state of one text. ``ended``: how many of its last tokens are ends. The library consumes none of these: it
    knows one end only, and counts it in some states and not in others."""

    def __init__(self, matcher: Any, vocabulary: Vocabulary) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary
        self.length = self.ended = 0

    def cut(self, length: int) -> None:
        """Go back to the first ``length`` tokens."""
        dropped = self.length - length
        ends = min(dropped, self.ended)
        if dropped > ends and not self._matcher.rollback(dropped - ends):
            _check(self._matcher)
        self.ended -= ends
        self.length = length

    def consume(self, tokens: list[int]) -> int:
        """Append tokens up to the first that is not allowed. Returns how many."""
        ends, matcher = self._vocabulary.ends, self._matcher
        first = next((at for at, token in enumerate(tokens) if token in ends), len(tokens))
        count = 0
        if first and not self.ended:
            count = matcher.try_consume_tokens(tokens[:first])
            _check(matcher)
        if count == first < len(tokens) and (self.ended or matcher.is_accepting()):
            after = next((at for at, token in enumerate(tokens[first:], first) if token not in ends), len(tokens))
            self.ended += after - first
            count = after
        self.length += count
        return count

    def mask(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """The words of the tokens that may follow. Raises `GrammarError` if there are none."""
        vocabulary = self._vocabulary
        if self.ended:
            return vocabulary.end_words
        words = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        _check(self._matcher)
        words = words & ~vocabulary.end_words
        if self._matcher.is_accepting():
            words |= vocabulary.end_words
        if not words.any():
            raise GrammarError("the grammar allows no token of the tokenizer here", too_complex=False)
        return words


def _source(grammar: Grammar) -> str:
    """The grammar in the library's form. White space between the parts of a JSON value would be a text without end for
    a model that prefers it; a schema may allow it with ``x-guidance``."""
    text = grammar.text.decode()
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            try:
                source: str = LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_flexible": False})
            except ValueError as error:
                raise _error(str(error)) from None
            return source
        case GrammarKind.REGEX:
            return str(LLMatcher.grammar_from_regex(text))
        case GrammarKind.LARK:
            return str(LLMatcher.grammar_from_lark(text))


def _check(matcher: Any) -> None:
    """Raise `GrammarError` if the matcher has failed."""
    if matcher.is_error():
        raise _error(matcher.get_error())


def _error(message: str) -> GrammarError:
    """The error for a message of the library, of which the first line is kept; it may quote the grammar."""
    line = message.strip().partition("\n")[0][:200]
    return GrammarError(line, too_complex=any(each in line.lower() for each in _SIZES))
