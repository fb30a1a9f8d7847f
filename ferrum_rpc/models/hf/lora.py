"""Adapters of a decoder of `transformers`: a hook behind each linear layer adds what they change.

Experts have no adapters: each sees some rows of a step, and only the layer knows which.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear

from ferrum_rpc.models.base import StepAdapters, StepInputs
from ferrum_rpc.models.layout import TensorPlacement
from ferrum_rpc.models.lora_choice import select_loras


def linear_layers(model: Any, dtype: torch.dtype) -> dict[str, Linear]:
    """The layers that adapters can change, by name."""
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Linear)
        and module is not head
        and module.weight.dtype == dtype
        and "experts" not in name.split(".")
    }


class LinearHooks:
    """Hooks behind the linear layers of ``model``, in ``dtype``. To ``loras`` each is a layer with one product. The C
    kernel is not used here: on a CPU torch computes the adapters."""

    _adapters: StepAdapters | None = None  # of the step that is computed
    _tokens = 0

    def __init__(self, model: Any, dtype: torch.dtype, device: torch.device, max_rank: int) -> None:
        table = {}
        for place, (name, linear) in enumerate(linear_layers(model, dtype).items()):
            shape = linear.out_features, linear.in_features
            table[f"{name}.weight"] = TensorPlacement(name, shape, 0, shape, adaptable=True, layer=place, slot=place)
            linear.register_forward_hook(partial(self._add, place))
        self.reason, self.loras = select_loras(table, dtype, device, max_rank=max_rank, native=False)

    @contextmanager
    def step(self, inputs: StepInputs) -> Iterator[None]:
        """Within it the hooks add the adapters of this step."""
        self._adapters, self._tokens = inputs.adapters, len(inputs.token_ids)
        try:
            yield
        finally:
            self._adapters = None

    def _add(self, place: int, module: Linear, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if self._adapters is None:
            return
        x, y = inputs[0].reshape(-1, module.in_features), output.view(-1, module.out_features)
        if len(y) != self._tokens:
            raise RuntimeError(f"a linear layer sees {len(y)} rows of a step of {self._tokens}")
        self._adapters.add(place, x, y)
