"""Collect packages as wheels: `make wheels` those of the images, `make first-light-wheels` those of a GPU machine.

The images' are in build/wheels/, with lists of their hashes.

Where pip is configured on this machine (an index or a folder of its own, as for torch's build for CPUs), an image build
knows nothing of it. So the wheels are collected here, and the build needs neither that nor a network. It takes what was
collected by its hashes, as it takes what the ordinary index has by those in locked/.

Those of a GPU machine are in wheels/: what the steps of first light import beyond torch, triton and transformers, which
such a machine has with what they need, for its Python.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from tools.commands import ROOT, Failed, run

WHEELS = ROOT / "build" / "wheels"
LOCKED = ROOT / "locked"
IMAGE_PYTHON = "3.11"
GPU_WHEELS = ROOT / "wheels"
GPU_PYTHON = "3.12"
GPU_PLATFORMS = ("manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in range(5, 36)))
"""pip takes each of them exactly as it is written."""

IMAGE_EXTRAS = ("server", "uvloop", "grammar", "scheduler", "smg")
GPU_MACHINE_HAS = ("torch", "triton", "transformers", "huggingface_hub", "tokenizers", "safetensors", "numpy")

GPU_TESTS = ("pytest", "pytest-asyncio", "pytest-xdist", "hypothesis")
PIP_SOURCES = ("index-url", "extra-index-url", "find-links", "no-index")


def requirements() -> list[str]:
    """What the images install, and what their build needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["project"]["dependencies"], *(each for name in IMAGE_EXTRAS for each in extras[name])]
    return sorted({*wanted, *project["build-system"]["requires"]})


def lists(wheels: Sequence[Path]) -> dict[str, str]:
    """The lists of locked/ for these files: the versions that they are, as torch's for CPUs alone, by their own hashes.
    What is not among them is in no list."""
    found = {}
    for wheel in wheels:
        name, version = wheel.name.split("-")[:2]
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        found[normal(name)] = f"{name}=={version} --hash=sha256:{digest}\n"
    locked = {path.name: re.findall(r"^([\w.-]+)==", path.read_text(), re.MULTILINE) for path in LOCKED.glob("*.txt")}
    return {
        file: "".join(found[normal(name)] for name in names if normal(name) in found) for file, names in locked.items()
    }


def normal(name: str) -> str:
    """A package's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def collect_wheels() -> str:
    """Fill build/wheels/ where the image build could not; returns what was done."""
    pip = [sys.executable, "-m", "pip"]
    asked = subprocess.run([*pip, "config", "list"], capture_output=True, text=True, check=False)
    if asked.returncode and not WHEELS.exists():
        return "from pip's default index, by the image build: this Python has no pip (PYTHON=.venv/bin/python has one)"
    configured = asked.stdout
    here = any(re.search(rf"\.{key}=", configured) for key in PIP_SOURCES)
    if not here or sys.platform != "linux":
        if WHEELS.exists():
            return "from build/wheels/, which is there; remove it to use pip's default index"
        return "from pip's default index, by the image build"
    fresh = WHEELS.with_name("wheels.new")
    command = [*pip, "download", "--quiet", "--dest", str(fresh), "-c", "constraints.txt"]
    command += ["--python-version", IMAGE_PYTHON, "--only-binary=:all:", *requirements()]
    shutil.rmtree(fresh, ignore_errors=True)
    try:  # what an earlier run collected may still do
        run([*command, "--no-index", "--find-links", str(WHEELS)], env=_without_pip_sources(), timeout=600)
    except Failed:
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            run(command, timeout=1800)
        except Failed as error:
            raise Failed(f"{error}\ncollect them where pip reaches its index: make wheels") from None
    files = list(fresh.glob("*.whl"))
    size = sum(file.stat().st_size for file in files) / 2**20
    for name, text in lists(files).items():
        (fresh / name).write_text(text)
    shutil.rmtree(WHEELS, ignore_errors=True)
    fresh.rename(WHEELS)
    return f"{len(files)} wheels, {size:.0f} MiB, collected in build/wheels/: the build needs no network"


def _without_pip_sources() -> dict[str, str]:
    """The environment, with pip told to read no configuration."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return {**kept, "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def gpu_requirements() -> list[str]:
    """What the steps of first light import, but for what a GPU machine has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["server"], *GPU_TESTS]
    return [each for each in wanted if not each.startswith(GPU_MACHINE_HAS)]


def collect_gpu_wheels() -> str:
    """Fill wheels/; returns what was done."""
    fresh = GPU_WHEELS.with_name("wheels.new")
    shutil.rmtree(fresh, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(fresh), "-c", "constraints.txt"]
    command += ["--python-version", GPU_PYTHON, "--implementation", "cp", "--only-binary=:all:"]
    command += [part for platform in GPU_PLATFORMS for part in ("--platform", platform)]
    run([*command, *gpu_requirements()], timeout=1800)
    files = list(fresh.glob("*.whl"))
    size = sum(file.stat().st_size for file in files) / 2**20
    shutil.rmtree(GPU_WHEELS, ignore_errors=True)
    fresh.rename(GPU_WHEELS)
    return f"{len(files)} wheels for Python {GPU_PYTHON}, {size:.0f} MiB, collected in wheels/"


def main() -> int:
    """Exit status 0; 1 where they cannot be had."""
    try:
        print(f"packages: {collect_gpu_wheels() if sys.argv[1:] == ['first-light'] else collect_wheels()}")
    except Failed as error:
        print(f"packages: FAILED: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
