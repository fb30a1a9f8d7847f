"""The session over the wire: the unary calls' answers, bounded, and lost without being forgotten."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import duration_pb2

from ferrum_rpc.errors import Reason
from ferrum_rpc.executor.v1 import forward_pb2, output_pb2, session_pb2, types_pb2
from ferrum_rpc.service import session
from ferrum_rpc.service.records import SequenceEnd
from ferrum_rpc.service.session import Session
from ferrum_rpc.wire.info import SCHEMA_REVISION
from tests.faults.frame_order import FRAMES
from tests.faults.frame_order import refusal as frame_refusal
from tests.support.failing import failing
from tests.support.serving import Served, gated, serve_identity
from tests.support.wiring import full, item, prefill, reason_of, refused, top, until

PROMPT = [3, 1, 4, 1, 5]


class Stream:
    """A scheduler's end of a session, frame by frame."""

    def __init__(self, served: Served) -> None:
        self.call = served.executor.Session()
        self._steps = itertools.count(1)

    async def send(self, **frame: Any) -> int:
        step = next(self._steps)
        await self.call.write(session_pb2.SessionRequest(step_id=step, **frame))
        return step

    async def read(self) -> session_pb2.SessionResponse:
        async with asyncio.timeout(10):
            answer = await self.call.read()
        assert answer is not grpc.aio.EOF
        return answer

    async def ask(self, **frame: Any) -> session_pb2.SessionResponse:
        step = await self.send(**frame)
        answer = await self.read()
        assert answer.step_id == step
        return answer

    async def hello(self, **fields: Any) -> session_pb2.SessionWelcome:
        return (await self.ask(hello=session_pb2.SessionHello(**{"client_revision": SCHEMA_REVISION} | fields))).welcome

    async def step(self, *items: forward_pb2.ForwardItem, **fields: Any) -> int:
        """Send a forward frame; its step id."""
        return await self.send(forward=session_pb2.SessionForward(items=items, **fields))

    async def forward(self, *items: forward_pb2.ForwardItem, **fields: Any) -> session_pb2.SessionForwardAnswer:
        answer = await self.ask(forward=session_pb2.SessionForward(items=items, **fields))
        assert answer.WhichOneof("frame") == "forward", answer
        return answer.forward

    async def prefill(self, tokens: list[int], **fields: Any) -> types_pb2.KvHandle:
        return (await self.forward(item(tokens, **fields))).results[0].output.handle


@asynccontextmanager
async def opened(served: Served, **hello: Any) -> AsyncIterator[Stream]:
    stream = Stream(served)
    await stream.hello(**hello)
    try:
        yield stream
    finally:
        stream.call.cancel()


def refusal(answer: session_pb2.SessionResponse) -> tuple[int, Reason | None]:
    assert answer.WhichOneof("frame") == "error"
    return answer.step_id, reason_of(answer)


class Script:
    """A stream whose frames lie there already behind a hello: each is read without giving anything else a turn. Answers
    to steps are written once they ``may_go``."""

    def __init__(self, *frames: dict[str, Any]) -> None:
        hello = {"hello": session_pb2.SessionHello()}
        self._frames = iter([session_pb2.SessionRequest(step_id=n, **each) for n, each in enumerate([hello, *frames])])
        self.answers: dict[int, session_pb2.SessionResponse] = {}
        self.may_go = asyncio.Event()

    async def read(self) -> Any:
        return next(self._frames, grpc.aio.EOF)

    async def write(self, answer: session_pb2.SessionResponse) -> None:
        if answer.HasField("forward"):
            await self.may_go.wait()
        self.answers[answer.step_id] = answer

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str:
        return "script"

    async def run(self, served: Served) -> dict[int, session_pb2.SessionResponse]:
        """The last answer to each frame."""
        stream: Any = self
        await Session(served.server.state, served.server.calls, served.server.sessions, stream).run()
        return self.answers


OUTPUTS = {
    "greedy": output_pb2.OutputSpec(greedy=output_pb2.GreedyOutput()),
    "logprob": output_pb2.OutputSpec(greedy=output_pb2.GreedyOutput(logprob=True)),
    "logprobs": output_pb2.OutputSpec(
        greedy=output_pb2.GreedyOutput(logprobs=output_pb2.RowLogprobs(top_k=3, token_ids=[8, 2]))
    ),
    "next token": output_pb2.OutputSpec(next_token=output_pb2.NextTokenOutput(first_position=2)),
    "all positions": output_pb2.OutputSpec(positions=output_pb2.POSITIONS_ALL),
    "top": top(7),
    "selected": output_pb2.OutputSpec(selected_tokens=output_pb2.SelectedTokensOutput(token_ids=[5, 1, 200])),
    "f32": full(),
    "bf16, all": full(types_pb2.D_TYPE_BF16, output_pb2.POSITIONS_ALL),
    "none": output_pb2.OutputSpec(positions=output_pb2.POSITIONS_NONE),
}


