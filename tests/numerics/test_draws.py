"""Draws against their distribution, the filters against transformers', and what a draw may depend on."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ferrum_rpc.core import Sample
from ferrum_rpc.kv.tokens import count_tokens
from ferrum_rpc.sampling.draw import ACCEPT, philox, uniforms
from ferrum_rpc.sampling.penalties import Penalty
from ferrum_rpc.sampling.samplers import ALL_TIES, LIMITS, TorchSampler
from tests.support.draws import any_draws, draws, logits, spoiled
from tests.support.rows import counted

FILTERS = (
    {},
    {"temperature": 0.5},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"temperature": 1.5, "top_k": 12, "top_p": 0.8, "min_p": 0.05},
)


def filters_of(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """transformers' own, in its order."""
    from transformers.generation import logits_process as theirs

    filters = theirs.LogitsProcessorList([theirs.TemperatureLogitsWarper(temperature)])
    if top_k:
        filters.append(theirs.TopKLogitsWarper(top_k))
    if top_p < 1:
        filters.append(theirs.TopPLogitsWarper(top_p))
    if min_p:
        filters.append(theirs.MinPLogitsWarper(min_p))
    return filters


def probabilities(row, **how):
    filtered = filters_of(**how)(torch.zeros(1, 1, dtype=torch.int64), row[None].double())
    return filtered[0].softmax(-1).numpy()


def check_counts(found, expected):
    """Chi-square of counts [V] against probabilities [V], the rare tokens counted together."""
    assert not found[expected <= 0].any()
    expected = found.sum() * expected
    rare = expected < 5
    found, expected = (np.append(each[~rare], each[rare].sum()) for each in (found, expected))
    kept = expected > 0
    degrees = max(1, kept.sum() - 1)
    chi_square = ((found - expected)[kept] ** 2 / expected[kept]).sum()
    assert chi_square < degrees + 5 * math.sqrt(2 * degrees) + 1, (chi_square, degrees)


