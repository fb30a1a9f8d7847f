"""What a program may write where people and programs read: colours and moving lines."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TextIO


def moves(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a line may be drawn over: on a terminal that knows how."""
    return stream.isatty() and environment.get("TERM") != "dumb"


def colours(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether to use colours: where lines may move, unless NO_COLOR is set (https://no-color.org)."""
    return moves(stream, environment) and not environment.get("NO_COLOR")
