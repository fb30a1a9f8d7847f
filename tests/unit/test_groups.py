"""Groups of ranks: shared memory and gloo keep the same promises, and are equal to the last bit.

Ranks are threads here, for the calls let go of the interpreter; a rank that is killed is a process.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, TCPStore

from ferrum_rpc.distributed import shared_memory
from ferrum_rpc.distributed.gloo import UNDER_WAY, GlooGroup
from ferrum_rpc.distributed.group import Group, GroupAborted, sum_in_order
from tests.support.forking import fork

SHARED, GLOO = "shared memory", "gloo"
REASON = shared_memory.available()
needs_shared = pytest.mark.skipif(REASON is not None, reason=f"no shared memory: {REASON}")
KINDS = [pytest.param(SHARED, marks=needs_shared), GLOO]
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
SOON_S = 3.0
"""Longer than what is prompt takes on a busy machine, shorter than any timeout."""


def on_all(groups: list[Group], call: Callable[[Group], Any]) -> list[Any]:
    """What each rank's call returns; the first error, once all have ended."""
    with ThreadPoolExecutor(len(groups)) as ranks:
        return [each.result(20) for each in [ranks.submit(call, group) for group in groups]]


def given_up(waits: Future[Any]) -> None:
    """Who waits is told soon that the group was given up."""
    with pytest.raises(GroupAborted):
        waits.result(SOON_S)


def join(kind: str, store: Any, rank: int, size: int) -> Group:
    return shared_memory.join(store, rank, size) if kind == SHARED else GlooGroup(store, rank, size)


@contextmanager
def joined(kind: str, size: int) -> Iterator[list[Group]]:
    store = HashStore()
    with ThreadPoolExecutor(size) as ranks:
        groups = list(ranks.map(lambda rank: join(kind, store, rank, size), range(size)))
    yield groups
    for group in groups:
        group.abort()
    for group in groups:
        group.close()


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[2, 3], ids=["two", "three"])
def groups(request: pytest.FixtureRequest, kind: str) -> Iterator[list[Group]]:
    with joined(kind, request.param) as made:
        yield made


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(-(1 << 40), 1 << 40, shape, generator=generator).to(dtype)


def same(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64])
def test_a_sum_has_the_same_bits_everywhere(groups: list[Group], dtype: torch.dtype) -> None:
    for shape in ((1,), (3,), (2, 17), (32769,), (50, 1024)):
        check_sum(groups, [random(shape, dtype, rank) for rank in range(len(groups))])


def check_sum(groups: list[Group], parts: list[Tensor]) -> None:
    whole, wanted = torch.stack(parts), torch.empty_like(parts[0])
    sum_in_order(whole, wanted)
    on_all(groups, lambda group: group.all_reduce(parts[group.rank]))
    assert all(same(part, wanted) for part in parts)
    if whole.dtype.is_floating_point:  # rounded once: half of the last bit, and what float32 loses
        rtol = torch.finfo(whole.dtype).eps * 0.5 + 2e-7
        torch.testing.assert_close(wanted.double(), whole.double().sum(0), rtol=rtol, atol=1e-6)
    else:
        assert torch.equal(wanted, whole.sum(0))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.bfloat16, torch.float64])
def test_parts_are_gathered_as_they_are(groups: list[Group], dtype: torch.dtype) -> None:
    """Also a lone element of a column, which torch calls contiguous with the column's stride."""
    for shape in ((), (5,), (3, 40000), (0, 4)):
        check_gathered(groups, [random(shape, torch.int64, rank).to(dtype) for rank in range(len(groups))])
    columns = torch.arange(12).to(dtype).view(3, 4)
    parts = [columns[1:2, rank] for rank in range(len(groups))]
    assert parts[0].is_contiguous() and parts[0].stride() == (4,)
    check_gathered(groups, parts)


def check_gathered(groups: list[Group], parts: list[Tensor]) -> None:
    for found in on_all(groups, lambda group: group.all_gather(parts[group.rank])):
        assert torch.equal(found, torch.stack(parts))


