"""What had to leave the prefix cache is found on disk: after others needed the room, and after a restart."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.executor.v1 import forward_pb2
from ferrum_rpc.kv.tiers import BlockFiles
from ferrum_rpc.wire.rows import rows_from_proto
from tests.service.test_kv_events import Router
from tests.support.serving import Served, serve_model
from tests.support.wiring import full, item, until

BLOCK = 4
PROMPT = [(7 * i + 3) % 251 for i in range(5 * BLOCK + 2)]
OTHER = [250 - each for each in PROMPT]
SALTED = forward_pb2.CreateOptions(cache_salt=b"tenant")


def tiered(folder: Path | None, *, blocks: int = 8, **more: Any) -> AbstractAsyncContextManager[Served]:
    about = {"kv_blocks": blocks, "block_size": BLOCK, "kv_tier_dir": folder, **more}
    return serve_model(ModelSettings(path="identity", device="cpu", **about))


def folders(folder: Path) -> list[Path]:
    return [*folder.iterdir()]


def files(folder: Path) -> list[Path]:
    """All but the keys."""
    return [each for one in folders(folder) for each in one.iterdir() if each.name != "key"]


async def seen(served: Served, tokens: list[int], **fields: Any) -> tuple[int, np.ndarray]:
    """Prefill and release: tokens that were found, and the row."""
    answer = await served.prefill(tokens, output=full(), **fields)
    await served.release(answer.output.handle)
    return answer.output.cached_tokens, rows_from_proto(answer.row_blocks)[0]["logits"]


async def test_blocks_that_gave_way_come_back_with_their_bits(tmp_path: Path) -> None:
    async with tiered(None) as served:
        _, expected = await seen(served, PROMPT)
        await seen(served, OTHER)
        assert (await seen(served, PROMPT))[0] < 5 * BLOCK
    async with tiered(tmp_path) as served:
        router = Router(served)
        await router.read()
        _, row = await seen(served, PROMPT)
        for _ in range(3):
            assert (await seen(served, OTHER))[1].shape == row.shape
            cached, again = await seen(served, PROMPT)
            assert cached == 5 * BLOCK
            np.testing.assert_array_equal(again, expected)
            await served.check()
        status = await served.status()
        assert status.blocks.parked_bytes
        while "parked" not in {each.WhichOneof("kind") for each in router.seen}:
            await router.read()
        router.leave()
        assert (await seen(served, PROMPT, create=SALTED))[0] == 0, "a salt keeps apart here too"


async def test_a_step_reads_nothing_and_an_operation_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ferrum_rpc.engine.operations.FETCH_BYTES", 1)
    async with tiered(tmp_path) as served:
        _, expected = await seen(served, PROMPT)
        await seen(served, OTHER)
        runner, read = served.runner, list[str]()
        fetch, begin, content = runner.fetch_prefix, runner.begin, BlockFiles.read
        monkeypatch.setattr(runner, "fetch_prefix", lambda *about: read.append("piece") or fetch(*about))
        monkeypatch.setattr(runner, "begin", lambda step: read.append("step") or begin(step))
        monkeypatch.setattr(BlockFiles, "read", lambda *about: read.append("read") or content(*about))
        cached, row = await seen(served, PROMPT)
        assert (cached, read) == (5 * BLOCK, [*["piece", "read"] * 3, "piece", "step"]), "two blocks had not to leave"
        np.testing.assert_array_equal(row, expected)
        await served.check()


async def test_a_call_that_is_cancelled_while_the_disk_is_read_leaves_nothing(tmp_path, monkeypatch):
    async with tiered(tmp_path) as served:
        for tokens in (PROMPT, OTHER):
            await seen(served, tokens)
        begun, go, fetch = threading.Event(), threading.Event(), served.runner.fetch_prefix

        def held(*about: Any) -> int:
            begun.set()
            assert go.wait(30)
            return fetch(*about)

        monkeypatch.setattr(served.runner, "fetch_prefix", held)
        asked, engine = list[str](), served.server.state.engine
        submit, steps = engine.submit, engine.counters.steps
        monkeypatch.setattr(engine, "submit", lambda work: asked.append(type(work).__name__) or submit(work))
        calls = [served.prefill(PROMPT) for _ in range(2)]
        await asyncio.to_thread(begun.wait, 30)
        await until(lambda: len(served.server.state.tier_reads.waiting) == 1)  # behind the one
        assert asked == ["Operation"], "the second waits until the first is read"
        for call in calls:
            call.cancel()
        await until(lambda: not served.server.calls.in_flight)
        go.set()
        await until(served.server.state.empty.is_set)
        await served.check()
        assert engine.counters.steps == steps
        assert (await seen(served, PROMPT))[0] == 5 * BLOCK


async def test_a_chunk_goes_on_with_what_the_disk_has(tmp_path: Path) -> None:
    async with tiered(tmp_path) as served:
        _, expected = await seen(served, PROMPT)
        await seen(served, OTHER)
        for first in (BLOCK, 2 * BLOCK, 2 * BLOCK + 1):
            begun = await served.prefill(PROMPT[:first])
            answer = await served.prefill(PROMPT[first:], begun.output.handle, output=full())
            np.testing.assert_array_equal(rows_from_proto(answer.row_blocks)[0]["logits"], expected)
            await served.release(answer.output.handle)
            await seen(served, OTHER)
            await served.check()


async def test_forks_in_a_step_go_on_with_what_the_disk_has(tmp_path: Path) -> None:
    async with tiered(tmp_path, blocks=9) as served:
        _, expected = await seen(served, PROMPT)
        for _ in range(2):
            await seen(served, OTHER)
        begun = await served.prefill(PROMPT[: BLOCK + 1])
        fork = item(
            PROMPT[BLOCK + 1 :], begun.output.handle, output=full(), create=forward_pb2.CreateOptions(fork=True)
        )
        answer = await served.unified(fork)
        assert answer.results[0].output.cached_tokens == 4 * BLOCK - 1
        np.testing.assert_array_equal(rows_from_proto(answer.row_blocks)[0]["logits"], expected)
        await served.check()


async def test_the_next_process_of_the_same_model_finds_them(tmp_path: Path) -> None:
    async with tiered(tmp_path, blocks=64) as served:
        _, expected = await seen(served, PROMPT)
    async with tiered(tmp_path, blocks=64) as served:
        cached, row = await seen(served, PROMPT)
        assert cached == 5 * BLOCK
        np.testing.assert_array_equal(row, expected)
    async with tiered(tmp_path, blocks=64, identity_positional=True) as served:
        assert (await seen(served, PROMPT))[0] == 0, "another model has a folder of its own"
    assert len(folders(tmp_path)) == 2


async def test_a_reset_empties_the_disk_too(tmp_path: Path) -> None:
    async with tiered(tmp_path) as served:
        await seen(served, PROMPT)
        await seen(served, OTHER)
        await served.reset()
        assert (await seen(served, PROMPT))[0] == 0
        await served.reset()
        assert not (await served.status()).blocks.parked_bytes

        await seen(served, PROMPT)
        begun = await served.prefill([1])
        await served.reserve(begun.output.handle, tokens=7 * BLOCK)  # they leave,
        await served.reset()  # and no step has saved them yet
        await seen(served, OTHER)
        assert (await seen(served, PROMPT))[0] == 0
        await served.reset()
    assert len(folders(tmp_path)) == 1
    assert not files(tmp_path)


async def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"kv-tier-bytes"):
        async with tiered(tmp_path, kv_tier_bytes=10):
            pass
    (file := tmp_path / "file").touch()
    for folder in (Path("/proc/nothing"), file):
        with pytest.raises(InvalidRequest, match=rf"^kv_tier_dir {folder}: \w"):
            async with tiered(folder):
                pass
    async with tiered(tmp_path / "mounted"):
        [inner] = folders(tmp_path / "mounted")
    (tmp_path / "mounted").chmod(0o777)  # a volume, whosever it is
    async with tiered(tmp_path / "mounted"):
        pass
    inner.chmod(0o720)
    with pytest.raises(InvalidRequest, match=rf"^kv_tier_dir .*: others can write {inner},"):
        async with tiered(tmp_path / "mounted"):
            pass
