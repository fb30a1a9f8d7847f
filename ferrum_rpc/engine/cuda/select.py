"""How steps run on a GPU, and why: staged copies, CUDA graphs, and whether a step is begun while another is computed.

Choices like that of a backend: made at the start, with their reasons for the log and for GetInfo.
"""

from __future__ import annotations

import structlog

from ferrum_rpc.attention.backend import AttentionBackend, StagedAttention
from ferrum_rpc.distributed.group import GroupAborted
from ferrum_rpc.engine.compute import Compute
from ferrum_rpc.engine.cuda.compute import StagedCompute
from ferrum_rpc.engine.cuda.graphs import MOST_SPANS, Capture, CudaCapture, Graphs, GraphShape
from ferrum_rpc.errors import InvalidRequest, counted
from ferrum_rpc.models.base import Model
from ferrum_rpc.models.lora import Loras
from ferrum_rpc.sampling.vocab_parallel import VocabShard

OFF = "off"

log = structlog.get_logger("ferrum_rpc.engine")


def select_compute(
    model: Model,
    attention: AttentionBackend,
    *,
    graphs: str,
    max_sequences: int,
    blocks_per_sequence: int,
    capture: Capture | None = None,
    loras: Loras | None = None,
) -> tuple[tuple[str, str], Compute]:
    """``(choice, compute)``; the choice is a name and its reason.

    ``graphs`` is ``auto`` or ``off``. Graphs of decode steps are recorded here, which takes seconds for a large model;
    ``capture`` records them (default: CUDA's). Raises what means that the device is gone.
    """
    compute = stage_compute(model, attention, loras)
    if (why := obstacle(compute, graphs)) is not None or not isinstance(compute, StagedCompute):
        return (f"cuda_graphs={OFF}", why or ""), compute
    compute.graphs = Graphs(
        compute.run_layers,
        compute.staged,
        capture or CudaCapture(model.device),
        model.device,
        most_spans=min(MOST_SPANS, max_sequences),
        blocks_per_span=blocks_per_sequence,
        on_failure=_warn,
    )
    compute.graphs.record(tokens=1)
    return graphs_chosen(compute.graphs, adapters=loras is not None), compute


def stage_compute(
    model: Model, attention: AttentionBackend, loras: Loras | None = None, part: VocabShard | None = None
) -> Compute:
    """What computes over ``attention``, without any graph yet."""
    if not isinstance(attention, StagedAttention):
        return Compute(model, attention, loras, part)
    attention.warm_up()
    return StagedCompute(model, attention, loras, part)


def obstacle(compute: Compute, graphs: str) -> str | None:
    """Why nothing is to be recorded; None where it is."""
    if not isinstance(compute, StagedCompute):
        return f"plans of attention={compute.attention.name} have no fixed size"
    if graphs == OFF:
        return "requested"
    return "the layers of transformers may wait for the device" if compute.model.waits else None


def record_on_ranks(compute: Compute, max_sequences: int, blocks_per_sequence: int) -> None:
    """Record decode steps, as the other ranks do at the same time: each runs its part of every shape, and what ranks
    say to each other is recorded with it. So a rank that cannot cannot go on alone: raises InvalidRequest, or
    GroupAborted where it was another."""
    assert isinstance(compute, StagedCompute)  # noqa: S101 - `obstacle` looked
    compute.graphs = Graphs(
        compute.run_layers,
        compute.staged,
        CudaCapture(compute.model.device),
        compute.model.device,
        most_spans=min(MOST_SPANS, max_sequences),
        blocks_per_span=blocks_per_sequence,
        most_tokens=1,  # others are recorded in the middle of work
        on_failure=_refuse,
    )
    compute.graphs.record(tokens=1)


def select_depth(compute: Compute, overlap: str) -> tuple[tuple[str, str], int]:
    """``(choice, steps that may be under way at once)``. ``overlap``: ``auto`` or ``off``."""
    if not compute.late:
        return (f"overlap={OFF}", f"with attention={compute.attention.name} the host waits within a step"), 1
    if overlap == OFF:
        return (f"overlap={OFF}", "requested"), 1
    return ("overlap=2", "a step is begun while the device computes the one before it"), 2


def graphs_chosen(graphs: Graphs, *, adapters: bool) -> tuple[str, str]:
    """What was chosen, and why."""
    spans = sorted(shape.spans for shape in graphs.recorded)
    if not spans:
        return f"cuda_graphs={OFF}", f"recording failed: {graphs.closed}"
    reason = f"decode steps of up to {spans[-1]} sequences are one launch"
    if graphs.closed is not None:
        reason += f"; no more were recorded: {graphs.closed}"
    if adapters:
        reason += "; steps with adapters are not replayed"
    return f"cuda_graphs={len(spans)}", reason


def _refuse(shape: GraphShape, error: Exception) -> None:
    if isinstance(error, GroupAborted):
        raise error
    raise InvalidRequest(
        f"a decode step of {counted(shape.spans, 'sequence')} could not be recorded ({type(error).__name__}: {error}); "
        "serve with --cuda-graphs off",
        field="cuda_graphs",
    ) from error


def _warn(shape: GraphShape, error: Exception) -> None:
    log.warning(
        "graph_capture_failed",
        sequences=shape.spans,
        tokens_each=shape.tokens,
        error=f"{type(error).__name__}: {error}",
        action="steps without a graph run slower and no less right; if it was memory, lower --kv-memory",
    )
