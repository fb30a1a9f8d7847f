"""What the command line shares with the settings of the server. It needs no package, so that every command but `serve`
runs where only the client is installed. `native` and `runtime` share the names of instruction sets here."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from typing import Final

TOKEN_VARIABLE: Final = "FERRUM_TOKEN"  # noqa: S105 - a name, no token
"""The token of the commands that ask a server; the server's own setting is a file of them."""

ISA_VARIABLE: Final = "FERRUM_ISA"
ISAS: Final = ("portable", "avx2", "avx512_vnni", "avx512", "amx")
"""Values of the variable, in the order of what they leave visible."""


class ConfigError(ValueError):
    """A setting is invalid; the message names it and says what is valid."""


def hint(name: str, known: Iterable[str]) -> str:
    """`` (did you mean ...?)``, or an empty text if no name is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""


def masked_isa(environment: Mapping[str, str] = os.environ) -> str | None:
    """The instruction set that the user limits this machine to, or None. Raises `ConfigError` for an unknown one."""
    isa = environment.get(ISA_VARIABLE)
    if isa is not None and isa not in ISAS:
        raise ConfigError(f"{ISA_VARIABLE} must be one of {', '.join(ISAS)}, not {isa!r}{hint(isa, ISAS)}")
    return isa
