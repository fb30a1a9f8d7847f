"""Real clients, an unmodified router, the worker and an executor: `openai` and `anthropic` get the client's texts."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from ferrum_rpc.client import ExecutorClient, Greedy, Sample
from tests.support.clients import text
from tests.support.grammars import DEMO
from tests.support.process import ROOT, environment, free_port, serving
from tests.support.scheduling import assert_nothing_is_left
from tests.support.serving import Served, serve_model
from tests.support.waiting import until
from tests.support.workers import Working, worker_process, working

if TYPE_CHECKING:
    from openai import AsyncOpenAI

MISSING = [each for each in ("smg_grpc_proto", "smg", "openai") if find_spec(each) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

TEXT = "In the beginning God created the heaven and "
MESSAGES: Any = [{"role": "user", "content": TEXT}]
START_S = 60.0
ENDLESS: Any = {"stream": True, "extra_body": {"ignore_eos": True}}
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
    from openai import AsyncOpenAI  # it takes two seconds, which each process of the suite would spend

    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60.0) as client:
        yield client


def chat(client: AsyncOpenAI, **more: Any) -> Any:
    """A greedy text of a few tokens, unless ``more`` says otherwise."""
    asked = {"model": "demo", "messages": MESSAGES, "temperature": 0, "max_tokens": 4, **more}
    return client.chat.completions.create(**asked)


TOGETHER = pytest.mark.asyncio(loop_scope="module")


@asynccontextmanager
async def everything() -> AsyncIterator[tuple[Served, Working, str]]:
    """An executor, a worker and a router; nothing is left of them at the end."""
    async with serve_model(DEMO) as served:
        async with working(served.target) as worker, router(worker.port.target) as url:
            yield served, worker, url
            await until(lambda: worker.port.methods.texts == 0, 20)
        await assert_nothing_is_left(served)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one_router() -> AsyncIterator[tuple[Served, Working, str]]:
    """For all tests that leave it as it was."""
    async with everything() as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def through(one_router: tuple[Served, Working, str]) -> AsyncIterator[tuple[Served, str]]:
    """The executor and the router's address; nothing of a test is left at the end."""
    served, worker, url = one_router
    yield served, url
    await until(lambda: not worker.port.methods.texts and not len(served.server.state.handles), 20)
    await assert_nothing_is_left(served)


async def alone(served: Served, output: Greedy | Sample) -> str:
    async with ExecutorClient(served.target) as client:
        return bytes(await text(client, list(TEXT.encode()), 24, output)).decode(errors="replace")


@TOGETHER
async def test_openai_clients_get_the_texts_of_the_client_alone(through: tuple[Served, str]) -> None:
    served, url = through
    async with openai_of(url) as client:
        greedy = await alone(served, Greedy())
        whole = await chat(client, max_tokens=24)
        [choice] = whole.choices
        assert (choice.message.content, choice.finish_reason) == (greedy, "length")
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(TEXT), 24)
        completion = await client.completions.create(prompt=TEXT, model="demo", max_tokens=24, temperature=0)
        assert completion.choices[0].text == greedy
        # streams, with usage
        pieces, usage, reasons = "", None, []
        counted: Any = {"stream": True, "stream_options": {"include_usage": True}}
        async for each in await chat(client, max_tokens=24, **counted):
            usage = each.usage or usage
            for part in each.choices:
                pieces += part.delta.content or ""
                reasons += [part.finish_reason] if part.finish_reason else []
        assert (pieces, reasons) == (greedy, ["length"])
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(TEXT), 24)
        # several texts with seeds
        texts = await chat(client, max_tokens=24, temperature=0.9, n=3, seed=11)
        by_index = sorted(texts.choices, key=lambda each: each.index)
        expected = [await alone(served, Sample(0.9, seed=11 + number)) for number in range(3)]
        assert [each.message.content for each in by_index] == expected
        # stops
        word = greedy[8:11]
        stopped = await chat(client, max_tokens=24, stop=[word])
        assert stopped.choices[0].finish_reason == "stop"
        assert stopped.choices[0].message.content == greedy[: greedy.index(word)]
        # log-probabilities
        scored = await chat(client, max_tokens=24, logprobs=True, top_logprobs=2)
        found = scored.choices[0].logprobs
        assert "".join(each.token for each in found.content) == greedy
        assert all(each.top_logprobs[0].token == each.token for each in found.content)
        assert all(each.logprob == each.top_logprobs[0].logprob for each in found.content)


@TOGETHER
async def test_constraints_tools_and_embeddings(through: tuple[Served, str]) -> None:
    async with openai_of(through[1]) as client:
        form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
        person = await chat(client, max_tokens=100, response_format=form)
        found = json.loads(person.choices[0].message.content or "")
        assert found.keys() == SCHEMA["properties"].keys()
        assert isinstance(found["old"], bool)
        for extra, texts in (
            ({"regex": "[ab]{3}"}, {f"{x}{y}{z}" for x in "ab" for y in "ab" for z in "ab"}),
            ({"ebnf": 'root ::= ("a" | "ab") "bc"'}, {"abc", "abbc"}),
        ):
            constrained = await chat(client, max_tokens=100, extra_body=extra)
            assert constrained.choices[0].message.content in texts
        named: Any = {"type": "function", "function": {"name": "add"}}
        called = await chat(client, max_tokens=100, tools=[ADD], tool_choice=named)
        [call] = called.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "add"
        assert 0 <= json.loads(call.function.arguments)["a"] <= 99
        embedded = await client.embeddings.create(model="demo", input=TEXT)
        assert len(embedded.data[0].embedding) == 256
        responded = await client.responses.create(model="demo", input=TEXT, max_output_tokens=16, temperature=0)
        assert responded.output_text


