"""Any history of runs and followers, with lost replies, broken streams, failing steps, a small pool, engines that die
and servers that drain: the tokens are those of a plain loop, each happens once, and nothing is left behind.

Half of the histories have their engine in a process of its own, which dies by SIGKILL; in the other half the thread
loses its device. After that, and after a drain, the machine is a scheduler's: it feeds what it knows to another server
and goes on.

The oracle chooses each next token by a prefill of all tokens so far in a runner of its own. What is chosen depends on
them all: sampled with a seed and a repetition penalty. Where a stream breaks depends on time, so what a rule does is
drawn from a seed of its own: Hypothesis sees the same strategies whatever happened before. `FERRUM_FUZZ_ROUNDS`
(default 1) multiplies the number of histories.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import tempfile
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import Positions, Span, Step
from ferrum_rpc.engine.api import Operation, Submission
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.commands import Command
from ferrum_rpc.engine.operations import TorchRunner
from ferrum_rpc.engine.places import Places
from ferrum_rpc.engine.process.parent import Program
from ferrum_rpc.errors import ExecutorError, Reason
from ferrum_rpc.executor.v1 import forward_pb2, output_pb2, session_pb2, types_pb2
from ferrum_rpc.service.records import Account, Resource
from ferrum_rpc.wire.output import output_from_proto
from ferrum_rpc.wire.status import error_from_rpc, error_from_status
from tests.support.faulty_engine import FAIL, HOLD, LOSE, STAGES, Fault, Forge, audit
from tests.support.inside import accounts, creating, uses
from tests.support.serving import Served, serve_identity
from tests.support.tokens import bearer
from tests.support.wiring import chosen, item, pb, refusal, until

ROUNDS = float(os.environ.get("FERRUM_FUZZ_ROUNDS", "1"))
BLOCK, BLOCKS, CONTEXT = 4, 24, 40
RUNNING = 3
_drawn: Any = {"seed": 5, "temperature": 3.0, "repetition_penalty": 1.3}
SAMPLE = output_pb2.OutputSpec(sample=output_pb2.SampleOutput(**_drawn))
WORDS = np.array([0x6B2D94A7] * 8, np.uint32).tobytes()
MASKED = output_pb2.OutputSpec(
    sample=output_pb2.SampleOutput(
        **_drawn, token_mask=types_pb2.Tensor(dtype=types_pb2.D_TYPE_I32, shape=[8], data=WORDS)
    )
)
NO_ROWS = output_pb2.OutputSpec(positions=output_pb2.POSITIONS_NONE)
ENDS = {value: name for name, value in forward_pb2.RunEnd.items()}
SEED = st.integers(0, 1 << 32)
BROKEN = {Reason.CHAIN_BROKEN, Reason.SEQUENCE_BUSY}
HELD_BY_CALLS = (Resource.QUEUED_ITEMS, Resource.QUEUED_TOKENS, Resource.UNREAD_BYTES)

forge = cache(Forge)


# --- the oracle -------------------------------------------------------------------------------------------------------


@cache
def runner() -> TorchRunner:
    config = ModelSettings(path="identity", device="cpu", kv_blocks=64, block_size=BLOCK, max_context=2 * CONTEXT)
    made = build_runner(config)
    made.change_masks([(output_from_proto(MASKED, Positions.LAST).kind.mask, WORDS)], [])
    return made


@cache
def next_token(masked: bool, tokens: tuple[int, ...]) -> int:
    output = output_from_proto(MASKED if masked else SAMPLE, Positions.LAST)
    span = Span(1, np.array(tokens, np.int32), 0, output, create=True)
    with runner().context():
        [outcome] = runner().finish(runner().begin(Step((span,)))).outcomes
        runner().release([1])
    assert not isinstance(outcome, ExecutorError)
    return int(outcome.rows.block["token_ids"][outcome.rows.first])


def plain_loop(tokens: list[int], sent: forward_pb2.ForwardItem) -> tuple[list[int], str]:
    """What an item's run chooses on a sequence of these tokens, and why it ends."""
    masked, found = sent.output.sample.HasField("token_mask"), list[int]()
    while True:
        found.append(next_token(masked, (*tokens, *found)))
        if found[-1] in sent.run.stop_token_ids:
            return found, "RUN_END_STOP_ID"
        if len(found) == sent.run.max_tokens:
            return found, "RUN_END_MAX_TOKENS"
        if len(tokens) + len(found) > CONTEXT:
            return found, "RUN_END_CONTEXT"


