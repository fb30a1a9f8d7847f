"""One program drives one executor and a fleet: what both clients are alike in."""

from __future__ import annotations

import asyncio

import pytest

from ferrum_rpc.client import ExecutorState, ExecutorView, Health, ModelClient
from ferrum_rpc.errors import TransportError
from tests.support.clients import answers, restarting
from tests.support.fleets import PROMPT, SAMPLED, SESSION, alone, behind_proxies, fleet, identity, several, until


async def serve(client: ModelClient) -> list[list[int]]:
    """Texts of a few sequences, by steps: a scheduler that knows nothing of fleets but what `ModelClient` says."""
    info = await client.info()
    assert info.model.max_context and await client.health() is Health.SERVING
    sequences = [client.sequence() for _ in range(6)]
    assert [each.owner for each in sequences] == [None] * 6
    results = await client.forward([each.item(PROMPT, SAMPLED) for each in sequences])
    texts: list[list[int]] = [[] for _ in sequences]
    for _ in range(8):
        for text, answer in zip(texts, answers(results), strict=True):
            text.append(answer.token)
        results = await client.forward(
            [each.item(text[-1:], SAMPLED) for each, text in zip(sequences, texts, strict=True)]
        )
    owners: list[ExecutorView] = [each.owner for each in sequences if each.owner is not None]
    assert len(owners) == 6 and {id(each) for each in owners} == {id(each) for each in client.executors}
    status = await client.status()
    assert status.state is ExecutorState.SERVING and status.pressure == client.pressure
    assert status.pressure.sequences == status.counters.sequences_created == 6
    assert status.pressure.total_blocks == sum(each.info.total_blocks for each in client.executors)
    assert len({each.method for each in status.methods}) == len(status.methods) > 0
    for each in client.executors:
        assert each.serving and each.condition == "serving" and each.pressure is not None
    assert await client.release(sequences) == [None] * 6
    return texts


async def test_one_program_drives_one_executor_and_a_fleet() -> None:
    async with identity() as single, SESSION(single.target) as client:
        texts = await serve(client)
        assert texts == [await alone(single.target, 8)] * 6
    async with fleet() as (several, _):
        assert await serve(several) == texts
        assert len(several.executors) == 2


async def test_what_is_known_of_one_executor_is_of_one_life_of_its_process() -> None:
    async with restarting(session=False) as (_, second, proxy, client):
        assert client.executors == []
        async with client.sequence() as sequence:
            await sequence.prefill(PROMPT)
            [old] = client.executors
            assert sequence.owner is old and old.target == proxy.target
            assert old.info == await client.info() and old.pressure == client.pressure
            await client.drain(grace_s=5.0)
            assert old.draining and not old.serving and old.condition == "draining"
        proxy.lead_to(second.target)
        async with client.sequence(rebuild=True) as sequence, asyncio.timeout(10):
            await sequence.prefill(PROMPT)
        [new] = client.executors
        assert new.info.instance_id != old.info.instance_id
        assert (old.gone, old.condition, new.gone, new.serving) == (True, "gone", False, True)


async def test_a_fleet_reports_those_that_answer() -> None:
    async with several(2) as served, behind_proxies(*served) as (one, proxies):
        statuses = [await each.client.status() for each in one.members.there]
        merged = await one.status()
        assert merged.pressure.total_blocks == sum(each.pressure.total_blocks for each in statuses)
        assert merged.uptime_s >= max(each.uptime_s for each in statuses)
        assert merged.blocks.free == sum(each.blocks.free for each in statuses)
        drained = one.members.there[0]
        await drained.client.drain(grace_s=30.0)
        assert (await one.status()).state is ExecutorState.SERVING and await one.health() is Health.SERVING
        assert [each.condition for each in one.executors] == ["draining", "serving"]
        for proxy in proxies.values():
            proxy.kill()
        await until(one, lambda: not one.members.there)
        assert one.pressure is None and one.executors == []
        for call in (one.status, one.health):
            with pytest.raises(TransportError, match="no executor of"):
                await call()
