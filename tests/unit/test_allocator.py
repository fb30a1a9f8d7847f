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


@pytest.mark.parametrize("name", SETTINGS)
def test_the_operators_own_setting_is_left_alone(name: str) -> None:
    assert keep_freed_memory({name: "1"}) == f"as {name} says"
