"""The heartbeat: a hung thread is told from an idle one and from a long honest computation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ferrum_rpc.engine.heartbeat import Heartbeat


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def look(heart: Heartbeat, clock: Clock, seconds: float) -> str | None:
    """Let time pass and look every quarter of a second; what the last look saw."""
    seen = None
    for _ in range(round(seconds * 4)):
        clock.now += 0.25
        seen = heart.trouble(clock.now)
    return seen


@contextmanager
def thread_that(heart: Heartbeat, work: Callable[[threading.Event], None]) -> Iterator[None]:
    """A thread that begins and then works until its event is set."""
    begun, stop = threading.Event(), threading.Event()

    def run() -> None:
        heart.begin()
        begun.set()
        work(stop)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert begun.wait(10)
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

    def __call__(self, stop: threading.Event) -> None:
        while not stop.is_set():
            sum(range(1000))
            self.cpu_s = time.thread_time()

    def some_more(self) -> None:
        enough = self.cpu_s + 0.003
        while self.cpu_s < enough:
            time.sleep(0.001)


def test_a_thread_that_has_not_begun_is_not_judged() -> None:
    clock = Clock()
    assert look(Heartbeat(clock=clock), clock, 60) is None


def test_silence_without_computing_is_a_hang_within_two_seconds_and_a_beat_ends_it() -> None:
    clock = Clock()
    heart = Heartbeat(clock=clock)
    with thread_that(heart, wait):
        assert look(heart, clock, 1.5) is None
        trouble = look(heart, clock, 0.5)
        assert trouble is not None and "neither" in trouble
        heart.beat()
        assert look(heart, clock, 1) is None


def test_a_thread_that_beats_lives() -> None:
    clock = Clock()
    heart = Heartbeat(clock=clock)
    with thread_that(heart, wait):
        for _ in range(20):
            heart.beat()
            assert look(heart, clock, 0.5) is None


def test_a_thread_that_computes_without_a_beat_lives_until_its_step_is_too_long() -> None:
    clock = Clock()
    heart = Heartbeat(max_step_s=60, clock=clock)
    computing = Computing()
    with thread_that(heart, computing):
        heart.step_begins()
        for _ in range(60):
            computing.some_more()
            assert look(heart, clock, 1) is None
        computing.some_more()
        assert "step has taken" in (look(heart, clock, 0.25) or "")
        heart.step_ends()
        assert look(heart, clock, 0.25) is None


def test_time_in_which_nobody_looked_proves_nothing() -> None:
    """A process that was stopped for a minute looks at a thread that had no chance to beat."""
    clock = Clock()
    heart = Heartbeat(clock=clock)
    with thread_that(heart, wait):
        assert look(heart, clock, 1) is None
        clock.now += 60
        assert heart.trouble(clock.now) is None
        assert look(heart, clock, 1) is None
        assert look(heart, clock, 1) is not None


def test_a_thread_that_has_ended_does_not_break_the_look() -> None:
    clock = Clock()
    heart = Heartbeat(clock=clock)
    with thread_that(heart, lambda stop: None):
        pass
    assert look(heart, clock, 3) is not None
