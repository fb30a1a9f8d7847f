"""Measures every family that transformers runs for us, and writes the table of docs/models.md.

``python -m tests.numerics.hf_table`` takes some minutes; with names of families it measures those and keeps the other
rows. Errors are root mean squares over the standard deviation of
the logits, of three sequences that are fed whole, in pieces and by single tokens. In float32 they are of all rows,
against transformers in float32; in bfloat16 of the median row, against transformers in float32 with the same, rounded,
weights, with the error of transformers in bfloat16.

Speed is of a decode step in bfloat16, with one thread, of a wider model: `WIDE` where a family takes such sizes. The
sides take turns, step by step, and the ratio is that of their medians. transformers has a cache of its own and eager
attention.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from ferrum_rpc.core import Greedy, OutputSpec, Positions, Span, Step
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.operations import TorchRunner
from ferrum_rpc.errors import ExecutorError, NotSupported
from ferrum_rpc.models.hf.describe import describe
from ferrum_rpc.models.spec import ModelSpec
from tests.numerics.test_hf_families import feed, plain_logits, settings
from tests.support.harness import error
from tests.support.hf_families import FAMILIES, HEADS, NATIVE, STATES, TINY, UNSAFE, make_family, model_type

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
TINY_HEAD = HEADS["head_dim"]
BEGIN, END = "<!-- families: `python -m tests.numerics.hf_table` -->", "<!-- end of families -->"


WIDE = {
    "vocab_size": 1024,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
PROMPT, DECODED, BATCH = 64, 24, 4
"""Tokens of each sequence, steps, sequences."""


class Measured(NamedTuple):
    """Errors of a family, and who serves it."""

    architecture: str
    backend: str
    exact: float
    rounded: float
    theirs: float
    features: str


class Speed(NamedTuple):
    """Medians of a decode step, in seconds; None: it is not run so."""

    native: float | None
    hf: float | None
    theirs: float

    def __str__(self) -> str:
        def ratio(slower: float | None, faster: float | None) -> str:
            return "" if slower is None or faster is None else f"{slower / faster:.1f} ×"

        ours = self.hf if self.native is None else self.native
        return f"{ratio(self.hf, self.native)} | {ratio(self.theirs, ours)}"


def measure(family: str) -> Measured:
    """Through our runner, and by transformers."""
    model = make_family(family, **STATES.get(family, {}))
    alone = family in NATIVE or family in STATES
    backend = "native" if alone else "hf"
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        exact = error(feed(build_runner(settings(folder, model_backend=backend))), plain_logits(model).double())
    with tempfile.TemporaryDirectory() as folder:
        model.to(torch.bfloat16).save_pretrained(folder)
        truth, theirs = (
            plain_logits(type(model).from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval())
            for dtype in (torch.float32, torch.bfloat16)
        )
        rounded = feed(build_runner(settings(folder, dtype="bfloat16", model_backend=backend)))
    with suppress(ExecutorError):
        ModelSpec.from_config(model.config.to_dict() | {"architectures": [type(model).__name__]})
        backend = backend if alone else "native, hf"
    errors = exact, usual_error(rounded, truth), usual_error(theirs, truth)
    return Measured(type(model).__name__, backend, *errors, features(model))


def features(model: Any) -> str:
    """What its tiny model has of what families differ in, by its configuration and the names of its weights."""
    config = model.config.get_text_config()
    names, kinds = list(dict(model.named_parameters())), set(getattr(config, "layer_types", None) or ())
    rope = getattr(config, "rope_parameters", None) or {}
    rotations = list(rope.values()) if rope and all(isinstance(each, dict) for each in rope.values()) else [rope]
    window = getattr(config, "sliding_window", None) or getattr(config, "local_attention", None)
    found = {
        "recurrent layers": "linear_attention" in kinds,
        "windows": bool(window) and "sliding_attention" in (kinds or {"sliding_attention"}),
        "full layers among them": {"sliding_attention", "full_attention"} <= kinds,
        "sinks": any("sinks" in name for name in names),
        "latent KV": any("kv_a_proj" in name for name in names),
        "shared K and V": bool(getattr(config, "num_kv_shared_layers", 0)),
        "experts": any("expert" in name or ".gate.weight" in name for name in names),
        "q and k norms": any(name.endswith(("q_norm.weight", "k_norm.weight", "q_layernorm.weight")) for name in names),
        "biases": any(name.endswith(("proj.bias", "attn.bias", "Wqkv.bias", "query_key_value.bias")) for name in names),
        "soft caps": bool(getattr(config, "attn_logit_softcapping", None)),
        "part of a head rotated": any((each or {}).get("partial_rotary_factor", 1.0) < 1.0 for each in rotations),
        "no rotation": not any(rotations),
        "tied head": bool(getattr(config, "tie_word_embeddings", False)),
    }
    return ", ".join(name for name, there in found.items() if there)


def measure_speed(family: str) -> Speed:
    """Of all sides in turn. Of models of text and images the text part is a family of its own in the table."""
    told = (FAMILIES | STATES).get(family, {})
    wide = {name: value for name, value in WIDE.items() if name not in told}
    if "kv_lora_rank" in told:
        wide = {name: value for name, value in wide.items() if "heads" not in name}
    elif told.get("head_dim") == TINY_HEAD:
        wide["head_dim"] = 64
    if "vocab_size_per_layer_input" in told:
        del wide["vocab_size"]
    model = make_family(family, **STATES.get(family, {}) | wide).to(torch.bfloat16)
    prompt = torch.arange(BATCH * PROMPT).view(BATCH, PROMPT) % model.config.vocab_size
    sides: dict[str, Callable[[int], object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for backend in ("native", "hf"):
            with suppress(NotSupported):
                runner = build_runner(settings(folder, dtype="bfloat16", model_backend=backend, kv_blocks=256))
                sides[backend] = partial(_step, runner, prompt.numpy())
        sides["theirs"] = partial(_their_step, model, prompt, {})
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(DECODED):
            for name, step in sides.items():
                began = time.perf_counter()
                step(number)
                taken[name].append(time.perf_counter() - began)
    medians = {name: median(each[2:]) for name, each in taken.items()}  # the first is the prompt's
    return Speed(medians.get("native"), medians.get("hf"), medians["theirs"])


def _step(runner: TorchRunner, prompt: Any, number: int) -> None:
    tokens = prompt if number == 0 else prompt[:, :1]
    start = 0 if number == 0 else PROMPT + number - 1
    last = OutputSpec(Positions.LAST, Greedy())
    spans = [Span(at, row.astype(np.int32), start, last, create=number == 0) for at, row in enumerate(tokens)]
    with runner.context():
        runner.forward(Step(tuple(spans)))


def _their_step(model: Any, prompt: torch.Tensor, kept: dict[str, Any], number: int) -> None:
    with torch.inference_mode():
        tokens = prompt if number == 0 else prompt[:, :1]
        answer = model(input_ids=tokens, use_cache=True, logits_to_keep=1, **kept)
        kept["past_key_values"] = answer.past_key_values
        answer.logits.argmax(-1)


def usual_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the median row: where rounding sends a token to another expert, a row is far off, in ours or in theirs."""
    return float((actual - expected).square().mean(-1).sqrt().median() / expected.std())


