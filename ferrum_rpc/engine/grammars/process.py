"""The process of one grammar as the engine sees it: what it is asked, what it answers, and its end.

All requests of a step are one frame, and their masks are in shared memory when it is answered. Until then the process
gets no more requests for masks, so the rows of that memory are used from the first on each time. A text that needs many
tokens, or a copy of a long state, gets them in pieces behind the masks of a frame: others wait for a piece at most.
"""

from __future__ import annotations

import os
import select
import socket
import time
from contextlib import suppress
from typing import Final

import numpy as np

from ferrum_rpc.core import Grammar
from ferrum_rpc.engine.channel import READ_BYTES
from ferrum_rpc.engine.grammars.messages import INVALID, MASK_ROWS, NO_TEXT, Frames, map_masks, pack
from ferrum_rpc.engine.grammars.starter import GrammarStarter
from ferrum_rpc.engine.grammars.text import NOT_SENT, GrammarText, Words
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

QUICK_US: Final = 1000
QUICK_MASKS: Final = 64
"""A grammar counts as slow from a mask that a step waited for too long until so many requests were answered sooner."""

MAX_STATES: Final = 512
MAX_STATE_TOKENS: Final = 1 << 20
"""Texts of one grammar whose states are kept, and their tokens, of some 60 bytes each; the least recently used are
dropped first, and computed again."""

PIECE_TOKENS: Final = 64
"""Tokens that a text may need together with its masks, some 0.1 ms."""

COPIED_TOKENS: Final = 16
"""Tokens of a copied state that take as long as one."""

TOKENS_PER_S: Final = 250_000
"""Tokens of pieces in the time that a step may wait: about half as many as a grammar reads in it."""


