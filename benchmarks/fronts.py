"""What a router and a worker cost: the same texts by the scheduler as a library, by a worker through gRPC, and by a
router in front of the worker through HTTP.

All ways have the same executor. The ways take turns, ratios are of one round, and each text has a prompt of its own.
The processor time of every process says where the time goes: on a machine whose cores are all busy, what the worker,
the router and the caller take is missing at the executor. The other rounds ask how long the executor has the sequence
of a text whose client leaves.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import re
import socket
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import Any, Final

import grpc

from benchmarks.cases import SHAPES, model_path
from benchmarks.engines.grpc import PROGRAM, connected
from benchmarks.engines.process import START_S, Child, ServerDied, served
from benchmarks.grammars import with_words
from benchmarks.machine import ROOT, processor_s
from benchmarks.record import Benchmark, Option, Record, shape_of
from benchmarks.streams import (
    SERVED,
    SHAPE,
    Came,
    Goal,
    Round,
    Taken,
    Work,
    Writer,
    by_scheduler,
    cancels,
    points,
    rounds_of,
    streams,
)
from ferrum_rpc.runtime import choose_loop
from ferrum_rpc.scheduler import Scheduler

STREAMS: Final = (1, 16, 64)  # texts at a time
LIBRARY, WORKER, ROUTER = "the scheduler as a library", "a worker, gRPC", "a router and a worker, HTTP"
WAYS: Final = (LIBRARY, WORKER, ROUTER)
LEAVES: Final = 100
LEFT_AT: Final = 12  # tokens that a text has when its client leaves, at most
BESIDE: Final = 16  # texts that go on while others are left
LONE: Final = 4
"""A text alone is this many times as long as one of several: its round would be over within the host's next stall."""

TARGET: Final = 0.95  # tokens a second of those of the library, at least
POLL_S: Final = 0.1
HEAD: Final = (
    b"POST /v1/completions HTTP/1.1\r\nHost: router\r\nConnection: close\r\nContent-Type: application/json\r\n"
)
EVENT: Final = b"data: {"
USAGE: Final = re.compile(rb'"completion_tokens":(\d+)')


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


OF_LIBRARY: Final = Goal(
    ROUTER, (LIBRARY,), "of the library", TARGET, "of a router and a worker, of the scheduler as a library, Qwen3-0.6B"
)


async def run(options: argparse.Namespace) -> Record:
    """Measure everything and write the file."""
    model = options.model
    told = f"of {options.tokens} tokens behind {options.prompt} each, alone {LONE * options.tokens}"
    record = Record(options, model=model, **SERVED, texts=told, router=f"smg {version('smg')}")
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        ours, client = await enter(connected(model_path(model), SERVED))
        scheduler = await enter(Scheduler(ours.target))
        flags = ["--target", ours.target, "--port", "0", "--served-model-name", model, "--log-format", "json"]
        if model in SHAPES:
            flags += ["--tokenizer", str(with_words(model))]
        worker = await enter(served(*PROGRAM, "worker", "smg", *flags))
        host, port, of_router = await enter(router(worker.target))
        writers: dict[str, Writer] = {
            LIBRARY: by_scheduler(scheduler),
            WORKER: await enter(by_worker(worker.target)),
            ROUTER: by_router(host, port, model),
        }
        processes = {"executor": ours.pid, "worker": worker.process.pid, "router": of_router, "caller": os.getpid()}

        async def take(way: str, work: Work, number: int, spread_s: float) -> Round:
            before = {name: processor_s(pid) for name, pid in processes.items()}
            found = await streams(client, writers[way], work, number, spread_s)
            found.worked_s = {name: processor_s(pid) - before[name] for name, pid in processes.items()}
            return found

        def put(taken: Taken) -> None:
            rows = points(taken, OF_LIBRARY, shaped=options.variant == SHAPE)
            record.put("ways", rows)

        ways = {way: partial(take, way) for way in WAYS}
        await rounds_of(options, ours.vocab_size, ways, LIBRARY, put, lone=LONE)
        work = Work(1 if options.quick else BESIDE, options.prompt, options.tokens, ours.vocab_size)
        left = list[dict[str, Any]]()
        for way in WAYS if options.leaves else ():
            left.append({"way": way, **await cancels(client, writers[way], work, options.leaves, LEFT_AT)})
            record.put("leaves", left)
    return record


BENCHMARK: Final = Benchmark(
    "fronts",
    run,
    (
        Option("--model", "demo", "demo or a shape of benchmarks/shapes.json"),
        Option("--streams", list(STREAMS), "texts at a time", [2]),
        Option("--tokens", 128, "of a text", 8),
        Option("--prompt", 64, "tokens of a prompt", 16),
        Option("--leaves", LEAVES, "of clients, by each way; 0: none", 2),
    ),
    variant=shape_of,
    loop=choose_loop("auto").make,
)
