"""Describe what transformers makes of a configuration, without weights: by a dry run on the meta device.

The layers' calls show the number and width of their heads, the scale and the cap of their scores; the rules of their
masks show what a query sees. A family is served if each layer calls attention exactly once, with a mask that is causal
or a window, and if nothing but attention reads other tokens. A layer that keeps a state, makes its own masks or
attention, or looks ahead would give wrong answers silently; it is refused here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from ferrum_rpc.core import AttentionSpec
from ferrum_rpc.errors import ExecutorError, InvalidRequest, NotSupported
from ferrum_rpc.models.fields import LARGEST, Fields
from ferrum_rpc.models.hf import attention
from ferrum_rpc.models.hf.head import Head
from ferrum_rpc.models.hf.library import library, quiet
from ferrum_rpc.models.hf.lora import linear_layers
from ferrum_rpc.models.hf.rope import freeze
from ferrum_rpc.models.spec import MAX_LAYERS

DRY_TOKENS: Final = 3
MAX_COUNT: Final = 1 << 16
"""Maximum number of experts, heads and other counted parts."""

MAX_TABLES: Final = 256 << 20
"""Maximum bytes of tables that no checkpoint holds."""

LIMIT: Final = "_limit"
"""How the names of fields end that may be infinite: ``time_step_limit`` of Mamba's layers, ``swiglu_limit``."""

NOT_READ: Final = frozenset(
    (
        *("auto_map", "transformers_weights", "name_or_path", "_name_or_path", "dtype", "torch_dtype", "device_map"),
        *("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"),
        *("fusion_config", "distributed_config", "base_model_tp_plan", "base_model_pp_plan"),
        *("use_cache", "return_dict", "output_attentions", "output_hidden_states", "output_router_logits"),
        "quantization_config",  # transformers gets numbers
    )
)
"""Fields that change how something is computed but not what, or that name other files."""

OF_LANGUAGE: Final = ("ForCausalLM", "LMHeadModel")
"""Suffixes of the names of classes that compute logits of the next token."""

KINDS: Final = ("full_attention", "sliding_attention")
"""Supported kinds of layers, where a configuration lists them."""

WITHOUT: Final = ("mlp", "moe")
"""Kinds of layers without a cache or state."""


@dataclass(frozen=True, slots=True, eq=False)
class HfSpec:
    """A decoder of transformers without weights. ``kind`` is its class and ``config`` transformers' configuration;
    ``shapes`` are those of its own tensors, by its own names. ``max_context`` is its context, ``longest`` the one that
    it may be scaled to. ``scaling``: kinds of rotary scaling that are fixed by `rope.freeze`. ``sinks``: for each layer
    the name of the weight that has its attention sinks, or an empty one. ``sources``: for each layer the one whose keys
    and values it attends over, itself or an earlier one. ``modules``: the linear layers that adapters can change, with
    their sizes [out, in]."""

    architecture: str
    kind: Any
    config: Any
    layers: tuple[AttentionSpec, ...]
    shapes: Mapping[str, tuple[int, ...]]
    tables_bytes: int
    parameters: int
    vocab_size: int
    hidden_size: int
    inner_size: int
    max_context: int
    longest: int
    scaling: tuple[str, ...]
    sinks: tuple[str, ...]
    sources: tuple[int, ...]
    modules: Mapping[str, tuple[int, int]]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


def describe(data: Mapping[str, Any]) -> HfSpec:
    """The spec of a parsed ``config.json``. Raises NotSupported if it cannot be served this way or transformers is
    missing, InvalidRequest for a broken configuration."""
    version = library().__version__
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    attention.register()
    fields = Fields(data)
    model_type = fields.text("model_type")
    if model_type not in CONFIG_MAPPING:
        ours = "" if "auto_map" not in data else ", and code that a checkpoint brings is never run"
        raise NotSupported(f"model_type: transformers {version} has no {model_type[:80]!r}{ours}", field="model_type")
    _check_counts(data)
    _check_finite(data)
    try:
        with quiet():
            config = _configured(CONFIG_MAPPING[model_type], data)
            if type(config) not in AutoModelForCausalLM._model_mapping:
                message = f"model_type: {model_type!r} is not a decoder of transformers"
                raise NotSupported(message, field="model_type")
            kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
            _check_class(fields, kind.__name__)
            return _described(kind, config, fields)
    except ExecutorError:
        raise
    except Exception as error:  # whatever its checks and its modules raise
        if isinstance(error, KeyError):  # a table has no such entry
            for name, value in data.items():
                if value in error.args:
                    message = f"{name[:80]}: transformers {version} has no {str(value)[:80]!r}"
                    raise InvalidRequest(message, field=name[:80]) from error
        message = f"config.json: transformers refuses it: {first_line(error)}"
        raise InvalidRequest(message, field="config.json") from error


