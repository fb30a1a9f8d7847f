"""Commands that tools run, and what is shown of one that does not work."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
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
