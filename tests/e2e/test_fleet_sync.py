"""A fleet in a program without asyncio: the same texts, whoever dies while a plain thread reads them."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack

import pytest

from ferrum_rpc.client import Answer, sync
from ferrum_rpc.client.fleet import Member
from ferrum_rpc.client.fleet.sync import FleetClient, FleetSequence
from ferrum_rpc.errors import InvalidRequest
from tests.e2e.fleets import PROMPT, SAMPLED, SESSION
from tests.faults.process import ServerProcess, serving


async def test_an_executor_is_killed_while_a_thread_reads_a_text() -> None:
    def owner(sequence: FleetSequence) -> Member:
        assert sequence.owner is not None
        return sequence.owner

    def text(executors: dict[str, ServerProcess]) -> None:
        with sync.ExecutorClient(next(iter(executors))) as client, client.sequence() as single:
            expected = list(single.generate(PROMPT, max_tokens=60, output=SAMPLED, stop=()))
        with FleetClient(list(executors), connect=SESSION, look_every_s=0.05, timeout_s=20.0) as fleet:
            while len(fleet.members.serving) < 3:
                assert fleet.score(PROMPT).tokens.tolist() == PROMPT[1:]
            sequence, others, found = fleet.sequence(), [fleet.sequence() for _ in range(6)], list[int]()
            answers = fleet.batch_prefill([each.item(PROMPT) for each in others])
            for token in sequence.generate(PROMPT, max_tokens=40, output=SAMPLED, stop=()):
                found.append(token)
                if len(found) == 6:
                    executors[owner(sequence).target].signal(signal.SIGKILL)
            killed = {each.target for each in fleet.members.there} ^ executors.keys()
            assert found == expected[:40] and owner(sequence).target not in killed and len(killed) == 1
            [to] = [each for each in fleet.members.serving if each is not sequence.owner]
            sequence.migrate(to)
            assert owner(sequence) is to
            [child] = sequence.fork()
            assert owner(child) is to
            for each in (sequence, child):
                assert list(each.generate(found[-1:], max_tokens=20, output=SAMPLED, stop=())) == expected[40:]
            again = fleet.batch_decode([each.item([1]) for each in others])
            assert len({each.token for each in again if isinstance(each, Answer)}) == 1
            assert all(isinstance(each, Answer) for each in [*answers, *again])
            assert fleet.truncate([(each, 4) for each in others]) == [None] * 6
            assert fleet.release([sequence, child, *others]) == [None] * 8

    async with AsyncExitStack() as stack:
        processes = await asyncio.gather(
            *(stack.enter_async_context(serving("--identity-positional")) for _ in range(3))
        )
        await asyncio.to_thread(text, {each.target: each for each in processes})


def test_executors_of_a_fleet_share_its_event_loop() -> None:
    with pytest.raises(InvalidRequest, match="connect must make"):
        FleetClient(["127.0.0.1:1"], connect=sync.ExecutorClient)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="FleetClient"):
        FleetClient(["127.0.0.1:1"]).score(PROMPT)
