"""R16: a crash at any point is survivable.

Every failpoint of a real server fires with every action under a client that checks all answers (`scripted_client`). A
server that died is started again for the client with its old handles, which prefills all tokens anew.

Texts by grammars are written the same way, at servers that fail, whose grammar processes are killed, and that crash.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Any, Final

from ferrum_rpc.client import DeviceLost, ExecutorClient, ExecutorError, ResendPolicy, Sample, Sequence, TransportError
from ferrum_rpc.errors import Reason
from ferrum_rpc.failpoints import OF_THE_DEVICE, Action, Failpoint, Failpoints, parse_failpoints
from tests.faults.figures import Figures, at_least, exactly
from tests.faults.models import DEMO, IDENTITY, Model
from tests.faults.scripted_client import ATTEMPTS, Counts, Gone, Held, ScriptedClient
from tests.faults.sizes import Size
from tests.support.grammars import END, SOURCES, encode
from tests.support.process import Dialled, ServerProcess, dial, dialled, serving
from tests.support.serving import serve_model

ROLLED_BACK: Final = (Action.ERROR, Action.OOM)
FATAL: Final = (Action.CRASH, Action.DEVICE_LOST)
VERSES: Final = 10
"""Verses within which a point is reached often enough; a rule that has not fired by then is a violation."""
SPACING: Final = {Failpoint.BEFORE_REPLY: 11, Failpoint.EXPORT: 7, Failpoint.IMPORT: 23}
"""Hits from one firing to the next, 3 elsewhere: so a fork of two that is tried again is not hit again at once, and
answers are lost of steps that did not fail. A move reaches a fork, up to three times an export and seven times an
import: with spacings as short as that, every attempt would fail at one of them."""

PROMPT: Final = encode("The register of ")
CHUNK: Final = 32
"""Tokens, of a text that goes on elsewhere too: states of longer ones have other bits."""
LONGEST_TEXT: Final = 100
"""Tokens: random weights write without an end."""
GRAMMAR_TEXTS: Final = 6
GRAMMAR_ROUNDS: Final = 4
"""Rounds for which there is one server that writes texts by grammars."""
GRAMMAR_FAULTS: Final = ";".join(
    f"{point}={action}@p0.02"
    for point in Failpoint
    if point not in {Failpoint.EXPORT, Failpoint.IMPORT}
    for action in (Action.ERROR, *((Action.OOM,) if point is not Failpoint.BEFORE_REPLY else ()))
)
KILL_EVERY: Final = 25
"""Calls from one kill of a grammar process to the next."""
SURVIVED: Final = frozenset(
    {Reason.STEP_FAILED, Reason.INTERNAL_ERROR, Reason.GRAMMAR_TOO_COMPLEX, Reason.DEADLINE_EXCEEDED}
)
"""What may refuse a call that is then made again; the last one a release, which has a tenth of a second."""

Start = Callable[[str, Counts], AbstractAsyncContextManager[Dialled]]
BLOCK_SIZE: Final = 4
BLOCKS: Final = 64


def actions(point: Failpoint) -> list[Action]:
    """What can happen at a point and be survived."""
    every = [*ROLLED_BACK, *FATAL]
    return [each for each in every if point is not Failpoint.BEFORE_REPLY or each not in OF_THE_DEVICE]


async def r16_a_crash_is_survivable(size: Size, model: Model = IDENTITY, seed: int = 0) -> Figures:
    """Errors and out of memory on one server; crashes and lost devices on a server each. The chains run side by side:
    what takes time is the start of so many processes. One in five has its engine in another, which imports torch."""
    counts = Counts()
    dice = random.Random(seed)
    fatal = dice.sample(sorted(Failpoint), round(size.crash_share * len(Failpoint)))
    points = [point for _ in range(size.crash_rounds) for point in fatal]
    servers = -(-size.crash_rounds // GRAMMAR_ROUNDS)
    apart = set(dice.sample(range(len(points)), len(points) // 5))
    threads, processes = ([each for at, each in enumerate(points) if (at in apart) is its] for its in (False, True))
    await asyncio.gather(
        _fail_and_go_on(model, size.crash_rounds, seed, counts),
        _die_and_restart(model, partial(_process, model, "thread"), Action.CRASH, threads, seed, counts),
        _die_and_restart(model, partial(_process, model, "process"), Action.CRASH, processes, seed + 1, counts),
        _die_and_restart(model, partial(_in_process, model), Action.DEVICE_LOST, points, seed, counts),
        _by_grammars(DEMO if model is IDENTITY else model, servers, seed, counts),
    )
    every = [(point, action) for point in Failpoint for action in actions(point)]
    expected = {(point.value, action.value) for point, action in every if action in ROLLED_BACK or point in fatal}
    short = [pair for pair in expected if counts.fired[pair] < size.crash_rounds]
    return Figures(
        "A crash at any point is survivable",
        exactly("violations", len(counts.wrong), 0),
        exactly("failpoints and actions that fired less than once a round", len(short), 0),
        at_least("rows by grammars, compared with those of a quiet server", counts.rows_by_grammars, servers),
        at_least("grammar processes that were killed", counts.killed, servers),
        at_least("answers lost after the commit and replayed", counts.replays, 1),
        exactly("old handles that did not answer INSTANCE_MISMATCH", counts.old_handles - counts.mismatches, 0),
        facts={
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


async def _fail_and_go_on(model: Model, rounds: int, seed: int, counts: Counts) -> None:
    """One server, at which every point fails with every action that is rolled back, once a round."""
    rules = [
        f"{point}={action}@{2 + SPACING.get(point, 3) * (n * len(ROLLED_BACK) + index)}"
        for point in Failpoint
        for index, action in enumerate(ROLLED_BACK)
        if action in actions(point)
        for n in range(rounds)
    ]
    flags = (*model.flags(**model.cached(block_size=BLOCK_SIZE)), "--failpoints", ";".join(rules))
    async with dialled(*flags, model=model.path, kv_blocks=BLOCKS) as (server, client):
        scheduler = ScriptedClient(
            client,
            [],
            random.Random(seed),
            counts,
            lambda: [each["blocks"] for each in server.events if each.get("event") == "blocks_freed_late"],
            model,
        )
        for _ in range(VERSES * rounds):
            await scheduler.script()
            if server.count("failpoint_fired") >= len(rules):
                break
        await scheduler.script()  # and without failures
        counts.count_fired(server)


async def _die_and_restart(  # noqa: PLR0917
    model: Model, start: Start, action: Action, points: list[Failpoint], seed: int, counts: Counts
) -> None:
    """A server for every point, which dies there; the next one gets the scheduler with its old handles."""
    dice = random.Random(f"{seed} {action}")
    held: list[Held] = []
    here = [each for each in points if action in actions(each)]
    for point in [*here, None] if here else []:
        rule = "" if point is None else f"{point}={action}@{dice.randint(1, 4)}"
        async with start(rule, counts) as client:
            scheduler = ScriptedClient(client, held, dice, counts, model=model)
            try:
                await scheduler.recover()
                for _ in range(1 if point is None else VERSES):
                    await scheduler.script()
            except Gone:
                if point is None:
                    counts.wrong.append(f"{action}: a server without failpoints died")


async def _by_grammars(model: Model, servers: int, seed: int, counts: Counts) -> None:
    """Texts by grammars at so many servers, each of which fails and crashes. A text goes on at the next one. It is the
    text of a server at which nothing happens."""
    dice, calls = random.Random(f"{seed} by grammars"), itertools.count(1)
    async with _with_grammars(model) as (_, client, outputs):
        expected = [await _text(client.sequence(), each, [], _at_once) for each in outputs]
    order, text = itertools.cycle(range(GRAMMAR_TEXTS)), list[int]()
    number = next(order)

    def compare() -> None:
        counts.rows_by_grammars += len(text)
        if text != expected[number][: len(text)]:
            counts.wrong.append(f"a text by a grammar: {text}")

    for _ in range(servers):
        crash = f"{Failpoint.AFTER_FORWARD}={Action.CRASH}@{dice.randint(60, 120)}"
        rules = f"{crash};{GRAMMAR_FAULTS}"  # in this order: no other fault of that hit may come before the crash
        async with _with_grammars(model, "--failpoints", rules) as (server, client, outputs):

            async def surely(call: Callable[[], Awaitable[Any]], server: ServerProcess = server) -> Any:
                for _ in range(ATTEMPTS):
                    try:
                        kill = next(calls) % KILL_EVERY == 0
                        kills = [_kill_a_grammar(server, dice, counts)] if kill else []
                        return (await asyncio.gather(call(), *kills))[0]
                    except (TransportError, DeviceLost) as error:
                        raise Gone from error
                    except ExecutorError as error:
                        counts.refusals[error.reason] += 1
                        if error.reason not in SURVIVED:
                            counts.wrong.append(f"a step by a grammar is refused: {error!r}")
                raise AssertionError(f"a step by a grammar is refused for good: {dict(counts.refusals)}")

            with suppress(Gone):  # the crash that is waited for
                while True:
                    await _text(client.sequence(), outputs[number], text, surely)
                    compare()
                    number, text = next(order), []
            if (status := await server.ended()) != -signal.SIGKILL:
                counts.wrong.append(f"{rules}: the process ended with {status}")
    compare()


@asynccontextmanager
async def _with_grammars(
    model: Model, *flags: str
) -> AsyncIterator[tuple[ServerProcess, ExecutorClient, list[Sample]]]:
    """A server, a client of it, and the outputs of the texts."""
    resend = ResendPolicy(times=1, backoff_s=0.01)
    async with (
        serving(*model.flags(), *flags, model=model.path, kv_blocks=128) as server,
        ExecutorClient(server.target, resend=resend, release_timeout_s=0.1) as client,
    ):
        grammars = [await client.register_grammar(*each) for each in SOURCES.items()]
        several = enumerate(grammars * (GRAMMAR_TEXTS // len(SOURCES)))
        yield server, client, [Sample(1.0, seed=at, grammar=each, grammar_from=len(PROMPT)) for at, each in several]


async def _text(
    sequence: Sequence, output: Sample, text: list[int], surely: Callable[..., Awaitable[Any]]
) -> list[int]:
    """Write the rest of ``text``, by steps, some of which are truncated and made again; returns it."""
    fed = [*PROMPT, *text]
    while len(text) < LONGEST_TEXT and (not text or text[-1] != END):
        text.append((await surely(lambda fed=fed: sequence.prefill(fed, output, chunk=CHUNK))).token)
        fed = text[-1:]
        if len(text) % 5 == 0:
            await surely(lambda length=sequence.length: sequence.truncate(length - 1))
            fed = [*(text[-2:-1] or PROMPT[-1:]), *fed]
    await surely(sequence.release)
    return text


async def _at_once(call: Callable[[], Awaitable[Any]]) -> Any:
    return await call()


async def _kill_a_grammar(server: ServerProcess, dice: random.Random, counts: Counts) -> None:
    """Kill a grammar's process, or the one that has the tokenizer, at some moment of a step."""
    await asyncio.sleep(dice.random() * 0.004)
    with suppress(IndexError, ProcessLookupError):  # there is none just now
        os.kill(dice.choice(sorted(server.descendants())), signal.SIGKILL)
        counts.killed += 1


