"""From settings to a runner: what `ferrum-rpc serve` runs in its model thread, or in its engine process."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from ferrum_rpc.config import IDENTITY, ModelSettings, ServeSettings
from ferrum_rpc.engine.api import Runner
from ferrum_rpc.engine.ranks.world import check_ranks
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.failpoints import NO_FAILPOINTS, Failpoints
from ferrum_rpc.hub import fetched, is_hub_name
from ferrum_rpc.terminal import moves
from ferrum_rpc.usage import hint

if TYPE_CHECKING:
    from ferrum_rpc.engine.assembly.choose import Choices
    from ferrum_rpc.engine.assembly.plan import MemoryPlan

DEMO: Final = ("demo", "demo-draft")
DEMO_PACKAGE: Final = "ferrum_rpc_demo"
BUILT_IN: Final = (*DEMO, IDENTITY)
CONFIG: Final = "config.json"
ADAPTER: Final = "adapter_config.json"
GGUF: Final = ".gguf"

log = structlog.get_logger("ferrum_rpc.serve")


def model_folder(model: str) -> str:
    """The path of a model, a folder or a GGUF file; ``identity`` and a name on the hub are returned unchanged. Raises
    `InvalidRequest` with the whole path if no model can be there, before torch is loaded, which takes seconds.
    """
    if not model:
        message = f"no model is named: write a folder, a GGUF file, a name on the hub, or one of {', '.join(BUILT_IN)}"
        raise InvalidRequest(message, field="model")
    if model == IDENTITY or is_hub_name(model):
        return model
    path = _demo_folder(model) if model in DEMO else str(Path(model).absolute())
    if path.lower().endswith(GGUF) and os.path.isfile(path):
        return path
    try:
        names = os.listdir(path)
    except OSError as error:
        meant = "; name its folder" if os.path.isfile(path) else hint(model, BUILT_IN)
        raise InvalidRequest(f"model folder {path}: {error.strerror or error}{meant}", field="model") from None
    if ADAPTER in names and CONFIG not in names:
        message = f"{path} has an adapter and no model: name the model's folder, and this one's parent by --adapter-dir"
        raise InvalidRequest(message, field="model")
    if CONFIG not in names and not any(name.lower().endswith(GGUF) for name in names):
        raise InvalidRequest(f"model folder {path} has neither {CONFIG} nor a GGUF file", field="model")
    return path


def _demo_folder(model: str) -> str:
    try:
        return str(resources.files(DEMO_PACKAGE) / model)
    except ModuleNotFoundError:
        message = (
            f"model {model} is in the package ferrum-rpc-demo, which is not installed (in a checkout: `make setup`)"
        )
        raise InvalidRequest(message, field="model") from None


def found(settings: ModelSettings) -> ModelSettings:
    """The settings with the model's folder and, for a built-in model, its name. Sets the number of threads."""
    import torch

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)  # this process is ours
    name = settings.path if settings.path in BUILT_IN else ""
    folder = model_folder(settings.path)
    return replace(settings, path=fetched(folder) if is_hub_name(folder) else folder, name=name)


def planned(
    settings: ServeSettings, memory: int | None = None, *, elsewhere: bool = False
) -> tuple[Choices, MemoryPlan]:
    """What `serve` would choose with these settings, and its use of ``memory`` bytes (None: the free memory here, 0 if
    unknown). ``elsewhere``: a CUDA device need not be in this machine. No weight is read."""
    model_folder(settings.model.path)  # before torch is loaded, which takes seconds
    check_ranks(settings.model)
    import torch

    from ferrum_rpc.engine.assembly.choose import choose
    from ferrum_rpc.engine.assembly.size import LargestStep, make_plan
    from ferrum_rpc.engine.memory import free_memory

    config = found(settings.model)
    elsewhere = elsewhere and config.device == "cuda" and not torch.cuda.is_available()
    if elsewhere and memory is None:
        raise InvalidRequest("this machine has no CUDA device: set its memory, as in --memory 80GiB", field="memory")
    choices = choose(config, elsewhere=elsewhere)
    largest = LargestStep(settings.max_batch_tokens, settings.max_batch_items)
    return choices, make_plan(choices, largest, memory or free_memory(choices.device))


def build(
    settings: ModelSettings, failpoints: Failpoints = NO_FAILPOINTS, largest: tuple[int, int] | None = None
) -> Runner:
    """Load the model and make its runner. This imports torch, so call it once the port is bound and health checks are
    answered. ``largest``: see `engine.assembly.size.LargestStep`; with it the memory plan is logged."""
    from ferrum_rpc.engine.assembly.build import build_runner, failing_stage
    from ferrum_rpc.engine.assembly.size import LargestStep

    return build_runner(
        found(settings),
        _Progress(),
        failing_stage(failpoints) if failpoints.rules else None,
        None if largest is None else LargestStep(*largest),
    )


class _Progress:
    """Loading progress, once a second and at the end: one moving line on a terminal, log lines otherwise."""

    def __init__(self) -> None:
        self._began = self._shown_at = time.monotonic()
        self._terminal = moves(sys.stderr)

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done < total and now - self._shown_at < 1:
            return
        self._shown_at = now
        if self._terminal and done < total:
            sys.stderr.write(f"\rloading weights {done / 2**20:,.0f} of {total / 2**20:,.0f} MiB")
            sys.stderr.flush()
        else:
            if self._terminal:
                sys.stderr.write("\r\x1b[2K")
                sys.stderr.flush()
            log.info("loading", bytes=done, total_bytes=total, seconds=round(now - self._began, 2))
