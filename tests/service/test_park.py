"""Sequences whose cache goes to a file and comes back with their next call: to the bit, or with a typed refusal."""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from ferrum_rpc.engine.thread import ModelThread
from ferrum_rpc.errors import InvalidRequest, Reason
from ferrum_rpc.executor.v1 import forward_pb2, info_pb2, session_pb2, types_pb2
from ferrum_rpc.failpoints import Failpoints, parse_failpoints
from ferrum_rpc.private_files import PrivateFolder
from ferrum_rpc.service import waits
from ferrum_rpc.service.meters import Direction
from ferrum_rpc.service.metrics import Metrics, registry_of
from ferrum_rpc.service.parked import ParkedFile, ParkedFiles
from ferrum_rpc.service.parking import Unpark
from ferrum_rpc.service.records import SequenceEnd
from ferrum_rpc.service.replay import ReplayLog
from ferrum_rpc.wire.status import error_from_status
from tests.service.test_session import opened
from tests.support import transfers
from tests.support.failing import failing
from tests.support.inside import parking_jobs
from tests.support.serving import LIMITS, Gate, Served, serve_identity
from tests.support.transfers import BYPASS, PROMPT, brought, chunks_of, exported, fed, header, imported, moving, row
from tests.support.wiring import full, item, pb, prefill, reason_of, refused, until

FORK = forward_pb2.CreateOptions(fork=True)

pytestmark = pytest.mark.asyncio(loop_scope="module")


def serving(folder: Path, **options: Any) -> Any:
    return moving(park_dir=folder, **options)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with serving(tmp_path_factory.mktemp("parked")) as served:
        yield served


@pytest_asyncio.fixture(loop_scope="module")
async def served(whole: Served) -> AsyncIterator[Served]:
    yield whole
    await whole.reset()
    await nothing_left(whole)


async def files(served: Served) -> list[Path]:
    """Those that stay."""
    parked = served.server.state.parked
    await until(lambda: not parking_jobs(served.server.state))
    return sorted(parked.folder.path.glob("ferrum-parked-*"))


async def nothing_left(served: Served) -> None:
    """But for leases of sessions that were cancelled, which wait for their time."""
    await transfers.nothing_left(served, but_leases=True)
    assert not await files(served)


async def parked(served: Served, tokens: list[int] = PROMPT, **create: Any) -> types_pb2.KvHandle:
    """A new sequence, parked; without the prefix cache, unless ``create`` says otherwise."""
    options = forward_pb2.CreateOptions(**{"cache_mode": forward_pb2.CACHE_MODE_BYPASS, **create})
    return (await served.park(await prefill(served, tokens, create=options))).handle


# --- there and back ---------------------------------------------------------------------------------------------------


async def test_a_parked_sequence_goes_on_bit_for_bit_under_its_handle(served: Served) -> None:
    handle, twin = [await fed(served) for _ in range(2)]
    before = (await served.status()).counters.sequences_parked
    meters = served.server.state.transfers
    moved = {each: meters[each].bytes for each in (Direction.PARK, Direction.UNPARK)}
    answer = await served.park(handle)
    assert (answer.handle, answer.freed_blocks, answer.pressure.free_blocks) == (handle, 8, 56)
    [file] = await files(served)
    assert file.stat().st_mode & 0o777 == 0o600
    told = await served.status()
    assert (told.blocks.parked_sequences, told.blocks.parked_bytes) == (1, file.stat().st_size)
    assert told.counters.sequences_parked == before + 1
    numbers = registry_of(Metrics(served.server.state, served.server.calls, served.server.steps))
    assert numbers.get_sample_value("ferrum_parked_bytes") == file.stat().st_size
    assert numbers.get_sample_value("ferrum_parked_sequences") == 1
    ours, _ = there = await served.listed()
    assert [(each.parked, each.blocks, each.seq_len) for each in there] == [(True, 0, 31), (False, 8, 31)]
    again = await served.park(handle)
    assert (again.handle, again.freed_blocks, await files(served)) == (handle, 0, [file])
    await served.check()
    assert await row(served, handle) == await row(served, twin)
    assert {meters[each].bytes - bytes_ for each, bytes_ in moved.items()} == {len(PROMPT) * 512}
    assert (await files(served), (await served.status()).blocks.parked_bytes) == ([], 0)
    assert (await served.listed())[0].label == ours.label, "an operator finds it where it was"
    await served.check()


async def test_an_item_may_need_what_is_offered(served: Served) -> None:
    offered = (await served.info()).capabilities
    assert info_pb2.CAPABILITY_PARK in offered
    handle = await prefill(served, PROMPT, needs=offered)
    async with opened(served) as stream:
        answer = await stream.ask(forward=session_pb2.SessionForward(items=[item([5], handle, needs=offered)]))
        assert answer.forward.results[0].output.handle.seq_len == 32


