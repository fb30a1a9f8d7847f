"""The training text: public-domain English out of four Debian packages, as a list of documents.

The packages are fetched with `apt-get download` and unpacked with `dpkg-deb -x` into a cache folder, so nothing is
installed and no address is named here. A document is one chapter; the split into training and validation text is by
chapter, so no held-out sentence has a neighbour in the training text. This module knows nothing of models.
"""

from __future__ import annotations

import re
import struct
import subprocess
import unicodedata
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_EVERY = 20
"""One chapter in this many is validation text (5 %)."""

MIN_DOCUMENT = 400
"""Shorter pieces (title pages, dedications) are dropped."""


@dataclass(frozen=True)
class Source:
    """One body of text: the packages that carry it, its licence in words, and how to read it.

    `read` gets the folder of each unpacked package, in the order of `packages`, and returns documents.
    """

    title: str
    packages: tuple[str, ...]
    licence: str
    read: Callable[[list[Path]], list[str]]


@dataclass(frozen=True)
class Corpus:
    """Documents (ASCII, paragraphs separated by an empty line) and the package versions they came from."""

    train: list[str]
    valid: list[str]
    versions: dict[str, str]

    def words(self) -> set[str]:
        """Every lower-cased word of the training text."""
        return {word for text in self.train for word in split_words(text)}


# ── reading the formats ──────────────────────────────────────────────────────────────────────────────────────────


def _only(root: Path, pattern: str) -> Path:
    found = sorted(root.rglob(pattern))
    if len(found) != 1:
        raise FileNotFoundError(f"expected one {pattern} in the package, found {len(found)}")
    return found[0]


def _r_strings(data: bytes) -> list[str]:
    """The strings of one R character vector in R's XDR serialization, version 2 or 3 ("R Internals", section 1.8).

    >>> _r_strings(b"X\\n" + struct.pack(">5i", 2, 0, 0, 16, 1) + struct.pack(">2i", 0x40009, 2) + b"hi")
    ['hi']
    """
    if data[:2] != b"X\n":
        raise ValueError("not an XDR serialization")
    (version,) = struct.unpack_from(">i", data, 2)
    at = 14
    if version == 3:
        (length,) = struct.unpack_from(">i", data, at)
        at += 4 + length
    flags, count = struct.unpack_from(">ii", data, at)
    at += 8
    if flags & 0xFF != 16:
        raise ValueError("not a character vector")
    strings = []
    for _ in range(count):
        _, length = struct.unpack_from(">ii", data, at)
        at += 8
        strings.append(data[at : at + max(length, 0)].decode("utf-8"))
        at += max(length, 0)
    return strings


def _r_vectors(database: bytes) -> Iterator[list[str]]:
    """Each vector of an R lazy-load database: a big-endian length, then a zlib stream, again and again."""
    at = 0
    while at < len(database):
        stream = zlib.decompressobj()
        data = stream.decompress(database[at + 4 :])
        at = len(database) - len(stream.unused_data)
        yield _r_strings(data)


def _austen(folders: list[Path]) -> list[str]:
    novels = _r_vectors(_only(folders[0], "data/Rdata.rdb").read_bytes())
    return [chapter for lines in novels for chapter in _chapters("\n".join(lines))]


def _bible(folders: list[Path]) -> list[str]:
    """One document per chapter, one verse per line, without the numbers. The package's own program decodes its data."""
    data = _only(folders[0], "bible.data").parent
    program = _only(folders[1], "bin/bible")
    dump = subprocess.run(
        [str(program), "-p", str(data), "-l", "0", "-f", "Gen1:1-Rev22:21"], capture_output=True, check=True, text=True
    ).stdout
    chapters: dict[str, list[str]] = {}
    for line in dump.splitlines():
        reference, _, verse = line.partition(" ")
        chapters.setdefault(reference.partition(":")[0], []).append(verse.strip())
    return ["\n".join(verses) for verses in chapters.values()]


def _sherlock_and_tom(folders: list[Path]) -> list[str]:
    """Two novels that a compression library carries as test data; the distributor's header and footer are cut off."""
    holmes = _only(folders[0], "testdata/pg1661.txt").read_text("utf-8-sig")
    holmes = re.split(r"^\*\*\* (?:START|END) OF .*$", holmes, flags=re.M)[1]
    holmes = re.sub(r"^End of the Project.*\Z", "", holmes, flags=re.M | re.S)
    tom = _only(folders[0], "testdata/Mark.Twain-Tom.Sawyer.txt").read_text("utf-8")
    return _chapters(holmes) + _chapters(tom)


