"""One session stream against a server that answers when it is told to: order, bounds, deadlines, cancels and ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from ferrum_rpc.client.policy import Deadline, fate_unknown
from ferrum_rpc.client.stream import METHOD, Answered, SessionStream
from ferrum_rpc.errors import (
    DeadlineExceeded,
    Draining,
    ExecutorError,
    LeaseExpired,
    QueueFull,
    TransportError,
)
from ferrum_rpc.executor.v1 import session_pb2
from ferrum_rpc.wire.status import CODE_BY_REASON, STATUS_METADATA_KEY, status_from_error

FOREVER = Deadline(None)
SLOTS = 3

Frame = session_pb2.SessionRequest
Reply = session_pb2.SessionResponse


class Executor(grpc.GenericRpcHandler):
    """Notes frames and answers hello; everything else is up to the test."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.metadata: dict[str, Any] = {}
        self.hello: Reply | ExecutorError | None = Reply(welcome=session_pb2.SessionWelcome(steps_in_flight=SLOTS))
        self.streams = 0
        self._told = asyncio.Condition()
        self._replies: asyncio.Queue[Reply | ExecutorError | None] = asyncio.Queue()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        assert details.method == METHOD
        self.metadata = dict(details.invocation_metadata)
        return grpc.stream_stream_rpc_method_handler(self._serve, Frame.FromString, Reply.SerializeToString)

    async def _serve(self, _: Any, context: grpc.aio.ServicerContext) -> None:
        self.streams += 1
        reading = asyncio.ensure_future(self._read(context))
        try:
            while (reply := await self._replies.get()) is not None:
                if isinstance(reply, ExecutorError):
                    details = status_from_error(reply).SerializeToString()
                    await context.abort(CODE_BY_REASON[reply.reason], "no", ((STATUS_METADATA_KEY, details),))
                await context.write(reply)
        finally:
            reading.cancel()

    async def _read(self, context: grpc.aio.ServicerContext) -> None:
        while isinstance(frame := await context.read(), Frame):
            async with self._told:
                self.frames.append(frame)
                self._told.notify_all()
            if frame.HasField("hello"):
                reply = self.hello
                if isinstance(reply, Reply):
                    reply.step_id = frame.step_id
                self._replies.put_nowait(reply)

    async def received(self, kind: str, count: int = 1) -> list[Frame]:
        """The frames of a kind, once there are so many."""
        async with asyncio.timeout(30), self._told:
            await self._told.wait_for(lambda: len(self.of(kind)) >= count)
        return self.of(kind)

    def of(self, kind: str) -> list[Frame]:
        return [each for each in self.frames if each.WhichOneof("frame") == kind]

    def reply(self, reply: Reply | ExecutorError | None) -> None:
        """Send a frame, fail the stream, or end it."""
        self._replies.put_nowait(reply)

    def answer(self, frame: Frame) -> None:
        """Answer a forward frame with its items' ids."""
        answer = session_pb2.SessionForwardAnswer()
        for item in frame.forward.items:
            answer.results.add(item_id=item.item_id)
        self.reply(Reply(step_id=frame.step_id, forward=answer))


