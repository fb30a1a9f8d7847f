"""A server whose engine is a process of its own, over the wire: every answer is that of the thread's, and its death is
told."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import grpc
import pytest

from ferrum_rpc.client import (
    Accept,
    ExecutorClient,
    ExecutorError,
    FullLogits,
    Greedy,
    HiddenStates,
    NextToken,
    OutputSpec,
    Positions,
    RowLogprobs,
    Sample,
    SelectedTokens,
    TopTokens,
)
from tests.support.clients import raw
from tests.support.lives import play
from tests.support.process import ServerProcess, dial, serving
from tests.support.wiring import item, pb

PROMPT = list(range(3, 90))
FLAGS = ("--identity-positional", "--kv-blocks", "256", "--block-size", "4", "--max-context", "200")
BESIDE = RowLogprobs(4, (9, 0))
WHOLE = (Greedy(logprob=True, logprobs=BESIDE), TopTokens(7), SelectedTokens((5, 3, 200)), FullLogits(), HiddenStates())
OUTPUTS = [*(OutputSpec(Positions.ALL, kind) for kind in WHOLE), OutputSpec(kind=Sample(2.0, seed=5)), NextToken()]


async def live(client: ExecutorClient) -> list[Any]:
    """A scheduler's life, every kind of rows, large ones too, replays, a draft, refusals of items and of calls."""
    heard: list[Any] = [await play(client, seed=1)]
    sequences = [client.sequence() for _ in OUTPUTS]
    items = [each.item(PROMPT, output) for each, output in zip(sequences, OUTPUTS, strict=True)]
    for _ in range(2):
        heard += [(raw(each), each.replayed) for each in (await client.forward(items)).all_answers()]
    heard += [raw(await each.decode(9, OUTPUTS[0])) for each in sequences]
    first, second = sequences[:2]
    heard.append(raw(await first.verify([1, 8, 9], Accept(Sample(seed=7), [[8, 9]] * 2, [[0.5, 0.5]] * 2))))
    heard += map(type, await client.forward([second.item([10**6]), client.sequence().item(range(201))]))
    with pytest.raises(ExecutorError) as refused:
        await second.truncate(1000)
    heard.append((refused.value.reason, refused.value.message))
    await second.reserve(9)
    status = await client.status()
    heard.append((status.pressure, status.counters.steps, status.counters.tokens, status.counters.replays))
    return heard


def engine_of(server: ServerProcess) -> int:
    [engine] = server.children()
    return engine


async def test_every_answer_is_the_threads() -> None:
    async def heard(engine: str) -> list[Any]:
        async with serving(*FLAGS, "--engine", engine) as server, ExecutorClient(server.target) as client:
            return await live(client)

    thread, process = await asyncio.gather(heard("thread"), heard("process"))
    assert len(thread) == 3 * len(OUTPUTS) + 6 and process == thread


async def test_its_death_is_device_lost_and_an_orderly_end() -> None:
    async with serving(*FLAGS, "--engine", "process") as server, dial(server.target) as dialled:
        made = await dialled.executor.Prefill(pb.PrefillRequest(item=item(PROMPT)))
        os.kill(engine_of(server), signal.SIGKILL)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            while True:  # until the server has heard of it
                await dialled.executor.TruncateKv(pb.TruncateKvRequest(handle=made.output.handle, length=87))
        assert failed.value.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE)
        assert await server.ended() == 1
        (event,) = [each for each in server.events if each["event"] == "engine_failed"]
        assert "ended by itself with status -9" in event["error"]
