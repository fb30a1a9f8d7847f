"""Links that work on a forge, changed to links that work on the site."""

from __future__ import annotations

import posixpath
import re
from typing import Final

from tools.commands import ROOT

PAGES: Final = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""Files outside of `docs/` that are pages, and their names on the site."""
EXAMPLES: Final = "examples.md"
"""The page that shows the programs of `examples/`."""
LINK: Final = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def anchor_of(example: str) -> str:
    """The anchor of a program of `examples/` on the page that has them all."""
    return posixpath.basename(example).removesuffix(".py").replace(".", "-")


def relinked(text: str, source: str, page: str) -> str:
    """Text with links for the site. ``source``: the file that it comes from, in the repository. ``page``: the page that
    it is on. A link to a file that is no page becomes its text."""

    def linked(found: re.Match[str]) -> str:
        label, target = found.groups()
        path, _, heading = target.partition("#")
        if "://" in target:
            return found[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path)) if path else source
        if file.startswith("docs/"):
            place = file.removeprefix("docs/")
        elif file in PAGES:
            place = PAGES[file]
        elif file.startswith("examples/") and (ROOT / file).exists():
            place, heading = EXAMPLES, anchor_of(file)
        else:
            return label if (ROOT / file).exists() else found[0]
        path = "" if place == page else posixpath.relpath(place, posixpath.dirname(page) or ".")
        return f"[{label}]({path}{'#' if heading else ''}{heading})"

    return LINK.sub(linked, text)
