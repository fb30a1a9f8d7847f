"""R20: a bad item harms nobody. A good item beside one of every kind that is refused, in every order, and between
twins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import grpc

from ferrum_rpc.core import HandleRef
from ferrum_rpc.executor.v1 import forward_pb2, output_pb2, session_pb2, types_pb2
from ferrum_rpc.wire.status import error_from_status
from tests.faults.figures import Figures, at_least, exactly
from tests.faults.raw_session import RawSession, raw_session
from tests.faults.sizes import Size
from tests.serving import Served, serve_identity
from tests.wiring import full, item, pb, prefill, top

Item = forward_pb2.ForwardItem
Send = Callable[[list[Item]], Awaitable[list[forward_pb2.ItemResult]]]

CONTEXT: Final = 96
TOKENS: Final = 64
LIMITS: Final[dict[str, int]] = {
    "kv_blocks": 24,
    "max_context": CONTEXT,
    "max_batch_tokens": TOKENS,
    "max_response_bytes": 4096,
    "max_session_response_bytes": 4096,
    "max_sequences": 16,
    "max_sequences_per_caller": 12,
    "max_leases": 4,
}
ALL: Final = output_pb2.POSITIONS_ALL
_Spec = output_pb2.OutputSpec


class World:
    """A server, and the handles that bad items name."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.live = self.gone = types_pb2.KvHandle()

    async def set_up(self) -> None:
        self.live = await prefill(self.served, [1, 2, 3])
        self.gone = await prefill(self.served, [1])
        await self.served.executor.Release(pb.ReleaseRequest(handle=self.gone))
        await self.served.executor.Prefill(pb.PrefillRequest(item=item([9], request_id="taken")))

    def of_live(self, **changes: Any) -> types_pb2.KvHandle:
        handle = types_pb2.KvHandle()
        handle.CopyFrom(self.live)
        for name, value in changes.items():
            setattr(handle, name, value)
        return handle

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While a call on the live sequence is in flight."""
        record = self.served.server.state.handles.find(HandleRef(self.live.id, 0, 0))
        record.busy = True
        try:
            yield
        finally:
            record.busy = False


def _sample(**fields: Any) -> output_pb2.OutputSpec:
    return _Spec(sample=output_pb2.SampleOutput(**fields))


def _create(**fields: Any) -> Item:
    return item([1], create=forward_pb2.CreateOptions(**fields))


OF_HANDLES: Final[dict[str, Callable[[World], Item]]] = {
    "no handle's length": lambda world: item([1], types_pb2.KvHandle(id=b"garbage")),
    "an empty handle": lambda world: item([1], types_pb2.KvHandle()),
    "a handle that never was": lambda world: item([1], world.of_live(id=world.live.id[:8] + bytes(16))),
    "a handle of another life": lambda world: item([1], world.of_live(id=bytes(8) + world.live.id[8:])),
    "a released handle": lambda world: item([1], world.gone),
}
OF_SEQUENCES: Final[dict[str, Callable[[World], Item]]] = {
    "a stale version": lambda world: item([1], world.of_live(version=9)),
    "another length": lambda world: item([1], world.of_live(seq_len=9)),
    "a busy sequence": lambda world: item([1], world.live),
    "a rollback that is growth": lambda world: item([1], world.live, truncate_to=4),
    "an id with other content": lambda world: item([1, 2], request_id="taken"),
}
"""Items whose twins name a live sequence twice, or that have no twin: those refuse the call, as the contract says."""
OF_FORM: Final[dict[str, Callable[[World], Item]]] = {
    "no tokens": lambda world: item([]),
    "a token above the vocabulary": lambda world: item([256]),
    "a token above 2^31": lambda world: item([0xFFFFFFFF]),
    "a long id": lambda world: item([1], request_id="x" * 129),
    "a handle and create": lambda world: item([1], world.live, create=forward_pb2.CreateOptions(reserve_tokens=1)),
    "a rollback of nothing": lambda world: item([1], truncate_to=3),
    "positions that do not exist": lambda world: item([1], output=_Spec(positions=77)),
    "top 0": lambda world: item([1], output=top(0)),
    "top 2^26": lambda world: item([1], output=top(1 << 26)),
    "top 2^32 of every row": lambda world: item([1] * 9, output=top(0xFFFFFFFF, ALL)),
    "no selected token": lambda world: item([1], output=_Spec(selected_tokens=output_pb2.SelectedTokensOutput())),
    "selected beyond the vocabulary": lambda world: item(
        [1], output=_Spec(selected_tokens=output_pb2.SelectedTokensOutput(token_ids=[1 << 30]))
    ),
    "too many selected": lambda world: item(
        [1], output=_Spec(selected_tokens=output_pb2.SelectedTokensOutput(token_ids=[1] * 257))
    ),
    "no row's type": lambda world: item([1], output=full(types_pb2.D_TYPE_U32)),
    "a mask": lambda world: item([1], output=_Spec(greedy=output_pb2.GreedyOutput(token_mask_id=b"m"))),
    "a penalty of nothing": lambda world: item([1], output=_Spec(greedy=output_pb2.GreedyOutput(repetition_penalty=0))),
    "a sample with a mask": lambda world: item([1], output=_sample(token_mask_id=b"x")),
    "a sample with an unknown mask": lambda world: item([1], output=_sample(token_mask_id=bytes(32))),
    "a sample with a mask of nothing": lambda world: item(
        [1], output=_sample(token_mask=types_pb2.Tensor(dtype=types_pb2.D_TYPE_I32, shape=[8], data=bytes(32)))
    ),
    "a sample with too many masks": lambda world: item([1], output=_sample(row_mask_ids=[b"", b""])),
    "a sample with an endless penalty": lambda world: item([1], output=_sample(presence_penalty=float("inf"))),
    "a sample that is colder than nothing": lambda world: item([1], output=_sample(temperature=-1)),
    "a sample that is no number": lambda world: item([1], output=_sample(top_p=float("nan"))),
    "a sample of no tokens": lambda world: item([1], output=_sample(top_p=0)),
    "log-probabilities above the limit": lambda world: item(
        [1], output=_sample(logprobs=output_pb2.RowLogprobs(top_k=1 << 30))
    ),
    "log-probabilities beyond the vocabulary": lambda world: item(
        [1], output=_Spec(greedy=output_pb2.GreedyOutput(logprobs=output_pb2.RowLogprobs(token_ids=[1 << 30])))
    ),
    "scores at positions": lambda world: item(
        [1], output=_Spec(positions=ALL, next_token=output_pb2.NextTokenOutput())
    ),
    "a following token above 2^31": lambda world: item(
        [1, 2], output=_Spec(next_token=output_pb2.NextTokenOutput(following_token=0xFFFFFFFF))
    ),
    "an acceptance": lambda world: item([1], output=_Spec(accept=output_pb2.AcceptOutput())),
    "hidden states of no type": lambda world: item(
        [1], output=_Spec(hidden_states=output_pb2.HiddenStatesOutput(dtype=types_pb2.D_TYPE_U32))
    ),
    "an adapter": lambda world: _create(adapter="a"),
    "a cache mode": lambda world: _create(cache_mode=99),
    "an unknown lease": lambda world: _create(lease_id="nobody's"),
    "a lease of another life": lambda world: _create(lease_id="00ff-11"),
    "a reserve beyond the context": lambda world: _create(reserve_tokens=0xFFFFFFFF),
    "more tokens than a call may have": lambda world: item([1] * (TOKENS + 1)),
    "an answer that is too large": lambda world: item([1] * 16, output=full(positions=ALL)),
    "a gone handle that wants a large answer": lambda world: item([1] * 3, world.gone, output=full(positions=ALL)),
    "more blocks than there are": lambda world: _create(reserve_tokens=CONTEXT - 1),
}
BAD: Final = OF_HANDLES | OF_SEQUENCES | OF_FORM


async def r20_a_bad_item_harms_nobody(size: Size) -> Figures:
    """Every kind of bad item before and behind a good one, and as twins around it; by unary calls and in a session."""
    harmed: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    tried = 0
    async with serve_identity(**LIMITS) as served, raw_session(served.executor) as session:
        world = World(served)
        await world.set_up()
        await _fill_pool(served)
        # A last round with a server that drains: new sequences are refused, and owned ones are not.
        for each in range(size.bad_item_rounds + 1):
            if each == size.bad_item_rounds:
                served.server.drain(60.0)
            draining = {"a new sequence": lambda _: item([1])}
            good = await _good(served) if each < size.bad_item_rounds else world.live
            for name, make in (BAD if each < size.bad_item_rounds else draining).items():
                bad = make(world)
                around = [[bad, None], [None, bad]] + ([] if name in OF_SEQUENCES else [[bad, None, bad]])
                for send in (_by_call(served), _in_session(session)):
                    for order in around:
                        tried += 1
                        items = [item([5], good, item_id=7, truncate_to=3) if one is None else one for one in order]
                        with world.busy() if name == "a busy sequence" else _nothing():
                            results = await send(items)
                        good = _judge(name, results, good, harmed=harmed, accepted=accepted, reasons=reasons)
            if each < size.bad_item_rounds:
                await served.executor.Release(pb.ReleaseRequest(handle=good, any_version=True))
        await served.check()
    return Figures(
        "R20",
        "A bad item harms nobody",
        (
            exactly("good items refused beside a bad one", harmed.total(), 0),
            exactly("bad items accepted", accepted.total(), 0),
            at_least("kinds of bad items", len(BAD) + 1, 39),
            at_least("reasons that they were refused for", len(reasons), 14),
        ),
        {"calls": tried, "reasons": dict(reasons), "wrong": dict((harmed + accepted).most_common(5))},
    )


async def _fill_pool(served: Served) -> None:
    """So that a sequence with a whole context ahead of it finds no blocks."""
    await served.executor.Prefill(pb.PrefillRequest(item=item([1] * 16)))


async def _good(served: Served) -> types_pb2.KvHandle:
    return await prefill(served, [1, 2, 3])


def _by_call(served: Served) -> Send:
    async def send(items: list[Item]) -> list[forward_pb2.ItemResult]:
        try:
            return list((await served.executor.UnifiedForward(pb.UnifiedForwardRequest(items=items))).results)
        except grpc.aio.AioRpcError:
            return []

    return send


def _in_session(session: RawSession) -> Send:
    async def send(items: list[Item]) -> list[forward_pb2.ItemResult]:
        return list((await session.ask(forward=session_pb2.SessionForward(items=items))).forward.results)

    return send


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _judge(
    name: str,
    results: list[forward_pb2.ItemResult],
    good: types_pb2.KvHandle,
    *,
    harmed: Counter[str],
    accepted: Counter[str],
    reasons: Counter[str],
) -> types_pb2.KvHandle:
    """Note what became of a call; the good sequence's handle from now on."""
    after = [each.output.handle for each in results if each.item_id == 7 and each.HasField("output")]
    if not after or after[0].version != good.version + 1:
        harmed[name] += 1
    for each in results:
        if each.item_id != 7 and each.HasField("output"):
            accepted[name] += 1
        elif each.item_id != 7:
            reasons[error_from_status(each.error).reason.value] += 1
    return after[0] if after else good
