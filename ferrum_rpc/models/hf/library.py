"""The package `transformers`: whether it is installed, and how it is kept quiet."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from ferrum_rpc.errors import NotSupported
from ferrum_rpc.install import install

INSTALL: Final = install("hf")
OLDEST: Final = 5


def library() -> Any:
    """The package `transformers`, imported now. Raises NotSupported where it is missing, or too old."""
    try:
        import transformers
    except ImportError as error:
        raise NotSupported(f"transformers is not installed ({error}): {INSTALL}", field="model_backend") from None
    found = str(transformers.__version__)
    if int(found.partition(".")[0]) < OLDEST:
        raise NotSupported(f"transformers {found} is too old: {INSTALL}", field="model_backend")
    return transformers


@contextmanager
def quiet() -> Iterator[None]:
    """Silence its remarks on configurations and its progress bars. Our errors say what is wrong, and programs read our
    log."""
    logs = library().utils.logging
    level, bar = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity(logs.CRITICAL)
    logs.disable_progress_bar()
    try:
        yield
    finally:
        logs.set_verbosity(level)
        if bar:
            logs.enable_progress_bar()


@contextmanager
def reading_one_by_one() -> Iterator[None]:
    """Keep its threads from reading ahead: where it joins tensors (those of experts), all of them would be in memory
    twice."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
