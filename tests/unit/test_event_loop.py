"""Which event loop is chosen, with uvloop there and without."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from ferrum_rpc.event_loop import Choice, choose_loop
from ferrum_rpc.usage import ConfigError


@pytest.mark.parametrize(
    ("choice", "module"), [("auto", "uvloop"), ("uvloop", "uvloop"), ("asyncio", "asyncio.unix_events")]
)
def test_the_loop_that_was_asked_for_is_made(choice: Choice, module: str) -> None:
    loop = choose_loop(choice).make()
    try:
        assert type(loop).__module__ == module
    finally:
        loop.close()


def test_without_uvloop_auto_is_asyncio_and_asking_for_it_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str, *rest: Any) -> None:
        assert name == "uvloop"

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    assert choose_loop("auto").name == choose_loop("asyncio").name == "asyncio"
    with pytest.raises(ConfigError, match=r"pip install .*uvloop"):
        choose_loop("uvloop")
