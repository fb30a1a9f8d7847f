"""Grammars over the wire: the executor's masks are the caller's own, token by token, whatever is done to a sequence."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from ferrum_rpc.client import (
    Accept,
    Answer,
    Capability,
    ExecutorClient,
    ExecutorError,
    FinishReason,
    GrammarKind,
    Greedy,
    InvalidRequest,
    NotSupported,
    OutputSpec,
    Positions,
    Run,
    RunEnd,
    Sample,
    Sequence,
)
from ferrum_rpc.client.fleet import FleetClient
from ferrum_rpc.core import Grammar
from ferrum_rpc.errors import Reason
from ferrum_rpc.executor.v1 import info_pb2, output_pb2
from ferrum_rpc.wire.masks import words_to_proto
from tests.support.clients import without
from tests.support.grammars import DEMO, END, MODEL, SOURCES, Watched, allowed, compiled, encode, text_by_masks
from tests.support.inside import uses
from tests.support.serving import Served, serve_identity, serve_model
from tests.support.wiring import item, pb, refused, until

PROMPT = encode("The register of ")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    async with serve_model(DEMO) as served:
        yield served


@pytest.fixture
def watched(served: Served) -> Iterator[Watched]:
    with Watched(served.runner) as watched:
        yield watched


@pytest_asyncio.fixture(loop_scope="module")
async def client(served: Served) -> AsyncIterator[ExecutorClient]:
    async with ExecutorClient(served.target, session=True) as client:
        yield client
    await until(lambda: not any(uses(served.server.state.grammars)))
    await served.check()


async def register(
    client: ExecutorClient, watched: Watched | None = None, kind: GrammarKind = GrammarKind.JSON_SCHEMA
) -> bytes:
    grammar = await client.register_grammar(kind, SOURCES[kind])
    assert grammar == Grammar(kind, SOURCES[kind].encode()).id((await client.info()).model.tokenizer_sha256)
    if watched is not None:
        watched.sources[grammar] = compiled(kind, SOURCES[kind])
    return grammar


async def text_of(sequence: Sequence, output: Greedy | Sample, prompt: list[int]) -> list[int]:
    """The whole text by single steps, with its end."""
    text = [(await sequence.prefill(prompt, output)).token]
    while text[-1] != END:
        text.append((await sequence.decode(text[-1], output)).token)
    return text


# --- masks are a function of tokens -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(GrammarKind))
async def test_single_steps_runs_and_streams_have_the_callers_masks_and_the_same_texts(served, client, watched, kind):
    grammar = await register(client, watched, kind)
    for output in (
        Greedy(grammar=grammar, grammar_from=len(PROMPT)),
        Sample(1.2, seed=8, repetition_penalty=1.3, logprob=True, grammar=grammar, grammar_from=len(PROMPT)),
    ):
        async with client.sequence() as one, client.sequence() as two, client.sequence() as three:
            text = await text_of(one, output, PROMPT)
            assert allowed(watched.sources[grammar], text) == {END}
            assert [token async for token in two.generate(PROMPT, output=output)] == text[:-1]
            assert [token async for token in two.generate([END], output=output, max_tokens=3, stop=())] == []
            answer, found = await three.prefill(PROMPT, output, run=Run(5)), list[int]()
            while True:
                found += answer.tokens.tolist()
                if answer.run_end is not RunEnd.MAX_TOKENS:
                    break
                answer = await three.decode(found[-1], output, run=Run(5))
            assert found == text and answer.run_end is RunEnd.STOP_ID
    assert watched.rows > 20 and not watched.without


async def test_truncation_forks_drafts_and_chunks_need_no_rule_of_their_own(served, client, watched):
    random_ = random.Random(3)
    grammar = await register(client, watched)
    begins = len(PROMPT)
    output = Sample(1.2, seed=1, grammar=grammar, grammar_from=begins)
    source = watched.sources[grammar]
    async with client.sequence() as sequence:
        text = await text_of(sequence, output, PROMPT)
        for _ in range(16):
            await sequence.truncate(min(sequence.length, begins))
            assert (await sequence.prefill(text[:-1], output)).token == END
            cut = random_.randrange(len(text))
            tokens = text[:cut]
            match random_.choice(["truncate", "truncate_to", "fork", "child", "verify", "accept", "chunks"]):
                case "truncate" if cut:
                    await sequence.truncate(begins + cut - 1)
                    answer = await sequence.decode(tokens[-1], output)
                case "truncate_to" if cut:
                    answer = await sequence.decode(tokens[-1], output, truncate_to=begins + cut - 1)
                case "fork":
                    [branch] = await sequence.fork(at=begins + cut - 1)
                    async with branch:
                        answer = await branch.prefill(tokens[-1:] or PROMPT[-1:], output)
                case "child" if cut:
                    async with sequence.child(at=begins + cut - 1) as branch:
                        answer = await branch.decode(tokens[-1], output)
                case "verify" if cut > 3:
                    spec = OutputSpec(Positions.ALL, output)
                    await sequence.truncate(begins + cut - 3)
                    answer = await sequence.verify(tokens[-3:], spec)
                case "accept" if 3 < cut < len(text) - 4:
                    await sequence.truncate(begins + cut - 1)
                    draft = [*text[cut : cut + 2], random_.choice([text[cut + 2], 65, END]), 66]
                    answer = await sequence.verify([tokens[-1], *draft], Accept(output))
                    assert answer.tokens.tolist()[:3] == text[cut : cut + 3]
                    tokens += answer.tokens.tolist()[:-1]
                case _:
                    async with client.sequence() as other:
                        answer = await other.prefill([*PROMPT, *tokens], output, chunk=3)
            assert allowed(source, [*tokens, answer.tokens.tolist()[-1]]) is not None
    assert watched.rows > 40


async def test_a_replay_needs_no_grammar_and_a_duplicate_gets_the_same_tokens(served: Served) -> None:
    async with ExecutorClient(served.target) as client:
        grammar = await register(client)
        output = output_pb2.OutputSpec(
            sample=output_pb2.SampleOutput(grammar_id=grammar, grammar_from=len(PROMPT), seed=3)
        )
        one = item(PROMPT, output=output, request_id="the same", run={"max_tokens": 6})
        first, second = [await served.executor.Prefill(pb.PrefillRequest(item=one)) for _ in range(2)]
        assert second.output.replayed and first.row_blocks == second.row_blocks
        other = item(PROMPT, output=output, request_id="the same")
        await refused(served.executor.Prefill(pb.PrefillRequest(item=other)), Reason.REQUEST_ID_REUSED)
        await served.release(first.output.handle, request_id="x")


async def test_a_fleet_registers_a_grammar_where_it_is_needed(served: Served) -> None:
    async with serve_model(DEMO) as second, FleetClient([served.target, second.target]) as fleet:
        before = len(served.server.state.grammars) + len(second.server.state.grammars)
        grammar = await fleet.register_grammar(GrammarKind.REGEX, "[x-z]{3}")
        output = Greedy(grammar=grammar, grammar_from=len(PROMPT))

        async def one() -> list[int]:
            async with fleet.sequence() as sequence:
                return [token async for token in sequence.generate(PROMPT, output=output)]

        for _ in range(20):
            texts = await asyncio.gather(*(one() for _ in range(8)))
            assert len({tuple(each) for each in texts}) == 1 and len(texts[0]) == 3
            if len(served.server.state.grammars) + len(second.server.state.grammars) == before + 2:
                break
        else:
            pytest.fail("all texts were of one executor")


# --- texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "temperature"), [*((kind, 1.1) for kind in GrammarKind), (GrammarKind.JSON_SCHEMA, 0.0)]
)
async def test_drafts_by_a_grammar_yield_the_tokens_of_single_steps_by_the_callers_masks(
    served: Served, client: ExecutorClient, kind: GrammarKind, temperature: float
) -> None:
    """Whatever is drafted: the right tokens, others that are allowed, and what is forbidden."""
    grammar, source, dice = await register(client, kind=kind), compiled(kind, SOURCES[kind]), random.Random(4)
    drafted = accepted = 0
    for seed in range(4):
        text = await text_by_masks(client, PROMPT, source, temperature, seed)
        choice = Sample(temperature, seed=seed, grammar=grammar, grammar_from=len(PROMPT))
        async with client.sequence() as sequence:
            found = [(await sequence.prefill(PROMPT, choice)).token]
            while found[-1] != END:
                draft = [
                    token if dice.random() < 0.8 else dice.choice([*sorted(allowed(source, text[:at]) or ()), 263])
                    for at, token in enumerate(text[len(found) : len(found) + 5], len(found))
                ]
                answer = await sequence.verify([found[-1], *draft], Accept(choice))
                drafted, accepted = drafted + len(draft), accepted + answer.tokens.size - 1
                found += answer.tokens.tolist()
                found = found[: found.index(END) + 1] if END in found else found
        assert found == text
    assert 0 < accepted < drafted


async def test_a_run_and_its_followers_end_where_the_grammar_ends(served: Served, client: ExecutorClient) -> None:
    grammar = await client.register_grammar(GrammarKind.REGEX, "abc")
    output = Greedy(grammar=grammar, grammar_from=len(PROMPT))
    async with client.sequence() as sequence:
        await sequence.prefill(PROMPT[:-1])
        first = sequence.item(PROMPT[-1:], output, run=Run(2))
        second = sequence.item((), output, run=Run(8), follows=first)
        answers = await asyncio.gather(client.forward([first]), client.forward([second]))
        [[one], [two]] = answers
        assert isinstance(one, Answer) and isinstance(two, Answer)
        assert [*one.tokens.tolist(), *two.tokens.tolist()] == [*b"abc", END]
        assert (one.run_end, two.run_end) == (RunEnd.MAX_TOKENS, RunEnd.STOP_ID)
        assert sequence.length == len(PROMPT) + 3  # the end is not fed
        follower = sequence.item((), output, run=Run(8), follows=second)
        [broken] = await client.forward([follower])
        assert isinstance(broken, ExecutorError) and broken.reason is Reason.CHAIN_BROKEN
        answer = await sequence.decode(END, output, run=Run(8))
        assert answer.tokens.tolist() == [END] and answer.run_end is RunEnd.STOP_ID


# --- what is refused --------------------------------------------------------------------------------------------------


async def test_a_forbidden_token_refuses_its_item_alone_and_changes_nothing(served, client):
    grammar = await register(client)
    output = Greedy(grammar=grammar, grammar_from=len(PROMPT))
    async with client.sequence() as sequence, client.sequence() as neighbour, client.sequence() as made:
        first = (await sequence.prefill(PROMPT, output)).token
        await neighbour.prefill(PROMPT)
        for tokens, at in (([first, ord("x")], 1), ([ord("x")], 0), ([END], 0), ([263], 0), ([first, END], 1)):
            for spec in (output, OutputSpec(Positions.NONE, output), OutputSpec(Positions.ALL, output)):
                results = await client.forward([sequence.item(tokens, spec), neighbour.item([first], output)])
                [bad, good] = results
                assert isinstance(bad, InvalidRequest) and bad.field == "token_ids" and bad.metadata["at"] == str(at)
                assert isinstance(good, Answer) and sequence.length == len(PROMPT)
                await neighbour.truncate(len(PROMPT))
        with pytest.raises(InvalidRequest):
            await made.prefill([*PROMPT, *b"[]"], output)
        with pytest.raises(InvalidRequest):
            await client.forward([sequence.item([1], output), neighbour.item([first])], all_or_nothing=True)
        with pytest.raises(InvalidRequest):
            await sequence.verify([ord("x"), first], Accept(Sample(0.0, grammar=grammar, grammar_from=len(PROMPT))))
        assert (await sequence.decode(first, output, run=Run(3))).tokens.size == 3
        text = [token async for token in made.generate(PROMPT, output=output)]
        assert made.length == len(PROMPT) + len(text)


async def test_a_draft_that_is_forbidden_is_only_not_accepted(served: Served, client: ExecutorClient) -> None:
    grammar, source = await register(client), compiled(GrammarKind.JSON_SCHEMA, SOURCES[GrammarKind.JSON_SCHEMA])
    for sampling in (
        Sample(0.0, grammar=grammar, grammar_from=len(PROMPT)),
        Sample(1.3, seed=4, grammar=grammar, grammar_from=len(PROMPT)),
    ):
        async with client.sequence() as sequence, client.sequence() as plain:
            text = await text_of(plain, sampling, PROMPT)
            await sequence.prefill(PROMPT, sampling)
            ids, chances = [[text[1], 9], [8, 9], [text[3], 9]], [[0.5, 0.5]] * 3
            for accept in (Accept(sampling), Accept(sampling, ids, chances)):
                answer = await sequence.verify([text[0], text[1], 8, text[3]], accept)
                assert answer.tokens.tolist()[0] in range(264) and 8 not in answer.tokens
                assert allowed(source, [text[0], *answer.tokens.tolist()]) is not None
                await sequence.truncate(len(PROMPT))


async def test_rows_before_the_text_are_not_constrained(served, client, watched):
    grammar = await register(client, watched)
    async with client.sequence() as plain, client.sequence() as sequence:
        rows = (await plain.prefill(PROMPT, OutputSpec(Positions.ALL, Greedy()))).tokens.tolist()
        spec = OutputSpec(Positions.ALL, Greedy(grammar=grammar, grammar_from=len(PROMPT)))
        found = (await sequence.prefill(PROMPT, spec)).tokens.tolist()
        assert found == [*rows[:-1], ord("{")] and (watched.rows, watched.without) == (1, len(PROMPT) - 1)
        later = Greedy(grammar=grammar, grammar_from=len(PROMPT) + 50)
        answer = await sequence.decode(rows[-1], later, truncate_to=len(PROMPT))
        assert answer.token == (await plain.decode(rows[-1])).token


async def test_what_is_malformed_or_unknown_is_refused_with_its_field(served: Served, client: ExecutorClient) -> None:
    grammar, executor = await register(client), served.executor

    def asked(**fields: Any) -> Any:
        return executor.Prefill(pb.PrefillRequest(item=item(PROMPT, output={"greedy": fields})))

    for fields, field in (
        ({"grammar_id": grammar, "token_mask_id": bytes(32)}, "output.greedy.grammar_id"),
        ({"grammar_id": grammar, "row_mask_ids": [bytes(32)]}, "output.greedy.grammar_id"),
        ({"grammar_id": grammar, "token_mask": words_to_proto(bytes(36))}, "output.greedy.grammar_id"),
        ({"grammar_id": b"short"}, "output.greedy.grammar_id"),
        ({"grammar_from": 3}, "output.greedy.grammar_from"),
    ):
        assert (await refused(asked(**fields), Reason.INVALID_REQUEST)).field == field
    unknown = await refused(asked(grammar_id=bytes(32)), Reason.GRAMMAR_UNKNOWN)
    assert unknown.metadata == {"grammar_id": bytes(32).hex()} and unknown.field == "output.grammar_id"
    many = item([1] * 66, output={"positions": output_pb2.POSITIONS_ALL, "greedy": {"grammar_id": grammar}})
    await refused(executor.Prefill(pb.PrefillRequest(item=many)), Reason.INVALID_REQUEST)
    for request, field in (
        ({"kind": 0, "text": b"a"}, "kind"),
        ({"kind": 9, "text": b"a"}, "kind"),
        ({"kind": 2, "text": b" "}, "text"),
        ({"kind": 2, "text": b"\xff\xfe"}, "text"),
        ({"kind": 2, "text": b"(("}, "text"),
        ({"kind": 1, "text": b"{"}, "text"),
        ({"kind": 3, "text": b"startx: 'a'"}, "text"),
        ({"kind": 2, "text": b"a" * ((256 << 10) + 1)}, "text"),
    ):
        call = executor.RegisterGrammar(pb.RegisterGrammarRequest(**request))
        assert (await refused(call, Reason.INVALID_REQUEST)).field == field
    for wrong in (Greedy(grammar="x"), Greedy(grammar=grammar, mask=bytes(32)), Greedy(grammar_from=2)):  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest):
            await client.sequence().prefill(PROMPT, wrong)
    with pytest.raises(InvalidRequest):
        await client.register_grammar(GrammarKind.REGEX, {"a": 1})


async def test_an_executor_without_grammars_says_so(tmp_path: Path) -> None:
    copied = tmp_path / "model"
    copied.mkdir()
    for each in ("config.json", "model.safetensors", "generation_config.json"):
        shutil.copy(MODEL / each, copied)
    without = [replace(DEMO, path=str(copied)), replace(DEMO, max_grammars=0)]
    for config in without:
        async with serve_model(config) as served, ExecutorClient(served.target) as client:
            assert Capability.GRAMMAR not in (await client.info()).capabilities
            with pytest.raises(NotSupported):
                await client.register_grammar(GrammarKind.REGEX, "a")
            with pytest.raises(NotSupported):
                await client.sequence().prefill(PROMPT, Greedy(grammar=bytes(32)))
            call = served.executor.RegisterGrammar(pb.RegisterGrammarRequest(kind="GRAMMAR_KIND_REGEX", text=b"a"))
            await refused(call, Reason.NOT_SUPPORTED)
    async with serve_identity() as served:
        for needs in ([info_pb2.CAPABILITY_GRAMMAR], []):
            needed = item(PROMPT, needs=needs, output={"greedy": {"grammar_id": bytes(32)}})
            await refused(served.executor.Prefill(pb.PrefillRequest(item=needed)), Reason.NOT_SUPPORTED)
        await served.check()


@pytest.mark.parametrize("missing", [None, Capability.RUN], ids=["runs", "steps"])
async def test_a_text_that_its_grammar_ends_is_over_before_min_tokens_too(served, missing):
    """Nothing else is allowed there: the grammar is the stronger demand."""
    async with ExecutorClient(served.target, session=True) as client, client.sequence() as sequence:
        info = await client.info()
        grammar = await client.register_grammar(GrammarKind.REGEX, "abc")
        if missing is not None:
            without(client, missing)
        output = Sample(temperature=0.0, grammar=grammar, grammar_from=len(PROMPT))
        stream = sequence.stream(PROMPT, max_tokens=20, min_tokens=10, output=output)
        found = [each async for each in stream]
        assert found[-1].finish_reason is FinishReason.STOP
        assert found[-1].token in info.model.eos_token_ids
        assert not {each.token for each in found[:-1]} & set(info.model.eos_token_ids)
        assert sequence.length == len(PROMPT) + len(found) - 1
