"""Contents that callers register by their hash: token masks and grammars. Which exist, who registered them, and which
are dropped when others need their place.

A caller may name only contents that it has registered itself, so it cannot find out whether another caller has
registered one. Only the engine has them. They are sent, and dropped, by commands in the queue of the steps, so a step
never refers to a missing one:

- a content is sent before the first item that names it;
- a content that a call in flight names is not dropped.

Otherwise the least recently used one is dropped: one of the caller itself if it has its share of the table, else one
of the caller that has most, if that has more than this one. If none can be dropped, the refusal says when to come back.
The same applies if as many as the table holds, or `ON_WAY`, are still on their way to the engine, which takes them
between steps.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final

from ferrum_rpc.core import Limits
from ferrum_rpc.engine.api import Operation
from ferrum_rpc.engine.commands import Command
from ferrum_rpc.errors import ExecutorError, QueueFull
from ferrum_rpc.service.asking import Submit
from ferrum_rpc.service.records import RETRY_AFTER_S, Account, Resource

ON_WAY: Final = 64
"""Contents that may be on their way to the engine, however small the table is."""


@dataclass(slots=True, eq=False)
class Registered:
    """A content of one caller. ``uses``: calls in flight that name it."""

    id: bytes
    owner: CallerContents
    uses: int = 0


@dataclass(slots=True, eq=False)
class CallerContents:
    """One caller's contents by id. ``idle``: the unused ones, the least recently used first."""

    account: Account
    contents: dict[bytes, Registered] = field(default_factory=dict)
    idle: OrderedDict[bytes, Registered] = field(default_factory=OrderedDict)


class ContentTable:
    """The contents of all callers. ``submit`` queues an operation of the engine. ``resource`` is shared by the callers,
    ``what`` its name in messages, ``limit`` that of its limit, and ``change`` the engine's operation, which takes what
    was added, by key, and the keys of what was dropped."""

    resource: ClassVar[Resource]
    what: ClassVar[str]
    limit: ClassVar[str]
    change: ClassVar[Callable[..., Any]]

    def __init__(self, limits: Limits, submit: Submit) -> None:
        self._most: int = getattr(limits, self.limit)
        self._submit = submit
        self._owners: dict[str, CallerContents] = {}
        self._holders: Counter[bytes] = Counter()  # by key: how many callers have registered it
        self._count = 0
        self._on_way: Counter[str] = Counter()  # by caller: contents that the engine has not taken yet

    def __len__(self) -> int:
        """The number of contents of all callers, to which the limit applies."""
        return self._count

    @staticmethod
    def key(account: Account, content_id: bytes) -> bytes:
        """The name of a caller's content in the engine; callers with the same one share it."""
        return content_id

    def known(self, account: Account, content_id: bytes) -> Registered | None:
        """The caller's content with this id."""
        owner = self._owners.get(account.caller.name)
        return None if owner is None else owner.contents.get(content_id)

    def unpin(self, contents: Iterable[Registered]) -> None:
        """Unpin the contents of a call that has ended."""
        for each in contents:
            self._unuse(each)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _add(self, account: Account, content_id: bytes, content: object) -> Registered:
        """Register a content, or mark it as used if it is registered. Raises `QueueFull` if there is no room; nothing
        has changed then."""
        if (known := self.known(account, content_id)) is not None:
            self._use(known)
            self._unuse(known)
            return known
        name = account.caller.name
        dropped = self._make_room(account, self._owners.get(name))
        owner = self._owners.setdefault(name, CallerContents(account))  # it may have gone with its last content
        made = owner.contents[content_id] = owner.idle[content_id] = Registered(content_id, owner)
        account.held[self.resource] += 1
        self._count += 1
        key = self.key(account, content_id)
        self._holders[key] += 1
        added = [(key, content)] if self._holders[key] == 1 else []
        if added or dropped:
            self._on_way[name] += 1
            command = Command(type(self).change, added, dropped)
            self._submit(Operation(command, partial(self._changed, name, content_id)))
        return made

    def _use(self, content: Registered) -> None:
        if not content.uses:
            content.owner.idle.pop(content.id, None)
        content.uses += 1

    def _unuse(self, content: Registered) -> None:
        content.uses -= 1
        if not content.uses and content.owner.contents.get(content.id) is content:
            content.owner.idle[content.id] = content

    def _make_room(self, account: Account, mine: CallerContents | None) -> list[bytes]:
        """Drop one content if another needs its place. Returns what the engine has to drop."""
        most = min(self._most, account.most[self.resource])
        if self._on_way[account.caller.name] >= max(most, ON_WAY) or self._on_way.total() >= max(self._most, ON_WAY):
            raise self._full(f"{self._on_way.total()} {self.what} are on their way to the engine", most)
        held = 0 if mine is None else len(mine.contents)
        victim: CallerContents | None
        if held >= account.most[self.resource]:
            victim = mine
        elif self._count >= self._most:
            others = [each for each in self._owners.values() if each is mine or len(each.contents) > held]
            victim = max((each for each in others if each.idle), key=lambda each: len(each.contents), default=None)
        else:
            return []
        if victim is None or not victim.idle:
            raise self._full(f"there are {self._count} {self.what}, and calls in flight name all that might go", most)
        oldest = next(iter(victim.idle.values()))
        return self._forget(oldest)

    def _forget(self, content: Registered) -> list[bytes]:
        """Remove the content from the caller. Returns what the engine has to drop: nothing if another caller has it."""
        owner = content.owner
        del owner.contents[content.id]
        owner.idle.pop(content.id, None)
        if not owner.contents:
            del self._owners[owner.account.caller.name]
        owner.account.free(self.resource)
        self._count -= 1
        key = self.key(owner.account, content.id)
        self._holders[key] -= 1
        if self._holders[key]:
            return []
        del self._holders[key]
        return [key]

    def _changed(self, name: str, content_id: bytes, result: object) -> None:
        """The engine has stored the content, or refused it: then it is as if no caller had ever registered it."""
        self._on_way[name] -= 1
        if not self._on_way[name]:
            del self._on_way[name]
        if isinstance(result, ExecutorError):
            for owner in list(self._owners.values()):
                if (content := owner.contents.get(content_id)) is not None:
                    self._forget(content)

    def _full(self, why: str, most: int) -> QueueFull:
        return QueueFull(f"{why}; nothing was started", metadata={self.limit: most}, retry_after_s=RETRY_AFTER_S)
