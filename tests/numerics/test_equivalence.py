"""What must not change a number: where a sequence is split, who its neighbours are, where its blocks lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.numerics.harness import Executor, native, rounded_model

RNG = np.random.default_rng(3)
TOKENS = RNG.integers(0, 300, size=23)
FAMILIES = {
    "llama": ("llama", {}),
    "mistral window": ("mistral", {"sliding_window": 6}),
    "qwen3": ("qwen3", {"num_key_value_heads": 1}),
}


@pytest.fixture(scope="module", params=FAMILIES)
def decoder(request):
    family, overrides = FAMILIES[request.param]
    return native(rounded_model(family, torch.float32, **overrides))


@pytest.fixture(scope="module")
def bf16_decoder():
    return native(rounded_model("qwen3", torch.bfloat16), torch.bfloat16)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * float(expected.std()))


def test_chunked_is_whole_at_every_split(decoder):
    whole = Executor(decoder).run(TOKENS, [23])
    for split in range(1, 23):
        close(Executor(decoder).run(TOKENS, [split, 23 - split]), whole)


def test_verify_rows_are_sequential_decode_rows(decoder):
    sequential = Executor(decoder).run(TOKENS, [14] + [1] * 9)
    close(Executor(decoder).run(TOKENS, [14, 9]), sequential)


def test_a_mixed_batch_is_each_alone(decoder):
    prompts = {name: RNG.integers(0, 300, size=size) for name, size in enumerate((17, 30, 3, 16, 40, 9))}
    feeds = {0: [16, 1], 1: [29, 1], 2: [2, 1], 3: [10, 6], 4: [40], 5: [4, 5]}
    together = Executor(decoder)
    first = together.step({s: prompts[s][: feeds[s][0]] for s in (0, 1, 2, 3, 5)})
    second = together.step({s: prompts[s][feeds[s][0] :] for s in (5, 0, 3, 1, 2)} | {4: prompts[4]})
    for sequence, prompt in prompts.items():
        rows = [step[sequence] for step in (first, second) if sequence in step]
        close(torch.cat(rows), Executor(decoder).run(prompt, feeds[sequence]))


def test_permuted_physical_blocks_are_bitwise_the_same(bf16_decoder):
    runs = [Executor(bf16_decoder, seed=seed).run(TOKENS, [11, 1, 1, 6, 4]) for seed in range(3)]
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
def test_poisoned_slots_change_nothing(decoder, block_size):
    """Slots that nobody owns hold NaN, those behind the end of a sequence in its own blocks included."""
    clean = Executor(decoder, block_size=block_size, poison=False)
    poisoned = Executor(decoder, block_size=block_size, poison=True)
    for size in (7, 1, 5, 1, 1, 8):
        first = clean.lengths.get(0, 0)
        spans = {0: TOKENS[first : first + size], 1: TOKENS[:1]}
        for sequence, rows in clean.step(spans).items():
            assert torch.isfinite(rows).all()
            if sequence == 0:
                expected = rows
        assert torch.equal(poisoned.step(spans)[0], expected)


def test_block_size_does_not_matter(decoder):
    whole = Executor(decoder).run(TOKENS, [23])
    for block_size in (1, 3, 16, 64):
        close(Executor(decoder, block_size=block_size).run(TOKENS, [9, 1, 1, 12]), whole)
