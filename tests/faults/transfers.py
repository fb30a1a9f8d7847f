"""R28: a transfer is whole or nothing, whichever side dies in the middle, whatever bits flip, however full it is."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from typing import Any, Final

import grpc

from ferrum_rpc.errors import ExecutorError, Reason
from ferrum_rpc.executor.v1 import kv_transfer_pb2, types_pb2
from ferrum_rpc.wire.status import error_from_rpc
from tests.faults.any_bytes import CALLERS_OWN
from tests.faults.figures import Figures, at_least, exactly
from tests.faults.models import IDENTITY, Model
from tests.faults.sizes import Size
from tests.support.process import Dialled, ServerProcess, dial, dialled
from tests.support.transfers import BYPASS, as_import, chunks_of, exported, header, imported
from tests.support.waiting import PATIENCE_S
from tests.support.wiring import full, prefill, refusal, release

kt = kv_transfer_pb2
TOKENS: Final = 61
STEP: Final = 5
"""Tokens of a sequence's last step, some of which are truncated where it goes on."""
CHUNK: Final = 4
BLOCKS: Final = 64
SLOTS: Final = 8


class Tally:
    """What happened over all rounds with a ``model``. ``chunks``: those of a stream."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.chunks = 0
        self.wrong: list[str] = []
        self.leaked: list[str] = []
        self.refused = Counter[str]()
        self.kills = {"source": 0, "target": 0}
        self.resumed = self.flips = self.half_open = self.unexplained = self.answered_early = self.rows = 0

    async def must_be_refused(self, call: Awaitable[Any], otherwise: str) -> ExecutorError | None:
        """Count why a call is refused."""
        error = await refusal(call)
        if error is None:
            self.wrong.append(otherwise)
        else:
            self.refused[str(error.reason)] += 1
        return error

    def explained(self, error: ExecutorError | None) -> None:
        """A refusal of a target that lives."""
        if error is not None and error.message != CALLERS_OWN:
            self.unexplained += error.reason is Reason.TRANSPORT

    def victim(self, engine: str) -> AbstractAsyncContextManager[tuple[ServerProcess, Dialled]]:
        slots = {"state_slots": SLOTS} if self.model.recurrent else {}
        flags = self.model.flags(dtype="float32", block_size=4, **slots)
        return dialled(*flags, "--engine", engine, model=self.model.path, kv_blocks=BLOCKS)

    async def row(self, client: Dialled, handle: types_pb2.KvHandle, tokens: list[int]) -> None:
        """The next row, behind a truncation within the last step or none, is that of these tokens, and nothing was fed
        again for it; then the sequence is released."""
        kept = len(tokens) - self.rows % STEP
        answer = await client.decode([7], handle, output=full(), truncate_to=kept)
        self.rows += 1
        if self.model.unlike(answer.row_blocks, [([*tokens[:kept], 7], kept)]) or answer.output.recomputed_tokens:
            self.wrong.append(f"the row behind {kept} tokens")
        await release(client, answer.output.handle)

    async def empty(self, client: Dialled, what: str) -> None:
        """Nothing is held, but for what ends by itself when its stream has: that is waited for."""
        if any(held := await client.released(PATIENCE_S)):
            self.leaked.append(f"{what}: {held[1]} blocks and slots")


async def r28_a_transfer_is_whole_or_nothing(size: Size, model: Model = IDENTITY, seed: int = 0) -> Figures:
    """Kill the source, and the target, in the middle of a transfer, as often as the size says; then break streams
    behind their header, refuse streams that are still being sent, flip bits of chunks, and fill the pool of the
    target."""
    dice, tally = random.Random(seed), Tally(model)
    async with AsyncExitStack() as stack:
        _, source = await stack.enter_async_context(tally.victim("thread"))
        server, target = await stack.enter_async_context(tally.victim("thread"))
        handle = await _fed(source, _tokens(dice))
        tally.chunks = len(chunks_of(await exported(source, handle, chunk_tokens=CHUNK)))
        await release(source, handle)
        for number in range(size.transfer_kills):
            engine = ("thread", "process")[number % 10 == 4]
            await asyncio.gather(
                _source_dies(source, target, engine, number % 2 == 0, dice, tally),
                _target_dies(source, engine, dice, tally),
            )
            await tally.empty(target, "target")
            await tally.empty(source, "source")
        await _half_open(source, target, server.target, 15 * size.transfer_kills, dice, tally)
        await _refused_early(target, 10 * size.transfer_kills, tally)
        await _bits_flip(source, target, 8 * size.transfer_kills, dice, tally)
        await _no_room(source, target, dice, tally)
    return Figures(
        "A transfer is whole or nothing",
        exactly("sequences with a wrong cache", len(tally.wrong), 0),
        exactly("blocks leaked, by place", len(tally.leaked), 0),
        exactly("kills of the source in mid-transfer", tally.kills["source"], size.transfer_kills),
        exactly("kills of the target in mid-transfer", tally.kills["target"], size.transfer_kills),
        exactly("refusals of a living target without ErrorInfo", tally.unexplained, 0),
        at_least("transfers that went on behind what had come", tally.resumed, 1),
        facts={
            "kills": sum(tally.kills.values()),
            "resumed": tally.resumed,
            "flips": tally.flips,
            "half-open imports": tally.half_open,
            "refused while they were sent": tally.answered_early,
            "rows compared": tally.rows,
            "refusals": tally.refused,
            "wrong": tally.wrong[:10],
            "leaked": tally.leaked[:10],
        },
    )


def _tokens(dice: random.Random) -> list[int]:
    return [dice.randrange(256) for _ in range(TOKENS)]


async def _fed(client: Dialled, tokens: list[int]) -> types_pb2.KvHandle:
    """A sequence of these tokens, the last of which a step has fed."""
    handle = await prefill(client, tokens[:-STEP], create=BYPASS)
    return await prefill(client, tokens[-STEP:], handle=handle)


async def _source_dies(  # noqa: PLR0917 - as its siblings
    other: Dialled, target: Dialled, engine: str, goes_on: bool, dice: random.Random, tally: Tally
) -> None:
    """What came of it stays, and another source of the same tokens goes on; or its lease is given up."""
    tokens, request_id = _tokens(dice), f"{dice.getrandbits(64):x}"
    async with tally.victim(engine) as (server, source):
        lease = (await target.acquire()).lease_id  # only now: a process may take longer to start than a lease lasts
        handle = await _fed(source, tokens)
        export = source.transfer.ExportKv(kt.ExportKvRequest(handle=handle, chunk_tokens=CHUNK))
        layout = (await export.read()).layout
        stream = target.transfer.ImportKv()
        await stream.write(header(layout, request_id, lease_id=lease))
        for _ in range(dice.randrange(tally.chunks)):
            await stream.write(as_import([await export.read()])[0])
        await server.kill()
        tally.kills["source"] += 1
        await stream.done_writing()
        came = (await stream).next_token
    if goes_on:
        handle = await _fed(other, tokens)
        rest = as_import(await exported(other, handle, chunk_tokens=CHUNK, first_token=came))
        await release(other, handle)
        answer = await imported(target, header(layout, request_id, lease_id=lease), *rest)
        tally.resumed += came > 0
        await tally.row(target, answer.handle, tokens)
    await target.revoke(lease)


async def _target_dies(source: Dialled, engine: str, dice: random.Random, tally: Tally) -> None:
    """The source is as it was, and may go elsewhere."""
    tokens = _tokens(dice)
    handle = await _fed(source, tokens)
    async with tally.victim(engine) as (server, target):
        export = source.transfer.ExportKv(kt.ExportKvRequest(handle=handle, chunk_tokens=CHUNK))
        stream = target.transfer.ImportKv()
        await stream.write(header((await export.read()).layout, "dies"))
        for _ in range(dice.randrange(tally.chunks)):
            await stream.write(as_import([await export.read()])[0])
        await server.kill()
        tally.kills["target"] += 1
        await tally.must_be_refused(_answer(stream), "an import was answered by a dead target")
        export.cancel()
    await tally.row(source, handle, tokens)


async def _answer(stream: Any) -> Any:
    await stream.done_writing()
    return await stream


async def _half_open(  # noqa: PLR0917
    source: Dialled, target: Dialled, address: str, count: int, dice: random.Random, tally: Tally
) -> None:
    """Imports that break at any moment before anything of them was kept."""
    handle = await _fed(source, _tokens(dice))
    [first, *_] = await exported(source, handle, chunk_tokens=CHUNK)
    await release(source, handle)

    async def broken(number: int) -> None:
        async with dial(address) as client:
            call = client.transfer.ImportKv()
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
                await call.write(header(first.layout, f"half-open {number}"))
                await asyncio.sleep(dice.random() * 0.004)
            if number % 2:
                call.cancel()
        tally.half_open += 1

    for each in range(0, count, 3):
        await asyncio.gather(*map(broken, range(each, each + 3)))
    await tally.empty(target, "target, after half-open imports")


async def _refused_early(target: Dialled, count: int, tally: Tally) -> None:
    """Streams that are refused at their header, and go on."""
    first = header(kt.KvLayout(layers=1, seq_len=1, token_ids=[1]), "refused").SerializeToString()
    rest = kt.ImportKvRequest(chunk=kt.KvChunk(keys=types_pb2.Tensor(data=bytes(256 << 10)))).SerializeToString()
    raw: Any = target.channel.stream_unary("/ferrum_rpc.executor.v1.KvTransfer/ImportKv")

    async def frames() -> AsyncIterator[bytes]:
        yield first
        for _ in range(32):
            yield rest

    for _ in range(count):
        tally.explained(await tally.must_be_refused(raw(frames()), "a cache of another layout was taken"))
        tally.answered_early += 1


async def _bits_flip(source: Dialled, target: Dialled, flips: int, dice: random.Random, tally: Tally) -> None:
    """One bit of all that follows the header. Where the sequence comes to be all the same, it is the right one."""
    tokens = _tokens(dice)
    handle = await _fed(source, tokens)
    frames = await exported(source, handle, chunk_tokens=CHUNK)
    layout, whole = frames[0].layout, [each.SerializeToString() for each in as_import(frames)]
    raw: Any = target.channel.stream_unary(
        "/ferrum_rpc.executor.v1.KvTransfer/ImportKv", response_deserializer=kt.ImportKvResponse.FromString
    )
    for number in range(flips):
        changed = list(whole)
        at = dice.randrange(len(changed))
        data = bytearray(changed[at])
        where = dice.choice((dice.randrange(len(data)), dice.randrange(min(64, len(data)))))
        data[where] ^= 1 << dice.randrange(8)
        changed[at] = bytes(data)
        lease = (await target.acquire()).lease_id
        first = header(layout, f"flip {number}", lease_id=lease).SerializeToString()
        tally.flips += 1
        try:
            answer = await raw(iter([first, *changed]))
        except grpc.aio.AioRpcError as failure:
            error = error_from_rpc(failure)
            tally.refused[str(error.reason)] += 1
            tally.explained(error)
        else:
            if answer.HasField("handle"):
                await tally.row(target, answer.handle, tokens)
        await target.revoke(lease)
    await release(source, handle)
    await tally.empty(target, "target, after flips")
    await tally.empty(source, "source, after flips")


async def _no_room(source: Dialled, target: Dialled, dice: random.Random, tally: Tally) -> None:
    """Where blocks or slots are missing an import is refused before anything moves, and taken when there is room."""
    tokens = _tokens(dice)
    handle = await _fed(source, tokens)
    frames = await exported(source, handle, chunk_tokens=CHUNK)
    sent = [header(frames[0].layout, "no room"), *as_import(frames)]
    slots = (await target.status()).pressure.total_slots
    for lengths in ([4 * BLOCKS - 8], [1] * slots):
        hogs = [await prefill(target, [1] * length, create=BYPASS) for length in lengths]
        if hogs:
            await tally.must_be_refused(imported(target, *sent), "a full pool took an import")
        await release(target, *hogs)
        await tally.empty(target, "target, after a refusal")
    await tally.row(target, (await imported(target, *sent)).handle, tokens)
    await tally.row(source, handle, tokens)
    await tally.empty(target, "target, in the end")
    await tally.empty(source, "source, in the end")