async def test_its_own_infinities_return_with_it(served: Served) -> None:
    handle = await fed(served)
    [record] = served.server.state.handles.records()
    await transfers.overflow(served, record)
    before = chunks_of(await exported(served, handle))
    await served.park(handle)
    assert chunks_of(await exported(served, handle)) == before


async def decode(served: Served, handle: types_pb2.KvHandle) -> list[types_pb2.KvHandle]:
    return [(await served.decode([5], handle)).output.handle]


async def run(served: Served, handle: types_pb2.KvHandle) -> list[types_pb2.KvHandle]:
    run = forward_pb2.Run(max_tokens=4)
    return [(await served.decode([5], handle, run=run, request_id=handle.id.hex())).output.handle]


async def truncate(served: Served, handle: types_pb2.KvHandle) -> list[types_pb2.KvHandle]:
    return [(await served.truncate(handle, length=9)).handle]


async def fork(served: Served, handle: types_pb2.KvHandle) -> list[types_pb2.KvHandle]:
    return [handle, *(await served.fork(handle, count=2, at_length=30)).handles]


async def child(served: Served, handle: types_pb2.KvHandle) -> list[types_pb2.KvHandle]:
    return [handle, (await served.prefill([5], handle, create=FORK)).output.handle]


async def step_fork(served: Served, handle: types_pb2.KvHandle) -> list[types_pb2.KvHandle]:
    answer = await served.unified(item([5], handle, create=FORK), item([6], handle, create=FORK))
    return [handle, *(each.output.handle for each in answer.results)]


async def step_fork_and_feed(served: Served, handle: types_pb2.KvHandle) -> list[types_pb2.KvHandle]:
    answer = await served.unified(item([5], handle, create=FORK), item([6], handle))
    return [each.output.handle for each in answer.results]


async def frames(served: Served, handle: types_pb2.KvHandle) -> list[types_pb2.KvHandle]:
    """Those of one session, two of them on the way at once."""
    async with opened(served) as stream:
        first = session_pb2.SessionForward(items=[item([5], handle)])
        await stream.send(forward=first)
        await stream.send(truncate=session_pb2.SessionTruncate(handles=[handle], lengths=[3]))
        answers = {answer.step_id: answer for answer in [await stream.read(), await stream.read()]}
        decoded, rolled_back = answers[2], answers[3]
        busy = reason_of(rolled_back.handles.results[0])
        assert busy in {Reason.SEQUENCE_BUSY, Reason.SEQUENCE_VERSION_MISMATCH}, "the first frame has claimed it"
        handle = decoded.forward.results[0].output.handle
        answer = await stream.ask(truncate=session_pb2.SessionTruncate(handles=[handle], lengths=[28]))
        return [answer.handles.results[0].handle]


CALLS = (decode, run, truncate, fork, step_fork, step_fork_and_feed, frames)
NEXT: dict[str, Callable[..., Awaitable[list[types_pb2.KvHandle]]]] = {each.__name__: each for each in CALLS}
"""Those that `test_state_machine` does not make, or that others here need."""


@pytest.mark.parametrize("call", NEXT)
async def test_every_call_brings_it_back(served: Served, call: str) -> None:
    twin = await fed(served)
    handle = await parked(served)
    ours, theirs = [await NEXT[call](served, each) for each in (handle, twin)]
    assert [(each.seq_len, each.version) for each in ours] == [(each.seq_len, each.version) for each in theirs]
    assert not await files(served)
    await served.check()
    for mine, other in zip(ours, theirs, strict=True):
        assert await row(served, mine) == await row(served, other)


async def test_an_item_that_follows_waits_for_one_that_waits(served: Served) -> None:
    twin = await fed(served)
    handle = await parked(served)
    rows = []
    for each in (handle, twin):
        async with opened(served) as stream:
            ahead = types_pb2.KvHandle(id=each.id, seq_len=each.seq_len + 1, version=each.version + 1)
            follow = forward_pb2.Follow(feed_chosen=True)
            behind = item([], ahead, follow=follow, request_id=str(each.id), output=full())
            await stream.step(item([5], each))
            await stream.step(behind)
            await stream.read()
            rows.append((await stream.read()).forward.row_blocks[0].logits.logits.data)
    assert rows[0] == rows[1]


async def test_an_item_that_follows_one_that_is_refused_is_answered(served: Served) -> None:
    handle = await parked(served)
    hogs = await fill(served, 3)
    async with opened(served) as stream:
        ahead = types_pb2.KvHandle(id=handle.id, seq_len=handle.seq_len + 1, version=handle.version + 1)
        behind = item([], ahead, follow=forward_pb2.Follow(feed_chosen=True), request_id="behind")
        await stream.step(item([5], handle))
        await stream.step(behind)
        reasons = [reason_of((await stream.read()).forward.results[0]) for _ in range(2)]
    assert reasons == [Reason.KV_BLOCKS_EXHAUSTED, Reason.CHAIN_BROKEN]
    assert hogs and len(await files(served)) == 1


