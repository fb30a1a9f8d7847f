"""`ferrum-rpc doctor`: whether a model can be served here, how, and whether it is computed correctly.

It makes the choices that `serve` makes with the same settings and prints the reasons, plans the memory, and compares a
few rows with transformers if that is installed. It reports obstacles in the words of `serve`, before the first caller
meets them.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from ferrum_rpc.building import planned
from ferrum_rpc.config import SETTINGS, ServeSettings
from ferrum_rpc.errors import ExecutorError
from ferrum_rpc.terminal import aligned, columns, wrap

if TYPE_CHECKING:
    from ferrum_rpc.engine.assembly.choose import Choices
    from ferrum_rpc.engine.assembly.parity import Parity

EXIT_SERVES, EXIT_WRONG, EXIT_TOO_LARGE = 0, 1, 2
FLOAT32: Final = 4
"""Bytes."""


def doctor(settings: ServeSettings, *, as_json: bool) -> int:
    """Print the findings. Exit status 1 if the model is computed incorrectly, 2 if it does not fit. Raises
    `ExecutorError` if it is refused."""
    choices, plan = planned(settings)
    from ferrum_rpc.engine.assembly.plan import gib

    config, memory, adapters = choices.config, plan.memory_bytes, _adapters(choices)
    parity, compared = None, "not compared: it does not fit"
    if not memory or plan.fits:
        left = memory - plan.weights_bytes * plan.ranks if memory else 0  # the whole model is compared
        parity, compared = _compare(choices, left)
    if memory and not plan.fits:
        status, verdict = EXIT_TOO_LARGE, plan.advice
    elif parity is not None and not parity.holds:
        status, verdict = EXIT_WRONG, "its results are wrong: do not serve it, and report it with this output"
    else:
        status, verdict = EXIT_SERVES, f"it can be served: {_command(settings)}"
    if as_json:
        facts = {
            "model": settings.model.path,
            "folder": config.path,
            "choices": dict(choices.reasons),
            "plan": {
                **dataclasses.asdict(plan),
                "others": plan.others._asdict(),
                "all_bytes": plan.all_bytes,
                "fits": plan.fits,
                "advice": plan.advice,
            },
            "adapters": adapters,
            "parity": None if parity is None else _facts(parity),
            "compared": compared,
            "verdict": verdict,
        }
        print(json.dumps(facts))
        return status
    lines = [("model", plan.architecture), ("folder", config.path)]
    lines += [(choice, reason) for choice, reason in choices.reasons]
    if plan.ranks > 1:
        lines.append(("ranks", f"{plan.ranks}; what follows is of the first of them"))
    lines += [
        ("weights", gib(plan.weights_bytes)),
        ("largest step", f"{gib(plan.activations_bytes + plan.sampling_bytes)} for {plan.step_tokens:,} tokens"),
        ("kv cache", f"{gib(plan.kv_bytes)} in {plan.kv_dtype}: {plan.kv_tokens:,} tokens"),
        *([("states", f"{gib(plan.slots_bytes)}: {plan.state_slots:,} slots")] if plan.state_slots else []),
        *([("all ranks", f"{gib(plan.all_bytes)} on this machine")] if plan.others.ranks else []),
        ("memory", f"{gib(memory)} free" if memory else "not known"),
        *((f"adapter {name}", text) for name, text in adapters.items()),
        ("parity", compared),
    ]
    width = columns(sys.stdout)
    print(*aligned(lines, width), sep="\n")
    print(verdict if status == EXIT_SERVES else "\n".join(wrap(verdict, width)))  # the command is to be copied
    return status


def _adapters(choices: Choices) -> dict[str, str]:
    """The adapters of the folder: each is loaded later, or refused, by `LoadAdapter`."""
    from ferrum_rpc.engine.adapters import examine

    config = choices.config
    if config.adapter_dir is None:
        return {}
    return examine(config.adapter_dir, choices.facts.modules, config.max_adapter_rank)


def _facts(parity: Parity) -> dict[str, Any]:
    errors = {"error": parity.error._asdict(), "theirs": parity.theirs and parity.theirs._asdict()}
    return {**dataclasses.asdict(parity), **errors, "holds": parity.holds}


def _command(settings: ServeSettings) -> str:
    """The command that serves it with these settings."""
    words = ["ferrum-rpc", "serve", settings.model.path]
    for name, field in SETTINGS.items():
        value = getattr(settings.model if hasattr(settings.model, name) else settings, name)
        if value != field.default:
            flag = f"--{'no-' * (value is False)}{name.replace('_', '-')}"
            words += [flag] if isinstance(value, bool) else [flag, str(value)]
    return shlex.join(words)


def _compare(choices: Choices, left: int) -> tuple[Parity | None, str]:
    """The comparison with transformers, and its text. ``left``: bytes besides the model, 0 if unknown."""
    from ferrum_rpc.engine.assembly.parity import compare
    from ferrum_rpc.engine.assembly.plan import gib

    config, needed = choices.config, FLOAT32 * choices.facts.numbers
    if not needed:
        return None, "not compared: the identity model has no weights"
    if find_spec("transformers") is None:
        return None, "not compared: transformers is not installed (pip install transformers)"
    if left and needed > left:
        return None, f"not compared: transformers would need {gib(needed)} in float32"
    exact = dataclasses.replace(config, quantize="none", kv_dtype="auto")
    try:
        parity = compare(exact)
    except ExecutorError:  # what `serve` would say
        raise
    except Exception as error:  # whatever transformers says of a model that it cannot load
        return None, f"not compared: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    theirs = ""
    if parity.theirs is not None:
        theirs = f"; of transformers in {parity.dtype} {parity.theirs.typical:.2g} and {parity.theirs.largest:.2g}"
    rounded = "" if exact == config else "without quantizing, "
    return parity, (
        f"{rounded}{parity.rows} rows in {parity.dtype}: the error is {parity.error.typical:.2g} of the logits' "
        f"standard deviation, the largest {parity.error.largest:.2g}{theirs}; "
        f"{parity.same_tokens:.0%} have the same largest logit"
    )
