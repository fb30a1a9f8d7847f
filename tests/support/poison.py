"""Slots without an owner hold NaN, and no output may change: what reads one of them is found."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ferrum_rpc.attention.recurrent import RecurrentSlot
from ferrum_rpc.engine.operations import TorchRunner
from ferrum_rpc.kv.store import KvStore
from tests.support.kv_world import owned_slots

NAN = float("nan")


def fill_slots(store: KvStore, slots: Tensor, value: float = NAN) -> None:
    """Set K and V of ``slots``, int64 [n] or a bool mask [num_slots], to ``value`` in all layers. Bytes have no NaN:
    every bit is set, and scales among them are NaN."""
    indices = slots.nonzero().squeeze(1) if slots.dtype == torch.bool else slots
    for each in (buffer.flatten(2, 3) for buffer in store.buffers):
        filled = -1 if each.itemsize == 1 and math.isnan(value) else value
        rows = each.view(torch.int8) if each.itemsize == 1 else each
        rows.index_fill_(2, indices.to(each.device), filled)


def fill_journal(slot: RecurrentSlot, value: float = NAN) -> RecurrentSlot:
    """``slot``, the rows of whose journal that no token of the sequence needs are set to ``value``, in each layer."""
    for layer, folded in enumerate(slot.folded):
        needed = {position % slot.rows for position in range(folded - slot.shape.taps + 1, slot.length)}
        others = [row for row in range(slot.channels.shape[1]) if row not in needed]
        slot.channels[layer, others] = value
        slot.gates[layer, others] = value
    return slot


def poison(runner: TorchRunner) -> int:
    """Fill what nobody owns with NaN; returns how many slots."""
    free = torch.from_numpy(~owned_slots(runner.kv))
    with torch.inference_mode():
        fill_slots(runner.store, free)
    return int(free.sum())
