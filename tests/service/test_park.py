"""Sequences whose cache goes to a file and comes back with their next call: to the bit, or with a typed refusal."""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from ferrum_rpc.engine.thread import ModelThread
from ferrum_rpc.errors import InvalidRequest, Reason
from ferrum_rpc.executor.v1 import executor_control_pb2, forward_pb2, info_pb2, kv_transfer_pb2, session_pb2, types_pb2
from ferrum_rpc.failpoints import Failpoints, parse_failpoints
from ferrum_rpc.private_files import PrivateFolder
from ferrum_rpc.service import waits
from ferrum_rpc.service.guard.auth import Security
from ferrum_rpc.service.meters import Direction
from ferrum_rpc.service.metrics import Metrics, registry_of
from ferrum_rpc.service.parked import ParkedFile, ParkedFiles
from ferrum_rpc.service.parking import Unpark
from ferrum_rpc.service.records import Resource, SequenceEnd
from ferrum_rpc.service.replay import ReplayLog
from ferrum_rpc.wire.status import error_from_status
from tests.failing import failing
from tests.service.test_session import opened
from tests.service.transfers import brought, chunks_of, exported, header, imported, overflow, row
from tests.serving import LIMITS, Gate, Served, serve_identity
from tests.wiring import full, item, pb, prefill, refused, until

kt = kv_transfer_pb2
PROMPT = [*range(100, 131)]
BYPASS = forward_pb2.CreateOptions(cache_mode=forward_pb2.CACHE_MODE_BYPASS)
EXHAUSTED, LOST = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DATA_LOSS

pytestmark = pytest.mark.asyncio(loop_scope="module")


@asynccontextmanager
async def serving(folder: Path, **options: Any) -> AsyncIterator[Served]:
    about = {"kv_blocks": 64, "max_context": 128, "park_dir": folder, **options}
    async with serve_identity(positional=True, **about) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with serving(tmp_path_factory.mktemp("parked")) as served:
        yield served


@pytest_asyncio.fixture(loop_scope="module")
async def served(whole: Served) -> AsyncIterator[Served]:
    yield whole
    await whole.control.Reset(executor_control_pb2.ResetRequest())
    await nothing_left(whole)


async def files(served: Served) -> list[Path]:
    """Those that stay."""
    parked = served.server.state.parked
    await until(lambda: not parked._jobs)
    return sorted(parked._opened.path.glob("ferrum-parked-*"))


async def nothing_left(served: Served) -> None:
    state = served.server.state
    await until(lambda: not state.parked._jobs and not state.unnamed)
    await served.check()
    assert (await files(served), state.parked.bytes, state.parked.sequences) == ([], 0, 0)
    assert not served.runner._imports and served.runner.kv.free_blocks == served.runner.kv.total_blocks
    for account in state.quotas._accounts.values():  # the lease of a session that was cancelled waits for its time
        assert not any(held for each, held in zip(Resource, account.held, strict=True) if each is not Resource.LEASES)
    assert state.empty.is_set()


async def park(served: Served, handle: types_pb2.KvHandle) -> kt.ParkKvResponse:
    return await served.transfer.ParkKv(kt.ParkKvRequest(handle=handle))


async def parked(served: Served, tokens: list[int] = PROMPT, **create: Any) -> types_pb2.KvHandle:
    """A new sequence, parked; without the prefix cache, unless ``create`` says otherwise."""
    options = forward_pb2.CreateOptions(**{"cache_mode": forward_pb2.CACHE_MODE_BYPASS, **create})
    return (await park(served, await prefill(served, tokens, create=options))).handle


async def status(served: Served) -> pb.GetStatusResponse:
    return await served.executor.GetStatus(pb.GetStatusRequest())


# --- there and back ---------------------------------------------------------------------------------------------------


async def test_a_parked_sequence_goes_on_bit_for_bit_under_its_handle(served: Served) -> None:
    handle, twin = [await prefill(served, PROMPT, create=BYPASS) for _ in range(2)]
    before = (await status(served)).counters.sequences_parked
    meters = served.server.state.transfers
    moved = {each: meters[each].bytes for each in (Direction.PARK, Direction.UNPARK)}
    answer = await park(served, handle)
    assert (answer.handle, answer.freed_blocks, answer.pressure.free_blocks) == (handle, 8, 56)
    [file] = await files(served)
    assert file.stat().st_mode & 0o777 == 0o600
    told = await status(served)
    assert (told.blocks.parked_sequences, told.blocks.parked_bytes) == (1, file.stat().st_size)
    assert told.counters.sequences_parked == before + 1
    numbers = registry_of(Metrics(served.server.state, served.server.calls, served.server.steps))
    assert numbers.get_sample_value("ferrum_parked_bytes") == file.stat().st_size
    assert numbers.get_sample_value("ferrum_parked_sequences") == 1
    listed = (await served.control.ListSequences(executor_control_pb2.ListSequencesRequest())).sequences
    assert [(each.parked, each.blocks, each.seq_len) for each in listed] == [(True, 0, 31), (False, 8, 31)]
    again = await park(served, handle)
    assert (again.handle, again.freed_blocks, await files(served)) == (handle, 0, [file])
    await served.check()
    assert await row(served, handle) == await row(served, twin)
    assert {meters[each].bytes - bytes_ for each, bytes_ in moved.items()} == {len(PROMPT) * 512}
    assert (await files(served), (await status(served)).blocks.parked_bytes) == ([], 0)
    labels = [
        each.label
        for each in (await served.control.ListSequences(executor_control_pb2.ListSequencesRequest())).sequences
    ]
    assert labels == [each.label for each in listed], "an operator finds it where it was"
    await served.check()


