"""Steps that are recorded and replayed answer as if they were not: the same rows and the same cache, bit for bit.

`PagedModel` pairs: one replays, one does not. The identity model has no products, so that padding cannot change a bit.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from ferrum_rpc.attention.triton_paged import TritonPagedAttention
from ferrum_rpc.engine.compute import TokensBehind
from ferrum_rpc.engine.cuda.graphs import CaptureFailed, CaptureRefused, CudaCapture, Graphs, GraphShape, buckets
from tests.support.fixtures import PER_SEQUENCE, PagedModel, PlannedTorch
from tests.support.rerun import Rerun

KERNELS = partial(TritonPagedAttention, processors=1)
"""No step here is long enough to be split: what is reserved for that is kept small."""

BACKENDS = pytest.mark.parametrize("backend", [PlannedTorch, KERNELS], ids=["torch", "kernels"])


def graphed(backend, device, capture=None, waits_when=None, **limits) -> PagedModel:
    world = PagedModel(backend, device)
    if waits_when is not None:
        forward = world.model.forward

        def waits(*arguments):
            hidden = forward(*arguments)
            if waits_when():
                hidden[0, 0].item()  # a copy that the host waits for: it cannot be captured
            return hidden

        world.model.forward = waits
    limits = {"max_spans": 8, "blocks_per_span": PER_SEQUENCE} | limits
    world.failures, world.capture = [], capture or Rerun()
    with torch.inference_mode():
        world.compute.graphs = Graphs(
            world.compute.run_layers,
            world.attention,
            world.capture,
            device,
            on_failure=lambda shape, error: world.failures.append((shape, error)),
            **limits,
        )
        world.compute.graphs.record()
    return world


def models(backend, device, **limits) -> tuple[PagedModel, PagedModel]:
    return graphed(backend, device, **limits), PagedModel(backend, device, staged=False)


def same(one: PagedModel, other: PagedModel, *tokens) -> None:
    """The same step in both, with the same rows and the same cache after it."""
    assert torch.equal(one.step(*tokens), other.step(*tokens))
    assert torch.equal(one.cached(), other.cached())


@BACKENDS
def test_replayed_steps_are_the_eager_ones_whatever_their_number_and_lengths(device, backend):
    replayed, eager = models(backend, device)
    random = np.random.default_rng(0)
    same(replayed, eager, *((sequence, random.integers(0, 64, 1 + 7 * sequence)) for sequence in range(5)))
    for count in (5, 1, 3, 5, 1):  # a bucket's own number, and fewer: what a longer step left is padding now
        chosen = random.permutation(5)[:count]
        same(replayed, eager, *((int(sequence), random.integers(0, 64, 1)) for sequence in chosen))
    assert replayed.compute.graphs.recorded == [GraphShape(1, spans) for spans in (1, 8, 4, 2)]


@pytest.mark.parametrize(
    ("backend", "graphs"), [(KERNELS, True), (PlannedTorch, False)], ids=["kernels, replayed", "torch, eager"]
)
def test_tokens_that_the_step_before_chose_are_read_on_the_device(device, backend, graphs):
    """Of any rows of it, in any order; tokens from the host stand behind them."""
    world = graphed(backend, device) if graphs else PagedModel(backend, device)
    known = PagedModel(backend, device, staged=False)
    random = np.random.default_rng(2)
    same(world, known, *((sequence, random.integers(0, 64, 1 + 3 * sequence)) for sequence in range(6)))
    for count, following in ((6, 6), (5, 3), (1, 1), (2, 1)):
        parts = [torch.from_numpy(random.integers(0, 64, rows)).to(device) for rows in (4, 3)]
        rows = random.permutation(7)[:following]
        host = random.integers(0, 64, count - following).tolist()
        ids = torch.cat(parts).cpu()[rows].tolist() + host
        sequences = random.permutation(6)[:count].tolist()
        unknown = [*[(sequence, [0]) for sequence in sequences[:following]]]
        unknown += [(sequence, [token]) for sequence, token in zip(sequences[following:], host, strict=True)]
        found = world.step(*unknown, behind=TokensBehind(parts, rows))
        assert torch.equal(found, known.step(*((each, [token]) for each, token in zip(sequences, ids, strict=True))))
        assert torch.equal(world.cached(), known.cached())
    if graphs:
        assert world.capture.replays == 4


@BACKENDS
def test_a_verify_is_replayed_on_request_and_rolls_back_as_before(device, backend):
    replayed, eager = models(backend, device, max_spans=4, verify_tokens=5)
    capture = replayed.capture
    recordings = capture.recordings
    assert recordings == len(buckets(4)) * 5 == len(replayed.compute.graphs.recorded)
    random = np.random.default_rng(1)
    for step in range(4):
        for world in (replayed, eager):
            for sequence in range(3):  # of the last verify, one draft more each time was right
                world.truncate(sequence, world.lengths.get(sequence, 0) - (3 - min(step, 3) if step else 0))
        drafts = [random.integers(0, 64, 5) for _ in range(3)]
        same(replayed, eager, *enumerate(drafts))
    assert (capture.recordings, capture.replays) == (recordings, 4)


@BACKENDS
def test_a_recording_of_ranks_that_restart_touches_no_sequence(device, backend):
    """It runs the step once more, over nothing: not over what the last step left in the buffers."""
    replayed, eager = models(backend, device, max_spans=4)
    same(replayed, eager, *((sequence, [sequence] * (8 + sequence)) for sequence in range(4)))
    same(replayed, eager, *((sequence, [7]) for sequence in range(4)))
    before = replayed.cached()
    with torch.inference_mode():
        replayed.compute.graphs.record()
    assert torch.equal(replayed.cached(), before)
    same(replayed, eager, *((sequence, [8]) for sequence in range(3)))


def test_padding_goes_to_the_null_block_alone(device):
    world = graphed(KERNELS, device)
    world.step(*((sequence, [3]) for sequence in range(3)))  # a bucket of four
    for layer in (*world.store.keys, *world.store.values):
        assert layer[1 + 3 * PER_SEQUENCE :].isnan().all()
        assert not layer[0, 0].isnan().any() and layer[0, 1:].isnan().all()


@BACKENDS
def test_what_fits_no_shape_runs_as_before(device, backend):
    replayed, eager = models(backend, device, max_spans=4, blocks_per_span=3, verify_tokens=2)
    capture = replayed.capture
    recordings = capture.recordings
    same(replayed, eager, *((sequence, [5] * (2 + sequence)) for sequence in range(3)))  # spans of their own lengths
    same(replayed, eager, *((sequence, [1]) for sequence in range(5)))  # too many
    same(replayed, eager, (5, [1, 2, 3]))  # too many tokens each
    same(replayed, eager, (6, [1] * 20))
    same(replayed, eager, (6, [2]))  # six blocks, where three are reserved
    assert capture.replays == 0
    same(replayed, eager, (4, [2]))
    assert (capture.recordings, capture.replays) == (recordings, 1)


@pytest.mark.parametrize("error", [CaptureFailed("not permitted"), CaptureRefused("no memory"), ValueError("x")])
def test_where_recording_fails_steps_run_as_before_and_it_is_not_tried_again(device, error):
    capture = Rerun(error, nth=3)
    replayed = graphed(PlannedTorch, device, capture, max_spans=4)
    eager = PagedModel(PlannedTorch, device, staged=False)
    for count in (2, 1, 1, 2, 4):
        same(replayed, eager, *((sequence, [count]) for sequence in range(count)))
    graphs = replayed.compute.graphs
    assert graphs.recorded == [GraphShape(1, 1), GraphShape(1, 4)] and capture.recordings == 3 and capture.replays == 3
    assert graphs.closed == f"{type(error).__name__}: {error}"
    assert replayed.failures == [(GraphShape(1, 2), error)]


def test_a_lost_device_is_no_failed_recording(device):
    with pytest.raises(torch.AcceleratorError):
        graphed(PlannedTorch, device, Rerun(torch.AcceleratorError("an illegal memory access")))


@pytest.mark.parametrize("most", [1, 5, 64, 200, 256, 1000])
def test_no_step_is_padded_to_twice_its_size(most):
    sizes = buckets(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == min(most, 256)
    assert all(above < 2 * (below + 1) for below, above in pairwise(sizes))


# --- on a GPU, with its own graphs ------------------------------------------------------------------------------------

gpu = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@gpu
@needs_cuda
def test_cuda_graphs_of_one_pool_do_not_disturb_each_other():
    device = torch.device("cuda")
    replayed = graphed(TritonPagedAttention, device, CudaCapture(device))
    eager = PagedModel(TritonPagedAttention, device, staged=False)
    assert len(replayed.compute.graphs.recorded) == len(buckets(8))
    random = np.random.default_rng(0)
    same(replayed, eager, *((sequence, random.integers(0, 64, 1 + 3 * sequence)) for sequence in range(8)))
    for count in (8, 1, 5, 2, 8, 3, 1):
        chosen = random.permutation(8)[:count]
        same(replayed, eager, *((int(sequence), random.integers(0, 64, 1)) for sequence in chosen))


@gpu
@needs_cuda
def test_a_step_that_waits_is_refused_before_a_capture_begins():
    device = torch.device("cuda")
    replayed = graphed(TritonPagedAttention, device, CudaCapture(device), waits_when=lambda: True)
    eager = PagedModel(TritonPagedAttention, device, staged=False)
    for count in (2, 1, 2):
        same(replayed, eager, *((sequence, [count]) for sequence in range(count)))
    graphs = replayed.compute.graphs
    assert graphs.recorded == [] and graphs.closed.startswith("CaptureRefused: RuntimeError: called a synchronizing")
    assert torch.cuda.get_sync_debug_mode() == 0


@gpu
@needs_cuda
def test_a_capture_that_fails_leaves_a_device_that_goes_on():
    """In a process of its own: below torch 2.13 the allocator of this one would be damaged."""
    program = Path(__file__).with_name("failed_capture.py")
    done = subprocess.run(
        [sys.executable, "-m", f"tests.kernels.{program.stem}"], cwd=program.parents[2], timeout=300, check=False
    )
    assert done.returncode == 0
