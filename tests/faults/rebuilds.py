"""R25: a lost sequence is rebuilt exactly, where the executor promises it."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Final

import numpy as np

from ferrum_rpc.client import Answer, CacheMode, ExecutorClient, FullLogits, Sequence
from ferrum_rpc.native import cpu
from ferrum_rpc.service.records import SequenceEnd
from tests.faults.figures import Figures, at_least, exactly
from tests.faults.models import DEMO, IDENTITY, Model
from tests.faults.sizes import Size
from tests.faults.states import OFF
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


async def r25_a_lost_sequence_is_rebuilt_exactly(size: Size, model: Model = DEMO) -> Figures:
    """Sequences of random histories, each with a fork that is asked for its next row; then the sequence is lost, the
    client rebuilds it, and its next row must be the same bits. Lost by a reset and with its lease, in bfloat16 and with
    weights in 8 and 4 bits; by kill -9 and a restart, of the identity model in float32, or of the one with recurrent
    states. Where states were fed again behind chunks that have other bits in another division, rows must be near each
    other."""
    dice, outcomes = random.Random(25), Counter[str]()
    for name, settings in IN_MEMORY.items():
        config = model.config(dtype="bfloat16", kv_blocks=512, **settings)
        async with serve_model(config) as served:
            forget = partial(_forget, served, dice)
            for _ in range(size.rebuilt_histories):
                await _lost_and_rebuilt(served.target, dice, outcomes, name, forget)
    restarted, dtype = (model, "bfloat16, restarted") if model.recurrent else (IDENTITY, "float32")
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving(*restarted.flags(), model=restarted.path))

        async def restart() -> None:
            nonlocal server
            await server.kill()
            again = serving(*restarted.flags(), model=restarted.path, port=server.port)
            server = await stack.enter_async_context(again)

        for _ in range(size.restarts):
            await _lost_and_rebuilt(server.target, dice, outcomes, dtype, restart)
    promised = sum(outcomes[name] for name in (*IN_MEMORY, dtype))
    return Figures(
        "A lost sequence is rebuilt exactly",
        exactly("rows of rebuilt sequences with other bits", outcomes["different"], 0),
        *([exactly("rows that are off, where tokens were fed again", outcomes["off"], 0)] if model.recurrent else []),
        *[
            at_least(f"rows compared in {name}", outcomes[name], 1)
            for name in (*IN_MEMORY, dtype)
            if not outcomes[f"{name}: {NOTHING}"]
        ],
        *([at_least("rows compared by their bits", outcomes["by their bits"], 1)] if promised else []),
        facts=dict(outcomes),
    )


async def _lost_and_rebuilt(
    target: str, dice: random.Random, outcomes: Counter[str], name: str, lose: Callable[[], Awaitable[None]]
) -> None:
    async with ExecutorClient(target, timeout_s=60.0) as client:
        exact = (await client.info()).limits.exact_span_tokens
        if not exact:
            outcomes[f"{name}: {NOTHING}"] += 1
            return
        sequences = [client.sequence(rebuild=True, cache_mode=CacheMode.BYPASS) for _ in range(HELD)]
        fed = [_Fed(exact) for _ in sequences]
        for sequence, each in zip(sequences, fed, strict=True):
            await _live(sequence, dice, each)
        token, expected = dice.randrange(250), []
        for sequence, each in zip(sequences, fed, strict=True):
            [twin] = await sequence.fork()
            answer = await twin.decode(token, FullLogits())
            each.note(answer, 1)
            expected.append(answer.logits)
        await lose()
        for sequence, each, row in zip(sequences, fed, expected, strict=True):
            got = (await sequence.decode(token, FullLogits())).logits
            outcomes[name] += 1
            if each.bits:
                outcomes["by their bits"] += 1
                outcomes["different"] += got.tobytes() != row.tobytes()
            else:
                outcomes["off"] += bool(np.abs(got - row).max() > OFF * row.std())


class _Fed:
    """How a sequence was fed. ``bits``: whether those of its rows are promised. They are not once states were fed again
    behind a span of more than ``exact`` tokens."""

    def __init__(self, exact: int) -> None:
        self.bits, self._exact, self._long = True, exact, False

    def note(self, answer: Answer, tokens: int) -> None:
        """An answer to a call, whose longest span had so many tokens."""
        self.bits = self.bits and not (self._long and answer.recomputed_tokens)
        self._long = self._long or tokens > self._exact


async def _live(sequence: Sequence, dice: random.Random, fed: _Fed) -> None:
    """A prompt in pieces, then steps, drafts and roll-backs."""
    prompt, chunk = [dice.randrange(250) for _ in range(dice.randint(1, LONGEST))], dice.choice((7, 33, LONGEST))
    longest = dice.choice((32, 40))
    fed.note(await sequence.prefill(prompt, chunk=chunk), min(chunk, len(prompt)))
    for _ in range(dice.randint(1, 24)):
        match dice.randrange(5):
            case 0:
                await sequence.truncate(dice.randint(1, sequence.length))
            case 1:
                draft = [dice.randrange(250) for _ in range(dice.randint(1, longest))]
                fed.note(await sequence.verify(draft), len(draft))
            case _:
                fed.note(await sequence.decode(dice.randrange(250)), 1)


async def _forget(served: Served, dice: random.Random) -> None:
    """Lose every sequence, by a reset or because the leases ran out."""
    state = served.server.state
    if dice.random() < 0.5:
        for lease in state.leases.due(math.inf):
            await state.ended(state.end_lease(lease, expired=True), SequenceEnd.EXPIRED)
    else:
        async with ExecutorClient(served.target) as operator:
            await operator.reset()
