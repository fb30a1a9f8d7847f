"""`clients/structured`: the demo model, held to a JSON schema token by token. 1,000 texts: its own command."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import jsonschema
import pytest
import pytest_asyncio

from clients.structured.program import SCHEMA, complete, output_of
from clients.structured.schema import Schema
from ferrum_rpc.client import ExecutorClient
from ferrum_rpc.config import ModelSettings
from tests.serving import Served, serve_model

MODEL = Path(__file__).parents[2] / "ferrum_rpc_demo/demo"
TEXTS = 6


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    async with serve_model(ModelSettings(path=str(MODEL), kv_blocks=512), max_token_masks=8) as served:
        yield served


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("temperature", "session"), [(0.0, True), (0.9, False), (0.9, True)])
async def test_every_text_is_of_its_schema(served: Served, temperature: float, session: bool) -> None:
    """With fewer masks than the texts need, so that they go and come back all the time."""
    schema = Schema(SCHEMA, MODEL / "tokenizer.json")
    async with ExecutorClient(served.target, session=session) as client:
        prompts = [schema.encode(f"The register of the parish, person number {each}: ") for each in range(TEXTS)]
        texts = await asyncio.gather(
            *(complete(client, schema, each, output_of(temperature, seed)) for seed, each in enumerate(prompts))
        )
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA, jsonschema.Draft202012Validator)
    assert len(set(texts)) > 1
    await served.check()


def test_a_token_that_may_not_follow_is_an_error() -> None:
    state = Schema(SCHEMA, MODEL / "tokenizer.json").begin()
    assert not state.complete and state.mask().size == 9
    with pytest.raises(ValueError, match="may not follow"):
        state.push(ord("x"))