async def test_an_item_may_need_what_is_offered(served: Served) -> None:
    offered = (await served.executor.GetInfo(pb.GetInfoRequest())).capabilities
    assert info_pb2.CAPABILITY_PARK in offered
    handle = await prefill(served, PROMPT, needs=offered)
    async with opened(served) as stream:
        answer = await stream.ask(forward=session_pb2.SessionForward(items=[item([5], handle, needs=offered)]))
        assert answer.forward.results[0].output.handle.seq_len == 32


async def test_it_is_parked_again_and_again(served: Served) -> None:
    handle, twin = [await prefill(served, PROMPT, create=BYPASS) for _ in range(2)]
    for token in range(4):
        await park(served, handle)
        answers = [
            await served.executor.Decode(pb.DecodeRequest(item=item([token], each, output=full())))
            for each in (handle, twin)
        ]
        assert answers[0].row_blocks == answers[1].row_blocks
        handle, twin = [answer.output.handle for answer in answers]


async def test_its_own_infinities_return_with_it(served: Served) -> None:
    handle = await prefill(served, PROMPT, create=BYPASS)
    [record] = served.server.state.handles.records()
    await overflow(served, record)
    before = chunks_of(await exported(served, handle))
    await park(served, handle)
    assert chunks_of(await exported(served, handle)) == before


async def decode(served: Served, handle: types_pb2.KvHandle) -> list[types_pb2.KvHandle]:
    return [(await served.executor.Decode(pb.DecodeRequest(item=item([5], handle)))).output.handle]


async def chunk(served: Served, handle: types_pb2.KvHandle) -> list[types_pb2.KvHandle]:
    return [await prefill(served, [5, 6, 7], handle=handle)]


async def verify(served: Served, handle: types_pb2.KvHandle) -> list[types_pb2.KvHandle]:
    request = pb.ForwardVerifyRequest(item=item([5, 6], handle, truncate_to=20))
    return [(await served.executor.ForwardVerify(request)).output.handle]


async def in_a_batch(served: Served, handle: types_pb2.KvHandle) -> list[types_pb2.KvHandle]:
    other = await prefill(served, [1, 2, 3], create=BYPASS)
    request = pb.BatchDecodeRequest(items=[item([4], other), item([5], handle)], all_or_nothing=True)
    return [each.output.handle for each in (await served.executor.BatchDecode(request)).results]


async def run(served: Served, handle: types_pb2.KvHandle) -> list[types_pb2.KvHandle]:
    run = forward_pb2.Run(max_tokens=4)
    request = pb.DecodeRequest(item=item([5], handle, run=run, request_id=handle.id.hex()))
    return [(await served.executor.Decode(request)).output.handle]


async def truncate(served: Served, handle: types_pb2.KvHandle) -> list[types_pb2.KvHandle]:
    return [(await served.executor.TruncateKv(pb.TruncateKvRequest(handle=handle, length=9))).handle]


async def fork(served: Served, handle: types_pb2.KvHandle) -> list[types_pb2.KvHandle]:
    return [handle, *(await served.executor.ForkKv(pb.ForkKvRequest(handle=handle, count=2, at_length=30))).handles]


async def step_fork(served: Served, handle: types_pb2.KvHandle) -> list[types_pb2.KvHandle]:
    create = forward_pb2.CreateOptions(fork=True)
    items = [item([5], handle, create=create), item([6], handle, create=create)]
    answer = await served.executor.UnifiedForward(pb.UnifiedForwardRequest(items=items))
    return [handle, *(each.output.handle for each in answer.results)]


async def step_fork_and_feed(served: Served, handle: types_pb2.KvHandle) -> list[types_pb2.KvHandle]:
    items = [item([5], handle, create=forward_pb2.CreateOptions(fork=True)), item([6], handle)]
    answer = await served.executor.UnifiedForward(pb.UnifiedForwardRequest(items=items))
    return [each.output.handle for each in answer.results]


async def export(served: Served, handle: types_pb2.KvHandle) -> list[types_pb2.KvHandle]:
    await exported(served, handle)
    return [handle]


async def reserve(served: Served, handle: types_pb2.KvHandle) -> list[types_pb2.KvHandle]:
    return [(await served.executor.ReserveKv(pb.ReserveKvRequest(handle=handle, tokens=9))).handle]


