"""The demo models in `ferrum_rpc_demo/` are what their cards say: small, loadable, and they write English."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest

ASSETS = Path(__file__).parents[2] / "ferrum_rpc_demo"
TARGET, DRAFT = ASSETS / "demo", ASSETS / "demo-draft"
BOTH = pytest.mark.parametrize("folder", [TARGET, DRAFT], ids=["target", "draft"])
WORDS = frozenset((Path(__file__).parent / "demo_words.txt").read_text("utf-8").split())
PROMPTS = ("It was a fine morning, and ", "She looked at him ", "And the king said unto ")


def shapes(folder: Path) -> dict[str, list[int]]:
    """Tensor shapes out of the header of `model.safetensors`, read without any library."""
    with (folder / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    assert {entry["dtype"] for name, entry in header.items() if name != "__metadata__"} == {"BF16"}
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


def parameters(folder: Path) -> int:
    return sum(map(math.prod, shapes(folder).values()))


def config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    return found


def test_tokenizer_ids_are_the_utf8_bytes_and_decode_back() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    rng = random.Random(7)
    scalars = [*range(0xD800), *range(0xE000, 0x110000)]
    texts = ["".join(map(chr, rng.choices(scalars[:limit], k=500))) for limit in (128, 0x800, 0x8000, len(scalars))]
    for text in ["", " ", "  two  spaces\n\n\tand a tab\r\n", "naïve café — “quoted” 🙂", *texts]:
        ids = tokenizer.encode(text).ids
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("a<|endoftext|>b").ids == [97, 256, 98]
    assert tokenizer.decode([97, 256, 98]) == "ab"
    assert tokenizer.get_vocab_size() == config(TARGET)["vocab_size"] == config(DRAFT)["vocab_size"]
    assert (TARGET / "tokenizer.json").read_bytes() == (DRAFT / "tokenizer.json").read_bytes()


def test_assets_stay_small() -> None:
    assert sum(path.stat().st_size for folder in (TARGET, DRAFT) for path in folder.iterdir()) < 12_000_000
    target, draft = parameters(TARGET), parameters(DRAFT)
    assert 2_000_000 <= target <= 5_000_000
    assert 0.07 <= draft / target <= 0.13


@BOTH
def test_config_is_a_plain_grouped_query_qwen3(folder: Path) -> None:
    found = config(folder)
    assert found["architectures"] == ["Qwen3ForCausalLM"]
    assert found["model_type"] == "qwen3"
    assert found["tie_word_embeddings"] is True
    assert "lm_head.weight" not in shapes(folder)
    assert found["num_key_value_heads"] < found["num_attention_heads"]
    assert found["bos_token_id"] == found["eos_token_id"] == 256


@BOTH
def test_model_card_states_what_one_needs_to_judge_and_repeat_it(folder: Path) -> None:
    card = (folder / "README.md").read_text("utf-8")
    assert f"{parameters(folder):,}" in card
    assert re.search(r"^\| seed \| \d+ \|$", card, re.M)
    assert re.search(r"^\| training loss \| \d\.\d+ nats/byte", card, re.M)
    assert re.search(r"^\| validation loss \| \d\.\d+ nats/byte, \d\.\d+ bits/byte", card, re.M)
    assert "public domain" in card
    assert "license: apache-2.0" in card
    assert "python -m tools.demo_model.train" in card
    assert ("greedy acceptance" in card) == (folder == DRAFT)


@BOTH
def test_greedy_text_is_english_words(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # a local folder never waits for a network
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = [[256, *prompt.encode()] for prompt in PROMPTS]
    width = max(map(len, rows))
    ids = torch.tensor([[257] * (width - len(row)) + row for row in rows])
    out = model.generate(ids, attention_mask=(ids != 257).long(), max_new_tokens=120, do_sample=False)
    texts = [bytes(i for i in row.tolist() if i < 256).decode("ascii") for row in out]
    words = [word for text in texts for word in re.findall(r"[a-z']+", text.lower())[:-1]]
    known = [word for word in words if word.strip("'") in WORDS]
    assert len(words) > 60
    assert len(known) / len(words) >= 0.8, texts
