"""Commands of `ferrum-rpc` that ask an executor, in the event loop of the test: no process for each."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from ferrum_rpc import ask, cli
from ferrum_rpc.bench.program import bench
from ferrum_rpc.top.program import top


def parsed(name: str, *flags: str, token: str | None = None) -> argparse.Namespace:
    """The command line of a command that asks an executor."""
    parser, _ = cli.build_parser(settings=False)
    arguments = parser.parse_args([name, *flags])
    arguments.token = token
    return arguments


async def run(target: str, name: str, *flags: str, token: str | None = None) -> int:
    """The exit status of a command, run as the command line does."""
    command = {"bench": bench, "top": top}.get(name) or getattr(ask, name)
    status: int = await command(parsed(name, "--target", target, *flags, token=token))
    return status


async def answer(capsys: pytest.CaptureFixture[str], target: str, name: str, *flags: str) -> Any:
    """What a command prints with --json. It must succeed."""
    capsys.readouterr()
    assert await run(target, name, "--json", *flags) == 0
    return json.loads(capsys.readouterr().out)
