"""Every call of the wire against transformers: the rows that a scheduler receives are those of the model.

Tiny random checkpoints, each served once on a real port. Those of every family are compared in tests/numerics: the wire
does not know of families.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from ferrum_rpc.client import Answer, ExecutorClient, FullLogits, HiddenStates, Item, OutputSpec, Positions, Sequence
from ferrum_rpc.config import ModelSettings
from tests.e2e.oracle import FLOAT32_BOUND, SIXTEEN_BITS_BOUND, Oracle, Tally
from tests.support.checkpoints import make_checkpoint
from tests.support.harness import error, worst
from tests.support.serving import Served, serve_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
BORROWED = "gemma2 through transformers"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3 yarn tied": ("qwen3", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "mistral window": ("mistral", {"sliding_window": 7}),
    BORROWED: ("gemma2", {"sliding_window": 7, "tie_word_embeddings": True}),
}
IN_FLOAT32 = [("mistral window", torch.float32)]
CASES = [*IN_FLOAT32, ("qwen3 yarn tied", torch.bfloat16), (BORROWED, torch.bfloat16)]

VOCAB = 300
BLOCKS, BLOCK_SIZE = 256, 4
ROW = FullLogits()
ROWS = OutputSpec(Positions.ALL, ROW)
SILENT = OutputSpec(Positions.NONE)


def some_tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, size=count).tolist()


PROMPT = some_tokens(7, 24)
LONG = some_tokens(8, 300)
"""Longer than a tile of attention rows, than a slice of the head, and than what yarn calls the original."""


@dataclass(frozen=True)
class Model:
    """A checkpoint, its server and its oracle."""

    dtype: torch.dtype
    served: Served
    oracle: Oracle

    async def check(self) -> None:
        """The books of both floors agree. An assertion in the model thread ends it, and its caller with it."""
        async with asyncio.timeout(30):
            await self.served.check()


def case_id(case: tuple[str, torch.dtype]) -> str:
    return f"{case[0]}, {str(case[1]).removeprefix('torch.')}"


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=CASES, ids=case_id)
async def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Model]:
    name, dtype = request.param
    family, overrides = MODELS[name]
    seed = zlib.crc32(name.encode())
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), family, dtype=dtype, seed=seed, shards=2, **overrides)
    config = ModelSettings(
        str(folder),
        device="cpu",
        dtype=str(dtype).removeprefix("torch."),
        kv_blocks=BLOCKS,
        block_size=BLOCK_SIZE,
        model_backend="hf" if name == BORROWED else "native",
    )
    async with serve_model(config) as served:
        yield Model(dtype, served, Oracle(folder, dtype))


@pytest_asyncio.fixture(loop_scope="module")
async def client(model: Model) -> AsyncIterator[ExecutorClient]:
    async with ExecutorClient(model.served.target) as client:
        yield client
    await model.check()
    state = model.served.runner.cache_state()
    assert (state.sequences, state.free_blocks) == (0, BLOCKS)


@pytest.fixture
def tally(model: Model, record_property: Callable[[str, Any], None]) -> Any:
    tally = Tally(model.oracle)
    yield tally
    tally.check(record_property)


async def started(client: ExecutorClient, tokens: list[int]) -> Sequence:
    sequence = client.sequence(keep_tokens=True)
    await sequence.prefill(tokens, SILENT)
    return sequence


def answers(results: list[Any]) -> list[Answer]:
    assert all(isinstance(each, Answer) for each in results), results
    assert len({each.timing for each in results}) == 1, "one forward pass"
    return results


async def test_prompts_whole_and_in_pieces(client: ExecutorClient, tally: Tally) -> None:
    for prompt, output, chunk in (
        *((prompt, output, None) for prompt in (PROMPT, LONG, PROMPT[:1]) for output in (ROWS, ROW)),
        *((PROMPT, ROWS, chunk) for chunk in (1, 2, 3, 5, 16)),
        (LONG, ROWS, 130),
    ):
        async with client.sequence() as sequence:
            tally.add((await sequence.prefill(prompt, output, chunk=chunk)).logits, prompt)
    for prompt, split in ((PROMPT, 7), (LONG, 18)):
        async with client.sequence() as sequence:
            tally.add((await sequence.prefill(prompt[:split], ROWS)).logits, prompt[:split])
            tally.add((await sequence.prefill(prompt[split:], ROWS)).logits, prompt)


async def test_hidden_states_are_what_the_head_reads(client: ExecutorClient, model: Model) -> None:
    async with client.sequence() as sequence:
        output = OutputSpec(Positions.ALL, HiddenStates())
        parts = [(await sequence.prefill(chunk, output)).hidden_states for chunk in (LONG[:130], LONG[130:])]
    ours, (truth, theirs) = torch.tensor(np.concatenate(parts)), model.oracle.hidden(LONG)
    assert ours.shape == truth.shape
    if model.dtype == torch.float32:
        assert worst(ours, truth) <= FLOAT32_BOUND
    else:
        assert error(ours, truth) <= SIXTEEN_BITS_BOUND * error(theirs, truth)


async def test_verify_rows_are_those_of_decoding_one_by_one(model: Model, client: ExecutorClient, tally: Tally) -> None:
    for start, count in ((3, 1), (4, 8), (7, 17), (10, 5)):
        verifying, decoding = await started(client, PROMPT[:start]), await started(client, PROMPT[:start])
        draft = PROMPT[start : start + count]
        rows = (await verifying.verify(draft, ROW)).logits
        tally.add(rows, PROMPT[: start + count])
        singles = np.concatenate([(await decoding.decode(token, ROW)).logits for token in draft])
        if model.dtype == torch.float32:
            assert worst(torch.from_numpy(rows.copy()), torch.from_numpy(singles).double()) <= FLOAT32_BOUND
        other = some_tokens(start, count)  # the draft was rejected but for its first token
        rows = (await verifying.verify(other, ROW, truncate_to=start + 1)).logits
        tally.add(rows, PROMPT[: start + 1] + other)


async def test_a_mixed_batch_is_each_alone_and_the_oracle(model: Model, client: ExecutorClient, tally: Tally) -> None:
    parts: list[tuple[int, list[int], Any, int | None]] = [  # tokens that it has, what is fed, the rows, truncate_to
        (17, [5], ROW, None),  # a decode
        (9, some_tokens(22, 6), ROWS, None),  # a verify
        (30, some_tokens(23, 4), ROWS, 21),  # a verify after a rejected draft
        (0, some_tokens(24, 19), ROWS, None),  # a prompt
        (12, [6], ROW, 7),  # a decode after a rollback
        (8, some_tokens(25, 11), ROW, None),  # the last chunk of a prompt
        (0, some_tokens(26, 33), ROW, None),  # a prompt, its last row only
        (3, some_tokens(27, 8), ROWS, 0),  # everything anew
    ]

    async def cast() -> list[tuple[Sequence, Item]]:
        items = []
        for held, tokens, rows, truncate_to in parts:
            sequence = client.sequence(keep_tokens=True)
            if held:
                await sequence.prefill(some_tokens(held, held), SILENT)
            items.append((sequence, sequence.item(tokens, rows, truncate_to=truncate_to)))
        return items

    together, alone = await cast(), await cast()
    mixed = answers(await client.forward([item for _, item in together]))
    for (sequence, _), (single, item), answer in zip(together, alone, mixed, strict=True):
        tally.add(answer.logits, sequence.tokens)
        [own] = answers(await client.forward([item]))
        tally.add(own.logits, sequence.tokens)
        assert single.tokens == sequence.tokens
        if model.dtype == torch.float32:
            rows, expected = torch.tensor(answer.logits), torch.tensor(own.logits).double()
            assert worst(rows, expected) <= FLOAT32_BOUND


async def test_truncate_and_redo(model: Model, client: ExecutorClient, tally: Tally) -> None:
    for shared in (False, True):
        for length in (0, 1, 3, 4, 5, 8, 15, 16, 23, 24):
            sequence = await started(client, PROMPT)
            forks = await sequence.fork(2) if shared else []
            await sequence.truncate(length)
            await model.check()
            redo = some_tokens(length, 7)
            tally.add((await sequence.prefill(redo[:5], ROWS)).logits, PROMPT[:length] + redo[:5])
            for at in (5, 6):
                tally.add((await sequence.decode(redo[at], ROW)).logits, PROMPT[:length] + redo[: at + 1])
            for fork in forks:
                tally.add((await fork.decode(9, ROW)).logits, [*PROMPT, 9])
                await fork.release()
            await sequence.release()


async def test_fork_and_diverge(model: Model, client: ExecutorClient, tally: Tally) -> None:
    for at in (None, 1, 4, 6, 16, 23, 24):
        parent = await started(client, PROMPT)
        family = [parent, *await parent.fork(3, at=at)]
        await model.check()
        for step in range(5):  # all write behind what they share, in the same step
            items = [each.item([(50 * index + step) % VOCAB], ROW) for index, each in enumerate(family)]
            for each, answer in zip(family, answers(await client.batch_decode(items)), strict=True):
                tally.add(answer.logits, each.tokens)
        [grandchild] = await family[2].fork(at=family[2].length - 2)
        tally.add((await grandchild.verify([1, 2, 3], ROW)).logits, grandchild.tokens)
        tally.add((await family[2].decode(4, ROW)).logits, family[2].tokens)
        for each in (*family, grandchild):
            await each.release()


@pytest.mark.parametrize("model", IN_FLOAT32, ids=case_id, indirect=True)
async def test_float32_greedy_tokens_are_those_that_transformers_generates(model, client) -> None:
    seen: set[int] = set()
    for prompt in (PROMPT, PROMPT[:3], [PROMPT[4]], LONG[:50]):
        expected = model.oracle.greedy(prompt, 12)
        async with client.sequence() as sequence:
            tokens = [(await sequence.prefill(prompt)).token]
            while len(tokens) < len(expected):
                tokens.append((await sequence.decode(tokens[-1])).token)
        assert tokens == expected
        seen |= set(tokens)
    assert len(seen) > 2, "always the same token would prove little"
