"""What Prometheus text must be like: a reader of scrapes, and the rules of `promtool check metrics` that matter."""

from __future__ import annotations

import re
import urllib.request

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
ABBREVIATED_OR_NOT_BASE = re.compile(
    r"_(ms|us|ns|s|sec|secs|millis|micros|milliseconds|microseconds|minutes|hours|kb|mb|mib|kilobytes|megabytes|bits|percent)(_|$)"
)

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def fetch(url: str, accept: str = "text/plain") -> str:
    request = urllib.request.Request(url, headers={"Accept": accept})  # noqa: S310 - our own server
    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
        return answer.read().decode()


def series(text: str) -> Series:
    """Every sample by name and labels."""
    found: Series = {}
    for family in parse_text(text):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found, key
            found[key] = sample.value
    return found


def value(found: Series, name: str, /, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def problems(text: str) -> list[str]:
    """What is wrong with a scrape, one line each."""
    wrong: list[str] = []
    declared = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    wrong += [f"{name} is declared twice" for name in sorted({each for each in declared if declared.count(each) > 1})]
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)", text, re.MULTILINE))
    helps = dict(re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE))
    for name, kind in types.items():
        if not helps.get(name, "").strip():
            wrong.append(f"{name} has no HELP")
        if (kind == "counter") != name.endswith("_total"):
            wrong.append(f"{name} is a {kind}: counters, and they alone, end in _total")
        if kind != "histogram" and name.endswith(("_count", "_sum", "_bucket")):
            wrong.append(f"{name} has the suffix of a histogram")
        if ABBREVIATED_OR_NOT_BASE.search(name):
            wrong.append(f"{name} has a unit that is no base unit")
        if "second" in name and not re.search(r"_seconds(_total)?$", name):
            wrong.append(f"{name} does not end in its unit")
    for key in series(text):
        base = re.sub(r"_(bucket|sum|count)$", "", key[0])
        if key[0] not in types and base not in types:
            wrong.append(f"{key[0]} has no TYPE")
    return wrong


def openmetrics_families(text: str) -> list[str]:
    """Names of the families of an OpenMetrics answer; its parser refuses clashes that the older format allows."""
    return [family.name for family in parse_openmetrics(text)]
