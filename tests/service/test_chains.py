"""Runs that follow runs in the engine: no step between them, and every rule of a follower that waits outside."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
from google.protobuf import duration_pb2

from ferrum_rpc.errors import Reason
from ferrum_rpc.executor.v1 import forward_pb2, session_pb2, types_pb2
from ferrum_rpc.service.records import SequenceEnd, no_follower
from ferrum_rpc.service.replay import ReplayLog
from ferrum_rpc.wire.status import error_from_status
from tests.service.test_run import (
    CUT,
    MAX_TOKENS,
    PROMPT,
    SAMPLE,
    STOP_ID,
    Steps,
    ahead,
    following,
    running,
    single_decodes,
    stepping,
)
from tests.service.test_session import Stream, opened
from tests.support.failing import failing
from tests.support.inside import arrived, set_stage
from tests.support.serving import Served, gated, serve_identity
from tests.support.wiring import chosen, item, prefill, reason_of, until


def follower(handle: types_pb2.KvHandle, most: int, stop: tuple[int, ...] = (), **fields: Any) -> Any:
    return following(handle, run=forward_pb2.Run(max_tokens=most, stop_token_ids=stop), **fields)


async def behind(served: Served, count: int = 1) -> None:
    """So many followers wait in the engine."""
    await until(lambda: sum(each.successor is not None for each in served.server.state.sequences()) == count)


async def answer_of(stream: Stream, step: int, answers: dict[int, Any]) -> Any:
    """The answer of a step, whatever the order in which they come."""
    while step not in answers:
        answer = await stream.read()
        answers[answer.step_id] = answer
    return answers[step]


@dataclass
class Followed:
    """A run whose second step is held, and a follower that waits for it in the engine, ``sent`` in ``step``."""

    served: Served
    stream: Stream
    steps: Steps
    handle: types_pb2.KvHandle
    record: Any
    sent: forward_pb2.ForwardItem
    step: int


@asynccontextmanager
async def followed(most: int, then: int, timeout_s: int | None = None, **options: Any) -> AsyncIterator[Followed]:
    """A run of ``most`` tokens with a follower of ``then``."""
    async with stepping(1, **options) as (served, steps), opened(served) as stream:
        handle = await stream.prefill(PROMPT, output=SAMPLE)
        await stream.step(running([1], handle, most=most))
        await steps.held()
        sent = follower(ahead(handle, most), then)
        timeout = None if timeout_s is None else duration_pb2.Duration(seconds=timeout_s)
        step = await stream.step(sent, timeout=timeout)
        await behind(served)
        [record] = served.server.state.handles.records()
        yield Followed(served, stream, steps, handle, record, sent, step)
        await served.check()


def why(answer: Any) -> Reason | None:
    return reason_of(answer.forward.results[0])


@pytest.mark.parametrize(("runs", "length", "sequences"), [(4, 5, 3), (6, 1, 2), (2, 16, 1)])
async def test_runs_that_follow_each_other_take_the_steps_of_one(runs: int, length: int, sequences: int) -> None:
    async with serve_identity(kv_blocks=512) as served, opened(served, steps_in_flight=8) as stream:
        expected = await single_decodes(served, PROMPT, 1 + runs * length)
        handles = [await stream.prefill(PROMPT, output=SAMPLE) for _ in range(sequences)]
        paced = Steps(0)
        set_stage(served.runner, paced)
        before, width = served.server.state.engine.counters.steps, set[int]()
        sent = [await stream.step(*[running(expected[:1], each, most=length) for each in handles])]
        for run in range(1, runs + 1):
            paced.allow(length - 1)
            await until(lambda run=run: paced.begun == run * length)  # in the last step of the runs in progress
            handles = [ahead(each, length) for each in handles]
            if run < runs:
                sent += [await stream.step(follower(each, length)) for each in handles]
                await behind(served, sequences)
            paced.allow(1)
        texts: list[list[int]] = [[] for _ in handles]
        answers: dict[int, Any] = {}
        for number, step in enumerate(sent):
            answer = (await answer_of(stream, step, answers)).forward
            width.add(answer.timing.step_sequences)
            for place, result in enumerate(answer.results):
                at = place if not number else (number - 1) % sequences
                assert result.output.run_end == MAX_TOKENS
                texts[at] += chosen(answer, result.output)
        assert texts == [expected[1:]] * sequences
        assert served.server.state.engine.counters.steps == before + runs * length
        assert width == {sequences}, "all of them are in every step"
        await served.check()


async def test_a_run_follows_the_prompt_that_makes_its_sequence_without_a_gap() -> None:
    async with stepping(0) as (served, steps), opened(served) as stream:
        one = await stream.step(item(PROMPT, output=SAMPLE, request_id="made"))
        await steps.held()
        at = types_pb2.KvHandle(seq_len=len(PROMPT), version=1)
        two = await stream.step(follower(at, 4, creation="made"))
        await behind(served)
        steps.free()
        made, fed = [(await stream.read()).forward for _ in (one, two)]
        assert served.server.state.engine.counters.steps == 5
        text = [*chosen(made, made.results[0].output), *chosen(fed, fed.results[0].output)]
        assert text == await single_decodes(served, PROMPT, 5)
        await served.check()


async def test_a_run_that_ends_otherwise_has_its_follower_refused() -> None:
    """By a stop id, by the context, by a cancel, and where it leaves another length than foreseen."""
    async with serve_identity() as served:
        expected = await single_decodes(served, PROMPT, 8)
    assert expected[2] not in expected[:2]
    cases = {"stop": STOP_ID, "cancel": CUT, "length": MAX_TOKENS, "version": MAX_TOKENS}
    for case, run_end in cases.items():
        async with stepping(1) as (served, steps), opened(served) as stream:
            handle = await stream.prefill(PROMPT, output=SAMPLE)
            stop = (expected[2],) if case == "stop" else ()
            step = await stream.step(running(expected[:1], handle, most=6, stop=stop))
            await steps.held()
            grown = 5 if case == "length" else 6
            await stream.step(follower(ahead(handle, grown, 2 if case == "version" else 1), 4))
            [record] = served.server.state.handles.records()
            await until(lambda record=record: record.follower is not no_follower)
            if case == "cancel":
                await stream.send(cancel=session_pb2.SessionCancel(step_id=step))
                await until(lambda served=served: arrived(served.server.state.engine) > 1)
            steps.free()
            ran, refused = await stream.read(), await stream.read()
            output, error = ran.forward.results[0].output, error_from_status(refused.forward.results[0].error)
            assert (output.run_end, error.reason) == (run_end, Reason.CHAIN_BROKEN), case
            assert (error.number("version"), error.number("seq_len")) == (2, output.handle.seq_len)
            assert not record.busy and record.successor is None and record.submission is None
            again = (await stream.forward(follower(output.handle, 2))).results[0]
            assert again.HasField("error") == (case == "stop")
            await served.check()


async def test_a_follower_is_taken_back_from_the_engine_with_its_step_and_with_its_stream() -> None:
    async with stepping(1) as (served, steps):
        async with opened(served) as stream:
            handle = await stream.prefill(PROMPT, output=SAMPLE)
            first = await stream.step(running([1], handle, most=3))
            await steps.held()
            sent = follower(ahead(handle, 3), 4)
            step = await stream.step(sent)
            await behind(served)
            assert served.server.state.engine.queued_items == 0, "it is not part of the queue"
            await stream.send(cancel=session_pb2.SessionCancel(step_id=step))
            answer = await stream.read()
            assert answer.step_id == step and reason_of(answer) is Reason.CANCELLED
            [record] = served.server.state.handles.records()
            assert record.follower is no_follower and record.successor is None
            await stream.step(follower(ahead(handle, 3), 4))
            await until(lambda: record.successor is not None)
            steps.allow(3)
            assert (await stream.read()).step_id == first
            await steps.held()  # in the first step of the follower, whose stream goes
        await until(lambda: not served.server.state.sessions)
        steps.free()
        await until(lambda: not record.busy)
        assert record.version == 3 and record.length < ahead(handle, 7).seq_len, "it was interrupted"
        await served.check()


@pytest.mark.parametrize(("parent", "outside"), [("run", False), ("step", False), ("step", True)])
async def test_a_sequence_that_is_released_has_no_follower(parent: str, outside: bool) -> None:
    """In the engine, or outside of it."""
    async with gated() as (served, gate), opened(served) as stream:
        handle = await stream.prefill(PROMPT, output=SAMPLE)
        one = running([1], handle, most=4) if parent == "run" else item([1], handle, output=SAMPLE)
        await gate.hold(stream.step(one))
        at = ahead(handle, 4 if parent == "run" else 1)
        await stream.step(following(at) if outside else follower(at, 3))
        [record] = served.server.state.handles.records()
        await until(lambda: record.follower is not no_follower)
        assert (record.successor is None) == outside
        await stream.send(release=session_pb2.SessionRelease(handles=[handle], any_version=True))
        await until(lambda: record.pending_end is not None)
        assert record.successor is None, "it was taken back"
        gate.open()
        answers = [await stream.read() for _ in range(3)]
        reasons = [why(each) for each in answers if each.HasField("forward")]
        assert [each for each in reasons if each is not None] == [Reason.HANDLE_RELEASED]
        await served.check()


async def test_a_sequence_that_ends_while_its_follower_begins_has_it_interrupted() -> None:
    """The engine has begun the follower, and the service does not know yet."""
    async with followed(2, 9) as it:
        submission, state = it.record.successor._submission, it.served.server.state
        begins = submission.begins

        def begin() -> None:
            begins()
            state.end([it.record], SequenceEnd.RELEASED)

        submission.begins = begin
        it.steps.allow(2)
        ran = await it.stream.read()
        it.steps.free()
        cut = await it.stream.read()
        assert ran.forward.results[0].output.run_end == MAX_TOKENS
        output = cut.forward.results[0].output
        assert output.run_end == CUT and error_from_status(output.run_cause).reason is Reason.HANDLE_RELEASED
        await until(lambda: not state.handles.records())


async def test_a_follower_does_not_pass_those_that_wait_for_a_place() -> None:
    async with stepping(2, max_running=1) as (served, steps), opened(served) as stream:
        handle = await stream.prefill(PROMPT, output=SAMPLE)
        other = await stream.prefill(PROMPT, output=SAMPLE)
        await stream.step(running([1], handle, most=3))
        await steps.held()
        second = await stream.step(follower(ahead(handle, 3), 2))
        await behind(served)
        third = await stream.step(running([1], other, most=2))
        await until(lambda: served.server.state.engine.queued_items == 1)
        steps.free()
        order = [(await stream.read()).step_id for _ in range(3)]
        assert order[1:] == [third, second]
        await served.check()


async def test_a_follower_whose_deadline_has_passed_does_not_begin() -> None:
    async with followed(3, 2, timeout_s=30) as it:
        late_by = mock.Mock(wraps=time, monotonic=lambda: time.monotonic() + 60)
        with mock.patch("ferrum_rpc.engine.loop.time", late_by):
            it.steps.free()
            ran, late = await it.stream.read(), await it.stream.read()
        assert ran.forward.results[0].output.run_end == MAX_TOKENS
        assert why(late) is Reason.DEADLINE_EXCEEDED
        assert (it.record.length, it.record.version) == (ahead(it.handle, 3).seq_len, 2)


async def test_a_follower_whose_blocks_are_taken_is_refused_and_changes_nothing() -> None:
    async with stepping(2, kv_blocks=8, block_size=4) as (served, steps), opened(served) as stream:
        handle = await stream.prefill([1] * 4, output=SAMPLE)
        await stream.step(running([1], handle, most=4))
        await steps.held()
        await stream.step(follower(ahead(handle, 4), 16))
        await behind(served)
        taken = asyncio.ensure_future(prefill(served, [2] * 16))
        await until(lambda: served.server.state.engine.queued_items == 1)
        steps.free()
        ran, refused = await stream.read(), await stream.read()
        await taken
        assert ran.forward.results[0].output.run_end == MAX_TOKENS
        assert why(refused) is Reason.KV_BLOCKS_EXHAUSTED
        assert served.server.state.engine.counters.running == 0
        [record, _] = served.server.state.handles.records()
        assert (record.length, record.version, record.busy) == (8, 2, False)
        await served.check()


async def test_a_step_that_fails_hands_followers_back_and_refuses_one_that_begins() -> None:
    async with serve_identity() as served, opened(served) as stream:
        handle = await stream.prefill(PROMPT, output=SAMPLE)
        for failing, ends in ((2, CUT), (3, MAX_TOKENS)):  # the last step of the run, or the first of its follower
            steps, count = Steps(1), itertools.count(1)

            def stage(name: str, steps: Steps = steps, failing: int = failing, count: Any = count) -> None:
                steps(name)
                if name == "select" and next(count) == failing:
                    raise RuntimeError("as asked")

            set_stage(served.runner, stage)
            await stream.step(running([1], handle, most=2))
            await steps.held()
            await stream.step(follower(ahead(handle, 2), 3))
            await behind(served)
            steps.free()
            ran, refused = await stream.read(), await stream.read()
            output = ran.forward.results[0].output
            assert output.run_end == ends
            assert why(refused) is (Reason.CHAIN_BROKEN if ends == CUT else Reason.STEP_FAILED)
            handle = output.handle
            set_stage(served.runner, None)
            await served.check()
        await stream.forward(item([1], handle))


async def test_a_follower_behind_a_run_that_cannot_be_committed_is_not_committed_either() -> None:
    async with followed(2, 3) as it:
        record, stream = it.record, it.stream
        with failing(ReplayLog, "finish"):
            it.steps.free()
            ran, refused = await stream.read(), await stream.read()
        assert (why(ran), why(refused)) == (Reason.INTERNAL_ERROR, Reason.CHAIN_BROKEN)
        await until(lambda: not record.busy)
        assert record.successor is None and record.follower is None
        handle = types_pb2.KvHandle(id=it.handle.id, seq_len=record.length, version=record.version)
        await stream.forward(item([1], handle))


async def test_a_duplicate_of_a_follower_in_the_engine_shares_its_answer() -> None:
    async with followed(2, 3) as it, opened(it.served) as other:
        duplicate = asyncio.ensure_future(other.forward(it.sent))
        replay = it.served.server.state.replay
        await until(lambda: replay.scope(("", it.handle.id))[it.sent.request_id].waiters)
        it.steps.free()
        _, one = (await it.stream.read()).forward, (await it.stream.read()).forward
        two = await duplicate
        assert chosen(one, one.results[0].output) == chosen(two, two.results[0].output)
        assert two.results[0].output.replayed and it.record.version == 3


async def test_what_a_follower_is_charged_ahead_is_given_back_where_it_does_not_begin() -> None:
    async with followed(8, 8, kv_blocks=64, block_size=4, max_blocks_per_caller=6) as it:
        assert it.record.charged == 6  # of 5 + 8 + 8 tokens, the last of which is not fed
        await it.stream.send(cancel=session_pb2.SessionCancel(step_id=it.step))
        await it.stream.read()
        it.steps.free()
        await it.stream.read()
        assert it.record.charged == 4


async def test_a_run_whose_follower_has_a_draft_or_a_grammar_or_no_run_waits_outside() -> None:
    """A step without a run takes its turn in the queue, for it counts in the budget of a step."""
    async with gated() as (served, gate), opened(served) as stream:
        handle = await stream.prefill(PROMPT, output=SAMPLE)
        await gate.hold(stream.step(running([1], handle, most=2)))
        await stream.step(following(ahead(handle, 2)))
        [record] = served.server.state.handles.records()
        await until(lambda: record.follower is not no_follower)
        assert record.successor is None
        gate.open()
        first, second = await stream.read(), await stream.read()
        assert second.forward.results[0].output.handle == ahead(first.forward.results[0].output.handle, 1)
        await served.check()
