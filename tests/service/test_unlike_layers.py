"""Caches whose layers have unlike KV heads, on their way between executors: to the bit, or refused by name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.errors import Reason
from ferrum_rpc.executor.v1 import types_pb2
from tests.support import transfers
from tests.support.listed_kv_heads import LISTED, make_deci_checkpoint
from tests.support.serving import Served, serve_model
from tests.support.transfers import (
    PROMPT,
    brought,
    chunks_of,
    exported,
    fed,
    header,
    imported,
    kt,
    nothing_left,
    sealed,
)
from tests.support.wiring import refused

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUMBERS = {4: ".1", 1: ".2", 2: ".3"}
"""KV heads of a layer, to what the names of its tensors end in."""

KINDS = ["auto", "int8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_deci_checkpoint(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def pair(folder: Path, request: pytest.FixtureRequest) -> AsyncIterator[tuple[Served, Served]]:
    settings = ModelSettings(str(folder), device="cpu", dtype="float32", kv_blocks=64, block_size=4)
    settings = replace(settings, kv_dtype=request.param)
    async with serve_model(settings) as source, serve_model(settings) as target:
        yield source, target


@pytest_asyncio.fixture(loop_scope="module")
async def both(pair: tuple[Served, Served], request: pytest.FixtureRequest) -> AsyncIterator[tuple[Served, Served]]:
    transfers.Names.present = f"{abs(hash(request.node.name))} "
    yield pair
    for served in pair:
        await served.reset()
        await nothing_left(served)


async def stream_of(source: Served, chunk_tokens: int) -> tuple[kt.KvLayout, list[kt.KvChunk]]:
    """An export of `PROMPT`."""
    handle = await fed(source)
    frames = await exported(source, handle, chunk_tokens=chunk_tokens)
    await source.release(handle)
    return frames[0].layout, chunks_of(frames)


@pytest.mark.parametrize("tokens", [0, 5])
async def test_a_sequence_goes_on_where_it_arrives_bit_for_bit(both: tuple[Served, Served], tokens: int) -> None:
    source, target = both
    layout, chunks = await stream_of(source, tokens)
    rounded = source.runner.info.kv_dtype == "int8"
    assert [each.layer for each in chunks] == [*range(len(LISTED))] * -(-len(PROMPT) // (tokens or len(PROMPT)))
    for chunk in chunks:
        heads = LISTED[chunk.layer]
        names = ["keys", "values", *(("key_scales", "value_scales") if rounded else ())]
        assert [each.tensor for each in chunk.parts] == [name + NUMBERS[heads] for name in names]
        count = chunk.parts[0].data.shape[0]
        assert [len(each.data.data) for each in chunk.parts[:2]] == [count * heads * 16 * (1 if rounded else 4)] * 2
    assert layout.seq_len == len(PROMPT) and not layout.layers
    answer = await imported(target, header(layout), *brought(chunks))
    assert await transfers.row(target, answer.handle) == await transfers.expected_row(target)


def _wide(chunks: list[kt.KvChunk]) -> None:
    """The data of another layer under the names of this one."""
    for part, other in zip(chunks[1].parts, chunks[0].parts, strict=True):
        part.data.CopyFrom(other.data)


def _of_fields(chunks: list[kt.KvChunk]) -> None:
    chunk = chunks[1]
    chunk.keys.CopyFrom(chunk.parts[0].data)
    chunk.values.CopyFrom(chunk.parts[1].data)
    del chunk.parts[:]


def _exchanged(chunks: list[kt.KvChunk]) -> None:
    chunks[1], chunks[2] = chunks[2], chunks[1]


WRONG: dict[str, tuple[Callable[[list[kt.KvChunk]], Any], str]] = {
    "data of another shape": (_wide, "chunk.keys.2"),
    "fields in place of parts": (_of_fields, "chunk.parts"),
    "layers in another order": (_exchanged, "chunk"),
    "a layer that there is not": (lambda chunks: setattr(chunks[1], "layer", 9), "chunk"),
}


@pytest.mark.parametrize("what", WRONG)
async def test_a_chunk_that_is_not_one_of_its_layer_is_refused_and_nothing_stays(
    both: tuple[Served, Served], what: str
) -> None:
    """What else may be wrong with its parts: tests/unit/test_wire_transfer.py."""
    source, target = both
    change, field = WRONG[what]
    layout, chunks = await stream_of(source, 8)
    change(chunks)
    frames = brought([sealed(each) for each in chunks])
    error = await refused(imported(target, header(layout), *frames), Reason.INVALID_REQUEST)
    assert error.field == field
    await nothing_left(target)
    layout, chunks = await stream_of(source, 8)
    answer = await imported(target, header(layout), *brought(chunks))  # the same request id
    assert await transfers.row(target, answer.handle) == await transfers.expected_row(target)


async def test_a_number_that_is_not_finite_is_named_with_its_layer(both: tuple[Served, Served]) -> None:
    source, target = both
    layout, chunks = await stream_of(source, 0)
    part = next(each for each in chunks[2].parts if each.data.dtype == types_pb2.D_TYPE_F32)
    numbers = np.frombuffer(part.data.data, np.float32).copy()
    numbers[-1] = np.nan
    part.data.data = numbers.tobytes()
    frames = brought([sealed(each) for each in chunks])
    error = await refused(imported(target, header(layout), *frames), Reason.KV_CORRUPT)
    assert error.metadata == {"not_finite": part.tensor, "layer": "2", "first_token": "0"}
    assert part.tensor.endswith(".3")
    await nothing_left(target)
