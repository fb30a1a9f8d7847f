"""R16: a crash at any point is survivable.

Every failpoint of a real server fires with every action under a client that checks all answers (`scripted_client`). A
server that died is started again for the client with its old handles, which prefills all tokens anew.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Final

from ferrum_rpc.failpoints import OF_THE_DEVICE, Action, Failpoint, Failpoints, parse_failpoints
from tests.faults.figures import Figures, at_least, exactly
from tests.faults.process import Dialled, dial, serving
from tests.faults.scripted_client import Counts, Gone, Held, ScriptedClient
from tests.faults.sizes import Size
from tests.serving import serve_identity

ROLLED_BACK: Final = (Action.ERROR, Action.OOM)
FATAL: Final = (Action.CRASH, Action.DEVICE_LOST)
VERSES: Final = 10
"""Verses within which a point is reached often enough; a rule that has not fired by then is a violation."""
SPACING: Final = {Failpoint.BEFORE_REPLY: 11, Failpoint.EXPORT: 4, Failpoint.IMPORT: 7}
"""Hits from one firing to the next, 3 elsewhere: so a fork of two that is tried again is not hit again at once, and
answers are lost of steps that did not fail. A move reaches a fork, an export and three times an import: with one
spacing for all of them, every attempt would fail at one of the three in turn."""

Start = Callable[[str, Counts], AbstractAsyncContextManager[Dialled]]
FLAGS: Final = ("--identity-positional", "--block-size", "4", "--kv-blocks", "64")


def actions(point: Failpoint) -> list[Action]:
    """What can happen at a point and be survived."""
    every = [*ROLLED_BACK, *FATAL]
    return [each for each in every if point is not Failpoint.BEFORE_REPLY or each not in OF_THE_DEVICE]


async def r16_a_crash_is_survivable(size: Size, seed: int = 0) -> Figures:
    """Errors and out of memory on one server; crashes and lost devices on a server each. The chains run side by side:
    what takes time is the start of so many processes. One in four has its engine in another, which imports torch."""
    counts = Counts()
    points = [point for _ in range(size.crash_rounds) for point in Failpoint]
    apart = set(random.Random(seed).sample(range(len(points)), -(-len(points) // 4)))
    threads, processes = ([each for at, each in enumerate(points) if (at in apart) is its] for its in (False, True))
    await asyncio.gather(
        _fail_and_go_on(size.crash_rounds, seed, counts),
        _die_and_restart(partial(_process, "thread"), Action.CRASH, threads, seed, counts),
        _die_and_restart(partial(_process, "process"), Action.CRASH, processes, seed + 1, counts),
        _die_and_restart(_in_process, Action.DEVICE_LOST, points, seed, counts),
    )
    expected = {(point.value, action.value) for point in Failpoint for action in actions(point)}
    short = [pair for pair in expected if counts.fired[pair] < size.crash_rounds]
    return Figures(
        "R16",
        "A crash at any point is survivable",
        (
            exactly("violations", len(counts.wrong), 0),
            exactly("failpoints and actions that fired less than once a round", len(short), 0),
            at_least("answers lost after the commit and replayed", counts.replays, 1),
            exactly("old handles that did not answer INSTANCE_MISMATCH", counts.old_handles - counts.mismatches, 0),
        ),
        {
            "rounds": size.crash_rounds,
            "failpoints": len(Failpoint),
            "pairs": len(expected),
            "fired": sum(counts.fired.values()),
            "rows compared": counts.rows,
            "old handles": counts.old_handles,
            "replays": counts.replays,
            "refusals": {str(reason): count for reason, count in counts.refusals.items()},
            "wrong": counts.wrong[:10],
            "short": sorted(short),
        },
    )


async def _fail_and_go_on(rounds: int, seed: int, counts: Counts) -> None:
    """One server, at which every point fails with every action that is rolled back, once a round."""
    rules = [
        f"{point}={action}@{2 + SPACING.get(point, 3) * (n * len(ROLLED_BACK) + index)}"
        for point in Failpoint
        for index, action in enumerate(ROLLED_BACK)
        if action in actions(point)
        for n in range(rounds)
    ]
    async with serving(*FLAGS, "--failpoints", ";".join(rules)) as server, dial(server.target) as client:
        scheduler = ScriptedClient(
            client,
            [],
            random.Random(seed),
            counts,
            lambda: [each["blocks"] for each in server.events if each.get("event") == "blocks_freed_late"],
        )
        for _ in range(VERSES * rounds):
            await scheduler.script()
            if server.count("failpoint_fired") >= len(rules):
                break
        await scheduler.script()  # and without failures
        counts.count_fired(server)


async def _die_and_restart(start: Start, action: Action, points: list[Failpoint], seed: int, counts: Counts) -> None:
    """A server for every point, which dies there; the next one gets the scheduler with its old handles."""
    dice = random.Random(f"{seed} {action}")
    held: list[Held] = []
    for point in [*(each for each in points if action in actions(each)), None]:
        rule = "" if point is None else f"{point}={action}@{dice.randint(1, 4)}"
        async with start(rule, counts) as client:
            scheduler = ScriptedClient(client, held, dice, counts)
            try:
                await scheduler.recover()
                for _ in range(1 if point is None else VERSES):
                    await scheduler.script()
            except Gone:
                if point is None:
                    counts.wrong.append(f"{action}: a server without failpoints died")


@asynccontextmanager
async def _process(engine: str, rule: str, counts: Counts) -> AsyncIterator[Dialled]:
    """A process that SIGKILL may end; or its engine's, whose death is the server's orderly end."""
    flags = ("--engine", engine, *(("--failpoints", rule) if rule else ()))
    async with serving(*FLAGS, *flags) as server:
        async with dial(server.target) as client:
            yield client
        killed = -signal.SIGKILL if engine == "thread" or rule.startswith(Failpoint.BEFORE_REPLY) else 1
        if rule and (status := await server.ended()) != killed:
            counts.wrong.append(f"{rule}: the process ended with {status}")
        counts.count_fired(server)


@asynccontextmanager
async def _in_process(rule: str, counts: Counts) -> AsyncIterator[Dialled]:
    """A server of this process, whose model thread may end; R19 has a process that loses its device."""
    failpoints = Failpoints(parse_failpoints(rule))
    async with serve_identity(positional=True, kv_blocks=64, failpoints=failpoints) as served:
        yield Dialled(served.channel)
        if rule and served.server.health.serving:
            counts.wrong.append(f"{rule}: the health service says that it serves")
    counts.fired.update(
        (each.point.value, each.action.value) for each in failpoints.rules if failpoints.fired[each.point]
    )
