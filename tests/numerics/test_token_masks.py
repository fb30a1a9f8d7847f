"""Masked draws against transformers' processors with the same mask, C against torch, and what a mask never lets in."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ferrum_rpc.core import Greedy, MaskRows, Sample
from ferrum_rpc.sampling.masks import MIN_LOGIT, Masks, RowMask
from ferrum_rpc.sampling.rows import RowRequest
from ferrum_rpc.sampling.samplers import TorchSampler
from ferrum_rpc.wire.masks import id_of, pack_mask
from tests.numerics.test_draws import check_counts, filters_of
from tests.support.draws import logits
from tests.support.rows import columns_of, counted, selected, tokens_of


def random_mask(vocabulary, share, seed):
    allowed = np.random.default_rng(seed).random(vocabulary) < share
    allowed[seed % vocabulary] = True
    return allowed


def words_of(allowed):
    return torch.frombuffer(bytearray(pack_mask(allowed)), dtype=torch.int32)


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 65, 33_001])
def test_what_is_not_allowed_is_minus_infinite_and_the_rest_as_it_was(sampler, vocabulary):
    rows = logits(7, vocabulary, vocabulary)
    rows[3, :: max(1, vocabulary // 3)] = -torch.inf
    rows[4, vocabulary // 2] = torch.nan
    masks = {
        row: random_mask(vocabulary, share, row) for row, share in ((0, 0.0), (1, 1.0), (3, 0.5), (4, 0.9), (6, 0.1))
    }
    expected = rows.clone()
    for row, allowed in masks.items():
        expected[row] = torch.where(torch.from_numpy(allowed), rows[row].clamp(min=MIN_LOGIT), -torch.inf)
    for given in (masks, dict.fromkeys(range(7), masks[0])):
        changed = rows.clone()
        sampler.forbid(changed, [RowMask(row, words_of(allowed)[None]) for row, allowed in given.items()])
        if given is masks:
            torch.testing.assert_close(changed, expected, rtol=0, atol=0, equal_nan=True)
        else:
            assert (changed[:, ~masks[0]] == -torch.inf).all() and (changed[:, masks[0]] >= MIN_LOGIT).sum() >= 6


def by_transformers(row, allowed, sample, history):
    """The probabilities that transformers' own processors leave, in its order."""
    from transformers.generation import logits_process as theirs

    filters = theirs.LogitsProcessorList()
    if sample.bias:
        filters.append(theirs.SequenceBiasLogitsProcessor([[[token], value] for token, value in sample.bias]))
    if sample.repetition_penalty != 1:
        filters.append(theirs.RepetitionPenaltyLogitsProcessor(sample.repetition_penalty))
    filters.append(theirs.PrefixConstrainedLogitsProcessor(lambda *_: np.flatnonzero(allowed).tolist(), 1))
    if sample.temperature:
        filters += filters_of(sample.temperature, sample.top_k, sample.top_p, sample.min_p)
    return filters(torch.from_numpy(history.astype(np.int64))[None], row[None].double())[0]


def drawn(row, count, sample, allowed, sampler, *, history=None):
    """``count`` draws from one row, at as many positions, through what a step runs."""
    kind = replace(sample, mask=b"m" * 32)
    masks = Masks(torch.device("cpu"))
    masks.change([(b"m" * 32, pack_mask(allowed))], [])
    past = None if history is None else counted(history, len(history))
    requests = [RowRequest(each, 1, kind, each, past) for each in range(count)]
    return np.concatenate([*map(tokens_of, selected(row.expand(count, -1), requests, sampler, masks))])


