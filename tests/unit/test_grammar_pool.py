"""The engine's side of the processes of grammars: masks are a function of tokens, and a long text delays no other."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import numpy as np
import pytest

from ferrum_rpc.core import Grammar, GrammarKind, MaskRows
from ferrum_rpc.engine.grammars import process
from ferrum_rpc.engine.grammars.messages import MASK_ROWS, NUMBERS, TOO_COMPLEX, Ask, error, error_of
from ferrum_rpc.engine.grammars.pool import GrammarPool
from ferrum_rpc.engine.grammars.process import MAX_STATES, GrammarProcess
from ferrum_rpc.engine.grammars.text import GrammarText
from ferrum_rpc.errors import ExecutorError, GrammarUnknown, InvalidRequest
from tests.grammars import END, MODEL, SOURCES, VOCABULARY, allowed, compiled

KEY = b"k" * 32
LIST = r"[a-f]+(,[a-f]+)*"
DEADLINE_S = 60.0


@pytest.fixture
def pool() -> Iterator[GrammarPool]:
    pool = GrammarPool(MODEL / "tokenizer.json", VOCABULARY, (END,), 256 << 20)
    pool.check()
    register(pool, LIST)
    yield pool
    pool.close()


def register(pool: GrammarPool, text: str, kind: GrammarKind = GrammarKind.REGEX) -> None:
    pool.change([(KEY, Grammar(kind, text.encode()))], [KEY])
    until = time.monotonic() + DEADLINE_S
    while not pool.compiled(KEY):
        pool.poll(0.1)
        assert time.monotonic() < until


def ask(pool: GrammarPool, sequence: int, tokens: list[int], *, rows: int = 1) -> GrammarText:
    pool.ask(sequence, KEY, np.array(tokens, np.int32), len(tokens), len(tokens) - rows + 1)
    text = pool.text(sequence)
    assert text is not None
    return text


def answered(pool: GrammarPool, *texts: GrammarText) -> None:
    until = time.monotonic() + DEADLINE_S
    while any(text.outcome is None for text in texts):
        pool.poll(0.1)
        assert time.monotonic() < until


def tokens_of(text: GrammarText, row: int = -1) -> set[int]:
    assert isinstance(text.outcome, MaskRows)
    words, first, rows, _ = text.outcome
    return set(np.unpackbits(words[first : first + rows][row].view(np.uint8), bitorder="little").nonzero()[0].tolist())


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each message that the engine makes."""
    found: list[int] = []
    plain = GrammarProcess._put

    def put(asked: GrammarProcess, piece: int) -> None:
        plain(asked, piece)
        numbers, tokens = asked._unsent, 0
        assert len(numbers) <= NUMBERS
        if numbers:
            at = 1 + numbers[0]
            while at < len(numbers):
                ask = Ask._make(numbers[at : at + len(Ask._fields)])
                tokens += ask.size
                at += len(Ask._fields) + ask.size
            assert at == len(numbers)
            found.append(tokens)

    monkeypatch.setattr(GrammarProcess, "_put", put)
    return found


@pytest.mark.parametrize("states", [MAX_STATES, 3])
@pytest.mark.parametrize("kind", list(GrammarKind))
def test_masks_are_those_of_the_tokens_whatever_was_asked_before(
    pool: GrammarPool, monkeypatch: pytest.MonkeyPatch, kind: GrammarKind, states: int
) -> None:
    """Requests of several texts, some replaced before they are answered, forks, and states that were dropped."""
    monkeypatch.setattr(process, "MAX_STATES", states)
    register(pool, SOURCES[kind], kind)
    source, dice = compiled(kind, SOURCES[kind]), random.Random(5)
    texts: dict[int, list[int]] = {0: []}
    compared = 0
    for number in range(1, 400):
        sequence = dice.choice(list(texts))
        text = texts[sequence]
        match dice.choice(["append", "append", "append", "cut", "fork", "forget", "wrong"]):
            case "append":
                found = ask(pool, sequence, text)
                if dice.random() < 0.6:
                    answered(pool, found)
                    chosen = dice.choice(sorted(tokens_of(found)))
                    pool.append(found, chosen)
                    texts[sequence] = [*text, chosen]
                    if chosen == END:
                        texts[sequence] = []
            case "cut":
                texts[sequence] = text[: dice.randrange(len(text) + 1)]
            case "fork" if len(texts) < 8:
                pool.fork(sequence, [number])
                texts[number] = text[: dice.randrange(len(text) + 1)] if dice.random() < 0.5 else list(text)
            case "forget" if len(texts) > 1:
                pool.forget([sequence])
                del texts[sequence]
            case "wrong":
                found = ask(pool, sequence, [*text, 263])
                answered(pool, found)
                assert isinstance(found.outcome, InvalidRequest)
                assert found.outcome.metadata == {"at": str(len(text))}
        if dice.random() < 0.3:
            every = [(ask(pool, each, tokens), tokens) for each, tokens in texts.items()]
            answered(pool, *(found for found, _ in every))
            for found, tokens in every:
                assert tokens_of(found) == allowed(source, tokens)
                compared += 1
    assert compared > 100


