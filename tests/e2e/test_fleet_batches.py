"""Batches of a fleet: what goes to each owner, and an outcome for each item whoever dies."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from ferrum_rpc.client import Answer, ExecutorClient, Greedy, Run
from ferrum_rpc.errors import ExecutorError, InstanceMismatch, InvalidRequest, TransportError
from tests.support import waiting
from tests.support.clients import answers
from tests.support.fleets import PROMPT, SAMPLED, alone, behind_proxies, fleet, identity, owner, several
from tests.support.serving import Gate


async def test_the_items_of_a_batch_have_outcomes_of_their_own_over_all_owners() -> None:
    async with several(4) as (*served, elsewhere), behind_proxies(*served) as (one, proxies):
        expected = await alone(elsewhere.target, 2, Greedy())  # whoever has seen the prompt would get them all
        sequences = [one.sequence(rebuild=at % 2 == 0) for at in range(12)]
        first = answers(await one.forward([each.item(PROMPT) for each in sequences]))
        assert [each.token for each in first] == [expected[0]] * 12
        assert {owner(each).target for each in sequences} == proxies.keys()
        with pytest.raises(InvalidRequest, match="one owner"):
            await one.forward([each.item([1]) for each in sequences], all_or_nothing=True)
        mates = [each for each in sequences if owner(each) is owner(sequences[0])]
        wrong = sequences[3].item([999_999])

        dead = proxies[owner(sequences[0]).target]
        dead.kill()
        items = [each.item([expected[0]]) if each is not sequences[3] else wrong for each in sequences]
        results = await one.forward(items)
        for sequence, result in zip(sequences, results, strict=True):
            if sequence is sequences[3]:
                assert isinstance(result, InvalidRequest | TransportError)
            elif sequence in mates and sequence not in sequences[::2]:
                assert isinstance(result, TransportError)
                with pytest.raises(InstanceMismatch, match=dead.target):
                    await sequence.decode(expected[0])
                await sequence.rebuild(PROMPT)
                assert (await sequence.decode(expected[0])).token == expected[1]
            else:
                assert isinstance(result, Answer) and result.token == expected[1]
        assert dead.target not in {owner(each).target for each in sequences if each.owner}
        assert await one.truncate([(each, 4) for each in sequences[::2]]) == [None] * 6
        [child] = await sequences[0].fork()
        grandchild = child.child()
        assert len(answers(await one.forward([child.item([7]), grandchild.item([8])]))) == 2
        assert await one.release([*sequences, child, grandchild]) == [None] * 14


@pytest.mark.parametrize("session", [True, False], ids=["session", "unary"])
async def test_batches_over_three_executors_of_which_two_die_are_those_of_one(session: bool) -> None:
    async def batches(client: Any, death: Any = lambda sequences: None) -> list[Any]:
        """Outcomes of batches of every kind, with a death before the second and one before the third."""
        sequences, scored = [client.sequence() for _ in range(9)], Greedy(logprob=True)
        outcomes = await client.batch_prefill([each.item([*PROMPT, at], scored) for at, each in enumerate(sequences)])
        for kind in range(3):
            tokens = [each.token if isinstance(each, Answer) else 9 for each in outcomes[-9:]]
            tokens[5] = 999_999
            if kind < 2:
                death(sequences)
            if kind == 1:
                rollbacks = [(each, 3 + at % 4) for at, each in enumerate(sequences)]
                assert await client.truncate(rollbacks) == [None] * 9
            items = [each.item([token], scored) for each, token in zip(sequences, tokens, strict=True)]
            outcomes += await client.batch_decode(items)
        assert [each.length for each in sequences] == [3 + at % 4 + 2 * (at != 5) for at in range(9)]
        assert await client.release(sequences) == [None] * 9
        outcomes.append(await client.score(PROMPT, first=3))
        return [
            (each.tokens.tolist(), each.logprobs.tolist(), each.length) if isinstance(each, Answer) else type(each)
            for each in outcomes
        ]

    async with several(4) as (*served, elsewhere), behind_proxies(*served, session=session) as (one, proxies):
        found = await batches(one, lambda sequences: proxies[owner(sequences[0]).target].kill())
        assert len(one.members.there) == 1
        async with ExecutorClient(elsewhere.target, session=session) as client:
            assert found == await batches(client)


async def test_masks_are_registered_where_they_are_needed() -> None:
    async with fleet() as (one, _):
        mask = np.zeros((await one.info()).model.vocab_size, bool)
        mask[[17]] = True
        output = Greedy(mask=await one.register_token_mask(mask))
        sequences = [one.sequence() for _ in range(4)]
        found = answers(await one.forward([each.item(PROMPT, output) for each in sequences]))
        assert [each.token for each in found] == [17] * 4
        assert len({owner(each) for each in sequences}) == 2
        await one.release(sequences)


async def test_a_follower_goes_where_the_prompt_that_it_follows_is_placed() -> None:
    """Both are begun at once, when no executor has the sequence, and the prompts are spread over all of them."""
    async with fleet(3) as (one, _), identity() as elsewhere:
        expected = await alone(elsewhere.target, 7)
        sequences = [one.sequence() for _ in range(9)]
        for calls in ("one by one", "batches"):
            items = [each.item(PROMPT, SAMPLED) for each in sequences]
            behind = [
                each.item(output=SAMPLED, run=Run(6), follows=item) for each, item in zip(sequences, items, strict=True)
            ]
            if calls == "batches":
                first, second = await asyncio.gather(one.forward(items), one.forward(behind))
            else:
                singles = await asyncio.gather(*(one.forward([each]) for each in [*items, *behind]))
                first, second = [[each for [each] in some] for some in (singles[:9], singles[9:])]
            for prompt, run in zip(answers(first), answers(second), strict=True):
                assert [prompt.token, *run.tokens.tolist()] == expected
            if calls == "one by one":
                assert len({owner(each) for each in sequences}) > 1
            assert await one.release(sequences) == [None] * 9
            sequences = [one.sequence(rebuild=False) for _ in range(9)]


async def test_a_follower_of_a_prompt_that_dies_with_its_executor_is_refused_and_the_prompt_is_not() -> None:
    gates = Gate("forward"), Gate("forward")
    async with (
        identity(stage=gates[0]) as left,
        identity(stage=gates[1]) as right,
        identity() as elsewhere,
        behind_proxies(left, right) as (one, proxies),
    ):
        expected = await alone(elsewhere.target, 2)
        sequence = one.sequence()
        item = sequence.item(PROMPT, SAMPLED)
        behind = sequence.item(output=SAMPLED, run=Run(6), follows=item)
        for each in gates:
            each.closed = True
        first, second = (asyncio.ensure_future(one.forward([each])) for each in (item, behind))
        await waiting.until(lambda: any(each.reached.is_set() for each in gates))
        [dead] = [proxy for proxy, gate in zip(proxies.values(), gates, strict=True) if gate.reached.is_set()]
        dead.kill()
        for each in gates:
            each.open()
        [answer], [refusal] = await asyncio.gather(first, second)
        assert isinstance(answer, Answer) and answer.token == expected[0]
        assert isinstance(refusal, ExecutorError) and not sequence.in_doubt
        assert (await sequence.decode(answer.token, SAMPLED)).token == expected[1]
