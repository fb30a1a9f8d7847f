"""The scheduler as a library: requests at any time, each with its own output, stops, priority, tenant and end."""

from __future__ import annotations

import asyncio
import json
import math
import random
import threading
from collections.abc import Sequence as ListOf
from contextlib import asynccontextmanager
from typing import Any

import pytest

from ferrum_rpc.client import (
    CALLER_ERROR,
    Answer,
    BatchResults,
    CacheMode,
    ContextLengthExceeded,
    ExecutorClient,
    ExecutorError,
    FinishReason,
    GrammarKind,
    Greedy,
    InvalidRequest,
    Item,
    KvBlocksExhausted,
    QueueFull,
    Sample,
    TopTokens,
    TransportError,
)
from ferrum_rpc.client.fleet import Members
from ferrum_rpc.client.session.frames import Frame, StreamRequest, frame_of
from ferrum_rpc.client.session.stream import SessionStream
from ferrum_rpc.executor.v1.session_pb2 import SessionResponse
from ferrum_rpc.scheduler import ExecutorGone, Observer, Request, RequestEnd, Scheduler, Stage, TextRequest, TokenStream
from ferrum_rpc.scheduler.queues import RequestQueues
from ferrum_rpc.scheduler.router import Router
from ferrum_rpc.scheduler.scheduler import in_a_session
from tests.support.inside import live_requests
from tests.support.proxy import proxied
from tests.support.scheduling import (
    SAMPLED,
    assert_nothing_is_left,
    by_the_client,
    demo,
    emptied,
    identity,
    prompts,
    sampled,
)
from tests.support.serving import Served
from tests.support.states import with_states
from tests.support.waiting import until

PROMPT = list(b"In the beginning God created the heaven and the earth. ")


def asked(prompt: list[int], max_tokens: int = 24, **more: Any) -> TextRequest:
    return TextRequest(prompt=prompt, max_tokens=max_tokens, **more)


class Letters:
    """A token is a letter."""

    def decode(self, tokens: Any) -> str:
        return "".join(chr(0x4E00 + token) for token in tokens)


async def test_a_prompt_joins_while_the_runs_of_others_go_on() -> None:
    """The first text's runs are in flight for its whole life: the second one begins and ends within it."""
    async with identity(kv_blocks=512) as served, Scheduler(served.target, run_tokens=4) as scheduler:
        long = scheduler.submit(asked([1, 2, 3], 200, output=SAMPLED, stop=()))
        await anext(long)
        short = scheduler.submit(asked([4, 5], 8, output=SAMPLED, stop=()))
        assert len(await short.all()) == 8
        assert long.end is None and len(await long.all()) == 199


class Noting(ExecutorClient):
    """Notes the step with which each run of ``noted`` tokens ends, and that many tokens it has."""

    noted = 8

    def __init__(self, target: str) -> None:
        super().__init__(target, session=True, steps_in_flight=64, tokens_ahead=True)
        self.ends: list[int] = []

    async def forward(self, items: ListOf[Item], **more: Any) -> BatchResults:
        results = await super().forward(items, **more)
        for item, answer in zip(items, results, strict=True):
            if item.run is not None and isinstance(answer, Answer) and answer.timing is not None:
                self.ends += [answer.timing.step] * (len(answer.tokens) == self.noted)
        return results


