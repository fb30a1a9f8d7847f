"""The tokens that a grammar allows, as a function of the text's tokens so far.

The states of texts are only kept to save time: a text is given by its tokens, and a state is moved to it by the tokens
that differ. Nothing here has limits of its own but those of the library, which make a grammar fail at the same place
every time; the process around it has the others (`worker`), and the engine decides how many states are kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ferrum_rpc.core import Grammar, GrammarKind
from ferrum_rpc.engine.grammars.messages import Ask

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
        self.ends = frozenset(ends)
        self.words = -(-size // _WORD)


class MaskMemory:
    """Rows of masks, int32 [rows, words of the vocabulary]. ``mask(row)`` costs less without numpy: its code is not in
    the processor's caches when a step needs a mask."""

    def __init__(self, masks: npt.NDArray[np.int32], ends: Iterable[int]) -> None:
        self._address, self._row_bytes = masks.ctypes.data, masks.strides[0]
        self._bytes = masks.data.cast("B")
        self._words = self._bytes.cast("I")
        self._ends: dict[int, int] = {}  # by word
        for token in ends:
            self._ends[token // _WORD] = self._ends.get(token // _WORD, 0) | 1 << token % _WORD

    def fill(self, row: int, matcher: Any) -> None:
        """The tokens that the library allows, and the ends if the text may end. Raises `GrammarError`."""
        matcher.unsafe_compute_mask_ptr(self._address + row * self._row_bytes, self._row_bytes)
        _check(matcher)
        first, accepts = row * self._row_bytes // 4, matcher.is_accepting()
        for word, bits in self._ends.items():
            others = self._words[first + word] & ~bits
            self._words[first + word] = others | bits if accepts else others

    def fill_ends(self, row: int) -> None:
        """The ends alone."""
        first, size = row * self._row_bytes, self._row_bytes
        self._bytes[first : first + size] = bytes(size)
        for word, bits in self._ends.items():
            self._words[first // 4 + word] = bits

    def is_empty(self, row: int) -> bool:
        """Whether no token is allowed."""
        first = row * self._row_bytes
        return not self._bytes[first : first + self._row_bytes].tobytes().lstrip(b"\0")


class Texts:
    """The texts of one grammar, whose masks go to ``masks``, int32 [rows, words of the vocabulary]. Raises
    `GrammarError` if the grammar cannot be compiled, or allows no text."""

    def __init__(self, vocabulary: Vocabulary, grammar: Grammar, masks: npt.NDArray[np.int32]) -> None:
        self._compiled = LLMatcher(vocabulary.library, _source(grammar), log_level=0, limits=LIMITS)
        _check(self._compiled)
        self._memory = MaskMemory(masks, vocabulary.ends)
        self._ends = vocabulary.ends
        self._states: dict[int, _State] = {}
        self._try(masks)

    def match(self, ask: Ask, tokens: list[int]) -> int:
        """Do what is asked, with its ``tokens``; how many of these are allowed. Raises `GrammarError`."""
        state = self._states.get(ask.text)
        if state is None:
            source = self._states.get(ask.source)
            state = self._states[ask.text] = self._begin() if source is None else source.copy()
        state.cut(ask.keep)
        first, last, row = ask.first_mask, ask.size, ask.row
        consumed = state.consume(tokens if first >= last else tokens[:first])
        while consumed >= first:
            state.mask(row)
            row += 1
            if consumed == last or not state.consume(tokens[consumed : consumed + 1]):
                break
            consumed += 1
        return consumed

    def drop(self, text: int) -> None:
        """Forget the state of a text."""
        self._states.pop(text, None)

    def _begin(self) -> _State:
        return _State(self._compiled.deep_copy(), self._memory, self._ends)

    def _try(self, masks: npt.NDArray[np.int32]) -> None:
        """Follow a text for some tokens, so that most grammars that allow none, or only at great cost, are refused
        when they are registered."""
        state = self._begin()
        for _ in range(TRIAL_TOKENS):
            state.mask(0)
            bits = np.unpackbits(masks[0].view(np.uint8), bitorder="little")
            if not state.consume([int(bits.nonzero()[0][-1])]) or state.ended:
                return


class _State:
    """The state of one text. ``ended``: how many of its last tokens are ends. The library consumes none of these: it
    knows one end only, and counts it in some states and not in others."""

    def __init__(self, matcher: Any, memory: MaskMemory, ends: frozenset[int]) -> None:
        self._matcher, self._memory, self._ends = matcher, memory, ends
        self.length = self.ended = 0

    def copy(self) -> _State:
        """The state of another text with the same tokens."""
        copied = _State(self._matcher.deep_copy(), self._memory, self._ends)
        copied.length, copied.ended = self.length, self.ended
        return copied

    def cut(self, length: int) -> None:
        """Go back to the first ``length`` tokens."""
        dropped = self.length - length
        if not dropped:
            return
        ends = min(dropped, self.ended)
        if dropped > ends and not self._matcher.rollback(dropped - ends):
            _check(self._matcher)
        self.ended -= ends
        self.length = length

    def consume(self, tokens: list[int]) -> int:
        """Append tokens up to the first that is not allowed. Returns how many."""
        ends, matcher = self._ends, self._matcher
        first = len(tokens) if ends.isdisjoint(tokens) else next(at for at, token in enumerate(tokens) if token in ends)
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

    def mask(self, row: int) -> None:
        """Write the tokens that may follow to a row. Raises `GrammarError` if there are none."""
        memory = self._memory
        if self.ended:
            memory.fill_ends(row)
            return
        memory.fill(row, self._matcher)
        if memory.is_empty(row):
            raise GrammarError("the grammar allows no token of the tokenizer here", too_complex=False)


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
