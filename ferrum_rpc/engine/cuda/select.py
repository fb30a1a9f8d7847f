"""How steps run on a GPU, and why: staged copies, CUDA graphs, and whether a step is begun while another is computed.

Choices like that of a backend: made at the start, with their reasons for the log and for GetInfo.
"""

from __future__ import annotations

from typing import Final

import structlog
import torch

from ferrum_rpc.attention.backend import AttentionBackend, StagedAttention
from ferrum_rpc.attention.recurrent_steps import RecurrentStore
from ferrum_rpc.distributed.group import GroupAborted
from ferrum_rpc.engine.compute import Compute
from ferrum_rpc.engine.cuda.compute import StagedCompute
from ferrum_rpc.engine.cuda.first_steps import run_first_steps
from ferrum_rpc.engine.cuda.graphs import (
    MAX_SPANS,
    Capture,
    CaptureFailed,
    CaptureRefused,
    CudaCapture,
    Graphs,
    GraphShape,
)
from ferrum_rpc.errors import InvalidRequest, counted
from ferrum_rpc.models.base import Model
from ferrum_rpc.models.lora import Loras
from ferrum_rpc.sampling.vocab_parallel import VocabShard

OFF: Final = "off"
SUPPORTED_TORCH: Final = (2, 13)
"""The first whose allocator survives a failed capture: see `graphs`."""

log = structlog.get_logger("ferrum_rpc.engine")


def select_compute(
    model: Model,
    attention: AttentionBackend,
    *,
    graphs: str,
    max_sequences: int,
    blocks_per_sequence: int,
    block_size: int,
    verify_tokens: int = 0,
    capture: Capture | None = None,
    loras: Loras | None = None,
    states: RecurrentStore | None = None,
) -> tuple[tuple[str, str], Compute]:
    """``(choice, compute)``; the choice is a name and its reason. ``states``: those of a model with recurrent layers.

    ``graphs`` is ``auto`` or ``off``. The first steps run here, and graphs are captured, which takes seconds for a
    large model. ``verify_tokens``: see `Graphs`; ``capture``: by default CUDA's. Raises `torch.AcceleratorError` if the
    device is lost.
    """
    compute = stage_compute(model, attention, loras)
    run_first_steps(compute, block_size, blocks_per_sequence, loras, states)
    if (why := obstacle(compute, graphs, states)) is not None or not isinstance(compute, StagedCompute):
        return (f"cuda_graphs={OFF}", why or ""), compute
    compute.graphs = Graphs(
        compute.run_layers,
        compute.staged,
        capture or CudaCapture(model.device),
        model.device,
        max_spans=min(MAX_SPANS, max_sequences),
        blocks_per_span=blocks_per_sequence,
        verify_tokens=verify_tokens,
        loras=loras,
        states=states,
        on_failure=_warn,
    )
    compute.graphs.record()
    return graphs_chosen(compute.graphs, adapters=loras is not None), compute


def stage_compute(
    model: Model, attention: AttentionBackend, loras: Loras | None = None, part: VocabShard | None = None
) -> Compute:
    """What computes over ``attention``, without any graph yet."""
    if not isinstance(attention, StagedAttention):
        return Compute(model, attention, loras, part)
    attention.warm_up()
    return StagedCompute(model, attention, loras, part)


def obstacle(compute: Compute, graphs: str, states: RecurrentStore | None = None) -> str | None:
    """The reason why nothing can be captured, or None."""
    if not isinstance(compute, StagedCompute):
        return f"plans of attention={compute.attention.name} have no fixed size"
    if graphs == OFF:
        return "requested"
    if states is not None and states.kernels is None:
        return "torch advances the states of each sequence by itself"
    return "its layers may wait for the device" if compute.model.waits else None


