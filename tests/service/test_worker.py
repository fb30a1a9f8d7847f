"""A worker of smg's protocol over the wire: the texts are the client's own, and nothing is left behind."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import math
import re
import zipfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import grpc
import numpy as np
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import generate_latest

from ferrum_rpc import errors
from ferrum_rpc.client import ExecutorClient, Greedy, HiddenStates, PrefixIndex, Pressure, RowLogprobs, Sample
from ferrum_rpc.scheduler import ExecutorGone
from tests.support.grammars import DEMO, END, MODEL, PERSON
from tests.support.process import serving
from tests.support.scheduling import assert_nothing_is_left
from tests.support.serving import Gate, Served, serve_model
from tests.support.tokens import bearer, write_tokens
from tests.support.waiting import until
from tests.support.workers import PROMPT, Working, request, working

pb = pytest.importorskip("smg_grpc_proto.generated.vllm_engine_pb2", reason="smg-grpc-proto is not installed")
from smg_grpc_proto.generated import common_pb2  # noqa: E402 - behind the skip

from ferrum_rpc.fronts import blocks, servicer  # noqa: E402 - behind the skip
from ferrum_rpc.fronts.load import WorkLoad, registry_of_worker  # noqa: E402 - behind the skip
from ferrum_rpc.fronts.port import status_of  # noqa: E402 - behind the skip

CODE = grpc.StatusCode
ENDLESS = {"stream": True, "max_tokens": 1500, "ignore_eos": True}

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def alone(served: Served, output: Greedy | Sample, max_tokens: int = 24, **options: Any) -> list[Any]:
    """The same text by the client."""
    async with ExecutorClient(served.target) as client, client.sequence() as sequence:
        stream = sequence.stream(PROMPT, max_tokens=max_tokens, output=output, **options)
        return [token async for token in stream]


def ids(tokens: list[Any]) -> list[int]:
    return [each.token for each in tokens]


def near(found: Any, expected: Any) -> bool:
    """Equal but for what a cached prefix changes in float32."""
    return bool(np.allclose(found, expected, rtol=1e-5, atol=1e-5))


async def refusal(call: Any) -> tuple[Any, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return refused.value.code(), refused.value.details()


async def emptied(served: Served) -> None:
    """Its sequences end soon, and nothing is left."""
    await until(lambda: len(served.server.state.handles) == 0, 10)
    await assert_nothing_is_left(served)


def subscribe(worker: Working, **request: Any) -> Any:
    return worker.engine.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(**request))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both() -> AsyncIterator[tuple[Served, Working]]:
    async with serve_model(DEMO) as served, working(served.target) as worker:
        yield served, worker


@pytest_asyncio.fixture(loop_scope="module")
async def served(both: tuple[Served, Working]) -> AsyncIterator[Served]:
    yield both[0]
    await emptied(both[0])


@pytest_asyncio.fixture(loop_scope="module")
async def worker(both: tuple[Served, Working], served: Served) -> AsyncIterator[Working]:
    """Which has nothing left of any text, however that ended."""
    yield both[1]
    methods = both[1].port.methods
    await until(lambda: methods.texts == 0, 10)
    assert (methods.load.waiting_tokens, methods.load.waiting, methods._streams) == (0, 0, {})


# --- texts ------------------------------------------------------------------------------------------------------------


async def test_a_text_is_the_clients_own_whole_or_in_pieces(served: Served, worker: Working) -> None:
    expected = ids(await alone(served, Greedy()))
    [whole] = await worker.generate(request())
    assert list(whole.complete.output_ids) == expected
    assert (whole.complete.finish_reason, whole.complete.prompt_tokens) == ("length", len(PROMPT))
    assert whole.complete.completion_tokens == 24
    *pieces, last = await worker.generate(request(stream=True))
    assert [token for each in pieces for token in each.chunk.token_ids] == expected
    assert sum(each.chunk.completion_tokens for each in pieces) == 24
    assert len(pieces) > 1
    assert last.complete.finish_reason == "length"
    assert list(last.complete.output_ids) == list(pieces[-1].chunk.token_ids)
    assert whole.complete.cached_tokens == last.complete.cached_tokens == len(PROMPT) // 16 * 16


async def test_a_prompt_may_be_a_text(served: Served, worker: Working) -> None:
    [by_text] = await worker.generate(request(bytes(PROMPT).decode()))
    assert list(by_text.complete.output_ids) == ids(await alone(served, Greedy()))


@pytest.mark.parametrize("stream", [False, True])
async def test_several_texts_of_a_prompt_have_their_own_seeds(served: Served, worker: Working, stream: bool) -> None:
    messages = await worker.generate(request(n=3, seed=7, temperature=0.9, stream=stream))
    texts: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for each in messages:
        if each.WhichOneof("response") == "chunk":
            texts[each.chunk.index] += each.chunk.token_ids
        elif not stream:
            texts[each.complete.index] += each.complete.output_ids
    assert sorted(each.complete.index for each in messages if each.HasField("complete")) == [0, 1, 2]
    for index, text in texts.items():
        assert text == ids(await alone(served, Sample(0.9, seed=7 + index)))
    assert len({tuple(each) for each in texts.values()}) == 3


async def test_stop_tokens_and_stop_strings(served: Served, worker: Working) -> None:
    text = bytes(ids(await alone(served, Greedy(), 60)))
    word, space = text[20:24].decode(), text[10]
    [at_string] = await worker.generate(request(max_tokens=60, stop=["never", word]))
    ended = bytes(at_string.complete.output_ids).decode()
    assert ended == text[: text.index(word.encode()) + len(word)].decode()
    assert (at_string.complete.finish_reason, at_string.complete.matched_stop_str) == ("stop", word)
    [at_token] = await worker.generate(request(max_tokens=60, stop_token_ids=[space]))
    assert bytes(at_token.complete.output_ids) == text[: text.index(space) + 1]
    assert (at_token.complete.finish_reason, at_token.complete.matched_token_id) == ("stop", space)
    [later] = await worker.generate(request(max_tokens=60, stop_token_ids=[space], min_tokens=30))
    assert len(later.complete.output_ids) > 30


async def test_the_models_own_end_is_not_reported_as_a_match(worker: Working) -> None:
    bias = {END: 100.0}
    [ended] = await worker.generate(request(logit_bias=bias))
    assert (list(ended.complete.output_ids), ended.complete.finish_reason) == ([END], "stop")
    assert ended.complete.WhichOneof("matched_stop") is None
    [on] = await worker.generate(request(logit_bias=bias, ignore_eos=True, max_tokens=5))
    assert (list(on.complete.output_ids), on.complete.finish_reason) == ([END] * 5, "length")


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_are_the_clients(served: Served, worker: Working, stream: bool) -> None:
    expected = await alone(served, Greedy(logprob=True, logprobs=RowLogprobs(3)), 8)
    async with ExecutorClient(served.target) as client:
        scores = await client.score(PROMPT, logprobs=RowLogprobs(2))
    messages = await worker.generate(request(logprobs=3, prompt_logprobs=2, max_tokens=8, stream=stream))
    kind = "chunk" if stream else "complete"
    parts = [getattr(each, kind) for each in messages if each.HasField(kind)]
    found = pb.OutputLogProbs()
    for each in parts:
        found.MergeFrom(each.output_logprobs)
    assert list(found.token_ids) == ids(expected)
    assert near(found.token_logprobs, [each.logprob for each in expected])
    for top, token in zip(found.top_logprobs, expected, strict=True):
        assert token.top_logprobs is not None
        assert list(top.token_ids) == token.top_logprobs.token_ids.tolist()
        assert near(top.values, token.top_logprobs.logprobs)
    inputs = parts[0].input_logprobs
    assert list(inputs.token_ids) == PROMPT
    assert not inputs.token_logprobs[0].HasField("value")
    assert near([each.value for each in inputs.token_logprobs[1:]], scores.logprobs)
    assert [list(each.token_ids) for each in inputs.top_logprobs] == [[], *scores.top_logprobs.token_ids.tolist()]
    assert [each.HasField("input_logprobs") for each in parts] == [True, *[False] * (len(parts) - 1)]


async def test_log_probabilities_of_the_tokens_alone(worker: Working) -> None:
    [found] = await worker.generate(request(logprobs=0, prompt_logprobs=0, max_tokens=4, prompt=[65]))
    assert len(found.complete.output_logprobs.token_logprobs) == 4
    assert all(value < 0 for value in found.complete.output_logprobs.token_logprobs)
    assert list(found.complete.output_logprobs.top_logprobs) == []
    assert [each.HasField("value") for each in found.complete.input_logprobs.token_logprobs] == [False]
    [without] = await worker.generate(request(max_tokens=4))
    assert not without.complete.HasField("output_logprobs")
    assert not without.complete.HasField("input_logprobs")


CONSTRAINTS: dict[str, tuple[dict[str, Any], Any]] = {
    "json_schema": ({"json_schema": json.dumps(PERSON)}, lambda text: set(json.loads(text)) == set(PERSON["required"])),
    "json_object": ({"json_object": True, "max_tokens": 200}, lambda text: isinstance(json.loads(text), dict)),
    "regex": ({"regex": "[a-f]{2,5}x"}, lambda text: re.fullmatch("[a-f]{2,5}x", text)),
    "lark": ({"grammar": 'start: "a" ("b" | "c")'}, lambda text: text in {"ab", "ac"}),
    "ebnf": ({"grammar": 'root ::= ("a" | "ab") "bc"'}, lambda text: text in {"abc", "abbc"}),
    "choice": ({"choice": {"choices": ["yes", "yes, sir", "no"]}}, lambda text: text in {"yes", "yes, sir", "no"}),
}


@pytest.mark.parametrize(("name", "temperature"), [*((name, 1.0) for name in CONSTRAINTS), ("json_schema", 0.0)])
async def test_a_constrained_text_is_of_its_language(worker: Working, name: str, temperature: float) -> None:
    sampling, holds = CONSTRAINTS[name]
    if name == "json_object":  # objects without an end are of its language too
        sampling = {**sampling, "logit_bias": {ord("}"): 60.0}}
    made = request(**{"max_tokens": 120, "temperature": temperature, "seed": 3, "stream": True, **sampling})
    *chunks, last = await worker.generate(made)
    tokens = [token for each in chunks for token in each.chunk.token_ids]
    assert tokens[-1] == END
    assert last.complete.finish_reason == "stop"
    assert holds(bytes(tokens[:-1]).decode())


# --- what ends a text -------------------------------------------------------------------------------------------------


async def test_aborted_texts_end_with_what_they_have(worker: Working) -> None:
    call = worker.engine.Generate(request(name="one", n=2, **ENDLESS))
    messages = aiter(call)
    assert (await anext(messages)).chunk.token_ids
    await worker.engine.Abort(pb.AbortRequest(request_ids=["unknown", "one"]))
    rest = [each async for each in messages]
    assert [each.complete.finish_reason for each in rest if each.HasField("complete")] == ["abort", "abort"]
    assert worker.port.methods.texts == 0


@pytest.mark.parametrize("by", ["cancel", "Abort"])
async def test_a_text_that_is_left_ends_with_the_present_step(by: str) -> None:
    """The step is held until the executor knows; a router leaves by ``Abort``."""
    gate = Gate("forward")
    async with serve_model(DEMO, stage=gate) as served, working(served.target) as worker:
        state = served.server.state
        call = worker.engine.Generate(request(**ENDLESS))
        await call.read()
        gate.closed = True
        await asyncio.to_thread(gate.reached.wait, 10)
        [record], rows = state.handles.records(), state.engine.counters.rows
        if by == "cancel":
            call.cancel()
        else:
            await worker.engine.Abort(pb.AbortRequest(request_ids=["r"]))
        await until(lambda: record.pending_end is not None, 10)
        gate.open()
        await until(lambda: len(state.handles) == 0, 10)
        await until(lambda: worker.port.methods.texts == 0, 10)
        assert state.engine.counters.rows == rows + 1
        await assert_nothing_is_left(served)


async def test_a_client_that_leaves_before_its_first_token_leaves_nothing() -> None:
    gate = Gate("forward")
    async with serve_model(DEMO, stage=gate) as served, working(served.target) as worker:
        gate.closed = True
        call = worker.engine.Generate(request(stream=True))
        await until(lambda: worker.port.methods.texts == 1, 10)
        call.cancel()
        await until(lambda: worker.port.methods.texts == 0, 10)
        gate.open()
        await emptied(served)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a value": ({"top_p": 2.0}, r"top_p must be in \(0, 1\], got 2\."),
    "a long prompt": ({"prompt": [1] * 3000}, r"The decoder prompt \(length 3000\) is longer than the maximum model"),
    "a constraint": ({"structural_tag": "{}"}, "structural_tag is not supported by this worker"),
    "a schema": ({"json_schema": '{"type": "nonsense"}'}, "Invalid type: nonsense"),
    "a regex": ({"regex": "[a"}, "invalid grammar"),
    "Lark": ({"grammar": "start: other"}, "other"),
    "EBNF": ({"grammar": "root ::= other"}, "the rule 'other' is not defined"),
}


async def test_what_the_caller_gets_wrong_is_an_invalid_argument(worker: Working) -> None:
    for name, (given, words) in REFUSED.items():
        code, details = await refusal(worker.generate(request(stream=True, **given)))
        assert code is CODE.INVALID_ARGUMENT and re.search(words, details), name


@pytest.mark.parametrize("constrained", [True, False])
async def test_a_text_that_cannot_go_on_under_its_constraint_says_so(worker: Working, constrained: bool) -> None:
    """The router then answers 422, and does not try again."""

    async def fails(streams: Any) -> Any:
        yield 0, await streams[0].arrived()
        raise errors.GrammarTooComplex("the mask of a row exceeds the time or memory of the grammar")

    made = request(stream=True, **({"regex": "a{9}"} if constrained else {}))
    with mock.patch.object(servicer, "_together", fails), pytest.raises(grpc.aio.AioRpcError) as refused:
        await worker.generate(made)
    marked = ("smg-constraint-failed", "engine") in list(refused.value.trailing_metadata() or ())
    assert marked == constrained
    assert refused.value.code() is (CODE.FAILED_PRECONDITION if constrained else CODE.INVALID_ARGUMENT)
    assert "exceeds the time" in (refused.value.details() or "")


STATUSES: dict[type[Exception], Any] = {
    errors.InvalidRequest: CODE.INVALID_ARGUMENT,
    errors.NotSupported: CODE.INVALID_ARGUMENT,
    errors.ContextLengthExceeded: CODE.INVALID_ARGUMENT,
    errors.GrammarTooComplex: CODE.INVALID_ARGUMENT,
    errors.QueueFull: CODE.RESOURCE_EXHAUSTED,
    errors.SequencesExhausted: CODE.RESOURCE_EXHAUSTED,
    errors.KvBlocksExhausted: CODE.RESOURCE_EXHAUSTED,
    errors.QuotaExceeded: CODE.RESOURCE_EXHAUSTED,
    errors.Draining: CODE.UNAVAILABLE,
    errors.Starting: CODE.UNAVAILABLE,
    errors.TransportError: CODE.UNAVAILABLE,
    errors.InstanceMismatch: CODE.UNAVAILABLE,
    errors.DeviceLost: CODE.UNAVAILABLE,
    ExecutorGone: CODE.UNAVAILABLE,
    errors.Unauthenticated: CODE.INTERNAL,
    errors.StepFailed: CODE.INTERNAL,
    ValueError: CODE.INTERNAL,
}


async def test_every_error_of_an_executor_has_a_status_of_the_protocol() -> None:
    for kind, expected in STATUSES.items():
        code, message = status_of(kind("why"))
        assert code is expected
        assert "why" in message
    for kind in errors.ERROR_BY_REASON.values():
        assert status_of(kind("why"))[0] in set(STATUSES.values())


async def test_too_many_waiting_texts_are_refused(served: Served) -> None:
    async with working(served.target, flags=("--max-waiting", "2")) as worker:
        code, details = await refusal(worker.generate(request(n=3)))
        assert (code, details) == (CODE.RESOURCE_EXHAUSTED, "0 requests wait already")
        assert len(await worker.generate(request(n=2, max_tokens=2))) == 2


async def test_without_an_executor_texts_fail_as_unavailable_and_the_worker_is_not_healthy() -> None:
    async with serving(model="demo") as process, working(process.target, flags=("--patience-s", "0.5")) as worker:
        health = await worker.engine.HealthCheck(pb.HealthCheckRequest())
        assert (health.healthy, health.message) == (True, "Health")
        text = asyncio.ensure_future(worker.generate(request(**ENDLESS)))
        await until(lambda: worker.port.methods.load.chosen_tokens > 0, 10)
        await process.kill()
        assert (await refusal(text))[0] is CODE.UNAVAILABLE
        assert (await refusal(worker.generate(request())))[0] is CODE.UNAVAILABLE
        health = await worker.engine.HealthCheck(pb.HealthCheckRequest())
        assert (health.healthy, health.message) == (False, "no executor serves")


# --- fleets and drains ------------------------------------------------------------------------------------------------


async def test_a_drain_serves_what_was_begun_and_refuses_the_rest(served: Served) -> None:
    """What waits for its turn has not begun."""
    async with working(served.target) as worker:
        turns = worker.port.methods.score_turns
        while not turns.locked():
            await turns.acquire()
        embed = pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=PROMPT))
        waiting = asyncio.ensure_future(worker.engine.Embed(embed))
        expected = ids(await alone(served, Greedy(), 120, stop=()))
        messages = aiter(worker.engine.Generate(request(**{**ENDLESS, "max_tokens": 120})))
        tokens = list((await anext(messages)).chunk.token_ids)
        draining = asyncio.create_task(worker.port.methods.drain())
        await until(lambda: worker.port.methods.draining, 10)
        assert await refusal(worker.generate(request())) == (CODE.UNAVAILABLE, "the worker is draining")
        turns.release()
        for each in (waiting, worker.engine.Embed(embed)):
            assert await refusal(each) == (CODE.UNAVAILABLE, "the worker is draining")
        health = await worker.engine.HealthCheck(pb.HealthCheckRequest())
        assert (health.healthy, health.message) == (False, "the worker is draining")
        async for each in messages:
            tokens += each.chunk.token_ids
        assert tokens == expected
        await draining


# --- what else the router asks ----------------------------------------------------------------------------------------


async def test_an_embedding_is_the_last_row_at_length_1(served: Served, worker: Working) -> None:
    async with ExecutorClient(served.target) as client, client.sequence() as sequence:
        row = (await sequence.prefill(PROMPT, HiddenStates())).hidden_states[0]
    found = await worker.engine.Embed(pb.EmbedRequest(request_id="e", tokenized=pb.TokenizedInput(input_ids=PROMPT)))
    assert (found.prompt_tokens, found.embedding_dim) == (len(PROMPT), 256)
    assert math.isclose(float(np.linalg.norm(found.embedding)), 1, rel_tol=1e-6)
    assert near(found.embedding, row / np.linalg.norm(row))
    code, details = await refusal(worker.engine.Embed(pb.EmbedRequest()))
    assert (code, details) == (CODE.INVALID_ARGUMENT, "EmbedRequest requires tokenized input")


async def test_the_model_and_the_worker_are_described(worker: Working) -> None:
    model = await worker.engine.GetModelInfo(pb.GetModelInfoRequest())
    assert (model.model_path, model.tokenizer_path) == (str(MODEL), str(MODEL))
    assert (model.max_context_length, model.vocab_size, list(model.eos_token_ids)) == (2048, 264, [END])
    assert (model.model_type, list(model.architectures)) == ("qwen3", ["Qwen3ForCausalLM"])
    assert (model.is_generation, model.supports_vision) == (True, False)
    server = await worker.engine.GetServerInfo(pb.GetServerInfoRequest())
    assert (server.server_type, server.data_parallel_size, server.block_size) == ("vllm-grpc", 1, 16)
    assert server.constrained_decoding_start == "first_token"
    assert (server.active_requests, server.is_paused, server.max_num_seqs) == (0, False, 256)


async def test_the_load_is_that_of_the_texts(worker: Working) -> None:
    async def load() -> Any:
        [found] = (await worker.engine.GetLoads(pb.GetLoadsRequest())).loads
        return found

    before = await load()
    assert (before.num_total_reqs, before.num_running_reqs, before.token_usage) == (0, 0, 0.0)
    call = worker.engine.Generate(request(**ENDLESS))
    await call.read()
    during = await load()
    assert (during.num_total_reqs, during.num_running_reqs, during.num_waiting_reqs) == (1, 1, 0)
    assert 0 < during.num_used_tokens < during.max_total_num_tokens
    assert during.max_total_num_tokens == 512 * 16
    call.cancel()


async def test_no_more_texts_run_than_executors_have_slots_for() -> None:
    def most(*slots: int) -> int:
        there: Any = [SimpleNamespace(pressure=Pressure(1, 2, 16, 0, 0, 0, total_slots=each)) for each in slots]
        members: Any = SimpleNamespace(there=there, serving=there)
        scheduler: Any = SimpleNamespace(waiting=0)
        return WorkLoad(scheduler, members, max_running=8, max_waiting=8).message().max_running_requests

    assert [most(), most(0), most(3, 9), most(0, 3)] == [8, 8, 11, 11]


async def test_the_tokenizer_is_a_zip_with_its_digest(worker: Working, tmp_path: Path) -> None:
    pieces = [each async for each in worker.engine.GetTokenizer(common_pb2.GetTokenizerRequest())]
    data = b"".join(each.data for each in pieces)
    assert [bool(each.sha256) for each in pieces] == [False] * (len(pieces) - 1) + [True]
    assert hashlib.sha256(data).hexdigest() == pieces[-1].sha256
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = set(archive.namelist())
        assert {"tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja"} <= names
        assert not any(name.endswith((".safetensors", ".md")) for name in names)
        assert archive.read("tokenizer.json") == (MODEL / "tokenizer.json").read_bytes()


@pytest_asyncio.fixture(loop_scope="module")
async def fresh() -> AsyncIterator[tuple[Served, Working]]:
    """With nothing in the cache."""
    async with serve_model(DEMO) as served, working(served.target) as worker:
        yield served, worker


async def test_cached_blocks_are_reported_with_their_tokens(fresh: tuple[Served, Working]) -> None:
    served, worker = fresh
    async with ExecutorClient(served.target) as client:
        index = PrefixIndex.of(await client.info())
    call = subscribe(worker)
    assert (await call.read()).events[0].WhichOneof("data") == "cleared"
    [made] = await worker.generate(request(max_tokens=60))
    text = [*PROMPT, *made.complete.output_ids]
    expected = [int.from_bytes(each[:8], "big", signed=True) for each in index.hashes(text)]
    found: list[Any] = []
    async with asyncio.timeout(20):
        while len(found) < len(expected):
            batch = await call.read()
            found += [event.stored for event in batch.events]
    assert [each.blocks[0].block_hash for each in found] == expected
    assert [token for each in found for token in each.blocks[0].token_ids] == text[: 16 * len(expected)]
    parents = [each.parent_block_hash if each.HasField("parent_block_hash") else None for each in found]
    assert parents == [None, *expected[:-1]]
    call.cancel()
    again = subscribe(worker)
    await again.read()
    assert [each.stored.blocks[0].block_hash for each in (await again.read()).events] == expected
    again.cancel()
    assert (await refusal(subscribe(worker, start_sequence_number=3).read()))[0] is CODE.OUT_OF_RANGE


# --- the port ---------------------------------------------------------------------------------------------------------


async def test_bytes_that_are_no_request_and_methods_that_are_not_offered_are_refused(worker: Working) -> None:
    async with grpc.aio.insecure_channel(worker.port.target) as channel:
        for method, kind in (("Generate", channel.unary_stream), ("Abort", channel.unary_unary)):
            call = kind(f"/vllm.grpc.engine.VllmEngine/{method}")(b"\xff")
            assert await call.code() is CODE.INVALID_ARGUMENT
            assert await call.details() == "the request is not a valid message of this method"
        call = channel.unary_unary("/grpc.health.v1.Health/Check")(b"\x0a\x00" * 600)
        assert await call.details() == "the request has 1200 bytes of at most 1024"
    assert (await refusal(worker.engine.FlushCache(common_pb2.FlushCacheRequest())))[0] is CODE.UNIMPLEMENTED
    assert (await worker.engine.HealthCheck(pb.HealthCheckRequest())).healthy


async def test_a_text_whose_client_does_not_read_is_ended(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "UNREAD_S", 0.2)
    async with working(served.target) as worker:
        reads, sent = asyncio.Event(), list[Any]()

        async def send(message: Any) -> None:
            sent.append(message)
            await reads.wait()

        text = asyncio.create_task(worker.port.methods.generate(request(**ENDLESS), send))
        await until(lambda: bool(sent), 20)
        assert len(served.server.state.handles) == 1
        await until(lambda: len(served.server.state.handles) == 0, 20)
        reads.set()
        await text
        assert sent[-1].complete.finish_reason == "abort"


async def test_more_texts_than_the_worker_holds_are_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkLoad, "max_texts", 3)
    async with working(served.target) as worker:
        assert await refusal(worker.generate(request(n=4))) == (CODE.RESOURCE_EXHAUSTED, "0 texts are not sent yet")
        for _ in range(2):  # those that have been sent count no more
            assert len(await worker.generate(request(n=3, max_tokens=2))) == 3
        texts = worker.engine.Generate(request(n=3, **ENDLESS))
        await texts.read()
        async with grpc.aio.insecure_channel(worker.port.target) as channel:
            unread = channel.stream_stream("/vllm.grpc.engine.VllmEngine/Generate")()  # a request that never comes
            assert (await unread.code(), await unread.details()) == (
                CODE.RESOURCE_EXHAUSTED,
                "3 texts are not sent yet",
            )
        texts.cancel()


async def test_more_token_ids_than_any_prompt_has_are_counted_and_not_parsed(worker: Working) -> None:
    most = (1 << 16) + 4 * 2048
    code, details = await refusal(worker.generate(request(prompt=[1] * most)))
    assert code is CODE.INVALID_ARGUMENT and details.startswith(f"The decoder prompt (length {most}) is longer than")
    code, details = await refusal(worker.generate(request(prompt=[1] * (most + 1))))
    assert code is CODE.INVALID_ARGUMENT
    assert details.startswith(f"the request has more than {most} token ids")
    [made] = await worker.generate(request(prompt=[1] * most, truncate_prompt_tokens=8, max_tokens=2))
    assert made.complete.prompt_tokens == 8


async def test_more_subscribers_than_allowed_are_refused(worker: Working, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MOST_SUBSCRIBERS", 1)
    first = subscribe(worker)
    assert (await first.read()).events[0].WhichOneof("data") == "cleared"
    code, details = await refusal(subscribe(worker).read())
    assert (code, details) == (CODE.RESOURCE_EXHAUSTED, "there are 1 subscribers already")
    first.cancel()
    async with asyncio.timeout(20):
        while True:
            with suppress(grpc.aio.AioRpcError):  # the worker has not seen yet that the first has left
                await (next_one := subscribe(worker)).read()
                break
    next_one.cancel()


async def test_prompt_scores_wait_while_others_are_not_read(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "MAX_SCORES_BYTES", servicer.SCORE_BYTES * len(PROMPT))
    async with working(served.target) as worker:
        reads, sent = asyncio.Event(), {name: list[Any]() for name in ("first", "second", "unscored")}

        async def text(name: str, **options: Any) -> None:
            async def send(message: Any) -> None:
                sent[name].append(message)
                await (reads.wait() if name == "first" else asyncio.sleep(0))

            await worker.port.methods.generate(request(name=name, max_tokens=4, **options), send)

        first = asyncio.create_task(text("first", prompt_logprobs=0))
        await until(lambda: bool(sent["first"]), 20)
        second = asyncio.create_task(text("second", prompt_logprobs=0))
        await text("unscored")
        assert sent["unscored"] and not sent["second"]
        reads.set()
        await asyncio.gather(first, second)
        assert len(sent["second"][0].complete.input_logprobs.token_ids) == len(PROMPT)


async def test_every_watcher_of_the_health_hears_of_a_drain(served: Served) -> None:
    async with working(served.target) as worker, grpc.aio.insecure_channel(worker.port.target) as channel:
        watches = [health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        for each in watches:
            assert (await each.read()).status == health_pb2.HealthCheckResponse.SERVING
        watches[0].cancel()
        code = worker.port.methods.load.calls
        await until(lambda: code["Watch", "CANCELLED"] == 1, 10)
        await worker.port.drain()
        assert (await watches[1].read()).status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_with_tokens_only_their_callers_are_served(served: Served, tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path, "router secret")
    async with working(served.target, flags=("--serve-tokens", str(tokens))) as worker:
        for metadata in ((), bearer("wrong")):
            call = worker.engine.HealthCheck(pb.HealthCheckRequest(), metadata=metadata)
            assert (await refusal(call))[0] is CODE.UNAUTHENTICATED
            stream = worker.engine.Generate(request(), metadata=metadata)
            assert (await refusal(stream.read()))[0] is CODE.UNAUTHENTICATED
        assert (await worker.engine.HealthCheck(pb.HealthCheckRequest(), metadata=bearer("secret"))).healthy


async def test_the_metrics_count_texts_tokens_and_statuses(served: Served) -> None:
    async with working(served.target) as worker:
        await worker.generate(request(n=2, max_tokens=3))
        with pytest.raises(grpc.aio.AioRpcError):
            await worker.generate(request(max_tokens=0))
        text = generate_latest(registry_of_worker(worker.port.methods.load)).decode()
        for line in (
            'ferrum_worker_calls_total{code="OK",method="Generate"} 1.0',
            'ferrum_worker_calls_total{code="INVALID_ARGUMENT",method="Generate"} 1.0',
            'ferrum_worker_texts_total{reason="length"} 2.0',
            "ferrum_worker_chosen_tokens_total 6.0",
            f"ferrum_worker_prompt_tokens_total {len(PROMPT)}.0",
            "ferrum_worker_running 0.0",
            'ferrum_worker_executors{state="serving"} 1.0',
        ):
            assert line in text.splitlines()
