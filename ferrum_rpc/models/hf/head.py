"""A model's own head over hidden rows that are there.

What lies between hidden rows and logits differs: a cap, a scale, a division. It stands in ``forward`` of the model
with the head, behind a call of the model below. So that is called, on a copy of the outer module in which the model
below answers with the rows.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


class _Answer:
    """What a model below returns, with nothing but hidden rows."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


class _Below(nn.Module):
    """In the place of the model below. Some outer modules call a part of it: that is the same."""

    rows: Tensor

    def forward(self, *_: Any, **__: Any) -> _Answer:
        """The rows that were put here."""
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
