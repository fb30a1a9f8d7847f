"""One session stream against a server that answers when it is told to: order, bounds, deadlines, cancels and ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from ferrum_rpc.client.retry import Deadline, fate_unknown
from ferrum_rpc.client.session.frames import UNSHARED, FrameCapacity, StreamRequest
from ferrum_rpc.client.session.stream import METHOD, SessionStream
from ferrum_rpc.client.state import Item, SequenceState
from ferrum_rpc.client.transport import Forwarded, outcomes_of
from ferrum_rpc.core import FullLogits, Greedy, HandleRef, OutputKind, OutputSpec, Positions
from ferrum_rpc.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    ExecutorError,
    InvalidRequest,
    LeaseExpired,
    QueueFull,
    TransportError,
)
from ferrum_rpc.executor.v1 import forward_pb2, session_pb2, types_pb2
from ferrum_rpc.wire.status import CODE_BY_REASON, STATUS_METADATA_KEY, status_from_error

FOREVER = Deadline(None)
SLOTS = 3
ROOM = FrameCapacity(items=8, tokens=64, row_bytes=256, request_bytes=1 << 16, vocab_size=256, hidden_size=32)

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
        self._replies: asyncio.Queue[Reply | ExecutorError | grpc.StatusCode | None] = asyncio.Queue()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        assert details.method == METHOD
        self.metadata = dict(details.invocation_metadata)
        return grpc.stream_stream_rpc_method_handler(self._serve, Frame.FromString, Reply.SerializeToString)

    async def _serve(self, _: Any, context: grpc.aio.ServicerContext) -> None:
        self.streams += 1
        reading = asyncio.ensure_future(self._read(context))
        try:
            while (reply := await self._replies.get()) is not None:
                if isinstance(reply, grpc.StatusCode):
                    await context.abort(reply)
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

    def reply(self, reply: Reply | ExecutorError | grpc.StatusCode | None) -> None:
        """Send a frame, fail the stream, or end it."""
        self._replies.put_nowait(reply)

    def answer(self, frame: Frame, refused: dict[int, ExecutorError] | None = None) -> None:
        """Answer a forward frame: every item stands at its id, or is ``refused``."""
        answer = session_pb2.SessionForwardAnswer()
        for item in frame.forward.items:
            if refused and item.item_id in refused:
                answer.results.add(item_id=item.item_id, error=status_from_error(refused[item.item_id]))
            else:
                answer.results.add(item_id=item.item_id).output.handle.seq_len = item.item_id
        self.reply(Reply(step_id=frame.step_id, forward=answer))

    def refuse(self, frame: Frame, error: ExecutorError) -> None:
        """Refuse a whole frame."""
        self.reply(Reply(step_id=frame.step_id, error=status_from_error(error)))


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
async def opened(capacity: FrameCapacity = UNSHARED) -> AsyncIterator[tuple[Executor, SessionStream]]:
    async with executor() as (fake, channel):
        stream = SessionStream(channel, (("authorization", "Bearer t"),))
        stream.capacity = capacity
        await stream.open(Frame(hello=session_pb2.SessionHello()), FOREVER)
        yield fake, stream
        stream.end(TransportError("the test is over"))


async def submitted(stream: SessionStream, request: StreamRequest[Any], within_s: float | None = None) -> Any:
    result = await stream.submit(request, Deadline.after(within_s))
    assert result is not None
    return result


async def step(stream: SessionStream, item_id: int = 0, within_s: float | None = None) -> Forwarded:
    """A forward frame of one's own."""
    item, frame = an_item(item_id), Frame()
    frame.forward.items.append(item.proto)
    forwarded: Forwarded = await submitted(stream, StreamRequest(frame=frame, items=[item]), within_s)
    return forwarded


def an_item(item_id: int, *, tokens: int = 1, kind: OutputKind = Greedy(), sequence: bytes = b"") -> Item:  # noqa: B008
    state = SequenceState(forward_pb2.CreateOptions(), handle=HandleRef(sequence or bytes([item_id]) * 8, 1, 1))
    return state.item(item_id, [7] * tokens, OutputSpec(Positions.LAST, kind))


