"""transformers' continuous batching as a peer. It samples for itself (greedy): the tokens that it is given only say how
many steps it takes. Its steps are the times between the tokens of the sequence that began last, when all decode.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig

from benchmarks.engines.peers.lines import Timed, Unsupported, run

PAGE: Final = 32
"""Tokens of a page."""


class Continuous:
    """One model; a manager for each round, as `generate_batch` makes it."""

    def open(self, model: str, threads: int, options: dict[str, Any]) -> dict[str, Any]:
        """Load in the checkpoint's dtype with its paged sdpa attention."""
        torch.set_num_threads(threads)
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto", attn_implementation="sdpa")
        self._model: Any = loaded.eval()
        self._library: Any = transformers
        return {
            "name": f"transformers {transformers.__version__} continuous batching",
            "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
            "threads": torch.get_num_threads(),
            "tokens": "its own",
        }

    def prepare(self, prompts: list[list[int]], room: int) -> None:
        """Its manager prefills at the start of every round."""
        self._prompts = prompts
        self._blocks = len(prompts) * (-(-(len(prompts[0]) + room) // PAGE) + 1)

    def decode(self, tokens: list[list[int]], lead_in: int) -> Timed:
        """Generate as many tokens; what comes before the last sequence's first one is not counted."""
        steps = len(tokens)
        config = self._library.GenerationConfig(
            do_sample=False, max_new_tokens=steps + 1, eos_token_id=-1, pad_token_id=0
        )
        answers = self._model.generate_batch(
            self._prompts,
            generation_config=config,
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE,
                num_blocks=self._blocks,
                max_batch_tokens=max(len(self._prompts[0]), len(self._prompts)),
                use_cuda_graph=False,
            ),
            record_timestamps=True,
        )
        found = list(answers.values())
        if len(found) != len(self._prompts) or any(each.error for each in found):
            raise RuntimeError(f"{len(found)} of {len(self._prompts)} sequences were answered")
        latest = max(found, key=lambda each: each.timestamps[0])
        step_s = [after - before for before, after in pairwise(latest.timestamps)]
        return step_s[lead_in:], []  # tokens of its own are no answer to ours

    def prefill(self, prompts: list[list[int]], lead_in: int) -> Timed:
        """The forward of a prompt is the eager one."""
        raise Unsupported("its prefill is the eager one")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    run(Continuous())
