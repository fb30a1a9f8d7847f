"""Every call of the wire against transformers: the rows that a scheduler receives are those of the model.

Tiny random checkpoints of every family, in float32 and in bfloat16, each served once on a real port.
"""

from __future__ import annotations

import asyncio
import functools
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from ferrum_rpc.client import (
    Answer,
    ExecutorClient,
    FullLogits,
    Greedy,
    HiddenStates,
    OutputSpec,
    Positions,
    SelectedTokens,
    Sequence,
    TopTokens,
)
from ferrum_rpc.config import ModelSettings
from ferrum_rpc.executor.v1 import types_pb2
from tests.checkpoints import make_checkpoint
from tests.e2e.oracle import FLOAT32_BOUND, SIXTEEN_BITS_BOUND, Oracle, Tally
from tests.numerics.harness import error, worst
from tests.poison import poison
from tests.serving import Served, serve_model
from tests.wiring import full, item, pb

pytestmark = pytest.mark.asyncio(loop_scope="module")

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama linear tied": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0}, "tie_word_embeddings": True},
    ),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3 yarn tied": ("qwen3", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "mistral window": ("mistral", {"sliding_window": 7}),
}
BORROWED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2 through transformers": ("gemma2", {"sliding_window": 7, "tie_word_embeddings": True}),
}
DTYPES = (torch.float32, torch.bfloat16)
CASES = [*[(name, dtype) for dtype in DTYPES for name in MODELS], *[(name, torch.bfloat16) for name in BORROWED]]

VOCAB = 300
BLOCKS, BLOCK_SIZE = 256, 4
ROW = FullLogits()
ROWS = OutputSpec(Positions.ALL, ROW)
SILENT = OutputSpec(Positions.NONE)


def some_tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, size=count).tolist()


PROMPT = some_tokens(7, 24)
LONG = some_tokens(8, 300)
"""Longer than a tile of attention rows, than a slice of the head, and than what yarn and llama3 call the original."""


@dataclass(frozen=True)
class Model:
    """A checkpoint, its server and its oracle."""

    config: ModelSettings
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
    family, overrides = (MODELS | BORROWED)[name]
    seed = zlib.crc32(name.encode())
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), family, dtype=dtype, seed=seed, shards=2, **overrides)
    config = ModelSettings(
        str(folder),
        device="cpu",
        dtype=str(dtype).removeprefix("torch."),
        kv_blocks=BLOCKS,
        block_size=BLOCK_SIZE,
        model_backend="hf" if name in BORROWED else "native",
    )
    async with serve_model(config) as served:
        yield Model(config, dtype, served, Oracle(folder, dtype))


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


# --- every call -------------------------------------------------------------------------------------------------------


async def test_prefill(client: ExecutorClient, tally: Tally) -> None:
    for prompt in (PROMPT, LONG, PROMPT[:1]):
        for output in (ROWS, ROW):
            async with client.sequence() as sequence:
                tally.add((await sequence.prefill(prompt, output)).logits, prompt)


async def test_chunked_prefill_at_every_split(client: ExecutorClient, tally: Tally) -> None:
    for split in range(1, len(PROMPT)):
        async with client.sequence() as sequence:
            tally.add((await sequence.prefill(PROMPT[:split], ROWS)).logits, PROMPT[:split])
            tally.add((await sequence.prefill(PROMPT[split:], ROWS)).logits, PROMPT)


async def test_prefill_in_many_chunks(client: ExecutorClient, tally: Tally) -> None:
    for chunk in (1, 2, 3, 5, 16):
        async with client.sequence() as sequence:
            tally.add((await sequence.prefill(PROMPT, ROWS, chunk=chunk)).logits, PROMPT)
    async with client.sequence() as sequence:
        tally.add((await sequence.prefill(LONG, ROWS, chunk=130)).logits, LONG)
    async with client.sequence() as sequence:
        await sequence.prefill(LONG[:18], SILENT)
        tally.add((await sequence.prefill(LONG[18:], ROWS)).logits, LONG)


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


async def test_batch_prefill_new_ones_and_chunks(client: ExecutorClient, tally: Tally) -> None:
    sequences = [client.sequence(keep_tokens=True) for _ in range(6)]
    for round_ in range(3):
        counts = np.random.default_rng(round_).integers(1, 20, size=len(sequences))
        items = [
            sequence.item(some_tokens(10 * round_ + index, count), ROWS)
            for index, (sequence, count) in enumerate(zip(sequences, counts, strict=True))
        ]
        for sequence, answer in zip(sequences, answers(await client.batch_prefill(items)), strict=True):
            tally.add(answer.logits, sequence.tokens)


async def test_decode(client: ExecutorClient, tally: Tally) -> None:
    sequence = await started(client, PROMPT[:1])
    for token in PROMPT[1:]:
        tally.add((await sequence.decode(token, ROW)).logits, sequence.tokens)


