"""R33: one truth about a hung device. The engine's process of one executor is stopped, and another executor whole.

A process that is stopped uses no CPU time, and is found within 2 s. See R19 for a GPU whose waiting thread spins.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Final

from ferrum_rpc.client import ExecutorClient
from ferrum_rpc.client.fleet import FleetClient, Member
from ferrum_rpc.executor.v1 import info_pb2
from tests.faults.figures import Figures, at_least, at_most, exactly
from tests.faults.fleet import NEW_TOKENS, Life, Load, executors, expected, foreign_handles, lives_of, metric
from tests.faults.health import NOT_SERVING, SERVING, Watcher
from tests.faults.sizes import Size
from tests.support.process import ServerProcess, dial, program
from tests.support.waiting import until

NOTICED_S: Final = 2.0
LOOK_S: Final = 0.02
PATIENCE_S: Final = 30.0
HELD: Final = 3
"""Sequences that each of the two has when they are stopped, at least."""


async def _once(holds: Callable[[], Awaitable[bool]], since: float) -> float:
    """Seconds from ``since`` until it holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not await holds():  # noqa: ASYNC110 - what is looked at is another process's
            await asyncio.sleep(LOOK_S)
    return time.monotonic() - since


async def _noticed(server: ServerProcess, member: Member, since: float) -> dict[str, float]:
    """How long each of those that report the state of an executor needed to say that it hangs."""
    async with dial(server.target) as client:
        watcher = Watcher(client.health)
        await watcher.until(SERVING)

        async def by_status() -> bool:
            return (await client.status()).state == info_pb2.EXECUTOR_STATE_HUNG

        async def by_metrics() -> bool:
            return await metric(server, "ferrum_executor_state", state="hung") == 1

        async def by_watch() -> float:
            return await watcher.until(NOT_SERVING) - since

        times = await asyncio.gather(
            by_watch(), _once(by_status, since), _once(by_metrics, since), _no_longer_serving(member, since)
        )
        watcher.reading.cancel()
    return dict(zip(("health", "GetStatus", "metrics", "members"), times, strict=True))


async def _no_longer_serving(member: Member, since: float) -> float:
    await until(lambda: not member.serving)
    return time.monotonic() - since


async def _commands_word(server: ServerProcess) -> str:
    """The state by `ferrum-rpc status`."""
    async with program("ferrum_rpc.cli", "status", "--json", "--target", server.target) as process:
        assert process.stdout is not None
        return str(json.loads(await process.stdout.read())["state"])


class Stop:
    """Two processes that stand still, and what was there when they stopped."""

    def __init__(self, pids: Iterable[int], lives: Iterable[Life], owners: Iterable[Member]) -> None:
        lives, self._pids, self.owners = list(lives), list(pids), list(owners)
        for pid in self._pids:
            os.kill(pid, signal.SIGSTOP)
        self.began = time.monotonic()
        self.held = _held(lives, self.owners)

    async def lasts(self, after_s: float, given_up: bool) -> None:
        """Until so many seconds after the stop; where the fleet is to give the owners up, as long again if it needs
        that on a machine that is busy elsewhere."""
        await asyncio.sleep(self.began + after_s - time.monotonic())
        if given_up:
            with suppress(TimeoutError):  # the figures of what was not rebuilt report it
                await until(lambda: all(each.gone for each in self.owners), after_s)

    def cont(self) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGCONT)

    def leave_out_ended(self) -> None:
        """Drop texts whose last answer was on its way when the processes stopped. Call it while they stand still."""

        def goes_on(life: Life) -> bool:
            return len(life.tokens) < NEW_TOKENS or len(life.owners) > 1

        self.held = [list(filter(goes_on, lives)) for lives in self.held]

    def rebuilt(self) -> list[int]:
        """Of those that each had, how many went on elsewhere."""
        targets = [each.target for each in self.owners]
        return [
            sum(set(life.owners) != {target} for life in lives)
            for target, lives in zip(targets, self.held, strict=True)
        ]


