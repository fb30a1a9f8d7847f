"""The hashes of a prompt's blocks, by which an executor finds blocks and which a router can compute.

A block's hash is chained: it covers the block's tokens and, through the hash of the block before it, all tokens before
them. A chain begins at a root, which names what else determines the content: the model, an adapter, and a salt.
docs/prefix_hashes.json has examples for other languages.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Final

from ferrum_rpc.core import TokenArray

HASH_BYTES: Final = 16


def caller_digest(name: str) -> bytes:
    """Suffix of the hash in the key of a block that only the caller of this name may find."""
    return blake2b(name.encode(), digest_size=HASH_BYTES, person=b"ferrum-rpc owner").digest()


def root_of(fingerprint: bytes, salt: bytes, adapter: str = "") -> bytes:
    """The root of the chains of sequences with ``salt``: ``fingerprint`` is the model's, 32 bytes, or that of the model
    with the ``adapter`` of this name."""
    named = adapter.encode()
    content = fingerprint + len(named).to_bytes(4, "little") + named + salt
    return blake2b(content, digest_size=HASH_BYTES, person=b"ferrum-rpc chain").digest()


def chained(parent: bytes, tokens: TokenArray, block_size: int) -> Iterator[bytes]:
    """The hashes of the full blocks of ``tokens`` behind the block ``parent``: each of the one before it and the ids as
    little-endian 32-bit integers."""
    ids, step = tokens.astype("<i4", copy=False).tobytes(), 4 * block_size
    for at in range(0, len(ids) - step + 1, step):
        parent = blake2b(parent + ids[at : at + step], digest_size=HASH_BYTES).digest()
        yield parent
