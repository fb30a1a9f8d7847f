"""The processes of grammars: one that has loaded the tokenizer, and a copy of it for each grammar.

    python -m ferrum_rpc.engine.grammars.worker FD TOKENIZER VOCABULARY END[,END...] MEMORY

The first process only copies itself: each socket that it receives is served by a new process, which has the tokenizer
at once and shares its memory. A grammar's process is bounded in its processor time per request and in its memory; the
system ends it if it exceeds them, and the other end of its socket reads that. `messages` has what both send.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from ferrum_rpc.engine.channel import READ_BYTES, Messages, dump, end_with_parent, leave_signals
from ferrum_rpc.engine.grammars.matching import GrammarError, Texts, Vocabulary
from ferrum_rpc.engine.grammars.messages import LOST, READY, Ask

COMPILE_S: Final = 2.0
"""Processor time for which a grammar may be compiled."""

TOGETHER_S: Final = 0.0005
"""Answers of so many seconds are sent together."""

MASK_S: Final = 1.0
"""Processor time that a request may take: the masks of an item's rows, and the tokens before them if its text's state
is not kept."""


def main(arguments: list[str]) -> int:
    """The first process. Returns its exit status."""
    end_with_parent()
    leave_signals()
    fd, tokenizer, size, ends, memory = arguments
    with socket.socket(fileno=int(fd)) as control:
        try:
            vocabulary = Vocabulary(Path(tokenizer).read_text("utf-8"), int(size), tuple(map(int, ends.split(","))))
        except Exception as error:
            control.send(f"{error}"[:500].encode())
            return 1
        gc.collect()
        gc.freeze()  # copies leave what was made until here alone, and share it
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system forgets copies that have ended
        control.send(READY)
        while True:
            data, fds, _, _ = socket.recv_fds(control, 1, 1)
            if not data:
                return 0
            _copy(control, fds, lambda each: _serve(each, vocabulary, int(memory)))


def _copy(control: socket.socket, fds: list[int], serve: Callable[[socket.socket], None]) -> None:
    """Serve the received socket in a copy of this process. Without a process for it, its other end reads that it is
    closed."""
    try:
        if fds and os.fork() == 0:
            try:
                control.close()
                serve(socket.socket(fileno=fds[0]))
            finally:
                os._exit(0)
    except OSError:
        pass
    for each in fds:
        os.close(each)


def _serve(connection: socket.socket, vocabulary: Vocabulary, memory: int) -> None:
    """The life of a grammar's process."""
    end_with_parent()
    _bound_memory(memory)
    texts: Texts | None = None
    messages = Messages()
    connection.sendall(dump(os.getpid()))
    while data := connection.recv(READ_BYTES):
        for message in messages.feed(data):
            if texts is None:
                _bound_time(COMPILE_S)
                try:
                    texts = Texts(vocabulary, message)
                except GrammarError as error:
                    connection.sendall(dump((str(error), error.too_complex)))
                    return
                _bound_time(0)
                connection.sendall(dump(None))
                continue
            asks, ended = message
            for each in ended:
                texts.drop(each)
            answers, sent = list[tuple[Any, ...]](), time.monotonic()
            _bound_time(MASK_S)
            for each in asks:
                if time.monotonic() - sent > TOGETHER_S:
                    connection.sendall(dump(answers))
                    answers, sent = [], time.monotonic()
                    _bound_time(MASK_S)
                answers.append(_answer(texts, Ask(*each)))
            _bound_time(0)
            connection.sendall(dump(answers))


def _answer(texts: Texts, ask: Ask) -> tuple[Any, ...]:
    try:
        tokens = memoryview(ask.tokens).cast("i").tolist()
        found = texts.match(ask.text, ask.keep, tokens, ask.required, ask.first_mask)
    except GrammarError as error:
        texts.drop(ask.text)
        return ask.serial, 0, None, (str(error), error.too_complex)
    if found is None:
        return ask.serial, LOST, None, None
    return ask.serial, found.consumed, found.words.tobytes(), None


def _bound_time(seconds: float) -> None:
    """The process ends when it has used so much processor time from now on; 0: any."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _bound_memory(memory: int) -> None:
    """The process may have so many bytes more than it has. What the library prints when it fails may quote a
    grammar."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    bound = pages * resource.getpagesize() + memory
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
