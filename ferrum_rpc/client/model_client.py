"""The common interface of one executor and a fleet, for schedulers and for servers in front of executors.

`ExecutorClient` and `FleetClient` are both a `ModelClient`. A program that plans per executor reads
`ModelClient.executors` and `Sequence.owner`; one that does not reads `pressure` and awaits `status`, which a fleet sums
over its executors.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Iterable, Mapping
from collections.abc import Sequence as ListOf
from contextlib import AbstractAsyncContextManager
from typing import Any

from ferrum_rpc.client.answer import Answer, BatchResults
from ferrum_rpc.client.arguments import CacheMode, Tokens, as_list, as_number, as_tokens
from ferrum_rpc.client.executor_view import ExecutorView
from ferrum_rpc.client.info import ExecutorInfo, ExecutorStatus, Health
from ferrum_rpc.client.masks import Mask
from ferrum_rpc.client.sequence import Sequence
from ferrum_rpc.client.state import Item
from ferrum_rpc.client.transport import BATCH_DECODE, BATCH_PREFILL, FORWARD, Feed
from ferrum_rpc.core import GrammarKind, NextToken, Pressure, RowLogprobs
from ferrum_rpc.errors import ExecutorError, InvalidRequest


class ModelClient(AbstractAsyncContextManager[Any]):
    """The executors of one model, for one scheduler: a single one, or a fleet. An async context manager."""

    # --- the executors ----------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def executors(self) -> ListOf[ExecutorView]:
        """The present executors, the oldest first. Empty before the first answer."""

    @property
    @abstractmethod
    def pressure(self) -> Pressure | None:
        """How full they were in their last answers, summed. None before the first."""

    @abstractmethod
    async def info(self, *, timeout_s: float | None = None) -> ExecutorInfo:
        """The executor's description; for a fleet that of the first one. `executors` have each one's own."""

    @abstractmethod
    async def status(self, *, timeout_s: float | None = None) -> ExecutorStatus:
        """The present status. For a fleet the state is that of the best executor, and the rest is summed."""

    @abstractmethod
    async def health(self, service: str = "", *, timeout_s: float | None = None) -> Health:
        """The standard health check. A fleet is SERVING as long as one executor is."""

    @abstractmethod
    async def close(self) -> None:
        """Release what is live, and close the connections."""

    # --- sequences --------------------------------------------------------------------------------------------------

    @abstractmethod
    def sequence(
        self,
        *,
        keep_tokens: bool = ...,
        rebuild: bool = ...,
        reserve_tokens: int = ...,
        adapter: str = ...,
        cache_salt: bytes = ...,
        cache_mode: CacheMode = ...,
    ) -> Sequence:
        """A new, empty sequence. ``rebuild`` is off for one executor by default, and on for a fleet."""

    @abstractmethod
    async def register_token_mask(self, mask: Mask, *, timeout_s: float | None = None) -> bytes:
        """Register a mask of allowed tokens; returns its id."""

    @abstractmethod
    async def register_grammar(
        self, kind: GrammarKind, text: str | Mapping[str, Any], *, timeout_s: float | None = None
    ) -> bytes:
        """Register a grammar; returns its id."""

    # --- many sequences in one call ---------------------------------------------------------------------------------

    async def forward(
        self, items: Iterable[Item], *, all_or_nothing: bool = False, timeout_s: float | None = None
    ) -> BatchResults:
        """Any mix of prefills, chunks, decodes and verifies (`Sequence.item`) in one forward pass.

        ``results[i]`` answers ``items[i]``: an `Answer`, or this item's own `ExecutorError`, returned and not raised;
        `BatchResults` separates them. With ``all_or_nothing`` the refusal of one is raised for all. Errors of the whole
        call (`QueueFull`, `Draining`, `TransportError`, …) are raised; sending the same items again is then safe.
        """
        return BatchResults(await self._batch(FORWARD, _listed(items), all_or_nothing, timeout_s))

    async def batch_prefill(
        self, items: Iterable[Item], *, all_or_nothing: bool = False, timeout_s: float | None = None
    ) -> BatchResults:
        """As `forward`, for items that start sequences or feed chunks."""
        return BatchResults(await self._batch(BATCH_PREFILL, _listed(items), all_or_nothing, timeout_s))

    async def batch_decode(
        self, items: Iterable[Item], *, all_or_nothing: bool = False, timeout_s: float | None = None
    ) -> BatchResults:
        """As `forward`, for items of one token on existing sequences."""
        return BatchResults(await self._batch(BATCH_DECODE, _listed(items), all_or_nothing, timeout_s))

    async def truncate(
        self, rollbacks: Iterable[tuple[Sequence, int]], *, timeout_s: float | None = None
    ) -> list[ExecutorError | None]:
        """Roll back many sequences, each to its own length: ``results[i]`` is None on success, or the `ExecutorError`
        that `Sequence.truncate` would raise. In a session they are one frame, else a call each. After an unknown
        outcome, making the same call again settles it."""
        pairs: list[tuple[Sequence, int]] = []
        for at, pair in enumerate(as_list(rollbacks, "rollbacks")):
            if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], Sequence):
                raise InvalidRequest(
                    f"rollbacks[{at}] must be a pair of a Sequence and a length", field=f"rollbacks[{at}]"
                )
            pairs.append((pair[0], as_number(pair[1], f"rollbacks[{at}]")))
        return await self._truncate(pairs, timeout_s)

    async def release(self, sequences: Iterable[Sequence]) -> list[ExecutorError | None]:
        """Free many sequences: ``results[i]`` is None if the sequence is free (also if it was before), or the
        `ExecutorError` that `Sequence.release` would raise. Bounded and completed as that is."""
        listed: ListOf[Sequence] = as_list(sequences, "sequences")
        for at, sequence in enumerate(listed):
            if not isinstance(sequence, Sequence):
                raise InvalidRequest(f"sequences[{at}] must be a Sequence", field=f"sequences[{at}]")
        return await self._release(listed)

    async def score(
        self,
        tokens: Tokens,
        first: int = 1,
        *,
        logprobs: RowLogprobs | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """Scores of ``tokens[first:]``, each given all tokens before it: `Answer.logprobs` float32 [n - first] of
        `Answer.tokens`, and the ``logprobs`` of their rows. ``first`` is at least 1; set it to a prompt's length to
        score what follows the prompt. A temporary sequence is made for it, fed in chunks, and released."""
        *fed, last = as_tokens(tokens)
        first = as_number(first, "first", least=1, most=len(fed))
        async with self.sequence() as sequence:
            return await sequence.prefill(fed, NextToken(first - 1, last, logprobs), timeout_s=timeout_s)

    @abstractmethod
    def _batch(
        self, feed: Feed, items: ListOf[Item], all_or_nothing: bool, timeout_s: float | None
    ) -> Awaitable[list[Answer | ExecutorError]]: ...

    @abstractmethod
    def _truncate(
        self, pairs: ListOf[tuple[Sequence, int]], timeout_s: float | None
    ) -> Awaitable[list[ExecutorError | None]]: ...

    @abstractmethod
    def _release(self, sequences: ListOf[Sequence]) -> Awaitable[list[ExecutorError | None]]: ...


def _listed(items: Iterable[Item]) -> list[Item]:
    listed: list[Item] = as_list(items, "items")
    for at, item in enumerate(listed):
        if not isinstance(item, Item):
            raise InvalidRequest(
                f"items[{at}] must be an Item, not {type(item).__name__}: make it with Sequence.item",
                field=f"items[{at}]",
            )
    return listed
