"""What the sources define, by name: log events, metrics, and the rows of tables that explain them in `docs/`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

from tools.commands import ROOT

LEVELS: Final = frozenset({"info", "warning", "error", "exception"})
CONSTRUCTORS: Final = {"_gauge": "gauge", "_bounded": "gauge", "_info": "gauge", "GaugeMetricFamily": "gauge"} | {
    "_counter": "counter", "CounterMetricFamily": "counter",
    "_histogram": "histogram", "HistogramMetricFamily": "histogram",
}  # fmt: skip
"""The type of a metric by the call in `service/metrics.py` that makes it."""


def logged_events() -> tuple[dict[str, set[str]], set[str]]:
    """The events that servers log, with the files that log them; and how those end whose name is made of a variable.
    Clients log sentences to their program's own log; these are not events."""
    events, ends = dict[str, set[str]](), set[str]()
    for path in sorted((ROOT / "ferrum_rpc").rglob("*.py")):
        if (ROOT / "ferrum_rpc" / "client") in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            match node:
                case ast.Call(func=ast.Call(func=ast.Name("getattr"), args=[ast.Name("log"), *_]), args=[said, *_]):
                    pass
                case ast.Call(func=ast.Attribute(attr=level), args=[said, *_]) if level in LEVELS:
                    pass
                case _:
                    continue
            match said:
                case ast.Constant(str(event)) if re.fullmatch(r"[a-z_]+", event):
                    events.setdefault(event, set()).add(path.relative_to(ROOT).as_posix())
                case ast.JoinedStr([*_, ast.Constant(str(end))]) if end.startswith("_"):
                    ends.add(end)
    return events, ends


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """A metric by the name under which Prometheus reads it. ``text``: its HELP line."""

    name: str
    kind: str
    text: str
    labels: tuple[str, ...]


def metric_families() -> Iterator[MetricFamily]:
    """The metrics of an executor, in the order of `service/metrics.py`; those of the process come from the library."""
    tree = ast.parse((ROOT / "ferrum_rpc" / "service" / "metrics.py").read_text("utf-8"))
    [metrics] = [each for each in tree.body if isinstance(each, ast.ClassDef)]
    for method in metrics.body:
        if isinstance(method, ast.FunctionDef):
            known = dict(_assigned(method))
            for call in sorted((each for each in ast.walk(method) if isinstance(each, ast.Call)), key=_place):
                if isinstance(call.func, ast.Name) and call.func.id in CONSTRUCTORS:
                    yield from _families(call, call.func.id, known)


def _place(node: ast.Call) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _assigned(method: ast.FunctionDef) -> Iterator[tuple[str, ast.expr]]:
    """Local names and what they are bound to."""
    for node in ast.walk(method):
        match node:
            case ast.Assign(targets=[ast.Name(name)], value=value):
                yield name, value
            case ast.Assign(targets=[ast.Tuple(names)], value=ast.Tuple(values)):
                yield from (
                    (each.id, value) for each, value in zip(names, values, strict=True) if isinstance(each, ast.Name)
                )


def _text(node: ast.expr, known: Mapping[str, ast.expr]) -> str:
    """The text of a constant, of a name bound to one, or of a format string of these."""
    match node:
        case ast.Constant(str(text)):
            return text
        case ast.Name("PREFIX"):
            return "ferrum_"
        case ast.Name(name) if name in known:
            return _text(known[name], known)
        case ast.JoinedStr(parts):
            return "".join(_text(each, known) for each in parts)
        case ast.FormattedValue(value):
            return _text(value, known)
    raise ValueError(f"line {node.lineno}: no constant text: {ast.unparse(node)}")


def _families(call: ast.Call, made_by: str, known: Mapping[str, ast.expr]) -> Iterator[MetricFamily]:
    kind = CONSTRUCTORS[made_by]
    name = "ferrum_" + _text(call.args[0], known).removeprefix("ferrum_")
    labels: list[ast.expr | None] = []
    if made_by in {"_gauge", "_counter"}:
        labels = list(call.args[3:])
    elif made_by == "_info":
        match known[call.args[2].id] if isinstance(call.args[2], ast.Name) else call.args[2]:
            case ast.Dict(keys):
                labels = list(keys)
    else:
        labels = [each for word in call.keywords if isinstance(word.value, ast.Tuple) for each in word.value.elts]
    named = tuple(_text(each, known) for each in labels if each is not None)
    yield MetricFamily(f"{name}_total" if kind == "counter" else name, kind, _text(call.args[1], known), named)
    if made_by == "_bounded":
        yield MetricFamily(f"{name}_limit", kind, f"The limit of {name}.", ())


@cache
def page(name: str) -> str:
    """The text of a page in `docs/`."""
    return (ROOT / "docs" / name).read_text("utf-8")


def rows(text: str, *heads: str) -> Iterator[list[str]]:
    """The cells of each row of the tables whose first column has one of these heads."""
    for table in re.findall(rf"^\| (?:{'|'.join(heads)}) \|.*\n\|---.*\n((?:\|.*\n)+)", text, re.MULTILINE):
        for row in table.splitlines():
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


def sections(name: str) -> Iterator[tuple[str, str]]:
    """The headings of a page, each with the text up to the next one."""
    heading = ""
    lines: list[str] = []
    fenced = False
    for line in page(name).splitlines():
        fenced ^= line.startswith("```")
        if line.startswith("#") and not fenced:
            yield heading, "\n".join(lines)
            heading, lines = line.lstrip("# "), []
        else:
            lines.append(line)
    yield heading, "\n".join(lines)


def anchor(heading: str) -> str:
    """The anchor of a heading, on a forge and on the site."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