def test_messages_arrive_in_order_and_may_wait(groups: list[Group]) -> None:
    """Of a size that fills what may be under way, between all pairs at once."""
    sizes = [1, 70_000, 3, *[10] * (UNDER_WAY - 3)]

    def talk(group: Group) -> None:
        others = [rank for rank in range(group.size) if rank != group.rank]
        for to in others:
            for number, size in enumerate(sizes):
                rows = torch.full((size,), 100 * group.rank + 10 * to + number, dtype=torch.int32)
                group.send(rows, to)
                rows.zero_()  # the sender's again
        for source in others:
            for number, size in enumerate(sizes):
                rows = torch.empty(size, dtype=torch.int32)
                group.receive(rows, source)
                assert (rows == 100 * source + 10 * group.rank + number).all()

    if isinstance(groups[0], GlooGroup) and len(groups) > 2:  # eight under way, to all of them
        sizes = sizes[: UNDER_WAY // 2]
    on_all(groups, talk)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["sum", "gather", "pass on"]),
        st.sampled_from([1, 31, 1024, 40_000]),
        st.sampled_from([*FLOATS, torch.int64]),
    ),
    max_size=12,
)


@settings(max_examples=15, deadline=None)
@given(operations=OPERATIONS, seed=st.integers(0, 1 << 30))
def test_any_sequence_of_operations(groups: list[Group], operations: list[Any], seed: int) -> None:
    size = len(groups)
    inputs = [
        [random((elements,), dtype, seed + size * i + rank) for rank in range(size)]
        for i, (_, elements, dtype) in enumerate(operations)
    ]

    def play(group: Group) -> None:
        for (operation, _, _), parts in zip(operations, inputs, strict=True):
            rows, wanted = parts[group.rank].clone(), torch.empty_like(parts[0])
            if operation == "sum":
                group.all_reduce(rows)
                sum_in_order(torch.stack(parts), wanted)
            elif operation == "gather":
                rows, wanted = group.all_gather(rows), torch.stack(parts)
            else:
                before = (group.rank - 1) % size
                group.send(rows, (group.rank + 1) % size)
                group.receive(rows, before)
                wanted = parts[before]
            assert same(rows, wanted)

    on_all(groups, play)


WAITING: dict[str, Callable[[Group], object]] = {
    "a sum": lambda group: group.all_reduce(torch.ones(40_000)),
    "gathering": lambda group: group.all_gather(torch.ones(10)),
    "receiving": lambda group: group.receive(torch.ones(10), 1),
    "sending": lambda group: [group.send(torch.ones(1 << 18), 1) for _ in range(2 + UNDER_WAY)],
}


@pytest.mark.parametrize("waiting", WAITING)
def test_who_waits_is_told_that_the_group_was_given_up(kind: str, waiting: str) -> None:
    with joined(kind, 2) as groups, ThreadPoolExecutor(1) as threads:
        waits = threads.submit(WAITING[waiting], groups[0])
        time.sleep(0.05)
        assert not waits.done()
        groups[0].abort()
        given_up(waits)
        for call in WAITING.values():
            with pytest.raises(GroupAborted):
                call(groups[0])
        for group in groups[1:]:  # told by this rank, or by the connection's end
            with pytest.raises(GroupAborted):
                group.all_reduce(torch.ones(1))
        on_all(groups, lambda group: group.renew(1))
        rows = [torch.full((9,), 1.0 + group.rank) for group in groups]
        on_all(groups, lambda group: group.all_reduce(rows[group.rank]))
        assert all((each == 3.0).all() for each in rows)


@needs_shared
def test_in_shared_memory_any_rank_gives_up_for_all() -> None:
    with joined(SHARED, 3) as groups, ThreadPoolExecutor(2) as threads:
        waits = [threads.submit(group.all_reduce, torch.ones(4)) for group in groups[:2]]
        time.sleep(0.02)
        groups[2].abort()
        for each in waits:
            given_up(each)


@needs_shared
def test_a_slow_rank_does_not_take_a_new_epoch_for_its_own() -> None:
    """Rank 0 has begun anew, sums and sends, while rank 1 still waits in the old epoch."""
    with joined(SHARED, 2) as groups, ThreadPoolExecutor(2) as threads:
        late = threads.submit(groups[1].all_reduce, torch.ones(4))
        time.sleep(0.02)
        groups[0].renew(1)
        rows = torch.ones(4)
        early = threads.submit(groups[0].all_reduce, rows)
        given_up(late)
        groups[1].renew(1)
        groups[1].all_reduce(torch.ones(4))
        early.result(SOON_S)
        assert (rows == 2.0).all()
        groups[0].abort()
        for each in groups:
            with pytest.raises(GroupAborted):
                each.renew(1)  # it is over


