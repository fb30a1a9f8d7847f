"""The commands of `ferrum-rpc fleet` on a Ray cluster.

Each executor has a placement group, which keeps its resources while it restarts, and an actor of the same name in it.
Both are detached: they outlive the command, and a later one finds them by their names in the fleet's namespace.

An actor whose node was killed may answer once more with what it knew. So a target counts only while its port accepts
connections; the executor there reports its instance, and refuses handles of another one.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NoReturn

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ferrum_rpc.fleet.process import DidNotServeError, ServeProcess
from ferrum_rpc.fleet.targets import Report, listening, publish

PREFIX: Final = "executor-"
ANSWER_S: Final = 2.0
"""Maximum response time of a live actor; one whose executor loads, drains or waits for resources does not answer."""

LOOK_EVERY_S: Final = 1.0
RETRY_S: Final = 5.0
"""Seconds between two starts of an executor that served once and now does not start."""


class Executor:
    """The actor that starts an executor, and reports its address."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], folder: str) -> None:
        """Raises `DidNotServeError` in its first life, after which Ray does not restart it: the settings are wrong.
        Later the same failure may be temporary, such as memory that is not free yet."""
        self._node = ray.util.get_node_ip_address()
        listen = ("--host", self._node, "--port", "0")
        self._process = ServeProcess([*arguments, *listen], environment, lambda: os._exit(1), folder=folder)
        try:
            self._process.wait_until_it_serves()
        except DidNotServeError:
            if not ray.get_runtime_context().was_current_actor_reconstructed:
                raise
            time.sleep(RETRY_S)
            os._exit(1)

    def report(self) -> Report:
        """The target and instance of the executor."""
        return {"target": self._process.target, "instance_id": self._process.instance_id, "node": self._node}

    def stop(self) -> int:
        """Drain; the executor's exit status."""
        return self._process.stop()


@contextmanager
def connected(options: argparse.Namespace) -> Iterator[None]:
    """Options of actors in the fleet's namespace of the cluster."""
    try:
        ray.init(options.address, namespace=options.name, log_to_driver=False, logging_level="ERROR")
    except ConnectionError as error:
        sys.exit(f"ferrum-rpc fleet: no Ray cluster at {options.address!r}: {error}; `ray start --head` begins one")
    except RayError as error:  # of a token that is missing or wrong
        sys.exit(f"ferrum-rpc fleet: the Ray cluster at {options.address!r} refuses this program: {error}")
    signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        ray.shutdown()


def _end(number: int, frame: object) -> NoReturn:
    """A handler in place of Ray's own, which prints a native stack as for a crash. Raised in a wait of Ray's, it
    becomes status 1."""
    sys.exit(128 + number)


def up(options: argparse.Namespace) -> int:
    """Start what is missing of ``options.executors``, of so many ``ranks`` each, by the ``arguments`` of `serve`, and
    wait until all serve. Exit status 1 where one does not; one that has no room yet starts when there is some."""
    environment = {name: value for name, value in os.environ.items() if name.startswith("FERRUM_")}
    environment.pop("FERRUM_TOKEN", None)
    environment["OMP_NUM_THREADS"] = str(options.cpus)
    room = {"CPU": options.cpus * options.ranks, "GPU": options.gpus * options.ranks}
    bundle = {kind: float(count) for kind, count in room.items() if count}
    with connected(options):
        running = names()
        for name in (f"{PREFIX}{index}" for index in range(options.executors)):
            if name in running:
                continue
            group = placement_group([bundle], name=name, lifetime="detached")
            ray.remote(Executor).options(
                name=name,
                lifetime="detached",
                num_cpus=room["CPU"],
                num_gpus=room["GPU"],
                max_restarts=options.max_restarts,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group),
            ).remote(options.arguments, environment, os.getcwd())
        return _wait(options.timeout)


