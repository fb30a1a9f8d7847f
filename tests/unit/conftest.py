"""Checkpoints that tests of this folder only read, each written once, and the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ferrum_rpc import cli
from tests.support.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Path]]:
    """The folder that `make_checkpoint` writes for a family and its options. Whoever changes one copies it."""
    folders: dict[str, Path] = {}
    written: dict[Path, int] = {}

    def checkpoint(family: str = "qwen3", **options: Any) -> Path:
        name = repr((family, sorted(options.items())))
        if name not in folders:
            folders[name] = make_checkpoint(tmp_path_factory.mktemp(family), family, **options)
            written.update((file, file.stat().st_mtime_ns) for file in folders[name].iterdir())
        return folders[name]

    yield checkpoint
    found = {file: file.stat().st_mtime_ns for folder in folders.values() for file in folder.iterdir()}
    assert found == written, "a test changed a checkpoint that others read"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs `ferrum-rpc` with these arguments: its exit status, its output and its errors."""
    monkeypatch.setattr(cli, "prepare", lambda: None)  # it would change the environment of this process

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main([*map(str, arguments)])
        status = ended.value.code
        assert status is None or isinstance(status, int), status
        return status or 0, *capsys.readouterr()

    return run
