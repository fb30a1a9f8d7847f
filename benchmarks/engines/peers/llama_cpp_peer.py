"""llama.cpp as a peer, by the C interface that llama-cpp-python binds: batches of several sequences in one call.

``options``: ``type`` is ``bf16``, ``q8_0`` or ``q4_k_m``. The checkpoint is converted once by `gguf_file`, beside the
original.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Final

import llama_cpp
import numpy as np

from benchmarks.engines.peers.gguf_file import converted
from benchmarks.engines.peers.lines import Timed, run, timed

PROMPT_BATCH: Final = 512  # tokens of a prefill call: llama.cpp's own micro batch


class LlamaCpp:
    """One model; a context for each preparation."""

    def open(self, model: str, threads: int, options: dict[str, Any]) -> dict[str, Any]:
        kind = str(options.get("type", "bf16"))
        file = converted(Path(model), kind)
        llama_cpp.llama_backend_init()
        self._threads = threads
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {file.name}")
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._context: Any = None
        self._hybrid = llama_cpp.llama_model_is_hybrid(self._model)
        return {
            "name": f"llama.cpp {kind} (llama-cpp-python {llama_cpp.__version__})",
            "versions": {"llama-cpp-python": llama_cpp.__version__},
            "threads": threads,
            "weight_bytes": file.stat().st_size,
            "built_with": llama_cpp.llama_print_system_info().decode(),
        }

    def prepare(self, prompts: list[list[int]], room: int) -> None:
        """A context with room for the sequences, and their prompts in it."""
        self._length = len(prompts[0])
        self._new_context(len(prompts), self._length + room)
        for sequence, prompt in enumerate(prompts):
            self._feed(prompt, sequence, answered=False)
        self._kept = [self._saved(each) for each in range(len(prompts))] if self._hybrid else []

    def decode(self, tokens: list[list[int]], lead_in: int) -> Timed:

        def step(numbered: tuple[int, list[int]]) -> list[int]:
            position, fed = numbered
            self._run([(token, position, sequence, True) for sequence, token in enumerate(fed)])
            return self._chosen(len(fed))

        self._forget(self._length)
        return timed(step, enumerate(tokens, self._length), lead_in)

    def prefill(self, prompts: list[list[int]], lead_in: int) -> Timed:

        def step(prompt: list[int]) -> list[int]:
            self._feed(prompt, 0, answered=True)
            return self._chosen(1)

        self._new_context(1, len(prompts[0]))
        return timed(step, prompts, lead_in, lambda: self._forget(0))

    def _feed(self, prompt: list[int], sequence: int, *, answered: bool) -> None:
        """A prompt in calls of `PROMPT_BATCH`; ``answered``: the logits of its last token are wanted."""
        for start in range(0, len(prompt), PROMPT_BATCH):
            part = enumerate(prompt[start : start + PROMPT_BATCH], start)
            last = len(prompt) - 1 if answered else -1
            self._run([(token, position, sequence, position == last) for position, token in part])

    def _new_context(self, sequences: int, tokens: int) -> None:
        if self._context is not None:
            llama_cpp.llama_free(self._context)
        wanted = llama_cpp.llama_context_default_params()
        wanted.n_ctx = sequences * (-(-tokens // 256) * 256)  # a multiple of llama.cpp's padding for each sequence
        wanted.n_batch = wanted.n_ubatch = PROMPT_BATCH
        wanted.n_seq_max = sequences
        wanted.n_threads = wanted.n_threads_batch = self._threads
        self._context = llama_cpp.llama_init_from_model(self._model, wanted)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context for {sequences} sequences of {tokens} tokens")

    def _run(self, entries: list[tuple[int, int, int, bool]]) -> None:
        """One call: (token, position, sequence, whether its logits are wanted) of each entry."""
        batch = llama_cpp.llama_batch_init(len(entries), 0, 1)
        try:
            batch.n_tokens = len(entries)
            for index, (token, position, sequence, wanted) in enumerate(entries):
                batch.token[index] = token
                batch.pos[index] = position
                batch.n_seq_id[index] = 1
                batch.seq_id[index][0] = sequence
                batch.logits[index] = wanted
            status = llama_cpp.llama_decode(self._context, batch)
        finally:
            llama_cpp.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode answers {status}")

    def _chosen(self, rows: int) -> list[int]:
        address = ctypes.cast(llama_cpp.llama_get_logits(self._context), ctypes.POINTER(ctypes.c_float))
        logits = np.ctypeslib.as_array(address, shape=(rows, self._vocabulary))
        chosen: list[int] = logits.argmax(-1).tolist()
        return chosen

    def _forget(self, length: int) -> None:
        """All sequences, back to ``length``: that of the prompts, or 0. Recurrent states cannot be cut, and are put
        back."""
        memory = llama_cpp.llama_get_memory(self._context)
        if not self._hybrid:
            llama_cpp.llama_memory_seq_rm(memory, -1, length, -1)
            return
        llama_cpp.llama_memory_clear(memory, False)
        for sequence, kept in enumerate(self._kept if length else []):
            if not llama_cpp.llama_state_seq_set_data(self._context, kept, len(kept), sequence):
                raise RuntimeError("llama.cpp does not take its own states back")

    def _saved(self, sequence: int) -> Any:
        """All that the context has of a sequence."""
        size = llama_cpp.llama_state_seq_get_size(self._context, sequence)
        kept = (ctypes.c_uint8 * size)()
        llama_cpp.llama_state_seq_get_data(self._context, kept, size, sequence)
        return kept


if __name__ == "__main__":
    run(LlamaCpp())
