"""The device of each rank and the transport of rows, chosen by rank 0 from the settings and the ranks' hosts.

The ranks of a machine are numbered in rank order, their seats, and a rank takes the CUDA device of its seat, so a
launcher need not assign devices; a launcher that does, by ``CUDA_VISIBLE_DEVICES``, leaves a single one. Devices are
identified by their UUIDs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal, NamedTuple

import torch

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.distributed import nccl, shared_memory
from ferrum_rpc.engine.ranks.setup import CUDA, GLOO, NCCL, SHARED_MEMORY, Setup
from ferrum_rpc.errors import InvalidRequest

CPU: Final[Literal["cpu"]] = "cpu"


class RankHost(NamedTuple):
    """The host of a rank: its machine, its address for others, and its CUDA devices (empty if ranks compute on
    CPUs)."""

    machine: str
    address: str
    devices: Sequence[str] = ()


def choose_kind(requested: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """The kind of device that all ranks compute on: rank 0's."""
    if requested != "auto":
        return requested
    return CUDA if torch.cuda.is_available() else CPU


def cuda_devices() -> list[str]:
    """The CUDA devices that this process sees, in its order."""
    return [str(torch.cuda.get_device_properties(each).uuid) for each in range(torch.cuda.device_count())]


def place(settings: ModelSettings, ranks: Sequence[RankHost]) -> list[Setup]:
    """The setup of each of the ``ranks``. Raises InvalidRequest if they cannot compute or communicate as requested."""
    kind = choose_kind(settings.device)
    settings = replace(settings, device=kind)
    machines, seats = Counter(each.machine for each in ranks), list[int]()
    taken = defaultdict[str, int](int)
    for each in ranks:
        seats.append(taken[each.machine])
        taken[each.machine] += 1
    memories = [each.machine for each in ranks]
    if kind == CUDA:
        for number, each in enumerate(ranks):
            if not each.devices:
                message = f"rank {number} finds no CUDA device, and rank 0 computes on one; use --device cpu"
                raise InvalidRequest(message, field="device")
        memories = [each.devices[seat % len(each.devices)] for each, seat in zip(ranks, seats, strict=True)]
    transport, host, reason = choose_transport(settings.rank_transport, kind, memories, machines=len(machines))
    sharers = Counter(memories)
    return [
        Setup(
            settings,
            number,
            transport=transport,
            host=host,
            reason=reason,
            address=each.address,
            neighbours=machines[each.machine],
            seat=seats[number],
            sharers=sharers[memories[number]],
        )
        for number, each in enumerate(ranks)
    ]


def choose_transport(requested: str, kind: str, memories: Sequence[str], *, machines: int) -> tuple[str, str, str]:
    """The transport of rows, the transport between hosts, and the reason. ``memories``: those in which ranks compute, a
    CUDA device or a machine; ``machines``: the number of machines. Raises InvalidRequest."""
    host = SHARED_MEMORY if machines == 1 and shared_memory.available() is None else GLOO
    if kind == CPU:
        if requested == NCCL:
            raise InvalidRequest("nccl is for CUDA devices, and these ranks compute on CPUs", field="rank_transport")
        if requested != "auto":
            return requested, requested, "requested"
        return host, host, "what ranks on these machines can use"
    if requested not in {"auto", NCCL}:
        return requested, requested, "requested; rows pass through the hosts' memory"
    obstacle = nccl.available()
    if shared := next((each for each, count in Counter(memories).items() if count > 1), None):
        first, second, *_ = (number for number, each in enumerate(memories) if each == shared)
        obstacle = f"ranks {first} and {second} have one GPU between them"
    if obstacle is None:
        return NCCL, host, "requested" if requested == NCCL else "every rank has a GPU of its own"
    if requested == NCCL:
        raise InvalidRequest(f"nccl cannot be used: {obstacle}; use --rank-transport auto", field="rank_transport")
    return host, host, f"rows pass through the hosts' memory: {obstacle}"
