"""Memory of an answer's size is used again, unless the operator decided otherwise."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from ferrum_rpc.allocator import SETTINGS, keep_freed_memory

FAULTS_OF_TWENTY_ANSWERS = """
import os, resource
from ferrum_rpc.allocator import keep_freed_memory
if os.environ.get("KEEP"):
    keep_freed_memory()
def answer():
    return len(bytearray(b"rows") * (2 << 20)) + len(bytearray(b"rows") * (2 << 20))
answer()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    answer()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**variables: str) -> int:
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS} | variables
    done = subprocess.run(
        [sys.executable, "-c", FAULTS_OF_TWENTY_ANSWERS], env=environment, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another libc keeps memory in its own way")
def test_freed_memory_of_an_answers_size_costs_no_page_faults() -> None:
    assert faults(KEEP="1") * 10 < faults(MALLOC_MMAP_THRESHOLD_=str(128 << 10))


MIB_LEFT_OF_A_BURST = """
import os, sys, time
from ferrum_rpc.allocator import keep_freed_memory
if os.environ.get("KEEP"):
    keep_freed_memory()
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20
before = resident()
burst = [bytes(16 << 10) for _ in range(4096)]
del burst[:-1]  # the last one lies above what was freed
until = time.monotonic() + float(sys.argv[1])
while resident() - before > 16 and time.monotonic() < until:
    time.sleep(0.01)
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another libc keeps memory in its own way")
@pytest.mark.parametrize(("keep", "patience_s"), [("1", 30), ("", 0)], ids=["asked to", "as it is"])
def test_what_lies_free_below_a_block_in_use_is_given_back(keep: str, patience_s: float) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS} | {"KEEP": keep}
    program = [sys.executable, "-c", MIB_LEFT_OF_A_BURST, str(patience_s)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
    assert (int(done.stdout) <= 16) == bool(keep)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_operators_own_setting_is_left_alone(name: str) -> None:
    assert keep_freed_memory({name: "1"}) == f"as {name} says"
