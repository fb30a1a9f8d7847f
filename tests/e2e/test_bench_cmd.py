"""`ferrum-rpc bench` against a server that asks for a token: its report, its exit statuses, and nothing is left."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ferrum_rpc.bench.program import INTERRUPTED
from ferrum_rpc.service.guard.auth import Security
from tests.support.commands import run
from tests.support.serving import Served, serve_identity
from tests.support.waiting import until

TOKEN = "a-token-of-some-length"  # noqa: S105 - of this test's own server


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    (tokens := tmp_path / "tokens").write_text(f"scheduler {TOKEN}\n")
    async with serve_identity(kv_blocks=1024, security=Security(tokens=tokens)) as served:
        yield served
        assert not len(served.server.state.handles)


async def test_a_session_is_measured(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    flags = ["--context", "16", "--way", "session", "--depth", "2", "--batch", "3", "--steps", "120", "--json"]
    assert await run(served.target, "bench", *flags, str(file), token=TOKEN) == 0
    said = capsys.readouterr()
    assert not said.err  # no progress line where it is no terminal
    report = json.loads(file.read_text())
    assert (report["decode"]["steps"], report["decode"]["tokens"], report["errors"]) == (120, 360, {})
    assert f"{report['decode']['tokens_per_s']:,.1f} tokens/s" in said.out


async def test_ctrl_c_reports_what_was_measured(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    running = asyncio.ensure_future(
        run(served.target, "bench", "--context", "16", "--callers", "4", "--seconds", "600", token=TOKEN)
    )
    await until(lambda: served.server.state.engine.counters.steps > 200)
    assert len(served.server.state.handles) == 4
    signal.raise_signal(signal.SIGINT)
    assert await running == INTERRUPTED
    out = capsys.readouterr().out
    assert "interrupted" in out and "tokens/s" in out


@pytest.mark.parametrize(
    ("target", "token", "says"),
    [(None, "another-token", ("UNAUTHENTICATED", "--token-file")), ("127.0.0.1:1", TOKEN, ("TRANSPORT", "health"))],
)
async def test_an_error_says_what_to_do_and_exits_1(served, target, token, says, capsys) -> None:
    assert await run(target or served.target, "bench", "--timeout", "5", token=token) == 1
    said = capsys.readouterr()
    assert not said.out and all(each in said.err for each in says)
