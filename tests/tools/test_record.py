"""How benchmarks are run: what `python -m benchmarks` lists, and that the commands of the docs are those that work."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from benchmarks import machine
from benchmarks.__main__ import NAMES
from benchmarks.machine import ROOT
from benchmarks.record import Benchmark, Option, Record
from benchmarks.report import DOCUMENT, PAGE
from benchmarks.table import rows_of, target

COMMAND = re.compile(r"python3? -m benchmarks ([a-z]\w*)((?: [^`#\n|()]+)?)")


def module(name):
    return importlib.import_module(f"benchmarks.{name}")


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_a_program_and_a_benchmark_answers_a_question(name):
    found = module(name)
    if (benchmark := getattr(found, "BENCHMARK", None)) is None:
        assert callable(found.main)
        return
    assert benchmark.name == name
    assert [question["title"] for question in PAGE["question"] if name in question["benchmarks"]]


def test_commands_of_the_docs_and_the_makefile_are_understood():
    """But for those of results on docs/benchmarks.md, which are of their time."""
    docs = {*(ROOT / "docs").rglob("*.md")} - {DOCUMENT}
    files = [ROOT / "Makefile", ROOT / "README.md", *docs, *ROOT.glob("benchmarks/*.py")]
    commands = {found.groups() for file in files for found in COMMAND.finditer(file.read_text("utf-8"))}
    assert len(commands) > 15
    for name, arguments in commands:
        assert name in NAMES, name
        if benchmark := getattr(module(name), "BENCHMARK", None):
            benchmark.parse(shlex.split(arguments))


async def nothing(_):
    raise AssertionError


TRIED = Benchmark(
    "tried",
    nothing,
    (
        Option("--steps", 100, "of a round", 4),
        Option("--sizes", [1, 8], "of a batch", [1]),
        Option("--all", False, "a flag"),
        Option("--folder", None, "of something", kind=Path),
    ),
    variant=lambda options: "large" if options.steps > 100 else "",
    round_s=2.0,
)


def test_what_is_not_given_is_the_default_or_that_of_a_quick_run():
    usual, quick, given = (TRIED.parse(shlex.split(each)) for each in ("", "--quick", "--quick --steps 0 --sizes 3 4"))
    assert (usual.steps, usual.sizes, usual.rounds, usual.round_seconds) == (100, [1, 8], 5, 2.0)
    assert (quick.steps, quick.sizes, quick.rounds, quick.round_seconds) == (4, [1], 2, 0.01)
    assert (given.steps, given.sizes, given.all, given.folder) == (0, [3, 4], False, None)
    assert given.command == "python -m benchmarks tried --quick --steps 0 --sizes 3 4"


def test_a_quick_run_is_no_result_and_a_variant_is_one_of_its_own():
    label = machine.label(machine.hardware())
    assert TRIED.parse([]).out == machine.RESULTS / f"tried-{label}.json"
    assert TRIED.parse(["--steps", "101"]).out == machine.RESULTS / f"tried-large-{label}.json"
    assert not TRIED.parse(["--quick"]).out.is_relative_to(machine.RESULTS)
    assert TRIED.parse(["--out", "x.json"]).out == Path("x.json")


def test_a_table_that_is_put_again_replaces_the_first_and_so_does_a_target(tmp_path):
    record = Record(TRIED.parse(["--out", str(tmp_path / "tried.json")]), threads=2)
    for value in (1.0, 3.0):
        rows = [{"way": "one", "ms": value, "target": target("ms of a row", value, 4.0, least=False, unit=" ms")}]
        rows.append({"way": "two", "ms": 5.0, "target": target("", 5.0, 6.0)})
        record.put("rates", rows, targets=[target("a rate", value, 2.0)])
    values = record.values
    one, two = rows_of(values["tables"]["rates"])
    assert (one, two["target"]) == ({"way": "one", "ms": 3.0, "target": "≤ 4 ms"}, "≥ 6"), "bounds are written"
    standing = {each["what"]: each["value"] for each in values["targets"]}
    assert standing == {"a rate": 3.0, "ms of a row": 3.0} and values["settings"]["threads"] == 2
