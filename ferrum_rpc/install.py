"""How to install what is missing: from a checkout, because no package index has this package."""

from __future__ import annotations


def install(*extras: str) -> str:
    """What to run, for the end of a sentence."""
    return f"pip install '.[{','.join(extras)}]' in a checkout of ferrum-rpc"
