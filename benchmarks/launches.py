"""What a decode step on a GPU costs besides the GPU: launches per layer, and host microseconds of `begin` and `finish`.

No GPU is needed. The runner is the one that serves on CUDA over the heads and layers of Qwen3-8B. A launch (a call of a
Triton kernel, or a torch operation that is neither a view nor an allocation) is counted and not carried out, and a
recorded step replays nothing. The times are those of Python and torch on the host: less than a GPU machine will show,
and comparable between two versions of the code. docs/kernels.md has figures.

They are CPU times of the calling thread: of each round the median, and of the rounds, which take turns, the lowest. A
busy machine computes at two thirds of its speed for seconds at a time, which the CPU time shows.
"""

from __future__ import annotations

import argparse
import gc
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import thread_time_ns
from typing import Any, Final
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter, jit

from benchmarks.cases import BLOCK_SIZE, NOTHING, SHAPES
from ferrum_rpc.attention.triton_paged import TritonPagedAttention
from ferrum_rpc.core import DeviceInfo, Greedy, OutputSpec, Positions, Run, Span, SpanResult, Step
from ferrum_rpc.engine.cuda.compute import StagedCompute
from ferrum_rpc.engine.cuda.select import select_compute
from ferrum_rpc.engine.operations import TorchRunner
from ferrum_rpc.kv.manager import KvManager
from ferrum_rpc.kv.store import CacheSpec, KvStore
from ferrum_rpc.models.adapter_config import LowRank
from ferrum_rpc.models.decoder import Decoder
from ferrum_rpc.models.layout import layout
from ferrum_rpc.models.linear import PlainLinear
from ferrum_rpc.models.spec import ModelSpec
from ferrum_rpc.models.triton_fused_ops import TritonFusedOps
from ferrum_rpc.models.triton_lora import TritonLoras

CPU: Final = torch.device("cpu")
NARROW: Final = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "tie_word_embeddings": False}
"""What makes the model small enough for any machine. No launch and no Python depends on it."""

MULTIPROCESSORS: Final = 132  # of an H100: the attention's plan depends on it
RANK: Final = 16  # of adapters
GREEDY: Final = OutputSpec(Positions.LAST, Greedy())
WARM: Final = 20
Launches = Counter[str]


