"""R22 and R30 with a front in between: callers of a worker that die, and hostile ones. And such callers, a program:

    python -m tests.faults.front_callers TARGET STREAMS TOKENS [TOKEN]

asks for so many texts of so many tokens, each with log-probabilities, reads the first message of each and says
``asked``. With 1,500 tokens it goes on to read; with fewer it reads nothing more. TOKEN: the caller's.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.faults.figures import Figure, Figures, at_least, at_most, exactly
from tests.faults.fronts import Fronted, engine_of, fronted
from tests.faults.hostile import HEALTH, MIB, WITHOUT, Trial, sending, unfinished
from tests.faults.process import dial, program
from tests.faults.proxy import proxied
from tests.faults.sizes import Size
from tests.faults.waiting import until
from tests.workers import request

SERVICE: Final = "/vllm.grpc.engine.VllmEngine/"
LONG: Final = 1500
"""Tokens of a text that does not end while a client dies."""

SHORT: Final = 100
STEP_MS: Final = 10
TIME_S: Final = 0.4
TIMEOUT_S: Final = 0.3
"""Keepalive of the worker."""

FREED_S: Final = 2.0
SILENT_S: Final = 2 * (TIME_S + TIMEOUT_S) + FREED_S
BUSY_S: Final = 20.0
"""The same where tests share two cores."""

LEFT: Final = 16
"""MiB that may be left of a worker's memory."""

ALICE: Final = "a-token-of-alice"
BOB: Final = "a-token-of-bob"
"""The hostile caller and its neighbour."""

FLOODED_S: Final = 2.0
"""Within this a neighbour has its text, however many texts of others wait."""

MESSAGE_BYTES: Final = (8 << 20) - 1024
ARENAS: Final = 32 * MIB
"""What the worker's allocator swings by: it reads large messages in threads, each of which has an arena."""

UNREAD_MIB: Final = 64
"""What streams that are not read may take of the worker."""


# --- R22 --------------------------------------------------------------------------------------------------------------


async def r22_a_front_holds_nothing_of_the_dead(size: Size) -> Figures:
    """Clients that are killed, that stand still, and whose network falls silent, in the middle of their texts: the
    worker ends the texts, and the executor frees them."""
    keepalive = ("--serve-keepalive-time-s", str(TIME_S), "--serve-keepalive-timeout-s", str(TIMEOUT_S))
    slow = ("--failpoints", f"before_forward=delay:{STEP_MS}")
    figures: list[Figure] = []
    facts: dict[str, object] = {"texts of each": size.front_dead}
    async with fronted(*keepalive, of_executor=slow, fresh=size.absolute) as both:
        if size.absolute:
            await _died(both, "SIGKILL", size)  # what libraries and allocators keep, they keep from now on
        opened = both.worker.descriptors()
        for name in ("SIGKILL", "SIGSTOP", "silence"):
            before, lengths = both.worker.rss_bytes(), (await both.ended())["length"]
            most, left, seconds = await _died(both, name, size)
            allowed = FREED_S if name == "SIGKILL" else SILENT_S
            figures += [
                at_least(f"sequences at the {name}", most, size.front_dead),
                exactly(f"sequences, blocks and texts left after {name}", left, 0),
                exactly(f"texts that ended by themselves after {name}", (await both.ended())["length"] - lengths, 0),
                at_most(f"until nothing was left after {name}", seconds, allowed if size.absolute else BUSY_S, "s"),
                at_most(f"memory left after {name}", (both.worker.rss_bytes() - before) / MIB, LEFT, "MiB"),
            ]
            facts[f"seconds after {name}"] = round(seconds, 3)
        with suppress(TimeoutError):  # the figure below reports it
            await until(lambda: both.worker.descriptors() <= opened, FREED_S, every_s=0.02)
        figures.append(at_most("connections left", both.worker.descriptors() - opened, 0))
    return Figures("R22", "The dead hold nothing: a front", tuple(figures), facts)


async def _died(both: Fronted, name: str, size: Size) -> tuple[int, int, float]:
    """The sequences when a client died, what was left of them, and after how many seconds nothing was."""
    async with proxied(both.worker.target) as proxy:
        target = proxy.target if name == "silence" else both.worker.target
        async with program("tests.faults.front_callers", target, str(size.front_dead), str(LONG)) as client:
            assert client.stdout is not None
            assert await client.stdout.readline() == b"asked\n"
            most, _, _ = await both.held()
            if name == "silence":
                proxy.weather.silent = True
            else:
                client.send_signal(signal.Signals[name])
            left, seconds = await both.released(BUSY_S)
    return most, left, seconds


# --- R30 --------------------------------------------------------------------------------------------------------------


