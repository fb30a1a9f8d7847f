"""Ranks as processes: what ends them while they wait for each other, and what is left of them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.distributed import TCPStore

from ferrum_rpc.client import Capability, ExecutorClient, FullLogits, Greedy, OutputSpec, Positions
from ferrum_rpc.config import ModelSettings
from ferrum_rpc.engine.ranks.links import CUT_S
from ferrum_rpc.engine.ranks.world import World
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.executor.v1 import kv_transfer_pb2
from tests.e2e.test_moved_states import ALL, LAST, PROMPT, fed, goes_on
from tests.support.checkpoints import RECURRENT_SHAPE, make_checkpoint
from tests.support.clients import text
from tests.support.exposition import fetch, series, value
from tests.support.listed_kv_heads import LISTED, make_deci_checkpoint
from tests.support.netns import missing, network
from tests.support.process import ServerProcess, environment, free_port, running, runs
from tests.support.serving import serve_model
from tests.support.transfers import brought, chunks_of, exported, header, imported
from tests.support.waiting import until
from tests.support.wiring import prefill, release

PROMPTLY_S = 30.0
"""Much less than the 120 s that ranks wait for each other. It takes a second on an idle machine, and took 12 on one
whose two cores had ten processes to run."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3")


def serve(checkpoint: Path, *flags: str) -> list[str]:
    small = ("--dtype", "float32", "--threads", "1", "--kv-blocks", "32", "--no-warmup")
    return ["serve", str(checkpoint), "--port", "0", "--log-format", "json", *small, *flags]


