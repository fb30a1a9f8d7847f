"""The processes of grammars as the engine sees them: asked for masks, restarted, given up.

Nothing here waits unless the caller says how long. A process that ends, for whatever reason, is started again and
asked again: its states are a function of the tokens that the engine has. A request whose process ends twice is refused,
and so are all of a grammar that cannot be compiled.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import structlog

from ferrum_rpc.core import Grammar, TokenArray
from ferrum_rpc.engine.channel import READ_BYTES, Messages, dump
from ferrum_rpc.engine.grammars.messages import LOST, READY, Ask
from ferrum_rpc.engine.liveness import process_clock
from ferrum_rpc.errors import ExecutorError, GrammarTooComplex, GrammarUnknown, InvalidRequest

log = structlog.get_logger("ferrum_rpc.engine")

Words = npt.NDArray[np.int32]
"""Masks, int32 [rows, ceil(V / 32)]."""

START_S: Final = 30.0
"""Seconds for which the start of the engine waits until the tokenizer is loaded."""

SILENT_S: Final = 30.0
"""A process that has not answered for so long is given up. It ends itself much earlier, if it runs."""

RESTART_S: Final = 1.0
"""Seconds between two starts of the process that has the tokenizer."""

TRIES: Final = 2

QUICK_CPU_S: Final = 0.05
QUICK_COMPILE_CPU_S: Final = 0.5
"""Processor time after which a process that has not answered gets a low priority, for good: it then takes mostly what
others leave. Nearly all masks take a hundredth of that."""

LOW_PRIORITY: Final = 15

MAX_TEXTS: Final = 1 << 14
"""Texts whose last request is kept, far more than sequences have one in flight."""

QUICK_US: Final = 1000
QUICK_MASKS: Final = 64
"""A grammar counts as slow from a mask that a step waited for too long until so many requests were answered sooner."""


class NoGrammars(Exception):
    """The tokenizer cannot be loaded, or the grammar library."""


@dataclass(slots=True, eq=False)
class MasksRequest:
    """The last request for masks of a text: ``tokens`` int32 [n] are all of it, of which ``required`` must be allowed.
    The masks of the rows behind ``first_mask`` tokens and of more are wanted. ``outcome``: the words, of fewer rows
    where a later token is not allowed; or the refusal; None: it is not there yet."""

    grammar: bytes
    tokens: TokenArray
    required: int
    first_mask: int
    serial: int = 0
    asked: float = 0.0
    tries: int = 0
    outcome: Words | ExecutorError | None = None


@dataclass(slots=True, eq=False)
class GrammarProcess:
    """A grammar. ``known``: the tokens of the texts whose state it has, if nothing was refused. ``waiting``: what was
    asked and not answered, by serial. ``slow``: answers until it counts as quick again.
    ``careful``: it has ended while it was asked. ``cpu_clock``: the clock of its
    processor time, which was ``cpu_heard`` when it was heard last; None: it is not known, or has a low priority."""

    grammar: Grammar
    socket: socket.socket | None = None
    messages: Messages = field(default_factory=Messages)
    compiled: bool = False
    was_compiled: bool = False
    failure: ExecutorError | None = None
    known: dict[int, TokenArray] = field(default_factory=dict)
    waiting: dict[int, tuple[int, MasksRequest]] = field(default_factory=dict)
    asks: list[Ask] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    unsent: bytearray = field(default_factory=bytearray)
    heard: float = 0.0
    tries: int = 0
    slow: int = 0
    careful: bool = False
    pid: int = 0
    cpu_clock: int | None = None
    cpu_heard: float = 0.0


class GrammarPool:
    """The grammars by their keys, for a model of ``vocab_size`` tokens, of which those of ``ends`` end a text.
    ``memory``: bytes of one process. Called by one thread."""

    def __init__(self, tokenizer: Path, vocab_size: int, ends: Iterable[int], memory: int) -> None:
        self._arguments = str(tokenizer), str(vocab_size), ",".join(map(str, ends)), str(memory)
        self._words = -(-vocab_size // 32)
        self._processes: dict[bytes, GrammarProcess] = {}
        self._requests: OrderedDict[int, MasksRequest] = OrderedDict()
        self._of_socket: dict[int, GrammarProcess] = {}
        self._poll = select.poll()
        self._serial = 0
        self._control: socket.socket | None = None
        self._first: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._start()

    # --- the first process ------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Wait until the tokenizer is loaded. Raises `NoGrammars`."""
        assert self._control is not None  # noqa: S101 - it was just started
        self._control.settimeout(START_S)
        try:
            answer = self._control.recv(1024)
        except TimeoutError:
            raise NoGrammars(f"the tokenizer was not loaded in {START_S:g} s") from None
        if answer != READY:
            raise NoGrammars(answer.decode(errors="replace") or "the process that loads the tokenizer has ended")
        self._control.setblocking(False)

    def _start(self) -> None:
        self._stop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        command = [sys.executable, "-m", f"{__package__}.worker", str(theirs.fileno()), *self._arguments]
        with theirs:
            self._first = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
        self._control, self._started = ours, time.monotonic()

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._first is not None:
            self._first.kill()
            self._first.wait()
            self._first = None

    def close(self) -> None:
        """End all processes."""
        for process in self._processes.values():
            self._disconnect(process)
        self._stop()

    # --- grammars ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._processes)

    def change(self, added: Iterable[tuple[bytes, Grammar]], dropped: Iterable[bytes]) -> None:
        """Begin to compile grammars, and end others."""
        for key in dropped:
            if (process := self._processes.pop(key, None)) is not None:
                self._disconnect(process)
        for key, grammar in added:
            self._processes[key] = process = GrammarProcess(grammar)
            self._connect(process)

    def compiled(self, key: bytes) -> bool:
        """Whether a grammar is compiled. Raises the reason why it cannot be."""
        process = self._processes.get(key)
        if process is None:
            raise GrammarUnknown("the grammar was dropped while it was compiled: register it again")
        self.poll()
        if process.failure is not None:
            raise process.failure
        return process.was_compiled

    # --- requests ---------------------------------------------------------------------------------------------------

    def ask(self, text: int, key: bytes, tokens: TokenArray, required: int, first_mask: int) -> MasksRequest:
        """Ask for masks of a text; `flush` sends it. Nothing is asked again that is known or on its way."""
        known = self._requests.get(text)
        if (
            known is not None
            and (known.grammar, known.required, known.first_mask) == (key, required, first_mask)
            and not isinstance(known.outcome, ExecutorError)
            and np.array_equal(known.tokens, tokens)
        ):
            self._requests.move_to_end(text)
            return known
        self._requests[text] = request = MasksRequest(key, tokens, required, first_mask)
        self._requests.move_to_end(text)
        if len(self._requests) > MAX_TEXTS:
            self.forget([next(iter(self._requests))])
        process = self._processes.get(key)
        if process is None:
            request.outcome = GrammarUnknown("the grammar is not registered any more: register it again")
        elif process.failure is not None:
            request.outcome = process.failure
        else:
            self._ask(process, text, request)
        return request

    def extend(self, text: int, request: MasksRequest, token: int) -> None:
        """Ask for the mask behind a text whose last request this is, and one more token."""
        known, tokens = request.tokens, np.empty(len(request.tokens) + 1, np.int32)
        tokens[:-1], tokens[-1] = known, token
        following = MasksRequest(request.grammar, tokens, len(tokens), len(tokens))
        process = self._processes.get(request.grammar)
        if process is None or process.known.get(text) is not known:
            self.ask(text, request.grammar, tokens, len(tokens), len(tokens))
            return
        self._requests[text] = following
        self._put(process, text, following, len(known))

    def request(self, text: int) -> MasksRequest | None:
        """The last request for masks of a text."""
        return self._requests.get(text)

    def is_slow(self, key: bytes) -> bool:
        """Whether steps should not count on masks of this grammar that are not there yet."""
        process = self._processes.get(key)
        return process is None or process.slow > 0 or not process.compiled

    def was_slow(self, key: bytes) -> None:
        """A step waited for too long."""
        if (process := self._processes.get(key)) is not None:
            process.slow = QUICK_MASKS

    def forget(self, texts: Iterable[int]) -> None:
        """The texts have ended."""
        for text in texts:
            request = self._requests.pop(text, None)
            process = None if request is None else self._processes.get(request.grammar)
            if process is not None and process.known.pop(text, None) is not None:
                process.ended.append(text)

    def _ask(self, process: GrammarProcess, text: int, request: MasksRequest) -> None:
        known, tokens, keep = process.known.get(text), request.tokens, 0
        if known is not None:
            least = min(len(known), len(tokens), request.first_mask)
            differ = np.flatnonzero(known[:least] != tokens[:least])
            keep = int(differ[0]) if differ.size else least
        self._put(process, text, request, keep)

    def _put(self, process: GrammarProcess, text: int, request: MasksRequest, keep: int) -> None:
        """Queue a request: the process has ``keep`` of its tokens."""
        tokens = request.tokens
        self._serial += 1
        request.serial, request.asked = self._serial, time.monotonic()
        if not process.waiting:
            process.heard = request.asked
        process.waiting[self._serial] = text, request
        process.known[text] = tokens
        content, rest = tokens[keep:].tobytes(), request.first_mask - keep
        process.asks.append(Ask(self._serial, text, keep, content, request.required - keep, rest))

    # --- sending and receiving --------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send what was asked."""
        for process in self._processes.values():
            if process.asks and process.compiled:
                self._send(process)

    def poll(self, seconds: float = 0.0) -> None:
        """Take the answers that are there; wait for the first for so long."""
        self.flush()
        for descriptor, _ in self._poll.poll(seconds * 1000):
            if (process := self._of_socket.get(descriptor)) is not None:
                self._receive(process)
        now = time.monotonic()
        for process in self._processes.values():
            if process.waiting and now - process.heard > SILENT_S:
                self._lose(process)
            elif process.socket is None and process.failure is None:
                self._connect(process)
            elif process.cpu_clock is not None and now - process.heard > QUICK_CPU_S:
                self._lower_if_expensive(process, process.cpu_clock)

    def _lower_if_expensive(self, process: GrammarProcess, cpu_clock: int) -> None:
        """Lower the priority of a process that needs much time for what it does."""
        if process.compiled and not process.waiting:
            return
        quick = QUICK_CPU_S if process.compiled else QUICK_COMPILE_CPU_S
        with suppress(OSError):  # it has ended
            if time.clock_gettime(cpu_clock) - process.cpu_heard > quick:
                os.setpriority(os.PRIO_PROCESS, process.pid, LOW_PRIORITY)
                process.cpu_clock = None

    def _send(self, process: GrammarProcess) -> None:
        if process.asks:
            asks = [tuple(each) for each in process.asks]
            if process.careful:  # one by one, so that the first that is not answered is the one that ends the process
                process.unsent += b"".join([dump(([each], ())) for each in asks[:-1]])
                asks = asks[-1:]
            process.unsent += dump((asks, process.ended))
            process.asks, process.ended = [], []
        if process.socket is None:
            return
        try:
            sent = process.socket.send(process.unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._lose(process)
            return
        del process.unsent[:sent]
        self._poll.register(process.socket, select.POLLIN | (select.POLLOUT if process.unsent else 0))

    def _receive(self, process: GrammarProcess) -> None:
        connected = process.socket
        if process.unsent:
            self._send(process)
        if connected is None or process.socket is not connected:
            return
        try:
            data = connected.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose(process)
            return
        process.heard = time.monotonic()
        if process.cpu_clock is not None:
            with suppress(OSError):  # it has ended
                process.cpu_heard = time.clock_gettime(process.cpu_clock)
        for message in process.messages.feed(data):
            if process.socket is not connected:  # lost meanwhile
                return
            if isinstance(message, int):
                process.pid, process.cpu_clock, process.cpu_heard = message, process_clock(message), 0.0
            elif process.compiled:
                for each in message:
                    self._answered(process, *each)
            elif message is None:
                process.compiled = process.was_compiled = True
                process.tries = 0
                self._send(process)
            else:
                self._fail(process, _refusal(*message))
                return

    def _answered(
        self, process: GrammarProcess, serial: int, consumed: int, words: bytes | None, error: tuple[str, bool] | None
    ) -> None:
        text, request = process.waiting.pop(serial)
        current = self._requests.get(text) is request
        if error is not None:
            if current:
                request.outcome = _refusal(*error)
                process.known.pop(text, None)
        elif consumed == LOST:
            if current:
                process.known.pop(text, None)
                self._ask(process, text, request)
                self._send(process)
        elif consumed < request.required:
            request.outcome = InvalidRequest(
                f"the grammar does not allow token {consumed} of its text", field="token_ids", metadata={"at": consumed}
            )
        else:
            assert words is not None  # noqa: S101 - it was not refused
            request.outcome = np.frombuffer(bytearray(words), np.int32).reshape(-1, self._words)
            waited_us = (process.heard - request.asked) * 1e6
            if process.slow and waited_us < QUICK_US:
                process.slow -= 1
        if process.careful and not process.waiting:
            process.careful = False

    # --- processes that end -----------------------------------------------------------------------------------------

    def _connect(self, process: GrammarProcess) -> None:
        """Start the process of a grammar; its texts are asked again, all of them."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            try:
                if self._control is None or self._first is None or self._first.poll() is not None:
                    raise BrokenPipeError
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
            except BlockingIOError:  # it starts many: later
                ours.close()
                return
            except OSError:
                ours.close()
                if time.monotonic() - self._started > RESTART_S:
                    log.warning("grammar_process_ended", action="nothing: it is started again; if often, see memory")
                    self._start()
                return
        process.socket, process.messages, process.compiled = ours, Messages(), False
        process.unsent = bytearray(dump(process.grammar))
        process.asks, process.ended = [], []
        process.known.clear()
        waiting, process.waiting = list(process.waiting.values()), {}
        self._of_socket[ours.fileno()] = process
        for text, request in waiting:
            if self._requests.get(text) is request:
                self._ask(process, text, request)
        process.heard = time.monotonic()
        asks, process.asks = process.asks, []  # not before it is compiled
        self._send(process)
        process.asks = asks

    def _disconnect(self, process: GrammarProcess) -> None:
        process.compiled, process.cpu_clock = False, None
        if process.socket is not None:
            with suppress(KeyError):
                self._poll.unregister(process.socket)
            del self._of_socket[process.socket.fileno()]
            process.socket.close()
            process.socket = None

    def _lose(self, process: GrammarProcess) -> None:
        """A process has ended, or is silent: it may have exceeded its limits, or was killed."""
        compiled = process.compiled
        self._disconnect(process)
        if not compiled:
            process.tries += 1
            if not process.was_compiled or process.tries >= TRIES:
                self._fail(process, GrammarTooComplex("the grammar exceeds the time or memory of its compilation"))
                return
        elif process.waiting:
            process.careful = True
            serial, (_, request) = next(iter(process.waiting.items()))
            request.tries += 1
            if request.tries >= TRIES:
                del process.waiting[serial]
                request.outcome = GrammarTooComplex("the mask of a row exceeds the time or memory of the grammar")
        self._connect(process)

    def _fail(self, process: GrammarProcess, error: ExecutorError) -> None:
        """A grammar cannot be compiled."""
        self._disconnect(process)
        process.failure = error
        for _, request in process.waiting.values():
            request.outcome = error
        process.waiting.clear()
        process.asks.clear()


def _refusal(message: str, too_complex: bool) -> ExecutorError:
    if too_complex:
        return GrammarTooComplex(f"the grammar exceeds a limit: {message}")
    return InvalidRequest(f"invalid grammar: {message}", field="text")
