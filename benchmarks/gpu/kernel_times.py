"""Where the microseconds of a step go on the device, by torch's profiler: two steps of first light.

20 replayed decode steps of 1 and of 64 sequences, and one prompt of 8,192 tokens, of the 8B shape and of a model with
recurrent states: a table of kernels each, and how much of the time between the first and the last kernel the device had
nothing to do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.cases import BLOCK_SIZE, NOTHING, checkpoint
from benchmarks.engines.inprocess import forward
from benchmarks.gpu.first_light import tell
from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import Greedy, OutputSpec, Positions, Span
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.operations import TorchRunner
from ferrum_rpc.logs import configure_logging

STEPS: Final = 20
ROWS: Final = 25
CONTEXT: Final = 16384
"""The longest of a sequence."""

GREEDY: Final = OutputSpec(Positions.LAST, Greedy())


def profiled(runner: TorchRunner, name: str, steps: Sequence[Sequence[Span]], *, cuda: bool) -> dict[str, Any]:
    """Kernels of ``steps``, longest first, in microseconds a step; and the share of the time in which none ran."""
    kind = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    with profile(activities=[kind]) as found:
        for spans in steps:
            forward(runner, spans)
        if cuda:
            torch.cuda.synchronize()
    where = DeviceType.CUDA if cuda else DeviceType.CPU
    events = [each for each in found.events() or () if each.device_type == where]
    times, counts = defaultdict[str, float](float), defaultdict[str, int](int)
    for each in events:
        taken = each.self_device_time_total if cuda else each.self_cpu_time_total
        times[each.name] += taken / len(steps)
        counts[each.name] += 1
    busy = sum(times.values())
    ends = [(each.time_range.start, each.time_range.end) for each in events]
    whole = (max(end for _, end in ends) - min(start for start, _ in ends)) / len(steps)
    ordered = sorted(times, key=lambda each: -times[each])
    print(f"\n{name}: {busy:,.0f} us of kernels a step, {sum(counts.values()) / len(steps):,.0f} kernels, ", end="")
    print(f"the device idle {max(0.0, 1 - busy / whole):.1%} of {whole:,.0f} us")
    for each in ordered[:ROWS]:
        print(f"{times[each]:>10,.1f} us {times[each] / busy:>6.1%} {counts[each] / len(steps):>7.1f} x  {each[:90]}")
    kernels = {each[:90]: [round(times[each], 1), round(counts[each] / len(steps), 2)] for each in ordered[:ROWS]}
    return {"kernels_us": round(busy, 1), "step_us": round(whole, 1), "by_kernel": kernels}


def measure(shape: str, *, rehearse: bool) -> dict[str, Any]:
    """The three tables of a ``shape``."""
    device = "cpu" if rehearse else "cuda"
    batches = {"b1 @1024": (1, 16 if rehearse else 1024), "b64 @2048": (3, 16) if rehearse else (64, 2048)}
    prompt = 64 if rehearse else 8192
    blocks = max(batch * (-(-context // BLOCK_SIZE) + 2) for batch, context in batches.values()) + prompt // BLOCK_SIZE
    made: dict[str, Any] = {"device": device, "dtype": "bfloat16", "kv_blocks": blocks + 64, "max_context": CONTEXT}
    runner = build_runner(ModelSettings(str(checkpoint(shape)), block_size=BLOCK_SIZE, **made))
    print(*(f"{name}: {why}" for name, why in runner.device.choices), sep="\n")
    found, cuda = dict[str, Any](), not rehearse
    with runner.context():
        for first, (name, (batch, context)) in enumerate(batches.items()):
            sequences = range(100 * first, 100 * first + batch)
            fill = np.ones(context, np.int32)
            for each in sequences:
                forward(runner, [Span(each, fill, 0, NOTHING, create=True)])
            token = np.ones(1, np.int32)
            steps = [[Span(s, token, context + at, GREEDY) for s in sequences] for at in range(STEPS + 3)]
            for spans in steps[:3]:
                forward(runner, spans)
            found[name] = profiled(runner, f"decode {name}", steps[3:], cuda=cuda)
            runner.release(list(sequences))
        for each in range(1000, 1003):
            spans = [Span(each, np.ones(prompt, np.int32), 0, GREEDY, create=True)]
            if each < 1002:
                forward(runner, spans)
            else:
                found[f"prefill {prompt}"] = profiled(runner, f"prefill {prompt}", [spans], cuda=cuda)
            runner.release([each])
    runner.close()
    return found


def kernels(*, rehearse: bool) -> None:
    """Measure and print."""
    configure_logging(level="warning")
    tell(measure("tiny" if rehearse else "qwen3-8b", rehearse=rehearse))


def states(*, rehearse: bool) -> None:
    """As `kernels`, of a model with recurrent states."""
    configure_logging(level="warning")
    tell(measure("qwen3.5-tiny" if rehearse else "qwen3.5-0.8b", rehearse=rehearse))