def table(before: str, wanted: list[str]) -> str:
    """All families, as Markdown: the ``wanted`` ones are measured (none: all), the others as they were ``before``."""
    kept = {line.split("|")[1].strip(): line for line in before.splitlines() if line.startswith("|")} if wanted else {}
    lines = [
        "| `model_type` | class | backend | error in float32 | in bfloat16 | of transformers in bfloat16 "
        "| native against hf | ours against transformers | what its model has |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for family in (*FAMILIES, *STATES, *NATIVE):
        if family in kept and family not in wanted:
            lines.append(kept[family])
            continue
        found = measure(family)
        print(family, *found, f"{found.rounded / found.theirs:.2f}", flush=True)
        figures = f"{found.exact:.0e} | {found.rounded:.1e} | {found.theirs:.1e}"
        speed: object = " | "
        if family in STATES or (family in FAMILIES and "text_config" not in FAMILIES[family]):
            print(speed := measure_speed(family), flush=True)
        lines.append(f"| {family} | {found.architecture} | {found.backend} | {figures} | {speed} | {found.features} |")
    for family, (overrides, _) in UNSAFE.items():
        if family in STATES:
            continue
        try:
            describe({**TINY, **overrides, "model_type": model_type(family)})
        except NotSupported as refusal:
            name, _, why = refusal.message.partition(" cannot be served through transformers: ")
            lines.append(f"| {family} | {name} | refused | {why} | | | | | |")
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    rows, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(rows, sys.argv[1:])}\n{END}{after}")
