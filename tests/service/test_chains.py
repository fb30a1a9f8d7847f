"""Runs that follow runs in the engine: no step between them, and every rule of a follower that waits outside."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Any

import pytest
from google.protobuf import duration_pb2

from ferrum_rpc.errors import Reason
from ferrum_rpc.executor.v1 import forward_pb2, session_pb2, types_pb2
from ferrum_rpc.service.records import SequenceEnd, no_follower
from ferrum_rpc.wire.status import error_from_status
from tests.service.test_run import (
    CUT,
    MAX_TOKENS,
    PROMPT,
    SAMPLE,
    STOP_ID,
    Steps,
    ahead,
    chosen,
    following,
    frame,
    running,
    single_decodes,
)
from tests.service.test_session import Stream, opened
from tests.serving import Gate, Served, serve_identity
from tests.wiring import item, prefill, until


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


def error_of(answer: Any) -> Any:
    return error_from_status(answer.forward.results[0].error)


class Paced:
    """A stage hook that lets as many steps run as were allowed. ``begun``: those that have begun, or wait for that."""

    def __init__(self) -> None:
        self._allowed = threading.Semaphore(0)
        self.begun = 0

    def __call__(self, stage: str) -> None:
        if stage == "forward":
            self.begun += 1
            assert self._allowed.acquire(timeout=30)

    def allow(self, count: int) -> None:
        for _ in range(count):
            self._allowed.release()


@pytest.mark.parametrize(("runs", "length", "sequences"), [(4, 5, 3), (6, 1, 2), (2, 16, 1)])
async def test_runs_that_follow_each_other_take_the_steps_of_one(runs: int, length: int, sequences: int) -> None:
    async with serve_identity(kv_blocks=512) as served, opened(served, steps_in_flight=8) as stream:
        expected = await single_decodes(served, PROMPT, 1 + runs * length)
        handles = [await stream.prefill(PROMPT, output=SAMPLE) for _ in range(sequences)]
        paced = served.runner._stage = Paced()
        before, width = served.server.state.engine.counters.steps, set[int]()
        sent = [await stream.send(forward=frame(*[running(expected[:1], each, most=length) for each in handles]))]
        for run in range(1, runs + 1):
            paced.allow(length - 1)
            await until(lambda run=run: paced.begun == run * length)  # in the last step of the runs in progress
            handles = [ahead(each, length) for each in handles]
            if run < runs:
                sent += [await stream.send(forward=frame(follower(each, length))) for each in handles]
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
    steps = Steps(0)
    async with serve_identity(stage=steps) as served, opened(served) as stream:
        one = await stream.send(forward=frame(item(PROMPT, output=SAMPLE, request_id="made")))
        await steps.held()
        at = types_pb2.KvHandle(seq_len=len(PROMPT), version=1)
        two = await stream.send(forward=frame(follower(at, 4, creation="made")))
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
        steps = Steps(1)
        async with serve_identity(stage=steps) as served, opened(served) as stream:
            handle = await stream.prefill(PROMPT, output=SAMPLE)
            stop = (expected[2],) if case == "stop" else ()
            step = await stream.send(forward=frame(running(expected[:1], handle, most=6, stop=stop)))
            await steps.held()
            grown = 5 if case == "length" else 6
            await stream.send(forward=frame(follower(ahead(handle, grown, 2 if case == "version" else 1), 4)))
            [record] = served.server.state.handles.records()
            await until(lambda record=record: record.follower is not no_follower)
            if case == "cancel":
                await stream.send(cancel=session_pb2.SessionCancel(step_id=step))
                await until(lambda served=served: served.server.state.engine._arrived.qsize() > 1)
            steps.free()
            ran, refused = await stream.read(), await stream.read()
            output, error = ran.forward.results[0].output, error_of(refused)
            assert output.run_end == run_end, case
            assert error.reason is Reason.CHAIN_BROKEN, case
            assert (error.number("version"), error.number("seq_len")) == (2, output.handle.seq_len)
            assert not record.busy and record.successor is None and record.submission is None
            again = (await stream.ask(forward=frame(follower(output.handle, 2)))).forward.results[0]
            assert again.HasField("error") == (case == "stop")
            await served.check()


async def test_a_follower_is_taken_back_from_the_engine_with_its_step_and_with_its_stream() -> None:
    steps = Steps(1)
    async with serve_identity(stage=steps) as served:
        async with opened(served) as stream:
            handle = await stream.prefill(PROMPT, output=SAMPLE)
            first = await stream.send(forward=frame(running([1], handle, most=3)))
            await steps.held()
            sent = follower(ahead(handle, 3), 4)
            step = await stream.send(forward=frame(sent))
            await behind(served)
            assert served.server.state.engine.queued_items == 0, "it is not part of the queue"
            await stream.send(cancel=session_pb2.SessionCancel(step_id=step))
            answer = await stream.read()
            assert answer.step_id == step and error_from_status(answer.error).reason is Reason.CANCELLED
            [record] = served.server.state.handles.records()
            assert record.follower is no_follower and record.successor is None
            await stream.send(forward=frame(follower(ahead(handle, 3), 4)))
            await until(lambda: record.successor is not None)
            steps.allow(3)
            assert (await stream.read()).step_id == first
            await steps.held()  # in the first step of the follower, whose stream goes
        await until(lambda: not served.server.state.sessions)
        steps.free()
        await until(lambda: not record.busy)
        assert record.version == 3 and record.length < ahead(handle, 7).seq_len, "it was interrupted"
        await served.check()


@pytest.mark.parametrize("parent", ["run", "step"])
async def test_a_sequence_that_is_released_has_no_follower_in_the_engine(parent: str) -> None:
    gate = Gate("forward")
    async with serve_identity(stage=gate) as served, opened(served) as stream:
        handle = await stream.prefill(PROMPT, output=SAMPLE)
        one = running([1], handle, most=4) if parent == "run" else item([1], handle, output=SAMPLE)
        await gate.hold(stream.send(forward=frame(one)))
        await stream.send(forward=frame(follower(ahead(handle, 4 if parent == "run" else 1), 3)))
        await behind(served)
        await stream.send(release=session_pb2.SessionRelease(handles=[handle], any_version=True))
        [record] = served.server.state.handles.records()
        await until(lambda: record.pending_end is not None)
        assert record.successor is None, "it was taken back"
        gate.open()
        answers = [await stream.read() for _ in range(3)]
        errors = [
            error_of(each).reason
            for each in answers
            if each.WhichOneof("frame") == "forward" and each.forward.results[0].HasField("error")
        ]
        assert errors == [Reason.HANDLE_RELEASED]
        await served.check()


async def test_a_sequence_that_ends_while_its_follower_begins_has_it_interrupted() -> None:
    """The engine has begun the follower, and the service does not know yet."""
    steps = Steps(1)
    async with serve_identity(stage=steps) as served, opened(served) as stream:
        handle = await stream.prefill(PROMPT, output=SAMPLE)
        await stream.send(forward=frame(running([1], handle, most=2)))
        await steps.held()
        await stream.send(forward=frame(follower(ahead(handle, 2), 9)))
        await behind(served)
        [record] = served.server.state.handles.records()
        successor = record.successor
        assert successor is not None
        begins = successor._submission.begins

        def begin() -> None:
            begins()
            served.server.state.end([record], SequenceEnd.RELEASED)

        successor._submission.begins = begin
        steps.allow(2)
        ran = await stream.read()
        steps.free()
        cut = await stream.read()
        assert ran.forward.results[0].output.run_end == MAX_TOKENS
        output = cut.forward.results[0].output
        assert output.run_end == CUT and error_from_status(output.run_cause).reason is Reason.HANDLE_RELEASED
        await until(lambda: not served.server.state.handles.records())
        await served.check()


async def test_a_follower_does_not_pass_those_that_wait_for_a_place() -> None:
    steps = Steps(2)
    async with serve_identity(stage=steps, max_running=1) as served, opened(served) as stream:
        handle = await stream.prefill(PROMPT, output=SAMPLE)
        other = await stream.prefill(PROMPT, output=SAMPLE)
        await stream.send(forward=frame(running([1], handle, most=3)))
        await steps.held()
        second = await stream.send(forward=frame(follower(ahead(handle, 3), 2)))
        await behind(served)
        third = await stream.send(forward=frame(running([1], other, most=2)))
        await until(lambda: served.server.state.engine.queued_items == 1)
        steps.free()
        order = [(await stream.read()).step_id for _ in range(3)]
        assert order[1:] == [third, second]
        await served.check()


async def test_a_follower_whose_deadline_has_passed_does_not_begin() -> None:
    steps = Steps(1)
    async with serve_identity(stage=steps) as served, opened(served) as stream:
        handle = await stream.prefill(PROMPT, output=SAMPLE)
        await stream.send(forward=frame(running([1], handle, most=3)))
        await steps.held()
        timeout = duration_pb2.Duration(seconds=30)
        await stream.send(forward=frame(follower(ahead(handle, 3), 2), timeout=timeout))
        await behind(served)
        [record] = served.server.state.handles.records()
        call: Any = record.successor
        call._deadline = call._submission.deadline = 0.0
        steps.free()
        ran, late = await stream.read(), await stream.read()
        assert ran.forward.results[0].output.run_end == MAX_TOKENS
        assert error_of(late).reason is Reason.DEADLINE_EXCEEDED
        assert (record.length, record.version) == (ahead(handle, 3).seq_len, 2)
        await served.check()


async def test_a_follower_whose_blocks_are_taken_is_refused_and_changes_nothing() -> None:
    steps = Steps(2)
    async with serve_identity(stage=steps, kv_blocks=8, block_size=4) as served, opened(served) as stream:
        handle = await stream.prefill([1] * 4, output=SAMPLE)
        await stream.send(forward=frame(running([1], handle, most=4)))
        await steps.held()
        await stream.send(forward=frame(follower(ahead(handle, 4), 16)))
        await behind(served)
        taken = asyncio.ensure_future(prefill(served, [2] * 16))
        await until(lambda: served.server.state.engine.queued_items == 1)
        steps.free()
        ran, refused = await stream.read(), await stream.read()
        await taken
        assert ran.forward.results[0].output.run_end == MAX_TOKENS
        assert error_of(refused).reason is Reason.KV_BLOCKS_EXHAUSTED
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

            served.runner._stage = stage
            await stream.send(forward=frame(running([1], handle, most=2)))
            await steps.held()
            await stream.send(forward=frame(follower(ahead(handle, 2), 3)))
            await behind(served)
            steps.free()
            ran, refused = await stream.read(), await stream.read()
            output = ran.forward.results[0].output
            assert output.run_end == ends
            assert error_of(refused).reason is (Reason.CHAIN_BROKEN if ends == CUT else Reason.STEP_FAILED)
            handle = output.handle
            served.runner._stage = None
            await served.check()
        await stream.forward(item([1], handle))


async def test_a_follower_behind_a_run_that_cannot_be_committed_is_not_committed_either() -> None:
    steps = Steps(1)
    async with serve_identity(stage=steps) as served, opened(served) as stream:
        state = served.server.state
        handle = await stream.prefill(PROMPT, output=SAMPLE)
        await stream.send(forward=frame(running([1], handle, most=2)))
        await steps.held()
        await stream.send(forward=frame(follower(ahead(handle, 2), 3)))
        await behind(served)
        [record] = state.handles.records()
        finish, failed = state.replay.finish, list[object]()

        def fail_once(entry: Any, outcome: Any) -> None:
            if not failed:
                failed.append(entry)
                raise MemoryError
            finish(entry, outcome)

        state.replay.finish = fail_once  # type: ignore[method-assign] - the fault
        steps.free()
        ran, refused = await stream.read(), await stream.read()
        assert error_of(ran).reason is Reason.INTERNAL_ERROR and error_of(refused).reason is Reason.CHAIN_BROKEN
        await until(lambda: not record.busy)
        assert record.successor is None and record.follower is None
        handle = types_pb2.KvHandle(id=handle.id, seq_len=record.length, version=record.version)
        await stream.forward(item([1], handle))
        await served.check()


async def test_a_duplicate_of_a_follower_in_the_engine_shares_its_answer() -> None:
    steps = Steps(1)
    async with serve_identity(stage=steps) as served, opened(served) as stream, opened(served) as other:
        handle = await stream.prefill(PROMPT, output=SAMPLE)
        await stream.send(forward=frame(running([1], handle, most=2)))
        await steps.held()
        sent = follower(ahead(handle, 2), 3)
        await stream.send(forward=frame(sent))
        await behind(served)
        duplicate = asyncio.ensure_future(other.ask(forward=frame(sent)))
        [record] = served.server.state.handles.records()
        call: Any = record.successor
        await until(call._awaited)
        steps.free()
        _, one = (await stream.read()).forward, (await stream.read()).forward
        two = (await duplicate).forward
        assert chosen(one, one.results[0].output) == chosen(two, two.results[0].output)
        assert two.results[0].output.replayed and record.version == 3
        await served.check()


async def test_what_a_follower_is_charged_ahead_is_given_back_where_it_does_not_begin() -> None:
    steps = Steps(1)
    async with serve_identity(stage=steps, kv_blocks=64, block_size=4, max_blocks_per_caller=6) as served:
        async with opened(served) as stream:
            handle = await stream.prefill(PROMPT, output=SAMPLE)
            await stream.send(forward=frame(running([1], handle, most=8)))
            await steps.held()
            step = await stream.send(forward=frame(follower(ahead(handle, 8), 8)))
            await behind(served)
            [record] = served.server.state.handles.records()
            assert record.charged == 6  # of 5 + 8 + 8 tokens, the last of which is not fed
            await stream.send(cancel=session_pb2.SessionCancel(step_id=step))
            await stream.read()
            steps.free()
            await stream.read()
            assert record.charged == 4
        await served.check()


async def test_a_run_whose_follower_has_a_draft_or_a_grammar_or_no_run_waits_outside() -> None:
    """A step without a run takes its turn in the queue, for it counts in the budget of a step."""
    gate = Gate("forward")
    async with serve_identity(stage=gate) as served, opened(served) as stream:
        handle = await stream.prefill(PROMPT, output=SAMPLE)
        await gate.hold(stream.send(forward=frame(running([1], handle, most=2))))
        await stream.send(forward=frame(following(ahead(handle, 2))))
        [record] = served.server.state.handles.records()
        await until(lambda: record.follower is not no_follower)
        assert record.successor is None
        gate.open()
        first, second = await stream.read(), await stream.read()
        assert second.forward.results[0].output.handle == ahead(first.forward.results[0].output.handle, 1)
        await served.check()
