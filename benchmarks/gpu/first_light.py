"""First light: all that has waited for a GPU, in the order in which a failure is worth knowing, as one program.

It needs python3 with torch, triton and transformers, and no package index: what else its steps import comes from a
folder of wheels beside the tree (``--wheels``; `make first-light-wheels` collects it). The program itself needs the
standard library alone. `benchmarks/gpu/steps.toml` has the steps.

Each step is a process with a time limit, and results are written after each. docs/operations.md has the options and the
exit statuses.
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
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
RESULTS: Final = ROOT / "results" / "first-light.json"
SITE: Final = ROOT / "build" / "first-light"
SOURCES: Final = ("ferrum_rpc", "ferrum_rpc_kernels", "benchmarks", "tests")
SUFFIXES: Final = (".py", ".c", ".h", ".json", ".toml")
WRITTEN: Final = ("benchmarks/results",)
TAIL: Final = 20_000  # characters of a step's output that are kept
SHOWN: Final = 40  # lines of a failed step's output that are shown
LEAST_S: Final = 20.0  # seconds that are left of a call below which no step is begun
END_S: Final = 10.0  # between the signals that ask a step to end and that end it
FIGURES: Final = "FIGURES "  # what begins a line of output with figures of the step, as JSON
NOT_HERE_STATUS: Final = 77  # exit status of a step that says: what I need is not on this machine
REHEARSAL: Final = "FIRST_LIGHT_REHEARSAL"  # a variable that steps have in a rehearsal
PASSED, FAILED, TIMEOUT, NOT_HERE, BLOCKED = "passed", "failed", "timed out", "not here", "not run"
Record = dict[str, Any]
show: Final = partial(print, flush=True)


KERNELS: Final = 3  # the last group whose failure ends the run before the next
PYTEST: Final = ("python", "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "--rootdir=.")


@dataclass(frozen=True, slots=True)
class LightStep:
    """A step, see `steps.toml`. Without a ``rehearsal`` it is not rehearsed."""

    name: str
    what: str
    command: tuple[str, ...]
    limit_s: float
    rehearsal: tuple[str, ...] | None = None
    first: bool = False
    folder: str = "."

    @property
    def group(self) -> int:
        return int(self.name.partition(".")[0])

    @classmethod
    def from_file(cls, command: str, rehearsal: str | None = None, **more: Any) -> LightStep:
        program, *rest = shlex.split(command)
        words = (*(PYTEST if program == "pytest" else (program,)), *rest)
        return cls(command=words, rehearsal=None if rehearsal is None else tuple(shlex.split(rehearsal)), **more)


STEPS: Final = tuple(
    LightStep.from_file(**each)
    for each in tomllib.loads(Path(__file__).with_name("steps.toml").read_text("utf-8"))["step"]
)


def main(argv: Sequence[str] | None = None, steps: Sequence[LightStep] = STEPS) -> int:
    """Run the selected steps; the exit status."""
    options = parse(argv, steps)
    record = read(options.results)
    out = options.out or options.results
    tree = fingerprint(ROOT)
    if options.rehearse:
        tree += ", rehearsed"
    environment = prepare(options.wheels)
    end = time.monotonic() + options.within
    record |= {"schema": 1, "began": now(), "tree": tree, "python": sys.version.split()[0]}
    found: Record = record.setdefault("steps", {})
    selected = [step for step in steps if not options.only or {step.name, str(step.group)} & {*options.only}]
    try:
        for step in selected:
            known = found.get(step.name, {})
            if known.get("status") == PASSED and known.get("tree") == tree and not options.again:
                show(f"{step.name:<16} passed before, with this tree")
                continue
            if step.group > KERNELS and not options.go_on and (why := stops(steps, found, tree)):
                found[step.name] = {"group": step.group, "status": BLOCKED, "why": why, "tree": tree}
                show(f"{step.name:<16} not run: {why}")
                continue
            left = end - time.monotonic()
            if left < LEAST_S:
                show(f"{step.name:<16} left for the next call: the time of this one is over")
                continue
            result = run(step, environment, rehearse=options.rehearse, left_s=left)
            found[step.name] = result | {"tree": tree}
            write(out, record)
            report(step, result)
            if step.first and result["status"] != PASSED and not options.go_on:
                show(f"\n{step.name} is what all others need: nothing else is run. --go-on runs the rest all the same.")
                break
    except KeyboardInterrupt:
        return 130
    finally:
        record["ended"] = now()
        write(out, record)
        show(f"\n{out}")
    failed = [step.group for step in selected if found.get(step.name, {}).get("status") in {FAILED, TIMEOUT}]
    return 10 + min(failed) if failed else 0


def parse(argv: Sequence[str] | None, steps: Sequence[LightStep]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.gpu first-light", description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="groups or steps, as in 1,2 or 3.pool (default: all)")
    parser.add_argument("--again", action="store_true", help="also run what has passed with this tree")
    parser.add_argument("--go-on", action="store_true", help="run groups 4 to 7 whatever failed before")
    parser.add_argument("--wheels", type=Path, default=ROOT / "wheels", help="packages to use (default: wheels/)")
    parser.add_argument("--within", type=float, default=float("inf"), help="seconds for all steps of this call")
    parser.add_argument("--results", type=Path, default=RESULTS, help="results so far (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="where all results are written (default: --results)")
    parser.add_argument("--rehearse", action="store_true", help="tiny and without a GPU: do the steps themselves run?")
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


def stops(steps: Sequence[LightStep], found: Mapping[str, Any], tree: str) -> str:
    """Which steps up to `KERNELS` have failed with this tree; nothing if none has."""
    known = ((step, found.get(step.name, {})) for step in steps if step.group <= KERNELS)
    failed = [step.name for step, each in known if each.get("tree") == tree and each["status"] in {FAILED, TIMEOUT}]
    return f"{', '.join(failed)} failed (--go-on runs it all the same)" if failed else ""


# --- a step -----------------------------------------------------------------------------------------------------------


def run(
    step: LightStep, environment: Mapping[str, str], *, rehearse: bool = False, left_s: float = float("inf")
) -> Record:
    """Run one step; what is recorded of it. ``left_s``: the call has no more time."""
    command = [sys.executable if part == "python" else part for part in step.command]
    result: Record = {"group": step.group, "what": step.what, "command": list(step.command), "began": now()}
    if rehearse and step.rehearsal is None:
        return result | {"status": NOT_HERE, "seconds": 0.0, "why": "needs a GPU also to rehearse it"}
    if shutil.which(command[0]) is None:
        return result | {"status": NOT_HERE, "seconds": 0.0, "why": f"{command[0]} is not on this machine"}
    if rehearse and step.rehearsal is not None:
        command += step.rehearsal
        environment = {**environment, REHEARSAL: "1"}
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        status = _wait(command, ROOT / step.folder, environment, output, min(step.limit_s, left_s))
        output.seek(0)
        text = output.read().decode(errors="replace")
    result |= {"seconds": round(time.monotonic() - began, 1), "exit": status, "tail": text[-TAIL:]}
    if figures := read_figures(text):
        result["figures"] = figures
    if status == 0 and not result.get("figures", {}).get("passed", 1):
        return result | {"status": NOT_HERE, "why": "all of its tests were skipped"}
    if status is None:
        if left_s < step.limit_s:
            why = f"the call ended after {left_s:.0f} of at most {step.limit_s:g} s"
            return result | {"status": BLOCKED, "why": why}
        return result | {"status": TIMEOUT, "why": f"longer than {step.limit_s:g} s"}
    return result | {"status": {0: PASSED, NOT_HERE_STATUS: NOT_HERE}.get(status, FAILED)}


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
        try:
            os.killpg(process.pid, number)
            process.wait(END_S)
        except ProcessLookupError:
            process.wait()
            return
        except subprocess.TimeoutExpired:
            continue
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


# --- the packages, the tree, the file ---------------------------------------------------------------------------------


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


def fingerprint(root: Path) -> str:
    """Of the sources: a step need not run again while they are the same."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*")):
            relative = path.relative_to(root).as_posix()
            if path.suffix in SUFFIXES and path.is_file() and not relative.startswith(WRITTEN):
                digest.update(f"{relative}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


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
