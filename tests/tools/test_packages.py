"""The three packages: what is in each wheel, for which Pythons it is, and that the installed ones find each other.

Wheels are built from copies of what is needed, with the setuptools of this environment and without an index.
"""

import json
import os
import re
import shutil
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from ferrum_rpc.native import library
from tests.tools.running import ran
from tools.commands import ROOT, run

PROJECTS = {"ferrum_rpc": ".", "ferrum_rpc_kernels": "ferrum_rpc_kernels", "ferrum_rpc_demo": "ferrum_rpc_demo"}
"""Folders of the projects by the names of their wheels."""

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


def built(project, out, **environment):
    """The wheel of a project, by setuptools without pip, which starts it three times."""
    program = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    return ran([sys.executable, "-c", program, str(out)], cwd=project, env=os.environ | environment)


def copy(folder, *names):
    """What these packages are built from, without what earlier builds left."""
    left = shutil.ignore_patterns("*.so", "build", "*.egg-info", "__pycache__")
    for name in names:
        shutil.copytree(ROOT / name, folder / name, ignore=left)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    setup = folder / "ferrum_rpc_kernels" / "setup.py"
    fewer = ["-O0", "-g0", "-include", str(ROOT / "tests" / "numerics" / "portable.h")]  # a tenth of the time
    quickly = setup.read_text().replace('"-O3"', ", ".join(map(json.dumps, fewer)))
    setup.write_text(quickly)
    return folder


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The wheels by name."""
    source, out = copy(tmp_path_factory.mktemp("source"), *PROJECTS), tmp_path_factory.mktemp("wheels")
    for each in PROJECTS.values():
        done = built(source / each, out)
        assert done.returncode == 0, done.stdout + done.stderr
    return {path.name.partition("-")[0]: path for path in out.iterdir()}


def contents(wheel):
    """Files of a wheel besides its metadata."""
    with zipfile.ZipFile(wheel) as opened:
        return {name for name in opened.namelist() if ".dist-info/" not in name}


def printed(folder, *wheels):
    """What the program prints in an environment where these are installed too; what they require is this one's."""
    [packages] = folder.glob("lib/*/site-packages")
    for each in wheels:
        zipfile.ZipFile(each).extractall(packages)
    required = [each for each in sys.path if each.endswith("-packages")]
    return run([str(folder / "bin" / "python"), "-I", "-c", PROGRAM, str(folder), *required]).splitlines()


def test_a_client_installs_python_and_protos_alone(wheels):
    assert wheels["ferrum_rpc"].name.endswith("-py3-none-any.whl")
    found = contents(wheels["ferrum_rpc"])
    assert {Path(name).suffix for name in found} == {".py", ".pyi", ".proto", ".typed"}
    protos = {str(path.relative_to(ROOT)) for path in (ROOT / "protos").rglob("*.proto")}
    assert {name.removeprefix("ferrum_rpc/") for name in found if name.endswith(".proto")} == protos
    assert {name for name in found if name.endswith(".py")} == {
        str(path.relative_to(ROOT)) for path in (ROOT / "ferrum_rpc").rglob("*.py")
    }


def test_kernels_are_one_library_for_every_python(wheels):
    tags = wheels["ferrum_rpc_kernels"].name.removesuffix(".whl").split("-", 2)[2]
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    assert re.fullmatch(r"py3-none-(manylinux_2_\d+_\w+|macosx_\w+)", tags)
    assert contents(wheels["ferrum_rpc_kernels"]) == {"ferrum_rpc_kernels/__init__.py", "ferrum_rpc_kernels/kernels.so"}


def test_demo_models_are_files_alone(wheels):
    assert wheels["ferrum_rpc_demo"].name.endswith("-py3-none-any.whl")
    models = ROOT / "ferrum_rpc_demo"
    expected = {f"ferrum_rpc_demo/{each.relative_to(models)}" for each in models.glob("demo*/*")}
    assert contents(wheels["ferrum_rpc_demo"]) == expected | {"ferrum_rpc_demo/__init__.py"}


def test_installed_packages_find_each_other_and_name_what_is_missing(wheels, tmp_path):
    """Those of a checkout, installed to be edited, are what every other test runs with."""
    venv.create(tmp_path / "venv", with_pip=False)
    demo, kernels = printed(tmp_path / "venv", wheels["ferrum_rpc"])
    assert "ferrum-rpc-demo, which is not installed" in demo
    assert kernels.startswith("it is not installed: install ferrum-rpc-kernels")
    demo, kernels = printed(tmp_path / "venv", wheels["ferrum_rpc_demo"], wheels["ferrum_rpc_kernels"])
    assert Path(demo, "model.safetensors").is_file() and demo.startswith(str(tmp_path))
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    assert kernels.startswith(str(tmp_path)) and kernels.endswith(f"/{library.PACKAGE}/{library.LIBRARY}")


@pytest.mark.parametrize("environment", [{"CC": "no-such-compiler"}, {"PATH": "/no/such/folder"}, {"CC": "false"}])
def test_without_a_compiler_the_package_is_made_without_the_library(tmp_path, environment):
    done = built(copy(tmp_path / "source", "ferrum_rpc_kernels") / "ferrum_rpc_kernels", tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.glob("*.whl")
    assert contents(wheel) == {"ferrum_rpc_kernels/__init__.py"}


def test_sources_that_the_compiler_refuses_are_an_error(tmp_path):
    """An installation that ended well would leave the library of older sources in a checkout."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    source = copy(tmp_path / "source", "ferrum_rpc_kernels") / "ferrum_rpc_kernels"
    with (source / "src" / "abi.c").open("a") as broken:
        broken.write("int broken(\n")
    done = built(source, tmp_path)
    assert done.returncode != 0 and re.search(r"src/abi\.c:\d+:\d+: error", done.stderr), done.stderr
    assert not [*tmp_path.glob("*.whl")]