def stands_at(forwarded: Forwarded) -> int:
    [output] = forwarded.outcomes
    assert not isinstance(output, ExecutorError)
    return output.handle.seq_len


def feeding(stream: SessionStream, item: Item, within_s: float | None = None) -> asyncio.Task[int]:
    """An item that may share a frame; gives where it stands."""

    async def fed() -> int:
        return stands_at(await submitted(stream, StreamRequest(items=[item]), within_s))

    return asyncio.ensure_future(fed())


def ids(frame: Frame) -> list[int]:
    return [each.item_id for each in frame.forward.items]


@asynccontextmanager
async def busy(items: Sequence[Item], within_s: float | None = None) -> AsyncIterator[Any]:
    """A stream in which one frame is in flight and items wait for it to be answered."""
    async with opened(ROOM) as (fake, stream):
        first = feeding(stream, an_item(99))
        [held] = await fake.received("forward")
        calls = [feeding(stream, item, within_s) for item in items]
        await asyncio.sleep(0)
        fake.answer(held)
        await first
        yield fake, stream, calls


async def test_hello_comes_first_with_the_callers_credentials() -> None:
    async with opened() as (fake, stream):
        assert stream.over is None
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
        assert stream.over is not None


async def test_answers_find_their_steps_in_whatever_order_they_come() -> None:
    async with opened() as (fake, stream):
        calls = [asyncio.create_task(step(stream, item_id)) for item_id in range(SLOTS)]
        frames = await fake.received("forward", SLOTS)
        for frame in reversed(frames):
            fake.answer(frame)
        assert list(map(stands_at, await asyncio.gather(*calls))) == list(range(SLOTS))


async def test_step_ids_grow_in_the_order_of_the_frames() -> None:
    async with opened() as (fake, stream):
        calls = [asyncio.create_task(step(stream, item_id)) for item_id in range(50)]
        for count in range(50):
            fake.answer((await fake.received("forward", count + 1))[count])
        await asyncio.gather(*calls)
        ids = [each.step_id for each in fake.frames]
        assert ids == sorted(set(ids))
        assert [each.forward.items[0].item_id for each in fake.of("forward")] == list(range(50)), "first come first"


def logits(rows: int, value: float | None = None) -> types_pb2.Tensor:
    """A tensor [rows, 1]; without a value, its announcement."""
    data = b"" if value is None else np.full(rows, value, np.float32).tobytes()
    return types_pb2.Tensor(dtype=types_pb2.D_TYPE_F32, shape=[rows, 1], data=data)


async def test_row_frames_come_with_the_answer_that_they_belong_to() -> None:
    async with opened() as (fake, stream):
        calls = [asyncio.create_task(step(stream, item_id)) for item_id in range(2)]
        one, two = await fake.received("forward", 2)
        for frame, first in ((two, 0), (one, 0), (one, 1)):
            rows = session_pb2.SessionRows(field=1, first=first, rows=logits(1, frame.step_id))
            fake.reply(Reply(step_id=frame.step_id, rows=rows))
        for frame, count in ((one, 2), (two, 1)):
            answer = session_pb2.SessionForwardAnswer()
            answer.results.add(item_id=frame.forward.items[0].item_id).output.handle.seq_len = 1
            answer.row_blocks.add().logits.logits.CopyFrom(logits(count))
            fake.reply(Reply(step_id=frame.step_id, forward=answer))
        blocks = [(await call).blocks[0]["logits"].tolist() for call in calls]
        assert blocks == [[[one.step_id]] * 2, [[two.step_id]]]


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


@pytest.mark.parametrize("how", ["deadline", "cancelled"])
async def test_who_gives_up_takes_the_step_back_and_leaves_nothing_behind(how: str) -> None:
    async with opened() as (fake, stream):
        call = asyncio.create_task(step(stream, within_s=0.02 if how == "deadline" else None))
        [frame] = await fake.received("forward")
        if how == "cancelled":
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        else:
            with pytest.raises(DeadlineExceeded) as late:
                await call
            assert fate_unknown(late.value)
        [cancel] = await fake.received("cancel")
        assert cancel.cancel.step_id == frame.step_id
        assert unanswered(stream) == 1, "the executor has not let go of it, so it still counts"
        fake.refuse(frame, QueueFull("late"))
        await until_answered(fake, stream)
        assert not unanswered(stream)