async def test_answers_are_the_unary_ones_byte_for_byte(served: Served) -> None:
    async with opened(served) as stream:
        unary = [await prefill(served, PROMPT) for _ in OUTPUTS]
        framed = [await stream.prefill(PROMPT) for _ in OUTPUTS]
        bad = item([1], types_pb2.KvHandle(id=b"x"), item_id=77)

        def items(handles: list[types_pb2.KvHandle]) -> list[forward_pb2.ForwardItem]:
            pairs = zip(handles, OUTPUTS.values(), strict=True)
            listed = [item([2, 7], handle, item_id=i, output=output) for i, (handle, output) in enumerate(pairs)]
            return [*listed[:3], bad, *listed[3:]]

        one = await served.unified(*items(unary))
        other = await stream.forward(*items(framed))
        assert one.row_blocks
        assert [each.SerializeToString() for each in one.row_blocks] == [
            each.SerializeToString() for each in other.row_blocks
        ]
        for mine, its in zip(one.results, other.results, strict=True):
            if mine.HasField("output"):
                assert mine.output.handle.id != its.output.handle.id
                mine.output.handle.id = its.output.handle.id
            assert mine.SerializeToString() == its.SerializeToString()
        assert other.pressure.total_blocks == one.pressure.total_blocks
        assert other.timing.step > one.timing.step


async def test_large_answers_come_in_row_frames_and_join_to_the_same(served: Served) -> None:
    output = full(positions=output_pb2.POSITIONS_ALL)
    many = top(90, output_pb2.POSITIONS_ALL)
    async with opened(served, inline_bytes=3000) as stream:
        step = await stream.step(item(range(20), output=output), item([1, 2, 3], output=many))
        parts: list[session_pb2.SessionRows] = []
        while (answer := await stream.read()).WhichOneof("frame") == "rows":
            assert answer.step_id == step
            assert len(answer.rows.rows.data) <= 3000
            parts.append(answer.rows)
        blocks = answer.forward.row_blocks
        for part in parts:
            rows = getattr(blocks[part.block], blocks[part.block].WhichOneof("kind"))
            tensor = next(tensor for field, tensor in rows.ListFields() if field.number == part.field)
            row = 4 * int(np.prod(tensor.shape[1:]))
            assert len(tensor.data) == part.first * row  # in order, nothing left out
            tensor.data += part.rows.data
        unary = await served.unified(item(range(20), output=output), item([1, 2, 3], output=many))
        assert len(parts) == 10  # 20 rows of 1 kB, 2 a frame; the small ones inline
        assert [each.SerializeToString() for each in blocks] == [each.SerializeToString() for each in unary.row_blocks]


async def test_an_answer_too_large_for_a_message_goes_through_a_session() -> None:
    async with serve_identity(max_response_bytes=8000, max_session_response_bytes=40_000) as served:
        output = full(positions=output_pb2.POSITIONS_ALL)
        assert (await refused(served.prefill(range(20), output=output), Reason.OUTPUT_TOO_LARGE)).number("bytes")
        assert not served.server.state.engine.counters.steps, "it is refused before the forward"
        async with opened(served) as stream:
            await stream.step(item(range(20), output=output))
            size = 0
            while (answer := await stream.read()).WhichOneof("frame") == "rows":
                size += len(answer.rows.rows.data)
            assert size == 20 * 1024
            [alone] = (await stream.forward(item(range(60), output=output))).results
            assert reason_of(alone) is Reason.OUTPUT_TOO_LARGE
            step = await stream.step(*[item(range(30), output=output)] * 2)  # neither is too large, together they are
            assert refusal(await stream.read()) == (step, Reason.OUTPUT_TOO_LARGE)