# --- what a scheduler knows -------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Known:
    """A sequence as its scheduler knows it: the tokens in the cache, and the one that was chosen last."""

    handle: types_pb2.KvHandle
    tokens: list[int]
    chosen: int | None = None


@dataclass
class Answered:
    """What an item came to: an error, or its tokens, and why its run ended. ``told``: tokens that came ahead."""

    error: ExecutorError | None = None
    tokens: list[int] = field(default_factory=list)
    end: str = ""
    cause: Reason | None = None
    handle: types_pb2.KvHandle = field(default_factory=types_pb2.KvHandle)
    replayed: bool = False
    told: list[int] = field(default_factory=list)

    @property
    def reason(self) -> Reason | None:
        return None if self.error is None else self.error.reason


def answered(answer: Any, result: Any, told: list[int] | None = None) -> Answered:
    if result.HasField("error"):
        return Answered(error_from_status(result.error), told=told or [])
    output, tokens = result.output, chosen(answer, result.output)
    assert (told or []) == tokens[: len(told or [])]
    cause = error_from_status(output.run_cause).reason if output.HasField("run_cause") else None
    return Answered(None, tokens, ENDS[output.run_end], cause, output.handle, output.replayed, told or [])


@dataclass
class Sent:
    """A run that was sent: of a known sequence, or of a new one, that has these tokens once it is fed."""

    known: Known
    tokens: list[int]
    item: forward_pb2.ForwardItem


@dataclass
class UnderWay:
    """Runs and what follows them, the steps of each such pair, and a run by a call of its own."""

    chains: list[tuple[Sent, forward_pb2.ForwardItem | None]]
    steps: list[list[int]]
    alone: tuple[Sent, asyncio.Future[Answered]] | None


hold_places = Places.hold


def checked_hold(places: Places, work: Submission) -> None:
    """None has more than its part, nor all together more than there are: every call here has one run."""
    hold_places(places, work)
    assert places._held[work.caller] <= work.max_running and places.count <= RUNNING


def history(**drawn: Any) -> Callable[..., Any]:
    """A rule that is a coroutine function, and draws what it does from a seed: see above."""

    def make(method: Callable[..., Any]) -> Any:
        def act(machine: RunMachine, seed: int, **about: Any) -> None:
            machine.run(method(machine, random.Random(seed), **about))

        act.__name__ = method.__name__
        return rule(seed=SEED, **drawn)(act)

    return make