def unanswered(stream: SessionStream) -> int:
    """Steps that the executor has not let go of."""
    return len(stream._steps)


async def until_answered(fake: Executor, stream: SessionStream) -> None:
    """Go once around: what was answered before has arrived."""
    call = asyncio.create_task(step(stream))
    before = len(fake.of("forward"))
    fake.answer((await fake.received("forward", before + 1))[-1])
    await call


async def test_a_stream_whose_every_step_was_given_up_is_given_up_itself() -> None:
    async with opened() as (fake, stream):
        calls = [asyncio.create_task(step(stream)) for _ in range(SLOTS)]
        await fake.received("forward", SLOTS)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        assert unanswered(stream) == SLOTS and stream.over is None
        with pytest.raises(DeadlineExceeded, match="nothing was sent"):
            await step(stream, within_s=0.01)
        assert stream.over is not None, "an executor that answers nothing does not hold the client"


@pytest.mark.parametrize("end", [None, Draining("no"), LeaseExpired("no")], ids=str)
async def test_when_the_stream_ends_nobody_knows_what_became_of_the_steps(end: ExecutorError | None) -> None:
    lost = Draining if isinstance(end, Draining) else TransportError
    async with opened() as (fake, stream):
        calls = [asyncio.create_task(step(stream)) for _ in range(SLOTS)]
        await fake.received("forward", SLOTS)
        waiting = asyncio.create_task(stream.submit(StreamRequest(frame=Frame()), FOREVER))
        await asyncio.sleep(0)
        fake.reply(end)
        for failure in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(failure, lost)
            assert fate_unknown(failure)
        assert await waiting is None, "who had sent nothing opens another"
        assert stream.over is not None
        assert not unanswered(stream)
        with pytest.raises(lost):
            await stream.control(Frame(keep_alive=session_pb2.SessionKeepAlive()), FOREVER)


async def test_a_stream_that_the_peer_resets_was_not_cancelled_by_this_client() -> None:
    async with opened() as (fake, stream):
        call = asyncio.create_task(step(stream))
        await fake.received("forward")
        fake.reply(grpc.StatusCode.CANCELLED)
        with pytest.raises(TransportError) as reset:
            await call
        assert reset.value.metadata["grpc_code"] == "UNAVAILABLE", "it may be sent again, on another stream"
        assert fate_unknown(reset.value)


async def test_an_answer_to_nothing_is_nobodys() -> None:
    async with opened() as (fake, stream):
        fake.reply(Reply(step_id=999, forward=session_pb2.SessionForwardAnswer()))
        fake.reply(Reply(step_id=999, rows=session_pb2.SessionRows()))
        await until_answered(fake, stream)


async def test_closing_says_so_waits_for_the_goodbye_and_ends_what_is_in_flight() -> None:
    async with opened() as (fake, stream):
        call = asyncio.create_task(step(stream))
        await fake.received("forward")
        closing = asyncio.create_task(stream.close(FOREVER))
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
            await stream.close(Deadline.after(0.01))
        assert stream.over is not None


# --- items that share a frame ---------------------------------------------------------------------------------------


async def test_what_is_ready_in_one_turn_goes_in_one_frame_and_each_hears_its_own_answer() -> None:
    async with opened(ROOM) as (fake, stream):
        calls = [feeding(stream, an_item(number)) for number in range(1, 6)]
        [frame] = await fake.received("forward")
        assert ids(frame) == [1, 2, 3, 4, 5]
        assert not frame.forward.HasField("timeout")
        fake.answer(frame, {3: InvalidRequest("bad")})
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [each for each in outcomes if not isinstance(each, InvalidRequest)] == [1, 2, 4, 5]
        assert isinstance(outcomes[2], InvalidRequest)


