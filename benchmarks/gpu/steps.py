"""The steps of first light, in their order. This file is data, and needs the standard library alone.

Groups 1 to 3 ask whether the kernels are right, 4 whether the runner is, 5 to 7 how fast it is and what it does under
load and under faults. ``python`` in a command is the Python that runs first light.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

KERNELS: Final = 3  # the last group whose failure ends the run before the next


@dataclass(frozen=True, slots=True)
class LightStep:
    """``name`` begins with the ``group``. ``what``: what it proves. ``command``: see above; ``rehearsal``: what is
    appended to it without a GPU, if it is ``rehearsed`` there at all. ``first``: nothing can run if it fails.
    ``folder``: of the tree, in which it runs."""

    name: str
    what: str
    command: tuple[str, ...]
    limit_s: float
    rehearsal: tuple[str, ...] = ()
    rehearsed: bool = True
    first: bool = False
    folder: str = "."

    @property
    def group(self) -> int:
        return int(self.name.partition(".")[0])


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return "python", "-m", name, *arguments


def _program(name: str, what: str, program: str, limit_s: float, *, first: bool = False) -> LightStep:
    """A program of `benchmarks.gpu` that takes ``--rehearse``."""
    return LightStep(name, what, _module("benchmarks.gpu", program), limit_s, ("--rehearse",), first=first)


def _suite(*arguments: str) -> tuple[str, ...]:
    """Tests, which are skipped without a device."""
    folder = arguments[0].rpartition("/")[0] if arguments[0].endswith(".py") else arguments[0]
    quiet = "-q", "--tb=short", "-p", "no:cacheprovider"
    return _module("pytest", *quiet, "--rootdir=.", f"--confcutdir={folder}", *arguments)


SANITIZER: Final = "compute-sanitizer", "--tool"
COUNTERS: Final = "ncu", "--clock-control", "none", "--kernel-name", "regex:attend|merge", "--set", "basic"
CAPTURE: Final = "tests/kernels/test_step_graphs.py::test_a_capture_that_fails_leaves_a_device_that_goes_on"
"""Runs in a process of its own anyway: `4.capture` is the same program."""

STEPS: Final = (
    _program("1.machine", "torch finds a CUDA device; versions", "machine", 120, first=True),
    _program("1.imports", "every package that the steps need is here", "imports", 120),
    _program("1.compiler", "Triton finds a C compiler and headers", "compiler", 120),
    LightStep(
        "1.kernels",
        "the kernels in C compile, by which ranks on one machine share memory",
        ("python", "setup.py", "-q", "build_ext", "--inplace"),
        300,
        rehearsed=False,
        folder="ferrum_rpc_kernels",
    ),
    LightStep(
        "1.registers",
        "registers, spills and shared memory of every kernel, by this machine's compiler",
        _module("tests.kernels.compiling"),
        400,
        ("--head-dim", "64"),
    ),
    LightStep(
        "2.kernels",
        "every kernel against float64 and torch",
        _suite("tests/kernels", "-n", "8", "--deselect", CAPTURE),
        540,
        ("-k", "test_triton_plan", "-n", "0"),
    ),
    LightStep(
        "3.memcheck",
        "no access outside of a tensor, one step of each kind",
        (*SANITIZER, "memcheck", "--error-exitcode", "9", *_module("benchmarks.gpu", "one")),
        400,
        rehearsed=False,
    ),
    LightStep(
        "3.racecheck",
        "no race in shared memory, the same steps",
        _module("benchmarks.gpu", "races"),
        500,
        rehearsed=False,
    ),
    _program("3.pool", "offsets are 64 bits wide: a cache of 2^32 elements", "pool", 240),
    _program("3.equal", "200 equal steps, equal bits", "equal", 240),
    LightStep(
        "4.runner",
        "the runner: undo, overlap, runs whose tokens stay on the device, graphs, the second tier; float32 sums",
        _suite("tests/gpu/test_cuda.py", "tests/gpu/test_products.py"),
        500,
    ),
    LightStep("4.ranks", "two ranks, by NCCL where there are two devices", _suite("tests/gpu/test_ranks.py"), 400),
    LightStep(
        "4.capture",
        "a failed capture, and what the allocator does after it",
        _module("tests.kernels.failed_capture"),
        240,
        rehearsed=False,
    ),
    LightStep("4.memory", "the largest step fits beside the cache", _suite("tests/gpu/test_memory.py"), 300),
    LightStep(
        "5.attention",
        "the attention kernels, of bandwidth and matrix units",
        _module("benchmarks.gpu", "--only", "attention", "--figures"),
        300,
        rehearsed=False,
    ),
    LightStep(
        "5.cells",
        "prefill and decode of the 8B shape, of the device's limits",
        _module("benchmarks.gpu", "--only", "cells", "--figures"),
        560,
        ("--quick",),
    ),
    _program("5.profile", "the kernels of a step, by time", "kernels", 400),
    _program(
        "6.serving",
        "steps of 64 sequences by output, with adapters; of runs, begun before their tokens are read",
        "serving",
        500,
    ),
    LightStep(
        "6.drills",
        "a killed engine, a cache too large, a step without memory, masks, SIGTERM under load",
        _suite("tests/gpu/test_drills.py"),
        400,
    ),
    LightStep(
        "7.counters",
        "counters of the attention kernels",
        (*COUNTERS, *_module("benchmarks.gpu", "attend")),
        300,
        rehearsed=False,
    ),
)
