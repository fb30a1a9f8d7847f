"""`make` with the wrong Python, and an installation that is cut off: what is left, and what the next attempt does.

The Python here is a shell script that answers what is asked of it, so nothing is downloaded.
"""

import io
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.tools.running import ran
from tools import environment
from tools.commands import ROOT

REAL = sys.executable
PRETENDING = """
import runpy, sys
sys.version_info, sys.argv = (3, 10, 12), sys.argv[1:]
runpy.run_path(sys.argv[0], run_name='__main__')
"""
"""Makes a Python say that it is 3.10."""

FAKE = """#!/bin/sh
# -m venv --clear FOLDER; -m pip install ...; -c PROBE
case "$1 $2" in
    "-m venv") rm -rf "$4"; mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;;
    "-m pip") echo "$@" >>pip; [ ! -p hold ] || { echo >hold; exec sleep 60; }; exit $(cat status) ;;
    *) cat version ;;
esac
"""


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A checkout with the fake as the user's Python, which is in order."""
    folder = tmp_path / "check out"
    (folder / "tools").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "tools/environment.py"):
        shutil.copy(ROOT / name, folder / name)
    python = folder / "python"
    python.write_text(FAKE)
    python.chmod(0o755)
    (folder / "status").write_text("0")
    (folder / "version").write_text("3 11")
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.chdir(folder)
    return folder


def installations(root):
    return len((root / "pip").read_text().splitlines()) if (root / "pip").exists() else 0


def marked(root):
    return (root / ".venv" / ".unfinished").exists()


@pytest.mark.parametrize("target", ["demo", "test"])
def test_another_python_is_named_and_nothing_is_left(root, target):
    wrong = root / "python3.10"
    wrong.write_text(f'#!/bin/sh\nexec "{REAL}" -c "{PRETENDING}" "$@"\n')
    wrong.chmod(0o755)
    done = ran(["make", "--no-print-directory", target, f"PYTHON=./{wrong.name}"], cwd=root)
    assert done.returncode != 0
    assert "this is Python 3.10.12, and 3.11 to 3.13 are needed" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (root / ".venv").exists()


def test_who_watches_sees_the_progress_of_pip_and_a_pipe_does_not(root, monkeypatch):
    class Screen(io.StringIO):
        def isatty(self):
            return True

    for stream, quiet in ((Screen(), False), (io.StringIO(), True)):
        monkeypatch.setattr(sys, "stdout", stream)
        environment.main("server", root)
        assert ("--quiet" in (root / "pip").read_text().splitlines()[-1].split()) is quiet


def test_an_editable_installation_is_a_path_and_no_import_hook(tmp_path):
    """Or type checkers could not follow it."""
    shutil.copytree(ROOT / "ferrum_rpc", tmp_path / "ferrum_rpc", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    build = "from setuptools import build_meta; print(build_meta.build_editable('.'))"
    done = ran([REAL, "-c", build], cwd=tmp_path)
    with zipfile.ZipFile(tmp_path / done.stdout.split()[-1]) as wheel:
        [found] = [name for name in wheel.namelist() if ".dist-info/" not in name]
        assert found.endswith(".pth") and Path(wheel.read(found).decode().strip()) == tmp_path


def test_the_right_python_installs_into_an_environment_of_its_own(root):
    assert environment.main("server", root) == 0
    assert (root / ".venv" / "bin" / "python").exists()
    assert installations(root) == 1
    assert not marked(root)


@pytest.mark.parametrize("version", ["3 10", "3 14", "no answer"])
def test_an_environment_of_another_python_or_without_pip_is_replaced(root, version):
    environment.main("server", root)
    rest = root / ".venv" / "rest"
    rest.touch()
    python = root / ".venv" / "bin" / "python"
    python.write_text("#!/bin/sh\nexit 1\n" if version == "no answer" else f"#!/bin/sh\necho {version}\n")
    assert environment.main("server", root) == 0
    assert not rest.exists()


def test_an_environment_that_works_is_kept_whatever_python_make_names(root, monkeypatch):
    environment.main("server", root)
    (root / ".venv" / "rest").touch()
    monkeypatch.setattr(sys, "version_info", (3, 10, 12))
    assert environment.main("server,dev", root) == 0
    assert (root / ".venv" / "rest").exists()


def test_nothing_is_left_where_no_environment_can_be_made(root):
    (root / "python").write_text('#!/bin/sh\nmkdir -p "$4/bin"; exit 1\n')  # Debian without python3-venv
    with pytest.raises(SystemExit, match="python3-venv"):
        environment.main("server", root)
    assert not (root / ".venv").exists()


def test_a_first_installation_that_fails_begins_anew(root):
    (root / "status").write_text("1")
    assert environment.main("server", root) == 1
    assert marked(root)
    (root / ".venv" / "rest").touch()
    (root / "status").write_text("0")
    assert environment.main("server", root) == 0
    assert not (root / ".venv" / "rest").exists()


def test_a_later_installation_that_fails_leaves_what_was_there(root):
    environment.main("server", root)
    (root / ".venv" / ".server").touch()
    (root / "status").write_text("1")
    assert environment.main("server,dev", root) == 1
    assert not marked(root)


@pytest.mark.parametrize("stage", ["server", "server,dev"])
def test_an_installation_that_is_interrupted_is_said_in_a_line_and_begun_anew(root, stage):
    program = "import sys; from pathlib import Path; from tools import environment; sys.executable = './python'; "
    program += "sys.exit(environment.main(sys.argv[1], Path.cwd()))"
    if stage == "server,dev":
        environment.main("server", root)
        (root / ".venv" / ".server").touch()
    os.mkfifo(root / "hold")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored
    with subprocess.Popen(
        [REAL, "-c", program, stage],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        (root / "hold").read_text()  # pip is at work
        os.killpg(running.pid, signal.SIGINT)
        _, said = running.communicate(timeout=30)
    assert (running.returncode, said) == (130, "\ninterrupted; the next `make` begins anew\n")
    assert marked(root)
    (root / "hold").unlink()
    (root / ".venv" / "rest").touch()
    assert environment.main(stage, root) == 0
    assert not (root / ".venv" / "rest").exists()
