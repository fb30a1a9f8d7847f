"""Sampling: the right distribution, and noise that belongs to the request alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrum_rpc.client import Capability, ExecutorInfo, FullLogits, Greedy, Sampler, Sampling, TopTokens
from ferrum_rpc.client.sampling import best, choose, uniform
from ferrum_rpc.core import DeviceInfo, Limits, ModelInfo

LIMITS = Limits(64, 512, 100, 100, 1 << 20, 1 << 20, 64, 64, 512, 0)
MODEL = ModelInfo("m", "a", 256, 128, 1, 1, 1, 1, 1, 0, "f", "f", 1)
INFO = ExecutorInfo("v", 1, 1, "i", MODEL, 16, 8, LIMITS, frozenset(Capability), DeviceInfo("cpu", "", 0, 1, "torch"))
ROW = np.array([1.0, 3.0, 2.0, 3.0, -1.0], np.float32)
logit_rows = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=50).map(lambda row: np.array(row, np.float32))


def distribution(candidates: Any, sampling: Sampling, draws: int = 4000) -> dict[int, float]:
    tokens = [choose(candidates, sampling, (at + 0.5) / draws) for at in range(draws)]
    return {token: tokens.count(token) / draws for token in set(tokens)}


def test_the_best_of_a_row_come_by_falling_logit_and_rising_id() -> None:
    ids, logits = best(ROW, 3)
    assert ids.tolist() == [1, 3, 2]
    assert logits.tolist() == [3.0, 3.0, 2.0]
    assert best(ROW, 0)[0].tolist() == [1, 3, 2, 0, 4]


@settings(deadline=None)
@given(logit_rows, st.integers(0, 60))
def test_the_best_of_a_row_are_those_of_a_full_sort(row: np.ndarray, k: int) -> None:
    expected = sorted(range(len(row)), key=lambda token: (-row[token], token))[: k or None]
    assert best(row, k)[0].tolist() == expected


def test_tokens_are_drawn_with_the_probabilities_of_the_softmax() -> None:
    sampling = Sampling(temperature=0.7, top_k=0, top_p=1.0)
    scaled = np.exp(ROW.astype(np.float64) / 0.7)
    for token, share in distribution(best(ROW, 0), sampling).items():
        assert share == pytest.approx(scaled[token] / scaled.sum(), abs=1e-3)


def test_top_k_keeps_the_k_best() -> None:
    assert set(distribution(best(ROW, 0), Sampling(top_k=2, top_p=1.0))) == {1, 3}


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    candidates = np.arange(4), np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    for p, kept in ((0.4, 1), (0.5, 1), (0.51, 2), (0.79, 2), (0.81, 3), (1.0, 4)):
        assert len(distribution(candidates, Sampling(temperature=1, top_k=0, top_p=p))) == kept, p


@settings(deadline=None)
@given(logit_rows, st.floats(0.05, 5), st.integers(0, 60), st.floats(0.01, 1), st.floats(0, 1, exclude_max=True))
def test_a_draw_is_always_one_of_the_candidates(row: np.ndarray, t: float, k: int, p: float, noise: float) -> None:
    candidates = best(row, k)
    assert choose(candidates, Sampling(temperature=t, top_k=k, top_p=p), noise) in candidates[0]


@settings(deadline=None)
@given(logit_rows)
def test_with_hardly_any_temperature_the_best_token_is_drawn(row: np.ndarray) -> None:
    token = choose(best(row, 0), Sampling(temperature=1e-4, top_k=0, top_p=1.0), 0.5)
    assert row[token] == pytest.approx(row.max(), abs=1e-2)


def test_noise_depends_on_seed_request_and_position_and_on_nothing_else() -> None:
    numbers = [uniform(seed, request, at) for seed in range(3) for request in range(3) for at in range(50)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= each < 1 for each in numbers)
    assert abs(np.mean(numbers) - 0.5) < 0.05
    assert uniform(1, 2, 3) == uniform(1, 2, 3)


@pytest.mark.parametrize(
    ("sampling", "kind"),
    [
        (Sampling(temperature=0), Greedy()),
        (Sampling(top_k=1), Greedy()),
        (Sampling(top_k=40), TopTokens(40)),
        (Sampling(top_k=100), TopTokens(100)),
        (Sampling(top_k=101), FullLogits()),
        (Sampling(top_k=0), FullLogits()),
    ],
)
def test_the_smallest_answer_that_suffices_is_asked_for(sampling: Sampling, kind: Any) -> None:
    assert Sampler(sampling, INFO).output.kind == kind


def test_an_executor_without_full_rows_is_asked_for_all_the_candidates_it_gives() -> None:
    info = replace(INFO, capabilities=frozenset({Capability.OUTPUT_TOP_TOKENS}))
    assert Sampler(Sampling(top_k=0), info).output.kind == TopTokens(100)


def test_a_step_asks_for_no_more_rows_than_an_answer_carries() -> None:
    assert Sampler(Sampling(top_k=0), INFO).rows_per_answer == (1 << 20) // (512 + 4 * 256)
    tiny = replace(INFO, limits=replace(LIMITS, max_response_bytes=1))
    assert Sampler(Sampling(), tiny).rows_per_answer == 1


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.5}, {"seed": -1}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="are needed"):
        Sampling(**wrong)
