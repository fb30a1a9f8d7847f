"""The log of a program: what must never stand in it, and a reader that stalls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

from ferrum_rpc.logs import HELD_CHARACTERS, LineWriter, configure_logging, drain
from ferrum_rpc.service import executor
from ferrum_rpc.service.guard.auth import Security
from tests.support.serving import serve_identity

ROOT = Path(__file__).parents[2]

TALKS = """
import structlog
from ferrum_rpc.logs import configure_logging
configure_logging("json")
for number in range(20_000):
    structlog.get_logger().warning("line", number=number, filler="x" * 100)
print("unhindered", flush=True)
"""


def talking() -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen((sys.executable, "-c", TALKS), cwd=ROOT, stdout=pipe, stderr=pipe)


async def test_a_traceback_has_no_prompt_and_no_token(tmp_path, capfd, monkeypatch) -> None:
    """Of a handler that raises with the prompt in its locals, in each format of the log."""

    def raise_with(state: Any, account: Any, items: Any, **_: object) -> None:
        prompt = [int(token) for token in items[0].tokens]
        raise RuntimeError(f"a bug, {len(prompt)} tokens on")

    tokens, secret, prompt = tmp_path / "tokens", "its-own-secret", [71531, 82642, 93753]
    tokens.write_text(f"alice {secret}\n")
    tokens.chmod(0o600)
    monkeypatch.setattr(executor, "ForwardCall", raise_with)
    async with serve_identity(vocab_size=100_000, security=Security(tokens=tokens)) as served:
        for log_format in ("json", "console"):
            configure_logging(log_format)
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await served.by(secret).prefill(prompt)
            assert failed.value.code() is grpc.StatusCode.INTERNAL
            drain()
            wrote = capfd.readouterr().err
            assert "a bug, 3 tokens on" in wrote and "raise_with" in wrote, "the traceback is there"
            assert not any(each in wrote for each in (secret, *map(str, prompt)))


def test_a_program_whose_log_nobody_reads_goes_on_and_ends() -> None:
    with talking() as it:
        try:
            said: list[bytes] = []
            hears = threading.Thread(target=lambda: said.append(it.stdout.readline()))
            hears.start()
            hears.join(60)
            assert said == [b"unhindered\n"], "it waits for the reader of its log"
            assert it.wait(60) == 0
        finally:
            it.kill()


def test_a_reader_that_goes_on_gets_what_was_held_and_hears_how_much_was_not() -> None:
    reads, writes = os.pipe()
    told: list[int] = []
    resumed = threading.Event()

    def tell(lines: int) -> None:
        told.append(lines)
        resumed.set()

    writer = LineWriter(writes, tell)
    line, sent = "x" * 999 + "\n", 0
    while not writer.dropped:
        writer.write(line)
        sent += 1
    assert not writer.drain(0)
    for _ in range(9):
        writer.write(line)
    got: list[bytes] = []

    def read() -> None:
        while data := os.read(reads, 1 << 16):
            got.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    assert resumed.wait(60) and writer.drain(60)
    os.close(writes)
    reader.join()
    os.close(reads)
    assert told == [writer.dropped]
    assert b"".join(got).decode() == line * (sent + 9 - writer.dropped)
    assert sent * len(line) < HELD_CHARACTERS + (1 << 17), "memory is bounded"


def test_lines_keep_their_order_and_their_count_is_told_in_the_log() -> None:
    with talking() as it:
        assert it.stdout.readline() == b"unhindered\n"  # the log is read from now on
        events = [json.loads(line) for line in it.stderr]
    numbers = [each["number"] for each in events if each["event"] == "line"]
    lost = [each["lines"] for each in events if each["event"] == "log_lines_dropped"]
    assert numbers == sorted(numbers)
    assert len(numbers) + sum(lost) == 20_000 and lost