@pytest.mark.parametrize("call", ["decode", "truncate"])
@pytest.mark.parametrize("what", ["unpark", "submit"])
async def test_a_return_that_fails_unexpectedly_leaves_it_parked_and_free(served: Served, call: str, what: str) -> None:
    handle = await parked(served)
    fault = failing(waits, "unpark")
    if what == "submit":
        fault = failing(ModelThread, "submit", of=lambda _, work: bool(work.spans) or work.run.method == "truncate")
    with fault:
        await refused(NEXT[call](served, handle), Reason.INTERNAL_ERROR)
    assert not any(each.busy for each in served.server.state.handles.records())
    assert len(await files(served)) == (what == "unpark")
    await NEXT[call](served, handle)
    await served.check()


@pytest.fixture
def returns(served: Served) -> Iterator[Any]:
    """Holds sequences that come back: their blocks are allocated, and nothing of their files was written to them."""
    begun, goes_on = defaultdict[bytes, asyncio.Event](asyncio.Event), defaultdict[bytes, asyncio.Event](asyncio.Event)
    receive = Unpark.receive

    async def held(unpark: Unpark, *arguments: Any) -> bool:
        begun[unpark.record.id].set()
        await goes_on[unpark.record.id].wait()
        return await receive(unpark, *arguments)

    with mock.patch.object(Unpark, "receive", held):
        yield SimpleNamespace(begun=begun, goes_on=goes_on)
    for each in goes_on.values():
        each.set()


def released(served: Served, handle: types_pb2.KvHandle) -> asyncio.Future[Any]:
    return asyncio.ensure_future(served.release(types_pb2.KvHandle(id=handle.id), any_version=True))


def expired(served: Served, handle: types_pb2.KvHandle) -> asyncio.Future[Any]:
    state = served.server.state
    return asyncio.ensure_future(state.ended([state.handles.live[handle.id]], SequenceEnd.EXPIRED))


@pytest.mark.parametrize("ended", [released, expired])
@pytest.mark.parametrize("call", [fork, step_fork])
async def test_a_parent_that_ends_while_it_comes_back_is_forked_and_then_ends(served, returns, call, ended):
    twin, handle = [await fed(served) for _ in range(2)]
    [shares] = (await served.fork(handle, count=1)).handles
    await served.park(handle)
    record = served.server.state.handles.live[handle.id]
    forks = asyncio.ensure_future(call(served, handle))
    await returns.begun[handle.id].wait()
    ending = ended(served, handle)
    await until(lambda: record.pending_end is not None)
    assert record.busy and record.parked and not ending.done()
    returns.goes_on[handle.id].set()
    [_, *children], [_, *twins] = await forks, await call(served, twin)
    await ending
    for ours, theirs in ((shares, twin), *zip(children, twins, strict=True)):
        assert await row(served, ours) == await row(served, theirs)
    assert not await files(served) and handle.id not in served.server.state.handles.live
    await served.check()


@pytest.mark.parametrize("ended", [released, expired])
async def test_a_parent_that_comes_back_is_its_calls_until_then_also_where_that_fails(served, returns, ended):
    """Taking the answer of a call that it repeats raises meanwhile."""
    twin, handle = [await fed(served) for _ in range(2)]
    [shares] = (await served.fork(handle, count=1)).handles
    await served.park(handle)
    other, record = await parked(served), served.server.state.handles.live[handle.id]
    repeated = item([7], other, request_id="once")
    first = asyncio.ensure_future(served.executor.Decode(pb.DecodeRequest(item=repeated)))
    await returns.begun[other.id].wait()
    items = [repeated, item([5], handle, create=FORK, request_id="child")]
    forks = asyncio.ensure_future(served.unified(*items))
    await returns.begun[handle.id].wait()
    with failing(ReplayLog, "repeat"):
        returns.goes_on[other.id].set()
        await first
    assert record.busy and not forks.done()
    ending = ended(served, handle)
    await until(lambda: record.pending_end is not None)
    assert record.parked and not ending.done()
    returns.goes_on[handle.id].set()
    await refused(forks, Reason.INTERNAL_ERROR)
    await ending
    assert await row(served, shares) == await row(served, twin)
    assert not await files(served) and handle.id not in served.server.state.handles.live
    await served.check()


async def test_to_release_it_nothing_comes_back(served: Served) -> None:
    for any_version in (False, True):
        handle = await parked(served)
        [file] = await files(served)
        file.unlink()
        await served.release(handle, any_version=any_version)
        await refused(served.release(handle), Reason.HANDLE_RELEASED)


