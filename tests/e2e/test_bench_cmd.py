"""`ferrum-rpc bench` as a user runs it: one process against another, with a token."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ferrum_rpc.client import ExecutorClient, ExecutorStatus
from tests.faults.process import ServerProcess, serving

BENCH = (sys.executable, "-m", "ferrum_rpc.cli", "bench", "--context", "16")
TOKEN = "a-token-of-some-length"  # noqa: S105 - of this test's own server


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ServerProcess]:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"scheduler {TOKEN}\n")
    tokens.chmod(0o600)
    async with serving("--tokens", str(tokens)) as process:
        yield process


def bench(target: str, *flags: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    command = (*BENCH, "--target", target, *flags)
    environment = os.environ | {"FERRUM_TOKEN": token}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


@contextmanager
def benching(target: str, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """A run that is under way."""
    command, environment = (*BENCH, "--target", target, *flags), os.environ | {"FERRUM_TOKEN": TOKEN}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as popen:
        try:
            yield popen
        finally:
            popen.kill()


async def status(server: ServerProcess) -> ExecutorStatus:
    async with ExecutorClient(server.target, token=TOKEN) as client:
        return await client.status()


async def test_a_session_is_measured_and_nothing_is_left(server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    flags = ("--way", "session", "--depth", "2", "--batch", "3", "--steps", "120", "--json", str(file))
    done = await asyncio.to_thread(bench, server.target, *flags)
    assert (done.returncode, done.stderr) == (0, "")  # no progress line on a pipe
    report = json.loads(file.read_text())
    assert (report["decode"]["steps"], report["decode"]["tokens"], report["errors"]) == (120, 360, {})
    assert f"{report['decode']['tokens_per_s']:,.1f} tokens/s" in done.stdout
    assert (await status(server)).pressure.sequences == 0


async def test_ctrl_c_reports_what_was_measured_and_releases_every_sequence(server: ServerProcess) -> None:
    before = (await status(server)).counters.steps
    with benching(server.target, "--callers", "4", "--seconds", "600") as popen:
        while (await status(server)).counters.steps < before + 200:
            assert popen.poll() is None
        assert (await status(server)).pressure.sequences == 4
        popen.send_signal(signal.SIGINT)
        out, err = await asyncio.to_thread(popen.communicate, timeout=30)
    assert popen.returncode == 130
    assert "interrupted" in out and "tokens/s" in out and "Traceback" not in err
    assert (await status(server)).pressure.sequences == 0


@pytest.mark.parametrize(
    ("target", "token", "says"),
    [(None, "another-token", ("UNAUTHENTICATED", "--token-file")), ("127.0.0.1:1", TOKEN, ("TRANSPORT", "health"))],
)
async def test_an_error_says_what_to_do_and_exits_1(
    server: ServerProcess, target: str | None, token: str, says: tuple[str, str]
) -> None:
    done = await asyncio.to_thread(bench, target or server.target, "--timeout", "5", token=token)
    assert (done.returncode, done.stdout) == (1, "")
    assert all(each in done.stderr for each in says) and "Traceback" not in done.stderr
