"""The flags of `ferrum-rpc fleet`. Loads no Ray: `--help` comes here too."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

OWN_SETTINGS: Final = ("host", "port", "log_format")
"""Settings of `serve` that a fleet decides: an executor listens on its node's address and on a port that is free there,
and its log is read by its actor."""


def add_fleet_flags(fleet: argparse.ArgumentParser) -> None:
    """`up`, `down`, `status` and `targets` with their flags. What `up` does not know are arguments of `serve`.
    What is parsed has the ``parser`` of the action."""
    actions = fleet.add_subparsers(dest="action", required=True, parser_class=type(fleet))
    usage = "ferrum-rpc fleet up [-h] [--executors N] [--cpus N] [--gpus N] ... [--SETTING VALUE ...] model"
    up = actions.add_parser(
        "up", usage=usage, allow_abbrev=False, help="start executors; takes the model and the settings of `serve`"
    )
    up.add_argument("--executors", type=_count, default=1, help="resulting number of executors, including running ones")
    up.add_argument("--cpus", type=_count, default=1, help="CPUs and threads per rank (default: 1)")
    up.add_argument("--gpus", type=int, default=0, help="GPUs per rank (default: 0)")
    up.add_argument(
        "--max-restarts", type=int, default=-1, help="how often Ray restarts an executor (default: -1, no limit)"
    )
    up.add_argument("--timeout", type=float, default=600.0, help="seconds to wait until all serve")
    down = actions.add_parser("down", allow_abbrev=False, help="drain and end all executors")
    down.add_argument("--timeout", type=float, default=120.0, help="seconds to wait for the drains")
    status = actions.add_parser("status", allow_abbrev=False, help="list the executors and their addresses")
    status.add_argument("--json", action="store_true", help="JSON on one line, for programs")
    targets = actions.add_parser("targets", allow_abbrev=False, help="maintain a file of targets, one per line")
    targets.add_argument("file", type=Path, help="rewritten whenever an executor appears or goes")
    for command in (up, down, status, targets):
        command.set_defaults(parser=command)
        command.add_argument("--address", default="auto", help="the cluster (default: $RAY_ADDRESS, or the one here)")
        command.add_argument("--name", default="ferrum", help="name of the fleet, if a cluster has several")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, not {text!r}")
    return int(text)
