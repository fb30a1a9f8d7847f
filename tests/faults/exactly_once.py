"""R2: a step is applied exactly once, whatever becomes of its request and of its answer.

The same random histories are made twice: once over a quiet connection, once over one that loses answers, delays them
and breaks, by callers that duplicate, hurry, and send again what was answered long ago. Handle versions count
mutations and logits show the multiset of cached tokens, so one step too many or too few is found.
"""

from __future__ import annotations

from typing import Any, Final

from tests.faults.figures import Figures, at_least, exactly
from tests.faults.netns import NoNetwork, missing, network
from tests.faults.process import ServerProcess, dial, serving
from tests.faults.proxy import Weather, proxied
from tests.faults.random_histories import Counts, differences, histories
from tests.faults.session_histories import session_histories
from tests.faults.sizes import Size

PACKET_LOSS: Final = 5


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
