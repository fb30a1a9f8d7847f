"""What every engine is asked to do: model shapes with random weights, and cells with their tokens.

A cell is one kind of step at one size. Its tokens come from fixed seeds and are chosen beforehand, so that every side
runs the same steps whatever it answers. Prompts of prefill rounds are never used twice: a cache of prefixes has nothing
to find, but what a cell gives it to. What a benchmark needs of a model is its size, not its knowledge.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from benchmarks.machine import ROOT
from ferrum_rpc import core
from ferrum_rpc.core import OutputKind, OutputSpec, Positions, RowDType, RowLogprobs
from ferrum_rpc.models.layout import layout
from ferrum_rpc.models.lora import modules_of
from ferrum_rpc.models.spec import ModelSpec

SHAPES: Final[dict[str, dict[str, Any]]] = json.loads((ROOT / "benchmarks" / "shapes.json").read_text("utf-8"))
"""Configurations: of https://huggingface.co/Qwen/Qwen3-0.6B and Qwen3-8B, of the text part of Qwen3.5-0.8B, of
two layers with experts of DeepSeek-V2-Lite behind its dense one, of three layers of Qwen3-30B-A3B, and of Qwen3's
architecture at a size that a test can afford."""

IDENTITY: Final = "identity"
BUILT_IN: Final = (IDENTITY, "demo")
USUAL: Final = ("qwen3-0.6b", "tiny")
"""The shape that most is measured with, and that of quick runs."""
SEED: Final = 20261121
CACHE: Final = ROOT / ".cache" / "bench"
BLOCK_SIZE: Final = 16
PERIOD: Final = 4194301
"""Numbers drawn per checkpoint: a prime, so that no two rows of a matrix are equal (equal rows tie in the logits)."""

LEAD_IN: Final = 2
"""Steps of a decode round that are not timed: the roll-back, and one that finds the caches as the timed ones do."""

MASK: Final = b"every second token"  # id of the mask that a runner of a benchmark knows; its words: see `mask_words`
DRAFT: Final = 4  # tokens of the drafts that the outputs with such a name are about
OUTPUTS: Final[dict[str, OutputKind]] = {
    "greedy": core.Greedy(),
    "greedy-logprobs": core.Greedy(logprob=True, logprobs=RowLogprobs(5)),
    "sample": core.Sample(seed=1),
    "sample-top-p": core.Sample(top_p=0.9, seed=1),
    "sample-penalties": core.Sample(0.8, 50, 0.95, seed=1, repetition_penalty=1.1, frequency_penalty=0.1),
    "top-tokens-20": core.TopTokens(20),
    "hidden-states": core.HiddenStates(RowDType.BF16),
    "greedy-masked": core.Sample(0.0, mask=MASK),
    "sample-masked": core.Sample(seed=1, mask=MASK),
    "verify-4": core.Greedy(),
    "accept-4": core.Accept(),
    "accept-4-sampled": core.Accept(core.Sample(seed=1)),
    "next-token": core.NextToken(),
    "next-token-logprobs": core.NextToken(logprobs=RowLogprobs(5)),
    "full-bf16": core.FullLogits(RowDType.BF16),
    "full-f32": core.FullLogits(RowDType.F32),
}
NOTHING: Final = OutputSpec(Positions.NONE, core.Greedy())
PREFILL: Final = "prefill"
DECODE: Final = "decode"

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Cell:
    """``batch`` sequences of ``context`` tokens that take a step (decode), or ``context`` tokens of a new one
    (prefill). ``target`` and ``goal``: tokens a second through gRPC, of performance work; nothing passes or fails.
    ``most``: timed steps of a round, at most. ``output``: a name of `OUTPUTS`. ``shared``: tokens with which every new
    sequence of a prefill begins. ``draw``: tells the tokens of decode rounds apart. ``callers``: how many have those
    sequences between them; each sends a step when its last is answered."""

    kind: Literal["prefill", "decode"]
    batch: int
    context: int
    target: float | None = None
    goal: float | None = None
    most: int = 48
    output: str = "greedy"
    shared: int = 0
    draw: int = 0
    callers: int = 1

    @property
    def name(self) -> str:
        """``decode b8 @256``, with the output if it is another than greedy tokens."""
        if self.kind == PREFILL:
            return f"prefill {self.context}" + f", {self.shared} of them seen" * (self.shared > 0)
        batches = "+".join([f"b{self.batch // self.callers}"] * self.callers)
        return f"decode {batches} @{self.context}" + f", {self.output}" * (self.output != "greedy")

    @property
    def spec(self) -> OutputSpec:
        """What every sequence of a step asks for."""
        kind = OUTPUTS[self.output]
        every = isinstance(kind, core.NextToken) or self.rows > 1
        return OutputSpec(Positions.ALL if every else Positions.LAST, kind)

    @property
    def rows(self) -> int:
        """Tokens that each sequence feeds in a decode step."""
        return 1 + DRAFT * self.output.startswith(("verify", "accept"))

    @property
    def tokens_per_step(self) -> int:
        """What a step counts for."""
        return self.context if self.kind == PREFILL else self.batch

    @property
    def blocks(self) -> int:
        """Blocks of the cache that its sequences take at their longest, a spare each for copies."""
        tokens = self.context if self.kind == PREFILL else self.context + LEAD_IN + self.most + DRAFT
        return self.batch * (-(-tokens // BLOCK_SIZE) + 1)

    def prompts(self, vocab_size: int) -> Tokens:
        """What the sequences hold before a decode round, int32 [batch, context]; larger batches begin alike."""
        return self._draw(0, 0, vocab_size, (self.batch, self.context))

    def fed(self, vocab_size: int, steps: int) -> Tokens:
        """What is fed in a decode round, its untimed steps first: int32 [LEAD_IN + steps, batch]."""
        return self._draw(1, self.draw, vocab_size, (LEAD_IN + self.most, self.batch))[: LEAD_IN + steps]

    def fresh(self, vocab_size: int, number: int, steps: int) -> Tokens:
        """The prompts of prefill round ``number``, an untimed one first: int32 [1 + steps, context]."""
        prompts = self._draw(2, number, vocab_size, (1 + steps, self.context))
        prompts[:, : self.shared] = self._draw(3, 0, vocab_size, (1, self.context))[:, : self.shared]
        return prompts

    def _draw(self, stream: int, number: int, vocab_size: int, shape: tuple[int, int]) -> Tokens:
        generator = np.random.default_rng((SEED, stream, number, self.context))
        return generator.integers(0, vocab_size, shape, dtype=np.int32)


CELLS: Final = (
    Cell(PREFILL, 1, 512, target=1200, goal=1800),
    Cell(DECODE, 1, 512, target=14.5, goal=22),
    Cell(DECODE, 8, 256, target=90, goal=130),
    Cell(DECODE, 32, 256, target=180, goal=240),
)
"""Of the Qwen3-0.6B shape, bfloat16, on two cores."""

GPU_CELLS: Final = (Cell(PREFILL, 1, 8192), Cell(DECODE, 1, 1024), Cell(DECODE, 64, 2048))
"""Of the Qwen3-8B shape, bfloat16; their targets are shares of the limit."""

QUICK_CELLS: Final = (Cell(PREFILL, 1, 24, most=4), Cell(DECODE, 1, 24, most=4), Cell(DECODE, 3, 8, most=4))
"""Of the ``tiny`` shape: does everything run?"""


def mask_words(vocab_size: int) -> bytes:
    """Of `MASK`: it allows every second token."""
    return b"\x55" * (4 * -(-vocab_size // 32))


def settings(cells: Sequence[Cell], threads: int, device: str = "cpu") -> dict[str, Any]:
    """Of `ferrum-rpc serve`, for the server and for the runner in this process alike: blocks for the largest cell, and
    to spare; slots for recurrent states of its sequences and their forks, and for a checkpoint each."""
    blocks, slots = max(cell.blocks for cell in cells) + 64, 3 * max(cell.batch for cell in cells)
    return {
        "block_size": BLOCK_SIZE,
        "kv_blocks": blocks,
        "state_slots": max(4, slots),
        "threads": threads,
        "device": device,
    }


def write_checkpoint(path: str | Path, config: Mapping[str, Any], dtype: str = "bfloat16") -> Path:
    """Write ``config`` with random weights of ``dtype`` (bfloat16, float16, float32) to folder ``path``; return it. At
    disk speed: one block of random numbers is drawn, and every tensor is cut from it at another offset."""
    import torch
    from safetensors.torch import save_file

    block = torch.randn(PERIOD, generator=torch.Generator().manual_seed(SEED)).to(getattr(torch, dtype)).repeat(2)
    tensors: dict[str, torch.Tensor] = {}
    for index, (name, placement) in enumerate(layout(ModelSpec.from_config(config)).items()):
        shape = placement.shape
        if len(shape) == 1:
            tensors[name] = torch.ones(shape, dtype=block.dtype)
            continue
        size = math.prod(shape)
        offset = index * 7919 % PERIOD
        source = block[offset : offset + PERIOD] * (0.02 if "embed" in name else shape[-1] ** -0.5)
        tensors[name] = source.repeat(-(-size // PERIOD))[:size].view(shape)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": dtype}, indent=1))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def checkpoint(shape: str) -> Path:
    """The folder with random weights of a shape; written whole or not at all, and anew where the shape has changed. Of
    several processes one writes it, and the others wait."""
    folder = CACHE / shape
    written = folder / "config.json"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f"{shape}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not written.is_file() or not SHAPES[shape].items() <= json.loads(written.read_text("utf-8")).items():
            shutil.rmtree(folder, ignore_errors=True)
            print(f"writing random weights of {shape} to {folder.relative_to(ROOT)} (once)")
            partial = CACHE / f"{shape}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            write_checkpoint(partial, SHAPES[shape]).rename(folder)
    return folder


def write_adapter(spec: ModelSpec, rank: int, folder: Path) -> str:
    """Write a random adapter of all products into a folder of its own in ``folder``, anew; returns its name."""
    import torch
    from safetensors.torch import save_file

    generator, tensors, modules = torch.Generator().manual_seed(SEED), {}, set()
    for module, (rows, width) in modules_of(layout(spec)).items():
        modules.add(module.rpartition(".")[2])
        for end, shape, size in (("lora_A", (rank, width), width**-0.5), ("lora_B", (rows, rank), 0.1)):
            numbers = torch.randn(shape, generator=generator) * size
            tensors[f"base_model.model.{module}.{end}.weight"] = numbers.to(torch.bfloat16)
    name = f"rank-{rank}"
    shutil.rmtree(folder / name, ignore_errors=True)
    (folder / name).mkdir(parents=True)
    save_file(tensors, folder / name / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(modules)}
    (folder / name / "adapter_config.json").write_text(json.dumps(config))
    return name


def with_words(shape: str) -> Path:
    """The folder of a shape's checkpoint with a tokenizer: all bytes, and as many random words as there are tokens.
    Every token but the ends has a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder, weights = CACHE / f"{shape}-words", checkpoint(shape)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        os.link(weights / name, folder / name)
    config = SHAPES[shape]
    ends = {config["bos_token_id"], config["eos_token_id"]}
    words, dice = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet())), random.Random(SEED)
    while len(words) + len(ends) < config["vocab_size"]:
        space = "Ġ" * (dice.random() < 0.5)  # how byte-level tokenizers write a space
        words[space + "".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=dice.randint(2, 8)))] = None
    numbers = [number for number in range(config["vocab_size"]) if number not in ends]
    vocab = dict(zip(words, numbers, strict=False)) | {f"<{end}>": end for end in ends}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<{end}>" for end in sorted(ends)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def model_path(model: str) -> str:
    """``model``: identity, demo, a name of `SHAPES` (written to the cache on first use), or a folder."""
    path = str(checkpoint(model)) if model in SHAPES else model
    if model not in BUILT_IN and not Path(path).is_dir():
        raise SystemExit(f"no model {model!r}: write identity, demo, {', '.join(SHAPES)} or a folder")
    return path
