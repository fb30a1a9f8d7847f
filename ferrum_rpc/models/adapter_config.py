"""What an adapter of the PEFT library changes: its configuration and the names of its tensors, checked against a model.

As with models, a key that is not read must be known not to matter, or to turn a feature off; otherwise it is refused by
name. The tensors determine which matrices are adapted, and the configuration must agree. The keys are those of peft
0.21. Patterns of modules are compared as plain names: a regular expression from a file is never run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from ferrum_rpc.errors import InvalidRequest, NotSupported
from ferrum_rpc.models.config_keys import refuse_unread
from ferrum_rpc.models.fields import Fields

FILE: Final = "adapter_config.json"
PREFIX: Final = "base_model.model."
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
NAMED: Final = 8
LONGEST_PATTERN: Final = 4096

IRRELEVANT: Final = frozenset(
    (
        # where the file comes from, and what it was made for
        *("base_model_name_or_path", "revision", "auto_mapping", "peft_version", "inference_mode", "task_type"),
        # training, and what tensors began with
        *("lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config"),
        *("qalora_group_size", "velora_config"),
    )
)
"""Keys whose value changes nothing that is computed with the tensors of the file."""

NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "fan_in_fan_out": (False,),
    "bias": ("none",),
    "lora_bias": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "modules_to_save": ([],),
    "megatron_config": ({},),
    "megatron_core": ("megatron.core",),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
    "layer_replication": ([],),
    "alora_invocation_tokens": ([],),
    "ensure_weight_tying": (False,),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),  # others change the model's own weights too
    "arrow_config": ({},),
    "use_bdlora": (False,),
    "kasa_config": ({},),
    "monteclora_config": ({},),
}
"""Keys that are accepted with the values that turn a feature off."""

REMEDY: Final = (
    "remove what the adapter does without from its configuration, or merge the adapter into the model with PEFT "
    "(merge_and_unload) and serve that"
)

MERGED: Final = "train it without them, or merge the adapter into the model with PEFT (merge_and_unload) and serve that"

CHANGING: Final = ("pissa", "olora", "loftq", "corda")
"""Initializations of adapters that are valid only with changed weights of the model."""

_PLAIN: Final = re.compile(r"\^?[\w.]+", re.ASCII)
_EXPERTS: Final = re.compile(r"\.(experts|block_sparse_moe\.(input|output)_linear)\.")
_LAYER: Final = re.compile(r".*?\.(?P<list>[^.]*)\.(?P<index>\d+)\.")


@dataclass(frozen=True, slots=True)
class LowRank:
    """The change of the products of the matrix ``module``: ``scale`` times the tensor ``b`` [out, rank] times ``a``
    [rank, in], both by name."""

    module: str
    rank: int
    scale: float
    a: str
    b: str


def read_adapter(
    config: Mapping[str, object],
    shapes: Mapping[str, tuple[int, ...]],
    modules: Mapping[str, tuple[int, int]],
    max_rank: int,
) -> list[LowRank]:
    """The matrices that an adapter changes, in the order of ``modules``: those of the model that can be, by name, with
    their sizes [out, in]. ``shapes``: of the file's tensors, by name. Raises InvalidRequest and NotSupported."""
    fields = Fields(config, FILE)
    kind = fields.text("peft_type")
    if kind != "LORA":
        raise NotSupported(f"{FILE}.peft_type is {kind[:80]!r}; LORA adapters are supported", field=f"{FILE}.peft_type")
    _refuse_experts(config, shapes, modules)
    rank = fields.integer("r")
    alpha = fields.number("lora_alpha", 8.0, positive=False)
    rooted = fields.flag("use_rslora", default=False)
    ranks, alphas = _pattern(fields, "rank_pattern"), _pattern(fields, "alpha_pattern")
    expected = _targets(fields, modules)
    begun = config.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(CHANGING):
        raise NotSupported(
            f"{FILE}.init_lora_weights is {begun[:80]!r}: such an adapter changes the model's own weights too; "
            "convert it with PEFT to one that does not (save_pretrained with path_initial_model_for_weight_conversion)",
            field=f"{FILE}.init_lora_weights",
        )
    refuse_unread(fields, IRRELEVANT, NEUTRAL, REMEDY)
    found = _modules(shapes, modules)
    if expected is not None:
        if strange := [each for each in found if each not in expected]:
            raise _wrong("adapts what its target_modules do not name", strange)
        if missing := [each for each in expected if each not in found]:
            raise _wrong("has no tensors of what its target_modules name", missing)
    made = []
    for module in (each for each in modules if each in found):
        a, b = f"{PREFIX}{module}{LORA_A}", f"{PREFIX}{module}{LORA_B}"
        own = int(_matched(ranks, module, rank))
        if own > max_rank:
            raise InvalidRequest(
                f"{FILE}: rank {own} of {module} is above {max_rank}; raise --max-adapter-rank",
                field=f"{FILE}.r",
                metadata={"max_adapter_rank": max_rank},
            )
        rows, width = modules[module]
        if shapes[a] != (own, width) or shapes[b] != (rows, own):
            raise InvalidRequest(
                f"{module}: the adapter's tensors have the shapes {[*shapes[a]]} and {[*shapes[b]]}; the model and "
                f"{FILE} say {[own, width]} and {[rows, own]}",
                field="adapter",
            )
        scale = _matched(alphas, module, alpha) / (math.sqrt(own) if rooted else own)
        made.append(LowRank(module, own, scale, a, b))
    return made