async def test_decode_of_independent_callers(client: ExecutorClient, tally: Tally) -> None:
    sequences = [await started(client, some_tokens(size, size)) for size in (1, 4, 7, 16, 23, 50)]

    async def generate(sequence: Sequence, seed: int) -> None:
        for token in some_tokens(seed, 8):
            tally.add((await sequence.decode(token, ROW)).logits, sequence.tokens)

    await asyncio.gather(*[generate(sequence, 100 + each) for each, sequence in enumerate(sequences)])


async def test_batch_decode(client: ExecutorClient, tally: Tally) -> None:
    sequences = [await started(client, some_tokens(size, size)) for size in (1, 3, 4, 8, 15, 16, 17, 40)]
    for step in range(8):
        items = [sequence.item([(31 * step + index) % VOCAB], ROW) for index, sequence in enumerate(sequences)]
        for sequence, answer in zip(sequences, answers(await client.batch_decode(items)), strict=True):
            tally.add(answer.logits, sequence.tokens)


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
    async def cast() -> list[Sequence]:
        return [
            await started(client, some_tokens(1, 17)),
            await started(client, some_tokens(2, 9)),
            await started(client, some_tokens(3, 30)),
            client.sequence(keep_tokens=True),
            await started(client, some_tokens(4, 12)),
            await started(client, some_tokens(5, 8)),
            client.sequence(keep_tokens=True),
            await started(client, some_tokens(6, 3)),
        ]

    parts: list[tuple[list[int], OutputSpec, int | None]] = [
        ([5], OutputSpec(Positions.LAST, ROW), None),  # a decode
        (some_tokens(22, 6), ROWS, None),  # a verify
        (some_tokens(23, 4), ROWS, 21),  # a verify after a rejected draft
        (some_tokens(24, 19), ROWS, None),  # a prompt
        ([6], OutputSpec(Positions.LAST, ROW), 7),  # a decode after a rollback
        (some_tokens(25, 11), OutputSpec(Positions.LAST, ROW), None),  # the last chunk of a prompt
        (some_tokens(26, 33), OutputSpec(Positions.LAST, ROW), None),  # a prompt, its last row only
        (some_tokens(27, 8), ROWS, 0),  # everything anew
    ]
    together, alone = await cast(), await cast()
    mixed = answers(
        await client.forward(
            [sequence.item(*part[:2], truncate_to=part[2]) for sequence, part in zip(together, parts, strict=True)]
        )
    )
    for sequence, single, part, answer in zip(together, alone, parts, mixed, strict=True):
        tally.add(answer.logits, sequence.tokens)
        [own] = answers(await client.forward([single.item(*part[:2], truncate_to=part[2])]))
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


@pytest.mark.parametrize("model", CASES[: len(MODELS)], ids=case_id, indirect=True)
async def test_float32_greedy_tokens_are_those_that_transformers_generates(
    model: Model, client: ExecutorClient
) -> None:
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


# --- kinds of rows ----------------------------------------------------------------------------------------------------


async def test_rows_of_every_kind_are_those_of_the_full_row_of_the_same_state(client: ExecutorClient) -> None:
    sequence = await started(client, PROMPT)
    for length in (len(PROMPT) - 1, 4, 1):
        token = PROMPT[length]
        [row] = (await sequence.decode(token, ROW, truncate_to=length)).logits
        order = sorted(range(VOCAB), key=lambda each: (-row[each], each))
        logsumexp = np.logaddexp.reduce(row.astype(np.float64))

        greedy = await sequence.decode(token, Greedy(logprob=True), truncate_to=length)
        assert greedy.token == order[0] == row.argmax()
        np.testing.assert_allclose(greedy.logprobs, [row.max() - logsumexp], rtol=1e-5, atol=1e-5)
        assert (await sequence.decode(token, truncate_to=length)).token == order[0]

        for k in (1, 2, 40, 256):
            top = (await sequence.decode(token, TopTokens(k), truncate_to=length)).top_tokens
            assert top.token_ids[0].tolist() == order[:k]
            assert top.logits[0].tolist() == row[order[:k]].tolist()
            np.testing.assert_allclose(top.logsumexp, [logsumexp], rtol=1e-6)

        ids = (7, 0, VOCAB - 1, 7)
        selected = (await sequence.decode(token, SelectedTokens(ids), truncate_to=length)).selected
        assert selected.logits[0].tolist() == row[list(ids)].tolist()
        np.testing.assert_allclose(selected.logsumexp, [logsumexp], rtol=1e-6)


