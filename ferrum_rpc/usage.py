"""What the command line shares with the settings of the server. It needs no package, so that every command but `serve`
runs where only the client is installed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

TOKEN_VARIABLE: Final = "FERRUM_TOKEN"  # noqa: S105 - a name, no token
"""The token of the commands that ask a server; the server's own setting is a file of them."""


class ConfigError(ValueError):
    """A setting is invalid; the message names it and says what is valid."""


def hint(name: str, known: Iterable[str]) -> str:
    """`` (did you mean ...?)``, or an empty text if no name is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""
