"""What the sources define, by name: log events, metrics, and the rows of tables that explain them in `docs/`."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

from ferrum_rpc.config import ModelSettings, ServeSettings
from ferrum_rpc.core import CacheState
from ferrum_rpc.engine.api import EngineCounters
from ferrum_rpc.service.meters import StepMeter
from ferrum_rpc.service.metrics import Metrics
from ferrum_rpc.service.rpc import CallLog
from ferrum_rpc.service.state import ServerState
from tools.commands import ROOT

LEVELS: Final = frozenset({"info", "warning", "error", "exception"})


@cache
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


class MetricFamily(NamedTuple):
    """A metric by the name under which Prometheus reads it. ``text``: its HELP line."""

    name: str
    kind: str
    text: str
    labels: tuple[str, ...]


def metric_families() -> Iterator[MetricFamily]:
    """The metrics of an executor, in the order of `service/metrics.py`; those of the process come from the library."""
    state: Any = ServerState(ServeSettings(model=ModelSettings("identity")).limits())
    cache, counters = CacheState(block_size=16, total_blocks=1, free_blocks=1, sequences=0), EngineCounters()
    state.engine = SimpleNamespace(cache=cache, counters=counters, queued_items=0, queued_tokens=0, ranks=())
    model = SimpleNamespace(
        name="", architecture="", tokenizer_sha256="", vocab_size=1, state_bytes=0, latent=False, kv_shapes=()
    )
    state.serve(model, SimpleNamespace(name="cpu", window_tokens=None))
    metrics = Metrics(state, CallLog(), StepMeter(), failpoints={"": 1})
    for part in vars(Metrics).values():
        if inspect.isgeneratorfunction(part) and part is not Metrics.collect:
            for each in part(metrics):
                name = each.name + "_total" * (each.type == "counter")
                yield MetricFamily(name, each.type, each.documentation, each._labelnames)


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
