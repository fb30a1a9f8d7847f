"""The models that promises are tried with: one whose rows numpy can compute, the demo model, one whose sequences have
recurrent states, and one with weights in 4 bits."""

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
"""Of the models that are made here, where they are not as they are made elsewhere."""

SLOTS: Final = 128
"""More than any promise holds sequences at a time that does not say so."""

STATES: Final = "recurrent states"
BITS: Final = "weights in 4 bits"

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

    def cached(self, **more: Any) -> dict[str, Any]:
        """These settings, and a cache in float32 where the weights allow it."""
        return more if "quantize" in self.settings else {"dtype": "float32"} | more

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
    from tests.support.checkpoints import RECURRENT_SHAPE

    folder = _folder("qwen3_5", RECURRENT_SHAPE)
    exact = "bfloat16" if cpu.flags() & {"avx2"} else "float32"
    settings = {"path": str(folder), "dtype": exact, "state_slots": SLOTS}
    return Model(settings, lambda tokens: _reference_logits(tuple(tokens)), 1e-3, recurrent=True)


def _folder(family: str, shape: dict[str, Any]) -> Path:
    """A checkpoint with the tokenizer of the demo model."""
    from tests.support.checkpoints import make_checkpoint

    folder = Path(tempfile.mkdtemp(prefix="ferrum-rpc-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    make_checkpoint(folder, family, **shape | SHAPE)
    for each in MODEL.glob("tokenizer*"):
        shutil.copy(each, folder)
    return folder


@cache
def in_4_bits() -> Model:
    """A tiny Qwen3. Its oracle are our own products in this process, of all tokens at once: a server, whose steps are
    shorter, is off by what bfloat16 rounds, 0.03; another last token but one moves logits by 3."""
    folder = _folder("qwen3", {"hidden_size": 128, "intermediate_size": 128})
    settings = {"path": str(folder), "dtype": "bfloat16", "quantize": "int4"}
    return Model(settings, lambda tokens: _in_4_bits_logits(tuple(tokens)), 0.1)


@cache
def _in_4_bits_model() -> Any:
    import torch

    from ferrum_rpc.engine.assembly.loading import load_model
    from ferrum_rpc.models.native_linear import ByteFactory, NibbleFactory

    linear = NibbleFactory()
    cpu = torch.device("cpu")
    return load_model(in_4_bits().path, torch.bfloat16, cpu, linear=linear, head=ByteFactory(linear.space))


@lru_cache(1024)
def _in_4_bits_logits(tokens: tuple[int, ...]) -> np.ndarray:
    from tests.support.harness import Executor

    logits: np.ndarray = Executor(_in_4_bits_model()).step({0: tokens})[0].float().numpy()
    return logits


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


def tried_with(what: str, model: Callable[[], Model], promise: Callable[..., Awaitable[Figures]]) -> Promise:
    """The promise once more, with another model, which has ``what``."""

    @wraps(promise)
    async def again(size: Size) -> Figures:
        figures = await promise(AGAIN if size is CI else size, model=model())
        figures.title += f", with {what}"
        return figures

    again.__name__ += f"_with_{what.replace(' ', '_')}"
    return again
