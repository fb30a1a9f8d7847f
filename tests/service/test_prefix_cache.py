"""A prompt that was seen is not computed twice, and its rows are those of one that was computed."""

from __future__ import annotations

import numpy as np

from ferrum_rpc.executor.v1 import forward_pb2, output_pb2
from ferrum_rpc.wire.rows import rows_from_proto
from tests.support.serving import Served, serve_identity
from tests.support.wiring import pb

BLOCK = 4
PROMPT = [(7 * i + 3) % 251 for i in range(5 * BLOCK + 2)]
FULL = output_pb2.OutputSpec(full_logits=output_pb2.FullLogitsOutput())
BYPASS = forward_pb2.CreateOptions(cache_mode=forward_pb2.CACHE_MODE_BYPASS)
READ_ONLY = forward_pb2.CreateOptions(cache_mode=forward_pb2.CACHE_MODE_READ_ONLY)
SALTED = forward_pb2.CreateOptions(cache_salt=b"tenant")


async def create(served: Served, tokens: list[int], **fields: object) -> pb.PrefillResponse:
    return await served.prefill(tokens, **{"output": FULL, **fields})


def row(answer: pb.PrefillResponse | pb.DecodeResponse) -> np.ndarray:
    return rows_from_proto(answer.row_blocks)[0]["logits"]


def blocks_in_use(served: Served) -> int:
    cache = served.server.state.engine.cache
    return cache.total_blocks - cache.free_blocks


async def test_a_hit_is_told_and_its_rows_are_those_of_a_miss(served: Served) -> None:
    miss = await create(served, PROMPT)
    used = blocks_in_use(served)
    hit = await create(served, PROMPT)
    assert (miss.output.cached_tokens, hit.output.cached_tokens) == (0, 5 * BLOCK)
    assert blocks_in_use(served) == used + 1, "what is cached is shared"
    np.testing.assert_array_equal(row(hit), row(miss))
    assert hit.output.handle.seq_len == len(PROMPT)
    for token, answer in enumerate((miss, hit)):  # both go on, and neither writes into what the other has
        on = await served.decode([token], answer.output.handle, output=FULL)
        np.testing.assert_array_equal(row(on), row(await create(served, [*PROMPT, token], create=BYPASS)))
    await served.check()


async def test_the_last_token_is_computed(served: Served) -> None:
    for length in (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK):
        tokens = [(each + length) % 251 for each in PROMPT[:length]]
        miss, hit = [await create(served, tokens) for _ in range(2)]
        assert hit.output.cached_tokens == (length - 1) // BLOCK * BLOCK
        np.testing.assert_array_equal(row(hit), row(miss))


async def test_a_prompt_that_is_still_fed_finds_what_follows(served: Served) -> None:
    """Whatever the pieces are, also from the middle of a block on."""
    whole = await create(served, PROMPT)
    for first in (1, BLOCK - 1, BLOCK, BLOCK + 3):
        handle = (await create(served, PROMPT[:first], create=BYPASS)).output.handle
        rest = await served.prefill(PROMPT[first:], handle, output=FULL)
        assert rest.output.cached_tokens == 0, "it was told not to look"
        handle = (await create(served, PROMPT[:first])).output.handle
        rest = await served.prefill(PROMPT[first:], handle, output=FULL)
        assert rest.output.cached_tokens == 5 * BLOCK - first
        np.testing.assert_array_equal(row(rest), row(whole))
    await served.check()


async def test_salts_and_modes_keep_apart(served: Served) -> None:
    tokens = [each ^ 1 for each in PROMPT]
    assert (await create(served, tokens, create=BYPASS)).output.cached_tokens == 0
    assert (await create(served, tokens, create=READ_ONLY)).output.cached_tokens == 0
    assert (await create(served, tokens)).output.cached_tokens == 0, "neither published anything"
    assert (await create(served, tokens, create=SALTED)).output.cached_tokens == 0
    assert (await create(served, tokens, create=SALTED)).output.cached_tokens == 5 * BLOCK
    assert (await create(served, tokens, create=READ_ONLY)).output.cached_tokens == 5 * BLOCK
    assert (await create(served, tokens, create=BYPASS)).output.cached_tokens == 0


