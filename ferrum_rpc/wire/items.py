"""ForwardItem: one work item behind every forward call, and what each call's name demands of it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from ferrum_rpc.core import (
    CreateOptions,
    HandleRef,
    ItemAnswer,
    ItemOutcome,
    OutputSpec,
    Positions,
    Pressure,
    StepTiming,
    WorkItem,
)
from ferrum_rpc.errors import ExecutorError, InvalidRequest, NotSupported
from ferrum_rpc.executor.v1 import forward_pb2, output_pb2, types_pb2
from ferrum_rpc.wire.output import output_from_proto, output_to_proto
from ferrum_rpc.wire.rows import RowPacker
from ferrum_rpc.wire.status import status_from_error

MAX_REQUEST_ID_BYTES: Final = 128
_NO_OPTIONS: Final = CreateOptions()
_I32_MAX: Final = 0x7FFFFFFF
_U32_MAX: Final = 0xFFFFFFFF


class Shape(enum.Enum):
    """What a call's name demands of its items."""

    PREFILL = "Prefill"
    DECODE = "Decode"
    VERIFY = "ForwardVerify"
    ANY = "UnifiedForward"


def handle_to_proto(handle: HandleRef) -> types_pb2.KvHandle:
    """Domain to wire."""
    return types_pb2.KvHandle(id=handle.id, seq_len=handle.seq_len, version=handle.version)


def handle_from_proto(handle: types_pb2.KvHandle) -> HandleRef:
    """Wire to domain."""
    return HandleRef(handle.id, handle.seq_len, handle.version)


def request_id_from_proto(request_id: str) -> str:
    """The id itself, or `InvalidRequest` where it is too long to be kept."""
    if len(request_id) > MAX_REQUEST_ID_BYTES or len(request_id.encode()) > MAX_REQUEST_ID_BYTES:
        raise InvalidRequest(f"request_id is longer than {MAX_REQUEST_ID_BYTES} bytes", field="request_id")
    return request_id


def item_from_proto(item: forward_pb2.ForwardItem, shape: Shape) -> WorkItem:
    """Wire to domain. Raises `InvalidRequest` or `NotSupported`; the item's state is checked by the service floor."""
    count = len(item.token_ids)
    has_handle = item.HasField("handle")
    if count == 0:
        raise InvalidRequest("token_ids is empty; an item feeds at least one token", field="token_ids")
    if shape is Shape.DECODE and not (has_handle and count == 1):
        raise InvalidRequest(
            "Decode takes a handle and exactly one token", field="token_ids" if has_handle else "handle"
        )
    if shape is Shape.VERIFY and not has_handle:
        raise InvalidRequest("ForwardVerify takes a handle", field="handle")
    if has_handle and item.HasField("create"):
        raise InvalidRequest("`create` is for new sequences; this item has a handle", field="create")
    if not has_handle and item.HasField("truncate_to") and item.truncate_to != 0:
        raise InvalidRequest("a new sequence cannot be rolled back", field="truncate_to")
    tokens = np.fromiter(item.token_ids, np.int64, count)  # twice as fast as np.array, and the maximum is numpy's
    if tokens.max() > _I32_MAX:
        raise InvalidRequest("a token id is above the vocabulary", field="token_ids")
    return WorkItem(
        item_id=item.item_id,
        handle=handle_from_proto(item.handle) if has_handle else None,
        tokens=tokens.astype(np.int32),
        truncate_to=item.truncate_to if has_handle and item.HasField("truncate_to") else None,
        output=output_from_proto(item.output, Positions.ALL if shape is Shape.VERIFY else Positions.LAST),
        request_id=request_id_from_proto(item.request_id) if item.request_id else "",
        create=_options_from_proto(item.create) if item.HasField("create") else _NO_OPTIONS,
    )


def _options_from_proto(create: forward_pb2.CreateOptions) -> CreateOptions:
    if create.adapter:
        raise NotSupported("adapters are not offered (capability ADAPTERS)", field="create.adapter")
    if create.cache_mode not in (forward_pb2.CACHE_MODE_UNSPECIFIED, forward_pb2.CACHE_MODE_BYPASS):
        raise NotSupported("there is no prefix cache (capability PREFIX_CACHE)", field="create.cache_mode")
    return CreateOptions(create.reserve_tokens, create.cache_salt, create.lease_id)


def with_lease(item: WorkItem, lease_id: str) -> WorkItem:
    """The item, a new sequence under ``lease_id`` where it names no lease of its own."""
    if item.handle is not None or item.create.lease_id:
        return item
    return replace(item, create=replace(item.create, lease_id=lease_id))


def item_to_proto(
    *,
    item_id: int,
    handle: types_pb2.KvHandle | None,
    tokens: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.integer]],
    output: OutputSpec,
    request_id: str,
    truncate_to: int | None = None,
    reserve_tokens: int = 0,
) -> forward_pb2.ForwardItem:
    """The client's side: a work item."""
    item = forward_pb2.ForwardItem(
        item_id=item_id,
        handle=handle,
        token_ids=tokens if isinstance(tokens, (list, tuple)) else np.asarray(tokens).tolist(),
        truncate_to=truncate_to,
        output=output_to_proto(output),
        request_id=request_id,
    )
    if handle is None and reserve_tokens:
        item.create.reserve_tokens = reserve_tokens
    return item


def fill_output(output: forward_pb2.ForwardOutput, answer: ItemAnswer, packer: RowPacker) -> None:
    """Write an answer into its message; the packer completes the row range."""
    handle = output.handle
    handle.id = answer.handle.id
    handle.seq_len = answer.handle.seq_len
    handle.version = answer.handle.version
    if answer.replayed:
        output.replayed = True
    if answer.cached_tokens:
        output.cached_tokens = answer.cached_tokens
    if answer.rows is not None:
        packer.add(answer.rows, output.rows)


def results_to_proto(
    items: Sequence[forward_pb2.ForwardItem], outcomes: Sequence[ItemOutcome]
) -> tuple[list[forward_pb2.ItemResult], list[output_pb2.RowBlock]]:
    """A batch's results, ``results[i]`` for ``items[i]``, and its packed rows."""
    packer = RowPacker()
    results = []
    for item, outcome in zip(items, outcomes, strict=True):
        result = forward_pb2.ItemResult(item_id=item.item_id)
        if isinstance(outcome, ExecutorError):
            result.error.CopyFrom(status_from_error(outcome))
        else:
            fill_output(result.output, outcome, packer)
        results.append(result)
    return results, packer.finish()


def pressure_to_proto(pressure: Pressure) -> types_pb2.KvPressure:
    """Domain to wire."""
    return types_pb2.KvPressure(
        free_blocks=pressure.free_blocks,
        total_blocks=pressure.total_blocks,
        block_size=pressure.block_size,
        queued_items=pressure.queued_items,
        queued_tokens=pressure.queued_tokens,
        sequences=pressure.sequences,
    )


def timing_to_proto(timing: StepTiming) -> types_pb2.StepTiming:
    """Domain to wire; durations saturate rather than wrap."""
    return types_pb2.StepTiming(
        step=timing.step,
        queue_micros=min(round(timing.queue_s * 1e6), _U32_MAX),
        forward_micros=min(round(timing.forward_s * 1e6), _U32_MAX),
        step_sequences=timing.sequences,
        step_tokens=timing.tokens,
    )
