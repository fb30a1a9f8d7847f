"""Request ids, cancellation and deadlines over the wire: whatever happens to the callers, a step is applied once.

`Gate` holds the model thread at a named stage, so that "queued" and "in flight" are states of a test and not of luck.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import structlog
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ferrum_rpc.errors import DeviceLost
from ferrum_rpc.executor.v1 import forward_pb2, types_pb2
from ferrum_rpc.executor.v1 import model_executor_pb2 as messages
from ferrum_rpc.wire.rows import rows_from_proto
from tests.support import wiring
from tests.support.identity_oracle import OracleConfig, identity_logits
from tests.support.inside import creating
from tests.support.serving import Served, serve_identity
from tests.support.waiting import until
from tests.support.wiring import full, reason_of, refusal

PATIENCE_S = 20.0


class Hold:
    """A stage of the next step that runs: `reached`, and held until `go`."""

    def __init__(self, failing: bool) -> None:
        self.failing = failing
        self._reached, self._go = threading.Event(), threading.Event()

    async def reached(self) -> None:
        await until(self._reached.is_set)

    def go(self) -> None:
        self._go.set()

    def stay(self) -> None:
        self._reached.set()
        assert self._go.wait(PATIENCE_S), "a test forgot to let the model thread go"
        if self.failing:
            raise RuntimeError("made to fail by the test")


class Gate:
    """A stage hook."""

    def __init__(self) -> None:
        self._holds: dict[str, list[Hold]] = {}
        self._all: list[Hold] = []

    def __call__(self, stage: str) -> None:
        holds = self._holds.get(stage)
        if holds:
            holds.pop(0).stay()

    def hold(self, stage: str, *, failing: bool = False) -> Hold:
        hold = Hold(failing)
        self._holds.setdefault(stage, []).append(hold)
        self._all.append(hold)
        return hold

    def open(self) -> None:
        """Hold nothing any more."""
        for hold in self._all:
            hold.go()


class Scheduler:
    """Raw calls to a served identity model, and what the server's side makes of them."""

    def __init__(self, served: Served, gate: Gate) -> None:
        self.served, self.gate = served, gate
        self.blockers: list[types_pb2.KvHandle] = []
        self.executor = served.executor
        self.state = served.server.state

    # --- calls ------------------------------------------------------------------------------------------------------

    def prefill(self, *tokens: int, request_id: str = "", **how: Any) -> Any:
        return self.executor.Prefill(messages.PrefillRequest(item=item(None, tokens, request_id)), **how)

    def decode(self, handle: types_pb2.KvHandle, token: int, request_id: str = "", **how: Any) -> Any:
        return self.executor.Decode(messages.DecodeRequest(item=item(handle, [token], request_id)), **how)

    def unified(self, *items: forward_pb2.ForwardItem, all_or_nothing: bool = False) -> Any:
        return self.served.unified(*items, all_or_nothing=all_or_nothing)

    def truncate(self, handle: types_pb2.KvHandle, length: int, request_id: str = "", **how: Any) -> Any:
        request = messages.TruncateKvRequest(handle=handle, length=length, request_id=request_id)
        return self.executor.TruncateKv(request, **how)

    def fork(self, handle: types_pb2.KvHandle, count: int, request_id: str = "", **how: Any) -> Any:
        return self.executor.ForkKv(messages.ForkKvRequest(handle=handle, count=count, request_id=request_id), **how)

    def release(
        self, handle: types_pb2.KvHandle, request_id: str = "", *, any_version: bool = False, **how: Any
    ) -> Any:
        request = messages.ReleaseRequest(handle=handle, any_version=any_version, request_id=request_id)
        return self.executor.Release(request, **how)

    async def new(self, *tokens: int) -> types_pb2.KvHandle:
        return (await self.prefill(*(tokens or (1, 2, 3)))).output.handle

    async def counters(self) -> Any:
        return (await self.served.status()).counters

    # --- moments ----------------------------------------------------------------------------------------------------

    async def in_flight(self, calls: int) -> None:
        """So many handlers run. A handler that waits for something has registered what it waits for."""
        await until(lambda: self.served.server.calls.in_flight == calls)
        await asyncio.sleep(0)

    @asynccontextmanager
    async def busy(self) -> AsyncIterator[None]:
        """The model thread is inside a step of somebody else's: whatever is sent now is queued until the end."""
        hold = self.gate.hold("forward")
        blocker = asyncio.ensure_future(self.prefill(9, 9))
        await hold.reached()
        try:
            yield
        finally:
            hold.go()
        self.blockers.append((await blocker).output.handle)  # it keeps its block while the queue is worked off

    async def cancel(self, call: Any) -> None:
        """Cancel a call that the server is working on, and wait until the server knows."""
        before = self.served.server.calls.in_flight
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: self.served.server.calls.in_flight == before - 1)

    # --- the end ----------------------------------------------------------------------------------------------------

    async def nothing_is_left(self, *handles: types_pb2.KvHandle) -> None:
        """With the sequences of ``handles`` released, every block is free and no sequence lives."""
        for handle in (*handles, *self.blockers):
            await self.release(handle)
        for _ in range(2):  # the step that runs now, and then the releases that its end asks for
            await self.served.between_steps(lambda runner: None)
        await self.served.check()
        status = await self.served.status()
        assert status.pressure.sequences == 0, "a sequence is left that nobody has a handle of"
        assert status.pressure.free_blocks == status.pressure.total_blocks
        assert (status.pressure.queued_items, status.pressure.queued_tokens) == (0, 0)
        assert status.counters.sequences_created == status.counters.sequences_released


