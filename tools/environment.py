"""Make .venv where there is none that works, and install the packages of this checkout into it, with the extras named.

`make` runs it with the Python that the user has, of whatever version: it needs the standard library alone, keeps to
what Python 3.6 reads, and says which versions would do before it makes anything. An installation that was cut off
leaves a mark, and the next one begins with an empty environment: what pip left half-written it would take for
installed.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BESIDE = ("./ferrum_rpc_kernels", "./ferrum_rpc_demo")
INTERRUPTED = 130


def versions(root: Path) -> "tuple[int, int]":
    """The lowest minor version of Python 3 that works, and the lowest above it that does not."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^requires-python = ">=3\.(\d+),<3\.(\d+)"$', text, re.MULTILINE)
    assert found is not None
    return int(found[1]), int(found[2])


def works(root: Path, version: "tuple[int, ...]") -> bool:
    """Whether a version of Python is among ours."""
    low, high = versions(root)
    return (3, low) <= version < (3, high)


def trouble(root: Path) -> "str | None":
    """Why the environment that is there cannot be used, or None."""
    if (root / ".venv" / ".unfinished").exists():
        return "its installation was cut off"
    probe = [str(root / ".venv" / "bin" / "python"), "-c", "import sys, pip; print(*sys.version_info[:2])"]
    try:
        said = subprocess.run(probe, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "it has no Python with pip"
    version = tuple(map(int, said.split()))
    return None if works(root, version) else "its Python is {}.{}".format(*version)


def create(root: Path) -> None:
    """An empty environment; none at all where that fails."""
    if not works(root, sys.version_info[:2]):
        low, high = versions(root)
        mine = "{}.{}.{}".format(*sys.version_info)
        newest = f"3.{high - 1}"
        sys.exit(f"this is Python {mine}, and 3.{low} to {newest} are needed; name one: make PYTHON=python{newest} ...")
    folder = root / ".venv"
    try:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, subprocess.CalledProcessError):
            sys.exit("no environment could be made in .venv (on Debian that needs the package python3-venv)")
        raise


def install(root: Path, extras: str) -> int:
    """Install the checkout; the exit status of pip."""
    folder = root / ".venv"
    mark = folder / ".unfinished"
    mark.touch()
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    if not sys.stdout.isatty():  # where nobody watches the bars
        pip.append("--quiet")
    packages = [part for each in (f".[{extras}]", *BESIDE) for part in ("-e", each)]
    with subprocess.Popen([*pip, "-c", "constraints.txt", *packages], cwd=root) as running:
        try:
            status = running.wait()
        except KeyboardInterrupt:
            running.wait()  # it was interrupted too, and cleans up
            raise
    # A later installation that fails by itself, as it does without a network, leaves what was there as it was.
    if status == 0 or (status > 0 and (folder / ".server").exists()):
        mark.unlink()
    return status


def main(extras: str, root: Path = ROOT) -> int:
    """Exit status 0; another where nothing could be installed."""
    try:
        why = trouble(root) if (root / ".venv").exists() else "there is none"
        if why is not None:
            print(f"making .venv ({why})", flush=True)
            create(root)
        return install(root, extras)
    except KeyboardInterrupt:
        print("\ninterrupted; the next `make` begins anew", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
