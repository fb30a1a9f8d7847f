"""What llama.cpp's converter does to the numbers of a tensor, and how it is undone.

Source: llama.cpp's ``conversion``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.weights.gguf.architectures import Architecture

ROTATED: Final = re.compile(r".*\.self_attn\.([qk])_proj\.(weight|bias)")
HEADS: Final = {"q": "num_attention_heads", "k": "num_key_value_heads"}


@dataclass(frozen=True, slots=True)
class Change:
    """How a stored tensor becomes Hugging Face's: the index of each row and of each column in the file (None: in
    order), a function of its numbers, and its shape if that is another one."""

    rows: Tensor | None = None
    columns: Tensor | None = None
    values: Callable[[Tensor], Tensor] | None = None
    shape: tuple[int, ...] | None = None

    @property
    def decodes(self) -> bool:
        """Whether the stored bytes cannot be read as they are."""
        return self.rows is not None or self.columns is not None or self.values is not None


UNCHANGED: Final = Change()


def change(name: str, shape: tuple[int, ...], known: Architecture, config: dict[str, Any]) -> Change:
    """Of the tensor with Hugging Face's ``name``. Raises InvalidRequest if its shape is not what the heads need."""
    if ".linear_attn." in name:
        return _recurrent(name.partition(".linear_attn.")[2], shape, config)
    if known.interleaved and (rotated := ROTATED.fullmatch(name)):
        return _rotated(shape, config[HEADS[rotated[1]]])
    if known.shifted and name.endswith("norm.weight"):
        return Change(values=lambda numbers: numbers - 1.0)
    if name.endswith(".shared_expert_gate.weight") and len(shape) == 1:  # as llama.cpp's own programs write one row
        return Change(shape=(1, *shape))
    return UNCHANGED


def _rotated(shape: tuple[int, ...], heads: int) -> Change:
    """llama.cpp pairs neighbouring channels; Hugging Face pairs the halves of a head."""
    if shape[0] % (2 * heads):
        raise InvalidRequest(f"{[*shape]} for {heads} heads")
    return Change(torch.arange(shape[0]).view(heads, -1, 2).transpose(1, 2).reshape(-1))


def _recurrent(tensor: str, shape: tuple[int, ...], config: dict[str, Any]) -> Change:
    """Decays are stored instead of their logarithms. Value heads that share a key head are side by side in Hugging
    Face's order; in llama.cpp's the first of each key head come first."""
    heads, keys, size = (config[f"linear_{each}"] for each in ("num_value_heads", "num_key_heads", "value_head_dim"))
    if heads % keys:
        raise InvalidRequest(f"{heads} value heads must be a multiple of {keys} key heads")
    order = torch.arange(heads).view(-1, keys).T.reshape(-1)
    values = (order[:, None] * size + torch.arange(size)).view(-1)
    others = torch.arange(2 * keys * config["linear_key_head_dim"])
    of_rows = {
        "in_proj_qkv.weight": torch.cat((others, len(others) + values)),
        "conv1d.weight": torch.cat((others, len(others) + values)),
        "in_proj_z.weight": values,
        "in_proj_b.weight": order,
        "in_proj_a.weight": order,
        "A_log": order,
        "dt_bias": order,
    }
    rows, columns = of_rows.get(tensor), values if tensor == "out_proj.weight" else None
    wanted = (rows, shape[0]) if columns is None else (columns, shape[-1])
    if wanted[0] is not None and len(wanted[0]) != wanted[1]:
        raise InvalidRequest(f"{[*shape]} for {heads} value heads and {keys} key heads")
    made = Change(rows, columns) if heads != keys else UNCHANGED
    if tensor == "A_log":
        return replace(made, values=lambda decays: (-decays).log())
    return replace(made, shape=(shape[0], 1, *shape[1:])) if tensor == "conv1d.weight" else made
