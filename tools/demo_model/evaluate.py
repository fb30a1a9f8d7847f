"""What a finished model is worth: loss on held-out text, words it spells, agreement of draft and target."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3ForCausalLM

from .corpus import split_words

PROMPTS = ("It was a fine morning, and ", "She looked at him ", "And the king said unto ", '"My dear Watson,')
CONTEXT = 512


@dataclass(frozen=True)
class Held:
    """Loss in nats per byte and the most likely next id at every position of the held-out text."""

    nats: float
    choices: Tensor

    @property
    def bits(self) -> float:
        """The loss in bits per byte."""
        return self.nats / log(2)


@torch.inference_mode()
def held_out(model: Qwen3ForCausalLM, stream: Tensor, rows: int = 16) -> Held:
    """Read `stream` in pieces of `CONTEXT` ids. The weights are used as they are, in their own dtype."""
    usable = (len(stream) - 1) // CONTEXT * CONTEXT
    inputs, targets = stream[:usable].view(-1, CONTEXT), stream[1 : usable + 1].view(-1, CONTEXT)
    total, choices = 0.0, []
    for row in range(0, len(inputs), rows):
        logits = model(input_ids=inputs[row : row + rows], use_cache=False).logits.float()
        correct = targets[row : row + rows].flatten()
        total += float(F.cross_entropy(logits.flatten(0, 1), correct, reduction="sum"))
        choices.append(logits.argmax(-1).flatten())
    return Held(total / usable, torch.cat(choices))


def agreement(draft: Held, target: Held) -> float:
    """The fraction of positions at which both would choose the same id: greedy acceptance of one drafted token."""
    return float((draft.choices == target.choices).double().mean())


@torch.inference_mode()
def sample(model: Qwen3ForCausalLM, prompt: str, new: int, temperature: float, seed: int = 0) -> str:
    """Continue `prompt` by up to `new` bytes; temperature 0 is greedy. The prompt is part of the answer."""
    torch.manual_seed(seed)
    generator: Any = model  # its own annotations exclude the class it is a method of
    choice: dict[str, Any] = {"do_sample": False, "temperature": None}
    if temperature:
        choice = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    ids = torch.tensor([list(prompt.encode())])
    out = generator.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **choice)
    return bytes(int(i) for i in out[0] if i < 256).decode("utf-8", "replace")


def spelled(texts: list[str], prompts: Sequence[str], known: Collection[str]) -> float:
    """The fraction of generated words that are in `known`. Prompts and the last, perhaps cut, words do not count."""
    words = [
        word
        for text, prompt in zip(texts, prompts, strict=True)
        for word in split_words(text.removeprefix(prompt))[:-1]
    ]
    return sum(word in known for word in words) / max(1, len(words))