SOURCES = (
    Source(
        "Jane Austen: Emma, Mansfield Park, Northanger Abbey, Persuasion, Pride and Prejudice, Sense and Sensibility",
        ("r-cran-janeaustenr",),
        "public domain (1811-1818); the package around the text is MIT",
        _austen,
    ),
    Source(
        "Arthur Conan Doyle: The Adventures of Sherlock Holmes; Mark Twain: The Adventures of Tom Sawyer",
        ("golang-github-pierrec-lz4-dev",),
        "public domain (1892, 1876); the package around the text is BSD-3-Clause",
        _sherlock_and_tom,
    ),
    Source(
        "The Bible, King James Version",
        ("bible-kjv-text", "bible-kjv"),
        "public domain (1611); the program that decodes it is GPL-2+ and is only run, not copied",
        _bible,
    ),
)


# ── cleaning ─────────────────────────────────────────────────────────────────────────────────────────────────────

_PUNCTUATION = str.maketrans(
    {
        "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "--", "\u2026": "...",
        "\u00a0": " ", "\u00a3": "L", "\u00e6": "ae", "\u0153": "oe", "\u00b4": "'", "\ufeff": "",
    }
)  # fmt: skip
_HEADING = re.compile(r"^\s*(?:CHAPTER|Chapter|ADVENTURE)\s+[IVXLC\d]+\b", flags=re.M)


def to_ascii(text: str) -> str:
    """Typographic quotes and dashes to ASCII ones, accents off, anything else that is not ASCII dropped.

    >>> to_ascii("\\u201cBrontë\\u201d \\u2014 caf\\u00e9")
    '"Bronte" -- cafe'
    """
    text = unicodedata.normalize("NFKD", text.translate(_PUNCTUATION))
    return text.encode("ascii", "ignore").decode("ascii")


def unwrap(text: str) -> str:
    """Hard-wrapped text to one line per paragraph; italics' underscores and runs of blanks go.

    >>> unwrap("It _was_\\n  so.\\n\\n\\nYes.")
    'It was so.\\n\\nYes.'
    """
    text = text.replace("\r\n", "\n").replace("_", "")
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return "\n\n".join(part for part in paragraphs if part)


def _chapters(text: str) -> list[str]:
    starts = [match.start() for match in _HEADING.finditer(text)]
    return [unwrap(text[a:b]) for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]


def split_words(text: str) -> list[str]:
    """Whitespace-separated words, lower-cased, without the punctuation around them; `--` separates too.

    >>> split_words('"Oh!--no," said she')
    ['oh', 'no', 'said', 'she']
    """
    words = (word.strip(".,;:!?'\"()[]-*").lower() for word in text.replace("--", " ").split())
    return [word for word in words if word]


# ── fetching ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _unpack(package: str, cache: Path) -> Path:
    """The folder of an unpacked Debian package, downloaded into `cache` unless it is there already."""
    folder = cache / package
    if not folder.exists():
        subprocess.run(["apt-get", "download", package], cwd=cache, check=True, capture_output=True)
        archive = _only(cache, f"{package}_*.deb")
        subprocess.run(["dpkg-deb", "-x", archive.name, package], cwd=cache, check=True)
    return folder


def load(cache: Path) -> Corpus:
    """Fetch what is missing, read every source, split by chapter. The order of documents is fixed."""
    cache.mkdir(parents=True, exist_ok=True)
    documents: list[str] = []
    versions: dict[str, str] = {}
    for source in SOURCES:
        folders = [_unpack(package, cache) for package in source.packages]
        documents += [to_ascii(document) for document in source.read(folders)]
        versions |= {package: _only(cache, f"{package}_*.deb").name.split("_")[1] for package in source.packages}
    documents = [document for document in documents if len(document) >= MIN_DOCUMENT]
    train = [document for at, document in enumerate(documents) if at % HELD_OUT_EVERY != HELD_OUT_EVERY // 2]
    valid = [document for at, document in enumerate(documents) if at % HELD_OUT_EVERY == HELD_OUT_EVERY // 2]
    return Corpus(train, valid, versions)