def test_a_group_that_is_given_up_while_it_connects_is_given_up() -> None:
    with joined(GLOO, 2) as groups, ThreadPoolExecutor(1) as threads:
        renews = threads.submit(groups[0].renew, 1)
        time.sleep(0.05)
        groups[0].abort()
        groups[1].renew(1)
        given_up(renews)
        with pytest.raises(GroupAborted):
            groups[1].all_reduce(torch.ones(1))


@needs_shared
def test_calls_that_do_not_agree_give_the_group_up() -> None:
    with joined(SHARED, 2) as groups, pytest.raises(GroupAborted, match=r"unequal size|aborted the group"):
        on_all(groups, lambda group: group.all_reduce(torch.ones(4 + group.rank)))


async def test_a_rank_that_is_killed_keeps_nobody() -> None:
    """gloo sees the connection's end; in shared memory whoever watches the processes gives the group up."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    kinds = [GLOO] if REASON else [GLOO, SHARED]
    process = await fork(["-m", "tests.unit.group_program", str(store.port), *kinds], dict(os.environ))
    with ExitStack() as stack:
        stack.callback(process.kill)
        groups = [stack.enter_context(closing(join(kind, PrefixStore(kind, store), 0, 2))) for kind in kinds]
        rows = [torch.ones(1024) for _ in kinds]
        for group, each in zip(groups, rows, strict=True):
            group.all_reduce(each)
            assert (each == 3.0).all()
        threads = stack.enter_context(ThreadPoolExecutor(2))
        waits = [threads.submit(group.all_reduce, each) for group, each in zip(groups, rows, strict=True)]
        process.kill()
        await process.wait()
        for kind, group, waiting in zip(kinds, groups, waits, strict=True):
            if kind == SHARED:
                await asyncio.sleep(0.05)
                assert not waiting.done()
                group.abort()
            given_up(waiting)


@needs_shared
def test_the_memory_has_no_name_in_any_folder() -> None:
    """So nothing is left of it, whoever is killed."""
    with joined(SHARED, 2):
        mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "ferrum-rpc-group" in line]
        assert len(mapped) >= 2
        assert all("/memfd:" in line for line in mapped)


@needs_shared
def test_all_ranks_are_told_which_one_cannot_share(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = iter([None, "no kernels here"])
    monkeypatch.setattr(shared_memory, "available", lambda: next(reasons))
    store = HashStore()
    with ThreadPoolExecutor(2) as threads:
        tried = [threads.submit(shared_memory.join, store, rank, 2) for rank in range(2)]
        for each in tried:
            with pytest.raises(OSError, match=r"rank [01]: no kernels here"):
                each.result(SOON_S)


@needs_shared
@pytest.mark.parametrize("place", ["", "{name} /proc/self/exe", "{other} {path}"], ids=["none", "exe", "another"])
def test_a_segment_that_is_not_meant_is_not_taken(place: str) -> None:
    descriptor, mapping, real = shared_memory.create_segment(4096)
    try:
        name, _, path = real.partition(" ")
        assert shared_memory.map_segment(real, 4096)[:] == mapping[:]
        with pytest.raises(OSError):
            shared_memory.map_segment(place.format(name=name, path=path, other="00" * 16), 4096)
    finally:
        os.close(descriptor)


def test_a_closed_group_says_so(kind: str) -> None:
    with joined(kind, 2) as groups:
        for group in groups:
            group.close()
            group.close()
            group.abort()
        for call in WAITING.values():
            with pytest.raises(GroupAborted, match="closed"):
                call(groups[0])


def test_only_contiguous_rows_of_another_rank_are_taken(groups: list[Group]) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        groups[0].all_reduce(torch.ones(4, 4)[:, :2])
    for rank in (0, -1, len(groups)):
        with pytest.raises(ValueError, match=f"no other rank {rank}"):
            groups[0].send(torch.ones(1), rank)
