"""`ferrum-rpc fleet` without a cluster: its command line, its child, and the file of targets."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ferrum_rpc import cli
from ferrum_rpc.config import SETTINGS
from ferrum_rpc.fleet import process
from ferrum_rpc.fleet.process import DidNotServeError, ServeProcess
from ferrum_rpc.fleet.targets import listening, publish

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["identity", "--kv-memorry", "1GiB"], "unknown flag '--kv-memorry' (did you mean '--kv-memory'?)"),
        (["identity", "--executor", "3"], "unknown flag '--executor' (did you mean '--executors'?)"),
        (["identity", "--kv-memory", "1x"], "kv_memory: must be a number of bytes"),
        (["identity", "--host", "10.0.0.3"], "host must not be set: a fleet"),
        (["identity", "--port", "5"], "port must not be set: a fleet"),
        (["--executors", "0", "identity"], "must be a number of at least 1, not '0'"),
        ([], "required: model"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(arguments, says, command):
    status, _, said = command("fleet", "up", *arguments)
    assert status == cli.EXIT_USAGE and says in said


def test_flags_of_the_fleet_are_no_settings_of_serve(command):
    _, told, _ = command("fleet", "up", "--help")
    assert "--executors" in told
    assert [name for name in SETTINGS if f"--{name.replace('_', '-')} " in told] == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_executors_get_the_arguments_of_serve_as_they_were_written(ranks, command, monkeypatch):
    of_serve = ["identity", "--kv-memory", "1GiB", "--no-warmup"]
    if ranks > 1:
        of_serve += ["--tensor-parallel", str(ranks)]
    seen: list[argparse.Namespace] = []

    def up(options: argparse.Namespace) -> int:
        seen.append(options)
        return 0

    monkeypatch.setitem(sys.modules, "ferrum_rpc.fleet.cluster", SimpleNamespace(up=up))
    monkeypatch.delattr("ferrum_rpc.fleet.cluster", raising=False)
    assert command("fleet", "up", "--executors", "3", of_serve[0], "--cpus", "4", *of_serve[1:])[0] == 0
    [options] = seen
    assert (options.executors, options.cpus, options.ranks) == (3, 4, ranks)
    assert options.arguments == of_serve


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
@pytest.mark.parametrize("arguments", [["up", "identity"], ["down"], ["status"], ["targets", "file"]])
def test_without_ray_it_says_which_extra_has_it(arguments):
    with pytest.raises(SystemExit, match=r"this needs ray, .*\[ray\]"):
        cli.main(["fleet", *arguments])


def child(monkeypatch: pytest.MonkeyPatch, *lines: str, then: str = "") -> tuple[ServeProcess, threading.Event]:
    """A child that logs these lines in the place of an executor; and whether its end was told."""
    script = f"import sys, time\nfor line in {lines!r}: print(line, file=sys.stderr, flush=True)\n{then}"
    monkeypatch.setattr(process, "BOUND", script)
    ended = threading.Event()
    return ServeProcess([], {}, ended.set), ended


READY = json.dumps({"event": "ready", "target": "10.0.0.3:4711", "instance_id": "ab"})


def test_an_executor_says_where_it_serves_and_its_end_is_told(monkeypatch):
    serving, ended = child(monkeypatch, "no json", '{"event": "backend_selected"}', READY, '{"event": "later"}')
    serving.wait_until_it_serves()
    assert (serving.target, serving.instance_id) == ("10.0.0.3:4711", "ab")
    assert ended.wait(10)


def test_an_executor_that_was_stopped_is_no_surprise(monkeypatch):
    then = "import signal; signal.signal(15, lambda *_: sys.exit(3)); print('armed', flush=True); time.sleep(60)"
    serving, ended = child(monkeypatch, READY, then=then)
    serving.wait_until_it_serves()
    assert serving.stop() in (3, -signal.SIGTERM)
    assert not ended.wait(0.1)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (['{"event": "startup_failed", "error": "port 5 is taken"}', '{"event": "stopped"}'], "port 5 is taken"),
        (["Traceback", "MemoryError"], "MemoryError"),
        ([], "it said nothing"),
    ],
)
def test_an_executor_that_does_not_serve_says_why(lines, reason, monkeypatch):
    serving, ended = child(monkeypatch, *lines)
    with pytest.raises(DidNotServeError, match=reason):
        serving.wait_until_it_serves()
    assert not ended.is_set()


@pytest.mark.parametrize("there", [True, False])
def test_paths_begin_in_the_folder_of_who_asked(there, tmp_path, monkeypatch):
    monkeypatch.setattr(process, "BOUND", "import os, sys; sys.exit(os.getcwd())")
    folder = tmp_path if there else tmp_path / "no such"
    serving = ServeProcess([], {}, lambda: None, folder=str(folder))
    with pytest.raises(DidNotServeError, match=f"^{tmp_path if there else '/'}$"):
        serving.wait_until_it_serves()


def test_an_executor_dies_with_what_started_it():
    script = """if True:
        from ferrum_rpc.fleet.process import ServeProcess
        import time
        serving = ServeProcess(["identity", "--port", "0", "--kv-blocks", "64", "--no-warmup"], {}, lambda: None)
        serving.wait_until_it_serves()
        print(serving.target, serving.instance_id, flush=True)
        time.sleep(60)
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as parent:
        assert parent.stdout is not None
        target, instance_id = parent.stdout.readline().split()
        assert len(instance_id) == 16
        found = {"executor-0": {"target": target, "instance_id": instance_id}}
        assert listening(found) == {"executor-0"}
        parent.kill()
        end = time.monotonic() + 10
        while listening(found):
            assert time.monotonic() < end


def test_targets_are_those_where_somebody_listens():
    with socket.create_server(("127.0.0.1", 0)) as there, socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))
        reports = {name: {"target": f"127.0.0.1:{each.getsockname()[1]}"} for name, each in (("a", there), ("b", gone))}
        assert listening({**reports, "c": {}}) == {"a"}
    assert listening({}) == set()


def test_the_file_of_targets_is_written_whole(tmp_path):
    file = tmp_path / "targets"
    publish(file, ["10.0.0.3:4711", "10.0.0.4:4711"])
    with file.open() as before:
        publish(file, ["10.0.0.5:4711"])
        assert before.read() == "10.0.0.3:4711\n10.0.0.4:4711\n"
    assert file.read_text() == "10.0.0.5:4711\n"
    publish(file, [])
    assert (file.read_text(), [each.name for each in tmp_path.iterdir()]) == ("", ["targets"])
