"""The identity of calls with one request id: fingerprints of a few bytes, whatever the calls contain.

A fingerprint is kept as long as the answer. Parts of a call with unbounded length (tokens, a salt, lists of ids,
biases) are stored as a digest. Others are stored as values: a decode has nothing else, and a digest would take ten
times as long.
"""

from __future__ import annotations

import enum
import hashlib
import marshal
from collections.abc import Hashable
from dataclasses import fields
from functools import cache
from typing import Any, Final

from ferrum_rpc.core import Accept, Sample, WorkItem

DIGEST_BYTES: Final = 16
FEW: Final = 8
"""Maximum number of stop ids that a fingerprint stores as values."""

HOW: Final = 4
"""The position of the output in an item's fingerprint."""


class OfADraft(tuple[Hashable, ...]):
    """The fingerprint of an item whose draft is verified: the token ids of its answer stay as long as the record."""

    __slots__ = ()


def item_fingerprint(item: WorkItem) -> Hashable:
    """The fingerprint of a work item: equal for items of one scope with the same content. The item id is not part of
    it; the handle's id is the scope's.

    It is kept as long as the answer, so it is small whatever the item contains: only parts with unbounded length are
    stored as a digest, and most steps have none.
    """
    handle, output, run, follow = item.handle, item.output, item.run, item.follow
    content = item.tokens.tobytes()
    if len(content) >= DIGEST_BYTES:
        content = hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()
    kind = output.kind
    how: Hashable = output
    if drafted := type(kind) is Accept:
        draft = hashlib.blake2b(kind.token_ids + kind.probabilities, digest_size=DIGEST_BYTES).digest()
        how = (_short(kind.sampling), kind.candidates, draft)
    elif kind.listed:
        how = digest(output)
    goes_on: Hashable = run if run is None or len(run.stop_token_ids) <= FEW else digest(run)
    found: tuple[Hashable, ...]
    if handle is None or item.create.fork:
        create = item.create
        prefix = None if create.prefix is None else tuple(create.prefix)
        made = digest(create.reserve_tokens, prefix, create.lease_id, create.fork, create.adapter)
        found = (handle, made, content, item.truncate_to, how, goes_on)
    else:
        feeds = follow is not None and follow.feed_chosen
        found = (handle.seq_len, handle.version, content, item.truncate_to, how, goes_on, feeds)
    return OfADraft(found) if drafted else found


def _short(sampling: Sample | None) -> Hashable:
    return sampling if sampling is None or not sampling.listed else digest(sampling)


def digest(*content: object) -> bytes:
    """A digest of a call's content: scalars, bytes, enums, and tuples and dataclasses of them. Equal contents have the
    same digest, and different ones differ except for collisions of BLAKE2b: every value is written with its type and
    its length."""
    written = marshal.dumps([each if type(each) in _AS_THEY_ARE else _plain(each) for each in content], 2)
    return hashlib.blake2b(written, digest_size=DIGEST_BYTES).digest()


def _plain(value: Any) -> Any:
    """What `marshal` can write, and writes alike where values are equal: version 2 refers to nothing by identity."""
    kind: Any = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is float:
        return value + 0.0  # -0.0 is 0.0
    if isinstance(value, enum.Enum):
        return value.name
    if kind is tuple and value:
        if type(value[0]) is tuple:  # biases
            return tuple([(token, bias + 0.0) for token, bias in value])
        if type(value[0]) in _AS_THEY_ARE:  # token ids, ids of masks
            return value
    if isinstance(value, tuple):
        return tuple([_plain(each) for each in value])
    return kind.__name__, *[_plain(getattr(value, name)) for name in _compared(kind)]


_AS_THEY_ARE: Final = frozenset((int, bytes, str, bool, type(None)))


@cache
def _compared(kind: Any) -> tuple[str, ...]:
    """The fields of a dataclass that make two of them equal."""
    return tuple([each.name for each in fields(kind) if each.compare])
