"""What a step's spans need of grammars: the masks of their rows, and whether their tokens are allowed.

A text is the tokens of a sequence from ``grammar_from`` on, and is read where the engine has them, so whatever changes
a sequence changes its text. Masks are asked for as early as the tokens are known: when a submission arrives, and for
the token that a step has chosen, which is nearly always fed next. A run's next step does not wait for that answer
before it begins: the mask is needed when its rows are selected, and is computed while the model is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ferrum_rpc.core import Accept, Grammar, Sample, Span, TokenArray
from ferrum_rpc.engine.grammars.pool import GrammarPool
from ferrum_rpc.errors import ExecutorError, GrammarUnknown

LATE_S: Final = 0.002
"""A step waits for so long for a mask that a run needs, or as long as its forward pass took. Then the run is left out
of the step, and joins one when the mask is there."""


class Constraints:
    """The grammars of a runner's spans. ``tokens_of``: the committed tokens of a sequence, `KvManager.tokens`.
    ``active``: whether there are any grammars; spans without one need none of this."""

    def __init__(self, pool: GrammarPool, tokens_of: Callable[[int], TokenArray]) -> None:
        self.active = False
        self._pool = pool
        self._tokens_of = tokens_of

    # --- grammars ---------------------------------------------------------------------------------------------------

    def change(self, added: Sequence[tuple[bytes, Grammar]], dropped: Sequence[bytes]) -> None:
        """See `GrammarPool.change`."""
        self._pool.change(added, dropped)
        self.active = len(self._pool) > 0

    def compiled(self, key: bytes) -> bool:
        """See `GrammarPool.compiled`."""
        return self._pool.compiled(key)

    def close(self) -> None:
        """End the processes."""
        self._pool.close()

    # --- before a step ----------------------------------------------------------------------------------------------

    def ask(self, spans: Sequence[Span]) -> bool:
        """Ask for what spans that have arrived need. Whether some of it is not there yet."""
        if not self.active:
            return False
        asked = False
        for span in spans:
            if (kind := _constrained(span)) is not None:
                asked |= self._ask(span, kind)
        if asked:
            self._pool.poll()
        return asked and not self.ready(spans)

    def ready(self, spans: Sequence[Span]) -> bool:
        """Whether all that the spans need is there, or refused."""
        for span in spans:
            if _constrained(span) is not None:
                request = self._pool.request(span.sequence)
                if request is not None and request.outcome is None:
                    return False
        return True

    def may_go_on(self, span: Span) -> bool:
        """Whether the next step of a run may begin: its mask is there, or soon will be."""
        kind = _constrained(span)
        if kind is None:
            return True
        request = self._pool.request(span.sequence)
        return request is None or request.outcome is not None or not self._pool.is_slow(kind.grammar)

    def wait(self, seconds: float) -> None:
        """Wait for the first answer, at most for so long."""
        self._pool.poll(seconds)

    def refusal(self, span: Span) -> ExecutorError | None:
        """The reason why a span must not run, if its masks are there."""
        kind = _constrained(span)
        if kind is None or span.end < kind.grammar_from:
            return None
        request = self._pool.request(span.sequence)
        if request is None or request.grammar != kind.grammar or kind.grammar_from + len(request.tokens) != span.end:
            return GrammarUnknown("the grammar was dropped: register it again")
        return request.outcome if isinstance(request.outcome, ExecutorError) else None

    # --- in a step --------------------------------------------------------------------------------------------------

    def late(self, spans: Sequence[Span], began: float) -> set[int]:
        """Wait for the masks of a step that ``began`` then (`time.monotonic`). The sequences whose masks are not there,
        which are those of runs."""
        waiting = [span for span in spans if not self.ready((span,))]
        if not waiting:
            return set()
        patience_s = max(LATE_S, time.monotonic() - began)
        until = time.monotonic() + patience_s
        while waiting and (left := until - time.monotonic()) > 0:
            self._pool.poll(left)
            waiting = [span for span in waiting if not self.ready((span,))]
        for span in waiting:
            if (kind := _constrained(span)) is not None:
                self._pool.was_slow(kind.grammar)
        return {span.sequence for span in waiting}

    def words(self, span: Span, rows: int) -> list[npt.NDArray[np.int32] | None] | None:
        """The masks of the last ``rows`` of a span, None for a row without one. None: none has one. Rows behind a token
        of a draft that is not allowed have none, and are not returned."""
        kind = _constrained(span)
        if kind is None or span.end < kind.grammar_from:
            return None
        request = self._pool.request(span.sequence)
        assert request is not None  # noqa: S101 - it was not refused
        if isinstance(request.outcome, ExecutorError):
            raise request.outcome
        assert request.outcome is not None  # noqa: S101 - it is not late
        last = len(request.tokens) - request.first_mask + 1
        found: list[npt.NDArray[np.int32] | None] = [None] * (rows - last)
        found.extend(request.outcome)
        return found + [None] * (rows - len(found))

    def chosen(self, span: Span, length: int, token: int) -> None:
        """A step has chosen a token: ask for the mask behind it, and send that with `flush`."""
        kind = _constrained(span)
        if kind is None or length < kind.grammar_from:
            return
        last = self._pool.request(span.sequence)
        if last is not None and last.grammar == kind.grammar and kind.grammar_from + len(last.tokens) == length:
            self._pool.extend(span.sequence, last, token)  # it was the request of this span
            return
        text = np.append(self._tokens_of(span.sequence)[kind.grammar_from : length], np.int32(token))
        self._pool.ask(span.sequence, kind.grammar, text, len(text), len(text))

    def flush(self) -> None:
        """Send what was asked for."""
        self._pool.flush()

    def forget(self, sequences: Iterable[int]) -> None:
        """The sequences have ended."""
        if self.active:
            self._pool.forget(sequences)

    def _ask(self, span: Span, kind: Sample) -> bool:
        """Ask for what a span needs, if anything."""
        start, end, begins = span.start, span.end, kind.grammar_from
        if end < begins:
            self._pool.forget((span.sequence,))
            return False
        text = span.tokens[max(0, begins - start) :]
        if begins < start:
            of = span.sequence if span.parent is None else span.parent
            text = np.concatenate((self._tokens_of(of)[begins:start], text))
        rows = span.row_count
        first_mask = max(0, end - rows + 1 - begins) if rows else len(text) + 1
        required = len(text)
        if isinstance(span.output.kind, Accept):  # the rest is a draft
            required = max(0, start + 1 - begins)
        self._pool.ask(span.sequence, kind.grammar, text, required, first_mask)
        return True


def _constrained(span: Span) -> Sample | None:
    kind = span.output.kind
    if isinstance(kind, Accept):
        kind = kind.choice
    return kind if isinstance(kind, Sample) and kind.grammar else None
