"""In what the layers of one model differ: their windows, their KV heads, whether their heads are rotated, and which are
recurrent."""

from __future__ import annotations

from ferrum_rpc.errors import InvalidRequest, NotSupported
from ferrum_rpc.models.families import Family
from ferrum_rpc.models.fields import Fields


def read_kinds(config: Fields, family: Family, layers: int) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Of each layer the window, and whether its heads are not rotated."""
    no_rope = _no_rope(config, family, layers)
    windows = _windows(config, family, layers, no_rope)
    if family.no_rope == "windowless":
        no_rope = tuple(window is None for window in windows)
    return windows, no_rope


def read_recurrent(config: Fields, layers: int) -> tuple[bool, ...]:
    """Which layers of a family with recurrent ones are recurrent: those that ``layer_types`` calls linear attention, or
    where that is absent all but every n-th, n being ``full_attention_interval``."""
    if config.value("layer_types") is None:
        interval = config.integer("full_attention_interval", 4)
        found = tuple(bool((layer + 1) % interval) for layer in range(layers))
    else:
        types = _types(config, layers, ("full_attention", "linear_attention"))
        found = tuple(kind == "linear_attention" for kind in types)
    if all(found) or not any(found):
        other = "full" if all(found) else "linear"
        raise NotSupported(f"layer_types: a model without {other} attention is not supported", field="layer_types")
    return found


def read_kv_heads(config: Fields, family: Family, layers: int, heads: int) -> tuple[int, ...] | None:
    """Of each layer, if the family lists them; its ``heads`` of queries must be a multiple of them."""
    if (field := family.kv_heads_listed) is None:
        return None
    listed = config.integers(field)
    if listed is None or len(listed) != layers:
        found = "is missing" if listed is None else f"has {len(listed)} entries"
        raise InvalidRequest(f"{field} {found}; it must have one for each of {layers} layers", field=field)
    for layer, each in enumerate(listed):
        if each < 1 or heads % each:
            message = f"{field}: num_attention_heads {heads} must be a multiple of {each}, which layer {layer} has"
            raise InvalidRequest(message, field=field)
    return listed


def _no_rope(config: Fields, family: Family, layers: int) -> tuple[bool, ...]:
    """Layers without a rotation, where a list says it: those with a 0 in ``no_rope_layers``, or where that is absent
    every n-th, n being ``no_rope_layer_interval``."""
    if family.no_rope != "listed":
        return (False,) * layers
    interval = config.integer("no_rope_layer_interval", 4)
    rotated = config.integers("no_rope_layers")
    if rotated is None:
        return tuple((layer + 1) % interval == 0 for layer in range(layers))
    if len(rotated) < layers:
        raise InvalidRequest(f"no_rope_layers has {len(rotated)} entries for {layers} layers", field="no_rope_layers")
    return tuple(not each for each in rotated[:layers])


def _windows(config: Fields, family: Family, layers: int, no_rope: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Null means none, as in transformers. A switch or a list that contradicts the family is refused."""
    window = family.window if "sliding_window" not in config else None
    if config.value("sliding_window") is not None:
        window = config.integer("sliding_window")
    switched = family.windows in {"switched", "some", "no_rope"}
    used = config.flag("use_sliding_window", window is not None and not switched)
    if family.windows == "none" and used:
        raise NotSupported(f"sliding_window: {window} is not supported for this architecture", field="sliding_window")
    if not switched and family.windows != "none" and used != (window is not None):
        raise InvalidRequest(f"use_sliding_window {used} contradicts sliding_window", field="use_sliding_window")
    window = window if used else None
    sliding = _usual(config, family, layers, window is not None, no_rope)
    if not family.recurrent and config.value("layer_types") is not None:
        listed = _listed(config, layers)
        if not family.listed and listed != sliding:
            raise NotSupported("layer_types: this architecture has layers of one kind", field="layer_types")
        sliding = listed
    if window is None and any(sliding):
        raise InvalidRequest("layer_types has sliding layers, but there is no sliding_window", field="layer_types")
    return tuple(window if each else None for each in sliding)


def _usual(config: Fields, family: Family, layers: int, windows: bool, no_rope: tuple[bool, ...]) -> tuple[bool, ...]:
    """Which layers have a window where no list says it."""
    first = 0
    if family.windows == "some" or not windows:
        first = config.integer("max_window_layers", 28, low=0)
    period = config.integer(family.pattern_field, family.pattern) if family.pattern_field else family.pattern
    if family.windows == "pattern":
        return tuple(windows and bool((layer + 1) % period) for layer in range(layers))
    if family.windows == "no_rope":
        return tuple(windows and each for each in no_rope)
    return tuple(windows and layer >= first for layer in range(layers))


def _listed(config: Fields, layers: int) -> tuple[bool, ...]:
    types = _types(config, layers, ("full_attention", "sliding_attention"))
    return tuple(kind == "sliding_attention" for kind in types)


def _types(config: Fields, layers: int, known: tuple[str, str]) -> tuple[str, ...]:
    types = config.texts("layer_types")
    if len(types) != layers:
        raise InvalidRequest(f"layer_types has {len(types)} entries for {layers} layers", field="layer_types")
    for kind in types:
        if kind not in known:
            raise NotSupported(f"layer_types: {kind[:80]!r} is not supported", field="layer_types")
    return types
