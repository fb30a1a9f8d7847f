"""The models that promises are tried with: one whose rows numpy can compute, the demo model, and one whose sequences
have recurrent states."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, wraps
from pathlib import Path
from typing import Any, Final

import numpy as np

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.wire.rows import float_rows, rows_from_proto
from tests.faults.figures import Figures, Promise
from tests.faults.sizes import AGAIN, CI, Size
from tests.support.grammars import MODEL, VOCABULARY
from tests.support.identity_oracle import TOLERANCE, OracleConfig, identity_logits

SHAPE: Final = {"vocab_size": VOCABULARY, "max_position_embeddings": 8192}
"""Of the model with recurrent states, where it is not `RECURRENT_SHAPE`."""

SLOTS: Final = 128
"""More than any promise holds sequences at a time that does not say so."""

WITH_STATES: Final = "_with_recurrent_states"

Oracle = Callable[[Sequence[int]], np.ndarray]


@dataclass(frozen=True)
class Model:
    """``settings`` are fields of `ModelSettings`. ``oracle``: the logits [tokens, vocabulary] of some tokens, which
    those of the executor in float32 are within ``tolerance`` of. ``recurrent``: sequences have states."""

    settings: dict[str, Any]
    oracle: Oracle | None = None
    tolerance: float = 0.0
    recurrent: bool = False

    @property
    def path(self) -> str:
        return str(self.settings["path"])

    def config(self, **more: Any) -> ModelSettings:
        """Of a server in this process."""
        return ModelSettings(device="cpu", **(self.settings | more))

    def flags(self, **more: Any) -> list[str]:
        """Of a server process, but for the `path`."""
        found = list[str]()
        for name, value in (self.settings | more).items():
            if name != "path":
                found += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        return found

    def unlike(self, row_blocks: Any, expected: Sequence[tuple[Sequence[int], int]]) -> bool:
        """Whether the logits of an answer are others than those of each of these tokens, from a position on."""
        assert self.oracle is not None
        found = np.concatenate([float_rows(block["logits"]) for block in rows_from_proto(row_blocks)])
        wanted = np.concatenate([self.oracle(tokens)[start:] for tokens, start in expected])
        return found.shape != wanted.shape or bool(np.abs(found - wanted).max() > self.tolerance)


IDENTITY: Final = Model(
    {"path": "identity", "identity_positional": True},
    lambda tokens: identity_logits(tokens, config=OracleConfig(positional=True)),
    TOLERANCE,
)
DEMO: Final = Model({"path": str(MODEL), "dtype": "float32"})


@cache
def recurrent() -> Model:
    """A tiny Qwen3.5 with the tokenizer of the demo model, in the dtype in which rows of short spans have the bits of
    single decodes, where there is one. Its folder is gone at the end of this process."""
    from ferrum_rpc.native import cpu  # which imports torch: the programs of this folder need none
    from tests.support.checkpoints import RECURRENT_SHAPE, make_checkpoint

    folder = Path(tempfile.mkdtemp(prefix="ferrum-rpc-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    make_checkpoint(folder, "qwen3_5", **RECURRENT_SHAPE | SHAPE)
    for each in MODEL.glob("tokenizer*"):
        shutil.copy(each, folder)
    exact = "bfloat16" if cpu.flags() & {"avx2"} else "float32"
    settings = {"path": str(folder), "dtype": exact, "state_slots": SLOTS}
    return Model(settings, lambda tokens: _reference_logits(tuple(tokens)), 1e-3, recurrent=True)


@cache
def _reference() -> Any:
    from tests.support.checkpoints import RECURRENT_SHAPE, make_model

    return make_model("qwen3_5", **RECURRENT_SHAPE | SHAPE)


@lru_cache(1024)
def _reference_logits(tokens: tuple[int, ...]) -> np.ndarray:
    """By transformers."""
    import torch

    with torch.inference_mode():
        logits: np.ndarray = _reference()(torch.tensor([tokens])).logits[0].numpy()
        return logits


def with_recurrent_states(promise: Callable[..., Awaitable[Figures]]) -> Promise:
    """The promise once more, tried with a model whose sequences have recurrent states."""

    @wraps(promise)
    async def again(size: Size) -> Figures:
        figures = await promise(AGAIN if size is CI else size, model=recurrent())
        figures.title += ", with recurrent states"
        return figures

    again.__name__ += WITH_STATES
    return again
