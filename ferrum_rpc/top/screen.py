"""Rows as lines of a terminal. Columns have constant widths, so that nothing moves between two refreshes, and a narrow
terminal has fewer of them: no line is wrapped. Below are, for operators, the callers that hold most and the slowest
calls of all executors."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from ferrum_rpc.client import ExecutorStatus
from ferrum_rpc.terminal import table
from ferrum_rpc.top.board import ExecutorRow, RowState
from ferrum_rpc.top.figures import StatusRates

UNKNOWN: Final = "-"
TARGET: Final = 23
"""Columns that a target has at least, if it needs them; a longer one is shortened in the middle."""

CALLERS: Final = 8
CALLS: Final = 8
"""Lines of callers and of calls, at most."""

NAME: Final = 24
"""Columns of a caller's name; a longer one is shortened in the middle."""

NO_NAME: Final = "(no name)"
HELD: Final = ("sequences", "blocks", "items", "sessions", "leases")
"""What callers hold, in the order of the columns."""

GAP: Final = 2
"""Between columns, as `table` has it."""

UNITS: Final = (("G", 1e9), ("M", 1e6), ("k", 1e3))


class ScreenColumn(NamedTuple):
    """A column: its cells are at most ``width`` wide, and say what ``show`` finds in a row."""

    heading: str
    width: int
    show: Callable[[ExecutorRow], str]


def short(number: float | None) -> str:
    """A number in at most 5 characters, of at least three digits where it has them."""
    if number is None:
        return UNKNOWN
    if number == 0 or (isinstance(number, int) and number < 10_000):
        return f"{number:.0f}"
    for unit, size in UNITS:
        if number >= 0.9995 * size and (size > 1e3 or number >= 9_999.5):
            number /= size
            return f"{number:.0f}{unit}" if number >= 99.95 else f"{number:.1f}{unit}"
    return f"{number:.0f}" if number >= 99.95 else f"{number:.1f}"


def share(part: float | None) -> str:
    """A share in percent."""
    return UNKNOWN if part is None else f"{100 * part:.0f}%"


def age(seconds: float | None) -> str:
    """A time in at most 4 characters, rounded down."""
    if seconds is None:
        return UNKNOWN
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= size:
            return f"{min(999, int(seconds / size))}{unit}"
    return f"{int(seconds)}s"


def _gauge(
    of: Callable[[ExecutorStatus], float], words: Callable[[float | None], str] = short
) -> Callable[[ExecutorRow], str]:
    return lambda row: words(None if row.status is None else of(row.status))


def _rate(
    of: Callable[[StatusRates], float | None], words: Callable[[float | None], str] = short
) -> Callable[[ExecutorRow], str]:
    return lambda row: words(None if row.rates is None else of(row.rates))


COLUMNS: Final = (
    ScreenColumn("up", 4, _gauge(lambda status: status.uptime_s, age)),
    ScreenColumn("steps/s", 7, _rate(lambda rates: rates.steps_per_s)),
    ScreenColumn("tokens/s", 8, _rate(lambda rates: rates.tokens_per_s)),
    ScreenColumn("batch", 5, _rate(lambda rates: rates.rows_per_step)),
    ScreenColumn("ms/step", 7, _rate(lambda rates: rates.step_ms)),
    ScreenColumn("busy", 4, _rate(lambda rates: rates.busy_share, share)),
    ScreenColumn("queue", 5, _gauge(lambda status: status.pressure.queued_items)),
    ScreenColumn("q-tokens", 8, _gauge(lambda status: status.pressure.queued_tokens)),
    ScreenColumn("used", 5, _gauge(lambda status: status.blocks.used)),
    ScreenColumn("cached", 6, _gauge(lambda status: status.blocks.cached)),
    ScreenColumn("free", 5, _gauge(lambda status: status.blocks.free)),
    ScreenColumn("hits", 4, _rate(lambda rates: rates.prefix_hit_share, share)),
    ScreenColumn("seqs", 5, _gauge(lambda status: status.pressure.sequences)),
    ScreenColumn("leases", 6, _gauge(lambda status: status.leases)),
    ScreenColumn("sessions", 8, _gauge(lambda status: status.sessions)),
    ScreenColumn("errors/s", 8, _rate(lambda rates: rates.errors_per_s)),
)
"""Behind target and state, which are always there. 160 terminal columns show all of them with targets of `TARGET`."""

DROPPED: Final = (
    *("sessions", "leases", "q-tokens", "cached", "ms/step", "up", "busy", "errors/s"),
    *("seqs", "hits", "batch", "used", "queue", "free", "steps/s", "tokens/s"),
)
"""In this order columns go where the terminal is too narrow."""

