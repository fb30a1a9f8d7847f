"""R13: mutated headers, offsets, configurations and index files end in typed errors only, or in a model.

``FERRUM_FUZZ_ROUNDS`` mutations (500 unless told; 100,000 in ``make soak``), from ``FERRUM_FUZZ_SEED``.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil

import pytest
import torch

from ferrum_rpc.engine.assembly.loading import load_model
from ferrum_rpc.errors import InvalidRequest, NotSupported
from ferrum_rpc.models.linear import PlainLinear
from ferrum_rpc.weights.checkpoint import Checkpoint
from tests.quantized.make import SAMPLES
from tests.support.checkpoints import make_checkpoint
from tests.support.hf_families import make_family_checkpoint

ROUNDS = int(os.environ.get("FERRUM_FUZZ_ROUNDS", "500"))
SEED = int(os.environ.get("FERRUM_FUZZ_SEED", "20261120"))
QUANTIZED = ("gptq-4", "awq-4", "ct-w4a16-asymmetric", "ct-w8a8", "fp8-block", "bnb-nf4-nested", "bnb-int8")

VALUES = [
    None, True, -1, 0, 1, 2, 7, 2**31, 2**63, 2**64, 10**40, -(10**40), 0.5, 1e308, -1e308, 1e-320, "", "F32", "BF16",
    "U8", "..", "../x", "x.safetensors", "\0", "a" * 300, [], [0], [0, 0], [-1, 4], [2**63, 2**63], [[]], {}, {"a": 1},
    "gptq", "awq", "fp8", "compressed-tensors", "bitsandbytes", "int-quantized", "group", "I32", "F8_E4M3",
    "llama", "yarn", "llama3", "linear", "sliding_attention", ["sliding_attention", "full_attention"], "silu",
]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = []
    for family, shards in (("llama", 1), ("qwen3", 3), ("mistral", 2)):
        path = tmp_path_factory.mktemp(family)
        options = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 16, "head_dim": 8}
        rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
        extra = {"rope_parameters": rope} if family == "llama" else {}
        made.append(make_checkpoint(path / "original", family, shards=shards, **options, **extra))
    made.append(make_family_checkpoint(tmp_path_factory.mktemp("gemma3") / "original", "gemma3"))
    return made + [SAMPLES / kind for kind in QUANTIZED]


def mutate_bytes(rng: random.Random, content: bytes, limit: int) -> bytes:
    """Flip, overwrite, insert, delete or cut, mostly within the first ``limit`` bytes."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        if not data:
            break
        at = rng.randrange(min(limit, len(data)))
        kind = rng.randrange(6)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at : at + rng.randrange(1, 9)] = rng.randbytes(rng.randrange(9))
        elif kind == 2:
            data[at:at] = rng.choice((b"{", b"}", b"[", b'"', b"0", b"-", b",", b"\xff", b"9" * 5000))
        elif kind == 3:
            del data[at : at + rng.randrange(1, 40)]
        elif kind == 4:
            del data[rng.randrange(len(data)) :]
        else:
            data[:8] = rng.choice((0, 1, 2, len(data), 10**9, 2**63, 2**64 - 1)).to_bytes(8, "little")
    return bytes(data)


def mutate_tree(rng: random.Random, tree):
    """Replace, delete, rename or duplicate one node of a JSON tree."""
    node, path = tree, []
    while isinstance(node, dict | list) and node and (not path or rng.random() < 0.75):
        key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        path.append((node, key))
        node = node[key]
    value = copy.deepcopy(rng.choice(VALUES))
    if not path:
        return value
    parent, key = path[-1]
    kind = rng.randrange(6)
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(parent, dict):
        parent[rng.choice(("x", "", key + "x", "rope_scaling", "layer_types", "quantization_config"))] = parent.pop(key)
    elif kind == 2 and isinstance(node, int) and not isinstance(node, bool):
        parent[key] = node + rng.choice((-8, -4, -1, 1, 4, 8, node))
    else:
        parent[key] = value
    return tree


def mutate_header(rng: random.Random, content: bytes) -> bytes:
    length = int.from_bytes(content[:8], "little")
    header = json.dumps(mutate_tree(rng, json.loads(content[8 : 8 + length]))).encode()
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


def mutated(rng: random.Random, file, content: bytes) -> bytes:
    if file.suffix == ".safetensors":
        if rng.random() < 0.5:
            return mutate_header(rng, content)
        return mutate_bytes(rng, content, 8 + int.from_bytes(content[:8], "little"))
    if rng.random() < 0.7:
        tree = json.loads(content)
        for _ in range(rng.choice((1, 1, 2, 3))):
            tree = mutate_tree(rng, tree)
        return json.dumps(tree).encode()
    return mutate_bytes(rng, content, len(content))


def rewrite(file, content: bytes) -> None:
    """As a new file: ext4 writes one that was truncated to the disk when it is closed, which takes 20 ms."""
    file.unlink()
    file.write_bytes(content)


def test_mutated_checkpoints_end_in_typed_errors_or_load(folders, tmp_path):
    rng = random.Random(SEED)
    survived = 0
    work = [shutil.copytree(folder, tmp_path / str(number)) for number, folder in enumerate(folders)]
    for round_number in range(ROUNDS):
        folder = rng.choice(work)
        file = rng.choice(sorted(file for file in folder.iterdir() if file.name != "oracle.safetensors"))
        original = file.read_bytes()
        content = mutated(rng, file, original)
        rewrite(file, content)
        try:
            model = load_model(Checkpoint.open(folder), torch.float32, torch.device("cpu"), linear=PlainLinear)
            survived += 1
            assert model.info("x").parameters > 0
        except (InvalidRequest, NotSupported) as refusal:
            assert refusal.message and len(refusal.message) < 6000
            assert str(tmp_path) not in refusal.message
        except BaseException as error:
            raise AssertionError(f"seed {SEED}, round {round_number}: {file.name} raised {error!r}") from error
        finally:
            rewrite(file, original)
    assert survived < ROUNDS  # most mutations are fatal; a reader that accepts all of them checks nothing
