"""The processes of grammars: one that has loaded the tokenizer, and a copy of it for each grammar.

    python -m ferrum_rpc.engine.grammars.worker FD TOKENIZER VOCABULARY END[,END...] MEMORY

The first process only copies itself: each socket that it receives is served by a new process, which has the tokenizer
at once and shares its memory. A grammar's process is bounded in its processor time per request and in its memory; the
system ends it if it exceeds them, and the other end of its socket reads that. `messages` has what both send.
"""

from __future__ import annotations

import gc
import mmap
import os
import resource
import signal
import socket
import sys
import time
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from ferrum_rpc.core import Grammar, GrammarKind
from ferrum_rpc.engine.channel import end_with_parent, leave_signals
from ferrum_rpc.engine.grammars import messages
from ferrum_rpc.engine.grammars.matching import GrammarError, Texts, Vocabulary
from ferrum_rpc.engine.grammars.messages import COMPILED, INVALID, READY, TOO_COMPLEX, Ask

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
            data, fds, _, _ = socket.recv_fds(control, 1, 2)
            if not data:
                return 0
            _copy(control, fds, partial(_serve, fds, vocabulary, int(memory)))


def _copy(control: socket.socket, fds: list[int], serve: Callable[[], None]) -> None:
    """Serve the received socket in a copy of this process. Without a process for it, its other end reads that it is
    closed."""
    try:
        if fds and os.fork() == 0:
            try:
                control.close()
                serve()
            finally:
                os._exit(0)
    except OSError:
        pass
    for each in fds:
        os.close(each)


def _serve(fds: list[int], vocabulary: Vocabulary, memory: int) -> None:
    """The life of a grammar's process, with its socket and the file of its masks."""
    end_with_parent()
    connection, shared = socket.socket(fileno=fds[0]), mmap.mmap(fds[1], 0)
    _bound_memory(memory)
    connection.send(array("q", [os.getpid()]))
    if not (first := messages.receive(connection)):
        return
    grammar = Grammar(GrammarKind(first[0]), shared[: first[1]])
    _bound_time(COMPILE_S)
    try:
        texts = Texts(vocabulary, grammar, messages.masks_in(shared, vocabulary.words))
    except GrammarError as error:
        connection.send(_message(error))
        return
    connection.send(array("q", [COMPILED]))
    while numbers := messages.receive(connection):
        _answer(connection, texts, numbers)


def _answer(connection: socket.socket, texts: Texts, numbers: array[int]) -> None:
    """Answer the asks of a message."""
    _bound_time(MASK_S)
    at = 1 + numbers[0]
    for each in numbers[1:at]:
        texts.drop(each)
    answers, sent = array("q"), time.monotonic()
    while at < len(numbers):
        first = at + len(Ask._fields)
        ask = Ask._make(numbers[at:first])
        at = first + ask.size
        if answers and (ask.first_mask > ask.size or time.monotonic() - sent > TOGETHER_S):
            connection.send(answers)
            answers, sent = array("q"), time.monotonic()
            _bound_time(MASK_S)
        try:
            answers.append(texts.match(ask, numbers[first:at].tolist()))
        except GrammarError as error:
            texts.drop(ask.text)
            connection.send(answers + _message(error))
            answers, sent = array("q"), time.monotonic()
            _bound_time(MASK_S)
    if answers:
        connection.send(answers)


def _message(error: GrammarError) -> array[int]:
    return messages.error(TOO_COMPLEX if error.too_complex else INVALID, str(error))


def _bound_time(seconds: float) -> None:
    """The process ends when it has used so much processor time from now on. It uses none while it waits."""
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
