"""A worker in this process or in one of its own, a raw stub to speak to it, and requests."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from ferrum_rpc import cli
from tests.support.grammars import MODEL
from tests.support.process import ServerProcess, running

PROMPT = list(b"In the beginning God created the heaven and ")


def request(
    text: str | None = None, *, prompt: Iterable[int] = PROMPT, stream: bool = False, name: str = "r", **given: Any
) -> Any:
    """A ``GenerateRequest``, greedy and of 24 tokens if nothing else is ``given``."""
    from smg_grpc_proto.generated import vllm_engine_pb2 as pb

    sampling = {"temperature": 0.0, "max_tokens": 24, **given}
    made = pb.GenerateRequest(request_id=name, stream=stream, sampling_params=pb.SamplingParams(**sampling))
    if text is None:
        made.tokenized.input_ids.extend(prompt)
    else:
        made.text = text
    return made


def flags_of(*flags: str) -> argparse.Namespace:
    """The command line of a worker on a free port."""
    parser, _ = cli.build_parser(settings=False)
    arguments = parser.parse_args(["worker", "smg", "--port", "0", *flags])
    arguments.token = None
    return arguments


@dataclass(slots=True)
class Working:
    """A running worker. ``engine``: its stub; ``port``: the server."""

    port: Any
    engine: Any
    ending: asyncio.Event

    async def generate(self, request: Any) -> list[Any]:
        """All messages of a request."""
        return [each async for each in self.engine.Generate(request)]


@asynccontextmanager
async def working(*targets: str, flags: tuple[str, ...] = ()) -> AsyncIterator[Working]:
    """A worker of executors, with the demo's tokenizer."""
    from smg_grpc_proto.generated import vllm_engine_pb2_grpc

    from ferrum_rpc.fronts.program import serving

    named = [word for each in targets for word in ("--target", each)]
    ending = asyncio.Event()
    async with serving(flags_of(*named, "--tokenizer", str(MODEL), *flags), ending) as port:
        assert port is not None
        async with grpc.aio.insecure_channel(port.target) as channel:
            yield Working(port, vllm_engine_pb2_grpc.VllmEngineStub(channel), ending)


def worker_process(*flags: str, fresh: bool = False) -> AbstractAsyncContextManager[ServerProcess]:
    """``ferrum-rpc worker smg`` on a free port, which may not serve yet. The rest as for `process.running`."""
    return running("worker", "smg", "--port", "0", "--log-format", "json", *flags, fresh=fresh)
