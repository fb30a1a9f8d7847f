from __future__ import annotations

import pytest

from ferrum_rpc.engine.memory import available_memory, total_memory

MEMINFO = "MemTotal:       1000 kB\nMemFree:  10 kB\nMemAvailable:    800 kB\nHugePages_Total:       0\n"


@pytest.fixture
def meminfo(tmp_path):
    path = tmp_path / "meminfo"
    path.write_text(MEMINFO)
    return path


def test_without_a_container_it_is_what_the_kernel_says(meminfo, tmp_path):
    assert total_memory(meminfo) == 1000 * 1024
    assert available_memory(meminfo, tmp_path / "none") == 800 * 1024


@pytest.mark.parametrize(
    ("limit", "use"),
    [("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")],
)
def test_a_container_with_less_counts(meminfo, tmp_path, limit, use):
    (tmp_path / "memory").mkdir()
    (tmp_path / limit).write_text("300000\n")
    (tmp_path / use).write_text("100000\n")
    assert available_memory(meminfo, tmp_path) == 200000


def test_a_container_without_a_limit_does_not(meminfo, tmp_path):
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5\n")
    assert available_memory(meminfo, tmp_path) == 800 * 1024


def test_where_nothing_can_be_told_it_is_zero(tmp_path):
    assert (total_memory(tmp_path / "x"), available_memory(tmp_path / "x", tmp_path)) == (0, 0)