async def frames(served: Served, handle: types_pb2.KvHandle) -> list[types_pb2.KvHandle]:
    """Those of one session, two of them on the way at once."""
    async with opened(served) as stream:
        first = session_pb2.SessionForward(items=[item([5], handle)])
        await stream.send(forward=first)
        await stream.send(truncate=session_pb2.SessionTruncate(handles=[handle], lengths=[3]))
        answers = {answer.step_id: answer for answer in [await stream.read(), await stream.read()]}
        decoded, rolled_back = answers[2], answers[3]
        busy = error_from_status(rolled_back.handles.results[0].error).reason
        assert busy in {Reason.SEQUENCE_BUSY, Reason.SEQUENCE_VERSION_MISMATCH}, "the first frame has claimed it"
        handle = decoded.forward.results[0].output.handle
        answer = await stream.ask(truncate=session_pb2.SessionTruncate(handles=[handle], lengths=[28]))
        return [answer.handles.results[0].handle]


NEXT: dict[str, Callable[..., Awaitable[list[types_pb2.KvHandle]]]] = {
    each.__name__: each
    for each in (
        decode, chunk, verify, in_a_batch, run, truncate, fork, step_fork, step_fork_and_feed, export, reserve, frames,
    )
}  # fmt: skip


@pytest.mark.parametrize("call", NEXT)
async def test_every_call_brings_it_back(served: Served, call: str) -> None:
    twin = await prefill(served, PROMPT, create=BYPASS)
    handle = await parked(served)
    ours, theirs = [await NEXT[call](served, each) for each in (handle, twin)]
    assert [(each.seq_len, each.version) for each in ours] == [(each.seq_len, each.version) for each in theirs]
    assert not await files(served)
    await served.check()
    for mine, other in zip(ours, theirs, strict=True):
        assert await row(served, mine) == await row(served, other)


async def test_an_item_that_follows_waits_for_one_that_waits(served: Served) -> None:
    twin = await prefill(served, PROMPT, create=BYPASS)
    handle = await parked(served)
    rows = []
    for each in (handle, twin):
        async with opened(served) as stream:
            ahead = types_pb2.KvHandle(id=each.id, seq_len=each.seq_len + 1, version=each.version + 1)
            follow = forward_pb2.Follow(feed_chosen=True)
            behind = item([], ahead, follow=follow, request_id=str(each.id), output=full())
            await stream.send(forward=session_pb2.SessionForward(items=[item([5], each)]))
            await stream.send(forward=session_pb2.SessionForward(items=[behind]))
            await stream.read()
            rows.append((await stream.read()).forward.row_blocks[0].logits.logits.data)
    assert rows[0] == rows[1]


async def test_an_item_that_follows_one_that_is_refused_is_answered(served: Served) -> None:
    handle = await parked(served)
    hogs = await fill(served, 3)
    async with opened(served) as stream:
        ahead = types_pb2.KvHandle(id=handle.id, seq_len=handle.seq_len + 1, version=handle.version + 1)
        behind = item([], ahead, follow=forward_pb2.Follow(feed_chosen=True), request_id="behind")
        await stream.send(forward=session_pb2.SessionForward(items=[item([5], handle)]))
        await stream.send(forward=session_pb2.SessionForward(items=[behind]))
        answers = [(await stream.read()).forward.results[0].error for _ in range(2)]
    reasons = [error_from_status(each).reason for each in answers]
    assert reasons == [Reason.KV_BLOCKS_EXHAUSTED, Reason.CHAIN_BROKEN]
    assert hogs and len(await files(served)) == 1


@pytest.mark.parametrize("call", ["decode", "truncate"])
@pytest.mark.parametrize("what", ["unpark", "submit"])
async def test_a_return_that_fails_unexpectedly_leaves_it_parked_and_free(served: Served, call: str, what: str) -> None:
    handle = await parked(served)
    fault = failing(waits, "unpark")
    if what == "submit":
        fault = failing(ModelThread, "submit", of=lambda _, work: bool(work.spans) or work.run._method == "truncate")
    with fault:
        await refused(NEXT[call](served, handle), Reason.INTERNAL_ERROR, grpc.StatusCode.INTERNAL)
    assert not any(each.busy for each in served.server.state.handles.records())
    assert len(await files(served)) == (what == "unpark")
    await NEXT[call](served, handle)
    await served.check()


class Returns:
    """Holds sequences that come back: their blocks are allocated, and nothing of their files was written to them."""

    def __init__(self) -> None:
        self.begun: dict[bytes, asyncio.Event] = defaultdict(asyncio.Event)
        self.goes_on: dict[bytes, asyncio.Event] = defaultdict(asyncio.Event)


@pytest.fixture
def returns(served: Served) -> Iterator[Returns]:
    holds, receive = Returns(), Unpark.receive

    async def held(unpark: Unpark, *arguments: Any) -> bool:
        holds.begun[unpark.record.id].set()
        await holds.goes_on[unpark.record.id].wait()
        return await receive(unpark, *arguments)

    with mock.patch.object(Unpark, "receive", held):
        yield holds
    for each in holds.goes_on.values():
        each.set()


def released(served: Served, handle: types_pb2.KvHandle) -> asyncio.Future[Any]:
    request = pb.ReleaseRequest(handle=types_pb2.KvHandle(id=handle.id), any_version=True)
    return asyncio.ensure_future(served.executor.Release(request))


