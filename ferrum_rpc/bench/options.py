"""The workload as flags, and as the frozen value that the rest of the package works with.

Loads no gRPC: `--help` comes here too.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ferrum_rpc.core import FullLogits, Greedy, OutputKind, RowDType, TopTokens
from ferrum_rpc.errors import InvalidRequest

SECONDS: Final = 10.0
"""Duration of a run if neither steps nor seconds are given."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked of the executor.

    ``in_flight`` batches of ``batch`` sequences, each with one step in flight. ``single``: a batch is one sequence, and
    its steps are Decode calls and not BatchDecode. ``context``, ``prompt_tokens`` in tokens; ``seconds`` or ``steps``
    end it; ``warmup`` steps of each batch come before. ``rate``: steps that become due in a second; None is a closed
    loop.
    """

    way: str
    batch: int
    in_flight: int
    single: bool
    context: int
    prompt_tokens: int
    output: OutputKind
    steps: int | None
    seconds: float | None
    warmup: int
    rate: float | None
    arrivals: str
    seed: int

    @property
    def sequences(self) -> int:
        """Number of live sequences."""
        return self.in_flight * self.batch


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of the workload and of its report."""
    add = parser.add_argument
    add("--batch", type=_count, metavar="N", help="sequences decoded together in a step (default: 1)")
    add("--depth", type=_count, metavar="D", help="steps in flight, each of N sequences of its own (default: 1)")
    add("--callers", type=_count, metavar="K", help="K callers of one sequence each, in place of --batch and --depth")
    add("--way", choices=("unary", "session"), default="unary", help="a call for each step, or frames of one stream")
    add("--context", type=_count, default=256, metavar="TOKENS", help="tokens in the cache before steps (default: 256)")
    add("--prompt-tokens", type=_count, metavar="TOKENS", help="tokens of a prompt (default: as --context)")
    add("--output", type=output, default="greedy", help="greedy, top:K, full, full:bf16 or full:f16 (default: greedy)")
    end = parser.add_mutually_exclusive_group()
    end.add_argument("--steps", type=_count, help="steps to measure, of all callers together")
    end.add_argument("--seconds", type=_positive, help=f"seconds to measure (default: {SECONDS:g})")
    add("--warmup", type=_whole, default=5, metavar="STEPS", help="steps of each caller before that (default: 5)")
    add("--rate", type=_positive, help="open loop: steps that become due in a second (default: a closed loop)")
    add("--arrivals", choices=("poisson", "fixed"), default="poisson", help="of the open loop (default: poisson)")
    add("--seed", type=_whole, default=0, help="of token ids and arrivals (default: 0)")
    add("--json", type=Path, metavar="FILE", help="write the report here as well, for programs")
    parser.set_defaults(timeout=60.0)  # of a prompt's chunks together: longer than the other commands' answers


def workload_from(arguments: argparse.Namespace) -> Workload:
    """The workload of the flags. Raises `InvalidRequest` if they contradict each other."""
    single = arguments.callers is not None
    if single and (arguments.batch or arguments.depth):
        raise InvalidRequest(
            "--callers has one sequence each and must not be set with --batch or --depth", field="callers"
        )
    if single and arguments.way == "session":
        raise InvalidRequest(
            "--callers makes unary calls and must not be set with a session: use --depth", field="callers"
        )
    as_given = ("way", "context", "output", "steps", "warmup", "rate", "arrivals", "seed")
    return Workload(
        batch=arguments.batch or 1,
        in_flight=arguments.callers or arguments.depth or 1,
        single=single,
        prompt_tokens=arguments.prompt_tokens or arguments.context,
        seconds=SECONDS if arguments.steps is None and arguments.seconds is None else arguments.seconds,
        **{name: getattr(arguments, name) for name in as_given},
    )


def output(text: str) -> OutputKind:
    """``greedy``, ``top:8``, ``full``, ``full:bf16``. Raises ArgumentTypeError."""
    kind, _, detail = text.partition(":")
    match kind:
        case "greedy" if not detail:
            return Greedy()
        case "top" if detail.isdecimal() and int(detail):
            return TopTokens(int(detail))
        case "full" if detail in ("", *(each.value for each in RowDType)):
            return FullLogits(RowDType(detail) if detail else RowDType.F32)
    raise argparse.ArgumentTypeError(f"invalid output {text!r}: must be greedy, top:8, full, full:bf16 or full:f16")


def output_name(kind: OutputKind) -> str:
    """How it is written."""
    match kind:
        case TopTokens(k):
            return f"top:{k}"
        case FullLogits(dtype):
            return f"full:{dtype.value}"
    return "greedy"


def _number(kind: Callable[[str], Any], minimum: float, what: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not minimum <= value < math.inf:
            raise argparse.ArgumentTypeError(f"must be a {what}, not {text!r}")
        return value

    return parse


_count = _number(int, 1, "whole number above 0")
_whole = _number(int, 0, "whole number")
_positive = _number(float, 1e-9, "number above 0")
