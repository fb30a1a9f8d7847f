"""R17: the error contract is true: every refusal has the code of the table and says its reason in ErrorInfo."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
from google.rpc import status_pb2

from ferrum_rpc.errors import Reason
from ferrum_rpc.executor.v1 import (
    executor_control_pb2,
    forward_pb2,
    kv_transfer_pb2,
    session_pb2,
    types_pb2,
)
from ferrum_rpc.wire.status import CODE_BY_REASON, code_number, error_from_status
from tests.faults.any_bytes import explanation
from tests.faults.figures import Figures, at_least, exactly
from tests.faults.sizes import Size
from tests.support.raw_session import raw_session
from tests.support.serving import Gate, Served, serve_identity
from tests.support.waiting import until
from tests.support.wiring import decode, full, item, prefill, release

RETRY_HELPS: Final = frozenset({Reason.SEQUENCES_EXHAUSTED, Reason.QUEUE_FULL, Reason.DRAINING})
"""Refusals that pass without the caller's doing: they say when to come back."""
LIMITS: Final[dict[str, Any]] = {
    "kv_blocks": 16,
    "max_context": 64,
    "max_sequences": 8,
    "max_sequences_per_caller": 6,
    "max_queued_items": 2,
    "max_response_bytes": 8192,
    "max_leases": 1,
}


class Provoked:
    """The refusals of one server, each as its status."""

    def __init__(self, served: Served, gate: Gate) -> None:
        self.served = served
        self.gate = gate
        self.seen: dict[Reason, list[status_pb2.Status]] = {}
        self.bare: list[str] = []

    async def refused(self, call: Awaitable[Any]) -> None:
        """Await a call that must be refused, and keep its status."""
        try:
            answer = await call
        except grpc.aio.AioRpcError as error:
            if (status := explanation(error.trailing_metadata())) is None:
                self.bare.append(f"{error.code().name} {error.details()}")
                return
            if status.code != code_number(error.code()):
                self.bare.append(f"{error.code().name} on the wire, {status.code} in the details")
            self.note(status)
        else:
            self.bare.append(f"not refused: {str(answer)[:100]}")

    def note(self, status: status_pb2.Status) -> None:
        self.seen.setdefault(error_from_status(status).reason, []).append(status)

    @asynccontextmanager
    async def busy(self) -> AsyncIterator[types_pb2.KvHandle]:
        """While a step on the sequence of this handle is held."""
        handle = await prefill(self.served, [1, 2, 3])
        async with self.gate.shut():
            running = asyncio.ensure_future(decode(self.served, [4], handle))
            await self.gate.held()
            yield handle
        await release(self.served, await running)


async def _requests(world: Provoked) -> None:
    served, raw = world.served, world.served.channel.unary_unary
    handle = await prefill(served, [1], request_id="same")
    for call in (
        served.prefill([9999]),
        raw(DECODE)(b"\xff\xff\xff"),
        raw(DECODE.replace("Decode", "Nope"))(b""),
        raw("/no.such.Service/Method")(b""),
        served.control.LoadAdapter(executor_control_pb2.LoadAdapterRequest(name="a")),
        served.prefill([1, 1], request_id="same"),
        served.prefill([1] * 40, output=full(positions=2)),
        served.prefill([1] * 65),
        served.prefill([1], output={"greedy": {"token_mask_id": bytes(32)}}),
        served.truncate(handle, length=9),
    ):
        await world.refused(call)
    await release(served, handle)


async def _handles(world: Provoked) -> None:
    handle = await prefill(world.served, [1, 2, 3])
    old = types_pb2.KvHandle(id=handle.id, seq_len=3, version=handle.version + 1)
    unknown = types_pb2.KvHandle(id=handle.id[:-16] + bytes(16), seq_len=3, version=1)
    foreign = types_pb2.KvHandle(id=bytes(8) + handle.id[8:], seq_len=3, version=1)
    await release(world.served, gone := await prefill(world.served, [1]))
    for bad in (old, unknown, foreign, gone, types_pb2.KvHandle(id=b"seven")):
        await world.refused(decode(world.served, [1], bad))
    await release(world.served, handle)
    async with world.busy() as handle:
        await world.refused(decode(world.served, [4], handle))


async def _leases(world: Provoked) -> None:
    served, leases = world.served, world.served.server.state.leases
    lease = (await served.acquire()).lease_id
    await world.refused(served.acquire())
    await world.refused(served.keep_alive("no such"))
    leased = await prefill(served, [1], create={"lease_id": lease})
    await until(lambda: bool(leases.due(math.inf)))  # no call holds it
    leases.due(math.inf)[0].expires = 0.0
    await until(lambda: not len(leases))
    await world.refused(served.keep_alive(lease))
    await world.refused(served.decode([1], leased))


