"""The executors of a list of targets or of a name, each for one process lifetime.

A restarted process at the same target is another member: the sequences of the old one are gone, and none of its
requests are sent to the new one. The status of each is requested periodically, and at once if its events end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Iterable
from collections.abc import Sequence as ListOf
from contextlib import suppress
from itertools import count
from typing import Final

from ferrum_rpc.client.client import ExecutorClient, connection_of
from ferrum_rpc.client.encryption import in_words
from ferrum_rpc.client.fleet.member import Member
from ferrum_rpc.client.fleet.placement import LongestPrefix, Placement
from ferrum_rpc.client.fleet.resolving import NAMED, check, lookup
from ferrum_rpc.client.grammars import KnownGrammars
from ferrum_rpc.client.masks import KnownMasks
from ferrum_rpc.client.retry import LEASE_GONE, Deadline
from ferrum_rpc.errors import ContextLengthExceeded, ExecutorError, InvalidRequest, LayoutMismatch, TransportError

SILENT_S: Final = 1.0
"""An executor that does not say for so long how it is gets no new sequences until it does."""

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 2.0
"""Between attempts to reach what does not answer."""

log = logging.getLogger("ferrum_rpc.client.fleet")


class Members:
    """The executors of ``targets``: a list of ``host:port`` and ``unix:path``, or ``dns:///name:port`` for those that
    the name resolves to, or ``file:PATH`` for those that it lists, one a line. An async context manager; ``connect``
    makes the client of one. All must serve the same model: an executor with another model is not used.

    ``look_every_s``: the interval of status requests, besides those after a change of health; ``resolve_every_s``: the
    interval at which names are resolved, besides when a member is gone; ``patience_s``: the time limit for a new one's
    first answer. One that hangs, or is silent, gets no new sequences; after ``hung_patience_s`` it is abandoned if
    others accept sequences, and its sequences continue there. When it answers again it is another member, after its
    sequences are released. ``watch_only``: for monitors, which place no sequences: executors with another model, and
    those that report that they hang, are members too. The events of prefix caches are not read then, nor for a single
    target, which leaves no choice. ``changes``: counts members that appeared, began to drain or to hang, recovered,
    went, or could not be reached (``troubles``).
    """

    def __init__(
        self,
        targets: str | Iterable[str],
        *,
        connect: Callable[[str], ExecutorClient] = ExecutorClient,
        placement: Placement = LongestPrefix(),
        look_every_s: float = 0.5,
        resolve_every_s: float = 5.0,
        patience_s: float = 5.0,
        hung_patience_s: float = 10.0,
        watch_only: bool = False,
    ) -> None:
        self.targets = (targets,) if isinstance(targets, str) else tuple(targets)
        if not self.targets:
            raise InvalidRequest("a fleet must have at least one target", field="targets")
        for target in self.targets:
            check(target)
        if not isinstance(
            connect(self.targets[0]), ExecutorClient
        ):  # no member would ever join, and no log line say why
            raise InvalidRequest(
                "connect must make a ferrum_rpc.client.ExecutorClient, in the client for threads too", field="connect"
            )
        self.changes = 0
        self.troubles: dict[str, ExecutorError] = {}
        self.masks = KnownMasks()
        self.grammars = KnownGrammars()
        self.first: Member | None = None
        self._connect = connect
        self._placement = placement
        self._look_every_s, self._resolve_every_s, self._patience_s = look_every_s, resolve_every_s, patience_s
        self._hung_patience_s, self._watch_only = hung_patience_s, watch_only
        self._there: list[Member] = []
        self._left: dict[str, tuple[str, str]] = {}  # by target: the instance that was given up, and the lease there
        self._contexts: dict[str, int] = {}  # by target: the context that it had last
        self._turns = count(1)
        self._addresses: dict[str, set[str]] = {}
        self._keeping: dict[str, asyncio.Task[None]] = {}
        self._resolving: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._resolve_now = asyncio.Event()

    async def __aenter__(self) -> Members:
        plain = [target for target in self.targets if not target.startswith(NAMED)]
        self._listed("", plain)
        self._resolving = [asyncio.create_task(self._resolve(each)) for each in set(self.targets) - set(plain)]
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [*self._resolving, *self._keeping.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def _several(self) -> bool:
        """Whether there may be several executors to choose from."""
        return len(self.targets) > 1 or self.targets[0].startswith(NAMED)

    @property
    def there(self) -> list[Member]:
        """The members that are not gone, the oldest first."""
        return list(self._there)

    @property
    def named(self) -> set[str]:
        """The targets of executors, as the names resolve now."""
        return set[str]().union(*self._addresses.values())

    @property
    def serving(self) -> list[Member]:
        """The members that accept new sequences."""
        return [each for each in self._there if each.serving]

    async def changed(self, since: int) -> int:
        """Wait until ``changes`` is another number than ``since``; returns it."""
        while self.changes == since:
            await self._changed.wait()
        return self.changes

    async def look(self, member: Member) -> None:
        """Check whether it is there and works. A member that has hung for too long is abandoned."""
        trouble = member.trouble
        await member.look(SILENT_S)
        if member.hung and not trouble and member in self._there:
            log.warning("executor %s of the fleet hangs: %s", member.target, member.trouble)
        elif trouble and not member.hung and not member.gone:
            log.info("executor %s of the fleet goes on", member.target)
        if member.hung_s > self._hung_patience_s and self.serving:
            why = f"{member.trouble} for {member.hung_s:.0f} s, and its sequences go on elsewhere"
            await member.end(TransportError(why))

    async def some(self, deadline: Deadline, tokens: int = 0) -> list[Member]:
        """Wait for members that accept new sequences. If none of them has a context of so many ``tokens``, wait for one
        that is `away` and may have it. Raises `TransportError` when the time is over."""
        while not (found := self.serving) or (
            max(each.max_context for each in found) < tokens and self.away(tokens, found)
        ):
            await self._change(deadline, tokens)
        return found

    async def longer(self, context: int, deadline: Deadline) -> list[Member]:
        """Those that take new sequences and have more than this ``context``, when there is one, or none may come back
        that has. Raises as `some`."""
        while not (found := [each for each in self.serving if each.max_context > context]):
            if not self.away(context + 1, self.serving):
                break
            await self._change(deadline, context + 1)
        return found

    def away(self, tokens: int, there: Iterable[Member]) -> set[str]:
        """The listed targets that are not among the members ``there`` and may have a context of so many ``tokens``,
        according to their last answer, or because they have not answered yet. Targets whose executors are not of this
        fleet are excluded."""
        away = self.named | ({each for each in self.targets if each.startswith(NAMED)} - self._addresses.keys())
        away -= {each.target for each in there}
        return {
            each
            for each in away
            if self._contexts.get(each, tokens) >= tokens
            and not isinstance(self.troubles.get(each), InvalidRequest | LayoutMismatch)
        }

    async def all_known(self, timeout_s: float) -> None:
        """Wait until each target is a member, or failed with a known reason, for so long at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.away(0, self._there) - self.troubles.keys():
                    await self.changed(self.changes)

    async def _change(self, deadline: Deadline, tokens: int) -> None:
        try:
            async with asyncio.timeout(deadline.remaining()):
                await self.changed(self.changes)
        except TimeoutError:
            known = {target: in_words(each) for target, each in self.troubles.items()}
            known |= {each.target: "it drains" for each in self._there if each.draining}
            known |= {each.target: each.trouble for each in self._there if each.hung}
            if self.serving:
                known |= dict.fromkeys(self.away(tokens, self._there) - known.keys(), "it has not answered")
            why = "; ".join(f"{target}: {each}" for target, each in known.items())
            what = f"a sequence of {tokens} tokens" if self.serving else "sequences"
            message = f"no executor of {', '.join(self.targets)} takes {what} ({why or 'none has answered'})"
            raise TransportError(message) from None

    def choose(
        self,
        members: ListOf[Member],
        prompt: ListOf[int],
        salt: bytes | None = b"",
        *,
        length: int = 0,
        becomes: int = 0,
        refused: Container[Member] = (),
    ) -> Member:
        """One of ``members``, of which there is at least one, for a new sequence that begins with ``prompt``. ``salt``:
        that of the sequence; None for one that finds nothing in a prefix cache of which this client knows.
        ``length``: of the sequence, where its tokens are not known; ``becomes``: how long it may be at last. Its
        context must hold that, or where none does, be the longest. One that is full is passed over, and one that has
        ``refused`` the sequence. Raises `ContextLengthExceeded` where none holds the sequence as it is."""
        fit = fitting(members, max(length, len(prompt)), becomes)
        untried = [each for each in fit if each not in refused]
        members = [each for each in untried if not each.full] or untried or fit
        hashes: dict[int, list[bytes]] = {}
        if prompt and salt is not None:
            for index in {each.info.block_size: each.index for each in members if each.index is not None}.values():
                hashes[index.block_size] = list(index.hashes(prompt, salt=salt))
        candidates = [each.candidate(prompt, hashes.get(each.info.block_size, [])) for each in members]
        chosen = self._placement.choose(prompt, candidates)
        member = members[candidates.index(chosen)]
        member.promise(chosen.blocks(len(prompt) - chosen.cached_tokens))
        member.turn = next(self._turns)
        return member

    # --- who is there -----------------------------------------------------------------------------------------------

    def _notify(self) -> None:
        self.changes += 1
        self._changed.set()
        self._changed = asyncio.Event()
        self._resolve_now.set()

    async def _resolve(self, name: str) -> None:
        while True:
            self._resolve_now.clear()
            try:
                found = await lookup(name)
            except TransportError as error:
                if name not in self.troubles:
                    log.warning("%s: %s; the executors that are known stay", name, error.message)
                self.troubles[name] = error
            else:
                self._listed(name, found)
                if found:
                    self.troubles.pop(name, None)
                else:
                    self.troubles[name] = TransportError("it names no executor")
            with suppress(TimeoutError):
                async with asyncio.timeout(self._resolve_every_s):
                    await self._resolve_now.wait()
            await asyncio.sleep(FIRST_PAUSE_S)

    def _listed(self, name: str, found: Iterable[str]) -> None:
        """Set the present addresses of a name. A member that is no longer listed is used while it answers."""
        before = self._addresses.get(name)
        self._addresses[name] = set(found)
        named = self.named
        if before != self._addresses[name]:  # one that somebody waits for may not be among them any more
            self._notify()
        for member in self._there:
            if member.listed != (member.target in named):
                member.listed = not member.listed
                self._notify()
        for target in named - self._keeping.keys():
            self._keeping[target] = asyncio.create_task(self._keep(target))

    async def _keep(self, target: str) -> None:
        """Keep a member for a target, one after the other, as long as the target is one of the fleet's."""
        pause_s = FIRST_PAUSE_S
        while target in self.named:
            try:
                client = await self._connect(target).__aenter__()
            except InvalidRequest as error:  # an invalid line of a file
                self.troubles[target] = error
                self._notify()
                return
            member: Member | None = None
            try:
                member = await self._join(target, client)
                self.troubles.pop(target, None)
                pause_s = FIRST_PAUSE_S
                await member.attend(self._look_every_s, self.look, prefixes=not self._watch_only and self._several)
            except ExecutorError as error:
                self.troubles[target] = error
                self._notify()
            except asyncio.CancelledError:
                await client.close()
                raise
            finally:
                if member is not None:
                    self._there.remove(member)
                    if member.ending is not None and target in self.named:
                        self.troubles[target] = member.ending
                    self._left[target] = member.info.instance_id, member.connection.leases.lease_id
            await connection_of(client).abandon()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        del self._keeping[target]
        self.troubles.pop(target, None)

    async def _join(self, target: str, client: ExecutorClient) -> Member:
        """The member that answers there. Raises `LayoutMismatch` for another model, `InvalidRequest` for a known
        one."""
        info = await client.info(timeout_s=self._patience_s)
        connection = connection_of(client)
        connection.context.only_instance, connection.masks.known = info.instance_id, self.masks
        connection.grammars.known = self.grammars
        member = Member(target, client, info, self._notify)
        await self.look(member)
        if member.ending is not None:
            raise member.ending
        if member.status is None or (member.hung and not self._watch_only):
            raise TransportError(member.trouble)
        if any(each.info.instance_id == info.instance_id for each in self._there):
            raise InvalidRequest("another target of the fleet is the same executor", field="targets")
        known = self.first
        if known is not None and known.model != member.model and not self._watch_only:
            raise LayoutMismatch(f"it serves {info.model.name}, and the fleet {known.info.model.name}")
        await self._release_left(target, member)
        self._contexts[target] = member.max_context
        self._there.append(member)
        self.first = self.first or member
        self._notify()
        return member

    async def _release_left(self, target: str, member: Member) -> None:
        """Free sequences that an executor still has of an abandoned member; they continue elsewhere."""
        instance, lease_id = self._left.get(target, ("", ""))
        if lease_id and instance == member.info.instance_id:
            with suppress(*LEASE_GONE):
                await member.client.revoke_lease(lease_id, timeout_s=self._patience_s)
        self._left.pop(target, None)


def fitting(members: ListOf[Member], length: int, becomes: int) -> list[Member]:
    """The members whose context fits a sequence's final length, or else the longest, for one of this ``length`` now."""
    longest = max(each.max_context for each in members)
    if length > longest:
        raise ContextLengthExceeded(
            f"the sequence has {length} tokens; the executors that accept it have a context of at most {longest}",
            metadata={"max_context": longest, "seq_len": length},
        )
    wanted = min(max(length, becomes), longest)
    return [each for each in members if each.max_context >= wanted]
