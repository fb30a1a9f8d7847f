"""Any history of runs and followers, with lost replies, broken streams, failing steps and a small pool: the tokens are
those of a plain loop, each happens once, and no block is left behind.

The oracle chooses each next token by a prefill of all tokens so far on a second server. What is chosen depends on them
all: sampled with a seed and a repetition penalty. Where a stream breaks depends on time, so what a rule does is drawn
from a seed of its own: Hypothesis sees the same strategies whatever happened before. `FERRUM_FUZZ_ROUNDS` (default 1)
multiplies the number of histories.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import grpc
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ferrum_rpc.errors import ExecutorError, Reason
from ferrum_rpc.executor.v1 import forward_pb2, output_pb2, session_pb2, types_pb2
from ferrum_rpc.wire.rows import rows_from_proto
from ferrum_rpc.wire.status import error_from_status
from tests.serving import Served, serve_identity
from tests.wiring import item, pb, until

ROUNDS = float(os.environ.get("FERRUM_FUZZ_ROUNDS", "1"))
BLOCK, BLOCKS, CONTEXT = 4, 24, 40
SAMPLE = output_pb2.OutputSpec(sample=output_pb2.SampleOutput(seed=5, temperature=3.0, repetition_penalty=1.3))
ENDS = {value: name for name, value in forward_pb2.RunEnd.items()}
SEED = st.integers(0, 1 << 32)
BROKEN = {Reason.CHAIN_BROKEN, Reason.SEQUENCE_BUSY}


@dataclass
class Known:
    """A sequence as its scheduler knows it: the tokens in the cache, and the one that was chosen last."""

    handle: types_pb2.KvHandle
    tokens: list[int]
    chosen: int | None = None


@dataclass
class Answered:
    """What an item came to: an error, or its tokens, and why its run ended."""

    error: ExecutorError | None = None
    tokens: list[int] = field(default_factory=list)
    end: str = ""
    handle: types_pb2.KvHandle = field(default_factory=types_pb2.KvHandle)
    replayed: bool = False


def answered(answer: Any, result: Any) -> Answered:
    if result.HasField("error"):
        return Answered(error_from_status(result.error))
    output = result.output
    rows = rows_from_proto(answer.row_blocks)[output.rows.block]["token_ids"]
    tokens = rows[output.rows.first : output.rows.first + output.rows.count].tolist()
    return Answered(None, tokens, ENDS[output.run_end], output.handle, output.replayed)


class Fault:
    """A stage hook that fails the ``at``-th step from now on, once."""

    def __init__(self) -> None:
        self.at: int | None = None

    def __call__(self, stage: str) -> None:
        if stage == "select" and self.at is not None:
            self.at -= 1
            if self.at < 0:
                self.at = None
                raise RuntimeError("as asked")


class RunMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.stack = AsyncExitStack()
        self.fault = Fault()
        self.numbers = itertools.count(1)
        self.known: list[Known] = []
        self.memo: dict[tuple[int, ...], int] = {}
        self.run(self.open())

    async def open(self) -> None:
        enter = self.stack.enter_async_context
        self.served: Served = await enter(
            serve_identity(kv_blocks=BLOCKS, block_size=BLOCK, max_context=CONTEXT, max_running=3, stage=self.fault)
        )
        self.oracle: Served = await enter(serve_identity(kv_blocks=64, block_size=BLOCK, max_context=2 * CONTEXT))
        self.lease = (await self.served.executor.AcquireLease(pb.AcquireLeaseRequest())).lease_id
        await self.connect()

    async def connect(self) -> None:
        self.steps = itertools.count(1)
        self.stream = self.served.executor.Session()
        await self.send(hello=session_pb2.SessionHello(lease_id=self.lease))
        assert (await self.read()).WhichOneof("frame") == "welcome"

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 30))

    async def call(self, method: str, request: Any) -> Any:
        return await getattr(self.served.executor, method)(request)

    async def send(self, **frame: Any) -> int:
        step = next(self.steps)
        await self.stream.write(session_pb2.SessionRequest(step_id=step, **frame))
        return step

    async def read(self) -> session_pb2.SessionResponse:
        answer = await self.stream.read()
        assert answer is not grpc.aio.EOF
        return answer

    async def ask(self, *items: forward_pb2.ForwardItem) -> dict[int, Answered]:
        """Send each item in a frame of its own, all at once; their answers, by index."""
        steps = [await self.send(forward=session_pb2.SessionForward(items=[each])) for each in items]
        found: dict[int, Answered] = {}
        while len(found) < len(items):
            answer = await self.read()
            assert answer.WhichOneof("frame") == "forward", answer
            found[steps.index(answer.step_id)] = answered(answer.forward, answer.forward.results[0])
        return found

    # --- the oracle -------------------------------------------------------------------------------------------------

    async def next_token(self, tokens: list[int]) -> int:
        key = tuple(tokens)
        if key not in self.memo:
            answer = await self.oracle.executor.Prefill(pb.PrefillRequest(item=item(tokens, output=SAMPLE)))
            await self.oracle.executor.Release(pb.ReleaseRequest(handle=answer.output.handle))
            self.memo[key] = int(rows_from_proto(answer.row_blocks)[0]["token_ids"][0])
        return self.memo[key]

    async def plain_loop(self, tokens: list[int], most: int, stop: tuple[int, ...]) -> tuple[list[int], str]:
        """What a run on a sequence of these tokens chooses, and why it ends."""
        found: list[int] = []
        while True:
            found.append(await self.next_token([*tokens, *found]))
            if found[-1] in stop:
                return found, "RUN_END_STOP_ID"
            if len(found) == most:
                return found, "RUN_END_MAX_TOKENS"
            if len(tokens) + len(found) > CONTEXT:
                return found, "RUN_END_CONTEXT"

    # --- choices ----------------------------------------------------------------------------------------------------

    async def draw(self, rng: random.Random) -> tuple[Known, list[int], forward_pb2.ForwardItem]:
        """A run on a new sequence or a known one: the sequence, all its tokens once it is fed, the item."""
        known = rng.choice([*self.known, None])
        fed = [rng.randrange(256) for _ in range(rng.randint(1, 6))]
        handle = None
        if known is not None and len(known.tokens) + len(fed) <= CONTEXT:
            handle = known.handle
            if known.chosen is not None and rng.random() < 0.5:
                fed = [known.chosen]
        else:
            known = Known(types_pb2.KvHandle(), [])
        tokens = [*known.tokens, *fed]
        most, stop = rng.randint(1, 9), ()
        if rng.random() < 0.5:
            expected, _ = await self.plain_loop(tokens, most, ())
            stop = (rng.choice(expected),)
        run = forward_pb2.Run(max_tokens=most, stop_token_ids=stop)
        return known, tokens, item(fed, handle, output=SAMPLE, run=run, request_id=f"r{next(self.numbers)}")

    async def settle(self, known: Known, tokens: list[int], sent: forward_pb2.ForwardItem, found: Answered) -> None:
        """Compare an answer with the plain loop, and note what it left."""
        if found.error is not None:
            if found.error.reason is Reason.KV_BLOCKS_EXHAUSTED:
                needed, free = found.error.number("needed_blocks"), found.error.number("free_blocks")
                assert needed is not None and free is not None and free < needed <= -(-(len(tokens) + 8) // BLOCK)
            else:
                assert found.error.reason is Reason.STEP_FAILED, found.error
            return
        expected, end = await self.plain_loop(tokens, sent.run.max_tokens, tuple(sent.run.stop_token_ids))
        if found.end == "RUN_END_CUT":
            expected = expected[: len(found.tokens)]
        else:
            assert found.end == end
        assert found.tokens == expected and expected
        known.tokens = [*tokens, *expected[:-1]]
        known.chosen = expected[-1]
        known.handle.CopyFrom(found.handle)
        assert found.handle.seq_len == len(known.tokens)
        if known not in self.known:
            self.known.append(known)

    # --- rules ------------------------------------------------------------------------------------------------------

    @rule(seed=SEED, unary=st.booleans(), again=st.booleans(), fail=st.sampled_from([None, None, 0, 1, 3]))
    def a_run(self, seed: int, unary: bool, again: bool, fail: int | None) -> None:
        self.run(self._run(random.Random(seed), unary, again, fail))

    async def _run(self, rng: random.Random, unary: bool, again: bool, fail: int | None) -> None:
        known, tokens, sent = await self.draw(rng)
        if not sent.HasField("handle"):
            sent.create.lease_id = self.lease
        self.fault.at = fail
        if unary:
            answer = await self.served.executor.UnifiedForward(pb.UnifiedForwardRequest(items=[sent]))
            found = answered(answer, answer.results[0])
        else:
            found = (await self.ask(sent))[0]
        self.fault.at = None
        await self.settle(known, tokens, sent, found)
        if again and found.error is None:  # the answer was lost
            repeated = (await self.ask(sent))[0]
            assert repeated.replayed and (repeated.tokens, repeated.end) == (found.tokens, found.end)
            assert repeated.handle == found.handle

    @rule(seed=SEED, most=st.integers(1, 9), fail=st.sampled_from([None, None, 0, 2, 5]), twice=st.booleans())
    def a_run_and_a_follower(self, seed: int, most: int, fail: int | None, twice: bool) -> None:
        self.run(self._follow(random.Random(seed), most, fail, twice))

    async def _follow(self, rng: random.Random, most: int, fail: int | None, twice: bool) -> None:
        known, tokens, first = await self.draw(rng)
        handle, creation = types_pb2.KvHandle(), ""
        if first.HasField("handle"):
            handle.CopyFrom(first.handle)
            handle.version += 1
        else:
            handle.version, creation = 1, first.request_id
        handle.seq_len = len(tokens) + first.run.max_tokens - 1
        if handle.seq_len >= CONTEXT:
            return
        behind = item(
            [],
            handle,
            output=SAMPLE,
            run=forward_pb2.Run(max_tokens=most),
            request_id=f"r{next(self.numbers)}",
            follow=forward_pb2.Follow(feed_chosen=True, creation=creation),
        )
        self.fault.at = fail
        frames = [first, behind, first, behind] if twice else [first, behind]
        answers = await self.ask(*frames)
        self.fault.at = None
        await self.settle(known, tokens, first, answers[0])
        whole = answers[0].error is None and answers[0].end == "RUN_END_MAX_TOKENS"
        if not whole:
            assert answers[1].error is not None and answers[1].error.reason in BROKEN, answers[1]
        else:
            assert known.chosen is not None
            await self.settle(known, [*known.tokens, known.chosen], behind, answers[1])
        for index in range(2, len(frames)):  # a duplicate that came too late for a refusal may be tried again
            one, other = answers[index - 2], answers[index]
            if one.error is None and other.error is None:
                assert (one.tokens, one.handle) == (other.tokens, other.handle)
            elif one.error is not None and other.error is None:
                await self.settle(
                    known, tokens if index == 2 else [*known.tokens, known.chosen or 0], frames[index], other
                )

    @rule(seed=SEED, turns=st.integers(0, 30))
    def a_stream_breaks(self, seed: int, turns: int) -> None:
        """What was under way can be asked for again, whatever became of it."""
        self.run(self._break(random.Random(seed), turns))

    async def _break(self, rng: random.Random, turns: int) -> None:
        known, tokens, sent = await self.draw(rng)
        await self.send(forward=session_pb2.SessionForward(items=[sent]))
        for _ in range(turns):
            await asyncio.sleep(0)
        self.stream.cancel()
        await until(lambda: not self.served.server.sessions)
        await self.connect()
        await self.settle(known, tokens, sent, (await self.ask(sent))[0])

    @rule(seed=SEED)
    def release(self, seed: int) -> None:
        if self.known:
            known = self.known.pop(seed % len(self.known))
            self.run(self.call("Release", pb.ReleaseRequest(handle=known.handle)))

    @rule(seed=SEED)
    def truncate(self, seed: int) -> None:
        if not self.known:
            return
        known = self.known[seed % len(self.known)]
        length = seed % (len(known.tokens) + 1)
        answer = self.run(self.call("TruncateKv", pb.TruncateKvRequest(handle=known.handle, length=length)))
        known.handle.CopyFrom(answer.handle)
        known.tokens, known.chosen = known.tokens[:length], None

    @rule()
    def a_handle_of_a_future_that_does_not_come(self) -> None:
        async def ask() -> Answered:
            never = types_pb2.KvHandle(seq_len=3, version=1)
            follow = forward_pb2.Follow(creation="never")
            return (await self.ask(item([1], never, request_id=f"r{next(self.numbers)}", follow=follow)))[0]

        error = self.run(ask()).error
        assert error is not None and error.reason is Reason.CHAIN_BROKEN

    # --- what always holds ------------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_left_behind(self) -> None:
        if not hasattr(self, "served"):
            return
        self.run(self.served.check())
        engine = self.served.server.state.engine
        used = sum(-(-len(known.tokens) // BLOCK) for known in self.known)
        assert engine.cache.free_blocks == engine.cache.total_blocks - used
        assert engine.counters.running == 0 and engine.cache.sequences == len(self.known)
        assert not any(each.busy or each.cut or each.follower for each in self.served.server.state.handles.records())

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            self.stream.cancel()
            self.run(self.stack.aclose())
            self.loop.close()


TestRuns = RunMachine.TestCase
TestRuns.settings = settings(
    max_examples=int(15 * ROUNDS),
    stateful_step_count=12,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
