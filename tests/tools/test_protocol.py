"""`python -m benchmarks.protocol --quick` runs: every way and its echo, the file and the page that is made of it."""

import asyncio

import pytest

import benchmarks.protocol
from benchmarks.compare import Round
from benchmarks.engines.process import ServerDied
from benchmarks.engines.ways import in_calls, in_frames
from benchmarks.protocol import AGAINST, BENCHMARK, DEPTHS, ECHO_OF, MANY, alone, points, sides, targets
from benchmarks.table import bound_of, rows_of


def rounds(step_s, forward_s=None, count=3, depth=1):
    forward = [] if forward_s is None else [forward_s] * 4
    return [
        Round(step_s=[step_s] * 4, forward_s=forward, queue_s=forward, wall_s=step_s * 4 / depth) for _ in range(count)
    ]


def test_a_quick_run_takes_every_way_at_every_depth(quick_run):
    result = quick_run(benchmarks.protocol, "--transports", "unix")
    rows = {row["way"]: row for row in rows_of(result["tables"]["ways"])}
    ways = {*ECHO_OF, *ECHO_OF.values()}
    assert {way for way, row in rows.items() if row[f"steps/s at {MANY}"]} == {way for way in ways if "unary" in way}
    for way in ways:
        assert all(rows[way][f"steps/s at {depth}"] > 0 for depth in DEPTHS)
        assert 0 < rows[way]["p50, ms"] <= rows[way]["p99, ms"]
        if way in ECHO_OF:
            assert len(rows[way]["in echoes"]["pairs"]) == 2
            assert 0 < rows[way]["forward, ms"] < rows[way]["p50, ms"]
    sizes = result["settings"]["bytes"].split("; ")
    assert [each.partition(" and ")[0].rpartition(" ")[0] for each in sizes] == ["unix, unary", "unix, session"]


def test_a_point_tells_the_forward_and_the_echo_from_what_is_around_them():
    found = alone(rounds(1e-3, 4e-4), rounds(2.5e-4))
    assert found["in echoes"] == {"pairs": [4.0] * 3, "median": 4.0, "low": 4.0, "high": 4.0}
    assert found["around, ms"] == pytest.approx(0.35)
    assert (found["forward, ms"], found["queue, ms"], bound_of(found["target"])) == (0.4, 0.4, "≤ 2")


def test_rates_count_all_that_is_in_flight():
    taken = {("tcp", "session", depth): rounds(1e-3, 4e-4, depth=depth) for depth in (1, 4)}
    taken |= {("tcp", "echo, stream", depth): rounds(5e-4, depth=depth) for depth in (1, 4)}
    session, echo = found = points(taken)
    assert (session["steps/s at 4"], session["in echoes"]["median"]) == (4000.0, 2.0)
    assert echo["steps/s at 4"] == 8000.0 and "in echoes" not in echo
    standing = {each["what"]: each["value"] for each in targets(found, "")}
    assert standing == {"an empty step, session, in bare echoes": 2.0, "empty steps in a session, 4 in flight": 4000.0}


def test_two_checkouts_are_compared_pair_by_pair():
    taken = {("tcp", "unary", 1): rounds(1.1e-3), ("tcp" + AGAINST, "unary", 1): rounds(1e-3)}
    ours, theirs = points(taken)
    other = "of the other checkout's step at 1"
    assert ours[other] == {"pairs": [1.1] * 3, "median": 1.1, "low": 1.1, "high": 1.1} and other not in theirs


async def test_the_executor_of_another_checkout_is_what_runs(tmp_path):
    (other := tmp_path / "other").mkdir()
    (other / "ferrum_rpc").mkdir()
    (other / "ferrum_rpc" / "__init__.py").touch()
    (other / "ferrum_rpc" / "cli.py").write_text("raise SystemExit('this is the other checkout')")
    options = BENCHMARK.parse(["--quick", "--against", str(other)])
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
