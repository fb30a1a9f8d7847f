"""The engine's side of the processes of grammars: masks are a function of tokens, and a long text delays no other."""

from __future__ import annotations

import random
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ferrum_rpc.core import Grammar, GrammarKind, MaskRows
from ferrum_rpc.engine.grammars import process, starter
from ferrum_rpc.engine.grammars.messages import MASK_ROWS, NUMBERS, TOO_COMPLEX, Ask, error, error_of
from ferrum_rpc.engine.grammars.pool import GrammarPool
from ferrum_rpc.engine.grammars.process import MAX_STATES
from ferrum_rpc.engine.grammars.starter import GrammarStarter
from ferrum_rpc.engine.grammars.text import GrammarText
from ferrum_rpc.errors import ExecutorError, GrammarTooComplex, GrammarUnknown, InvalidRequest
from tests.support.grammars import END, MODEL, SOURCES, VOCABULARY, allowed, compiled

KEY = b"k" * 32
LIST = r"[a-f]+(,[a-f]+)*"
DEADLINE_S = 60.0


class Watched(socket.socket):
    """The engine's end of a grammar's process. ``sent``: the tokens in each message of requests."""

    def __init__(self, plain: socket.socket) -> None:
        super().__init__(fileno=plain.detach())
        self.setblocking(False)
        self.sent: list[int] = []

    def send(self, numbers: Any) -> int:
        size = super().send(numbers)
        assert len(numbers) <= NUMBERS
        if len(numbers) > 2:  # not the grammar itself
            tokens, at = 0, 1 + numbers[0]
            while at < len(numbers):
                ask = Ask._make(numbers[at : at + len(Ask._fields)])
                tokens += ask.size
                at += len(Ask._fields) + ask.size
            assert at == len(numbers)
            self.sent.append(tokens)
        return size


@pytest.fixture
def sockets(monkeypatch):
    """Of all processes that are started."""
    found, start = list[Watched](), GrammarStarter.start

    def watch(starter: GrammarStarter, masks: int) -> Watched | None:
        if (plain := start(starter, masks)) is None:
            return None
        found.append(Watched(plain))
        return found[-1]

    monkeypatch.setattr(GrammarStarter, "start", watch)
    return found


@pytest.fixture
def pool(sockets):
    pool = GrammarPool(MODEL / "tokenizer.json", VOCABULARY, (END,), 256 << 20)
    pool.check()
    register(pool, LIST)
    yield pool
    pool.close()


@pytest.fixture
def sent(pool, sockets):
    """The tokens of each message to the process of `LIST`."""
    return sockets[-1].sent


def poll(pool: GrammarPool, until: Callable[[], object], every_s: float = 0.1) -> None:
    end = time.monotonic() + DEADLINE_S
    while not until():
        pool.poll(every_s)
        assert time.monotonic() < end


def register(pool: GrammarPool, text: str, kind: GrammarKind = GrammarKind.REGEX) -> None:
    pool.change([(KEY, Grammar(kind, text.encode()))], [KEY])
    poll(pool, lambda: pool.compiled(KEY))


def ask(pool: GrammarPool, sequence: int, tokens: list[int], *, rows: int = 1) -> GrammarText:
    pool.ask(sequence, KEY, np.array(tokens, np.int32), len(tokens), len(tokens) - rows + 1)
    text = pool.text(sequence)
    assert text is not None
    return text


def answered(pool: GrammarPool, *texts: GrammarText) -> None:
    poll(pool, lambda: all(text.outcome is not None for text in texts))


def answer(pool: GrammarPool, sequence: int, tokens: list[int]) -> GrammarText:
    """As `ask`, and wait for the answer."""
    text = ask(pool, sequence, tokens)
    answered(pool, text)
    return text


def tokens_of(text: GrammarText, row: int = -1) -> set[int]:
    assert isinstance(text.outcome, MaskRows)
    words, first, rows, _ = text.outcome
    return set(np.unpackbits(words[first : first + rows][row].view(np.uint8), bitorder="little").nonzero()[0].tolist())


