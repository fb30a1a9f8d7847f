"""The files for contributors and forges say what the project does: versions of Python, commands of lint, lines."""

import re
import tomllib

from tests.tools.running import yaml
from tools.commands import ROOT
from tools.environment import versions

PYPROJECTS = [ROOT / "pyproject.toml", *ROOT.glob("*/pyproject.toml")]
PROJECT, *OTHERS = (tomllib.loads(each.read_text("utf-8")) for each in PYPROJECTS)
LINT = (ROOT / "Makefile").read_text("utf-8").partition("\nlint:")[2].partition("\n\n")[0]
JOBS = yaml(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]


def commands(job):
    return [each["run"] for each in job["steps"] if "run" in each]


def test_every_python_is_tried_and_named():
    low, high = versions(ROOT)
    pythons = [f"3.{minor}" for minor in range(low, high)]
    assert JOBS["check"]["strategy"]["matrix"]["python"] == pythons
    assert commands(JOBS["check"]) == [".ci/run"]
    assert re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"])) == pythons


def test_a_workflow_builds_the_wheels_of_each_package():
    [command] = commands(JOBS["wheels"])
    folders = [each.parent.relative_to(ROOT).as_posix() for each in PYPROJECTS]
    assert len(folders) == 3
    assert {each.removeprefix("./") for each in command.split("--wheel-dir dist ")[1].split()} == {*folders}
    assert JOBS["wheels"]["needs"] == "check"


def test_hooks_before_a_commit_are_commands_of_lint():
    [repository] = yaml(ROOT / ".pre-commit-config.yaml")["repos"]
    assert len(repository["hooks"]) == 3
    for hook in repository["hooks"]:
        assert hook["entry"] == "make lint" or hook["entry"].replace(".venv/bin/", "$(BIN)/") in LINT


def test_editors_and_ruff_have_one_line_length():
    [length] = re.findall(r"^max_line_length = (\d+)$", (ROOT / ".editorconfig").read_text("utf-8"), re.M)
    assert int(length) == PROJECT["tool"]["ruff"]["line-length"]


def test_packages_have_one_version_one_licence_and_take_the_same_pythons():
    for key in ("version", "requires-python", "license"):
        assert {each["project"][key] for each in OTHERS} == {PROJECT["project"][key]}, key
    assert all(each["build-system"]["requires"] == PROJECT["build-system"]["requires"] for each in OTHERS)
    [own] = re.findall(r'^__version__ = "(.*)"$', (ROOT / "ferrum_rpc" / "__init__.py").read_text("utf-8"), re.M)
    assert own == PROJECT["project"]["version"]
