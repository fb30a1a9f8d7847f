"""`FleetClient`: many executors as one, for a scheduler that outgrows one and wants to lose nothing with any."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from collections.abc import Sequence as ListOf
from contextlib import AsyncExitStack
from typing import TypeVar

from ferrum_rpc.client.answer import Answer
from ferrum_rpc.client.arguments import as_list
from ferrum_rpc.client.client import CacheMode, ExecutorClient, creation
from ferrum_rpc.client.fleet.member import Member
from ferrum_rpc.client.fleet.members import Members
from ferrum_rpc.client.fleet.placement import LongestPrefix, Placement
from ferrum_rpc.client.fleet.sequence import FleetSequence, Home
from ferrum_rpc.client.info import ExecutorInfo
from ferrum_rpc.client.masks import Mask
from ferrum_rpc.client.retry import Deadline
from ferrum_rpc.client.sequence import Sequence
from ferrum_rpc.client.state import Item, SequenceState
from ferrum_rpc.errors import ExecutorError, InvalidRequest

Thing = TypeVar("Thing")
Outcome = TypeVar("Outcome")

REBUILDS_OF_A_BATCH = 4
"""Times that what a batch finds lost is fed elsewhere, in one call."""


class FleetClient:
    """The executors of one model, for one scheduler. An async context manager: entering it waits until one of them
    takes sequences, for ``timeout_s``, which is also the deadline of every batch that is not given one of its own.

    ``targets``: ``host:port`` and ``unix:path``, or ``dns:///name:port`` for each address that the name has, or
    ``file:PATH`` for each line of that file, looked up again every few seconds. ``connect`` makes the
    client of one: ``partial(ExecutorClient, session=True, token=...)``.
    ``placement`` chooses the executor of a new sequence. ``members``: who is there.

    A sequence stays with the executor that it was first fed at, its owner. Where that drains it is moved to another,
    and where it dies or forgets it, what it held is fed again at another before anything else is sent
    (`Sequence.rebuild`).
    """

    def __init__(
        self,
        targets: str | Iterable[str],
        *,
        connect: Callable[[str], ExecutorClient] = ExecutorClient,
        placement: Placement = LongestPrefix(),  # noqa: B008 - no state
        timeout_s: float | None = 60.0,
        look_every_s: float = 0.5,
        resolve_every_s: float = 5.0,
        patience_s: float = 5.0,
    ) -> None:
        self.members = Members(
            targets,
            connect=connect,
            placement=placement,
            look_every_s=look_every_s,
            resolve_every_s=resolve_every_s,
            patience_s=patience_s,
        )
        self._timeout_s = timeout_s
        self._home = Home(self.members)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> FleetClient:
        await self._stack.enter_async_context(self.members)
        try:
            await self.members.some(Deadline.after(self._timeout_s))
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Release what is live at every executor, and close the connections."""
        await self._stack.aclose()

    @property
    def info(self) -> ExecutorInfo:
        """What the executors are, by the one that was there first: they serve the same model, and other limits may
        differ (`Member.info`)."""
        return self._first.info

    @property
    def _first(self) -> Member:
        if (first := self.members.first) is None:
            raise RuntimeError("this client is not open: use it as `async with FleetClient(...) as fleet`")
        return first

    def sequence(
        self,
        *,
        keep_tokens: bool = False,
        rebuild: bool = True,
        reserve_tokens: int = 0,
        adapter: str = "",
        cache_salt: bytes = b"",
        cache_mode: CacheMode = CacheMode.DEFAULT,
    ) -> FleetSequence:
        """A new, empty sequence, as `ExecutorClient.sequence` makes it. ``rebuild`` is on here: without it a sequence
        is lost with its executor, and `Sequence.rebuild` feeds it elsewhere."""
        create = creation(reserve_tokens, "", adapter, cache_salt, cache_mode)
        state = SequenceState(create, tokens=[] if keep_tokens or rebuild else None)
        return FleetSequence(self._home, self._first, state, rebuild=rebuild)

    async def register_token_mask(self, mask: Mask, *, timeout_s: float | None = None) -> bytes:
        """As `ExecutorClient.register_token_mask`, for all executors: each gets it when it is first needed there."""
        deadline = self._deadline(timeout_s)
        [member, *_] = await self.members.some(deadline)
        return await member.connection.masks.register(mask, deadline)

    # --- batches ----------------------------------------------------------------------------------------------------

    async def forward(
        self, items: Iterable[Item], *, all_or_nothing: bool = False, timeout_s: float | None = None
    ) -> list[Answer | ExecutorError]:
        """As `ExecutorClient.forward`, with a call for each owner at the same time. ``results[i]`` answers
        ``items[i]``; the error of an owner's whole call is that of each item that went there. Sequences whose owner is
        gone are rebuilt elsewhere first, if they may be, and so are those that are lost under way.

        ``all_or_nothing`` is for items of one owner, and is left to it."""
        listed: ListOf[Item] = as_list(items, "items")
        for at, item in enumerate(listed):
            if not isinstance(item, Item) or item.state not in self._home.sequences:
                raise InvalidRequest(f"items[{at}] is no item of a sequence of this fleet", field=f"items[{at}]")
        deadline = self._deadline(timeout_s)
        if all_or_nothing:
            owners = {self._home.sequences[item.state].owner for item in listed}
            if len(owners) != 1 or (owner := owners.pop()) is None:
                raise InvalidRequest("all or nothing is for items of sequences of one owner", field="all_or_nothing")
            return await owner.client.forward(listed, all_or_nothing=True, timeout_s=deadline.remaining())
        return await self._forward(listed, deadline, REBUILDS_OF_A_BATCH)

    async def _forward(self, items: ListOf[Item], deadline: Deadline, rebuilds: int) -> list[Answer | ExecutorError]:
        sequences = [self._home.sequences[item.state] for item in items]
        told = dict[int, Answer | ExecutorError]()
        ready = dict(enumerate(items))
        unsettled = [at for at, each in enumerate(sequences) if not each.settled and items[at].follows is None]
        outcomes = await asyncio.gather(*(_settled(sequences[at], items[at], deadline) for at in unsettled))
        for at, outcome in zip(unsettled, outcomes, strict=True):
            if isinstance(outcome, Item):
                ready[at] = outcome
            else:
                told[at] = outcome
                del ready[at]

        def send(member: Member, some: list[Item]) -> Awaitable[list[Answer | ExecutorError]]:
            return member.client.forward(some, timeout_s=deadline.remaining())

        answers = await self._by_owner([(sequences[at]._member, item) for at, item in ready.items()], send)
        told |= zip(ready, answers, strict=True)
        lost = list[int]()
        for at, item in ready.items():
            error = told[at]
            if (
                rebuilds
                and isinstance(error, ExecutorError)
                and item.follows is None
                and await sequences[at].lost(error)
            ):
                lost.append(at)
        if lost:
            told |= zip(lost, await self._forward([items[at] for at in lost], deadline, rebuilds - 1), strict=True)
        return [told[at] for at in range(len(items))]

    async def truncate(
        self, rollbacks: Iterable[tuple[Sequence, int]], *, timeout_s: float | None = None
    ) -> list[ExecutorError | None]:
        """As `ExecutorClient.truncate`, with a call for each owner at the same time."""
        pairs: ListOf[tuple[Sequence, int]] = as_list(rollbacks, "rollbacks")
        owned = [(self._owner_of(sequence), (sequence, length)) for sequence, length in pairs]
        return await self._by_owner(owned, lambda member, some: member.client.truncate(some, timeout_s=timeout_s))

    async def release(self, sequences: Iterable[Sequence]) -> list[ExecutorError | None]:
        """As `ExecutorClient.release`, with a call for each owner at the same time."""
        owned = [(self._owner_of(each), each) for each in as_list(sequences, "sequences")]
        return await self._by_owner(owned, lambda member, some: member.client.release(some))

    # --- inside -----------------------------------------------------------------------------------------------------

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline.after(self._timeout_s if timeout_s is None else timeout_s)

    @staticmethod
    def _owner_of(sequence: Sequence) -> Member:
        if not isinstance(sequence, FleetSequence):
            raise InvalidRequest(f"{sequence!r} is no sequence of this fleet", field="sequences")
        return sequence._member

    @staticmethod
    async def _by_owner(
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


async def _settled(sequence: FleetSequence, item: Item, deadline: Deadline) -> Item | ExecutorError:
    """The item, or where the sequence has moved on to another owner the same one for it."""
    try:
        await sequence.settle(item.tokens, deadline)
    except ExecutorError as error:
        return error
    if item.handle == sequence.handle:
        return item
    return sequence.item(item.tokens, item.output, truncate_to=item.truncate_to, run=item.run)
