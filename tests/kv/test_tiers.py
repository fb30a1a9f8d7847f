"""Blocks on disk: what is read is what was written, or nothing is, whatever happens to the files."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from ferrum_rpc.kv import tiers
from ferrum_rpc.kv.tiers import HEAD, BlockFiles

SIZE = 64


def hashed(number: int) -> bytes:
    return number.to_bytes(16, "big")


def content(number: int) -> bytes:
    return bytes([number % 256]) * SIZE


def opened(folder: Path, blocks: int = 100) -> BlockFiles:
    return BlockFiles(folder, blocks * (SIZE + HEAD.size), SIZE)


def filled(folder: Path, count: int, blocks: int = 100) -> BlockFiles:
    files = opened(folder, blocks)
    for number in range(count):
        assert files.write(hashed(number), lambda number=number: content(number))
    return files


def test_another_process_finds_what_one_has_left(tmp_path: Path) -> None:
    files = filled(tmp_path, 3)
    assert [files.read(hashed(number)) for number in range(4)] == [*map(content, range(3)), None]
    files.end([(hashed(3), lambda: content(3))], 10)
    assert sorted(each.stat().st_mode & 0o777 for each in tmp_path.iterdir()) == [0o600] * 4
    after = opened(tmp_path)
    assert [after.read(hashed(number)) for number in range(4)] == [*map(content, range(4))]
    assert after.held_bytes == 4 * (SIZE + HEAD.size) == sum(each.stat().st_size for each in tmp_path.iterdir())
    after.clear()
    after.end([], 10)
    assert not [*tmp_path.iterdir()]


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    files, gone = filled(tmp_path, 3, blocks=3), list[bytes]()
    files.on_gone = gone.append
    assert files.read(hashed(0))
    assert files.write(hashed(1), lambda: content(1)), "it is there, and used again"
    files.write(hashed(3), lambda: content(3))
    assert gone == [hashed(2)]
    assert [hashed(number) in files for number in range(4)] == [True, True, False, True]
    files.end([], 10)
    assert {each.name for each in tmp_path.iterdir()} == {hashed(number).hex() for number in (0, 1, 3)}
    fewer = opened(tmp_path, blocks=2)
    fewer.end([], 10)
    assert len(fewer.hashes()) == len([*tmp_path.iterdir()]) == 2


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(at: int) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    return flip


def of_another(path: Path) -> None:
    path.write_bytes(path.with_name(hashed(1).hex()).read_bytes())


@pytest.mark.parametrize("harm", [os.unlink, cut, *map(flip, (0, 8, 24, 32, HEAD.size, -1)), of_another])
def test_a_file_that_is_not_what_was_written_is_a_miss_and_goes(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    filled(tmp_path, 2).end([], 10)
    files = opened(tmp_path)
    harm(tmp_path / hashed(0).hex())
    assert files.read(hashed(0)) is None
    assert files.read(hashed(1)) == content(1)
    assert hashed(0) not in files
    files.write(hashed(0), lambda: content(0))
    files.end([], 10)
    assert opened(tmp_path).read(hashed(0)) == content(0), "it was written anew"


def test_files_of_another_length_are_told_once_and_go(tmp_path: Path) -> None:
    filled(tmp_path, 5).end([], 10)
    for number, length in enumerate((0, SIZE, 200)):
        os.truncate(tmp_path / hashed(number).hex(), length)
    with capture_logs() as logs:
        files = opened(tmp_path)
    [told] = logs
    assert (told["event"], told["blocks"], told["folder"]) == ("cached_block_lost", 3, str(tmp_path))
    assert set(files.hashes()) == {hashed(3), hashed(4)}
    files.end([], 10)
    assert len([*tmp_path.iterdir()]) == 2


def test_a_second_process_deletes_what_it_wrote_alone(tmp_path: Path) -> None:
    first = filled(tmp_path, 3)
    first.end([], 10)
    first = opened(tmp_path)
    with capture_logs() as logs:
        second = opened(tmp_path, blocks=4)
    [told] = logs
    assert told["event"] == "tier_shared" and "--kv-tier-dir" in told["action"]
    for number in (0, 3, 4):
        second.write(hashed(number), lambda number=number: content(number))
    assert len(second.hashes()) == 4, "it keeps to its own limit"
    second.clear()
    second.end([], 10)
    assert {each.name for each in tmp_path.iterdir()} == {hashed(number).hex() for number in range(3)}
    assert [first.read(hashed(number)) for number in range(3)] == [*map(content, range(3))]
    first.end([], 10)


def test_a_second_process_has_the_folder_when_the_first_has_ended(tmp_path: Path) -> None:
    first = filled(tmp_path, 2)
    second = opened(tmp_path, blocks=4)
    first.end([(hashed(2), lambda: content(2))], 10)
    for number in range(10, 15):
        second.write(hashed(number), lambda number=number: content(number))
    second.end([], 10)
    left = {each.name for each in tmp_path.iterdir()}
    assert left == {each.hex() for each in second.hashes()} and len(left) == 4, "what the first left counts"
    third = opened(tmp_path)
    third.clear()
    third.end([], 10)
    assert not [*tmp_path.iterdir()]


def test_what_is_no_block_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "abcd").write_bytes(b"x")
    (tmp_path / "new.partial").write_bytes(b"another process is writing")
    (old := tmp_path / "old.partial").write_bytes(b"of one that was killed")
    os.utime(old, (0, 0))
    assert opened(tmp_path).hashes() == []
    assert {each.name for each in tmp_path.iterdir()} == {"notes.txt", "abcd", "new.partial"}
    with pytest.raises(ValueError, match="hold no block"):
        BlockFiles(tmp_path, SIZE, SIZE)


def test_a_slow_disk_loses_blocks_and_not_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "WAITING_BYTES", 2 * SIZE)
    held, write = threading.Event(), tiers._write

    def slow(*args: object) -> None:
        assert held.wait(10)
        write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(tiers, "_write", slow)
    files = opened(tmp_path)
    kept = [files.write(hashed(number), lambda number=number: content(number)) for number in range(4)]
    assert kept.count(False) >= 2
    assert [files.read(hashed(number)) is not None for number in range(4)] == kept, "what waits can be read"
    held.set()
    files.end([], 10)
    assert len([*tmp_path.iterdir()]) == kept.count(True)


@pytest.mark.parametrize(("code", "action"), [(28, "make room there"), (2, "put the folder"), (5, "see why")])
def test_a_disk_that_fails_costs_the_blocks_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, action: str
) -> None:
    def fails(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr(tiers, "_write", fails)
        files = filled(tmp_path, 3)
        files.end([], 10)
    [told] = logs
    assert told["event"] == "tier_write_failed" and told["action"].startswith(action)
    assert [files.read(hashed(number)) for number in range(3)] == [None] * 3
