"""The three packages: what is in each wheel, for which Pythons it is, and that the installed ones find each other.

Wheels are built from copies of what is needed, with the setuptools of this environment and without an index.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from ferrum_rpc.native import library

ROOT = Path(__file__).parents[2]
PROJECTS = {"ferrum_rpc": ".", "ferrum_rpc_kernels": "ferrum_rpc_kernels", "ferrum_rpc_demo": "ferrum_rpc_demo"}
"""Folders of the projects by the names of their wheels."""
OFFLINE = ("--no-deps", "--no-index", "--disable-pip-version-check", "--quiet")

PROGRAM = """
import sys
sys.path += sys.argv[2:]
from ferrum_rpc.building import model_folder
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.native import library
assert library.__file__.startswith(sys.argv[1]), library.__file__
try:
    print(model_folder("demo"))
except InvalidRequest as error:
    print(error)
try:
    print(library.find())
    library.load()
except OSError as error:
    print(error)
"""


def pip(*arguments: str | Path, **environment: str) -> None:
    command = [sys.executable, "-m", "pip", *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def kernels_wheel(source: Path, out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The wheel of the kernels alone, by setuptools without pip, which starts it three times."""
    command = [sys.executable, "setup.py", "--quiet", "bdist_wheel", "--dist-dir", out]
    return subprocess.run(
        command, cwd=source, env=os.environ | environment, capture_output=True, text=True, check=False
    )


def copy(folder: Path, *names: str) -> Path:
    """What these packages are built from, without what earlier builds left."""
    left = shutil.ignore_patterns("*.so", "build", "*.egg-info", "__pycache__")
    for name in names:
        shutil.copytree(ROOT / name, folder / name, ignore=left)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    setup = folder / "ferrum_rpc_kernels" / "setup.py"
    setup.write_text(setup.read_text().replace("-O3", "-O0"))  # a quarter of the time
    return folder


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels by name."""
    source, out = copy(tmp_path_factory.mktemp("source"), *PROJECTS), tmp_path_factory.mktemp("wheels")
    pip("wheel", *OFFLINE, "--no-build-isolation", "-w", out, *(source / each for each in PROJECTS.values()))
    return {path.name.partition("-")[0]: path for path in out.iterdir()}


def contents(wheel: Path) -> set[str]:
    """Files of a wheel besides its metadata."""
    with zipfile.ZipFile(wheel) as opened:
        return {name for name in opened.namelist() if ".dist-info/" not in name}


def run(python: Path, *installed: str | Path) -> list[str]:
    """What the program prints where these are installed; what they require is this environment's."""
    folder = python.parents[2]
    pip("--python", python, "install", "--no-compile", *OFFLINE, *installed)
    required = [each for each in sys.path if each.endswith("-packages")]
    command = [python, "-I", "-c", PROGRAM, folder, *required]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_client_installs_python_and_protos_alone(wheels: dict[str, Path]) -> None:
    assert wheels["ferrum_rpc"].name.endswith("-py3-none-any.whl")
    found = contents(wheels["ferrum_rpc"])
    assert {Path(name).suffix for name in found} == {".py", ".pyi", ".proto", ".typed"}
    protos = {str(path.relative_to(ROOT)) for path in (ROOT / "protos").rglob("*.proto")}
    assert {name.removeprefix("ferrum_rpc/") for name in found if name.endswith(".proto")} == protos
    assert {name for name in found if name.endswith(".py")} == {
        str(path.relative_to(ROOT)) for path in (ROOT / "ferrum_rpc").rglob("*.py")
    }


def test_kernels_are_one_library_for_every_python(wheels: dict[str, Path]) -> None:
    tags = wheels["ferrum_rpc_kernels"].name.removesuffix(".whl").split("-", 2)[2]
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    assert re.fullmatch(r"py3-none-(manylinux_2_\d+_\w+|macosx_\w+)", tags)
    assert contents(wheels["ferrum_rpc_kernels"]) == {"ferrum_rpc_kernels/__init__.py", "ferrum_rpc_kernels/kernels.so"}


def test_demo_models_are_files_alone(wheels: dict[str, Path]) -> None:
    assert wheels["ferrum_rpc_demo"].name.endswith("-py3-none-any.whl")
    models = ROOT / "ferrum_rpc_demo"
    expected = {f"ferrum_rpc_demo/{each.relative_to(models)}" for each in models.glob("demo*/*")}
    assert contents(wheels["ferrum_rpc_demo"]) == expected | {"ferrum_rpc_demo/__init__.py"}


def test_installed_packages_find_each_other_and_name_what_is_missing(wheels: dict[str, Path], tmp_path: Path) -> None:
    """Those of a checkout, installed to be edited, are what every other test runs with."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    demo, kernels = run(python, wheels["ferrum_rpc"])
    assert "ferrum-rpc-demo, which is not installed" in demo
    assert kernels.startswith("it is not installed: install ferrum-rpc-kernels")
    demo, kernels = run(python, wheels["ferrum_rpc_demo"], wheels["ferrum_rpc_kernels"])
    assert Path(demo, "model.safetensors").is_file() and demo.startswith(str(tmp_path))
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    assert kernels.startswith(str(tmp_path)) and kernels.endswith(f"/{library.PACKAGE}/{library.LIBRARY}")


@pytest.mark.parametrize("environment", [{"CC": "no-such-compiler"}, {"PATH": "/no/such/folder"}, {"CC": "false"}])
def test_without_a_compiler_the_package_is_made_without_the_library(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    done = kernels_wheel(
        copy(tmp_path / "source", "ferrum_rpc_kernels") / "ferrum_rpc_kernels", tmp_path, **environment
    )
    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.glob("*.whl")
    assert contents(wheel) == {"ferrum_rpc_kernels/__init__.py"}


def test_sources_that_the_compiler_refuses_are_an_error(tmp_path: Path) -> None:
    """An installation that ended well would leave the library of older sources in a checkout."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    source = copy(tmp_path / "source", "ferrum_rpc_kernels") / "ferrum_rpc_kernels"
    with (source / "src" / "abi.c").open("a") as broken:
        broken.write("int broken(\n")
    done = kernels_wheel(source, tmp_path)
    assert done.returncode != 0 and re.search(r"src/abi\.c:\d+:\d+: error", done.stderr), done.stderr
    assert not [*tmp_path.glob("*.whl")]


def test_packages_have_one_version_and_take_the_same_pythons() -> None:
    read = [tomllib.loads((ROOT / each / "pyproject.toml").read_text()) for each in PROJECTS.values()]
    for key in ("version", "requires-python", "license"):
        assert len({each["project"][key] for each in read}) == 1, key
    assert len({tuple(each["build-system"]["requires"]) for each in read}) == 1
