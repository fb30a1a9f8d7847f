"""ForwardItem: the work item of every forward call, and the constraints of each call's name."""

from __future__ import annotations

import enum
from collections.abc import Container, Iterable, Sequence
from typing import Any, Final

import numpy as np

from ferrum_rpc.core import (
    MAX_CACHE_SALT_BYTES,
    MAX_NAME_BYTES,
    MAX_REQUEST_ID_BYTES,
    MAX_STOP_TOKENS,
    Accept,
    CreateOptions,
    Follow,
    HandleRef,
    ItemAnswer,
    ItemOutcome,
    Positions,
    PrefixUse,
    Pressure,
    Run,
    RunEnd,
    StepTiming,
    WorkItem,
    named,
)
from ferrum_rpc.core.check import check_run
from ferrum_rpc.errors import ExecutorError, InvalidRequest, NotSupported, above
from ferrum_rpc.executor.v1 import forward_pb2, info_pb2, model_executor_pb2, output_pb2, session_pb2, types_pb2
from ferrum_rpc.wire.output import output_from_proto
from ferrum_rpc.wire.rows import Extent
from ferrum_rpc.wire.status import status_from_error

SHORT_REQUEST_ID: Final = MAX_REQUEST_ID_BYTES // 4
"""Characters of at most four bytes each: an id up to this length need not be encoded to know that it is short
enough."""

RUN_END_TO_PROTO: Final[dict[RunEnd, Any]] = {each: forward_pb2.RunEnd.Value(f"RUN_END_{each.name}") for each in RunEnd}

RUN_END_FROM_PROTO: Final[dict[Any, RunEnd]] = {number: end for end, number in RUN_END_TO_PROTO.items()}

_NO_OPTIONS: Final = CreateOptions()
_U32_MAX: Final = 0xFFFFFFFF
_ONE_TOKEN: Final = np.zeros(1, np.int32)


class CallShape(enum.Enum):
    """The constraints that a call's name puts on its items."""

    PREFILL = "Prefill"
    DECODE = "Decode"
    VERIFY = "ForwardVerify"
    ANY = "UnifiedForward"
    FRAME = "Session"


_DECODE, _VERIFY = CallShape.DECODE, CallShape.VERIFY  # a member costs 0.1 µs to look up, and every item asks for it
_ALL, _LAST = Positions.ALL, Positions.LAST


def handle_to_proto(handle: HandleRef) -> types_pb2.KvHandle:
    """Domain to wire."""
    return types_pb2.KvHandle(id=handle.id, seq_len=handle.seq_len, version=handle.version)


def handle_from_proto(handle: types_pb2.KvHandle) -> HandleRef:
    """Wire to domain."""
    return named(HandleRef, (handle.id, handle.seq_len, handle.version))


def request_id_from_proto(request_id: str) -> str:
    """The id itself; raises `InvalidRequest` if it is too long."""
    if (size := len(request_id.encode())) > MAX_REQUEST_ID_BYTES:
        raise above("max_request_id_bytes", MAX_REQUEST_ID_BYTES, size, "bytes of a request id", "request_id")
    return request_id


def name_from_proto(name: str, field: str) -> str:
    """A caller's name of something; raises `InvalidRequest` if it is too long."""
    if (size := len(name.encode())) > MAX_NAME_BYTES:
        raise above("max_name_bytes", MAX_NAME_BYTES, size, "bytes of a name", field)
    return name


def fork_from_proto(
    request: model_executor_pb2.ForkKvRequest | session_pb2.SessionFork,
) -> tuple[HandleRef, int, int | None, str]:
    """The handle, the number of children, their length (None: that of the parent), and the request id."""
    at = request.at_length if request.HasField("at_length") else None
    return handle_from_proto(request.handle), request.count or 1, at, request_id_from_proto(request.request_id)


