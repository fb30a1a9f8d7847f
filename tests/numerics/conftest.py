"""Tiny matrices: one thread each, so that parallel workers do not fight over two cores."""

import pytest
import torch

from ferrum_rpc.models.native_linear import PairFactory
from ferrum_rpc.native import library
from ferrum_rpc.sampling.samplers import NativeSampler, Sampler, TorchSampler
from ferrum_rpc.usage import ISA_VARIABLE, ISAS
from tests.support.harness import made_or_skip

torch.set_num_threads(1)


@pytest.fixture(params=["torch", "native"], scope="session")
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return TorchSampler() if request.param == "torch" else request.getfixturevalue("native")


@pytest.fixture(scope="session")
def native() -> NativeSampler:
    return made_or_skip(NativeSampler)


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The C library is not installed."""
    monkeypatch.setattr(library, "PACKAGE", "no_such_package")
    monkeypatch.setattr(library, "load", library.load.__wrapped__)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """C kernels that are made meanwhile are of no better instruction set. torch keeps its own."""
    chosen: str = request.param
    monkeypatch.setenv(ISA_VARIABLE, chosen)
    if chosen == ISAS[-1] and made_or_skip(PairFactory).isa != "AMX":
        pytest.skip("the CPU has no AMX: test_native_builds.py emulates it")
    return chosen
