"""First light: all that has waited for a GPU, in the order in which a failure is worth knowing, as one program.

It needs python3 with torch, triton and transformers, and no package index: what else its steps import comes from a
folder of wheels beside the tree (``--wheels``; `make first-light-wheels` collects it). The program itself needs the
standard library alone. `benchmarks/gpu/steps.toml` has the steps.

Each step is a process with a time limit, and results are written after each: those of an earlier call stay, but for
what is run again. docs/operations.md has the options and the exit statuses.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

from benchmarks.machine import commit

ROOT: Final = Path(__file__).resolve().parents[2]
RESULTS: Final = ROOT / "results" / "first-light.json"
SITE: Final = ROOT / "build" / "first-light"
TAIL: Final = 20_000  # characters of a step's output that are kept
SHOWN: Final = 40  # lines of a failed step's output that are shown
END_S: Final = 10.0  # between the signals that ask a step to end and that end it
FIGURES: Final = "FIGURES "  # what begins a line of output with figures of the step, as JSON
PASSED, FAILED, TIMEOUT, NOT_HERE = "passed", "failed", "timed out", "not here"
Record = dict[str, Any]
show: Final = partial(print, flush=True)


KERNELS: Final = 3  # the last group whose failure ends the run before the next
PYTEST: Final = ("python", "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "--rootdir=.")


@dataclass(frozen=True, slots=True)
class LightStep:
    """A step, see `steps.toml`."""

    name: str
    what: str
    command: tuple[str, ...]
    limit_s: float
    first: bool = False
    folder: str = "."

    @property
    def group(self) -> int:
        return int(self.name.partition(".")[0])

    @classmethod
    def from_file(cls, command: str, **more: Any) -> LightStep:
        program, *rest = shlex.split(command)
        return cls(command=(*(PYTEST if program == "pytest" else (program,)), *rest), **more)


STEPS: Final = tuple(
    LightStep.from_file(**each)
    for each in tomllib.loads(Path(__file__).with_name("steps.toml").read_text("utf-8"))["step"]
)


def main(argv: Sequence[str] | None = None, steps: Sequence[LightStep] = STEPS) -> int:
    """Run the selected steps; the exit status."""
    options = parse(argv, steps)
    record = read(options.results)
    environment = prepare(options.wheels)
    record |= {"schema": 1, "began": now(), "commit": commit(), "python": sys.version.split()[0]}
    failed: list[int] = []
    try:
        for step in steps:
            if options.only and not {step.name, str(step.group)} & {*options.only}:
                continue
            if failed and failed[0] <= KERNELS < step.group:
                show(f"\nThe kernels are not right: {step.name} and the rest are not run. --only runs what it names.")
                break
            result = run(step, environment)
            record.setdefault("steps", {})[step.name] = result | {"commit": record["commit"]["id"]}
            write(options.results, record)
            report(step, result)
            if result["status"] in {FAILED, TIMEOUT}:
                failed.append(step.group)
                if step.first:
                    show(f"\n{step.name} is what all others need: nothing else is run. --only runs what it names.")
                    break
    except KeyboardInterrupt:
        return 130
    finally:
        record["ended"] = now()
        write(options.results, record)
        show(f"\n{options.results}")
    return 10 + failed[0] if failed else 0


def parse(argv: Sequence[str] | None, steps: Sequence[LightStep]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.gpu first-light", description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="groups or steps, as in 1,2 or 3.pool (default: all)")
    parser.add_argument("--wheels", type=Path, default=ROOT / "wheels", help="packages to use (default: wheels/)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of results (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the steps and their commands, and end")
    options = parser.parse_args(argv)
    options.only = [each for each in options.only.split(",") if each]
    known = {step.name for step in steps} | {str(step.group) for step in steps}
    if wrong := [each for each in options.only if each not in known]:
        parser.error(f"no step or group {', '.join(wrong)}; there are {', '.join(step.name for step in steps)}")
    if options.list:
        for step in steps:
            show(f"{step.name:<16} {step.limit_s:>4.0f} s  {step.what}\n{'':<24}{' '.join(step.command)}")
        sys.exit(0)
    return options


# --- a step -----------------------------------------------------------------------------------------------------------


def run(step: LightStep, environment: Mapping[str, str]) -> Record:
    """Run one step; what is recorded of it."""
    command = [sys.executable if part == "python" else part for part in step.command]
    result: Record = {"group": step.group, "what": step.what, "command": list(step.command), "began": now()}
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        status = _wait(command, ROOT / step.folder, environment, output, step.limit_s)
        output.seek(0)
        text = output.read().decode(errors="replace")
    result |= {"seconds": round(time.monotonic() - began, 1), "exit": status, "tail": text[-TAIL:]}
    if figures := read_figures(text):
        result["figures"] = figures
    if status is None:
        return result | {"status": TIMEOUT, "why": f"longer than {step.limit_s:g} s"}
    if status == 0 and not result.get("figures", {}).get("passed", 1):
        return result | {"status": NOT_HERE, "why": "all of its tests were skipped"}
    return result | {"status": FAILED if status else PASSED}


def _wait(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], output: IO[bytes], limit_s: float
) -> int | None:
    """The exit status; None if the limit ended it, with all that it had started."""
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, cwd=folder, env=dict(environment), start_new_session=True, **pipes)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the step's process group, whoever of it is left."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(END_S)
    process.wait()


def tell(figures: Record) -> None:
    """What a step has found, as a line of its output."""
    show(FIGURES + json.dumps(figures))


def read_figures(text: str) -> Record:
    """The figures in a step's output, and what pytest counted."""
    found: Record = {}
    for line in text.splitlines():
        if line.startswith(FIGURES):
            found |= json.loads(line.removeprefix(FIGURES))
    counts = re.findall(r"(\d+) (passed|failed|skipped|errors?|deselected)\b(?=.* in [\d.]+s)", text[-TAIL:])
    if counts:
        found |= {"passed": 0} | {kind: int(count) for count, kind in counts}
    return found


def report(step: LightStep, result: Record) -> None:
    """A line of a step, and the end of its output if it failed."""
    why = f": {result['why']}" if "why" in result else ""
    show(f"{step.name:<16} {result['status']}{why} ({result['seconds']:.0f} s)")
    if result["status"] in {FAILED, TIMEOUT}:
        show("\n".join(f"    {line}" for line in result["tail"].splitlines()[-SHOWN:]))


# --- the packages, the file -------------------------------------------------------------------------------------------


def prepare(wheels: Path) -> dict[str, str]:
    """The environment of all steps; installs the ``wheels``, if there are any, into a folder of their own."""
    paths = [str(ROOT)]
    files = sorted(wheels.glob("*.whl"))
    if files:
        name = hashlib.sha256("\n".join(file.name for file in files).encode()).hexdigest()[:12]
        site = SITE / f"{sys.version_info.major}.{sys.version_info.minor}-{name}"
        if not site.is_dir():
            show(f"installing {len(files)} packages from {wheels}")
            partial = site.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
            done = subprocess.run([*pip, "--target", partial, *files], capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"first-light: the packages of {wheels} cannot be installed:\n{done.stderr}")
            partial.rename(site)
        paths.insert(0, str(site))
    inherited = os.environ.get("PYTHONPATH")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, *([inherited] if inherited else [])])}
    return environment | {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def read(path: Path) -> Record:
    """What earlier calls have found."""
    try:
        found: Record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        sys.exit(f"first-light: {path} is no file of results ({error})")
    return found


def write(path: Path, record: Record) -> None:
    """Write all results, at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(path)


def now() -> str:
    """The time, for the file."""
    return datetime.now(UTC).isoformat(timespec="seconds")
