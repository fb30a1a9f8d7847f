"""The scheduler on several executors: the tokens are those of a single one, whoever comes, drains and dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from clients.scheduler.driver import ExecutorGone
from clients.scheduler.options import parse
from clients.scheduler.program import serve
from clients.scheduler.request import Request
from ferrum_rpc.client import ExecutorClient
from ferrum_rpc.errors import NotSupported
from tests.e2e.test_scheduler_moves import fleet, texts
from tests.e2e.test_scheduler_runs import (
    SAMPLED,
    Watcher,
    assert_nothing_is_left,
    identity,
    prompts,
    requests,
    schedule,
)
from tests.faults.proxy import TcpProxy, proxied
from tests.serving import Served

COUNT = 24
NONE: frozenset[int] = frozenset()


class At(Watcher):
    """Does something at some tokens."""

    def __init__(self, acts: dict[int, Callable[[], Any]]) -> None:
        super().__init__()
        self._acts = acts
        self.doing: list[asyncio.Future[Any]] = []
        self.on_token = self._act

    def _act(self) -> None:
        act = self._acts.pop(len(self.tokens), None)
        if act is not None and asyncio.iscoroutine(done := act()):
            self.doing.append(asyncio.ensure_future(done))


def texts_to_write() -> list[Request]:
    return requests(prompts(COUNT), 48)


@pytest.fixture(scope="module")
def texts_of_one() -> list[Any]:
    async def run() -> list[Any]:
        async with identity(kv_blocks=512) as served:
            await schedule(served.target, work := texts_to_write(), sampling=SAMPLED)
        return texts(work)

    return asyncio.run(run())


def kill(proxy: TcpProxy) -> None:
    proxy.upstream = "127.0.0.1:1"
    proxy.reset_all()


async def drain(served: Served) -> None:
    async with ExecutorClient(served.target) as client:
        await client.drain(30.0)


def there(work: list[Request], target: str) -> int:
    return sum(each.executor == target for each in work)


@pytest.mark.parametrize(
    "how", [{"session": False}, {"run_tokens": 5}, {"sampling": SAMPLED}], ids=["unary", "runs", "session"]
)
async def test_a_run_over_three_executors_outlives_one_that_dies_and_one_that_drains(
    how: dict[str, Any], texts_of_one: list[Any]
) -> None:
    async with AsyncExitStack() as stack:
        served = [await stack.enter_async_context(identity(kv_blocks=512)) for _ in range(3)]
        dies = await stack.enter_async_context(proxied(served[0].target))
        work = texts_to_write()
        watcher = At({100: lambda: kill(dies), 300: lambda: drain(served[1])})
        targets = [dies.target, served[1].target, served[2].target]
        run = await fleet(targets, [], work, watcher=watcher, stop=NONE, **how)
        await asyncio.gather(*watcher.doing)
        assert texts(work) == texts_of_one
        assert run.executors_lost == 1 and run.rebuilds > 0
        assert run.moves and served[1].server.state.counters.sequences_exported > 0
        assert there(work, served[2].target) > 0 and not run.failed
        for each in served[1:]:
            await assert_nothing_is_left(each)
            assert each.server.state.handles.foreign == 0


async def test_prompts_and_texts_apart_on_two_executors_each(texts_of_one: list[Any]) -> None:
    async with AsyncExitStack() as stack:
        served = [await stack.enter_async_context(identity(kv_blocks=512)) for _ in range(4)]
        first, then = [await stack.enter_async_context(proxied(each.target)) for each in served[::2]]
        work = texts_to_write()
        watcher = At({30: lambda: kill(first), 120: lambda: kill(then)})
        run = await fleet(
            [then.target, served[3].target], [first.target, served[1].target], work, watcher=watcher, stop=NONE
        )
        assert texts(work) == texts_of_one and run.executors_lost == 2
        for each in served[1::2]:
            await assert_nothing_is_left(each)
        assert served[1].server.state.counters.sequences_exported > 0
        assert served[3].server.state.counters.sequences_imported > 0


async def test_where_caches_cannot_move_a_draining_executors_requests_are_computed_elsewhere(
    monkeypatch: pytest.MonkeyPatch, texts_of_one: list[Any]
) -> None:
    async def refuse(*_: Any) -> None:
        raise NotSupported("no")

    monkeypatch.setattr("ferrum_rpc.client.transfer.check_offered", refuse)
    async with identity(kv_blocks=512) as one, identity(kv_blocks=512) as two:
        work = texts_to_write()
        watcher = At({60: lambda: drain(one)})
        run = await fleet([one.target, two.target], [], work, watcher=watcher, stop=NONE)
        assert texts(work) == texts_of_one and run.rebuilds > 0 and not run.moves


async def test_an_executor_that_comes_is_used_and_a_small_one_gets_what_fits(
    tmp_path: Path, texts_of_one: list[Any]
) -> None:
    async with identity(kv_blocks=24) as small, identity(kv_blocks=512) as large:
        listed = tmp_path / "targets"
        listed.write_text(f"{small.target}\n")
        work = texts_to_write()
        watcher = At({10: lambda: listed.write_text(f"{small.target}\n{large.target}\n")})
        await fleet([f"file:{listed}"], [], work, watcher=watcher, stop=NONE)
        assert texts(work) == texts_of_one
        assert there(work, large.target) > 0


async def test_where_everybody_is_gone_for_too_long_the_run_ends() -> None:
    async with identity(kv_blocks=512) as one, proxied(one.target) as dies:
        watcher = At({20: lambda: kill(dies)})
        with pytest.raises(ExecutorGone, match=dies.target):
            await fleet([dies.target], [], texts_to_write(), watcher=watcher, patience_s=0.5)


async def test_the_program_takes_several_targets(capsys: pytest.CaptureFixture[str]) -> None:
    async with identity(kv_blocks=512) as one, identity(kv_blocks=512) as two:
        flags = ["--prompt", "alpha", "--prompt", "beta", "--max-new-tokens", "6", "--greedy", "--plain"]
        alone = await serve(parse(["--target", one.target, *flags]))
        run = await serve(parse(["--target", one.target, "--target", two.target, *flags]))
        assert texts(list(run.requests)) == texts(list(alone.requests)) and not run.failed
        assert {each.executor for each in run.requests} == {one.target, two.target}
    assert "lost executors" in capsys.readouterr().out