class GrammarProcess:
    """A grammar, whose masks have so many ``words``. ``failure``: why it cannot be compiled. ``compiled``: whether it
    is, in the present process; ``was_compiled``: in any. ``slow``: answers until it counts as quick again.

    ``_queue``: the texts with a request that is not sent. ``_sent``: those with one that is not answered, in its order,
    of which ``_masked`` have masks, in the first ``_rows``. ``_states``: those whose state the process has, the least
    recently used first. ``_careful``: the process has ended while it was asked, and is asked one by one.
    ``_cpu_clock``: the clock of its processor time; None: it is not known, or the priority is low already.
    ``_cpu_heard``: what it showed when the process had been silent for a moment; None: it is not silent."""

    def __init__(self, grammar: Grammar, words: int, starter: GrammarStarter, poll: select.poll) -> None:
        self._grammar, self._words, self._starter, self._poll = grammar, words, starter, poll
        self.failure: ExecutorError | None = None
        self.compiled = self.was_compiled = False
        self.slow = 0
        self._queue: dict[GrammarText, None] = {}
        self._sent: dict[int, GrammarText] = {}
        self._masked = self._rows = 0
        self._states: dict[int, GrammarText] = {}
        self._ended: list[int] = []
        self._socket: socket.socket | None = None
        self._masks: Words = np.empty((0, words), np.int32)
        self._frames = Frames()
        self._unsent = bytearray()
        self._blocked = False
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

    # --- requests ---------------------------------------------------------------------------------------------------

    def want(self, text: GrammarText) -> None:
        """Queue the request of a text; `send` sends it."""
        if self.failure is not None:
            text.outcome = self.failure
            return
        text.asked = time.monotonic()
        if not self.asked:
            self._heard = text.asked
        self._queue[text] = None

    def drop(self, text: GrammarText) -> None:
        """The text has ended."""
        self._queue.pop(text, None)
        if self._states.pop(text.number, None) is not None:
            self._ended.append(text.number)

    def send(self, spare_s: float) -> None:
        """Send what can be sent. ``spare_s``: how long a step may wait for its masks."""
        if self._queue and self.compiled and not self._masked and not (self._careful and self._sent):
            self._put(max(PIECE_TOKENS, int(spare_s * TOKENS_PER_S)))
        if self._unsent:
            self._write()

    def _put(self, piece: int) -> None:
        """Put what is wanted in a frame, with pieces of so many tokens in all."""
        self._make_room()
        asks: list[int] = []
        contents: list[bytes] = []
        long: list[GrammarText] = []
        row = 0
        for text in self._ready():
            source, keep = self._start(text)
            work = min(text.first_mask, text.length) - keep
            copied = self._states[source].known // COPIED_TOKENS if source != NO_TEXT else 0
            if work + copied <= PIECE_TOKENS:
                if row + text.mask_count <= MASK_ROWS:
                    row += self._ask(text, source, keep, text.length, row, asks, contents)
                    del self._queue[text]
            elif source == NO_TEXT:
                long.append(text)
            elif piece > 0:
                self._ask(text, source, keep, keep, NOT_SENT, asks, contents)
                piece -= copied
            if self._careful and asks:
                break
        for text in long:
            if piece <= 0 or (self._careful and asks):
                break
            _, keep = self._start(text)
            end = min(text.first_mask, text.length, keep + piece)
            self._ask(text, NO_TEXT, keep, end, NOT_SENT, asks, contents)
            piece -= end - keep
        if row:
            self._rows = row
        if asks:
            self._unsent += pack([len(self._ended), *self._ended, *asks], b"".join(contents))
            self._ended = []

    def _ready(self) -> list[GrammarText]:
        """The texts that can be sent, first those that begin with a copy of another's state, while that is known."""
        copies: list[GrammarText] = []
        others: list[GrammarText] = []
        for text in self._queue:
            if (origin := text.origin) is not None and origin.number not in self._states:
                origin = text.origin = None
            if text.sent == NOT_SENT and (origin is None or origin.sent == NOT_SENT):
                (others if origin is None else copies).append(text)
        return copies + others

    def _start(self, text: GrammarText) -> tuple[int, int]:
        """The text whose state it begins with, and how many tokens it has then."""
        if (origin := text.origin) is None:
            return NO_TEXT, min(text.known, text.first_mask)
        keep = min(text.common(origin.tokens[: origin.known]), text.first_mask)
        return (origin.number, keep) if keep else (NO_TEXT, 0)

    def _ask(  # noqa: PLR0917 - once for each row of a step
        self, text: GrammarText, source: int, keep: int, end: int, row: int, asks: list[int], contents: list[bytes]
    ) -> int:
        """Ask for the tokens of a text from ``keep`` up to ``end``, and for its masks in ``row`` and more, if that is
        one. How many masks these are."""
        masks = 0 if row == NOT_SENT else text.mask_count
        asks += text.number, source, keep, end - keep, text.first_mask - keep if masks else end - keep + 1, row
        contents.append(text.tokens[keep:end].tobytes())
        text.was_sent(keep, end, row if masks else NOT_SENT)
        text.origin = None
        self._states.pop(text.number, None)
        self._states[text.number] = self._sent[text.number] = text
        self._masked += masks > 0
        return masks

    def _make_room(self) -> None:
        """Drop the states that were not used for the longest time, if others are to come and there are too many."""
        states = self._states
        added = sum([text.number not in states for text in self._queue])
        if not added:
            return
        count, tokens = len(states) + added, sum([text.known for text in states.values()])
        needed = {text.number for text in self._queue} | self._sent.keys()
        needed |= {text.origin.number for text in self._queue if text.origin is not None}
        for text in [each for number, each in states.items() if number not in needed]:
            if count <= MAX_STATES and tokens <= MAX_STATE_TOKENS:
                break
            count, tokens = count - 1, tokens - text.known
            del states[text.number]
            self._ended.append(text.number)
            text.lose_state()

    def _write(self) -> None:
        if self._socket is None:
            return
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._lose()
            return
        del self._unsent[:sent]
        if self._blocked != bool(self._unsent):
            self._blocked = not self._blocked
            self._poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._blocked else 0))

    # --- answers ----------------------------------------------------------------------------------------------------

    def receive(self) -> None:
        """Take what it has sent, which `select.poll` has reported."""
        connected = self._socket
        if connected is None:
            return
        if self._unsent:
            self._write()
            if self._socket is not connected:
                return
        try:
            data = connected.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose()
            return
        self._heard, self._cpu_heard = time.monotonic(), None
        for numbers, content in self._frames.feed(data):
            if not self._pid:
                [self._pid] = numbers
                self._cpu_clock = process_clock(self._pid)
            elif self.compiled:
                self._answered(numbers, content)
            elif not numbers:
                self.compiled = self.was_compiled = True
                self._tries = 0
            else:
                self.end(_refusal(bool(numbers[0]), content))
                return

    def _answered(self, numbers: list[int], content: bytes) -> None:
        copied = self._masks[: self._rows].copy()
        for at in range(0, len(numbers), 2):
            text, consumed = self._sent.pop(numbers[at]), numbers[at + 1]
            row, reached, end, stale = text.row, text.kept + consumed, text.sent, text.stale
            self._masked -= row != NOT_SENT
            dropped = text.number not in self._states
            if consumed < 0:
                self._states.pop(text.number, None)
                text.lose_state()
            else:
                text.was_answered(consumed)
            if dropped or stale:
                continue
            if consumed < 0:
                self._refuse(text, _refusal(consumed != INVALID, content))
            elif reached < min(end, text.required):
                message = f"the grammar does not allow token {reached} of its text"
                self._refuse(text, InvalidRequest(message, field="token_ids", metadata={"at": reached}))
            elif text not in self._queue:
                masks = max(0, reached - text.first_mask + 1)
                text.outcome = copied[row : row + masks]
                if self.slow and (self._heard - text.asked) * 1e6 < QUICK_US:
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
        masks = os.memfd_create("ferrum-grammar", os.MFD_CLOEXEC)
        try:
            self._masks = map_masks(masks, self._words)
            self._socket = self._starter.start(masks)
        finally:
            os.close(masks)
        if self._socket is None:
            return
        self._poll.register(self._socket, select.POLLIN)
        self._frames, self._blocked, self._pid = Frames(), False, 0
        self._unsent = bytearray(pack([self._grammar.kind.value], self._grammar.text))
        self._heard = time.monotonic()
        self._write()

    def disconnect(self) -> None:
        """End the process."""
        self.compiled, self._cpu_clock = False, None
        if self._socket is not None:
            self._poll.unregister(self._socket)
            self._socket.close()
            self._socket = None
        for text in (*self._states.values(), *self._sent.values()):
            text.lose_state()
        self._states.clear()
        self._sent.clear()
        self._ended, self._masked = [], 0
        self._unsent.clear()

    def look_after(self, now: float) -> None:
        """End a process that is silent, start one that has ended, and lower the priority of one that needs much time
        for what it does."""
        if self._socket is None:
            if self.failure is None:
                self.connect()
        elif self.compiled and not self.asked:
            return
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
        compiled, sent = self.compiled, [each for each in self._sent.values() if each.number in self._states]
        blamed = sent[0] if sent and not sent[0].stale else None
        self.disconnect()
        if not compiled:
            self._tries += 1
            if not self.was_compiled or self._tries >= TRIES:
                self.end(GrammarTooComplex("the grammar exceeds the time or memory of its compilation"))
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
        asked = [*self._queue, *self._sent.values()]
        self.disconnect()
        self.failure = error
        self._queue.clear()
        for text in asked:
            text.outcome = error


def _refusal(too_complex: bool, message: bytes) -> ExecutorError:
    text = message.decode(errors="replace")
    if too_complex:
        return GrammarTooComplex(f"the grammar exceeds a limit: {text}")
    return InvalidRequest(f"invalid grammar: {text}", field="text")
