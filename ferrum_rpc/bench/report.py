"""What a tally says, as one JSON object; `display` shows the same object to a person."""

from __future__ import annotations

from typing import Any, Final

from ferrum_rpc import __version__
from ferrum_rpc.bench.group import GROWTH
from ferrum_rpc.bench.options import Workload, output_name
from ferrum_rpc.bench.samples import LIMIT
from ferrum_rpc.bench.tally import Tally
from ferrum_rpc.client import ExecutorInfo
from ferrum_rpc.errors import Reason

ENOUGH_FOR_P99: Final = 100
ENOUGH_FOR_P99_9: Final = 1000
"""Samples of which one stands beyond the percentile. With fewer it is the slowest one by another name."""


def report(
    target: str, info: ExecutorInfo | None, workload: Workload, tally: Tally, *, interrupted: bool
) -> dict[str, Any]:
    """Figures with their units in their names, and the notes without which they mislead. ``info``: None where the
    executor did not tell it."""
    prompts, steps = tally.prompts, tally.step.count
    return {
        "ferrum_rpc": __version__,
        "target": target,
        "server": _server(info),
        "workload": {
            "way": workload.way,
            "calls": "Session" if workload.way == "session" else "Decode" if workload.single else "BatchDecode",
            "batch": workload.batch,
            "in_flight": workload.groups,
            "sequences": workload.sequences,
            "context": workload.context,
            "prompt_tokens": workload.prompt_tokens,
            "output": output_name(workload.output),
            "loop": "closed" if workload.rate is None else "open",
            "arrivals": None if workload.rate is None else workload.arrivals,
            "steps": workload.steps,
            "seconds": workload.seconds,
            "warmup_steps": workload.warmup,
            "rate_per_s": workload.rate,
            "seed": workload.seed,
        },
        "interrupted": interrupted,
        "prefill": {
            "prompts": prompts.times.count,
            "tokens": prompts.tokens,
            "cached_tokens": prompts.cached_tokens,
            "seconds": prompts.wall_s,
            "tokens_per_s": _rate(prompts.tokens, prompts.wall_s),
        },
        "decode": {
            "steps": steps,
            "tokens": tally.tokens,
            "seconds": tally.wall_s,
            "tokens_per_s": _rate(tally.tokens, tally.wall_s),
            "steps_per_s": _rate(steps, tally.wall_s),
            "sequences_per_forward": tally.tokens / tally.forwards if tally.forwards else None,
        },
        "milliseconds": {
            "prompt": prompts.times.milliseconds(),
            "step": tally.step.milliseconds(),
            "sent_late": {} if workload.rate is None else tally.late.milliseconds(),
            "queue": tally.queue.milliseconds(),
            "forward": tally.forward.milliseconds(),
            "rest": tally.rest.milliseconds(),
        },
        "attempts": tally.attempts,
        "queue_full": tally.errors[str(Reason.QUEUE_FULL)],
        "errors": dict(tally.errors.most_common()),
        "gave_up": tally.gave_up,
        "unsent": tally.unsent,
        "notes": _notes(workload, tally),
    }


def _server(info: ExecutorInfo | None) -> dict[str, Any]:
    if info is None:
        return {}
    return {
        "version": info.server_version,
        "model": info.model.name,
        "weight_dtype": info.model.weight_dtype,
        "device": info.device.name,
        "attention": info.device.attention_backend,
        "threads": info.device.threads,
    }


def _notes(workload: Workload, tally: Tally) -> list[str]:
    steps = tally.step.count
    notes = [
        f"not counted: one prompt and {workload.warmup} steps of each caller, to warm up",
        f"a sequence grows from {workload.context} tokens by {GROWTH} at most, then a step rolls it back first",
    ]
    if 0 < steps < ENOUGH_FOR_P99:
        notes.append(f"only {steps} steps: p99 and beyond are little more than the slowest; measure 1000 or more")
    elif 0 < steps < ENOUGH_FOR_P99_9:
        notes.append(f"{steps} steps: p99.9 is little more than the slowest; measure 1000 or more")
    if tally.step.thinned:
        notes.append(f"percentiles are of {LIMIT} random steps of {steps}; count, mean and max are of all")
    if tally.prompts.cached_tokens:
        notes.append(f"{tally.prompts.cached_tokens} prompt tokens came from the prefix cache, of no forward pass")
    if workload.rate is not None:
        notes.append("a step's time counts from when it was due; refused steps are not sent again and have no time")
    if tally.unsent:
        notes.append(
            f"{tally.unsent} steps were due and not sent before the end: the rate is more than these callers carry, "
            "and the times are those of a growing queue"
        )
    return notes


def _rate(count: int, by: float) -> float | None:
    return count / by if count and by else None
