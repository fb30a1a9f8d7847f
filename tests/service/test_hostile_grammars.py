"""Grammars that need all time and memory, and processes of grammars that end: typed errors, and neighbours go on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from ferrum_rpc.client import Answer, ExecutorClient, GrammarKind, Greedy, Run, RunEnd, Sample
from ferrum_rpc.engine.operations import TorchRunner
from ferrum_rpc.errors import GrammarTooComplex, GrammarUnknown, InvalidRequest, QueueFull, Reason
from tests.support.grammars import AMBIGUOUS, DEMO, END, IMPOSSIBLE, SOURCES, TOO_COMPLEX, allowed, compiled, decode
from tests.support.inside import grammar_pool
from tests.support.process import serving
from tests.support.ranks import World
from tests.support.serving import Gate, Served, serve_identity, serve_model
from tests.support.wiring import pb, until

PROMPT = [*b"The register of "]
TEXT = SOURCES[GrammarKind.JSON_SCHEMA]
LONGEST = "many rules that refer to each other"
"""It is compiled until all of its processor time is gone."""

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def lowered() -> Iterator[list[int]]:
    """The priorities that processes would get: with a low one they would hardly run beside other tests."""
    found = list[int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "setpriority", lambda which, process, priority: found.append(priority))
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(lowered: list[int]) -> AsyncIterator[Served]:
    async with serve_model(DEMO, max_grammar_bytes=2 << 20) as served:
        yield served


async def decodes(client: ExecutorClient, output: Greedy, stop: asyncio.Event) -> list[float]:
    """Single steps of a neighbour until it is to stop: the seconds that each took."""
    took, loop = [], asyncio.get_running_loop()
    async with client.sequence() as sequence:
        token = (await sequence.prefill(PROMPT, output)).token
        while not took or not stop.is_set():
            began = loop.time()
            answer = await sequence.decode(token, output, truncate_to=len(PROMPT))
            took.append(loop.time() - began)
            assert answer.token is not None
    return took


@pytest.mark.parametrize("name", [*TOO_COMPLEX, *IMPOSSIBLE])
async def test_a_grammar_that_cannot_be_compiled_is_refused_and_no_neighbour_waits(served, lowered, name):
    kind, text = {**TOO_COMPLEX, **IMPOSSIBLE}[name]
    lowered.clear()
    async with ExecutorClient(served.target, session=True) as client, ExecutorClient(served.target) as other:
        grammar = await client.register_grammar(GrammarKind.JSON_SCHEMA, TEXT)
        stop = asyncio.Event()
        neighbour = asyncio.create_task(decodes(client, Greedy(grammar=grammar, grammar_from=len(PROMPT)), stop))
        with pytest.raises(GrammarTooComplex if name in TOO_COMPLEX else InvalidRequest) as caught:
            await other.register_grammar(kind, text)
        stop.set()
        assert await neighbour, "it had steps meanwhile"
        assert name != LONGEST or min(lowered) > 0
        assert text[:40] not in caught.value.message
        assert len(served.server.state.grammars) == len(grammar_pool(served.runner))
        again = await other.register_grammar(GrammarKind.JSON_SCHEMA, TEXT)
        assert again == grammar


async def test_a_mask_that_exceeds_its_time_ends_its_item_alone(served: Served) -> None:
    async with ExecutorClient(served.target, session=True) as client:
        bad = await client.register_grammar(GrammarKind.LARK, AMBIGUOUS)
        good = await client.register_grammar(GrammarKind.JSON_SCHEMA, TEXT)
        output, begins = Greedy(grammar=good, grammar_from=len(PROMPT)), len(PROMPT)
        async with client.sequence() as hostile, client.sequence() as neighbour:
            text = [token async for token in neighbour.generate(PROMPT, output=output)]
            await neighbour.truncate(begins)
            many = [*PROMPT, *b"a" * 400]
            with pytest.raises(GrammarTooComplex):
                await hostile.prefill(many, Greedy(grammar=bad, grammar_from=begins))
            assert hostile.length == 0
            stop = asyncio.Event()
            took = asyncio.create_task(decodes(client, output, stop))
            await hostile.prefill(many[:-200])
            sample = Sample(5.0, seed=1, grammar=bad, grammar_from=begins)
            end, tokens = None, 0
            while end is None or end is RunEnd.MAX_TOKENS:  # some run ends: by its grammar, or for its time
                try:
                    answer = await hostile.decode(ord("a"), sample, run=Run(32))
                except GrammarTooComplex:
                    break
                end, tokens = answer.run_end, tokens + answer.tokens.size
                if end is RunEnd.CUT:
                    assert answer.run_cause is not None and answer.run_cause.reason is Reason.GRAMMAR_TOO_COMPLEX
            stop.set()
            assert len(await took) > 20
            assert decode(text).startswith('{"name":')
    await served.check()


def processes(served: Served) -> list[int]:
    """Those of the grammars, which are children of the first."""
    first = grammar_pool(served.runner).starter.process.pid
    found = []
    for each in Path("/proc").iterdir():
        if each.name.isdecimal():
            try:
                fields = (each / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == first and fields[0] != "Z":
                found.append(int(each.name))
    return found


@pytest.mark.parametrize(("what", "stage"), [("the grammar", "forward"), ("the first process", "commit")])
async def test_a_process_that_is_killed_in_a_step_is_started_again_and_nobody_notices(what: str, stage: str) -> None:
    gate = Gate(stage)
    async with serve_model(DEMO, stage=gate) as served, ExecutorClient(served.target, session=True) as client:
        grammar = await client.register_grammar(GrammarKind.JSON_SCHEMA, TEXT)
        output = Sample(1.0, seed=2, grammar=grammar, grammar_from=len(PROMPT))
        async with client.sequence() as plain, client.sequence() as sequence:
            text = [token async for token in plain.generate(PROMPT, output=output)]
            first = (await sequence.prefill(PROMPT, output)).token
            running = await gate.hold(sequence.decode(first, output, run=Run(32)))
            first_process = grammar_pool(served.runner).starter.process.pid
            victims = processes(served) if what == "the grammar" else [first_process]
            assert victims
            for each in victims:
                os.kill(each, signal.SIGKILL)
            await until(lambda: not set(victims) & set(processes(served)))
            gate.open()
            answer = await running
            found = [first, *answer.tokens.tolist()]
            assert found[: len(text)] == text[: len(found)]
            await sequence.truncate(len(PROMPT))
            rest = [token async for token in sequence.generate([text[0]], output=output)]
            assert [text[0], *rest] == text
        assert processes(served)
        await served.check()


async def test_a_caller_has_its_share_and_finds_nothing_of_others() -> None:
    async with serve_model(replace(DEMO, max_grammars=4), max_grammars=4, tokens=("one 1", "two 2")) as served:
        one, two = map(served.by, "12")

        async def register(by: Served, text: str) -> bytes:
            request = pb.RegisterGrammarRequest(kind="GRAMMAR_KIND_REGEX", text=text.encode())
            return bytes((await by.executor.RegisterGrammar(request)).grammar_id)

        async with ExecutorClient(served.target, token=one.executor.token) as client:
            limits = (await client.info()).limits
            assert (limits.max_grammars, limits.max_grammar_bytes) == (4, 256 << 10)
            first = await register(one, "a")
            assert await register(two, "a") == first and len(grammar_pool(served.runner)) == 2
            second = await register(two, "b")
            with pytest.raises(GrammarUnknown):
                await client.sequence().prefill(PROMPT, Greedy(grammar=second, grammar_from=len(PROMPT)))
            kept = [await client.register_grammar(GrammarKind.REGEX, text) for text in ("c", "d", "e")]
            assert len(served.server.state.grammars) == 4 == len(grammar_pool(served.runner))
            for each, letter in zip(kept, "cde", strict=True):  # the first has gone, and comes back
                async with client.sequence() as sequence:
                    answer = await sequence.prefill(PROMPT, Greedy(grammar=each, grammar_from=len(PROMPT)))
                    assert answer.token == ord(letter)
            await until(lambda: len(grammar_pool(served.runner)) == 4)


async def test_grammars_in_use_are_not_dropped() -> None:
    gate = Gate("forward")
    config = replace(DEMO, max_grammars=1)
    async with serve_model(config, stage=gate, max_grammars=1) as served, ExecutorClient(served.target) as client:
        grammar = await client.register_grammar(GrammarKind.REGEX, "a")
        async with client.sequence() as sequence:
            held = await gate.hold(sequence.prefill(PROMPT, Greedy(grammar=grammar, grammar_from=len(PROMPT))))
            with pytest.raises(QueueFull) as caught:
                await client.register_grammar(GrammarKind.REGEX, "b")
            assert caught.value.metadata == {"max_grammars": "1"}
            gate.open()
            assert (await held).token == ord("a")
            await client.register_grammar(GrammarKind.REGEX, "b")


async def test_an_engine_in_a_process_of_its_own_and_a_restart() -> None:
    flags = ("--dtype", "float32")
    async with (
        serving("--engine", "process", *flags, model="demo", kv_blocks=512) as server,
        ExecutorClient(server.target, session=True) as client,
    ):
        grammar = await client.register_grammar(GrammarKind.JSON_SCHEMA, TEXT)
        output = Sample(1.0, seed=2, grammar=grammar, grammar_from=len(PROMPT))
        sequence = client.sequence(rebuild=True)
        text = [token async for token in sequence.generate(PROMPT, output=output)]
        await sequence.truncate(len(PROMPT) + 4)
        port = int(server.target.rpartition(":")[2])
        await server.kill()
        async with serving(*flags, model="demo", kv_blocks=512, port=port):
            found = [token async for token in sequence.generate([text[4]], output=output)]
            assert [*text[:5], *found] == text
            item = client.sequence().item(PROMPT, Greedy(grammar=grammar, grammar_from=len(PROMPT)))
            [answer] = await client.forward([item])
            assert isinstance(answer, Answer) and answer.token == ord("{")


async def test_two_ranks_choose_as_one() -> None:
    """Ranks are threads here, in the place of the model that was built."""
    kind, texts, worlds = GrammarKind.REGEX, [], list[World]()

    def ranked(cut: dict[str, int], _: TorchRunner) -> TorchRunner:
        worlds.append(World(replace(DEMO, **cut)))
        return worlds[-1].runner

    cuts = ({"tensor_parallel": 2}, {"pipeline_parallel": 2})
    ways: list[Any] = [serve_model(DEMO), *(serve_identity(kv_blocks=8, made=partial(ranked, cut)) for cut in cuts)]
    for way in ways:
        async with way as served, ExecutorClient(served.target, session=True) as client:
            grammar = await client.register_grammar(kind, SOURCES[kind])
            about = {"grammar": grammar, "grammar_from": len(PROMPT)}
            outputs = [Greedy(**about), Sample(1.0, seed=2, **about)]

            async def text(output: Greedy | Sample, client: ExecutorClient = client) -> list[int]:
                async with client.sequence() as sequence:
                    return [token async for token in sequence.generate(PROMPT, output=output)]

            texts.append(await asyncio.gather(*map(text, outputs)))
            await served.check()
    for each in worlds:
        each.close()
    assert texts[0] == texts[1] == texts[2]
    source = compiled(kind, SOURCES[kind])
    assert all(allowed(source, [*each, END]) == {END} for each in texts[0])
