"""What a program may write where people and programs read: colours, moving lines, and no lines that are not its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import Final, TextIO

VERBOSITY: Final = "GRPC_VERBOSITY"


def moves(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a line may be drawn over: on a terminal that knows how."""
    return stream.isatty() and environment.get("TERM") != "dumb"


def colours(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether to use colours: where lines may move, unless NO_COLOR is set (https://no-color.org)."""
    return moves(stream, environment) and not environment.get("NO_COLOR")


def keep_grpc_quiet(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let gRPC's C core write no lines: they would stand between ours, and of those each is one JSON object. Must be
    called before grpc is imported. Whoever sets `VERBOSITY` decides."""
    environment.setdefault(VERBOSITY, "NONE")
