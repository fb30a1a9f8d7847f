"""Quick runs of benchmarks in this process, with servers that are forked: a process of its own imports torch, once for
itself and once for each server, and that is most of what a quick run takes."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks import compare
from tests.faults.forking import ROOT, fork

QuickRun = Callable[..., str]
"""``(module, *arguments)``: the benchmark's command line, behind ``--quick``. Returns what it prints."""

SERVER = (sys.executable, "-m", "ferrum_rpc.cli")


@pytest.fixture(scope="module")
def forked_servers() -> Iterator[None]:
    """The servers of benchmarks are forked, and no turn is repeated because others use the machine: the suite does."""
    execute = asyncio.create_subprocess_exec

    async def start(*command: str, **options: Any) -> Any:
        if command[:3] != SERVER or Path(options["cwd"]) != ROOT:
            return await execute(*command, **options)
        return await fork(list(command[3:]), options["env"])

    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "create_subprocess_exec", start)
        patch.setattr(compare.Bystanders, "disturbed", lambda self: False)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def quick_run(forked_servers: None) -> QuickRun:
    """Runs a benchmark."""

    def run(module: ModuleType, *arguments: str) -> str:
        with redirect_stdout(io.StringIO()) as told:
            module.main(["--quick", *arguments])
        return told.getvalue()

    return run
