"""The attention kernels alone: once each, for a profiler, or a whole prompt beside torch's kernel for packed sequences.

    python3 -m benchmarks.gpu.attend once | varlen [--rehearse]

`once` launches each kind of step once, after a launch that compiles; `ncu` reads the counters of the kernels. `varlen`
times a prompt of 8,192 tokens beside `varlen_attn` and SDPA: what a backend on them would gain.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from typing import Final

import torch

from benchmarks.gpu.first_light import FIGURES

PROMPT: Final = "prefill, 8k"


def main() -> int:
    """Run one of them; the exit status."""
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.gpu.attend")
    parser.add_argument("what", choices=("once", "varlen"))
    parser.add_argument("--rehearse", action="store_true", help="tiny, interpreted on the CPU")
    options = parser.parse_args()
    if options.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"  # read when something first imports triton
    from benchmarks.gpu.check import LLAMA, LOADS, Load, attention, calls_of
    from benchmarks.limits import Machine
    from ferrum_rpc.core import AttentionSpec

    device = torch.device("cpu" if options.rehearse else "cuda")
    spec = AttentionSpec(4, 1, 128, 0.1) if options.rehearse else LLAMA
    loads = (Load("decode", 2, 19, 1), Load(PROMPT, 1, 0, 24)) if options.rehearse else LOADS
    if options.what == "once":
        with torch.inference_mode():
            for load in loads:
                calls, _ = calls_of(device, load, spec, alone=True)
                for _ in range(2):
                    calls["ours"][0]()
                if not options.rehearse:
                    torch.cuda.synchronize()
                print(load.name)
        return 0
    machine = Machine(1, device.type, quick=options.rehearse)
    machine.read()
    prompt = [load for load in loads if load.name == PROMPT]
    [found] = asyncio.run(attention(device, prompt, machine.limits(), rounds=1 if options.rehearse else 9, spec=spec))
    print(json.dumps(found, indent=1))
    print(FIGURES + json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
