"""R34: what callers put into requests does not grow the executor's memory, however much of it there is."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from ferrum_rpc.executor.v1 import forward_pb2, info_pb2, output_pb2, types_pb2
from ferrum_rpc.wire.tensor import fill_tensor
from tests.faults.figures import Figures, at_most, exactly
from tests.faults.sizes import Size
from tests.support.process import Dialled, dialled
from tests.support.raw_session import RawSession, raw_session
from tests.support.wiring import item, pb, prefill

MIB: Final = 1 << 20
WORKERS: Final = 8
TIMES: Final = 10
"""Calls of the second measurement, in calls of the first."""

VOCABULARY: Final = 6_000
"""Ids of tokens are objects of their own then, and not the small numbers that Python shares."""

MAY_BE_ZERO: Final = {
    *("max_sequences_per_caller", "max_blocks_per_caller"),
    *("exact_span_tokens", "free_truncation_tokens", "checkpoint_tokens"),
}
"""Limits that an operator sets or leaves out, what an executor without C kernels does not promise, and what models
without recurrent states do not have."""


async def r34_memory_by_content_is_bounded(size: Size) -> Figures:
    """The largest contents that the limits allow, in every call that keeps something of them."""
    flags = ("--identity-vocab-size", str(VOCABULARY), "--max-sequences", "1024", "--max-request-bytes", "4MiB")
    async with dialled(*flags, fresh=size.absolute) as (server, client):
        limits = (await client.info()).limits
        unreported = [each.name for each in info_pb2.Limits.DESCRIPTOR.fields if not _reported(limits, each)]
        await _called(client, limits, size.content_calls)
        first = server.rss_bytes()
        await _called(client, limits, (TIMES - 1) * size.content_calls)
        grown = (server.rss_bytes() - first) / MIB
        status = await client.status()
    return Figures(
        "Memory by request content is bounded",
        at_most("memory between n calls and ten times as many", grown, size.content_mib, "MiB"),
        at_most("of it, in the gauge", status.replay_bytes / MIB, limits.replay_bytes / MIB + 40, "MiB"),
        exactly("limits that GetInfo does not report", len(unreported), 0),
        facts={"calls": TIMES * size.content_calls, "rss MiB": round(first / MIB), "not reported": unreported},
    )


def _reported(limits: Any, field: Any) -> bool:
    """Whether a limit is there: one that is no number is set, and one that is, is not 0."""
    if field.message_type is not None:
        return bool(limits.HasField(field.name))
    return field.name in MAY_BE_ZERO or bool(getattr(limits, field.name))


async def _called(client: Dialled, limits: Any, calls: int) -> None:
    """So many calls of all kinds, in turn."""
    left = itertools.count()

    async def worker() -> None:
        async with raw_session(client.executor) as session:
            long = Contents(client, session, limits)
            while (number := next(left)) < calls:
                await long.kinds[number % len(long.kinds)]()

    await asyncio.gather(*(worker() for _ in range(WORKERS)))


class Contents:
    """Calls at the limits, on sequences that end with the call: what is left of them is what is remembered."""

    def __init__(self, client: Dialled, session: RawSession, limits: Any) -> None:
        self._client, self._session, self._limits = client, session, limits
        ids = [1000 + each for each in range(limits.max_selected_tokens)]
        beside = output_pb2.RowLogprobs(top_k=limits.max_top_tokens, token_ids=ids)
        biases = [output_pb2.TokenBias(token_id=1000 + each, bias=each / 3) for each in range(limits.max_biases)]
        sample = output_pb2.SampleOutput(seed=1 << 60, bias=biases, logprobs=beside)
        self._outputs = [
            output_pb2.OutputSpec(selected_tokens=output_pb2.SelectedTokensOutput(token_ids=ids)),
            output_pb2.OutputSpec(sample=sample),
            output_pb2.OutputSpec(next_token=output_pb2.NextTokenOutput(following_token=1, logprobs=beside)),
        ]
        self._accept = output_pb2.OutputSpec(accept=output_pb2.AcceptOutput(sampling=sample))
        shape = (limits.max_draft_tokens, limits.max_draft_candidates)
        candidates = np.tile(np.arange(1000, 1000 + shape[1], dtype=np.uint32), (shape[0], 1))
        fill_tensor(self._accept.accept.draft_token_ids, candidates)
        fill_tensor(self._accept.accept.draft_probabilities, np.full(shape, 1 / shape[1], np.float32))
        self.kinds: list[Callable[[], Any]] = [
            *[lambda output=each: self._step(output) for each in self._outputs],
            self._draft,
            self._run,
            self._fork,
            self._lease,
        ]

    def _id(self) -> str:
        """As long as it may be, and of characters that take Python four bytes each."""
        name = "\U0001f600" + uuid.uuid4().hex * 4
        return name.encode()[: self._limits.max_request_id_bytes].decode()

    async def _new(self) -> types_pb2.KvHandle:
        salt = uuid.uuid4().bytes * (self._limits.max_cache_salt_bytes // 16)
        create = forward_pb2.CreateOptions(cache_salt=salt, reserve_tokens=1)
        return await prefill(self._client, [1000] * 3, create=create, request_id=self._id())

    async def _fed(self, tokens: list[int], **fields: Any) -> None:
        handle = await self._new()
        [result] = await self._session.step(item(tokens, handle, request_id=self._id(), **fields))
        assert result.HasField("output"), result
        await self._session.release(handle)

    async def _step(self, output: output_pb2.OutputSpec) -> None:
        await self._fed([1000], output=output)

    async def _draft(self) -> None:
        await self._fed([1000] * (1 + self._limits.max_draft_tokens), output=self._accept)

    async def _run(self) -> None:
        stops = [2000 + each for each in range(self._limits.max_stop_tokens)]
        run = forward_pb2.Run(max_tokens=self._limits.max_run_tokens, stop_token_ids=stops)
        await self._fed([1000], run=run)

    async def _fork(self) -> None:
        handle = await self._new()
        count = min(64, self._limits.max_forks)  # of eight workers, as many as may live
        answer = await self._client.executor.ForkKv(pb.ForkKvRequest(handle=handle, count=count, request_id=self._id()))
        await self._session.release(handle, *answer.handles)

    async def _lease(self) -> None:
        name = (uuid.uuid4().hex * 8)[: self._limits.max_name_bytes]
        lease = await self._client.acquire(client_name=name)
        await self._client.revoke(lease.lease_id)
