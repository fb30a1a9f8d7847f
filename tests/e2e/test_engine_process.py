"""A server whose engine is a process of its own, over the wire: every answer is that of the thread's, and its death is
told."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import grpc
import numpy as np
import pytest

from ferrum_rpc.errors import Reason
from ferrum_rpc.executor.v1 import output_pb2
from ferrum_rpc.wire.tensor import fill_tensor
from tests.faults.process import Dialled, ServerProcess, dial, serving
from tests.wiring import full, item, pb, refused, top

PROMPT = list(range(3, 90))
ALL = output_pb2.POSITIONS_ALL
FLAGS = ("--identity-positional", "--kv-blocks", "64", "--block-size", "4", "--max-context", "200")


def told(answer: Any) -> list[bytes]:
    """What an answer says but for its times and the names of its sequences."""
    items = [each.output for each in answer.results] if hasattr(answer, "results") else [answer.output]
    facts = [
        (output.handle.seq_len, output.handle.version, output.replayed, output.rows.SerializeToString())
        for output in items
    ]
    errors = [(each.error.code, each.error.message) for each in getattr(answer, "results", [])]
    return [repr((facts, errors)).encode(), *(block.SerializeToString() for block in answer.row_blocks)]


async def play(dialled: Dialled) -> list[Any]:
    """Every method, every kind of rows, large ones too, refusals of items and of calls."""
    call, heard = dialled.executor, []
    selected = output_pb2.OutputSpec(selected_tokens=output_pb2.SelectedTokensOutput(token_ids=[5, 3, 200]))
    logprob = output_pb2.OutputSpec(greedy=output_pb2.GreedyOutput(logprob=True))
    made = await call.Prefill(pb.PrefillRequest(item=item(PROMPT, output=full(positions=ALL))))
    heard += told(made)
    handle = made.output.handle
    beside = output_pb2.RowLogprobs(top_k=4, token_ids=[9, 0])
    logprobs = output_pb2.OutputSpec(greedy=output_pb2.GreedyOutput(logprobs=beside))
    scores = output_pb2.OutputSpec(next_token=output_pb2.NextTokenOutput(following_token=6, logprobs=beside))
    outputs = [None, full(), top(7), selected, logprob, logprobs, scores]
    many = await call.BatchPrefill(
        pb.BatchPrefillRequest(items=[item(PROMPT[: 5 + n], output=each) for n, each in enumerate(outputs)])
    )
    heard += told(many)
    handles = [each.output.handle for each in many.results]
    for output in outputs:
        step = pb.BatchDecodeRequest(items=[item([9], each, output=output) for each in handles])
        decoded = await call.BatchDecode(step)
        heard += told(decoded)
        handles = [each.output.handle for each in decoded.results]
    one = await call.Decode(pb.DecodeRequest(item=item([4], handle, request_id="once")))
    again = await call.Decode(pb.DecodeRequest(item=item([4], handle, request_id="once")))
    heard += [*told(one), *told(again)]
    forked = await call.ForkKv(pb.ForkKvRequest(handle=one.output.handle, count=2, at_length=50))
    verified = await call.ForwardVerify(pb.ForwardVerifyRequest(item=item([8, 9, 7], forked.handles[0], output=full())))
    heard += told(verified)
    for spec in (output_pb2.AcceptOutput(), output_pb2.AcceptOutput(sampling=output_pb2.SampleOutput(seed=7))):
        if spec.HasField("sampling"):
            fill_tensor(spec.draft_token_ids, np.array([[8, 9]] * 5, np.uint32))
            fill_tensor(spec.draft_probabilities, np.full((5, 2), 0.5, np.float32))
        draft = item([1, 8, 8, 9, 8, 9], forked.handles[1], output=output_pb2.OutputSpec(accept=spec), truncate_to=50)
        accepted = await call.ForwardVerify(pb.ForwardVerifyRequest(item=draft))
        forked.handles[1].CopyFrom(accepted.output.handle)
        heard += told(accepted)
    back = await call.TruncateKv(pb.TruncateKvRequest(handle=verified.output.handle, length=51))
    heard.append((back.handle.seq_len, back.handle.version, back.pressure.free_blocks))
    mixed = await call.UnifiedForward(
        pb.UnifiedForwardRequest(items=[item([1, 2], back.handle), item(list(range(150))), item([3] * 120)])
    )
    heard += told(mixed)
    too_long = call.Prefill(pb.PrefillRequest(item=item([3] * 190)))
    error = await refused(too_long, Reason.KV_BLOCKS_EXHAUSTED, grpc.StatusCode.RESOURCE_EXHAUSTED)
    heard.append(error.metadata)
    heard.append((await call.ReserveKv(pb.ReserveKvRequest(handle=handles[0], tokens=9))).handle.seq_len)
    released = await call.Release(pb.ReleaseRequest(handle=handles[1]))
    heard.append(released.pressure.free_blocks)
    status = await dialled.status()
    counters = status.counters
    heard.append((counters.steps, counters.tokens, counters.rows, counters.blocks_copied, counters.replays))
    return heard


def engine_of(server: ServerProcess) -> int:
    [engine] = server.children()
    return engine


async def test_every_answer_is_the_threads() -> None:
    async def heard(engine: str) -> list[Any]:
        async with serving(*FLAGS, "--engine", engine) as server, dial(server.target) as dialled:
            return await play(dialled)

    thread, process = await asyncio.gather(heard("thread"), heard("process"))
    assert len(thread) == 41
    assert process == thread


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


async def test_nothing_of_it_is_left_when_the_server_is_killed() -> None:
    async with serving(*FLAGS, "--engine", "process") as server:
        watched = os.pidfd_open(engine_of(server))
        gone = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(watched, lambda: gone.done() or gone.set_result(None))
        await server.kill()
        await asyncio.wait_for(gone, 30)
        asyncio.get_running_loop().remove_reader(watched)
        os.close(watched)
