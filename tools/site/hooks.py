"""Hooks of MkDocs, which mkdocs.yml names.

The pages in `docs/` are written to be read on a forge too. So the home page is README.md, and links may leave `docs/`:
a link to a page of the site becomes a link to that page, and a link to another file of the repository becomes its text,
because the site has no copy of that file and the repository has no public address.

No page may send a request to another host. The theme's script has two addresses of a package host, from which it would
load what very old browsers and diagrams need; the built copy has them removed.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File, Files

from tools.commands import ROOT
from tools.site import protos, python, reference
from tools.site.links import EXAMPLES, PAGES, anchor_of, relinked

RANKS: Final = {"concepts/": 2, "howto/": 2, "reference/proto-": 0.2, "reference/python-": 0.2, "examples": 0.5}
"""Weights of pages in the search by how their paths begin: explanations first, names of code last."""
HOSTED: Final = re.compile(r"https://(?:unpkg\.com|api\.github\.com)[\w./@-]*")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in `docs/`."""
    pages = {**reference.pages(), **protos.pages(), **python.pages()}
    for source, page in PAGES.items():
        pages[page] = relinked((ROOT / source).read_text("utf-8"), source, page)
    pages[EXAMPLES] = "\n".join(examples())
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    return files


def examples() -> Iterator[str]:
    """The programs of `examples/`, each with its path as its heading."""
    yield from ("# Examples", "", "The test suite runs each of these programs against the demo model.")
    for path in sorted((ROOT / "examples").glob("*.[pj][ys]")):
        yield from ("", f"## `examples/{path.name}` {{ #{anchor_of(path.name)} }}", "")
        yield from ("```python" if path.suffix == ".py" else "```js", path.read_text("utf-8").strip(), "```")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let the links of a page in `docs/` end on the site, and rank the page in the search."""
    folder = next((each for each in RANKS if page.file.src_uri.startswith(each)), "")
    page.meta.setdefault("search", {}).setdefault("boost", RANKS.get(folder, 1))
    if page.file.generated_by:
        return markdown
    return relinked(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)


def on_post_build(config: Any) -> None:
    """Remove the addresses of other hosts from the theme's script, and the search's other languages."""
    scripts = Path(config.site_dir, "assets", "javascripts")
    shutil.rmtree(scripts / "lunr")
    for script in scripts.glob("bundle.*.js"):
        script.write_text(HOSTED.sub("about:blank", script.read_text("utf-8")), "utf-8")
