"""Adapters of a model shared by ranks: the other ranks load and unload with rank 0, each its own part.

Every rank reads all files itself and computes the fingerprint; an adapter counts as loaded only if all fingerprints
agree. Only rank 0 keeps which adapters are loaded, their numbers and their users.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ferrum_rpc.core import AdapterFacts
from ferrum_rpc.engine.adapters import Adapters
from ferrum_rpc.engine.ranks.leader import Ranks
from ferrum_rpc.errors import ExecutorError, InvalidRequest
from ferrum_rpc.models.lora import Loras


class RankedAdapters(Adapters):
    """The adapters on rank 0. The refusal of another rank is raised with that rank's name. ``max_bytes`` is per
    rank."""

    def __init__(
        self, root: Path, loras: Loras, fingerprint: bytes, max_rank: int, max_bytes: int, *, ranks: Ranks
    ) -> None:
        super().__init__(root, loras, fingerprint, max_rank, max_bytes)
        self._ranks = ranks
        ranks.ask("take_adapters", fingerprint)

    def open(self, number: int, name: str) -> AdapterFacts:
        """Its bytes are those of the rank with the most."""
        facts = super().open(number, name)
        try:
            others: list[AdapterFacts] = self._ranks.ask("adapter", "open", number, name)
            self._compare(facts._replace(nbytes=0), [each._replace(nbytes=0) for each in others])
        except BaseException:
            self.drop(number)
            raise
        return facts._replace(nbytes=max(each.nbytes for each in (facts, *others)))

    def read(self, number: int) -> bytes | None:
        others = self._ranks.order("adapter", "read", number)
        try:
            found = super().read(number)
        except BaseException:
            with suppress(ExecutorError):  # a refusal of this rank comes first
                self._ranks.collect(others)
            raise
        self._compare(found, self._ranks.collect(others))
        return found

    def drop(self, number: int) -> None:
        super().drop(number)
        self._ranks.ask("adapter", "drop", number)

    def _compare(self, here: object, there: list[object]) -> None:
        """Raise InvalidRequest if a rank has found different files."""
        for rank, found in zip(self._ranks.names, there, strict=True):
            if found != here:
                raise InvalidRequest(
                    f"{rank}: the adapter's files are not those of rank 0: bring the same to every machine",
                    field="adapter",
                )
