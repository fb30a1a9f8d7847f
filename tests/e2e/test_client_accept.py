"""Speculation through the client: what it emits, and what the client keeps of the sequence."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio

from ferrum_rpc.client import Accept, Capability, ExecutorClient, OutputSpec, Positions, Sample
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.executor.v1 import model_executor_pb2
from ferrum_rpc.wire.items import handle_to_proto
from tests.serving import Served, serve_identity

PROMPT = [3, 1, 4, 1, 5]
BOTH_WAYS = pytest.mark.parametrize("session", [False, True], ids=["unary", "session"])


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    async with serve_identity(kv_blocks=64, block_size=4, max_context=256, positional=True) as served:
        yield served


async def plain(client: ExecutorClient, count: int, output: Sample | None = None) -> list[int]:
    async with client.sequence() as sequence:
        how = {"output": output} if output else {}
        return [token async for token in sequence.generate(PROMPT, max_tokens=count, stop=(), **how)]


@BOTH_WAYS
@pytest.mark.parametrize("sampling", [None, Sample(seed=9, top_p=0.9)], ids=["greedy", "sampled"])
async def test_a_sequence_knows_what_it_holds_after_every_draft(
    served: Served, session: bool, sampling: Sample | None
) -> None:
    async with ExecutorClient(served.target, session=session) as client:
        assert Capability.OUTPUT_ACCEPT in (await client.info()).capabilities
        text = await plain(client, 40, sampling)
        sequence = client.sequence(keep_tokens=True)
        emitted = [(await sequence.prefill(PROMPT, sampling or OutputSpec())).token]
        for right in (0, 3, 1, 4, 2, 0, 4, 3):
            at = len(emitted)
            draft = [*text[at : at + right], *[(token + 1) % 256 for token in text[at + right : at + 5]]]
            if right % 2:
                answer = await sequence.verify([emitted[-1], *draft], Accept(sampling))
            else:
                [answer] = await client.forward([sequence.item([emitted[-1], *draft], Accept(sampling))])
            emitted += answer.tokens.tolist()
            assert sequence.tokens == [*PROMPT, *emitted[:-1]] and sequence.length == answer.length
            assert len(answer.tokens) == right + 1
        assert emitted == text[: len(emitted)]
        [branch] = await sequence.fork()
        assert branch.tokens == sequence.tokens
        assert (await branch.decode(emitted[-1], sampling or OutputSpec())).token == text[len(emitted)]


async def test_a_sequence_that_is_lost_behind_a_draft_is_rebuilt_without_its_rejected_tokens(served: Served) -> None:
    async with ExecutorClient(served.target) as client:
        text = await plain(client, 30)
        sequence = client.sequence(rebuild=True)
        await sequence.prefill(PROMPT)
        answer = await sequence.verify([*text[:3], 1, 1, 1], Accept())
        assert answer.tokens.tolist() == text[1:4]
        assert sequence.handle is not None
        release = model_executor_pb2.ReleaseRequest(handle=handle_to_proto(sequence.handle), any_version=True)
        await served.executor.Release(release)
        answer = await sequence.verify([*text[3:7], 1], Accept())
        assert answer.tokens.tolist() == text[4:8]
        assert sequence.tokens == [*PROMPT, *text[:7]]


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Accept(Sample(), [[1, 2]], [[0.5]]), "output.accept.draft_probabilities"),
        (lambda: Accept(Sample(), [[1, 2]]), "output.accept.draft_probabilities"),
        (lambda: Accept(Sample(), None, [[1.0]]), "output.accept.draft_probabilities"),
        (lambda: Accept(Sample(), [1, 2], [0.5, 0.5]), "output.accept.draft_token_ids"),
        (lambda: Accept(Sample(), [[1, 2], [1]], [[0.5, 0.5]]), "output.accept.draft_token_ids"),
        (lambda: Accept(Sample(), [[1.5]], [[1.0]]), "output.accept.draft_token_ids"),
        (lambda: Accept(Sample(), [[-1]], [[1.0]]), "output.accept.draft_token_ids"),
        (lambda: Accept(Sample(), [[1 << 32]], [[1.0]]), "output.accept.draft_token_ids"),
        (lambda: Accept(Sample(), [[1]], [["much"]]), "output.accept.draft_probabilities"),
    ],
)
def test_arrays_that_do_not_agree_are_refused_where_they_are_given(make, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        make()
    assert refused.value.field == field


def test_what_describes_a_draft_can_be_any_array() -> None:
    made = Accept(None, np.array([[3, 4]], np.int64), [[0.25, 0.75]])
    assert made == Accept(None, [[3, 4]], np.array([[0.25, 0.75]])) and hash(made) == hash(made)
    assert made.draft_token_ids.tolist() == [[3, 4]] and made.draft_probabilities.tolist() == [[0.25, 0.75]]


async def test_what_cannot_be_meant_is_refused_before_anything_is_sent(served: Served) -> None:
    async with ExecutorClient(served.target) as client:
        sequence = client.sequence(keep_tokens=True)
        await sequence.prefill(PROMPT)
        for call, field in (
            (lambda: sequence.prefill([1, 2], Accept()), "output"),
            (lambda: sequence.rebuild(output=Accept()), "output"),
            (lambda: sequence.verify([1, 2], OutputSpec(Positions.LAST, Accept())), "output.positions"),
            (lambda: sequence.verify([1, 2], Accept(7)), "output"),
            (lambda: sequence.verify([1, 2], Accept(Sample(top_p="much"))), "output.accept.sampling.top_p"),
        ):
            with pytest.raises(InvalidRequest) as refused:
                await call()
            assert refused.value.field == field
        assert sequence.length == len(PROMPT) and not sequence.in_doubt
