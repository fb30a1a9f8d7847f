"""`python -m benchmarks.protocol --quick` runs: every way and its echo, the file and the page that is made of it."""

import asyncio
import json

import pytest

import benchmarks.protocol
from benchmarks import report, tables
from benchmarks.compare import Round
from benchmarks.engines.process import ServerDied
from benchmarks.engines.ways import in_calls, in_frames
from benchmarks.protocol import AGAINST, BATCHES, CROWD, DEPTHS, ECHO_OF, MANY, parse, point, points, sides, steps_of


def rounds(step_s, forward_s=None, count=3, depth=1):
    forward = [] if forward_s is None else [forward_s] * 4
    return [
        Round(step_s=[step_s] * 4, forward_s=forward, queue_s=forward, wall_s=step_s * 4 / depth) for _ in range(count)
    ]


def test_a_quick_run_takes_every_way_at_every_depth(tmp_path, quick_run):
    out = tmp_path / "protocol.json"
    told = quick_run(benchmarks.protocol, "--transports", "unix", "--out", str(out))
    result = json.loads(out.read_text(encoding="utf-8"))
    measured = {(each["way"], each["depth"]): each for each in result["points"]}
    ways = {*ECHO_OF, *ECHO_OF.values()}
    assert {way for way, depth in measured if depth == MANY} == {way for way in ways if "unary" in way}
    for way in ways:
        for depth in DEPTHS:
            found = measured[way, depth]
            assert found["samples"] == 2 * depth * steps_of(depth, 16)
            assert 0 < found["p50_ms"] <= found["p99_ms"]
            if way in ECHO_OF:
                assert len(found["ratio"]["pairs"]) == 2
                assert 0 < found["forward_ms"] < found["p50_ms"]
    crowd = measured["client, session", CROWD]["ratio"]
    assert len(crowd["pairs"]) == 2 and measured[BATCHES, CROWD]["ratio"] is None
    sizes = result["settings"]["exchange_bytes"]
    assert set(sizes) == {"unix, unary", "unix, session"} and all(min(each) > 40 for each in sizes.values())
    assert str(out) in told
    page = report.document([("protocol.json", result)])
    for row in tables.protocol(result["points"]).rows:
        assert "| " + " | ".join(row) + " |" in page


def test_a_point_tells_the_forward_and_the_echo_from_what_is_around_them():
    found = point(("tcp", "session", 1), rounds(1e-3, 4e-4), rounds(2.5e-4))
    assert found["ratio"] == {"pairs": [4.0] * 3, "median": 4.0, "low": 4.0, "high": 4.0, "target": 2.0}
    assert found["around_ms"] == pytest.approx(0.35)
    assert (found["forward_ms"], found["queue_ms"], found["steps_per_s"]) == (0.4, 0.4, 1000.0)


def test_rates_count_all_that_is_in_flight():
    taken = {("tcp", "session", 4): rounds(1e-3, 4e-4, depth=4), ("tcp", "echo, stream", 4): rounds(5e-4, depth=4)}
    session, echo = points(taken)
    assert (session["steps_per_s"], session["rate_target"], session["ratio"]["median"]) == (4000.0, 3000.0, 2.0)
    assert session["ratio"]["target"] is None  # the target is for a step that is alone
    assert (echo["steps_per_s"], echo["rate_target"], echo["ratio"], echo["around_ms"]) == (8000.0, None, None, None)


def test_a_crowd_is_measured_against_batches_and_not_against_the_echo():
    taken = {("tcp", "client, session", CROWD): rounds(5e-3), ("tcp", BATCHES, CROWD): rounds(4e-3)}
    session, batches = points(taken)
    assert session["ratio"] == {"pairs": [1.25] * 3, "median": 1.25, "low": 1.25, "high": 1.25, "target": 1.25}
    assert batches["ratio"] is None


def test_two_checkouts_are_compared_pair_by_pair():
    taken = {("tcp", "unary", 1): rounds(1.1e-3), ("tcp" + AGAINST, "unary", 1): rounds(1e-3)}
    ours, theirs = points(taken)
    assert ours["against"] == {"pairs": [1.1] * 3, "median": 1.1, "low": 1.1, "high": 1.1} and "against" not in theirs
    assert len(tables.protocol([ours, theirs]).rows) == 2


async def test_the_executor_of_another_checkout_is_what_runs(tmp_path):
    (other := tmp_path / "other").mkdir()
    (other / "ferrum_rpc").mkdir()
    (other / "ferrum_rpc" / "__init__.py").touch()
    (other / "ferrum_rpc" / "cli.py").write_text("raise SystemExit('this is the other checkout')")
    options = parse(["--quick", "--against", str(other)])
    with pytest.raises(ServerDied, match="this is the other checkout"):
        async with sides("unix", options, options.against):
            pass


async def test_calls_and_frames_keep_one_step_of_each_sequence_in_flight():
    in_flight, taken, waiting = [], [], asyncio.Queue()

    async def send(sequence):
        assert sequence not in in_flight
        in_flight.append(sequence)
        waiting.put_nowait(sequence)

    async def receive():
        assert len(in_flight) == min(3, 15 - len(taken))
        sequence = await waiting.get()
        in_flight.remove(sequence)
        taken.append(sequence)
        return sequence, None

    async def step(sequence):
        await send(sequence)
        await asyncio.sleep(0)
        in_flight.remove(sequence)
        taken.append(sequence)

    timed = await in_frames(send, receive, 3, 5)
    assert sorted(taken) == sorted([0, 1, 2] * 5) and len(timed.step_s) == 15
    assert sum(timed.step_s) <= 3 * timed.wall_s
    taken.clear()
    timed = await in_calls(step, 3, 5)
    assert sorted(taken) == sorted([0, 1, 2] * 5) and len(timed.step_s) == 15
