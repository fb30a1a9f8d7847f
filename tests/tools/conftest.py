"""Quick runs of benchmarks in this process, with servers that are forked: a process of its own imports torch, once for
itself and once for each server, and that is most of what a quick run takes."""

import asyncio
import io
import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

from benchmarks import compare
from tests.support.forking import ROOT, fork

SERVER = (sys.executable, "-m", "ferrum_rpc.cli")


@pytest.fixture(scope="module")
def forked_servers():
    """The servers of benchmarks are forked and have one thread, and no turn is repeated: other tests use the cores."""
    execute = asyncio.create_subprocess_exec

    async def start(*command, **options):
        if command[:3] != SERVER or Path(options["cwd"]) != ROOT:
            return await execute(*command, **options)
        return await fork(list(command[3:]), options["env"])

    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "create_subprocess_exec", start)
        patch.setattr(os, "sched_getaffinity", lambda process: {0})
        patch.setattr(compare.Bystanders, "disturbed", lambda self: False)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def quick_run(forked_servers, tmp_path_factory):
    """Runs a benchmark: ``(module, *arguments)``, its command line behind ``--quick``. Returns the result that it
    writes."""

    def run(module, *arguments):
        out = tmp_path_factory.mktemp("quick") / "result.json"
        main = module.main if hasattr(module, "main") else module.BENCHMARK.main
        with redirect_stdout(io.StringIO()) as told:
            try:
                main(["--quick", "--out", str(out), *arguments])
            except SystemExit as ended:
                assert not ended.code, told.getvalue()
        assert str(out) in told.getvalue()
        return json.loads(out.read_text(encoding="utf-8"))

    return run
