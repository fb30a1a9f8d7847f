"""A decoder of `transformers`, run over our cache.

transformers knows the layout of each family's checkpoints, and reads the weights through a mapping that the caller
makes of checked files: it gets neither a folder nor a network. A configuration never selects code to run.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ferrum_rpc.core import AttentionSpec, ModelInfo
from ferrum_rpc.errors import ExecutorError, InvalidRequest, listed
from ferrum_rpc.models.base import Attend, StepInputs
from ferrum_rpc.models.finite import is_finite
from ferrum_rpc.models.hf import attention
from ferrum_rpc.models.hf.describe import HfSpec, first_line
from ferrum_rpc.models.hf.head import Head
from ferrum_rpc.models.hf.library import quiet, reading_one_by_one
from ferrum_rpc.models.hf.lora import LinearHooks
from ferrum_rpc.models.hf.rope import freeze
from ferrum_rpc.models.lora import Loras

ALIGNED: Final = 16
"""Bytes."""


class StoredTensor(Protocol):
    """A tensor that is still in its file. transformers reads it from several threads."""

    def __getitem__(self, index: Any) -> Tensor:
        """With ``...``: all of it, in memory of its own where it is of the model's dtype."""


class HfModel:
    """A `Model`. ``model`` is the causal language model of transformers, with its weights, made by `load`."""

    rowwise = native = False
    waits = True
    _hooks: LinearHooks | None = None

    def __init__(self, spec: HfSpec, model: Any, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.attention_specs: tuple[AttentionSpec, ...] = spec.layers
        self._model = model
        self.sinks = (
            tuple(model.get_parameter(name) if name else None for name in spec.sinks) if any(spec.sinks) else ()
        )
        self._body = model.base_model
        self._head = Head(model)

    def take_adapters(self, max_rank: int) -> tuple[str, Loras]:
        self._hooks = LinearHooks(self._model, self.dtype, self.device, max_rank)
        reason = self._hooks.reason or "one adapter after the other"
        return f"behind the linear layers of transformers, {reason}", self._hooks.loras

    def forward(self, inputs: StepInputs, attend: Attend) -> Tensor:
        adapted = nullcontext() if self._hooks is None else self._hooks.step(inputs)
        with adapted, attention.attending(attend):
            return self._run(self._body, inputs).last_hidden_state[0]  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden).float()

    def argmax(self, hidden: Tensor) -> Tensor:
        return self._head(hidden).argmax(dim=-1)

    def plain_logits(self, inputs: StepInputs) -> Tensor:
        """float32 [T, vocab] of one sequence from its start on, with transformers' own attention: the reference of
        ours."""
        with attention.plain(self._model.config):
            return self._run(self._model, inputs).logits[0].float()  # type: ignore[no-any-return]

    @staticmethod
    def _run(module: Any, inputs: StepInputs) -> Any:
        return module(input_ids=inputs.token_ids[None], position_ids=inputs.positions[None], use_cache=False)

    def info(self, name: str) -> ModelInfo:
        """Of layers that differ, heads are those of the first."""
        spec, dtype = self.spec, str(self.dtype).removeprefix("torch.")
        first = spec.layers[0]
        return ModelInfo(
            name=name,
            architecture=spec.architecture,
            vocab_size=spec.vocab_size,
            max_context=spec.max_context,
            layers=len(spec.layers),
            hidden_size=spec.hidden_size,
            heads=first.heads,
            kv_heads=first.kv_heads,
            head_dim=first.head_dim,
            parameters=spec.parameters,
            weight_dtype=dtype,
            kv_dtype=dtype,
            eos_token_ids=spec.eos_token_ids,
            bos_token_id=spec.bos_token_id,
        )


def load(
    spec: HfSpec, stored: Mapping[str, StoredTensor], dtype: torch.dtype, device: torch.device, max_context: int
) -> HfModel:
    """The model with the weights of a checkpoint, ``stored`` by their names there. ``max_context``: of the longest
    sequence, for scalings that depend on it. Raises what `check_fit` does, and InvalidRequest for weights that are not
    finite."""
    joined = any(name not in spec.shapes for name in stored)
    with reading_one_by_one() if joined else nullcontext():
        model = _with_weights(spec, stored, dtype)
    for name, weight in model.named_parameters():
        weight.requires_grad_(False)
        if not is_finite(weight):
            kind = str(weight.dtype).removeprefix("torch.")
            raise InvalidRequest(f"{name} holds NaN or infinity, or numbers that {kind} cannot hold", field="model")
    model = model.eval().to(device)
    with torch.inference_mode():
        freeze(model, max_context)
    return HfModel(spec, model, dtype, device)


def check_fit(spec: HfSpec, entries: Mapping[str, tuple[int, ...]]) -> None:
    """Raise InvalidRequest where the tensors of a checkpoint, their shapes by name, are not those of the configuration:
    transformers loads them without their numbers, and nothing is allocated for them."""
    stored = {name: torch.empty(shape, device="meta") for name, shape in entries.items()}
    with reading_one_by_one(), _Nowhere():
        _with_weights(spec, stored, torch.float32)


def _with_weights(spec: HfSpec, stored: Mapping[str, StoredTensor], dtype: torch.dtype) -> Any:
    """transformers' model of ``stored``. Raises InvalidRequest where they do not fit."""
    try:
        with quiet():
            model, found = spec.kind.from_pretrained(
                None,
                config=spec.config,
                state_dict=dict(stored),
                dtype=dtype,
                attn_implementation=attention.NAME,
                experts_implementation=_experts(spec, dtype),
                ignore_mismatched_sizes=True,  # they are reported below
                output_loading_info=True,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
            )
    except ExecutorError:
        raise
    except Exception as error:
        message = f"{spec.architecture}: transformers cannot load it: {first_line(error)}"
        if "CONVERSION" in str(error):  # its log says which
            joined = "tensors that are joined, those of experts mostly, are missing or misshapen"
            message = f"the weights do not fit {spec.architecture}: {joined}"
        raise InvalidRequest(message, field="model") from error
    misshapen = [f"{name} {[*shape]}, expected {[*expected]}" for name, shape, expected in found["mismatched_keys"]]
    problems = [
        listed(kind, sorted(names))
        for kind, names in (
            ("missing", found["missing_keys"]),
            ("unexpected", found["unexpected_keys"]),
            ("misshapen", misshapen),
        )
        if names
    ]
    if problems:
        raise InvalidRequest(f"the weights do not fit {spec.architecture}: {'; '.join(problems)}", field="model")
    return model


def _experts(spec: HfSpec, dtype: torch.dtype) -> str | None:
    """How experts are computed. None: by transformers' default, a grouped product, whose rows must begin at multiples
    of 16 bytes."""
    widths = {width for shape in spec.shapes.values() if len(shape) == 3 for width in shape[1:]}
    return None if all(width * dtype.itemsize % ALIGNED == 0 for width in widths) else attention.EAGER


class _Nowhere(TorchFunctionMode):
    """A context in which tensors requested on a device are on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)
