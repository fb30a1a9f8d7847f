"""Rows that ranks share: what is drawn from them, and told of them, is that of whole rows on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from ferrum_rpc.core import (
    Accept,
    FullLogits,
    Greedy,
    NextToken,
    OutputKind,
    RowLogprobs,
    Rows,
    Sample,
    SelectedTokens,
    TopTokens,
)
from ferrum_rpc.distributed.group import Group
from ferrum_rpc.models.shard import Shard
from ferrum_rpc.sampling import rows as sampling_rows
from ferrum_rpc.sampling.accept import Draft
from ferrum_rpc.sampling.draw import PARAMS_DTYPE, SORTED, Sampler, SamplingParams
from ferrum_rpc.sampling.masks import Masks
from ferrum_rpc.sampling.rows import RowRequest, select_rows
from ferrum_rpc.sampling.samplers import NativeSampler, ShardSampler, TorchSampler
from ferrum_rpc.sampling.vocab_parallel import VocabParallelSampler, VocabShard
from ferrum_rpc.wire.masks import pack_mask
from tests.numerics.test_token_masks import random_mask
from tests.support.draws import any_draws, draws, logits, spoiled
from tests.support.fake_device import fake_device
from tests.support.rows import columns_of, counted
from tests.unit.test_groups import GLOO, REASON, SHARED, joined


class Counting:
    """A `Group` that counts what a rank tells the others. ``turn``: held by the rank that computes; None: all may."""

    def __init__(self, group: Group, turn: Lock | None) -> None:
        self._group, self.rank, self.size, self.abort = group, group.rank, group.size, group.abort
        self._turn = turn
        self.told: list[int] = []

    def all_gather(self, part: Tensor) -> Tensor:
        self.told.append(part.nbytes)
        if self._turn is None:
            return self._group.all_gather(part)
        self._turn.release()
        try:
            with _disable_current_modes():
                return self._group.all_gather(part)
        finally:
            self._turn.acquire()


class World:
    """``size`` ranks, threads of this process, which share rows; and ``one`` that has them whole. ``on_device``: the
    ranks' rows lie on a device, what they tell each other on the host. Ranks then compute in turns: torch's modes of
    two threads at once ended the process now and then."""

    def __init__(self, groups: list[Group], make: Callable[[], ShardSampler], *, on_device: bool = False) -> None:
        self._turn = Lock() if on_device else None
        self.groups = [Counting(each, self._turn) for each in groups]
        self.size, self.one = len(groups), make()
        self._own = [make() for _ in groups]
        self._threads = ThreadPoolExecutor(self.size)

    def fits(self, vocabulary: int) -> bool:
        return Shard(self.size - 1, self.size).tokens(vocabulary)[0] < vocabulary

    def each(self, rows: Tensor, call: Callable[[Sampler, Tensor], Any]) -> list[Any]:
        """What ``call`` returns on every rank, of its sampler and its part of ``rows`` [R, V]."""
        vocabulary = rows.shape[-1]
        width = Shard(0, self.size).token_width(vocabulary)

        def on(rank: int) -> Any:
            part: Any = VocabShard(self.groups[rank], width, vocabulary)  # type: ignore[arg-type]
            first, end = Shard(rank, self.size).tokens(vocabulary)
            assert (part.first, part.end) == (first, end)
            sampler, own = VocabParallelSampler(self._own[rank], part), rows[:, first:end].contiguous()
            with torch.inference_mode():
                if self._turn is None:
                    return call(sampler, own)
                with self._turn, fake_device() as device:
                    return tree_map_only(Tensor, Tensor.cpu, call(sampler, own.to(device)))

        for group in self.groups:
            group.told.clear()
        futures = [self._threads.submit(on, rank) for rank in range(self.size)]
        wait(futures, 20, FIRST_EXCEPTION)
        if any(not each.done() or each.exception() for each in futures):
            for group in self.groups:  # nobody waits for one that failed
                group.abort()
        found = [each.result(5) for each in futures]
        assert all(group.told == self.groups[0].told for group in self.groups)
        return found

    def check_draws(self, rows: Tensor, given: SamplingParams) -> None:
        """The same tokens on every rank, and on one."""
        expected = self.one.draw(rows, given)
        for found in self.each(rows, lambda sampler, part: sampler.draw(part, given)):
            different = (found != expected).nonzero().squeeze(-1)
            assert not len(different), (given[different], expected[different], found[different])

    def check_kinds(self, vocabulary: int, count: int = 12) -> None:
        """Every kind of rows, so many of each, as on one rank."""
        requests = requests_of(count, vocabulary, np.random.default_rng(1))
        hidden = torch.arange(count * len(requests), dtype=torch.float32)[:, None]
        table = logits(len(hidden), vocabulary, 5).bfloat16().float()

        def rows(sampler: Sampler, part: Tensor) -> list[Rows]:
            return rows_of(requests, hidden, part, sampler)

        expected = rows(self.one, table)
        for found in self.each(table, rows):
            for request, one, ours in zip(requests, expected, found, strict=True):
                for name, column in one.block.columns.items():
                    here, there = (columns_of(each)[name] for each in (one, ours))
                    if column.dtype.kind == "f":
                        np.testing.assert_allclose(there, here, rtol=1e-6, atol=2e-6, err_msg=f"{request.kind} {name}")
                    else:
                        assert (here == there).all(), (request.kind, name)


@pytest.fixture(scope="module", params=[(3, TorchSampler), (4, NativeSampler)], ids=["3, torch", "4, native"])
def world(request) -> Iterator[World]:
    size, sampler = request.param
    with joined(GLOO if REASON else SHARED, size) as groups:
        try:
            yield World([*groups], sampler)
        except OSError as error:
            pytest.skip(f"no kernels: {error}")


@pytest.mark.parametrize("vocabulary", [385, 1000])
def test_draws_are_those_of_one_rank(world, vocabulary):
    """A thousand of them, with all filters."""
    world.check_draws(spoiled(logits(1000, vocabulary, vocabulary)), any_draws(1000, vocabulary, vocabulary))


def test_rows_are_put_together_only_where_candidates_do_not_tell(world):
    vocabulary, width = 9000, 4 * Shard(0, world.size).token_width(9000)
    steep, flat = logits(8, vocabulary, 1, 6.0), logits(8, vocabulary, 2, 0.01)
    for rows, how, whole in (
        (flat, {}, False),
        (flat, {"top_k": 50}, False),
        (flat, {"top_k": SORTED}, False),
        (flat, {"min_p": 0.2}, False),
        (steep, {"top_p": 0.9}, False),
        (flat, {"top_p": 0.05}, False),
        (flat, {"top_p": 0.9}, True),
        (flat, {"top_k": 5000}, True),
    ):
        world.check_draws(rows, draws(8, seed=7, **how))
        assert (max(world.groups[0].told) == 8 * width) is whole, how
    mixed = torch.cat([steep, flat])
    world.check_draws(mixed, draws(16, top_p=0.9))
    assert max(world.groups[0].told) == 8 * width, "rows that were decided were put together too"


VALUES = [0.0, -0.0, 1.0, 1.5, 2.0, 30.0, -3.0, 1e-4, -torch.inf]
RARE = [torch.nan, torch.inf, -3.4028234663852886e38]


@settings(max_examples=40)
@given(data=st.data())
def test_any_row_is_drawn_from_as_on_one_rank(world, data):
    vocabulary = data.draw(st.sampled_from([65, 193, 250, 256, 257]).filter(world.fits))
    values = VALUES[: data.draw(st.integers(1, len(VALUES)))] + data.draw(st.sampled_from([[], RARE]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rows = torch.from_numpy(rng.choice(np.array(values, np.float32), (24, vocabulary)))
    for row in range(0, 24, 3):
        rows[row, rng.permutation(vocabulary)[data.draw(st.integers(1, 4)) :]] = -torch.inf
    how = {
        "temperature": data.draw(st.sampled_from([1.0, 0.5, 3.0, 0.0])),
        "top_p": data.draw(st.sampled_from([1.0, 0.9, 0.5, 0.1, 0.999999, 0.0])),
        "min_p": data.draw(st.sampled_from([0.0, 0.3])),
        "top_k": data.draw(st.sampled_from([0, 1, 2, 7, 100, 130, vocabulary])),
    }
    world.check_draws(rows, draws(24, seed=rng.integers(0, 2**64, 24, dtype=np.uint64), **how))


@pytest.mark.parametrize("vocabulary", [385, 400])
def test_the_best_and_the_named_are_those_of_one_rank(world, vocabulary):
    rows = spoiled(logits(200, vocabulary))
    tokens = torch.randint(0, vocabulary, (200, 5), generator=torch.Generator().manual_seed(1))
    known = ~rows.isnan().any(-1)
    for k in (0, 1, 7, 128, 200, vocabulary):
        expected = world.one.best(rows, k)
        for found in world.each(rows, lambda sampler, part, k=k: sampler.best(part, k)):  # type: ignore[misc]
            assert torch.equal(found.token_ids[known], expected.token_ids[known])
            assert torch.equal(found.logits[known], expected.logits[known])
            torch.testing.assert_close(found.logsumexp, expected.logsumexp, rtol=1e-6, atol=1e-6, equal_nan=True)
    for found in world.each(
        rows, lambda sampler, part: (sampler.argmax(part), sampler.at(part, tokens.to(part.device)))
    ):
        assert torch.equal(found[0], rows.argmax(-1))
        torch.testing.assert_close(found[1], rows.gather(-1, tokens), rtol=0, atol=0, equal_nan=True)
    for found in world.each(rows, lambda sampler, part: sampler.whole(part)):
        torch.testing.assert_close(found, rows, rtol=0, atol=0, equal_nan=True)


BESIDE = RowLogprobs(5, (3, 250, 3))
KINDS: list[OutputKind] = [
    Greedy(),
    Greedy(logprob=True, logprobs=BESIDE),
    TopTokens(9),
    SelectedTokens((0, 299, 128, 127)),
    FullLogits(),
    NextToken(logprobs=BESIDE),
    Sample(seed=3, logprob=True, top_p=0.9),
    Sample(seed=4, logprobs=BESIDE, bias=((3, 2.0), (290, 3.0), (3, 1.0))),
    Sample(seed=5, bias=((140, 4.0), (1, -5.0)), repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    Sample(seed=6, repetition_penalty=0.8, frequency_penalty=2.0, penalty_from=9, top_k=20, logprob=True),
    Sample(seed=7, mask=b"m", temperature=0.7),
    Sample(seed=8, mask=b"m", repetition_penalty=1.2, bias=((299, 50.0),), min_p=0.05, logprob=True),
]


def requests_of(count: int, vocabulary: int, rng: np.random.Generator) -> list[RowRequest]:
    """Each kind with so many rows, and drafts. The id of a mask is its words."""
    made, first = [], 0
    only_last = np.zeros(vocabulary, bool)
    only_last[vocabulary - 1] = True
    masks = [pack_mask(each) for each in (only_last, random_mask(vocabulary, 0.02, 5), random_mask(vocabulary, 0.9, 6))]
    for kind in KINDS:
        history, scored = None, None
        if isinstance(kind, NextToken):
            scored = rng.integers(0, vocabulary, count).astype(np.int32)
        if isinstance(kind, Sample) and kind.penalised:
            tokens = rng.integers(0, vocabulary, 29 + count).astype(np.int32)
            history = counted(tokens, 30, kind.penalty_from)
        if isinstance(kind, Sample) and kind.mask:
            kind = replace(kind, mask=b"", row_masks=tuple([[*masks, b""][row % 4] for row in range(count)]))  # noqa: PLW2901
        made.append(RowRequest(first, count, kind, 30, history, scored))
        first += count
    for seed, how in enumerate(({}, {"top_p": 0.8}, {"top_k": 12, "min_p": 0.02}, {"temperature": 0.0})):
        width = 8
        ids = np.stack([rng.permutation(vocabulary)[:width] for _ in range(count - 1)]).astype(np.uint32)
        odds = rng.random((count - 1, width)).astype(np.float32)
        tokens = np.array([1, *ids[:, 0]], np.int32)
        kind = Accept(Sample(seed=seed, **how), ids, odds / odds.sum(-1, keepdims=True))
        made.append(RowRequest(first, count, kind.choice, 40, draft=Draft.of(kind, tokens)))
        first += count
    return made


def rows_of(requests: list[RowRequest], hidden: Tensor, part: Tensor, sampler: Sampler) -> list[Rows]:
    """Of ``part`` of the logits, whose rows ``hidden`` counts; on the device of the part."""
    device = part.device
    masks = Masks(device)
    named = {mask for each in requests if isinstance(each.kind, Sample) for mask in each.kind.masks if mask}
    masks.change([(mask, mask) for mask in named], [])
    head = lambda each: part[each[:, 0].long()].clone()  # noqa: E731
    return select_rows(hidden.to(device), requests, head, None, sampler, masks=masks)


@pytest.mark.parametrize("at_once", [256, 7])
def test_every_kind_of_rows_is_that_of_one_rank(world, at_once, monkeypatch):
    """Also where the head's slices cut through kinds, and with drafts that are accepted and rejected."""
    monkeypatch.setattr(sampling_rows, "HEAD_ROWS", at_once)
    world.check_kinds(300 + 100 * (world.size == 4))


