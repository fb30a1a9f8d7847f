"""R36: a state rolls back exactly."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import numpy as np

from ferrum_rpc.client import CacheMode, ExecutorClient, FullLogits, OutputSpec, Positions, Sequence
from ferrum_rpc.config import ModelSettings
from ferrum_rpc.errors import StepFailed
from ferrum_rpc.failpoints import Failpoints, parse_failpoints
from tests.faults.figures import Figures, at_least, exactly
from tests.faults.sizes import Size
from tests.support.checkpoints import RECURRENT_SHAPE, make_checkpoint
from tests.support.serving import serve_model

SHAPE: Final = RECURRENT_SHAPE | {"vocab_size": 300}
RULES: Final = "after_reserve=error@p0.03;before_forward=error@p0.03;before_commit=error@p0.03;truncate=error@p0.03"
OFF: Final = 0.2
"""In standard deviations of a row: a state that is wrong is off by one and more, bfloat16 by 0.05."""

SLOTS: Final = 5
LAST: Final = OutputSpec(Positions.LAST, FullLogits())
ALL: Final = OutputSpec(Positions.ALL, FullLogits())
Result = TypeVar("Result")


async def r36_a_state_rolls_back_exactly(size: Size) -> Figures:
    """Sequences of a model with recurrent layers: prompts in pieces, steps, drafts of which any number is rejected, by
    `TruncateKv` or by the next call, forks, and failures of any stage. After each cut within the last step the next row
    has the bits of a sequence that never had the tokens. After a deeper one it is near them."""
    dice, outcomes = random.Random(36), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        cache = {"kv_blocks": 512, "block_size": 4, "state_slots": SLOTS}
        config = ModelSettings(
            str(make_checkpoint(folder, "qwen3_5", **SHAPE)), device="cpu", dtype="bfloat16", **cache
        )
        points = Failpoints(parse_failpoints(RULES))
        async with (
            serve_model(config, failpoints=points) as served,
            ExecutorClient(served.target, timeout_s=60.0) as client,
        ):
            exact = (await client.info()).limits.exact_span_tokens
            for _ in range(size.state_histories):
                await _History(client, dice, outcomes, exact=bool(exact)).run()
            pressure = (await client.status()).pressure
    return Figures(
        "A state rolls back exactly",
        exactly("rows with other bits after a cut within the last step", outcomes["other bits"], 0),
        exactly("rows that are off after a deeper cut", outcomes["off"], 0),
        exactly("slots that are not free in the end", pressure.total_slots - pressure.free_slots, 0),
        at_least("cuts within the last step", outcomes["within"], 1),
        at_least("deeper cuts", outcomes["deeper"], 1),
        at_least("calls that failed", outcomes["failed"], 1),
        *([at_least("rows compared by their bits", outcomes["rows by their bits"], 1)] if exact else []),
        facts=dict(outcomes) | {"exact_span_tokens": exact},
    )


class _History:
    """One sequence: the ``pieces`` that it was fed in, a token each but for the longer ones, and whether its rows still
    have the bits of those."""

    def __init__(self, client: ExecutorClient, dice: random.Random, outcomes: Counter[str], *, exact: bool) -> None:
        self.client, self.dice, self.outcomes = client, dice, outcomes
        self.exact = exact
        self.pieces: list[list[int]] = []
        self.sequence = client.sequence(cache_mode=CacheMode.BYPASS)

    @property
    def length(self) -> int:
        return sum(map(len, self.pieces))

    async def run(self) -> None:
        await self.feed(self.tokens(self.dice.choice((5, 40, 90))))
        for _ in range(self.dice.randint(3, 8)):
            match self.dice.randrange(6):
                case 0:
                    await self.feed(self.tokens(self.dice.randint(33, 60)))
                case 1:
                    await self.feed(self.tokens(self.dice.randint(1, 32)))
                    await self.cut(self.dice.randint(0, self.length), by_call=self.dice.random() < 0.5)
                case 2:
                    await self.fork()
                case _:
                    count = self.dice.randint(1, 32)
                    await self.feed(self.tokens(count))
                    await self.cut(self.length - self.dice.randint(0, count), by_call=self.dice.random() < 0.5)
        await self.until_done(self.sequence.release)

    def tokens(self, count: int) -> list[int]:
        return [self.dice.randrange(300) for _ in range(count)]

    async def until_done(self, call: Callable[[], Awaitable[Result]]) -> Result:
        while True:
            try:
                return await call()
            except StepFailed:
                self.outcomes["failed"] += 1

    async def feed(self, tokens: list[int]) -> None:
        long = len(tokens) > 32
        if long or not self.pieces:
            await self.until_done(lambda: self.sequence.prefill(tokens, LAST))
        else:
            await self.until_done(lambda: self.sequence.verify(tokens, ALL))
        self.pieces += [tokens] if long else [[each] for each in tokens]
        self.last = len(tokens)

    async def cut(self, length: int, *, by_call: bool) -> None:
        """Cut back, then feed a token and look at its row."""
        pieces, last = list[list[int]](), self.length - self.last
        for piece in self.pieces:
            room = length - sum(map(len, pieces))
            if room > 0:
                pieces.append(piece[:room])
        within = length >= last and self.last <= 32
        self.outcomes["within" if within else "deeper"] += 1
        self.exact = self.exact and (within or not length)
        if not by_call:
            await self.until_done(lambda: self.sequence.truncate(length))
        self.pieces, token = pieces, self.dice.randrange(300)
        to = length if by_call else None
        answer = await self.until_done(lambda: self.sequence.decode(token, LAST, truncate_to=to))
        self.pieces.append([token])
        self.last = 1
        await self.compare(answer.logits)

    async def fork(self) -> None:
        """Feed a child beside, which is at any length."""
        at = self.dice.randint(max(0, self.length - self.last), self.length)
        [child] = await self.until_done(lambda: self.sequence.fork(at=at))
        token = self.dice.randrange(300)
        await self.until_done(lambda: child.decode(token, LAST))
        await self.until_done(child.release)
        await self.feed([token])

    async def compare(self, row: np.ndarray) -> None:
        """With that of a new sequence, which is fed the pieces alone."""
        other = self.client.sequence(cache_mode=CacheMode.BYPASS)
        wanted = await self.until_done(lambda: _fed(other, self.pieces))
        await self.until_done(other.release)
        self.outcomes["rows"] += 1
        if self.exact:
            self.outcomes["rows by their bits"] += 1
            self.outcomes["other bits"] += row.tobytes() != wanted.tobytes()
        self.outcomes["off"] += bool(np.abs(row - wanted).max() > OFF * wanted.std())


async def _fed(sequence: Sequence, pieces: list[list[int]]) -> np.ndarray:
    """The last row; those that were fed before a failure are not fed again."""
    fed = 0
    for piece in pieces:
        fed += len(piece)
        if fed > sequence.length:
            answer = await sequence.prefill(piece, LAST)
    return answer.logits
