"""`ferrum-rpc top`: rates never come from two processes, and a narrow terminal has fewer columns, none of them cut."""

from __future__ import annotations

import re
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from ferrum_rpc import cli
from ferrum_rpc.client import (
    Activity,
    CallerActivity,
    Counters,
    ExecutorState,
    ExecutorStatus,
    KvBlocks,
    MethodCount,
    Pressure,
    SlowCall,
)
from ferrum_rpc.top import program, screen
from ferrum_rpc.top.board import ExecutorRow, RowState
from ferrum_rpc.top.figures import MethodRates, StatusRates, StatusSample, hits_since_start, rates
from ferrum_rpc.top.screen import COLUMNS, DROPPED, age, lines, short, shown

ROOT = Path(__file__).parents[2]
ZERO = Counters(**dict.fromkeys((each.name for each in fields(Counters)), 0))
DECODE = "ferrum_rpc.executor.v1.ModelExecutor/Decode"


def status(counters: Counters, *methods: MethodCount, uptime_s: float = 100.0, number: int = 7) -> ExecutorStatus:
    blocks = KvBlocks(**{each.name: number for each in fields(KvBlocks)})
    pressure = Pressure(number, number, 16, number, number, number, number, free_slots=number, total_slots=2 * number)
    return ExecutorStatus(ExecutorState.SERVING, pressure, counters, methods, uptime_s, 0, number, number, blocks)


BEFORE = StatusSample(
    status(
        replace(ZERO, steps=100, tokens=1000, rows=700, forward_s=5.0, searched_tokens=60, cached_tokens=50),
        MethodCount(DECODE, 10, 1, 20, 2),
    ),
    at=1000.0,
)
NOW = StatusSample(
    status(
        replace(ZERO, steps=140, tokens=1500, rows=1020, forward_s=6.0, searched_tokens=160, cached_tokens=130),
        MethodCount(DECODE, 30, 2, 80, 5),
        MethodCount("Fork", 4, 0, 0, 0),
        uptime_s=102.0,
    ),
    at=1002.0,
)


# --- rates ------------------------------------------------------------------------------------------------------------


def test_rates_are_differences_over_the_time_between_two_answers():
    assert rates(BEFORE, NOW) == StatusRates(
        measured_s=2.0,
        steps_per_s=20.0,
        tokens_per_s=210.0,  # 500 were fed, of which the prefix cache had 80
        rows_per_step=8.0,
        step_ms=25.0,
        busy_share=0.5,
        prefix_hit_share=0.8,
        errors_per_s=2.0,
        methods=(MethodRates(DECODE, 10.0, 0.5, 30.0, 1.5), MethodRates("Fork", 2.0, 0.0, 0.0, 0.0)),
    )
    assert hits_since_start(NOW.status.counters) == 130 / 160


def test_a_mean_of_nothing_is_unknown_and_a_rate_of_nothing_is_zero():
    idle = rates(BEFORE, StatusSample(BEFORE.status, 1001.0))
    assert idle is not None
    assert (idle.steps_per_s, idle.tokens_per_s, idle.busy_share, idle.errors_per_s) == (0, 0, 0, 0)
    assert (idle.rows_per_step, idle.step_ms, idle.prefix_hit_share) == (None, None, None)
    assert hits_since_start(ZERO) is None


@pytest.mark.parametrize("name", [each.name for each in fields(Counters)])
def test_a_counter_that_went_back_is_another_process_and_has_no_rates(name):
    counters = replace(BEFORE.status.counters, **{name: 9})
    before = StatusSample(replace(BEFORE.status, counters=replace(counters, **{name: 10})), 1000.0)
    assert rates(before, StatusSample(replace(BEFORE.status, counters=counters), 1001.0)) is None


@pytest.mark.parametrize(
    "now",
    [
        StatusSample(replace(NOW.status, uptime_s=99.0), 1001.0),
        StatusSample(replace(NOW.status, methods=()), 1001.0),
        StatusSample(replace(NOW.status, methods=(MethodCount(DECODE, 9, 1, 20, 2),)), 1001.0),
        StatusSample(NOW.status, 1000.0),
    ],
    ids=["uptime", "no method", "fewer calls", "no time"],
)
def test_rates_start_again_with_another_process(now):
    assert rates(BEFORE, now) is None
    assert rates(None, now) is None
    assert rates(BEFORE, NOW) is not None