def test_more_masks_than_the_shared_memory_has_rows(pool: GrammarPool) -> None:
    text = list(b"ab,cd,ef")
    texts = [ask(pool, sequence, text, rows=8) for sequence in range(MASK_ROWS // 8 + 10)]
    answered(pool, *texts)
    expected = [allowed(compiled(GrammarKind.REGEX, LIST), text[: at + 1]) for at in range(8)]
    for each in texts:
        assert [tokens_of(each, row) for row in range(8)] == expected


def test_a_long_text_is_read_in_pieces_and_others_do_not_wait_for_it(pool: GrammarPool, sent: list[int]) -> None:
    long = ask(pool, 1, list(b"abc," * 5000 + b"d"))
    short = ask(pool, 2, list(b"ab"))
    for token in b"abcdef" * 5:
        answered(pool, short)
        assert long.outcome is None
        pool.append(short, token)
    answered(pool, long, short)
    assert tokens_of(long) == tokens_of(short) == {*b"abcdef,", END}
    assert max(sent) <= 2 * process.PIECE_TOKENS
    pool.spare_s, sent[:] = 1.0, []
    again = ask(pool, 3, list(b"abc," * 2000))
    answered(pool, again)
    assert len(sent) == 2, "more time to spare, longer pieces"


def test_a_child_of_a_long_text_gets_a_copy_of_its_state(pool: GrammarPool, sent: list[int]) -> None:
    pool.spare_s = 1.0
    text = list(b"abc," * 5000 + b"d")
    parent = ask(pool, 1, text)
    answered(pool, parent)
    sent.clear()
    pool.fork(1, [2, 3])
    pool.forget([1])
    children = [ask(pool, 2, [*text, *b"e,"]), ask(pool, 3, [*text[:-3], *b"f"])]
    grandchild = ask(pool, 4, [*b"a"])
    pool.ask(5, KEY, np.array([*text, *b"e,f"], np.int32), len(text) + 3, len(text) + 3, parent=2)
    last = pool.text(5)
    assert last is not None
    answered(pool, *children, grandchild, last)
    assert sum(sent) < 32
    assert [tokens_of(each) == {*b"abcdef"} for each in (*children, grandchild, last)] == [True, False, False, False]
    pool.fork(9, [10])  # which has no text
    assert pool.text(10) is None


def test_a_long_text_that_is_not_allowed_is_refused_at_its_place(pool: GrammarPool) -> None:
    text = list(b"abc," * 300)
    text[777] = ord("x")
    found = ask(pool, 1, text)
    answered(pool, found)
    assert isinstance(found.outcome, InvalidRequest) and found.outcome.metadata == {"at": "777"}
    text[777] = ord("a")
    found = ask(pool, 1, text)
    answered(pool, found)
    assert tokens_of(found) == {*b"abcdef"}


def test_what_a_dropped_grammar_has_not_answered_is_refused_and_can_be_asked_again(pool: GrammarPool) -> None:
    text = ask(pool, 1, list(b"ab"))
    pool.flush()
    queued = ask(pool, 2, list(b"ab"))
    pool.change([], [KEY])
    assert isinstance(text.outcome, GrammarUnknown) and isinstance(queued.outcome, GrammarUnknown)
    assert isinstance(ask(pool, 1, list(b"ab")).outcome, GrammarUnknown)
    register(pool, LIST)
    text = ask(pool, 1, list(b"ab"))
    answered(pool, text)
    assert not isinstance(text.outcome, ExecutorError) and ord(",") in tokens_of(text)


def test_more_texts_than_a_message_has_room_for(pool: GrammarPool, sent: list[int]) -> None:
    texts = [ask(pool, sequence, list(b"abcde," * 9 + b"a")) for sequence in range(300)]
    answered(pool, *texts)
    assert len(sent) > 1 and sum(sent) == 300 * 55
    assert all(tokens_of(each) == {*b"abcdef,", END} for each in texts)


@pytest.mark.parametrize("message", ["", "a", "8 bytes.", "naïve", "\udcff", "ß" * 200])
def test_messages_of_errors_are_read_as_they_were_written(message: str) -> None:
    kind, *_ = found = error(TOO_COMPLEX, message)
    assert kind == TOO_COMPLEX
    assert error_of(found[1:]) == message.replace("\udcff", "?")