def messages() -> dict[str, tuple[str, bytes]]:
    """Messages to a worker that take as much to read as they can, by their name; each with its method."""
    from smg_grpc_proto.generated import vllm_engine_pb2 as pb

    def generate(made: Any) -> tuple[str, bytes]:
        return "Generate", made.SerializeToString()

    room = MESSAGE_BYTES
    grammar = 8 << 10
    return {
        "token ids": generate(request(prompt=[1] * room)),
        "a long text": generate(request("a" * room)),
        "a text of many words": generate(request("a " * 30_000)),
        "a long grammar": generate(request(grammar="root ::= " + '"a" | ' * (room // 6 - 16) + '"b"')),
        "a grammar in EBNF": generate(request(grammar="root ::= " + '"a" | ' * (grammar // 6 - 16) + '"b"')),
        "a deep grammar": generate(
            request(grammar="root ::= " + "(" * (grammar // 2 - 16) + ")" * (grammar // 2 - 16))
        ),
        "a deep schema": generate(request(json_schema="[" * grammar)),
        "a large schema": generate(request(json_schema=json.dumps({"enum": list(range(30_000))}))),
        "choices": generate(request(choice={"choices": ["a"] * (grammar // 4)})),
        "stop strings": generate(request(stop=["a"] * (room // 4))),
        "biases": generate(request(logit_bias={each % 256: 1.0 for each in range(256)})),
        "stop tokens": generate(request(stop_token_ids=range(room // 4))),
        "a long request id": generate(request(name="i" * room)),
        "aborts": ("Abort", pb.AbortRequest(request_ids=["a"] * (room // 4)).SerializeToString()),
        "embeddings": ("Embed", pb.EmbedRequest(tokenized={"input_ids": [1] * room}).SerializeToString()),
        "noise": ("Generate", b"\xff" * room),
    }


async def r30_no_caller_stops_a_front(size: Size) -> Figures:
    """Callers of a worker that send what takes long to read, that flood it, and that read nothing; and a neighbour."""
    figures: list[Figure] = []
    least, within_s = (20, FLOODED_S) if size.absolute else (4, BUSY_S)
    async with AsyncExitStack() as stack:
        tokens = Path(stack.enter_context(TemporaryDirectory())) / "tokens"
        tokens.touch(0o600)
        tokens.write_text(f"alice {ALICE}\nbob {BOB}\n")
        both = await stack.enter_async_context(fronted("--serve-tokens", str(tokens), fresh=size.absolute))
        client = await stack.enter_async_context(dial(both.worker.target))
        engine, health = engine_of(client.channel), health_pb2_grpc.HealthStub(client.channel)

        async def a_text() -> None:
            async for _ in engine.Generate(request(max_tokens=4), metadata=bearer(BOB)):
                pass

        probes: Any = {"a health check": lambda: health.Check(health_pb2.HealthCheckRequest())}
        probes["a neighbour's text"] = a_text
        sent = messages()
        for name in ("token ids", "a long text"):  # the allocator keeps some of what was freed
            method, data = sent[name]
            async with sending(both.worker, 8, SERVICE + method, data, streams=True) as ended:
                await ended.wait()
        trial = Trial(both.worker, size, probes, ARENAS)
        await trial.alone()
        for name, (method, data) in sent.items():
            hostile = sending(
                both.worker,
                size.hostile_messages // 3,
                SERVICE + method,
                data,
                streams=method == "Generate",
            )
            figures += await trial.of(name, hostile, 2 * len(data), least=least)
        flood = request(max_tokens=2, n=8, temperature=1.0).SerializeToString()
        for name, hostile, held in (
            ("a flood of texts", _flooding(both, size, flood), 8 * MIB),
            ("a flood of refusals", _flooding(both, size, request(top_p=7.0).SerializeToString()), 8 * MIB),
            ("streams that are not read", _unread(both, size), UNREAD_MIB * MIB),
            ("requests that do not end", unfinished(both.worker, SERVICE + "Generate"), WITHOUT),
            ("health checks that do not end", unfinished(both.worker, HEALTH), WITHOUT),
        ):
            figures += await trial.of(name, hostile, held, times=1.0, least=least, within_s=within_s)
        left, _ = await both.released(BUSY_S)
        figures.append(exactly("sequences, blocks and texts left", left, 0))
    return Figures("R30", "No caller can stop the server: a front", tuple(figures), trial.facts)


@asynccontextmanager
async def _flooding(both: Fronted, size: Size, data: bytes) -> AsyncIterator[asyncio.Event]:
    """As `sending`, but with all messages at once."""
    ended = asyncio.Event()

    async def send(call: Any) -> None:
        with suppress(Exception):  # refused, as most of them are
            async for _ in call(data, metadata=bearer(ALICE)):
                pass

    async def flood() -> None:
        try:
            async with dial(both.worker.target) as client:
                call = client.channel.unary_stream(SERVICE + "Generate")
                await asyncio.gather(*(send(call) for _ in range(size.front_unread)))
        finally:
            ended.set()

    task = asyncio.create_task(flood())
    try:
        yield ended
    finally:
        await task


@asynccontextmanager
async def _unread(both: Fronted, size: Size) -> AsyncIterator[asyncio.Event]:
    """Streams of another process that reads nothing but their first messages."""
    ended = asyncio.Event()
    arguments = (both.worker.target, str(size.front_unread), str(SHORT), ALICE)
    async with program("tests.faults.front_callers", *arguments) as callers:
        assert callers.stdout is not None
        output = callers.stdout

        async def asked() -> None:
            try:
                assert await output.readline() == b"asked\n"
            finally:
                ended.set()

        task = asyncio.create_task(asked())
        yield ended
        await task


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a caller with a token; none without."""
    return (("authorization", f"Bearer {token}"),) if token else ()


async def main(target: str, streams: str, tokens: str, token: str = "") -> None:
    """The clients, until they are killed."""
    async with dial(target) as client:
        engine = engine_of(client.channel)
        made = [
            request(name=str(each), stream=True, max_tokens=int(tokens), ignore_eos=True, logprobs=8)
            for each in range(int(streams))
        ]
        calls = [aiter(engine.Generate(each, metadata=bearer(token))) for each in made]
        for call in calls:
            await anext(call)
        print("asked", flush=True)

        async def read_on(call: Any) -> None:
            async for _ in call:
                pass

        if int(tokens) >= LONG:
            await asyncio.gather(*map(read_on, calls))
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
