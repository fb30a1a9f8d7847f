"""The documentation site: it builds without a warning, and its pages load nothing from another host."""

import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import tomllib
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.tools.running import ran
from tools.commands import ROOT, run

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

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        values = {name: value or "" for name, value in attrs}
        if tag in SHOWN and not (tag == "link" and LOADED & set(values.get("rel", "").split())):
            return
        found = [value for value in values.values() if re.search(r"(?<![\w/])(?:https?:)?//\w", value)]
        self.found += [each for each in found if not re.match(HARMLESS, each)]


def requests(suffix, text):
    """The addresses of other hosts that a file of the site asks for."""
    if suffix == ".html":
        page = Requests()
        page.feed(text)
        return page.found
    return re.findall(rf"(?!{HARMLESS})https?://[\w./@-]+", text)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = ran(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


def test_every_page_of_the_repository_is_on_the_site(site):
    pages = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    built = {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")}
    assert len(pages) > 10
    assert pages <= built
    assert {Path(each) for each in ("index", "changelog", "contributing", "security", "examples")} <= built


def test_no_file_of_the_site_asks_another_host(site):
    files = [path for path in site.rglob("*") if path.suffix in {".html", ".css", ".js", ".svg"}]
    assert len([path for path in files if path.suffix == ".html"]) > 10
    assert {path: found for path in files if (found := requests(path.suffix, path.read_text("utf-8")))} == {}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("html", '<script src="https://example.org/a.js"></script>'),
        ("html", '<script src="//example.org/a.js"></script>'),
        ("html", '<link rel="stylesheet" href="https://example.org/a.css">'),
        ("html", '<link rel="preconnect" href="https://example.org">'),
        ("html", '<img srcset="a.png 1x, https://example.org/b.png 2x">'),
        ("html", '<p style="background: url(https://example.org/a.png)">'),
        ("css", '@import "https://example.org/a.css";'),
        ("js", 'load("https://example.org/a.js")'),
        ("svg", '<image href="https://example.org/a.png"/>'),
    ],
)
def test_what_asks_another_host_is_found(kind, text):
    assert requests(f".{kind}", text) != []


def test_a_link_that_only_a_reader_follows_is_allowed():
    text = '<a href="https://example.org/">that</a><link rel="canonical" href="https://example.org/a.html">'
    assert requests(".html", text) == []


@pytest.mark.parametrize(
    ("source", "link", "expected"),
    [
        ("README.md", "[a](docs/contract.md#errors)", "[a](contract.md#errors)"),
        ("README.md", "[`a`](clients/scheduler)", "`a`"),
        ("docs/client.md", "[a](../clients/scheduler) and [b](fleet.md)", "a and [b](fleet.md)"),
        ("docs/client.md", "[a](../CHANGELOG.md)", "[a](changelog.md)"),
        ("docs/client.md", "[a](../examples/scheduler.py)", "[a](examples.md#scheduler)"),
        ("docs/client.md", "[a](../examples/scheduler.js)", "[a](examples.md#scheduler-js)"),
        ("docs/client.md", "[a](#errors) [b](https://example.org)", "[a](#errors) [b](https://example.org)"),
        ("docs/no/such.md", "[a](../client.md) [b](missing.md)", "[a](../client.md) [b](missing.md)"),
    ],
)
def test_links_of_a_forge_end_on_the_site(source, link, expected):
    page = "index.md" if source == "README.md" else source.removeprefix("docs/")
    assert relinked(link, source, page) == expected


HERE = Path(__file__).parent
QUESTIONS = tomllib.loads((HERE / "site_questions.toml").read_text("utf-8"))["question"]


def worker_hits(site):
    """The first hit of each question, by the search that the pages run, in Node.js."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("the search of the site runs in Node.js, which is not installed")
    command = [node, str(HERE / "site_search.mjs"), str(site), *(each["ask"] for each in QUESTIONS)]
    return json.loads(run(command))


def browser_hits(site):
    """The first link that a reader sees who types each question into the first page, in a headless browser."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium is installed")
    hits = queue.Queue()

    class Site(SimpleHTTPRequestHandler):
        """The site, a page that asks it all questions, and what that finds."""

        def do_GET(self):
            if self.path == "/questions":
                self._answer(json.dumps([each["ask"] for each in QUESTIONS]).encode())
            elif self.path == "/ask.html":
                self._answer((HERE / "site_search.html").read_bytes())
            else:
                super().do_GET()

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(b"")
            hits.put([each and urlsplit(each).path.lstrip("/") for each in json.loads(body)])

        def _answer(self, body):
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with (
        ThreadingHTTPServer(("127.0.0.1", 0), partial(Site, directory=str(site))) as server,
        tempfile.TemporaryDirectory() as profile,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={profile}")
        command = [browser, *flags, f"http://127.0.0.1:{server.server_port}/ask.html"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                return hits.get(timeout=120)
            finally:
                process.kill()
                process.wait()
                server.shutdown()


@pytest.fixture(scope="module", params=["worker", "browser"])
def hits(site, request):
    """The first hit of each question, and whether it is the link of a page, with the best of its sections below."""
    return (browser_hits(site), True) if request.param == "browser" else (worker_hits(site), False)


def test_there_are_twenty_questions_and_their_answers_are_there(site):
    assert len([each for each in QUESTIONS if each["pages"]]) >= 20
    for each in {page for question in QUESTIONS for page in question["pages"]}:
        page, _, anchor = each.partition("#")
        assert not anchor or f'id="{anchor}"' in (site / page).read_text("utf-8"), each


@pytest.mark.parametrize("at", range(len(QUESTIONS)), ids=lambda at: str(QUESTIONS[at]["ask"]))
def test_the_first_hit_answers(hits, at):
    found, of_page = hits
    hit, pages = found[at], QUESTIONS[at]["pages"]
    if not pages:
        assert hit is None, "a word that is nowhere has no hit"
    else:
        expected = {*pages} | ({each.partition("#")[0] for each in pages} if of_page else set())
        assert hit is not None and {hit, hit.partition("#")[0]} & expected, f"{hit} is not one of {pages}"