def _check_class(fields: Fields, served: str) -> None:
    """Raise NotSupported for a model that is not a language model, although its layers could run."""
    names = fields.texts("architectures")
    if names and names[0] != served and not names[0].endswith(OF_LANGUAGE):
        raise NotSupported(
            f"architectures: {names[0][:80]!r} is not a language model; of this model_type {served} is served",
            field="architectures",
        )


def _check_counts(data: Mapping[str, Any]) -> None:
    """Check the counts: a module is made for each, and no file may request millions."""
    for name, value in data.items():
        if isinstance(value, dict):
            _check_counts(value)
        elif isinstance(value, int) and (name.startswith("num_") or name.endswith(("layers", "layer"))):
            limit = MAX_LAYERS if "layer" in name else MAX_COUNT
            if value > limit:
                raise InvalidRequest(f"{name[:80]} is {value}, more than {limit}", field=name[:80])


def _check_finite(data: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for a number that is not finite: transformers would compute NaN with it. A limit may be
    infinite, which means no limit."""
    found: list[tuple[str, Any]] = [*data.items()]
    while found:
        name, value = found.pop()
        if isinstance(value, dict):
            found.extend(value.items())
        elif isinstance(value, list):
            found.extend((name, each) for each in value)
        elif isinstance(value, float) and (math.isnan(value) or (math.isinf(value) and not name.endswith(LIMIT))):
            raise InvalidRequest(f"{name[:80]} is {value}; it must be a finite number", field=name[:80])


def _configured(kind: Any, data: Mapping[str, Any]) -> Any:
    config = kind.from_dict({key: value for key, value in data.items() if key not in NOT_READ})
    config._attn_implementation = attention.DRY_NAME
    config._experts_implementation = "batched_mm"  # the one that can be run without weights
    return config


def _described(kind: Any, config: Any, fields: Fields) -> HfSpec:
    text, name = config.get_text_config(decoder=True), kind.__name__
    kinds = getattr(text, "layer_types", None) or ()
    strange = [str(each)[:80] for each in dict.fromkeys(kinds) if each not in KINDS]
    stateful = [repr(each) for each in strange if each not in WITHOUT]
    if kind._is_stateful and (stateful or not kinds):  # the class says it of layers that this model may not have
        which = f" (layer_types: {', '.join(stateful)})" if stateful else ""
        raise _refusal(name, f"it keeps a state in addition to keys and values{which}")
    if not kind._is_stateful and not kind._supports_attention_backend:
        raise _refusal(name, "its attention cannot be replaced (transformers says so)")
    if getattr(config, "is_encoder_decoder", False):
        raise _refusal(name, "it has an encoder")
    if strange:
        raise _refusal(name, f"layer_types: {strange[0]!r} is not full or sliding attention")
    layers = text.num_hidden_layers
    if not isinstance(layers, int) or not 1 <= layers <= MAX_LAYERS:
        raise InvalidRequest(f"num_hidden_layers is {layers}", field="num_hidden_layers")
    with torch.device("meta"):
        model = kind(config).eval()
    scaling = tuple(dict.fromkeys(freeze(model, 1)))
    with _looked_up(model) as looked_up:
        calls, hidden, logits = _dry_run(model, name)
    for table, rows in looked_up.items():
        if rows < logits:  # a token without a row would fail a step, and on a GPU end the device
            message = f"config.json: {name} has {logits} tokens, and looks them up in {table}, which has {rows} rows"
            raise InvalidRequest(message, field="config.json")
    context = getattr(text, "max_position_embeddings", None)
    if not isinstance(context, int) or not 1 <= context <= LARGEST:
        message = f"max_position_embeddings is missing, or not within 1 .. {LARGEST}"
        raise InvalidRequest(message, field="max_position_embeddings")
    parameters = {id(each): each for each in model.parameters()}
    state = model.state_dict(keep_vars=True)
    tables = sum(each.nbytes for key, each in model.named_buffers() if key not in state)
    weights = sum(each.numel() for each in parameters.values())
    if tables > MAX_TABLES + weights:
        raise InvalidRequest(f"config.json: {name} would make tables of {tables} bytes", field="config.json")
    nested = fields.table("text_config") or fields
    eos, bos = (fields.token_ids(key) or nested.token_ids(key) for key in ("eos_token_id", "bos_token_id"))
    return HfSpec(
        architecture=name,
        kind=kind,
        config=config,
        layers=_layers(name, calls, layers, context, getattr(text, "sliding_window", None)),
        shapes={key: tuple(each.shape) for key, each in state.items()},
        tables_bytes=tables,
        parameters=weights,
        vocab_size=logits,
        hidden_size=hidden,
        inner_size=_inner_size(model, hidden, logits),
        max_context=context,
        longest=_longest(text, context, scaling),
        scaling=scaling,
        sinks=_sinks(name, model, calls),
        sources=_sources(calls),
        modules={key: (each.out_features, each.in_features) for key, each in linear_layers(model, model.dtype).items()},
        eos_token_ids=eos,
        bos_token_id=bos[0] if bos else None,
    )


@contextmanager
def _looked_up(model: Any) -> Iterator[dict[str, int]]:
    """A context that records the embeddings in which the model looks up token ids, with their numbers of rows."""
    found: dict[str, int] = {}
    ids: list[Any] = []

    def begins(_: Any, args: Any, given: dict[str, Any]) -> None:
        ids[:] = [given.get("input_ids")]

    def looks(name: str, module: Any, args: Any) -> None:
        if ids and args and args[0] is ids[0]:
            found[name] = module.num_embeddings

    hooks = [model.base_model.register_forward_pre_hook(begins, with_kwargs=True)]
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding):
            hooks.append(module.register_forward_pre_hook(partial(looks, name)))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _dry_run(model: Any, name: str) -> tuple[list[attention.DryRunCall], int, int]:
    """What the layers of a model on the meta device request, and the widths of its hidden rows and its logits. The
    model then runs with transformers' own attention too, with which `serve` compares: sizes that fail there fail
    here."""
    from transformers import DynamicCache

    ids = torch.zeros(1, DRY_TOKENS, dtype=torch.int64, device="meta")
    positions = torch.arange(DRY_TOKENS, device="meta")[None]
    given: dict[str, Any] = {"use_cache": False}
    if model._is_stateful:  # a cache of keys and values alone: a layer that would keep a state in it fails
        given = {"use_cache": True, "past_key_values": DynamicCache(config=model.config)}
    else:  # transformers would look whether the positions are those of several sequences
        given["attention_mask"] = torch.ones_like(ids)
    try:
        with torch.inference_mode(), attention.recording() as calls:
            out = model.base_model(input_ids=ids, position_ids=positions, **given)
            hidden = out.last_hidden_state
            if hidden.dim() != 3 or hidden.shape[:2] != ids.shape:
                raise _refusal(name, f"its hidden rows are {[*hidden.shape]}")
            seen = len(calls)
            logits = Head(model)(hidden[0])
    except ExecutorError:
        raise
    except Exception as error:
        raise _refusal(name, f"a dry run of three tokens failed: {first_line(error)}") from error
    if len(calls) != seen:
        raise _refusal(name, "its output head attends")
    try:
        with torch.inference_mode(), attention.plain(model.config):
            model(input_ids=ids, position_ids=positions, **{**given, "past_key_values": None})
    except Exception as error:
        if "meta" not in str(error):  # else it wants numbers, which are not there yet
            message = f"config.json: {name} cannot be run by transformers: {first_line(error)}"
            raise InvalidRequest(message, field="config.json") from error
    return calls, hidden.shape[-1], logits.shape[-1]


def _layers(
    name: str, calls: list[attention.DryRunCall], layers: int, context: int, window: int | None
) -> tuple[AttentionSpec, ...]:
    seen = [each.layer for each in calls]
    if sorted(seen, key=str) != sorted(range(layers), key=str):
        missing = sorted(set(range(layers)) - {*seen})
        what = (
            f"layers {missing[:8]} do not ask for attention" if missing else f"layers ask more than once: {seen[:16]}"
        )
        raise _refusal(name, f"{what}: recurrent layers, or attention of its own")
    return tuple(_layer(name, each, context, window) for each in sorted(calls, key=lambda each: each.layer or 0))


def _layer(name: str, call: attention.DryRunCall, context: int, window: int | None) -> AttentionSpec:
    if call.rule is None:
        raise _refusal(name, f"layer {call.layer} makes its own mask")
    if not call.causal:
        raise _refusal(name, f"layer {call.layer} is not causal")
    if call.heads % call.kv_heads or call.widths[1] > call.widths[0]:
        shape = f"{call.heads} heads over {call.kv_heads}, keys and values {call.widths} wide"
        raise _refusal(name, f"layer {call.layer} has {shape}")
    for seen in dict.fromkeys((call.window or None, None, window or None)):
        if _is_window(call.rule, seen, context):
            sinks, softcap = call.sinks is not None, call.softcap or None
            return AttentionSpec(call.heads, call.kv_heads, call.widths[0], call.scale, seen, softcap, sinks)
    raise _refusal(name, f"the mask of layer {call.layer} is neither causal nor a window")


def _sinks(name: str, model: Any, calls: list[attention.DryRunCall]) -> tuple[str, ...]:
    names = {id(each): key for key, each in model.named_parameters()}
    wanted = {each.layer: each.sinks for each in calls if each.sinks is not None}
    if any(id(each) not in names for each in wanted.values()):
        raise _refusal(name, "its attention sinks are not weights")
    return tuple(names[id(wanted[layer])] if layer in wanted else "" for layer in range(len(calls)))


def _sources(calls: list[attention.DryRunCall]) -> tuple[int, ...]:
    """For each layer the one whose key and value it has: that of the first such call."""
    found = dict[int, int]()
    for number, call in enumerate(calls):
        same = (each for each in calls[:number] if call.kept[0] is each.kept[0] and call.kept[1] is each.kept[1])
        found[call.layer or 0] = next(same, call).layer or 0
    return tuple(found[layer] for layer in sorted(found))


def _is_window(rule: attention.MaskRule, window: int | None, context: int) -> bool:
    """Whether the rule is that a query sees the last ``window`` positions, itself included, or all. It is evaluated at
    positions where other rules would differ."""
    edges = {1, 2, 16, 17, context // 2, context}
    if window is not None:
        edges |= {window - 1, window, window + 1, 2 * window, 2 * window + 1}
    near = {at + by for at in edges for by in (-2, -1, 0, 1)}
    places = torch.tensor(sorted(at for at in near if 0 <= at < 2 * context))
    query, key = places[:, None], places[None, :]
    expected = key <= query
    if window is not None:
        expected = expected & (key > query - window)
    try:
        return torch.equal(rule(0, 0, query, key).expand_as(expected), expected)
    except Exception:  # one that depends on more than positions
        return False


def _inner_size(model: Any, hidden: int, logits: int) -> int:
    """Approximately the widest row that a matrix of a layer computes."""
    widths = [each.shape[-2] for each in model.parameters() if each.dim() >= 2 and logits not in each.shape]
    return int(max([hidden, *widths]))


def _longest(text: Any, context: int, scaling: tuple[str, ...]) -> int:
    if not any("dynamic" in each for each in scaling):
        return context
    rope = text.rope_parameters
    tables = [each for each in rope.values() if isinstance(each, dict)] or [rope]
    factor = max(float(each.get("factor") or 1.0) for each in tables)
    return max(context, math.floor(context * min(factor, 1024.0)))


def _refusal(name: str, why: str) -> NotSupported:
    return NotSupported(f"{name[:80]} cannot be served through transformers: {why}", field="architectures")


def first_line(error: BaseException) -> str:
    """The error of transformers on one line."""
    if isinstance(error, KeyError) and error.args:
        what = str(error.args[0])
        return what[:200] if " " in what else f"it has no {what[:200]!r}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {(lines[-1] if lines else '')[:200]}"
