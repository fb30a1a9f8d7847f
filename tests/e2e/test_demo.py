"""`make demo` and Ctrl-C: one line, and no process is left. `make fleet-demo`: what it shows is so.

A terminal's Ctrl-C goes to every process of the foreground group; so it does here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ferrum_rpc.client import ExecutorClient

ROOT = Path(__file__).parents[2]
LOADING = "import sys, time; print('loading', file=sys.stderr, flush=True); time.sleep(60)"
SLOW_EXECUTOR = f"import sys, tools.demo as demo; demo.SERVE = (sys.executable, '-c', {LOADING!r}); demo.main()"


@contextmanager
def demo(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A run of the demo as leader of a session, and the end of whatever that leaves."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = (sys.executable, *arguments)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored
    with subprocess.Popen(command, cwd=ROOT, text=True, start_new_session=True, **pipes) as running:
        try:
            yield running
        finally:
            for process in members(running.pid):
                os.kill(process, signal.SIGKILL)


def members(session: int) -> list[int]:
    """Processes of a session."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, its = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):  # it has ended
            continue
        if int(its) == session and state != "Z":
            found.append(int(folder.name))
    return found


def ended(running: subprocess.Popen[str]) -> tuple[int, str, list[int]]:
    """Exit status, the rest of what it wrote to its errors, and the processes that are left."""
    errors = running.communicate(timeout=60)[1]
    return running.returncode, errors, members(running.pid)


def test_the_demo_ends_with_the_next_commands_as_they_must_be_typed() -> None:
    with demo("tools/demo.py", "--plain", "--max-new-tokens", "2") as running:
        output, errors = running.communicate(timeout=120)
    assert running.returncode == 0, errors
    *_, heading, serve, generate = output.splitlines()
    program = os.path.relpath(Path(sys.executable).with_name("ferrum-rpc"), ROOT)
    assert heading.startswith("next: ")
    assert [serve.strip(), generate.strip()] == [f"{program} serve demo", f'{program} generate "In the beginning"']


async def test_ctrl_c_while_texts_are_written() -> None:
    with demo("tools/demo.py", "--plain", "--max-new-tokens", "3000") as running:
        assert running.stdout is not None
        while (line := running.stdout.readline()).startswith("executor: ") and " parameters) on " not in line:
            pass
        async with ExecutorClient(line.split()[-1]) as client:
            while (await client.status()).pressure.sequences < 8:
                assert running.poll() is None
        assert len(members(running.pid)) == 4, "the demo, the executor and its process for grammars, the scheduler"
        os.killpg(running.pid, signal.SIGINT)
        assert ended(running) == (130, "interrupted\n", [])


def test_a_fleet_writes_the_texts_of_one_executor_though_one_is_killed() -> None:
    with demo("-m", "tools.fleet_demo", "identity", "--executors", "2", "--max-new-tokens", "96", "--plain") as running:
        output, errors = running.communicate(timeout=120)
        assert running.returncode == 0, output + errors
        assert "of the fleet" not in errors, "the board says who is gone"
        before, killed, verdict = output.rstrip().rsplit("\n", 2)
        assert killed.endswith("was killed") and verdict.startswith("texts: 8, ")
        assert verdict.endswith("rebuilt elsewhere; the same as by one executor")
        assert "8 texts. The same by 2, of which" in before
        assert members(running.pid) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_end_while_the_executor_loads(number: signal.Signals) -> None:
    with demo("-c", SLOW_EXECUTOR) as running:
        assert running.stderr is not None
        assert running.stderr.readline() == "loading\n"
        os.killpg(running.pid, number)
        assert ended(running) == (130, "interrupted\n", [])


def test_ctrl_c_while_modules_are_imported() -> None:
    at_subprocess = """
import builtins, runpy, sys
original = builtins.__import__
def interrupted(name, *rest):
    if name == "subprocess":
        raise KeyboardInterrupt
    return original(name, *rest)
builtins.__import__ = interrupted
runpy.run_path("tools/demo.py", run_name="__main__")
"""
    with demo("-c", at_subprocess) as running:
        assert ended(running) == (130, "interrupted\n", [])
