"""R25: a lost sequence is rebuilt exactly, where the executor promises it."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Final

from ferrum_rpc.client import CacheMode, ExecutorClient, FullLogits, Sequence
from ferrum_rpc.config import ModelSettings
from ferrum_rpc.native import cpu
from ferrum_rpc.service.records import SequenceEnd
from tests.faults.figures import Figures, at_least, exactly
from tests.faults.sizes import Size
from tests.support.grammars import MODEL
from tests.support.process import serving
from tests.support.serving import Served, serve_model

NOTHING: Final = "this machine's kernels promise nothing"
LONGEST: Final = 90
IN_MEMORY: Final[dict[str, dict[str, Any]]] = {
    "bfloat16": {},
    **({each: {"quantize": each} for each in ("int8", "int4")} if cpu.flags() & {"avx2"} else {}),
}
"""Weights; portable C has 8 and 4 bits too, and takes minutes."""

HELD: Final = 4
"""Sequences at a time: they meet in steps, and what stands beside a span must not show in it."""


async def r25_a_lost_sequence_is_rebuilt_exactly(size: Size) -> Figures:
    """Sequences of random histories, each with a fork that is asked for its next row; then the sequence is lost, the
    client rebuilds it, and its next row must be the same bits. Lost by a reset and with its lease, in bfloat16 and with
    weights in 8 and 4 bits; by kill -9 and a restart, in float32."""
    dice, outcomes = random.Random(25), Counter[str]()
    for name, settings in IN_MEMORY.items():
        config = ModelSettings(path=str(MODEL), device="cpu", dtype="bfloat16", kv_blocks=512, **settings)
        async with serve_model(config) as served:
            forget = partial(_forget, served, dice)
            for _ in range(size.rebuilt_histories):
                await _lost_and_rebuilt(served.target, dice, outcomes, name, forget)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving("--identity-positional"))

        async def restart() -> None:
            nonlocal server
            await server.kill()
            server = await stack.enter_async_context(serving("--identity-positional", port=server.port))

        for _ in range(size.restarts):
            await _lost_and_rebuilt(server.target, dice, outcomes, "float32", restart)
    return Figures(
        "A lost sequence is rebuilt exactly",
        exactly("rows of rebuilt sequences with other bits", outcomes["different"], 0),
        *[
            at_least(f"rows compared in {name}", outcomes[name], 1)
            for name in (*IN_MEMORY, "float32")
            if not outcomes[f"{name}: {NOTHING}"]
        ],
        facts=dict(outcomes),
    )


async def _lost_and_rebuilt(
    target: str, dice: random.Random, outcomes: Counter[str], name: str, lose: Callable[[], Awaitable[None]]
) -> None:
    async with ExecutorClient(target, timeout_s=60.0) as client:
        if not (await client.info()).limits.exact_span_tokens:
            outcomes[f"{name}: {NOTHING}"] += 1
            return
        sequences = [client.sequence(rebuild=True, cache_mode=CacheMode.BYPASS) for _ in range(HELD)]
        for sequence in sequences:
            await _live(sequence, dice)
        token, expected = dice.randrange(250), []
        for sequence in sequences:
            [twin] = await sequence.fork()
            expected.append((await twin.decode(token, FullLogits())).logits.tobytes())
        await lose()
        for sequence, row in zip(sequences, expected, strict=True):
            got = (await sequence.decode(token, FullLogits())).logits.tobytes()
            outcomes[name] += 1
            outcomes["different"] += got != row


async def _live(sequence: Sequence, dice: random.Random) -> None:
    """A prompt in pieces, then steps, drafts and roll-backs."""
    prompt = [dice.randrange(250) for _ in range(dice.randint(1, LONGEST))]
    await sequence.prefill(prompt, chunk=dice.choice((7, 33, LONGEST)))
    for _ in range(dice.randint(1, 24)):
        match dice.randrange(5):
            case 0:
                await sequence.truncate(dice.randint(1, sequence.length))
            case 1:
                await sequence.verify([dice.randrange(250) for _ in range(dice.randint(1, 40))])
            case _:
                await sequence.decode(dice.randrange(250))


async def _forget(served: Served, dice: random.Random) -> None:
    """Lose every sequence, by a reset or because the leases ran out."""
    state = served.server.state
    if dice.random() < 0.5:
        for lease in state.leases.due(math.inf):
            await state.ended(state.end_lease(lease, expired=True), SequenceEnd.EXPIRED)
    else:
        async with ExecutorClient(served.target) as operator:
            await operator.reset()
