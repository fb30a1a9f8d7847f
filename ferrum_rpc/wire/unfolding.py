"""The expanded size of a message, counted on its bytes before it is parsed.

A message may be far smaller than its parsed form: an empty item of a batch takes two bytes on the wire and a hundred in
memory, a token id one byte and four. The parser needs 50 ms for 1 MiB of empty items, and the checks behind it seconds.
So the fields and elements of a message are counted first, in a walk over its tags that ends at the first one too many.
The content of a field is skipped by its length, so a message of megabytes in one field costs microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np

from ferrum_rpc.core import Limits
from ferrum_rpc.errors import InvalidRequest

UNCOUNTED_BYTES: Final = 1 << 14
"""A message up to this size is parsed without counting: whatever its content, parsing takes at most a millisecond and a
few megabytes."""

FIELDS_PER_ITEM: Final = 48
"""Maximum tags per item of a batch: an item with every field and option set has 46."""

BIAS_FIELDS: Final = 3 * 8 * 512
"""Maximum tags of a batch for biases: three each, of eight items with the maximum number."""

_PACKABLE: Final = frozenset(range(1, 19)) - {9, 10, 11, 12}
"""Numeric types; a repeated field of these may be packed."""


@dataclass(frozen=True, slots=True)
class UnfoldingBudget:
    """The maximum expanded size of a message: ``fields`` in all its parts together, ``elements`` of its lists of
    numbers."""

    fields: int
    elements: int

    @classmethod
    def of(cls, limits: Limits, max_context: int = 0) -> UnfoldingBudget:
        """The budget of the largest call within the limits, and of the header of an import of ``max_context``
        tokens."""
        return cls(
            fields=FIELDS_PER_ITEM * (limits.max_batch_items + 8) + BIAS_FIELDS,
            elements=max(limits.max_batch_tokens + limits.max_selected_tokens_of_a_call, max_context),
        )


def check(data: bytes, message: Any, budget: UnfoldingBudget) -> None:
    """Raise `InvalidRequest` if ``data``, supposed to be a ``message`` (a generated class), exceeds the budget. Bytes
    that are not a message pass: the parser refuses them."""
    if len(data) <= UNCOUNTED_BYTES:
        return
    fields, elements = budget.fields, budget.elements
    parts = [(0, len(data), message.DESCRIPTOR)]
    while parts:
        at, end, descriptor = parts.pop()
        nested = _nested(descriptor)
        while at < end:
            fields -= 1
            if fields < 0:
                raise _too_much(f"{budget.fields} fields", budget)
            key, at = data[at], at + 1
            if key >= 0x80:
                key, at = _varint(data, at - 1, end)
            match key & 7:
                case 2:
                    if at < end and data[at] < 0x80:  # without a call: 25,000 empty items take 4 ms, not 19
                        size, start = data[at], at + 1
                    else:
                        size, start = _varint(data, at, end)
                    at = start + size
                    if not size:
                        continue  # nothing inside
                    inner = nested.get(key >> 3) if at <= end else None
                    if inner is _NUMBERS:  # each ends with a byte below 128; those of fixed width are fewer than that
                        elements -= int(np.count_nonzero(np.frombuffer(data, np.int8, size, start) >= 0))
                        if elements < 0:
                            raise _too_much(f"{budget.elements} token ids and other numbers", budget)
                    elif inner is not None:
                        parts.append((start, at, inner))
                case 0:
                    _, at = _varint(data, at, end)
                case 5:
                    at += 4
                case 1:
                    at += 8
                case _:  # groups are of an older protobuf
                    raise InvalidRequest("the request is not a valid message of this method")


def _too_much(what: str, budget: UnfoldingBudget) -> InvalidRequest:
    return InvalidRequest(
        f"the request has more than {what}; send fewer items and shorter lists (limits of GetInfo)",
        metadata={"max_fields": budget.fields, "max_elements": budget.elements},
    )


_NUMBERS: Final = object()


@cache
def _nested(descriptor: Any) -> dict[int, Any]:
    """The fields that have an inside: their message's descriptor, or `_NUMBERS`."""
    inside: dict[int, Any] = {}
    for field in descriptor.fields:
        if field.message_type is not None:
            inside[field.number] = field.message_type
        elif field.is_repeated and field.type in _PACKABLE:
            inside[field.number] = _NUMBERS
    return inside


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """The number at ``at`` and where the next one begins; what is cut short ends the walk."""
    value = shift = 0
    while at < end:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            break
    return 0, end