def _refuse_experts(
    config: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]], modules: Mapping[str, tuple[int, int]]
) -> None:
    """Raise NotSupported if the adapter changes experts: by its tensors, or by its ``target_parameters``, into which
    PEFT rewrites modules that transformers 5 has joined. A name there that ends with ``weight`` is that of a module, a
    router."""
    name = f"{FILE}.target_parameters"
    wanted = config.get("target_parameters")
    named = [each for each in wanted if isinstance(each, str)] if isinstance(wanted, list) else []
    if parameters := [each for each in named if not each.endswith("weight")]:
        raise NotSupported(f"{name}: experts are not adapted: {_listed(parameters)}; {MERGED}", field=name)
    found = [each for each in shapes if each.removeprefix(PREFIX).rpartition(".lora_")[0] not in modules]
    if found := [each for each in found if _EXPERTS.search(each)]:
        message = f"experts are not adapted, and the adapter has tensors of them: {_listed(found)}; {MERGED}"
        raise NotSupported(message, field="adapter")


def _modules(shapes: Mapping[str, tuple[int, ...]], modules: Mapping[str, tuple[int, int]]) -> set[str]:
    """The adapted matrices, by the names of the file's tensors."""
    names: dict[str, set[str]] = {}
    strange = []
    for name in shapes:
        ending = next((each for each in (LORA_A, LORA_B) if name.endswith(each)), None)
        module = name.removeprefix(PREFIX).removesuffix(ending or "")
        if ending is None or not name.startswith(PREFIX) or module not in modules:
            strange.append(name)
        else:
            names.setdefault(module, set()).add(ending)
    if strange:
        raise NotSupported(
            f"the adapter has tensors that this model takes no part of: {_listed(strange)}", field="adapter"
        )
    if half := [module for module, endings in names.items() if len(endings) != 2]:
        raise _wrong("has one of the two tensors of", half)
    if not names:
        raise InvalidRequest("the adapter has no tensors", field="adapter")
    return set(names)


def _targets(fields: Fields, modules: Mapping[str, tuple[int, int]]) -> list[str] | None:
    """The modules that the configuration names; None if it has a pattern: the tensors decide then."""
    wanted, left_out = _names(fields, "target_modules"), _names(fields, "exclude_modules")
    chosen = fields.value("layers_to_transform")
    layers = _names(fields, "layers_pattern")
    if chosen is not None and chosen != []:
        chosen = chosen if isinstance(chosen, list) else [chosen]
        if not all(isinstance(each, int) and not isinstance(each, bool) for each in chosen):
            name = f"{FILE}.layers_to_transform"
            raise InvalidRequest(f"{name} must be integers", field=name)
    else:
        chosen = None
    if wanted is None or not wanted or left_out is None or layers is None:
        return None

    def is_meant(module: str) -> bool:
        if not _ends_with(module, wanted) or _ends_with(module, left_out):
            return False
        if chosen is None:
            return True
        where = _LAYER.match(module)
        return where is not None and (not layers or where["list"] in layers) and int(where["index"]) in chosen

    return [module for module in modules if is_meant(module)]


def _names(fields: Fields, field: str) -> tuple[str, ...] | None:
    """A list of plain names; None for a pattern, which is not run."""
    value = fields.value(field)
    if isinstance(value, str):
        _check_pattern(value, f"{FILE}.{field}")
        return (value,) if field == "layers_pattern" and _PLAIN.fullmatch(value) else None
    names = fields.texts(field)
    return names if field != "layers_pattern" or all(map(_PLAIN.fullmatch, names)) else None


def _check_pattern(pattern: str, name: str) -> None:
    try:
        if len(pattern) > LONGEST_PATTERN:
            raise ValueError(f"longer than {LONGEST_PATTERN} characters")
        re.compile(pattern)
    except (re.error, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest(
            f"{name}: {pattern[:80]!r} is not a valid regular expression: {error}", field=name
        ) from None


def _ends_with(module: str, names: Iterable[str]) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


def _pattern(fields: Fields, field: str) -> dict[str, float]:
    """Numbers by the ends of modules' names, in their order."""
    table = fields.table(field)
    if table is None:
        return {}
    found = {}
    for name in table.unread():
        if not _PLAIN.fullmatch(name):
            shown = f"{FILE}.{field}"
            raise NotSupported(f"{shown}: {name[:80]!r} is a regular expression; write plain names", field=shown)
        found[name] = float(table.integer(name)) if field == "rank_pattern" else table.number(name, positive=False)
    return found


def _matched(patterns: Mapping[str, float], module: str, default: float) -> float:
    """The first match, in peft's order."""
    for name, value in patterns.items():
        whole = name.startswith("^")
        if module == name.removeprefix("^") or (not whole and module.endswith(f".{name}")):
            return value
    return default


def _wrong(what: str, modules: list[str]) -> InvalidRequest:
    return InvalidRequest(f"the adapter {what}: {_listed(modules)}", field="adapter")


def _listed(names: list[str]) -> str:
    return ", ".join(name[:120] for name in names[:NAMED]) + (", ..." if len(names) > NAMED else "")
