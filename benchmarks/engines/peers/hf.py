"""transformers as a peer, in all its ways.

``options``: ``cache`` is ``dynamic`` (eager, the default) or ``static`` (decode steps compiled by inductor): the
model's own forward and cache, driven step by step, which is faster than `generate`, as that adds some milliseconds of
its own to every step. Or it is ``paged``: its continuous batching. That samples for itself (greedy): the tokens that it
is given only say how many steps it takes. Its steps are the times between the tokens of the sequence that began last,
when all decode. ``device`` is where it runs, the CPU unless told.
"""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from itertools import pairwise
from typing import Any, Final

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, DynamicCache, GenerationConfig, StaticCache

from benchmarks.engines.peers.lines import Timed, Unsupported, run, timed

WAYS: Final = {"dynamic": "eager, sdpa", "static": "static cache, compiled", "paged": "continuous batching"}
PAGE: Final = 32  # tokens of a page of the continuous batching


class Transformers:
    """One model with one cache."""

    def open(self, model: str, threads: int, options: dict[str, Any]) -> dict[str, Any]:
        """Load in the checkpoint's dtype with sdpa attention."""
        torch.set_num_threads(threads)
        self._way = options.get("cache", "dynamic")
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto", attn_implementation="sdpa")
        self._device = options.get("device", "cpu")
        self._model: Any = loaded.eval().to(self._device)
        self._config: Any = GenerationConfig
        mode = "default" if self._device == "cpu" else "reduce-overhead"
        static = self._way == "static"
        self._step: Any = torch.compile(self._model.forward, mode=mode, dynamic=False) if static else self._model
        dtype = str(self._model.dtype).removeprefix("torch.")
        return {
            "name": f"transformers {transformers.__version__} {WAYS[self._way]}, {dtype}",
            "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
            "threads": torch.get_num_threads(),
            "tokens": "its own" if self._way == "paged" else "ours",
        }

    def prepare(self, prompts: list[list[int]], room: int) -> None:
        """Prefill the batch, eager in both ways: transformers compiles only decoding as well. Its continuous batching
        prefills at the start of every round."""
        self._prompts, self._room, self._length = prompts, room, len(prompts[0])
        if self._way != "paged":
            self._cache = self._new_cache(self._length + room)
            self._rows(self._model, prompts)
            self._kept = deepcopy(self._cache) if self._model._is_stateful else None

    def decode(self, tokens: list[list[int]], lead_in: int) -> Timed:
        if self._way == "paged":
            return self._generate(len(tokens))[lead_in:], []  # tokens of its own are no answer to ours
        self._roll_back()
        return timed(partial(self._rows, self._step), [[[each] for each in fed] for fed in tokens], lead_in)

    def prefill(self, prompts: list[list[int]], lead_in: int) -> Timed:
        """Eager; another cache has nothing to add to it."""
        if self._way != "dynamic":
            raise Unsupported("its prefill is the eager one")

        def anew() -> None:
            self._cache = self._new_cache(len(prompts[0]))

        return timed(partial(self._rows, self._model), [[prompt] for prompt in prompts], lead_in, anew)

    def _generate(self, steps: int) -> list[float]:
        """Seconds of as many steps; what comes before the last sequence's first token is not counted."""
        config = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=len(self._prompts) * (-(-(self._length + self._room) // PAGE) + 1),
            max_batch_tokens=max(self._length, len(self._prompts)),
            use_cuda_graph=False,
        )
        wanted = self._config(do_sample=False, max_new_tokens=steps + 1, eos_token_id=-1, pad_token_id=0)
        answers = self._model.generate_batch(
            self._prompts, generation_config=wanted, continuous_batching_config=config, record_timestamps=True
        )
        found = list(answers.values())
        if len(found) != len(self._prompts) or any(each.error for each in found):
            raise RuntimeError(f"{len(found)} of {len(self._prompts)} sequences were answered")
        latest = max(found, key=lambda each: each.timestamps[0])
        return [after - before for before, after in pairwise(latest.timestamps)]

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