def expired(served: Served, handle: types_pb2.KvHandle) -> asyncio.Future[Any]:
    state = served.server.state
    return asyncio.ensure_future(state.ended([state.handles.live[handle.id]], SequenceEnd.EXPIRED))


@pytest.mark.parametrize("ended", [released, expired])
@pytest.mark.parametrize("call", [fork, step_fork])
async def test_a_parent_that_ends_while_it_comes_back_is_forked_and_then_ends(
    served: Served, returns: Returns, call: Callable[..., Any], ended: Callable[..., Any]
) -> None:
    twin, handle = [await prefill(served, PROMPT, create=BYPASS) for _ in range(2)]
    [shares] = (await served.executor.ForkKv(pb.ForkKvRequest(handle=handle, count=1))).handles
    await park(served, handle)
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
async def test_a_parent_that_comes_back_is_its_calls_until_then_also_where_that_fails(
    served: Served, returns: Returns, ended: Callable[..., Any]
) -> None:
    """Taking the answer of a call that it repeats raises meanwhile."""
    twin, handle = [await prefill(served, PROMPT, create=BYPASS) for _ in range(2)]
    [shares] = (await served.executor.ForkKv(pb.ForkKvRequest(handle=handle, count=1))).handles
    await park(served, handle)
    other, record = await parked(served), served.server.state.handles.live[handle.id]
    repeated = item([7], other, request_id="once")
    first = asyncio.ensure_future(served.executor.Decode(pb.DecodeRequest(item=repeated)))
    await returns.begun[other.id].wait()
    items = [repeated, item([5], handle, create=forward_pb2.CreateOptions(fork=True), request_id="child")]
    forks = asyncio.ensure_future(served.executor.UnifiedForward(pb.UnifiedForwardRequest(items=items)))
    await returns.begun[handle.id].wait()
    with failing(ReplayLog, "repeat"):
        returns.goes_on[other.id].set()
        await first
    assert record.busy and not forks.done()
    ending = ended(served, handle)
    await until(lambda: record.pending_end is not None)
    assert record.parked and not ending.done()
    returns.goes_on[handle.id].set()
    await refused(forks, Reason.INTERNAL_ERROR, grpc.StatusCode.INTERNAL)
    await ending
    assert await row(served, shares) == await row(served, twin)
    assert not await files(served) and handle.id not in served.server.state.handles.live
    await served.check()


async def test_to_release_it_nothing_comes_back(served: Served) -> None:
    for any_version in (False, True):
        handle = await parked(served)
        [file] = await files(served)
        file.unlink()
        request = pb.ReleaseRequest(handle=handle, any_version=any_version)
        await served.executor.Release(request)
        again = served.executor.Release(pb.ReleaseRequest(handle=handle))
        await refused(again, Reason.HANDLE_RELEASED, grpc.StatusCode.NOT_FOUND)


