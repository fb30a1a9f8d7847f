"""Groups of ranks on devices, as far as a host shows them: through its memory, and as NCCL is called."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from ferrum_rpc.distributed import nccl
from ferrum_rpc.distributed.group import Group, GroupAborted
from ferrum_rpc.distributed.staged import StagedGroup
from tests.support.fake_device import fake_device
from tests.support.fake_nccl import use_fake_nccl
from tests.unit.test_groups import GLOO, REASON, SHARED, joined, on_all, random


@pytest.mark.parametrize("size", [2, 3])
def test_rows_of_a_device_pass_through_the_host(size: int) -> None:

    def play(group: Group) -> None:
        with fake_device() as device:
            staged = StagedGroup(group, device)
            rows = torch.full((3, 5), 1.0 + group.rank, dtype=torch.bfloat16).to(device)
            staged.all_reduce(rows)
            assert (rows.cpu() == size * (size + 1) / 2).all()
            gathered = staged.all_gather(torch.arange(4).to(device) + group.rank)
            assert gathered.device == device
            assert (gathered.cpu() - torch.arange(size)[:, None])[-1].tolist() == [0, 1, 2, 3]
            staged.send(rows * (1 + group.rank), (group.rank + 1) % size)
            found = torch.zeros_like(rows)
            staged.receive(found, before := (group.rank - 1) % size)
            assert (found.cpu() == (rows * (1 + before)).cpu()).all()
            staged.check()
            with pytest.raises(ValueError, match="on cpu"):
                group.all_reduce(rows)

    with joined(GLOO if REASON else SHARED, size) as groups:
        on_all(groups, play)


def test_nccl_is_called_as_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = use_fake_nccl(monkeypatch)
    store = HashStore()
    with ThreadPoolExecutor(2) as threads:
        groups: list[Group] = [*threads.map(lambda rank: nccl.NcclGroup(store, rank, 2, torch.device("cpu")), range(2))]
    parts = [random((2, 17), torch.float32, rank) for rank in range(2)]

    def play(group: Group) -> None:
        rows = parts[group.rank].clone()
        group.all_reduce(rows)
        assert torch.equal(rows, parts[0] + parts[1])
        assert torch.equal(group.all_gather(parts[group.rank] > 0), torch.stack(parts) > 0)
        if group.rank:
            group.send(parts[1], 0)
        else:
            group.receive(rows, 1)
            assert torch.equal(rows, parts[1])
        group.check()

    for epoch in (1, 2):
        on_all(groups, play)
        gone.clear()
        for group in groups:
            group.abort()  # returns, though NCCL's waits for graphs
            with pytest.raises(GroupAborted, match="aborted the group"):
                group.check()
            with pytest.raises(GroupAborted):
                group.all_reduce(parts[0])
        gone.set()
        on_all(groups, lambda group, epoch=epoch: group.renew(epoch))  # type: ignore[misc]
    for group in groups:
        group.close()
        with pytest.raises(GroupAborted, match="closed"):
            group.check()
