"""What a router and a worker cost: the same texts by the scheduler as a library, by a worker through gRPC, and by a
router in front of the worker through HTTP.

All ways have the same executor, which runs in a process of its own, as the worker and the router do. The callers are in
the measuring process, for the library together with its scheduler, as in an application; this process does nothing else
meanwhile. The scheduler has the settings and the event loop of a worker. The ways take turns, and ratios are of one
round. Each text has a prompt of its own, so that no way finds another one's blocks in the prefix cache. The processor
time of every process says where the time goes: on a machine whose cores are all busy, what the worker, the router and
the caller take is missing at the executor. The other rounds ask how long the executor has the sequence of a text whose
client leaves: it closes its connection to the router, or cancels its call of the worker.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import re
import socket
import sys
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np

from benchmarks import tables
from benchmarks.cases import BUILT_IN, CACHE, SHAPES, checkpoint
from benchmarks.engines.grpc import PROGRAM, executor
from benchmarks.engines.process import START_S, Child, ServerDied, served
from benchmarks.machine import ROOT, processor_s
from benchmarks.record import Record, finish, out_of, read_options
from benchmarks.streams import SERVED, Came, Round, Work, Writer, by_scheduler, cancels, medians, shares, streams
from ferrum_rpc.client import ExecutorClient
from ferrum_rpc.runtime import choose_loop
from ferrum_rpc.scheduler import Scheduler

STREAMS: Final = (1, 16, 64)
"""Texts at a time."""

LIBRARY, WORKER, ROUTER = "the scheduler as a library", "a worker, gRPC", "a router and a worker, HTTP"
WAYS: Final = (LIBRARY, WORKER, ROUTER)
LEAVES: Final = 100
LEFT_AT: Final = 12
"""Tokens that a text has when its client leaves, at most."""

BESIDE: Final = 16
"""Texts that go on while others are left."""

TARGET: Final = 0.95
"""Tokens a second of those of the library, at least."""

POLL_S: Final = 0.1
DEMO_TOKENIZER: Final = ROOT / "ferrum_rpc_demo" / "demo" / "tokenizer.json"
HEAD: Final = (
    b"POST /v1/completions HTTP/1.1\r\nHost: router\r\nConnection: close\r\nContent-Type: application/json\r\n"
)
EVENT: Final = b"data: {"
USAGE: Final = re.compile(rb'"completion_tokens":(\d+)')


@dataclass(frozen=True, slots=True)
class Turn:
    """One way's round, and the seconds that the cores worked in it for each process."""

    round: Round
    worked_s: Mapping[str, float]

    def per_token_us(self) -> dict[str, float]:
        """Microseconds for each token."""
        return {name: 1e6 * seconds / self.round.tokens for name, seconds in self.worked_s.items()}


def tokenizer_of(shape: str, vocab_size: int) -> Path:
    """A folder with a tokenizer for random weights, which have none: bytes, and a word for every other token, so that
    each token has a text."""
    folder = CACHE / f"{shape}-tokenizer"
    made: dict[str, Any] = json.loads(DEMO_TOKENIZER.read_text("utf-8"))
    made["added_tokens"] = []
    made["model"]["vocab"] |= {f"word{token}": token for token in range(256, vocab_size)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DEMO_TOKENIZER.name).write_text(json.dumps(made), "utf-8")
    return folder


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
                while not await lists_a_model(host, ports[0]):
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


async def lists_a_model(host: str, port: int) -> bool:
    """Whether a router has a worker."""
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:  # it does not listen yet
        return False
    try:
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: router\r\nConnection: close\r\n\r\n")
        return b'"id"' in await reader.read()
    finally:
        writer.close()


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


class Bench:
    """Every way to the same executor. ``processes``: the ids of the processes, by what they are."""

    def __init__(self, client: ExecutorClient, writers: Mapping[str, Writer], processes: Mapping[str, int]) -> None:
        self.client, self.writers, self._processes = client, writers, processes
        self._numbers = itertools.count()

    async def turn(self, way: str, work: Work, spread_s: float) -> Turn:
        """A round of one way, with prompts of its own."""
        before = self._worked_s()
        found = await streams(self.client, self.writers[way], work, next(self._numbers), spread_s)
        return Turn(found, {name: seconds - before[name] for name, seconds in self._worked_s().items()})

    def _worked_s(self) -> dict[str, float]:
        return {name: processor_s(pid) for name, pid in self._processes.items()}


