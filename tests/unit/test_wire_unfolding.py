"""What a message may unfold into is counted on its bytes, and nothing honest is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.executor.v1 import executor_control_pb2, model_executor_pb2, session_pb2
from ferrum_rpc.wire.unfolding import UNCOUNTED_BYTES, UnfoldingBudget, check
from tests.support.serving import LIMITS
from tests.support.wiring import field

BUDGET = UnfoldingBudget.of(LIMITS)
MEGABYTE = 1 << 20


Item = model_executor_pb2.BatchPrefillRequest
LARGE: dict[str, tuple[Any, bytes]] = {
    "empty items": (Item, field(1, b"") * (MEGABYTE // 2)),
    "fields that nobody knows": (Item, b"\x78\x00" * (MEGABYTE // 2)),
    "fields that nobody knows, within an item": (Item, field(1, b"\x78\x00" * (MEGABYTE // 2))),
    "token ids of one item": (Item, field(1, field(3, b"\x01" * MEGABYTE))),
    "token ids over many fields": (Item, field(1, field(3, b"\x01" * 8192) * 128)),
    "token ids that are not packed": (Item, field(1, b"\x18\x01" * (MEGABYTE // 2))),
    "selected ids": (Item, field(1, field(5, field(5, field(1, b"\x01" * MEGABYTE))))),
    "handles to release": (
        session_pb2.SessionRequest,
        field(session_pb2.SessionRequest.DESCRIPTOR.fields_by_name["release"].number, field(1, b"") * MEGABYTE),
    ),
    "groups": (Item, b"\x0b\x0c" * MEGABYTE),
}


@pytest.mark.parametrize("name", LARGE)
def test_what_unfolds_into_too_much_is_refused_before_it_is_parsed(name: str) -> None:
    message, data = LARGE[name]
    assert message.FromString(data) is not None or name == "groups"  # the parser would take it
    with pytest.raises(InvalidRequest):
        check(data, message, BUDGET)


def test_the_walk_ends_at_the_first_field_too_many() -> None:
    """A message that goes on behind what is counted is not read: its bytes there may be anything."""
    data = field(1, b"") * (BUDGET.fields + 1) + b"\xff" * MEGABYTE
    with pytest.raises(InvalidRequest, match=f"{BUDGET.fields} fields"):
        check(data, Item, BUDGET)


def test_the_largest_call_that_the_limits_allow_passes() -> None:
    request = model_executor_pb2.UnifiedForwardRequest()
    each = LIMITS.max_batch_tokens // LIMITS.max_batch_items
    for index in range(LIMITS.max_batch_items):
        item = request.items.add(item_id=1 << 60, truncate_to=7, request_id="x" * 128)
        item.handle.id, item.handle.seq_len, item.handle.version = b"h" * 24, 1, 2
        item.token_ids.extend([1 << 20] * each)
        item.create.lease_id, item.create.cache_salt, item.create.reserve_tokens = "l" * 40, b"s" * 64, 9
        ids = LIMITS.max_selected_tokens if index < 16 else 0
        item.output.selected_tokens.token_ids.extend(range(1 << 20, (1 << 20) + ids))
    data = request.SerializeToString()
    assert len(data) > UNCOUNTED_BYTES
    check(data, type(request), BUDGET)


def test_megabytes_in_one_field_cost_one_step() -> None:
    check(field(1, field(6, b"r" * (8 * MEGABYTE))), Item, UnfoldingBudget(fields=2, elements=0))


@given(st.binary(max_size=200), st.integers(0, 40))
def test_bytes_that_are_no_message_are_left_to_the_parser(noise: bytes, cut: int) -> None:
    """Whatever the bytes are, the walk ends, and only too much or groups are refused."""
    padding = field(15, b"p" * UNCOUNTED_BYTES)
    for data in (noise + padding, (padding + noise)[: len(padding) + cut], padding[:-cut] if cut else padding):
        try:
            check(data, executor_control_pb2.ListSequencesRequest, UnfoldingBudget(fields=8, elements=8))
        except InvalidRequest:
            continue