@pytest.mark.parametrize(
    ("items", "frames"),
    [
        ([an_item(number) for number in range(1, 11)], [8, 2]),
        ([an_item(number, tokens=30) for number in range(1, 4)], [2, 1]),
        ([an_item(1, sequence=b"same"), an_item(2), an_item(3, sequence=b"same")], [2, 1]),
        ([an_item(1), an_item(2, tokens=99), an_item(3)], [1, 1, 1]),
    ],
    ids=["items", "tokens", "sequence", "one above the limit"],
)
async def test_a_frame_holds_what_the_executor_takes_in_one(items: list[Item], frames: list[int]) -> None:
    async with busy(items) as (fake, _, calls):
        for count in range(len(frames)):
            fake.answer((await fake.received("forward", count + 2))[count + 1])
        await asyncio.gather(*calls)
        assert [len(ids(each)) for each in fake.of("forward")[1:]] == frames


async def test_large_rows_go_alone_and_leave_a_place_to_the_small() -> None:
    async with opened(ROOM) as (fake, stream):
        large = [feeding(stream, an_item(number, kind=FullLogits())) for number in range(1, SLOTS + 1)]
        await fake.received("forward", SLOTS - 1)
        small = feeding(stream, an_item(50))
        frames = await fake.received("forward", SLOTS)
        assert [ids(each) for each in frames] == [[1], [2], [50]]
        for frame in frames:
            fake.answer(frame)
        assert await small == 50
        fake.answer((await fake.received("forward", SLOTS + 1))[-1])
        await asyncio.gather(*large)


@pytest.mark.parametrize("refusal", [QueueFull("full"), InvalidRequest("twice"), Cancelled("no")], ids=repr)
async def test_a_shared_frame_that_is_refused_has_its_items_asked_for_one_by_one(refusal: ExecutorError) -> None:
    async with busy([an_item(number) for number in (1, 2, 3)]) as (fake, _, calls):
        fake.refuse((await fake.received("forward", 2))[1], refusal)
        alone = (await fake.received("forward", 5))[2:]
        assert [ids(each) for each in alone] == [[1], [2], [3]]
        fake.answer(alone[0])
        fake.refuse(alone[1], refusal)
        fake.answer(alone[2])
        one, two, three = await asyncio.gather(*calls, return_exceptions=True)
        assert (one, three) == (1, 3)
        assert type(two) is type(refusal)


async def test_a_full_line_of_steps_is_waited_for_together() -> None:
    async with busy([an_item(1), an_item(2)]) as (fake, _, calls):
        full = QueueFull("full", metadata={"steps_in_flight": 3})
        fake.refuse((await fake.received("forward", 2))[1], full)
        again = (await fake.received("forward", 3))[2]
        assert ids(again) == [1, 2]
        fake.answer(again)
        assert await asyncio.gather(*calls) == [1, 2]


async def test_a_frame_has_the_deadline_of_its_most_hurried_item_and_cuts_nobody_else_short() -> None:
    async with opened(ROOM) as (fake, stream):
        calls = [feeding(stream, an_item(number), within_s) for number, within_s in ((1, 60), (2, 50), (3, 1000))]
        [frame] = await fake.received("forward")
        assert ids(frame) == [1, 2], "the patient one has a frame of its own"
        assert frame.forward.timeout.seconds == 49
        late = DeadlineExceeded("the deadline passed before the step began")
        fake.answer(frame, {1: late, 2: late})
        seconds = {}
        for each in (await fake.received("forward", 4))[1:]:
            [number] = ids(each)
            seconds[number] = each.forward.timeout.seconds
            fake.answer(each, {2: late})
        assert seconds == {1: 59, 2: 49, 3: 999}
        one, two, three = await asyncio.gather(*calls, return_exceptions=True)
        assert (one, three) == (1, 3)
        assert isinstance(two, DeadlineExceeded)


