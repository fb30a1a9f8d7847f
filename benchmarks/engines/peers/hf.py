"""transformers as a peer: the model's own forward and cache, driven step by step, without `generate` around it.

``options``: ``cache`` is ``dynamic`` (eager, the default) or ``static`` (decode steps compiled by inductor); ``device``
is where it runs, the CPU unless told. Driving the forward itself is the fastest way to use it: `generate` adds some
milliseconds of its own to every step.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from benchmarks.engines.peers.lines import Timed, Unsupported, run


class Transformers:
    """One model with one cache."""

    def open(self, model: str, threads: int, options: dict[str, Any]) -> dict[str, Any]:
        """Load in the checkpoint's dtype with sdpa attention."""
        torch.set_num_threads(threads)
        self._static = options.get("cache", "dynamic") == "static"
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto", attn_implementation="sdpa")
        self._device = options.get("device", "cpu")
        self._model: Any = loaded.eval().to(self._device)
        mode = "default" if self._device == "cpu" else "reduce-overhead"
        self._step: Any = torch.compile(self._model.forward, mode=mode, dynamic=False) if self._static else self._model
        self._length = 0
        way = "static cache, compiled" if self._static else "eager, sdpa"
        return {
            "name": f"transformers {transformers.__version__} {way}, {str(self._model.dtype).removeprefix('torch.')}",
            "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
            "threads": torch.get_num_threads(),
        }

    def prepare(self, prompts: list[list[int]], room: int) -> None:
        """Prefill the batch, eager in both ways: transformers compiles only decoding as well."""
        self._length = len(prompts[0])
        self._cache = self._new_cache(self._length + room)
        self._rows(self._model, torch.tensor(prompts))

    def decode(self, tokens: list[list[int]], lead_in: int) -> Timed:
        """Roll back and step."""
        self._roll_back()
        return self._timed(self._step, [torch.tensor(fed).unsqueeze(1) for fed in tokens], lead_in, fresh=False)

    def prefill(self, prompts: list[list[int]], lead_in: int) -> Timed:
        """Eager; a static cache has nothing to add to it."""
        if self._static:
            raise Unsupported("its prefill is the eager one")
        return self._timed(self._model, [torch.tensor([prompt]) for prompt in prompts], lead_in, fresh=True)

    def _timed(self, step: Any, inputs: list[torch.Tensor], lead_in: int, *, fresh: bool) -> Timed:
        step_s: list[float] = []
        for index, tokens in enumerate(inputs):
            if fresh:
                self._cache = self._new_cache(tokens.shape[1])
            began = time.perf_counter()
            last = self._rows(step, tokens)
            if index >= lead_in:
                step_s.append(time.perf_counter() - began)
        return step_s, last

    def _rows(self, step: Any, tokens: torch.Tensor) -> list[int]:
        answer = step(input_ids=tokens.to(self._device), past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        chosen: list[int] = answer.logits[:, -1].argmax(-1).tolist()
        return chosen

    def _new_cache(self, most: int) -> Any:
        config = self._model.config
        return StaticCache(config=config, max_cache_len=most) if self._static else DynamicCache(config=config)

    def _roll_back(self) -> None:
        if not self._static:
            surplus = self._cache.get_seq_length() - self._length
            self._cache.crop(-surplus)
            return
        for layer in self._cache.layers:  # no crop of its own; entries beyond the length are masked and written anew
            layer.cumulative_length.fill_(self._length)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    run(Transformers())