async def test_operations_answer_per_handle(served: Served) -> None:
    async with opened(served) as stream:
        one, two = await stream.prefill(PROMPT), await stream.prefill(PROMPT)
        gone = types_pb2.KvHandle(id=one.id[:8] + bytes(16), seq_len=5, version=1)
        cut = await stream.ask(
            truncate=session_pb2.SessionTruncate(handles=[one, gone, two], lengths=[2, 0, 9], request_id="cut")
        )
        first, second, third = cut.handles.results
        assert first.handle == types_pb2.KvHandle(id=one.id, seq_len=2, version=2)
        assert (reason_of(second), reason_of(third)) == (Reason.HANDLE_UNKNOWN, Reason.TRUNCATE_BEYOND_LENGTH)
        again = await stream.ask(truncate=session_pb2.SessionTruncate(handles=[one], lengths=[2], request_id="cut"))
        assert again.handles.results[0].handle == first.handle
        forked = await stream.ask(fork=session_pb2.SessionFork(handle=two, count=3, at_length=4))
        children = [each.handle for each in forked.handles.results]
        assert [child.seq_len for child in children] == [4, 4, 4]
        released = await stream.ask(release=session_pb2.SessionRelease(handles=[*children, gone, one]))
        reasons = list(map(reason_of, released.handles.results))
        assert reasons == [None] * 3 + [Reason.HANDLE_UNKNOWN, Reason.SEQUENCE_VERSION_MISMATCH]
        uneven = await stream.ask(truncate=session_pb2.SessionTruncate(handles=[two], lengths=[]))
        assert refusal(uneven)[1] is Reason.INVALID_REQUEST
        assert (await served.status()).pressure.sequences == 2
    await served.check()


@pytest.mark.parametrize("first", FRAMES)
async def test_frames_claim_their_sequence_in_the_order_in_which_they_are_read(served: Served, first: str) -> None:
    for second in FRAMES:
        handle = await prefill(served, PROMPT)
        script = Script(FRAMES[first](handle), FRAMES[second](handle))
        script.may_go.set()
        answers = await script.run(served)
        assert frame_refusal(answers[1]) is None, second
        shares = first == second and "repeats" in first
        waits = second == "release of any version"
        if shares or waits or "keep_alive" in {first, second}:
            assert frame_refusal(answers[2]) is None, second
        else:
            assert frame_refusal(answers[2]) is Reason.SEQUENCE_BUSY, second
    await served.check()


async def test_several_steps_are_in_flight_and_one_more_is_refused() -> None:
    async with gated() as (served, gate), opened(served, steps_in_flight=3) as stream:
        handles = [await stream.prefill([i, 1]) for i in range(4)]
        first = await gate.hold(stream.step(item([5], handles[0])))
        steps = [await first]
        steps += [await stream.step(item([5], handle)) for handle in handles[1:3]]
        extra = await stream.step(item([5], handles[3]))
        assert refusal(await stream.read()) == (extra, Reason.QUEUE_FULL)
        gate.open()
        answers = [await stream.read() for _ in steps]
        assert sorted(answer.step_id for answer in answers) == steps
        # The second and third met in one forward pass.
        assert len({answer.forward.timing.step for answer in answers}) == 2
        assert (await stream.forward(item([5], handles[3]))).results[0].output.handle.seq_len == 3


async def test_a_step_is_taken_back_before_it_begins_and_answered_if_it_has_begun() -> None:
    async with gated() as (served, gate), opened(served) as stream:
        one, two = await stream.prefill([1, 2]), await stream.prefill([3, 4])
        running = await (await gate.hold(stream.step(item([5], one))))
        queued = await stream.step(item([5], two))
        for step in (running, queued, 999):
            await stream.send(cancel=session_pb2.SessionCancel(step_id=step))
        assert refusal(await stream.read()) == (queued, Reason.CANCELLED)
        gate.open()
        answer = await stream.read()
        assert (answer.step_id, answer.forward.results[0].output.handle.seq_len) == (running, 3)
        assert (await stream.forward(item([5], two))).results[0].output.handle.seq_len == 3
        await served.check()


async def test_a_step_that_has_not_begun_by_its_deadline_never_does() -> None:
    async with gated() as (served, gate), opened(served) as stream:
        one, two = await stream.prefill([1, 2]), await stream.prefill([3, 4])
        running = await (await gate.hold(stream.step(item([5], one))))
        late = await stream.step(item([5], two), timeout=duration_pb2.Duration(nanos=1000))
        await until(lambda: [each.busy for each in served.server.state.handles.records()] == [True, True])
        gate.open()
        answers = {(await stream.read()).step_id: None for _ in range(2)}
        assert set(answers) == {running, late}
        assert (await stream.forward(item([5], two))).results[0].output.handle.seq_len == 3


async def test_a_step_that_repeats_one_in_flight_waits_for_it_and_shares_its_answer() -> None:
    async with gated() as (served, gate), opened(served) as stream:
        one, two = await stream.prefill([1, 2]), await stream.prefill([3, 4])
        once = item([5], one, request_id="once")
        first = await (await gate.hold(stream.step(once)))
        again = await stream.step(once)
        other = await stream.step(item([5], two))
        gate.open()
        answers = {answer.step_id: answer.forward.results[0].output for answer in [await stream.read() for _ in "abc"]}
        assert {step: output.replayed for step, output in answers.items()} == {first: False, again: True, other: False}
        assert answers[first].handle == answers[again].handle and answers[first].handle.seq_len == 3
        await served.check()


