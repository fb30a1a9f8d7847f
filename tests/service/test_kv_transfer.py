"""Sequences that leave one executor and arrive in another: whole, or not at all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from typing import Any
from unittest import mock

import grpc
import pytest
import pytest_asyncio

from ferrum_rpc.errors import QueueFull, Reason
from ferrum_rpc.executor.v1 import executor_control_pb2, forward_pb2, types_pb2
from ferrum_rpc.failpoints import Failpoints, parse_failpoints
from ferrum_rpc.service import peers
from ferrum_rpc.service.kv_stream import CHUNK_BYTES
from ferrum_rpc.service.lifecycle import Sweeper
from ferrum_rpc.service.meters import Direction
from ferrum_rpc.service.metrics import Metrics, registry_of
from tests.support import transfers
from tests.support.serving import Gate, Served, serve_identity
from tests.support.transfers import PROMPT, brought, exported, header, imported, kt, moving, nothing_left, row
from tests.support.wiring import item, pb, prefill, refused, until

DEFAULT = forward_pb2.CACHE_MODE_UNSPECIFIED
LARGE = {"max_transfers": 1, "kv_heads": 8, "heads": 8, "head_dim": 64, "max_context": 2048, "kv_blocks": 512}
READ_ONLY = forward_pb2.CreateOptions(cache_mode=forward_pb2.CACHE_MODE_READ_ONLY)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[tuple[Served, Served]]:
    order = (*range(2, 65, 2), *range(1, 65, 2))
    async with moving() as source, moving(block_order=order) as target:
        yield source, target


@pytest_asyncio.fixture(loop_scope="module")
async def source(pair: tuple[Served, Served]) -> AsyncIterator[Served]:
    yield pair[0]
    await empty(pair[0])


@pytest_asyncio.fixture(loop_scope="module")
async def target(pair: tuple[Served, Served], request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    transfers.Names.present = f"{abs(hash(request.node.name))} "
    yield pair[1]
    await empty(pair[1])


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def empty(served: Served) -> None:
    """Reset it: then nothing may be left, nor be counted."""
    await served.reset()
    await nothing_left(served)


def is_open(each: Any) -> bool:
    """An import that its stream may go on with."""
    return bool(each._stage.name == "OPEN")


def swept(served: Served) -> bool:
    """What transfers hold was not used for long, and is swept: whether nothing is left."""
    state = served.server.state
    for record in state.unnamed:
        record.used = -1e9
    Sweeper(state).sweep(time.monotonic())
    return not state.unnamed


async def frames_of(source: Served, **fields: Any) -> list[kt.ExportKvResponse]:
    """An export of `PROMPT`."""
    handle = await transfers.fed(source)
    frames = await exported(source, handle, **{"chunk_tokens": 8, **fields})
    await source.release(handle)
    return frames


async def export_of(source: Served, **fields: Any) -> tuple[kt.KvLayout, list[kt.KvChunk]]:
    frames = await frames_of(source, **fields)
    return frames[0].layout, transfers.chunks_of(frames)


def copied(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


async def arrives(target: Served, *frames: kt.ImportKvRequest) -> kt.ImportKvResponse:
    """These frames bring what goes on as the sequence that is fed there."""
    answer = await imported(target, *frames)
    assert await row(target, answer.handle) == await transfers.expected_row(target)
    return answer


def imports(served: Served) -> list[Any]:
    return [record.cut.__self__ for record in served.server.state.unnamed if record.cut is not None]


async def begun(target: Served, *frames: kt.ImportKvRequest, came: int = 8) -> Any:
    """A stream of an import that has sent these, once so many tokens have come."""
    stream = target.transfer.ImportKv()
    for frame in frames:
        await stream.write(frame)
    await until(lambda: [each for each in imports(target) if is_open(each) and each.next_token == came])
    return stream


# --- whole ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 5, 8, 1000])
async def test_a_sequence_goes_on_where_it_arrives_bit_for_bit(source: Served, target: Served, tokens: int) -> None:
    frames = await frames_of(source, chunk_tokens=tokens)
    layout, chunks = frames[0].layout, transfers.chunks_of(frames)
    assert list(layout.token_ids) == PROMPT and layout.seq_len == len(PROMPT)
    assert layout.model_fingerprint == source.runner.info.fingerprint
    step = min(tokens or len(PROMPT), len(PROMPT))
    assert len(chunks) == 2 * -(-len(PROMPT) // step)
    assert brought(chunks)[-1].trailer == frames[-1].trailer
    answer = await imported(target, header(layout), *brought(chunks))
    assert (answer.handle.seq_len, answer.handle.version, answer.next_token) == (len(PROMPT), 1, len(PROMPT))
    await target.check()
    again = await imported(target, header(layout), *brought(chunks))
    assert again.replayed and again.handle == answer.handle
    assert await row(target, answer.handle) == await transfers.expected_row(target)


async def test_an_eight_bit_cache_travels_with_its_scales_and_not_into_an_exact_one(target: Served) -> None:
    async with moving(kv_dtype="int8") as source, moving(kv_dtype="int8") as other:
        frames = await frames_of(source)
        stream = header(frames[0].layout), *brought(transfers.chunks_of(frames))
        assert stream[-1].trailer == frames[-1].trailer
        await arrives(other, *stream)
        assert (await refused(imported(target, *stream), Reason.LAYOUT_MISMATCH)).metadata["differs"] == "dtype"


async def test_the_source_goes_on_while_it_is_read(source: Served, target: Served) -> None:
    """Decoded, rolled back and fed again, and released in mid-stream: what arrives is what was there at the call."""
    handle = await prefill(source, PROMPT)
    stream = source.transfer.ExportKv(kt.ExportKvRequest(handle=handle, chunk_tokens=1))
    frames = [await stream.read()]
    for token in (1, 2, 3):
        decode = item([token], handle, truncate_to=len(PROMPT) - 4 * token)
        handle = (await source.executor.Decode(pb.DecodeRequest(item=decode))).output.handle
        frames.append(await stream.read())
    await source.release(handle)
    await prefill(source, [7] * 100)
    while (frame := await stream.read()) is not grpc.aio.EOF:
        frames.append(frame)
    await arrives(target, header(frames[0].layout), *brought(transfers.chunks_of(frames)))


async def test_what_was_imported_is_found_by_its_tokens_and_what_is_there_need_not_travel(source, target):
    layout, chunks = await export_of(source)
    await imported(target, header(layout, "first", cache_mode=DEFAULT), *brought(chunks))
    asked = await imported(target, header(layout, "second", cache_mode=DEFAULT))
    assert (asked.next_token, asked.HasField("handle")) == (28, False), "all full blocks"
    _, rest = await export_of(source, first_token=28)
    assert {chunk.first_token for chunk in rest} == {28}
    answer = await imported(target, header(layout, "second", cache_mode=DEFAULT), *brought(rest))
    assert answer.handle.seq_len == len(PROMPT)
    assert await row(target, answer.handle) == await transfers.expected_row(target)
    salted = await imported(target, header(layout, "salted", cache_salt=b"salt", cache_mode=DEFAULT))
    bypassing = await imported(target, header(layout, "bypassing"))
    assert (salted.next_token, bypassing.next_token) == (0, 0)
    prefilled = await target.prefill([*PROMPT, 1])
    assert prefilled.output.cached_tokens == 28


async def test_chunks_may_begin_before_what_is_missing(source: Served, target: Served) -> None:
    layout, chunks = await export_of(source)
    await imported(target, header(layout, "first", cache_mode=DEFAULT), *brought(chunks))
    for request_id, first in (("whole", 0), ("in part", 24)):
        some = [chunk for chunk in chunks if chunk.first_token >= first]
        await arrives(target, header(layout, request_id, cache_mode=DEFAULT), *brought(some))


async def test_reserved_blocks_and_a_lease_belong_to_what_is_imported(source: Served, target: Served) -> None:
    layout, chunks = await export_of(source)
    lease = (await target.acquire()).lease_id
    free = target.runner.kv.free_blocks
    answer = await imported(target, header(layout, reserve_tokens=16, lease_id=lease), *brought(chunks))
    assert free - answer.pressure.free_blocks == 12
    await target.revoke(lease)
    await nothing_left(target)


# --- broken and taken up again ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", range(9))
async def test_a_later_stream_goes_on_behind_what_came(source: Served, target: Served, kept: int) -> None:
    """Ended after any number of chunks, by its end or by being cancelled."""
    layout, chunks = await export_of(source)
    whole = min(8 * (kept // 2), len(PROMPT))
    if kept % 2:
        short = await imported(target, header(layout), *brought(chunks[:kept])[:-1])
        assert (short.next_token, short.HasField("handle")) == (whole, False)
    else:
        stream = await begun(target, header(layout), *brought(chunks[:kept])[:-1], came=whole)
        stream.cancel()
        await until(lambda: not any(each.busy for each in imports(target)))
    assert (await imported(target, header(layout))).next_token == whole
    rest = [chunk for chunk in chunks if chunk.first_token >= whole]
    await arrives(target, header(layout), *brought(rest))


async def given_up(target: Served, name: str = "") -> kt.ImportKvResponse:
    request_id = transfers.Names.present + name
    return await imported(target, kt.ImportKvRequest(header=kt.ImportKvHeader(request_id=request_id, abandon=True)))


@pytest.mark.parametrize("streaming", [False, True])
async def test_an_import_that_is_given_up_frees_its_blocks_at_once(source, target, streaming):
    layout, chunks = await export_of(source)
    lease = (await target.acquire()).lease_id
    stream = await begun(target, header(layout, lease_id=lease), *brought(chunks[:3])[:-1])
    blocks = (await target.status()).blocks
    assert blocks.unfinished_imports == 1 and blocks.importing == blocks.used == -(-len(PROMPT) // 4)
    [caller] = (await target.control.GetActivity(executor_control_pb2.GetActivityRequest())).callers
    assert (caller.sequences, caller.blocks) == (1, blocks.used)
    if not streaming:
        stream.cancel()
        await until(lambda: not imports(target)[0].busy)
    free = target.runner.kv.total_blocks
    assert (await given_up(target)).pressure.free_blocks == free
    blocks = (await target.status()).blocks
    assert (blocks.unfinished_imports, blocks.importing, blocks.used) == (0, 0, 0)
    if streaming:
        with suppress(asyncio.InvalidStateError):
            await stream.done_writing()
        await refused(stream, Reason.CANCELLED)
    assert not (await given_up(target)).HasField("handle")  # there is none
    await target.revoke(lease)
    await nothing_left(target)
    done = await imported(target, header(layout), *brought(chunks))
    assert (await given_up(target)).handle == done.handle and await row(target, done.handle)


async def test_what_names_no_import_is_not_given_up(target: Served) -> None:
    no_name = imported(target, kt.ImportKvRequest(header=kt.ImportKvHeader(abandon=True)))
    await refused(no_name, Reason.INVALID_REQUEST)
    await target.prefill(PROMPT, request_id=transfers.Names.present)
    assert not (await given_up(target)).HasField("handle")


@contextmanager
def metered(served: Served, direction: Direction) -> Iterator[list[int]]:
    """Bytes, transfers that moved something, and failures, of what is done here."""
    meter = served.server.state.transfers[direction]

    def numbers() -> list[int]:
        return [meter.bytes, sum(meter.seconds.counts), meter.failures]

    before, found = numbers(), list[int]()
    yield found
    found += [after - each for after, each in zip(numbers(), before, strict=True)]


async def test_transfers_are_counted(source: Served, target: Served) -> None:
    async def counts(served: Served) -> tuple[int, int]:
        counters = (await served.status()).counters
        return counters.sequences_exported, counters.sequences_imported

    out, arrived = await counts(source), await counts(target)
    layout, chunks = await export_of(source)
    with metered(source, Direction.EXPORT) as failed, metered(source, Direction.IMPORT) as unused:
        await export_of(source)
    assert (failed, unused) == ([len(PROMPT) * 512, 1, 0], [0, 0, 0])
    with metered(target, Direction.IMPORT) as found:
        await imported(target, header(layout), *brought(chunks))
        await imported(target, header(layout), *brought(chunks))  # recorded: nothing moves
    assert found == [len(PROMPT) * 512, 1, 0]
    with metered(target, Direction.IMPORT) as found:
        stream = await begun(target, header(layout, "breaks"), *brought(chunks[:2])[:-1])
        assert target.server.state.transfers[Direction.IMPORT].now == 1
        stream.cancel()
        await until(lambda: not target.server.state.transfers[Direction.IMPORT].now)
        await given_up(target, "breaks")
    assert found == [8 * 512, 1, 1]
    numbers = registry_of(Metrics(target.server.state, target.server.calls, target.server.steps))
    meter = target.server.state.transfers[Direction.IMPORT]
    for name, value in (("bytes_total", meter.bytes), ("failures_total", meter.failures), ("seconds_count", 2)):
        assert numbers.get_sample_value(f"ferrum_transfer_{name}", {"direction": "import"}) >= value > 0
    assert numbers.get_sample_value("ferrum_transfers", {"direction": "park"}) == 0
    assert await counts(source) == (out[0] + 2, out[1]) and await counts(target) == (arrived[0], arrived[1] + 1)


@pytest.mark.parametrize("ending", ["reset", "lease", "idle", "idle, with a lease"])
@pytest.mark.parametrize("streaming", [False, True])
async def test_an_import_ends_with_its_lease_its_time_and_a_reset(source, target, ending, streaming):
    layout, chunks = await export_of(source)
    lease = (await target.acquire()).lease_id
    first = header(layout, lease_id=lease) if "lease" in ending else header(layout)
    stream = await begun(target, first, *brought(chunks[:3])[:-1])
    if not streaming:
        stream.cancel()
        await until(lambda: not imports(target)[0].busy)
    if ending == "reset":
        assert (await target.reset()).released_sequences == 0
    elif ending == "lease":
        await target.revoke(lease)
    elif streaming and "lease" in ending:  # that keeps it as long as its stream goes on
        assert not swept(target)
        stream.cancel()
        await until(lambda: not imports(target)[0].busy)
        await until(lambda: swept(target))
    else:
        await until(lambda: swept(target))
    if streaming and "with" not in ending:
        await stream.done_writing()  # a write may meet the answer to it, and fail of itself
        reason = Reason.LEASE_EXPIRED if ending == "idle" else Reason.HANDLE_RELEASED
        await refused(stream, reason)
    if ending != "lease":
        await target.revoke(lease)
    await nothing_left(target)
    again = await imported(target, header(layout), *brought(chunks))
    assert again.handle.seq_len == len(PROMPT) and not again.replayed


@pytest.mark.parametrize("how", ["cancelled", "reset", "idle"])
async def test_an_export_that_ends_early_lets_go_of_its_copy(how: str) -> None:
    gate = Gate("export")
    async with moving(stage=gate) as served:
        handle = await transfers.fed(served)
        held = served.server.state.unnamed
        call = await gate.hold(exported(served, handle))
        assert len(held) == 1
        reset = None
        if how == "cancelled":
            call.cancel()
        elif how == "reset":
            reset = asyncio.ensure_future(served.reset())
        else:
            await until(lambda: swept(served))
        await until(lambda: not held)
        gate.open()
        if how == "cancelled":
            await asyncio.wait([call])
        else:
            reason = Reason.HANDLE_RELEASED if reset else Reason.LEASE_EXPIRED
            await refused(call, reason)
        if reset is not None:
            assert (await reset).released_sequences == 1
        await empty(served)


# --- refused ----------------------------------------------------------------------------------------------------------

FIELDS: dict[str, Callable[[kt.KvLayout], object]] = {
    "model_fingerprint": lambda layout: setattr(layout, "model_fingerprint", bytes(32)),
    "layers": lambda layout: setattr(layout, "layers", 3),
    "kv_heads": lambda layout: setattr(layout, "kv_heads", 8),
    "head_dim": lambda layout: setattr(layout, "head_dim", 4),
    "dtype": lambda layout: setattr(layout, "dtype", types_pb2.D_TYPE_BF16),
    "adapter": lambda layout: setattr(layout, "adapter", "somebody's"),
}


async def test_another_layout_is_refused_by_name_before_anything_moves(source: Served, target: Served) -> None:
    for field, change in FIELDS.items():
        layout, _ = await export_of(source)
        change(layout)
        error = await refused(imported(target, header(layout, field)), Reason.LAYOUT_MISMATCH)
        assert error.metadata["differs"] == field and field in error.metadata
        assert not target.server.state.unnamed


def _tokens(layout: kt.KvLayout, tokens: list[int]) -> None:
    layout.token_ids[:] = tokens
    layout.seq_len = len(tokens)


MALFORMED: dict[str, Callable[[kt.ImportKvRequest], object]] = {
    "no tokens": lambda first: _tokens(first.header.layout, []),
    "another length": lambda first: setattr(first.header.layout, "seq_len", 3),
    "a token at the vocabulary": lambda first: _tokens(first.header.layout, [256]),
    "a token of 32 bits": lambda first: _tokens(first.header.layout, [2**32 - 1]),
    "beyond the context": lambda first: _tokens(first.header.layout, [1] * 129),
    "no request id": lambda first: setattr(first.header, "request_id", ""),
    "a long request id": lambda first: setattr(first.header, "request_id", "x" * 129),
    "a fork": lambda first: setattr(first.header.create, "fork", True),
    "no header": lambda first: first.trailer.SetInParent(),
}


async def test_a_malformed_header_is_refused(source: Served, target: Served) -> None:
    for what, change in MALFORMED.items():
        first = header((await export_of(source))[0], what)
        change(first)
        assert (await refused(imported(target, first), Reason.INVALID_REQUEST)).field, what
        assert not target.server.state.unnamed


async def test_chunks_out_of_order_are_refused_and_what_came_before_stays(source: Served, target: Served) -> None:
    layout, chunks = await export_of(source)
    wrong = (
        [chunks[1]],
        [chunks[2]],
        [*chunks[:2], *chunks[4:6]],
        [*chunks[:2], chunks[3]],
        [*chunks[:3], chunks[5]],
        [*chunks[:2], *chunks[:2]],
    )
    came = 0
    for some in wrong:
        frames_ = [header(layout), *brought(some)]
        error = await refused(imported(target, *frames_), Reason.INVALID_REQUEST)
        came = max(came, 8 * (len(some) > 2))
        assert error.number("next_token") == came
        assert len(imports(target)) == (came > 0)
    error = await refused(imported(target, header(layout), *brought([])), Reason.INVALID_REQUEST)
    assert error.number("next_token") == came
    await refused(imported(target, header(layout), header(layout)), Reason.INVALID_REQUEST)
    await arrives(target, header(layout), *brought(chunks))


def _flip(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8 % len(data)] ^= 1 << bit % 8
    return bytes(changed)


FLIPS: dict[str, Callable[[kt.KvChunk], object]] = {
    "layer": lambda chunk: setattr(chunk, "layer", chunk.layer ^ 1),
    "first_token": lambda chunk: setattr(chunk, "first_token", chunk.first_token ^ 4),
    "crc32c": lambda chunk: setattr(chunk, "crc32c", chunk.crc32c ^ 1 << 17),
    "keys": lambda chunk: setattr(chunk.keys, "data", _flip(chunk.keys.data, 1001)),
    "values": lambda chunk: setattr(chunk.values, "data", _flip(chunk.values.data, 13)),
    "dtype": lambda chunk: setattr(chunk.keys, "dtype", types_pb2.D_TYPE_I32),
    "shape": lambda chunk: chunk.values.shape.__setitem__(0, chunk.values.shape[0] ^ 1),
    "no shape": lambda chunk: chunk.keys.ClearField("shape"),
}


@pytest.mark.parametrize("where", FLIPS)
async def test_a_flipped_bit_is_found_and_costs_what_follows(source: Served, target: Served, where: str) -> None:
    layout, chunks = await export_of(source)
    right = copied(chunks[3])
    FLIPS[where](chunks[3])
    reason = Reason.KV_CORRUPT if where in {"crc32c", "keys", "values"} else Reason.INVALID_REQUEST
    await refused(imported(target, header(layout), *brought(chunks)), reason)
    assert (await imported(target, header(layout))).next_token == 8
    chunks[3] = right
    await arrives(target, header(layout), *brought(chunks[2:]))


async def test_a_wrong_digest_costs_the_stream_and_no_other(source: Served, target: Served) -> None:
    """A chunk with a checksum of its own that another stands for: only the digest knows."""
    layout, chunks = await export_of(source)
    await imported(target, header(layout), *brought(chunks[:2])[:-1])
    trailer = brought(chunks[2:])[-1]
    wrong = copied(chunks[5])
    wrong.keys.data = _flip(wrong.keys.data, 7)
    bad = [*brought([*chunks[2:5], transfers.sealed(wrong), *chunks[6:]])[:-1], trailer]
    assert (await refused(imported(target, header(layout), *bad), Reason.KV_CORRUPT)).number("next_token") == 8
    assert (await imported(target, header(layout))).next_token == 8
    await arrives(target, header(layout), *brought(chunks[2:]))


NAN, INFINITY = b"\x00\x00\xc0\x7f", b"\x00\x00\x80\xff"  # float32, the second one below 0


@pytest.mark.parametrize(("part", "value"), [("keys", NAN), ("values", INFINITY), ("key_scales", NAN)])
async def test_values_that_are_not_finite_are_refused_and_nothing_is_kept(source, target, part, value):
    """In the last chunk, after all others were written, with all checksums right. The same again is refused again, and
    the name is free for another cache of the tokens."""
    async with AsyncExitStack() as stack:
        if part == "key_scales":
            source, target = [await stack.enter_async_context(moving(kv_dtype="int8")) for _ in range(2)]
        layout, chunks = await export_of(source)
        bad = copied(chunks[-1])
        data = getattr(bad, part).data
        getattr(bad, part).data = data[: len(data) // 2 // 4 * 4] + value + data[len(data) // 2 // 4 * 4 + 4 :]
        for _ in range(2):
            stream = header(layout), *brought([*chunks[:-1], transfers.sealed(bad)])
            error = await refused(imported(target, *stream), Reason.KV_CORRUPT)
            assert error.metadata == {"not_finite": part, "layer": "1", "first_token": "24"}
            await nothing_left(target)
        answer = await imported(target, header(layout), *brought(chunks))
        assert not answer.replayed
        assert await row(target, answer.handle) == await transfers.expected_row(target)


async def test_a_trusted_import_takes_nothing_that_its_name_alone_may_find() -> None:
    tokens = "one plain", "one high trusted", "other other"
    async with serve_identity(kv_blocks=64, tokens=tokens, caller_share=1.0) as served:
        plain, other = served.by("plain"), served.by("other")
        layout, chunks = await export_of(plain)
        for token, found in (("plain", False), ("high", True)):
            begin = header(layout, f"by {token}", cache_mode=DEFAULT)
            handle = (await imported(served.by(token), begin, *brought(chunks))).handle
            await plain.release(handle)
            answer = await other.prefill([*PROMPT, 9], create=READ_ONLY)
            assert bool(answer.output.cached_tokens) is found
            await other.release(answer.output.handle)
        await served.check()


async def test_a_request_id_names_one_import_and_one_stream_at_a_time(source: Served, target: Served) -> None:
    layout, chunks = await export_of(source)
    stream = target.transfer.ImportKv()
    await stream.write(header(layout))
    await until(lambda: bool(imports(target)))
    await refused(imported(target, header(layout)), Reason.SEQUENCE_BUSY)
    other = copied(layout)
    other.token_ids[3] += 1
    for frame in (header(other), header(layout, cache_mode=DEFAULT)):
        await refused(imported(target, frame), Reason.REQUEST_ID_REUSED)
    await refused(target.prefill(PROMPT, request_id=transfers.Names.present), Reason.REQUEST_ID_REUSED)
    for frame in brought(chunks):
        await stream.write(frame)
    await stream.done_writing()
    assert (await stream).handle.seq_len == len(PROMPT)
    await refused(imported(target, header(other)), Reason.REQUEST_ID_REUSED)


async def test_an_export_may_begin_behind_the_last_token_and_no_later(source: Served) -> None:
    handle = await prefill(source, PROMPT)
    await refused(exported(source, handle, first_token=32), Reason.INVALID_REQUEST)
    [layout, trailer] = await exported(source, handle, first_token=31)
    assert layout.layout.seq_len == 31 and trailer.HasField("trailer")


# --- peers that go, or do nothing -------------------------------------------------------------------------------------


def waiting_peers(served: Served) -> dict[Any, float]:
    """Tasks that wait for their peers, and since when."""
    return served.server.state.peers.since


async def silent(served: Served) -> None:
    """A peer has done nothing for a while, and then for as long as it may."""
    waits = waiting_peers(served)
    await until(lambda: bool(waits) and min(waits.values()) < time.monotonic() - 0.3)
    [task] = waits
    waits[task] = -1e9
    await until(lambda: task not in waits)


async def test_time_in_which_the_process_was_stopped_is_not_the_peers() -> None:
    waits, answered = peers.Peers(), asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(waits.owed("nothing came", answered))
    await asyncio.sleep(0)
    now = time.monotonic() + peers.PEER_S + 1
    waits.extend(5.0)
    waits.sweep(now)
    await asyncio.sleep(0)
    assert not task.done()
    for _ in range(2):
        waits.sweep(now + 5.0)
    with pytest.raises(QueueFull, match="nothing came for 30 s"):
        await task
    task = asyncio.ensure_future(waits.owed("nothing came", asyncio.Event().wait()))
    await asyncio.sleep(0)
    waits.sweep(now + 5.0)
    task.cancel()  # by its peer, at the same moment
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not waits.since and not waits._late


@pytest.mark.parametrize("sent", [0, 1, 2, 4])
async def test_an_import_whose_next_frame_does_not_come_gives_its_slot_back(sent: int) -> None:
    async with moving(max_transfers=1) as served:
        layout, chunks = await export_of(served)
        stream: Any = served.transfer.ImportKv()
        for frame in [header(layout), *brought(chunks)][:sent]:
            await stream.write(frame)
        kept = 8 * (sent > 2)
        if sent:
            await until(lambda: [each for each in imports(served) if is_open(each) and each.next_token == kept])
        await silent(served)
        error = await refused(stream, Reason.QUEUE_FULL)
        assert error.retry_after_s and error.number("peer_s") == 30
        assert len(served.server.state.unnamed) == (kept > 0), "what has come is kept"
        assert (await imported(served, header(layout))).next_token == kept
        rest = [chunk for chunk in chunks if chunk.first_token >= kept]
        await arrives(served, header(layout), *brought(rest))
        await empty(served)


async def test_an_export_that_is_not_read_gives_its_slot_back() -> None:
    async with moving(**LARGE) as served:
        handle = await prefill(served, [1] * 2000)
        unread = served.transfer.ExportKv(kt.ExportKvRequest(handle=handle))
        await silent(served)
        await until(lambda: not served.server.state.unnamed)
        frames = await exported(served, handle)
        assert frames[-1].HasField("trailer"), "another one has its slot"

        async def read() -> list[kt.ExportKvResponse]:
            return [frame async for frame in unread]

        held = served.server.state.unread
        assert held.bytes > 0, "what was written, until it is read"
        await refused(read(), Reason.QUEUE_FULL)
        await until(lambda: not held.bytes)
        await empty(served)


async def test_exports_that_nobody_reads_are_bounded_also_when_they_hold_no_slot(caplog):
    async with moving(**LARGE) as served:
        handle = await prefill(served, [1] * 2000)
        held = served.server.state.unread
        unread: list[Any] = []
        with mock.patch.object(held, "_max_per_connection", 3 * 2 * CHUNK_BYTES):
            for _ in range(3):
                unread.append(served.transfer.ExportKv(kt.ExportKvRequest(handle=handle)))
                await silent(served)
            assert (await refused(exported(served, handle), Reason.QUEUE_FULL)).number("unread_bytes") == held.bytes
            caplog.clear()
            for each in unread:
                each.cancel()
            await until(lambda: not held.bytes and not served.server.calls.streams)
            await exported(served, handle)
            assert not caplog.records, "gRPC logs no stack traces"
        await empty(served)


async def test_a_stream_that_is_cancelled_while_blocks_are_taken_leaves_nothing() -> None:
    gate = Gate("import")
    async with moving(stage=gate) as served:
        layout, _ = await export_of(served)
        call = await gate.hold(imported(served, header(layout)))
        assert len(served.server.state.unnamed) == 1
        call.cancel()
        await until(lambda: imports(served)[0].record.origin is None)
        gate.open()
        await nothing_left(served)


REFUSED_EARLY = {
    "another layout": Reason.LAYOUT_MISMATCH,
    "no header": Reason.INVALID_REQUEST,
    "a chunk that is damaged": Reason.KV_CORRUPT,
    "no slot": Reason.QUEUE_FULL,
    "no message": Reason.INVALID_REQUEST,
    "recorded": None,
}


@pytest.mark.parametrize("what", REFUSED_EARLY)
async def test_a_stream_that_is_answered_while_it_is_sent_has_the_whole_answer(what: str) -> None:
    """Of grpc.aio, whose writes fail when a call ends, and then make of every status an INTERNAL."""
    async with moving(**{**LARGE, "block_size": 16}) as served:
        handle = await prefill(served, [1] * 1000)
        frames = await exported(served, handle)
        first, sent = header(frames[0].layout), brought(transfers.chunks_of(frames))
        if what == "recorded":
            await imported(served, first, *sent)
        elif what == "another layout":
            first.header.layout.layers = 3
        elif what == "no header":
            first = sent[0]
        elif what == "a chunk that is damaged":
            sent[0].chunk.crc32c ^= 1
        elif what == "no slot":
            other = served.transfer.ImportKv()
            await until(lambda: bool(waiting_peers(served)))
        body = [each.SerializeToString() for each in (first, *sent)]
        if what == "no message":
            body[0] = b"\xff"
        raw: Any = served.channel.stream_unary(
            "/ferrum_rpc.executor.v1.KvTransfer/ImportKv", response_deserializer=kt.ImportKvResponse.FromString
        )

        async def each() -> AsyncIterator[bytes]:
            for frame in body:
                yield frame

        for _ in range(10):
            reason = REFUSED_EARLY[what]
            if reason is None:
                assert (await raw(each())).replayed
            else:
                await refused(raw(each()), reason)
        if what == "no slot":
            other.cancel()


async def test_what_goes_on_behind_a_refusal_is_not_read_for_ever() -> None:
    async with moving() as served:
        stream = served.transfer.ImportKv()
        with mock.patch.object(peers, "READ_ON_BYTES", 1 << 10):
            await stream.write(kt.ImportKvRequest(chunk=kt.KvChunk(keys=types_pb2.Tensor(data=bytes(1 << 10)))))
            assert await stream.initial_metadata() is not None  # the answer comes
            with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
                for _ in range(3):
                    await stream.write(kt.ImportKvRequest(chunk=kt.KvChunk(keys=types_pb2.Tensor(data=bytes(1 << 10)))))
        assert await stream.code() in {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL}
        waiting = served.transfer.ImportKv()
        await waiting.write(kt.ImportKvRequest(trailer=kt.KvTrailer()))
        await refused(waiting, Reason.INVALID_REQUEST)


# --- bounds, ends and failures ----------------------------------------------------------------------------------------


async def test_so_many_transfers_are_under_way_and_no_more() -> None:
    async with moving(max_transfers=1) as served:
        assert (await served.info()).limits.max_transfers == 1
        handle = await prefill(served, PROMPT)
        layout = (await exported(served, handle))[0].layout
        stream = served.transfer.ImportKv()
        await stream.write(header(layout))
        await until(lambda: bool(served.server.state.unnamed))
        for call in (exported(served, handle), imported(served, header(layout, "other"))):
            error = await refused(call, Reason.QUEUE_FULL)
            assert error.retry_after_s and error.number("max_transfers") == 1
        await stream.done_writing()
        await stream
        await exported(served, handle)


async def test_a_sequence_as_long_as_the_context_arrives() -> None:
    """Its header unfolds into more token ids than the largest call."""
    length = 1 << 15
    async with moving(max_context=length, kv_blocks=length // 64, block_size=64, layers=1) as served:
        layout, _ = await export_of(served)
        for tokens, reason in ((length, None), (length + 1, Reason.INVALID_REQUEST)):
            _tokens(layout, [200] * tokens)
            call = imported(served, header(layout, f" of {tokens}"))
            if reason is None:
                assert (await call).next_token == 0 and served.server.state.pressure().free_blocks == 0
            else:
                await refused(call, reason)


async def test_the_copy_and_the_import_count_on_their_callers_blocks() -> None:
    async with moving(max_blocks_per_caller=15) as served:
        handle = await prefill(served, PROMPT)
        await refused(exported(served, handle), Reason.QUOTA_EXCEEDED)
        await served.release(handle)
        handle = await prefill(served, PROMPT[:28])
        layout = (await exported(served, handle))[0].layout
        await imported(served, header(layout))
        await refused(imported(served, header(layout, "more")), Reason.QUOTA_EXCEEDED)
        await empty(served)


async def test_a_drain_waits_for_streams_and_drops_what_has_none() -> None:
    async with moving() as served:
        handle = await prefill(served, PROMPT)
        frames = await exported(served, handle, chunk_tokens=8)
        layout, chunks = frames[0].layout, transfers.chunks_of(frames)
        await imported(served, header(layout, "left"), *brought(chunks[:4])[:-1])
        stream = served.transfer.ImportKv()
        await stream.write(header(layout))
        await until(lambda: len(served.server.state.unnamed) == 2)
        served.server.drain(60)
        await until(lambda: len(served.server.state.unnamed) == 1)
        await refused(imported(served, header(layout, "new")), Reason.DRAINING)
        assert len(await exported(served, handle, chunk_tokens=8)) == len(frames), "what moves out is served"
        for frame in brought(chunks):
            await stream.write(frame)
        await stream.done_writing()
        moved = (await stream).handle
        assert not served.server.draining.done.is_set()
        for each in (handle, moved):
            await served.release(each)
        await served.server.draining.done.wait()


@pytest.mark.parametrize("at", range(1, 7))
async def test_a_failure_at_any_operation_leaves_both_as_they_were(at: int) -> None:
    """Begin, four chunks, commit: the stream is refused, and the next one goes on."""
    points = Failpoints(parse_failpoints(f"import=error@{at};export=error@1"))
    async with moving(failpoints=points) as served:
        handle = await prefill(served, PROMPT)
        await refused(exported(served, handle), Reason.STEP_FAILED)
        await until(lambda: not served.server.state.unnamed)
        frames = await exported(served, handle, chunk_tokens=16)
        layout, chunks = frames[0].layout, transfers.chunks_of(frames)
        first = header(layout)
        await refused(imported(served, first, *brought(chunks)), Reason.STEP_FAILED)
        asked = await imported(served, first)
        assert asked.next_token == {1: 0, 2: 0, 3: 0, 4: 16, 5: 16, 6: 31}[at]
        rest = [chunk for chunk in chunks if chunk.first_token >= asked.next_token]
        answer = await imported(served, first, *brought(rest))
        assert await row(served, answer.handle) == await row(served, handle)
        await empty(served)


async def test_an_engine_that_is_lost_ends_both() -> None:
    for rule in ("export=device_lost", "import=device_lost@2"):
        async with moving(failpoints=Failpoints(parse_failpoints(rule))) as served:
            handle = await prefill(served, PROMPT)
            if rule.startswith("export"):
                call: Any = exported(served, handle)
            else:
                frames = await exported(served, handle)
                call = imported(served, header(frames[0].layout), *brought(transfers.chunks_of(frames)))
            await refused(call, Reason.DEVICE_LOST)
