"""R22 and R30 with a front in between: callers of a worker that die, and hostile ones. And such callers, a program:

    python -m tests.faults.front_callers TARGET STREAMS TOKENS [TOKEN]
    python -m tests.faults.front_callers TARGET COUNT flood TOKEN REQUEST

asks for so many texts of so many tokens, each with log-probabilities, reads the first message of each and says
``asked``. With 1,500 tokens it goes on to read; with fewer it reads nothing more. A flood is so many calls at once of a
request, in hexadecimal digits, and says ``asked`` once all have been answered. TOKEN: the caller's.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Final

import grpc

from ferrum_rpc.client import ExecutorClient
from tests.faults.figures import Figure, Figures, at_least, at_most, exactly
from tests.faults.fronts import Fronted, engine_of, fronted
from tests.faults.hostile import ALICE, HEALTH, MIB, WITHOUT, Trial, going_on, sending, unfinished
from tests.faults.sizes import Size
from tests.support.process import dial, next_line, program
from tests.support.proxy import proxied
from tests.support.tokens import bearer, token_file
from tests.support.workers import request

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

BOB: Final = "a-token-of-bob"
"""The neighbour of the hostile caller."""

FLOODED_S: Final = 4.0
"""Within this a neighbour has its text while 2,000 calls of another caller arrive at once: gRPC accepts one call in a
turn of the event loop, and every text that runs takes part of the turn."""

ROOM_FOR_ALL: Final = ("--kv-blocks", "4096")
"""Of the executor: room for as many texts of a flood as run at once. While a cache is full, a neighbour waits for runs
that are under way."""

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
        left, _ = await both.worker.settled_descriptors(opened, FREED_S)
        figures.append(at_most("connections left", left - opened, 0))
    return Figures("The dead hold nothing: a front", *figures, facts=facts)


async def _died(both: Fronted, name: str, size: Size) -> tuple[int, int, float]:
    """The sequences when a client died, what was left of them, and after how many seconds nothing was."""
    async with proxied(both.worker.target) as proxy:
        target = proxy.target if name == "silence" else both.worker.target
        async with program("tests.faults.front_callers", target, size.front_dead, LONG, says="asked") as client:
            most, _, _ = await both.held()
            if name == "silence":
                proxy.weather.silent = True
            else:
                client.send_signal(signal.Signals[name])
            left, seconds = await both.released(BUSY_S)
    return most, left, seconds


# --- R30 --------------------------------------------------------------------------------------------------------------


def messages(room: int) -> dict[str, tuple[str, bytes]]:
    """Messages of ``room`` bytes to a worker that take as much to read as they can, by their name; each with its
    method."""
    from smg_grpc_proto.generated import vllm_engine_pb2 as pb

    def generate(made: Any) -> tuple[str, bytes]:
        return "Generate", made.SerializeToString()

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
    from ferrum_rpc.fronts.port import max_request_bytes

    figures: list[Figure] = []
    least, within_s = (20, FLOODED_S) if size.absolute else (4, BUSY_S)
    async with AsyncExitStack() as stack:
        tokens = stack.enter_context(token_file(f"alice {ALICE}", f"bob {BOB}"))
        flags = ("--serve-tokens", str(tokens))
        both = await stack.enter_async_context(fronted(*flags, of_executor=ROOM_FOR_ALL, fresh=size.absolute))
        client = await stack.enter_async_context(dial(both.worker.target))
        engine = engine_of(client.channel)

        async def a_text() -> None:
            async for _ in engine.Generate(request(max_tokens=4), metadata=bearer(BOB)):
                pass

        probes = {"a health check": client.health_check, "a neighbour's text": a_text}
        async with ExecutorClient(both.executor.target) as alone:
            largest = max_request_bytes((await alone.info()).model.max_context)
        sent = messages(largest - 1024)
        for name in ("token ids", "a long text"):  # the allocator keeps some of what was freed
            method, data = sent[name]
            async with sending(both.worker, size.hostile_messages // 3, SERVICE + method, data, streams=True) as ended:
                await ended.wait()
        trial = Trial(both.worker, size, probes, ARENAS)
        await trial.alone()
        for name, (method, data) in sent.items():
            count, streams = size.hostile_messages // 3, method == "Generate"
            hostile = sending(both.worker, count, SERVICE + method, data, streams=streams)
            figures += await trial.of(name, hostile, 2 * len(data), least=least)
        flood = request(max_tokens=2, n=8, temperature=1.0).SerializeToString()
        wrong = request(top_p=7.0).SerializeToString()
        for name, hostile, held in (
            ("a flood of texts", _calling(both, size, "flood", flood), 8 * MIB),
            ("a flood of refusals", _calling(both, size, "flood", wrong), 8 * MIB),
            ("streams that are not read", _calling(both, size, str(SHORT)), UNREAD_MIB * MIB),
            ("requests that do not end", unfinished(both.worker, SERVICE + "Generate"), WITHOUT),
            ("health checks that do not end", unfinished(both.worker, HEALTH), WITHOUT),
        ):
            figures += await trial.of(name, hostile, held, times=1.0, least=least, within_s=within_s)
        left, _ = await both.released(BUSY_S)
        figures.append(exactly("sequences, blocks and texts left", left, 0))
    return Figures("No caller can stop the server: a front", *figures, facts=trial.facts)


@asynccontextmanager
async def _calling(both: Fronted, size: Size, kind: str, data: bytes = b"") -> AsyncIterator[asyncio.Event]:
    """Callers in a process of their own, until they have said that they asked."""
    arguments = (both.worker.target, size.front_unread, kind, ALICE, data.hex())
    async with (
        program("tests.faults.front_callers", *arguments) as callers,
        going_on(next_line(callers, "asked")) as ended,
    ):
        yield ended


async def flood(target: str, count: str, token: str, data: str) -> None:
    """All calls at once; most of them are refused."""
    async with dial(target) as client:
        call = client.channel.unary_stream(SERVICE + "Generate")

        async def send() -> None:
            with suppress(grpc.aio.AioRpcError):
                async for _ in call(bytes.fromhex(data), metadata=bearer(token)):
                    pass

        await asyncio.gather(*(send() for _ in range(int(count))))


async def main(target: str, streams: str, tokens: str, token: str = "", data: str = "") -> None:
    """The clients, until they are killed."""
    if tokens == "flood":
        await flood(target, streams, token, data)
        print("asked", flush=True)
        return
    async with dial(target) as client:
        engine = engine_of(client.channel)
        made = [
            request(name=str(each), stream=True, max_tokens=int(tokens), ignore_eos=True, logprobs=8)
            for each in range(int(streams))
        ]
        calls = [aiter(engine.Generate(each, metadata=bearer(token) if token else ())) for each in made]
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
