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

from ferrum_rpc.core import Accept, Grammar, MaskRows, OutputSpec, Rows, Sample, Span, TokenArray
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
                text = self._pool.text(span.sequence)
                if text is not None and text.outcome is None:
                    return False
        return True

    @property
    def any_slow(self) -> bool:
        """Whether `may_go_on` may be False."""
        return self.active and self._pool.any_slow

    def may_go_on(self, span: Span) -> bool:
        """Whether the next step of a run may begin: its mask is there, or soon will be."""
        kind = _constrained(span)
        if kind is None:
            return True
        text = self._pool.text(span.sequence)
        return text is None or text.outcome is not None or not self._pool.is_slow(kind.grammar)

    def wait(self, seconds: float) -> None:
        """Wait for the first answer, at most for so long."""
        self._pool.poll(seconds)

    def refusal(self, span: Span) -> ExecutorError | None:
        """The reason why a span must not run, if its masks are there."""
        kind = _constrained(span)
        if kind is None or span.end < kind.grammar_from:
            return None
        text = self._pool.text(span.sequence)
        if text is None or text.key != kind.grammar or kind.grammar_from + len(text.tokens) != span.end:
            return GrammarUnknown("the grammar was dropped: register it again")
        return text.outcome if isinstance(text.outcome, ExecutorError) else None

    # --- in a step --------------------------------------------------------------------------------------------------

    def late(self, spans: Sequence[Span], began: float) -> set[int]:
        """Wait for the masks of a step that ``began`` then (`time.monotonic`). The sequences whose masks are not there,
        which are those of runs."""
        pool = self._pool
        pool.spare_s = max(LATE_S, time.monotonic() - began)
        pool.receive()
        if not pool.asked:
            return set()
        waiting = [span for span in spans if not self.ready((span,))]
        until = time.monotonic() + pool.spare_s
        while waiting and (left := until - time.monotonic()) > 0:
            pool.poll(left)
            waiting = [span for span in waiting if not self.ready((span,))]
        for span in waiting:
            if (kind := _constrained(span)) is not None:
                pool.was_slow(kind.grammar)
        return {span.sequence for span in waiting}

    def words(self, span: Span, rows: int) -> MaskRows | None:
        """The masks of the last ``rows`` of a span; None: none has one. Rows before ``grammar_from``, and behind a
        token of a draft that is not allowed, have none."""
        kind = _constrained(span)
        if kind is None or span.end < kind.grammar_from:
            return None
        text = self._pool.text(span.sequence)
        assert text is not None  # noqa: S101 - it was not refused
        masks = text.outcome
        if isinstance(masks, ExecutorError):
            raise masks
        assert masks is not None  # noqa: S101 - it is not late
        return masks if text.rows == rows else masks._replace(at=rows - text.rows)

    def chosen(self, span: Span, rows: Rows) -> None:
        """A step has chosen a token behind what it keeps of a span, that of the last of these ``rows``: ask for the
        mask behind it, and send that with `flush`."""
        kind = _constrained(span)
        if kind is None or span.end < kind.grammar_from:
            return
        token = int(rows.block.columns["token_ids"][rows.first + rows.count - 1])
        text = self._pool.text(span.sequence)
        if text is not None and text.key == kind.grammar and kind.grammar_from + len(text.tokens) == span.end:
            self._pool.append(text, token)  # its last request was that of this span
        else:
            self._ask(span._replace(tokens=np.append(span.tokens, np.int32(token)), output=OutputSpec(kind=kind)), kind)

    def flush(self) -> None:
        """Send what was asked for."""
        self._pool.flush()

    def fork(self, parent: int, children: Sequence[int]) -> None:
        """The children begin with the parent's tokens, and so with its state."""
        if self.active:
            self._pool.fork(parent, children)

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
        self._pool.ask(span.sequence, kind.grammar, text, required, first_mask, span.parent)
        return True


def _constrained(span: Span) -> Sample | None:
    kind = span.output.kind
    if isinstance(kind, Accept):
        kind = kind.choice
    return kind if isinstance(kind, Sample) and kind.grammar else None
