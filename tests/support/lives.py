"""A scheduler's life in small, to be lived twice: in peace, and while the network loses what it can."""

from __future__ import annotations

import random
from typing import Any

from ferrum_rpc.client import Answer, ExecutorClient, FullLogits
from tests.support.serving import Served


async def counters(served: Served) -> tuple[int, int]:
    """Sequences that live, and tokens that were fed since the start."""
    return len(served.server.state.handles), served.server.state.engine.counters.tokens


async def play(client: ExecutorClient, seed: int) -> list[Any]:
    """A scheduler's life in small: everything that changes a sequence, and what it saw."""
    dice = random.Random(seed)
    seen: list[Any] = []
    async with client.sequence() as one, client.sequence() as two:
        for sequence in (one, two):
            first = await sequence.prefill([dice.randrange(256) for _ in range(6)])
            seen.append(first.token)
        for _ in range(25):
            sequence = dice.choice((one, two))
            token = dice.randrange(256)
            match dice.randrange(6):
                case 0:
                    seen.append((await sequence.decode(token)).token)
                case 1:
                    seen.append((await sequence.verify([token, 5, 6])).tokens.tolist())
                case 2:
                    await sequence.truncate(dice.randint(1, sequence.length))
                case 3:
                    roll_back = dice.randint(1, sequence.length)
                    seen.append((await sequence.decode(token, truncate_to=roll_back)).token)
                case 4:
                    results = await client.forward([one.item([token]), two.item([token, 9])])
                    seen.append([each.token for each in results if isinstance(each, Answer)])
                case _:
                    [child] = await sequence.fork(at=dice.randint(1, sequence.length))
                    async with child:
                        seen.append((await child.decode(token)).token)
            seen.append((one.length, two.length))
        for sequence in (one, two):
            row = (await sequence.decode(0, FullLogits())).logits[0]
            seen.append(row.round(4).tolist())
    return seen
