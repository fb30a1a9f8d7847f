"""The training text: public-domain English out of four Debian packages, as a list of documents.

The packages are fetched with `apt-get download` and unpacked with `dpkg-deb -x` into a cache folder, so nothing is
installed and no address is named here. A document is one chapter; the split into training and validation text is by
chapter, so no held-out sentence has a neighbour in the training text. The model cards name titles and licences.
"""

from __future__ import annotations

import re
import struct
import subprocess
import unicodedata
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HELD_OUT_EVERY: Final = 20
"""One chapter in this many is validation text (5 %)."""

MIN_DOCUMENT: Final = 400
"""Shorter pieces (title pages, dedications) are dropped."""

HEADING: Final = re.compile(r"^\s*(?:CHAPTER|Chapter|ADVENTURE)\s+[IVXLC\d]+\b", flags=re.MULTILINE)
PUNCTUATION: Final = str.maketrans(
    {
        "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "--", "\u2026": "...",
        "\u00a0": " ", "\u00a3": "L", "\u00e6": "ae", "\u0153": "oe", "\u00b4": "'", "\ufeff": "",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Corpus:
    """Documents (ASCII, paragraphs separated by an empty line) and the package versions they came from."""

    train: list[str]
    valid: list[str]
    versions: dict[str, str]


def _only(root: Path, pattern: str) -> Path:
    found = sorted(root.rglob(pattern))
    if len(found) != 1:
        raise FileNotFoundError(f"expected one {pattern} in the package, found {len(found)}")
    return found[0]


def _r_strings(data: bytes) -> list[str]:
    """The strings of one R character vector in R's XDR serialization, version 2 or 3 ("R Internals", section 1.8)."""
    if data[:2] != b"X\n":
        raise ValueError("not an XDR serialization")
    (version,) = struct.unpack_from(">i", data, 2)
    at = 14
    if version == 3:
        at += 4 + struct.unpack_from(">i", data, at)[0]
    flags, count = struct.unpack_from(">ii", data, at)
    at += 8
    if flags & 0xFF != 16:
        raise ValueError("not a character vector")
    strings = []
    for _ in range(count):
        length = max(struct.unpack_from(">ii", data, at)[1], 0)
        strings.append(data[at + 8 : at + 8 + length].decode("utf-8"))
        at += 8 + length
    return strings


def _austen(folders: list[Path]) -> list[str]:
    """An R lazy-load database: a big-endian length, then a zlib stream, again and again; a vector is a novel."""
    database = _only(folders[0], "data/Rdata.rdb").read_bytes()
    documents, at = [], 0
    while at < len(database):
        stream = zlib.decompressobj()
        lines = _r_strings(stream.decompress(database[at + 4 :]))
        at = len(database) - len(stream.unused_data)
        documents += _chapters("\n".join(lines))
    return documents


def _bible(folders: list[Path]) -> list[str]:
    """One document per chapter, one verse per line, without the numbers. The package's own program decodes its data."""
    data = _only(folders[0], "bible.data").parent
    program = [str(_only(folders[1], "bin/bible")), "-p", str(data), "-l", "0", "-f", "Gen1:1-Rev22:21"]
    chapters: dict[str, list[str]] = {}
    for line in subprocess.run(program, capture_output=True, check=True, text=True).stdout.splitlines():
        reference, _, verse = line.partition(" ")
        chapters.setdefault(reference.partition(":")[0], []).append(verse.strip())
    return ["\n".join(verses) for verses in chapters.values()]


def _holmes_and_tom(folders: list[Path]) -> list[str]:
    """Two novels that a compression library carries as test data; the distributor's header and footer are cut off."""
    holmes = _only(folders[0], "testdata/pg1661.txt").read_text("utf-8-sig")
    holmes = re.split(r"^\*\*\* (?:START|END) OF .*$", holmes, flags=re.MULTILINE)[1]
    holmes = re.sub(r"^End of the Project.*\Z", "", holmes, flags=re.MULTILINE | re.DOTALL)
    return _chapters(holmes) + _chapters(_only(folders[0], "testdata/Mark.Twain-Tom.Sawyer.txt").read_text("utf-8"))


SOURCES: Final[tuple[tuple[tuple[str, ...], Callable[[list[Path]], list[str]]], ...]] = (
    (("r-cran-janeaustenr",), _austen),
    (("golang-github-pierrec-lz4-dev",), _holmes_and_tom),
    (("bible-kjv-text", "bible-kjv"), _bible),
)
"""Packages, and what reads their unpacked folders."""


def to_ascii(text: str) -> str:
    """Typographic quotes and dashes to ASCII ones, accents off, anything else that is not ASCII dropped."""
    return unicodedata.normalize("NFKD", text.translate(PUNCTUATION)).encode("ascii", "ignore").decode("ascii")


def _unwrap(text: str) -> str:
    """Hard-wrapped text to one line per paragraph; italics' underscores and runs of blanks go."""
    text = text.replace("\r\n", "\n").replace("_", "")
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return "\n\n".join(part for part in paragraphs if part)


def _chapters(text: str) -> list[str]:
    starts = [match.start() for match in HEADING.finditer(text)]
    return [_unwrap(text[a:b]) for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]


def load(cache: Path) -> Corpus:
    """Fetch what is missing, read every source, split by chapter. The order of documents is fixed."""
    cache.mkdir(parents=True, exist_ok=True)
    documents: list[str] = []
    versions: dict[str, str] = {}
    for packages, read in SOURCES:
        for package in packages:
            if not (cache / package).exists():
                subprocess.run(["apt-get", "download", package], cwd=cache, check=True, capture_output=True)
                archive = _only(cache, f"{package}_*.deb").name
                subprocess.run(["dpkg-deb", "-x", archive, package], cwd=cache, check=True)
            versions[package] = _only(cache, f"{package}_*.deb").name.split("_")[1]
        documents += [to_ascii(document) for document in read([cache / package for package in packages])]
    documents = [document for document in documents if len(document) >= MIN_DOCUMENT]
    held_out = set(range(HELD_OUT_EVERY // 2, len(documents), HELD_OUT_EVERY))
    train = [document for at, document in enumerate(documents) if at not in held_out]
    return Corpus(train, [documents[at] for at in sorted(held_out)], versions)