@TOGETHER
async def test_anthropic_clients_get_the_texts_of_the_client_alone(through: tuple[Served, str]) -> None:
    anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")
    served, url = through
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
@TOGETHER
async def test_the_npm_package_gets_the_texts_of_the_client_alone(through: tuple[Served, str]) -> None:
    served, url = through
    given = {"url": url, "prompt": TEXT, "tokens": 24, "seed": 11, "greedy": await alone(served, Greedy())}
    given["sampled"] = [await alone(served, Sample(0.9, seed=11 + number)) for number in range(3)]
    pipe = asyncio.subprocess.PIPE
    program = await asyncio.create_subprocess_exec(
        str(NODE), "openai_client.js", json.dumps(given), cwd=JAVASCRIPT, stdout=pipe, stderr=pipe
    )
    checked, wrong = await program.communicate()
    assert program.returncode == 0, f"after {checked.decode()}: {wrong.decode()}"
    assert len(checked.splitlines()) == 15


@TOGETHER
async def test_what_is_wrong_has_the_routers_error_and_leaves_nothing(through: tuple[Served, str]) -> None:
    import openai

    served, url = through
    async with openai_of(url) as client:
        bad: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
        with pytest.raises(openai.BadRequestError, match="Invalid type: nonsense"):
            await chat(client, response_format=bad)
        with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens"):
            await client.completions.create(model="demo", prompt="x" * 5000, max_tokens=4)
        with pytest.raises(openai.NotFoundError):
            await chat(client, model="other")
        with pytest.raises(openai.BadRequestError, match="is not defined"):
            await chat(client, extra_body={"ebnf": "root ::= other"})
        # a client that leaves in the middle
        stream = await chat(client, max_tokens=1500, **ENDLESS)
        await anext(aiter(stream))
        assert len(served.server.state.handles) == 1
        await stream.close()
        await until(lambda: len(served.server.state.handles) == 0, 20)
        assert (await chat(client)).choices


async def test_floods_and_a_lost_executor_have_the_routers_errors_and_leave_nothing() -> None:
    import openai

    flags = ("--max-waiting", "4", "--max-running", "2", "--patience-s", "0.5")
    async with (
        serving(model="demo") as executor,
        working(executor.target, flags=flags) as worker,
        router(worker.port.target, flags=("--disable-retries", "--disable-circuit-breaker")) as url,
        openai_of(url) as client,
    ):

        async def status() -> int:
            try:
                await chat(client, max_tokens=8)
            except openai.APIStatusError as error:
                return error.status_code
            return 200

        assert set(await asyncio.gather(*(status() for _ in range(60)))) == {200, 429}
        stream = aiter(await chat(client, max_tokens=1500, **ENDLESS))
        await anext(stream)
        await executor.kill()
        with pytest.raises(openai.APIError):
            while True:
                await anext(stream)
        assert await status() == 503
        assert worker.port.methods.texts == 0


async def test_when_one_of_two_workers_dies_its_streams_fail_and_the_next_requests_succeed() -> None:
    import openai

    async with serve_model(DEMO, lease_ttl_s=2) as served:
        at = ("--target", served.target)
        async with worker_process(*at) as dies, worker_process(*at) as stays:
            targets = [(await each.event("ready"))["target"] for each in (dies, stays)]
            async with router(*targets, flags=("--policy", "round_robin")) as url, openai_of(url) as client:
                streams = [aiter(await chat(client, max_tokens=300, **ENDLESS)) for _ in range(4)]
                for each in streams:
                    await anext(each)
                await dies.kill()

                async def outcome(stream: Any) -> str:
                    reason = ""
                    try:
                        async for each in stream:
                            reason = "".join(part.finish_reason or "" for part in each.choices) or reason
                    except openai.APIError:
                        return "error"
                    return reason

                outcomes = await asyncio.gather(*map(outcome, streams))
                assert sorted(outcomes) == ["error", "error", "length", "length"]
                for _ in range(6):
                    assert (await chat(client)).choices[0].finish_reason == "length"
        await until(lambda: len(served.server.state.handles) == 0, 60)  # what the dead one had ends with its lease


async def test_when_one_of_two_workers_drains_the_next_requests_succeed() -> None:
    import openai

    async with serve_model(DEMO) as served:
        async with (
            working(served.target) as first,
            working(served.target) as second,
            router(first.port.target, second.port.target, flags=("--policy", "round_robin")) as url,
            openai_of(url) as client,
        ):
            texts = {(await chat(client)).choices[0].message.content for _ in range(4)}
            assert len(texts) == 1
            assert min(each.port.methods.load.finished["length"] for each in (first, second)) > 0
            await first.port.methods.drain()
            for _ in range(6):
                try:
                    answer = await chat(client)
                except openai.APIStatusError as error:  # the router had not seen it yet
                    assert error.status_code in {502, 503}
                else:
                    assert {answer.choices[0].message.content} == texts
            assert {(await chat(client)).choices[0].message.content} == texts
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
                    if turn:
                        details = done.usage.prompt_tokens_details
                        cached += 0 if details is None else details.cached_tokens or 0
                        asked += len(prefix) // 16 * 16
            assert cached >= 0.95 * asked
        await assert_nothing_is_left(one)
        await assert_nothing_is_left(two)
