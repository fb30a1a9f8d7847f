"""Compare a model as it would be served with transformers: the logits of the same random tokens.

The reference computes in float32. If the served model has fewer bits, transformers computes in that dtype too, and its
error is the yardstick. Without transformers there is no comparison.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import FullLogits, OutputSpec, Positions, Span, SpanResult, Step, TokenArray
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.assembly.hf_source import stored_tensors
from ferrum_rpc.engine.operations import TorchRunner
from ferrum_rpc.errors import StepFailed
from ferrum_rpc.models.hf.rope import freeze
from ferrum_rpc.weights.checkpoint import INDEX, SINGLE, Checkpoint, read_json

TOKENS: Final = 64
DECODED: Final = 8
"""Of the tokens, one at a time."""

EXACT: Final = 1e-3
"""Maximum error in float32, in standard deviations of the logits. A wrong computation exceeds it."""

TIMES: Final = 2.0
"""With fewer bits: times the error of transformers. Measured: 0.76 to 0.96."""

TIMES_LARGEST: Final = 5.0
"""The same for the largest of some thousand errors. By rounding alone it is between 0.56 and 1.93 times theirs. It
detects a few wrong logits among many."""


class Error(NamedTuple):
    """Differences from the reference's logits, in standard deviations of those: root mean square, and the largest."""

    typical: float
    largest: float


@dataclass(frozen=True, slots=True)
class Parity:
    """``theirs``: the error of transformers in ``dtype``, None for float32. ``same_tokens``: the fraction of rows with
    the same argmax."""

    rows: int
    dtype: str
    error: Error
    theirs: Error | None
    same_tokens: float

    @property
    def holds(self) -> bool:
        """Whether the model is computed right."""
        theirs = self.theirs or Error(0.0, 0.0)
        bounds = Error(max(EXACT, TIMES * theirs.typical), max(EXACT, TIMES_LARGEST * theirs.largest))
        return all(isfinite(each) and each <= bound for each, bound in zip(self.error, bounds, strict=True))


def compare(config: ModelSettings) -> Parity:
    """Raises ModuleNotFoundError without transformers, and what transformers raises if it cannot load the model."""
    blocks = 2 * (TOKENS // config.block_size + 2)
    runner = build_runner(replace(config, kv_blocks=blocks, kv_memory=None, kv_tier_dir=None))
    vocab, dtype = runner.info.vocab_size, runner.compute.model.dtype
    count = min(TOKENS, runner.info.max_context)
    tokens = np.random.default_rng(0).integers(0, vocab, count).astype(np.int32)
    ours, context = _served(runner, tokens), runner.info.max_context
    runner.close()
    del runner
    gc.collect()
    exact = reference(config.path, tokens, torch.float32, context)
    theirs = None if dtype == torch.float32 else _error(reference(config.path, tokens, dtype, context), exact)
    same = float((ours.argmax(-1) == exact.argmax(-1)).float().mean())
    return Parity(count, str(dtype).removeprefix("torch."), _error(ours, exact), theirs, same)


def _served(runner: TorchRunner, tokens: TokenArray) -> torch.Tensor:
    """float32 [T, vocab], as a prompt and as decode steps."""
    output, rows, at = OutputSpec(Positions.ALL, FullLogits()), [], 0
    prompt = max(1, len(tokens) - DECODED)
    with runner.context():
        for end in range(prompt, len(tokens) + 1):
            step = Step((Span(1, tokens[at:end], at, output, create=at == 0),))
            [outcome] = runner.forward(step).outcomes
            if not isinstance(outcome, SpanResult) or outcome.rows is None:
                raise StepFailed(f"the step of tokens {at} to {end} failed: {outcome}")
            first = outcome.rows.first
            rows.append(torch.from_numpy(outcome.rows.block["logits"][first : first + end - at].copy()))
            at = end
    return torch.cat(rows)


def reference(path: str, tokens: TokenArray, dtype: torch.dtype, context: int) -> torch.Tensor:
    """float32 [T, vocab] of transformers, with the rotation for sequences of ``context``, as ours."""
    import transformers

    library: Any = transformers
    library.utils.logging.disable_progress_bar()
    library.utils.logging.set_verbosity(library.utils.logging.CRITICAL)
    checkpoint = Checkpoint.open(path)
    if checkpoint.encodings or not _can_read(Path(path)):
        model = _of_tensors(library, checkpoint, dtype)
    else:
        config = library.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        model = _class(library, config).from_pretrained(
            path, dtype=dtype, use_safetensors=True, local_files_only=True, trust_remote_code=False
        )
    freeze(model.eval(), context)
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0].float()
    return logits


def _can_read(folder: Path) -> bool:
    """Whether transformers reads such files itself: not GGUF files, and no index without metadata."""
    index = read_json(folder, INDEX) or {}
    return (folder / SINGLE).exists() or isinstance(index.get("metadata"), dict)


def _of_tensors(library: Any, checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """The model of transformers with the weights that we read or dequantize."""
    facts = {name: value for name, value in checkpoint.config.items() if name != "quantization_config"}
    config = library.AutoConfig.for_model(**facts)
    stored = stored_tensors(checkpoint, dtype)
    return _class(library, config).from_pretrained(
        None, config=config, state_dict=stored, dtype=dtype, local_files_only=True, trust_remote_code=False
    )


def _class(library: Any, config: Any) -> Any:
    """In transformers only a part of a model of text and images is a decoder."""
    plain, kind = library.AutoModelForCausalLM, type(config)
    return (plain if kind in plain._model_mapping else library.AutoModelForImageTextToText)._model_mapping[kind]


def _error(actual: torch.Tensor, expected: torch.Tensor) -> Error:
    apart = (actual - expected) / expected.std()
    return Error(float(apart.square().mean().sqrt()), float(apart.abs().max()))