def record_on_ranks(compute: Compute, max_sequences: int, blocks_per_sequence: int, verify_tokens: int) -> None:
    """Capture steps at the same time as the other ranks: each runs its part of every shape, with the collectives in
    it. All ranks must have the same graphs. Raises InvalidRequest if a capture fails on this rank, GroupAborted if it
    fails on another."""
    assert isinstance(compute, StagedCompute)  # noqa: S101 - `obstacle` looked
    compute.graphs = Graphs(
        compute.run_layers,
        compute.staged,
        CudaCapture(compute.model.device),
        compute.model.device,
        max_spans=min(MAX_SPANS, max_sequences),
        blocks_per_span=blocks_per_sequence,
        verify_tokens=verify_tokens,
        loras=compute.loras,
        on_failure=_refuse,
    )
    compute.graphs.record()


def select_depth(compute: Compute, overlap: str, *, states: bool = False) -> tuple[tuple[str, str], int]:
    """``(choice, steps that may be under way at once)``. ``overlap``: ``auto`` or ``off``; ``states``: whether the
    model keeps any."""
    if not compute.late:
        return (f"overlap={OFF}", f"with attention={compute.attention.name} the host waits within a step"), 1
    if states:
        return (f"overlap={OFF}", "a step begins from the states that the one before it has left"), 1
    if overlap == OFF:
        return (f"overlap={OFF}", "requested"), 1
    return ("overlap=2", "a step is begun while the device computes the one before it"), 2


def graphs_chosen(graphs: Graphs, *, adapters: bool) -> tuple[str, str]:
    """``(choice, reason)``."""
    shapes = graphs.recorded
    if not shapes:
        return f"cuda_graphs={OFF}", f"capture failed: {graphs.closed}"
    reason = f"decode steps of up to {max(shape.spans for shape in shapes if shape.tokens == 1)} sequences"
    if verifying := [shape for shape in shapes if shape.tokens > 1]:
        tokens, spans, _ = (max(sizes) for sizes in zip(*verifying, strict=True))
        reason += f", and verify steps of up to {tokens} tokens for each of {spans}"
    reason += " are one launch"
    if graphs.closed is not None:
        reason += f"; no more were captured: {graphs.closed}"
    if adapters and not any(shape.adapters for shape in shapes):
        reason += "; steps with adapters are not replayed"
    return f"cuda_graphs={len(shapes)}", reason


def warn_of_torch(version: str = torch.__version__) -> None:
    """Log a warning if this torch is older than what is supported on CUDA."""
    if _release(version) < SUPPORTED_TORCH:
        log.warning(
            "torch_not_supported",
            torch=version,
            supported=".".join(map(str, SUPPORTED_TORCH)),
            action="install a newer torch; with this one restart with --cuda-graphs off after graph_capture_failed, "
            "because a failed capture damages its allocator",
        )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(each) for each in version.split(".")[:2])


def _refuse(shape: GraphShape, error: Exception) -> None:
    reason = error.__cause__ or error if isinstance(error, CaptureRefused | CaptureFailed) else error
    if isinstance(reason, GroupAborted):
        raise reason
    raise InvalidRequest(
        f"a step of {counted(shape.spans, 'sequence')} of {counted(shape.tokens, 'token')} each could not be captured "
        f"({type(reason).__name__}: {reason}); serve with --cuda-graphs off",
        field="cuda_graphs",
    ) from error


def _warn(shape: GraphShape, error: Exception) -> None:
    action = "none needed: steps without a graph are slower and otherwise the same. If it was memory, lower --kv-memory"
    if not isinstance(error, CaptureRefused) and _release(torch.__version__) < SUPPORTED_TORCH:
        action = (
            "restart with --cuda-graphs off: the failed capture has damaged the allocator of this torch, so that steps "
            "may run out of memory that is free"
        )
    elif isinstance(error, CaptureFailed):
        action += ". What the failed capture had allocated may stay reserved until the restart"
    log.warning(
        "graph_capture_failed",
        sequences=shape.spans,
        tokens_each=shape.tokens,
        error=f"{type(error).__name__}: {error}",
        action=action,
    )
