"""The CUDA kernels on both of their devices: a GPU where there is one, else Triton's interpreter on a CPU.

The choice is made before triton is imported, and holds for the process. Tests do not know which it is.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

CUDA = torch.cuda.is_available()

if find_spec("triton") is not None and not CUDA:
    from tests.support.interpreter import interpret

    interpret()

torch.set_num_threads(1)


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu) if CUDA else "cpu"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the kernels run."""
    return torch.device(request.param)