async def _room(world: Provoked) -> None:
    served = world.served
    handles = [await prefill(served, [2 + place] * 12) for place in range(5)]  # they share nothing
    await world.refused(served.prefill([1] * 12))
    one = await prefill(served, [1])
    await world.refused(served.prefill([1]))
    await release(served, *handles, one)
    async with world.busy():
        waiting = [asyncio.ensure_future(prefill(served, [1])) for _ in range(2)]
        await until(lambda: served.server.state.engine.queued_items == 2)
        await world.refused(served.prefill([1]))
    await release(served, *await asyncio.gather(*waiting))


async def _transfers(world: Provoked) -> None:
    handle = await prefill(world.served, [1, 2, 3])
    export = world.served.transfer.ExportKv(kv_transfer_pb2.ExportKvRequest(handle=handle, first_token=3))
    layout, _ = [frame.layout async for frame in export]
    header = kv_transfer_pb2.ImportKvHeader(layout=layout, request_id="import")
    trailer = kv_transfer_pb2.ImportKvRequest(trailer=kv_transfer_pb2.KvTrailer(sha256=bytes(32)))
    await world.refused(world.served.transfer.ImportKv(iter([kv_transfer_pb2.ImportKvRequest(header=header), trailer])))
    header.layout.layers += 1
    await world.refused(world.served.transfer.ImportKv(iter([kv_transfer_pb2.ImportKvRequest(header=header)])))
    await world.served.reset()


async def _sessions(world: Provoked) -> None:
    async with raw_session(world.served.executor) as session:
        async with world.busy():
            late = session_pb2.SessionForward(items=[item([1])])
            late.timeout.FromMilliseconds(1)
            _, too_late = await session.send(forward=late)
            step, taken_back = await session.send(forward=session_pb2.SessionForward(items=[item([1])]))
            await session.send(cancel=session_pb2.SessionCancel(step_id=step))
            world.note((await taken_back).error)
            await asyncio.sleep(0.02)
        answer = await too_late
        world.note(answer.error if answer.HasField("error") else answer.forward.results[0].error)
        never = types_pb2.KvHandle(seq_len=1, version=1)
        follower = item([1], never, request_id="follower", follow=forward_pb2.Follow(creation="never"))
        [broken] = await session.step(follower)
        world.note(broken.error)
        await session.close()
    stream = world.served.executor.Session()
    await stream.write(session_pb2.SessionRequest(step_id=1, keep_alive=session_pb2.SessionKeepAlive()))
    await world.refused(stream.read())


async def _draining(world: Provoked) -> None:
    world.served.server.drain(10.0)
    await world.refused(world.served.prefill([1]))


DECODE: Final = "/ferrum_rpc.executor.v1.ModelExecutor/Decode"
PROVOCATIONS: Final[tuple[Callable[[Provoked], Awaitable[None]], ...]] = (
    _requests,
    _handles,
    _leases,
    _room,
    _transfers,
    _sessions,
    _draining,
)
ELSEWHERE: Final = frozenset(
    {
        Reason.STARTING,  # tests/service/test_error_table.py
        Reason.ADAPTER_UNKNOWN,  # tests/service/test_adapters.py
        Reason.ADAPTER_IN_USE,  # the same
        Reason.GRAMMAR_UNKNOWN,  # tests/service/test_grammars.py
        Reason.GRAMMAR_TOO_COMPLEX,  # tests/service/test_hostile_grammars.py
        Reason.UNAUTHENTICATED,  # R12
        Reason.PERMISSION_DENIED,  # R12
        Reason.DEVICE_LOST,  # R16
        Reason.STEP_FAILED,  # R16
        Reason.INTERNAL_ERROR,  # R16
        Reason.TRANSPORT,  # what a client says
    }
)
"""Reasons that need a server of their own, and who provokes them."""


async def r17_the_error_contract_is_true(size: Size) -> Figures:
    """Provoke every reason of the table, and what gRPC itself would answer to nonsense."""
    gate = Gate()
    async with serve_identity(stage=gate, **LIMITS) as served:
        world = Provoked(served, gate)
        for provoke in PROVOCATIONS:
            await provoke(world)
        await served.check()
    wrong_code, no_retry = [], []
    for reason, statuses in world.seen.items():
        for status in statuses:
            if status.code != code_number(CODE_BY_REASON[reason]):
                wrong_code.append(f"{reason}: {status.code}")
            if reason in RETRY_HELPS and not error_from_status(status).retry_after_s:
                no_retry.append(str(reason))
    missing = set(Reason) - ELSEWHERE - world.seen.keys()
    return Figures(
        "The error contract is true",
        exactly("reasons that could not be provoked", len(missing), 0),
        at_least("refusals", sum(map(len, world.seen.values())), 24),
        exactly("refusals without ErrorInfo, or none where one was due", len(world.bare), 0),
        exactly("codes unlike the table", len(wrong_code), 0),
        exactly("refusals that pass by themselves, without RetryInfo", len(no_retry), 0),
        facts={"missing": sorted(missing), "bare": world.bare, "wrong": wrong_code + no_retry},
    )
