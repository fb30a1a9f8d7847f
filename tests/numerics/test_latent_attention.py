"""Attention over latents against its definition in float64, for mixes of short and long spans."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from ferrum_rpc.attention.backend import select_backend
from ferrum_rpc.attention.geometry import BatchGeometry
from ferrum_rpc.attention.latent import EXPANDED_BYTES, SHORT, LatentPagedAttention
from ferrum_rpc.attention.torch_paged import TorchPagedAttention
from ferrum_rpc.core import AttentionSpec, LatentShape
from ferrum_rpc.engine.assembly.choose import cache_layers
from ferrum_rpc.kv.store import KvStore
from tests.support.harness import CPU
from tests.support.poison import fill_slots

SIZE, HEADS = 4, 3
SHAPES = {
    "narrow values": LatentShape(32, 16, 16, 8),
    "wide values": LatentShape(48, 16, 8, 40),
    "DeepSeek's": LatentShape(512, 64, 128, 128),  # the kernel is compiled with its width
}
SPANS = {
    "decode": [(9, 1), (0, 1), (130, 1)],
    "short": [(0, SHORT), (40, 5), (7, 2)],
    "long": [(0, 70), (90, SHORT + 1)],
    "a tile": [(300, 290), (0, 300)],
    "both": [(0, 40), (9, 1), (33, 50), (60, 3)],
}


class Products:
    """The lifts of random matrices."""

    def __init__(self, shape: LatentShape, dtype: torch.dtype, generator: torch.Generator) -> None:
        self.shape = shape
        self.keys = torch.randn((HEADS, shape.plain, shape.rank), generator=generator).to(dtype) / shape.rank**0.5
        self.values = torch.randn((HEADS, shape.value_dim, shape.rank), generator=generator).to(dtype) / shape.rank**0.5

    def absorbed(self, query: torch.Tensor) -> torch.Tensor:
        first, rest = query.split_with_sizes((self.shape.rotated, self.shape.plain), -1)
        return torch.cat((first, torch.stack([torch.einsum("hp,hpr->hr", row, self.keys) for row in rest])), -1)

    def answers(self, found: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.einsum("hr,hvr->hv", row, self.values) for row in found])

    def expand(self, rows: torch.Tensor, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        rotated, latents = rows.split_with_sizes((self.shape.rotated, self.shape.rank), -1)
        heads = slice(first, first + len(keys))
        keys[..., : self.shape.rotated] = rotated
        keys[..., self.shape.rotated :] = torch.einsum("nr,hpr->hnp", latents, self.keys[heads])
        values.copy_(torch.einsum("nr,hvr->hnv", latents, self.values[heads]))


class Case:
    """Sequences whose rows are written, and queries of a step."""

    def __init__(self, shape: LatentShape, spans: list[tuple[int, int]], dtype: torch.dtype, backend: str) -> None:
        generator = torch.Generator().manual_seed(1)
        self.spec = AttentionSpec(HEADS, 1, shape.width, shape.key_dim**-0.5, latent=shape)
        self.lifts, self.spans = Products(shape, dtype, generator), spans
        lengths = [start + count for start, count in spans]
        blocks = sum(-(-length // SIZE) for length in lengths) + 1
        self.store = KvStore(cache_layers([self.spec], dtype, "auto"), blocks, SIZE, CPU)
        fill_slots(self.store, torch.arange(blocks * SIZE), float("nan"))
        made = partial(LatentPagedAttention, TorchPagedAttention)
        if backend == "native":
            name, _, made = select_backend(CPU, [self.spec], dtype)
            if name != "native":
                pytest.skip("no kernel of ours takes such rows here")
        self.attention = made([self.spec], self.store.keys, self.store.values)
        self.rows = [torch.randn((length, shape.width), generator=generator).to(dtype) for length in lengths]
        count = sum(count for _, count in spans)
        self.query = torch.randn((count, HEADS, shape.key_dim), generator=generator).to(dtype)
        free = iter(np.random.default_rng(0).permutation(blocks - 1) + 1)
        self.tables = [np.array([next(free) for _ in range(-(-length // SIZE))], dtype=np.int32) for length in lengths]
        for table, rows in zip(self.tables, self.rows, strict=True):
            written = BatchGeometry.build(SIZE, [0], [len(rows)], [table])
            self.attention.write(0, torch.from_numpy(written.slots), rows[:, None], rows[:, None])

    def attend(self, spans: list[tuple[int, int]], query: torch.Tensor, tables: list[np.ndarray]) -> torch.Tensor:
        geometry = BatchGeometry.build(SIZE, *map(list, zip(*spans, strict=True)), tables)
        return self.attention.attend_latent(0, query, self.lifts, self.attention.plan(geometry))

    def expected(self) -> torch.Tensor:
        """float64 [T, heads, value_dim]."""
        shape, found, at = self.lifts.shape, [], 0
        for (start, count), rows in zip(self.spans, self.rows, strict=True):
            rotated, latents = rows.double().split_with_sizes((shape.rotated, shape.rank), -1)
            plain = torch.einsum("nr,hpr->hnp", latents, self.lifts.keys.double())
            keys = torch.cat((rotated.expand(HEADS, -1, -1), plain), -1)
            values = torch.einsum("nr,hvr->hnv", latents, self.lifts.values.double())
            query = self.query[at : at + count].double().transpose(0, 1)
            scores = query @ keys.mT * self.spec.scale
            unseen = torch.arange(len(rows)) > torch.arange(start, start + count)[:, None]
            found.append((scores.masked_fill(unseen, -torch.inf).softmax(-1) @ values).transpose(0, 1))
            at += count
        return torch.cat(found)


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spans", SPANS)
def test_attention_is_its_definition(spans, shape, dtype, backend, monkeypatch):
    """A head at a time where there are many rows."""
    monkeypatch.setattr("ferrum_rpc.attention.latent.EXPANDED_BYTES", EXPANDED_BYTES >> 9)
    case = Case(SHAPES[shape], SPANS[spans], dtype, backend)
    found, expected = case.attend(case.spans, case.query, case.tables), case.expected()
    assert found.shape == expected.shape and found.dtype == dtype
    assert float((found.double() - expected).abs().max()) <= (2e-5 if dtype == torch.float32 else 3e-2)


def test_short_spans_have_the_bits_of_single_tokens_beside_long_ones():
    case = Case(SHAPES["narrow values"], [(0, 40), (9, 1), (60, SHORT), (33, 50)], torch.bfloat16, "native")
    assert case.attention.exact_span_tokens == SHORT
    found = case.attend(case.spans, case.query, case.tables)[41 : 41 + SHORT]
    singly = [
        case.attend([(60 + at, 1)], case.query[41 + at : 42 + at], [case.tables[2][: -(-(61 + at) // SIZE)]])
        for at in range(SHORT)
    ]
    assert torch.equal(found, torch.cat(singly))


def test_sinks_are_refused():
    case = Case(SHAPES["narrow values"], SPANS["decode"], torch.float32, "torch")
    with pytest.raises(ValueError, match="no sinks"):
        LatentPagedAttention(
            TorchPagedAttention, [case.spec], case.store.keys, case.store.values, sinks=[torch.zeros(HEADS)]
        )
