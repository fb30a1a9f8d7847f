"""The scheduler on several executors: the tokens are those of a single one, whoever comes, drains and dies."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from clients.scheduler.options import parse
from clients.scheduler.program import serve
from ferrum_rpc.scheduler import Observer, Scheduler, TextRequest
from ferrum_rpc.scheduler.counts import RunCounts
from ferrum_rpc.scheduler.patience import ExecutorGone
from ferrum_rpc.scheduler.request import Request, RequestEnd, Stage
from tests.support import waiting
from tests.support.fleets import hanging, identity, moving, several
from tests.support.proxy import TcpProxy, proxied
from tests.support.scheduling import (
    SAMPLED,
    At,
    Watcher,
    assert_nothing_is_left,
    drain,
    fleet,
    of_one,
    prompts,
    requests,
    scheduled,
    texts,
)
from tests.support.serving import Gate, Served

NONE: frozenset[int] = frozenset()


class Once(At):
    """Does things one after the other, each when a text has begun at an executor."""

    def __init__(self, work: list[Request], acts: list[tuple[str, Callable[[], Any]]]) -> None:
        super().__init__({})
        self._work, self._turns = work, acts

    def _act(self) -> None:
        if self._turns and any(
            each.executor == self._turns[0][0] and each.stage is Stage.RUNNING and len(each.generated) > 2
            for each in self._work
        ):
            self.do(self._turns.pop(0)[1])


def texts_to_write() -> list[Request]:
    return requests(prompts(12), 48)


@pytest.fixture(scope="module")
def texts_of_one() -> list[Any]:
    return of_one(partial(scheduled, work=texts_to_write(), sampling=SAMPLED))


async def over(targets: list[str], work: list[Request], watcher: Watcher | None = None, **how: Any) -> RunCounts:
    """A run with these executors. What the watcher does has ended too."""
    run = await fleet(targets, [], work, watcher=watcher, stop=NONE, **how)
    await asyncio.gather(*getattr(watcher, "doing", ()))
    return run


def there(work: list[Request], target: str) -> int:
    return sum(each.executor == target for each in work)


@pytest.mark.parametrize("how", [{"session": False}, {"run_tokens": 5}], ids=str)
async def test_a_run_over_three_executors_outlives_one_that_dies_and_one_that_drains(how, texts_of_one) -> None:
    async with several(3, kv_blocks=512) as served, proxied(served[0].target) as dies:
        work = texts_to_write()
        watcher = Once(work, [(dies.target, dies.kill), (served[1].target, lambda: drain(served[1]))])
        targets = [dies.target, served[1].target, served[2].target]
        run = await over(targets, work, watcher, **how)
        assert texts(work) == texts_of_one
        assert run.executors_lost == 1 and run.rebuilds > 0
        assert run.moves and served[1].server.state.counters.sequences_exported > 0
        assert there(work, served[2].target) > 0 and not run.failed
        for each in served[1:]:
            await assert_nothing_is_left(each)
            assert each.server.state.handles.foreign == 0


async def test_restarts_drains_and_lost_connections_at_random_change_no_token(texts_of_one: list[Any]) -> None:
    dice = random.Random(3)
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(several(8, kv_blocks=512))
        proxies = [await stack.enter_async_context(proxied(each.target)) for each in served[:5]]
        spare = served[5:]

        def restart(proxy: TcpProxy) -> None:
            proxy.lead_to(spare.pop().target)

        async def drained(proxy: TcpProxy) -> None:
            await drain(next(each for each in served if each.target == proxy.upstream))
            await asyncio.sleep(0.3)
            restart(proxy)

        work = texts_to_write()
        acts: dict[int, Callable[[], Any]] = {}
        for kind, at in ((drained, 40), (restart, 100), (restart, 260)):
            acts[at] = partial(kind, dice.choice(proxies))
        acts |= {at: dice.choice(proxies).reset_all for at in range(70, 540, 80)}
        watcher = At(acts)
        targets = [each.target for each in proxies]
        run = await fleet(targets[:3], targets[3:], work, watcher=watcher, stop=NONE, run_tokens=16)
        await asyncio.gather(*watcher.doing)
        assert texts(work) == texts_of_one and run.executors_lost > 0


async def test_where_caches_cannot_move_a_draining_executors_requests_are_computed_elsewhere(texts_of_one) -> None:
    async with several(2, kv_blocks=512) as (one, two):
        work = texts_to_write()
        watcher = Once(work, [(one.target, lambda: drain(one))])
        with moving(False):
            run = await over([one.target, two.target], work, watcher)
        assert texts(work) == texts_of_one and run.rebuilds > 0 and not run.moves


class Drains(Observer):
    """Knows when an executor is seen to drain."""

    def __init__(self) -> None:
        self.seen = asyncio.Event()

    def executors(self, there: ListOf[tuple[str, str]]) -> None:
        if any(condition == "draining" for _, condition in there):
            self.seen.set()


async def test_choices_whose_executor_drains_before_they_are_fed_are_computed_elsewhere() -> None:
    """The drain is seen while the step of their prompt is held, so nothing of a choice exists there."""
    request = TextRequest(prompt=list(range(30)), max_tokens=24, output=SAMPLED, stop=())
    async with identity(kv_blocks=512) as served, Scheduler(served.target) as scheduler:
        expected = [[each.token for each in await one.all()] for one in scheduler.submit_choices(request, 3)]
    gates, watcher = [Gate("forward"), Gate("forward")], Drains()
    async with identity(kv_blocks=512, stage=gates[0]) as one, identity(kv_blocks=512, stage=gates[1]) as two:
        async with Scheduler([one.target, two.target], run_tokens=6, observer=watcher) as scheduler:
            for gate in gates:
                gate.closed = True
            streams = scheduler.submit_choices(request, 3)
            await waiting.until(lambda: any(gate.reached.is_set() for gate in gates))
            here, there = (one, two) if gates[0].reached.is_set() else (two, one)
            await drain(here)
            await asyncio.wait_for(watcher.seen.wait(), 30)
            for gate in gates:
                gate.open()
            assert [[each.token for each in await one.all()] for one in streams] == expected
            assert {each.executor for each in streams} == {there.target}
        await assert_nothing_is_left(there)


async def test_where_every_executor_drains_the_waiting_requests_fail_after_the_patience() -> None:
    async with identity(kv_blocks=512) as served, Scheduler(served.target, patience_s=0.5) as scheduler:
        await drain(served)
        with pytest.raises(ExecutorGone, match=r"(every executor drains|no executor) at .* for 0.5 s"):
            await scheduler.submit(TextRequest(prompt=[1, 2, 3], max_tokens=6, stop=())).all()


async def test_an_executor_that_comes_is_used_and_a_small_one_gets_what_fits(tmp_path, texts_of_one) -> None:
    async with identity(kv_blocks=32) as small, identity(kv_blocks=512) as large:
        listed = tmp_path / "targets"
        listed.write_text(f"{small.target}\n")
        work = texts_to_write()
        watcher = At({10: lambda: listed.write_text(f"{small.target}\n{large.target}\n")})
        await over([f"file:{listed}"], work, watcher)
        assert texts(work) == texts_of_one
        assert there(work, large.target) > 0


def asked(served: Served) -> int:
    """How often a client wanted to know how it is."""
    return sum(count.calls for name, count in served.server.calls.methods.items() if name.endswith("/GetStatus"))


async def test_texts_outgrow_a_short_context_and_go_on_where_there_is_a_longer_one(tmp_path, texts_of_one) -> None:
    gate = Gate("forward")
    async with identity(kv_blocks=512, max_context=64, stage=gate) as short, identity(kv_blocks=512) as long:
        listed = tmp_path / "targets"
        listed.write_text(f"{short.target}\n")

        async def come() -> None:
            gate.closed = True
            listed.write_text(f"{short.target}\n{long.target}\n")
            await waiting.until(lambda: asked(long) > 1)
            gate.open()

        work = texts_to_write()
        watcher = At({10: come})
        run = await over([f"file:{listed}"], work, watcher)
        assert texts(work) == texts_of_one and not run.failed
        assert len(run.moves) == long.server.state.counters.sequences_imported > 0 and not run.rebuilds
        for each in (short, long):
            await assert_nothing_is_left(each)


@pytest.mark.parametrize("comes", [True, False])
async def test_a_text_that_fills_its_context_waits_for_a_longer_one_that_is_away(tmp_path: Path, comes: bool) -> None:
    gate = Gate("forward")
    async with (
        identity(kv_blocks=512, max_context=32, stage=gate) as short,
        identity(kv_blocks=512) as long,
        proxied(long.target) as away,
    ):
        away.kill()
        listed = tmp_path / "targets"
        listed.write_text(f"{short.target}\n")

        async def listed_too() -> None:
            gate.closed = True
            listed.write_text(f"{short.target}\n{away.target}\n")
            await waiting.until(lambda: away.connections)
            gate.open()

        class Moving(At):
            def changed(self, request: Request) -> None:
                super().changed(request)
                if comes and request.stage is Stage.MOVING:
                    away.upstream = long.target

        work = requests([[1], [2]], 40)
        watcher = Moving({4: listed_too})
        run = await over([f"file:{listed}"], work, watcher, patience_s=30.0 if comes else 0.5)
        assert (0, Stage.MOVING) in watcher.stages
        if comes:
            assert [(each.executor, each.ending) for each in work] == [(away.target, RequestEnd.LENGTH)] * 2
            assert len(run.moves) == 2 and not run.failed and not run.rebuilds
        else:
            assert [(each.ending, each.known) for each in work] == [(RequestEnd.CONTEXT, 33)] * 2
        await assert_nothing_is_left(short)


async def test_a_text_goes_where_all_that_it_may_become_has_room_and_stays_there() -> None:
    async with identity(kv_blocks=512, max_context=32) as short, identity(kv_blocks=512, max_context=64) as long:
        work = requests([[1], [2] * 40, [3] * 64, [4] * 65], 40)
        run = await over([short.target, long.target], work)
        assert [(each.executor, each.ending, len(each.generated)) for each in work[:3]] == [
            (long.target, RequestEnd.LENGTH, 40),
            (long.target, RequestEnd.CONTEXT, 25),
            (long.target, RequestEnd.CONTEXT, 1),
        ]
        assert [each.index for each in run.failed] == [3] and "1 to 64 can be served" in work[3].error
        work = requests(prompts(6, longest=8), 40)
        await over([short.target, long.target], work, Once(work, [(long.target, lambda: drain(long))]))
        assert all(each.executor == long.target and each.ending is RequestEnd.LENGTH for each in work)


async def test_what_an_executor_that_hangs_had_is_computed_elsewhere(texts_of_one: list[Any]) -> None:
    gate = Gate("forward")
    async with identity(kv_blocks=512, stage=gate) as hangs, identity(kv_blocks=512) as other:
        with ExitStack() as hang:
            work = texts_to_write()
            watcher = Once(work, [(hangs.target, lambda: hang.enter_context(hanging(hangs, gate)))])
            run = await over([hangs.target, other.target], work, watcher, hung_patience_s=0.2, timeout_s=5.0)
            assert texts(work) == texts_of_one and run.rebuilds > 0 and not run.failed
        await assert_nothing_is_left(other)


async def test_where_the_only_executor_hangs_the_run_ends_and_says_so() -> None:
    gate = Gate("forward")
    async with identity(kv_blocks=512, stage=gate) as hangs:
        with ExitStack() as hang:
            watcher = At({20: lambda: hang.enter_context(hanging(hangs, gate))})
            with pytest.raises(ExecutorGone, match=r"no progress for 0.5 s: the executor's device makes no progress"):
                await over([hangs.target], texts_to_write(), watcher, patience_s=0.5, timeout_s=0.4)


async def test_the_program_takes_several_targets(capsys: pytest.CaptureFixture[str]) -> None:
    async with identity(kv_blocks=512) as one, identity(kv_blocks=512) as two:
        flags = ["--prompt", "alpha", "--prompt", "beta", "--max-new-tokens", "6", "--greedy", "--plain"]
        alone = await serve(parse(["--target", one.target, *flags]))
        run = await serve(parse(["--target", one.target, "--target", two.target, *flags]))
        assert texts(list(run.requests)) == texts(list(alone.requests)) and not run.failed
        assert {each.executor for each in run.requests} == {one.target, two.target}
    assert "lost executors" in capsys.readouterr().out
