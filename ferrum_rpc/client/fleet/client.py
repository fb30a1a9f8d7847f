"""`FleetClient`: several executors as one, for a scheduler that keeps its sequences if an executor is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from collections.abc import Sequence as ListOf
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from ferrum_rpc.client.answer import Answer
from ferrum_rpc.client.arguments import CacheMode, creation
from ferrum_rpc.client.batches import all_sent, forward_at, release_at, truncate_at
from ferrum_rpc.client.client import ExecutorClient
from ferrum_rpc.client.fleet.batches import BatchEntry, at_owners, by_owner
from ferrum_rpc.client.fleet.member import Member
from ferrum_rpc.client.fleet.members import SILENT_S, Members
from ferrum_rpc.client.fleet.merged import merged_pressure, merged_status
from ferrum_rpc.client.fleet.owner import FleetOwner, FleetState
from ferrum_rpc.client.fleet.placement import LongestPrefix, Placement
from ferrum_rpc.client.fleet.sequence import FleetSequence
from ferrum_rpc.client.info import ExecutorInfo, ExecutorStatus, Health
from ferrum_rpc.client.masks import Mask
from ferrum_rpc.client.model_client import ModelClient
from ferrum_rpc.client.retry import Deadline
from ferrum_rpc.client.sender import Sender
from ferrum_rpc.client.sequence import Sequence, sender_of
from ferrum_rpc.client.state import Item, SequenceState, followed_first
from ferrum_rpc.client.transport import Feed
from ferrum_rpc.core import GrammarKind, Pressure
from ferrum_rpc.errors import ExecutorError, InvalidRequest, TransportError

Outcome = TypeVar("Outcome")


class FleetClient(ModelClient):
    """The executors of one model, for one scheduler. An async context manager: entering it waits until one of them
    accepts sequences, for ``timeout_s``, which is also the default deadline of batches, and then up to 1 s for the
    first answers of the others.

    ``targets``: ``host:port`` and ``unix:path``, or ``dns:///name:port`` for each address that the name has, or
    ``file:PATH`` for each line of that file, looked up again every few seconds. ``connect`` makes the
    client of one: ``partial(ExecutorClient, session=True, token=...)``.
    ``placement`` chooses the executor of a new sequence.

    A sequence stays with the executor at which it was first fed, its owner. If the owner drains, the sequence is moved
    to another one; if the owner ends or loses it, its tokens are fed to another one before anything else is sent
    (`Sequence.rebuild`). For an owner that hangs, or does not answer, the fleet waits ``hung_patience_s`` in all, and
    each call until its deadline; then the sequences are fed to other executors, if these accept them.

    Batches (`forward`, `batch_prefill`, `batch_decode`, `truncate`, `release`) are one call per owner, concurrently,
    and the error of an owner's whole call is that of each of its items. ``all_or_nothing`` is for items of one owner,
    which handles it.
    """

    def __init__(
        self,
        targets: str | Iterable[str],
        *,
        connect: Callable[[str], ExecutorClient] = ExecutorClient,
        placement: Placement = LongestPrefix(),
        timeout_s: float | None = 60.0,
        look_every_s: float = 0.5,
        resolve_every_s: float = 5.0,
        patience_s: float = 5.0,
        hung_patience_s: float = 10.0,
    ) -> None:
        self._members = Members(
            targets,
            connect=connect,
            placement=placement,
            look_every_s=look_every_s,
            resolve_every_s=resolve_every_s,
            patience_s=patience_s,
            hung_patience_s=hung_patience_s,
        )
        self._timeout_s = timeout_s
        self._fleet = FleetState(self._members)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> FleetClient:
        await self._stack.enter_async_context(self.members)
        try:
            await self.members.some(Deadline.after(self._timeout_s))
            await self.members.all_known(SILENT_S)
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
    def members(self) -> Members:
        """The members of the fleet."""
        return self._members

    # --- the executors ----------------------------------------------------------------------------------------------

    @property
    def executors(self) -> list[Member]:
        """The present executors, the oldest first."""
        return self.members.there

    @property
    def pressure(self) -> Pressure | None:
        """How full the executors were in their last answers, together, in blocks of the smallest block size; `Member`
        has that of each. None before the first."""
        reports = [each.pressure for each in self.members.there if each.pressure is not None]
        return merged_pressure(reports) if reports else None

    async def info(self, *, timeout_s: float | None = None) -> ExecutorInfo:
        """The description of the oldest executor: all serve the same model, but limits may differ (`Member.info`).
        Nothing is sent."""
        return self._first.info

    async def status(self, *, timeout_s: float | None = None) -> ExecutorStatus:
        """The present status of the executors: the best of their states, the longest uptime, and the sums of everything
        else. An executor that does not answer within 1 s is left out. Raises the first one's error if none answers, and
        `TransportError` if there is none."""
        deadline = Deadline.after(self._deadline(timeout_s).remaining(SILENT_S))
        return merged_status(await self._asked(lambda each: each.connection.context.status(deadline)))

    async def health(self, service: str = "", *, timeout_s: float | None = None) -> Health:
        """SERVING where one executor is, else what the first one answers. ``service`` and errors as
        `ExecutorClient.health` and `status`."""
        left_s = self._deadline(timeout_s).remaining(SILENT_S)
        answers = await self._asked(lambda each: each.client.health(service, timeout_s=left_s))
        return Health.SERVING if Health.SERVING in answers else answers[0]

    async def _asked(self, ask: Callable[[Member], Awaitable[Outcome]]) -> list[Outcome]:
        """The answers of the executors that answer, at least one."""
        members = self.members.there
        if not members:
            raise TransportError(f"no executor of {', '.join(self.members.targets)} is there")
        outcomes = await asyncio.gather(*map(ask, members), return_exceptions=True)
        answers = list[Outcome]()
        for outcome in outcomes:
            if not isinstance(outcome, BaseException):
                answers.append(outcome)
            elif not isinstance(outcome, ExecutorError):
                raise outcome
        if not answers:
            raise next(each for each in outcomes if isinstance(each, ExecutorError))
        return answers

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
        state = SequenceState(create, tokens=[] if keep_tokens or rebuild else None, rebuilds=rebuild)
        return FleetSequence(Sender(state, FleetOwner(self._fleet, self._first, state)))

    async def register_token_mask(self, mask: Mask, *, timeout_s: float | None = None) -> bytes:
        """As `ExecutorClient.register_token_mask`, for all executors: each gets it when it is first needed there."""
        deadline = self._deadline(timeout_s)
        [member, *_] = await self.members.some(deadline)
        return await member.connection.masks.register(mask, deadline)

    async def register_grammar(
        self, kind: GrammarKind, text: str | Mapping[str, Any], *, timeout_s: float | None = None
    ) -> bytes:
        """As `ExecutorClient.register_grammar`, for all executors: each gets it when it is first needed there."""
        deadline = self._deadline(timeout_s)
        [member, *_] = await self.members.some(deadline)
        return await member.connection.grammars.register(kind, text, deadline)

    # --- batches ----------------------------------------------------------------------------------------------------

    def _batch(
        self, feed: Feed, items: ListOf[Item], all_or_nothing: bool, timeout_s: float | None
    ) -> Awaitable[list[Answer | ExecutorError]]:
        senders, deadline = self._fleet.senders, self._deadline(timeout_s)
        for at, item in enumerate(items):
            if item.state not in senders:
                raise InvalidRequest(f"items[{at}] must be an item of a sequence of this fleet", field=f"items[{at}]")
        if all_or_nothing and items:
            owners = {senders[item.state].owner.executor for item in items}
            if len(owners) != 1 or (owner := owners.pop()) is None:
                raise InvalidRequest("all or nothing is for items of sequences of one owner", field="all_or_nothing")
            return forward_at(owner.connection, feed, items, deadline, all_or_nothing=True)

        def renewed(sender: Sender[FleetOwner], item: Item) -> Item:
            if item.handle == sender.state.handle:
                return item
            again = sender.item(item.tokens, item.output, item.truncate_to, item.run)
            again.on_tokens = item.on_tokens
            return again

        async def in_order() -> list[Answer | ExecutorError]:
            first = followed_first(items)
            try:
                if first:  # they may still wait for an owner
                    await all_sent(first, deadline)
                return await at_owners(
                    [BatchEntry(senders[item.state], item, item.tokens, item.follows is not None) for item in items],
                    renewed,
                    lambda member, some: forward_at(member.connection, feed, some, deadline),
                    deadline,
                )
            finally:
                for item in items:
                    item.sent()

        return in_order()

    def _truncate(
        self, pairs: ListOf[tuple[Sequence, int]], timeout_s: float | None
    ) -> Awaitable[list[ExecutorError | None]]:
        deadline = self._deadline(timeout_s)
        owned = [(self._own(sequence), length) for sequence, length in pairs]
        return at_owners(
            [BatchEntry(pair[0], pair) for pair in owned],
            lambda _, pair: pair,
            lambda member, some: truncate_at(member.connection, some, deadline),
            deadline,
        )

    def _release(self, sequences: ListOf[Sequence]) -> Awaitable[list[ExecutorError | None]]:
        owned = [(sender.owner.member, sender) for sender in map(self._own, sequences)]
        return by_owner(owned, lambda member, some: release_at(member.connection, some))

    # --- inside -----------------------------------------------------------------------------------------------------

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline.after(self._timeout_s if timeout_s is None else timeout_s)

    def _own(self, sequence: Sequence) -> Sender[FleetOwner]:
        sender = self._fleet.senders.get(sender_of(sequence).state)
        if sender is None:
            raise InvalidRequest(f"{sequence!r} is not a sequence of this fleet", field="sequences")
        return sender
