"""A stand-in for CUDA graphs where there is no CUDA: what it recorded runs again, over the same memory.

So a replay that reads what an earlier step left in a buffer, or writes where it must not, shows here as it would there.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ferrum_rpc.engine.cuda.graphs import Replay


class Rerun:
    """A `Capture`. ``fail`` is raised by the ``nth`` recording."""

    def __init__(self, fail: Exception | None = None, nth: int = 1) -> None:
        self.recordings = self.replays = 0
        self._fail, self._nth = fail, nth

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        """See `Capture`. Runs twice, as CUDA's does: once to warm up."""
        self.recordings += 1
        if self._fail is not None and self.recordings == self._nth:
            raise self._fail
        run()
        output = run().clone()

        def replay() -> None:
            self.replays += 1
            output.copy_(run())

        return replay, output