class RunMachine(RuleBasedStateMachine):
    @initialize(process=st.booleans(), several=st.booleans())
    def start(self, process: bool, several: bool) -> None:
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        self.process, self.path = process, Path(self.folder.name) / "fault"
        self.tokens = ("mine m", "neighbour n") if several else ()
        self.mine, self.neighbours = map(bearer, "mn") if several else ((), ())
        self.fault = Fault(self.path, kills=False)
        self.numbers = itertools.count(1)
        self.known: list[Known] = []
        self.run(self.open())

    async def open(self) -> None:
        """A server, a lease, a stream."""
        self.life = AsyncExitStack()
        self.life.enter_context(mock.patch.object(Places, "hold", checked_hold))
        instead = mock.patch("ferrum_rpc.engine.process.parent.subprocess.Popen", forge().popen)
        with instead if self.process else nullcontext():
            self.served: Served = await self.life.enter_async_context(
                serve_identity(
                    kv_blocks=BLOCKS,
                    block_size=BLOCK,
                    max_context=CONTEXT,
                    max_running=RUNNING,
                    max_blocks_per_caller=8 * BLOCKS,  # the pool refuses, and no quota
                    tokens=self.tokens,
                    stage=self.fault,
                    program=self.engine,
                )
            )
        self.state = self.served.server.state
        self.raised: list[object] = []
        self.unhandled: Any = self.loop.get_exception_handler()
        self.loop.set_exception_handler(self.note)
        self.lease = (await self.call("AcquireLease", pb.AcquireLeaseRequest())).lease_id
        await self.connect()

    def engine(self, config: ModelSettings) -> Program | None:
        return Program(("forked",), (config, self.path)) if self.process else None

    async def connect(self) -> None:
        self.ended: Reason | None = None
        self.steps = itertools.count(1)
        self.stream = self.served.executor.Session(metadata=self.mine)
        await self.send(hello=session_pb2.SessionHello(lease_id=self.lease, steps_in_flight=16, tokens=True))
        answer = await self.stream.read()
        assert answer is not grpc.aio.EOF and answer.WhichOneof("frame") == "welcome"

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 30))

    async def call(self, method: str, request: Any, metadata: Any = None) -> Any:
        """The answer, or the refusal."""
        call = getattr(self.served.executor, method)(request, metadata=metadata or self.mine)
        return await refusal(call) or await call

    def accounts(self) -> Iterable[Account]:
        return accounts(self.state)

    async def held(self) -> None:
        """The engine stands where the fault holds it, or does not get there."""
        await self.soon(lambda: self.fault.held)

    async def soon(self, holds: Callable[[], bool]) -> None:
        """It holds, or will not."""
        for _ in range(300):
            if holds():
                return
            await asyncio.sleep(0)

    async def send(self, **frame: Any) -> int:
        step = next(self.steps)
        await self.stream.write(session_pb2.SessionRequest(step_id=step, **frame))
        return step

    async def send_each(self, *items: forward_pb2.ForwardItem) -> list[int]:
        """Each in a frame of its own."""
        return [await self.send(forward=session_pb2.SessionForward(items=[each])) for each in items]

    async def read(self, steps: list[int]) -> dict[int, Answered]:
        """The answers to steps of one item, by index: all of them, or those that came before the stream ``ended``;
        without steps it must end. A token that is told ahead comes once, and in its place."""
        found: dict[int, Answered] = {}
        told: dict[int, list[int]] = {}
        while len(found) < len(steps) or not steps:
            try:
                answer = await self.stream.read()
            except grpc.aio.AioRpcError as error:
                self.ended = error_from_rpc(error).reason
                break
            assert answer is not grpc.aio.EOF
            index = steps.index(answer.step_id)
            kind = answer.WhichOneof("frame")
            if kind == "tokens":
                assert index not in found
                [run] = answer.tokens.runs
                assert run.item_index == 0 and run.first == len(told.setdefault(index, []))
                told[index] += run.token_ids
            elif kind == "error":
                found[index] = Answered(error_from_status(answer.error))
            else:
                assert kind == "forward", answer
                found[index] = answered(answer.forward, answer.forward.results[0], told.get(index))
        return found

    async def ask(self, *items: forward_pb2.ForwardItem) -> dict[int, Answered]:
        """Send each item in a frame of its own, all at once; their answers, by index."""
        found = await self.read(await self.send_each(*items))
        assert len(found) == len(items)
        return found

    async def ask_alone(self, sent: forward_pb2.ForwardItem) -> Answered:
        """By a unary call."""
        answer = await self.call("UnifiedForward", pb.UnifiedForwardRequest(items=[sent]))
        return Answered(answer) if isinstance(answer, ExecutorError) else answered(answer, answer.results[0])

    # --- choices ----------------------------------------------------------------------------------------------------

    def draw(self, rng: random.Random, *but: Known) -> Sent:
        """A run on a new sequence or a known one."""
        known = rng.choice([*(each for each in self.known if each not in but), None])
        fed = [rng.randrange(256) for _ in range(rng.randint(1, 6))]
        handle, create = None, forward_pb2.CreateOptions(lease_id=self.lease)
        if known is not None and len(known.tokens) + len(fed) <= CONTEXT:
            handle, create = known.handle, None
            if known.chosen is not None and rng.random() < 0.5:
                fed = [known.chosen]
        else:
            known = Known(types_pb2.KvHandle(), [])
        sent = item(
            fed,
            handle,
            output=rng.choice([SAMPLE, SAMPLE, MASKED]),
            run=forward_pb2.Run(max_tokens=rng.randint(1, 9)),
            request_id=f"r{next(self.numbers)}",
            create=create,
        )
        tokens = [*known.tokens, *fed]
        if rng.random() < 0.5:
            sent.run.stop_token_ids.append(rng.choice(plain_loop(tokens, sent)[0]))
        return Sent(known, tokens, sent)

    def draw_follower(self, first: Sent, most: int) -> forward_pb2.ForwardItem | None:
        """What follows a run, if that runs to its end; None where there is no room, or for no token."""
        handle, creation = types_pb2.KvHandle(), ""
        if first.item.HasField("handle"):
            handle.CopyFrom(first.item.handle)
            handle.version += 1
        else:
            handle.version, creation = 1, first.item.request_id
        handle.seq_len = len(first.tokens) + first.item.run.max_tokens - 1
        if handle.seq_len >= CONTEXT or not most:
            return None
        return item(
            [],
            handle,
            output=first.item.output,
            run=forward_pb2.Run(max_tokens=most),
            request_id=f"r{next(self.numbers)}",
            follow=forward_pb2.Follow(feed_chosen=True, creation=creation),
        )

    def settle(self, sent: Sent, found: Answered, *reasons: Reason) -> None:
        """Compare an answer with the plain loop, and note what it left. ``reasons``: what may refuse or cut it."""
        known, tokens = sent.known, sent.tokens
        expected, end = plain_loop(tokens, sent.item)
        assert found.told == expected[: len(found.told)]
        if found.error is not None:
            if found.reason is Reason.KV_BLOCKS_EXHAUSTED:
                needed, free = found.error.number("needed_blocks"), found.error.number("free_blocks")
                assert needed is not None and free is not None and free < needed <= -(-(len(tokens) + 8) // BLOCK)
            else:
                assert found.reason in reasons, found.error
            if found.told:  # its scheduler has shown them
                assert found.reason is Reason.DEVICE_LOST
                self.grew(known, tokens, found.told)
            return
        if found.end == "RUN_END_CUT":
            over = self.served.server.draining.done.is_set()
            assert found.cause in reasons and (over or found.cause is not Reason.DRAINING)
            expected = expected[: len(found.tokens)]
        else:
            assert found.end == end and found.cause is None
        assert found.tokens == expected and expected
        self.grew(known, tokens, expected)
        known.handle.CopyFrom(found.handle)
        assert found.handle.seq_len == len(known.tokens)

    def grew(self, known: Known, tokens: list[int], chosen: list[int]) -> None:
        known.tokens = [*tokens, *chosen[:-1]]
        known.chosen = chosen[-1]
        if known not in self.known:
            self.known.append(known)

    def settle_follower(self, first: Sent, behind: forward_pb2.ForwardItem, found: Answered, *reasons: Reason) -> None:
        """That of an item whose predecessor ran to its end."""
        known = first.known
        assert known.chosen is not None
        self.settle(Sent(known, [*known.tokens, known.chosen], behind), found, *reasons)

    # --- rules ------------------------------------------------------------------------------------------------------

    @history(unary=st.booleans(), again=st.booleans(), fail=st.sampled_from([None, None, 0, 1, 3]))
    async def a_run(self, rng: random.Random, unary: bool, again: bool, fail: int | None) -> None:
        sent = self.draw(rng)
        if fail is not None:
            self.fault.arm(FAIL, fail)
        found = await self.ask_alone(sent.item) if unary else (await self.ask(sent.item))[0]
        self.fault.arm(0)
        self.settle(sent, found, Reason.STEP_FAILED)
        if again and found.error is None:  # the answer was lost
            repeated = (await self.ask(sent.item))[0]
            assert repeated.replayed and (repeated.tokens, repeated.end) == (found.tokens, found.end)
            assert repeated.handle == found.handle and not repeated.told

    @history(most=st.integers(1, 9), fail=st.sampled_from([None, None, 0, 2, 5]), twice=st.booleans())
    async def a_run_and_a_follower(self, rng: random.Random, most: int, fail: int | None, twice: bool) -> None:
        first = self.draw(rng)
        behind = self.draw_follower(first, most)
        if behind is None:
            return
        if fail is not None:
            self.fault.arm(FAIL, fail)
        frames = [first.item, behind, first.item, behind] if twice else [first.item, behind]
        answers = await self.ask(*frames)
        self.fault.arm(0)
        self.settle(first, answers[0], Reason.STEP_FAILED)
        whole = answers[0].end == "RUN_END_MAX_TOKENS"
        if not whole:
            assert answers[1].reason in BROKEN, answers[1]
        else:
            self.settle_follower(first, behind, answers[1], Reason.STEP_FAILED)
        for index in range(2, len(frames)):  # a duplicate that came too late for a refusal may be tried again
            one, other = answers[index - 2], answers[index]
            if one.error is None and other.error is None:
                assert (one.tokens, one.handle) == (other.tokens, other.handle)
            elif one.error is not None and other.error is None:
                if index == 2:
                    self.settle(first, other, Reason.STEP_FAILED)
                else:
                    self.settle_follower(first, behind, other, Reason.STEP_FAILED)

    @history(cancelled=st.booleans())
    async def a_neighbour_runs_too(self, rng: random.Random, cancelled: bool) -> None:
        """Another caller, where there is one: what it asks for while others of ours wait for their share."""
        self.fault.arm(HOLD, 0)
        under_way = await self.begin_some(rng, RUNNING)
        await self.soon(lambda: sum(each.held[Resource.QUEUED_ITEMS] for each in self.accounts()) == RUNNING)
        fed = [rng.randrange(256) for _ in range(rng.randint(1, 6))]
        run = forward_pb2.Run(max_tokens=rng.randint(1, 9))
        sent = item(fed, output=SAMPLE, run=run, request_id=f"r{next(self.numbers)}")
        request = pb.UnifiedForwardRequest(items=[sent])
        if cancelled:  # while it waits, or runs
            first = asyncio.ensure_future(self.call("UnifiedForward", request, self.neighbours))
            await asyncio.sleep(0)
            first.cancel()
        calling = asyncio.ensure_future(self.call("UnifiedForward", request, self.neighbours))
        await asyncio.sleep(0)
        self.fault.arm(0)
        answer = await calling
        await self.end_some(under_way)
        found = answered(answer, answer.results[0])
        if found.error is None:
            expected, end = plain_loop(fed, sent)
            assert (found.tokens, found.end) == (expected, end) or found.cause is Reason.CANCELLED
            release = pb.ReleaseRequest(handle=found.handle)
            assert not isinstance(await self.call("Release", release, self.neighbours), ExecutorError)
        else:
            assert found.reason is Reason.KV_BLOCKS_EXHAUSTED or (cancelled and found.reason is Reason.CANCELLED)

    @history(at=st.integers(0, 6))
    async def a_stream_breaks(self, rng: random.Random, at: int) -> None:
        """What was under way can be asked for again, whatever became of it."""
        sent = self.draw(rng)
        self.fault.arm(HOLD, at)
        await self.send_each(sent.item)
        await self.held()
        self.stream.cancel()
        await until(lambda: not self.served.server.sessions)
        self.fault.arm(0)
        await self.connect()
        self.settle(sent, (await self.ask(sent.item))[0], Reason.CANCELLED)

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
        never = types_pb2.KvHandle(seq_len=3, version=1)
        follow = forward_pb2.Follow(creation="never")
        sent = item([1], never, request_id=f"r{next(self.numbers)}", follow=follow)
        assert self.run(self.ask(sent))[0].reason is Reason.CHAIN_BROKEN

    # --- the end of an engine, and of a server ------------------------------------------------------------------------

    @history(at=st.integers(0, 12), stage=st.sampled_from(STAGES))
    async def the_engine_dies(self, rng: random.Random, at: int, stage: str) -> None:
        self.fault.arm(LOSE, at, stage)
        under_way = await self.begin_some(rng)
        await self.end_some(under_way, Reason.DEVICE_LOST)
        if self.fault.armed and self.process:  # they ended before
            self.fault.arm(0)
            forge().last.kill()
        elif self.fault.armed:
            self.fault.arm(LOSE)
            longest = max(self.known, key=lambda known: len(known.tokens), default=None)  # needs no block
            last = item([1]) if longest is None else item([1], longest.handle, truncate_to=0)
            assert (await self.ask_alone(last)).reason is Reason.DEVICE_LOST
        await self.served.server.failed()
        for known in self.known:
            if known.handle.id:
                for method, request in (
                    ("Decode", pb.DecodeRequest(item=item([1], known.handle))),
                    ("TruncateKv", pb.TruncateKvRequest(handle=known.handle, length=0)),
                ):
                    error = await self.call(method, request)
                    assert isinstance(error, ExecutorError) and error.reason is Reason.DEVICE_LOST, error
        self.nothing_is_under_way()
        await self.go_on(rng)

    @history(at=st.integers(0, 6), grace=st.booleans())
    async def the_server_drains(self, rng: random.Random, at: int, grace: bool) -> None:
        self.fault.arm(HOLD, at)
        under_way = await self.begin_some(rng)
        await self.held()
        server = self.served.server
        if grace and not self.state.empty.is_set():
            server.drain(60)
            error = await self.call("Prefill", pb.PrefillRequest(item=item([1])))
            assert isinstance(error, ExecutorError) and error.reason is Reason.DRAINING
            self.fault.arm(0)
            await self.end_some(under_way, Reason.DRAINING)
            if not self.state.empty.is_set():  # those that are there are served
                sent = self.draw(rng)
                reasons = () if sent.item.HasField("handle") else (Reason.DRAINING,)
                self.settle(sent, await self.ask_alone(sent.item), *reasons)
                self.fault.arm(HOLD, at)
                under_way = await self.begin_some(rng)
                await self.held()
        server.drain(0)
        await server.draining.done.wait()
        steps, held = self.state.engine.counters.steps, self.fault.held
        self.fault.arm(0)
        await self.end_some(under_way, Reason.DRAINING)
        assert not held or self.state.engine.counters.steps <= steps + 2, "the next step was the last"
        assert not await self.read([]) and self.ended is Reason.DRAINING
        await self.audit()
        self.nothing_is_under_way()
        await self.go_on(rng)

    async def begin_some(self, rng: random.Random, count: int = 0) -> UnderWay:
        """Runs on different sequences, some with a follower behind, one perhaps by a call of its own."""
        firsts: list[Sent] = []
        for _ in range(count or rng.randint(1, 3)):
            firsts.append(self.draw(rng, *(each.known for each in firsts)))
        alone = None
        if len(firsts) > 1 and rng.random() < 0.4:
            sent = firsts.pop()
            alone = sent, asyncio.ensure_future(self.ask_alone(sent.item))
        chains = [(each, self.draw_follower(each, rng.randint(0, 9))) for each in firsts]
        steps = [await self.send_each(*filter(None, (first.item, behind))) for first, behind in chains]
        return UnderWay(chains, steps, alone)

    async def end_some(self, under_way: UnderWay, *reasons: Reason) -> None:
        """Compare all answers. What the server had not read when it ended the stream has none, and did not happen."""
        found = await self.read([step for steps in under_way.steps for step in steps])
        answers = iter(found.get(index) for index in range(sum(map(len, under_way.steps))))
        for first, behind in under_way.chains:
            answer = next(answers)
            self.settle_if(first, answer, *reasons)
            if behind is None:
                continue
            following = next(answers)
            if answer is not None and answer.end == "RUN_END_MAX_TOKENS":
                whole = Sent(first.known, [*first.known.tokens, first.known.chosen or 0], behind)
                self.settle_if(whole, following, *reasons)
            else:
                assert following is None or following.reason in BROKEN | {*reasons}, following
        if under_way.alone is not None:
            sent, task = under_way.alone
            self.settle(sent, await task, *reasons)

    def settle_if(self, sent: Sent, found: Answered | None, *reasons: Reason) -> None:
        if found is None:
            assert self.ended in reasons
        else:
            self.settle(sent, found, *reasons)

    async def go_on(self, rng: random.Random) -> None:
        """Feed to another server what is known, and go on from there."""
        await self.close()
        await self.open()
        for known in list(self.known):
            if known.handle.id:
                error = await self.call("Decode", pb.DecodeRequest(item=item([1], known.handle)))
                assert isinstance(error, ExecutorError) and error.reason is Reason.INSTANCE_MISMATCH
            known.handle.Clear()
            create = forward_pb2.CreateOptions(lease_id=self.lease)
            again = item(known.tokens, output=NO_ROWS, create=create, request_id=f"r{next(self.numbers)}")
            answer = known.tokens and await self.call("Prefill", pb.PrefillRequest(item=again))
            if not answer or isinstance(answer, ExecutorError):
                assert not answer or answer.reason is Reason.KV_BLOCKS_EXHAUSTED
                self.known.remove(known)
                continue
            known.handle.CopyFrom(answer.output.handle)
            if known.chosen is not None and len(known.tokens) < CONTEXT:
                run = forward_pb2.Run(max_tokens=rng.randint(1, 5))
                on = item([known.chosen], known.handle, output=SAMPLE, run=run, request_id="on")
                self.settle(Sent(known, [*known.tokens, known.chosen], on), (await self.ask(on))[0])

    def note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What a callback has raised, for whoever reads a failure of this test."""
        self.raised.append(context)
        self.unhandled(loop, context)

    async def close(self) -> None:
        self.stream.cancel()
        await self.life.aclose()

    # --- what always holds ------------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_left_behind(self) -> None:
        if hasattr(self, "served"):
            self.run(self.audit())
            self.nothing_is_under_way()

    async def audit(self) -> None:
        """The cache's books agree, and both floors and the scheduler know the same sequences at the same lengths."""
        engine, records = self.state.engine, self.state.handles.records()
        lengths = {record.sequence: record.length for record in records}
        wrong: asyncio.Future[Any] = self.loop.create_future()
        command = Command(audit, lengths) if self.process else partial(audit, lengths=lengths)
        engine.submit(Operation(command, wrong.set_result))
        assert await wrong == ""
        assert {each.id: (each.length, each.version) for each in records} == {
            each.handle.id: (len(each.tokens), each.handle.version) for each in self.known
        }
        used = sum(-(-length // BLOCK) for length in lengths.values())
        assert engine.cache.free_blocks >= engine.cache.total_blocks - used  # some have blocks in common
        assert engine.cache.sequences == len(lengths)

    def nothing_is_under_way(self) -> None:
        """Of an engine that is dead, too."""
        state, engine = self.state, self.state.engine
        assert (engine.counters.running, engine.queued_items, engine.queued_tokens) == (0, 0, 0)
        records = state.handles.records()
        assert not creating(state) and not any(each.busy or each.cut or each.follower for each in records)
        assert not any(account.held[each] for account in self.accounts() for each in HELD_BY_CALLS)
        assert not any(uses(state.masks))
        assert not state.masks._on_way and not state.unread.bytes
        assert not any(state.supervisor.failures.values()), self.raised[:3]
        assert not self.process or not engine._open

    def teardown(self) -> None:
        if hasattr(self, "served"):
            self.run(self.close())
            self.loop.close()
            self.folder.cleanup()


TestRuns = RunMachine.TestCase
TestRuns.settings = settings(
    max_examples=int(10 * ROUNDS),
    stateful_step_count=12,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
