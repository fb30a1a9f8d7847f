"""Runs and followers over the wire: the tokens of single decodes, every way in which a run ends, and exactly once."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2

from ferrum_rpc.errors import Reason
from ferrum_rpc.executor.v1 import forward_pb2, output_pb2, session_pb2, types_pb2
from ferrum_rpc.service.records import SequenceEnd, no_follower
from ferrum_rpc.wire.status import error_from_status
from tests.service.test_session import Stream, opened
from tests.support.inside import arrived, creating
from tests.support.serving import Served, gated, serve_identity
from tests.support.wiring import chosen, item, pb, prefill, reason_of, refused, top, until

PROMPT = [3, 1, 4, 1, 5]
INVALID = grpc.StatusCode.INVALID_ARGUMENT
MAX_TOKENS, STOP_ID, CUT = 1, 2, 4
SAMPLE = output_pb2.OutputSpec(sample=output_pb2.SampleOutput(seed=5, temperature=3.0, repetition_penalty=1.3))
"""The identity model's greedy tokens soon repeat; these do not."""

_ids = itertools.count(1)


def running(
    tokens: list[int], handle: types_pb2.KvHandle | None = None, *, most: int, stop: tuple[int, ...] = (), **fields: Any
) -> forward_pb2.ForwardItem:
    fields.setdefault("request_id", f"run-{next(_ids)}")
    fields.setdefault("output", SAMPLE)
    return item(tokens, handle, run=forward_pb2.Run(max_tokens=most, stop_token_ids=stop), **fields)


def ask(served: Served, tokens: list[int], handle: types_pb2.KvHandle | None = None, **how: Any) -> Any:
    """A call of one run."""
    return served.executor.Prefill(pb.PrefillRequest(item=running(tokens, handle, **how)))


async def single_decodes(
    served: Served, tokens: list[int], count: int, output: output_pb2.OutputSpec = SAMPLE
) -> list[int]:
    """What ``count`` calls choose, one after the other."""
    answer: Any = await served.prefill(tokens, output=output)
    found = chosen(answer)
    while len(found) < count:
        one = item(found[-1:], answer.output.handle, output=output)
        answer = await served.executor.Decode(pb.DecodeRequest(item=one))
        found += chosen(answer)
    await served.release(answer.output.handle)
    return found


