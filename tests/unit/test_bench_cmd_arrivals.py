"""When steps are due: an open loop's clock waits for nobody."""

import itertools
import time
from dataclasses import replace

import pytest

from ferrum_rpc.bench.arrivals import Arrivals, due_times
from tests.unit.test_bench_cmd_options import workload as workload_of


def workload(**changes):
    """A closed loop without an end, but for the changes; an open one has steps at a fixed distance."""
    return replace(workload_of(), **{"seconds": None, "arrivals": "fixed"} | changes)


async def handed_out(arrivals):
    due = []
    while (at := await arrivals.next()) is not None:
        due.append(at)
    return due


async def test_a_closed_loop_hands_out_the_steps_and_no_more():
    began = time.perf_counter()
    due = await handed_out(Arrivals(workload(steps=3), began))
    assert len(due) == 3 and began <= due[0] <= due[1] <= due[2] <= time.perf_counter()


async def test_a_closed_loop_ends_with_its_time():
    assert await handed_out(Arrivals(workload(seconds=1.0), time.perf_counter() - 1)) == []


async def test_steps_that_were_missed_keep_their_due_times():
    began = time.perf_counter() - 1
    due = await handed_out(Arrivals(workload(rate=10.0, steps=3), began))
    assert due == pytest.approx([began, began + 0.1, began + 0.2])


async def test_no_step_is_handed_out_before_it_is_due():
    arrivals = Arrivals(workload(rate=200.0, steps=4), time.perf_counter())
    while (due := await arrivals.next()) is not None:
        assert time.perf_counter() >= due


async def test_what_was_due_before_the_end_and_found_no_caller_is_counted():
    began = time.perf_counter() - 1
    arrivals = Arrivals(workload(rate=5.0, seconds=1.0), began)
    assert await handed_out(arrivals) == []
    assert arrivals.unsent == 5


def test_arrivals_by_poisson_have_the_rate_and_depend_on_the_seed_alone():
    def first(seed):
        return list(itertools.islice(due_times(workload(rate=100.0, arrivals="poisson", seed=seed), 0.0), 4000))

    due = first(1)
    assert due == first(1) != first(2)
    gaps = [after - before for before, after in itertools.pairwise(due)]
    assert min(gaps) > 0
    assert due[-1] == pytest.approx(40, rel=0.07)  # four deviations
