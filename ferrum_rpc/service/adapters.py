"""Loaded adapters: which exist, how many sequences use each, and how one is loaded and unloaded.

An adapter has a number in the engine, which is never reused, and spans carry it. It is sent to the engine in pieces, by
commands in the queue of the steps. So steps continue meanwhile, and none refers to a missing adapter. It can be found
by name once all of it has arrived, until its unloading begins. An adapter with sequences is not unloaded.

Its fingerprint keeps its results separate: cached blocks and exported caches of another adapter that was loaded under
the same name are not found.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count
from typing import Final

from ferrum_rpc.engine.api import Operation
from ferrum_rpc.engine.commands import Command, Operations
from ferrum_rpc.errors import (
    AdapterInUse,
    AdapterUnknown,
    NotSupported,
    SequencesExhausted,
    counted,
    listed,
)
from ferrum_rpc.service.asking import Submit, between_steps
from ferrum_rpc.service.records import Adapter

NAMED: Final = 80
"""Maximum characters of an adapter's name in an error."""


class AdapterTable:
    """The adapters of one executor, at most ``max_adapters``; 0 if none are offered. ``submit`` queues an operation of
    the engine."""

    def __init__(self, max_adapters: int, submit: Submit) -> None:
        self._max_adapters = max_adapters
        self._submit = submit
        self._numbers = count(1)
        self._loaded: dict[str, Adapter] = {}
        self._loading: dict[str, asyncio.Task[Adapter]] = {}

    @property
    def offered(self) -> bool:
        """Whether adapters are offered."""
        return self._max_adapters > 0

    def __len__(self) -> int:
        """Loaded ones."""
        return len(self._loaded)

    def __iter__(self) -> Iterator[Adapter]:
        """The loaded adapters, in the order of loading."""
        return iter(list(self._loaded.values()))

    def listed(self) -> list[Adapter]:
        """The loaded adapters, for an operator. Raises `NotSupported`."""
        self._check_offered()
        return list(self)

    def find(self, name: str, field: str) -> Adapter:
        """The adapter that a request names in ``field``. Raises `AdapterUnknown` and `NotSupported`."""
        found = self._loaded.get(name)
        if found is None:
            if not self.offered:
                raise NotSupported("adapters are not offered (capability ADAPTERS)", field=field)
            raise AdapterUnknown(f"no adapter {name[:NAMED]!r} is loaded", field=field)
        return found

    async def load(self, name: str) -> Adapter:
        """Load it, unless it is loaded; it continues to load if the caller is cancelled. Raises `SequencesExhausted` if
        there are too many, and the engine's refusals; nothing of it is left then."""
        self._check_offered()
        if (found := self._loaded.get(name)) is not None:
            return found
        task = self._loading.get(name)
        if task is None:
            if len(self._loaded) + len(self._loading) >= self._max_adapters:
                await between_steps(
                    self._submit, Command(Operations.find_adapter, name)
                )  # one that there is not is refused as that
                raise SequencesExhausted(
                    f"at most {counted(self._max_adapters, 'adapter')} may be loaded: unload one",
                    metadata={"max_adapters": self._max_adapters},
                )
            task = self._loading[name] = asyncio.create_task(self._load(name))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # asked for, or not
        return await asyncio.shield(task)

    async def unload(self, name: str) -> None:
        """Unload it; returns when its memory is free. Raises `AdapterUnknown` if it is not loaded, and
        `AdapterInUse`."""
        self._check_offered()
        found = self._loaded.get(name)
        if found is None:
            loaded = listed("loaded", sorted(self._loaded)) if self._loaded else "none is loaded"
            raise AdapterUnknown(f"no adapter {name[:NAMED]!r} is loaded: {loaded}", field="name")
        if found.sequences:
            raise AdapterInUse(
                f"the adapter is used by {counted(found.sequences, 'sequence')} and stays until the last is released",
                metadata={"sequences": found.sequences},
            )
        del self._loaded[name]
        await asyncio.shield(
            asyncio.create_task(between_steps(self._submit, Command(Operations.drop_adapter, found.number)))
        )

    def _check_offered(self) -> None:
        if not self.offered:
            raise NotSupported(
                "adapters are not offered (capability ADAPTERS): the executor has no --adapter-dir",
                metadata={"capability": "ADAPTERS"},
            )

    async def _load(self, name: str) -> Adapter:
        number = next(self._numbers)
        try:
            facts = await between_steps(self._submit, Command(Operations.open_adapter, number, name))
            fingerprint: bytes | None = None
            while fingerprint is None:
                fingerprint = await between_steps(self._submit, Command(Operations.read_adapter, number))
        except BaseException:
            self._submit(Operation(Command(Operations.drop_adapter, number), _ignore))
            raise
        else:
            loaded = self._loaded[name] = Adapter(name, number, facts.rank, facts.nbytes, fingerprint)
            return loaded
        finally:
            del self._loading[name]


def _ignore(_: object) -> None:
    """A command whose result nothing waits for."""