# --- the screen -------------------------------------------------------------------------------------------------------


def row(target: str, state: RowState = RowState.SERVING, number: int = 7, reason: str = "") -> ExecutorRow:
    """Whose figures have about as many digits as ``number``."""
    found = rates(BEFORE, NOW)
    assert found is not None
    shares = {"busy_share": 1.0, "prefix_hit_share": 1.0}
    changed = {each.name: float(number) for each in fields(StatusRates) if each.name != "methods"} | shares
    there = status(replace(ZERO, tokens=number), uptime_s=float(number), number=number)
    return ExecutorRow(target, state, reason, status=there, rates=replace(found, **changed))


ROWS = [
    row("127.0.0.1:50051"),
    row("10.200.200.200:50051", RowState.DRAINING, 123_456_789, reason="it drains " * 30),
    ExecutorRow("executor-0.executors.ferrum.svc.cluster.local:50051", RowState.GONE, "Connection refused (111)"),
]


def activity(*names: str, held: int = 3, elapsed_s: float = 1.5) -> Activity:
    return Activity(
        tuple(CallerActivity(name, held, held, held, held, held, held) for name in names),
        tuple(SlowCall(DECODE, name, elapsed_s, 59.0, "RESOURCE_EXHAUSTED") for name in names),
    )


def test_callers_of_all_executors_are_added_up_and_the_slowest_calls_come_first():
    first = replace(row("a:1"), activity=activity("alice", "", held=3, elapsed_s=0.25))
    second = replace(row("b:1"), activity=activity("alice", "x" * 60, held=4, elapsed_s=123.0))
    heading, *callers = [line.split() for line in screen.callers([first, second, ROWS[2]])]
    assert heading == ["caller", "sequences", "blocks", "items", "sessions", "leases", "executors"]
    names = [" ".join(line[:-6]) for line in callers]
    assert names == ["alice", screen.middle("x" * 60, screen.NAME), "(no name)"]
    assert [line[-6:] for line in callers] == [[*["7"] * 5, "2"], [*["4"] * 5, "1"], [*["3"] * 5, "1"]]
    heading, *calls = [line.split() for line in screen.slowest([first, second])]
    assert [line[:4] for line in calls[:2]] == [["Decode", "123.000", "-59s", "RESOURCE_EXHAUSTED"]] * 2
    assert [line[-1] for line in calls] == ["b:1", "b:1", "a:1", "a:1"]
    many = replace(first, activity=activity(*map(str, range(50))))
    drawn = [line for line, _ in lines([many], 80)]
    assert max(map(len, drawn)) <= 80 and len(drawn) == 4 + 2 * (8 + 2)
    assert lines([replace(many, activity=activity())], 80) == lines([row("a:1")], 80)


def test_at_any_width_no_line_is_wider_no_cell_is_cut_and_columns_go_in_one_order():
    every = [each.heading for each in COLUMNS]
    assert sorted(DROPPED) == sorted(every)
    for width in range(20, 200):
        drawn = [line for line, _ in lines(ROWS, width)]
        assert max(map(len, drawn)) <= width
        heads, *rows = [line.split() for line in drawn[2:6]]
        _, columns = shown(width, [each.target for each in ROWS])
        left = DROPPED[len(DROPPED) - len(columns) :]
        assert [each.heading for each in columns] == [each for each in every if each in left]
        if columns:
            assert heads == ["executor", "state", *(each.heading for each in columns)]
            for found, each in zip(rows, ROWS, strict=True):
                assert found[1:] == [each.state.lower(), *(column.show(each) for column in columns)]
        few, many = (lines([row("a:1", number=number)], width)[2:4] for number in (0, 987_654_321_000))
        assert few[0] == many[0] and len(few[1][0]) == len(many[1][0]), "none moves when figures change"


