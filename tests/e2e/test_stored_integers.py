"""A quantized checkpoint over a port: held as it is stored, unless its server is told to expand it."""

from __future__ import annotations

import numpy as np
import pytest

from ferrum_rpc.client import ExecutorClient, FullLogits, Greedy
from ferrum_rpc.config import ModelSettings
from ferrum_rpc.errors import LayoutMismatch
from ferrum_rpc.models.native_linear import PairFactory
from tests.quantized.make import SAMPLES
from tests.support.harness import made_or_skip
from tests.support.serving import serve_model

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("gptq-4", "gptq"),  # columns in an order of their own
        ("gguf-q4_k_m", "q4_k,q6_k,q5_0,q8_0"),  # parts of several kinds
        ("ct-w4a16-mxfp4", "compressed-tensors"),
    ],
)
async def test_a_server_holds_what_the_file_stores(kind: str, told: str) -> None:
    made_or_skip(PairFactory)
    pytest.importorskip("gguf")
    config = ModelSettings(str(SAMPLES / kind), device="cpu", kv_blocks=64)
    expanded = ModelSettings(str(SAMPLES / kind), device="cpu", dtype="bfloat16", kv_blocks=64)
    async with (
        serve_model(config) as stored,
        serve_model(config) as twin,
        serve_model(expanded) as other,
        ExecutorClient(stored.target) as client,
        ExecutorClient(twin.target) as alike,
        ExecutorClient(other.target) as unlike,
    ):
        about, theirs = await client.info(), await unlike.info()
        assert about.model.weight_dtype == told
        assert theirs.model.weight_dtype == "bfloat16"
        assert about.limits.exact_span_tokens == 32
        async with client.sequence() as whole, client.sequence() as pieces, unlike.sequence() as elsewhere:
            row = (await whole.prefill(PROMPT, FullLogits())).logits
            for token in PROMPT[:-1]:
                await pieces.prefill([token])
            assert np.array_equal((await pieces.decode(PROMPT[-1], FullLogits())).logits, row)
            near = (await elsewhere.prefill(PROMPT, FullLogits())).logits
            assert 0 < np.linalg.norm(near - row) < 0.03 * np.linalg.norm(near)
            token = (await whole.decode(7, Greedy())).token
            moved, refused = alike.sequence(), unlike.sequence()
            with pytest.raises(LayoutMismatch):  # its keys and values are others
                await pieces.move_to(refused)
            await pieces.move_to(moved)
            assert (await moved.decode(7, Greedy())).token == token
            await moved.release()
        for served in (stored, twin, other):
            await served.check()
