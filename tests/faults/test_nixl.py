"""Sequences that move between processes by NIXL itself, over TCP: to the bit, and whichever side is killed."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress

import grpc
import pytest

from ferrum_rpc.client import ExecutorClient, FullLogits
from ferrum_rpc.executor.v1 import forward_pb2, types_pb2
from tests.support.process import Dialled, ServerProcess, dial, serving
from tests.support.transfers import BYPASS, as_import, header, imported, kt, row
from tests.support.waiting import until
from tests.support.wiring import prefill

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="nixl is not installed: pip install '.[nixl]'"
)

PROMPT = [(7 * each + each // 250) % 256 for each in range(4000)]
FLAGS = ("--kv-transport", "nixl", "--identity-positional", "--identity-head-dim", "64")
CHUNK_TOKENS = 64
BEFORE_KILL = 40


class Side:
    """One server and its stubs."""

    def __init__(self, process: ServerProcess, stubs: Dialled) -> None:
        self.process, self.stubs = process, stubs

    async def free(self) -> int:
        return (await self.stubs.status()).blocks.free

    async def empty(self, blocks: int, descriptors: int) -> None:
        """Nothing is held any more, and no connection to what has gone."""
        await self.stubs.reset()
        async with asyncio.timeout(30):
            while await self.free() != blocks:  # each look is a call
                pass
        await until(lambda: self.process.descriptors() <= descriptors, 30)


async def exporting(source: Side, handle: types_pb2.KvHandle, first_token: int) -> AsyncIterator[kt.ExportKvResponse]:
    request = kt.ExportKvRequest(
        handle=handle, chunk_tokens=CHUNK_TOKENS, first_token=first_token, transport=kt.KV_TRANSPORT_NIXL
    )
    async for frame in source.stubs.transfer.ExportKv(request):
        yield frame


async def killed_in_the_middle(source: Side, target: Side, victim: Side, name: str) -> kt.KvLayout:
    """Relay an export until its victim is killed, and until both streams have ended. Returns its layout."""
    handle = await prefill(source.stubs, PROMPT, create=BYPASS)
    frames = exporting(source, handle, 0)
    layout = (await anext(frames)).layout
    stream = target.stubs.transfer.ImportKv()
    await stream.write(header(layout, name))
    count = 0
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        async for frame in frames:
            await stream.write(*as_import([frame]))
            count += 1
            if count == BEFORE_KILL:
                await victim.process.kill()
    await frames.aclose()
    assert BEFORE_KILL <= count < len(PROMPT) // CHUNK_TOKENS * 2
    with suppress(asyncio.InvalidStateError):
        await stream.done_writing()
    if victim is target:
        with pytest.raises(grpc.aio.AioRpcError):
            await stream
    else:
        with suppress(grpc.aio.AioRpcError):  # KV_CORRUPT, or nothing waited to be read
            assert not (await stream).HasField("handle")
    return layout


async def test_what_is_moved_is_there_to_the_bit_and_a_killed_side_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    async with AsyncExitStack() as stack:
        sides = []
        for _ in range(3):
            process = await stack.enter_async_context(serving(*FLAGS, kv_blocks=2048))
            sides.append(Side(process, await stack.enter_async_context(dial(process.target))))
        one, two, three = sides
        blocks = {await side.free() for side in sides}.pop()
        await moves(one, two)
        two_had, three_had = two.process.descriptors(), three.process.descriptors()

        layout = await killed_in_the_middle(one, two, one, "first")
        other = await prefill(three.stubs, PROMPT, create=BYPASS)
        known = (await imported(two.stubs, header(layout, "first"))).next_token
        assert 0 < known < len(PROMPT)

        async def rest() -> AsyncIterator[kt.ImportKvRequest]:
            yield header(layout, "first")
            async for frame in exporting(three, other, known):
                for each in as_import([frame]):
                    yield each

        answer = await two.stubs.transfer.ImportKv(rest())
        again = await prefill(two.stubs, PROMPT, create=BYPASS)
        assert await row(two.stubs, answer.handle) == await row(two.stubs, again)
        await two.empty(blocks, two_had)  # a connection to the third one, and none to the first

        await killed_in_the_middle(three, two, two, "second")
        await three.empty(blocks, three_had)
        assert not [each for side in (two, three) for each in side.process.events if each.get("level") == "error"]


async def moves(one: Side, two: Side) -> None:
    """By the client: both ways give the same rows, which are those of a prefill there."""
    async with ExecutorClient(one.process.target) as client, ExecutorClient(two.process.target) as other:
        rows = []
        for transport in ("nixl", "grpc", "none"):
            async with other.sequence(cache_mode=forward_pb2.CACHE_MODE_BYPASS) as target:
                if transport == "none":
                    await target.prefill(PROMPT)
                else:
                    source = client.sequence()
                    await source.prefill(PROMPT)
                    await source.move_to(target, transport=transport)
                    assert source.released and target.length == len(PROMPT)
                rows.append((await target.decode(9, FullLogits())).logits.tobytes())
        assert len(set(rows)) == 1
