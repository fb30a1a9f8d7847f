"""R1: handles cannot be forged or confused."""

from __future__ import annotations

import random
import re
import secrets
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import grpc
from google.protobuf.message import Message

from ferrum_rpc.errors import Reason
from ferrum_rpc.executor.v1 import forward_pb2, types_pb2
from ferrum_rpc.service.guard.auth import Security
from ferrum_rpc.wire.status import STATUS_METADATA_KEY
from tests.faults.figures import Figures, exactly
from tests.faults.sizes import Size
from tests.support.serving import Served, serve_identity
from tests.support.tokens import token_file
from tests.support.wiring import decode, item, prefill, refusal, release

BATCH: Final = 4_000
LIVE: Final = 64
NUMBER: Final = re.compile(r"\d+")


async def r1_handles_cannot_be_forged(size: Size, seed: int = 0) -> Figures:
    """Present random, bit-flipped, foreign, released and stale handles to a server with live sequences, in batches and
    in every method that takes one."""
    dice = random.Random(seed)
    accepted = changed = leaks = 0
    texts: Counter[str] = Counter()
    async with (
        serve_identity(max_batch_items=BATCH, max_queued_items=2 * BATCH, kv_blocks=1024) as served,
        serve_identity() as other,
    ):
        live = [await prefill(served, [1, 2, 3, dice.randrange(256)]) for _ in range(LIVE)]
        foreign = [await prefill(other, [1, 2, 3]) for _ in range(LIVE)]
        gone = [await prefill(served, [1]) for _ in range(LIVE)]
        await release(served, *gone)
        known = _secrets([*live, *foreign, *gone])
        before = {record.sequence: (record.version, record.length) for record in served.server.state.handles.records()}
        wrong = wrong_handles(dice, live, foreign, gone)
        tried = 0
        while tried < size.handles:
            bad = [next(wrong) for _ in range(min(BATCH, size.handles - tried))]
            tried += len(bad)
            for batch in _without_twins(bad):
                response = await served.batch_decode(*[item([7], each) for each in batch])
                accepted += sum(each.HasField("output") for each in response.results)
                leaks += _leaks(response, known)
                for result, handle in zip(response.results, batch, strict=True):
                    texts[NUMBER.sub("#", result.error.message)] += 1
                    leaks += _unexplained_number(result, live, handle)
        for handle in [next(wrong) for _ in range(min(size.handles // 100, 2_000))]:
            refusals = [await refusal(call) for call in _every_method(served, handle)]
            accepted += refusals.count(None)
            tried += 1
        after = {record.sequence: (record.version, record.length) for record in served.server.state.handles.records()}
        changed = sum(after.get(number) != state for number, state in before.items()) + len(after) - len(before)
        for handle in live:
            changed += (await decode(served, [7], handle)).seq_len != 5
        await served.check()
    strangers = max(5, size.handles // 10_000)
    differ = await _tenants(strangers)
    return Figures(
        "Handles cannot be forged or confused",
        exactly("wrong handles accepted", accepted, 0),
        exactly("live sequences changed by them", changed, 0),
        exactly("answers that carry a part of any handle, or an internal number", leaks, 0),
        exactly("answers that tell another tenant's handle from one that never was", differ, 0),
        facts={"handles": tried, "other tenants' handles": strangers, "answers": dict(texts)},
    )


def wrong_handles(
    dice: random.Random,
    live: list[types_pb2.KvHandle],
    foreign: list[types_pb2.KvHandle],
    gone: list[types_pb2.KvHandle],
) -> Iterator[types_pb2.KvHandle]:
    """Handles that nobody may accept, for ever."""
    size = len(live[0].id)
    while True:
        handle = types_pb2.KvHandle()
        handle.CopyFrom(dice.choice(live))
        match dice.randrange(8):
            case 0:
                handle.id = dice.randbytes(size)
            case 1:  # right instance, guessed secret
                handle.id = handle.id[:8] + dice.randbytes(size - 8)
            case 2:
                damaged = bytearray(handle.id)
                damaged[dice.randrange(size)] ^= 1 << dice.randrange(8)
                handle.id = bytes(damaged)
            case 3:
                handle.id = dice.randbytes(dice.choice((1, 7, 8, 16, size - 1, size + 1, 64)))
            case 4:
                handle.CopyFrom(dice.choice(foreign))
            case 5:
                handle.CopyFrom(dice.choice(gone))
            case 6:
                handle.version ^= 1 << dice.randrange(64)
            case _:
                handle.seq_len ^= 1 << dice.randrange(32)
        yield handle


def _without_twins(handles: list[types_pb2.KvHandle]) -> Iterator[list[types_pb2.KvHandle]]:
    """Batches in which no id occurs twice: that refuses the call before anybody looks at its handles."""
    rest = handles
    while rest:
        batch: dict[bytes, types_pb2.KvHandle] = {}
        later = []
        for each in rest:
            if each.id in batch:
                later.append(each)
            else:
                batch[each.id] = each
        yield list(batch.values())
        rest = later


def _secrets(handles: list[types_pb2.KvHandle]) -> list[bytes]:
    """What no answer may contain: each handle's instance and secret, raw and as text."""
    parts = {part for each in handles for part in (each.id[:8], each.id[8:])}
    return [form for part in parts for form in (part, part.hex().encode(), repr(part)[2:-1].encode())]


def _leaks(response: Message, known: list[bytes]) -> int:
    data = response.SerializeToString()
    return sum(secret in data for secret in known)


def _unexplained_number(
    result: forward_pb2.ItemResult, live: list[types_pb2.KvHandle], handle: types_pb2.KvHandle
) -> int:
    """1 where a text has a number that is neither the version nor the length of the sequence that was named."""
    known = {str(value) for each in live if each.id == handle.id for value in (each.version, each.seq_len)}
    return int(not known.issuperset(NUMBER.findall(result.error.message)))


def _every_method(served: Served, handle: types_pb2.KvHandle) -> list[Any]:
    """A call of every method that takes a handle."""
    return [
        served.decode([1], handle),
        served.prefill([1], handle),
        served.verify([1, 2], handle),
        served.truncate(handle, 1),
        served.fork(handle),
        served.reserve(handle, 1),
        served.release(handle),
    ]


async def _tenants(count: int) -> int:
    """How often a tenant's answer about another tenant's handle or lease differs from that about one that never was."""
    differ, tokens = 0, [secrets.token_urlsafe(32) for _ in range(2)]
    with token_file(f"ann {tokens[0]}", f"bob {tokens[1]}") as path:
        async with serve_identity(security=Security(tokens=path)) as served:
            ann, bob = map(served.by, tokens)
            for _ in range(count):
                handle = await prefill(ann, [1, 2])
                never = types_pb2.KvHandle(id=handle.id[:8] + secrets.token_bytes(16), seq_len=2, version=1)
                hers, nobodys = [[await _answer(call) for call in _every_method(bob, each)] for each in (handle, never)]
                differ += sum(one != other for one, other in zip(hers, nobodys, strict=True))
                differ += sum(Reason.HANDLE_UNKNOWN.encode() not in each for each in hers)
                await ann.release(handle)
            lease = (await ann.acquire()).lease_id
            unknown = lease[:-8] + secrets.token_hex(4)
            of_hers, of_nobodys = [
                [await _answer(call) for call in (bob.keep_alive(each), bob.revoke(each))] for each in (lease, unknown)
            ]
            differ += of_hers != of_nobodys
    return differ


async def _answer(call: Any) -> bytes:
    """A refusal as it came, or nothing."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return bytes(dict(error.trailing_metadata() or ())[STATUS_METADATA_KEY])
    return b""