@asynccontextmanager
async def opened(model: str) -> AsyncIterator[tuple[Bench, int]]:
    """Start everything; and the size of the vocabulary."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        ours = await enter(executor(model if model in BUILT_IN else str(checkpoint(model)), SERVED))
        client = await enter(ExecutorClient(ours.target, session=True, timeout_s=600.0))
        scheduler = await enter(Scheduler(ours.target))
        flags = ["--target", ours.target, "--port", "0", "--served-model-name", model, "--log-format", "json"]
        if model in SHAPES:
            flags += ["--tokenizer", str(tokenizer_of(model, ours.vocab_size))]
        worker = await enter(served(*PROGRAM, "worker", "smg", *flags))
        host, port, of_router = await enter(router(worker.target))
        writers = {
            LIBRARY: by_scheduler(scheduler),
            WORKER: await enter(by_worker(worker.target)),
            ROUTER: by_router(host, port, model),
        }
        processes = {"executor": ours.pid, "worker": worker.process.pid, "router": of_router, "caller": os.getpid()}
        yield Bench(client, writers, processes), ours.vocab_size


def points(taken: Mapping[tuple[str, int], Sequence[Turn]]) -> list[dict[str, Any]]:
    """Medians of the rounds; ``of_library``: of the ratios to the library's of the same round."""
    found = []
    for (way, texts), turns in taken.items():
        rates, library = [[each.round.rate for each in taken[of, texts]] for of in (way, LIBRARY)]
        per_token = [each.per_token_us() for each in turns]
        token_us = {name: round(float(np.median([each[name] for each in per_token]))) for name in per_token[0]}
        found.append(
            {
                "way": way,
                "streams": texts,
                **medians([each.round for each in turns]),
                "of_library": shares(rates, library),
                "token_us": token_us,
                "target": TARGET if way == ROUTER else None,
            }
        )
    return found


async def run(options: argparse.Namespace) -> Record:
    """Measure everything and write the file."""
    settings = {"model": options.model, **SERVED, "tokens": options.tokens, "prompt": options.prompt}
    settings |= {"rounds": options.rounds, "smg": version("smg")}
    record = Record(options.name, settings, options.out)
    taken: dict[tuple[str, int], list[Turn]] = {}
    async with opened(options.model) as (bench, vocab_size):
        for texts in options.streams:
            work = Work(texts, options.prompt, options.tokens, vocab_size)
            few = Work(texts, options.prompt, min(8, options.tokens), vocab_size)
            rates = {way: (await bench.turn(way, few, 0.0)).round.rate for way in WAYS}
            for number in range(options.rounds):
                for way in WAYS:
                    spread_s = texts * options.tokens / rates[LIBRARY]
                    taken.setdefault((way, texts), []).append(await bench.turn(way, work, spread_s))
                    rates[way] = taken[way, texts][-1].round.rate
                told = ", ".join(f"{way} {rates[way]:,.0f} tok/s" for way in WAYS)
                print(f"{texts} streams, round {number + 1}: {told}", flush=True)
            record.save(points=points(taken))
        work, left = Work(options.beside, options.prompt, options.tokens, vocab_size), list[dict[str, Any]]()
        for way in WAYS if options.leaves else ():
            write = bench.writers[way]
            left.append({"way": way, **await cancels(bench.client, write, work, options.leaves, LEFT_AT)})
            record.save(leaves=left)
    return record


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fronts", description="What a router and a worker cost.")
    parser.add_argument("--model", default="demo", help="demo or a shape of benchmarks/shapes.json (demo)")
    parser.add_argument("--streams", type=int, nargs="+", help="texts at a time (1 16 64)")
    parser.add_argument("--tokens", type=int, help="of a text (default: 128)")
    parser.add_argument("--prompt", type=int, help="tokens of a prompt (default: 64)")
    parser.add_argument("--leaves", type=int, help=f"of clients, by each way; 0: none (default: {LEAVES})")
    options = read_options(parser, argv, rounds=5)
    options.streams = options.streams or ([2] if options.quick else list(STREAMS))
    options.tokens = options.tokens or (8 if options.quick else 128)
    options.prompt = options.prompt or (16 if options.quick else 64)
    options.leaves = (2 if options.quick else LEAVES) if options.leaves is None else options.leaves
    options.beside = 1 if options.quick else BESIDE
    options.name = "fronts" if options.model in BUILT_IN else f"fronts-{options.model}"
    options.out = out_of(options, options.name)
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, show, save."""

    def show(values: dict[str, Any]) -> None:
        tables.show(tables.fronts(values["points"]), "fronts")
        tables.show(tables.leaves(values.get("leaves", ())), "leaves")

    finish(run(parse(argv)), show, choose_loop("auto").make)


if __name__ == "__main__":
    main()
