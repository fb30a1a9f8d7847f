"""llama.cpp's own converter writes GGUF files, its library quantizes them, and transformers 5.23.0 reads them.

Logits of llama.cpp itself, which rounds activations too, are compared with the oracle's here.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import torch
import transformers
from safetensors.torch import load_file

from tests.quantized.make import SHAPE, TOKENS, finish, folder
from tests.support.checkpoints import make_model
from tests.support.harness import error

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
WIDE = {"hidden_size": 256, "intermediate_size": 32}
KINDS = {
    "gguf-q8_0": ("qwen3", {}, 7),
    "gguf-q4_k_m": ("llama", WIDE | {"rope_parameters": LLAMA3}, 15),
    "gguf-q5_1": ("qwen2", {}, 9),
}
"""Of each the family, its shape, and llama.cpp's number of the file's type."""


def make(llama_cpp_folder: str) -> None:
    prepare_library(llama_cpp_folder)
    for name, (family, shape, kind) in KINDS.items():
        made = folder(name)
        made.mkdir()
        with tempfile.TemporaryDirectory() as scratch:
            original, plain, file = Path(scratch) / "original", Path(scratch) / "f32.gguf", made / "model.gguf"
            model = make_model(family, **SHAPE | shape)
            model.save_pretrained(original)
            convert(model, original, plain, "ALL_F32")
            options = llama_cpp.llama_model_quantize_default_params()
            options.ftype = kind
            assert not llama_cpp.llama_model_quantize(str(plain).encode(), str(file).encode(), ctypes.byref(options))
            read = transformers.AutoModelForCausalLM.from_pretrained(  # which reads no head_dim
                made, gguf_file="model.gguf", dtype=torch.float32, config=model.config
            )
        matrices = {
            name: tensor for name, tensor in read.state_dict().items() if tensor.dim() == 2 and name != "lm_head.weight"
        }
        finish(made, matrices, family, **shape)
        expected = load_file(made / "oracle.safetensors")["logits"]
        print(name, "llama.cpp differs by", error(logits(file), expected))


def prepare_library(llama_cpp_folder: str) -> None:
    """The converter can be imported from now on, and nothing is said that is no error."""
    sys.path[:0] = [llama_cpp_folder, f"{llama_cpp_folder}/gguf-py"]
    transformers.logging.set_verbosity_error()
    llama_cpp.llama_backend_init()


SAY_IT = ("llama", "granite", "smollm3", "cohere2")
"""Architectures whose converter writes the size of the vocabulary."""


def convert(model: Any, checkpoint: Path, file: Path, kind: str) -> None:
    """Write a file of a model in ``checkpoint`` by llama.cpp's converter."""
    import gguf
    from conversion import get_model_class

    def without_words(self) -> None:
        """There is no tokenizer: the file says so, and how many tokens there are."""
        self.gguf_writer.add_tokenizer_model("none")
        if self.gguf_writer.arch not in SAY_IT:
            self.gguf_writer.add_vocab_size(SHAPE["vocab_size"])

    writer = get_model_class(type(model).__name__)
    writer.set_vocab, writer.no_mtp = without_words, True
    with torch.inference_mode():
        writer(checkpoint, getattr(gguf.LlamaFileType, kind), file).write()


def logits(file: Path, tokens: Sequence[int] = TOKENS) -> torch.Tensor:
    """float32 [T, vocab] of ``tokens``, by llama.cpp."""
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
    assert model
    wanted = llama_cpp.llama_context_default_params()
    wanted.n_ctx = 256
    context = llama_cpp.llama_init_from_model(model, wanted)
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for index, token in enumerate(tokens):
        batch.token[index], batch.pos[index] = token, index
        batch.n_seq_id[index], batch.seq_id[index][0], batch.logits[index] = 1, 0, True
    assert not llama_cpp.llama_decode(context, batch)
    address = ctypes.cast(llama_cpp.llama_get_logits(context), ctypes.POINTER(ctypes.c_float))
    return torch.from_numpy(np.ctypeslib.as_array(address, shape=(len(tokens), SHAPE["vocab_size"])).copy())
