"""Liveness: a hung engine is told from an idle one and from a long honest computation."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from ferrum_rpc.engine import liveness as liveness_module
from ferrum_rpc.engine.liveness import Liveness, own_clock, runs_compiler
from tests.support.waiting import until


class Engine:
    """Its liveness, and a clock that stands until it is moved."""

    def __init__(self, max_step_s: float = 600.0) -> None:
        self.now = 1000.0
        self.busy_since = self.waiting_since = 0.0
        self.liveness = Liveness(max_step_s=max_step_s)

    def look(self, seconds: float) -> str | None:
        """Let time pass and look every quarter of a second; what the last look saw."""
        seen = None
        for _ in range(round(seconds * 4)):
            self.now += 0.25
            seen = self.liveness.hang_reason(self.now, self.busy_since, self.waiting_since)
        return seen

    def lives(self, seconds: int, computing: Computing) -> None:
        """Nothing is wrong in each of so many seconds, in which it computes."""
        for _ in range(seconds):
            computing.some_more()
            assert self.look(1) is None
        computing.some_more()

    @contextmanager
    def thread(self, work: Callable[[threading.Event], None]) -> Iterator[None]:
        """A thread with a step under way, which works until its event is set."""
        begun, stop = threading.Event(), threading.Event()

        def run() -> None:
            self.liveness.cpu_clock = own_clock()
            begun.set()
            work(stop)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert begun.wait(10)
        self.busy_since = self.now
        try:
            yield
        finally:
            stop.set()
            thread.join(10)


def wait(stop: threading.Event) -> None:
    stop.wait(30)


class Computing:
    """Burns CPU time until stopped; `some_more` waits for some of it, however busy the machine is."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self._moved = threading.Condition()

    def __call__(self, stop: threading.Event) -> None:
        while not stop.is_set():
            sum(range(1000))
            with self._moved:
                self.cpu_s = time.thread_time()
                self._moved.notify_all()

    def some_more(self) -> None:
        with self._moved:
            enough = self.cpu_s + 0.003
            self._moved.wait_for(lambda: self.cpu_s >= enough)


def test_an_engine_that_waits_for_work_is_not_judged():
    engine = Engine()
    assert engine.look(60) is None
    with engine.thread(wait):
        engine.busy_since = 0.0
        assert engine.look(60) is None


def test_work_without_computing_is_a_hang_within_two_seconds_and_its_end_ends_it():
    engine = Engine()
    with engine.thread(wait):
        assert engine.look(1.5) is None
        assert "neither" in (engine.look(0.5) or "")
        engine.busy_since = 0.0
        assert engine.look(0.25) is None


def test_steps_that_end_are_progress_though_they_compute_next_to_nothing():
    engine = Engine()
    with engine.thread(wait):
        for _ in range(20):
            engine.busy_since = engine.now
            assert engine.look(0.5) is None


def test_one_that_computes_lives_until_its_step_is_too_long():
    engine = Engine(max_step_s=60)
    computing = Computing()
    with engine.thread(computing):
        engine.lives(60, computing)
        assert "step has taken" in (engine.look(0.25) or "")
        engine.busy_since = 0.0
        assert engine.look(0.25) is None


def test_where_no_clock_can_be_read_the_length_of_a_step_is_judged_alone():
    engine = Engine(max_step_s=60)
    engine.busy_since = engine.now
    assert engine.look(60) is None
    assert "step has taken" in (engine.look(0.25) or "")


def test_time_in_which_nothing_looked_proves_nothing():
    """A process that was stopped for a minute looks at a thread that had no chance to compute."""
    engine = Engine()
    with engine.thread(wait):
        assert engine.look(1) is None
        engine.now += 60
        assert engine.liveness.hang_reason(engine.now, engine.busy_since) is None
        assert engine.look(1) is None
        assert engine.look(1) is not None


def test_a_thread_that_has_ended_does_not_break_the_look():
    engine = Engine()
    with engine.thread(lambda stop: None):
        pass
    assert engine.look(3) is not None


# --- a device, and compilers ------------------------------------------------------------------------------------------


def test_a_device_that_hangs_while_its_waiting_thread_spins_is_found_after_thirty_seconds():
    engine, computing = Engine(), Computing()
    with engine.thread(computing):
        engine.waiting_since = engine.now
        engine.lives(30, computing)
        assert "the device has not finished its step for 30 s" in (engine.look(0.5) or "")
        engine.waiting_since = engine.now  # it has, and computes the next one
        computing.some_more()
        assert engine.look(0.25) is None


def test_a_thread_that_hangs_while_it_waits_for_a_device_is_found_within_two_seconds():
    engine = Engine()
    with engine.thread(wait):
        engine.waiting_since = engine.now
        assert "neither" in (engine.look(2) or "")


def test_a_device_is_not_judged_by_time_in_which_nothing_looked():
    engine, computing = Engine(), Computing()
    with engine.thread(computing):
        engine.waiting_since = engine.now
        assert engine.look(1) is None
        engine.now += 60
        engine.lives(30, computing)
        assert engine.look(0.5) is not None


def test_a_step_that_waits_for_a_compiler_lives_for_a_minute(monkeypatch):
    running = True
    monkeypatch.setattr(liveness_module, "runs_compiler", lambda process: running and process == 7)
    engine = Engine()
    engine.liveness.process = 7
    with engine.thread(wait):
        assert engine.look(60) is None
        assert "neither moved on nor computed for 60" in (engine.look(0.5) or "")
    engine = Engine()
    engine.liveness.process = 7
    with engine.thread(wait):
        assert engine.look(20) is None
        running = False
        assert engine.look(0.25) is not None, "what it does after the compiler has ended is its own"


@pytest.fixture
def programs(tmp_path):
    """Starts a program that waits, under a name, perhaps as the child of a shell."""
    sleep = shutil.which("sleep")
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *, below: bool = False) -> int:
        program = tmp_path / name
        program.symlink_to(str(sleep))
        command = ["sh", "-c", f"{program} 1000 & wait"] if below else [str(program), "1000"]
        started.append(subprocess.Popen(command, start_new_session=True))
        return started[-1].pid

    yield start
    for each in started:
        os.killpg(each.pid, 9)
        each.wait()


@pytest.mark.parametrize("name", ["ptxas", "cc1", "x86_64-linux-gnu-gcc-12"])
async def test_a_compiler_is_found_by_its_name(programs, name):
    assert not runs_compiler(os.getpid())
    compiler = programs(name)
    await until(lambda: runs_compiler(os.getpid()))
    os.kill(compiler, 9)
    await until(lambda: not runs_compiler(os.getpid()))  # one that nobody has waited for yet is dead all the same


async def test_a_compiler_of_a_child_is_found_and_other_children_prove_nothing(programs):
    programs("server")
    programs("ptxas-helper")
    shell = programs("ptxas", below=True)
    await until(lambda: runs_compiler(os.getpid()))
    assert runs_compiler(shell)
    os.killpg(shell, 9)
    await until(lambda: not runs_compiler(os.getpid()))
    assert not runs_compiler(2**22 + 1)