def _wait(timeout_s: float) -> int:
    """Wait until every executor has reported where it serves."""
    failed = 0
    waiting = {ray.get_actor(name).report.remote(): name for name in names()}
    end = time.monotonic() + timeout_s
    while waiting:
        done, _ = ray.wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
        if not done:
            print(f"ferrum-rpc fleet: no room yet, or still loading: {', '.join(waiting.values())}", file=sys.stderr)
            return 1
        [ready] = done
        name = waiting.pop(ready)
        try:
            print(f"{name}  {ray.get(ready)['target']}", flush=True)
        except RayError as error:
            print(f"ferrum-rpc fleet: {name}: {str(error).strip().splitlines()[-1]}", file=sys.stderr)
            _remove(name)
            failed = 1
    return failed


def down(options: argparse.Namespace) -> int:
    """Drain all serving executors, then end all. Exit status 1 if a drain took longer than ``options.timeout``."""
    with connected(options):
        serving = [name for name, report in reports().items() if report]
        drains = [ray.get_actor(name).stop.remote() for name in serving]
        _, late = ray.wait(drains, num_returns=len(drains), timeout=options.timeout) if drains else ([], [])
        for name in names():
            _remove(name)
    return 1 if late else 0


def status(options: argparse.Namespace) -> int:
    """Print one line per executor. Exit status 1 if one does not serve, or there is none."""
    with connected(options):
        found = reports()
        there = listening(found)
    rows = [
        {"name": name, "state": "serving" if name in there else "unreachable" if report else "starting", **report}
        for name, report in found.items()
    ]
    if options.json:
        print(json.dumps(rows))
    else:
        for row in rows:
            print("  ".join((row["name"], f"{row['state']:<11}", row.get("target", ""), row.get("instance_id", ""))))
    return 0 if rows and all(row["state"] == "serving" for row in rows) else 1


def targets(options: argparse.Namespace) -> int:
    """Maintain ``options.file`` until a signal: the targets that accept connections, one per line. SIGTERM ends it with
    exit status 0."""
    stopping = threading.Event()
    known: dict[str, Report] = {}
    pending: dict[str, Any] = {}
    written: list[str] | None = None
    with connected(options):
        signal.signal(signal.SIGTERM, lambda *_: stopping.set())
        while not stopping.is_set():
            known = _reports(known, pending)
            there = sorted(known[name]["target"] for name in listening(known))
            if there != written:
                publish(options.file, there)
                print(f"{len(there)} targets: {' '.join(there)}", flush=True)
                written = there
            stopping.wait(LOOK_EVERY_S)
    return 0


def _reports(known: dict[str, Report], pending: dict[str, Any]) -> dict[str, Report]:
    """The latest reports of the present executors. ``pending``: requests for reports in flight, by name; an actor that
    starts again answers when its executor serves."""
    present = names()
    for name in present:
        if name not in pending:
            pending[name] = ray.get_actor(name).report.remote()
    done, _ = ray.wait(list(pending.values()), num_returns=len(pending), timeout=LOOK_EVERY_S) if pending else ([], [])
    for name in [name for name, answer in pending.items() if answer in done or name not in present]:
        try:
            known = {**known, name: ray.get(pending.pop(name), timeout=0)}
        except (RayError, GetTimeoutError):
            continue
    return {name: report for name, report in known.items() if name in present}


def names() -> list[str]:
    """The executors of this fleet, in order."""
    found = [name for name in ray.util.list_named_actors() if name.startswith(PREFIX)]
    return sorted(found, key=lambda name: int(name.removeprefix(PREFIX)))


def reports() -> dict[str, Report]:
    """The report of each executor's actor, empty if it does not answer."""
    pending = {name: ray.get_actor(name).report.remote() for name in names()}
    done, _ = ray.wait(list(pending.values()), num_returns=len(pending), timeout=ANSWER_S) if pending else ([], [])
    found: dict[str, Report] = {}
    for name, answer in pending.items():
        try:
            found[name] = ray.get(answer) if answer in done else {}
        except RayError:
            found[name] = {}
    return found


def _remove(name: str) -> None:
    """An executor, and the resources reserved for it."""
    with suppress(ValueError):  # it is gone already
        ray.kill(ray.get_actor(name))
    with suppress(ValueError):
        remove_placement_group(ray.util.get_placement_group(name))
