"""A step's launches recorded once and replayed: what a CUDA graph needs, and which steps get one.

A decode step of an 8B model is some 400 launches, and Python takes longer to make them than a GPU to run them. A CUDA
graph replays all of them in one call, with the same arguments: so everything that changes from step to step is read
from device memory that stays where it is (`attention.staging`), and steps come in a few *shapes*: all spans have the
same number of tokens (1 for decode, more for a verify of drafts), and their number is rounded up to a bucket. Rows
beyond the step's own are padding: token 0 at position 0 of the null block, which no sequence owns.

What is recorded reaches from the embedding to the final norm, all layers' cache writes among it. The head is not in
it: which rows are asked for changes from step to step, and its few launches are queued while the layers still run.

How recording is done is a `Capture`; CUDA's is here, and tests have one that runs the step again over the same memory.
A shape that is not there runs eagerly; nothing but speed depends on a graph. This file knows no sequences and no rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ferrum_rpc.attention.backend import StagedAttention
from ferrum_rpc.attention.geometry import BatchGeometry, Int64Array
from ferrum_rpc.attention.staging import Integers, Layout, Staging

MOST_SPANS: Final = 256
"""Spans of the largest graph: beyond, a step is long enough to hide its launches."""

MOST_TOKENS: Final = 8
"""Tokens a span of the longest verify that gets a graph."""

WORTH_RECORDING: Final = 3
"""Steps of a shape of several tokens before it is recorded: a scheduler drafts the same number for hours, and a
recording takes as long as dozens of steps. Shapes of one token are recorded at the start."""

STEP_INPUTS: Final = 3
"""Sections of a step's integers before those of the attention's plan: token ids, positions, slots."""

Run = Callable[[Sequence[Tensor], Any], Tensor]
"""``run((token ids, positions, slots), plan)``: hidden rows, all on the device."""

Replay = Callable[[], None]


class Capture(Protocol):
    """Records what ``run`` launches. It may run it more than once."""

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        """``(replay, output)``: after ``replay()`` the ``output`` is what ``run()`` would return."""


class CaptureFailed(RuntimeError):
    """A step could not be recorded; the device goes on."""


class CudaCapture:
    """A `Capture`: CUDA graphs that share one pool of memory. They never run at the same time, so that the intermediate
    results of the largest, recorded first, serve all of them. Each keeps its own output."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        """Runs once before, so that compilers and libraries allocate what a recording must not."""
        current = torch.cuda.current_stream()
        try:
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                run()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # other threads may use the device meanwhile: they free pinned rows that were sent
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                output = run()
        except torch.AcceleratorError as error:
            torch.cuda.synchronize()  # raises again where the device is gone, and not where the recording was refused
            raise CaptureFailed(str(error)) from error
        finally:
            torch.cuda.set_stream(current)  # a recording that cannot be ended leaves its own stream in place
        return graph.replay, output


class GraphShape(NamedTuple):
    """Spans of ``tokens`` tokens each."""

    tokens: int
    spans: int


def buckets(most: int) -> list[int]:
    """Numbers of spans that graphs are recorded for, up to ``most``: 1, 2, 4, 8, then every eighth to 64, and every
    sixteenth beyond, where a padding row costs less than a recording."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, MOST_SPANS + 1, 16)]
    most = min(most, MOST_SPANS)
    return [*(size for size in sizes if size < most), most]


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """One recorded shape, and how its inputs are laid out."""

    capacity: Any
    layout: Layout
    replay: Replay
    output: Tensor


class Graphs:
    """Recorded shapes of one model over one cache, for steps of at most ``most_spans`` spans whose sequences have at
    most ``blocks_per_span`` blocks. ``closed`` says why no more are recorded, once that is so."""

    def __init__(
        self,
        run: Run,
        attention: StagedAttention,
        capture: Capture,
        device: torch.device,
        *,
        most_spans: int,
        blocks_per_span: int,
        most_tokens: int = MOST_TOKENS,
        on_failure: Callable[[GraphShape, Exception], None] = lambda shape, error: None,
    ) -> None:
        self.closed: str | None = None
        self._run, self._attention, self._capture = run, attention, capture
        self._buckets = buckets(most_spans)
        self._blocks, self._most_tokens = blocks_per_span, most_tokens
        self._on_failure = on_failure
        self._graphs: dict[GraphShape, Graph] = {}
        self._seen: Counter[GraphShape] = Counter()
        largest = [self._layout(GraphShape(tokens, self._buckets[-1]))[1] for tokens in range(1, most_tokens + 1)]
        self._staging = Staging(device, max(layout.nbytes for layout in largest))

    @property
    def recorded(self) -> list[GraphShape]:
        """The shapes that are replayed."""
        return list(self._graphs)

    def record(self, tokens: int) -> None:
        """Record every bucket of spans of ``tokens`` tokens, the largest first. Stops where one fails; see ``closed``.
        Whatever means that the device is gone is raised."""
        for spans in reversed(self._buckets):
            self._record(GraphShape(tokens, spans))

    def forward(self, token_ids: Integers, geometry: BatchGeometry) -> Tensor | None:
        """Hidden rows [T, hidden] of a step by replaying its shape, or None where it has none. They are valid until the
        next step."""
        shape = self.shape(geometry)
        if shape is None:
            return None
        graph = self._graphs.get(shape) or self._record_if_worth_it(shape)
        if graph is None:
            return None
        try:
            planned = self._attention.fill(graph.capacity, geometry)
        except ValueError:  # a sequence longer than what was reserved
            return None
        self._staging.send(graph.layout, [token_ids, geometry.positions, geometry.slots, *planned])
        graph.replay()
        return graph.output[: geometry.tokens]

    def shape(self, geometry: BatchGeometry) -> GraphShape | None:
        """The shape that ``geometry`` is padded to; None: its spans differ, or are too many or too long."""
        tokens = geometry.tokens // max(geometry.spans, 1)
        if not 1 <= tokens <= self._most_tokens or geometry.spans > self._buckets[-1]:
            return None
        if not np.array_equal(geometry.query_start, np.arange(geometry.spans + 1) * tokens):
            return None
        return GraphShape(tokens, next(each for each in self._buckets if each >= geometry.spans))

    def _record_if_worth_it(self, shape: GraphShape) -> Graph | None:
        if shape.tokens > 1:
            self._seen[shape] += 1
            if self._seen[shape] < WORTH_RECORDING:
                return None
        return self._record(shape)

    def _record(self, shape: GraphShape) -> Graph | None:
        if self.closed is not None:
            return None
        capacity, layout = self._layout(shape)
        sections = self._staging.open(layout)
        plan = self._attention.bind(capacity, sections[STEP_INPUTS:])
        # recording runs the step: over nothing but padding, and never over what an earlier step left here
        nothing: Int64Array = np.zeros(0, dtype=np.int64)
        self._staging.send(layout, [nothing] * len(sections))
        try:
            replay, output = self._capture(lambda: self._run(sections[:STEP_INPUTS], plan))
        except torch.AcceleratorError:
            raise
        except Exception as error:  # memory, a library that cannot be recorded: the eager path does without
            self.closed = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            self._on_failure(shape, error)
            return None
        self._graphs[shape] = graph = Graph(capacity, layout, replay, output)
        return graph

    def _layout(self, shape: GraphShape) -> tuple[Any, Layout]:
        capacity = self._attention.reserve(shape.spans, shape.tokens, shape.spans * self._blocks)
        rows = shape.spans * shape.tokens
        inputs = ((np.int64, rows),) * STEP_INPUTS
        return capacity, Layout((*inputs, *((np.int32, size) for size in capacity.sizes)))