async def test_a_step_that_nobody_expected_to_fail_is_answered_and_the_session_goes_on(served: Served) -> None:
    async with opened(served) as stream:
        handle = await stream.prefill(PROMPT)
        frame = session_pb2.SessionForward(items=[item([5], handle)])
        for owner, name in ((session, "ForwardCall"), (served.server.state, "pressure")):  # by then the step has run
            with failing(owner, name):
                assert refusal(await stream.ask(forward=frame))[1] is Reason.INTERNAL_ERROR
        stands = types_pb2.KvHandle(id=handle.id, seq_len=len(PROMPT) + 1, version=handle.version + 1)
        assert (await stream.forward(item([5], stands))).results[0].output.handle.seq_len == len(PROMPT) + 2
    await served.check()


async def test_a_lost_stream_takes_back_what_waits_commits_what_runs_and_keeps_the_sequences() -> None:
    async with gated() as (served, gate):
        stream = Stream(served)
        lease = (await stream.hello()).lease_id
        one, two = await stream.prefill([1, 2]), await stream.prefill([3, 4])
        await (await gate.hold(stream.step(item([5], one, request_id="running"))))
        await stream.step(item([5], two, request_id="queued"))
        state = served.server.state
        await until(lambda: all(record.busy for record in state.handles.records()))
        stream.call.cancel()
        await until(lambda: not state.sessions)
        gate.open()
        async with opened(served, lease_id=lease) as again:
            sent = item([5], one, request_id="running"), item([5], two, request_id="queued")
            results = (await again.forward(*sent)).results
            assert [(each.output.replayed, each.output.handle.seq_len) for each in results] == [(True, 3), (False, 3)]
        await served.check()


async def test_a_half_closed_stream_is_answered_and_is_no_close(served: Served) -> None:
    stream = Stream(served)
    await stream.hello()
    handle = await stream.prefill(PROMPT)
    step = await stream.step(item([5], handle))
    await stream.call.done_writing()
    answer = await stream.read()
    assert answer.step_id == step
    assert await stream.call.read() is grpc.aio.EOF
    after = answer.forward.results[0].output.handle
    assert (await served.decode([1], after)).output.handle.seq_len == 7


async def test_close_waits_for_the_steps_in_flight_and_releases_what_the_session_made(served: Served) -> None:
    elsewhere = await prefill(served, PROMPT)
    stream = Stream(served)
    lease = (await stream.hello()).lease_id
    made = [await stream.prefill(PROMPT) for _ in range(3)]
    await stream.ask(fork=session_pb2.SessionFork(handle=made[0]))
    step = await stream.step(item([5], made[1]))
    close = await stream.send(close=session_pb2.SessionClose(release_sequences=True))
    assert (await stream.read()).step_id == step
    goodbye = await stream.read()
    assert (goodbye.step_id, goodbye.goodbye.released_sequences) == (close, 4)
    assert await stream.call.read() is grpc.aio.EOF
    assert await stream.call.code() is grpc.StatusCode.OK
    status = await served.status()
    assert (status.pressure.sequences, status.leases, status.sessions) == (1, 0, 0)
    await refused(served.keep_alive(lease), Reason.LEASE_UNKNOWN)
    assert (await served.decode([1], elsewhere)).output.handle.seq_len == 6
    await served.check()


async def test_every_frame_renews_the_lease_and_an_expired_one_is_told(served: Served) -> None:
    async with opened(served) as stream:
        handle = await stream.prefill(PROMPT)
        [lease] = served.server.state.leases.due(float("inf"))
        for frame in (
            {"keep_alive": session_pb2.SessionKeepAlive()},
            {"forward": session_pb2.SessionForward(items=[item([1], types_pb2.KvHandle(id=b"none"))])},
            {"truncate": session_pb2.SessionTruncate()},
        ):
            lease.expires = 0.0
            await stream.ask(**frame)
            assert lease.expires > 0.0
        served.server.state.end(served.server.state.end_lease(lease, expired=True), SequenceEnd.EXPIRED)
        answer = await stream.ask(keep_alive=session_pb2.SessionKeepAlive())
        assert refusal(answer)[1] is Reason.LEASE_EXPIRED
        results = (await stream.forward(item([1], handle), item([1, 2]))).results
        assert list(map(reason_of, results)) == [Reason.LEASE_EXPIRED] * 2