@asynccontextmanager
async def executor() -> AsyncIterator[tuple[Executor, grpc.aio.Channel]]:
    fake = Executor()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((fake,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            yield fake, channel
        finally:
            await server.stop(None)


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[Executor, SessionStream]]:
    async with executor() as (fake, channel):
        stream = SessionStream(channel, (("authorization", "Bearer t"),))
        await stream.open(Frame(hello=session_pb2.SessionHello()), FOREVER)
        yield fake, stream
        stream.end(TransportError("the test is over"))


async def step(stream: SessionStream, item_id: int = 0, within_s: float | None = None) -> Answered:
    """A forward frame in its slot."""
    deadline = Deadline.after(within_s)
    assert await stream.slot(deadline)
    frame = Frame()
    frame.forward.items.add(item_id=item_id)
    return await stream.ask(frame, deadline.remaining())


async def test_hello_comes_first_with_the_callers_credentials() -> None:
    async with opened() as (fake, stream):
        assert stream.alive
        assert [each.WhichOneof("frame") for each in fake.frames] == ["hello"]
        assert fake.metadata["authorization"] == "Bearer t"


@pytest.mark.parametrize("in_frame", [False, True], ids=["status", "frame"])
async def test_a_refused_hello_is_the_refusal(in_frame: bool) -> None:
    async with executor() as (fake, channel):
        refusal = LeaseExpired("no")
        fake.hello = Reply(error=status_from_error(refusal)) if in_frame else refusal
        stream = SessionStream(channel, ())
        with pytest.raises(LeaseExpired):
            await stream.open(Frame(hello=session_pb2.SessionHello()), FOREVER)
        stream.end(TransportError("over"))
        assert not stream.alive


async def test_answers_find_their_steps_in_whatever_order_they_come() -> None:
    async with opened() as (fake, stream):
        calls = [asyncio.create_task(step(stream, item_id)) for item_id in range(SLOTS)]
        frames = await fake.received("forward", SLOTS)
        for frame in reversed(frames):
            fake.answer(frame)
        answers = await asyncio.gather(*calls)
        assert [each.forward.results[0].item_id for each, _ in answers] == list(range(SLOTS))


async def test_step_ids_grow_in_the_order_of_the_frames() -> None:
    async with opened() as (fake, stream):
        calls = [asyncio.create_task(step(stream, item_id)) for item_id in range(50)]
        for count in range(50):
            fake.answer((await fake.received("forward", count + 1))[count])
        await asyncio.gather(*calls)
        ids = [each.step_id for each in fake.frames]
        assert ids == sorted(set(ids))
        assert [each.forward.items[0].item_id for each in fake.of("forward")] == list(range(50)), "first come first"


async def test_row_frames_come_with_the_answer_that_they_belong_to() -> None:
    async with opened() as (fake, stream):
        calls = [asyncio.create_task(step(stream, item_id)) for item_id in range(2)]
        one, two = await fake.received("forward", 2)
        for frame in (two, one, one):
            fake.reply(Reply(step_id=frame.step_id, rows=session_pb2.SessionRows(first=frame.step_id)))
        fake.answer(one)
        fake.answer(two)
        rows = [[each.first for each in (await call)[1]] for call in calls]
        assert rows == [[one.step_id] * 2, [two.step_id]]


async def test_no_more_steps_are_in_flight_than_were_granted() -> None:
    async with opened() as (fake, stream):
        calls = [asyncio.create_task(step(stream)) for _ in range(SLOTS + 2)]
        frames = await fake.received("forward", SLOTS)
        with pytest.raises(DeadlineExceeded) as late:
            await step(stream, within_s=0.01)
        assert not fate_unknown(late.value), "nothing was sent"
        assert len(fake.of("forward")) == SLOTS
        fake.answer(frames[0])
        assert len(await fake.received("forward", SLOTS + 1)) == SLOTS + 1
        for count in range(1, SLOTS + 2):
            fake.answer((await fake.received("forward", count + 1))[count])
        await asyncio.gather(*calls)


async def test_a_refused_frame_is_the_callers_error() -> None:
    async with opened() as (fake, stream):
        call = asyncio.create_task(step(stream))
        [frame] = await fake.received("forward")
        fake.reply(Reply(step_id=frame.step_id, error=status_from_error(QueueFull("no", retry_after_s=0.5))))
        with pytest.raises(QueueFull) as full:
            await call
        assert full.value.retry_after_s == 0.5


async def test_a_deadline_ends_the_wait_takes_the_step_back_and_leaves_nothing_behind() -> None:
    async with opened() as (fake, stream):
        with pytest.raises(DeadlineExceeded) as late:
            await step(stream, within_s=0.02)
        assert fate_unknown(late.value)
        [frame], [cancel] = await fake.received("forward"), await fake.received("cancel")
        assert cancel.cancel.step_id == frame.step_id
        assert len(stream._steps) == 1, "the executor has not let go of it, so it still counts"
        fake.reply(Reply(step_id=frame.step_id, error=status_from_error(QueueFull("late"))))
        await until_answered(fake, stream)
        assert not stream._steps


async def test_a_cancelled_caller_takes_the_step_back() -> None:
    async with opened() as (fake, stream):
        call = asyncio.create_task(step(stream))
        [frame] = await fake.received("forward")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        [cancel] = await fake.received("cancel")
        assert cancel.cancel.step_id == frame.step_id
        fake.answer(frame)
        await until_answered(fake, stream)
        assert not stream._steps


async def until_answered(fake: Executor, stream: SessionStream) -> None:
    """Go once around: what was answered before has arrived."""
    call = asyncio.create_task(step(stream))
    before = len(fake.of("forward"))
    fake.answer((await fake.received("forward", before + 1))[-1])
    await call


async def test_a_stream_whose_every_step_was_given_up_is_given_up_itself() -> None:
    async with opened() as (_, stream):
        for _ in range(SLOTS):
            with pytest.raises(DeadlineExceeded):
                await step(stream, within_s=0.01)
        assert stream.alive
        with pytest.raises(DeadlineExceeded, match="nothing was sent"):
            await step(stream, within_s=0.01)
        assert not stream.alive, "an executor that answers nothing does not hold the client"


@pytest.mark.parametrize("end", [None, Draining("no"), LeaseExpired("no")], ids=str)
async def test_when_the_stream_ends_nobody_knows_what_became_of_the_steps(end: ExecutorError | None) -> None:
    lost = Draining if isinstance(end, Draining) else TransportError
    async with opened() as (fake, stream):
        calls = [asyncio.create_task(step(stream)) for _ in range(SLOTS)]
        waiting = asyncio.create_task(stream.slot(FOREVER))
        await fake.received("forward", SLOTS)
        fake.reply(end)
        for failure in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(failure, lost)
            assert fate_unknown(failure)
        assert await waiting is False, "who had sent nothing opens another"
        assert not stream.alive
        assert not stream._steps
        with pytest.raises(lost):
            await stream.ask(Frame(keep_alive=session_pb2.SessionKeepAlive()), None)


async def test_an_answer_to_nothing_is_nobodys() -> None:
    async with opened() as (fake, stream):
        fake.reply(Reply(step_id=999, forward=session_pb2.SessionForwardAnswer()))
        fake.reply(Reply(step_id=999, rows=session_pb2.SessionRows()))
        await until_answered(fake, stream)


async def test_closing_says_so_waits_for_the_goodbye_and_ends_what_is_in_flight() -> None:
    async with opened() as (fake, stream):
        call = asyncio.create_task(step(stream))
        await fake.received("forward")
        closing = asyncio.create_task(stream.close(FOREVER, release_sequences=True))
        [frame] = await fake.received("close")
        assert frame.close.release_sequences
        assert not closing.done()
        fake.reply(Reply(step_id=frame.step_id, goodbye=session_pb2.SessionGoodbye(released_sequences=5)))
        assert await closing == 5
        with pytest.raises(TransportError, match="closed"):
            await call


async def test_closing_does_not_wait_for_ever() -> None:
    async with opened() as (_, stream):
        with pytest.raises(DeadlineExceeded):
            await stream.close(Deadline.after(0.01), release_sequences=False)
        assert not stream.alive