STATE: Final = max(map(len, RowState))
STATUS: Final = len("RESOURCE_EXHAUSTED")


def shown(width: int | None, targets: Sequence[str]) -> tuple[int, list[ScreenColumn]]:
    """The width of the first column, and the columns behind the state that fit into ``width``; all for None."""
    longest = max(len("executor"), *map(len, targets))
    columns, dropped = list(COLUMNS), iter(DROPPED)
    if width is None:
        return longest, columns
    while (room := width - GAP - STATE - sum(GAP + each.width for each in columns)) < min(longest, TARGET) and columns:
        name = next(dropped)
        columns = [each for each in columns if each.heading != name]
    return max(1, min(longest, room)), columns


def cut(text: str, width: int | None) -> str:
    """A text in at most ``width`` characters: the end is left out."""
    return text if width is None or len(text) <= width else f"{text[: max(0, width - 1)]}…"


def middle(text: str, width: int) -> str:
    """A text in at most ``width`` characters: the middle is left out, because targets differ at their begin or end."""
    if len(text) <= width:
        return text
    end = (width - 1) // 2
    return f"{text[: width - 1 - end]}…{text[len(text) - end :]}"


def headline(rows: Sequence[ExecutorRow]) -> str:
    """The number of executors in each state, and their tokens a second."""
    states = Counter(each.state for each in rows)
    counted = ", ".join(f"{states[state]} {state.lower()}" for state in RowState if states[state])
    tokens = sum(each.rates.tokens_per_s for each in rows if each.rates is not None)
    return f"{counted or 'no executors'}; {short(tokens)} tokens/s"


def callers(rows: Sequence[ExecutorRow]) -> list[str]:
    """The callers that hold most, over all executors: a heading and a line for each. Empty if none is known."""
    held = defaultdict[str, Counter[str]](Counter)
    for row in rows:
        for each in row.activity.callers if row.activity else ():
            held[each.identity].update({name: getattr(each, name) for name in HELD}, executors=1)
    if not held:
        return []
    columns = (*HELD, "executors")
    listed = sorted(held.items(), key=lambda pair: (-pair[1]["sequences"], -pair[1]["items"], pair[0]))
    return table(
        [
            ["caller".ljust(NAME), *columns],
            *(
                [middle(name or NO_NAME, NAME), *(short(count[each]) for each in columns)]
                for name, count in listed[:CALLERS]
            ),
        ],
        numbers=True,
    )


def slowest(rows: Sequence[ExecutorRow]) -> list[str]:
    """The slowest calls of the last minute of all executors: a heading and a line for each. Empty if none is known."""
    found = [(each, row.target) for row in rows for each in (row.activity.slowest_calls if row.activity else ())]
    found.sort(key=lambda pair: -pair[0].elapsed_s)
    head = ["slowest calls".ljust(NAME), "seconds", "ended", "status".ljust(STATUS), "caller".ljust(NAME), "executor"]
    cells = [
        [
            middle(call.method.rpartition("/")[2], NAME),
            f"{call.elapsed_s:.3f}".rjust(len("seconds")),
            f"-{age(call.ago_s)}".rjust(len("ended")),
            call.code.ljust(STATUS),
            middle(call.identity or NO_NAME, NAME),
            target,
        ]
        for call, target in found[:CALLS]
    ]
    return table([head, *cells]) if cells else []


def lines(
    rows: Sequence[ExecutorRow], width: int | None, height: int | None = None
) -> list[tuple[str, RowState | None]]:
    """The screen in ``width`` columns and ``height`` lines (None: no limit), each line with the state of its row. Below
    the table are the reasons, the callers and the slowest calls."""
    size, columns = shown(width, [each.target for each in rows])
    head = ["executor".ljust(size), "state".ljust(STATE), *(each.heading.rjust(each.width) for each in columns)]
    cells = [
        [middle(row.target, size), row.state.lower().ljust(STATE), *(column.show(row) for column in columns)]
        for row in rows
    ]
    first, *others = table([head, *cells], numbers=True)
    found: list[tuple[str, RowState | None]] = [
        (cut(headline(rows), width), None),
        ("", None),
        (cut(first, width), None),
    ]
    found += [(cut(line, width), row.state) for line, row in zip(others, rows, strict=True)]
    reasons = [(cut(f"{row.target}: {row.reason}", width), row.state) for row in rows if row.reason]
    found += [("", None), *reasons] if reasons else []
    for part in (callers(rows), slowest(rows)):
        found += [("", None), *((cut(line, width), None) for line in part)] if part else []
    if height is not None and len(found) > height:
        left = len(found) - (kept := max(1, height - 1))
        found = [*found[:kept], (cut(f"… {left} more lines", width), None)]
    return found
