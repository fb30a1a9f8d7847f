"""Sequences of a model with recurrent layers across the wire: they go on with the bits of one that stayed, whether they
come from another executor, from a file or from a disk; and streams that are not right are refused and leave nothing."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from ferrum_rpc.client import Capability, ExecutorClient, FullLogits, OutputSpec, Positions, Sequence, transfer
from ferrum_rpc.client.client import connection_of
from ferrum_rpc.client.retry import Deadline
from ferrum_rpc.config import ModelSettings
from ferrum_rpc.errors import KvBlocksExhausted, LayoutMismatch, NotSupported, Reason, StepFailed
from ferrum_rpc.executor.v1 import info_pb2, kv_transfer_pb2
from ferrum_rpc.service import kv_stream
from tests.support.checkpoints import RECURRENT_SHAPE, make_checkpoint
from tests.support.nixl import Fabric
from tests.support.serving import Served, serve_identity, serve_model
from tests.support.transfers import Names, brought, chunks_of, exported, header, imported, row, sealed
from tests.support.wiring import prefill, refused, release

kt = kv_transfer_pb2
LAST, ALL = OutputSpec(Positions.LAST, FullLogits()), OutputSpec(Positions.ALL, FullLogits())
PROMPT = np.random.default_rng(3).integers(0, 6, 100).tolist()
DRAFT = [1, 2, 3, 4]
SLOTS = 6
There = tuple[Served, ExecutorClient, Served, ExecutorClient]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelSettings:
    folder = make_checkpoint(tmp_path_factory.mktemp("qwen"), "qwen3_5", **RECURRENT_SHAPE)
    cache: dict[str, Any] = {"block_size": 4, "kv_blocks": 200, "state_slots": SLOTS}
    return ModelSettings(str(folder), device="cpu", dtype="bfloat16", **cache)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(config: ModelSettings, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[There]:
    parked = tmp_path_factory.mktemp("parked")
    async with (
        serve_model(config, park_dir=parked) as one,
        serve_model(config, max_request_bytes=40 << 10) as other,
        ExecutorClient(one.target) as source,
        ExecutorClient(other.target) as target,
    ):
        yield one, source, other, target


@pytest_asyncio.fixture(loop_scope="module")
async def there(two: There, request: pytest.FixtureRequest) -> AsyncIterator[There]:
    """Two executors and a client of each; nothing of a test is left at either."""
    Names.present = f"{request.node.name} "
    yield two
    for served in (two[0], two[2]):
        await served.reset()
        await served.check()
        assert served.runner.cache_state().free_slots == SLOTS
        assert not any(each.before_change for each in served.runner.states.store.slots), "states are held for nobody"
        assert not served.server.state.unnamed


async def fed(client: ExecutorClient) -> Sequence:
    """A prompt, and a step that may be taken back."""
    sequence = client.sequence()
    await sequence.prefill(PROMPT)
    await sequence.verify(DRAFT, ALL)
    return sequence


async def goes_on(sequence: Sequence) -> bytes:
    """The rows of what follows, within the last step and behind a truncation; nothing is computed again."""
    rows = []
    for length, tokens in ((len(PROMPT) + 4, [5, 0]), (len(PROMPT) + 4, [1]), (len(PROMPT) + 4, [2, 3])):
        await sequence.truncate(length)
        answer = await sequence.verify(tokens, ALL)
        assert answer.recomputed_tokens == 0
        rows.append(answer.logits.tobytes())
    return b"".join(rows)


async def test_a_sequence_that_left_goes_on_with_the_bits_of_one_that_stayed(there: There, tmp_path: Path) -> None:
    _, source, _, target = there
    assert {Capability.KV_TRANSFER, Capability.PARK} <= (await source.info()).capabilities
    stays, parks, leaves = [await fed(source) for _ in range(3)]
    for each in (stays, parks, leaves):
        await each.truncate(len(PROMPT) + 2)
        await each.verify([0, 5], ALL)
    await leaves.export_to(tmp_path / "file")
    moved, filed = target.sequence(), target.sequence()
    await leaves.move_to(moved)
    await filed.import_from(tmp_path / "file")
    free = (await source.status()).pressure.free_slots
    await parks.park()
    assert (await source.status()).pressure.free_slots == free + 1
    wanted = await goes_on(stays)
    for each in (moved, filed, parks):
        assert await goes_on(each) == wanted
    for each in (stays, moved, filed, parks):
        await each.truncate(50)
    rows = [(await each.decode(4, LAST)).logits for each in (stays, moved, filed, parks)]
    for each in rows[1:]:
        np.testing.assert_allclose(each, rows[0], atol=0.1)
    for each in (stays, moved, filed, parks):
        await each.release()


async def test_without_a_slot_nothing_comes_and_a_parked_sequence_stays(there: There, tmp_path: Path) -> None:
    _, source, _, target = there
    parks, leaves = await fed(source), await fed(source)
    wanted = await goes_on(leaves)
    await leaves.truncate(len(PROMPT) + 4)
    await parks.park()
    for client, sequence in ((source, parks), (target, leaves)):
        held = [client.sequence() for _ in range((await client.status()).pressure.free_slots)]
        for each in held:
            await each.prefill([1, 2, 3])
        with pytest.raises(KvBlocksExhausted) as refused:
            await (sequence.decode(1) if client is source else sequence.move_to(client.sequence()))
        assert (refused.value.number("needed_slots"), refused.value.number("free_slots")) == (1, 0)
        await client.release(held)
    assert await goes_on(parks) == wanted
    await leaves.move_to(moved := target.sequence())
    await moved.release()
    await parks.release()


async def test_states_move_in_pieces_and_those_of_an_export_are_of_its_beginning(
    there: There, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _, other, _ = there
    piece, sizes = 8 << 10, dict[str, list[int]]()
    monkeypatch.setattr(kv_stream, "READ_BYTES", piece)
    read, write = one.runner.read_states, other.runner.write_states

    def reading(number: int, rows: Any) -> Any:
        found = read(number, rows)
        sizes.setdefault("read", []).append(sum(map(len, found)))
        return found

    def writing(sequence: int, moved: Any, pieces: Any) -> None:
        sizes.setdefault("written", []).append(sum(len(data) for _, data in pieces))
        write(sequence, moved, pieces)

    monkeypatch.setattr(one.runner, "read_states", reading)
    monkeypatch.setattr(other.runner, "write_states", writing)
    handle = await prefill(one, PROMPT)
    export = aiter(one.transfer.ExportKv(kt.ExportKvRequest(handle=handle, chunk_tokens=10)))
    frames = [await anext(export)]
    wanted = await row(one, handle)  # a step behind the beginning, before all was read or after
    frames += [frame async for frame in export]
    answer = await imported(other, header(frames[0].layout), *brought(chunks_of(frames)))
    assert await row(other, answer.handle) == wanted
    for each in ("read", "written"):
        assert sum(sizes[each]) > 8 * piece and max(sizes[each]) < 2 * piece, each
    await release(other, answer.handle)


async def test_a_piece_that_fails_ends_a_park_an_export_and_an_import_and_the_next_one_is_whole(
    there: There, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, source, other, target = there
    stays, parks, leaves = [await fed(source) for _ in range(3)]

    def fails(*_: Any) -> None:
        raise StepFailed("broken")

    with monkeypatch.context() as broken:
        broken.setattr(one.runner, "read_states", fails)
        with pytest.raises(StepFailed):
            await parks.park()
        with pytest.raises(StepFailed):
            await leaves.export_to(tmp_path / "file")
    with monkeypatch.context() as broken:
        broken.setattr(other.runner, "write_states", fails)
        with pytest.raises(StepFailed):
            await leaves.move_to(target.sequence())
    await parks.park()
    await leaves.move_to(moved := target.sequence())
    wanted = await goes_on(stays)
    for each in (parks, moved):
        assert await goes_on(each) == wanted
    for each in (stays, parks, moved):
        await each.release()


@pytest.mark.parametrize(("operation", "nth"), [("write_kv", 5), ("write_states", 2), ("commit_import", 1)])
async def test_an_import_that_the_engine_fails_gives_back_its_slot_and_the_same_call_begins_anew(
    there: There, monkeypatch: pytest.MonkeyPatch, operation: str, nth: int
) -> None:
    _, source, other, target = there
    stays, leaves, moved = await fed(source), await fed(source), target.sequence()
    await other.check()  # behind what the test before has released
    before, run, calls = other.runner.cache_state(), getattr(other.runner, operation), itertools.count(1)

    def fails(*arguments: Any) -> Any:
        if next(calls) == nth:
            raise StepFailed("broken")
        return run(*arguments)

    async def few(*_: Any) -> int:
        return 10

    with monkeypatch.context() as broken:
        broken.setattr(kv_stream, "READ_BYTES", 8 << 10)
        broken.setattr(transfer, "chunk_tokens", few)
        broken.setattr(other.runner, operation, fails)
        with pytest.raises(StepFailed):
            await leaves.move_to(moved)
    await other.check()
    assert other.runner.cache_state() == before and not other.server.state.unnamed
    await leaves.move_to(moved)
    assert await goes_on(moved) == await goes_on(stays)
    for each in (stays, moved):
        await each.release()


async def test_another_kind_of_cache_and_another_transport_are_refused(there: There, tmp_path: Path) -> None:
    _, source, _, target = there
    sequence = await fed(source)
    async with serve_identity() as other, ExecutorClient(other.target) as client:
        with pytest.raises(LayoutMismatch) as refused:
            await sequence.move_to(client.sequence())
        assert {"tensors", "layers"} <= set(refused.value.metadata["differs"].split(","))
        plain = client.sequence()
        await plain.prefill(PROMPT)
        with pytest.raises(LayoutMismatch) as refused:
            await plain.move_to(target.sequence())
        assert {"tensors", "layers"} <= set(refused.value.metadata["differs"].split(","))
    with pytest.raises(NotSupported):
        await sequence.move_to(target.sequence(), transport="nixl")
    await sequence.release()


async def test_nixl_is_not_offered_and_refused(config: ModelSettings) -> None:
    async with serve_model(config, nixl_agent=Fabric().agent) as served:
        assert info_pb2.CAPABILITY_KV_TRANSPORT_NIXL not in (await served.info()).capabilities
        handle = await prefill(served, PROMPT)
        export = served.transfer.ExportKv(kt.ExportKvRequest(handle=handle, transport=kt.KV_TRANSPORT_NIXL))
        await refused(export.read(), Reason.NOT_SUPPORTED)
        layout, chunks = (await exported(served, handle))[0].layout, chunks_of(await exported(served, handle))
        chunks[0].remote.size = 1
        error = await refused(imported(served, header(layout), *brought(chunks)), Reason.INVALID_REQUEST)
        assert error.field == "chunk.remote"


async def test_a_move_asks_for_chunks_that_the_importer_takes(there: There) -> None:
    layout, _, _ = await frames_of(there[0])
    context = connection_of(there[3]).context
    assert await transfer.chunk_tokens(context, layout, Deadline(None)) == (36 << 10) // (2 * 64 * 2)


# --- streams on the raw stubs -----------------------------------------------------------------------------------------


async def frames_of(served: Served) -> tuple[kt.KvLayout, list[kt.KvChunk], bytes]:
    """An export of `PROMPT`, and the row that follows it."""
    handle = await prefill(served, PROMPT)
    frames = await exported(served, handle, chunk_tokens=40)
    wanted = await row(served, handle)
    return frames[0].layout, chunks_of(frames), wanted


async def test_an_export_says_which_tensors_it_has(there: There) -> None:
    layout, chunks, _ = await frames_of(there[0])
    assert (layout.layers, layout.kv_heads, layout.head_dim, layout.dtype) == (0, 0, 0, 0)
    images = [
        f"{image}.{each}" for image in ("slot", "checkpoint") for each in ("lengths", "states", "channels", "gates")
    ]
    assert [(each.name, each.layers) for each in layout.tensors] == [
        ("keys", 2),
        ("values", 2),
        *((name, 0) for name in images),
    ]
    assert [[each.tensor for each in chunk.parts] for chunk in chunks[:6]] == [["keys", "values"]] * 6
    came = [chunk.parts[0].tensor for chunk in chunks[6:]]
    assert list(dict.fromkeys(came)) == images and all(each.parts[0].data.shape[0] for each in chunks)
    only = await exported(there[0], await prefill(there[0], PROMPT), layout_only=True)
    assert [each.WhichOneof("frame") for each in only] == ["layout"]


def without(name: str) -> Callable[[list[kt.KvChunk]], None]:
    def change(chunks: list[kt.KvChunk]) -> None:
        chunks[:] = [each for each in chunks if each.parts[0].tensor != name]

    return change


def changed(name: str, change: Callable[[kt.KvChunk], object], *, seal: bool = True) -> Any:
    """The first chunk that has a part of this name."""

    def changed(chunks: list[kt.KvChunk]) -> None:
        chunk = next(each for each in chunks if name in {part.tensor for part in each.parts})
        change(chunk)
        if seal:
            sealed(chunk)

    return changed


def data(chunk: kt.KvChunk, content: bytes) -> None:
    part = chunk.parts[0].data
    part.data = content + part.data[len(content) :]


def lengths(*numbers: int) -> Callable[[kt.KvChunk], None]:
    return lambda chunk: data(chunk, np.array(numbers, "<u4").tobytes())


WRONG: dict[str, tuple[Any, Reason]] = {
    "no states": (without("slot.states"), Reason.INVALID_REQUEST),
    "no gates of the checkpoint": (without("checkpoint.gates"), Reason.INVALID_REQUEST),
    "no values": (changed("values", lambda chunk: chunk.parts.pop()), Reason.INVALID_REQUEST),
    "parts in another order": (changed("keys", lambda chunk: chunk.parts.reverse()), Reason.INVALID_REQUEST),
    "an unknown tensor": (changed("slot.states", lambda c: setattr(c.parts[0], "tensor", "x")), Reason.INVALID_REQUEST),
    "rows twice": (lambda chunks: chunks.insert(-1, chunks[-1]), Reason.INVALID_REQUEST),
    "rows behind the last": (lambda chunks: chunks.append(chunks[-1]), Reason.INVALID_REQUEST),
    "tokens behind states": (lambda chunks: chunks.append(chunks[0]), Reason.INVALID_REQUEST),
    "states before tokens": (lambda chunks: chunks.insert(0, chunks.pop()), Reason.INVALID_REQUEST),
    "states within tokens": (lambda chunks: chunks.insert(1, chunks.pop(6)), Reason.INVALID_REQUEST),
    "longer than the sequence": (changed("slot.lengths", lengths(101, 101)), Reason.INVALID_REQUEST),
    "not a number": (changed("slot.states", lambda c: data(c, b"\xff" * 4)), Reason.KV_CORRUPT),
    "an infinity": (changed("checkpoint.gates", lambda c: data(c, b"\0\0\x80\x7f")), Reason.KV_CORRUPT),
    "lengths of another checksum": (changed("slot.lengths", lengths(101, 101), seal=False), Reason.KV_CORRUPT),
    "another checksum": (changed("slot.gates", lambda c: data(c, b"\1"), seal=False), Reason.KV_CORRUPT),
}


@pytest.mark.parametrize("case", WRONG)
async def test_a_stream_that_is_not_right_is_refused_and_another_one_goes_on(there: There, case: str) -> None:
    """What else may be wrong with rows: tests/unit/test_state_stream.py."""
    layout, chunks, wanted = await frames_of(there[0])
    change, reason = WRONG[case]
    wrong = [kt.KvChunk.FromString(each.SerializeToString()) for each in chunks]
    change(wrong)
    target = there[2]
    error = await refused(imported(target, header(layout), *brought(wrong)), reason)
    assert (error.field or "").startswith("chunk.slot.states" if case == "not a number" else ("chunk", "trailer"))
    answer = await imported(target, header(layout), *brought(chunks))
    assert not answer.replayed and await row(target, answer.handle) == wanted
    await release(target, answer.handle)


async def test_a_wrong_digest_and_a_stream_that_breaks_leave_the_states_to_the_next_one(there: There) -> None:
    layout, chunks, wanted = await frames_of(there[0])
    target, frames = there[2], brought(chunks)
    digest = kt.ImportKvRequest(trailer=kt.KvTrailer(sha256=bytes(32)))
    await refused(imported(target, header(layout), *frames[:-1], digest), Reason.KV_CORRUPT)
    for end in (6, 8, len(chunks)):
        answer = await imported(target, header(layout), *frames[:end])
        assert (answer.next_token, answer.HasField("handle")) == (len(PROMPT), False)
    early = frames[:7] + frames[-1:]
    await refused(imported(target, header(layout), *early), Reason.KV_CORRUPT)
    answer = await imported(target, header(layout), *brought(chunks[6:]))
    assert await row(target, answer.handle) == wanted
    await release(target, answer.handle)


async def test_without_states_the_tokens_are_fed_again(there: There) -> None:
    """As of a sequence that was cut back and not fed since: the checkpoint comes alone, or nothing."""
    layout, chunks, _ = await frames_of(there[0])
    target = there[2]
    for first in ("checkpoint", "nothing"):
        some = [each for each in chunks if each.parts[0].tensor.partition(".")[0] in {"keys", first}]
        handle = (await imported(target, header(layout, first), *brought(some))).handle
        answer = await target.decode([9 % 6], handle)
        assert answer.output.recomputed_tokens == (len(PROMPT) - 96 if first == "checkpoint" else len(PROMPT))
        await release(target, answer.output.handle)
