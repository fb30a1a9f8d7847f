"""The process of one grammar as the engine sees it: what it is asked, what it answers, and its end.

All requests of a step are one message, and their masks are in shared memory when it is answered. Until then the process
gets no more requests for masks, so the rows of that memory are used from the first on each time. A text that needs many
tokens, or a copy of a long state, gets them in pieces behind the masks of a message: others wait for a piece at most.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import time
from array import array
from collections import deque
from contextlib import suppress
from typing import Final

import numpy as np

from ferrum_rpc.core import Grammar, MaskRows
from ferrum_rpc.engine.grammars import messages
from ferrum_rpc.engine.grammars.messages import COMPILED, MASK_ROWS, NO_TEXT, NUMBERS, TOO_COMPLEX, Ask
from ferrum_rpc.engine.grammars.starter import GrammarStarter
from ferrum_rpc.engine.grammars.text import GrammarText
from ferrum_rpc.engine.liveness import process_clock
from ferrum_rpc.errors import ExecutorError, GrammarTooComplex, InvalidRequest

SILENT_S: Final = 30.0
"""A process that has not answered for so long is given up. It ends itself much earlier, if it runs."""

TRIES: Final = 2

QUICK_CPU_S: Final = 0.05
QUICK_COMPILE_CPU_S: Final = 0.5
"""Processor time after which a process that has not answered gets a low priority, for good: it then takes mostly what
others leave. Nearly all masks take a hundredth of that."""

LOW_PRIORITY: Final = 15

_NOTHING: Final = array("q")

QUICK_US: Final = 1000
QUICK_MASKS: Final = 64
"""A grammar counts as slow from a mask that a step waited for too long until so many requests were answered sooner."""

MAX_STATES: Final = 512
MAX_STATE_TOKENS: Final = 1 << 20
"""Texts of one grammar whose states are kept, and their tokens, of some 60 bytes each; the least recently used are
dropped first, and computed again."""

PIECE: Final = -1

FULL: Final = NUMBERS - 2 * MASK_ROWS
"""Numbers of a message that is full: it has room for any whole request, and no more."""

PIECE_TOKENS: Final = 64
"""Tokens that a text may need together with its masks, some 0.1 ms."""

COPIED_TOKENS: Final = 16
"""Tokens of a copied state that take as long as one."""

TOKENS_PER_S: Final = 250_000
"""Tokens of pieces in the time that a step may wait: about half as many as a grammar reads in it."""


class GrammarProcess:
    """A grammar, whose masks have so many ``words``. ``failure``: why it cannot be compiled. ``compiled``: whether it
    is, in the present process; ``was_compiled``: in any. ``slow``: answers until it counts as quick again.
    ``_waits``: it could not be compiled again, and has no process until it is asked.

    ``_queue``: the texts with a request that is not sent. ``_sent``: what is not answered, in its order: the text, from
    which to which of its tokens, and the first row of its masks, or `PIECE`; ``_whole`` of these are requests, and not
    pieces of them, with masks in the first ``_rows``. ``_sent_at``: when the last message was made. ``_states``: the
    texts whose state the process has, the least recently used first; ``_ended``: the numbers of those whose state is to
    be dropped. ``_careful``: the process has ended while it was asked, and is asked one by one.
    ``_cpu_clock``: the clock of its processor time; None: it is not known, or the priority is low already.
    ``_cpu_heard``: what it showed when the process had been silent for a moment; None: it is not silent."""

    def __init__(self, grammar: Grammar, words: int, starter: GrammarStarter, poll: select.poll) -> None:
        self._grammar, self._words, self._starter, self._poll = grammar, words, starter, poll
        self.failure: ExecutorError | None = None
        self.compiled = self.was_compiled = self._waits = False
        self.slow = 0
        self._queue: dict[GrammarText, None] = {}
        self._sent: deque[tuple[GrammarText, int, int, int]] = deque()
        self._whole = self._rows = 0
        self._sent_at = 0.0
        self._states: dict[GrammarText, None] = {}
        self._ended: list[int] = []
        self._socket: socket.socket | None = None
        self._masks = np.empty((0, words), np.int32)
        self._unsent = _NOTHING
        self._heard = 0.0
        self._tries = 0
        self._careful = False
        self._pid = 0
        self._cpu_clock: int | None = None
        self._cpu_heard: float | None = None

    @property
    def descriptor(self) -> int | None:
        """Of its socket, if it has one."""
        return None if self._socket is None else self._socket.fileno()

    @property
    def asked(self) -> bool:
        """Whether it has to answer."""
        return bool(self._queue or self._sent)

    @property
    def idle(self) -> bool:
        """Whether nothing is to be done before it is asked again, unless it ends."""
        done = self.failure is not None or self._waits
        return done or (self.compiled and not (self._queue or self._sent or self._unsent))

    # --- requests ---------------------------------------------------------------------------------------------------

    def want(self, text: GrammarText) -> None:
        """Queue the request of a text; `send` sends it."""
        if self.failure is not None:
            text.outcome = self.failure
        else:
            self._queue[text] = None
            self._waits = False

    def drop(self, text: GrammarText) -> None:
        """The text has ended."""
        self._queue.pop(text, None)
        if text in self._states:
            del self._states[text]
            self._ended.append(text.number)

    def send(self, spare_s: float) -> None:
        """Send what can be sent. ``spare_s``: how long a step may wait for its masks."""
        if self._queue and self.compiled and not (self._unsent or self._whole or (self._careful and self._sent)):
            self._put(max(PIECE_TOKENS, int(spare_s * TOKENS_PER_S)))
        if self._unsent:
            self._write()

    def _put(self, piece: int) -> None:
        """Put what is wanted in a message, with pieces of so many tokens in all."""
        if not self._queue.keys() <= self._states.keys():
            self._make_room()
        ended = self._ended[:MASK_ROWS]
        numbers = [len(ended), *ended]
        empty = len(numbers)
        long: list[GrammarText] = []
        idle, row = not self._sent, 0
        for text in self._ready():
            if len(numbers) > FULL or (self._careful and len(numbers) > empty):
                break
            keep, origin = self._start(text)
            copied = 0 if origin is None else origin.known // COPIED_TOKENS
            if text.first_mask - keep + copied <= PIECE_TOKENS:
                if row + text.rows <= MASK_ROWS:
                    self._ask(numbers, text, origin, keep, len(text.tokens), row)
                    self._whole += 1
                    row += text.rows
                    del self._queue[text]
            elif origin is None:
                long.append(text)
            elif piece > 0:
                self._ask(numbers, text, origin, keep, keep, PIECE)
                piece -= copied
        for text in long:
            piece = min(piece, NUMBERS - len(numbers) - len(Ask._fields))
            if piece <= 0 or (self._careful and len(numbers) > empty):
                break
            keep, _ = self._start(text)
            end = min(text.first_mask, len(text.tokens), keep + piece)
            self._ask(numbers, text, None, keep, end, PIECE)
            piece -= end - keep
        if len(numbers) > empty:
            del self._ended[: len(ended)]
            self._unsent, self._rows, self._sent_at = array("q", numbers), row, time.monotonic()
            if idle:
                self._heard = self._sent_at

    def _ready(self) -> list[GrammarText]:
        """The texts that can be sent, first those that begin with a copy of another's state, while that is known."""
        ready = [text for text in self._queue if not text.busy]
        if copies := [text for text in ready if text.origin is not None]:
            for text in copies:
                if text.origin not in self._states:
                    text.origin = None
            copies = [text for text in copies if text.origin is not None and not text.origin.busy]
            ready = copies + [text for text in ready if text.origin is None]
        return ready

    @staticmethod
    def _start(text: GrammarText) -> tuple[int, GrammarText | None]:
        """How many tokens of a text its state has to begin with, and the text whose state is copied for that."""
        origin, known, first_mask = text.origin, text.known, text.first_mask
        if origin is not None:
            known = text.common(np.array(origin.tokens[: origin.known]))
        return known if known < first_mask else first_mask, origin if known else None

    def _ask(  # noqa: PLR0917 - once for each row of a step
        self, numbers: list[int], text: GrammarText, origin: GrammarText | None, keep: int, end: int, row: int
    ) -> None:
        """Ask for the tokens of a text from ``keep`` up to ``end``, and for its masks in ``row`` and more, unless that
        is `PIECE`."""
        source = NO_TEXT if origin is None else origin.number
        first_mask = end + 1 if row == PIECE else text.first_mask
        numbers += (text.number, source, keep, end - keep, first_mask - keep, row)
        numbers += text.tokens[keep:end]
        text.known, text.busy, text.origin = end, True, None
        self._states.pop(text, None)
        self._states[text] = None
        self._sent.append((text, keep, end, row))

    def _make_room(self) -> None:
        """Drop the states that were not used for the longest time, if there will be too many."""
        count, tokens = len(self._states.keys() | self._queue.keys()), sum([text.known for text in self._states])
        needed = self._queue.keys() | {text for text, *_ in self._sent} | {text.origin for text in self._queue}
        for text in [each for each in self._states if each not in needed]:
            if count <= MAX_STATES and tokens <= MAX_STATE_TOKENS:
                break
            count, tokens = count - 1, tokens - text.known
            self.drop(text)
            text.lose_state()

    def _write(self) -> None:
        """Send the message that is not sent. If there is no room, it is sent when the process has read others."""
        if self._socket is None:
            return
        try:
            self._socket.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:
            self._lose()
            return
        self._unsent = _NOTHING

    # --- answers ----------------------------------------------------------------------------------------------------

    def receive(self) -> None:
        """Take a message that it has sent, if there is one."""
        if self._socket is None:
            return
        try:
            numbers = messages.receive(self._socket)
        except BlockingIOError:
            return
        except OSError:
            numbers = _NOTHING
        if not numbers:
            self._lose()
            return
        self._heard, self._cpu_heard = time.monotonic(), None
        if self.compiled:
            self._answered(numbers)
        elif not self._pid:
            [self._pid] = numbers
            self._cpu_clock = process_clock(self._pid)
        elif numbers[0] == COMPILED:
            self.compiled = self.was_compiled = True
            self._tries = 0
        else:
            self.end(_refusal(numbers))

    def _answered(self, numbers: array[int]) -> None:
        """Take the answers to the first of what was sent."""
        masks = self._masks[: self._rows].copy()
        quick = (self._heard - self._sent_at) * 1e6 < QUICK_US
        for at, consumed in enumerate(numbers):
            text, kept, end, row = self._sent.popleft()
            whole = row != PIECE
            self._whole -= whole
            passed = text.stale or text not in self._states  # no text waits for this
            text.busy, text.stale = False, False
            reached = kept + consumed
            if consumed < 0:
                self._states.pop(text, None)
                text.known = 0
                if not passed:
                    self._refuse(text, _refusal(numbers[at:]))
                break
            text.known = min(text.known, reached)
            if passed:
                continue
            if reached < end and reached < text.required:
                message = f"the grammar does not allow token {reached} of its text"
                self._refuse(text, InvalidRequest(message, field="token_ids", metadata={"at": reached}))
            elif whole:
                text.outcome = MaskRows(masks, row, max(0, reached - text.first_mask + 1))
                if self.slow and quick:
                    self.slow -= 1
        if self._careful and not self.asked:
            self._careful = False

    def _refuse(self, text: GrammarText, error: ExecutorError) -> None:
        """Refuse a request."""
        text.outcome = error
        self._queue.pop(text, None)

    # --- processes that end -----------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Start the process, if it can be started now. What is wanted is asked when it has compiled the grammar."""
        text = self._grammar.text
        file = os.memfd_create("ferrum-grammar", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, max(len(text), MASK_ROWS * self._words * self._masks.itemsize))
            memory = mmap.mmap(file, 0)
            memory[: len(text)] = text
            self._masks = messages.masks_in(memory, self._words)
            self._socket = self._starter.start(file)
        finally:
            os.close(file)
        if self._socket is None:
            return
        self._poll.register(self._socket, select.POLLIN)
        self._pid, self._heard = 0, time.monotonic()
        self._unsent = array("q", [self._grammar.kind.value, len(text)])
        self._write()

    def disconnect(self) -> None:
        """End the process."""
        self.compiled, self._cpu_clock = False, None
        if self._socket is not None:
            self._poll.unregister(self._socket)
            self._socket.close()
            self._socket = None
        for text in (*self._states, *[text for text, *_ in self._sent]):
            text.lose_state()
        self._states.clear()
        self._sent.clear()
        self._ended, self._whole = [], 0
        self._unsent = _NOTHING

    def look_after(self, now: float) -> None:
        """End a process that is silent, start one that has ended, and lower the priority of one that needs much time
        for what it does."""
        if self._socket is None:
            if not self.idle:
                self.connect()
        elif self.compiled and not self.asked:
            return  # it may be silent
        elif now - self._heard > SILENT_S:
            self._lose()
        elif self._cpu_clock is not None and now - self._heard > QUICK_CPU_S:
            quick = QUICK_CPU_S if self.compiled else QUICK_COMPILE_CPU_S
            with suppress(OSError):  # it has ended
                used = time.clock_gettime(self._cpu_clock)
                if self._cpu_heard is None:
                    self._cpu_heard = used
                elif used - self._cpu_heard > quick:
                    os.setpriority(os.PRIO_PROCESS, self._pid, LOW_PRIORITY)
                    self._cpu_clock = None

    def _lose(self) -> None:
        """The process has ended, or is silent: it may have exceeded its limits, or was killed."""
        compiled, sent = self.compiled, [text for text, *_ in self._sent if text in self._states]
        blamed = sent[0] if sent and not sent[0].stale else None
        self.disconnect()
        if not compiled:
            self._tries += 1
            if not self.was_compiled:
                self.end(GrammarTooComplex("the grammar exceeds the time or memory of its compilation"))
                return
            if self._tries >= TRIES:  # it was compiled once, so something else may have ended it
                for text in list(self._queue):
                    self._refuse(text, GrammarTooComplex("the grammar's process ended when it was compiled again"))
                self._tries, self._waits = 0, True
                return
        if sent:
            self._careful = True
            self._queue = dict.fromkeys([*sent, *self._queue])  # the first is the one that it did not answer
        if blamed is not None:
            blamed.tries += 1
            if blamed.tries >= TRIES:
                self._refuse(blamed, GrammarTooComplex("the mask of a row exceeds the time or memory of the grammar"))
        self.connect()

    def end(self, error: ExecutorError) -> None:
        """End the process for good, and refuse everything with ``error``."""
        asked = [*self._queue, *[text for text, *_ in self._sent]]
        self.disconnect()
        self.failure = error
        self._queue.clear()
        for text in asked:
            text.outcome = error


def _refusal(error: array[int]) -> ExecutorError:
    """For an error, and its message."""
    text = messages.error_of(error[1:])
    if error[0] == TOO_COMPLEX:
        return GrammarTooComplex(f"the grammar exceeds a limit: {text}")
    return InvalidRequest(f"invalid grammar: {text}", field="text")
