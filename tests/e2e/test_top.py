"""`ferrum-rpc top` over the wire: every state with its reason, and no executor delays another one's row."""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import os
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ferrum_rpc.client import ExecutorClient
from ferrum_rpc.client.fleet import Members
from ferrum_rpc.service.guard.auth import Security
from ferrum_rpc.top import program
from ferrum_rpc.top.board import ExecutorBoard, ExecutorRow, RowState
from ferrum_rpc.top.screen import COLUMNS
from tests.support.commands import parsed, run
from tests.support.fleets import hanging, identity
from tests.support.process import ServerProcess, environment, serving
from tests.support.proxy import proxied
from tests.support.serving import Gate, loading

TOP = (sys.executable, "-m", "ferrum_rpc.cli", "top")
PATIENCE_S = 20.0
PAUSE_S = 0.005
"""Between tokens that are read: two clients that read as fast as they can leave the commands no processor."""


class Watched:
    """A board, and its rows as of the last look."""

    def __init__(self, members: Members) -> None:
        self.members = members
        self.board = ExecutorBoard(members)
        self.rows: dict[str, ExecutorRow] = {}

    async def until(self, holds: Callable[[dict[str, ExecutorRow]], object]) -> None:
        """Wait for rows by their targets of which something holds."""
        async with asyncio.timeout(PATIENCE_S):
            while not holds(rows := {each.target: each for each in self.board.rows()}):
                await asyncio.gather(*map(self.members.look, self.members.there))
                await asyncio.sleep(0.01)
            self.rows = rows


@asynccontextmanager
async def watched(*targets: str, **options: Any) -> AsyncIterator[Watched]:
    """As the command watches them."""
    flags = [word for each in targets for word in ("--target", each)]
    async with program.members_of(parsed("top", *flags, "--interval-s", "0.1"), **options) as members:
        await members.all_known(PATIENCE_S)
        yield Watched(members)


async def test_every_state_has_its_reason_and_the_others_have_their_figures() -> None:
    gate = Gate("forward")
    async with (
        identity() as first,
        identity() as second,
        identity(vocab_size=300) as other,
        identity() as drains,
        identity(stage=gate) as hangs,
        proxied(first.target) as twin,
        watched(*(each.target for each in (first, second, other, drains, hangs)), twin.target, "127.0.0.1:1") as seen,
        ExecutorClient(drains.target) as client,
        client.sequence() as sequence,
    ):
        await sequence.prefill([1, 2, 3])
        await client.drain(60)
        with hanging(hangs, gate):
            await seen.until(lambda rows: (rows[drains.target].state, rows[hangs.target].state) == ("DRAINING", "HUNG"))
            states = [(each.state, each.reason) for each in seen.rows.values()]
            assert seen.rows[hangs.target].status is not None, "it reports that it hangs"
    assert [state for state, _ in states] == [
        *(RowState.SERVING, RowState.SERVING, RowState.MISMATCH, RowState.DRAINING, RowState.HUNG),
        *(RowState.INVALID, RowState.GONE),
    ]
    expected = ("", "", "serves another identity", "no new sequences", "no progress", "the same executor", "refused")
    assert all(words in reason for (_, reason), words in zip(states, expected, strict=True))
    assert [reason for _, reason in states[:2]] == ["", ""]


async def test_who_loads_or_refuses_the_credentials_is_shown_so_until_that_is_over(tmp_path: Path) -> None:
    (tokens := tmp_path / "tokens").write_text("scheduler a-token\n")
    async with loading() as loads, identity(security=Security(tokens=tokens)) as refuses:
        target = loads.server.target
        async with watched(target, refuses.target) as seen:
            await seen.until(lambda rows: [each.state for each in rows.values()] == ["STARTING", "REFUSED"])
            assert [each.status for each in seen.rows.values()] == [None, None]
            loads.go.set()
            await seen.until(lambda rows: rows[target].state is RowState.SERVING)


async def test_operators_alone_see_callers(tmp_path: Path) -> None:
    (tokens := tmp_path / "tokens").write_text("scheduler a-token\nops b-token operator\n")
    async with identity(security=Security(tokens=tokens)) as served:
        for token, known in (("a-token", False), ("b-token", True)):
            arguments = parsed("top", "--target", served.target, "--interval-s", "0.1", token=token)
            async with program.members_of(arguments) as members:
                await members.all_known(PATIENCE_S)
                board = ExecutorBoard(members)
                await asyncio.gather(*board.ask(PATIENCE_S))
                [row] = board.rows()
                assert (row.state, row.activity is not None) == (RowState.SERVING, known)


async def test_a_monitor_follows_no_prefixes_and_holds_nothing() -> None:
    """Streams of cache events are bounded, and belong to schedulers."""
    async with identity() as served, watched(served.target) as seen:
        await seen.until(lambda rows: rows[served.target].rates is not None)
        status = seen.rows[served.target].status
        assert status is not None and (status.leases, status.sessions, status.pressure.sequences) == (0, 0, 0)
        assert {each.method.rpartition("/")[2] for each in status.methods} <= {"GetInfo", "GetStatus"}


async def test_a_file_of_targets_is_followed(tmp_path: Path) -> None:
    file = tmp_path / "targets"
    async with identity() as first, identity() as second:
        file.write_text(f"{first.target}\n")
        async with watched(f"file:{file}", f"file:{tmp_path}/none", resolve_every_s=0.05) as seen:
            await seen.until(lambda rows: [each.state for each in rows.values()] == ["SERVING", "GONE"])
            assert seen.rows[f"file:{tmp_path}/none"].reason.startswith("it cannot be read")
            file.write_text(f"{second.target}\n")
            await seen.until(lambda rows: rows.get(second.target) and "no longer listed" in rows[first.target].reason)


