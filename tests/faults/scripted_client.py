"""A client that repeats one script: a short history of sequences, with every row compared to the oracle's and every
answer and refusal checked against the contract.

What it may conclude from a refusal is the contract: STEP_FAILED, nothing changed, the same request again;
INTERNAL_ERROR, nobody knows, the same request again finds out; a dead process or device, every handle is gone.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Final

import grpc

from ferrum_rpc.errors import ExecutorError, Reason
from ferrum_rpc.executor.v1 import output_pb2, types_pb2
from ferrum_rpc.wire.status import error_from_rpc, error_from_status
from tests.faults.models import IDENTITY, Model
from tests.support.process import Dialled, ServerProcess
from tests.support.transfers import as_import, exported, header, imported
from tests.support.waiting import until
from tests.support.wiring import full, item, pb

ALL: Final = output_pb2.POSITIONS_ALL
FREED_WITHIN_S: Final = 10.0
"""An executor retries its own failed frees, such as that of an export's copy, after a short delay."""
ATTEMPTS: Final = 20
"""Times that a request is sent before it counts as refused for good."""


class Gone(Exception):
    """The process or its device is."""


@dataclass
class Counts:
    """What happened over all servers."""

    fired: Counter[tuple[str, str]] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    rows: int = 0
    rows_by_grammars: int = 0
    killed: int = 0
    old_handles: int = 0
    mismatches: int = 0
    replays: int = 0

    def count_fired(self, server: ServerProcess) -> None:
        """Count what the log of a server says that fired."""
        for each in server.events:
            if each.get("event") == "failpoint_fired":
                self.fired[each["failpoint"], each["effect"]] += 1


@dataclass
class Held:
    """A sequence as the scheduler knows it: its newest handle, and every token that it fed and kept."""

    handle: types_pb2.KvHandle
    tokens: list[int]