def patiently(test: Callable[..., Any]) -> Callable[..., Any]:
    """Nobody may wait for ever: a test that does has failed."""

    @functools.wraps(test)
    async def run(*args: Any, **kwargs: Any) -> None:
        await asyncio.wait_for(test(*args, **kwargs), PATIENCE_S)

    return run


@pytest.fixture
async def scheduler() -> AsyncIterator[Scheduler]:
    async with scheduling() as each:
        yield each


@asynccontextmanager
async def scheduling(**options: Any) -> AsyncIterator[Scheduler]:
    gate = Gate()
    async with serve_identity(stage=gate, **{"kv_blocks": 64, "positional": True, **options}) as served:
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))  # steps fail on purpose here
        try:
            yield Scheduler(served, gate)
        finally:
            gate.open()


def item(
    handle: types_pb2.KvHandle | None, tokens: Any, request_id: str = "", **fields: Any
) -> forward_pb2.ForwardItem:
    return wiring.item(tokens, handle, request_id=request_id, output=full(), **fields)


def is_after(answer: Any, *tokens: int) -> None:
    """The answer's row is the one after exactly these tokens: none lost, none twice, none elsewhere."""
    rows = answer.output.rows
    found = rows_from_proto(answer.row_blocks)[rows.block]["logits"][rows.first]
    expected = identity_logits(tokens, [len(tokens) - 1], OracleConfig(positional=True))[0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    assert answer.output.handle.seq_len == len(tokens)


async def outcome(call: Any) -> Any:
    """The answer, or why there is none."""
    error = await refusal(call)
    return await call if error is None else str(error.reason)


async def reason(call: Any) -> str:
    found = await outcome(call)
    assert isinstance(found, str), found
    return found


# --- duplicates: `test_state_machine` sends them at the same time, and twice in a batch ----------------------------


@patiently
async def test_other_content_under_an_id_in_flight_is_refused_at_once(scheduler):
    handle = await scheduler.new(1, 2, 3)
    async with scheduler.busy():
        first = asyncio.ensure_future(scheduler.decode(handle, 7, "one"))
        await scheduler.in_flight(2)
        assert await reason(scheduler.decode(handle, 8, "one")) == "REQUEST_ID_REUSED"
        assert await reason(scheduler.truncate(handle, 1, "one")) == "REQUEST_ID_REUSED"
        assert await reason(scheduler.decode(handle, 7, "two")) == "SEQUENCE_BUSY"
    await scheduler.nothing_is_left((await first).output.handle)


@pytest.mark.parametrize("cancelled", [False, True])
@patiently
async def test_a_retry_in_a_batch_that_waits_for_a_queued_call_shares_its_result(scheduler, cancelled):
    """`a duplicate in flight waits for and shares the first one's result`, whether or not the first is cancelled."""
    mine, other = await scheduler.new(1, 2, 3), await scheduler.new(4, 5)
    async with scheduler.busy():
        first = scheduler.decode(mine, 7, "one")
        await scheduler.in_flight(2)
        batch = asyncio.ensure_future(scheduler.unified(item(mine, [7], "one"), item(other, [8])))
        await scheduler.in_flight(3)
        if cancelled:
            await scheduler.cancel(first)
    results = (await batch).results
    assert results[0].HasField("output"), reason_of(results[0])
    if not cancelled:
        assert results[0].output.handle == (await first).output.handle and results[0].output.replayed
    await scheduler.nothing_is_left(results[0].output.handle, results[1].output.handle)


# --- cancelled, or too late -----------------------------------------------------------------------------------------


@patiently
async def test_a_batch_with_a_retry_of_its_own_is_cancelled_like_any_other(scheduler):
    handle = await scheduler.new(1, 2, 3)
    async with scheduler.busy():
        batch = scheduler.unified(item(None, [6], "one"), item(None, [6], "one"), item(handle, [7]))
        await scheduler.in_flight(2)
        await scheduler.cancel(batch)
    await scheduler.nothing_is_left(handle)


@pytest.mark.parametrize(("ending", "request_id"), [("cancelled", ""), ("cancelled", "one"), ("too late", "one")])
@patiently
async def test_what_is_abandoned_before_dispatch_did_not_happen(scheduler, ending, request_id):
    """A forward call or an operation. Its place is another's at once."""
    handle = await scheduler.new(1, 2, 3)
    how: dict[str, Any] = {"request_id": request_id} | ({} if ending == "cancelled" else {"timeout": 0.5})
    for call, *about in ((scheduler.decode, 7), (scheduler.truncate, 1), (scheduler.fork, 1), (scheduler.release,)):
        async with scheduler.busy():
            abandoned = call(handle, *about, **how)
            await scheduler.in_flight(2)
            if ending == "cancelled":
                await scheduler.cancel(abandoned)
            else:
                assert await reason(abandoned) == "DEADLINE_EXCEEDED"
                await scheduler.in_flight(1)
            assert (scheduler.state.engine.queued_items, creating(scheduler.state)) == (0, 1), "the blocker's alone"
    answer = await scheduler.decode(handle, 7, request_id)
    assert not answer.output.replayed
    is_after(answer, 1, 2, 3, 7)
    await scheduler.nothing_is_left(answer.output.handle)


@patiently
async def test_an_operation_that_breaks_the_model_thread_is_answered(scheduler):
    """So is what the same turn of the thread had done before it, and what waits behind it: nobody hangs."""
    broken, sound = await scheduler.new(1, 2, 3), await scheduler.new(4, 5)

    def fail(*_: Any) -> None:
        raise DeviceLost("the device is gone")

    scheduler.served.runner.kv.fork = fail
    hold = scheduler.gate.hold("forward")
    blocker = asyncio.ensure_future(scheduler.prefill(9))
    await hold.reached()
    before = asyncio.ensure_future(scheduler.truncate(sound, 1))
    await scheduler.in_flight(2)
    culprit = asyncio.ensure_future(reason(scheduler.fork(broken, 1)))
    await scheduler.in_flight(3)
    behind = asyncio.ensure_future(reason(scheduler.prefill(6)))
    await scheduler.in_flight(4)
    hold.go()
    await blocker
    async with asyncio.timeout(5):
        assert (await before).handle.seq_len == 1
        assert await culprit == "DEVICE_LOST"
        assert await behind == "DEVICE_LOST"


# --- all or nothing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("why", "blocks"), [("KV_BLOCKS_EXHAUSTED", 4), ("STEP_FAILED", 64)])
@patiently
async def test_all_or_nothing_with_a_retry_of_a_call_that_is_refused(why, blocks):
    """`All items succeed, or none does`: also the one that the batch repeats, and that is in flight."""
    async with scheduling(kv_blocks=blocks) as scheduler:
        full, roomy, rest = await scheduler.new(1, 2, 3, 4), await scheduler.new(5, 6), await scheduler.new(7)
        async with scheduler.busy():
            if why == "STEP_FAILED":
                scheduler.gate.hold("forward", failing=True).go()
            first = asyncio.ensure_future(reason(scheduler.decode(full, 7, "one")))
            await scheduler.in_flight(2)
            items = item(full, [7], "one"), item(roomy, [8])
            batch = asyncio.ensure_future(reason(scheduler.unified(*items, all_or_nothing=True)))
            await scheduler.in_flight(3)
        assert await first == await batch == why
        answer = await scheduler.decode(roomy, 8)
        is_after(answer, 5, 6, 8)
        await scheduler.nothing_is_left(full, answer.output.handle, rest)


@patiently
async def test_all_or_nothing_with_a_retry_of_a_call_that_comes_back_while_it_waits_for_another(scheduler):
    """While the batch waits for the first call of one item, another item's first call is sent, and fails."""
    first, second, other = await scheduler.new(1, 2), await scheduler.new(3, 4), await scheduler.new(5, 6)
    hold, failing = scheduler.gate.hold("forward"), scheduler.gate.hold("forward", failing=True)
    one = asyncio.ensure_future(scheduler.decode(second, 7, "one"))
    await hold.reached()
    items = item(first, [7], "one"), item(second, [7], "one"), item(other, [8])
    batch = asyncio.ensure_future(outcome(scheduler.unified(*items, all_or_nothing=True)))
    await scheduler.in_flight(2)
    two = asyncio.ensure_future(reason(scheduler.decode(first, 7, "one")))
    await scheduler.in_flight(3)
    hold.go()
    await failing.reached()
    failing.go()
    second = (await one).output.handle
    assert await two == "STEP_FAILED"
    if isinstance(await batch, str):
        answer = await scheduler.decode(other, 8)
        is_after(answer, 5, 6, 8)
        await scheduler.nothing_is_left(first, second, answer.output.handle)
    else:
        await scheduler.nothing_is_left(*(result.output.handle for result in (await batch).results))


@patiently
async def test_a_duplicate_of_an_item_of_a_refused_batch_is_told_a_reason_of_its_own():
    """Nobody who did not cancel is told CANCELLED: it is no row of the error table."""
    async with scheduling(kv_blocks=4) as scheduler:
        roomy, full, rest = await scheduler.new(5, 6), await scheduler.new(1, 2, 3, 4), await scheduler.new(7)
        async with scheduler.busy():
            items = item(roomy, [8], "one"), item(full, [7])
            batch = asyncio.ensure_future(reason(scheduler.unified(*items, all_or_nothing=True)))
            await scheduler.in_flight(2)
            duplicate = asyncio.ensure_future(outcome(scheduler.decode(roomy, 8, "one")))
            await scheduler.in_flight(3)
        assert await batch == "KV_BLOCKS_EXHAUSTED"
        answer = await duplicate
        if isinstance(answer, str):
            assert answer == "KV_BLOCKS_EXHAUSTED"
            answer = await scheduler.decode(roomy, 8, "one")
        is_after(answer, 5, 6, 8)
        await scheduler.nothing_is_left(full, answer.output.handle, rest)


# --- giving up a sequence whose call is in flight -------------------------------------------------------------------


@patiently
async def test_releasing_any_version_during_a_step_frees_the_sequence_when_it_ends(scheduler):
    """`How full the executor is, the sequence's blocks included`: its answer counts what it freed."""
    handle = await scheduler.new(1, 2, 3)
    hold = scheduler.gate.hold("forward")
    call = asyncio.ensure_future(scheduler.decode(handle, 7, "one"))
    await hold.reached()
    release = asyncio.ensure_future(scheduler.release(handle, any_version=True))
    await until(lambda: any(record.pending_end for record in scheduler.state.handles.records()))
    hold.go()
    is_after(await call, 1, 2, 3, 7)
    pressure = (await release).pressure
    assert (pressure.free_blocks, pressure.sequences) == (pressure.total_blocks, 0)
    assert await reason(scheduler.decode((await call).output.handle, 8)) == "HANDLE_RELEASED"
    await scheduler.nothing_is_left()


# --- what GetStatus and StepTiming tell of refusals -----------------------------------------------------------------


@patiently
async def test_a_step_in_which_nothing_ran_is_not_a_forward_pass():
    """`steps`: forward passes. `step_sequences`: sequences that ran in the step."""
    async with scheduling(kv_blocks=1) as scheduler:
        handle = await scheduler.new(1, 2, 3, 4)
        before = await scheduler.counters()
        answer = await scheduler.unified(item(handle, [5]))
        assert reason_of(answer.results[0]) == "KV_BLOCKS_EXHAUSTED"
        assert (await scheduler.counters()).steps == before.steps
        answer = await scheduler.unified(item(handle, [9], truncate_to=3), item(None, [1]))
        assert answer.results[0].HasField("output") and answer.results[1].HasField("error")
        assert (answer.timing.step_sequences, answer.timing.step_tokens) == (1, 1)
        await scheduler.nothing_is_left(answer.results[0].output.handle)


@patiently
async def test_items_of_refused_batches_are_counted_like_those_of_refused_single_calls(scheduler):
    """`items`: work items in those calls, refused ones included."""
    handle = await scheduler.new(1, 2, 3)
    await reason(scheduler.decode(handle, 300))
    await reason(scheduler.unified(item(handle, [300]), item(None, [1]), all_or_nothing=True))
    methods = (await scheduler.served.status()).methods
    counts = {method.method.rsplit("/", 1)[1]: method for method in methods}
    assert (counts["Decode"].calls, counts["Decode"].errors, counts["Decode"].items) == (1, 1, 1)
    unified = counts["UnifiedForward"]
    assert (unified.calls, unified.errors, unified.items) == (1, 1, 2)
    await scheduler.nothing_is_left(handle)


# --- any mix --------------------------------------------------------------------------------------------------------

REFUSALS = {
    "INVALID_REQUEST",
    "REQUEST_ID_REUSED",
    "HANDLE_RELEASED",
    "SEQUENCE_VERSION_MISMATCH",
    "SEQUENCE_BUSY",
    "TRUNCATE_BEYOND_LENGTH",
    "KV_BLOCKS_EXHAUSTED",
    "DEADLINE_EXCEEDED",
    "STEP_FAILED",
}
"""What a scheduler may be told that shares its sequences with five others and hardly looks where it steps."""


class Chaos:
    """Six clients that share few request ids and few sequences, and give up on much of what they ask for."""

    def __init__(self, scheduler: Scheduler, seed: int) -> None:
        self.scheduler = scheduler
        self.random = random.Random(seed)
        self.handles: list[types_pb2.KvHandle] = []

    def item(self) -> Any:
        choose = self.random
        request_id = choose.choice(["", "a", "b", "c"])
        if not self.handles or choose.random() < 0.3:
            return item(None, [choose.randrange(4) for _ in range(choose.randrange(1, 7))], request_id)
        handle = choose.choice(self.handles[-6:])
        back = max(0, handle.seq_len - choose.randrange(4)) if choose.random() < 0.3 else None
        return item(handle, [choose.randrange(4) for _ in range(choose.randrange(1, 4))], request_id, truncate_to=back)

    def call(self) -> Any:
        choose, scheduler = self.random, self.scheduler
        how = {"timeout": choose.choice([0.001, 0.003, 0.01])} if choose.random() < 0.2 else {}
        request_id = choose.choice(["", "a", "b"])
        handle = choose.choice(self.handles[-6:]) if self.handles else None
        match choose.choice(["one", "one", "batch", "batch", "batch", "truncate", "fork", "release", "reset"]):
            case "one" if handle is not None:
                return scheduler.decode(handle, choose.randrange(4), request_id, **how)
            case "truncate" if handle is not None:
                return scheduler.truncate(handle, choose.randrange(handle.seq_len + 1), request_id, **how)
            case "fork" if handle is not None:
                return scheduler.fork(handle, choose.randrange(1, 3), request_id, **how)
            case "release" if handle is not None:
                return scheduler.release(handle, request_id, any_version=choose.random() < 0.7, **how)
            case "reset" if choose.random() < 0.1:
                return scheduler.served.reset()
            case _:
                items = [self.item() for _ in range(choose.randrange(1, 4))]
                return scheduler.unified(*items, all_or_nothing=choose.random() < 0.5)

    async def client(self, calls: int) -> None:
        for _ in range(calls):
            if self.random.random() < 0.05:
                stage = self.random.choice(["reserve", "plan", "forward", "select", "commit"])
                self.scheduler.gate.hold(stage, failing=True).go()
            call = self.call()
            if self.random.random() < 0.3:
                for _ in range(self.random.choice([10, 100, 200, 300, 400])):
                    await asyncio.sleep(0)
                call.cancel()
            try:
                answer = await outcome(call)
            except asyncio.CancelledError:
                continue
            if isinstance(answer, str):
                assert answer in REFUSALS
                continue
            self.handles += getattr(answer, "handles", ())
            self.handles += [answer.handle] if hasattr(answer, "handle") else []
            self.handles += [answer.output.handle] if hasattr(answer, "output") else []
            for result in getattr(answer, "results", ()):
                if result.HasField("output"):
                    self.handles.append(result.output.handle)
                else:
                    assert reason_of(result) in REFUSALS


@settings(
    max_examples=max(1, int(6 * float(os.environ.get("FERRUM_FUZZ_ROUNDS", "1")))),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)
@given(seed=st.integers(0, 2**32))
def test_after_any_chaos_the_books_are_in_order(seed):
    """Nobody hangs, nobody is told of a bug or of somebody else's cancellation, and no block is lost."""

    async def scenario() -> None:
        async with scheduling(kv_blocks=12) as scheduler:
            chaos = Chaos(scheduler, seed)
            await asyncio.gather(*(chaos.client(40) for _ in range(6)))
            await scheduler.in_flight(0)
            await scheduler.served.check()
            await scheduler.served.reset()
            await scheduler.nothing_is_left()

    asyncio.run(asyncio.wait_for(scenario(), 2 * PATIENCE_S))
