"""R31: a fleet of executors loses no token. One is killed, one is drained, one is added, under load."""

from __future__ import annotations

import asyncio
import random
import signal
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from ferrum_rpc.client import Answer, ExecutorClient, Greedy, Sample
from ferrum_rpc.client.fleet import FleetClient, FleetSequence, Member
from tests.faults.figures import Figures, at_least, at_most, exactly
from tests.faults.sizes import Size
from tests.support.exposition import fetch, series, value
from tests.support.process import ServerProcess, serving

NEW_TOKENS: Final = 40
BATCH: Final = 16
LOST_S: Final = 10.0
"""Within this a lost sequence has its next token, though all that were lost are fed again at once."""
FOUND_S: Final = 5.0
"""Within this a new executor is used."""


@dataclass
class Life:
    """One sequence: a prompt, how tokens are chosen, what has come, and when its first token came from each owner."""

    prompt: list[int]
    output: Greedy | Sample
    tokens: list[int] = field(default_factory=list)
    owners: dict[str, float] = field(default_factory=dict)
    sequence: FleetSequence | None = None

    def got(self, token: int) -> None:
        self.tokens.append(token)
        if self.sequence is not None and self.sequence.owner is not None:
            self.owners.setdefault(self.sequence.owner.target, time.monotonic())


def lives_of(count: int, seed: int = 31) -> list[Life]:
    """Prompts, some of which begin alike; every other text is sampled with a seed of its own."""
    dice = random.Random(seed)
    shared = [dice.randrange(250) for _ in range(48)]
    return [
        Life(
            [*(shared if at % 4 == 0 else ()), *(dice.randrange(250) for _ in range(dice.randint(2, 40)))],
            Sample(0.8, seed=at) if at % 2 else Greedy(),
        )
        for at in range(count)
    ]


async def expected(target: str, lives: Sequence[Life]) -> list[list[int]]:
    """The texts of one executor, a stream each."""
    slots = asyncio.Semaphore(64)
    async with ExecutorClient(target, session=True) as client:

        async def text(life: Life) -> list[int]:
            async with slots, client.sequence() as sequence:
                stream = sequence.generate(life.prompt, max_tokens=NEW_TOKENS, output=life.output, stop=())
                return [token async for token in stream]

        return list(await asyncio.gather(*map(text, lives)))


class Load:
    """All lives at a time: a third as streams, a third by single calls, a third by batches over several owners."""

    def __init__(self, fleet: FleetClient, lives: Sequence[Life]) -> None:
        self._fleet = fleet
        self.lives = lives
        self.errors: list[str] = []
        self.late = asyncio.Event()
        """Those behind the first ``early`` begin when this is set."""
        self.early = len(lives) * 3 // 4

    @property
    def tokens(self) -> int:
        return sum(len(each.tokens) for each in self.lives)

    async def run(self) -> None:
        async def begin(lives: Sequence[Life]) -> None:
            streams, singles, batched = (lives[kind::3] for kind in range(3))
            batches = [batched[at : at + BATCH] for at in range(0, len(batched), BATCH)]
            await asyncio.gather(
                *map(self._streamed, streams), *map(self._single, singles), *map(self._batched, batches)
            )

        async def later() -> None:
            await self.late.wait()
            await begin(self.lives[self.early :])

        await asyncio.gather(begin(self.lives[: self.early]), later())

    async def reached(self, share: float, at: Member) -> None:
        """Wait until so much of all tokens is there, and some sequence has begun at an executor."""
        wanted = share * NEW_TOKENS * len(self.lives)
        while self.tokens < wanted or not any(_owned_by(each, at) for each in self.lives):  # noqa: ASYNC110 - it counts
            await asyncio.sleep(0.002)

    def _sequence(self, life: Life) -> FleetSequence:
        life.sequence = self._fleet.sequence()
        return life.sequence

    async def _streamed(self, life: Life) -> None:
        async with self._sequence(life) as sequence:
            async for token in sequence.generate(life.prompt, max_tokens=NEW_TOKENS, output=life.output, stop=()):
                life.got(token)

    async def _single(self, life: Life) -> None:
        async with self._sequence(life) as sequence:
            answer = await sequence.prefill(life.prompt, life.output)
            life.got(answer.token)
            while len(life.tokens) < NEW_TOKENS:
                answer = await sequence.decode(life.tokens[-1], life.output)
                life.got(answer.token)

    async def _batched(self, lives: Sequence[Life]) -> None:
        sequences = [self._sequence(life) for life in lives]
        for _ in range(NEW_TOKENS):
            items = [
                each.item(life.tokens[-1:] or life.prompt, life.output)
                for life, each in zip(lives, sequences, strict=True)
            ]
            for life, answer in zip(lives, await self._fleet.forward(items), strict=True):
                if isinstance(answer, Answer):
                    life.got(answer.token)
                else:
                    self.errors.append(f"{answer.reason} {answer.message}")
                    life.got(-1)
        await self._fleet.release(sequences)


