"""R21: frames keep their order. Pairs of frames of every kind on one sequence, one right behind the other: whatever the
second is answered, the first is never refused for it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, Final

from ferrum_rpc.errors import Reason
from ferrum_rpc.executor.v1 import forward_pb2, session_pb2, types_pb2
from ferrum_rpc.wire.status import error_from_status
from tests.faults.figures import Figures, at_least, exactly
from tests.faults.sizes import Size
from tests.support.raw_session import RawSession, raw_session
from tests.support.serving import serve_identity
from tests.support.wiring import item

PROMPT: Final = (3, 1, 4, 1)
WORKERS: Final = 6
NOBODY: Final = types_pb2.KvHandle(id=b"nobody")

Handle = types_pb2.KvHandle
Frame = dict[str, Any]


def _forward(*items: forward_pb2.ForwardItem, **fields: Any) -> Frame:
    return {"forward": {"items": items, **fields}}


def _two(handle: Handle) -> tuple[forward_pb2.ForwardItem, ...]:
    return item([5], handle, item_id=1), item([6], item_id=2)


FRAMES: Final[dict[str, Callable[[Handle], Frame]]] = {
    "forward": lambda handle: _forward(item([5], handle)),
    "forward that repeats": lambda handle: _forward(item([5], handle, request_id="same")),
    "forward, all or nothing": lambda handle: _forward(item([5], handle), all_or_nothing=True),
    "forward of two": lambda handle: _forward(*_two(handle)),
    "forward of two, all or nothing": lambda handle: _forward(*_two(handle), all_or_nothing=True),
    "forward of two, one of them bad": lambda handle: _forward(item([6], NOBODY, item_id=2), _two(handle)[0]),
    "truncate": lambda handle: {"truncate": {"handles": [handle], "lengths": [2]}},
    "truncate that repeats": lambda handle: {"truncate": {"handles": [handle], "lengths": [2], "request_id": "cut"}},
    "fork": lambda handle: {"fork": {"handle": handle}},
    "release": lambda handle: {"release": {"handles": [handle]}},
    "release of any version": lambda handle: {"release": {"handles": [handle], "any_version": True}},
    "keep_alive": lambda _: {"keep_alive": session_pb2.SessionKeepAlive()},
}
"""Every kind of frame that a step can be; the item that matters has the id 1, or is the only one."""

LATER: Final = frozenset({Reason.SEQUENCE_BUSY, Reason.SEQUENCE_VERSION_MISMATCH, Reason.HANDLE_RELEASED})
"""What the second may be refused for: the first runs, or has changed the sequence or ended it."""


def refusal(answer: session_pb2.SessionResponse) -> Reason | None:
    """Why a frame's sequence was refused, or None."""
    if answer.HasField("error"):
        return error_from_status(answer.error).reason
    if answer.HasField("forward"):
        results = [each for each in answer.forward.results if each.item_id == 1 or len(answer.forward.results) == 1]
    else:
        results = list(answer.handles.results)
    errors = [error_from_status(each.error).reason for each in results if each.HasField("error")]
    return errors[0] if errors else None


def made(answer: session_pb2.SessionResponse) -> Iterator[Handle]:
    """The sequences of an answer that still have to be released."""
    for each in answer.forward.results:
        if each.HasField("output"):
            yield each.output.handle
    for other in answer.handles.results:
        if other.HasField("handle"):
            yield other.handle


async def r21_frames_keep_their_order(size: Size, seed: int = 21) -> Figures:
    """Every kind behind every kind, as often as the size says, several pairs in flight."""
    dice = random.Random(seed)
    kinds = list(product(FRAMES, repeat=2))
    rounds = -(-size.frame_pairs // len(kinds))
    pairs = kinds * rounds
    dice.shuffle(pairs)
    first_refused: Counter[str] = Counter()
    second: Counter[str] = Counter()

    async def work(executor: Any) -> None:
        async with raw_session(executor) as session:
            while pairs:
                await try_pair(session, *pairs.pop())

    async def try_pair(session: RawSession, one: str, other: str) -> None:
        [created] = await session.step(item(PROMPT))
        handle = created.output.handle
        (_, earlier), (_, later) = [await session.send(**FRAMES[each](handle)) for each in (one, other)]
        answers = await earlier, await later
        if (why := refusal(answers[0])) is not None:
            first_refused[f"{one} before {other}: {why.value}"] += 1
        why = refusal(answers[1])
        second["done" if why is None else why.value] += 1
        await session.release(handle, *(each for answer in answers for each in made(answer)))

    total = len(pairs)
    async with serve_identity(layers=1, heads=1, kv_heads=1) as served:
        await asyncio.gather(*[work(served.executor) for _ in range(WORKERS)])
        left = len(served.server.state.handles)
        await served.check()
    strange = sum(count for why, count in second.items() if why not in {"done", *(each.value for each in LATER)})
    return Figures(
        "Frames keep their order",
        exactly("frames refused for one that came later", first_refused.total(), 0),
        exactly("later frames refused for anything but the earlier one", strange, 0),
        at_least("later frames that met the earlier one", second[Reason.SEQUENCE_BUSY.value], total / 20),
        exactly("sequences left behind", left, 0),
        facts={
            "pairs": total,
            "kinds": len(kinds),
            "second": dict(second),
            "wrong": dict(first_refused.most_common(5)),
        },
    )