def test_160_columns_show_all_and_80_the_ones_that_matter_most():
    targets = ["10.200.200.200:50051"]
    assert shown(160, targets)[1] == shown(None, targets)[1] == list(COLUMNS)
    kept = ["steps/s", "tokens/s", "batch", "queue", "used", "free"]
    assert [each.heading for each in shown(80, targets)[1]] == kept
    assert [each.heading for each in shown(80, ["127.0.0.1:50051"])[1]] == [*kept, "hits"]


def test_without_a_terminal_nothing_is_left_out_and_a_long_target_keeps_its_begin_and_its_end():
    drawn = [line for line, _ in lines(ROWS, None)]
    assert all(any(each.target in line for line in drawn) for each in ROWS)
    assert f"10.200.200.200:50051: {ROWS[1].reason}" in drawn
    [line] = [line for line, state in lines(ROWS, 100) if state is RowState.GONE and " gone " in line]
    assert re.match(r"executor-0\.\w*….*cal:50051  gone", line)


def test_what_does_not_fit_the_terminals_height_is_counted():
    rows = [row(f"10.0.0.{each}:50051") for each in range(50)]
    drawn = [line for line, _ in lines(rows, 80, 10)]
    assert len(drawn) == 10 and drawn[-1] == "… 44 more lines"
    assert len(lines(rows, 80, 53)) == 53 and lines(rows, 80, 53)[-1][0].startswith("10.0.0.49:50051")


def test_the_first_line_counts_states_and_adds_up_tokens():
    assert screen.headline(ROWS) == "1 serving, 1 draining, 1 gone; 123M tokens/s"
    assert screen.headline([]) == "no executors; 0 tokens/s"


def test_numbers_have_at_most_five_characters_and_times_four():
    numbers = [None, 0, 0.0, 0.04, 7.26, 99.96, 1234.5, 9999, 9999.4, 9999.6, 10_000, 99_949, 99_951, 999_700, 2**32]
    in_words = "- 0 0 0.0 7.3 100 1234 9999 9999 10.0k 10.0k 99.9k 100k 1.0M 4.3G"
    assert " ".join(map(short, numbers)) == in_words
    times = [None, 0.9, 59.9, 60, 3599, 86_399, 86_400, 1e9]
    assert " ".join(map(age, times)) == "- 0s 59s 1m 59m 23h 1d 999d"


# --- JSON and the command line ----------------------------------------------------------------------------------------


def test_json_has_the_documented_keys_whatever_is_known():
    text = (ROOT / "docs" / "operations.md").read_text("utf-8")
    section = text.partition("## Watching executors")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    documented = {each for row in rows for each in re.findall(r"`(\w+)`", row[1])}
    assert set(ROWS[0].json()) == set(ROWS[2].json()) == documented - set(program.document([], 1.0))
    assert set(program.document([], 1.0)) <= documented
    assert (ROWS[0].json()["free_slots"], ROWS[0].json()["total_slots"]) == (7, 14)
    unknown = {key: value for key, value in ROWS[2].json().items() if value not in (None, [])}
    assert unknown == {"target": ROWS[2].target, "state": "GONE", "reason": ROWS[2].reason, "restarts": 0}
    assert {each.heading for each in COLUMNS} <= {each.strip() for row in rows for each in row[2].split(", ")}


def test_the_live_screen_names_the_extra_that_it_needs(monkeypatch, capsys):
    monkeypatch.setattr(program, "moves", lambda _: True)
    monkeypatch.setitem(sys.modules, "rich.live", None)
    with pytest.raises(SystemExit) as caught:
        cli.main(["top"])
    assert "needs rich" in str(caught.value) and "pip install '.[scheduler]'" in str(caught.value)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--interval-s", "0.01"), "at least 0.1"),
        (("--interval-s", "nan"), "at least 0.1"),
        (("--interval-s", "soon"), "at least 0.1"),
        (("--once", "--target", "dns:///nowhere"), "dns:///name:port"),
        (("--once", "--target", "file:"), "file:PATH"),
        (("--once", "--taget", "a:1"), "--target"),
    ],
)
def test_what_is_written_wrongly_is_refused(flags, says, command):
    status, out, said = command("top", *flags)
    assert status in (1, 2) and says in said and out == ""