# --- processes --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def loaded(*servers: ServerProcess) -> AsyncIterator[None]:
    """Each serves a client that generates on and on, once the first tokens of all have come."""
    begun = [asyncio.Event() for _ in servers]

    async def generate(target: str, began: asyncio.Event) -> None:
        async with ExecutorClient(target, session=True, release_timeout_s=0.1, timeout_s=PATIENCE_S) as client:
            while True:
                async with client.sequence() as sequence:
                    async for _ in sequence.generate([1, 2, 3], max_tokens=30_000, stop=()):
                        began.set()
                        await asyncio.sleep(PAUSE_S)

    tasks = [asyncio.create_task(generate(each.target, event)) for each, event in zip(servers, begun, strict=True)]
    try:
        await asyncio.gather(*(each.wait() for each in begun))
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class TopScreen:
    """`ferrum-rpc top` on a terminal of so many columns, and what it wrote."""

    def __init__(self, process: subprocess.Popen[bytes], terminal: int) -> None:
        self._process, self._terminal = process, terminal
        self.written = ""

    def read(self, words: str = "") -> None:
        """Read until the latest screen has ``words``; without words, to the end."""
        while not words or words not in self.frame:
            try:
                found = os.read(self._terminal, 1 << 16)
            except OSError:  # the other side is closed
                found = b""
            if not found:
                assert not words, self.written
                return
            self.written += found.decode()

    @property
    def frame(self) -> str:
        """The latest complete screen, without colours."""
        frames = self.written.split("\x1b[H")
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", frames[-2] if len(frames) > 2 else "")

    def interrupt(self) -> int:
        self._process.send_signal(signal.SIGINT)
        self.read()
        return self._process.wait(PATIENCE_S)


@contextmanager
def top(columns: int, *flags: str) -> Iterator[TopScreen]:
    here, there = os.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    variables = environment() | {"TERM": "xterm-256color"}
    process = subprocess.Popen((*TOP, *flags), stdin=there, stdout=there, stderr=there, env=variables)
    os.close(there)
    try:
        yield TopScreen(process, here)
    finally:
        process.kill()
        process.wait()
        os.close(here)


async def test_processes_are_measured_while_one_is_stopped_and_ctrl_c_ends_it(capsys) -> None:
    async with serving() as works, serving() as stops, loaded(works, stops):
        flags = [word for each in (works, stops) for word in ("--target", each.target)]
        flags += ["--interval-s", "0.2", "--timeout", "1"]
        with top(80, *flags) as narrow:
            await asyncio.to_thread(narrow.read, "2 serving")
            stops.signal(signal.SIGSTOP)
            try:
                await asyncio.to_thread(narrow.read, f"{stops.target}: it does not answer")
                assert await run(works.target, "top", *flags[2:], "--once", "--json") == 0
                hung, frame = json.loads(capsys.readouterr().out), narrow.frame
            finally:
                stops.signal(signal.SIGCONT)
            await asyncio.to_thread(narrow.read, "2 serving")
            await stops.kill()
            await asyncio.to_thread(narrow.read, "1 serving, 1 gone")
            async with serving(port=stops.port):
                await asyncio.to_thread(narrow.read, f"{stops.target}: it was restarted")
                assert await asyncio.to_thread(narrow.interrupt) == 0
    measured, silent = hung["executors"]
    assert (measured["target"], measured["state"], measured["reason"]) == (works.target, "SERVING", "")
    assert measured["steps_per_s"] > 0 and measured["tokens_per_s"] > 0 and 0 < measured["busy_share"] <= 1.1
    assert measured["rows_per_step"] == pytest.approx(1, abs=0.2)
    assert measured["measured_s"] >= 0.2 and measured["sequences"] >= 1
    [caller] = measured["callers"]
    assert (caller["identity"], caller["sessions"]) == ("", 1) and caller["sequences"] >= 1
    assert {each["method"].rpartition("/")[2] for each in measured["slowest_calls"]} & {"Session", "GetInfo"}
    assert re.search(r"\(no name\) +\d", frame) and "slowest calls" in frame
    assert (silent["state"], silent["reason"], silent["steps_per_s"]) == ("HUNG", "it does not answer", None)
    assert max(map(len, frame.replace("\r", "").splitlines())) == 80
    assert re.search(rf"{works.target} +serving +[1-9]", frame), "the one that hangs does not hold up the other's row"
    assert narrow.written.startswith("\x1b[?1049h") and narrow.written.endswith("\x1b[?1049l")
    assert "Traceback" not in narrow.written


async def test_once_without_an_executor_has_its_reason_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("127.0.0.1:1", "top", "--once", "--interval-s", "0.1") == 1
    head, _, columns, found, _, reason = capsys.readouterr().out.splitlines()
    assert head == "1 gone; 0 tokens/s" and columns.split()[:3] == ["executor", "state", "up"]
    assert found.split() == ["127.0.0.1:1", "gone", *["-"] * len(COLUMNS)] and "refused" in reason


async def test_without_a_terminal_documents_are_written_at_each_interval_until_a_signal_comes(monkeypatch) -> None:
    found: list[str] = []

    class Reader(io.StringIO):
        def write(self, text: str) -> int:
            found.append(text)
            if len(found) == 3:
                signal.raise_signal(signal.SIGTERM)
            return len(text)

    monkeypatch.setattr(sys, "stdout", Reader())
    async with identity() as served, asyncio.timeout(PATIENCE_S):
        assert await run(served.target, "top", "--json", "--interval-s", "0.1") == 0
    rows = [json.loads(each)["executors"][0] for each in found]
    assert [each["state"] for each in rows] == ["SERVING"] * 3
    assert rows[0]["steps_per_s"] is None and rows[2]["steps_per_s"] == 0
