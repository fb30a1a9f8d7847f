"""A step's launches captured once and replayed: what a CUDA graph needs, and which steps get one.

A decode step of an 8B model is some 400 launches, and Python takes longer to make them than a GPU to run them. A CUDA
graph replays all of them in one call, with the same arguments: so everything that changes from step to step is read
from device memory that stays where it is (`attention.staging`), and steps come in a few *shapes*: all spans have the
same number of tokens (1 for decode, more for a verify of drafts), and their number is rounded up to a bucket. Rows
beyond the step's own are padding: token 0 at position 0 of the null block, which no sequence owns.

A graph reaches from the embedding to the final norm, with all layers' cache writes. The head is not in it: the
requested rows change from step to step, and its few launches are queued while the layers still run.

Shapes are captured before the executor serves, never within a step of a caller: a capture waits for the device and
empties torch's caches, which takes 50 to 100 ms and makes every later allocation a call of the driver. A shape without
a graph runs eagerly.

A failed capture costs more than speed. Torch 2.11 and 2.12 leave their allocator in the state of a capture if CUDA
refuses its end (pytorch #180395): it no longer releases cached memory if memory is short. Later versions may keep the
memory of the failed graph reserved (#190348), and out of memory within a capture may end it with another error
(#187795). So whatever makes a capture fail is looked for before one begins; see `CudaCapture`.

How a step is captured is a `Capture`; CUDA's is here, and tests have one that runs the step again over the same memory.
This file knows no sequences and no rows.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ferrum_rpc.attention.backend import StagedAttention
from ferrum_rpc.attention.geometry import BatchGeometry, Int64Array
from ferrum_rpc.attention.native_recurrent import JOB_INTEGERS
from ferrum_rpc.attention.recurrent_steps import RecurrentStep, RecurrentStore
from ferrum_rpc.attention.staging import Integers, Layout, Staging
from ferrum_rpc.device import check_device
from ferrum_rpc.models.base import Recur, StepAdapters
from ferrum_rpc.models.lora import Loras, StagedAdapters

MAX_SPANS: Final = 256
"""Spans of the largest graph: beyond, a step is long enough to hide its launches."""

MAX_VERIFY_SPANS: Final = 32
"""The same of a verify, which is several times as long: seven graphs for each number of tokens."""

SPARE_BYTES: Final = 64 << 20
"""Device memory that must be free besides what a step takes: the graph itself and its output, and what the allocator
rounds up. Estimated."""

STEP_INPUTS: Final = 3
"""Sections of a step's integers before those of the attention's plan: token ids, positions, slots."""

Run = Callable[[Sequence[Tensor], Any, StepAdapters | None, Recur | None], Tensor]
"""``run((token ids, positions, slots), plan, adapters, recur)``: hidden rows, all on the device."""

Replay = Callable[[], None]


class Capture(Protocol):
    """Captures what ``run`` launches. It may run it more than once."""

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        """``(replay, output)``: after ``replay()`` the ``output`` is what ``run()`` would return. Raises
        `CaptureRefused`, `CaptureFailed`, or `torch.AcceleratorError` if the device is lost."""


class CaptureRefused(RuntimeError):
    """No capture was begun, because it would have failed. Torch and the device are as before."""


class CaptureFailed(RuntimeError):
    """A capture was begun and failed. The device works; for torch's allocator see the module."""


