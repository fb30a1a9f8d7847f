"""The peer of the GPU check: transformers with a static cache and compiled decode steps, on the same shape.

A step is what it is for us: feed a token, and have the next one on the host. Its prefill is left out: the cache is as
long as it says, and what is in it does not change the time. A process of its own, so that a compiler that takes
minutes can be ended: `python tools/gpu_peer.py SHAPE CONTEXT ROUNDS STEPS` prints a line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


def peer(config: dict[str, Any], device: torch.device, context: int, rounds: int, steps: int) -> dict[str, Any]:
    """Seconds of a decode step of one sequence with ``context`` tokens cached, by round; and what ran."""
    import transformers
    from transformers import AutoModelForCausalLM, Qwen3Config, StaticCache

    from tools.gpu_world import alternate

    given = {name: value for name, value in config.items() if name not in ("architectures", "model_type")}
    make: Any = AutoModelForCausalLM
    with device:
        model = make.from_config(Qwen3Config(**given), dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    cache: Any = StaticCache(config=model.config, max_cache_len=context + 128)
    mode = "reduce-overhead" if device.type == "cuda" else "default"
    forward: Any = torch.compile(model.forward, mode=mode, dynamic=False)
    token = torch.ones((1, 1), dtype=torch.int64, device=device)
    model(input_ids=token, past_key_values=cache, use_cache=True)  # makes the cache's tensors

    def step(index: int) -> int:
        for layer in cache.layers:  # which count for themselves, on the device
            layer.cumulative_length.fill_(context + index)
        answer = forward(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return int(answer.logits[:, -1].argmax(-1).item())

    for index in range(3):  # compiles, records
        step(index)
    [seconds] = alternate({"": step}, rounds, steps).values()
    name = f"transformers {transformers.__version__}, static cache, torch.compile {mode}, torch {torch.__version__}"
    return {"peer": name, "seconds": seconds}


def main() -> None:
    """Measure and print."""
    from benchmarks.shapes import SHAPES

    shape, context, rounds, steps = sys.argv[1], *map(int, sys.argv[2:5])
    torch.set_grad_enabled(False)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(json.dumps(peer(SHAPES[shape], device, context, rounds, steps)))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