class ScriptedClient:
    """Runs the script on one server; ``held`` are the sequences that it owns, from a dead server perhaps. ``late``
    gives the blocks of every free that failed at first and succeeded when the server retried it, oldest first."""

    def __init__(  # noqa: PLR0917
        self,
        client: Dialled,
        held: list[Held],
        dice: random.Random,
        counts: Counts,
        late: Callable[[], list[int]] = list,
        model: Model = IDENTITY,
    ) -> None:
        self._model = model
        self._client = client
        self._held = held
        self._dice = dice
        self._counts = counts
        self._late = late
        self._late_seen = 0

    # --- histories --------------------------------------------------------------------------------------------------

    async def recover(self) -> None:
        """Every old handle is of another instance; a prefill of all tokens brings its sequence back."""
        for one in self._held:
            self._counts.old_handles += 1
            try:
                await self._client.decode([1], one.handle)
            except grpc.aio.AioRpcError as error:
                self._counts.mismatches += error_from_rpc(error).reason is Reason.INSTANCE_MISMATCH
        old, self._held[:] = list(self._held), []
        for index, one in enumerate(old):
            try:
                await self.create(one.tokens)
            except Gone:
                self._held += old[index:]
                raise
        await self.release_all()

    async def script(self) -> None:
        """Every method that changes a sequence, over sequences that share blocks."""
        self._late_seen = len(self._late())
        one = await self.create(self._tokens(6))
        two, three = await self.fork(one, 2)
        await self.reserve(one, 9)
        await self.feed({one_of: self._tokens(1) for one_of in (0, 1, 2)})
        await self.truncate(two, 3)
        await self.feed({0: self._tokens(3), 1: self._tokens(5)})
        await self.feed({2: self._tokens(2)}, truncate_to=5)
        assert three.tokens[:5] == one.tokens[:5]
        await self.move(three)
        await self.feed({3: self._tokens(1)})
        await self.release_all()
        if any(held := await self._client.released(FREED_WITHIN_S)):
            self._counts.wrong.append(f"after a script {held[0]} sequences, {held[1]} blocks and slots")

    async def create(self, tokens: Sequence[int]) -> Held:
        request = pb.PrefillRequest(item=item(tokens, output=full(positions=ALL), request_id=self._id()))
        response = await self._settle("Prefill", request)
        self._compare(response, [(list(tokens), 0)])
        self._held.append(Held(self._once(response.output.handle, len(tokens), 1), list(tokens)))
        return self._held[-1]

    async def fork(self, one: Held, count: int) -> list[Held]:
        request = pb.ForkKvRequest(handle=one.handle, count=count, request_id=self._id())
        handles = (await self._settle("ForkKv", request)).handles
        children = [Held(self._once(each, len(one.tokens), 1), list(one.tokens)) for each in handles]
        self._held += children
        return children

    async def feed(self, tokens: dict[int, list[int]], truncate_to: int | None = None) -> None:
        """One step for the held sequences of these numbers."""
        held = [self._held[index] for index in tokens]
        items = [
            item(each, one.handle, output=full(positions=ALL), request_id=self._id(), truncate_to=truncate_to)
            for one, each in zip(held, tokens.values(), strict=True)
        ]
        response = await self._settle("UnifiedForward", pb.UnifiedForwardRequest(items=items))
        expected = []
        for one, new, result in zip(held, tokens.values(), response.results, strict=True):
            kept = one.tokens[:truncate_to]
            one.tokens = kept + new
            one.handle = self._once(result.output.handle, len(one.tokens), one.handle.version + 1)
            expected.append((one.tokens, len(kept)))
        self._compare(response, expected)

    async def truncate(self, one: Held, length: int) -> None:
        request = pb.TruncateKvRequest(handle=one.handle, length=length, request_id=self._id())
        handle = (await self._settle("TruncateKv", request)).handle
        one.handle = self._once(handle, length, one.handle.version + 1)
        del one.tokens[length:]

    async def reserve(self, one: Held, tokens: int) -> None:
        await self._settle("ReserveKv", pb.ReserveKvRequest(handle=one.handle, tokens=tokens))

    async def move(self, one: Held) -> None:
        """A second sequence of what the first has in the cache, exported and imported."""
        name = self._id()
        for _ in range(ATTEMPTS):
            try:
                frames = await exported(self._client, one.handle, chunk_tokens=4)
                answer = await imported(self._client, header(frames[0].layout, name), *as_import(frames))
            except grpc.aio.AioRpcError as error:
                refusal = error_from_rpc(error)
                self._counts.refusals[refusal.reason] += 1
                if refusal.reason in (Reason.DEVICE_LOST, Reason.TRANSPORT):
                    raise Gone from error
                if refusal.reason not in (Reason.INTERNAL_ERROR, Reason.STEP_FAILED):
                    raise
                continue
            self._held.append(Held(self._once(answer.handle, len(one.tokens), 1), list(one.tokens)))
            return
        raise AssertionError("a move is refused for good")

    async def release_all(self) -> None:
        while self._held:
            request = pb.ReleaseRequest(handle=self._held[-1].handle, request_id=self._id())
            await self._settle("Release", request)
            self._held.pop()

    # --- one call ---------------------------------------------------------------------------------------------------

    async def _settle(self, method: str, request: Any) -> Any:
        """Send a request until it is answered, and check what every refusal promises."""
        free = (await self._status()).free_blocks
        unknown = False
        for _ in range(ATTEMPTS):
            response, error = await self._send(method, request)
            if error is None:
                replayed = _replayed(response)
                self._counts.replays += bool(replayed)
                if replayed and not unknown:
                    self._counts.wrong.append(f"{method}: was refused as not applied, and is replayed")
                return response
            self._counts.refusals[error.reason] += 1
            if error.reason is Reason.INTERNAL_ERROR:
                unknown = True
                free = (await self._status()).free_blocks
            elif error.reason is Reason.STEP_FAILED:
                after = (await self._status()).free_blocks
                if after != free and not await self._were_late(after - free):
                    late = self._late()[self._late_seen :]
                    text = f"{method}: {free} free blocks before it failed, {after} after; freed late: {late}"
                    self._counts.wrong.append(text)
                free = after  # what is explained once is not asked of the next attempt too
            elif error.reason in (Reason.DEVICE_LOST, Reason.TRANSPORT):
                raise Gone
            else:
                break
        raise AssertionError(f"{method} is refused for good: {error}")

    async def _were_late(self, blocks: int) -> bool:
        """Whether so many blocks became free because the server retried frees of its own: an export's copy goes when
        its stream has ended, and nobody can name it. Each such free explains one growth, and only its own blocks.
        Those before the growth and those behind it are in the log as well by now."""

        def explained() -> bool:
            late = self._late()[self._late_seen :]
            return any(sum(late[first:last]) == blocks for first, last in combinations(range(len(late) + 1), 2))

        try:
            await until(explained, FREED_WITHIN_S)
        except TimeoutError:
            return False
        self._late_seen = len(self._late())
        return True

    async def _send(self, method: str, request: Any) -> tuple[Any, ExecutorError | None]:
        try:
            response = await getattr(self._client.executor, method)(request)
        except grpc.aio.AioRpcError as error:
            return None, error_from_rpc(error)
        refused = [each.error for each in getattr(response, "results", ()) if each.HasField("error")]
        if not refused:
            return response, None
        if len(refused) < len(response.results):
            self._counts.wrong.append(f"{method}: a failed step failed for some of its sequences only")
        return None, error_from_status(refused[0])

    async def _status(self) -> types_pb2.KvPressure:
        try:
            return (await self._client.status()).pressure
        except grpc.aio.AioRpcError as error:
            raise Gone from error

    def _once(self, handle: types_pb2.KvHandle, length: int, version: int) -> types_pb2.KvHandle:
        """Every change counts one version: a change that was made twice or not at all shows."""
        if (handle.seq_len, handle.version) != (length, version):
            seen = f"length {handle.seq_len}, version {handle.version}"
            self._counts.wrong.append(f"{seen} in place of {length}, {version}")
        return handle

    def _compare(self, response: Any, expected: list[tuple[list[int], int]]) -> None:
        """The rows are those of the tokens from a position on, sequence by sequence."""
        self._counts.rows += sum(len(tokens) - start for tokens, start in expected)
        if self._model.unlike(response.row_blocks, expected):
            self._counts.wrong.append(f"rows of {[len(tokens) for tokens, _ in expected]} tokens are not the oracle's")

    def _tokens(self, count: int) -> list[int]:
        return [self._dice.randrange(256) for _ in range(count)]

    def _id(self) -> str:
        return f"{self._dice.getrandbits(64):x}"


def _replayed(response: Any) -> bool | None:
    """Whether it is a recorded answer; None for a method that records none."""
    if hasattr(response, "results"):
        return all(each.output.replayed for each in response.results)
    if hasattr(response, "output"):
        return bool(response.output.replayed)
    return bool(response.replayed) if hasattr(response, "replayed") else None