class CudaCapture:
    """A `Capture`: CUDA graphs that share one pool of memory. They never run at the same time, so the intermediate
    results of the largest serve all of them. Each keeps its own output.

    Before a capture the step runs once on its stream, so that compilers and libraries allocate what a capture must not.
    If the step waits for the device, torch refuses it there; if less memory is free than the step took, the capture is
    refused. Whatever a first run alone waits for (constants, tables) must have run before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._pooled = 0
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        current = torch.cuda.current_stream()
        failed: type[RuntimeError] = CaptureRefused
        collects = gc.isenabled()
        gc.disable()  # a collection may free graphs of an earlier runner, which makes a capture fail
        try:
            taken = self._warm_up(run, current)
            self._check_memory(taken)
            failed = CaptureFailed
            graph = torch.cuda.CUDAGraph()
            # other threads may use the device meanwhile: they free pinned rows that were sent
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                output = run()
        except CaptureRefused:
            raise
        except Exception as error:
            check_device()
            raise failed(f"{type(error).__name__}: {error}") from error
        finally:
            if collects:
                gc.enable()
            torch.cuda.set_stream(current)  # a capture that cannot be ended leaves its own stream in place
        self._pooled = max(self._pooled, taken)
        return graph.replay, output

    def _warm_up(self, run: Callable[[], Tensor], current: Any) -> int:
        """Run the step. Returns the most bytes that it had allocated at once."""
        mode = torch.cuda.get_sync_debug_mode()
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._stream.wait_stream(current)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says once that this mode does not find all waits
            torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.stream(self._stream):
                run()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        current.wait_stream(self._stream)
        return torch.cuda.max_memory_allocated(self._device) - before

    def _check_memory(self, taken: int) -> None:
        """Raise `CaptureRefused` if a step that took so many bytes does not fit beside what the pool has."""
        torch.cuda.empty_cache()  # what the warm-up took cannot become the pool's; `torch.cuda.graph` does this too
        free, needed = torch.cuda.mem_get_info(self._device)[0], max(0, taken - self._pooled) + SPARE_BYTES
        if free < needed:
            raise CaptureRefused(f"{free >> 20} MiB of device memory are free, and a capture needs {needed >> 20}")


class GraphShape(NamedTuple):
    """Spans of ``tokens`` tokens each. ``adapters``: some of them may have one."""

    tokens: int
    spans: int
    adapters: bool = False


def buckets(largest: int) -> list[int]:
    """Numbers of spans that graphs are captured for, up to ``largest``: 1, 2, 4, 8, then every eighth to 64, and every
    sixteenth beyond, where a padding row costs less than a capture."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, MAX_SPANS + 1, 16)]
    largest = min(largest, MAX_SPANS)
    return [*(size for size in sizes if size < largest), largest]


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """One captured shape, and how its inputs are laid out. ``token_ids``: the first of them on the device."""

    capacity: Any
    layout: Layout
    token_ids: Tensor
    replay: Replay
    output: Tensor


