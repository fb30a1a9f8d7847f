"""Failpoints: the grammar, when a rule fires, and what it does."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch

from ferrum_rpc.config import load_settings
from ferrum_rpc.engine.assembly.build import POINT_OF_STAGE, failing_stage
from ferrum_rpc.errors import DeviceLost
from ferrum_rpc.failpoints import NO_FAILPOINTS, Failpoint, FailpointError, Failpoints, parse_failpoints
from ferrum_rpc.usage import ConfigError


def fires(text: str, point: str, hits: int, seed: int = 0) -> list[int]:
    """At which hits it fires."""
    failpoints = Failpoints(parse_failpoints(text), seed)
    fired = []
    for hit in range(1, hits + 1):
        try:
            failpoints.reach(point)
        except FailpointError:
            fired.append(hit)
    assert failpoints.hits[point] == hits and failpoints.fired[point] == len(fired)
    return fired


def test_a_rule_fires_every_time_at_one_time_or_from_one_on():
    assert fires("fork=error", "fork", 3) == [1, 2, 3]
    assert fires("fork=error@3", "fork", 5) == [3]
    assert fires("fork=error@3+", "fork", 5) == [3, 4, 5]
    assert fires("fork=error@1; fork=error@4", "fork", 5) == [1, 4]


def test_a_probability_fires_about_that_often_and_the_same_for_a_seed():
    first = fires("fork=error@p0.25", "fork", 1000, seed=1)
    assert 180 < len(first) < 320
    assert first == fires("fork=error@p0.25", "fork", 1000, seed=1)
    assert first != fires("fork=error@p0.25", "fork", 1000, seed=2)


def test_points_without_rules_do_and_count_nothing():
    failpoints = Failpoints(parse_failpoints("fork=error"))
    failpoints.reach("release")
    NO_FAILPOINTS.reach("fork")
    assert failpoints.hits == {"fork": 0} and NO_FAILPOINTS.hits == {}


def test_what_fires_is_logged_before_it_happens(logs):
    with pytest.raises(FailpointError):
        Failpoints(parse_failpoints("truncate=error")).reach("truncate")
    assert (logs[0]["event"], logs[0]["failpoint"], logs[0]["effect"]) == ("failpoint_fired", "truncate", "error")
    assert logs[0]["action"]


def test_out_of_memory_and_a_lost_device_look_as_the_device_makes_them():
    stage = failing_stage(Failpoints(parse_failpoints("before_forward=oom;truncate=device_lost")))
    with pytest.raises(torch.OutOfMemoryError):
        stage("forward")
    with pytest.raises(DeviceLost):
        stage("truncate")
    stage("reserve")
    with pytest.raises(MemoryError):
        Failpoints(parse_failpoints("fork=oom")).reach("fork")


def test_every_point_of_the_model_thread_has_its_stage():
    assert set(POINT_OF_STAGE.values()) == set(Failpoint) - {Failpoint.BEFORE_REPLY}


def test_what_hangs_goes_on_when_released_and_nothing_hangs_after():
    failpoints = Failpoints(parse_failpoints("fork=hang"))
    passed = threading.Event()
    thread = threading.Thread(target=lambda: (failpoints.reach("fork"), passed.set()), daemon=True)
    thread.start()
    assert not passed.wait(0.05)
    failpoints.release()
    assert passed.wait(10)
    failpoints.reach("fork")
    assert failpoints.fired["fork"] == 2


def test_a_delay_takes_its_time():
    began = time.monotonic()
    Failpoints(parse_failpoints("fork=delay:30")).reach("fork")
    assert time.monotonic() - began >= 0.03


def test_a_crash_is_sigkill_after_its_log_line():
    program = "from ferrum_rpc.failpoints import *; Failpoints(parse_failpoints('fork=crash')).reach('fork')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == -9
    assert "failpoint_fired" in done.stdout


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("before_comit=error", "did you mean 'before_commit'?"),
        ("before_commit=eror", "did you mean 'error'?"),
        ("nowhere=error", "known: after_reserve"),
        ("before_commit", "point=action"),
        ("before_commit=delay", "milliseconds"),
        ("before_commit=error:5", "milliseconds"),
        ("before_commit=error@0", "a hit must be at least 1"),
        ("before_commit=error@p1.5", "probability"),
        ("before_reply=oom", "no device"),
        ("fork=error,release=error", "point=action"),
    ],
)
def test_a_setting_that_is_wrong_says_what_would_be_right(text, hint):
    with pytest.raises(ConfigError, match="failpoints: ") as caught:
        load_settings("identity", {"failpoints": text})
    assert hint in str(caught.value)


def test_a_setting_that_is_right_is_kept_as_written():
    text = "before_commit=error@3;after_forward=crash@10+; fork=delay:20@p0.5;"
    assert load_settings("identity", {"failpoints": text}).failpoints == text
    assert len(parse_failpoints(text)) == 3