async def test_a_release_does_not_wait_for_the_disk(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, done, unlink = threading.Event(), threading.Event(), PrivateFolder.unlink

    def slow(folder: PrivateFolder, name: str) -> None:
        begun.set()
        assert done.wait(30)
        unlink(folder, name)

    handle = await parked(served)
    [file] = await files(served)
    monkeypatch.setattr(PrivateFolder, "unlink", slow)
    await served.release(handle)
    assert await asyncio.to_thread(begun.wait, 30)
    assert file.exists() and not served.server.state.parked.bytes
    await refused(decode(served, handle), Reason.HANDLE_RELEASED)
    done.set()
    assert not await files(served)


async def test_a_file_that_cannot_be_deleted_ends_nothing(served: Served) -> None:
    handle = await parked(served)
    with mock.patch.object(PrivateFolder, "unlink", side_effect=OSError(5, "Input/output error")):
        assert len(await decode(served, handle)) == 1
        [file] = await files(served)
    file.unlink()


async def test_what_the_prefix_cache_has_is_not_read(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ferrum_rpc.service.kv_stream.CHUNK_BYTES", 4 * 2 * 4 * 8 * 4)  # of a block
    twin = await fed(served)
    handle = await parked(served, cache_mode=forward_pb2.CACHE_MODE_UNSPECIFIED, cache_salt=b"salt")
    read: list[int] = []
    next_frames = ParkedFile.next
    monkeypatch.setattr(ParkedFile, "next", lambda *about: read.append(len(got := next_frames(*about))) or got)
    assert await row(served, handle) == await row(served, twin)
    assert read == [1, 3], "the layout; of the last block two layers, and the trailer"


# --- refused ----------------------------------------------------------------------------------------------------------


async def fill(served: Served, left: int = 0) -> list[types_pb2.KvHandle]:
    """Sequences that leave so many blocks."""
    hogs = []
    while (free := served.server.state.pressure().free_blocks) > left:
        hogs.append(await prefill(served, [1] * min(120, 4 * (free - left)), create=BYPASS))
    return hogs


@pytest.mark.parametrize("call", [each for each in NEXT if each != "frames"])
async def test_without_blocks_it_stays_parked_and_unharmed(served: Served, call: str) -> None:
    twin = await fed(served)
    expected = await row(served, twin)
    handle = await parked(served)
    hogs = await fill(served, 3)
    if call in {"step_fork", "step_fork_and_feed"}:
        items = [item([5], handle, create=FORK), item([6], handle), item([1])][:: 1 if "feed" in call else 2]
        answer = await served.unified(*items)
        reasons = set(map(reason_of, answer.results[:-1]))
        assert reasons == {Reason.KV_BLOCKS_EXHAUSTED} and answer.results[-1].output.handle.seq_len == 1
        await served.release(answer.results[-1].output.handle)
    else:
        await refused(NEXT[call](served, handle), Reason.KV_BLOCKS_EXHAUSTED)
    assert len(await files(served)) == 1
    await served.check()
    for each in hogs:
        await served.release(each)
    assert await row(served, handle) == expected


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def other_tokens(path: Path) -> None:
    data = path.read_bytes()
    at = data.index(bytes(range(100, 128)))
    path.write_bytes(data[:at] + b"\x01" + data[at + 1 :])


def swapped(path: Path) -> None:
    """Two chunks, each with its digest, in each other's place."""
    data, frames = path.read_bytes(), []
    while data:
        size = int.from_bytes(data[:4], "little") + 4 + 32
        frames.append(data[:size])
        data = data[size:]
    frames[1], frames[2] = frames[2], frames[1]
    path.write_bytes(b"".join(frames))


def linked(path: Path) -> None:
    path.rename(target := path.with_name("elsewhere"))
    path.symlink_to(target)


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


HARM: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: os.truncate(path, 0),
    "cut in the layout": lambda path: os.truncate(path, 60),
    "cut in a chunk": lambda path: os.truncate(path, path.stat().st_size - 100),
    "without a trailer": lambda path: os.truncate(path, path.stat().st_size - 40),
    "a flipped bit": flipped,
    "other tokens": other_tokens,
    "two chunks swapped": swapped,
    "a link": linked,
    "a pipe": a_pipe,
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "writable by others": lambda path: path.chmod(0o602),
    "another file": lambda path: path.write_bytes(b"x" * path.stat().st_size),
}


@pytest.mark.parametrize(
    ("harm", "call"), [*((harm, "decode") for harm in HARM), ("missing", "step_fork"), ("a flipped bit", "truncate")]
)
async def test_a_bad_file_ends_its_sequence_and_no_other(served: Served, harm: str, call: str) -> None:
    handle = await parked(served)
    [file] = await files(served)
    HARM[harm](file)
    other = await parked(served)
    label = (await served.listed())[0].label
    failures = served.server.state.transfers[Direction.UNPARK].failures
    with capture_logs() as logs:
        if call == "step_fork":
            answer = await served.unified(item([5], handle, create=FORK), item([5], other, create=FORK))
            error = error_from_status(answer.results[0].error)
            assert error.reason is Reason.KV_CORRUPT
            assert answer.results[1].output.handle.seq_len == 32
        else:
            error = await refused(NEXT[call](served, handle), Reason.KV_CORRUPT)
        await refused(decode(served, handle), Reason.HANDLE_RELEASED)
    assert ("is gone" if harm == "missing" else "is not what was written") in error.message
    assert served.server.state.transfers[Direction.UNPARK].failures > failures
    [told] = [each for each in logs if each["event"] == "parked_sequence_lost"]
    assert (told["sequence"], told["path"]) == (label, str(file)) and "(" not in told["error"]
    await decode(served, other)
    if harm == "a folder":
        file.rmdir()
    assert not await files(served)


async def test_a_file_brings_back_the_sequence_of_its_name_alone(served: Served) -> None:
    handles = [await parked(served, tokens) for tokens in (PROMPT, PROMPT[::-1])]
    one, other = await files(served)
    one.rename(one.with_name("between"))
    other.rename(one)
    one.with_name("between").rename(other)
    for each in handles:
        await refused(decode(served, each), Reason.KV_CORRUPT)


async def test_a_claim_and_what_cannot_be_parked_is_refused(served: Served) -> None:
    handle = await prefill(served, PROMPT)
    stale = types_pb2.KvHandle(id=handle.id, seq_len=handle.seq_len, version=handle.version + 1)
    await refused(served.park(stale), Reason.SEQUENCE_VERSION_MISMATCH)
    await refused(served.park(types_pb2.KvHandle(id=b"x")), Reason.INVALID_REQUEST)
    nothing = (await served.truncate(handle, length=0)).handle
    for call in (served.park(nothing), exported(served, nothing)):
        error = await refused(call, Reason.INVALID_REQUEST)
        assert error.field == "handle" and "empty" in error.message
    assert (await served.decode([5], nothing)).output.handle.seq_len == 1
    handle = await parked(served)
    stale = types_pb2.KvHandle(id=handle.id, seq_len=handle.seq_len - 1, version=handle.version)
    for call in (served.park(stale), decode(served, stale)):
        await refused(call, Reason.SEQUENCE_VERSION_MISMATCH)
    assert len(await files(served)) == 1
    assert len(await decode(served, handle)) == 1


async def test_an_executor_without_a_folder_parks_nothing() -> None:
    async with serve_identity() as served:
        handle = await prefill(served, PROMPT)
        assert (await refused(served.park(handle), Reason.NOT_SUPPORTED)).metadata["capability"] == "PARK"
        info = await served.info()
        assert info_pb2.CAPABILITY_PARK not in info.capabilities
        error = await refused(prefill(served, PROMPT, needs=[info_pb2.CAPABILITY_PARK]), Reason.NOT_SUPPORTED)
        assert "PARK" in error.message


async def test_only_so_many_bytes_are_parked(tmp_path: Path) -> None:
    async with serving(tmp_path, kv_park_bytes=30_000) as served:
        first, second = [await fed(served) for _ in range(2)]
        await served.park(first)
        error = await refused(served.park(second), Reason.SEQUENCES_EXHAUSTED)
        size = (await files(served))[0].stat().st_size
        assert (error.number("kv_park_bytes"), error.number("parked_bytes")) == (30_000, size)
        await served.release(first)
        await served.park(second)
        assert len(await files(served)) == 1


async def test_the_blocks_of_a_parked_sequence_count_on_no_quota(tmp_path: Path) -> None:
    async with serving(tmp_path, max_blocks_per_caller=10) as served:
        handle = await parked(served)
        other = await fed(served)
        for call in (decode, truncate, exported, fork, child):
            await refused(call(served, handle), Reason.QUOTA_EXCEEDED)
            assert len(await files(served)) == 1
        await served.release(other)
        await decode(served, handle)
        await refused(prefill(served, PROMPT), Reason.QUOTA_EXCEEDED)
        await served.reset()
        await nothing_left(served)


# --- failures and ends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 2])
async def test_a_failure_while_it_is_read_leaves_it_in_the_cache(tmp_path, monkeypatch, at):
    monkeypatch.setattr("ferrum_rpc.service.kv_stream.READ_BYTES", 1)
    async with serving(tmp_path, failpoints=Failpoints(parse_failpoints(f"export=error@{at}"))) as served:
        handle, twin = [await fed(served) for _ in range(2)]
        await refused(served.park(handle), Reason.STEP_FAILED)
        assert not await files(served) and not served.server.state.parked.bytes
        await served.check()
        assert await row(served, handle) == await row(served, twin)


async def test_a_full_disk_leaves_it_in_the_cache(served: Served) -> None:
    handle, twin = [await fed(served) for _ in range(2)]

    with mock.patch.object(ParkedFile, "append", side_effect=OSError(28, "No space left on device")):
        await refused(served.park(handle), Reason.STEP_FAILED)
    assert not await files(served)
    assert await row(served, handle) == await row(served, twin)


async def test_the_engine_frees_it_later_where_it_fails_to(tmp_path: Path) -> None:
    async with serving(tmp_path, failpoints=Failpoints(parse_failpoints("release=error@1"))) as served:
        handle = await fed(served)
        assert (await served.park(handle)).freed_blocks == 8
        await served.check()
        await decode(served, handle)


@pytest.mark.parametrize(
    ("at", "call"), [*((at, "decode") for at in range(1, 5)), (1, "truncate"), (2, "child"), (4, "child")]
)
async def test_a_failure_on_the_way_back_leaves_it_parked(tmp_path: Path, at: int, call: str) -> None:
    """Begin, two layers, commit."""
    async with serving(tmp_path, failpoints=Failpoints(parse_failpoints(f"import=error@{at}"))) as served:
        twin = await fed(served)
        handle = await parked(served)
        await refused({**NEXT, "child": child}[call](served, handle), Reason.STEP_FAILED)
        assert len(await files(served)) == 1
        await served.check()
        assert await row(served, handle) == await row(served, twin)
        await served.reset()
        await nothing_left(served)


async def test_an_engine_that_is_lost_ends_both_ways(tmp_path: Path) -> None:
    for number, rule in enumerate(("export=device_lost", "import=device_lost@2")):
        points = Failpoints(parse_failpoints(rule))
        async with serving(tmp_path / str(number), failpoints=points) as served:
            handle = await prefill(served, PROMPT)
            if rule.startswith("import"):
                await served.park(handle)
            call = served.park(handle) if rule.startswith("export") else decode(served, handle)
            await refused(call, Reason.DEVICE_LOST)
        assert not list((tmp_path / str(number)).glob("ferrum-parked-*"))


@pytest.mark.parametrize("how", ["cancelled", "reset", "lease", "any_version", "busy"])
async def test_while_it_is_being_parked(tmp_path: Path, how: str) -> None:
    gate = Gate("export")
    async with serving(tmp_path, stage=gate) as served:
        lease = (await served.acquire()).lease_id
        handle = await prefill(served, PROMPT, create={"cache_mode": forward_pb2.CACHE_MODE_BYPASS, "lease_id": lease})
        call = await gate.hold(served.park(handle))
        jobs, ending = parking_jobs(served.server.state), None
        [record] = served.server.state.handles.records()
        endings: dict[str, Callable[[], Any]] = {
            "reset": served.reset,
            "lease": lambda: served.revoke(lease),
            "any_version": lambda: served.release(handle, any_version=True),
        }
        if how == "cancelled":
            call.cancel()
            await until(lambda: record.cut is not None and record.cut.__self__.ended is not None)
        elif how in endings:
            ending = asyncio.ensure_future(endings[how]())
            await until(lambda: record.pending_end is not None)
        else:
            for other in (decode(served, handle), served.park(handle)):
                await refused(other, Reason.SEQUENCE_BUSY)
        gate.open()
        await asyncio.wait([call])
        await until(lambda: not jobs)
        if how in {"cancelled", "busy"}:
            assert len(await files(served)) == (how == "busy")
            assert (await row(served, handle)) and not record.parked
            await served.revoke(lease)
        else:
            assert ending is not None
            await ending
            await refused(call, Reason.HANDLE_RELEASED)
            if how != "lease":
                await served.revoke(lease)
        await nothing_left(served)


@pytest.mark.parametrize(
    ("how", "call"),
    [
        *(("cancelled", call) for call in ("decode", "truncate", "in_a_batch")),
        *(("reset", call) for call in ("decode", "truncate", "in_a_batch")),
        *(("repeated", call) for call in ("decode", "truncate")),
        *(("busy", call) for call in ("decode", "truncate")),
    ],
)
async def test_while_it_comes_back(tmp_path: Path, how: str, call: str) -> None:
    gate = Gate("import")
    async with serving(tmp_path, stage=gate) as served:
        twin = await fed(served)
        expected = await row(served, twin)
        other = await prefill(served, [1, 2, 3], create=BYPASS)
        handle = await parked(served)
        jobs = parking_jobs(served.server.state)

        def made(request_id: str) -> Any:
            if call == "decode":
                return served.decode([5], handle, request_id=request_id)
            if call == "truncate":
                return served.truncate(handle, length=9, request_id=request_id)
            items = [item([4], other), item([5], handle, request_id=request_id)]
            return served.batch_decode(*items, all_or_nothing=True)

        ours = await gate.hold(made("id"))
        record = served.server.state.handles.live[handle.id]
        ending = twice = None
        if how == "cancelled":
            ours.cancel()
            await until(lambda: served.server.calls.in_flight == 0)
        elif how == "reset":
            ending = asyncio.ensure_future(served.reset())
            await until(lambda: record.pending_end is not None)
        elif how == "repeated":
            twice = asyncio.ensure_future(made("id"))
            await until(lambda: served.server.calls.in_flight == 2)
            ours.cancel()
            await until(lambda: served.server.calls.in_flight == 1)
        else:
            await refused(made("other"), Reason.SEQUENCE_BUSY)
        gate.open()
        await asyncio.wait([ours])
        await until(lambda: not jobs and not record.busy)
        assert not await files(served)
        if how == "cancelled":
            assert (record.version, record.length) == (handle.version, len(PROMPT)), "back, and not fed"
            assert await row(served, handle) == expected
        elif ending is not None:
            await ending
        if twice is not None:
            assert (await twice).replayed if call == "truncate" else (await twice).output.replayed
        await served.reset()
        await nothing_left(served)


@pytest.mark.parametrize("how", ["lease", "expired", "idle", "reset"])
async def test_a_file_goes_with_its_sequence(served: Served, how: str) -> None:
    state = served.server.state
    lease = (await served.acquire()).lease_id
    await parked(served, **({"lease_id": lease} if how in {"lease", "expired"} else {}))
    assert len(await files(served)) == 1
    if how == "lease":
        await served.revoke(lease)
    elif how == "reset":
        assert (await served.reset()).released_sequences == 1
    else:
        [record] = state.handles.records()
        record.used = -1e9
        for each in state.leases.due(float("inf")) if how == "expired" else ():
            each.expires = -1e9
        await until(lambda: not state.handles.live)
    assert not await files(served)
    if how not in {"lease", "expired"}:
        await served.revoke(lease)


async def test_a_drain_serves_what_is_parked_and_waits_for_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        twin = await fed(served)
        first, second = await parked(served), await parked(served)
        served.server.drain(60)
        assert await row(served, first) == await row(served, twin)
        for each in (first, twin):
            await served.release(each, any_version=True)
        assert not served.server.draining.done.is_set()
        await served.release(second)
        await served.server.draining.done.wait()


async def test_the_folder_is_one_process_s_and_left_empty(tmp_path: Path) -> None:
    given = tmp_path / "made" / "here"
    given.mkdir(parents=True)
    given.chmod(0o777)  # a volume, whosever it is
    (given / "ferrum-parked-7").write_bytes(b"of an earlier version")
    (given / "ferrum-parked.lock").write_bytes(b"of it too")
    (given / "ferrum-parked-5").mkdir()
    for each in ("somebody's", "ferrum-parked-notes", "ferrum-parked-7.txt"):
        (given / each).write_bytes(b"")
    others = {each.name for each in given.iterdir()} - {"ferrum-parked-7", "ferrum-parked.lock"}
    (folder := given / "ferrum-parked").mkdir(0o700)
    (folder / "ferrum-parked-1").mkdir()
    (folder / "ferrum-parked-8").write_bytes(b"of an earlier process")
    async with serving(given) as served:
        assert {each.name for each in given.iterdir()} == others | {"ferrum-parked"}
        assert not (folder / "ferrum-parked-8").exists()
        handle = await prefill(served, PROMPT)
        await refused(served.park(handle), Reason.STEP_FAILED)  # its name is taken
        (folder / "ferrum-parked-1").rmdir()
        await served.park(handle)
        [file] = await files(served)
        assert file.parent == folder and folder.stat().st_mode & 0o777 == 0o700
        with pytest.raises(InvalidRequest, match="another executor's"):
            ParkedFiles(given, LIMITS).open()
        assert file.exists()
    assert not [*folder.iterdir()]
    with (given / "ferrum-parked.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of the earlier version is there
        with pytest.raises(InvalidRequest, match="another executor's"):
            ParkedFiles(given, LIMITS).open()
    folder.chmod(0o730)
    with pytest.raises(InvalidRequest, match=rf"^kv_park_dir .*: others can write {folder}, whose mode is 0730"):
        ParkedFiles(given, LIMITS).open()
    with pytest.raises(InvalidRequest, match="kv_park_dir"):
        ParkedFiles(given / "somebody's", LIMITS).open()


# --- where blocks are short -------------------------------------------------------------------------------------------


@pytest.fixture
def turned_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ferrum_rpc.service.server.IDLE_TURN_S", 1e6)


async def turn(served: Served) -> None:
    served.server.idle_parking.turn()
    await until(lambda: not parking_jobs(served.server.state))


@pytest.mark.usefixtures("turned_by_hand")
async def test_idle_sequences_are_parked_where_blocks_are_short(tmp_path: Path) -> None:
    async with serving(tmp_path, kv_park_idle_s=1000.0, idle_ttl_s=1e5) as served:
        live = served.server.state.handles.live
        handles = [await fed(served) for _ in range(4)]
        rows = await row(served, await fed(served))
        for age, each in zip((3, 4, 0, 5), handles, strict=True):
            live[each.id].used -= 1000.0 * age
        await turn(served)
        assert not await files(served), "blocks are plenty"
        await fill(served, 3)
        await turn(served)
        assert [bool(live[each.id].parked) for each in handles] == [False, False, False, True], "the oldest first"
        await turn(served)
        assert len(await files(served)) == 1, "enough is free"
        await refused(served.prefill([1] * 60, create=BYPASS), Reason.KV_BLOCKS_EXHAUSTED)
        await turn(served)
        assert [bool(live[each.id].parked) for each in handles] == [False, True, False, True]
        hogs = await fill(served, 3)
        await turn(served)
        assert [bool(live[each.id].parked) for each in handles] == [True, True, False, True]
        for hog in hogs:
            await served.release(hog)
        assert await row(served, handles[3]) == rows


@pytest.mark.usefixtures("turned_by_hand")
async def test_a_call_on_a_sequence_that_is_being_parked_for_idleness_goes_ahead(tmp_path: Path) -> None:
    """It is no second call: it is not refused, and the sequence stays."""
    gate = Gate("export")
    async with serving(tmp_path, stage=gate, kv_park_idle_s=10.0) as served:
        for call in (decode, Served.release):
            handle = await fed(served)
            served.server.state.handles.live[handle.id].used -= 1000.0
            served.server.state.counters.kv_exhausted += 1
            served.server.idle_parking.turn()
            gate.closed = True
            await asyncio.to_thread(gate.reached.wait, 30)
            called = asyncio.ensure_future(call(served, handle))
            await until(lambda key=handle.id: served.server.state.handles.live[key].busy)
            gate.open()
            await called
            await until(lambda: not parking_jobs(served.server.state))
            assert not await files(served) and not served.server.state.parked.bytes
            gate.reached.clear(), gate.opened.clear()
            await served.check()


@pytest.mark.usefixtures("turned_by_hand")
async def test_a_sequence_that_ends_before_it_is_read_for_its_file_ends_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine learns of its end between two questions about it, for both wait behind a step."""
    gate = Gate("forward")
    async with serving(tmp_path, stage=gate, kv_park_idle_s=10.0) as served:
        other, handle = await fed(served), await fed(served)
        state = served.server.state
        state.handles.live[handle.id].used -= 1000.0
        state.counters.kv_exhausted += 1
        gate.closed = True
        step = asyncio.ensure_future(decode(served, other))
        await asyncio.to_thread(gate.reached.wait, 30)
        submitted, submit = list[object](), state.engine.submit
        monkeypatch.setattr(state.engine, "submit", lambda work: (submitted.append(work), submit(work)))
        served.server.idle_parking.turn()
        await until(lambda: submitted)
        released = asyncio.ensure_future(served.release(handle))
        await until(lambda: len(submitted) > 1)
        gate.open()
        await asyncio.gather(step, released)
        await until(lambda: not parking_jobs(state))
        assert not await files(served) and not state.parked.bytes
        await decode(served, (await step)[0])
        await served.check()


@pytest.mark.parametrize("role", ["", " trusted"])
async def test_what_was_imported_is_its_callers_after_it_was_parked(tmp_path: Path, role: str) -> None:
    """Nothing of it is in the cache when it comes back: what it is, its file's record alone says."""
    async with serving(tmp_path, kv_blocks=20, tokens=(f"one one{role}", "other other"), caller_share=1.0) as served:
        one, other = served.by("one"), served.by("other")
        source = await prefill(one, PROMPT, create=BYPASS)
        frames = await exported(one, source)
        await one.release(source)
        begin = header(frames[0].layout, cache_mode=forward_pb2.CACHE_MODE_UNSPECIFIED)
        handle = (await imported(one, begin, *brought(chunks_of(frames)))).handle
        handle = (await one.park(handle)).handle
        hog = await prefill(other, [7] * 80, create=BYPASS)
        await other.release(hog)
        handle = (await one.decode([9], handle)).output.handle
        for side, found in ((one, True), (other, bool(role))):
            answer = await side.prefill([*PROMPT, 9, 9])
            assert answer.output.cached_tokens == 32 * found
            await side.release(answer.output.handle)
