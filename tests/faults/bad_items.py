"""R20: a bad item harms nobody. A good item beside one of every kind that is refused, in every order, and between
twins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any, Final

import grpc

from ferrum_rpc.core import HandleRef
from ferrum_rpc.executor.v1 import forward_pb2, output_pb2, types_pb2
from ferrum_rpc.wire.status import error_from_status
from tests.faults.figures import Figures, at_least, exactly
from tests.faults.sizes import Size
from tests.support.raw_session import raw_session
from tests.support.serving import Served, serve_identity
from tests.support.wiring import full, item, prefill, release, top

Item = forward_pb2.ForwardItem
Send = Callable[..., Awaitable[list[forward_pb2.ItemResult]]]

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


class World:
    """A server, and the handles that bad items name."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.live = self.gone = types_pb2.KvHandle()

    async def set_up(self) -> None:
        self.live = await prefill(self.served, [1, 2, 3])
        self.gone = await prefill(self.served, [1])
        await release(self.served, self.gone)
        await prefill(self.served, [9], request_id="taken")

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


Make = Callable[[World], Item]


def _asking(**output: Any) -> Make:
    """One token, and an output."""
    return lambda world: item([1], output=output)


def _sampled(**fields: Any) -> Make:
    return _asking(sample=fields)


def _create(**fields: Any) -> Make:
    return lambda world: item([1], create=fields)


OF_HANDLES: Final[dict[str, Make]] = {
    "no handle's length": lambda world: item([1], types_pb2.KvHandle(id=b"garbage")),
    "an empty handle": lambda world: item([1], types_pb2.KvHandle()),
    "a handle that never was": lambda world: item([1], world.of_live(id=world.live.id[:8] + bytes(16))),
    "a handle of another life": lambda world: item([1], world.of_live(id=bytes(8) + world.live.id[8:])),
    "a released handle": lambda world: item([1], world.gone),
}
OF_SEQUENCES: Final[dict[str, Make]] = {
    "a stale version": lambda world: item([1], world.of_live(version=9)),
    "another length": lambda world: item([1], world.of_live(seq_len=9)),
    "a busy sequence": lambda world: item([1], world.live),
    "a rollback that is growth": lambda world: item([1], world.live, truncate_to=4),
    "an id with other content": lambda world: item([1, 2], request_id="taken"),
}
"""Items whose twins name a live sequence twice, or that have no twin: those refuse the call, as the contract says."""
OF_FORM: Final[dict[str, Make]] = {
    "no tokens": lambda world: item([]),
    "a token above the vocabulary": lambda world: item([256]),
    "a token above 2^31": lambda world: item([0xFFFFFFFF]),
    "a long id": lambda world: item([1], request_id="x" * 129),
    "a handle and create": lambda world: item([1], world.live, create={"reserve_tokens": 1}),
    "a rollback of nothing": lambda world: item([1], truncate_to=3),
    "positions that do not exist": _asking(positions=77),
    "top 0": lambda world: item([1], output=top(0)),
    "top 2^26": lambda world: item([1], output=top(1 << 26)),
    "top 2^32 of every row": lambda world: item([1] * 9, output=top(0xFFFFFFFF, ALL)),
    "no selected token": _asking(selected_tokens=output_pb2.SelectedTokensOutput()),
    "selected beyond the vocabulary": _asking(selected_tokens={"token_ids": [1 << 30]}),
    "too many selected": _asking(selected_tokens={"token_ids": [1] * 257}),
    "no row's type": lambda world: item([1], output=full(types_pb2.D_TYPE_U32)),
    "a mask": _asking(greedy={"token_mask_id": b"m"}),
    "a penalty of nothing": _asking(greedy={"repetition_penalty": 0}),
    "a sample with a mask": _sampled(token_mask_id=b"x"),
    "a sample with an unknown mask": _sampled(token_mask_id=bytes(32)),
    "a sample with a mask of nothing": _sampled(
        token_mask={"dtype": types_pb2.D_TYPE_I32, "shape": [8], "data": bytes(32)}
    ),
    "a sample with too many masks": _sampled(row_mask_ids=[b"", b""]),
    "a sample with an endless penalty": _sampled(presence_penalty=float("inf")),
    "a sample that is colder than nothing": _sampled(temperature=-1),
    "a sample that is no number": _sampled(top_p=float("nan")),
    "a sample of no tokens": _sampled(top_p=0),
    "log-probabilities above the limit": _sampled(logprobs={"top_k": 1 << 30}),
    "log-probabilities beyond the vocabulary": _asking(greedy={"logprobs": {"token_ids": [1 << 30]}}),
    "scores at positions": _asking(positions=ALL, next_token=output_pb2.NextTokenOutput()),
    "a following token above 2^31": _asking(next_token={"following_token": 0xFFFFFFFF}),
    "an acceptance": _asking(accept=output_pb2.AcceptOutput()),
    "hidden states of no type": _asking(hidden_states={"dtype": types_pb2.D_TYPE_U32}),
    "an adapter": _create(adapter="a"),
    "a cache mode": _create(cache_mode=99),
    "an unknown lease": _create(lease_id="nobody's"),
    "a lease of another life": _create(lease_id="00ff-11"),
    "a reserve beyond the context": _create(reserve_tokens=0xFFFFFFFF),
    "more tokens than a call may have": lambda world: item([1] * (TOKENS + 1)),
    "an answer that is too large": lambda world: item([1] * 16, output=full(positions=ALL)),
    "a gone handle that wants a large answer": lambda world: item([1] * 3, world.gone, output=full(positions=ALL)),
    "more blocks than there are": _create(reserve_tokens=CONTEXT - 1),
}
BAD: Final = OF_HANDLES | OF_SEQUENCES | OF_FORM


