"""First light as a program: order, limits, exit status. Some of its steps are rehearsed on a CPU."""

import json
import re
import subprocess
import sys
import time

import pytest

from benchmarks.gpu.__main__ import PROGRAMS
from benchmarks.gpu.first_light import ROOT, STEPS, LightStep, main, read_figures
from tests.support.process import runs
from tools.wheels import GPU_MACHINE_HAS, gpu_requirements

PASSES = "print('fine')"
FAILS = "print('broken'); raise SystemExit(3)"


def step(name, program, limit_s=20.0, **more):
    return LightStep(name, "a test", ("python", "-S", "-c", program), limit_s, **more)


def run(tmp_path, *steps, arguments=""):
    """The exit status, and the steps in the file."""
    out = tmp_path / "results.json"
    status = main(["--results", str(out), "--wheels", str(tmp_path / "none"), *arguments.split()], steps)
    found = json.loads(out.read_text())
    return status, found["steps"]


def statuses(steps):
    return {name: each["status"] for name, each in steps.items()}


def test_steps_run_in_their_order_and_are_recorded(tmp_path):
    lines = 'print(\'FIGURES {"ms": 2.5}\'); print("in the end")'
    status, found = run(tmp_path, step("1.a", PASSES), step("2.b", lines), step("5.c", PASSES))
    assert status == 0 and list(found) == ["1.a", "2.b", "5.c"] and set(statuses(found).values()) == {"passed"}
    assert found["2.b"]["figures"] == {"ms": 2.5} and found["2.b"]["tail"].endswith("in the end\n")
    assert {"group", "what", "command", "began", "seconds", "exit", "tail", "commit", "status"} <= set(found["1.a"])


@pytest.mark.parametrize(
    ("failing", "expected", "later"), [("1.a", 11, None), ("3.b", 13, None), ("4.c", 14, "passed")]
)
def test_a_failure_up_to_group_3_ends_the_run_before_4(tmp_path, failing, expected, later):
    names = "1.a", "3.b", "4.c", "5.d"
    steps = [step(name, FAILS if name == failing else PASSES) for name in names]
    status, found = run(tmp_path, *steps)
    assert status == expected and found.get("5.d", {}).get("status") == later
    assert found[failing]["status"] == "failed" and found[failing]["exit"] == 3 and "broken" in found[failing]["tail"]
    assert "3.b" in found, "all that tell of the kernels are run"
    assert run(tmp_path, *steps, arguments="--only 5")[1]["5.d"]["status"] == "passed"


def test_nothing_is_run_where_the_first_step_fails(tmp_path):
    status, found = run(tmp_path, step("1.machine", FAILS, first=True), step("1.b", PASSES), step("2.c", PASSES))
    assert status == 11 and list(found) == ["1.machine"]


def test_a_step_beyond_its_limit_is_ended_with_what_it_started(tmp_path):
    child = "import subprocess, sys, time; print('working', flush=True);"
    child += "c = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)']);"
    child += "print('child', c.pid, flush=True); time.sleep(60)"
    began = time.monotonic()
    status, found = run(tmp_path, step("2.slow", child, 1.5), step("3.b", PASSES), step("4.c", PASSES))
    assert time.monotonic() - began < 15 and status == 12
    assert statuses(found) == {"2.slow": "timed out", "3.b": "passed"}
    tail = found["2.slow"]["tail"]
    assert tail.startswith("working") and found["2.slow"]["why"] == "longer than 1.5 s"
    assert not runs(int(tail.split()[-1]))


def test_what_is_skipped_is_never_a_pass(tmp_path):
    skipped = step("4.b", "print('2 skipped in 0.10s')")
    counted = step("4.c", "print('3 passed, 1 skipped in 0.10s')")
    status, found = run(tmp_path, skipped, counted)
    assert status == 0 and statuses(found) == {"4.b": "not here", "4.c": "passed"}


