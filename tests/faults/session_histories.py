"""Random histories of sequences by `ExecutorClient` over one session stream. For R2.

The client does what it promises by itself: reopens the stream with the same lease and sends again under the same
request ids. Where it gives up, the same line of code is run again, as its documentation says.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, Final

import numpy as np

from ferrum_rpc.client import ExecutorClient, ResendPolicy, Sequence, TopTokens
from ferrum_rpc.errors import DeadlineExceeded, TransportError

AT_ONCE: Final = 8
STEPS_OF_A_HISTORY: Final = 25
ATTEMPT_S: Final = 1.0
MOST_TRIES: Final = 200
RECONNECT: Final = (("grpc.initial_reconnect_backoff_ms", 20), ("grpc.max_reconnect_backoff_ms", 100))

Rows = list[tuple[Any, ...]]


async def session_histories(target: str, steps: int, seed: int = 2) -> tuple[list[Rows], int]:
    """``steps`` steps in all; the answers to every history, and how often a call had to be made again by its caller."""
    again = 0
    seen: list[Rows] = [[] for _ in range(AT_ONCE)]
    resend = ResendPolicy(times=3, backoff_s=0.01, attempt_timeout_s=ATTEMPT_S)

    async def surely(call: Callable[[], Awaitable[Any]]) -> Any:
        nonlocal again
        for _ in range(MOST_TRIES):
            try:
                return await call()
            except (TransportError, DeadlineExceeded):
                again += 1
        raise AssertionError("the executor does not answer")

    async def worker(index: int) -> None:
        dice = random.Random(f"{seed} {index}")
        left = steps // AT_ONCE
        while left > 0:
            async with client.sequence() as sequence:
                left -= await history(sequence, dice, min(left, STEPS_OF_A_HISTORY), seen[index])

    async def history(sequence: Sequence, dice: random.Random, most: int, rows: Rows) -> int:
        def tokens(count: int) -> list[int]:
            return [dice.randrange(256) for _ in range(count)]

        def note(answer: Any) -> None:
            top = answer.top_tokens
            rows.append((answer.length, np.asarray(top.token_ids).tobytes(), np.asarray(top.logits).tobytes()))

        prompt = tokens(dice.randint(1, 9))
        note(await surely(lambda: sequence.prefill(prompt, TopTokens(4))))
        for _ in range(most - 1):
            kind = dice.random()
            back = dice.randint(1, sequence.length) if kind < 0.3 else None
            if kind > 0.9:
                length = dice.randint(1, sequence.length)
                await surely(lambda length=length: sequence.truncate(length))
                rows.append((sequence.length,))
            else:
                fed = tokens(dice.randint(1, 4))
                note(await surely(lambda fed=fed, back=back: sequence.verify(fed, TopTokens(4), truncate_to=back)))
        return most

    async with ExecutorClient(target, session=True, resend=resend, channel_options=RECONNECT) as client:
        await asyncio.gather(*(worker(index) for index in range(AT_ONCE)))
    return seen, again
