"""Who follows the events knows what the prefix cache has: from any moment on, or is told that it does not."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import pytest

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.errors import Reason, StepFailed
from ferrum_rpc.executor.v1 import forward_pb2
from ferrum_rpc.executor.v1 import kv_transfer_pb2 as kv
from ferrum_rpc.prefix_hash import caller_digest
from ferrum_rpc.service import kv_events
from ferrum_rpc.wire.status import error_from_rpc
from tests.support.serving import Served, serve_identity, serve_model
from tests.support.transfers import brought, chunks_of, exported, header, imported
from tests.support.wiring import prefill, refused, release, until

BLOCK = 4


class Router:
    """What a reader knows. ``seen``: the events that it was sent one by one."""

    def __init__(self, served: Served, name: str = "", **request: Any) -> None:
        self.served, self.name = served, name
        self.stream = served.transfer.WatchKvEvents(kv.WatchKvEventsRequest(**request))
        self.there: dict[bytes, bytes] = {}
        self.last = self.gaps = self.snapshots = 0
        self.within = False  # a snapshot
        self.seen: list[kv.KvEvent] = []

    async def read(self) -> None:
        batch = await self.stream.read()
        assert batch is not grpc.aio.EOF
        assert batch.instance_id == self.served.server.state.handles.instance_id
        if batch.snapshot and not self.within:
            self.there.clear()
        self.within = batch.snapshot and batch.more
        self.snapshots += batch.snapshot and not batch.more
        self.gaps += batch.gap
        missed = batch.event - self.last - len(batch.events)
        assert batch.snapshot or missed == 0 or (missed > 0 and self.name), "of others, where there are any"
        for each in batch.events:
            match each.WhichOneof("kind"):
                case "stored":
                    assert batch.snapshot or each.stored.hash not in self.there
                    self.there[each.stored.hash] = each.stored.parent_hash
                case "removed":
                    del self.there[each.removed.hash]
                case "parked":
                    self.there.pop(each.parked.hash, None)
                case "cleared":
                    self.there.clear()
        self.seen += [] if batch.snapshot else batch.events
        self.last = batch.event

    async def agrees(self) -> None:
        """Read until it knows what the executor has; its events end there."""
        expected = await published(self.served, self.name)
        while self.there != expected or not self.snapshots:
            await asyncio.wait_for(self.read(), 30)

    def leave(self) -> None:
        self.stream.cancel()


async def published(served: Served, name: str = "") -> dict[bytes, bytes]:
    """What the caller of this name can find: hashes, and those of the blocks before them."""
    found: dict[bytes, bytes] = {}

    def look(runner: Any) -> None:
        prefixes, seen = runner.kv.prefixes, (b"", caller_digest(name))
        found.update({key[:16]: prefixes._parents[block] for block, key in prefixes.blocks() if key[16:] in seen})

    await served.between_steps(look)
    return found


async def a_life(served: Served, dice: random.Random, live: list[Any]) -> None:
    """One call that may change the prefix cache: prompts with beginnings in common, ends, and steps back."""
    kind = dice.randrange(4) if live else 0
    try:
        if kind == 0:
            prompt = [dice.randrange(2) * 7 + place // BLOCK for place in range(dice.randrange(1, 24))]
            live.append(await prefill(served, prompt))
        elif kind == 1:
            await release(served, live.pop(dice.randrange(len(live))))
        elif kind == 2:
            handle = live.pop(dice.randrange(len(live)))
            length = dice.randrange(handle.seq_len + 1)
            answer = await served.truncate(handle, length=length)
            live.append(answer.handle)
        else:
            children = await served.fork(dice.choice(live))
            live += children.handles
    except grpc.aio.AioRpcError as error:
        assert error_from_rpc(error).reason is Reason.KV_BLOCKS_EXHAUSTED
        if live:
            await release(served, live.pop())


@pytest.mark.parametrize("seed", range(2))
async def test_who_follows_knows_what_is_there(seed: int) -> None:
    dice = random.Random(seed)
    async with serve_identity(kv_blocks=12, block_size=BLOCK) as served:
        live: list[Any] = []
        routers = [Router(served)]
        for turn in range(60):
            await a_life(served, dice, live)
            if turn % 20 == 10:  # one that comes later, and one that goes on where another was
                at, own = routers[0].last, served.server.state.handles.instance_id
                routers += [Router(served), Router(served, after_event=at, instance_id=own)]
                routers[-1].there, routers[-1].last = dict(routers[0].there), at
                routers[-1].snapshots = routers[0].snapshots
            if turn % 7 == 0:
                for each in routers:
                    await each.agrees()
        for each in routers:
            await each.agrees()
            assert not each.gaps
        assert {each.WhichOneof("kind") for each in routers[0].seen} == {"stored", "removed"}
        await served.check()


@pytest.mark.parametrize(("seed", "tier"), [(0, False), (1, True)])
async def test_what_one_imported_is_seen_by_its_callers_watchers_alone(tmp_path: Path, seed: int, tier: bool) -> None:
    """Prompts with beginnings in common, of which two callers import many and a third none: a hash may have a block of
    each of them and one for everybody, and each watcher sees one, or that none is left."""
    dice, names = random.Random(seed), ("one", "other", "third")
    tokens = [f"{each} token-{each} operator" for each in names]
    config = ModelSettings(
        path="identity", device="cpu", kv_blocks=20, block_size=BLOCK, kv_tier_dir=tmp_path / "tier" if tier else None
    )
    async with serve_model(config, tokens=tokens) as served:
        sides = {name: served.by(f"token-{name}") for name in names}
        routers = [Router(sides[name], name) for name in names]
        live: dict[str, list[Any]] = {name: [] for name in names}
        texts, differed = list[list[int]](), 0
        for turn in range(60):
            name = dice.choice((*names, "third"))
            await a_life(sides[name], dice, live[name])
            try:
                if live[name] and name != "third" and (source := live[name][-1]).seq_len:
                    frames = await exported(sides[name], source)
                    begin = header(frames[0].layout, str(turn), cache_mode=forward_pb2.CACHE_MODE_UNSPECIFIED)
                    begin.header.layout.token_ids[0] = 9
                    live[name].append((await imported(sides[name], begin, *brought(chunks_of(frames)))).handle)
                    texts.append([*begin.header.layout.token_ids])
                elif texts:  # those very tokens, computed, while the imported ones are still there
                    live[name].append(await prefill(sides[name], [*dice.choice(texts[-3:]), 1]))
            except grpc.aio.AioRpcError as error:
                assert error_from_rpc(error).reason is Reason.KV_BLOCKS_EXHAUSTED
                await release(sides[name], *live[name])
                live[name].clear()
            if turn % 10 == 9:
                routers.append(Router(sides[name], name))
            if turn % 3 == 0:
                for each in routers:
                    await each.agrees()
                differed += len({*map(str, (each.there for each in routers[:3]))}) > 1
        for each in routers:
            await each.agrees()
            assert not each.gaps
            each.leave()
        assert differed > 2
        await served.check()


async def test_a_reset_empties_the_cache_and_says_so(served: Served) -> None:
    router = Router(served)
    await prefill(served, [9] * 3 * BLOCK)
    await router.agrees()
    assert router.there
    await served.reset()
    await router.agrees()
    assert not router.there
    assert router.seen[-1].HasField("cleared")
    again = await served.prefill([9] * 3 * BLOCK)
    assert not again.output.cached_tokens
    await served.check()
    await release(served, again.output.handle)


async def test_what_is_not_known_any_more_is_a_gap_and_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "KEPT", 4)
    async with serve_identity(kv_blocks=64, block_size=BLOCK) as served:
        own = served.server.state.handles.instance_id
        router = Router(served)
        await router.agrees()
        await prefill(served, [1] * (8 * BLOCK + 1))
        await router.agrees()
        for request, gap in (
            ({"after_event": 1, "instance_id": own}, True),  # too old
            ({"after_event": 999, "instance_id": own}, True),  # never was
            ({"after_event": 1, "instance_id": "another"}, False),  # of another process: it knows that itself
            ({"after_event": router.last - 2, "instance_id": own}, None),  # kept
        ):
            late = Router(served, **request)
            await late.read() if gap is not None else await prefill(served, [2] * (BLOCK + 1))
            assert (late.gaps, late.snapshots) == (bool(gap), gap is not None)
            if gap is not None:
                assert late.there == router.there


async def test_too_many_changes_are_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept for ever in the engine, either, where nobody comes for it."""
    monkeypatch.setattr("ferrum_rpc.kv.prefix.MOST_CHANGES", 3)
    async with serve_identity(kv_blocks=64, block_size=BLOCK) as served:
        router = Router(served)
        await router.agrees()
        await prefill(served, [1] * (8 * BLOCK + 1))
        await router.agrees()
        assert (router.gaps, router.snapshots, len(router.there)) == (1, 2, 8)


