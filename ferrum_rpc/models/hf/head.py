"""A model's own head, applied to given hidden rows.

The computation between hidden rows and logits differs by family: a cap, a scale, a division. It is in ``forward`` of
the model with the head, after its call of the inner model. So this calls ``forward`` of a copy of the outer module
whose inner model returns the given rows.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


class _Answer:
    """The result of an inner model, with nothing but hidden rows."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


class _Below(nn.Module):
    """Takes the place of the inner model. If an outer module calls a part of it, it gets the same object."""

    rows: Tensor

    def forward(self, *_: Any, **__: Any) -> _Answer:
        """The given rows."""
        return _Answer(self.rows[None])

    def __getattr__(self, name: str) -> Any:
        return self


class Head:
    """``head(hidden [R, hidden])``: logits [R, vocab], in the dtype that the model gives. Only the model thread may
    call it."""

    def __init__(self, model: Any) -> None:
        self._below = _Below()
        self._outer = copy.copy(model)
        self._outer._modules = {**model._modules, model.base_model_prefix: self._below}

    def __call__(self, hidden: Tensor) -> Tensor:
        ids = hidden.new_zeros((1, len(hidden)), dtype=torch.int64)
        self._below.rows = hidden
        try:
            logits: Tensor = self._outer(input_ids=ids, use_cache=False).logits[0]
        finally:
            del self._below.rows
        return logits