def item_from_proto(
    item: forward_pb2.ForwardItem, shape: CallShape, capabilities: Container[int], lease_id: str = ""
) -> WorkItem:
    """Wire to domain. ``capabilities``: what it may need. ``lease_id``: the lease of a new sequence that names none.
    Raises `InvalidRequest` or `NotSupported`; the item's state is checked by the service floor."""
    token_ids, message = item.token_ids, item.handle
    count, handle_id = len(token_ids), message.id
    has_handle = handle_id != b"" or item.HasField("handle")
    has_create = item.HasField("create")
    has_follow = item.HasField("follow")
    if count == 0 and not (has_follow and item.follow.feed_chosen):
        raise InvalidRequest("token_ids is empty; an item feeds at least one token", field="token_ids")
    if shape is _DECODE and not (has_handle and count == 1):
        raise InvalidRequest(
            "Decode takes a handle and exactly one token", field="token_ids" if has_handle else "handle"
        )
    if shape is _VERIFY and not has_handle:
        raise InvalidRequest("ForwardVerify takes a handle", field="handle")
    if item.needs:
        _check_needs(item.needs, capabilities)
    fork = has_create and item.create.fork
    if has_create or (not has_handle and item.HasField("truncate_to")):
        _check_creation(item, has_handle, fork)
    output, request_id = output_from_proto(item.output, _ALL if shape is _VERIFY else _LAST), item.request_id
    try:
        if count == 1:  # in a third of the time of np.array
            tokens = _ONE_TOKEN.copy()
            tokens[0] = token_ids[0]
        else:  # in half of it
            tokens = np.fromiter(token_ids, np.int32, count)
    except OverflowError:
        raise InvalidRequest("a token id is above the vocabulary", field="token_ids") from None
    if not has_handle and isinstance(output.kind, Accept):
        raise InvalidRequest("accept takes a handle: a draft goes on with a sequence", field="handle")
    run = None
    if item.HasField("run"):
        if not request_id:
            raise InvalidRequest("a run needs a request id: its tokens cannot be computed again", field="request_id")
        run = Run(item.run.max_tokens, tuple(item.run.stop_token_ids))
        check_run(run, output, MAX_STOP_TOKENS)
    return named(
        WorkItem,
        (
            item.item_id,
            named(HandleRef, (handle_id, message.seq_len, message.version)) if has_handle else None,
            tokens,
            item.truncate_to if has_handle and item.HasField("truncate_to") else None,
            output,
            request_id_from_proto(request_id) if len(request_id) > SHORT_REQUEST_ID else request_id,
            options_from_proto(item.create, "" if fork else lease_id) if has_create or not has_handle else _NO_OPTIONS,
            run,
            _follow_from_proto(item, shape) if has_follow else None,
        ),
    )


def _check_creation(item: forward_pb2.ForwardItem, has_handle: bool, fork: bool) -> None:
    """Refuse an item that creates a sequence with fields that creations must not have."""
    if fork and (not has_handle or item.HasField("follow")):
        raise InvalidRequest("a fork takes the handle of its parent, and follows nothing", field="create.fork")
    if has_handle and not fork:
        raise InvalidRequest("`create` is for new sequences; this item has a handle", field="create")
    if not has_handle and item.truncate_to != 0:
        raise InvalidRequest("a new sequence cannot be rolled back", field="truncate_to")


def _follow_from_proto(item: forward_pb2.ForwardItem, shape: CallShape) -> Follow:
    follow, handle = item.follow, item.handle
    if shape is not CallShape.FRAME:
        raise InvalidRequest("items follow each other in sessions only", field="follow")
    if not item.request_id:
        raise InvalidRequest("an item that follows needs a request id", field="request_id")
    if not item.HasField("handle") or bool(handle.id) == bool(follow.creation):
        raise InvalidRequest(
            "an item follows the handle that will be: with the id of the sequence, or behind a `creation` without one",
            field="handle",
        )
    if follow.creation and handle.version != 1:
        raise InvalidRequest("a creation leaves a sequence at version 1", field="handle.version")
    if follow.feed_chosen and item.token_ids:
        raise InvalidRequest("`feed_chosen` stands in place of token_ids", field="token_ids")
    return Follow(follow.feed_chosen, follow.creation)


def _check_needs(needs: Iterable[int], capabilities: Container[int]) -> None:
    """Refuse an item that needs an unavailable capability; it is named by its name, or by its number if that is
    unknown."""
    for need in needs:
        if need not in capabilities:
            known = info_pb2.Capability.DESCRIPTOR.values_by_number.get(need)
            name = str(need) if known is None else known.name.removeprefix("CAPABILITY_")
            raise NotSupported(f"the item needs capability {name}, which is not offered", field="needs")


def items_from_proto(
    messages: Sequence[forward_pb2.ForwardItem], shape: CallShape, capabilities: Container[int], lease_id: str = ""
) -> list[WorkItem | ExecutorError]:
    """A batch's items: a malformed one becomes the error in its place."""
    items: list[WorkItem | ExecutorError] = []
    for message in messages:
        try:
            items.append(item_from_proto(message, shape, capabilities, lease_id))
        except ExecutorError as error:
            items.append(error)
    return items


def options_from_proto(create: forward_pb2.CreateOptions, lease_id: str = "") -> CreateOptions:
    """Wire to domain. ``lease_id``: the lease of a new sequence that names none."""
    mode, prefix = create.cache_mode, None
    if mode not in forward_pb2.CacheMode.values():
        raise InvalidRequest(f"invalid cache_mode {mode}", field="create.cache_mode")
    if mode != forward_pb2.CACHE_MODE_BYPASS:
        prefix = PrefixUse(create.cache_salt, mode != forward_pb2.CACHE_MODE_READ_ONLY)
    if (size := len(create.cache_salt)) > MAX_CACHE_SALT_BYTES:
        raise above("max_cache_salt_bytes", MAX_CACHE_SALT_BYTES, size, "bytes of a salt", "create.cache_salt")
    adapter = name_from_proto(create.adapter, "create.adapter")
    if create.fork and adapter:
        raise InvalidRequest("a fork has the adapter of its parent", field="create.adapter")
    return CreateOptions(create.reserve_tokens, prefix, create.lease_id or lease_id, create.fork, adapter)