async def test_runs_of_texts_that_arrive_at_random_end_together() -> None:
    """So that they are answered together, and the next ones are sent together. Each step waits until the answers of the
    one before are written: an answer has the time of its last step only."""
    loop, dice, clients = asyncio.get_running_loop(), random.Random(2), list[Noting]()

    async def turns() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    def stage(name: str) -> None:
        if name == "forward":
            asyncio.run_coroutine_threadsafe(turns(), loop).result(30)

    def connect(target: str) -> ExecutorClient:
        clients.append(Noting(target))
        return clients[-1]

    async with (
        identity(kv_blocks=512, stage=stage) as served,
        Scheduler(served.target, connect=connect, run_tokens=Noting.noted) as scheduler,
    ):

        async def one(number: int) -> None:
            for _ in range(dice.randrange(400)):
                await asyncio.sleep(0)
            assert len(await scheduler.submit(asked([number + 1], 120, output=sampled(number), stop=())).all()) == 120

        await asyncio.gather(*map(one, range(8)))
        assert served.server.state.watchers == 0, "a single executor leaves no choice to which its prefixes matter"
    ends = [end for client in clients for end in client.ends]
    together = sum(end % (Noting.noted // 2) == 0 for end in ends)
    assert len(ends) > 80 and together > 0.75 * len(ends)


async def test_runs_that_are_sent_late_share_frames_and_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a scheduler that is busy: its executor waits for each next run."""
    frames = list[int]()

    def counted(requests: ListOf[StreamRequest[Any]], now: float) -> Frame:
        frames.append(len(requests) if requests[0].items else 0)
        return frame_of(requests, now)

    monkeypatch.setattr("ferrum_rpc.client.session.stream.frame_of", counted)
    monkeypatch.setattr("ferrum_rpc.scheduler.runs.MARGIN_S", -0.1)
    texts = [[number + 1] for number in range(8)]
    async with identity(kv_blocks=512) as served:
        expected = [await by_the_client(served, text, sampled(number), 48) for number, text in enumerate(texts)]
        frames.clear()
        async with Scheduler(served.target, run_tokens=8) as scheduler:
            found, streams = list[list[int]](), list[TokenStream]()
            for at, text in enumerate(texts):
                streams.append(scheduler.submit(asked(text, 48, output=sampled(at), stop=())))
                found.append([(await anext(streams[at])).token])
            for tokens, stream in zip(found, streams, strict=True):
                tokens += [each.token for each in await stream.all()]
            assert found == expected
        await assert_nothing_is_left(served)
    sent = [each for each in frames if each]
    assert sum(sent) > 48 and len(sent) < 0.4 * sum(sent)


@pytest.mark.parametrize("first", ["the answer of the prompt", "tokens of the run behind it"])
async def test_tokens_of_a_run_arrive_before_it_ends(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step within the run waits until the reader has the tokens of the steps before it."""
    read, waits, held = threading.Event(), list[bool](), list[SessionResponse]()
    receive, tokens_came = SessionStream._receive, False

    def tokens_first(stream: SessionStream, response: SessionResponse) -> None:
        nonlocal tokens_came
        if response.HasField("forward") and not tokens_came:
            held.append(response)
            return
        tokens_came |= response.HasField("tokens")
        for each in (response, *held):
            receive(stream, each)
        held.clear()

    if first != "the answer of the prompt":
        monkeypatch.setattr(SessionStream, "_receive", tokens_first)

    def stage(name: str) -> None:
        if name == "forward" and served.server.state.engine.counters.steps == 12:
            waits.append(read.wait(10))

    async with identity(kv_blocks=512, stage=stage) as served, Scheduler(served.target, run_tokens=32) as scheduler:
        stream = scheduler.submit(asked([1, 2, 3], 30, output=SAMPLED, stop=()))
        tokens = []
        async for each in stream:
            tokens.append(each.token)
            if len(tokens) == 8:
                read.set()
        monkeypatch.undo()
        assert waits == [True] and tokens == await by_the_client(served, [1, 2, 3], SAMPLED, 30)
        assert scheduler.counts.sequences == 2, "a prompt and one run"


async def test_a_stop_token_a_stop_string_and_the_context_end_a_text_and_are_reported() -> None:
    async with emptied(kv_blocks=512, max_context=60) as served:
        whole = await by_the_client(served, [1, 2, 3], SAMPLED)
        first = whole[9]
        at = whole.index(first)
        letters = Letters().decode(whole)
        async with Scheduler(served.target, run_tokens=8, tokenizer=Letters()) as scheduler:
            stream = scheduler.submit(asked([1, 2, 3], output=SAMPLED, stop=[first]))
            tokens = [each async for each in stream]
            assert [each.token for each in tokens] == whole[: at + 1]
            assert (tokens[-1].finish_reason, stream.stop, stream.end) == (FinishReason.STOP, first, RequestEnd.STOP)
            assert stream.token_ids == whole[:at] and stream.text == letters[:at]

            wanted = letters[5:7]
            stream = scheduler.submit(asked([1, 2, 3], output=SAMPLED, stop=[], stop_strings=["none", wanted]))
            tokens = [each async for each in stream]
            at = letters.index(wanted)
            assert [each.token for each in tokens] == whole[: at + 2] == stream.token_ids
            assert (stream.text, stream.stop) == (letters[:at], wanted)
            assert tokens[-1].finish_reason is FinishReason.STOP

            stream = scheduler.submit(asked(list(range(50)), 100, output=SAMPLED, stop=()))
            tokens = await stream.all()
            assert len(tokens) == 11 and tokens[-1].finish_reason is FinishReason.CONTEXT


@pytest.mark.parametrize("output", [Greedy(), SAMPLED], ids=["greedy", "sampled"])
async def test_no_stop_is_chosen_before_min_tokens_and_texts_are_those_of_the_client(output: Greedy | Sample) -> None:
    async with identity(kv_blocks=512) as served:
        stops = [*sorted(set(await by_the_client(served, [1, 2, 3], output))), 7, 99]
        async with ExecutorClient(served.target) as client, client.sequence() as sequence:
            stream = sequence.stream([1, 2, 3], max_tokens=40, min_tokens=11, output=output, stop=stops)
            expected = [(each.token, each.finish_reason) async for each in stream]
        assert len(expected) > 11 and not {token for token, _ in expected[:11]} & set(stops)
        async with Scheduler(served.target, run_tokens=4) as scheduler:
            request = asked([1, 2, 3], 40, min_tokens=11, output=output, stop=stops)
            found = [(each.token, each.finish_reason) async for each in scheduler.submit(request)]
        assert found == expected


async def test_log_probabilities_and_cached_tokens_come_with_the_tokens() -> None:
    output = Greedy(logprob=True)
    async with identity(kv_blocks=512) as served:
        async with ExecutorClient(served.target) as client, client.sequence(cache_mode=CacheMode.BYPASS) as sequence:
            expected = (await sequence.prefill(list(range(20)), output)).logprobs[0]
        async with Scheduler(served.target) as scheduler:
            for cached in (0, 16):
                tokens = await (stream := scheduler.submit(asked(list(range(20)), 3, output=output, stop=()))).all()
                assert tokens[0].logprob == pytest.approx(expected)
                assert all(each.logprob is not None for each in tokens)
                assert [each.cached_tokens for each in tokens] == [stream.cached_tokens, 0, 0] == [cached, 0, 0]


@pytest.mark.parametrize(("blocks", "slots"), [(512, 0), (40, 0), (512, 5), (512, 3), (512, 1)])
async def test_texts_of_one_prompt_share_it_and_have_a_seed_each(blocks: int, slots: int) -> None:
    """Four of them and their prompt need five slots. With one, each is computed as a prompt of its own."""
    states = {"made": with_states(slots)} if slots else {}
    prompt = list(range(30))
    async with emptied(kv_blocks=512) as served:
        expected = [await by_the_client(served, prompt, sampled(number)) for number in range(4)]
    async with identity(kv_blocks=blocks, **states) as served, Scheduler(served.target, run_tokens=5) as scheduler:
        streams = scheduler.submit_choices(asked(prompt, output=sampled(0), stop=()), 4)
        found = await asyncio.gather(*(each.all() for each in streams))
        assert [[each.token for each in tokens] for tokens in found] == expected
        if blocks == 512 and slots != 1:
            assert scheduler.counts.prompt_tokens == 29 + 4, "the prompt is computed once"
        [single] = scheduler.submit_choices(asked([7], 3, stop=()), 1)
        assert len(await single.all()) == 3
        assert [len(await each.all()) for each in scheduler.submit_choices(asked([7], 3, stop=()), 2)] == [3, 3]


async def test_a_cancelled_text_ends_within_a_step_and_leaves_nothing() -> None:
    """The step in which the second text is cancelled is held until the cancel is sent: its run ends with it."""
    async with emptied(kv_blocks=512) as served, Scheduler(served.target, run_tokens=32) as scheduler:
        kept = scheduler.submit(asked([1, 2, 3], 300, output=SAMPLED, stop=()))
        left = scheduler.submit(asked([4, 5], 300, output=SAMPLED, stop=()))
        async for _ in left:
            if len(left.token_ids) > 8:
                break
        left.cancel()
        assert left.end is RequestEnd.CANCELLED
        async for _ in kept:
            if len(served.server.state.handles) == 1:
                break
        assert len(served.server.state.handles) == 1 and kept.end is None
        read = [each.token async for each in left]
        assert all(each is None for each in [token.finish_reason async for token in left])
        assert len(read) <= len(left.token_ids)
        async with kept:
            pass
        assert kept.end is RequestEnd.CANCELLED


async def test_texts_that_leave_while_a_step_is_planned_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text gives up its blocks to the others, and meanwhile all are cancelled: none begins again."""
    preempt, preempted = RequestQueues.preempt, list[Request]()

    async def and_all_leave(queues: RequestQueues, request: Request) -> None:
        preempted.append(request)
        await preempt(queues, request)
        for each in texts:
            each.cancel()

    monkeypatch.setattr(RequestQueues, "preempt", and_all_leave)
    async with identity(kv_blocks=30) as served, Scheduler(served.target, run_tokens=0) as scheduler:
        texts = [scheduler.submit(asked([at, 2, 3], 300, output=SAMPLED, stop=())) for at in range(3)]
        await asyncio.gather(*(each.all() for each in texts))
        assert preempted and {each.end for each in texts} == {RequestEnd.CANCELLED}
        await until(lambda: not len(served.server.state.handles))
        assert len(await scheduler.submit(asked([1, 2, 3])).all()) == 24
        await until(lambda: not len(served.server.state.handles))


async def test_a_deadline_ends_a_text_where_it_is() -> None:
    async with identity(kv_blocks=512) as served, Scheduler(served.target, run_tokens=4) as scheduler:
        late = scheduler.submit(asked([1, 2, 3], 5000, output=SAMPLED, stop=(), deadline_s=0.3))
        tokens = await late.all()
        assert late.end is RequestEnd.DEADLINE and len(tokens) < 5000
        assert await scheduler.submit(asked([1, 2, 3], 4, deadline_s=60.0, stop=())).all()
        assert not live_requests(scheduler)


@asynccontextmanager
async def one_at_a_time(served: Served, order: list[str], **options: Any) -> Any:
    """A scheduler that runs one text at a time. ``order``: the names of the texts as they begin."""

    class Begins(Observer):
        def changed(self, request: Request) -> None:
            if request.stage is Stage.RUNNING and request.executor and not request.cached:
                order.append(chr(request.prompt[0]))

    async with Scheduler(served.target, max_running=1, observer=Begins(), **options) as scheduler:
        blocker = scheduler.submit(asked([1], 8, stop=()))
        await anext(blocker)
        order.clear()
        yield scheduler


async def test_the_last_slots_are_for_tenants_that_have_no_text_running() -> None:
    async with emptied(kv_blocks=1024, made=with_states(16)) as served, Scheduler(served.target) as scheduler:
        many = [scheduler.submit(asked([1, 2, 3], 200, tenant="a", output=SAMPLED, stop=())) for _ in range(17)]
        await anext(many[0])
        assert len(await scheduler.submit(asked([4, 5], 8, tenant="b", stop=())).all()) == 8
        assert not any(each.end for each in many)


async def test_tenants_take_turns_by_their_weights_however_much_one_sends() -> None:
    order: list[str] = []
    async with identity(kv_blocks=512) as served, one_at_a_time(served, order, weights={"b": 2.0}) as scheduler:
        streams = [scheduler.submit(asked([ord("a")], 9, tenant="a", stop=())) for _ in range(8)]
        streams += [scheduler.submit(asked([ord("b")], 9, tenant="b", stop=())) for _ in range(8)]
        await asyncio.gather(*(each.all() for each in streams))
        first = "".join(order[:9])
        assert (first.count("a"), first.count("b")) == (3, 6)


async def test_few_more_texts_run_than_there_are_places_for_their_runs() -> None:
    """The executor would have them wait in the order of their calls, and every newcomer behind them."""
    running, most = set[Request](), list[int]()

    class Counts(Observer):
        def changed(self, request: Request) -> None:
            (running.add if request.stage is Stage.RUNNING else running.discard)(request)
            most.append(len(running))

    async with identity(kv_blocks=512, max_running=16) as served, Scheduler(served.target, observer=Counts()) as one:
        streams = [one.submit(asked([at], 40, stop=())) for at in range(60)]
        assert {len(await each.all()) for each in streams} == {40}
    assert max(most) == 18


async def test_higher_priorities_go_first() -> None:
    order: list[str] = []
    async with identity(kv_blocks=512) as served, one_at_a_time(served, order) as scheduler:
        streams = [
            scheduler.submit(asked([ord(name)], 3, priority=priority, stop=()))
            for name, priority in (("a", 0), ("b", -1), ("c", 2), ("d", 0))
        ]
        await asyncio.gather(*(each.all() for each in streams))
        assert "".join(order) == "cadb"


WRONG: list[tuple[str, Any]] = [
    *(("prompt", value) for value in ([], "text", [-1], [1.5], None, 5)),
    *(("max_tokens", value) for value in (0, "4", 2**70, None, True)),
    *(("min_tokens", value) for value in (-1, 5, "1")),
    *(("output", value) for value in (None, "greedy", TopTokens(3), Greedy(row_masks=(b"a" * 32,)))),
    *(("stop", value) for value in ([-1], ["a"], [1.5], 5)),
    *(("stop_strings", value) for value in ("abc", [""], [5], [b"a"], 5, None)),
    *(("deadline_s", value) for value in ("a", -1.0, math.nan, True)),
    *(("priority", value) for value in ("a", 1.5, None)),
    *(("tenant", value) for value in (None, 5, ["a"])),
    *(("adapter", value) for value in (None, 5, "\ud800")),
    *(("cache_salt", value) for value in (None, 5, "salt")),
    *(("cache_mode", value) for value in (None, "BYPASS", 3)),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=str)
def test_a_wrong_value_is_refused_where_it_is_given(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        TextRequest(**{"prompt": [1], "max_tokens": 4, name: value})
    assert (refused.value.field or "").split(".")[0] in {name, "create"}
    with pytest.raises(InvalidRequest):
        TextRequest(prompt=[1], max_tokens=4, output=Sample(seed=-1))


WRONG_SETTINGS: list[tuple[str, Any]] = [
    *((name, 0) for name in ("token_budget", "max_running", "max_waiting")),
    *((name, -1) for name in ("run_tokens", "max_delay_s", "patience_s")),
    *(("weights", value) for value in ({"a": 0}, {"a": "x"}, {"a": math.nan}, ["a"])),
    *(("close_timeout_s", "x"), ("connect", "localhost:1"), ("tokenizer", "gpt2"), ("drafter", 4), ("observer", print)),
]


@pytest.mark.parametrize(("name", "value"), WRONG_SETTINGS, ids=str)
def test_a_wrong_setting_is_refused_where_it_is_given(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Scheduler("localhost:1", **{name: value})
    assert refused.value.field == name


async def test_tokens_that_have_come_are_read_together() -> None:
    async with identity(kv_blocks=512) as served:
        expected = await by_the_client(served, [1, 2, 3], SAMPLED, 30)
        async with Scheduler(served.target, run_tokens=8) as scheduler:
            stream, late = [scheduler.submit(asked([1, 2, 3], 30, output=SAMPLED, stop=())) for _ in range(2)]
            first, found = asyncio.create_task(anext(late)), []
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="another task"):
                await late.arrived()
            while tokens := await stream.arrived():
                assert [each.more for each in tokens[:-1]] == [True] * (len(tokens) - 1)
                found += tokens
            assert [each.token for each in found] == expected
            assert [each.finish_reason for each in found] == [None] * 29 + [FinishReason.LENGTH]
            await scheduler.drain()
            rest = await late.arrived()
            assert [each.token for each in (await first, *rest)] == expected and len(rest) == 29
            assert await late.arrived() == []
        async with Scheduler(served.target) as scheduler:
            with pytest.raises(CALLER_ERROR):
                await scheduler.submit(asked([9], 4, adapter="none")).arrived()


async def test_a_text_ends_with_its_grammar_at_each_executor_of_a_fleet() -> None:
    """Whatever else may end it."""
    schema, ways = {"enum": ["Kent", "Surrey", "Hertfordshire"]}, [{"stop": []}, {"stop": [44]}, {"min_tokens": 50}, {}]
    async with demo(kv_blocks=256) as one, demo(kv_blocks=256) as two:
        targets = [one.target, two.target]
        async with Members(targets, connect=in_a_session) as members, Scheduler(members) as scheduler:
            await members.all_known(30.0)  # one that joins later gets none of these texts
            grammar = await scheduler.register_grammar(GrammarKind.JSON_SCHEMA, schema)
            output = Greedy(grammar=grammar, grammar_from=len(PROMPT))
            streams = [scheduler.submit(asked(PROMPT, 60, output=output, **ways[at % 4])) for at in range(12)]
            found = [await each.all() for each in streams]
            assert {each.executor for each in streams} == {one.target, two.target}
        async with ExecutorClient(one.target) as client:
            assert await client.register_grammar(GrammarKind.JSON_SCHEMA, schema) == grammar
            expected = list[list[tuple[int, FinishReason | None]]]()
            for how in ways:
                async with client.sequence() as sequence:
                    alone = sequence.stream(PROMPT, max_tokens=60, output=output, **how)
                    expected.append([(each.token, each.finish_reason) async for each in alone])
                assert expected[-1][-1][1] is FinishReason.STOP and len(expected[-1]) < 60
        for at, (tokens, stream) in enumerate(zip(found, streams, strict=True)):
            assert [(each.token, each.finish_reason) for each in tokens] == expected[at % 4]
            assert json.loads(bytes(stream.token_ids)) in schema["enum"]


async def test_a_request_that_fails_leaves_the_others_and_the_scheduler_alone() -> None:
    """Found by the client before anything is sent, by the executor, and by the tokenizer."""

    class Fragile(Letters):
        def decode(self, tokens: Any) -> str:
            if unknown in tokens:
                raise ValueError("no such token")
            return super().decode(tokens)

    async with emptied(kv_blocks=512) as served:
        expected = await by_the_client(served, [1, 2, 3], SAMPLED, 200)
        unknown = next(token for token in range(256) if token not in expected)
        async with Scheduler(served.target, run_tokens=4, tokenizer=Fragile(), max_waiting=2) as scheduler:
            good = [scheduler.submit(asked([1, 2, 3], 200, output=SAMPLED, stop=())) for _ in range(2)]
            await asyncio.gather(*map(anext, good))
            for wrong in (
                {"adapter": "x" * 10_000},
                {"adapter": "none"},
                {"cache_salt": b"x" * 100_000},
                {"stop": [10_000]},
                {"output": Sample(seed=1, bias=((10_000, 1.0),))},
                {"output": Sample(seed=1, temperature=-1.0)},
                {"output": Greedy(mask=b"a" * 32)},
            ):
                with pytest.raises(CALLER_ERROR):
                    await scheduler.submit(asked([9], 4, **wrong)).all()
            chosen = Sample(0.0, bias=((unknown, 100.0),))
            with pytest.raises(ValueError, match="no such token"):
                await scheduler.submit(asked([9], 4, output=chosen, stop=(), stop_strings=["none"])).all()
            read = scheduler.submit(asked([9], 4, output=chosen, stop=()))  # nothing is decoded before it is read
            assert [each.token for each in await read.all()] == [unknown] * 4
            with pytest.raises(ValueError, match="no such token"):
                _ = read.text
            for each in good:
                await each.all()
                assert each.token_ids == expected and each.end is RequestEnd.LENGTH


async def test_a_request_ends_at_the_models_own_stop_tokens_whenever_it_is_submitted() -> None:
    """The first ones are submitted before any executor has answered."""
    async with demo(kv_blocks=256) as served:
        async with ExecutorClient(served.target) as client, client.sequence() as sequence:
            [eos] = (await client.info()).model.eos_token_ids
            output = Sample(1.0, seed=1, bias=((eos, 8.0),))
            expected = [(each.token, each.finish_reason) async for each in sequence.stream(PROMPT, output=output)]
        assert expected[-1] == (eos, FinishReason.STOP)
        async with Scheduler(served.target) as scheduler:
            streams = [scheduler.submit(asked(PROMPT, 500, output=output))]
            streams += scheduler.submit_choices(asked(PROMPT, 500, output=output), 2)[:1]
            for stream in streams:
                assert [(each.token, each.finish_reason) for each in await stream.all()] == expected


async def test_what_cannot_be_served_is_a_typed_error_and_harms_nobody() -> None:
    async with (
        emptied(kv_blocks=8, max_context=60) as served,
        Scheduler(served.target, max_waiting=2, max_running=1) as scheduler,
    ):
        good = scheduler.submit(asked([1, 2, 3], 12, stop=()))
        with pytest.raises(ContextLengthExceeded, match="61 tokens"):
            await scheduler.submit(asked(list(range(61)), 4)).all()
        with pytest.raises(KvBlocksExhausted, match="10 blocks"):
            await scheduler.submit(asked(list(range(40)), 4)).all()
        with pytest.raises(InvalidRequest, match="vocabulary"):
            await scheduler.submit(asked([999], 4)).all()
        running = scheduler.submit(asked([5], 500, stop=()))
        await good.all()
        await anext(running)
        waits = [scheduler.submit(asked([6], 4, stop=())) for _ in range(2)]
        with pytest.raises(QueueFull):
            scheduler.submit(asked([7], 4))
        running.cancel()
        assert [len(await each.all()) for each in waits] == [4, 4]
        assert good.end is RequestEnd.LENGTH


async def test_requests_fail_while_no_executor_is_there_and_are_served_once_one_is() -> None:
    async with identity(kv_blocks=512) as first, identity(kv_blocks=512) as second, proxied(first.target) as proxy:
        async with Scheduler(proxy.target, patience_s=1.0) as scheduler:
            stream = scheduler.submit(asked([1, 2, 3], 5000, output=SAMPLED, stop=()))
            await anext(stream)
            proxy.upstream = "127.0.0.1:1"
            proxy.reset_all()
            with pytest.raises(ExecutorGone, match=proxy.target):
                await stream.all()
            proxy.upstream = second.target
            tokens = await scheduler.submit(asked([1, 2, 3], 5, output=SAMPLED, stop=())).all()
            assert len(tokens) == 5
        await assert_nothing_is_left(second)


async def test_tries_that_fail_at_once_are_made_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where an executor refuses the scheduler's token: it answers, and every call fails."""
    pauses, slept, sleep = list[float](), asyncio.Event(), asyncio.sleep

    async def noted(seconds: float) -> None:
        if seconds:
            pauses.append(seconds)
        await (sleep(0) if len(pauses) < 8 else slept.set() or asyncio.Event().wait())

    async def refused(_: Router) -> None:
        raise ExecutorError("not you")

    async with identity(kv_blocks=512) as served, Members([served.target]) as members:
        monkeypatch.setattr(Router, "serve", refused)
        monkeypatch.setattr(asyncio, "sleep", noted)
        async with Scheduler(members, close_timeout_s=0.01):
            await slept.wait()
        monkeypatch.undo()
    assert pauses == sorted(pauses) and len({*pauses}) == 5 and pauses[4:] == [1.0] * 4


async def test_it_reports_what_it_drives_once_it_is_ready() -> None:
    async with identity(kv_blocks=512) as served, ExecutorClient(served.target) as client:
        async with proxied(served.target) as proxy, Scheduler([proxy.target, served.target]) as scheduler:
            assert await scheduler.info() == await client.info()
        async with Scheduler(served.target, prefill=["localhost:1"]) as scheduler:
            with pytest.raises(TransportError, match="no executor of localhost:1"):
                await scheduler.ready(timeout_s=0.1)
            with pytest.raises(InvalidRequest, match="timeout_s"):
                await scheduler.info(timeout_s=-1.0)
        with pytest.raises(RuntimeError, match="not open"):
            await scheduler.ready()


async def test_what_is_closed_leaves_nothing_at_executors_whose_connections_stay() -> None:
    """In the middle of a run, and with nothing but the closing to release it."""
    async with identity(kv_blocks=512) as served, Members([served.target], connect=in_a_session) as members:
        async with Scheduler(members) as scheduler:
            await anext(scheduler.submit(asked([1, 2, 3], 5000, output=SAMPLED, stop=())))
        await assert_nothing_is_left(served)


async def test_draining_serves_what_was_taken_and_refuses_the_rest() -> None:
    async with emptied(kv_blocks=512) as served:
        async with Scheduler(served.target) as scheduler:
            streams = [scheduler.submit(asked(prompt, 12, stop=())) for prompt in prompts(6)]
            await scheduler.drain()
            assert all(each.end is RequestEnd.LENGTH for each in streams)
            with pytest.raises(RuntimeError, match="not open"):
                scheduler.submit(asked([1], 4))
        with pytest.raises(RuntimeError, match="not open"):
            Scheduler(served.target).submit(asked([1], 4))