def test_rows_may_lie_on_a_device():
    """What ranks tell each other lies on the host, where the groups that carry it are."""
    with joined(GLOO if REASON else SHARED, 2) as groups:
        world = World([*groups], TorchSampler, on_device=True)
        world.check_draws(spoiled(logits(150, 385)), any_draws(150, 385, 1))
        world.check_draws(logits(4, 3000, 2, 0.01), draws(4, seed=7, top_p=0.9))
        world.check_kinds(300, 3)
        world.each(logits(4, 3000, 2, 0.01), lambda sampler, part: sampler.filtered(part, draws(4, top_p=0.9)))
        for k in (0, 9):
            world.each(logits(2, 300), lambda sampler, part, k=k: sampler.best(part, k))  # type: ignore[misc]


def test_drafts_that_were_drawn_are_verified_as_on_one_rank(world):
    """From rows of which no candidates tell a top-p, too."""
    vocabulary, rng = 5000, np.random.default_rng(2)
    table = logits(12, vocabulary, 3, 0.3)
    table[:6] *= 20
    draft = requests_of(12, vocabulary, rng)[-3:]
    requests = [each._replace(first=0) for each in draft]

    hidden = torch.arange(12, dtype=torch.float32)[:, None]

    def rows(sampler: Sampler, part: Tensor) -> list[Rows]:
        return rows_of(requests, hidden, part, sampler)

    expected = [each.block["token_ids"].tolist() for each in rows(world.one, table)]
    for found in world.each(table, rows):
        assert [each.block["token_ids"].tolist() for each in found] == expected


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Greedy(), [16]),
        (Sample(), [4, 8, 8]),
        (Sample(temperature=0.7, min_p=0.1), [4, 8, 8]),
        (Sample(top_k=20), [80, 8, 8]),
        (Sample(top_k=500), [2000, 8, 8]),
        (Sample(top_p=0.9), [512, 8, 8, 8]),
        (TopTokens(10), [84]),
        (Greedy(logprob=True), [12]),
        (Sample(logprob=True), [4, 8, 8, 4, 4]),
        (FullLogits(), [4 * 2048]),
    ],
    ids=str,
)
def test_a_rank_tells_a_few_bytes_of_a_row(world, kind, told):
    """What docs/fleet.md has of it."""
    vocabulary = 2048 * world.size
    table = logits(3, vocabulary, 1, 8.0)
    world.each(
        table, lambda sampler, part: select_rows(part, [RowRequest(0, 3, kind)], lambda each: part, None, sampler)
    )
    assert [each / 3 for each in world.groups[0].told] == told
    assert PARAMS_DTYPE.itemsize == 32
