"""Hashes of blocks are what others can compute too: a router in any language."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ferrum_rpc.client import PrefixIndex
from ferrum_rpc.client.info import AdapterInfo
from ferrum_rpc.client.prefixes import PrefixEvents
from ferrum_rpc.prefix_hash import chained, root_of

VECTORS = json.loads((Path(__file__).parents[2] / "docs/prefix_hashes.json").read_text(encoding="utf-8"))["cases"]


@pytest.mark.parametrize("case", VECTORS)
def test_the_published_examples_are_right(case: dict[str, Any]) -> None:
    """Computed here from the contract's words, and by the code."""
    named = case["adapter"].encode()
    model, salt = bytes.fromhex(case["fingerprint"]), bytes.fromhex(case["salt"])
    content = model + len(named).to_bytes(4, "little") + named + salt
    root = blake2b(content, digest_size=16, person=b"ferrum-rpc chain").digest()
    parent, expected = root, []
    size, tokens = case["block_size"], case["token_ids"]
    for first in range(0, len(tokens) // size * size, size):
        ids = b"".join(each.to_bytes(4, "little") for each in tokens[first : first + size])
        parent = blake2b(parent + ids, digest_size=16).digest()
        expected.append(parent.hex())
    assert (root.hex(), expected) == (case["root"], case["blocks"])
    assert root_of(model, salt, case["adapter"]) == root
    found = chained(root, np.array(tokens, np.int32), size)
    assert [each.hex() for each in found] == expected


def test_what_decides_over_the_content_and_where_it_stands_counts() -> None:
    model, tokens = bytes(range(32)), np.arange(4, dtype=np.int32)
    roots = [root_of(*key) for key in ((model, b""), (bytes(32), b""), (model, b"salt"), (model, b"", "salt"))]
    roots += [root_of(model, b"lt", "sa"), next(chained(roots[0], tokens, 4))]
    assert len({next(chained(each, tokens, 4)) for each in roots}) == len(roots)


def test_an_index_knows_the_beginnings_that_are_there() -> None:
    index = PrefixIndex(bytes(32), 4)
    prompt = list(range(12))
    first, second = index.hashes(prompt)  # the last token is computed always
    index.apply(PrefixEvents(1, "a", ((second, True),), anew=True, gap=False))
    assert index.match(prompt) == 0, "what follows is of no use without its beginning"
    index.apply(PrefixEvents(2, "a", ((first, True),), anew=False, gap=False))
    assert [index.match(prompt), index.match(prompt[:9]), index.match(prompt[:8])] == [8, 8, 4]
    assert index.match(np.array(prompt)) == 8
    adapted = AdapterInfo("s", rank=4, nbytes=1, sequences=0, fingerprint=bytes(range(32)))
    assert index.match(prompt, salt=b"s") == index.match(prompt, adapter=adapted) == index.match([7, *prompt]) == 0
    root = root_of(adapted.fingerprint, b"", "s")
    assert [*index.hashes(prompt, adapter=adapted)] == [*chained(root, np.arange(8, dtype=np.int32), 4)]
    index.apply(PrefixEvents(3, "a", ((second, False),), anew=False, gap=False))
    assert (index.match(prompt), len(index)) == (4, 1)
    index.apply(PrefixEvents(4, "b", (), anew=True, gap=True))
    assert (index.match(prompt), len(index)) == (0, 0)