def test_what_an_earlier_call_found_of_other_steps_stays(tmp_path):
    steps = step("1.a", PASSES), step("2.b", FAILS), step("5.c", PASSES)
    assert run(tmp_path, *steps, arguments="--only 1,2")[0] == 12
    status, found = run(tmp_path, *steps, arguments="--only 5.c")
    assert status == 0 and statuses(found) == {"1.a": "passed", "2.b": "failed", "5.c": "passed"}


def test_pytest_is_counted():
    text = "FAILED tests/a.py::b\n= 1 failed, 20 passed, 3 skipped, 1 deselected, 2 errors in 12.34s (0:00:12) =\n"
    assert read_figures(text) == {"failed": 1, "passed": 20, "skipped": 3, "deselected": 1, "errors": 2}
    assert read_figures("2 passed of 3\n") == {}


def test_a_group_that_does_not_exist_has_status_2():
    with pytest.raises(SystemExit) as ended:
        main(["--only", "9"])
    assert ended.value.code == 2


# --- the real steps ---------------------------------------------------------------------------------------------------


def test_the_program_needs_the_standard_library_alone():
    command = [sys.executable, "-S", "-E", "-m", "benchmarks.gpu", "first-light", "--list"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for each in STEPS:
        assert f"\n{each.name} " in f"\n{done.stdout}"


def test_groups_are_in_order_and_no_command_outlasts_ten_minutes():
    groups = [each.group for each in STEPS]
    assert groups == sorted(groups) and set(groups) == set(range(1, 8))
    assert all(each.limit_s < 600 for each in STEPS) and STEPS[0].first
    assert [each.name for each in STEPS if each.group == 4][-1] == "4.memory", "which fills the device"
    named = [part for each in STEPS for part in each.command if part.startswith("tests/")]
    assert named and all((ROOT / part.partition("::")[0]).exists() for part in named)
    programs = {each.command[3] for each in STEPS if each.command[2:3] == ("benchmarks.gpu",)} - {"--only"}
    assert programs == {*PROGRAMS} - {"attend"}  # which ncu runs


def test_a_failed_capture_and_a_full_device_are_tried_alone_and_no_suite_is_left_out():
    """Either may spoil what follows in its process."""
    commands = {each.name: each.command for each in STEPS}
    kernels = commands["2.kernels"]
    file, _, name = kernels[kernels.index("--deselect") + 1].partition("::")
    assert "tests/kernels" in kernels and f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")
    assert commands["4.capture"][-1] == "tests.kernels.failed_capture"
    suites = [each.relative_to(ROOT).as_posix() for each in sorted((ROOT / "tests" / "gpu").glob("test_*.py"))]
    named = [part for command in commands.values() for part in command if part.startswith("tests/gpu/")]
    assert len({*named}) == len(named) and {part.partition("::")[0] for part in named} == {*suites}
    assert [part for part in commands["4.memory"] if part in suites] == ["tests/gpu/test_memory.py"]


def test_a_machine_without_cuda_is_said_clearly_and_ends_the_run(tmp_path):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    status, found = run(tmp_path, *STEPS, arguments="--only 1.machine")
    assert status == 11 and "torch finds no CUDA device" in found["1.machine"]["tail"]
    assert found["1.machine"]["figures"]["packages"]["torch"] == torch.__version__


def test_programs_of_steps_run_small_on_a_cpu():
    """In this process."""
    pytest.importorskip("triton")
    from benchmarks.gpu import kernel_times

    assert kernel_times.measure("tiny", rehearse=True)["b1 @1024"]["kernels_us"] > 0


def test_wheels_are_what_a_gpu_machine_lacks():
    wanted = gpu_requirements()
    assert not any(each.startswith(GPU_MACHINE_HAS) for each in wanted)
    assert {"grpcio", "structlog", "pydantic", "pytest"} <= {re.split(r"[^\w-]", each)[0] for each in wanted}