class NoProduct(PlainLinear):
    """A product whose rows are undefined. The operation is torch's while launches are counted."""

    __slots__ = ()
    counting = False

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) if self.counting else x.new_empty((len(x), len(self._weight)))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, launches: Launches) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._launches = launches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0]
        if not func.is_view and not name.startswith(("empty", "new_empty")):
            self._launches[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def no_device(launches: Launches) -> Iterator[None]:
    """Within it launches of Triton kernels are counted and not carried out."""

    def run(kernel: Any, *_: Any, **__: Any) -> None:
        launches[kernel.fn.__name__] += 1

    with mock.patch.object(jit.JITFunction, "run", run), mock.patch.object(interpreter.InterpretedFunction, "run", run):
        yield


def make_runner(
    batch: int, tokens: int, *, graphs: str, layers: int | None = None, adapters: int = 0, depth: int = 1
) -> TorchRunner:
    """A runner of ``batch`` sequences of up to ``tokens`` tokens, with ``adapters`` of all modules, and with up to
    ``depth`` steps in flight."""
    config = SHAPES["qwen3-8b"] | NARROW
    spec = ModelSpec.from_config(config | {"num_hidden_layers": layers or config["num_hidden_layers"]})
    model = Decoder(spec, torch.bfloat16, CPU, NoProduct, TritonFusedOps(spec.layers[0]))
    for name, shape in model.expected_tensors().items():
        model.load(name, torch.zeros(shape, dtype=torch.bfloat16))
    blocks_each = -(-tokens // BLOCK_SIZE)
    blocks = batch * (blocks_each + 1) + 1
    [one, *_], count = model.attention_specs, len(model.attention_specs)
    store = KvStore([CacheSpec(one.kv_heads, one.head_dim, torch.bfloat16)], blocks, BLOCK_SIZE, CPU)
    attention = TritonPagedAttention(
        model.attention_specs, store.keys * count, store.values * count, processors=MULTIPROCESSORS
    )

    loras = None
    if adapters:
        loras = TritonLoras(layout(spec), torch.bfloat16, CPU, max_rank=RANK)
        for number in range(1, adapters + 1):
            loras.add(number, loras.changes([LowRank(module, RANK, 1.0, "", "") for module in loras.modules]))

    def capture(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        return (lambda: None), run()

    sizes = {"max_sequences": batch, "blocks_per_sequence": blocks_each, "block_size": BLOCK_SIZE}
    _, compute = select_compute(model, attention, graphs=graphs, capture=capture, loras=loras, states=None, **sizes)
    compute.follows = depth > 1
    kv = KvManager(blocks, BLOCK_SIZE)
    device = DeviceInfo("cuda", "none", 0, 1, attention.name, ())
    info = model.info("shape")
    return TorchRunner(model, kv, store, attention, info=info, device=device, compute=compute, depth=depth)


def launches_per_layer(batch: int) -> tuple[Launches, Launches]:
    """Launches of a decode step in each layer, and those before and behind the layers. The head is not among them."""
    found = []
    for layers in (2, 3):
        launches = Launches()
        with torch.no_grad(), no_device(launches):
            compute = make_runner(batch, BLOCK_SIZE, graphs="off", layers=layers).compute
            assert isinstance(compute, StagedCompute)
            capacity = compute.staged.reserve(batch, 1, batch)
            sections = [torch.zeros(size, dtype=torch.int32) for size in capacity.sizes]
            inputs = [torch.zeros(batch, dtype=torch.int64) for _ in range(3)]
            plan = compute.staged.bind(capacity, sections)
            launches.clear()
            NoProduct.counting = True
            try:
                with _Operations(launches):
                    compute.run_layers(inputs, plan)
            finally:
                NoProduct.counting = False
        found.append(launches)
    two, three = found
    each = three - two
    return each, two - each - each


def host_times(  # noqa: PLR0917
    batch: int, context: int, steps: int, graphs: str, adapters: int = 0, runs: bool = False, following: bool = False
) -> tuple[float, float]:
    """Median microseconds of `begin` and of `finish`, of greedy decode steps of ``batch`` sequences, which have the
    ``adapters`` in turn. Steps of ``runs``: they feed what the step before chose; if they are ``following``, they begin
    while that one is in flight."""
    own = [1 + sequence % adapters if adapters else 0 for sequence in range(batch)]
    prompt, run = np.ones(context - 1, dtype=np.int32), Run(WARM + steps + 1) if runs else None
    times: list[tuple[int, int]] = []
    with no_device(Launches()), torch.inference_mode():
        tokens = context + WARM + steps + runs
        runner = make_runner(batch, tokens, graphs=graphs, adapters=adapters, depth=1 + runs)

        def spans(at: int, token: Any, run: Run | None = None) -> tuple[Span, ...]:
            return tuple(Span(each, token, at, GREEDY, adapter=own[each], run=run) for each in range(batch))

        for sequence in range(batch):
            runner.forward(Step((Span(sequence, prompt, 0, NOTHING, create=True, adapter=own[sequence]),)))
        gc.collect()
        if runs:
            pending = runner.begin(Step(spans(context - 1, prompt[:1], run)))
            if not following:
                runner.finish(pending)
        for at in range(context - 1 + runs, context - 1 + runs + WARM + steps):
            fed = np.zeros(1, np.int32) if runs else prompt[:1]
            step = Step(spans(at, fed), (), ((),) * batch if following else ())
            began = thread_time_ns()
            begun = runner.begin(step)
            queued = thread_time_ns()
            result = runner.finish(pending if following else begun)
            times.append((queued - began, thread_time_ns() - queued))
            assert all(isinstance(each, SpanResult) for each in result.outcomes)
            pending = begun
    begin, finish = np.median(times[WARM:], axis=0) / 1e3
    return float(begin), float(finish)


def measure(batches: Sequence[int], context: int, steps: int, rounds: int, adapters: int = 0) -> dict[str, Any]:
    """The launches, and the times by batch size."""
    per_layer, others = launches_per_layer(1)
    found = defaultdict[str, list[tuple[float, float]]](list)
    for _ in range(rounds):
        for batch in batches:
            for way in ("auto", "off"):
                name = f"b{batch} @{context}, {'replayed' if way == 'auto' else 'eager'}"
                name += f", {adapters} adapters" if adapters else ""
                found[name].append(host_times(batch, context, steps, way, adapters))
                for following in () if adapters else (False, True):
                    of_runs = host_times(batch, context, steps, way, runs=True, following=following)
                    found[f"{name}, runs{' that follow' if following else ''}"].append(of_runs)
    lowest = {name: np.min(each, axis=0).round(1).tolist() for name, each in found.items()}
    times = {name: {"begin_us": begin, "finish_us": finish} for name, (begin, finish) in lowest.items()}
    return {"per_layer": dict(per_layer), "others": dict(others), "host": times}


def main(argv: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks launches")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--adapters", type=int, default=0, help="of rank 16, which the sequences have in turn")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = measure(options.batches, options.context, options.steps, options.rounds, options.adapters)
    for title, launches in (("launches per layer", found["per_layer"]), ("outside the layers", found["others"])):
        print(f"{title}: {sum(launches.values())} ({', '.join(f'{name} {n}' for name, n in launches.items())})")
    for name, times in found["host"].items():
        print(f"{name}: begin {times['begin_us']:.0f} us, finish {times['finish_us']:.0f} us")
