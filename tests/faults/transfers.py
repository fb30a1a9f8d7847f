"""R28: a transfer is whole or nothing, whichever side dies in the middle, whatever bits flip, however full it is."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Final

import grpc
import numpy as np

from ferrum_rpc.errors import Reason
from ferrum_rpc.executor.v1 import forward_pb2, kv_transfer_pb2, types_pb2
from ferrum_rpc.wire.rows import float_rows, rows_from_proto
from ferrum_rpc.wire.status import error_from_rpc
from tests.faults.figures import Figures, at_least, exactly
from tests.faults.process import Dialled, ServerProcess, dial, serving
from tests.faults.sizes import Size
from tests.identity_oracle import OracleConfig, identity_logits
from tests.wiring import full, item, pb

kt = kv_transfer_pb2
TOKENS: Final = 61
CHUNK: Final = 4
ORACLE: Final = OracleConfig(positional=True)
TOLERANCE: Final = 1e-5
BLOCKS: Final = 64
FLAGS: Final = ("--identity-positional", "--block-size", "4")
BYPASS: Final = forward_pb2.CreateOptions(cache_mode=forward_pb2.CACHE_MODE_BYPASS)


class Tally:
    """What happened over all rounds."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.leaked: list[str] = []
        self.refused: dict[str, int] = {}
        self.kills = {"source": 0, "target": 0}
        self.resumed = 0
        self.flips = 0
        self.half_open = 0
        self.unexplained = 0
        self.answered_early = 0
        self.rows = 0

    def refusal(self, error: grpc.aio.AioRpcError) -> None:
        reason = str(error_from_rpc(error).reason)
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def explained(self, error: grpc.aio.AioRpcError) -> None:
        """A refusal of a target that lives."""
        self.refusal(error)
        self.unexplained += error_from_rpc(error).reason is Reason.TRANSPORT

    async def row(self, client: Dialled, handle: types_pb2.KvHandle, tokens: list[int]) -> None:
        """The next row is that of these tokens; then the sequence is released."""
        answer = await client.executor.Decode(pb.DecodeRequest(item=item([7], handle, output=full())))
        found = np.concatenate([float_rows(block["logits"]) for block in rows_from_proto(answer.row_blocks)])
        self.rows += 1
        if np.abs(found - identity_logits([*tokens, 7], range(len(tokens), len(tokens) + 1), ORACLE)).max() > TOLERANCE:
            self.wrong.append(f"the row behind {len(tokens)} tokens")
        await client.executor.Release(pb.ReleaseRequest(handle=answer.output.handle))

    async def empty(self, client: Dialled, what: str) -> None:
        """Nothing is held, but for what ends by itself when its stream has: that is waited for."""
        for _ in range(2_000):
            pressure = (await client.status()).pressure
            if pressure.free_blocks == pressure.total_blocks and not pressure.sequences:
                return
        self.leaked.append(f"{what}: {pressure.total_blocks - pressure.free_blocks} blocks")


async def prefilled(client: Dialled, tokens: list[int]) -> types_pb2.KvHandle:
    request = pb.PrefillRequest(item=item(tokens, create=BYPASS))
    return (await client.executor.Prefill(request)).output.handle


async def exported(client: Dialled, handle: types_pb2.KvHandle, first: int = 0) -> list[kt.ExportKvResponse]:
    request = kt.ExportKvRequest(handle=handle, chunk_tokens=CHUNK, first_token=first)
    return [frame async for frame in client.transfer.ExportKv(request)]


def header(layout: kt.KvLayout, request_id: str, lease_id: str = "") -> kt.ImportKvRequest:
    create = forward_pb2.CreateOptions(cache_mode=forward_pb2.CACHE_MODE_BYPASS, lease_id=lease_id)
    return kt.ImportKvRequest(header=kt.ImportKvHeader(layout=layout, request_id=request_id, create=create))


