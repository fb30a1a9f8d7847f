"""Batches of a fleet: one call for each owner, at the same time, once each owner has all of its sequences."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as ListOf
from typing import Final, Generic, NamedTuple, TypeVar

from ferrum_rpc.client.fleet.member import Member
from ferrum_rpc.client.fleet.owner import FleetOwner
from ferrum_rpc.client.owner import FULL
from ferrum_rpc.client.retry import Deadline
from ferrum_rpc.client.sender import Sender, nothing
from ferrum_rpc.errors import ExecutorError

Thing = TypeVar("Thing")
Outcome = TypeVar("Outcome")

REBUILDS_OF_A_BATCH: Final = 4
"""Times that what a batch finds lost is fed elsewhere, in one call."""


class BatchEntry(NamedTuple, Generic[Thing]):
    """What a batch has for the sequence of one ``sender``. ``tokens``: what it feeds. ``follows``: it goes with what is
    in flight, and is lost with that."""

    sender: Sender[FleetOwner]
    thing: Thing
    tokens: ListOf[int] = ()
    follows: bool = False


async def at_owners(
    entries: ListOf[BatchEntry[Thing]],
    renewed: Callable[[Sender[FleetOwner], Thing], Thing],
    call: Callable[[Member, list[Thing]], Awaitable[ListOf[Outcome]]],
    deadline: Deadline,
    rebuilds: int = REBUILDS_OF_A_BATCH,
) -> list[Outcome | ExecutorError]:
    """The outcome of each entry: what has moved is ``renewed``, and what is lost under way goes again."""
    outcomes = dict[int, Outcome | ExecutorError]()
    ready = {at: entry.thing for at, entry in enumerate(entries)}
    moving = [at for at, entry in enumerate(entries) if not entry.follows and not entry.sender.owner.ready]
    refusals = await asyncio.gather(*(_be_ready(entries[at], deadline) for at in moving))
    for at, refusal in zip(moving, refusals, strict=True):
        if refusal is None:
            ready[at] = renewed(entries[at].sender, ready[at])
        else:
            outcomes[at] = refusal
            del ready[at]
    answers = await by_owner([(entries[at].sender.owner.member, thing) for at, thing in ready.items()], call)
    outcomes |= zip(ready, answers, strict=True)
    lost = list[int]()
    for at in ready if rebuilds else ():
        entry, error = entries[at], outcomes[at]
        if not isinstance(error, ExecutorError) or entry.follows:
            continue
        try:
            again = isinstance(error, FULL) and await entry.sender.owner.finds_capacity(error, deadline)
        except ExecutorError as refusal:
            outcomes[at] = refusal
            continue
        if (again or await entry.sender.lost_behind(error)) and not deadline.passed:
            lost.append(at)
    if lost:
        again_at = [
            entry._replace(thing=renewed(entry.sender, entry.thing)) if entry.sender.owner.ready else entry
            for entry in (entries[at] for at in lost)
        ]
        answers = await at_owners(again_at, renewed, call, deadline, rebuilds - 1)
        outcomes |= zip(lost, answers, strict=True)
    return [outcomes[at] for at in range(len(entries))]


async def _be_ready(entry: BatchEntry[Thing], deadline: Deadline) -> ExecutorError | None:
    """Be at an owner that has all that the sequence holds. Returns why that cannot be."""
    sender = entry.sender
    with sender.state.claim("forward"):
        sender.owner.place_anew(entry.tokens)
        try:
            await sender.send(nothing, deadline, settle=False)
        except ExecutorError as error:
            return error
    return None


async def by_owner(
    owned: ListOf[tuple[Member, Thing]], call: Callable[[Member, list[Thing]], Awaitable[ListOf[Outcome]]]
) -> list[Outcome | ExecutorError]:
    """One call for each owner, at the same time; the outcome of each thing."""
    groups: dict[Member, list[int]] = {}
    for at, (member, _) in enumerate(owned):
        groups.setdefault(member, []).append(at)

    async def called(member: Member, places: list[int]) -> ListOf[Outcome | ExecutorError]:
        try:
            return await call(member, [owned[at][1] for at in places])
        except ExecutorError as error:
            return [error] * len(places)

    outcomes = await asyncio.gather(*(called(*group) for group in groups.items()))
    places = [at for group in groups.values() for at in group]
    found = dict(zip(places, (each for some in outcomes for each in some), strict=True))
    return [found[at] for at in range(len(owned))]
