"""`clients/structured`: the demo model, held to a JSON schema token by token. 1,000 texts: its own command."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import jsonschema
import pytest
import pytest_asyncio

from clients.structured.program import SCHEMA, complete, complete_by_grammar, output_of
from clients.structured.schema import Schema
from ferrum_rpc.client import ExecutorClient, GrammarKind, Run
from ferrum_rpc.config import ModelSettings
from tests.support.serving import Served, serve_model

MODEL = Path(__file__).parents[2] / "ferrum_rpc_demo/demo"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "married": {"type": "boolean"},
        "county": SCHEMA["properties"]["county"],
        "sisters": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["name", "married", "county", "sisters"],
    "additionalProperties": False,
}
"""Short texts of what the default schema has."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    """It keeps fewer masks than the texts need, so that they go and come back."""
    demo = ModelSettings(path=str(MODEL), dtype="float32", kv_blocks=512)
    async with serve_model(demo, max_token_masks=24) as served:
        yield served


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("temperature", "session"), [(0.0, True), (0.9, False)])
async def test_every_text_is_of_its_schema_and_the_same_under_speculation(served, temperature, session) -> None:
    schema = Schema(PERSON, MODEL / "tokenizer.json")
    async with ExecutorClient(served.target, session=session) as client:
        prompts = [schema.encode(text) for text in ("I am ", "15, ")]
        grammar = await client.register_grammar(GrammarKind.JSON_SCHEMA, PERSON)
        for most, by in ((0, b""), (5, b""), (5, grammar)):
            outputs = [output_of(temperature, seed) for seed in range(len(prompts))]
            texts = await asyncio.gather(
                *(complete(client, schema, *each, most, by) for each in zip(prompts, outputs, strict=True))
            )
            if most == 0:
                plain = texts
                continue
            assert [each.tokens for each in texts] == [each.tokens for each in plain]
            for text in texts:
                jsonschema.validate(json.loads(schema.decode(text.tokens)), PERSON, jsonschema.Draft202012Validator)
                assert text.trips + text.accepted == len(text.tokens)
                assert text.drafted > text.accepted > len(text.tokens) / 3
    assert all(each.trips == len(each.tokens) for each in plain)
    assert temperature == 0 or len({tuple(each.tokens) for each in texts}) > 1
    await served.check()


@pytest.mark.asyncio(loop_scope="module")
async def test_grammars_of_the_executor_give_the_same_texts_in_fewer_trips(served: Served) -> None:
    schema = Schema(PERSON, MODEL / "tokenizer.json")
    async with ExecutorClient(served.target, session=True) as client:
        grammar = await client.register_grammar(GrammarKind.JSON_SCHEMA, PERSON)
        for seed, prompt in enumerate(map(schema.encode, ("I am ", "He is called "))):
            output = output_of(0.9, seed)
            by_masks = await complete(client, schema, prompt, output)
            by_grammar = await complete_by_grammar(client, grammar, prompt, output, Run(16))
            assert by_grammar.tokens == by_masks.tokens
            assert by_grammar.trips == len(by_masks.tokens) // 16 + 1 and by_masks.trips == len(by_masks.tokens)


def test_a_draft_is_of_the_schema_and_leaves_the_state_as_it_was() -> None:
    schema = Schema(PERSON, MODEL / "tokenizer.json")
    state, text = schema.begin(), schema.encode('{"name":"Ann","married":')
    state.push(text)
    assert schema.decode(state.ahead(text, 9)[0]) == ""
    state.push([ord("t")])
    draft, masks = state.ahead([*text, ord("t")], 20)
    assert schema.decode(draft) == 'rue,"county":"' and len(masks) == len(draft) + 1
    assert (state.mask() == masks[0]).all()
    state.push([*draft, *schema.encode('Kent","sisters":["Eve"')])
    draft, masks = state.ahead(schema.encode('"Eve"]}"Eve"'), 9)  # what looks like the end is left to the last row
    assert schema.decode(draft) == "]" and len(masks) == 2


def test_a_token_that_may_not_follow_is_an_error() -> None:
    state = Schema(SCHEMA, MODEL / "tokenizer.json").begin()
    assert not state.complete and state.mask().size == 9
    with pytest.raises(ValueError, match="may not follow"):
        state.push([ord("x")])