def _held(lives: Iterable[Life], owners: Iterable[Member]) -> list[list[Life]]:
    """What each owner has, of the texts that are under way."""
    going = [each for each in lives if each.sequence is not None and 0 < len(each.tokens) < NEW_TOKENS]
    return [[each for each in going if each.sequence and each.sequence.owner is owner] for owner in owners]


async def r33_one_truth_about_a_hung_device(size: Size) -> Figures:
    """Three executors under load. The engine's process of one and the whole of another are stopped, first for less than
    the patience of the fleet, then for more."""
    short, long = (lives_of(size.fleet_sequences, seed) for seed in (33, 34))
    misplaced: list[Member] = []
    async with executors(3, "--engine", "process") as servers:
        engine_stops, stops, stays = servers
        [engine] = engine_stops.children()
        alone = [await expected(stays.target, each) for each in (short, long)]
        targets = [each.target for each in servers]
        connect = partial(ExecutorClient, session=True)
        async with FleetClient(
            targets, connect=connect, timeout_s=120.0, hung_patience_s=size.hung_patience_s
        ) as fleet:
            members = fleet.members

            async def all_serve() -> list[Member]:
                while len(members.serving) < len(targets):
                    await members.changed(members.changes)
                by_target = {each.target: each for each in members.serving}
                return [by_target[target] for target in targets]

            async def wave(lives: list[Life], stop_s: float) -> tuple[Stop, dict[str, float], str, Load]:
                first, second, _ = await all_serve()
                load = Load(fleet, lives)
                running = asyncio.create_task(load.run())
                while min(map(len, _held(lives, (first, second)))) < HELD:  # noqa: ASYNC110 - it counts
                    await asyncio.sleep(0.001)
                stop = Stop((engine, stops.pid), lives, (first, second))
                try:
                    times, times["members, of one that is silent"] = await asyncio.gather(
                        _noticed(engine_stops, first, stop.began), _no_longer_serving(second, stop.began)
                    )
                    load.late.set()
                    word = await _commands_word(engine_stops) if lives is long else ""
                    stop.leave_out_ended()
                    await stop.lasts(stop_s, given_up=lives is long)
                    placed = [each.sequence.owner for each in lives[load.early :] if each.sequence is not None]
                    misplaced.extend(each for each in placed if each in stop.owners)
                finally:
                    stop.cont()
                await running
                await all_serve()
                return stop, times, word, load

            brief, first_times, _, first_load = await wave(short, size.short_stop_s)
            lasting, times, word, load = await wave(long, size.long_stop_s)
            used = sum([await metric(each, "ferrum_kv_blocks", state="used") for each in servers])
            foreign = sum([await foreign_handles(each) for each in servers])
    texts = [each.tokens for each in (*short, *long)]
    different = sum(text != right for text, right in zip(texts, [*alone[0], *alone[1]], strict=True))
    held, rebuilt = [len(each) for each in lasting.held], lasting.rebuilt()
    noticed = {name: max(first_times[name], times[name]) for name in times}
    return Figures(
        "One truth about a hung device",
        *(at_most(f"until {name} said that it hangs", at, NOTICED_S, "s") for name, at in noticed.items()),
        exactly("ferrum-rpc status says HUNG", word == "HUNG", 1),
        exactly("sequences placed where it hung", len(misplaced), 0),
        exactly(f"rebuilt by a stop of {size.short_stop_s:g} s", sum(brief.rebuilt()), 0),
        at_least("sequences held then, by the fewer", min(map(len, brief.held)), 1),
        exactly(f"not rebuilt by a stop of {size.long_stop_s:g} s", sum(held) - sum(rebuilt), 0),
        at_least("sequences held then by the hung engine", held[0], 1),
        at_least("sequences held then by the stopped executor", held[1], 1),
        exactly("texts that are not those of one executor", different, 0),
        exactly("errors that a caller saw", len(first_load.errors) + len(load.errors), 0),
        exactly("blocks in use afterwards, on all three", used, 0),
        exactly("decodes at an executor that is not the owner", foreign, 0),
        facts={
            "sequences": len(texts),
            "held at the short stop": [len(each) for each in brief.held],
            "held at the long stop": held,
            "patience, s": size.hung_patience_s,
            "errors": [*first_load.errors, *load.errors][:3],
        },
    )
