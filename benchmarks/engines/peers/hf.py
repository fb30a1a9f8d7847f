"""transformers as a peer, with a cache of its own or a static one.

``options``: ``cache`` is ``dynamic`` (eager, the default) or ``static`` (decode steps compiled by inductor): the
model's own forward and cache, driven step by step, which is faster than `generate`, as that adds some milliseconds of
its own to every step. ``device`` is where it runs, the CPU unless told.
"""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any, Final

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from benchmarks.engines.peers.lines import Timed, Unsupported, run, timed

WAYS: Final = {"dynamic": "eager, sdpa", "static": "static cache, compiled"}


class Transformers:
    """One model with one cache."""

    def open(self, model: str, threads: int, options: dict[str, Any]) -> dict[str, Any]:
        """Load in the checkpoint's dtype with sdpa attention."""
        torch.set_num_threads(threads)
        self._way = options.get("cache", "dynamic")
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto", attn_implementation="sdpa")
        self._device = options.get("device", "cpu")
        self._model: Any = loaded.eval().to(self._device)
        mode = "default" if self._device == "cpu" else "reduce-overhead"
        static = self._way == "static"
        self._step: Any = torch.compile(self._model.forward, mode=mode, dynamic=False) if static else self._model
        dtype = str(self._model.dtype).removeprefix("torch.")
        return {
            "name": f"transformers {transformers.__version__} {WAYS[self._way]}, {dtype}",
            "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
            "threads": torch.get_num_threads(),
            "tokens": "ours",
        }

    def prepare(self, prompts: list[list[int]], room: int) -> None:
        """Prefill the batch, eager in both ways: transformers compiles only decoding as well."""
        self._length = len(prompts[0])
        self._cache = self._new_cache(self._length + room)
        self._rows(self._model, prompts)
        self._kept = deepcopy(self._cache) if self._model._is_stateful else None

    def decode(self, tokens: list[list[int]], lead_in: int) -> Timed:
        self._roll_back()
        return timed(partial(self._rows, self._step), [[[each] for each in fed] for fed in tokens], lead_in)

    def prefill(self, prompts: list[list[int]], lead_in: int) -> Timed:
        """Eager; another cache has nothing to add to it."""
        if self._way != "dynamic":
            raise Unsupported("its prefill is the eager one")

        def anew() -> None:
            self._cache = self._new_cache(len(prompts[0]))

        return timed(partial(self._rows, self._model), [[prompt] for prompt in prompts], lead_in, anew)

    def _rows(self, step: Any, rows: list[list[int]]) -> list[int]:
        tokens = torch.tensor(rows).to(self._device)
        answer = step(input_ids=tokens, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        chosen: list[int] = answer.logits[:, -1].argmax(-1).tolist()
        return chosen

    def _new_cache(self, most: int) -> Any:
        config = self._model.config
        return StaticCache(config=config, max_cache_len=most) if self._way == "static" else DynamicCache(config=config)

    def _roll_back(self) -> None:
        if self._kept is not None:  # states cannot be cropped
            self._cache = deepcopy(self._kept)
            return
        if self._way == "dynamic":
            surplus = self._cache.get_seq_length() - self._length
            self._cache.crop(-surplus)
            return
        for layer in self._cache.layers:  # no crop of its own; entries beyond the length are masked and written anew
            layer.cumulative_length.fill_(self._length)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    run(Transformers())