async def test_who_gives_up_takes_the_frame_back_and_the_others_are_asked_for_again() -> None:
    async with busy([an_item(number) for number in (1, 2, 3)]) as (fake, _, calls):
        shared = (await fake.received("forward", 2))[1]
        calls[1].cancel()
        [cancel] = await fake.received("cancel")
        assert cancel.cancel.step_id == shared.step_id
        fake.refuse(shared, Cancelled("not begun"))
        alone = (await fake.received("forward", 4))[2:]
        assert [ids(each) for each in alone] == [[1], [3]], "nothing is sent for who gave up"
        for frame in alone:
            fake.answer(frame)
        assert await asyncio.gather(calls[0], calls[2]) == [1, 3]
        assert calls[1].cancelled()


async def test_who_gives_up_on_a_step_that_runs_leaves_it_to_the_others() -> None:
    async with busy([an_item(number) for number in (1, 2, 3)]) as (fake, stream, calls):
        shared = (await fake.received("forward", 2))[1]
        calls[0].cancel()
        calls[2].cancel()
        await fake.received("cancel")
        fake.answer(shared)
        assert await calls[1] == 2
        assert len(fake.of("forward")) == 2
        assert len(fake.of("cancel")) == 1
        assert not unanswered(stream)


async def test_who_gives_up_while_waiting_was_never_sent() -> None:
    async with opened(ROOM) as (fake, stream):
        first = feeding(stream, an_item(1))
        [held] = await fake.received("forward")
        second, third = feeding(stream, an_item(2)), feeding(stream, an_item(3))
        await asyncio.sleep(0)
        second.cancel()
        fake.answer(held)
        await first
        frame = (await fake.received("forward", 2))[1]
        assert ids(frame) == [3]
        fake.answer(frame)
        assert await third == 3
        assert not fake.of("cancel")


async def test_an_item_that_was_sent_before_keeps_nobody_waiting() -> None:
    async with busy([]) as (fake, stream, _):
        resent: StreamRequest[Any] = StreamRequest(items=[an_item(1)])
        resent.resent = True
        again = asyncio.ensure_future(submitted(stream, resent))
        calls = [again, feeding(stream, an_item(2)), feeding(stream, an_item(3))]
        frames = (await fake.received("forward", 3))[1:]
        assert [ids(each) for each in frames] == [[1], [2, 3]]
        for frame in frames:
            fake.answer(frame)
        await asyncio.gather(*calls)


async def test_an_answer_to_other_items_is_nobodys() -> None:
    async with busy([an_item(1), an_item(2)]) as (fake, _, calls):
        shared = (await fake.received("forward", 2))[1]
        shared.forward.items[0].item_id = 77
        fake.answer(shared)
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, TransportError)
            assert fate_unknown(outcome)


async def test_who_is_answered_asks_again_together_with_those_who_wait() -> None:
    async with opened(ROOM) as (fake, stream):

        async def crowd(number: int) -> list[int]:
            return [await asyncio.wait_for(feeding(stream, an_item(number)), 30) for _ in range(2)]

        early = [asyncio.ensure_future(crowd(number)) for number in (1, 2)]
        [first] = await fake.received("forward")
        late = [asyncio.ensure_future(crowd(number)) for number in (3, 4)]
        for _ in range(5):
            await asyncio.sleep(0)
        fake.answer(first)
        second = (await fake.received("forward", 2))[1]
        assert sorted(ids(second)) == [1, 2, 3, 4], "two groups have become one"
        fake.answer(second)
        fake.answer((await fake.received("forward", 3))[2])
        assert await asyncio.gather(*early, *late) == [[each, each] for each in (1, 2, 3, 4)]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("named", [True, False], ids=["revision 6", "older"])
def test_results_are_taken_by_the_place_that_they_name(order: tuple[int, ...], named: bool) -> None:
    """An older executor names none, and keeps the order: results in another one are those of other items."""
    items = [an_item(10 + place) for place in range(3)]
    results = [forward_pb2.ItemResult(item_id=10 + place, item_index=place if named else 0) for place in order]
    for place, result in zip(order, results, strict=True):
        result.output.handle.seq_len = place
    if not named and order != (0, 1, 2):
        with pytest.raises(TransportError, match="other items"):
            outcomes_of(results, items)
        return
    outcomes = outcomes_of(results, items)
    assert [each.handle.seq_len for each in outcomes if isinstance(each, forward_pb2.ForwardOutput)] == [0, 1, 2]
