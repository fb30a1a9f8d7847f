"""Where ranks compute and how they talk, as a table; and what they do with integers of a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.distributed import nccl, shared_memory
from ferrum_rpc.distributed.group import GroupAborted
from ferrum_rpc.engine.assembly.choose import choose
from ferrum_rpc.engine.ranks import placing, setup
from ferrum_rpc.engine.ranks.compute import RankedStore
from ferrum_rpc.engine.ranks.placing import RankHost, place
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.kv.store import CacheSpec
from ferrum_rpc.models.shard import Shard
from tests.support.fake_device import OnFakeDevice, fake_device

NO_NCCL = "no NCCL here"


@pytest.fixture(autouse=True)
def as_elsewhere(monkeypatch):
    """Whatever this machine has."""
    monkeypatch.setattr(nccl, "available", lambda: None)
    monkeypatch.setattr(shared_memory, "available", lambda: None)


def setups(requested: str, kind: str, *ranks: str) -> list[Any]:
    """``ranks``: ``machine:device,device`` of each."""
    many: Any = {"device": kind, "rank_transport": requested, "tensor_parallel": len(ranks)}
    parts = [rank.partition(":") for rank in ranks]
    hosts = [RankHost(machine, f"at {machine}", devices.split(",") if devices else ()) for machine, _, devices in parts]
    return list(place(ModelSettings("model", **many), hosts))


@pytest.mark.parametrize(
    ("ranks", "requested", "transport", "host", "reason", "seats", "sharers"),
    [
        (("a", "a"), "auto", "shared-memory", "shared-memory", "can use", [0, 1], [2, 2]),
        (("a", "b", "a"), "auto", "gloo", "gloo", "can use", [0, 0, 1], [2, 1, 2]),
        (("a", "a"), "gloo", "gloo", "gloo", "requested", [0, 1], [2, 2]),
        (("a:x,y", "a:x,y"), "auto", "nccl", "shared-memory", "a GPU of its own", [0, 1], [1, 1]),
        (("a:x,y", "a:x,y"), "nccl", "nccl", "shared-memory", "requested", [0, 1], [1, 1]),
        (("a:x", "a:y"), "auto", "nccl", "shared-memory", "a GPU of its own", [0, 1], [1, 1]),
        (("a:x,y", "b:z,w", "a:x,y", "b:z,w"), "auto", "nccl", "gloo", "of its own", [0, 0, 1, 1], [1, 1, 1, 1]),
        (("a:x,y", "b:z"), "gloo", "gloo", "gloo", "requested; rows pass", [0, 0], [1, 1]),
        (("a:x", "a:x"), "auto", "shared-memory", "shared-memory", "ranks 0 and 1 have one GPU", [0, 1], [2, 2]),
        (("a:x,y",) * 3, "auto", "shared-memory", "shared-memory", "ranks 0 and 2 have", [0, 1, 2], [2, 1, 2]),
        (("a:x", "b:x"), "auto", "gloo", "gloo", "ranks 0 and 1 have one GPU", [0, 0], [2, 2]),
    ],
)
def test_ranks_are_placed(*, ranks, requested, transport, host, reason, seats, sharers):
    kind = "cuda" if ":" in ranks[0] else "cpu"
    made = setups(requested, kind, *ranks)
    assert {(each.transport, each.host) for each in made} == {(transport, host)}
    assert reason in made[0].reason
    assert [each.seat for each in made] == seats and [each.sharers for each in made] == sharers
    assert [each.number for each in made] == list(range(len(ranks)))
    assert all(each.address == f"at {rank[0]}" for each, rank in zip(made, ranks, strict=True))
    assert {each.recordable for each in made} == {transport == "nccl"}


@pytest.mark.parametrize(
    ("ranks", "requested", "kind", "field", "words"),
    [
        (("a", "a"), "nccl", "cpu", "rank_transport", "compute on CPUs"),
        (("a:x", "a:x"), "nccl", "cuda", "rank_transport", "ranks 0 and 1 have one GPU"),
        (("a:x", "b"), "auto", "cuda", "device", "rank 1 finds no CUDA device"),
    ],
)
def test_what_ranks_cannot_do_is_refused(ranks, requested, kind, field, words):
    with pytest.raises(InvalidRequest, match=words) as refusal:
        setups(requested, kind, *ranks)
    assert refusal.value.field == field


def test_a_torch_without_nccl_says_so(monkeypatch):
    monkeypatch.setattr(nccl, "available", lambda: NO_NCCL)
    made = setups("auto", "cuda", "a:x,y", "a:x,y")
    assert made[0].transport == "shared-memory" and NO_NCCL in made[0].reason
    with pytest.raises(InvalidRequest, match=NO_NCCL):
        setups("nccl", "cuda", "a:x,y", "a:x,y")


def test_where_nccl_does_not_work_the_error_says_what_would(monkeypatch):
    def fail(*arguments: Any) -> Any:
        assert arguments[-1] == torch.device("cuda", 0), "whatever the current device of the thread is"
        raise GroupAborted("rank 0 lost another: NCCL error: unhandled system error")

    monkeypatch.setattr(setup, "NcclGroup", fail)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InvalidRequest, match=r"unhandled system error; --rank-transport gloo") as refusal:
        setup.Groups(setups("auto", "cuda", "a:x,y", "a:x,y")[0], HashStore())
    assert refusal.value.field == "rank_transport"


def test_every_rank_has_a_device_with_an_index(monkeypatch):
    """Of the devices that its own process sees."""
    made = setups("auto", "cuda", "a:x,y", "a:x,y", "b:z")
    for visible, expected in ((2, [0, 1, 0]), (1, [0, 0, 0])):
        monkeypatch.setattr(torch.cuda, "device_count", lambda visible=visible: visible)
        assert [each.device for each in made] == [torch.device("cuda", index) for index in expected]
    assert setups("auto", "cpu", "a", "a")[1].device == torch.device("cpu")


def test_the_choices_of_a_rank_are_for_its_own_device(monkeypatch, checkpoint_of):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = ModelSettings(str(checkpoint_of()), device="cuda", tensor_parallel=2)
    assert choose(config).device == torch.device("cuda", 0)
    assert choose(config, rank=1, device=torch.device("cuda", 1)).device == torch.device("cuda", 1)


def test_all_ranks_take_the_kind_of_device_that_the_first_has(monkeypatch):
    for there, kind in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert {each.settings.device for each in setups("auto", "auto", "a:x,y", "a:x,y")} == {kind}
        assert placing.choose_kind("cpu") == "cpu"


def test_what_is_told_of_blocks_on_a_device_lies_on_the_host():
    messages: list[tuple[Any, ...]] = []
    told: Any = SimpleNamespace(  # `Ranks` of one other, which has a cache as large
        send=lambda *message, to=None: messages.append(message),
        order=lambda *message, to=None: messages.append(message) or [],
        ask=lambda *_: [1000],
        collect=lambda _: [],
    )
    with torch.inference_mode(), fake_device() as device:
        layers = [CacheSpec(1, 8, torch.float32)] * 2
        store = RankedStore(layers, 6, 4, device, ranks=told, shard=Shard(0, 2), kv_heads=[2, 2])
        assert store.block_bytes == store.own_block_bytes + 1000 and isinstance(store.keys[0], OnFakeDevice)
        slots, pairs = np.array([4, 9]), np.array([[1, 3]])
        saved = store.save(slots)
        store.copy_blocks(pairs)
        store.restore(saved)
        store.write(slots, 1, 8, [np.arange(2 * 2 * 8, dtype=np.float32).tobytes()] * 2)
        keys, _ = store.read(slots, 1, 8)
        assert keys.view(np.float32).reshape(2, 1, 8)[:, 0, 0].tolist() == [0, 16]
    names = ["save", "copy_blocks", "restore", "write", "read"]
    assert [message[message[0] == "cache"] for message in messages] == names
    arrays = [each for message in messages for each in message if not isinstance(each, (str, int, list))]
    assert len(arrays) == 4 and all(each is slots or each is pairs for each in arrays), "not a copy from the device"
