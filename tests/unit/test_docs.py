"""What the docs say of the code is there: files and folders, names in the code, ends of links."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from ferrum_rpc.client import ExecutorClient
from ferrum_rpc.client.fleet import FleetClient

ROOT = Path(__file__).parents[2]
LAYOUT = ("architecture.md", "kernels.md")
"""The docs that name files and what is in them."""
FOLDERS = (ROOT, ROOT / "ferrum_rpc", ROOT / "docs", ROOT / "protos" / "ferrum_rpc" / "executor" / "v1")
SOURCES = ("ferrum_rpc", "ferrum_rpc_kernels", "clients", "protos")
PATH = re.compile(r"[\w.*-]+(?:/[\w.*-]+)*/?")
NAME = re.compile(r"[A-Za-z_]\w+(?:\.[A-Za-z_]\w+)*(?=\(|$)")


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text("utf-8")


def code(text: str) -> list[str]:
    """What stands between backticks, code blocks aside."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


@cache
def words() -> frozenset[str]:
    """Every word of the sources, file names among them, and those of the Makefile."""
    files = [path for name in SOURCES for path in (ROOT / name).rglob("*.*")]
    found = set(re.findall(r"\w+", (ROOT / "Makefile").read_text()))
    for path in [each for each in files if each.suffix in {".py", ".c", ".h", ".proto"}]:
        found |= {path.stem, *re.findall(r"\w+", path.read_text())}
    return frozenset(found)


def missing_paths(text: str) -> list[str]:
    """Paths that no file or folder has. A word is a path where it has a slash in it, or a suffix of ours."""
    ours = re.compile(r"/|\.(py|c|h|md|toml|yml|proto)$")
    paths = [each for each in code(text) if PATH.fullmatch(each) and ours.search(each)]
    return [each for each in paths if not any(list(folder.glob(each)) for folder in FOLDERS)]


def missing_names(text: str) -> list[str]:
    """Names of which a part occurs nowhere in the sources."""
    names = [found[0] for each in code(text) if "/" not in each and (found := NAME.match(each))]
    return [each for each in names if not set(each.split(".")) <= words() | {"py"}]


@pytest.mark.parametrize("name", LAYOUT)
def test_files_and_names_that_the_layout_mentions_exist(name: str) -> None:
    text = page(name)
    assert missing_paths(text) == []
    assert missing_names(text) == []


def test_the_picture_mentions_files_that_exist() -> None:
    [picture] = re.findall(r"^```\n(.*?)^```", page("architecture.md"), re.DOTALL | re.MULTILINE)
    paths = re.findall(r"(?<![\w/])(?:service|wire|engine|kv|attention|models|sampling|native)/\w*", picture)
    assert len(paths) > 12
    assert [each for each in paths if not any((ROOT / "ferrum_rpc").glob(f"{each.rstrip('/')}*"))] == []


EACH_PAGE = pytest.mark.parametrize(
    "path",
    [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")), *sorted((ROOT / "docs").rglob("*.md"))],
    ids=lambda each: each.name,
)


@EACH_PAGE
def test_files_of_the_repository_that_a_page_mentions_exist(path: Path) -> None:
    folders = {each.name for each in ROOT.iterdir() if each.is_dir()}
    paths = [each for each in code(path.read_text("utf-8")) if PATH.fullmatch(each) and each.split("/")[0] in folders]
    missing = [each for each in paths if "/" in each and not list(ROOT.glob(each))]
    assert [each for each in missing if not each.startswith("benchmarks/results/")] == []  # a run makes those


@EACH_PAGE
def test_links_end_at_files_and_at_headings(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text("utf-8")):
        if "://" in target:
            continue
        file, _, heading = target.partition("#")
        linked = path.parent / file if file else path
        assert linked.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", linked.read_text("utf-8"), re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}, target


def test_the_figures_of_the_readme_are_those_of_the_benchmarks() -> None:
    [glance] = re.findall(r"^## All engines at a glance$(.*?)^## ", page("benchmarks.md"), re.S | re.M)
    figures = re.findall(r"([\d.]+) ×", (ROOT / "README.md").read_text("utf-8"))
    assert len(figures) >= 4
    assert [each for each in figures if f"({each} ×)" not in glance] == []


TEXTS = (".md", ".py", ".toml", ".yaml", "Dockerfile", "Makefile")


def test_what_a_fleet_lacks_is_on_its_page() -> None:
    table = page("fleet.md").partition("`ExecutorClient` has these methods, and a fleet does not:")[2].split("\n\n")[1]
    named = {name for row in table.splitlines()[2:] for name in code(row.split("|")[1])}
    lacking = {each for each in dir(ExecutorClient) if not each.startswith("_")} - {*dir(FleetClient)}
    assert named - {"all_or_nothing", "lease_id"} == lacking


def test_nothing_says_that_this_project_is_on_a_package_index() -> None:
    """Whoever registers the name there would be installed."""
    said = re.compile(r"pip3? install(?:\s+-\S+)*[\s\"'f]*ferrum[-_]rpc")
    assert said.search("pip install -U 'ferrum-rpc[x]'") and said.search('"pip install "\n  f"\'ferrum-rpc[x]\'"')
    assert not said.search("pip install '.[x]' ./ferrum_rpc_kernels")
    folders = [ROOT / each for each in ("benchmarks", "clients", "deploy", "docs", "tests", "tools")]
    files = [each for folder in (*folders, *ROOT.glob("ferrum_rpc*")) for each in folder.rglob("*")]
    files = [each for each in (*files, *ROOT.glob("*")) if each.name.endswith(TEXTS)]
    assert len(files) > 400
    assert [str(each) for each in files if each != Path(__file__) and said.search(each.read_text("utf-8"))] == []


def test_every_flag_of_serve_is_explained(command: Callable[..., tuple[int, str, str]]) -> None:
    """By its name, or that of its setting; what has a ``--no-`` in front is explained with the flag."""
    flags = set(re.findall(r"^ +(--[a-z0-9-]+)", command("serve", "--help")[1], re.MULTILINE))
    assert len(flags) > 70
    text = page("operations.md") + page("fleet.md")
    named = set(re.findall(r"--[a-z0-9-]+", text))
    named |= {f"--{each.replace('_', '-')}" for each in re.findall(r"`([a-z_]+)`", text)}
    named |= {f"--{each.replace('_', '-')}" for each in re.findall(r"^([a-z_]+) = ", text, re.MULTILINE)}
    assert sorted(flags - named) == []


def test_what_is_not_there_is_found() -> None:
    text = "`service/no_such.py`, `errors.py`, `NoSuchName.here`, `Span`, `make stubs`, `tests/unit/no/`"
    assert missing_paths(text) == ["service/no_such.py", "tests/unit/no/"]
    assert missing_names(text) == ["NoSuchName.here"]
