"""The results as one JSON object; `display` shows the same object to a person."""

from __future__ import annotations

from typing import Any, Final

from ferrum_rpc import __version__
from ferrum_rpc.bench.batch import GROWTH
from ferrum_rpc.bench.options import Workload, output_name
from ferrum_rpc.bench.stats import LIMIT, Stats
from ferrum_rpc.client import ExecutorInfo
from ferrum_rpc.errors import Reason

ENOUGH_FOR_P99: Final = 100
ENOUGH_FOR_P99_9: Final = 1000
"""The number of samples of which one lies beyond the percentile. With fewer the percentile is the slowest sample."""


def report(
    target: str, info: ExecutorInfo | None, workload: Workload, stats: Stats, *, interrupted: bool
) -> dict[str, Any]:
    """Figures with their units in their names, and notes on their limitations. ``info``: None if the executor did not
    answer."""
    steps = stats.step.count
    return {
        "ferrum_rpc": __version__,
        "target": target,
        "server": _server(info),
        "workload": {
            "way": workload.way,
            "calls": "Session" if workload.way == "session" else "Decode" if workload.single else "BatchDecode",
            "batch": workload.batch,
            "in_flight": workload.in_flight,
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
            "prompts": stats.prompt.count,
            "tokens": stats.prompt_tokens,
            "cached_tokens": stats.cached_tokens,
            "seconds": stats.prefill_s,
            "tokens_per_s": _rate(stats.prompt_tokens, stats.prefill_s),
        },
        "decode": {
            "steps": steps,
            "tokens": stats.tokens,
            "seconds": stats.wall_s,
            "tokens_per_s": _rate(stats.tokens, stats.wall_s),
            "steps_per_s": _rate(steps, stats.wall_s),
            "sequences_per_forward": stats.tokens / stats.forwards if stats.forwards else None,
        },
        "milliseconds": {
            "prompt": stats.prompt.milliseconds(),
            "step": stats.step.milliseconds(),
            "sent_late": {} if workload.rate is None else stats.late.milliseconds(),
            "queue": stats.queue.milliseconds(),
            "forward": stats.forward.milliseconds(),
            "rest": stats.rest.milliseconds(),
        },
        "attempts": stats.attempts,
        "queue_full": stats.errors[str(Reason.QUEUE_FULL)],
        "errors": dict(stats.errors.most_common()),
        "gave_up": stats.gave_up,
        "unsent": stats.unsent,
        "notes": _notes(workload, stats),
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


def _notes(workload: Workload, stats: Stats) -> list[str]:
    steps = stats.step.count
    notes = [
        f"not counted: one prompt and {workload.warmup} steps of each caller, to warm up",
        f"a sequence grows from {workload.context} tokens by {GROWTH} at most, then a step rolls it back first",
    ]
    if 0 < steps < ENOUGH_FOR_P99:
        notes.append(f"only {steps} steps: p99 and beyond are little more than the slowest; measure 1000 or more")
    elif 0 < steps < ENOUGH_FOR_P99_9:
        notes.append(f"{steps} steps: p99.9 is little more than the slowest; measure 1000 or more")
    if stats.step.thinned:
        notes.append(f"percentiles are of {LIMIT} random steps of {steps}; count, mean and max are of all")
    if stats.cached_tokens:
        notes.append(f"{stats.cached_tokens} prompt tokens came from the prefix cache, of no forward pass")
    if workload.rate is not None:
        notes.append("a step's time counts from when it was due; refused steps are not sent again and have no time")
    if stats.unsent:
        notes.append(
            f"{stats.unsent} steps were due and not sent before the end: the rate is more than these callers carry, "
            "and the times are those of a growing queue"
        )
    return notes


def _rate(count: int, by: float) -> float | None:
    return count / by if count and by else None
