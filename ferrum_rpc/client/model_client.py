"""The seam for schedulers and for servers in front of executors: the same program drives one executor or a fleet.

`ExecutorClient` and `FleetClient` are both a `ModelClient`. A program that plans per executor reads
`ModelClient.executors` and `Sequence.owner`; one that does not reads `pressure` and awaits `status`, which a fleet sums
over its executors.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as ListOf
from typing import Protocol, Self

from ferrum_rpc.client.answer import Answer, BatchResults
from ferrum_rpc.client.arguments import CacheMode, Tokens
from ferrum_rpc.client.executor_view import ExecutorView
from ferrum_rpc.client.info import ExecutorInfo, ExecutorStatus, Health
from ferrum_rpc.client.masks import Mask
from ferrum_rpc.client.sequence import Sequence
from ferrum_rpc.client.state import Item
from ferrum_rpc.core import Pressure, RowLogprobs
from ferrum_rpc.errors import ExecutorError


class ModelClient(Protocol):
    """The executors of one model, for one scheduler: one of them, or a fleet. An async context manager."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def close(self) -> None:
        """Release what is live, and close the connections."""

    # --- the executors ----------------------------------------------------------------------------------------------

    @property
    def executors(self) -> ListOf[ExecutorView]:
        """Those that are there, the oldest first. Empty before the first answer says what they are."""

    @property
    def pressure(self) -> Pressure | None:
        """How full they were in their last answers, together. None before the first."""

    async def info(self, *, timeout_s: float | None = None) -> ExecutorInfo:
        """What they are: model, cache, limits, capabilities. Of a fleet it is that of the first one; `executors` have
        each one's own."""

    async def status(self, *, timeout_s: float | None = None) -> ExecutorStatus:
        """How they are doing right now: state, pressure, counters. Of a fleet the state is that of the best one, and
        the rest is summed over those that answer. Raises `TransportError` where none answers."""

    async def health(self, service: str = "", *, timeout_s: float | None = None) -> Health:
        """The standard health check of a service; of the whole server without a name. A fleet is SERVING as long as
        one executor is. Raises `TransportError` where none answers."""

    # --- sequences --------------------------------------------------------------------------------------------------

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
        """A new, empty sequence. Nothing is sent until it is fed. ``rebuild`` is off for one executor by default, and
        on for a fleet."""

    async def register_token_mask(self, mask: Mask, *, timeout_s: float | None = None) -> bytes:
        """Register which tokens a row may yield; returns the id for ``Greedy(mask=...)`` and ``Sample(mask=...)``."""

    # --- many sequences in one call ---------------------------------------------------------------------------------

    async def forward(
        self, items: Iterable[Item], *, all_or_nothing: bool = False, timeout_s: float | None = None
    ) -> BatchResults:
        """Any mix of prefills, chunks, decodes and verifies; ``results[i]`` answers ``items[i]``."""

    async def batch_prefill(
        self, items: Iterable[Item], *, all_or_nothing: bool = False, timeout_s: float | None = None
    ) -> BatchResults:
        """As `forward`, for items that start sequences or feed chunks."""

    async def batch_decode(
        self, items: Iterable[Item], *, all_or_nothing: bool = False, timeout_s: float | None = None
    ) -> BatchResults:
        """As `forward`, for items of one token on sequences that exist."""

    async def truncate(
        self, rollbacks: Iterable[tuple[Sequence, int]], *, timeout_s: float | None = None
    ) -> list[ExecutorError | None]:
        """Roll back many sequences, each to a length of its own."""

    async def release(self, sequences: Iterable[Sequence]) -> list[ExecutorError | None]:
        """Free many sequences."""

    async def score(
        self, tokens: Tokens, first: int = 1, *, logprobs: RowLogprobs | None = None, timeout_s: float | None = None
    ) -> Answer:
        """Log-probabilities of ``tokens[first:]``."""
