"""Scores and log-probabilities through the client: whole, in chunks, in batches, and where an executor lacks them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from ferrum_rpc.client import (
    Answer,
    Capability,
    ExecutorClient,
    Greedy,
    NextToken,
    NoSuchRowsError,
    RowLogprobs,
    Sample,
    sync,
)
from ferrum_rpc.errors import InvalidRequest, NotSupported
from tests.identity_oracle import OracleConfig, identity_logits
from tests.serving import serve_identity

TEXT = [(7 * at * at) % 256 for at in range(50)]


@pytest_asyncio.fixture(params=[False, True], ids=["unary", "session"])
async def client(request: Any) -> AsyncIterator[ExecutorClient]:
    """At most 16 tokens a call, so that a text goes in chunks."""
    async with (
        serve_identity(max_batch_tokens=16, positional=True) as served,
        ExecutorClient(served.target, session=request.param) as client,
    ):
        yield client


def truth() -> np.ndarray:
    """Log-probabilities float64 [n, V] of the row of each token of the text."""
    logits = identity_logits(TEXT, None, OracleConfig(positional=True))
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize("first", [1, 2, 16, 17, 33, 49])
async def test_a_texts_scores_come_as_if_in_one_call(client: ExecutorClient, first: int) -> None:
    answer = await client.score(TEXT, first, logprobs=RowLogprobs(2, (TEXT[0],)))
    assert answer.tokens.tolist() == TEXT[first:]
    rows = truth()[first - 1 : -1]
    np.testing.assert_allclose(answer.logprobs, rows[np.arange(len(rows)), TEXT[first:]], atol=2e-5)
    best = answer.top_logprobs
    np.testing.assert_allclose(best.logprobs, np.take_along_axis(rows, best.token_ids.astype(int), -1), atol=2e-5)
    np.testing.assert_allclose(best.logprobs[:, 0], rows.max(-1), atol=2e-5)
    np.testing.assert_allclose(answer.selected_logprobs, rows[:, TEXT[:1]], atol=2e-5)
    assert (await client.status()).pressure.sequences == 0


async def test_a_sequence_that_was_scored_goes_on(client: ExecutorClient) -> None:
    """In chunks of the caller's, with what follows, and from a length that it has already."""
    async with client.sequence() as sequence:
        await sequence.prefill(TEXT[:20])
        answer = await sequence.prefill(TEXT[20:45], NextToken(30, TEXT[45]), chunk=4)
        assert answer.tokens.tolist() == TEXT[31:46]
        np.testing.assert_allclose(answer.logprobs, truth()[np.arange(30, 45), TEXT[31:46]], atol=2e-5)
        decoded = await sequence.decode(TEXT[45], Greedy(True, RowLogprobs(3)))
        assert decoded.token == decoded.top_logprobs.token_ids[0, 0] == truth()[45].argmax()
        assert decoded.logprobs[0] == decoded.top_logprobs.logprobs[0, 0]


async def test_items_of_a_batch_score_beside_others(client: ExecutorClient) -> None:
    async with client.sequence() as one, client.sequence() as two, client.sequence() as three:
        results = await client.forward(
            [
                one.item(TEXT[:6], NextToken()),
                two.item(TEXT[:1], Sample(seed=1, logprobs=RowLogprobs(0, (4, 9)))),
                three.item(TEXT[:1], NextToken()),
            ]
        )
        first, second, third = (each for each in results if isinstance(each, Answer))
        assert first.tokens.tolist() == TEXT[1:6]
        np.testing.assert_allclose(second.selected_logprobs, truth()[:1, [4, 9]], atol=2e-5)
        assert third.rows is None and third.length == 1
        with pytest.raises(NoSuchRowsError, match="without rows"):
            _ = third.logprobs


async def test_what_cannot_be_scored_is_refused_before_it_is_sent(client: ExecutorClient) -> None:
    for tokens, first in (([], 1), ([5], 1), ([5, 6], 0), ([5, 6], 2)):
        with pytest.raises(InvalidRequest):
            await client.score(tokens, first)
    async with client.sequence(keep_tokens=True) as sequence:
        await sequence.prefill(TEXT[:3])
        with pytest.raises(InvalidRequest, match="prefill"):
            await sequence.rebuild(output=NextToken())


async def test_an_executor_that_lacks_them_is_not_asked(client: ExecutorClient) -> None:
    """One of an older revision would answer with greedy tokens, and without log-probabilities."""
    real = await client.info()
    missing = {Capability.OUTPUT_NEXT_TOKEN, Capability.ROW_LOGPROBS}
    context: Any = client._context
    context.known_info = replace(real, capabilities=real.capabilities - missing)
    steps = (await client.status()).counters.steps
    async with client.sequence() as sequence:
        for output in (NextToken(), Greedy(logprobs=RowLogprobs(1))):
            with pytest.raises(NotSupported, match="does not offer"):
                await sequence.prefill(TEXT[:4], output)
        assert (await client.status()).counters.steps == steps
        assert len((await sequence.prefill(TEXT[:4])).tokens) == 1


def test_the_client_without_asyncio_scores_too() -> None:
    from ferrum_rpc.client.background import Background

    loop, serving = Background(), serve_identity(positional=True)
    served = loop.run(serving.__aenter__())
    try:
        with sync.ExecutorClient(served.target) as client:
            assert client.score(TEXT, 40).tokens.tolist() == TEXT[40:]
    finally:
        loop.run(serving.__aexit__(None, None, None))
        loop.stop()
