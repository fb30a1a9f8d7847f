"""R15 and R31 with a front in between: the texts of a worker end in every way, and its executors come and go."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import grpc

from ferrum_rpc.client import ExecutorClient
from tests.faults.figures import Figures, at_least, at_most, exactly
from tests.faults.sizes import GRAMMAR_NOISE_BYTES, TEXT_BYTES, Size
from tests.support.exposition import fetch, series, value
from tests.support.process import ServerProcess, dial, serving
from tests.support.waiting import until
from tests.support.workers import request, worker_process, working

AT_ONCE: Final = 16
"""Calls of a worker at a time."""

WARM_TEXTS: Final = 2400
"""Before memory is measured, at full size. The executor's grew by 21 MB in the second 400, by 1 in the sixth."""

WORKER_NOISE_BYTES: Final = 1 << 20
"""What a worker's process moves by without a leak."""

SHORT_MEMORY: Final = ("--replay-bytes", "64KiB")
"""Of the executor: answers that it remembers by design are no leak."""

LATE_S: Final = 0.03
RELEASED_S: Final = 2.0
PROMPTS: Final = 5
FLEET_TOKENS: Final = 60


@dataclass(frozen=True)
class Fronted:
    """An executor and a worker in front of it, each a process. ``metrics``: the address of the worker's."""

    executor: ServerProcess
    worker: ServerProcess
    metrics: str

    async def ended(self) -> Counter[str]:
        """Ended texts by their reasons."""
        found = series(await asyncio.to_thread(fetch, self.metrics))
        name = "ferrum_worker_texts_total"
        return Counter({dict(labels)["reason"]: int(count) for (each, labels), count in found.items() if each == name})

    async def held(self) -> tuple[int, int, int]:
        """Sequences and used blocks of the executor, and texts of the worker."""
        async with dial(self.executor.target) as client:
            held = await client.held()
        found = series(await asyncio.to_thread(fetch, self.metrics))
        return *held, int(sum(value(found, f"ferrum_worker_{each}") for each in ("running", "waiting")))

    async def released(self, patience_s: float) -> tuple[int, float]:
        """Wait until nothing is held; what still is, and the seconds that it took."""
        began = time.monotonic()
        while True:
            held, seconds = sum(await self.held()), time.monotonic() - began
            if not held or seconds > patience_s:
                return held, seconds
            await asyncio.sleep(0.05)  # both processes are asked: neither sends an event


@asynccontextmanager
async def fronted(*flags: str, of_executor: tuple[str, ...] = (), fresh: bool = False) -> AsyncIterator[Fronted]:
    """Both processes, with the demo model. ``flags``: of the worker. ``fresh``: as for `serving`."""
    async with (
        serving(*of_executor, model="demo", kv_blocks=2048, fresh=fresh) as executor,
        worker_process("--target", executor.target, "--metrics-port", "0", *flags, fresh=fresh) as worker,
    ):
        worker.target = (await worker.event("ready"))["target"]
        yield Fronted(executor, worker, (await worker.event("metrics_enabled"))["url"])


def engine_of(channel: grpc.aio.Channel) -> Any:
    """The stub of a worker."""
    from smg_grpc_proto.generated import vllm_engine_pb2_grpc

    return vllm_engine_pb2_grpc.VllmEngineStub(channel)


# --- R15 --------------------------------------------------------------------------------------------------------------


class Caller:
    """Asks a worker for texts that end in every way. ``made``: the answers and refusals so far, by their kind."""

    def __init__(self, target: str, engine: Any) -> None:
        self._target = target
        self._engine = engine
        self._numbers = itertools.count()
        self.made = Counter[str]()

    async def texts(self, count: int) -> None:
        """So many texts, `AT_ONCE` at a time, each ending in its turn."""
        ways = itertools.cycle(self._ways())
        left = iter(range(count))

        async def one_by_one() -> None:
            for _ in left:
                way = next(ways)
                try:
                    self.made[await way()] += 1
                except grpc.aio.AioRpcError as error:
                    self.made[error.code().name] += 1

        await asyncio.gather(*(one_by_one() for _ in range(AT_ONCE)))

    def _ways(self) -> Iterator[Callable[[], Awaitable[str]]]:
        for given in (
            {},
            {"n": 3, "temperature": 0.9, "seed": 3},
            {"stop": ["e"]},
            {"stop_token_ids": [ord(" ")]},
            {"regex": "[a-f]{2,5}x"},
            {"logprobs": 2, "prompt_logprobs": 1},
            {"top_p": 7.0},
            {"regex": "[a"},
            {"max_tokens": 4000, "ignore_eos": True, "prompt": b"a " * 1000},
        ):
            yield lambda given=given: self._whole(**given)
            yield lambda given=given: self._whole(stream=True, **given)
        yield from (self._gone, self._leaves, self._is_late, self._aborted, self._disconnected, self._embedded)

    def _request(self, **given: Any) -> Any:
        number = next(self._numbers)
        prompt = f"{number % PROMPTS} In the beginning God created the heaven ".encode()
        return request(name=str(number), **{"prompt": prompt, **given})

    def _endless(self) -> Any:
        return self._request(stream=True, max_tokens=1500, ignore_eos=True)

    async def _whole(self, **given: Any) -> str:
        last: Any = None
        async for each in self._engine.Generate(self._request(**given)):
            last = each
        return str(last.complete.finish_reason)

    async def _gone(self) -> str:
        """The client leaves before its first token."""
        self._engine.Generate(self._endless()).cancel()
        return "gone"

    async def _leaves(self) -> str:
        call = self._engine.Generate(self._endless())
        await call.read()
        call.cancel()
        return "left"

    async def _is_late(self) -> str:
        async for _ in self._engine.Generate(self._endless(), timeout=LATE_S):
            pass
        return "in time"

    async def _aborted(self) -> str:
        from smg_grpc_proto.generated import vllm_engine_pb2 as pb

        made = self._endless()
        messages = aiter(self._engine.Generate(made))
        await anext(messages)
        await self._engine.Abort(pb.AbortRequest(request_ids=[made.request_id]))
        last: Any = None
        async for each in messages:
            last = each
        return str(last.complete.finish_reason)

    async def _disconnected(self) -> str:
        async with dial(self._target) as other:
            await engine_of(other.channel).Generate(self._endless()).read()
        return "disconnected"

    async def _embedded(self) -> str:
        from smg_grpc_proto.generated import vllm_engine_pb2 as pb

        prompt = pb.TokenizedInput(input_ids=b"In the beginning")
        await self._engine.Embed(pb.EmbedRequest(request_id="e", tokenized=prompt))
        return "embedded"


