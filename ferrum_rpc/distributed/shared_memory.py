"""A group of ranks on one machine that use shared memory: the C of ``group.c``.

The memory has no name in the file system: rank 0 creates it and sends the others its file descriptor's path. So nothing
is left behind, whichever process is killed at any time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import threading
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import Store

from ferrum_rpc.distributed.group import GroupAborted, check_other, check_rows, sum_in_order
from ferrum_rpc.native import library

SUMMED: Final = {torch.bfloat16: 0, torch.float32: 1}
"""Dtypes that the C code sums, with its codes. Others are gathered and summed by torch."""

_NAME_BYTES: Final = 16
"""``name`` in ``struct shared`` of group.c."""

_SEGMENT, _YES = "segment", "yes"


def available() -> str | None:
    """The reason why ranks of this machine cannot share memory, or None."""
    if not hasattr(os, "memfd_create") or not os.path.isdir("/proc/self/fd"):
        return "it needs Linux, and /proc"
    try:
        library.load()
    except OSError as reason:
        return f"no kernels: {reason}"
    return None


class SharedMemoryGroup:
    """A `Group`. ``mapping`` is a segment of this group that all ranks have mapped."""

    def __init__(self, mapping: mmap.mmap, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._library: Any = library.load()
        self._mapping = mapping
        self._segment: Any = ctypes.c_char.from_buffer(mapping)
        lanes = self._library.ferrum_rows_lanes(16)
        self._handle: int = self._library.ferrum_group_new(ctypes.addressof(self._segment), rank, size, lanes)
        self._closed = False
        self._closing = threading.Lock()  # who aborts may be another thread

    def all_reduce(self, rows: Tensor) -> None:
        dtype_code = SUMMED.get(rows.dtype)
        if dtype_code is None:
            sum_in_order(self.all_gather(rows), rows)
            return
        self._check(self._library.ferrum_group_reduce(self._handle, _address(rows), rows.numel(), dtype_code))

    @property
    def native_sum(self) -> tuple[int, int]:
        function = ctypes.cast(self._library.ferrum_group_reduce_pairs, ctypes.c_void_p).value
        assert function is not None  # noqa: S101 - the library was loaded with it
        return function, self._handle

    def all_gather(self, part: Tensor) -> Tensor:
        parts = part.new_empty((self.size, *part.shape))
        sides = _address(part), part.nbytes, _address(parts)
        self._check(self._library.ferrum_group_gather(self._handle, *sides))
        return parts

    def send(self, rows: Tensor, to: int) -> None:
        """As `Group.send`. A megabyte may be under way before it waits for the other rank."""
        check_other(self, to)
        self._check(self._library.ferrum_group_send(self._handle, _address(rows), rows.nbytes, to))

    def receive(self, rows: Tensor, source: int) -> None:
        check_other(self, source)
        self._check(self._library.ferrum_group_receive(self._handle, _address(rows), rows.nbytes, source))

    def check(self) -> None:
        """As `Group.check`: nothing is late here."""

    def abort(self) -> None:
        with self._closing:
            self._library.ferrum_group_abort(self._handle)

    def renew(self, epoch: int) -> None:
        self._check(self._library.ferrum_group_renew(self._handle, epoch))

    def close(self) -> None:
        with self._closing:
            self._library.ferrum_group_close(self._handle)
            self._closed, self._segment = True, None
            self._mapping.close()

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._library.ferrum_group_free(self._handle)

    def _check(self, status: int) -> None:
        if status == library.GROUP_UNEQUAL:
            raise GroupAborted("the ranks' calls differ: their rows have unequal sizes")
        if status:
            raise GroupAborted("the group is closed" if self._closed else "a rank aborted the group")


def join(store: Store, rank: int, size: int) -> SharedMemoryGroup:
    """The group of all ranks that call this with the same ``store``. If one cannot take part, OSError is raised on all
    of them, with the rank and the reason. If one does not come, the error of the store is raised."""
    _agree(store, "able", rank, size, available())
    length = library.load().ferrum_group_bytes(size)
    if not length:
        raise ValueError(f"{size} ranks are more than can share memory")
    descriptor, mapping, reason = None, None, None
    try:
        if rank == 0:
            descriptor, mapping, place = create_segment(length)
            store.set(_SEGMENT, place)
        else:
            mapping = map_segment(store.get(_SEGMENT).decode(), length)
    except OSError as error:
        reason = str(error)
        if rank == 0:
            store.set(_SEGMENT, "")
    try:
        _agree(store, "mapped", rank, size, reason)
    finally:
        if descriptor is not None:
            os.close(descriptor)
    assert mapping is not None  # noqa: S101 - or there was a reason
    return SharedMemoryGroup(mapping, rank, size)


def _agree(store: Store, question: str, rank: int, size: int, reason: str | None) -> None:
    """Raise OSError on every rank if one of them has a reason."""
    store.set(f"{question}/{rank}", reason or _YES)
    answers = [store.get(f"{question}/{each}").decode() for each in range(size)]
    refused = [f"rank {each}: {answer}" for each, answer in enumerate(answers) if answer != _YES]
    if refused:
        raise OSError(f"the ranks cannot share memory ({'; '.join(refused)})")


def create_segment(length: int) -> tuple[int, mmap.mmap, str]:
    """A new segment: its descriptor, the memory, and the place by which other ranks find it."""
    descriptor = os.memfd_create("ferrum-rpc-group", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, length)
        mapping = mmap.mmap(descriptor, length)
    except OSError:
        os.close(descriptor)
        raise
    name = secrets.token_bytes(_NAME_BYTES)
    mapping[:_NAME_BYTES] = name
    return descriptor, mapping, f"{name.hex()} /proc/{os.getpid()}/fd/{descriptor}"


def map_segment(place: str, length: int) -> mmap.mmap:
    """Map another rank's segment. On another machine, or in another container, the path means something else."""
    name, _, path = place.partition(" ")
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_size != length:
            raise OSError(f"{path} is not rank 0's segment")
        mapping = mmap.mmap(descriptor, length)
    finally:
        os.close(descriptor)
    if mapping[:_NAME_BYTES].hex() != name:
        raise OSError(f"{path} is not rank 0's segment")
    return mapping


def _address(rows: Tensor) -> int:
    check_rows(rows)
    return rows.data_ptr()
