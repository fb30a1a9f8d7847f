"""The grammars of an executor: their processes, and the texts of the sequences that they constrain.

Nothing here waits unless the caller says how long. A process that ends, for whatever reason, is started again and
asked again: its states are a function of the tokens that the engine has. A request whose process ends twice is refused,
and so are all of a grammar that cannot be compiled. If one that was compiled cannot be compiled again, what waits for
it is refused, and the next request tries anew.
"""

from __future__ import annotations

import select
import time
from collections import OrderedDict
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Final

import numpy as np

from ferrum_rpc.core import Grammar, TokenArray
from ferrum_rpc.engine.grammars.process import QUICK_MASKS, GrammarProcess
from ferrum_rpc.engine.grammars.starter import GrammarStarter
from ferrum_rpc.engine.grammars.text import GrammarText
from ferrum_rpc.errors import ExecutorError, GrammarUnknown

MAX_TEXTS: Final = 1 << 14
"""Texts whose last request is kept, far more than sequences have one in flight."""


class GrammarPool:
    """The grammars by their keys, for a model of ``vocab_size`` tokens, of which those of ``ends`` end a text.
    ``memory``: bytes of one process. ``spare_s``: how long a step may wait for its masks. Called by one thread."""

    def __init__(self, tokenizer: Path, vocab_size: int, ends: Iterable[int], memory: int) -> None:
        self.starter = GrammarStarter(str(tokenizer), str(vocab_size), ",".join(map(str, ends)), str(memory))
        self.spare_s = 0.0
        self._words = -(-vocab_size // 32)
        self._processes: dict[bytes, GrammarProcess] = {}
        self._active: dict[GrammarProcess, None] = {}  # those that are not idle
        self._texts: OrderedDict[int, GrammarText] = OrderedDict()
        self._numbers = count()
        self._poll = select.poll()

    def check(self) -> None:
        """Wait until the tokenizer is loaded. Raises `NoGrammars`."""
        self.starter.check()

    def close(self) -> None:
        """End all processes."""
        for process in self._processes.values():
            process.disconnect()
        self.starter.close()

    # --- grammars ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._processes)

    def change(self, added: Iterable[tuple[bytes, Grammar]], dropped: Iterable[bytes]) -> None:
        """Begin to compile grammars, and end others."""
        for key in dropped:
            if (process := self._processes.pop(key, None)) is not None:
                process.end(GrammarUnknown("the grammar was dropped: register it again"))
        for key, grammar in added:
            self._processes[key] = process = GrammarProcess(grammar, self._words, self.starter, self._poll)
            self._active[process] = None
            process.connect()

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

    @property
    def asked(self) -> bool:
        """Whether any request is not answered."""
        return any(process.asked for process in self._active)

    def ask(  # noqa: PLR0917 - a request
        self, sequence: int, key: bytes, tokens: TokenArray, required: int, first_mask: int, parent: int | None = None
    ) -> None:
        """Ask for masks of a sequence's text; `flush` sends it. Nothing is asked again that is known or on its way.
        ``parent``: a sequence whose text may begin alike."""
        text = self._texts.get(sequence)
        if text is not None and text.key != key:
            self.forget((sequence,))
            text = None
        if text is None:
            origin = None if parent is None else self._texts.get(parent)
            text = GrammarText(next(self._numbers), key, origin if origin is not None and origin.key == key else None)
        elif text.is_of(tokens, required, first_mask) and not isinstance(text.outcome, ExecutorError):
            self._texts.move_to_end(sequence)
            return
        text.request(tokens, required, first_mask)
        self._texts[sequence] = text
        self._texts.move_to_end(sequence)
        if len(self._texts) > MAX_TEXTS:
            self.forget([next(iter(self._texts))])
        self._want(text)

    def append(self, text: GrammarText, token: int) -> None:
        """Ask for the mask behind one more token of a text."""
        text.append(token)
        self._want(text)

    def fork(self, parent: int, children: Iterable[int]) -> None:
        """Copy the state of a text at once, as long as it is there."""
        if (origin := self._texts.get(parent)) is None:
            return
        self.poll()  # nothing can be copied from a text that is not answered
        for child in children:
            self.ask(child, origin.key, np.array(origin.tokens), 0, len(origin.tokens) + 1, parent)
        self.flush()

    def _want(self, text: GrammarText) -> None:
        process = self._processes.get(text.key)
        if process is None:
            text.outcome = GrammarUnknown("the grammar is not registered any more: register it again")
        else:
            process.want(text)
            self._active[process] = None

    def text(self, sequence: int) -> GrammarText | None:
        """The text of a sequence, with its last request."""
        return self._texts.get(sequence)

    @property
    def any_slow(self) -> bool:
        """Whether `is_slow` may be True, of a grammar that is registered."""
        return any(process.slow or not process.compiled for process in self._processes.values())

    def is_slow(self, key: bytes) -> bool:
        """Whether steps should not count on masks of this grammar that are not there yet."""
        process = self._processes.get(key)
        return process is None or process.slow > 0 or not process.compiled

    def was_slow(self, key: bytes) -> None:
        """A step waited for a mask of this grammar too long."""
        if (process := self._processes.get(key)) is not None:
            process.slow = QUICK_MASKS

    def forget(self, sequences: Iterable[int]) -> None:
        """The sequences have ended, or have no text any more."""
        for sequence in sequences:
            text = self._texts.pop(sequence, None)
            if text is not None and (process := self._processes.get(text.key)) is not None:
                process.drop(text)

    # --- sending and receiving --------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send what was asked."""
        for process in self._active:
            process.send(self.spare_s)

    def receive(self) -> None:
        """Take the answers that are there, of processes that were asked."""
        for process in list(self._active):
            process.receive()
            process.send(self.spare_s)
            if process.idle:
                del self._active[process]

    def poll(self, seconds: float = 0.0) -> None:
        """Send what was asked, and take the answers that are there; wait for the first for so long. Looks after all
        processes."""
        self.flush()
        if ready := self._poll.poll(seconds * 1000):
            there = dict(ready)
            for process in self._processes.values():
                if process.descriptor in there:
                    self._active[process] = None
            self.receive()
        now = time.monotonic()
        for process in self._active:
            process.look_after(now)