@pytest.mark.parametrize(("kind", "states"), [*((kind, 3) for kind in GrammarKind), (GrammarKind.REGEX, MAX_STATES)])
def test_masks_are_those_of_the_tokens_whatever_was_asked_before(pool, monkeypatch, kind, states):
    """Requests of several texts, some replaced before they are answered, forks, and states that were dropped."""
    monkeypatch.setattr(process, "MAX_STATES", states)
    register(pool, SOURCES[kind], kind)
    source, dice = compiled(kind, SOURCES[kind]), random.Random(5)
    texts: dict[int, list[int]] = {0: []}
    compared = 0
    for number in range(1, 250):
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
                found = answer(pool, sequence, [*text, 263])
                assert isinstance(found.outcome, InvalidRequest)
                assert found.outcome.metadata == {"at": str(len(text))}
        if dice.random() < 0.3:
            every = [(ask(pool, each, tokens), tokens) for each, tokens in texts.items()]
            answered(pool, *(found for found, _ in every))
            for found, tokens in every:
                assert tokens_of(found) == allowed(source, tokens)
                compared += 1
    assert compared > 100


def test_more_masks_than_the_shared_memory_has_rows(pool):
    text = list(b"ab,cd,ef")
    texts = [ask(pool, sequence, text, rows=8) for sequence in range(MASK_ROWS // 8 + 10)]
    answered(pool, *texts)
    expected = [allowed(compiled(GrammarKind.REGEX, LIST), text[: at + 1]) for at in range(8)]
    for each in texts:
        assert [tokens_of(each, row) for row in range(8)] == expected


def test_a_long_text_is_read_in_pieces_and_others_do_not_wait_for_it(pool, sent):
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
    answer(pool, 3, list(b"abc," * 2000))
    assert len(sent) == 2, "more time to spare, longer pieces"


def test_a_child_of_a_long_text_gets_a_copy_of_its_state(pool, sent):
    pool.spare_s = 1.0
    text = list(b"abc," * 5000 + b"d")
    answer(pool, 1, text)
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


def test_a_long_text_that_is_not_allowed_is_refused_at_its_place(pool):
    text = list(b"abc," * 300)
    text[777] = ord("x")
    found = answer(pool, 1, text)
    assert isinstance(found.outcome, InvalidRequest) and found.outcome.metadata == {"at": "777"}
    text[777] = ord("a")
    found = answer(pool, 1, text)
    assert tokens_of(found) == {*b"abcdef"}


def test_what_a_dropped_grammar_has_not_answered_is_refused_and_can_be_asked_again(pool):
    text = ask(pool, 1, list(b"ab"))
    pool.flush()
    queued = ask(pool, 2, list(b"ab"))
    pool.change([], [KEY])
    assert isinstance(text.outcome, GrammarUnknown) and isinstance(queued.outcome, GrammarUnknown)
    assert isinstance(ask(pool, 1, list(b"ab")).outcome, GrammarUnknown)
    register(pool, LIST)
    text = answer(pool, 1, list(b"ab"))
    assert not isinstance(text.outcome, ExecutorError) and ord(",") in tokens_of(text)


def test_a_grammar_that_cannot_be_compiled_again_refuses_what_waits_and_no_later_request(pool, sockets, monkeypatch):
    """Something else than its limits may have ended its process, so the next request tries anew."""
    monkeypatch.setattr(starter, "RESTART_S", 0.0)
    answered(pool, ask(pool, 1, list(b"ab")))
    kill_the_starter(pool, sockets)  # and with it the process that has compiled the grammar
    text = ask(pool, 1, list(b"ab,"))
    for _ in range(process.TRIES):
        assert text.outcome is None
        kill_the_starter(pool, sockets, text)
    assert isinstance(text.outcome, GrammarTooComplex)
    text = answer(pool, 1, list(b"ab,"))
    assert tokens_of(text) == {*b"abcdef"}


def kill_the_starter(pool: GrammarPool, sockets: list[Watched], *texts: GrammarText) -> None:
    """Kill the process that starts those of grammars before it starts another, though the engine has its end; wait
    until the pool has started it again, or refused a text."""
    first = pool.starter.process
    assert first is not None
    first.send_signal(signal.SIGSTOP)
    poll(pool, lambda: sockets[-1].fileno() >= 0, 0.01)
    first.kill()
    poll(pool, lambda: pool.starter.process is not first or any(each.outcome for each in texts), 0.01)


def test_more_texts_than_a_message_has_room_for(pool, sent):
    texts = [ask(pool, sequence, list(b"abcde," * 9 + b"a")) for sequence in range(300)]
    answered(pool, *texts)
    assert len(sent) > 1 and sum(sent) == 300 * 55
    assert all(tokens_of(each) == {*b"abcdef,", END} for each in texts)


@pytest.mark.parametrize("message", ["", "a", "8 bytes.", "naïve", "\udcff", "ß" * 200])
def test_messages_of_errors_are_read_as_they_were_written(message):
    kind, *_ = found = error(TOO_COMPLEX, message)
    assert kind == TOO_COMPLEX
    assert error_of(found[1:]) == message.replace("\udcff", "?")
