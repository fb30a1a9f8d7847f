"""Commands that tools run, what is shown of one that does not work, and the command line of what generates files."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class Failed(Exception):
    """A check did not hold, or a command did not work."""


def run(command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float = 120) -> str:
    """What a command wrote to its output; raises `Failed` with the last lines of that and of its errors."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=env, timeout=timeout, capture_output=True, text=True, errors="replace", check=False
        )
    except subprocess.TimeoutExpired as error:
        output = b"".join(part for part in (error.stdout, error.stderr) if isinstance(part, bytes))
        raise Failed(f"`{' '.join(command)}` took more than {timeout:.0f} s\n{tail(output.decode())}") from None
    if done.returncode:
        raise Failed(f"`{' '.join(command)}` exited {done.returncode}\n{tail(done.stdout + done.stderr)}")
    return done.stdout


def tail(text: str, lines: int = 40) -> str:
    """The last lines, indented."""
    return indent("\n".join(text.strip().splitlines()[-lines:]))


def indent(text: str) -> str:
    """Every line, indented."""
    return "\n".join(f"    {line}" for line in text.strip().splitlines())


def write_or_check(generate: Callable[[], Mapping[Path, bytes]], committed: Iterable[Path] = ()) -> None:
    """Write generated files, or exit with status 1 where one differs if the command line says so. ``committed``: files
    that go where they are not generated any more."""
    parser = argparse.ArgumentParser(description="Generate files of this repository.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a file differs")
    check, texts = parser.parse_args().check, generate()
    gone = set(committed) - set(texts)
    changed = {path for path, text in texts.items() if not path.exists() or path.read_bytes() != text}
    if not check:
        for path in gone:
            path.unlink()
        for path in changed:
            path.write_bytes(texts[path])
    elif gone | changed:
        names = sorted(str(path.relative_to(ROOT)) for path in gone | changed)
        sys.exit(f"not what they are generated from, run `make stubs`: {', '.join(names)}")
