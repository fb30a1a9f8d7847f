"""R2: a step is applied exactly once, whatever becomes of its request and of its answer.

The same random histories are made twice: once over a quiet connection, once over one that loses answers, delays them
and breaks, by callers that duplicate, hurry, and send again what was answered long ago. Handle versions count
mutations and logits show the multiset of cached tokens, so one step too many or too few is found.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from functools import partial
from typing import Any, Final

from ferrum_rpc.client import ExecutorClient, ExecutorError, Greedy, Sample
from ferrum_rpc.scheduler import STEPS_IN_FLIGHT, RequestEnd, Scheduler, TextRequest
from tests.faults.figures import Figures, at_least, exactly
from tests.faults.netns import NoNetwork, missing, network
from tests.faults.process import ServerProcess, dial, serving
from tests.faults.proxy import Weather, proxied
from tests.faults.random_histories import Counts, differences, histories
from tests.faults.session_histories import RECONNECT, session_histories
from tests.faults.sizes import Size
from tests.grammars import SOURCES

PACKET_LOSS: Final = 5
TEXT_TOKENS: Final = 32
TEXTS_AT_ONCE: Final = 16
CHOICES: Final = 3
TOKENS_OF_A_PROMPT: Final = TEXT_TOKENS * (3 + CHOICES) // 4


async def fed(server: ServerProcess) -> tuple[int, int, int]:
    """Tokens fed, sequences that live, blocks that are not free."""
    async with dial(server.target) as client:
        status = await client.status()
        return (
            status.counters.tokens,
            status.pressure.sequences,
            (status.pressure.total_blocks - status.pressure.free_blocks),
        )


async def r2_exactly_once(size: Size) -> Figures:
    """Through a proxy that delays, and resets connections."""
    flags = ("--replay-bytes", "64MiB", "--max-sequences", "256")
    async with serving("--identity-positional", *flags) as server, proxied(server.target) as proxy:
        proxy.weather = Weather(delay_s=0.002, resets=0.01)
        figures, facts = await _compare(server, proxy.target, size.calls_under_loss)
        facts["connections lost"] = proxy.lost_connections
    return Figures("R2", "A step is applied exactly once", (*figures, *_enough(facts, "connections lost")), facts)


async def r2_in_sessions(size: Size) -> Figures:
    """By the client over a session, through the same proxy: the client resends by itself."""
    async with serving("--identity-positional", "--replay-bytes", "64MiB") as server, proxied(server.target) as proxy:
        at_first, *_ = await fed(server)
        quiet, _ = await session_histories(server.target, size.calls_in_sessions)
        between, *_ = await fed(server)
        proxy.weather = Weather(delay_s=0.002, resets=0.01)
        noisy, again = await session_histories(proxy.target, size.calls_in_sessions)
        at_last, sequences, blocks = await fed(server)
        facts: dict[str, Any] = {
            "steps": size.calls_in_sessions,
            "connections lost": proxy.lost_connections,
            "calls made again by their caller": again,
        }
    figures = [
        exactly(
            "answers unlike those of the fault-free run", sum(a != b for a, b in zip(quiet, noisy, strict=True)), 0
        ),
        exactly("tokens fed twice or lost", abs((at_last - between) - (between - at_first)), 0),
        exactly("sequences left behind", sequences, 0),
        exactly("blocks left behind", blocks, 0),
        *_enough(facts, "connections lost"),
    ]
    return Figures("R2", "A step is applied exactly once, by the client in a session", tuple(figures), facts)


async def r2_by_a_scheduler(size: Size) -> Figures:
    """Texts of a scheduler, through the same proxy."""
    flags = ("--dtype", "float32", "--replay-bytes", "64MiB")
    async with serving(*flags, model="demo") as server, proxied(server.target) as proxy:
        prompts = max(1, size.calls_in_sessions // TOKENS_OF_A_PROMPT)
        quiet = await _texts(server.target, prompts)
        proxy.weather = Weather(delay_s=0.002, resets=0.02)
        noisy = await _texts(proxy.target, prompts)
        _, sequences, blocks = await fed(server)
        facts: dict[str, Any] = {
            "texts": len(noisy),
            "tokens": sum(len(tokens) for _, tokens in noisy),
            "connections lost": proxy.lost_connections,
        }
    figures = (
        exactly("texts unlike those of the fault-free run", sum(a != b for a, b in zip(quiet, noisy, strict=True)), 0),
        exactly("texts that did not end", sum(end not in {RequestEnd.LENGTH, RequestEnd.STOP} for end, _ in quiet), 0),
        exactly("sequences left behind", sequences, 0),
        exactly("blocks left behind", blocks, 0),
        *_enough(facts, "connections lost"),
    )
    return Figures("R2", "A step is applied exactly once, by a scheduler", figures, facts)


async def _texts(target: str, prompts: int) -> list[tuple[RequestEnd | None, list[int]]]:
    """How each text ended and its tokens: greedy ones, seeded ones, ones by grammars, and several of one prompt."""
    slots = asyncio.Semaphore(TEXTS_AT_ONCE)
    connect = partial(
        ExecutorClient, session=True, steps_in_flight=STEPS_IN_FLIGHT, tokens_ahead=True, channel_options=RECONNECT
    )
    async with Scheduler(target, connect=connect, run_tokens=8) as scheduler:
        grammars = [await scheduler.register_grammar(*each) for each in SOURCES.items()]

        async def write(number: int) -> list[tuple[RequestEnd | None, list[int]]]:
            prompt = random.Random(number).choices(range(97, 123), k=1 + number % 40)
            seeded = Sample(1.0, seed=number)
            grammar = grammars[number // 4 % len(grammars)]
            constrained = Sample(1.0, seed=number, grammar=grammar, grammar_from=len(prompt))
            output = (Greedy(), seeded, constrained, constrained)[number % 4]
            request = TextRequest(prompt=prompt, max_tokens=TEXT_TOKENS, output=output)
            async with slots:
                streams = scheduler.submit_choices(request, CHOICES if number % 4 == 3 else 1)
                for each in streams:
                    with suppress(ExecutorError):  # the ends are compared below
                        await each.all()
            return [(each.end, each.token_ids) for each in streams]

        return [text for texts in await asyncio.gather(*map(write, range(prompts))) for text in texts]


async def r2_under_packet_loss(size: Size) -> Figures:
    """Through a network that loses packets. Raises `NoNetwork` where there can be no namespace."""
    if (why := missing()) is not None:
        raise NoNetwork(why)
    async with (
        network() as net,
        serving("--identity-positional", "--host", net.host, "--insecure", prefix=net.prefix) as server,
    ):
        await net.drop(PACKET_LOSS)
        figures, facts = await _compare(server, server.target, size.calls_under_packet_loss, before=net.drop)
        facts["packets lost of 100"] = PACKET_LOSS
    return Figures("R2", "A step is applied exactly once, over a network that loses packets", tuple(figures), facts)


async def _compare(
    server: ServerProcess, noisy_target: str, steps: int, before: Any = None
) -> tuple[list[Any], dict[str, Any]]:
    counts = Counts()
    if before is not None:
        await before(0)
    at_first, *_ = await fed(server)
    quiet = await histories(server.target, steps, Counts(), duplicating=False)
    between, *_ = await fed(server)
    if before is not None:
        await before(PACKET_LOSS)
    noisy = await histories(noisy_target, steps, counts, duplicating=True)
    if before is not None:
        await before(0)
    at_last, sequences, blocks = await fed(server)
    quiet_tokens, noisy_tokens = between - at_first, at_last - between
    figures = [
        exactly("answers unlike those of the fault-free run", differences(quiet, noisy), 0),
        exactly("tokens fed twice", max(0, noisy_tokens - quiet_tokens), 0),
        exactly("tokens lost", max(0, quiet_tokens - noisy_tokens), 0),
        exactly("answers that contradict each other or refuse wrongly", len(counts.wrong), 0),
        exactly("sequences left behind", sequences, 0),
        exactly("blocks left behind", blocks, 0),
    ]
    facts: dict[str, Any] = {"steps": sum(map(len, noisy)), "sent": dict(counts.sent), "wrong": counts.wrong[:5]}
    return figures, facts


def _enough(facts: dict[str, Any], what: str) -> tuple[Any, ...]:
    """The weather was bad: else nothing was shown."""
    return (at_least(f"{what}, so that there was something to survive", facts[what], 3),)
