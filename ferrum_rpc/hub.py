"""Models by their name on the Hugging Face hub, in place of a folder: `serve Qwen/Qwen3-0.6B`.

`huggingface_hub` caches them, so each is downloaded once, and cached ones are served without a network. Only
configuration, tokenizer and safetensors are downloaded. Branches move: the log reports the commit, and ``name@commit``
pins it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

import structlog

from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.terminal import moves

FILES: Final = ("*.json", "*.safetensors", "tokenizer.model")
NAME: Final = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@([\w./-]{1,120}))?")

log = structlog.get_logger("ferrum_rpc.serve")


def is_hub_name(model: str) -> bool:
    """Whether it has the form ``organisation/name`` or ``organisation/name@revision``, and is not a path."""
    return NAME.fullmatch(model) is not None and not Path(model.partition("/")[0]).exists()


def fetched(model: str) -> str:
    """The folder of ``model``, a name on the hub, from the cache or downloaded now. Raises `InvalidRequest` with the
    way to get it if that fails."""
    match = NAME.fullmatch(model)
    assert match is not None  # noqa: S101 - `is_hub_name` looked
    name, revision = match.groups()
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ModuleNotFoundError:
        raise _refusal(model, "the package huggingface_hub, which would fetch it, is not installed") from None
    if not moves(sys.stderr):
        disable_progress_bars()
    try:
        folder = snapshot_download(name, revision=revision, allow_patterns=list(FILES))
    except LocalEntryNotFoundError as error:
        why = f"it is not in the cache, and the hub could not be asked ({_first_line(error.__cause__ or error)})"
        raise _refusal(model, why) from None
    except Exception as error:  # the hub's, the network's and the disk's errors have no class in common
        raise _refusal(model, _first_line(error)) from None
    commit = Path(folder).name
    log.info(
        "hub_model_resolved",
        model=name,
        revision=commit,
        folder=folder,
        action=f"serve {name}@{commit} to keep this one",
    )
    return folder


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def _refusal(model: str, why: str) -> InvalidRequest:
    name, _, revision = model.partition("@")
    option = f" --revision {revision}" if revision else ""
    return InvalidRequest(
        f"there is no folder {Path(model).absolute()}, and as a name on the Hugging Face hub: {why}. Where there is a "
        f"network: `hf download {name}{option} --local-dir FOLDER`; then serve FOLDER",
        field="model",
    )
