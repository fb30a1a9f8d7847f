"""R15: nothing leaks, however a call ends.

One thing does: a call whose deadline passes takes some bytes with it in a bare grpc.aio server too (55 to 110 a call
with 1.76 and 1.85). No Python object is left, so they are of its C or Cython part; which, is not known. The endings
show that of ours nothing is left behind by such a call.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from ferrum_rpc.client import TRY_LATER, ExecutorClient, GrammarKind, Greedy
from ferrum_rpc.scheduler import STEPS_IN_FLIGHT, Scheduler, TextRequest, TokenStream
from ferrum_rpc.service.handles import TOMBSTONES
from ferrum_rpc.service.replay import PLAIN_BYTES, RECORDS
from tests.faults.endings import ENDINGS, World
from tests.faults.figures import Figures, at_least, at_most, exactly
from tests.faults.models import IDENTITY, Model
from tests.faults.sizes import GRAMMAR_NOISE_BYTES, TEXT_BYTES, Size
from tests.support.process import Dialled, ServerProcess, dialled, runs, serving
from tests.support.raw_session import raw_session
from tests.support.serving import Gate, serve_model
from tests.support.tokens import token_file
from tests.support.waiting import until
from tests.support.wiring import decode, item, prefill, refusal, release

SHORT_LEASE_S: Final = 0.5
SETTLED_S: Final = 5.0
"""For the short lease, a sweep, and a machine that is busy elsewhere."""
FILL_BATCH: Final = 256
CALLS_OF_A_LIFE: Final = 4
ENTRIES: Final = RECORDS // PLAIN_BYTES
"""More answers than are recorded."""

WARM_LIVES: Final = ENTRIES * 11 // 20
"""Each leaves two recorded answers. Only when the last answer of the quick filling has made room for one of a life does
memory stand still: measured, 300 bytes a life until then and none after it."""
WARM_CALLS: Final = 5_000
"""After 1,000 calls a process of this size still moves by 0.4 MB either way, after these by 0.15."""

LEAK_PER_100_000: Final = 1 << 20
"""What R15 allows 100,000 calls."""
NOISE_BYTES: Final = 512 << 10
"""What allocators and page granularity move a process by without a leak: no bound is held below it."""


CALLERS: Final = ("one", "two")
MAX_GRAMMARS: Final = 8
GRAMMARS_OF_A_SCHEDULER: Final = 10
WARM_GRAMMARS: Final = 240
"""For memory. By then the pool was written once, and steps of nearly all sizes have been computed."""
GRAMMAR_BYTES: Final = 64 << 10
"""Of the text of a grammar, nearly all of it a comment: more than a text by it may leave."""


async def r15_nothing_leaks(size: Size, model: Model = IDENTITY) -> Figures:
    """Every ending in turn: afterwards no sequence, no block, no slot, no lease, no session and no queued work is
    left."""
    gate = Gate()
    left: Counter[str] = Counter()
    config = model.config(block_size=4, kv_blocks=64)
    times = {"lease_ttl_s": SHORT_LEASE_S, "min_lease_ttl_s": SHORT_LEASE_S}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        served = await stack.enter_async_context(serve_model(config, stage=gate, park_dir=folder, **times))
        world = World(served, gate)
        state = served.server.state
        for _ in range(size.endings):
            for ending in ENDINGS:
                await ending(world)
                try:
                    await until(lambda: _clean(state), SETTLED_S)
                except TimeoutError:
                    left[ending.__name__] += 1
                    await served.reset()
            await served.check()
        created, released = state.counters.sequences_created, state.counters.sequences_released
    figures = [
        at_least("endings", len(ENDINGS), 13),
        exactly("sequences created and not released", created - released, 0),
        exactly("endings that left something behind", sum(left.values()), 0),
    ]
    facts: dict[str, object] = {"rounds": size.endings, "sequences": created, "left": dict(left)}
    # what is remembered of whole lives is the same for every model; what a sequence has of states grows while it lives
    whole_lives = size.leak_whole_lives and not model.recurrent
    if size.leak_whole_lives or not model.recurrent:
        grown, warm = await _growth(model, size.leak_calls, whole_lives=whole_lives, fresh=size.leak_whole_lives)
        bound = max(NOISE_BYTES, round(LEAK_PER_100_000 * size.leak_calls / 100_000))
        figures.append(at_most("memory that calls after warm-up took", grown, bound, "bytes"))
        facts |= {"calls": size.leak_calls, "rss bytes": warm}
    return Figures("Nothing leaks", *figures, facts=facts)


async def r15_grammars_come_and_go(size: Size) -> Figures:
    """Grammars are registered, used by texts that end in every way, evicted for others, and lose their caller. Each has
    a process, which ends with it, and with the server, which is killed."""
    with token_file(*[f"{each} secret-{each}" for each in CALLERS]) as tokens:
        flags = ("--tokens", str(tokens), "--max-grammars", str(MAX_GRAMMARS), "--replay-bytes", "64KiB")
        async with serving(*flags, model="demo", kv_blocks=64, fresh=size.leak_whole_lives) as server:
            numbers = itertools.count()
            least = WARM_GRAMMARS if size.leak_whole_lives else 1
            await _grammars(server, max(least, size.adapter_cycles // 4), numbers)
            warm, opened = await server.settled_rss_bytes(), server.descriptors()
            most, ends = await _grammars(server, size.adapter_cycles, numbers)
            grown = await server.settled_rss_bytes() - warm
            with suppress(TimeoutError):  # the figure below reports it
                await until(lambda: len(server.descendants()) <= MAX_GRAMMARS + 1, SETTLED_S)
            processes = server.descendants()
            opened = server.descriptors() - opened
            async with ExecutorClient(server.target, token=f"secret-{CALLERS[0]}", lease=None) as client:
                pressure = (await client.status()).pressure
            await server.kill()
            with suppress(TimeoutError):  # the figure below reports it
                await until(lambda: not any(map(runs, processes)), SETTLED_S)
    held = pressure.sequences + pressure.total_blocks - pressure.free_blocks
    figures = [
        at_least("grammars, each used by a text", sum(ends.values()), size.adapter_cycles),
        exactly("sequences and blocks left", held, 0),
        at_most("grammar processes at a time, with the tokenizer's", most, 2 * MAX_GRAMMARS + 1),
        at_most("grammar processes afterwards, with the tokenizer's", len(processes), MAX_GRAMMARS + 1),
        exactly("processes that have outlived the server", sum(map(runs, processes)), 0),
        at_most("descriptors left", opened, MAX_GRAMMARS),
    ]
    if size.leak_whole_lives:
        bound = GRAMMAR_NOISE_BYTES + TEXT_BYTES * size.adapter_cycles
        figures.append(at_most("memory that grammars after warm-up took", grown, bound, "bytes"))
    return Figures(
        "Nothing leaks: grammars that come and go",
        *figures,
        facts={"rss bytes": warm, "grown": grown, "ends": {str(end): count for end, count in ends.items()}},
    )


async def _grammars(server: ServerProcess, count: int, numbers: Iterator[int]) -> tuple[int, Counter[Any]]:
    """So many grammars of two callers, each caller's `GRAMMARS_OF_A_SCHEDULER` by one scheduler, which closes while
    its last texts are written. Returns the maximum of processes, and how the texts ended."""
    most, ends = 0, Counter[Any]()

    async def one(scheduler: Scheduler, way: int) -> TokenStream:
        nonlocal most
        while True:
            try:
                text = f"// {'-' * GRAMMAR_BYTES}\nstart: /{next(numbers)}[a-f]{{10,40}}/"
                output = Greedy(grammar=await scheduler.register_grammar(GrammarKind.LARK, text), grammar_from=4)
                break
            except TRY_LATER as error:  # texts in progress name all of its share
                await asyncio.sleep(error.retry_after_s or 0)
        deadline_s = 0.02 if way == 1 else None
        request = TextRequest(prompt=b"Text", max_tokens=50, output=output, deadline_s=deadline_s)
        stream = scheduler.submit(request)
        match way:
            case 0 | 1:
                await stream.all()
            case 2:
                await anext(stream)
                stream.cancel()
        most = max(most, len(server.descendants()))
        return stream

    async def caller(name: str) -> None:
        ahead = {"session": True, "steps_in_flight": STEPS_IN_FLIGHT, "tokens_ahead": True}
        connect = partial(ExecutorClient, **ahead, token=f"secret-{name}")
        for _ in range(-(-count // (len(CALLERS) * GRAMMARS_OF_A_SCHEDULER))):
            async with Scheduler(server.target, connect=connect) as scheduler:
                streams = [await one(scheduler, number % 4) for number in range(GRAMMARS_OF_A_SCHEDULER)]
            ends.update(each.end for each in streams)

    await asyncio.gather(*map(caller, CALLERS))
    return most, ends


def _clean(state: Any) -> bool:
    """Nothing is held, and nothing waits."""
    pressure = state.pressure()
    return (
        pressure.sequences == 0
        and state.parked.sequences == 0
        and pressure.free_blocks == pressure.total_blocks
        and pressure.free_slots == pressure.total_slots
        and pressure.queued_items == 0
        and len(state.leases) == 0
        and state.sessions == 0
        and state.counters.sequences_created == state.counters.sequences_released
    )


async def _growth(model: Model, calls: int, *, whole_lives: bool, fresh: bool) -> tuple[int, int]:
    """Bytes by which a server process grew over so many calls after warm-up, and its size after warm-up. With
    ``whole_lives`` calls create and release sequences, and what is bounded by design (recorded answers, tombstones) is
    filled first; else they are calls on sequences that live from before the warm-up on: each has its most recorded
    answers by then, 21 KB of them."""
    slots = {"state_slots": 2 * FILL_BATCH} if model.recurrent else {}
    flags = (*model.flags(**slots), "--replay-bytes", "64KiB", "--max-sequences", str(2 * FILL_BATCH))
    flags += ("--max-batch-items", str(FILL_BATCH))
    async with dialled(*flags, model=model.path, kv_blocks=1024, fresh=fresh) as (server, client):
        if whole_lives:
            await _fill(client)
            await _whole_lives(client, WARM_LIVES * CALLS_OF_A_LIFE)
            warm = await server.settled_rss_bytes()
            await _whole_lives(client, calls)
        else:
            handles = [await prefill(client, [1, 2, 3, number]) for number in range(8)]
            handles = await _long_lives(client, handles, max(WARM_CALLS, calls // 5))
            warm = await server.settled_rss_bytes()
            await _long_lives(client, handles, calls)
        return await server.settled_rss_bytes() - warm, warm


async def _fill(client: Dialled) -> None:
    """Twice as many sequences as are remembered, each with a recorded creation and a recorded step."""
    async with raw_session(client.executor) as session:
        for first in range(0, 2 * max(ENTRIES, TOMBSTONES), FILL_BATCH):
            items = [item([1], request_id=f"fill:{first + number}") for number in range(FILL_BATCH)]
            items = [item([1], each.output.handle, request_id="d") for each in await session.step(*items)]
            await session.release(*[each.output.handle for each in await session.step(*items)])
        await session.close()


async def _whole_lives(client: Dialled, count: int) -> None:
    """Good and bad calls of sequences from their creation to their release, eight at a time."""
    run, left = uuid.uuid4().hex, count

    async def worker(number: int) -> None:
        nonlocal left
        while left > 0:
            left -= CALLS_OF_A_LIFE
            handle = await prefill(client, [1, 2, 3, number], request_id=f"{run}:{left}")
            await release(client, await _step(client, handle, "d"))

    await asyncio.gather(*[worker(number) for number in range(8)])


async def _long_lives(client: Dialled, handles: list[Any], count: int) -> list[Any]:
    """Good and bad calls on these sequences, and their handles afterwards. Each third step truncates by the two before:
    states are then fed again."""
    run, left = uuid.uuid4().hex, count

    async def worker(handle: Any) -> Any:
        nonlocal left
        for number in itertools.count():
            if left <= 0:
                return handle
            left -= 2
            back = {} if number % 3 else {"truncate_to": 4}
            handle = await _step(client, handle, f"{run}:{left}", **back)

    return await asyncio.gather(*[worker(handle) for handle in handles])


async def _step(client: Dialled, handle: Any, request_id: str, **fields: Any) -> Any:
    """Two calls: a step, and one with the handle that it has made stale."""
    newest = await decode(client, [4], handle, request_id=request_id, **fields)
    assert await refusal(decode(client, [4], handle))
    return newest
