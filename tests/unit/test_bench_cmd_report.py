"""What `ferrum-rpc bench` says: figures that add up, and the notes without which they mislead."""

import io
import json
from functools import partial

import pytest

from ferrum_rpc.bench.display import progress, progress_line, show
from ferrum_rpc.bench.report import report
from ferrum_rpc.bench.stats import Stats
from ferrum_rpc.core import StepTiming
from ferrum_rpc.errors import KvBlocksExhausted, QueueFull
from tests.unit.test_bench_cmd_arrivals import workload as any_workload

workload = partial(any_workload, batch=4, in_flight=2, single=False, steps=100, warmup=5)


def measured(steps):
    """Steps of 10 ms each, one after the other: 1 ms in the queue, 6 ms in forward passes of two of them."""
    stats = Stats(phase="steps", began=100.0, attempts=steps)
    for step in range(steps):
        sent = 100 + step / 100
        stats.ended = sent + 0.01
        stats.answered(sent, sent, 4, StepTiming(step, 8, 8, 0.001, 0.006))
    return stats


def told(steps=100, stats=None, **changes):
    return report("host:1", None, workload(**changes), stats or measured(steps), interrupted=False)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(made, out=None):
    out = out or io.StringIO()
    show(made, out)
    return out.getvalue()


def test_rates_are_of_the_time_from_the_begin_to_the_last_answer():
    decode = told(200)["decode"]
    assert (decode["steps"], decode["tokens"]) == (200, 800)
    assert decode["seconds"] == pytest.approx(2.0)
    assert (decode["steps_per_s"], decode["tokens_per_s"]) == (pytest.approx(100), pytest.approx(400))
    assert decode["sequences_per_forward"] == pytest.approx(8)


def test_a_step_is_its_queue_its_forward_pass_and_the_rest():
    times = told()["milliseconds"]
    assert [times[name]["p50"] for name in ("step", "queue", "forward", "rest")] == pytest.approx([10, 1, 6, 3])


@pytest.mark.parametrize(("steps", "warns"), [(99, "p99 and beyond"), (100, "p99.9 is"), (1000, None)])
def test_percentiles_that_few_steps_cannot_tell_are_called_so(steps, warns):
    text = shown(told(steps))
    assert ("little more than the slowest" in text) == (warns is not None)
    assert warns is None or warns in text


def test_an_open_loop_tells_refusals_and_what_was_never_sent():
    stats = measured(10)
    stats.refused([QueueFull("full"), QueueFull("full"), KvBlocksExhausted("no")])
    stats.unsent = 7
    made = told(stats=stats, rate=50.0)
    assert (made["queue_full"], made["errors"]) == (2, {"QUEUE_FULL": 2, "KV_BLOCKS_EXHAUSTED": 1})
    text = shown(made)
    assert "2 QUEUE_FULL" in text and "7 never sent" in text and "1 KV_BLOCKS_EXHAUSTED" in text
    assert "from when it was due" in text and "growing queue" in text


def test_a_report_is_json_and_a_pipe_gets_no_escapes():
    made = told()
    assert json.loads(json.dumps(made)) == made
    text = shown(made)
    assert "\x1b" not in text and "\r" not in text and "forward pass" in text
    assert "5 steps of each caller" in text, "the warm-up"


def test_a_run_that_measured_nothing_still_has_a_report():
    made = told(stats=Stats())
    assert made["decode"]["tokens_per_s"] is None and made["milliseconds"]["step"] == {}
    assert "host:1" in shown(made)


def test_progress_tells_steps_rate_and_what_is_left():
    line = progress_line(workload(steps=100), measured(25), 100.25)
    assert "25%" in line and "25 steps" in line and "100.0/s" in line and "1 s left" in line
    assert progress_line(workload(), Stats(phase="prefill"), 0.0) == "prefill 0/8 ..."


async def test_progress_is_for_terminals_that_move(monkeypatch):
    for out, term, written in (
        (io.StringIO(), "xterm", False),
        (Terminal(), "dumb", False),
        (Terminal(), "xterm", True),
    ):
        monkeypatch.setenv("TERM", term)
        async with progress(workload(), measured(1), out):
            pass
        assert bool(out.getvalue()) is written
