"""The valid targets, and the file of them that a scheduler may watch."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

CONNECT_S: Final = 1.0

Report = dict[str, str]
"""The report of an executor's actor: ``target``, ``instance_id``, ``node``. Empty if it does not answer."""


def listening(found: Mapping[str, Report]) -> set[str]:
    """The names of the executors whose target accepts a connection."""
    reported = [(name, report["target"]) for name, report in found.items() if report]
    with ThreadPoolExecutor(max_workers=max(1, len(reported))) as pool:
        answers = pool.map(_connects, [target for _, target in reported])
    return {name for (name, _), there in zip(reported, answers, strict=True) if there}


def _connects(target: str) -> bool:
    host, _, port = target.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except OSError:
        return False
    return True


def publish(file: Path, lines: Sequence[str]) -> None:
    """Write a file of lines atomically: readers see the old one or the new one."""
    part = file.with_name(f".{file.name}.{os.getpid()}")
    part.write_text("".join(f"{line}\n" for line in lines))
    part.replace(file)