async def test_a_release_does_not_wait_for_the_disk(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, done, unlink = threading.Event(), threading.Event(), PrivateFolder.unlink

    def slow(folder: PrivateFolder, name: str) -> None:
        begun.set()
        assert done.wait(30)
        unlink(folder, name)

    handle = await parked(served)
    [file] = await files(served)
    monkeypatch.setattr(PrivateFolder, "unlink", slow)
    await served.executor.Release(pb.ReleaseRequest(handle=handle))
    assert await asyncio.to_thread(begun.wait, 30)
    assert file.exists() and not served.server.state.parked.bytes
    await refused(decode(served, handle), Reason.HANDLE_RELEASED, grpc.StatusCode.NOT_FOUND)
    done.set()
    assert not await files(served)


async def test_a_file_that_cannot_be_deleted_ends_nothing(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = await parked(served)
    with monkeypatch.context() as patched:
        patched.setattr(PrivateFolder, "unlink", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        assert len(await decode(served, handle)) == 1
        [file] = await files(served)
    file.unlink()


async def test_what_the_prefix_cache_has_is_not_read(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ferrum_rpc.service.kv_stream.CHUNK_BYTES", 4 * 2 * 4 * 8 * 4)  # of a block
    twin = await prefill(served, PROMPT, create=BYPASS)
    handle = await parked(served, cache_mode=forward_pb2.CACHE_MODE_UNSPECIFIED, cache_salt=b"salt")
    read: list[int] = []
    next_frames = ParkedFile.next
    monkeypatch.setattr(ParkedFile, "next", lambda *about: read.append(len(got := next_frames(*about))) or got)
    assert await row(served, handle) == await row(served, twin)
    assert read == [1, 3], "the layout; of the last block two layers, and the trailer"


async def test_what_was_reserved_comes_back_with_it(served: Served) -> None:
    create = forward_pb2.CreateOptions(cache_mode=forward_pb2.CACHE_MODE_BYPASS, reserve_tokens=17)
    handle = await prefill(served, PROMPT, create=create)
    assert (await park(served, handle)).freed_blocks == 12
    [handle] = await decode(served, handle)
    listed = (await served.control.ListSequences(executor_control_pb2.ListSequencesRequest())).sequences
    assert listed[0].blocks == 12
    await fill(served)
    await refused(prefill(served, [7] * 17, handle=handle), Reason.KV_BLOCKS_EXHAUSTED, EXHAUSTED)
    await prefill(served, [7] * 16, handle=handle)


# --- refused ----------------------------------------------------------------------------------------------------------


async def fill(served: Served, left: int = 0) -> list[types_pb2.KvHandle]:
    """Sequences that leave so many blocks."""
    hogs = []
    while (free := served.server.state.pressure().free_blocks) > left:
        hogs.append(await prefill(served, [1] * min(120, 4 * (free - left)), create=BYPASS))
    return hogs


@pytest.mark.parametrize("call", [each for each in NEXT if each != "frames"])
async def test_without_blocks_it_stays_parked_and_unharmed(served: Served, call: str) -> None:
    twin = await prefill(served, PROMPT, create=BYPASS)
    expected = await row(served, twin)
    handle = await parked(served)
    hogs = await fill(served, 3)
    if call in {"step_fork", "step_fork_and_feed"}:
        create = forward_pb2.CreateOptions(fork=True)
        items = [item([5], handle, create=create), item([6], handle), item([1])][:: 1 if "feed" in call else 2]
        answer = await served.executor.UnifiedForward(pb.UnifiedForwardRequest(items=items))
        reasons = [each.error and error_from_status(each.error).reason for each in answer.results[:-1]]
        assert set(reasons) == {Reason.KV_BLOCKS_EXHAUSTED} and answer.results[-1].output.handle.seq_len == 1
        await served.executor.Release(pb.ReleaseRequest(handle=answer.results[-1].output.handle))
    else:
        await refused(NEXT[call](served, handle), Reason.KV_BLOCKS_EXHAUSTED, EXHAUSTED)
    assert len(await files(served)) == 1
    await served.check()
    for each in hogs:
        await served.executor.Release(pb.ReleaseRequest(handle=each))
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


@pytest.mark.parametrize("call", ["decode", "truncate", "step_fork"])
@pytest.mark.parametrize("harm", HARM)
async def test_a_bad_file_ends_its_sequence_and_no_other(served: Served, harm: str, call: str) -> None:
    handle = await parked(served)
    [file] = await files(served)
    HARM[harm](file)
    other = await parked(served)
    [label, _] = [
        each.label
        for each in (await served.control.ListSequences(executor_control_pb2.ListSequencesRequest())).sequences
    ]
    failures = served.server.state.transfers[Direction.UNPARK].failures
    with capture_logs() as logs:
        if call == "step_fork":
            create = forward_pb2.CreateOptions(fork=True)
            items = [item([5], handle, create=create), item([5], other, create=create)]
            answer = await served.executor.UnifiedForward(pb.UnifiedForwardRequest(items=items))
            error = error_from_status(answer.results[0].error)
            assert error.reason is Reason.KV_CORRUPT
            assert answer.results[1].output.handle.seq_len == 32
        else:
            error = await refused(NEXT[call](served, handle), Reason.KV_CORRUPT, LOST)
        await refused(decode(served, handle), Reason.HANDLE_RELEASED, grpc.StatusCode.NOT_FOUND)
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
        await refused(decode(served, each), Reason.KV_CORRUPT, LOST)


async def test_a_claim_and_what_cannot_be_parked_is_refused(served: Served) -> None:
    handle = await prefill(served, PROMPT)
    stale = types_pb2.KvHandle(id=handle.id, seq_len=handle.seq_len, version=handle.version + 1)
    await refused(park(served, stale), Reason.SEQUENCE_VERSION_MISMATCH, grpc.StatusCode.ABORTED)
    await refused(park(served, types_pb2.KvHandle(id=b"x")), Reason.INVALID_REQUEST, grpc.StatusCode.INVALID_ARGUMENT)
    nothing = (await served.executor.TruncateKv(pb.TruncateKvRequest(handle=handle, length=0))).handle
    for call in (park(served, nothing), exported(served, nothing)):
        error = await refused(call, Reason.INVALID_REQUEST, grpc.StatusCode.INVALID_ARGUMENT)
        assert error.field == "handle" and "empty" in error.message
    assert (await served.executor.Decode(pb.DecodeRequest(item=item([5], nothing)))).output.handle.seq_len == 1
    handle = await parked(served)
    stale = types_pb2.KvHandle(id=handle.id, seq_len=handle.seq_len - 1, version=handle.version)
    for call in (park(served, stale), decode(served, stale)):
        await refused(call, Reason.SEQUENCE_VERSION_MISMATCH, grpc.StatusCode.ABORTED)
    assert len(await files(served)) == 1
    assert len(await decode(served, handle)) == 1


async def test_an_executor_without_a_folder_parks_nothing() -> None:
    async with serve_identity() as served:
        handle = await prefill(served, PROMPT)
        error = await refused(park(served, handle), Reason.NOT_SUPPORTED, grpc.StatusCode.UNIMPLEMENTED)
        assert error.metadata["capability"] == "PARK"
        info = await served.executor.GetInfo(pb.GetInfoRequest())
        assert info_pb2.CAPABILITY_PARK not in info.capabilities
        needing = prefill(served, PROMPT, needs=[info_pb2.CAPABILITY_PARK])
        error = await refused(needing, Reason.NOT_SUPPORTED, grpc.StatusCode.UNIMPLEMENTED)
        assert "PARK" in error.message


async def test_only_so_many_bytes_are_parked(tmp_path: Path) -> None:
    async with serving(tmp_path, kv_park_bytes=30_000) as served:
        first, second = [await prefill(served, PROMPT, create=BYPASS) for _ in range(2)]
        await park(served, first)
        error = await refused(park(served, second), Reason.SEQUENCES_EXHAUSTED, EXHAUSTED)
        size = (await files(served))[0].stat().st_size
        assert (error.number("kv_park_bytes"), error.number("parked_bytes")) == (30_000, size)
        await served.executor.Release(pb.ReleaseRequest(handle=first))
        await park(served, second)
        assert len(await files(served)) == 1


async def test_the_blocks_of_a_parked_sequence_count_on_no_quota(tmp_path: Path) -> None:
    async with serving(tmp_path, max_blocks_per_caller=10) as served:
        handle = await parked(served)
        other = await prefill(served, PROMPT, create=BYPASS)
        for name in ("decode", "truncate", "export", "fork", "step_fork"):
            if name == "step_fork":
                create = forward_pb2.CreateOptions(fork=True)
                call = served.executor.Prefill(pb.PrefillRequest(item=item([5], handle, create=create)))
            else:
                call = NEXT[name](served, handle)
            await refused(call, Reason.QUOTA_EXCEEDED, EXHAUSTED)
            assert len(await files(served)) == 1
        await served.executor.Release(pb.ReleaseRequest(handle=other))
        await decode(served, handle)
        await refused(prefill(served, PROMPT), Reason.QUOTA_EXCEEDED, EXHAUSTED)
        await served.control.Reset(executor_control_pb2.ResetRequest())
        await nothing_left(served)


# --- failures and ends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 2])
async def test_a_failure_while_it_is_read_leaves_it_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    monkeypatch.setattr("ferrum_rpc.service.kv_stream.READ_BYTES", 1)
    async with serving(tmp_path, failpoints=Failpoints(parse_failpoints(f"export=error@{at}"))) as served:
        handle, twin = [await prefill(served, PROMPT, create=BYPASS) for _ in range(2)]
        await refused(park(served, handle), Reason.STEP_FAILED, grpc.StatusCode.INTERNAL)
        assert not await files(served) and not served.server.state.parked.bytes
        await served.check()
        assert await row(served, handle) == await row(served, twin)


async def test_a_full_disk_leaves_it_in_the_cache(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    handle, twin = [await prefill(served, PROMPT, create=BYPASS) for _ in range(2)]

    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(ParkedFile, "append", fails)
        await refused(park(served, handle), Reason.STEP_FAILED, grpc.StatusCode.INTERNAL)
    assert not await files(served)
    assert await row(served, handle) == await row(served, twin)


async def test_the_engine_frees_it_later_where_it_fails_to(tmp_path: Path) -> None:
    async with serving(tmp_path, failpoints=Failpoints(parse_failpoints("release=error@1"))) as served:
        handle = await prefill(served, PROMPT, create=BYPASS)
        assert (await park(served, handle)).freed_blocks == 8
        await served.check()
        await decode(served, handle)


@pytest.mark.parametrize("call", ["decode", "truncate", "step_fork"])
@pytest.mark.parametrize("at", range(1, 5))
async def test_a_failure_on_the_way_back_leaves_it_parked(tmp_path: Path, at: int, call: str) -> None:
    """Begin, two layers, commit."""
    async with serving(tmp_path, failpoints=Failpoints(parse_failpoints(f"import=error@{at}"))) as served:
        twin = await prefill(served, PROMPT, create=BYPASS)
        handle = await parked(served)
        if call == "step_fork":
            create = forward_pb2.CreateOptions(fork=True)
            failing: Any = served.executor.Prefill(pb.PrefillRequest(item=item([5], handle, create=create)))
        else:
            failing = NEXT[call](served, handle)
        await refused(failing, Reason.STEP_FAILED, grpc.StatusCode.INTERNAL)
        assert len(await files(served)) == 1
        await served.check()
        assert await row(served, handle) == await row(served, twin)
        await served.control.Reset(executor_control_pb2.ResetRequest())
        await nothing_left(served)


async def test_an_engine_that_is_lost_ends_both_ways(tmp_path: Path) -> None:
    for number, rule in enumerate(("export=device_lost", "import=device_lost@2")):
        points = Failpoints(parse_failpoints(rule))
        async with serving(tmp_path / str(number), failpoints=points) as served:
            handle = await prefill(served, PROMPT)
            if rule.startswith("import"):
                await park(served, handle)
            call = park(served, handle) if rule.startswith("export") else decode(served, handle)
            await refused(call, Reason.DEVICE_LOST, grpc.StatusCode.INTERNAL)
        assert not list((tmp_path / str(number)).glob("ferrum-parked-*"))


@pytest.mark.parametrize("how", ["cancelled", "reset", "lease", "any_version", "busy"])
async def test_while_it_is_being_parked(tmp_path: Path, how: str) -> None:
    gate = Gate("export")
    async with serving(tmp_path, stage=gate) as served:
        lease = (await served.executor.AcquireLease(pb.AcquireLeaseRequest())).lease_id
        create = forward_pb2.CreateOptions(cache_mode=forward_pb2.CACHE_MODE_BYPASS, lease_id=lease)
        handle = await prefill(served, PROMPT, create=create)
        call = await gate.hold(park(served, handle))
        jobs, ending = served.server.state.parked._jobs, None
        [record] = served.server.state.handles.records()
        if how == "cancelled":
            call.cancel()
            await until(lambda: record.cut is not None and record.cut.__self__.ended is not None)
        elif how == "reset":
            ending = asyncio.ensure_future(served.control.Reset(executor_control_pb2.ResetRequest()))
        elif how == "lease":
            ending = asyncio.ensure_future(served.executor.RevokeLease(pb.RevokeLeaseRequest(lease_id=lease)))
        elif how == "any_version":
            request = pb.ReleaseRequest(handle=handle, any_version=True)
            ending = asyncio.ensure_future(served.executor.Release(request))
        else:
            for other in (decode(served, handle), park(served, handle)):
                await refused(other, Reason.SEQUENCE_BUSY, grpc.StatusCode.ABORTED)
        if ending is not None:
            await until(lambda: record.pending_end is not None)
        gate.open()
        await asyncio.wait([call])
        await until(lambda: not jobs)
        if how in {"cancelled", "busy"}:
            assert len(await files(served)) == (how == "busy")
            assert (await row(served, handle)) and not record.parked
            await served.executor.RevokeLease(pb.RevokeLeaseRequest(lease_id=lease))
        else:
            assert ending is not None
            await ending
            await refused(call, Reason.HANDLE_RELEASED, grpc.StatusCode.NOT_FOUND)
            if how != "lease":
                await served.executor.RevokeLease(pb.RevokeLeaseRequest(lease_id=lease))
        await nothing_left(served)


@pytest.mark.parametrize("call", ["decode", "truncate", "in_a_batch"])
@pytest.mark.parametrize("how", ["cancelled", "reset", "busy", "repeated"])
async def test_while_it_comes_back(tmp_path: Path, how: str, call: str) -> None:
    gate = Gate("import")
    async with serving(tmp_path, stage=gate) as served:
        twin = await prefill(served, PROMPT, create=BYPASS)
        expected = await row(served, twin)
        other = await prefill(served, [1, 2, 3], create=BYPASS)
        handle = await parked(served)
        jobs = served.server.state.parked._jobs

        def made(request_id: str) -> Any:
            if call == "decode":
                return served.executor.Decode(pb.DecodeRequest(item=item([5], handle, request_id=request_id)))
            if call == "truncate":
                request = pb.TruncateKvRequest(handle=handle, length=9, request_id=request_id)
                return served.executor.TruncateKv(request)
            items = [item([4], other), item([5], handle, request_id=request_id)]
            return served.executor.BatchDecode(pb.BatchDecodeRequest(items=items, all_or_nothing=True))

        ours = await gate.hold(made("id"))
        record = served.server.state.handles.live[handle.id]
        ending = twice = None
        if how == "cancelled":
            ours.cancel()
            await until(lambda: served.server.calls.in_flight == 0)
        elif how == "reset":
            ending = asyncio.ensure_future(served.control.Reset(executor_control_pb2.ResetRequest()))
            await until(lambda: record.pending_end is not None)
        elif how == "repeated" and call != "in_a_batch":
            twice = asyncio.ensure_future(made("id"))
            await until(lambda: served.server.calls.in_flight == 2)
            ours.cancel()
            await until(lambda: served.server.calls.in_flight == 1)
        else:
            await refused(made("other"), Reason.SEQUENCE_BUSY, grpc.StatusCode.ABORTED)
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
        await served.control.Reset(executor_control_pb2.ResetRequest())
        await nothing_left(served)


@pytest.mark.parametrize("how", ["lease", "expired", "idle", "reset"])
async def test_a_file_goes_with_its_sequence(served: Served, how: str) -> None:
    state = served.server.state
    lease = (await served.executor.AcquireLease(pb.AcquireLeaseRequest())).lease_id
    await parked(served, **({"lease_id": lease} if how in {"lease", "expired"} else {}))
    assert len(await files(served)) == 1
    if how == "lease":
        await served.executor.RevokeLease(pb.RevokeLeaseRequest(lease_id=lease))
    elif how == "reset":
        answer = await served.control.Reset(executor_control_pb2.ResetRequest())
        assert answer.released_sequences == 1
    else:
        [record] = state.handles.records()
        record.used = -1e9
        for each in state.leases._live.values():
            each.expires = -1e9 if how == "expired" else each.expires
        await until(lambda: not state.handles.live)
    assert not await files(served)
    if how not in {"lease", "expired"}:
        await served.executor.RevokeLease(pb.RevokeLeaseRequest(lease_id=lease))


async def test_a_drain_serves_what_is_parked_and_waits_for_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        twin = await prefill(served, PROMPT, create=BYPASS)
        first, second = await parked(served), await parked(served)
        served.server.drain(60)
        assert await row(served, first) == await row(served, twin)
        for each in (first, twin):
            await served.executor.Release(pb.ReleaseRequest(handle=each, any_version=True))
        assert not served.server.draining.done.is_set()
        await served.executor.Release(pb.ReleaseRequest(handle=second))
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
        await refused(park(served, handle), Reason.STEP_FAILED, grpc.StatusCode.INTERNAL)  # its name is taken
        (folder / "ferrum-parked-1").rmdir()
        await park(served, handle)
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
    await until(lambda: not served.server.state.parked._jobs)


@pytest.mark.usefixtures("turned_by_hand")
async def test_idle_sequences_are_parked_where_blocks_are_short(tmp_path: Path) -> None:
    async with serving(tmp_path, kv_park_idle_s=1000.0) as served:
        live = served.server.state.handles.live
        handles = [await prefill(served, PROMPT, create=BYPASS) for _ in range(4)]
        rows = await row(served, await prefill(served, PROMPT, create=BYPASS))
        for age, each in zip((3, 4, 0, 5), handles, strict=True):
            live[each.id].used -= 1000.0 * age
        await turn(served)
        assert not await files(served), "blocks are plenty"
        await fill(served, 3)
        await turn(served)
        assert [bool(live[each.id].parked) for each in handles] == [False, False, False, True], "the oldest first"
        await turn(served)
        assert len(await files(served)) == 1, "enough is free"
        long = served.executor.Prefill(pb.PrefillRequest(item=item([1] * 60, create=BYPASS)))
        await refused(long, Reason.KV_BLOCKS_EXHAUSTED, EXHAUSTED)
        await turn(served)
        assert [bool(live[each.id].parked) for each in handles] == [False, True, False, True]
        hogs = await fill(served, 3)
        await turn(served)
        assert [bool(live[each.id].parked) for each in handles] == [True, True, False, True]
        for hog in hogs:
            await served.executor.Release(pb.ReleaseRequest(handle=hog))
        assert await row(served, handles[3]) == rows


@pytest.mark.usefixtures("turned_by_hand")
async def test_a_call_on_a_sequence_that_is_being_parked_for_idleness_goes_ahead(tmp_path: Path) -> None:
    """It is no second call: it is not refused, and the sequence stays."""
    gate = Gate("export")
    async with serving(tmp_path, stage=gate, kv_park_idle_s=10.0) as served:
        for ends in ("decode", "release"):
            handle = await prefill(served, PROMPT, create=BYPASS)
            served.server.state.handles.live[handle.id].used -= 1000.0
            served.server.state.counters.kv_exhausted += 1
            served.server.idle_parking.turn()
            gate.closed = True
            await asyncio.to_thread(gate.reached.wait, 30)
            if ends == "decode":
                call = asyncio.ensure_future(decode(served, handle))
                await until(lambda key=handle.id: served.server.state.handles.live[key].busy)
            else:
                call = asyncio.ensure_future(served.executor.Release(pb.ReleaseRequest(handle=handle)))
                await until(lambda key=handle.id: served.server.state.handles.live[key].busy)
            gate.open()
            await call
            await until(lambda: not served.server.state.parked._jobs)
            assert not await files(served) and not served.server.state.parked.bytes
            gate.reached.clear(), gate.opened.clear()
            await served.check()


@pytest.mark.parametrize("role", ["", " trusted"])
async def test_what_was_imported_is_its_callers_after_it_was_parked(tmp_path: Path, role: str) -> None:
    """Nothing of it is in the cache when it comes back: what it is, its file's record alone says."""
    (tokens := tmp_path / "tokens").write_text(f"one one{role}\nother other\n")
    async with serving(tmp_path, kv_blocks=20, security=Security(tokens=tokens), caller_share=1.0) as served:
        one, other = served.by("one"), served.by("other")
        source = await prefill(one, PROMPT, create=BYPASS)
        frames = await exported(one, source)
        await one.executor.Release(pb.ReleaseRequest(handle=source))
        begin = header(frames[0].layout, cache_mode=forward_pb2.CACHE_MODE_UNSPECIFIED)
        handle = (await imported(one, begin, *brought(chunks_of(frames)))).handle
        handle = (await park(one, handle)).handle
        hog = await prefill(other, [7] * 80, create=BYPASS)
        await other.executor.Release(pb.ReleaseRequest(handle=hog))
        handle = (await one.executor.Decode(pb.DecodeRequest(item=item([9], handle)))).output.handle
        for side, found in ((one, True), (other, bool(role))):
            answer = await side.executor.Prefill(pb.PrefillRequest(item=item([*PROMPT, 9, 9])))
            assert answer.output.cached_tokens == 32 * found
            await side.executor.Release(pb.ReleaseRequest(handle=answer.output.handle))
