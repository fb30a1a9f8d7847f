"""Blocks on disk: what is read is what was written, or nothing is, whatever happens to the files."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from struct import Struct

import pytest
from structlog.testing import capture_logs

from ferrum_rpc.kv import tiers
from ferrum_rpc.kv.tiers import ABOUT, HEAD_BYTES, STATES, BlockFiles
from ferrum_rpc.private_files import NotPrivateError, PrivateFolder

SIZE = 64
WHOLE = HEAD_BYTES + SIZE


def hashed(number: int) -> bytes:
    return number.to_bytes(16, "big")


def content(number: int) -> bytes:
    return bytes([number % 256]) * SIZE


def contents(numbers: Sequence[int]) -> list[Callable[[], bytes]]:
    """Of the blocks with these numbers."""
    return [partial(content, each) for each in numbers]


def put(files: BlockFiles, number: int) -> bool:
    """Whether it is there afterwards."""
    files.write([(number, hashed(number))], contents)
    return hashed(number) in files


def opened(folder: Path, blocks: int = 100) -> BlockFiles:
    return BlockFiles(folder, blocks * WHOLE, SIZE)


def filled(folder: Path, count: int, blocks: int = 100) -> BlockFiles:
    files = opened(folder, blocks)
    for number in range(count):
        assert put(files, number)
    return files


def noted(changes: list[tuple[bytes, bool]]) -> Callable[..., object]:
    """Which blocks come and go, in a list."""
    return lambda key, there: changes.append((key, there))


def names(folder: Path) -> set[str]:
    """Of all files but the key."""
    return {each.name for each in folder.iterdir()} - {"key"}


def test_another_process_finds_what_one_has_left(tmp_path):
    files = filled(tmp_path, 3)
    assert [files.read(hashed(number)) for number in range(4)] == [*map(content, range(3)), None]
    files.end([(3, hashed(3))], contents, 10)
    assert sorted(each.stat().st_mode & 0o777 for each in tmp_path.iterdir()) == [0o600] * 5, "four, and the key"
    after = opened(tmp_path)
    assert [after.read(hashed(number)) for number in range(4)] == [*map(content, range(4))]
    assert after.held_bytes == 4 * WHOLE == sum((tmp_path / each).stat().st_size for each in names(tmp_path))
    after.clear()
    after.end([], contents, 10)
    assert not names(tmp_path)


def test_what_was_not_used_for_longest_goes_first(tmp_path):
    files, changes = filled(tmp_path, 3, blocks=3), list[tuple[bytes, bool]]()
    files.on_change = noted(changes)
    assert files.read(hashed(0))
    assert put(files, 1), "it is there, and used again"
    put(files, 3)
    assert changes == [(hashed(3), True), (hashed(2), False)]
    assert [hashed(number) in files for number in range(4)] == [True, True, False, True]
    files.end([], contents, 10)
    assert names(tmp_path) == {hashed(number).hex() for number in (0, 1, 3)}
    fewer = opened(tmp_path, blocks=2)
    fewer.end([], contents, 10)
    assert len(fewer.hashes()) == len(names(tmp_path)) == 2


def flip(at: int) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    return flip


def of_another_key(path: Path) -> None:
    """What somebody writes who has not read the key, however well all else is made."""
    filled(other := path.parent / "other", 1).end([], contents, 10)
    (other / path.name).rename(path)


def of_one_caller(path: Path) -> None:
    """What only the caller who imported it may find, under the name of what everybody may."""
    files, key = opened(path.parent), hashed(0) + b"c" * 16
    files.write([(0, key)], contents)
    files.end([], contents, 10)
    assert opened(path.parent).read(key) == content(0)
    path.with_name(key.hex()).rename(path)


HARM: dict[str, Callable[[Path], object]] = {
    "gone": os.unlink,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "of another": lambda path: path.write_bytes(path.with_name(hashed(1).hex()).read_bytes()),
    "of another key": of_another_key,
    "of one caller": of_one_caller,
    "linked": lambda path: path.symlink_to(path.rename(path.with_name("elsewhere"))),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "writable": lambda path: path.chmod(0o620),
    **{f"byte {at}": flip(at) for at in (0, 8, 24, ABOUT.size, HEAD_BYTES - 1, HEAD_BYTES, -1)},
}


@pytest.mark.parametrize("harm", HARM)
def test_a_file_that_is_not_what_was_written_is_a_miss_and_goes(tmp_path, harm):
    filled(tmp_path, 2).end([], contents, 10)
    files = opened(tmp_path)
    HARM[harm](tmp_path / hashed(0).hex())
    assert files.read(hashed(0)) is None
    assert files.read(hashed(1)) == content(1)
    assert hashed(0) not in files
    put(files, 0)
    files.end([], contents, 10)
    assert opened(tmp_path).read(hashed(0)) == content(0), "it was written anew"


@pytest.mark.parametrize("key", ["key", "new", "damaged"])
def test_the_key_is_made_once_and_what_another_one_wrote_is_a_miss(tmp_path, key):
    filled(tmp_path, 1).end([], contents, 10)
    secret = (tmp_path / "key").read_bytes()
    assert len(secret) == 32
    if key == "new":
        (tmp_path / "key").unlink()
    elif key == "damaged":
        os.truncate(tmp_path / "key", 31)
    with ThreadPoolExecutor() as pool:  # at one moment, as when one takes the place of the other
        files = [*pool.map(opened, [tmp_path] * 4)]
    assert ((tmp_path / "key").read_bytes() == secret) is (key == "key")
    assert [each.read(hashed(0)) for each in files] == [content(0) if key == "key" else None] * 4
    put(files[1], 1)
    files[1].end([], contents, 10)
    assert opened(tmp_path).read(hashed(1)) == content(1), "they have the same key"


def a_folder_for_a_key(folder: Path) -> None:
    (folder / "key").unlink()
    (folder / "key").mkdir()


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "for all": (lambda folder: folder.chmod(0o770), r"others can write .*/tier, whose mode is 0770: chmod"),
    "of somebody else": (
        lambda folder: os.chown(folder, 12345, -1),
        r"/tier belongs to user 12345, and this process is user 0",
    ),
    "elsewhere": (lambda folder: folder.symlink_to(folder.rename(folder.with_name("other"))), "/tier is not a folder"),
    "a folder for a key": (a_folder_for_a_key, "/key is not a regular file"),
    "a key for all": (
        lambda folder: (folder / "key").chmod(0o640),
        r"others can read or write .*/key, whose mode is 0640",
    ),
    "a key of somebody else": (lambda folder: os.chown(folder / "key", 12345, -1), "/key belongs to user 12345"),
}


@pytest.mark.parametrize("harm", REFUSED)
def test_a_folder_that_is_not_this_user_s_alone_is_refused(tmp_path, harm):
    filled(tmp_path / "tier", 1).end([], contents, 10)
    assert (tmp_path / "tier").stat().st_mode & 0o777 == 0o700
    if "somebody" in harm and os.geteuid():
        pytest.skip("only root gives files away")
    change, message = REFUSED[harm]
    change(tmp_path / "tier")
    with pytest.raises(OSError, match=message) as caught:
        opened(tmp_path / "tier")
    assert isinstance(caught.value, NotPrivateError)


def test_what_an_earlier_version_left_goes(tmp_path):
    head = Struct("<8s16sQI").pack(b"ferrumkv", hashed(0), SIZE, zlib.crc32(content(0)))
    (old := tmp_path / hashed(0).hex()).write_bytes(head + content(0))
    files = opened(tmp_path)
    assert files.read(hashed(0)) is None and not old.exists()


def test_files_of_another_length_are_told_once_and_go(tmp_path):
    filled(tmp_path, 5).end([], contents, 10)
    for number, length in enumerate((0, SIZE, 200)):
        os.truncate(tmp_path / hashed(number).hex(), length)
    with capture_logs() as logs:
        files = opened(tmp_path)
    [told] = logs
    assert (told["event"], told["blocks"], told["folder"]) == ("cached_block_lost", 3, str(tmp_path))
    assert set(files.hashes()) == {hashed(3), hashed(4)}
    files.end([], contents, 10)
    assert len(names(tmp_path)) == 2


def test_a_second_process_deletes_what_it_wrote_alone(tmp_path):
    first = filled(tmp_path, 3)
    first.end([], contents, 10)
    first = opened(tmp_path)
    with capture_logs() as logs:
        second = opened(tmp_path, blocks=4)
    [told] = logs
    assert told["event"] == "kv_tier_locked" and "--kv-tier-dir" in told["action"]
    for number in (0, 3, 4):
        put(second, number)
    assert len(second.hashes()) == 4, "it keeps to its own limit"
    second.clear()
    second.end([], contents, 10)
    assert names(tmp_path) == {hashed(number).hex() for number in range(3)}
    assert [first.read(hashed(number)) for number in range(3)] == [*map(content, range(3))]
    first.end([], contents, 10)


def test_a_second_process_has_the_folder_when_the_first_has_ended(tmp_path):
    first = filled(tmp_path, 2)
    second = opened(tmp_path, blocks=4)
    first.end([(2, hashed(2))], contents, 10)
    changes = list[tuple[bytes, bool]]()
    second.on_change = noted(changes)
    for number in range(10, 15):
        put(second, number)
    assert (hashed(2), True) in changes, "nobody was told of it before"
    told = {key for key, there in dict(changes).items() if there}
    assert told == {*second.hashes()}
    second.end([], contents, 10)
    left = names(tmp_path)
    assert left == {each.hex() for each in second.hashes()} and len(left) == 4, "what the first left counts"
    third = opened(tmp_path)
    third.clear()
    third.end([], contents, 10)
    assert not names(tmp_path)


def test_what_is_no_block_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "abcd").write_bytes(b"x")
    (tmp_path / "new.partial").write_bytes(b"another process is writing")
    (old := tmp_path / "old.partial").write_bytes(b"of one that was killed")
    os.utime(old, (0, 0))
    (tmp_path / hashed(0).hex()).mkdir()
    assert opened(tmp_path).hashes() == []
    assert names(tmp_path) == {"notes.txt", "abcd", "new.partial", hashed(0).hex()}
    with pytest.raises(ValueError, match="hold no block"):
        BlockFiles(tmp_path, SIZE, SIZE)


def test_a_slow_disk_loses_blocks_and_not_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(tiers, "WAITING_BYTES", 2 * SIZE)
    held, rename = threading.Event(), PrivateFolder.rename

    def slow(folder: PrivateFolder, name: str, new: str) -> None:
        assert held.wait(10)
        rename(folder, name, new)

    monkeypatch.setattr(PrivateFolder, "rename", slow)
    files = opened(tmp_path)
    kept = [put(files, number) for number in range(4)]
    assert kept.count(False) >= 2
    assert [files.read(hashed(number)) is not None for number in range(4)] == kept, "what waits can be read"
    held.set()
    files.end([], contents, 10)
    assert len(names(tmp_path)) == kept.count(True)


def test_blocks_of_one_step_are_read_at_once_and_awaited_by_the_writer_alone(tmp_path):
    """Of those that are there none is read; a block may be read again before it has arrived."""
    files, arrived, asked = filled(tmp_path, 1), threading.Event(), list[list[int]]()

    def late(number: int) -> bytes:
        assert arrived.wait(10)
        return content(number)

    def read(numbers: Sequence[int]) -> list[Callable[[], bytes]]:
        asked.append([*numbers])
        return [partial(late, each) for each in numbers]

    files.write([(number, hashed(number)) for number in (1, 0, 2, 3)], read)
    assert asked == [[1, 2, 3]] and all(hashed(number) in files for number in range(4))
    threading.Timer(0.05, arrived.set).start()
    assert files.read(hashed(3)) == content(3)
    files.end([], contents, 10)
    assert names(tmp_path) == {hashed(number).hex() for number in range(4)}


def test_what_a_lost_device_had_is_missed_alone(tmp_path):
    def lost() -> bytes:
        raise RuntimeError("an illegal memory access")

    files = opened(tmp_path)
    with capture_logs() as logs:
        files.write([(0, hashed(0)), (1, hashed(1))], lambda _: [lost, partial(content, 1)])
        files.end([], contents, 10)
    [told] = logs
    assert told["event"] == "kv_tier_write_failed" and "illegal" in told["error"]
    assert [opened(tmp_path).read(hashed(number)) for number in range(2)] == [None, content(1)]


@pytest.mark.parametrize(("code", "action"), [(28, "make room there"), (2, "start the executor again"), (5, "see why")])
def test_a_disk_that_fails_costs_the_blocks_alone(tmp_path, monkeypatch, code, action):
    def fails(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr(PrivateFolder, "rename", fails)
        files = filled(tmp_path, 3)
        files.end([], contents, 10)
    [told] = logs
    assert told["event"] == "kv_tier_write_failed" and told["action"].startswith(action)
    assert [files.read(hashed(number)) for number in range(3)] == [None] * 3


# --- states beside blocks ---------------------------------------------------------------------------------------------


def with_states(folder: Path, blocks: int = 100, state_bytes: int = 4 * SIZE) -> BlockFiles:
    return BlockFiles(folder, blocks * WHOLE, SIZE, state_bytes)


def states_of(number: int) -> bytes:
    return STATES + hashed(number)


def test_states_are_files_of_any_size_beside_their_blocks(tmp_path):
    files, changes = with_states(tmp_path), list[tuple[bytes, bool]]()
    files.on_change = noted(changes)
    sizes = {0: SIZE, 1: 4 * SIZE, 2: 1}
    for number, size in sizes.items():
        assert put(files, number)
        files.write_states(states_of(number), partial(bytes, size))
        assert files.read(states_of(number)) == bytes(size)
    assert files.hashes() == [hashed(number) for number in sizes], "states are no blocks"
    files.end([], contents, 10, [(states_of(3), lambda: b"last")])
    after = with_states(tmp_path)
    assert [after.read(states_of(number)) for number in range(5)] == [
        *map(bytes, sizes.values()),
        b"last",
        None,
    ]
    assert [after.read(hashed(number)) for number in sizes] == [content(number) for number in sizes]
    assert after.held_bytes == sum((tmp_path / each).stat().st_size for each in names(tmp_path))
    assert changes == [(hashed(number), True) for number in sizes]
    after.on_change = noted(changes)
    after.clear()
    assert (after.held_bytes, sorted(changes[3:])) == (0, sorted((hashed(number), False) for number in sizes))
    after.end([], contents, 10)
    assert not names(tmp_path)


def test_states_that_no_file_can_have_are_not_waited_for(tmp_path):
    files = with_states(tmp_path)
    assert files.write_states(states_of(0), lambda: None)
    files.end([], contents, 3600, [(states_of(0), lambda: None), (states_of(1), lambda: b"last")])
    assert [states_of(number) in files for number in range(2)] == [False, True]


def test_states_count_as_what_they_take_and_give_way_like_blocks(tmp_path):
    files = with_states(tmp_path, blocks=4)
    for number in range(3):
        assert put(files, number)
    files.write_states(states_of(0), partial(bytes, 3 * SIZE))
    assert [hashed(number) in files for number in range(3)] == [False, True, True] and states_of(0) in files
    files.write_states(states_of(0), lambda: pytest.fail("they are there"))
    for number, there in ((3, True), (4, True), (5, False)):
        assert put(files, number) and (states_of(0) in files) == there
        assert files.held_bytes <= 4 * WHOLE
    files.end([], contents, 10)
    with pytest.raises(ValueError, match="hold no block"):
        with_states(tmp_path, blocks=1)


def test_states_are_not_taken_for_a_block_or_for_those_of_others(tmp_path):
    files = with_states(tmp_path)
    mine, block = hashed(1) + hashed(2), hashed(1)
    files.write_states(STATES + mine, lambda: bytes(SIZE))
    files.end([], contents, 10)
    written = (tmp_path / (STATES + mine).hex()).read_bytes()
    for other in (mine, STATES + hashed(1) + hashed(3), STATES + block):
        (tmp_path / other.hex()).write_bytes(written)
        (tmp_path / other.hex()).chmod(0o600)
    after = with_states(tmp_path)
    assert after.read(STATES + mine) == bytes(SIZE)
    for other in (mine, STATES + hashed(1) + hashed(3), STATES + block):
        assert other in after and after.read(other) is None and other not in after
    after.end([], contents, 10)


def test_states_wait_for_a_disk_that_is_too_slow_as_blocks_do(tmp_path, monkeypatch):
    monkeypatch.setattr(tiers, "WAITING_BYTES", 0)
    files, go_on = with_states(tmp_path), threading.Event()
    rename = tiers.PrivateFolder.rename
    monkeypatch.setattr(tiers.PrivateFolder, "rename", lambda *about: go_on.wait(10) and rename(*about))
    for number in range(2):
        files.write_states(states_of(number), lambda: bytes(SIZE))
    assert [states_of(number) in files for number in range(2)] == [True, False]
    go_on.set()
    files.end([], contents, 10)
