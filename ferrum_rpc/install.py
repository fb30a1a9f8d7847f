"""How what is missing is installed: from a checkout, as this package and its extras are on no package index."""

from __future__ import annotations


def install(*extras: str) -> str:
    """What to run, for the end of a sentence."""
    return f"pip install '.[{','.join(extras)}]' in a checkout of ferrum-rpc"
