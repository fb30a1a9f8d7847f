"""The script that drives llama.cpp, against an engine that keeps its rules: positions follow on each other, logits come
for the rows that were asked for, in their order, and a context holds what it was made for."""

import ctypes
import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest

VOCABULARY = 32


class FakeEngine(ModuleType):
    """The part of llama_cpp's functions that the script calls. A row's arg-max is (token + position) mod the
    vocabulary."""

    __version__ = "0"
    llama_backend_init = llama_model_default_params = llama_context_default_params = staticmethod(SimpleNamespace)
    llama_model_load_from_file = staticmethod(lambda path, params: path.decode().endswith(".gguf"))
    llama_model_get_vocab = staticmethod(lambda model: model)
    llama_vocab_n_tokens = staticmethod(lambda vocab: VOCABULARY)
    llama_print_system_info = staticmethod(lambda: b"AVX")
    llama_get_memory = staticmethod(lambda context: "memory")

    def __init__(self):
        super().__init__("llama_cpp")
        self.lengths, self.freed, self.hybrid = {}, 0, False

    def llama_model_is_hybrid(self, model):
        return self.hybrid

    def llama_init_from_model(self, model, params):
        self.params, self.lengths = params, dict.fromkeys(range(params.n_seq_max), 0)
        return "context"

    def llama_free(self, _):
        self.freed += 1

    llama_batch_free = llama_free

    def llama_memory_seq_rm(self, memory, sequence, first, last):
        assert (sequence, last) == (-1, -1)
        assert not self.hybrid, "a state has no part that can be removed"
        self.lengths = {name: min(length, first) for name, length in self.lengths.items()}

    def llama_memory_clear(self, memory, data):
        self.lengths = dict.fromkeys(self.lengths, 0)

    def llama_state_seq_get_size(self, context, sequence):
        return 1

    def llama_state_seq_get_data(self, context, kept, size, sequence):
        kept[0] = self.lengths[sequence]

    def llama_state_seq_set_data(self, context, kept, size, sequence):
        self.lengths[sequence] = kept[0]
        return size

    def llama_batch_init(self, tokens, embedded, sequences):
        blank = {name: [0] * tokens for name in ("token", "pos", "n_seq_id", "logits")}
        return SimpleNamespace(**blank, seq_id=[[0] for _ in range(tokens)])

    def llama_decode(self, context, batch):
        assert batch.n_tokens <= self.params.n_batch
        rows = []
        for index in range(batch.n_tokens):
            [sequence], position = batch.seq_id[index], batch.pos[index]
            assert position == self.lengths[sequence] < self.params.n_ctx / self.params.n_seq_max
            self.lengths[sequence] += 1
            if batch.logits[index]:
                rows.append((batch.token[index] + position) % VOCABULARY)
        self.rows = (ctypes.c_float * (len(rows) * VOCABULARY))()
        for index, largest in enumerate(rows):
            self.rows[index * VOCABULARY + largest] = 1.0
        return 0

    def llama_get_logits(self, context):
        return ctypes.cast(self.rows, ctypes.POINTER(ctypes.c_float))


@pytest.fixture
def script(monkeypatch):
    engine = FakeEngine()
    monkeypatch.setitem(sys.modules, "llama_cpp", engine)
    files = ModuleType("gguf_file")
    files.converted = lambda folder, kind: folder / f"model.{kind}.gguf"
    monkeypatch.setitem(sys.modules, "benchmarks.engines.peers.gguf_file", files)
    monkeypatch.delitem(sys.modules, "benchmarks.engines.peers.llama_cpp_peer", raising=False)
    yield importlib.import_module("benchmarks.engines.peers.llama_cpp_peer"), engine
    sys.modules.pop("benchmarks.engines.peers.llama_cpp_peer", None)


@pytest.fixture(params=[False, True], ids=["attention", "hybrid"])
def peer(script, tmp_path, request):
    script[1].hybrid = request.param
    (tmp_path / "model.bf16.gguf").write_bytes(b"weights")
    found = script[0].LlamaCpp()
    assert found.open(str(tmp_path), 2, {"type": "bf16"})["weight_bytes"] == 7
    return found


def test_every_round_begins_where_the_prompts_ended(script, peer):
    peer.prepare([[1, 2, 3], [4, 5, 6]], room=8)
    for _ in range(2):
        step_s, last = peer.decode([[1, 2], [3, 4], [5, 6], [7, 8]], lead_in=2)
        assert len(step_s) == 2
        assert last == [(7 + 3 + 3) % VOCABULARY, (8 + 3 + 3) % VOCABULARY]
        assert script[1].lengths == {0: 7, 1: 7}


def test_prefill_takes_long_prompts_in_pieces_and_answers_for_the_last_token(script, peer):
    length = script[0].PROMPT_BATCH + 9
    step_s, last = peer.prefill([[1] * length, [2] * (length - 1) + [9]], lead_in=1)
    assert len(step_s) == 1 and last == [(9 + length - 1) % VOCABULARY]
    assert script[1].lengths == {0: length}


def test_a_new_preparation_frees_the_context_before(script, peer):
    peer.prepare([[1, 2]], room=4)
    batches = script[1].freed
    peer.prepare([[1, 2]] * 3, room=4)
    assert script[1].freed == batches + 1 + 3  # the context, and a batch for each prompt
    assert script[1].params.n_seq_max == 3