async def test_rows_of_all_tokens_are_computed_again(served: Served) -> None:
    spec = output_pb2.OutputSpec(positions=output_pb2.POSITIONS_ALL, greedy=output_pb2.GreedyOutput())
    miss, hit = [await create(served, PROMPT, output=spec) for _ in range(2)]
    assert hit.output.cached_tokens == 0
    both = [rows_from_proto(each.row_blocks)[0]["token_ids"].tolist() for each in (miss, hit)]
    assert both[0] == both[1] and len(both[0]) == len(PROMPT)


async def test_what_was_rolled_back_and_written_anew_is_not_found_under_the_old_tokens(served: Served) -> None:
    tokens = [each ^ 2 for each in PROMPT]
    handle = (await create(served, tokens)).output.handle
    back = BLOCK + 3
    new = [each ^ 32 for each in tokens[back:]]
    answer = await served.prefill(new, handle, truncate_to=back, output=FULL)
    assert answer.output.cached_tokens == 0
    for text in ([*tokens[:back], *new], tokens):  # the old block was copied, as there was room
        hit = await create(served, text)
        assert hit.output.cached_tokens == 5 * BLOCK
        np.testing.assert_array_equal(row(hit), row(await create(served, text, create=BYPASS)))
    await served.check()


async def test_penalties_count_what_was_found(served: Served) -> None:
    spec = {"sample": {"temperature": 0.0, "repetition_penalty": 50.0, "frequency_penalty": 9.0}}
    tokens = [each ^ 8 for each in PROMPT]
    found = [await create(served, tokens, output=spec, create=each) for each in (BYPASS, None, None)]
    assert found[-1].output.cached_tokens == 5 * BLOCK
    assert len({rows_from_proto(each.row_blocks)[0]["token_ids"].item() for each in found}) == 1


async def test_a_recorded_answer_says_what_was_found(served: Served) -> None:
    tokens = [each ^ 16 for each in PROMPT]
    await create(served, tokens)
    first, again = [await create(served, tokens, request_id="once") for _ in range(2)]
    assert again.output.replayed and again.output.cached_tokens == first.output.cached_tokens == 5 * BLOCK


async def test_what_the_cache_does_is_counted() -> None:
    async with serve_identity(kv_blocks=8, block_size=BLOCK) as served:

        async def status() -> pb.GetStatusResponse:
            answer = await served.status()
            blocks = answer.blocks
            assert blocks.free + blocks.cached + blocks.used == answer.pressure.total_blocks
            assert blocks.free + blocks.cached == answer.pressure.free_blocks
            return answer

        handle = (await create(served, PROMPT)).output.handle
        before = await status()
        assert (before.blocks.used, before.blocks.cached) == (6, 0)
        counters = before.counters
        assert (counters.tokens, counters.searched_tokens, counters.cached_tokens) == (22, 21, 0), "all but the last"
        await served.release(handle)
        assert (await status()).blocks.cached == 5
        hit = await create(served, PROMPT)
        assert hit.timing.step_tokens == 2, "what was found did not run"
        again = (await status()).counters
        assert (again.tokens, again.searched_tokens, again.cached_tokens) == (44, 42, 20)
        children = await served.fork(hit.output.handle, count=2)
        child = await served.prefill([1], children.handles[0], create=forward_pb2.CreateOptions(fork=True))
        assert (await status()).counters.sequences_forked == 3
        for each in (hit.output.handle, child.output.handle, *children.handles):
            await served.release(each, any_version=True)
        await create(served, [250 - each for each in PROMPT], create=BYPASS)
        after = await status()
        assert after.counters.blocks_evicted == 5 - after.blocks.cached > 0