@asynccontextmanager
async def executors(count: int, *of_first: str) -> AsyncIterator[list[ServerProcess]]:
    """Identity models that depend on the position, with metrics. ``of_first``: flags of the first alone."""
    flags = ("--identity-positional", "--metrics-port", "0", "--grace-s", "60")
    async with AsyncExitStack() as stack:
        made = [
            stack.enter_async_context(serving(*flags, *(() if number else of_first), kv_blocks=16_384))
            for number in range(count)
        ]
        yield list(await asyncio.gather(*made))


async def metric(server: ServerProcess, name: str, **labels: str) -> float:
    url = (await server.event("metrics_enabled"))["url"]
    return value(series(await asyncio.to_thread(fetch, url)), name, **labels)


async def foreign_handles(server: ServerProcess) -> float:
    """Handles of others that were refused there."""
    return await metric(server, "ferrum_foreign_handles_total")


async def foreign_until_the_end(server: ServerProcess) -> float:
    """The same, of one that is about to end: as it was last seen."""
    found = 0.0
    with suppress(OSError, HTTPException):  # HTTPException: it ended within an answer
        while True:
            found = await foreign_handles(server)
            await asyncio.sleep(0.05)
    return found


async def r31_a_fleet_loses_no_token(size: Size) -> Figures:
    """Three executors under load, of which one is killed and one is drained by SIGTERM, and a fourth that comes: every
    text is that of one executor alone, and nobody was asked to decode what is another's."""
    lives = lives_of(size.fleet_sequences)
    async with AsyncExitStack() as stack:
        listed = Path(stack.enter_context(TemporaryDirectory()), "targets")
        killed, drained, stays, comes = await stack.enter_async_context(executors(4))
        alone = await expected(stays.target, lives)
        _list(listed, killed, drained, stays)
        options: Any = {"look_every_s": 0.2, "resolve_every_s": 0.2, "timeout_s": 120.0}
        async with FleetClient(f"file:{listed}", connect=partial(ExecutorClient, session=True), **options) as fleet:
            members = fleet.members
            while len(members.serving) < 3:
                await members.changed(members.changes)
            owner = {each.target: each for each in members.there}
            load = Load(fleet, lives)
            running = asyncio.create_task(load.run())
            await load.reached(0.15, owner[killed.target])
            of_killed = [each for each in lives if _owned_by(each, owner[killed.target])]
            kill_at = time.monotonic()
            await killed.kill()
            await load.reached(0.2, owner[drained.target])
            asked = asyncio.create_task(foreign_until_the_end(drained))
            drained.signal(signal.SIGTERM)
            of_drained = sum(_owned_by(each, owner[drained.target]) for each in lives)
            _list(listed, killed, drained, stays, comes)
            listed_at = time.monotonic()
            while comes.target not in {each.target for each in members.serving}:
                await members.changed(members.changes)
            found_s = time.monotonic() - listed_at
            load.late.set()
            await running
            used = sum(comes.target in each.owners for each in lives)
            foreign = sum([await foreign_handles(each) for each in (stays, comes)])
        drained_status = await drained.ended()
        foreign += await asked
    different = sum(life.tokens != text for life, text in zip(lives, alone, strict=True))
    then = [[at for at in life.owners.values() if at > kill_at] for life in of_killed]
    waits = sorted(min(times) - kill_at for times in then if times)
    return Figures(
        "A fleet loses no token",
        exactly("texts that are not those of one executor", different, 0),
        exactly("decodes at an executor that is not the owner", foreign, 0),
        exactly("errors that a caller saw", len(load.errors), 0),
        exactly("exit status of the drained one", drained_status, 0),
        at_least("sequences whose owner was killed", len(waits), 1),
        at_least("sequences whose owner was drained", of_drained, 1),
        at_least("sequences at the one that came", used, 1),
        at_most("until a lost sequence had its next token, the slowest", waits[-1] if waits else 0, LOST_S, "s"),
        at_most("until the new one was used", found_s, FOUND_S, "s"),
        facts={
            "sequences": len(lives),
            "tokens of each": NEW_TOKENS,
            "next token of the lost, median s": round(statistics.median(waits), 3) if waits else 0,
            "errors": load.errors[:3],
        },
    )


def _list(path: Path, *servers: ServerProcess) -> None:
    """Write the targets to a fleet's file, all at once."""
    new = path.with_suffix(".new")
    new.write_text("".join(f"{each.target}\n" for each in servers))
    new.replace(path)


def _owned_by(life: Life, member: Member) -> bool:
    return life.sequence is not None and life.sequence.owner is member and len(life.tokens) < NEW_TOKENS
