"""Ranks on CUDA devices: the tokens of one rank, failed steps without trace, and a death that is known at once.

With one device two ranks share it, and rows pass through the host's memory; with two they have one each, and NCCL too
is asked. What needs the second is skipped visibly without it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore, PrefixStore

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import Sample
from ferrum_rpc.distributed import nccl, shared_memory
from ferrum_rpc.distributed.group import Group, GroupAborted, sum_in_order
from ferrum_rpc.distributed.staged import StagedGroup
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.operations import TorchRunner
from ferrum_rpc.engine.ranks.compute import RankedCompute
from ferrum_rpc.errors import DeviceLost, StepFailed
from tests.support.checkpoints import make_checkpoint
from tests.support.ranks import texts_of as texts

DEVICES = torch.cuda.device_count()
HERE = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="needs a CUDA device")]
NEEDS_TWO = pytest.mark.skipif(DEVICES < 2 or nccl.available() is not None, reason="needs two CUDA devices and NCCL")
STAGED, NCCL = "staged", "nccl"
KINDS = pytest.mark.parametrize("kind", [STAGED, pytest.param(NCCL, marks=NEEDS_TWO)])
TRANSPORTS = pytest.mark.parametrize("transport", ["shared-memory", pytest.param("nccl", marks=NEEDS_TWO)])
SOON_S = 5.0


# --- groups -----------------------------------------------------------------------------------------------------------


def device_of(rank: int) -> torch.device:
    return torch.device("cuda", rank % DEVICES)


@contextmanager
def joined(kind: str) -> Iterator[list[Group]]:
    store = HashStore()

    def join(rank: int) -> Group:
        torch.cuda.set_device(device_of(rank))
        if kind == NCCL:
            return nccl.NcclGroup(store, rank, 2, device_of(rank))
        return StagedGroup(shared_memory.join(PrefixStore("hosts", store), rank, 2), device_of(rank))

    with ThreadPoolExecutor(2) as ranks:
        groups = list(ranks.map(join, range(2)))
    yield groups
    for group in groups:
        group.abort()
    for group in groups:
        group.close()


def on_all(groups: list[Group], call: Callable[[Group], Any]) -> list[Any]:
    def on(group: Group) -> Any:
        torch.cuda.set_device(device_of(group.rank))
        found = call(group)
        torch.cuda.synchronize()
        group.check()
        return found

    with ThreadPoolExecutor(2) as ranks:
        return [each.result(60) for each in [ranks.submit(on, group) for group in groups]]


def parts_of(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    numbers = torch.randn(2, *shape) if dtype.is_floating_point else torch.randint(-100, 100, (2, *shape))
    return [each.to(dtype).to(device_of(rank)) for rank, each in enumerate(numbers)]


@KINDS
def test_what_a_group_carries(kind):
    with joined(kind) as groups:
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int64):
            for shape in ((1,), (3, 17), (50, 1024), (0, 4)):
                parts = parts_of(shape, dtype)
                host = torch.stack([each.cpu() for each in parts])
                wanted = torch.empty_like(host[0])
                sum_in_order(host, wanted)
                for found in on_all(groups, lambda group: group.all_gather(parts[group.rank])):  # noqa: B023
                    assert torch.equal(found.cpu(), host)
                sums = [each.clone() for each in parts]
                on_all(groups, lambda group: group.all_reduce(sums[group.rank]))  # noqa: B023
                assert torch.equal(sums[0].cpu(), sums[1].cpu())
                torch.testing.assert_close(sums[0].cpu(), wanted)

        def talk(group: Group) -> None:
            for number in range(4):
                rows = torch.full((9, 1 + number), 10 * group.rank + number, device=device_of(group.rank))
                if group.rank == 0:
                    group.send(rows, 1)
                else:
                    group.receive(rows, 0)
                    assert (rows == number).all()

        on_all(groups, talk)


@KINDS
def test_who_waits_for_a_group_that_is_given_up_goes_on(kind):
    with joined(kind) as groups, ThreadPoolExecutor(1) as threads:

        def alone() -> None:
            torch.cuda.set_device(device_of(0))
            groups[0].all_reduce(torch.ones(1000, device=device_of(0)))
            torch.cuda.synchronize()
            groups[0].check()

        waits = threads.submit(alone)
        time.sleep(0.2)
        assert not waits.done()
        for group in groups:
            group.abort()
        with pytest.raises(GroupAborted):
            waits.result(SOON_S)
        on_all(groups, lambda group: group.renew(1))
        rows = [torch.ones(5, device=device_of(rank)) for rank in range(2)]
        on_all(groups, lambda group: group.all_reduce(rows[group.rank]))
        assert all((each == 2).all() for each in rows)


# --- runners: rank 0 is here, the other a process ---------------------------------------------------------------------


@contextmanager
def running(checkpoint: Path, tensor: int, pipeline: int, **others: Any) -> Iterator[TorchRunner]:
    settings = ModelSettings(
        str(checkpoint),
        device="cuda",
        dtype="float32",
        block_size=4,
        kv_blocks=64,
        max_sequences=4,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        **others,
    )
    runner = build_runner(settings)
    try:
        yield runner
    finally:
        runner.close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", num_hidden_layers=4)


texts_of = partial(texts, drawn=Sample(seed=4, top_k=20, top_p=0.9))


@TRANSPORTS
@pytest.mark.parametrize("cut", [(2, 1), (1, 2)], ids=["tensor", "pipeline"])
def test_tokens_are_those_of_one_rank_and_a_failed_step_leaves_no_trace(checkpoint, cut, transport):
    with running(checkpoint, 1, 1) as one:
        expected = texts_of(one, 24)
    with running(checkpoint, *cut, rank_transport=transport) as runner:
        chosen = [name for name, _ in runner.device.choices]
        assert f"rank_transport={transport}" in chosen
        assert ("cuda_graphs=off" in chosen) is (transport != "nccl"), chosen
        assert texts_of(runner, 24) == expected
        assert isinstance(runner.compute, RankedCompute)
        before = runner.kv.state()
        runner.compute._ranks.send("fail")  # which the other rank does not know
        with pytest.raises(StepFailed):
            texts_of(runner, 1, first=10)
        runner.check()
        assert runner.kv.state() == before
        assert texts_of(runner, 24, first=20) == expected


@TRANSPORTS
@pytest.mark.parametrize("cut", [(2, 1), (1, 2)], ids=["tensor", "pipeline"])
def test_a_rank_that_is_killed_is_lost_at_once(checkpoint, cut, transport):
    with running(checkpoint, *cut, rank_transport=transport) as runner:
        texts_of(runner, 3)
        assert isinstance(runner.compute, RankedCompute)
        os.kill(runner.compute.others[0], signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(DeviceLost, match="rank 1"):
            texts_of(runner, 2, first=10)
        assert time.monotonic() - began < SOON_S
        os.kill(runner.compute.others[0], signal.SIGKILL)


def test_ranks_that_share_a_device_say_so(checkpoint, monkeypatch):
    """One of them is enough to try all else."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # of the other rank: this one sees what it saw
    with running(checkpoint, 2, 1) as runner:
        reasons = dict(runner.device.choices)
    assert "one GPU" in reasons["rank_transport=shared-memory"]