class Tally:
    """What became of good items beside bad ones, by the kind of the bad one, and why those were refused."""

    def __init__(self) -> None:
        self.harmed, self.accepted, self.reasons = Counter[str](), Counter[str](), Counter[str]()
        self.tried = 0

    def note(self, name: str, results: list[forward_pb2.ItemResult], good: types_pb2.KvHandle) -> types_pb2.KvHandle:
        """Note a call; the good sequence's handle from now on."""
        self.tried += 1
        after = [each.output.handle for each in results if each.item_id == 7 and each.HasField("output")]
        self.harmed[name] += not after or after[0].version != good.version + 1
        for each in results:
            if each.item_id != 7 and each.HasField("output"):
                self.accepted[name] += 1
            elif each.item_id != 7:
                self.reasons[error_from_status(each.error).reason.value] += 1
        return after[0] if after else good


async def r20_a_bad_item_harms_nobody(size: Size) -> Figures:
    """Every kind of bad item before and behind a good one, and as twins around it; by unary calls and in a session."""
    tally = Tally()
    async with serve_identity(**LIMITS) as served, raw_session(served.executor) as session:
        world = World(served)
        await world.set_up()
        await prefill(served, [1] * 16)  # so that a sequence with a whole context ahead of it finds no blocks

        async def round_of(kinds: dict[str, Make], good: types_pb2.KvHandle) -> types_pb2.KvHandle:
            for name, make in kinds.items():
                bad = make(world)
                around = [[bad, None], [None, bad]] + ([] if name in OF_SEQUENCES else [[bad, None, bad]])
                for send, order in product((_by_call(served), session.step), around):
                    items = [item([5], good, item_id=7, truncate_to=3) if one is None else one for one in order]
                    with world.busy() if name == "a busy sequence" else nullcontext():
                        results = await send(*items)
                    good = tally.note(name, results, good)
            return good

        for _ in range(size.bad_item_rounds):
            await release(served, await round_of(BAD, await prefill(served, [1, 2, 3])))
        served.server.drain(60.0)  # new sequences are refused, and owned ones are not
        await round_of({"a new sequence": lambda _: item([1])}, world.live)
        await served.check()
    return Figures(
        "A bad item harms nobody",
        exactly("good items refused beside a bad one", tally.harmed.total(), 0),
        exactly("bad items accepted", tally.accepted.total(), 0),
        at_least("kinds of bad items", len(BAD) + 1, 39),
        at_least("reasons that they were refused for", len(tally.reasons), 14),
        facts={
            "calls": tally.tried,
            "reasons": dict(tally.reasons),
            "wrong": dict((tally.harmed + tally.accepted).most_common(5)),
        },
    )


def _by_call(served: Served) -> Send:
    async def send(*items: Item) -> list[forward_pb2.ItemResult]:
        try:
            return list((await served.unified(*items)).results)
        except grpc.aio.AioRpcError:
            return []

    return send
