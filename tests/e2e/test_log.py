"""The log of a program: what must never stand in it, and a reader that stalls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ferrum_rpc.logs import HELD_CHARACTERS, LineWriter

ROOT = Path(__file__).parents[2]

TALKS = """
import structlog
from ferrum_rpc.logs import configure_logging
configure_logging("json")
for number in range(20_000):
    structlog.get_logger().warning("line", number=number, filler="x" * 100)
print("unhindered", flush=True)
"""


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_traceback_has_no_prompt_and_no_token(log_format: str, tmp_path: Path) -> None:
    tokens, secret, prompt = tmp_path / "tokens", "its-own-secret", ["71531", "82642", "93753"]
    tokens.write_text(f"alice {secret}\n")
    tokens.chmod(0o600)
    command = (sys.executable, "-m", "tests.e2e.raising_handler", log_format, str(tokens), secret, *prompt)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "INTERNAL\n"
    assert "a bug, 3 tokens on" in done.stderr and "raise_with" in done.stderr, "the traceback is there"
    assert not any(each in done.stderr for each in (secret, *prompt))


def test_a_program_whose_log_nobody_reads_goes_on_and_ends() -> None:
    with subprocess.Popen(
        (sys.executable, "-c", TALKS), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as it:
        try:
            said: list[bytes] = []
            hears = threading.Thread(target=lambda: said.append(it.stdout.readline()))  # type: ignore[union-attr]
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
    with subprocess.Popen(
        (sys.executable, "-c", TALKS), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as it:
        assert it.stdout is not None and it.stderr is not None
        assert it.stdout.readline() == b"unhindered\n"  # the log is read from now on
        events = [json.loads(line) for line in it.stderr]
    numbers = [each["number"] for each in events if each["event"] == "line"]
    lost = [each["lines"] for each in events if each["event"] == "log_lines_dropped"]
    assert numbers == sorted(numbers)
    assert len(numbers) + sum(lost) == 20_000 and lost
