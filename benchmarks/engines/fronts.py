"""Texts of an smg worker, by its gRPC protocol, and of an smg router in front of it, by HTTP."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc

from benchmarks.cases import SHAPES, with_words
from benchmarks.engines.grpc import PROGRAM
from benchmarks.engines.process import START_S, Child, ServerDied, served
from benchmarks.machine import ROOT

POLL_S: Final = 0.1
HEAD: Final = (
    b"POST /v1/completions HTTP/1.1\r\nHost: router\r\nConnection: close\r\nContent-Type: application/json\r\n"
)
EVENT: Final = b"data: {"
USAGE: Final = re.compile(rb'"completion_tokens":(\d+)')

Came = Callable[[int], None]
Writer = Callable[[Sequence[int], int, Came], Coroutine[Any, Any, None]]
"""Has a text written: behind a prompt, of so many tokens, whose arrival is told by calls with how many came
together."""


@asynccontextmanager
async def worker_and_router(target: str, model: str) -> AsyncIterator[tuple[Writer, Writer, dict[str, int]]]:
    """Both, for an executor at ``target``: how they have texts written, and the ids of their processes."""
    flags = ["--target", target, "--port", "0", "--served-model-name", model, "--log-format", "json"]
    if model in SHAPES:
        flags += ["--tokenizer", str(with_words(model))]
    async with (
        served(*PROGRAM, "worker", "smg", *flags) as worker,
        router(worker.target) as (host, port, pid),
        by_worker(worker.target) as of_worker,
    ):
        yield of_worker, by_router(host, port, model), {"worker": worker.process.pid, "router": pid}


@asynccontextmanager
async def router(target: str) -> AsyncIterator[tuple[str, int, int]]:
    """A router in front of a worker: its address, and the id of its process. Raises `ServerDied`."""
    host, ports = "127.0.0.1", [free_port(), free_port()]
    command = [sys.executable, "-m", "smg", "launch", "--host", host, "--port", str(ports[0]), "--log-level", "error"]
    command += ["--prometheus-port", str(ports[1]), "--worker-urls", f"grpc://{target}"]
    command += ["--worker-startup-check-interval", "1", "--shutdown-grace-period-secs", "1"]
    async with Child.run(command, ROOT, pipe=asyncio.subprocess.DEVNULL) as child:
        try:
            async with asyncio.timeout(START_S):
                while not await asyncio.to_thread(lists_a_model, host, ports[0]):
                    if child.process.returncode is not None:
                        raise ServerDied("\n".join(["the router has ended", *child.said]))
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise ServerDied("\n".join(["the router has no worker", *child.said])) from None
        yield host, ports[0], child.process.pid


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def lists_a_model(host: str, port: int) -> bool:
    """Whether a router has a worker."""
    try:
        connection = http.client.HTTPConnection(host, port)
        connection.request("GET", "/v1/models")
        return b'"id"' in connection.getresponse().read()
    except OSError:  # it does not listen yet
        return False


@asynccontextmanager
async def by_worker(target: str) -> AsyncIterator[Writer]:
    """Texts of a worker, by the stub of its protocol."""
    from smg_grpc_proto.generated import vllm_engine_pb2 as pb  # of an extra, which the page does not need
    from smg_grpc_proto.generated import vllm_engine_pb2_grpc

    async with grpc.aio.insecure_channel(target) as channel:
        engine: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)

        async def write(prompt: Sequence[int], tokens: int, came: Came) -> None:
            sampling = pb.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            request = pb.GenerateRequest(request_id=uuid.uuid4().hex, sampling_params=sampling, stream=True)
            request.tokenized.input_ids.extend(prompt)
            left = tokens
            async for each in engine.Generate(request):
                if count := len(each.chunk.token_ids):
                    left -= count
                    came(count)
            if left:
                raise RuntimeError(f"a text of the worker has {tokens - left} of {tokens} tokens")

        yield write


def by_router(host: str, port: int, model: str) -> Writer:
    """Texts of a router, by its OpenAI completions. An event counts as one token; the router tells at the end of a text
    how many it has."""

    async def write(prompt: Sequence[int], tokens: int, came: Came) -> None:
        body = json.dumps(
            {
                "model": model,
                "prompt": bytes(prompt).decode(),
                "max_tokens": tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(b"%sContent-Length: %d\r\n\r\n%s" % (HEAD, len(body), body))
            left, end = tokens, b""
            while piece := await reader.read(1 << 16):
                text = end[1 - len(EVENT) :] + piece
                if count := min(text.count(EVENT), left - 1):
                    left -= count
                    came(count)
                end = (end + piece)[-1024:]
            if (found := USAGE.findall(end)) != [b"%d" % tokens]:
                raise RuntimeError(f"a text of the router has {found} of {tokens} tokens: {end[-200:]!r}")
            came(left)
        finally:
            writer.close()

    return write