HELLO, KEEP = {"hello": session_pb2.SessionHello()}, {"keep_alive": session_pb2.SessionKeepAlive()}
WRONG: dict[str, tuple[list[tuple[int, dict[str, Any]]], Reason]] = {
    "no hello": ([(1, KEEP)], Reason.INVALID_REQUEST),
    "two hellos": ([(1, HELLO), (2, HELLO)], Reason.INVALID_REQUEST),
    "a step id twice": ([(1, HELLO), (1, KEEP)], Reason.INVALID_REQUEST),
    "an empty frame": ([(1, HELLO), (2, {})], Reason.INVALID_REQUEST),
    "no lease": ([(1, {"hello": session_pb2.SessionHello(lease_id="x")})], Reason.LEASE_UNKNOWN),
    "a lease of another": (
        [(1, {"hello": session_pb2.SessionHello(lease_id="0123456789abcdef-00")})],
        Reason.INSTANCE_MISMATCH,
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_broken_frame_order_ends_the_stream_with_its_reason(served: Served, wrong: str) -> None:
    frames, reason = WRONG[wrong]
    call = served.executor.Session()
    for step, frame in frames:
        await call.write(session_pb2.SessionRequest(step_id=step, **frame))

    async def end() -> None:
        async with asyncio.timeout(5):
            while await call.read() is not grpc.aio.EOF:
                pass

    await refused(end(), reason)
    assert served.server.state.sessions == 0


async def test_an_empty_stream_is_no_mistake(served: Served) -> None:
    stream = Stream(served)
    await stream.call.done_writing()
    assert await stream.call.read() is grpc.aio.EOF
    assert await stream.call.code() is grpc.StatusCode.OK


async def test_a_client_that_does_not_read_holds_its_own_answers_only() -> None:
    """Its steps stay in flight until they are written; another scheduler's calls go on."""
    async with serve_identity(max_session_response_bytes=1 << 24, max_batch_tokens=4096, kv_blocks=4096) as served:
        async with opened(served, steps_in_flight=2) as stream:
            output = full(positions=output_pb2.POSITIONS_ALL)
            for _ in range(6):
                await stream.step(item([1] * 2000, output=output))
            async with asyncio.timeout(20):
                await until(lambda: len(served.server.state.handles) >= 2)
                for _ in range(20):
                    await served.release(await prefill(served, PROMPT))
            assert len(served.server.state.handles) == 2
        await served.check()


@pytest.mark.parametrize("order", [[0], [2, 0, 1]], ids=["one", "three"])
async def test_every_result_says_which_item_it_answers(served: Served, order: list[int]) -> None:
    """By every call that has results: good ones, refused ones, replayed ones."""
    first = [await prefill(served, [each, 1]) for each in order]
    new = [item([each, 2], item_id=7, request_id=f"new {order} {each}") for each in order]
    fed = [item([each], handle, item_id=7, request_id="fed") for each, handle in zip(order, first, strict=True)]
    bad = [item([1], types_pb2.KvHandle(id=b"none"), item_id=7) for _ in order]
    mixed = [*bad[:1], *fed, *bad[:1], *new]
    batches = ((served.batch_prefill, new), (served.batch_decode, [*fed, *bad]), (served.unified, mixed))
    async with opened(served) as stream:
        for call, items in batches:
            for replayed in (False, True):
                found = (await call(*items)).results
                assert [each.item_index for each in found] == list(range(len(items)))
                if items is not mixed:
                    assert found[0].output.replayed is replayed
        for items, fields in ((mixed, {}), (fed, {"all_or_nothing": True})):
            found = (await stream.forward(*items, **fields)).results
            assert [each.item_index for each in found] == list(range(len(items)))
            assert found[items.index(fed[0])].output.replayed


async def test_only_items_that_are_apart_lose_their_order_also_in_one_part(served: Served) -> None:
    """Items end while an earlier answer is being written; the one that is refused at once, first."""
    apart = session_pb2.SessionForward(items=[item([1], item_id=5), item([999], item_id=6)], apart=True)
    script = Script({"forward": session_pb2.SessionForward(items=[item([999])])}, {"forward": apart})
    running = asyncio.ensure_future(script.run(served))
    await until(lambda: len(served.server.state.handles) == 1)
    await served.between_steps(lambda runner: None)  # by then its call has ended
    script.may_go.set()
    answer = (await running)[2].forward
    assert not answer.more
    assert [(each.item_index, each.item_id) for each in answer.results] == [(1, 6), (0, 5)]