async def test_kinds_side_by_side_in_one_step_agree(model: Model, client: ExecutorClient) -> None:
    sequence = await started(client, PROMPT)
    family = [sequence, *await sequence.fork(4)]
    kinds = (ROW, Greedy(), TopTokens(9), SelectedTokens((4, 2)), Greedy(logprob=True))
    draft = some_tokens(40, 6)
    items = [each.item(draft, OutputSpec(Positions.ALL, kind)) for each, kind in zip(family, kinds, strict=True)]
    full_rows, greedy, top, selected, logprob = answers(await client.forward(items))
    rows = full_rows.logits
    slack = float(rows.std()) * (FLOAT32_BOUND if model.dtype == torch.float32 else 0.02)
    best = rows.max(-1)
    for tokens in (greedy.tokens, logprob.tokens, top.top_tokens.token_ids[:, 0]):
        assert (rows[np.arange(len(draft)), tokens] >= best - slack).all()
    np.testing.assert_allclose(top.top_tokens.logits, -np.sort(-rows, axis=-1)[:, :9], atol=slack)
    np.testing.assert_allclose(selected.selected.logits, rows[:, [4, 2]], atol=slack)
    logsumexp = np.logaddexp.reduce(rows.astype(np.float64), axis=-1)
    np.testing.assert_allclose(logprob.logprobs, best - logsumexp, atol=2 * slack + 1e-5)


async def test_sixteen_bit_rows_are_the_rounded_float32_rows(model: Model, client: ExecutorClient) -> None:
    stub = model.served.executor
    rows: dict[int, torch.Tensor] = {}
    kinds = {
        types_pb2.D_TYPE_F32: torch.float32,
        types_pb2.D_TYPE_BF16: torch.bfloat16,
        types_pb2.D_TYPE_F16: torch.float16,
    }
    for wire, dtype in kinds.items():
        answer = await stub.Prefill(pb.PrefillRequest(item=item(PROMPT, output=full(wire, positions=2))))
        [block] = answer.row_blocks
        tensor = block.logits.logits
        assert (tensor.dtype, list(tensor.shape)) == (wire, [len(PROMPT), VOCAB])
        assert (answer.output.rows.first, answer.output.rows.count) == (0, len(PROMPT))
        assert len(tensor.data) == len(PROMPT) * VOCAB * dtype.itemsize
        rows[wire] = torch.frombuffer(bytearray(tensor.data), dtype=dtype).view(len(PROMPT), VOCAB)
        await stub.Release(pb.ReleaseRequest(handle=answer.output.handle))
    for wire, dtype in kinds.items():
        assert torch.equal(rows[wire], rows[types_pb2.D_TYPE_F32].to(dtype))


# --- what must not change a bit ---------------------------------------------------------------------------------------


async def story(client: ExecutorClient, between: Callable[[], Awaitable[None]]) -> list[np.ndarray]:
    """A life with every call in it; its rows. ``between`` is awaited before each."""
    rows: list[np.ndarray] = []

    async def note(call: Awaitable[Any]) -> None:
        results = await call
        rows.extend(answer.logits for answer in (results if isinstance(results, list) else [results]))

    one, two, three = (client.sequence() for _ in range(3))
    steps: list[Callable[[], Awaitable[Any]]] = [
        lambda: note(one.prefill(PROMPT[:9], ROWS)),
        lambda: note(two.prefill(LONG[:70], ROWS, chunk=33)),
        lambda: note(one.prefill(PROMPT[9:], ROWS)),
        lambda: note(one.decode(3, ROW)),
        lambda: note(two.verify([1, 2, 3, 4, 5], ROW)),
        lambda: two.truncate(46),
        lambda: note(client.forward([two.item([8, 9], ROWS), three.item(PROMPT[::-1], ROWS), one.item([4], ROW)])),
    ]
    for step in steps:
        await between()
        await step()
    await between()
    children = await one.fork(2, at=22)
    for token in (10, 20, 30):
        await between()
        family = [one, *children]
        items = [each.item([token + index], ROW) for index, each in enumerate(family)]
        await note(client.batch_decode(items))
    await between()
    await note(children[0].verify([5, 6], ROW, truncate_to=17))
    await between()
    await note(one.decode(7, ROW, truncate_to=2))
    for each in (one, two, three, *children):
        await each.release()
    return rows


async def nothing() -> None:
    return None


def same_bits(actual: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


async def test_slots_that_nobody_owns_hold_nan_and_not_a_bit_changes(model: Model, client: ExecutorClient) -> None:
    clean = await story(client, nothing)
    poisoned: list[int] = []

    await model.served.between_steps(lambda runner: runner.kv.reset())  # nothing is cached: most slots have no owner
    between = functools.partial(model.served.between_steps, lambda runner: poisoned.append(poison(runner)))
    same_bits(await story(client, between), clean)
    slots = (BLOCKS + 1) * BLOCK_SIZE
    assert len(poisoned) == 13
    assert all(slots / 2 < count <= slots for count in poisoned)


async def test_physical_blocks_are_permuted_and_not_a_bit_changes(model: Model, client: ExecutorClient) -> None:
    expected = await story(client, nothing)
    orders = ([*range(BLOCKS, 0, -1)], (1 + np.random.default_rng(0).permutation(BLOCKS)).tolist())
    for order in orders:
        async with (
            serve_model(replace(model.config, block_order=order)) as served,
            ExecutorClient(served.target) as other,
        ):
            same_bits(await story(other, nothing), expected)