@asynccontextmanager
async def _process(model: Model, engine: str, rule: str, counts: Counts) -> AsyncIterator[Dialled]:
    """A process that SIGKILL may end; or its engine's, whose death is the server's orderly end. Without a ``rule`` its
    engine is in it: another process would import torch for it."""
    flags = (
        *model.flags(**model.cached(block_size=BLOCK_SIZE)),
        *(("--engine", engine, "--failpoints", rule) if rule else ()),
    )
    async with serving(*flags, model=model.path, kv_blocks=BLOCKS) as server:
        async with dial(server.target) as client:
            yield client
        killed = -signal.SIGKILL if engine == "thread" or rule.startswith(Failpoint.BEFORE_REPLY) else 1
        if rule and (status := await server.ended()) != killed:
            counts.wrong.append(f"{rule}: the process ended with {status}")
        counts.count_fired(server)


@asynccontextmanager
async def _in_process(model: Model, rule: str, counts: Counts) -> AsyncIterator[Dialled]:
    """A server of this process, whose model thread may end; R19 has a process that loses its device."""
    failpoints = Failpoints(parse_failpoints(rule))
    async with serve_model(
        model.config(**model.cached(block_size=BLOCK_SIZE), kv_blocks=BLOCKS), failpoints=failpoints
    ) as served:
        yield Dialled(served.channel)
        if rule and served.server.health.serving:
            counts.wrong.append(f"{rule}: the health service says that it serves")
    counts.fired.update(
        (each.point.value, each.action.value) for each in failpoints.rules if failpoints.fired[each.point]
    )
