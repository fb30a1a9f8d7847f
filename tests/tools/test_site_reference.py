"""The reference of the site has an anchor for everything that the sources define, and explains each once."""

import re
from collections import Counter
from functools import cache
from importlib import import_module

import pytest
from prometheus_client import generate_latest

from ferrum_rpc import cli, scheduler
from ferrum_rpc.config import SETTINGS
from ferrum_rpc.errors import Reason
from ferrum_rpc.executor.v1 import info_pb2
from tests.unit.test_client_names import names
from tests.unit.test_metrics import observed
from tools.generate_stubs import PROTOS
from tools.site import protos, python, reference
from tools.site.sources import logged_events, metric_families, page, rows


@cache
def pages():
    return {**reference.pages(), **protos.pages(), **python.pages()}


def tables(*heads):
    """The rows of tables in docs/operations.md."""
    return rows(page("operations.md"), *heads)


def anchors(start):
    """The anchors of the pages whose names begin so, with how often each occurs."""
    texts = [text for name, text in pages().items() if name.startswith(f"reference/{start}")]
    assert texts
    return Counter(each for text in texts for each in re.findall(r"\{ #([\w.-]+) \}", text))


def contract():
    """Every service, method, message, field, enum and value."""
    for each in PROTOS.glob("*/*/*/*.proto"):
        file = import_module(f"ferrum_rpc.executor.v1.{each.stem}_pb2").DESCRIPTOR
        for service in file.services_by_name.values():
            yield service.name
            yield from (f"{service.name}.{method.name}" for method in service.methods)
        for message in file.message_types_by_name.values():
            yield message.name
            yield from (f"{message.name}.{field.name}" for field in message.fields)
        for enum in file.enum_types_by_name.values():
            yield from (enum.name, *(value.name for value in enum.values))


def client_names():
    """Every public name of the client, as the recorded list has it."""
    module = name = ""
    for line in names():
        word = re.split(r"[( :]", line.strip().lstrip("."))[0]
        if not line.startswith(" "):
            module = line
            yield module
        elif not line.startswith(" " * 8):
            name = f"{module}.{word}"
            yield name
        else:
            yield f"{name}.{word}"


EXPECTED = {
    "proto-": contract,
    "python-": client_names,
    "python-scheduler": lambda: [f"ferrum_rpc.scheduler.{each}" for each in scheduler.__all__],
    "settings": lambda: SETTINGS,
    "commands": lambda: cli.build_parser(settings=False)[1],
    "errors": lambda: [each.value for each in Reason],
    "limits": lambda: [each.name for each in info_pb2.Limits.DESCRIPTOR.fields],
    "log-events": lambda: logged_events()[0],
    "metrics": lambda: re.findall(r"`(ferrum_\w+)`", " ".join(cells[0] for cells in tables("metric", "limit"))),
}


@pytest.mark.parametrize("start", EXPECTED)
def test_everything_has_one_anchor_and_nothing_else_has_one(start):
    expected, found = set(EXPECTED[start]()), anchors(start)
    assert len(expected) > 10
    assert sorted(expected - found.keys()) == []
    assert {name: times for name, times in found.items() if times > 1} == {}
    if start in {"settings", "commands", "errors", "limits", "metrics"}:
        assert sorted(found.keys() - expected) == []


def test_every_comment_is_on_its_page():
    """A heading is followed by text, a table or code, and a row of a table has no empty explanation in the protos."""
    for name, text in pages().items():
        empty = re.findall(r"^(##+ [^\n]*)\n+(?=##? |\Z)", text, re.M)
        assert [each for each in empty if not each.startswith("## ")] == [], name
        assert not name.startswith("reference/proto-") or re.findall(r"^\| `[^\n]*\|  \|$", text, re.M) == [], name


def test_every_event_of_the_log_is_explained():
    explained = {name for cells in tables("event") for name in re.findall(r"`(\w+)`", cells[0])}
    events, ends = logged_events()
    assert len(events) > 40
    assert sorted(events.keys() - explained) == []
    assert sorted(each for each in explained - events.keys() if not each.endswith(tuple(ends))) == []


def test_the_metrics_are_those_that_are_served():
    text = generate_latest(observed()[-1]).decode()
    served = dict(re.findall(r"^# TYPE (ferrum_\S+) (\w+)", text, re.M))
    listed = {each.name: each for each in metric_families()}
    assert {name: each.kind for name, each in listed.items() if name != "ferrum_model_info"} == served
    helps = dict(re.findall(r"^# HELP (ferrum_\S+) (.*)", text, re.M))
    assert {name: listed[name].text for name in helps} == helps
    for name, labels in re.findall(r"^(ferrum_\w+)\{(.*)\} ", text, re.M):
        named = name if name in listed else re.sub("_(bucket|sum|count)$", "", name)
        assert set(re.findall(r'(\w+)="', labels)) - {"le"} == set(listed[named].labels), name


def test_a_name_of_a_docstring_is_a_link():
    text = pages()["reference/python-client.md"]
    assert "[`Sequence`](python-client.md#ferrum_rpc.client.Sequence)" in text
    assert "\n```python\nasync prefill(" in text
