"""R2: a step is applied exactly once, whatever becomes of its request and of its answer.

The same random histories are made twice: once over a quiet connection, once over one that loses answers, delays them
and breaks, by callers that duplicate, hurry, and send again what was answered long ago. Handle versions count
mutations and logits show the multiset of cached tokens, so one step too many or too few is found.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from ferrum_rpc.client import ExecutorClient, ExecutorError, Greedy, Sample
from ferrum_rpc.scheduler import STEPS_IN_FLIGHT, RequestEnd, Scheduler, TextRequest
from tests.faults.figures import Figure, Figures, at_least, exactly
from tests.faults.models import DEMO, IDENTITY, Model
from tests.faults.random_histories import Counts, Seen, differences, histories
from tests.faults.session_histories import RECONNECT, session_histories
from tests.faults.sizes import Size
from tests.support.grammars import SOURCES
from tests.support.netns import NoNetwork, missing, network
from tests.support.process import ServerProcess, dial, serving
from tests.support.proxy import TcpProxy, Weather, proxied

T = TypeVar("T")
ENOUGH: Final = 3
"""Events without which nothing was survived."""

MORE_WEATHER: Final = 5
"""Rounds that are added if too little happened in the first."""

PACKET_LOSS: Final = 5
TEXT_TOKENS: Final = 32
TEXTS_AT_ONCE: Final = 16
LONGEST: Final = 40
LONGEST_EXACT: Final = 32
"""Tokens of a prompt; of one that has the same bits however it is divided, where states of longer ones do not."""

CHOICES: Final = 3
TOKENS_OF_A_PROMPT: Final = TEXT_TOKENS * (3 + CHOICES) // 4


async def fed(server: ServerProcess) -> tuple[int, int, int]:
    """Tokens fed, sequences that live, blocks and slots that are not free."""
    async with dial(server.target) as client:
        return (await client.status()).counters.tokens, *await client.held()


def nothing_left(sequences: int, blocks: int) -> tuple[Figure, Figure]:
    return exactly("sequences left behind", sequences, 0), exactly("blocks left behind", blocks, 0)


def unlike(what: str, quiet: list[Any], noisy: list[Any]) -> Figure:
    different = sum(a != b for a, b in zip(quiet, noisy, strict=True))
    return exactly(f"{what} unlike those of the fault-free run", different, 0)


async def r2_exactly_once(size: Size, model: Model = IDENTITY) -> Figures:
    """Through a proxy that delays, and resets connections."""
    flags = (*model.flags(), "--replay-bytes", "64MiB", "--max-sequences", "256")
    async with serving(*flags, model=model.path) as server, proxied(server.target) as proxy:
        figures, facts = await _compare(server, proxy.target, size.calls_under_loss, partial(_in_weather, proxy))
        facts["connections lost"] = proxy.lost_connections
    return Figures("A step is applied exactly once", *figures, _enough(facts), facts=facts)


async def r2_in_sessions(size: Size, model: Model = IDENTITY) -> Figures:
    """By the client over a session, through the same proxy: the client resends by itself."""
    flags = (*model.flags(), "--replay-bytes", "64MiB")
    async with serving(*flags, model=model.path) as server, proxied(server.target) as proxy:
        at_first, *_ = await fed(server)
        quiet, _ = await session_histories(server.target, size.calls_in_sessions)
        between, *_ = await fed(server)
        rounds = await _in_weather(proxy, lambda: session_histories(proxy.target, size.calls_in_sessions))
        at_last, sequences, blocks = await fed(server)
        facts: dict[str, Any] = {
            "steps": size.calls_in_sessions * len(rounds),
            "connections lost": proxy.lost_connections,
            "calls made again by their caller": sum(again for _, again in rounds),
        }
    figures = [
        unlike("answers", quiet * len(rounds), [rows for noisy, _ in rounds for rows in noisy]),
        exactly("tokens fed twice or lost", abs((at_last - between) - (between - at_first) * len(rounds)), 0),
        *nothing_left(sequences, blocks),
        _enough(facts),
    ]
    return Figures("A step is applied exactly once, by the client in a session", *figures, facts=facts)


async def r2_by_a_scheduler(size: Size, model: Model = DEMO) -> Figures:
    """Texts of a scheduler, through the same proxy."""
    flags = (*model.flags(), "--replay-bytes", "64MiB")
    longest = LONGEST_EXACT if model.recurrent else LONGEST
    async with serving(*flags, model=model.path) as server, proxied(server.target) as proxy:
        prompts = max(1, size.calls_in_sessions // TOKENS_OF_A_PROMPT)
        quiet = await _texts(server.target, prompts, longest)
        rounds = await _in_weather(proxy, lambda: _texts(proxy.target, prompts, longest), resets=0.02)
        quiet, noisy = quiet * len(rounds), [text for texts in rounds for text in texts]
        _, sequences, blocks = await fed(server)
        facts: dict[str, Any] = {
            "texts": len(noisy),
            "tokens": sum(len(tokens) for _, tokens in noisy),
            "connections lost": proxy.lost_connections,
        }
    figures = (
        unlike("texts", quiet, noisy),
        exactly("texts that did not end", sum(end not in {RequestEnd.LENGTH, RequestEnd.STOP} for end, _ in quiet), 0),
        *nothing_left(sequences, blocks),
        _enough(facts),
    )
    return Figures("A step is applied exactly once, by a scheduler", *figures, facts=facts)


async def _texts(target: str, prompts: int, longest: int) -> list[tuple[RequestEnd | None, list[int]]]:
    """How each text ended and its tokens: greedy ones, seeded ones, ones by grammars, and several of one prompt."""
    slots = asyncio.Semaphore(TEXTS_AT_ONCE)
    connect = partial(
        ExecutorClient, session=True, steps_in_flight=STEPS_IN_FLIGHT, tokens_ahead=True, channel_options=RECONNECT
    )
    async with Scheduler(target, connect=connect, run_tokens=8) as scheduler:
        grammars = [await scheduler.register_grammar(*each) for each in SOURCES.items()]

        async def write(number: int) -> list[tuple[RequestEnd | None, list[int]]]:
            prompt = random.Random(number).choices(range(97, 123), k=1 + number % longest)
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

        async def in_packet_loss(write: Callable[[], Awaitable[T]]) -> list[T]:
            await net.drop(PACKET_LOSS)
            rounds = [await write()]
            await net.drop(0)
            return rounds

        figures, facts = await _compare(server, server.target, size.calls_under_packet_loss, in_packet_loss)
        facts["packets lost of 100"] = PACKET_LOSS
    return Figures("A step is applied exactly once, over a network that loses packets", *figures, facts=facts)


async def _in_weather(proxy: TcpProxy, write: Callable[[], Awaitable[T]], resets: float = 0.01) -> list[T]:
    """What is written through a proxy that delays, and resets connections: again if too few were lost. On a busy
    machine messages share packets, and what is reset is a share of these."""
    proxy.weather = Weather(delay_s=0.002, resets=resets)
    rounds = [await write()]
    while proxy.lost_connections < ENOUGH and len(rounds) <= MORE_WEATHER:
        rounds.append(await write())
    return rounds


async def _compare(
    server: ServerProcess, noisy_target: str, steps: int, noisily: Callable[..., Awaitable[list[list[list[Seen]]]]]
) -> tuple[list[Figure], dict[str, Any]]:
    """Histories over a quiet connection, and over the other target as they are written ``noisily``, in rounds."""
    counts = Counts()
    at_first, *_ = await fed(server)
    quiet = await histories(server.target, steps, Counts(), duplicating=False)
    between, *_ = await fed(server)
    rounds = await noisily(partial(histories, noisy_target, steps, counts, duplicating=True))
    at_last, sequences, blocks = await fed(server)
    quiet_tokens, noisy_tokens = (between - at_first) * len(rounds), at_last - between
    figures = [
        exactly("answers unlike those of the fault-free run", sum(differences(quiet, each) for each in rounds), 0),
        exactly("tokens fed twice", max(0, noisy_tokens - quiet_tokens), 0),
        exactly("tokens lost", max(0, quiet_tokens - noisy_tokens), 0),
        exactly("answers that contradict each other or refuse wrongly", len(counts.wrong), 0),
        *nothing_left(sequences, blocks),
    ]
    done = sum(len(each) for noisy in rounds for each in noisy)
    facts: dict[str, Any] = {"steps": done, "sent": dict(counts.sent), "wrong": counts.wrong[:5]}
    return figures, facts


def _enough(facts: dict[str, Any]) -> Figure:
    """The weather was bad: else nothing was shown."""
    return at_least("connections lost, so that there was something to survive", facts["connections lost"], ENOUGH)
