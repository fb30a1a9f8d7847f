"""What the package index gives for our requirements, with every setting of this machine ignored.

`make lint` asks with `--check`: both installations can be resolved for every Python that we take, from wheels alone. A
wheel that lies on a developer's disk, or an index of the developer's own, hides that they cannot. And the lists in
`locked/`, from which the images are built, are what constraints.txt says. `make lock` writes these lists: every package
that an image installs, with the hashes of its files.

Without a network the check says SKIPPED, with exit status 0.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.commands import ROOT, indent
from tools.environment import versions
from tools.wheels import IMAGE_PYTHON, LOCKED

UV: Final = (sys.executable, "-m", "uv")
COMPILE: Final = ("pip", "compile", "--quiet", "--native-tls", "--no-header", "--no-annotate", "-c", "constraints.txt")
INSTALLATIONS: Final = {"make demo": ("server", "uvloop"), "make test": ("server", "dev")}
"""Extras by the command that installs them."""
PLATFORM: Final = "x86_64-manylinux_2_28"
IMAGES: Final = {"executor": ("server", "uvloop", "grammar"), "scheduler": ("scheduler",), "worker": ("smg",)}
"""Extras by the list that is locked for them; `build` is what builds our own package."""
UNREACHABLE: Final = "client error (Connect)"


@dataclass(frozen=True, slots=True)
class Answer:
    """How uv ended: for what, what it printed, and why it failed, which is empty where it did not."""

    what: str
    output: str
    failure: str

    @property
    def reached(self) -> bool:
        """Whether the index was there."""
        return UNREACHABLE not in self.failure


def ask(what: str, arguments: Sequence[str], requirements: str = "") -> Answer:
    """Run uv without a setting of this machine; what it trusts and its proxies stay. ``requirements``: its input."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_", "VIRTUAL_ENV"))}
    environment = kept | {"UV_NO_CONFIG": "1", "UV_HTTP_RETRIES": "1"}
    command = [*UV, *COMPILE, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, input=requirements, capture_output=True, text=True, check=False
    )
    return Answer(what, done.stdout, done.stderr.strip() or f"exit status {done.returncode}" if done.returncode else "")


def with_extras(extras: Sequence[str]) -> list[str]:
    """Arguments that name the project with these extras."""
    return ["pyproject.toml", *(part for extra in extras for part in ("--extra", extra))]


def resolve(python: str, command: str) -> Answer:
    """Resolve an installation for a version of Python."""
    arguments = [*with_extras(INSTALLATIONS[command]), "--only-binary", ":all:"]
    arguments += ["--python-version", python, "--python-platform", PLATFORM]
    return ask(f"`{command}` with Python {python}", arguments)


def lock(name: str) -> Answer:
    """The text of a list with hashes for all platforms. Where constraints.txt leaves a choice, what is locked stays."""
    requirements = ""
    if name == "build":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())
        requirements = "\n".join(project["build-system"]["requires"])
    source = ["-"] if requirements else with_extras(IMAGES[name])
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder, path_of(name).name)
        if path_of(name).exists():
            shutil.copy(path_of(name), fresh)
        flags = ["--universal", "--generate-hashes", "--python-version", IMAGE_PYTHON, "--output-file", str(fresh)]
        answer = ask(f"locked/{name}.txt", [*source, *flags], requirements)
        return Answer(answer.what, "" if answer.failure else fresh.read_text(), answer.failure)


def path_of(name: str) -> Path:
    """A list's file."""
    return LOCKED / f"{name}.txt"


def pins(text: str) -> set[str]:
    """The lines of a list without their hashes. To a release that is out files may be added, as for a new Python."""
    return set(re.findall(r"^[^\s#].*?(?= *\\?$)", text, re.MULTILINE))


def check() -> int:
    """Resolve everything at once; exit status 0 if all can be resolved and the lists are in step."""
    low, high = versions(ROOT)
    names = [*IMAGES, "build"]
    asked = [(f"3.{minor}", command) for minor in range(low, high) for command in INSTALLATIONS]
    with ThreadPoolExecutor() as pool:
        locked = pool.map(lock, names)
        answers = list(pool.map(resolve, *zip(*asked, strict=True)))
        lists = dict(zip(names, locked, strict=True))
    if not any(answer.reached for answer in [*answers, *lists.values()]):
        print(f"resolution: SKIPPED: the package index cannot be reached\n{indent(answers[0].failure)}")
        return 0
    failed = [f"{answer.what}:\n{indent(answer.failure)}" for answer in [*answers, *lists.values()] if answer.failure]
    for name, answer in lists.items():
        apart = pins(answer.output) ^ pins(path_of(name).read_text()) if not answer.failure else ()
        if apart:
            failed.append(
                f"{answer.what} is not what constraints.txt says, run `make lock`: {', '.join(sorted(apart))}"
            )
    for each in failed:
        print(f"resolution: FAILED: {each}", file=sys.stderr)
    if not failed:
        print(f"{len(answers)} installations resolve, {len(lists)} lists in locked/ are in step")
    return 1 if failed else 0


def write() -> int:
    """Write the lists."""
    for name in [*IMAGES, "build"]:
        answer = lock(name)
        if answer.failure:
            sys.exit(f"{answer.what}:\n{indent(answer.failure)}")
        path_of(name).parent.mkdir(exist_ok=True)
        path_of(name).write_text(answer.output)
        print(f"{answer.what}: {len(pins(answer.output))} packages")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Lock what the images install; check what can be installed.")
    parser.add_argument("--check", action="store_true", help="write nothing")
    sys.exit(check() if parser.parse_args().check else write())
