"""Random histories of sequences, and callers that make them: each request once, or with duplicates, short deadlines and
requests again that were answered long ago. For R2."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import numpy as np

from ferrum_rpc.errors import ExecutorError, Reason
from ferrum_rpc.executor.v1 import types_pb2
from ferrum_rpc.wire.rows import rows_from_proto
from ferrum_rpc.wire.status import error_from_rpc, error_from_status
from tests.support.process import Dialled, dial
from tests.support.wiring import item, pb, top

AT_ONCE: Final = 16
STEPS_OF_A_HISTORY: Final = 25
PATIENCE_S: Final = 1.0
MOST_TRIES: Final = 300
"""Of one request; then the executor will never answer it."""
RECONNECT: Final = (
    ("grpc.initial_reconnect_backoff_ms", 20),
    ("grpc.min_reconnect_backoff_ms", 20),
    ("grpc.max_reconnect_backoff_ms", 100),
    ("grpc.enable_retries", 0),
)
AGAIN: Final = frozenset({Reason.SEQUENCE_BUSY, Reason.DEADLINE_EXCEEDED, Reason.CANCELLED, Reason.TRANSPORT})
"""Answers after which a caller sends the same request again."""
STALE: Final = frozenset({Reason.SEQUENCE_VERSION_MISMATCH, Reason.HANDLE_RELEASED})
"""Answers to an old handle in a new request."""


@dataclass
class Counts:
    """What was sent, and what went wrong that must not."""

    sent: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Seen:
    """What an answer says of a sequence."""

    handle: tuple[bytes, int, int]
    rows: tuple[Any, ...]


class Caller:
    """Sends requests until they are answered, over several connections; ``duplicating``: some of them twice or late."""

    def __init__(self, connections: list[Dialled], dice: random.Random, counts: Counts, *, duplicating: bool) -> None:
        self._connections = connections
        self._dice = dice
        self._counts = counts
        self._duplicating = duplicating
        self._answered: list[tuple[str, Any, list[Seen]]] = []

    async def settle(self, method: str, request: Any) -> list[Seen]:
        """Send one request, in whatever way, until its answer is there."""
        way = self._dice.choice(("once", "twice", "hurried", "once", "late")) if self._duplicating else "once"
        if way == "late" and self._answered:
            await self._late()
        for _ in range(MOST_TRIES):
            patience = self._dice.uniform(0.0005, 0.004) if way == "hurried" else PATIENCE_S
            copies = 2 if way == "twice" else 1
            self._counts.sent[way] += copies
            answers = [
                each
                for each in await asyncio.gather(*[self._send(method, request, patience) for _ in range(copies)])
                if not isinstance(each, ExecutorError)
            ]
            if answers:
                if any([seen.handle for seen in each] != [seen.handle for seen in answers[0]] for each in answers):
                    self._counts.wrong.append(f"two answers to one {method}")
                if answers[0]:
                    self._answered.append((method, request, answers[0]))
                return answers[0]
            way = "again"
            await asyncio.sleep(0.005)
        raise AssertionError(f"no answer to a {method} after {MOST_TRIES} tries: {self._counts.wrong[-1:]}")

    async def _late(self) -> None:
        """Send again what was answered long ago: the recorded answer, and nothing happens. And an old handle in a new
        request: refused."""
        method, request, before = self._dice.choice(self._answered)
        self._counts.sent["late"] += 1
        answer = await self._send(method, request, PATIENCE_S)
        then = [each.handle for each in before]
        if not isinstance(answer, ExecutorError) and [each.handle for each in answer] != then:
            self._counts.wrong.append(f"a late duplicate of {method} was answered otherwise")
        id_, length, version = before[0].handle
        latest = {each.handle[0]: each.handle for _, _, seen in self._answered for each in seen}
        if latest[id_] != before[0].handle:
            stale = types_pb2.KvHandle(id=id_, seq_len=length, version=version)
            self._counts.sent["stale"] += 1
            decode = pb.DecodeRequest(item=item([1], stale))
            late = await self._send("Decode", decode, PATIENCE_S, AGAIN | STALE)
            if not isinstance(late, ExecutorError):
                self._counts.wrong.append("a stale handle was accepted")

    async def _send(
        self, method: str, request: Any, timeout_s: float, expected: frozenset[Reason] = AGAIN
    ) -> list[Seen] | ExecutorError:
        call = getattr(self._dice.choice(self._connections).executor, method)
        try:
            response = await call(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return self._judged(method, error_from_rpc(error), expected)
        if method == "UnifiedForward":
            refusals = [error_from_status(each.error) for each in response.results if each.HasField("error")]
            if refusals:
                return self._judged(method, refusals[0], expected)
            return [_seen(each.output, response.row_blocks) for each in response.results]
        if method == "Release":
            return []
        if method == "TruncateKv":
            return [Seen((response.handle.id, response.handle.seq_len, response.handle.version), ())]
        return [_seen(response.output, response.row_blocks)]

    def _judged(self, method: str, refusal: ExecutorError, expected: frozenset[Reason]) -> ExecutorError:
        if refusal.reason not in expected:
            self._counts.wrong.append(f"{method}: {refusal.reason} {refusal.message}")
        return refusal


def _seen(output: Any, row_blocks: Any) -> Seen:
    handle = output.handle
    blocks = rows_from_proto(row_blocks)
    rows: tuple[Any, ...] = ()
    if output.HasField("rows"):
        block, first, end = blocks[output.rows.block], output.rows.first, output.rows.first + output.rows.count
        part = block.cut(first, end)
        rows = tuple(part.columns.values())
    return Seen((handle.id, handle.seq_len, handle.version), rows)


async def history(caller: Caller, seed: int, run: str) -> list[Seen]:
    """The history of two sequences: everything that changes one, alone and together, and what was answered."""
    dice = random.Random(seed)
    name = iter(f"{run}:{seed}:{number}" for number in range(10_000))
    seen: list[Seen] = []
    handles: list[types_pb2.KvHandle] = []

    def note(answers: list[Seen], *which: int) -> None:
        seen.extend(answers)
        for index, answer in zip(which, answers, strict=True):
            id_, length, version = answer.handle
            handles[index] = types_pb2.KvHandle(id=id_, seq_len=length, version=version)

    def step(tokens: list[int], index: int, **fields: Any) -> Any:
        return item(tokens, handles[index], output=top(2), request_id=next(name), **fields)

    for index in range(2):
        handles.append(types_pb2.KvHandle())
        prompt = [dice.randrange(256) for _ in range(dice.randint(2, 20))]
        first = item(prompt, output=top(2), request_id=next(name))
        note(await caller.settle("Prefill", pb.PrefillRequest(item=first)), index)
    for _ in range(STEPS_OF_A_HISTORY - 2):
        index, token = dice.randrange(2), dice.randrange(256)
        match dice.randrange(6):
            case 0 | 1:
                note(await caller.settle("Decode", pb.DecodeRequest(item=step([token], index))), index)
            case 2:
                verify = pb.ForwardVerifyRequest(item=step([token, 3], index))
                note(await caller.settle("ForwardVerify", verify), index)
            case 3:
                length = dice.randint(1, handles[index].seq_len)
                truncate = pb.TruncateKvRequest(handle=handles[index], length=length, request_id=next(name))
                note(await caller.settle("TruncateKv", truncate), index)
            case 4:
                back = dice.randint(1, handles[index].seq_len)
                decode = pb.DecodeRequest(item=step([token], index, truncate_to=back))
                note(await caller.settle("Decode", decode), index)
            case _:
                both = pb.UnifiedForwardRequest(items=[step([token], 0), step([token, 9], 1)])
                note(await caller.settle("UnifiedForward", both), 0, 1)
    for handle in handles:
        await caller.settle("Release", pb.ReleaseRequest(handle=handle, any_version=True, request_id=next(name)))
    return seen


async def histories(target: str, steps: int, counts: Counts, *, duplicating: bool) -> list[list[Seen]]:
    """So many steps in histories of their own, `AT_ONCE` at a time."""
    async with AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(dial(target, *RECONNECT)) for _ in range(4)]
        run = secrets.token_hex(4)
        todo = list(range(max(1, steps // STEPS_OF_A_HISTORY)))
        done: dict[int, list[Seen]] = {}

        async def worker() -> None:
            while todo:
                seed = todo.pop()
                caller = Caller(connections, random.Random(-seed - 1), counts, duplicating=duplicating)
                done[seed] = await history(caller, seed, run)

        await asyncio.gather(*[worker() for _ in range(AT_ONCE)])
        return [done[seed] for seed in sorted(done)]


def differences(quiet: list[list[Seen]], noisy: list[list[Seen]]) -> int:
    """Answers that differ, ids apart: length, version, tokens, logits."""
    count = 0
    for one, other in zip(quiet, noisy, strict=True):
        count += abs(len(one) - len(other))
        for a, b in zip(one, other, strict=False):
            rows = zip(a.rows, b.rows, strict=False)
            same = len(a.rows) == len(b.rows) and all(np.allclose(x, y, atol=1e-4) for x, y in rows)
            count += a.handle[1:] != b.handle[1:] or not same
    return count
