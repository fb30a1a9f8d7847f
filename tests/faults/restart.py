"""R4: a restart is never mistaken for the same executor."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack
from typing import Final

from ferrum_rpc.client import ExecutorClient, Sequence
from ferrum_rpc.errors import Reason
from ferrum_rpc.executor.v1 import types_pb2
from ferrum_rpc.wire.status import error_from_status
from tests.faults.figures import Figures, exactly
from tests.faults.sizes import Size
from tests.support.process import Dialled, dial, serving
from tests.support.wiring import item

BATCH: Final = 200
HELPED: Final = 8
STEPS: Final = 6


async def _many(client: Dialled, count: int) -> list[types_pb2.KvHandle]:
    handles: list[types_pb2.KvHandle] = []
    while len(handles) < count:
        items = [item([1, 2, 3]) for _ in range(min(BATCH, count - len(handles)))]
        response = await client.batch_prefill(*items)
        handles += [each.output.handle for each in response.results]
    return handles


async def _reasons(client: Dialled, handles: list[types_pb2.KvHandle]) -> Counter[str]:
    """How the executor answers each handle."""
    reasons: Counter[str] = Counter()
    for first in range(0, len(handles), BATCH):
        items = [item([4], each) for each in handles[first : first + BATCH]]
        response = await client.batch_decode(*items)
        for each in response.results:
            reasons["accepted" if each.HasField("output") else error_from_status(each.error).reason] += 1
    return reasons


async def _generate(sequence: Sequence, token: int, steps: int) -> list[int]:
    out = [token]
    while len(out) <= steps:
        out.append((await sequence.decode(out[-1])).token)
    return out[1:]


async def r4_a_restart_is_never_mistaken(size: Size) -> Figures:
    """Kill a server that holds sequences, start another on its port, present every old handle; and go on with sequences
    whose client rebuilds them."""
    dice = random.Random(4)
    flags = ("--identity-positional", "--max-sequences", str(size.old_handles + 100))
    blocks = size.old_handles + 256
    prompts = [[dice.randrange(256) for _ in range(12)] for _ in range(HELPED)]
    expected = []
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(serving(*flags, kv_blocks=blocks))
        client = await stack.enter_async_context(ExecutorClient(first.target, timeout_s=30.0))
        for prompt in prompts:
            async with client.sequence() as whole:
                expected.append(await _generate(whole, (await whole.prefill(prompt)).token, 2 * STEPS))
        carefree = [client.sequence(rebuild=True) for _ in prompts]
        tokens = []
        for sequence, prompt in zip(carefree, prompts, strict=True):
            tokens.append(await _generate(sequence, (await sequence.prefill(prompt)).token, STEPS))
        async with dial(first.target) as raw:
            old = await _many(raw, size.old_handles)
        await first.kill()
        second = await stack.enter_async_context(serving(*flags, port=first.port, kv_blocks=blocks))
        async with dial(second.target) as raw:
            reasons = await _reasons(raw, old)
        rest = await asyncio.gather(
            *[_generate(sequence, begun[-1], STEPS) for sequence, begun in zip(carefree, tokens, strict=True)]
        )
    different = sum(begun + end != whole for begun, end, whole in zip(tokens, rest, expected, strict=True))
    return Figures(
        "A restart is never mistaken",
        exactly("old handles answered INSTANCE_MISMATCH", reasons[Reason.INSTANCE_MISMATCH], size.old_handles),
        exactly("sequences that went on with other tokens", different, 0),
        facts={"answers": dict(reasons), "rebuilt sequences": len(carefree)},
    )
