"""OpenVINO GenAI as a peer: its continuous batching, step by step.

``options``: ``weights`` is ``bf16``, ``int8`` or ``int4``; with ``prefix`` it looks for prompts that it has seen. The
checkpoint is exported once by optimum-intel, beside the original.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import openvino
import openvino_genai

from benchmarks.engines.peers.generating import Generating
from benchmarks.engines.peers.lines import run

FORMATS: Final = {
    "bf16": (),
    "int8": ("--weight-format", "int8"),
    "int4": ("--weight-format", "int4", "--group-size", "32", "--ratio", "1.0"),
}
"""Arguments of the export; without any, weights stay as they are. In int4 all matrices but embedding and head are."""

CACHE_GB: Final = 2
BATCH_TOKENS: Final = 8192  # tokens of a step, at most: a prompt is not cut into pieces


def exported(folder: Path, weights: str) -> Path:
    """The exported model of ``folder``; made on first use, whole or not at all."""
    target = folder / f"openvino-{weights}"
    if not target.exists():
        partial = folder / f"openvino-{weights}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", str(folder)]
        command += ["--task", "text-generation-with-past", "--disable-convert-tokenizer", *FORMATS[weights]]
        done = subprocess.run([*command, str(partial)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["optimum-cli failed"])[-1])
        partial.rename(target)
    return target


class OpenVino(Generating):
    """One pipeline."""

    def open(self, model: str, threads: int, options: dict[str, Any]) -> dict[str, Any]:
        """Export and load; products and cache in bfloat16."""
        weights = str(options.get("weights", "bf16"))
        version = openvino_genai.__version__.partition("-")[0]
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.max_num_batched_tokens = BATCH_TOKENS
        scheduler.enable_prefix_caching = bool(options.get("prefix"))
        wanted = {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16", "INFERENCE_NUM_THREADS": threads}
        folder = exported(Path(model), weights)
        self._pipeline: Any = openvino_genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", wanted)
        self._handles: list[Any] = []
        self._asked = 0
        return {
            "name": f"OpenVINO GenAI {version}, {weights} weights",
            "versions": {"openvino-genai": version},
            "threads": threads,
            "tokens": "its own",
        }

    def begin(self, prompts: Sequence[list[int]], tokens: int) -> None:
        wanted = openvino_genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        self._handles = []
        for prompt in prompts:
            ids = openvino.Tensor(np.array([prompt], np.int64))
            self._handles.append(self._pipeline.add_request(self._asked, ids, wanted))
            self._asked += 1

    def step(self) -> list[list[int]]:
        self._pipeline.step()
        return [
            [token for output in handle.read().values() for token in output.generated_ids] if handle.can_read() else []
            for handle in self._handles
        ]

    def end(self) -> None:
        """Stop them, and the steps that the pipeline needs to see it."""
        for handle in self._handles:
            handle.stop()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()


if __name__ == "__main__":
    run(OpenVino())