def fill_results(
    response: Any,
    items: Sequence[forward_pb2.ForwardItem],
    outcomes: Sequence[ItemOutcome],
    places: Iterable[int] | None = None,
) -> list[Extent]:
    """Write a batch's results, ``results[i]`` for ``items[i]``, into its answer, of any type. ``places``: where those
    items stand in their call, for a part of its answer. Returns the rows that it still lacks, as `fill_outputs` does.
    """
    answered: list[tuple[forward_pb2.ForwardOutput, ItemAnswer]] = []
    add = response.results.add
    for place, item, outcome in zip(range(len(items)) if places is None else places, items, outcomes, strict=True):
        result = add()
        result.item_id = item.item_id
        result.item_index = place
        if isinstance(outcome, ExecutorError):
            result.error.CopyFrom(status_from_error(outcome))
        else:
            answered.append((result.output, outcome))
    return fill_outputs(answered)


def fill_outputs(answered: Iterable[tuple[forward_pb2.ForwardOutput, ItemAnswer]]) -> list[Extent]:
    """Write answers into their messages, but for their rows. Returns the rows, one extent for each block of the answer,
    in the blocks' order: items of one step share blocks, and their rows stand together in them, so that each block is
    cut once and leaves as one slice."""
    extents: dict[int, Extent] = {}
    ranges: list[tuple[output_pb2.RowRange, Extent, int]] = []
    extent: Extent | None = None
    for output, (reference, rows, replayed, cached_tokens, ended, recomputed_tokens) in answered:
        handle = output.handle
        handle.id, handle.seq_len, handle.version = reference
        if replayed:
            output.replayed = True
        if cached_tokens:
            output.cached_tokens = cached_tokens
        if recomputed_tokens:
            output.recomputed_tokens = recomputed_tokens
        if ended is not None:
            output.run_end = RUN_END_TO_PROTO[ended.end]
            if ended.cause is not None:
                output.run_cause.CopyFrom(status_from_error(ended.cause))
        if rows is None:
            continue
        block, first, count = rows
        last = first + count
        target = output.rows
        target.count = count
        if extent is None or extent.block is not block:
            extent = extents.get(id(block))
            if extent is None:
                extent = extents[id(block)] = Extent(block, first, last, len(extents))
        if first < extent.low:  # noqa: PLR1730 - in a third of the time of `min` and `max`
            extent.low = first
        if last > extent.high:  # noqa: PLR1730
            extent.high = last
        ranges.append((target, extent, first))
    for target, extent, first in ranges:
        if extent.index:  # zero is what an unset field is
            target.block = extent.index
        if first != extent.low:
            target.first = first - extent.low
    return list(extents.values())


def fill_pressure(message: types_pb2.KvPressure, pressure: Pressure) -> None:
    """Write the pressure of the executor into its message."""
    message.free_blocks, message.total_blocks, message.block_size = pressure[:3]
    message.queued_items, message.queued_tokens, message.sequences, message.running_items = pressure[3:7]
    if pressure.total_slots:
        message.free_slots, message.total_slots = pressure[7:]


def pressure_to_proto(pressure: Pressure) -> types_pb2.KvPressure:
    """Domain to wire."""
    message = types_pb2.KvPressure()
    fill_pressure(message, pressure)
    return message


def fill_step(answer: Any, pressure: Pressure, timing: StepTiming | None) -> None:
    """Write the pressure of the executor into an answer to a forward call, and the timing of its step, if one ran;
    durations saturate rather than wrap."""
    fill_pressure(answer.pressure, pressure)
    if timing is not None:
        message = answer.timing
        message.step, message.step_sequences, message.step_tokens, queue_s, forward_s = timing
        message.queue_micros = min(round(queue_s * 1e6), _U32_MAX)
        message.forward_micros = min(round(forward_s * 1e6), _U32_MAX)


def pressure_from_proto(message: types_pb2.KvPressure) -> Pressure:
    """Wire to domain."""
    return Pressure(
        message.free_blocks,
        message.total_blocks,
        message.block_size,
        message.queued_items,
        message.queued_tokens,
        message.sequences,
        message.running_items,
        message.free_slots,
        message.total_slots,
    )


def timing_from_proto(answer: Any) -> StepTiming | None:
    """The timing in an answer to a forward call; None if no step ran for it."""
    if not answer.HasField("timing"):
        return None
    timing = answer.timing
    queue_s, forward_s = timing.queue_micros * 1e-6, timing.forward_micros * 1e-6
    return StepTiming(timing.step, timing.step_sequences, timing.step_tokens, queue_s, forward_s)
