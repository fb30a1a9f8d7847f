from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.support.serving import Served, serve_identity


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    """An identity server with 64 blocks of 4 tokens and a context of 128."""
    async with serve_identity(kv_blocks=64, block_size=4, max_context=128) as served:
        yield served
