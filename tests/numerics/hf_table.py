"""Measures every family that transformers runs for us, and writes the table of docs/models.md.

``python -m tests.numerics.hf_table`` takes half a minute. Errors are root mean squares over the standard deviation of
the logits, of three sequences that are fed whole, in pieces and by single tokens. In float32 they are of all rows,
against transformers in float32; in bfloat16 of the median row, against transformers in float32 with the same, rounded,
weights, beside the error of transformers in bfloat16.
"""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from ferrum_rpc.engine.build import build_runner
from ferrum_rpc.errors import ExecutorError, NotSupported
from ferrum_rpc.models.hf.describe import describe
from ferrum_rpc.models.spec import ModelSpec
from tests.numerics.harness import error
from tests.numerics.hf_families import FAMILIES, NATIVE, TINY, UNSAFE, make_family
from tests.numerics.test_hf_families import feed, plain_logits, settings

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- families: `python -m tests.numerics.hf_table` -->", "<!-- end of families -->"


class Measured(NamedTuple):
    """Errors of a family, and who serves it."""

    architecture: str
    backend: str
    exact: float
    rounded: float
    theirs: float


def measure(family: str) -> Measured:
    """Through our runner, and by transformers."""
    model = make_family(family)
    backend = "native" if family in NATIVE else "hf"
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
        backend = backend if family in NATIVE else "native, hf"
    return Measured(type(model).__name__, backend, exact, usual_error(rounded, truth), usual_error(theirs, truth))


def usual_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the median row: where rounding sends a token to another expert, a row is far off, in ours or in theirs."""
    return float((actual - expected).square().mean(-1).sqrt().median() / expected.std())


def table() -> str:
    """All families, as Markdown."""
    lines = [
        "| `model_type` | class | backend | error in float32 | in bfloat16 | of transformers in bfloat16 |",
        "|---|---|---|---|---|---|",
    ]
    for family in (*FAMILIES, *NATIVE):
        found = measure(family)
        print(family, *found, f"{found.rounded / found.theirs:.2f}", flush=True)
        figures = f"{found.exact:.0e} | {found.rounded:.1e} | {found.theirs:.1e}"
        lines.append(f"| {family} | {found.architecture} | {found.backend} | {figures} |")
    for family, (overrides, _) in UNSAFE.items():
        try:
            describe({**TINY, **overrides, "model_type": family})
        except NotSupported as refusal:
            name, _, why = refusal.message.partition(" cannot be served through transformers: ")
            lines.append(f"| {family} | {name} | refused | {why} | | |")
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    page = PAGE.read_text()
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")