KINDS: Final = frozenset(
    {"length", "stop", "abort", "gone", "left", "disconnected", "embedded", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED"}
)


async def r15_a_front_leaks_nothing(size: Size) -> Figures:
    """Texts of a worker that end in every way: afterwards neither the worker nor the executor has anything of them."""
    async with fronted(of_executor=SHORT_MEMORY, fresh=size.absolute) as both, dial(both.worker.target) as client:
        caller = Caller(both.worker.target, engine_of(client.channel))
        await caller.texts(WARM_TEXTS if size.absolute else len(list(caller._ways())))
        await both.released(RELEASED_S)
        warm, opened = [each.rss_bytes() for each in (both.worker, both.executor)], both.worker.descriptors()
        caller.made.clear()
        await caller.texts(size.front_texts)
        left, seconds = await both.released(10 * RELEASED_S)
        open_now, _ = await both.worker.settled_descriptors(opened, RELEASED_S)
        grown = [each.rss_bytes() - was for each, was in zip((both.worker, both.executor), warm, strict=True)]
        ended = await both.ended()
    figures = [
        at_least("calls", caller.made.total(), size.front_texts),
        exactly("ways to end that did not occur", len(KINDS - caller.made.keys()), 0),
        exactly("sequences, blocks and texts left", left, 0),
        exactly("texts that failed", ended["error"], 0),
        at_most("until nothing was left", seconds, RELEASED_S, "s"),
        at_most("connections of the worker left", open_now - opened, 0),
    ]
    if size.absolute:
        bound = GRAMMAR_NOISE_BYTES + TEXT_BYTES * size.front_texts
        figures += [
            at_most("memory that they took of the worker", grown[0], WORKER_NOISE_BYTES, "bytes"),
            at_most("memory that they took of the executor", grown[1], bound, "bytes"),
        ]
    facts: dict[str, object] = {"ends": dict(caller.made), "rss bytes": warm, "grown": grown}
    return Figures("Nothing leaks: a front", *figures, facts=facts)


# --- R31 --------------------------------------------------------------------------------------------------------------


async def r31_a_front_loses_no_token(size: Size) -> Figures:
    """Streams of an OpenAI client through a router and a worker with three executors, of which one is killed and one is
    drained: every text is the one that an undisturbed fleet writes."""
    from tests.e2e.test_worker_router import openai_of, router

    prompt = "And it came to pass that"  # at most 32 tokens: the same bits, whatever of them is cached
    async with AsyncExitStack() as stack:
        dies, drains, stays = [await stack.enter_async_context(serving(model="demo")) for _ in range(3)]
        worker = await stack.enter_async_context(working(dies.target, drains.target, stays.target))
        url = await stack.enter_async_context(router(worker.port.target))
        client = await stack.enter_async_context(openai_of(url))
        begun: set[int] = set()
        errors: list[str] = []

        async def text(number: int) -> tuple[str, list[str]]:
            asked: Any = {"max_tokens": FLEET_TOKENS, "temperature": 0.8, "seed": number}
            asked |= {"stream": True, "extra_body": {"ignore_eos": True}}
            messages: Any = [{"role": "user", "content": f"{number}. {prompt}"}]
            found, reasons = "", list[str]()
            try:
                async for each in await client.chat.completions.create(model="demo", messages=messages, **asked):
                    for part in each.choices:
                        found += part.delta.content or ""
                        reasons += [part.finish_reason] if part.finish_reason else []
                    if found:
                        begun.add(number)
            except Exception as error:
                errors.append(f"{type(error).__name__} {error}")
            return found, reasons

        expected = await asyncio.gather(*map(text, range(size.front_streams)))
        begun.clear()
        texts = asyncio.gather(*map(text, range(size.front_streams)))
        await until(lambda: len(begun) >= size.front_streams // 2, 60)
        at_kill = len(begun)
        await dies.kill()
        async with ExecutorClient(drains.target) as operator:
            await operator.drain(60.0)
        found = await texts
        counts = worker.port.methods.load.scheduler.counts
        with suppress(TimeoutError):  # the figure below reports it
            await until(lambda: not worker.port.methods.texts, RELEASED_S)
        left = worker.port.methods.texts
    return Figures(
        "A fleet loses no token: a front",
        exactly("texts that ended otherwise than by their length", sum(each[1] != ["length"] for each in found), 0),
        exactly(
            "texts unlike those of an undisturbed fleet", sum(a != b for a, b in zip(found, expected, strict=True)), 0
        ),
        exactly("errors that a client saw", len(errors), 0),
        exactly("texts left at the worker", left, 0),
        at_least("streams that had begun at the kill", at_kill, size.front_streams // 2),
        at_least("executors lost", counts.executors_lost, 1),
        facts={"streams": len(found), "tokens of each": FLEET_TOKENS, "errors": errors[:3]},
    )
