"""Runs every kernel with the first allocation failing, then the second, and so on, and prints what came of it as JSON.

For test_native_memory.py, in a process where failing_allocator.c is preloaded.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os

import numpy as np
import torch

from ferrum_rpc.attention.geometry import BatchGeometry
from ferrum_rpc.attention.native_paged import NativePagedAttention
from ferrum_rpc.core import AttentionSpec
from ferrum_rpc.models.fused_ops import NativeFusedOps
from ferrum_rpc.models.layers import Layer, NativeLayers
from ferrum_rpc.models.native_linear import ByteFactory, PairFactory
from ferrum_rpc.models.spec import ModelSpec

SPEC = ModelSpec.from_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
    }
).layers[0]


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()


def attention():
    spec, cache = AttentionSpec(4, 2, 32, 0.2), draw(2, 64, 16, 2, 32)
    table = np.arange(64, dtype=np.int32)
    geometry = BatchGeometry.build(16, [0, 1000], [40, 1], [table, table])
    backend = NativePagedAttention([spec], [cache[0]], [cache[1]])
    return [backend.attend(0, draw(41, 4, 32), backend.plan(geometry))]


def pairs():
    made = PairFactory()(draw(32, 64), None)
    return made(draw(5, 64)), made.argmax(draw(5, 64))


def eights():
    made = ByteFactory()(draw(32, 64), None)
    return made(draw(5, 64)), made.argmax(draw(5, 64))


def layers():
    factory, norm = PairFactory(), torch.ones(1, 64)
    linears = tuple(factory(draw(rows, 64), None) for rows in (128, 64, 128, 64))
    layer = Layer(SPEC, NativeFusedOps(SPEC, torch.bfloat16), linears, 0, before_mixer=norm, before_mlp=norm)
    cache, table = draw(2, 4, 16, 1, 32), np.arange(4, dtype=np.int32)
    backend = NativePagedAttention([SPEC.mixer.spec], [cache[0]], [cache[1]])
    plan = backend.plan(BatchGeometry.build(16, [0], [3], [table]))
    hidden, cos, sin = draw(3, 64), torch.ones(1, 3, 1, 32), torch.ones(1, 3, 1, 16)
    return NativeLayers([layer]).forward(hidden, cos, sin, backend.native_step(plan)), hidden


def tried(task):
    """Each failure's error, and what is left when all succeed again."""
    process, errors, leaks = ctypes.CDLL(None), [], []
    watching, allowed, held = (ctypes.c_int.in_dll(process, name) for name in ("watching", "allowed", "held"))
    expected = task()
    watching.value = 1
    for count in itertools.count():
        allowed.value = count
        try:
            answer = task()
        except Exception as error:
            errors.append(type(error).__name__)
        else:
            break
        leaks.append(held.value)
    watching.value = 0
    return {"errors": errors, "leaks": [*leaks, held.value], "same": all(map(torch.equal, expected, answer))}


def main():
    torch.set_num_threads(1)
    tasks = {"attention": attention, "pairs": pairs, "layers": layers, "bytes": eights}
    found = {name: tried(task) for name, task in tasks.items()}
    os.environ["FERRUM_ISA"] = "avx2"  # rows of pairs are widened
    print(json.dumps(found | {f"{name} in AVX2": tried(tasks[name]) for name in ("attention", "pairs")}))


if __name__ == "__main__":
    main()