def world(rank: int, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


@pytest.mark.parametrize("engine", ["thread", "process"])
async def test_sigterm_ends_rank_0_while_it_waits_for_the_others(checkpoint: Path, engine: str) -> None:
    """As it ends one that loads: in order, and with status 0."""
    command = serve(checkpoint, "--tensor-parallel", "2", "--engine", engine)
    async with running(*command, **world(0, free_port())) as process:
        await process.event("waiting_for_ranks")
        began = time.monotonic()
        process.signal(signal.SIGTERM)
        assert await process.ended() == 0
        assert time.monotonic() - began < PROMPTLY_S
        assert process.count("stopped") == 1
        assert not any(each["level"] in ("warning", "error") for each in process.events)


@pytest.mark.parametrize(
    ("number", "store"),
    [
        (signal.SIGINT, "nobody listens"),
        (signal.SIGTERM, "rank 0 has not begun"),
        (signal.SIGINT, "rank 0 has not begun"),
        (signal.SIGTERM, "somebody else listens"),
    ],
)
async def test_signals_end_a_rank_that_waits_for_rank_0(number: signal.Signals, store: str) -> None:
    port = free_port()
    listening: TCPStore | socket.socket | None = None
    if store == "rank 0 has not begun":  # torchrun listens, and starts ranks in any order
        listening = TCPStore("127.0.0.1", port, 2, True, timedelta(seconds=10), wait_for_workers=False)
    elif store == "somebody else listens":
        listening = socket.create_server(("127.0.0.1", port))
    async with running("rank", **world(1, port)) as process:
        await until(lambda: any("goes to rank 0" in line for line in process.other_lines), 60)
        if listening is not None:
            await until(lambda: connections(process.pid) > 0, 10)
        began = time.monotonic()
        process.signal(number)
        assert await process.ended() == 128 + number
        assert time.monotonic() - began < PROMPTLY_S
        assert "stopped before rank 0 was there" in process.other_lines[-1]
    if isinstance(listening, socket.socket):
        listening.close()


def connections(pid: int) -> int:
    """Sockets that a process has open."""
    found = 0
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found += "socket:" in os.readlink(each)
    return found


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (world(0, 1) | {"WORLD_SIZE": "4"}, "WORLD_SIZE is 4"),
        (world(0, 1) | {"MASTER_PORT": "any"}, "MASTER_PORT must be a number"),
        (world(0, 1) | {"MASTER_PORT": "99999"}, "from 1 to 65535"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, "RANK must be a number"),
    ],
    ids=["size", "port", "large port", "rank"],
)
def test_variables_of_a_launcher_that_cannot_be_are_named(variables: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        if (found := World.of(variables)) is not None:
            found.check(ModelSettings("any", tensor_parallel=2))


async def test_what_cannot_be_is_refused_before_a_port_is_opened(checkpoint: Path) -> None:
    command = serve(checkpoint, "--tensor-parallel", "2")
    async with running(*command, **world(0, 1) | {"MASTER_ADDR": "10.0.0.1"}) as process:
        assert "--trust-rank-network" in (await process.event("startup_failed"))["error"]
        assert await process.ended() == 1
        assert not process.count("listening")


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_a_rank_ends_with_the_status_of_what_ends_it(checkpoint: Path, address: str) -> None:
    """And says why, where it is not its executor's orderly end."""
    port = free_port()
    ranks = world(0, port) | {"MASTER_ADDR": address}
    command = serve(checkpoint, "--tensor-parallel", "2", "--rank-transport", "gloo")
    async with running(*command, **ranks) as first:
        await first.event("waiting_for_ranks")
        async with running("rank", **ranks | {"RANK": "2", "WORLD_SIZE": "3"}) as beyond:
            assert await beyond.ended() == 1
            assert "rank 0 has refused it: start each rank once" in beyond.other_lines[-1]
        assert first.count("rank_refused") == 1
        async with running("rank", **ranks | {"RANK": "1"}) as other:
            await first.event("ready")
            async with running("rank", **ranks | {"RANK": "1"}) as again:
                assert await again.ended() == 1
                assert "takes no rank 1" in again.other_lines[-1]
            if address == "::1":
                await first.kill()
                assert await other.ended() == 1
                assert other.other_lines[-1].endswith("rank 1 ends: rank 0 is gone")
            else:
                first.signal(signal.SIGTERM)
                assert (await first.ended(), await other.ended()) == (0, 0)


@pytest.mark.parametrize(("transport", "engine"), [("gloo", "thread"), ("shared-memory", "process")])
async def test_ranks_are_measured_and_nothing_is_left_of_a_rank_0_that_was_killed(
    checkpoint: Path, tmp_path: Path, transport: str, engine: str
) -> None:
    flags = ("--rank-transport", transport, "--engine", engine, "--metrics-port", "0")
    async with running(*serve(checkpoint, "--tensor-parallel", "2", *flags), TMPDIR=str(tmp_path)) as process:
        other = (await process.event("rank_joined"))["pid"]
        await process.event("ready")
        url = (await process.event("metrics_enabled"))["url"]
        reported = "ferrum_rank_resident_memory_bytes", frozenset({("rank", "1")})
        await until(lambda: reported in series(fetch(url)), PROMPTLY_S)
        found = series(fetch(url))
        resident = [value(found, "ferrum_rank_resident_memory_bytes", rank=rank) for rank in "01"]
        assert [value(found, "ferrum_rank_alive", rank=rank) for rank in "01"] == [1, 1]
        assert all(100 << 20 < each < 10 << 30 for each in resident), "torch alone takes more"
        assert abs(resident[1] - resident_bytes(other)) < 100 << 20
        await process.kill()
        await until(lambda: not runs(other), 10)
    assert not os.listdir(tmp_path)


async def test_ranks_of_two_machines_write_the_text_of_one_and_notice_a_cut(checkpoint: Path) -> None:
    """As far as one machine can be two: a network, process ids and a /proc of its own for the other rank."""
    if reason := missing(("ip", "unshare")):
        pytest.skip(reason)
    alone = (*("unshare", "--pid", "--fork", "--mount-proc", "--kill-child"), sys.executable, "-m", "ferrum_rpc.cli")
    async with network() as net, AsyncExitStack() as stack:
        ranks = world(0, free_port()) | {"MASTER_ADDR": net.here}
        command = (*net.prefix, *alone, "rank", "--trust-rank-network")
        other = ServerProcess(
            await asyncio.create_subprocess_exec(
                *command, env=environment() | ranks | {"RANK": "1"}, stderr=asyncio.subprocess.PIPE
            )
        )
        stack.push_async_callback(other.kill)
        both = serve(checkpoint, "--pipeline-parallel", "2", "--trust-rank-network")
        first = await stack.enter_async_context(running(*both, **ranks))
        one = await stack.enter_async_context(running(*serve(checkpoint)))
        targets = [(await each.event("ready"))["target"] for each in (first, one)]
        async with ExecutorClient(targets[0]) as several, ExecutorClient(targets[1]) as single:
            assert await text(several, [1, 2, 3, 4], 40) == await text(single, [1, 2, 3, 4], 40)
        assert "rank_transport=gloo" in {each.get("choice") for each in first.events}
        began = time.monotonic()
        await net.cut()
        assert (await first.event("rank_lost"))["rank"] == 1
        assert await first.ended() == 1
        assert time.monotonic() - began < PROMPTLY_S
        await other.ended(2 * CUT_S)


async def life(client: ExecutorClient) -> list[list[int]]:
    """Texts of a sequence that is cut within its last step and deeper, of a fork, and of a prompt that is known."""
    prompt, output = [each * each % 290 for each in range(1, 90)], OutputSpec(Positions.LAST, Greedy())
    found = [await text(client, prompt, 8)]
    async with client.sequence() as sequence:
        for tokens, back in ((prompt, 0), (prompt[:5], 3), (prompt[:4], 40), ([7], 0)):
            answer = await sequence.prefill(tokens, output)
            found.append([int(each) for each in answer.tokens])
            await sequence.truncate(sequence.length - back)
        [child] = await sequence.fork(1)
        found.append([each async for each in child.generate([5], max_tokens=8)])
        found.append([each async for each in sequence.generate([6], max_tokens=8)])
    return [*found, *[await text(client, [*prompt, 1], 8) for _ in range(2)]]


async def test_two_ranks_with_states_give_the_texts_of_one(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "qwen3_5", "qwen3_5")
    async with AsyncExitStack() as stack:
        many = serve(folder, "--tensor-parallel", "2"), serve(folder)
        servers = [await stack.enter_async_context(running(*each)) for each in many]
        targets = [(await each.event("ready"))["target"] for each in servers]
        two, one = [await stack.enter_async_context(ExecutorClient(each)) for each in targets]
        assert await life(two) == await life(one)
        infos = [await each.info() for each in (two, one)]
        assert infos[0].model.state_bytes == infos[1].model.state_bytes
        assert all(Capability.KV_TRANSFER in each.capabilities for each in infos)
        async with two.sequence() as sequence:
            await sequence.prefill([1, 2, 3])
            await sequence.export_to(tmp_path / "cache")


@pytest.fixture(scope="module")
def with_states(tmp_path_factory: pytest.TempPathFactory) -> ModelSettings:
    folder = make_checkpoint(tmp_path_factory.mktemp("qwen3_5"), "qwen3_5", **RECURRENT_SHAPE)
    cache: dict[str, Any] = {"block_size": 4, "kv_blocks": 200, "state_slots": 6}
    return ModelSettings(str(folder), device="cpu", dtype="bfloat16", **cache)


async def test_sequences_with_states_move_between_two_ranks_and_one(with_states: ModelSettings, tmp_path: Path) -> None:
    """What left two ranks and came back has the bits of what stayed. Rows of one rank are equal within rounding."""
    ranks = replace(with_states, tensor_parallel=2)
    async with (
        serve_model(ranks, park_dir=tmp_path / "parked") as two,
        serve_model(with_states) as one,
        ExecutorClient(two.target) as source,
        ExecutorClient(one.target) as target,
    ):
        assert {Capability.KV_TRANSFER, Capability.PARK} <= (await source.info()).capabilities
        stays, parks, leaves = [await fed(source) for _ in range(3)]
        for each in (stays, parks, leaves):
            await each.truncate(each.length - 2)
            await each.verify([0, 5], ALL)
        back, filed, passing, there = source.sequence(), source.sequence(), target.sequence(), target.sequence()
        await leaves.export_to(tmp_path / "file")
        await leaves.move_to(passing)
        await passing.move_to(back)
        await filed.import_from(tmp_path / "file")
        await parks.park()
        await there.import_from(tmp_path / "file")
        wanted = await goes_on(stays)
        for each in (back, filed, parks):
            assert await goes_on(each) == wanted
        rows = [np.frombuffer(each, np.float32) for each in (wanted, await goes_on(there))]
        np.testing.assert_allclose(rows[1], rows[0], atol=0.1)
        for each in (stays, back, filed, parks, there):
            await each.truncate(98)
        answers = [await each.decode(4, LAST) for each in (stays, back, filed, parks, there)]
        for each in answers[1:]:
            assert each.recomputed_tokens == 2, "from the checkpoint on, which moved"
            np.testing.assert_allclose(each.logits, answers[0].logits, atol=0.1)
        await source.release([stays, back, filed, parks])
        await target.release([there])
        for served in (one, two):
            await served.check()
            assert served.runner.cache_state().free_slots == with_states.state_slots


async def test_sequences_of_layers_that_differ_move_between_two_ranks_and_one(tmp_path: Path) -> None:
    """In one layer each rank has two of the KV heads, in another both have the only one."""
    config = ModelSettings(str(make_deci_checkpoint(tmp_path / "model")), device="cpu", dtype="float32", kv_blocks=64)
    async with (
        serve_model(replace(config, tensor_parallel=2), park_dir=tmp_path / "parked") as two,
        serve_model(config) as one,
        ExecutorClient(two.target) as source,
        ExecutorClient(one.target) as target,
    ):
        infos = [(await each.info()).model for each in (source, target)]
        assert {each.kv_bytes_per_token for each in infos} == {2 * sum(LISTED) * 16 * 4}
        parks, leaves = source.sequence(), source.sequence()
        rows = []
        for each in (parks, leaves):
            await each.prefill([*range(30, 83)])
            rows.append((await each.decode(4, FullLogits())).logits)
            await each.truncate(53)
        back, there, passing = source.sequence(), target.sequence(), target.sequence()
        await leaves.export_to(tmp_path / "file")
        await there.import_from(tmp_path / "file")
        await leaves.move_to(passing)
        await passing.move_to(back)
        await parks.park()
        for each, wanted in zip((parks, back), rows, strict=True):
            assert ((await each.decode(4, FullLogits())).logits == wanted).all()
        np.testing.assert_allclose((await there.decode(4, FullLogits())).logits, rows[1], atol=1e-4)


async def test_an_import_to_two_ranks_that_is_cut_off_and_given_up_leaves_no_slot_taken(
    with_states: ModelSettings,
) -> None:
    async with serve_model(replace(with_states, tensor_parallel=2)) as served:
        frames = await exported(served, handle := await prefill(served, PROMPT))
        await release(served, handle)
        free = served.runner.cache_state().free_slots
        sent = [header(frames[0].layout), *brought(chunks_of(frames))]
        for count in range(1, len(sent), 3):
            call = served.transfer.ImportKv()
            sent[0].header.request_id = f"cut off {count}"
            for frame in sent[:count]:
                await call.write(frame)
            await until(lambda: served.runner.cache_state().free_slots < free)
            call.cancel()
            given_up = kv_transfer_pb2.ImportKvHeader(request_id=sent[0].header.request_id, abandon=True)
            await imported(served, kv_transfer_pb2.ImportKvRequest(header=given_up))
            assert served.runner.cache_state().free_slots == free
        sent[0].header.request_id = "whole"
        answer = await imported(served, *sent)
        await release(served, answer.handle)
        await served.reset()
        await served.check()


async def test_two_ranks_find_their_states_on_disk_after_a_restart(with_states: ModelSettings, tmp_path: Path) -> None:
    ranks, answers = replace(with_states, tensor_parallel=2, kv_tier_dir=tmp_path / "tier"), []
    for _ in range(2):
        async with serve_model(ranks) as served, ExecutorClient(served.target) as client, client.sequence() as sequence:
            answers.append(await sequence.prefill(PROMPT, LAST))
    assert [each.cached_tokens for each in answers] == [0, 96]
    np.testing.assert_allclose(answers[1].logits, answers[0].logits, atol=1e-4 * answers[0].logits.std())


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