def as_import(frames: Iterable[kt.ExportKvResponse]) -> list[kt.ImportKvRequest]:
    """All frames but the layout."""
    return [kt.ImportKvRequest.FromString(each.SerializeToString()) for each in frames if not each.HasField("layout")]


async def imported(client: Dialled, *frames: kt.ImportKvRequest) -> kt.ImportKvResponse:
    return await client.transfer.ImportKv(iter(frames))


@asynccontextmanager
async def victim(engine: str) -> AsyncIterator[tuple[ServerProcess, Dialled]]:
    async with serving(*FLAGS, "--engine", engine, kv_blocks=BLOCKS) as server, dial(server.target) as client:
        yield server, client


async def r28_a_transfer_is_whole_or_nothing(size: Size, seed: int = 0) -> Figures:
    """Kill the source, and the target, in the middle of a transfer, as often as the size says; then break streams
    behind their header, refuse streams that are still being sent, flip bits of chunks, and fill the pool of the
    target."""
    dice, tally = random.Random(seed), Tally()
    async with AsyncExitStack() as stack:
        _, source = await stack.enter_async_context(victim("thread"))
        server, target = await stack.enter_async_context(victim("thread"))
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
        "R28",
        "A transfer is whole or nothing",
        (
            exactly("sequences with a wrong cache", len(tally.wrong), 0),
            exactly("blocks leaked, by place", len(tally.leaked), 0),
            exactly("kills of the source in mid-transfer", tally.kills["source"], size.transfer_kills),
            exactly("kills of the target in mid-transfer", tally.kills["target"], size.transfer_kills),
            exactly("refusals of a living target without ErrorInfo", tally.unexplained, 0),
            at_least("transfers that went on behind what had come", tally.resumed, 1),
        ),
        {
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


async def _source_dies(  # noqa: PLR0917 - as its siblings
    other: Dialled, target: Dialled, engine: str, goes_on: bool, dice: random.Random, tally: Tally
) -> None:
    """What came of it stays, and another source of the same tokens goes on; or its lease is given up."""
    tokens, request_id = _tokens(dice), f"{dice.getrandbits(64):x}"
    lease = (await target.executor.AcquireLease(pb.AcquireLeaseRequest())).lease_id
    async with victim(engine) as (server, source):
        handle = await prefilled(source, tokens)
        export = source.transfer.ExportKv(kt.ExportKvRequest(handle=handle, chunk_tokens=CHUNK))
        layout = (await export.read()).layout
        stream = target.transfer.ImportKv()
        await stream.write(header(layout, request_id, lease))
        for _ in range(dice.randrange(2 * (TOKENS // CHUNK))):
            await stream.write(as_import([await export.read()])[0])
        await server.kill()
        tally.kills["source"] += 1
        await stream.done_writing()
        came = (await stream).next_token
    if goes_on:
        handle = await prefilled(other, tokens)
        rest = as_import(await exported(other, handle, came))
        await other.executor.Release(pb.ReleaseRequest(handle=handle))
        answer = await imported(target, header(layout, request_id, lease), *rest)
        tally.resumed += came > 0
        await tally.row(target, answer.handle, tokens)
    await target.executor.RevokeLease(pb.RevokeLeaseRequest(lease_id=lease))


async def _target_dies(source: Dialled, engine: str, dice: random.Random, tally: Tally) -> None:
    """The source is as it was, and may go elsewhere."""
    tokens = _tokens(dice)
    handle = await prefilled(source, tokens)
    async with victim(engine) as (server, target):
        export = source.transfer.ExportKv(kt.ExportKvRequest(handle=handle, chunk_tokens=CHUNK))
        stream = target.transfer.ImportKv()
        await stream.write(header((await export.read()).layout, "dies"))
        for _ in range(dice.randrange(2 * (TOKENS // CHUNK))):
            await stream.write(as_import([await export.read()])[0])
        await server.kill()
        tally.kills["target"] += 1
        try:
            await stream.done_writing()
            await stream
            tally.wrong.append("an import was answered by a dead target")
        except grpc.aio.AioRpcError as error:
            tally.refusal(error)
        export.cancel()
    await tally.row(source, handle, tokens)


async def _half_open(  # noqa: PLR0917
    source: Dialled, target: Dialled, address: str, count: int, dice: random.Random, tally: Tally
) -> None:
    """Imports that break at any moment before anything of them was kept."""
    handle = await prefilled(source, _tokens(dice))
    [first, *_] = await exported(source, handle)
    await source.executor.Release(pb.ReleaseRequest(handle=handle))

    async def broken(number: int) -> None:
        async with dial(address) as client:
            call = client.transfer.ImportKv()
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
                await call.write(header(first.layout, f"half-open {number}", ""))
                await asyncio.sleep(dice.random() * 0.004)
            if number % 2:
                call.cancel()
        tally.half_open += 1

    for each in range(0, count, 3):
        await asyncio.gather(*map(broken, range(each, each + 3)))
    await tally.empty(target, "target, after half-open imports")


async def _refused_early(target: Dialled, count: int, tally: Tally) -> None:
    """Streams that are refused at their header, and go on."""
    first = header(kt.KvLayout(layers=1, seq_len=1, token_ids=[1]), "refused", "").SerializeToString()
    rest = kt.ImportKvRequest(chunk=kt.KvChunk(keys=types_pb2.Tensor(data=bytes(256 << 10)))).SerializeToString()
    raw: Any = target.channel.stream_unary("/ferrum_rpc.executor.v1.KvTransfer/ImportKv")

    async def frames() -> AsyncIterator[bytes]:
        yield first
        for _ in range(32):
            yield rest

    for _ in range(count):
        try:
            await raw(frames())
            tally.wrong.append("a cache of another layout was taken")
        except grpc.aio.AioRpcError as error:
            tally.answered_early += 1
            tally.explained(error)


async def _bits_flip(source: Dialled, target: Dialled, flips: int, dice: random.Random, tally: Tally) -> None:
    """One bit of all that follows the header. Where the sequence comes to be all the same, it is the right one."""
    tokens = _tokens(dice)
    handle = await prefilled(source, tokens)
    frames = await exported(source, handle)
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
        lease = (await target.executor.AcquireLease(pb.AcquireLeaseRequest())).lease_id
        first = header(layout, f"flip {number}", lease).SerializeToString()
        tally.flips += 1
        try:
            answer = await raw(iter([first, *changed]))
        except grpc.aio.AioRpcError as error:
            tally.explained(error)
        else:
            if answer.HasField("handle"):
                await tally.row(target, answer.handle, tokens)
        await target.executor.RevokeLease(pb.RevokeLeaseRequest(lease_id=lease))
    await source.executor.Release(pb.ReleaseRequest(handle=handle))
    await tally.empty(target, "target, after flips")
    await tally.empty(source, "source, after flips")


async def _no_room(source: Dialled, target: Dialled, dice: random.Random, tally: Tally) -> None:
    """A full pool refuses the import before anything moves, and takes it when there is room."""
    tokens = _tokens(dice)
    handle = await prefilled(source, tokens)
    frames = await exported(source, handle)
    hog = await prefilled(target, [1] * (4 * BLOCKS - 8))
    sent = [header(frames[0].layout, "no room"), *as_import(frames)]
    try:
        await imported(target, *sent)
        tally.wrong.append("a full pool took an import")
    except grpc.aio.AioRpcError as error:
        tally.refusal(error)
    await target.executor.Release(pb.ReleaseRequest(handle=hog))
    await tally.empty(target, "target, after a refusal")
    await tally.row(target, (await imported(target, *sent)).handle, tokens)
    await tally.row(source, handle, tokens)
    await tally.empty(target, "target, in the end")
    await tally.empty(source, "source, in the end")
