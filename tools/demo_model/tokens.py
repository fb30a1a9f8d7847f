"""The byte tokenizer: id == byte value for 0..255, then eight special tokens.

It is an ordinary `tokenizer.json` (byte-level pre-tokenizer and decoder around a BPE without merges), so any program
that reads Hugging Face tokenizers reads this one. This module knows nothing of text sources or models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

END_OF_TEXT = 256
"""Stands between documents: beginning and end of sequence at once."""

SPECIAL = ("<|endoftext|>", "<|pad|>", *(f"<|reserved_{at}|>" for at in range(6)))
VOCABULARY = 256 + len(SPECIAL)
"""264 ids: a multiple of eight, for the matrix kernels."""


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary, as GPT-2 defined it.

    >>> alphabet = byte_alphabet()
    >>> alphabet[65], alphabet[32], len(set(alphabet))
    ('A', 'Ġ', 256)
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + shifted.index(byte)) for byte in range(256)]


def tokenizer_json() -> dict[str, Any]:
    """The contents of `tokenizer.json`."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": 256 + at,
                "content": name,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for at, name in enumerate(SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {character: byte for byte, character in enumerate(byte_alphabet())},
            "merges": [],
        },
    }


def write(folder: Path, max_length: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[0],
        "pad_token": SPECIAL[1],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    text = json.dumps(tokenizer_json(), ensure_ascii=False, indent=1)
    (folder / "tokenizer.json").write_text(text + "\n", "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def encode_documents(documents: list[str]) -> bytes:
    """All documents as little-endian 16-bit ids, each after an end-of-text id (so the stream starts with one)."""
    out = bytearray()
    for document in documents:
        ids = bytearray(2 * (len(document) + 1))
        ids[0:2] = END_OF_TEXT.to_bytes(2, "little")
        ids[2::2] = document.encode("ascii")
        out += ids
    return bytes(out)
