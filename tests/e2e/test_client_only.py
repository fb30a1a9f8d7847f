"""The package without extras: every command that asks a server works, and what needs more names the extra.

The commands run in a process that can import nothing but the standard library, this package and its base requirements.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import serve_identity

ROOT = Path(__file__).parents[2]

PROGRAM = """
import contextlib, importlib.abc, io, json, sys

class OnlyTheClient(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        package = name.partition(".")[0]
        if package not in sys.stdlib_module_names and package not in ALLOWED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

commands, ALLOWED = json.loads(sys.argv[1])
sys.meta_path.insert(0, OnlyTheClient())
from ferrum_rpc.cli import main

for command in commands:
    out, err, status = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(command)
        except SystemExit as end:
            status = end.code
    print(json.dumps([status, out.getvalue(), err.getvalue()]))
"""


def base_packages() -> set[str]:
    """Import names of what a bare `pip install` brings."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[<>=]", each)[0] for each in wanted} | {"typing_extensions"}  # grpcio's own requirement
    owners = metadata.packages_distributions()
    return {top for top, by in owners.items() if names & set(by)} | {"ferrum_rpc"}


def run(*commands: tuple[str, ...]) -> list[tuple[Any, str, str]]:
    """(exit status, output, errors) of each command."""
    given = json.dumps([commands, sorted(base_packages())])
    done = subprocess.run([sys.executable, "-c", PROGRAM, given], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


Found = dict[str, tuple[Any, str, str]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each command has done, by its first words."""
    tokenizer = tmp_path_factory.mktemp("folder") / "tokenizer.json"
    tokenizer.write_text("{}")

    async def ask() -> Found:
        async with serve_identity() as served:
            at = ("--target", served.target)
            commands = {
                "health": ("health", *at),
                "info": ("info", *at),
                "status": ("status", *at, "--json"),
                "generate": ("generate", *at, "ab"),
                "bench": ("bench", *at, "--steps", "4", "--warmup", "0", "--context", "8"),
                "--version": ("--version",),
                "--help": ("--help",),
                "bench --help": ("bench", "--help"),
                "worker --help": ("worker", "--help"),
                "serve": ("serve", "demo", "--port", "0"),
                "serve --help": ("serve", "--help"),
                "generate --tokenizer": ("generate", *at, "ab", "--tokenizer", str(tokenizer)),
                "worker smg": ("worker", "smg"),
            }
            return dict(zip(commands, await asyncio.to_thread(run, *commands.values()), strict=True))

    return asyncio.run(ask())


def test_commands_that_ask_a_server_need_only_the_client(found: Found) -> None:
    asked = [found[each] for each in ("health", "info", "status", "generate", "bench")]
    assert [(status, err) for status, _, err in asked] == [(0, "")] * len(asked)
    health, info, status, generate, measured = (out for _, out, _ in asked)
    assert health == "SERVING\n"
    assert "identity" in info
    assert json.loads(status)["state"] == "SERVING"
    assert len(generate) > 1
    assert "steps/s" in measured


def test_help_and_version_need_only_the_client(found: Found) -> None:
    assert [found[each][0] for each in ("--version", "--help", "bench --help", "worker --help")] == [0] * 4
    assert found["--version"][1].startswith("ferrum-rpc ")
    assert all(name in found["--help"][1] for name in ("serve", "info", "generate"))


def test_what_needs_the_extra_names_it_in_one_line(found: Found) -> None:
    missing = "this needs smg_grpc_proto, which is not installed: pip install '.[smg]' in a checkout"
    assert missing in found["worker smg"][0]
    for status, out, _ in (found[each] for each in ("serve", "serve --help", "generate --tokenizer")):
        assert isinstance(status, str)  # `sys.exit` writes it to stderr, and the exit status is 1
        assert "pip install '.[server]' in a checkout" in status and "\n" not in status
        assert out == ""