async def test_salts_begin_other_chains(served: Served) -> None:
    router = Router(served)
    await router.agrees()
    before = set(router.there)
    prompt = [31] * (2 * BLOCK + 1)
    handles = [await prefill(served, prompt, create={"cache_salt": salt}) for salt in (b"", b"tenant")]
    await router.agrees()
    new = {hashed: parent for hashed, parent in router.there.items() if hashed not in before}
    assert len(new) == 4
    assert sorted(new.values())[:2] == [b"", b""]
    assert set(new.values()) - {b""} < set(new)
    await release(served, *handles)


async def test_watchers_that_wait_do_nothing_and_one_task_looks_for_all() -> None:
    async with serve_identity() as served:
        events = served.server.events
        routers = [Router(served) for _ in range(8)]
        for each in routers:
            await each.agrees()
        looking: list[asyncio.Task[Any] | None] = []
        look = events._look

        async def looked() -> None:
            looking.append(asyncio.current_task())
            await look()

        with mock.patch.object(events, "_look", looked):
            await until(lambda: len(looking) > 4)
            await prefill(served, [1] * (2 * BLOCK + 1))
            for each in routers:
                await each.agrees()
        [polling] = set(looking)
        assert polling is not None and not polling.done()
        for each in routers:
            each.leave()
        await until(polling.done)
        again = Router(served)
        await again.agrees()
        await prefill(served, [2] * (2 * BLOCK + 1))
        await again.agrees()


