"""The files for contributors and forges say what the project does: versions of Python, commands of lint, lines."""

from __future__ import annotations

import re
import tomllib

from ruamel.yaml import YAML

from tools.commands import ROOT
from tools.environment import versions

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
LINT = (ROOT / "Makefile").read_text("utf-8").partition("\nlint:")[2].partition("\n\n")[0]


def test_every_python_is_tried_and_named() -> None:
    low, high = versions(ROOT)
    pythons = [f"3.{minor}" for minor in range(low, high)]
    workflow = YAML(typ="safe").load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    check = workflow["jobs"]["check"]
    assert check["strategy"]["matrix"]["python"] == pythons
    assert [each["run"] for each in check["steps"] if "run" in each] == [".ci/run"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    assert named == pythons


def test_a_workflow_builds_the_wheels_of_each_package() -> None:
    workflow = YAML(typ="safe").load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    wheels = workflow["jobs"]["wheels"]
    [command] = [each["run"] for each in wheels["steps"] if "run" in each]
    folders = {
        each.parent.relative_to(ROOT).as_posix()
        for each in [*ROOT.glob("pyproject.toml"), *ROOT.glob("*/pyproject.toml")]
    }
    assert {each.removeprefix("./") for each in command.split("--wheel-dir dist ")[1].split()} == folders
    assert wheels["needs"] == "check"


def test_hooks_before_a_commit_are_commands_of_lint() -> None:
    [hooks] = [
        each["hooks"] for each in YAML(typ="safe").load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    ]
    assert len(hooks) == 3
    for hook in hooks:
        assert hook["entry"] == "make lint" or hook["entry"].replace(".venv/bin/", "$(BIN)/") in LINT


def test_editors_and_ruff_have_one_line_length() -> None:
    [length] = re.findall(r"^max_line_length = (\d+)$", (ROOT / ".editorconfig").read_text("utf-8"), re.M)
    assert int(length) == PROJECT["tool"]["ruff"]["line-length"]


def test_the_version_is_the_same_wherever_a_release_sets_it() -> None:
    files = ["pyproject.toml", *(f"ferrum_rpc_{each}/pyproject.toml" for each in ("kernels", "demo"))]
    found = [tomllib.loads((ROOT / each).read_text("utf-8"))["project"]["version"] for each in files]
    [own] = re.findall(r'^__version__ = "(.*)"$', (ROOT / "ferrum_rpc" / "__init__.py").read_text("utf-8"), re.M)
    assert {*found, own} == {own}
