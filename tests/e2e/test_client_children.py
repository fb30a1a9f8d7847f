"""Children that the client makes in the step which feeds them: what they hold, whose they are, and what goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from ferrum_rpc.client import (
    Accept,
    Capability,
    ExecutorClient,
    Greedy,
    ResendPolicy,
    Run,
    Sample,
    Sequence,
    SequenceMisuseError,
)
from ferrum_rpc.errors import (
    InstanceMismatch,
    NotSupported,
    SequenceVersionMismatch,
    TransportError,
    TruncateBeyondLength,
)
from tests.support.clients import answers, losing, restarting, text, without
from tests.support.serving import Served, serve_identity

PROMPT = [3, 1, 4, 1, 5, 9, 2]
SAMPLE = Sample(temperature=3.0, seed=5)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    async with serve_identity(positional=True) as served:
        yield served


@pytest_asyncio.fixture(loop_scope="module", params=[False, True], ids=["unary", "session"])
async def client(served: Served, request: pytest.FixtureRequest) -> AsyncIterator[ExecutorClient]:
    async with ExecutorClient(served.target, session=request.param) as client:
        yield client
    await served.check()
    assert not served.server.state.handles.live


async def fed(client: ExecutorClient, tokens: list[int] = PROMPT) -> Sequence:
    sequence = client.sequence(keep_tokens=True)
    await sequence.prefill(tokens, SAMPLE)
    return sequence


async def test_children_and_their_parent_are_fed_in_one_step(served: Served, client: ExecutorClient) -> None:
    parent = await fed(client)
    children = [parent.child(), parent.child(4), parent.child()]
    texts = [[*PROMPT, 11], [*PROMPT[:4], 12, 13], [*PROMPT, 14], [*PROMPT, 15]]
    items = [
        children[0].item([11], SAMPLE),
        children[1].item([12, 13], SAMPLE, run=Run(3)),
        children[2].item([14], SAMPLE),
        parent.item([15], SAMPLE),
    ]
    steps = served.server.state.engine.counters.steps
    found = answers(await client.forward(items))
    if "unary" in repr(client):
        assert served.server.state.engine.counters.steps == steps + 3
    for sequence, fed_tokens, answer in zip([*children, parent], texts, found, strict=True):
        chosen = answer.tokens.tolist()
        assert chosen == await text(client, fed_tokens, len(chosen), SAMPLE)
        assert sequence.tokens == [*fed_tokens, *chosen[:-1]] and sequence.length == len(sequence.tokens)
    assert [each.version for each in children] == [1, 1, 1] and parent.version == 2
    [again] = answers(await client.forward(items[:1]))
    assert again.replayed and again.handle == children[0].handle


async def test_a_childs_first_call_is_any_call(client: ExecutorClient) -> None:
    parent = await fed(client)
    first, second, third, fourth = parent.child(), parent.child(), parent.child(5), parent.child()
    assert (first.length, third.length, first.handle, third.tokens) == (7, 5, None, PROMPT[:5])
    [one] = await text(client, [*PROMPT, 9], 1, SAMPLE)
    assert (await first.decode(9, SAMPLE)).token == one and first.tokens == [*PROMPT, 9]
    [cut] = await text(client, [*PROMPT[:3], 9], 1, SAMPLE)
    assert (await second.decode(9, SAMPLE, truncate_to=3)).token == cut and second.tokens == [*PROMPT[:3], 9]
    [best] = await text(client, [*PROMPT, 9], 1, Greedy())
    draft = await fourth.verify([9, best, best ^ 1], Accept())
    assert draft.tokens[0] == best and fourth.length == 7 + len(draft.tokens)
    long = [each % 200 for each in range(20)]
    assert (await third.prefill(long, SAMPLE, chunk=8)).token == (await text(client, PROMPT[:5] + long, 1, SAMPLE))[0]
    assert third.tokens == PROMPT[:5] + long
    await parent.release()
    assert (await first.decode(one, SAMPLE)).length == 9


async def test_many_texts_go_on_from_one_prompt_at_the_same_time(client: ExecutorClient) -> None:
    parent = await fed(client)

    async def one(token: int) -> list[int]:
        async with parent.child() as child:
            return [each async for each in child.generate([token], max_tokens=12, output=SAMPLE)]

    expected = [await text(client, [*PROMPT, token], 12, SAMPLE) for token in range(6)]
    assert await asyncio.gather(*map(one, range(6))) == expected
    assert parent.version == 1


async def test_what_is_no_child_is_refused(client: ExecutorClient) -> None:
    parent = await fed(client)
    with pytest.raises(TruncateBeyondLength):
        parent.child(8)
    child = parent.child(5)
    with pytest.raises(TruncateBeyondLength):
        await child.decode(1, truncate_to=6)
    for call in (child.truncate(1), child.fork(), child.reserve(1)):
        with pytest.raises(SequenceMisuseError, match="nothing was fed"):
            await call
    with pytest.raises(SequenceMisuseError, match="nothing was fed"):
        child.child()
    await parent.decode(1)
    with pytest.raises(SequenceVersionMismatch):
        await child.decode(1)
    assert (child.length, child.in_doubt, child.tokens) == (5, False, PROMPT[:5])
    await child.release()
    await client.info()
    without(client, Capability.STEP_FORK)
    with pytest.raises(NotSupported, match="STEP_FORK") as refused:
        await parent.child().decode(1)
    assert refused.value.field == "create.fork"


@pytest.mark.parametrize("goes_on", [False, True])
async def test_a_child_whose_answer_was_lost_is_one_child(goes_on: bool) -> None:
    about = {"resend": ResendPolicy(times=int(goes_on), backoff_s=0)}
    async with losing(about=about) as (served, proxy, client):
        parent = await fed(client)
        child = parent.child()
        proxy.only = "Decode"
        proxy.faults.append("lose")
        if goes_on:
            assert (await child.decode(9, SAMPLE)).replayed and child.tokens == [*PROMPT, 9]
        else:
            with pytest.raises(TransportError):
                await child.decode(9, SAMPLE)
            assert child.in_doubt
        assert len(served.server.state.handles.live) == 2
        await child.release()
        assert len(served.server.state.handles.live) == 1
        await served.check()


@pytest.mark.parametrize("rebuild", [False, True])
async def test_a_child_of_a_lost_parent_is_made_of_its_tokens(rebuild: bool) -> None:
    async with restarting() as (_, second, proxy, client):
        [expected] = await text(client, [*PROMPT[:5], 9], 1, SAMPLE)
        parent = client.sequence(rebuild=rebuild)
        await parent.prefill(PROMPT)
        child = parent.child(5)
        proxy.lead_to(second.target)
        if rebuild:
            assert (await child.decode(9, SAMPLE)).token == expected
            assert child.tokens == [*PROMPT[:5], 9] and child.length == 6
        else:
            with pytest.raises(InstanceMismatch):
                await child.decode(9, SAMPLE)
        await second.check()
