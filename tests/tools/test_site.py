"""The documentation site: it builds without a warning, and its pages load nothing from another host."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tools.commands import ROOT

pytest.importorskip("mkdocs", reason="the site needs the extra docs")

from tools.site.links import relinked

LOADED = {"icon", "stylesheet", "preload", "modulepreload", "prefetch", "preconnect", "dns-prefetch", "manifest"}
"""What a link must be for a browser to ask its host for something."""
SHOWN = {"a", "link", "meta"}
"""Elements with addresses that a browser does not load by itself, or only as `LOADED`."""
HARMLESS = r"https?://(?:www\.w3\.org/|bit\.ly/2s3ChXG|tartarus\.org|lunrjs\.com|clipboardjs\.com/|fontawesome\.com)"
"""Namespaces of XML, and addresses in comments and messages of the theme's own files."""


class Requests(HTMLParser):
    """The addresses of other hosts that a browser asks when it shows a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag in SHOWN and not (tag == "link" and LOADED & set(values.get("rel", "").split())):
            return
        found = [value for value in values.values() if re.search(r"(?<![\w/])(?:https?:)?//\w", value)]
        self.found += [each for each in found if not re.match(HARMLESS, each)]


def requests(path: Path) -> list[str]:
    """The addresses of other hosts that a file of the site asks for."""
    text = path.read_text("utf-8")
    if path.suffix == ".html":
        page = Requests()
        page.feed(text)
        return page.found
    return re.findall(rf"(?!{HARMLESS})https?://[\w./@-]+", text)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


def test_every_page_of_the_repository_is_on_the_site(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    built = {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")}
    assert len(pages) > 10
    assert pages <= built
    assert {Path(each) for each in ("index", "changelog", "contributing", "security", "examples")} <= built


def test_no_file_of_the_site_asks_another_host(site: Path) -> None:
    files = [path for path in site.rglob("*") if path.suffix in {".html", ".css", ".js", ".svg"}]
    assert len([path for path in files if path.suffix == ".html"]) > 10
    assert {str(path.relative_to(site)): found for path in files if (found := requests(path))} == {}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.html", '<script src="https://example.org/a.js"></script>'),
        ("a.html", '<script src="//example.org/a.js"></script>'),
        ("a.html", '<link rel="stylesheet" href="https://example.org/a.css">'),
        ("a.html", '<link rel="preconnect" href="https://example.org">'),
        ("a.html", '<img srcset="a.png 1x, https://example.org/b.png 2x">'),
        ("a.html", '<p style="background: url(https://example.org/a.png)">'),
        ("a.css", '@import "https://example.org/a.css";'),
        ("a.js", 'load("https://example.org/a.js")'),
        ("a.svg", '<image href="https://example.org/a.png"/>'),
    ],
)
def test_what_asks_another_host_is_found(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert requests(path) != []


def test_a_link_that_only_a_reader_follows_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    path.write_text('<a href="https://example.org/">that</a><link rel="canonical" href="https://example.org/a.html">')
    assert requests(path) == []


@pytest.mark.parametrize(
    ("source", "page", "link", "expected"),
    [
        ("README.md", "index.md", "[a](docs/contract.md#errors)", "[a](contract.md#errors)"),
        ("README.md", "index.md", "[`a`](clients/scheduler)", "`a`"),
        ("docs/client.md", "client.md", "[a](../clients/scheduler) and [b](fleet.md)", "a and [b](fleet.md)"),
        ("docs/client.md", "client.md", "[a](../CHANGELOG.md)", "[a](changelog.md)"),
        (
            "docs/client.md",
            "client.md",
            "[a](#errors) [b](https://example.org)",
            "[a](#errors) [b](https://example.org)",
        ),
        ("docs/no/such.md", "no/such.md", "[a](../client.md) [b](missing.md)", "[a](../client.md) [b](missing.md)"),
    ],
)
def test_links_of_a_forge_end_on_the_site(source: str, page: str, link: str, expected: str) -> None:
    assert relinked(link, source, page) == expected


QUESTIONS = tomllib.loads((Path(__file__).with_name("site_questions.toml")).read_text("utf-8"))["question"]


@pytest.fixture(scope="module")
def hits(site: Path) -> list[str | None]:
    """The first hit of each question, by the search that the pages run."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("the search of the site runs in Node.js, which is not installed")
    command = [node, str(Path(__file__).with_name("site_search.mjs")), str(site), *(each["ask"] for each in QUESTIONS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: list[str | None] = json.loads(done.stdout)
    return found


def test_there_are_twenty_questions_and_their_answers_are_there(site: Path) -> None:
    assert len([each for each in QUESTIONS if each["pages"]]) >= 20
    for each in {page for question in QUESTIONS for page in question["pages"]}:
        page, _, anchor = each.partition("#")
        assert not anchor or f'id="{anchor}"' in (site / page).read_text("utf-8"), each


@pytest.mark.parametrize("at", range(len(QUESTIONS)), ids=lambda at: str(QUESTIONS[at]["ask"]))
def test_the_first_hit_answers(hits: list[str | None], at: int) -> None:
    hit, pages = hits[at], QUESTIONS[at]["pages"]
    if not pages:
        assert hit is None, "a word that is nowhere has no hit"
    else:
        assert hit is not None and {hit, hit.partition("#")[0]} & {*pages}, f"{hit} is not one of {pages}"
