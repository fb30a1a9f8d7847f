"""A capture that CUDA refuses to end, and what works after it: `python -m tests.kernels.failed_capture`, on a GPU.

Exit status 0 if steps still run eagerly and the allocator still releases cached memory when memory is short. Below
torch 2.13 it does not (pytorch #180395), and the last line of the output says so.
"""

from __future__ import annotations

import sys

import torch

from ferrum_rpc.attention.triton_paged import TritonPagedAttention
from ferrum_rpc.engine.cuda.graphs import CudaCapture
from tests.kernels.test_step_graphs import graphed, same
from tests.support.fixtures import PagedModel


def main() -> int:
    """Run it; the exit status."""
    device = torch.device("cuda")
    stream = torch.cuda.current_stream()
    # it waits within a capture alone, so that the warm-up does not find it
    replayed = graphed(
        TritonPagedAttention, device, CudaCapture(device), waits_when=torch.cuda.is_current_stream_capturing
    )
    eager = PagedModel(TritonPagedAttention, device, staged=False)
    for count in (2, 1, 2):
        same(replayed, eager, *((sequence, [count]) for sequence in range(count)))
    graphs = replayed.compute.graphs
    assert graphs.recorded == [] and graphs.closed.startswith("CaptureFailed: "), graphs.closed
    assert torch.cuda.current_stream() == stream
    free = torch.cuda.mem_get_info()[0]
    try:
        for _ in range(2):  # the second fits only where the first is released
            torch.empty(int(free * 0.6), dtype=torch.uint8, device=device)[:1].zero_()
            torch.empty(int(free * 0.3), dtype=torch.uint8, device=device)[:1].zero_()
            torch.empty(int(free * 0.7), dtype=torch.uint8, device=device)[:1].zero_()
        torch.cuda.empty_cache()
    except RuntimeError as error:  # out of memory is one too
        print(f"torch {torch.__version__}: the allocator is damaged: {error}")
        return 1
    print(f"torch {torch.__version__}: the allocator works")
    return 0


if __name__ == "__main__":
    sys.exit(main())