@pytest.mark.parametrize(("length", "output"), [(1, SAMPLE), (7, SAMPLE), (32, SAMPLE), (7, output_pb2.OutputSpec())])
async def test_runs_of_any_length_choose_what_single_decodes_do(served, length, output):
    expected = await single_decodes(served, PROMPT, 64, output)
    found: list[int] = []
    handle, tokens = None, PROMPT
    while len(found) < 64:
        most = min(length, 64 - len(found))
        call = served.executor.Prefill if handle is None else served.executor.Decode
        kind = pb.PrefillRequest if handle is None else pb.DecodeRequest
        answer = await call(kind(item=running(tokens, handle, most=most, output=output)))
        assert answer.output.run_end == MAX_TOKENS and not answer.output.HasField("run_cause")
        found += chosen(answer)
        handle, tokens = answer.output.handle, found[-1:]
        assert handle.seq_len == len(PROMPT) + len(found) - 1
    assert found == expected and handle is not None and handle.version == -(-64 // length)
    await served.check()


async def test_runs_and_others_share_their_steps(served: Served) -> None:
    """A batch of runs of several lengths beside plain items: one call, as many steps as the longest."""
    expected = await single_decodes(served, PROMPT, 9)
    before = served.server.state.engine.counters.steps
    items = [running(PROMPT, most=9), item(PROMPT, output=top(3)), running(PROMPT, most=4), running(PROMPT, most=1)]
    answer = await served.unified(*items)
    assert served.server.state.engine.counters.steps == before + 9
    assert [chosen(answer, answer.results[at].output) for at in (0, 2, 3)] == [expected[:9], expected[:4], expected[:1]]
    assert [each.output.run_end for each in answer.results] == [MAX_TOKENS, 0, MAX_TOKENS, MAX_TOKENS]
    assert [each.output.handle.seq_len for each in answer.results] == [13, 5, 8, 5]
    await served.check()


async def test_a_run_holds_its_blocks_and_gives_back_what_it_does_not_use() -> None:
    async with serve_identity(kv_blocks=10, block_size=4) as served:  # 10 that can be had
        state = served.server.state
        handle = await prefill(served, [1] * 4)
        other = await prefill(served, [2] * 20)  # 6 in use
        await refused(ask(served, [1], handle, most=32), Reason.KV_BLOCKS_EXHAUSTED)
        assert state.engine.cache.free_blocks == 4
        stop = chosen(await served.decode([1], handle, output=SAMPLE))
        handle.version, handle.seq_len = 2, 5
        answer = await ask(served, [1], handle, truncate_to=4, most=13, stop=(stop[0],))
        assert (answer.output.run_end, answer.output.handle.seq_len) == (STOP_ID, 5)
        assert state.engine.cache.free_blocks == 3  # of the 3 that were held besides, none is left
        held = await served.reserve(answer.output.handle, tokens=4)
        answer = await ask(served, [1], held.handle, most=2)
        assert state.engine.cache.free_blocks == 2  # what ReserveKv holds stays
        await served.release(answer.output.handle)
        await served.release(other)
        await served.check()
        assert state.engine.cache.free_blocks == 10


async def test_all_or_nothing_is_decided_by_the_first_step() -> None:
    async with serve_identity(kv_blocks=10, block_size=4) as served:
        items = [running([1] * 4, most=2), running([2] * 20, most=20)]
        error = await refused(served.unified(*items, all_or_nothing=True), Reason.KV_BLOCKS_EXHAUSTED)
        assert error.metadata["item"] == "1"
        assert served.server.state.engine.cache.free_blocks == 10 and not served.server.state.handles.live


BAD = {
    "request_id": {"request_id": ""},
    "run.max_tokens": {"most": 0},
    "output": {"output": top(3)},
    "run.stop_token_ids": {"stop": tuple(range(257))},
}


async def test_a_bad_run_is_refused_by_its_field(served: Served) -> None:
    for field, fields in BAD.items():
        error = await refused(ask(served, PROMPT, **{"most": 2, **fields}), Reason.INVALID_REQUEST)
        assert error.field == field and not served.server.state.handles.live


async def test_runs_beyond_the_limits_are_refused(served: Served) -> None:
    limits = (await served.info()).limits
    assert (limits.max_run_tokens, limits.max_running, limits.max_followers) == (32, 64, 1)
    for most, stop in ((33, ()), (2, (256,))):
        await refused(ask(served, PROMPT, most=most, stop=stop), Reason.INVALID_REQUEST)
    everywhere = output_pb2.OutputSpec(positions=output_pb2.POSITIONS_ALL)
    masks = output_pb2.OutputSpec(greedy=output_pb2.GreedyOutput(row_mask_ids=[b"m" * 32]))
    for output in (everywhere, masks):
        await refused(ask(served, PROMPT, most=2, output=output), Reason.INVALID_REQUEST)
    items = [running(PROMPT, most=2) for _ in range(65)]
    assert (await refused(served.unified(*items), Reason.INVALID_REQUEST)).metadata["max_running"] == "64"


async def test_how_long_and_how_many_runs_may_be_is_set() -> None:
    async with serve_identity(max_run_tokens=3, max_running=2) as served:
        limits = (await served.info()).limits
        assert (limits.max_run_tokens, limits.max_running) == (3, 2)
        assert len(chosen(await ask(served, PROMPT, most=3))) == 3
        error = await refused(ask(served, PROMPT, most=4), Reason.INVALID_REQUEST)
        assert (error.field, error.metadata["max_run_tokens"]) == ("run.max_tokens", "3")
        error = await refused(served.unified(*[running(PROMPT, most=2) for _ in range(3)]), Reason.INVALID_REQUEST)
        assert error.metadata["max_running"] == "2"


async def test_a_run_happens_once() -> None:
    """A retry gets the recorded tokens; one that meets it in flight shares them; other content is refused. The tokens
    stay when the rows' budget is used up."""
    async with serve_identity(replay_bytes=8) as served:
        expected, once = await single_decodes(served, PROMPT, 6), {"most": 6, "request_id": "once"}
        first, second = await asyncio.gather(ask(served, PROMPT, **once), ask(served, PROMPT, **once))
        assert chosen(first) == chosen(second) == expected
        assert first.output.replayed != second.output.replayed and first.output.handle == second.output.handle
        await prefill(served, [1], request_id="another")
        again = await ask(served, PROMPT, **once)
        assert again.output.replayed and chosen(again) == expected and again.output.run_end == MAX_TOKENS
        await refused(ask(served, PROMPT, most=7, request_id="once"), Reason.REQUEST_ID_REUSED)


# --- cut --------------------------------------------------------------------------------------------------------------


class Steps:
    """A stage hook that lets as many steps run as were allowed, and holds the model thread at the next, which counts as
    ``begun`` too."""

    def __init__(self, count: int) -> None:
        self._allowed = threading.Semaphore(count)
        self._free = False
        self._held = threading.Event()
        self.begun = 0

    def __call__(self, stage: str) -> None:
        self.begun += stage == "forward"
        if stage == "forward" and not self._free and not self._allowed.acquire(blocking=False):
            self._held.set()
            assert self._allowed.acquire(timeout=30)
            self._held.clear()

    async def held(self) -> None:
        assert await asyncio.to_thread(self._held.wait, 30)

    def allow(self, count: int) -> None:
        for _ in range(count):
            self._allowed.release()

    def free(self) -> None:
        self._free = True
        self._allowed.release()


@asynccontextmanager
async def stepping(count: int, **options: Any) -> AsyncIterator[tuple[Served, Steps]]:
    """Serve the identity model, so many steps of it at first."""
    steps = Steps(count)
    async with serve_identity(stage=steps, **options) as served:
        yield served, steps


async def cut_at_the_third_step(cut: Callable[[Served, Any, Any], Awaitable[object]]) -> tuple[Any, list[int]]:
    """A run of which the third step is under way when ``cut(served, handle, call)`` is awaited: its answer, and the
    tokens of one that was left to itself."""
    async with stepping(3) as (served, steps):
        handle = await prefill(served, PROMPT)
        once = {"most": 10, "request_id": "once"}
        call = asyncio.ensure_future(ask(served, [9], handle, **once))
        await steps.held()
        await cut(served, handle, call)
        steps.free()
        await asyncio.wait([call])
        answer = await ask(served, [9], handle, **once) if call.cancelled() else call.result()
        await served.check()
        return answer, await single_decodes(served, [*PROMPT, 9], 10)


def cause(answer: Any) -> Reason:
    return error_from_status(answer.output.run_cause).reason


async def release(served: Served, handle: Any, call: Any) -> None:
    asyncio.ensure_future(served.release(handle, any_version=True))  # noqa: RUF006
    await until(lambda: any(each.pending_end for each in served.server.state.handles.records()))


async def leave(served: Served, handle: Any, call: Any) -> None:
    call.cancel()
    await until(lambda: arrived(served.server.state.engine) > 0)


@pytest.mark.parametrize(("end", "reason"), [(release, Reason.HANDLE_RELEASED), (leave, Reason.CANCELLED)])
async def test_what_ends_a_run_leaves_the_tokens_so_far(end: Any, reason: Reason) -> None:
    """A caller that has gone can ask for them again."""
    answer, expected = await cut_at_the_third_step(end)
    assert answer.output.replayed == (end is leave)
    assert (chosen(answer), answer.output.run_end, cause(answer)) == (expected[:3], CUT, reason)
    assert answer.output.handle.seq_len == len(PROMPT) + 3


async def test_a_duplicate_keeps_a_run_going_when_its_caller_goes() -> None:
    async with stepping(2) as (served, steps):
        first = asyncio.ensure_future(ask(served, PROMPT, most=5, request_id="once"))
        await steps.held()
        second = asyncio.ensure_future(ask(served, PROMPT, most=5, request_id="once"))
        calls = served.server.calls.methods["ferrum_rpc.executor.v1.ModelExecutor/Prefill"]
        await until(lambda: calls.items == 2)
        first.cancel()
        await until(first.done)
        steps.free()
        answer = await second
        assert len(chosen(answer)) == 5 and answer.output.run_end == MAX_TOKENS


async def test_the_end_of_a_lease_cuts_a_run_and_frees_the_sequence() -> None:
    async with stepping(2) as (served, steps):
        create = forward_pb2.CreateOptions(lease_id=(await served.acquire()).lease_id)
        call = asyncio.ensure_future(ask(served, PROMPT, most=10, create=create))
        await steps.held()
        [found] = served.server.state.leases.due(float("inf"))  # a run does not keep it alive
        state = served.server.state
        state.end(state.end_lease(found, expired=True), SequenceEnd.EXPIRED)
        steps.free()
        answer = await call
        assert (len(chosen(answer)), answer.output.run_end, cause(answer)) == (3, CUT, Reason.LEASE_EXPIRED)
        await refused(served.decode([1], answer.output.handle), Reason.LEASE_EXPIRED)
        await served.check()
        assert served.server.state.engine.cache.sequences == 0


async def test_a_reset_ends_sequences_that_are_being_created() -> None:
    """A run under way, and a plain creation and a fork that wait for the step behind it."""
    async with stepping(3) as (served, steps):
        parent = await prefill(served, PROMPT)
        run = asyncio.ensure_future(ask(served, PROMPT, most=10))
        await steps.held()
        plain = asyncio.ensure_future(prefill(served, PROMPT))
        fork = asyncio.ensure_future(served.fork(parent, count=2))
        await until(lambda: creating(served.server.state) == 4)
        reset = asyncio.ensure_future(served.reset())
        await until(lambda: all(each.pending_end for each in served.server.state.sequences()))
        steps.allow(1)
        answer = await run
        await steps.held()  # in the step of the plain creation
        for _ in range(20):
            await asyncio.sleep(0)
        assert not reset.done()
        steps.free()
        assert (len(chosen(answer)), answer.output.run_end, cause(answer)) == (3, CUT, Reason.HANDLE_RELEASED)
        for handle in (answer.output.handle, await plain, parent, *(await fork).handles):
            assert "reset" in (await refused(served.decode([1], handle), Reason.HANDLE_RELEASED)).message
        assert (await reset).released_sequences == 5
        await served.check()
        assert served.server.state.engine.cache.sequences == 0


async def test_a_deadline_cuts_a_run() -> None:
    async with stepping(2) as (served, steps), opened(served) as stream:
        timeout = duration_pb2.Duration(seconds=60)
        await stream.step(running(PROMPT, most=10), timeout=timeout)
        await steps.held()
        [record] = served.server.state.sequences()
        record.submission.deadline = 0.0
        steps.free()
        answer = (await stream.read()).forward
        output = answer.results[0].output
        assert (len(chosen(answer, output)), output.run_end) == (3, CUT)
        assert error_from_status(output.run_cause).reason is Reason.DEADLINE_EXCEEDED


# --- beside others ----------------------------------------------------------------------------------------------------


async def test_a_running_sequence_is_busy_and_others_join_its_steps() -> None:
    async with stepping(2) as (served, steps):
        handle = await prefill(served, PROMPT)
        call = asyncio.ensure_future(ask(served, [9], handle, most=5))
        await steps.held()
        await refused(served.decode([1], handle), Reason.SEQUENCE_BUSY)
        pressure = (await served.status()).pressure
        assert pressure.running_items == 1
        other = asyncio.ensure_future(served.prefill([1, 2]))
        await until(lambda: served.server.state.engine.queued_items == 1)
        steps.free()
        assert (await other).timing.step_sequences == 2
        assert len(chosen(await call)) == 5
        assert (await served.status()).pressure.running_items == 0


# --- sessions ---------------------------------------------------------------------------------------------------------


async def read_parts(stream: Stream) -> tuple[list[Any], list[tuple[int, int, list[int]]]]:
    """The parts of the next step's answer, and the tokens that came before each."""
    parts, came = [], []
    while True:
        answer = await stream.read()
        if answer.WhichOneof("frame") == "tokens":
            came += [(each.item_index, each.first, list(each.token_ids)) for each in answer.tokens.runs]
            continue
        parts.append(answer.forward)
        if not answer.forward.more:
            return parts, came


@pytest.mark.parametrize("revision", [6, 7])
async def test_items_that_are_apart_are_answered_as_they_end(revision: int) -> None:
    async with stepping(0) as (served, steps), opened(served, tokens=True, client_revision=revision) as stream:
        items = [
            running(PROMPT, most=12),
            running(PROMPT, most=3),
            item(PROMPT, output=top(2)),
            item([999], output=top(2)),
        ]
        await stream.step(*items, apart=True)
        reading = asyncio.ensure_future(read_parts(stream))
        steps.allow(4)
        await steps.held()  # at the fifth: that of three tokens is over
        steps.free()
        parts, came = await reading
        expected = await single_decodes(served, PROMPT, 12)
        order = [result.item_index for part in parts for result in part.results]
        assert sorted(order) == [0, 1, 2, 3] and order.index(1) < order.index(0) == 3
        for part in parts:
            for result in part.results:
                if result.item_index == 3:
                    assert reason_of(result) is Reason.INVALID_REQUEST
                elif result.item_index < 2:
                    assert chosen(part, result.output) == expected[: [12, 3][result.item_index]]
        for index, most in enumerate([12, 3]):
            tokens: list[int] = []
            for _, first, each in [entry for entry in came if entry[0] == index]:
                assert first == len(tokens)
                tokens += each
            assert tokens == expected[: most if revision < 7 else len(tokens)], "the result brings the rest"


@pytest.mark.parametrize("revision", [6, 7])
async def test_tokens_of_several_steps_share_a_frame_for_clients_that_know_it(revision: int) -> None:
    async with stepping(0) as (served, steps), opened(served, tokens=True, client_revision=revision) as stream:
        runs_of = [session_pb2.SessionForward(items=[running(PROMPT, most=12)]) for _ in range(3)]
        numbers = [await stream.send(forward=each) for each in runs_of]
        await steps.held()
        await until(lambda: creating(served.server.state) == 3)
        steps.allow(4)
        found: dict[int, list[int]] = {number: [] for number in numbers}
        results: dict[int, list[int]] = {}
        shared = 0
        while len(results) < 3:
            answer = await stream.read()
            if answer.WhichOneof("frame") != "tokens":
                [result] = answer.forward.results
                results[answer.step_id] = chosen(answer.forward, result.output)
                continue
            runs = answer.tokens.runs
            shared += len({run.step_id for run in runs}) > 1
            assert bool(answer.step_id) is (revision < 7)
            for run in runs:
                assert bool(run.step_id) is (revision >= 7)
                text = found[run.step_id or answer.step_id]
                assert run.first == len(text)
                text += run.token_ids
            if all(found.values()):
                steps.free()
        expected = await single_decodes(served, PROMPT, 12)
        assert list(results.values()) == [expected] * 3
        assert all(text == expected[: len(text)] for text in found.values())
        assert bool(shared) is (revision >= 7)


async def test_one_item_of_a_step_is_cancelled() -> None:
    async with stepping(0) as (served, steps), opened(served) as stream:
        first = asyncio.ensure_future(served.prefill([1]))
        await steps.held()
        items = [running(PROMPT, most=6), running(PROMPT, most=6)]
        step = await stream.step(*items, apart=True)
        await until(lambda: served.server.state.engine.queued_items == 2)
        steps.allow(3)
        await first
        await steps.held()
        await stream.send(cancel=session_pb2.SessionCancel(step_id=step, item_indexes=[1]))
        await until(lambda: arrived(served.server.state.engine) > 0)
        steps.free()
        parts, _ = await read_parts(stream)
        ends = {r.item_index: (r.output.run_end, r.output.rows.count) for part in parts for r in part.results}
        assert ends == {0: (MAX_TOKENS, 6), 1: (CUT, 3)}


async def test_a_step_lets_go_of_sequences_first(served: Served) -> None:
    async with opened(served) as stream:
        old = await stream.prefill(PROMPT)
        kept = await stream.prefill(PROMPT)
        await stream.ask(forward=session_pb2.SessionForward(items=[item([999])], release=[old]))
        with pytest.raises(AssertionError, match="error"):
            await stream.forward(item([1], kept), release=[kept])
        await stream.forward(item([1], kept))
        gone = await stream.forward(item([1], old))
        assert reason_of(gone.results[0]) is Reason.HANDLE_RELEASED
        held = await stream.ask(reserve=session_pb2.SessionReserve(handle=kept, tokens=4))
        assert reason_of(held.handles.results[0]) is Reason.SEQUENCE_VERSION_MISMATCH
        await served.check()


def ahead(handle: types_pb2.KvHandle, grown: int, versions: int = 1) -> types_pb2.KvHandle:
    """The handle that a step in flight will leave."""
    return types_pb2.KvHandle(id=handle.id, seq_len=handle.seq_len + grown, version=handle.version + versions)


def following(handle: types_pb2.KvHandle, creation: str = "", **fields: Any) -> forward_pb2.ForwardItem:
    """Feed what the run before chose last."""
    fields.setdefault("request_id", f"follow-{next(_ids)}")
    fields.setdefault("output", SAMPLE)
    return item([], handle, follow=forward_pb2.Follow(feed_chosen=True, creation=creation), **fields)


async def test_a_follower_behind_a_creation_and_chunks_of_a_prompt(served: Served) -> None:
    expected = await single_decodes(served, PROMPT, 6)
    async with opened(served) as stream:
        none = output_pb2.OutputSpec(positions=output_pb2.POSITIONS_NONE)
        await stream.step(item(PROMPT[:2], output=none, request_id="made"))
        behind = types_pb2.KvHandle(seq_len=2, version=1)
        chunk = item(PROMPT[2:], behind, output=SAMPLE, request_id="c", follow=forward_pb2.Follow(creation="made"))
        await stream.step(chunk)
        made, fed = (await stream.read()).forward, (await stream.read()).forward
        handle = fed.results[0].output.handle
        assert handle.id == made.results[0].output.handle.id and handle.seq_len == 5
        more = await stream.forward(following(ahead(handle, 0, 0), run=forward_pb2.Run(max_tokens=5)))
        assert chosen(fed, fed.results[0].output) + chosen(more, more.results[0].output) == expected
        again = await stream.forward(chunk)  # the same bytes, long after
        assert again.results[0].output.replayed and again.results[0].output.handle == handle


async def broken(stream: Stream, sent: forward_pb2.ForwardItem, reason: Reason = Reason.CHAIN_BROKEN) -> Any:
    answer = await stream.forward(sent)
    error = error_from_status(answer.results[0].error)
    assert error.reason is reason, error
    return error


async def test_a_chain_that_is_not_as_foreseen_is_broken_and_changes_nothing(served: Served) -> None:
    async with opened(served) as stream:
        handle = await stream.prefill(PROMPT, output=SAMPLE)
        for wrong in (ahead(handle, 1), ahead(handle, 0), ahead(handle, 1, 0)):
            error = await broken(stream, following(wrong))
            assert (error.number("version"), error.number("seq_len")) == (1, 5)
        unknown = types_pb2.KvHandle(seq_len=5, version=1)
        await broken(stream, following(unknown, creation="never"))
        none = await stream.prefill(PROMPT, output=output_pb2.OutputSpec(positions=output_pb2.POSITIONS_NONE))
        await broken(stream, following(none))
        expected = await single_decodes(served, PROMPT, 3)
        stopped = await stream.forward(running(PROMPT, most=5, stop=(expected[2],)))
        await broken(stream, following(stopped.results[0].output.handle))
        await stream.forward(item([1], handle))
        await served.check()


async def test_a_follower_whose_chain_broke_is_sent_again(served: Served) -> None:
    """The executor does not feed it later; and its refusal is not recorded, so the same bytes are decided anew."""
    async with opened(served) as stream:
        handle = await stream.prefill(PROMPT, output=SAMPLE)
        sent = following(ahead(handle, 1))
        await broken(stream, sent)
        handle = (await stream.forward(item([1], handle, output=SAMPLE))).results[0].output.handle
        assert (handle.seq_len, handle.version) == (6, 2), "nothing of it was fed"
        again = (await stream.forward(sent)).results[0].output
        assert not again.replayed and again.handle.version == 3
        assert (await stream.forward(sent)).results[0].output.replayed


async def test_a_follower_of_what_is_refused_is_refused_and_one_is_enough() -> None:
    async with gated() as (served, gate), opened(served) as stream:
        handle = await stream.prefill(PROMPT, output=SAMPLE)
        await gate.hold(stream.step(item([1], handle, output=SAMPLE)))
        await stream.step(following(ahead(handle, 2)))  # a length that does not come
        await broken(stream, following(ahead(handle, 1)), Reason.SEQUENCE_BUSY)
        gate.open()
        first, follower = await stream.read(), await stream.read()
        assert first.forward.results[0].output.handle.seq_len == 6
        error = error_from_status(follower.forward.results[0].error)
        assert error.reason is Reason.CHAIN_BROKEN and error.number("seq_len") == 6
        await served.check()


async def test_what_waits_is_taken_back_with_its_step_and_with_its_stream() -> None:
    async with gated() as (served, gate):
        async with opened(served) as stream:
            handle = await stream.prefill(PROMPT, output=SAMPLE)
            await gate.hold(stream.step(item([1], handle, output=SAMPLE)))
            sent = following(ahead(handle, 1))
            step = await stream.step(sent)
            await stream.send(cancel=session_pb2.SessionCancel(step_id=step))
            answer = await stream.read()
            assert answer.step_id == step and reason_of(answer) is Reason.CANCELLED
            await stream.step(sent)
            [record] = served.server.state.handles.records()
            await until(lambda: record.follower is not no_follower)
        await until(lambda: record.follower is no_follower)  # the stream is gone
        gate.open()
        async with opened(served) as stream:
            answer = await stream.forward(sent)  # as if it had never been sent
            assert answer.results[0].output.handle == ahead(handle, 2, 2)
        await served.check()


async def test_a_follower_whose_turn_comes_after_a_drain_leaves_its_sequence_free() -> None:
    async with gated() as (served, gate), opened(served) as stream:
        handle = await stream.prefill(PROMPT, output=SAMPLE)
        await gate.hold(stream.step(item([1], handle, output=SAMPLE)))
        await stream.step(following(ahead(handle, 1)))
        [record] = served.server.state.handles.records()
        await until(lambda: record.follower is not no_follower)
        served.server.drain(0)
        await served.server.draining.done.wait()
        gate.open()
        first, follower = await stream.read(), await stream.read()
        assert first.forward.results[0].output.handle.seq_len == 6
        assert reason_of(follower.forward.results[0]) is Reason.DRAINING
        assert not record.busy


async def test_a_bad_follower_is_refused_by_its_field(served: Served) -> None:
    async with opened(served) as stream:
        handle = await stream.prefill(PROMPT, output=SAMPLE)
        fed = following(handle)
        fed.token_ids.append(1)
        for field, sent in (
            ("request_id", following(handle, request_id="")),
            ("handle", following(handle, creation="x")),
            ("token_ids", fed),
        ):
            assert (await broken(stream, sent, Reason.INVALID_REQUEST)).field == field
    answer = await served.unified(following(handle))
    assert error_from_status(answer.results[0].error).field == "follow"


async def test_verified_drafts_are_followed_by_nothing() -> None:
    async with gated() as (served, gate), opened(served) as stream:
        handle = await stream.prefill(PROMPT)
        accept = output_pb2.OutputSpec(accept=output_pb2.AcceptOutput())
        await gate.hold(stream.step(item([1, 2], handle, output=accept)))
        await broken(stream, following(ahead(handle, 2)), Reason.SEQUENCE_BUSY)
        gate.open()
        await stream.read()