def words(*numbers):
    return tuple(np.array([each], np.uint64) for each in numbers)


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        (0, (0,) * 4, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (2**64 - 1, (2**32 - 1,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            0x299F31D0A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_generator_gives_the_known_answers_of_its_authors(key, counter, expected):
    assert [int(word[0]) for word in philox(words(key)[0], words(*counter))] == list(expected)


@pytest.mark.parametrize("how", FILTERS, ids=str)
def test_draws_have_the_distribution_that_the_filters_leave(sampler, how):
    count, row = 20_000, logits(1, 48)[0]
    drawn = sampler.draw(row.expand(count, -1), draws(count, **how)).numpy()
    check_counts(np.bincount(drawn, minlength=48), probabilities(row, **how))


@pytest.mark.parametrize("vocabulary", [1, 63, 64, 65, 33_000])
def test_c_draws_what_torch_draws(native, vocabulary):
    rows, given = spoiled(logits(200, vocabulary, seed=vocabulary)), any_draws(200, vocabulary, vocabulary)
    differ = native.draw(rows, given) != TorchSampler().draw(rows, given)
    assert differ.sum() <= 1  # a number may lie on the border of two tokens


@pytest.mark.parametrize("vocabulary", [1, 64, 65, 700])
def test_c_draws_from_a_part_of_a_row_what_torch_draws(native, vocabulary):
    """What is left of it, what that comes to, and where it passes a target."""
    rng, count, torch_sampler = np.random.default_rng(vocabulary), 120, TorchSampler()
    rows = logits(count, vocabulary, seed=vocabulary)
    rows[::2] = rows[::2].round()
    rows[3::5, ::2] = -torch.inf
    rows[7::20] = -torch.inf
    limits = np.zeros(count, LIMITS)
    limits["largest"] = rows.amax(-1).clamp(min=0).numpy() + rng.choice([0, 2], count)
    limits["temperature"] = rng.choice([0.3, 1, 5], count)
    limits["least"] = np.where(rng.random(count) < 0.3, -np.inf, rows.median(-1).values.numpy())
    limits["ties"] = rng.choice([0, 1, 5, ALL_TIES], count)
    limits["least_weight"] = rng.choice([0, 0.0123], count)
    weights, masses = (each.weigh(rows, limits) for each in (native, torch_sampler)), native.masses(rows, limits)
    found, expected = weights
    assert ((found > 0) == (expected > 0)).all()
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=0)
    torch.testing.assert_close(masses, expected.sum(-1, dtype=torch.float64), rtol=1e-5, atol=0)
    limits["target"] = np.where(rng.random(count) < 0.2, -1, masses.numpy() * rng.random(count))
    kept = (limits["target"] >= 0) & (masses > 0).numpy()
    assert (native.find(rows, limits) != torch_sampler.find(rows, limits))[kept].sum() <= 1


@pytest.mark.parametrize("vocabulary", [1, 64, 65, 700, 5_000])
def test_the_best_of_a_row_stand_in_their_order_whatever_is_beside_it(sampler, vocabulary):
    """With ties at every border, rows that are all one number, and rows that are no numbers."""
    rows = logits(9, vocabulary, seed=vocabulary)
    rows[::3] = rows[::3].round()
    rows[1], rows[4, ::2], rows[5, vocabulary // 2 :] = 3.0, -torch.inf, -0.0
    for odd in (None, torch.nan, torch.inf, -torch.inf):
        if odd is not None:
            rows[8] = odd
        for k in sorted({0, 1, min(5, vocabulary), min(70, vocabulary), min(700, vocabulary)}):
            ids, values, logsumexp = sampler.best(rows, k)
            torch.testing.assert_close(values, rows.gather(-1, ids), rtol=0, atol=0, equal_nan=True)
            assert (ids.dtype, logsumexp.dtype) == (torch.int64, torch.float32)
            known = slice(8) if odd is torch.nan else slice(9)
            assert torch.equal(ids[known], rows[known].sort(dim=-1, descending=True, stable=True).indices[:, :k])
            np.testing.assert_allclose(logsumexp, rows.double().logsumexp(-1), rtol=1e-6, atol=1e-5)
            for row in (1, 6):
                alone = sampler.best(rows[row : row + 1], k)
                assert torch.equal(alone[0][0], ids[row])
                if odd is None:
                    assert torch.equal(alone.logsumexp[0], logsumexp[row])


def test_a_draw_depends_on_its_row_seed_and_position_alone(sampler):
    rows, given = logits(40, 500), draws(40, top_p=0.9, seed=np.arange(40) % 3, position=np.arange(40) % 7)
    found = sampler.draw(rows, given)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    assert torch.equal(sampler.draw(rows[order], given[order.numpy()]), found[order])
    for index in (0, 17, 39):
        assert sampler.draw(rows[index : index + 1], given[index : index + 1]) == found[index]
    for other in ("seed", "position"):
        changed = given.copy()
        changed[other] += 100
        assert not torch.equal(sampler.draw(rows, changed), found)


def test_numbers_are_even_and_differ_by_seed_position_and_stream():
    count = np.arange(20_000, dtype=np.uint64)
    same = np.full_like(count, 2**63 + 5)
    taken = [uniforms(count, same), uniforms(same, count), uniforms(same, count, ACCEPT)]
    for numbers in taken:
        assert numbers.min() >= 0 and numbers.max() < 1
        parts = np.histogram(numbers, 20, (0, 1))[0]
        assert ((parts - 1000) ** 2 / 1000).sum() < 19 + 5 * math.sqrt(38)
    assert abs(np.corrcoef(taken)[np.triu_indices(3, 1)]).max() < 0.05


def test_what_cannot_be_drawn_from_takes_the_arg_max(sampler):
    rows = logits(6, 100)
    rows[0, 40] = rows[0, 20] = torch.inf
    rows[1, 30] = torch.nan
    rows[2] = -torch.inf
    rows[3, 99] = torch.nan
    assert sampler.draw(rows, draws(6, temperature=[1, 1, 1, 1, 0, 1e-45], top_k=3, top_p=0.5))[:5].tolist() == [
        20, 30, 0, 99, int(rows[4].argmax()),
    ]  # fmt: skip


def test_penalties_are_those_of_transformers_and_of_their_definition(sampler):
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    rng, rows = np.random.default_rng(4), logits(6, 90)
    rows[2, :5] = 0
    histories = [rng.integers(0, 90, length).astype(np.int32) for length in (1, 2, 40, 400, 400, 7)]
    given = [(1.3, 0.0, 0.0, 0), (0.5, 0.0, 0.0, 0), (2.0, 0.7, 0.25, 10), (1.0, -0.5, 1.5, 399), (1.1, 0.3, 0.1, 0)]
    expected = rows.clone()
    for row, (repetition, presence, frequency, start) in enumerate(given):
        history = torch.from_numpy(histories[row].astype(np.int64))
        expected[row] = RepetitionPenaltyLogitsProcessor(repetition)(history[None], rows[row : row + 1])[0]
        counts = torch.bincount(history[start:], minlength=90)
        expected[row] -= frequency * counts + presence * (counts > 0)
    found = rows.clone()
    penalties = [Penalty(row, count_tokens(histories[row], start), *rest) for row, (*rest, start) in enumerate(given)]
    sampler.penalise(found, penalties)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(found[5], rows[5])


class Operations(TorchDispatchMode):
    """Counts what torch is asked for."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_torch_penalises_many_rows_in_as_many_operations_as_two():
    """Each is a launch on a GPU."""
    rows, counts = logits(64, 90), []
    histories = [np.arange(row % 9 + 1, dtype=np.int32) for row in range(64)]
    penalties = [Penalty(row, count_tokens(each, 0), 1.1, 0.3, 0.1) for row, each in enumerate(histories)]
    for some in (penalties[:2], penalties):
        with Operations() as operations:
            TorchSampler().penalise(rows, some)
        counts.append(operations.count)
    assert 0 < counts[0] == counts[1]


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_penalties_have_the_bits_of_their_definition(sampler, data):
    """Token by token in float32: the product first, then frequency times the count, then presence."""
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng, vocabulary = np.random.default_rng(seed), data.draw(st.integers(1, 70))
    rows, count = logits(5, vocabulary, seed), data.draw(st.integers(1, 40))
    kind = Sample(
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.1, 0.7, 2.0])),
        presence_penalty=data.draw(st.sampled_from([0.0, 0.3, -1.1])),
        frequency_penalty=data.draw(st.sampled_from([0.0, 0.1, -0.7])),
        penalty_from=data.draw(st.integers(0, 45)),
    )
    history = rng.integers(0, vocabulary, count + 3).astype(np.int32)
    expected = rows.clone().numpy()
    numbers = (kind.repetition_penalty, kind.presence_penalty, kind.frequency_penalty)
    repetition, presence, frequency = map(np.float32, numbers)
    for row in (1, 2, 3):
        held = history[: count + row].tolist()
        for token in set(held):
            value = expected[row, token]
            value = value / repetition if value > 0 else value * repetition
            times = held[kind.penalty_from :].count(token)
            expected[row, token] = value - frequency * np.float32(times) - presence if times else value
    asked = counted(history, count, kind.penalty_from)
    penalties = [*asked.penalties(kind, count, range(1, 3), 1), *asked.penalties(kind, count, range(3, 4), 3)]
    assert [each.row for each in penalties] == [1, 2, 3]
    sampler.penalise(rows, penalties)
    assert rows.numpy().tobytes() == expected.tobytes()
