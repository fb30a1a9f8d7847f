"""Percentiles of `ferrum-rpc bench`: exact while every sample is kept, fair when they are thinned out."""

import random

import pytest

from ferrum_rpc.bench.stats import Samples


def test_percentiles_are_samples_by_nearest_rank():
    samples = Samples()
    for each in random.Random(1).sample(range(1, 1001), 1000):
        samples.add(each / 1000)
    assert samples.milliseconds() == pytest.approx(
        {"p50": 500, "p90": 900, "p99": 990, "p99_9": 999, "max": 1000, "mean": 500.5}
    )
    assert not samples.thinned


def test_memory_is_bounded_and_late_samples_count_as_much_as_early_ones():
    samples = Samples(limit=1000)
    for each in range(20_000):
        samples.add(each / 20_000)
    assert samples.thinned and len(samples.kept) == 1000
    figures = samples.milliseconds()
    assert figures["p50"] == pytest.approx(500, abs=60)  # four deviations of a median of 1000
    assert (samples.count, figures["max"], figures["mean"]) == (20_000, 999.95, pytest.approx(499.975))


def test_a_percentile_of_few_samples_is_one_of_them_and_of_none_there_is_none():
    samples = Samples()
    assert samples.milliseconds() == {}
    for count in (1, 2, 3):
        samples.add(count / 1000)
        figures = samples.milliseconds()
        assert (figures["p50"], figures["p99_9"]) == pytest.approx(((count + 1) // 2, count))
