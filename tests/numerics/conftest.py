"""Tiny matrices: one thread each, so that parallel workers do not fight over two cores."""

import pytest
import torch

from ferrum_rpc.sampling.samplers import NativeSampler, Sampler, TorchSampler

torch.set_num_threads(1)


@pytest.fixture(params=["torch", "native"], scope="session")
def sampler(request: pytest.FixtureRequest) -> Sampler:
    if request.param == "torch":
        return TorchSampler()
    try:
        return NativeSampler()
    except OSError as error:
        pytest.skip(f"no kernels: {error}")
