"""The worker as a process: its start, its drain on SIGTERM, and what it says where it cannot serve."""

from __future__ import annotations

import asyncio
import signal
import urllib.request
from typing import Any

import grpc
import pytest

from tests.support.grammars import DEMO, MODEL
from tests.support.process import serving
from tests.support.serving import serve_identity, serve_model
from tests.support.waiting import until
from tests.support.workers import request
from tests.support.workers import worker_process as worker

pytest.importorskip("smg_grpc_proto", reason="smg-grpc-proto is not installed")
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

TOKENIZER = ("--tokenizer", str(MODEL))


def endless(max_tokens: int = 400) -> Any:
    return request(stream=True, max_tokens=max_tokens, ignore_eos=True)


async def test_sigterm_lets_texts_end_and_then_ends_the_worker() -> None:
    async with serve_model(DEMO) as served, worker("--target", served.target) as process:
        ready = await process.event("ready")
        assert (ready["model"], ready["executors"]) == ("demo", [served.target])
        async with grpc.aio.insecure_channel(ready["target"]) as channel:
            engine: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            messages = aiter(engine.Generate(endless()))
            tokens = len((await anext(messages)).chunk.token_ids)
            process.signal(signal.SIGTERM)
            await process.event("draining")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await anext(aiter(engine.Generate(endless())))
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            last: Any = None
            async for each in messages:
                tokens += len(each.chunk.token_ids)
                last = each
            assert (tokens, last.complete.finish_reason) == (400, "length")
        assert await process.ended() == 0
        assert (await process.event("drained"))["texts_left"] == 0
        assert len(served.server.state.handles) == 0


async def test_the_grace_and_a_second_signal_end_a_worker_with_texts() -> None:
    for second in (False, True):
        async with serve_model(DEMO) as served:
            flags = ("--grace-s", "60" if second else "0", "--target", served.target)
            async with worker(*flags) as process:
                target = (await process.event("ready"))["target"]
                async with grpc.aio.insecure_channel(target) as channel:
                    engine: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
                    messages = aiter(engine.Generate(endless(2000)))
                    await anext(messages)
                    process.signal(signal.SIGTERM)
                    await process.event("draining")
                    if second:
                        process.signal(signal.SIGTERM)
                    assert await process.ended() == (128 + signal.SIGTERM if second else 0)
            if not second:  # what a killed worker had ends with its lease
                await until(lambda: len(served.server.state.handles) == 0, 20)


async def test_a_worker_that_waits_for_an_executor_serves_it_or_ends() -> None:
    async with serving(model="demo") as executor:
        target = executor.target
    async with worker("--target", target, *TOKENIZER) as waits, worker("--target", target, *TOKENIZER) as ends:
        for each in (waits, ends):
            await each.event("connecting")
        ends.signal(signal.SIGTERM)
        assert await ends.ended() == 0
        async with serving(model="demo", port=int(target.rpartition(":")[2])):
            assert (await waits.event("ready"))["executors"] == [target]


async def test_the_metrics_are_on_a_port_of_their_own() -> None:
    async with serve_model(DEMO) as served, worker("--target", served.target, "--metrics-port", "0") as process:
        await process.event("ready")
        url = (await process.event("metrics_enabled"))["url"]
        text = (await asyncio.to_thread(urllib.request.urlopen, url, timeout=10)).read().decode()
        assert 'ferrum_worker_executors{state="serving"} 1.0' in text
        assert "process_resident_memory_bytes" in text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "the executor does not report the folder of identity: name one with --tokenizer"),
        (("--tokenizer", "/nowhere"), "/nowhere has no tokenizer.json: name the model's folder"),
        ((*TOKENIZER, "--host", "192.0.2.1"), "set --serve-tls-cert and --serve-tls-key, or --serve-tokens"),
        ((*TOKENIZER, "--serve-tls-cert", "x"), "tls_cert and tls_key must be set together"),
        ((*TOKENIZER, "--metrics-host", "203.0.113.1", "--metrics-port", "9"), "cannot serve metrics on 203.0.113.1:9"),
    ],
)
async def test_a_setting_that_cannot_be_used_is_named(flags: tuple[str, ...], words: str) -> None:
    async with serve_identity() as served, worker("--target", served.target, *flags) as process:
        assert words in (await process.event("startup_failed"))["error"]
        assert await process.ended() == 1
