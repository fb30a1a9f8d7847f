"""Real clients, an unmodified router, the worker and an executor: `openai` and `anthropic` get the client's texts."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from ferrum_rpc.client import ExecutorClient, Greedy, Sample
from tests.e2e.test_scheduler_runs import assert_nothing_is_left
from tests.faults.process import ROOT, environment, serving
from tests.faults.waiting import until
from tests.grammars import DEMO
from tests.serving import Served, serve_model
from tests.workers import Working, worker_process, working

for package in ("smg_grpc_proto", "smg", "openai"):
    pytest.importorskip(package, reason=f"{package} is not installed")

from openai import APIError, APIStatusError, AsyncOpenAI, BadRequestError, NotFoundError  # noqa: E402 - behind the skip

TEXT = "In the beginning God created the heaven and "
MESSAGES: Any = [{"role": "user", "content": TEXT}]
START_S = 60.0
JAVASCRIPT = ROOT / "tests" / "javascript"
NODE = shutil.which("node")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def lists_a_model(port: int) -> bool:
    # it does not listen yet, or has no worker yet
    with suppress(OSError, ValueError), urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=2) as got:
        return bool(json.load(got)["data"])
    return False


@asynccontextmanager
async def router(*workers: str, flags: tuple[str, ...] = ()) -> AsyncIterator[str]:
    """The address of a router in front of workers."""
    port, command = free_port(), [sys.executable, "-m", "smg", "launch", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(free_port()), "--log-level", "warn", *flags]
    for each in workers:
        command += ["--worker-urls", f"grpc://{each}"]
    null = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=environment(), stdout=null, stderr=null)
    try:
        async with asyncio.timeout(START_S):
            while not await asyncio.to_thread(lists_a_model, port):
                assert process.returncode is None, f"the router has ended with {process.returncode}"
                await asyncio.sleep(0.1)  # a program that is not ours: it has no event for this
        yield f"http://127.0.0.1:{port}"
    finally:
        with suppress(ProcessLookupError):  # it has ended by itself
            process.kill()
        await process.wait()


@asynccontextmanager
async def openai_of(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60.0) as client:
        yield client


@asynccontextmanager
async def everything() -> AsyncIterator[tuple[Served, Working, str]]:
    """An executor, a worker and a router; nothing is left of them at the end."""
    async with serve_model(DEMO) as served:
        async with working(served.target) as worker, router(worker.port.target) as url:
            yield served, worker, url
            await until(lambda: worker.port.methods.texts == 0, 20)
        await assert_nothing_is_left(served)


async def alone(served: Served, output: Greedy | Sample, max_tokens: int = 24) -> str:
    async with ExecutorClient(served.target) as client, client.sequence() as sequence:
        stream = sequence.generate(list(TEXT.encode()), max_tokens=max_tokens, output=output)
        return bytes([token async for token in stream]).decode(errors="replace")


async def test_openai_clients_get_the_texts_of_the_client_alone() -> None:
    async with everything() as (served, _, url), openai_of(url) as client:
        greedy = await alone(served, Greedy())
        asked: Any = {"model": "demo", "max_tokens": 24, "temperature": 0}
        chat = await client.chat.completions.create(messages=MESSAGES, **asked)
        [choice] = chat.choices
        assert (choice.message.content, choice.finish_reason) == (greedy, "length")
        assert chat.usage is not None
        assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (len(TEXT), 24)
        completion = await client.completions.create(prompt=TEXT, **asked)
        assert completion.choices[0].text == greedy
        # streams, with usage
        pieces, usage, reasons = "", None, []
        counted: Any = {"stream": True, "stream_options": {"include_usage": True}}
        async for each in await client.chat.completions.create(messages=MESSAGES, **asked, **counted):
            usage = each.usage or usage
            for part in each.choices:
                pieces += part.delta.content or ""
                reasons += [part.finish_reason] if part.finish_reason else []
        assert (pieces, reasons) == (greedy, ["length"])
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(TEXT), 24)
        # several texts with seeds
        sampled = {**asked, "temperature": 0.9, "n": 3, "seed": 11}
        texts = await client.chat.completions.create(messages=MESSAGES, **sampled)
        by_index = sorted(texts.choices, key=lambda each: each.index)
        expected = [await alone(served, Sample(0.9, seed=11 + number)) for number in range(3)]
        assert [each.message.content for each in by_index] == expected
        # stops
        word = greedy[8:11]
        stopped = await client.chat.completions.create(messages=MESSAGES, **asked, stop=[word])
        assert stopped.choices[0].finish_reason == "stop"
        assert stopped.choices[0].message.content == greedy[: greedy.index(word)]
        # log-probabilities
        scored = await client.chat.completions.create(messages=MESSAGES, **asked, logprobs=True, top_logprobs=2)
        found = scored.choices[0].logprobs
        assert found is not None
        assert found.content is not None
        assert "".join(each.token for each in found.content) == greedy
        assert all(each.top_logprobs[0].token == each.token for each in found.content)
        assert all(each.logprob == each.top_logprobs[0].logprob for each in found.content)


async def test_constraints_tools_and_embeddings() -> None:
    async with everything() as (_, _, url), openai_of(url) as client:
        asked: Any = {"model": "demo", "max_tokens": 100, "temperature": 0, "messages": MESSAGES}
        form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
        person = await client.chat.completions.create(**asked, response_format=form)
        found = json.loads(person.choices[0].message.content or "")
        assert found.keys() == SCHEMA["properties"].keys()
        assert isinstance(found["old"], bool)
        for extra, texts in (
            ({"regex": "[ab]{3}"}, {f"{x}{y}{z}" for x in "ab" for y in "ab" for z in "ab"}),
            ({"ebnf": 'root ::= ("a" | "ab") "bc"'}, {"abc", "abbc"}),
        ):
            constrained = await client.chat.completions.create(**asked, extra_body=extra)
            assert constrained.choices[0].message.content in texts
        named: Any = {"type": "function", "function": {"name": "add"}}
        called = await client.chat.completions.create(**asked, tools=[ADD], tool_choice=named)
        [call] = called.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "add"
        assert 0 <= json.loads(call.function.arguments)["a"] <= 99
        embedded = await client.embeddings.create(model="demo", input=TEXT)
        assert len(embedded.data[0].embedding) == 256
        responded = await client.responses.create(model="demo", input=TEXT, max_output_tokens=16, temperature=0)
        assert responded.output_text


async def test_anthropic_clients_get_the_texts_of_the_client_alone() -> None:
    anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")
    async with everything() as (served, _, url):
        greedy = await alone(served, Greedy())
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=60.0) as client:
            asked: Any = {"model": "demo", "max_tokens": 24, "messages": MESSAGES, "extra_body": {"temperature": 0}}
            message = await client.messages.create(**asked)
            assert message.content[0].text == greedy
            assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 24)
            async with client.messages.stream(**asked) as stream:
                assert "".join([each async for each in stream.text_stream]) == greedy


@pytest.mark.skipif(
    NODE is None or not (JAVASCRIPT / "node_modules" / "openai").is_dir(),
    reason="no node, or not yet: npm install --prefix tests/javascript --no-package-lock",
)
async def test_the_npm_package_gets_the_texts_of_the_client_alone() -> None:
    async with everything() as (served, _, url):
        given = {"url": url, "prompt": TEXT, "tokens": 24, "seed": 11, "greedy": await alone(served, Greedy())}
        given["sampled"] = [await alone(served, Sample(0.9, seed=11 + number)) for number in range(3)]
        pipe = asyncio.subprocess.PIPE
        program = await asyncio.create_subprocess_exec(
            str(NODE), "openai_client.js", json.dumps(given), cwd=JAVASCRIPT, stdout=pipe, stderr=pipe
        )
        checked, wrong = await program.communicate()
        assert program.returncode == 0, f"after {checked.decode()}: {wrong.decode()}"
        assert len(checked.splitlines()) == 15


async def test_what_is_wrong_has_the_routers_error_and_leaves_nothing() -> None:
    async with everything() as (served, _, url), openai_of(url) as client:
        asked: Any = {"model": "demo", "max_tokens": 4, "messages": MESSAGES}
        bad: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
        with pytest.raises(BadRequestError, match="Invalid type: nonsense"):
            await client.chat.completions.create(**asked, response_format=bad)
        with pytest.raises(BadRequestError, match="maximum context length is 2048 tokens"):
            await client.completions.create(model="demo", prompt="x" * 5000, max_tokens=4)
        with pytest.raises(NotFoundError):
            await client.chat.completions.create(**{**asked, "model": "other"})
        with pytest.raises(BadRequestError, match="is not defined"):
            await client.chat.completions.create(**asked, extra_body={"ebnf": "root ::= other"})
        # a client that leaves in the middle
        endless: Any = {**asked, "max_tokens": 1500, "stream": True, "extra_body": {"ignore_eos": True}}
        stream = await client.chat.completions.create(**endless)
        await anext(aiter(stream))
        assert len(served.server.state.handles) == 1
        await stream.close()
        await until(lambda: len(served.server.state.handles) == 0, 20)
        assert (await client.chat.completions.create(**asked)).choices


async def test_floods_and_a_lost_executor_have_the_routers_errors_and_leave_nothing() -> None:
    flags = ("--max-waiting", "4", "--max-running", "2", "--patience-s", "0.5")
    async with (
        serving(model="demo") as executor,
        working(executor.target, flags=flags) as worker,
        router(worker.port.target, flags=("--disable-retries", "--disable-circuit-breaker")) as url,
        openai_of(url) as client,
    ):
        asked: Any = {"model": "demo", "messages": MESSAGES, "temperature": 0}

        async def status() -> int:
            try:
                await client.chat.completions.create(**asked, max_tokens=8)
            except APIStatusError as error:
                return error.status_code
            return 200

        assert set(await asyncio.gather(*(status() for _ in range(60)))) == {200, 429}
        endless: Any = {"max_tokens": 1500, "stream": True, "extra_body": {"ignore_eos": True}}
        stream = aiter(await client.chat.completions.create(**asked, **endless))
        await anext(stream)
        await executor.kill()
        with pytest.raises(APIError):
            while True:
                await anext(stream)
        assert await status() == 503
        assert worker.port.methods.texts == 0


async def test_when_one_of_two_workers_dies_its_streams_fail_and_the_next_requests_succeed() -> None:
    async with serve_model(DEMO, lease_ttl_s=4) as served:
        at = ("--target", served.target)
        async with worker_process(*at) as dies, worker_process(*at) as stays:
            targets = [(await each.event("ready"))["target"] for each in (dies, stays)]
            async with router(*targets, flags=("--policy", "round_robin")) as url, openai_of(url) as client:
                asked: Any = {"model": "demo", "messages": MESSAGES, "temperature": 0}
                endless: Any = {"max_tokens": 1500, "stream": True, "extra_body": {"ignore_eos": True}}
                streams = [aiter(await client.chat.completions.create(**asked, **endless)) for _ in range(4)]
                for each in streams:
                    await anext(each)
                await dies.kill()

                async def outcome(stream: Any) -> str:
                    reason = ""
                    try:
                        async for each in stream:
                            reason = "".join(part.finish_reason or "" for part in each.choices) or reason
                    except APIError:
                        return "error"
                    return reason

                outcomes = await asyncio.gather(*map(outcome, streams))
                assert sorted(outcomes) == ["error", "error", "length", "length"]
                for _ in range(6):
                    answer = await client.chat.completions.create(**asked, max_tokens=4)
                    assert answer.choices[0].finish_reason == "length"
        await until(lambda: len(served.server.state.handles) == 0, 60)  # what the dead one had ends with its lease


async def test_when_one_of_two_workers_drains_the_next_requests_succeed() -> None:
    async with serve_model(DEMO) as served:
        async with (
            working(served.target) as first,
            working(served.target) as second,
            router(first.port.target, second.port.target, flags=("--policy", "round_robin")) as url,
            openai_of(url) as client,
        ):
            asked: Any = {"model": "demo", "max_tokens": 4, "messages": MESSAGES, "temperature": 0}
            texts = {(await client.chat.completions.create(**asked)).choices[0].message.content for _ in range(4)}
            assert len(texts) == 1
            assert min(each.port.methods.load.finished["length"] for each in (first, second)) > 0
            await first.port.methods.drain()
            for _ in range(6):
                try:
                    answer = await client.chat.completions.create(**asked)
                except APIStatusError as error:  # the router had not seen it yet
                    assert error.status_code in {502, 503}
                else:
                    assert {answer.choices[0].message.content} == texts
            assert {(await client.chat.completions.create(**asked)).choices[0].message.content} == texts
        await assert_nothing_is_left(served)


async def test_prompts_that_begin_alike_go_to_the_worker_that_has_them() -> None:
    """Cache-aware routing by the workers' events: 4 prefixes, two workers with an executor each."""
    prefixes = [f"{number} {TEXT * 6}" for number in range(4)]
    flags = ("--policy", "cache_aware", "--block-size", "16")
    async with serve_model(DEMO) as one, serve_model(DEMO) as two:
        async with (
            working(one.target) as first,
            working(two.target) as second,
            router(first.port.target, second.port.target, flags=flags) as url,
            openai_of(url) as client,
        ):
            cached = asked = 0
            for turn in range(6):
                for prefix in prefixes:
                    text = f"{prefix}{turn}, "
                    done = await client.completions.create(model="demo", prompt=text, max_tokens=2, temperature=0)
                    assert done.usage is not None
                    if turn:
                        details = done.usage.prompt_tokens_details
                        cached += 0 if details is None else details.cached_tokens or 0
                        asked += len(prefix) // 16 * 16
            assert cached >= 0.95 * asked
        await assert_nothing_is_left(one)
        await assert_nothing_is_left(two)
