"""A runner whose cache is in fp8, as far as an interpreter shows it: a GPU is what it is for, and is not asked here."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import FullLogits, OutputSpec, Positions, Span
from ferrum_rpc.engine.assembly import choose
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.wire.kv_stream import CacheLayout
from tests.support.rows import answered

TOKENS = np.arange(3, 33, dtype=np.int32)


def logits(runner, start: int, end: int) -> np.ndarray:
    output = OutputSpec(Positions.ALL, FullLogits())
    [columns] = answered(runner, Span(1, TOKENS[start:end], start, output, create=start == 0))
    return columns["logits"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there tests/gpu asks it")
def test_a_runner_with_a_cache_in_fp8(monkeypatch):
    monkeypatch.setattr(choose, "check_kv_dtype", lambda *_, **__: None)

    def runner(**settings):
        small = {"identity_kv_heads": 1, "kv_blocks": 16, "block_size": 4} | settings
        return build_runner(ModelSettings("identity", device="cpu", **small))

    exact, oracle = runner(), runner(attention="torch", kv_dtype="fp8")
    ours = runner(attention="triton", kv_dtype="fp8")
    info, told = ours.info, dict(ours.device.choices)
    assert (info.kv_dtype, info.kv_bytes_per_token) == ("fp8", 2 * 2 * (8 + 4))
    errors = [float(each.split("%")[0]) for each in told["kv_dtype=fp8"].split("by ")[1:]]
    assert told["attention=triton"] == "requested" and len(errors) == 2 and all(1 < each < 4 for each in errors)
    for first, last in ((0, 20), (20, 29), (29, 30)):
        answer, known, right = (logits(each, first, last) for each in (ours, oracle, exact))
        np.testing.assert_allclose(answer, known, rtol=0, atol=1e-5)
        assert 0.002 < np.sqrt(np.mean((answer - right) ** 2)) / right.std() < 0.05

    # moving: its parts are what the layout says, and no other cache has that layout
    layout, layers = CacheLayout.of(info), [0, 1]
    assert layout.model_fingerprint == CacheLayout.of(exact.info).model_fingerprint and layout != CacheLayout.of(
        exact.info
    )
    with ours.context():
        parts = ours.read_kv(1, 0, 20, layers)
    assert [[each.nbytes for each in layer] for layer in parts] == [[size for *_, size in layout.parts(0, 20)]] * 2
    with oracle.context():
        oracle.begin_import(2, TOKENS[:20], 0, 0, None)
        for layer in layers:
            oracle.write_kv(2, 0, 20, layer, parts[layer])
        oracle.commit_import(2)
        arrived = oracle.read_kv(2, 0, 20, layers)
    assert [[each.tobytes() for each in layer] for layer in arrived] == [[e.tobytes() for e in each] for each in parts]
