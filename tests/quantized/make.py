"""Makes the folders of ``tests/quantized/samples``: tiny random checkpoints, each written by the library that users
write such files with, and what another reader makes of them.

None of these libraries is a requirement of this project. Once, by hand, in environments of their own beside torch
2.13.0, transformers 5.23.0, accelerate 1.15.0 and safetensors 0.8.0:

    python -m tests.quantized.make compressed_tensors   # compressed-tensors 0.20.0
    python -m tests.quantized.make bitsandbytes         # bitsandbytes 0.50.2
    python -m tests.quantized.make fp8                  # by a few lines here, read by transformers
    python -m tests.quantized.make gptqmodel            # gptqmodel 7.5.0
    python -m tests.quantized.make awq                  # by a few lines here, read by gptqmodel 7.5.0
    python -m tests.quantized.make gguf LLAMA_CPP       # gguf 0.19.0, llama-cpp-python 0.3.36, and the folder of its
                                                        # vendored llama.cpp, whose converter is taken
    python -m tests.quantized.make gguf_families LLAMA_CPP  # the same, into tests/quantized/families

A folder has the checkpoint, and ``oracle.safetensors``: of every matrix the first, the eighth and the last row as the
other reader makes them, and the logits of `TOKENS` of a transformers model with those matrices, in float64.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import make_model
from tests.support.harness import reference_logits

SAMPLES = Path(__file__).parent / "samples"
TOKENS = [3, 1, 4, 15, 9, 26, 5, 31]
ROWS = (0, 7, -1)
SHAPE = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "tie_word_embeddings": True,
}


def main() -> None:
    SAMPLES.mkdir(exist_ok=True)
    maker = importlib.import_module(f"tests.quantized.makers.{sys.argv[1]}")
    maker.make(*sys.argv[2:])


def folder(name: str) -> Path:
    """The empty folder of a sample."""
    made = SAMPLES / name
    shutil.rmtree(made, ignore_errors=True)
    return made


def finish(made: Path, matrices: dict[str, torch.Tensor], family: str = "llama", **shape: object) -> None:
    """Write what the other reader made, and the logits. ``matrices``: by name, all that differ from the original's."""
    model = make_model(family, **SHAPE | shape)
    state = model.state_dict()
    if (made / "model.safetensors").exists():
        for name, tensor in load_file(made / "model.safetensors").items():
            if name in state and tensor.dtype in (torch.float32, torch.float16, torch.bfloat16):
                state[name].copy_(tensor)  # perhaps rounded when it was written
    for name, matrix in matrices.items():
        assert name in state, name
        assert torch.isfinite(matrix).all(), name
        loss = (matrix.float() - state[name]).norm() / state[name].norm()
        assert loss < 0.25, (name, loss)
        state[name].copy_(matrix)
    logits = reference_logits(model, TOKENS, torch.float64)
    rows = {name: matrix[torch.tensor(ROWS) % len(matrix)].float().contiguous() for name, matrix in matrices.items()}
    save_file({"logits": logits.float().contiguous(), **rows}, made / "oracle.safetensors")
    for file in made.iterdir():
        if file.suffix not in (".safetensors", ".gguf") and file.name != "config.json":
            file.unlink()
    print(made.name, sum(file.stat().st_size for file in made.iterdir()), "bytes")


def layer_matrices(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The matrices of layers."""
    return {name: tensor for name, tensor in state.items() if ".layers." in name and name.endswith("proj.weight")}


def read_config(made: Path) -> dict:
    return json.loads((made / "config.json").read_text())


def edit_config(made: Path, **changes: object) -> None:
    config = read_config(made)
    (made / "config.json").write_text(json.dumps(config | changes, indent=1) + "\n")


def edit_tensors(made: Path, change) -> None:
    tensors = load_file(made / "model.safetensors")
    change(tensors)
    save_file({name: each.contiguous() for name, each in tensors.items()}, made / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    main()
