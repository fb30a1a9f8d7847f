"""Shared by schemes of small integers: integers packed in 32-bit words, and groups of columns with a scale each."""

from __future__ import annotations

import torch
from torch import Tensor

from ferrum_rpc.models.stored_integers import BITS, IntegerFormat
from ferrum_rpc.weights.quantized.stored import wrong


def unpacked(words: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32, ``32 / bits`` times as long along ``dim``: the unsigned integers in ``words`` (int32), lowest bits first.
    ``order``: their positions in a word, if not in order."""
    places = order or tuple(range(32 // bits))
    shape = [len(places) if each == dim + 1 else 1 for each in range(words.dim() + 1)]
    shifts = torch.tensor([bits * place for place in places], dtype=torch.int32).view(shape)
    return ((words.unsqueeze(dim + 1) >> shifts) & ((1 << bits) - 1)).flatten(dim, dim + 1)


def as_float32(values: Tensor) -> Tensor:
    """float32 of the same shape. float8_e4m3fn is converted by a table of its 256 numbers: torch's own conversion takes
    three times as long on a CPU."""
    if values.dtype != torch.float8_e4m3fn:
        return values.to(torch.float32)
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    return table.index_select(0, values.view(torch.uint8).reshape(-1).to(torch.int32)).view(values.shape)


def rescaled(values: Tensor, scales: Tensor, zeros: Tensor | None, size: int, columns: Tensor | None = None) -> Tensor:
    """float32 [rows, width]: ``(values - zeros) * scales``.

    ``values`` [rows, width]; ``scales`` and ``zeros`` [rows, groups], one for each ``size`` columns, or for those that
    ``columns`` int64 [width] gives to each group.
    """
    rows, width = values.shape
    scales = scales.to(torch.float32)
    zeros = None if zeros is None else zeros.to(torch.float32)
    made = as_float32(values)
    if columns is None and width == scales.shape[1] * size:
        made = made.view(rows, -1, size)
        if zeros is not None:
            made = made - zeros[:, :, None]
        return (made * scales[:, :, None]).view(rows, width)
    if columns is None:
        columns = torch.arange(width) // size
    if zeros is not None:
        made = made - zeros[:, columns]
    return made * scales[:, columns]


def column_order(module: str, index: Tensor | None, groups: int, size: int) -> Tensor | None:
    """int32 [width]: the columns of each group by ``index``, one group after the other; an empty tensor where they are
    in order. None: not every group has ``size``."""
    columns = None if index is None else checked_columns(module, index, groups)
    if columns is None:
        return torch.empty(0, dtype=torch.int32)
    order = torch.argsort(columns, stable=True)
    in_groups = torch.arange(len(columns)) // size
    if not torch.equal(columns[order], in_groups):
        return None
    return order.to(torch.int32) if not torch.equal(columns, in_groups) else torch.empty(0, dtype=torch.int32)


def even_groups(width: int, size: int, bits: int, *, zeroed: bool, ordered: bool = False) -> IntegerFormat | None:
    """How a matrix is stored that our kernel can hold so, if all of its groups are of ``size`` columns."""
    return IntegerFormat(bits, size, zeroed, ordered=ordered) if bits in BITS and width % size == 0 else None


def checked_columns(module: str, index: Tensor, groups: int) -> Tensor | None:
    """int64: the group of each column, as stored in ``index``. None if all of them are -1."""
    if bool((index == -1).all()):
        return None
    low, high = (int(each) for each in torch.aminmax(index))
    if low < 0 or high >= groups:
        raise wrong(module, f"g_idx names group {low if low < 0 else high} of {groups}")
    return index.to(torch.int64)


def group_count(width: int, size: int) -> int:
    """Groups of ``size`` columns in ``width``; -1 is one group."""
    return 1 if size == -1 else -(-width // size)