HOW = (
    {},
    {"temperature": 0.5, "top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"temperature": 1.5, "top_k": 12, "top_p": 0.8, "min_p": 0.05, "bias": ((3, 2.0), (11, -1.0), (4, 50.0))},
)


@pytest.mark.parametrize("how", HOW, ids=str)
def test_masked_draws_have_the_distribution_that_transformers_leaves(sampler, how):
    count, row, allowed = 8_000, logits(1, 48)[0], random_mask(48, 0.5, 3)
    allowed[4] = False  # what a bias of 50 would bring back
    sample = Sample(seed=5, **how)
    expected = by_transformers(row, allowed, sample, np.zeros(1)).softmax(-1).numpy()
    found = np.bincount(drawn(row, count, sample, allowed, sampler), minlength=48)
    assert not found[~allowed].any()
    check_counts(found, expected)


@pytest.mark.parametrize("seed", range(6))
def test_masked_greedy_is_transformers_arg_max(sampler, seed):
    row, allowed = logits(1, 300, seed)[0], random_mask(300, 0.3, seed)
    history = np.random.default_rng(seed).integers(0, 300, 40).astype(np.int32)
    bias = tuple((int(token), 3.0) for token in np.flatnonzero(~allowed)[:5])
    for how in ({}, {"bias": bias}, {"repetition_penalty": 1.8}, {"repetition_penalty": 0.6, "bias": bias}):
        sample = Sample(temperature=0.0, **how)
        expected = int(by_transformers(row, allowed, sample, history).argmax())
        penalised = history if sample.penalised else None
        assert drawn(row, 1, sample, allowed, sampler, history=penalised).tolist() == [expected]


def test_c_masks_and_draws_what_torch_does(native):
    rng, differ = np.random.default_rng(0), 0
    for seed in range(60):
        row, allowed = logits(1, 5_000, seed)[0], random_mask(5_000, rng.choice([0.001, 0.1, 0.9]), seed)
        sample = Sample(rng.choice([0, 0.7, 1.0]), int(rng.choice([0, 40])), float(rng.choice([1, 0.9])), seed=seed)
        one, other = (drawn(row, 8, sample, allowed, each) for each in (native, TorchSampler()))
        assert allowed[one].all() and allowed[other].all()
        differ += int((one != other).sum())
    assert differ <= 1  # a number may lie on the border of two tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_row_whatever_yields_a_forbidden_token(sampler, temperature):
    """Not one whose allowed tokens are all -inf, nor one with infinities and NaN among the forbidden ones."""
    allowed = np.zeros(100, bool)
    allowed[[40, 77]] = True
    for name, row in {
        "allowed are -inf": torch.zeros(100).index_fill(0, torch.tensor([40, 77]), -torch.inf),
        "all are -inf": torch.full((100,), -torch.inf),
        "forbidden are inf": torch.zeros(100).index_fill(0, torch.tensor([3, 5]), torch.inf),
        "forbidden are NaN": torch.zeros(100).index_fill(0, torch.tensor([3, 5]), torch.nan),
        "an allowed one is NaN": torch.zeros(100).index_fill(0, torch.tensor([77]), torch.nan),
        "an allowed one is inf": torch.zeros(100).index_fill(0, torch.tensor([77]), torch.inf),
    }.items():
        for how in ({}, {"top_k": 3}, {"top_p": 0.5}, {"bias": ((3, 100.0),)}):
            found = drawn(row, 5, Sample(temperature, seed=1, **how), allowed, sampler)
            assert allowed[found].all(), (name, how)


def test_rows_of_others_and_their_log_probabilities_do_not_change(sampler):
    """Log-probabilities are of the row as the model gave it; each row of an item has a mask of its own, or none."""
    table, masks = logits(9, 200), Masks(torch.device("cpu"))
    allowed = [random_mask(200, 0.2, seed) for seed in range(2)]
    content = [*map(pack_mask, allowed)]
    ids = [id_of(each) for each in content]
    masks.change(list(zip(ids, content, strict=True)), [])
    per_row = Sample(temperature=0.0, logprob=True, row_masks=(ids[0], b"", ids[1]))
    kinds = [
        (Greedy(logprob=True), 1),
        (per_row, 3),
        (Sample(seed=4), 2),
        (Sample(seed=4, logprob=True), 2),
        (Sample(temperature=0.0, mask=ids[1]), 1),
    ]

    def rows(kinds):
        requests, first = [], 0
        for kind, count in kinds:
            requests.append(RowRequest(first, count, kind, first))
            first += count
        return [*map(columns_of, selected(table, requests, sampler, masks))]

    masked = rows(kinds)
    unmasked = [replace(kind, mask=b"", row_masks=()) if isinstance(kind, Sample) else kind for kind, _ in kinds]
    plain = rows([(kind, count) for kind, (_, count) in zip(unmasked, kinds, strict=True)])
    for index in (0, 2, 3):
        assert all(np.array_equal(masked[index][name], plain[index][name]) for name in plain[index])
    log_softmax = table[1:4].log_softmax(-1)
    expected = []
    for row, mask in zip(log_softmax, (allowed[0], np.ones(200, bool), allowed[1]), strict=True):
        expected.append(int(row.where(torch.from_numpy(mask), -torch.inf).argmax()))
    assert masked[1]["token_ids"].tolist() == expected
    found = log_softmax[torch.arange(3), torch.tensor(expected)]
    np.testing.assert_allclose(masked[1]["logprobs"], found, rtol=0, atol=2e-6)
    with pytest.raises(KeyError):
        masks.change([], [ids[1]])
        masks.of(per_row, 0, 3)


def test_masks_of_items_that_adjoin_are_one_and_others_keep_their_rows():
    """Items in the order of their masks, out of it, of two blocks, and with rows that have none."""
    blocks = [np.stack([words_of(random_mask(200, 0.5, seed + row)).numpy() for row in range(6)]) for seed in (0, 10)]
    one, two = blocks
    cases = {
        (0,): [(0, MaskRows(one, 0, 2)), (2, MaskRows(one, 2, 3)), (5, MaskRows(one, 5, 1))],
        (0, 3, 4): [(0, MaskRows(one, 2, 2)), (3, MaskRows(one, 4, 1)), (4, MaskRows(one, 0, 2))],
        (0, 1): [(0, MaskRows(one, 0, 1)), (1, MaskRows(two, 1, 2))],
        (2, 4): [(0, MaskRows(two, 0, 1, at=2)), (4, MaskRows(two, 1, 1))],
        (1,): [(0, MaskRows(two, 0, 1, at=1)), (2, MaskRows(two, 1, 1))],
        (3,): [(3, MaskRows(one, 0, 2)), (5, MaskRows(one, 2, 0))],
    }
    for rows, items in cases.items():
        found = Masks(torch.device("cpu")).on_device(items)
        assert tuple(each.row for each in found) == rows
        by_row = {each.row + at: words for each in found for at, words in enumerate(each.words.numpy())}
        expected = {
            row + masks.at + at: masks.words[masks.first + at] for row, masks in items for at in range(masks.rows)
        }
        assert by_row.keys() == expected.keys()
        assert all(np.array_equal(by_row[row], expected[row]) for row in expected)
