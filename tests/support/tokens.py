"""Files of tokens, and the metadata of callers that have one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a caller with a token."""
    return (("authorization", f"Bearer {token}"),)


def write_tokens(folder: Path, *lines: str) -> Path:
    """A file that nobody else may read. A line: a name, its token, and its role perhaps."""
    path = folder / "tokens"
    path.touch(0o600)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@contextmanager
def token_file(*lines: str) -> Iterator[Path]:
    """The same, in a folder of its own."""
    with TemporaryDirectory() as folder:
        yield write_tokens(Path(folder), *lines)
