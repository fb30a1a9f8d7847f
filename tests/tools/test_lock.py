"""What `make lint` makes of the answers about what can be installed. uv is a function here: nothing asks an index."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tools import lock

UNREACHABLE = "error: Failed to fetch\n  cause: client error (Connect)\n  cause: dns error"
CONFLICT = "error: No solution found\n  cause: torch depends on another triton"


class Uv:
    """In the place of `subprocess.run`. ``errors``: what it says where its command contains a text; ``text``: the list
    that it makes, and nothing new by default."""

    def __init__(self):
        self.commands: list[str] = []
        self.environments: list[Mapping[str, str]] = []
        self.errors: dict[str, str] = {}
        self.text = ""

    def __call__(self, command, **options):
        said = " ".join(command)
        self.commands.append(said)
        self.environments.append(options["env"])
        if self.text and "--output-file" in command:
            Path(command[command.index("--output-file") + 1]).write_text(self.text)
        error = next((error for when, error in self.errors.items() if when in said), "")
        return subprocess.CompletedProcess(command, 1 if error else 0, "", error)


@pytest.fixture
def uv(monkeypatch):
    made = Uv()
    monkeypatch.setattr(lock.subprocess, "run", made)
    return made


def test_both_installations_are_resolved_for_every_python_that_the_project_takes(uv):
    assert lock.check() == 0
    resolved = [each for each in uv.commands if "--python-platform" in each]
    assert len(resolved) == 6
    for minor in (11, 12, 13):
        for extra in ("uvloop", "dev"):
            wanted = f"pyproject.toml --extra server --extra {extra} --only-binary :all: --python-version 3.{minor} "
            assert sum(wanted in each for each in resolved) == 1
    assert all("-c constraints.txt" in each for each in uv.commands)


def test_no_setting_of_the_machine_is_heard(uv, monkeypatch):
    for name in ("PIP_CONFIG_FILE", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "UV_INDEX_URL", "UV_FIND_LINKS"):
        monkeypatch.setenv(name, "/nowhere")
    monkeypatch.setenv("HTTPS_PROXY", "a proxy")
    lock.check()
    for environment in uv.environments:
        assert not [name for name in environment if name.startswith("PIP_")]
        assert {name for name in environment if name.startswith("UV_")} == {"UV_NO_CONFIG", "UV_HTTP_RETRIES"}
        assert environment["HTTPS_PROXY"] == "a proxy"


def test_what_cannot_be_resolved_fails_and_is_named(uv, capsys):
    uv.errors = {"--extra uvloop --only-binary :all: --python-version 3.12": CONFLICT}
    assert lock.check() == 1
    said = capsys.readouterr().err
    assert "FAILED: `make demo` with Python 3.12" in said
    assert "torch depends on another triton" in said
    assert said.count("FAILED") == 1


def test_without_a_network_it_says_that_it_skips(uv, capsys):
    uv.errors = {"": UNREACHABLE}
    assert lock.check() == 0
    assert "SKIPPED: the package index cannot be reached" in capsys.readouterr().out


@pytest.mark.parametrize("error", [UNREACHABLE, "error: cannot read constraints.txt"])
def test_one_failure_beside_answers_is_never_a_skip(uv, error):
    uv.errors = {"3.13": error}
    assert lock.check() == 1


def test_a_list_that_is_not_what_constraints_say_fails_until_it_is_written(uv, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lock, "path_of", lambda name: tmp_path / "locked" / f"{name}.txt")
    uv.text = "a==1 \\\n    --hash=sha256:0\n"
    assert lock.write() == 0
    assert lock.check() == 0
    uv.text = "a==2 \\\n    --hash=sha256:0\n"
    assert lock.check() == 1
    said = capsys.readouterr().err
    assert said.count("FAILED") == len(lock.IMAGES) + 1
    assert "locked/executor.txt is not what constraints.txt says, run `make lock`: a==1, a==2" in said
    lock.write()
    assert lock.check() == 0


def test_hashes_alone_do_not_put_a_list_out_of_step():
    text = (
        "a==1 ; sys_platform == 'linux' \\\n    --hash=sha256:0 \\\n    --hash=sha256:1\nb==2 \\\n    --hash=sha256:2"
    )
    assert lock.pins(text) == lock.pins(text.replace("--hash=sha256:1", "--hash=sha256:3"))
    assert lock.pins(text) == {"a==1 ; sys_platform == 'linux'", "b==2"}