class Graphs:
    """Captured shapes of one model over one cache: decode steps of up to ``max_spans`` spans, and verify steps of up to
    `MAX_VERIFY_SPANS` of them with 2 to ``verify_tokens`` tokens each. Their sequences have at most ``blocks_per_span``
    blocks. With ``loras`` that allow it, each shape is captured a second time, for steps with adapters: their launches
    take time also if there is nothing to add. ``closed``: the reason why some shapes were not captured, if so."""

    def __init__(
        self,
        run: Run,
        attention: StagedAttention,
        capture: Capture,
        device: torch.device,
        *,
        max_spans: int,
        blocks_per_span: int,
        verify_tokens: int = 0,
        loras: Loras | None = None,
        states: RecurrentStore | None = None,
        on_failure: Callable[[GraphShape, Exception], None] = lambda shape, error: None,
    ) -> None:
        self.closed: str | None = None
        self._states = states
        self._recurrent = 0 if states is None else len(states.slots[0].folded)
        self._run, self._attention, self._capture = run, attention, capture
        self._buckets = {1: buckets(max_spans)}
        self._buckets |= dict.fromkeys(range(2, verify_tokens + 1), buckets(min(max_spans, MAX_VERIFY_SPANS)))
        self._blocks = blocks_per_span
        self._loras = loras
        self._on_failure = on_failure
        self._graphs: dict[GraphShape, Graph] = {}
        self._staging = Staging(device, max(self._layout(shape)[1].nbytes for shape in self._shapes()))

    @property
    def recorded(self) -> list[GraphShape]:
        """The shapes that are replayed."""
        return list(self._graphs)

    def record(self) -> None:
        """Capture every shape. The smallest is first, because its failure costs least; then the largest, whose memory
        serves the others. Stops at a failure; see ``closed``. Raises `torch.AcceleratorError` if the device is lost."""
        smallest = GraphShape(1, self._buckets[1][0])
        for shape in sorted(self._shapes(), key=lambda shape: shape != smallest):
            if not self._record(shape):
                break

    def forward(
        self,
        token_ids: Integers,
        geometry: BatchGeometry,
        adapters: StepAdapters | None = None,
        change: Callable[[Tensor], object] | None = None,
        states: RecurrentStep | None = None,
    ) -> Tensor | None:
        """Hidden rows [T, hidden] of a step by replaying its shape, or None where it has none. They are valid until the
        next step. ``change`` is called with the token ids on the device before the layers run. ``states``: those of the
        spans."""
        shape = self.shape(geometry)
        if shape is None or (states is not None and not states.uniform):
            return None
        if adapters is not None:
            shape = shape._replace(adapters=True)
        if (graph := self._graphs.get(shape)) is None:
            return None
        try:
            planned = self._attention.fill(graph.capacity, geometry)
        except ValueError:  # a sequence longer than what was reserved
            return None
        adapted = adapters.arrays(recorded=True) if isinstance(adapters, StagedAdapters) else ()
        jobs = () if states is None else (self._padded(states, shape.spans),)
        self._staging.send(graph.layout, [token_ids, geometry.positions, geometry.slots, *jobs, *adapted, *planned])
        if change is not None:
            change(graph.token_ids)
        graph.replay()
        if states is not None:
            states.replayed()
        return graph.output[: geometry.tokens]

    def shape(self, geometry: BatchGeometry) -> GraphShape | None:
        """The shape that ``geometry`` is padded to; None: its spans differ, or are too many or too long."""
        tokens = geometry.tokens // max(geometry.spans, 1)
        sizes = self._buckets.get(tokens)
        if sizes is None or geometry.spans > sizes[-1]:
            return None
        if not np.array_equal(geometry.query_start, np.arange(geometry.spans + 1) * tokens):
            return None
        return GraphShape(tokens, next(each for each in sizes if each >= geometry.spans))

    def _record(self, shape: GraphShape) -> bool:
        """Capture a shape. False if that failed."""
        capacity, layout, adapters = self._layout(shape)
        sections = self._staging.open(layout)
        first, behind = STEP_INPUTS + (self._states is not None), len(sections) - len(capacity.sizes)
        plan = self._attention.bind(capacity, sections[behind:])
        # a capture runs the step: over nothing but padding, and never over what an earlier step left here
        nothing: Int64Array = np.zeros(0, dtype=np.int64)
        self._staging.send(layout, [nothing] * len(sections))

        def run() -> Tensor:
            bound = None if adapters is None else adapters.bind(sections[first:behind])
            recur = None
            if self._states is not None:
                recur = self._states.recur(sections[STEP_INPUTS].view(self._recurrent, shape.spans, JOB_INTEGERS))
            return self._run(sections[:STEP_INPUTS], plan, bound, recur)

        try:
            replay, output = self._capture(run)
        except torch.AcceleratorError:
            raise
        except Exception as error:  # memory, a library that cannot be captured: the eager path does without
            self.closed = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            self._on_failure(shape, error)
            return False
        self._graphs[shape] = Graph(capacity, layout, sections[0], replay, output)
        return True

    @staticmethod
    def _padded(states: RecurrentStep, spans: int) -> Int64Array:
        """The jobs of all layers, and jobs of zeros, which do nothing, up to the spans of a graph."""
        jobs = states.jobs()
        padded = np.zeros((len(jobs), spans, JOB_INTEGERS), np.int64)
        padded[:, : jobs.shape[1]] = jobs
        return padded.ravel()

    def _shapes(self) -> Iterator[GraphShape]:
        """All that are to be captured, the largest first; those with adapters last."""
        for adapters in (False,) if self._loras is None or self._loras.reserve(1) is None else (False, True):
            for tokens, sizes in self._buckets.items():
                yield from (GraphShape(tokens, spans, adapters) for spans in reversed(sizes))

    def _layout(self, shape: GraphShape) -> tuple[Any, Layout, StagedAdapters | None]:
        capacity = self._attention.reserve(shape.spans, shape.tokens, shape.spans * self._blocks)
        rows, adapters = shape.spans * shape.tokens, None
        inputs = [rows] * STEP_INPUTS
        if self._states is not None:
            inputs.append(self._recurrent * shape.spans * JOB_INTEGERS)
        if shape.adapters and self._loras is not None and (adapters := self._loras.reserve(rows)) is not None:
            inputs += map(len, adapters.arrays(recorded=True))
        layout = Layout((*((np.int64, size) for size in inputs), *((np.int32, size) for size in capacity.sizes)))
        return capacity, layout, adapters