async def test_what_the_engine_refuses_ends_the_streams_and_the_next_one_knows_all() -> None:
    async with serve_identity() as served:
        routers = [Router(served) for _ in range(2)]
        for each in routers:
            await each.agrees()
        with mock.patch.object(kv_events, "between_steps", side_effect=StepFailed("injected")):
            handle = await prefill(served, [1] * (2 * BLOCK + 1))
            for each in routers:
                await refused(each.stream.read(), Reason.STEP_FAILED)
        late = Router(served)
        await late.agrees()
        await release(served, handle)
        await prefill(served, [2] * (2 * BLOCK + 1))
        await late.agrees()


async def test_streams_are_counted_and_end_with_the_server() -> None:
    async with serve_identity(max_watchers=2) as served:
        routers = [Router(served) for _ in range(2)]
        for each in routers:
            await each.read()
        more = served.transfer.WatchKvEvents(kv.WatchKvEventsRequest())
        assert (await refused(more.read(), Reason.SEQUENCES_EXHAUSTED)).number("max_watchers") == 2
        assert (await served.info()).limits.max_watchers == 2
        routers[0].leave()
        await until(lambda: served.server.state.watchers == 1)
        routers[0] = Router(served)
        await routers[0].read()
        stopped = asyncio.ensure_future(served.server.stop(grace_s=30))
        for each in routers:
            await refused(each.stream.read(), Reason.DRAINING)
        await stopped
