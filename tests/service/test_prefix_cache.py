"""A prompt that was seen is not computed twice, and its rows are those of one that was computed."""

from __future__ import annotations

import numpy as np
import pytest

from ferrum_rpc.executor.v1 import forward_pb2, output_pb2, types_pb2
from ferrum_rpc.wire.rows import rows_from_proto
from tests.serving import Served, serve_identity
from tests.wiring import item, pb, prefill

BLOCK = 4
PROMPT = [(7 * i + 3) % 251 for i in range(5 * BLOCK + 2)]
FULL = output_pb2.OutputSpec(full_logits=output_pb2.FullLogitsOutput())
BYPASS = forward_pb2.CreateOptions(cache_mode=forward_pb2.CACHE_MODE_BYPASS)
READ_ONLY = forward_pb2.CreateOptions(cache_mode=forward_pb2.CACHE_MODE_READ_ONLY)
SALTED = forward_pb2.CreateOptions(cache_salt=b"tenant")


async def create(served: Served, tokens: list[int], **fields: object) -> pb.PrefillResponse:
    return await served.executor.Prefill(pb.PrefillRequest(item=item(tokens, **{"output": FULL, **fields})))


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
        on = await served.executor.Decode(pb.DecodeRequest(item=item([token], answer.output.handle, output=FULL)))
        np.testing.assert_array_equal(row(on), row(await create(served, [*PROMPT, token], create=BYPASS)))
    await served.check()


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
async def test_the_last_token_is_computed(served: Served, length: int) -> None:
    tokens = [250 - each for each in PROMPT[:length]]
    miss, hit = [await create(served, tokens) for _ in range(2)]
    assert hit.output.cached_tokens == (length - 1) // BLOCK * BLOCK
    np.testing.assert_array_equal(row(hit), row(miss))


async def test_a_prompt_that_is_still_fed_finds_what_follows(served: Served) -> None:
    """Whatever the pieces are, also from the middle of a block on."""
    whole = await create(served, PROMPT)
    for first in (1, BLOCK - 1, BLOCK, BLOCK + 3):
        handle = (await create(served, PROMPT[:first], create=BYPASS)).output.handle
        rest = await served.executor.Prefill(pb.PrefillRequest(item=item(PROMPT[first:], handle, output=FULL)))
        assert rest.output.cached_tokens == 0, "it was told not to look"
        handle = (await create(served, PROMPT[:first])).output.handle
        rest = await served.executor.Prefill(pb.PrefillRequest(item=item(PROMPT[first:], handle, output=FULL)))
        assert rest.output.cached_tokens == 5 * BLOCK - first
        np.testing.assert_array_equal(row(rest), row(whole))
    await served.check()


async def test_content_outlives_its_sequence_until_its_place_is_needed() -> None:
    async with serve_identity(kv_blocks=8) as served:
        handle = (await create(served, PROMPT)).output.handle
        await served.executor.Release(pb.ReleaseRequest(handle=handle))
        assert blocks_in_use(served) == 0
        again = await create(served, PROMPT)
        assert again.output.cached_tokens == 5 * BLOCK
        await served.executor.Release(pb.ReleaseRequest(handle=again.output.handle))
        other = await prefill(served, [200 - each for each in PROMPT[: 4 * BLOCK]], create=BYPASS)
        assert blocks_in_use(served) == 4
        await served.executor.Release(pb.ReleaseRequest(handle=other))
        part = await create(served, PROMPT)  # the ends of prompts go first
        assert part.output.cached_tokens in range(BLOCK, 5 * BLOCK, BLOCK)
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
    answer = await served.executor.Prefill(pb.PrefillRequest(item=item(new, handle, truncate_to=back, output=FULL)))
    assert answer.output.cached_tokens == 0
    for text in ([*tokens[:back], *new], tokens):  # the old block was copied, as there was room
        hit = await create(served, text)
        assert hit.output.cached_tokens == 5 * BLOCK
        np.testing.assert_array_equal(row(hit), row(await create(served, text, create=BYPASS)))
    await served.check()


async def test_penalties_count_what_was_found(served: Served) -> None:
    sample = output_pb2.SampleOutput(temperature=0.0, repetition_penalty=50.0, frequency_penalty=9.0)
    spec = output_pb2.OutputSpec(sample=sample)
    tokens = [each ^ 8 for each in PROMPT]
    found = [await create(served, tokens, output=spec, create=each) for each in (BYPASS, None, None)]
    assert found[-1].output.cached_tokens == 5 * BLOCK
    assert len({rows_from_proto(each.row_blocks)[0]["token_ids"].item() for each in found}) == 1


async def test_a_recorded_answer_says_what_was_found(served: Served) -> None:
    tokens = [each ^ 16 for each in PROMPT]
    await create(served, tokens)
    first, again = [await create(served, tokens, request_id="once") for _ in range(2)]
    assert again.output.replayed and again.output.cached_tokens == first.output.cached_tokens == 5 * BLOCK


async def test_the_cache_of_a_full_pool_gives_way_to_promises() -> None:
    """A sequence that was promised its blocks gets them, whatever was published meanwhile."""
    async with serve_identity(kv_blocks=14) as served:
        options = forward_pb2.CreateOptions(reserve_tokens=6 * BLOCK)
        promised = await prefill(served, PROMPT[:BLOCK], create=options)
        for shift in range(4):
            other = await prefill(served, [each ^ shift for each in PROMPT])
            await served.executor.Release(pb.ReleaseRequest(handle=other))
        rest = pb.PrefillRequest(item=item(PROMPT[BLOCK:], promised, output=FULL))
        answer = await served.executor.Prefill(rest)
        hog = await prefill(served, list(range(5 * BLOCK)), create=BYPASS)
        on = await served.executor.Prefill(
            pb.PrefillRequest(item=item([9] * (2 * BLOCK - 5), answer.output.handle, truncate_to=len(PROMPT)))
        )
        back = item([8] * (6 * BLOCK), on.output.handle, truncate_to=BLOCK)
        again = await served.executor.Prefill(pb.PrefillRequest(item=back))
        assert again.output.handle.seq_len == 7 * BLOCK
        await served.check()
        for handle in (again.output.handle, hog):
            await served.executor.Release(pb.ReleaseRequest(handle=types_pb2.KvHandle(id=handle.id), any_version=True))
        assert blocks_in_use(served) == 0


async def test_what_the_cache_does_is_counted() -> None:
    async with serve_identity(kv_blocks=8, block_size=BLOCK) as served:

        async def status() -> pb.GetStatusResponse:
            answer = await served.executor.GetStatus(pb.GetStatusRequest())
            blocks = answer.blocks
            assert blocks.free + blocks.cached + blocks.used == answer.pressure.total_blocks
            assert blocks.free + blocks.cached == answer.pressure.free_blocks
            return answer

        handle = (await create(served, PROMPT)).output.handle
        before = await status()
        assert (before.blocks.used, before.blocks.cached) == (6, 0)
        counters = before.counters
        assert (counters.tokens, counters.searched_tokens, counters.cached_tokens) == (22, 21, 0), "all but the last"
        await served.executor.Release(pb.ReleaseRequest(handle=handle))
        assert (await status()).blocks.cached == 5
        hit = await create(served, PROMPT)
        assert hit.timing.step_tokens == 2, "what was found did not run"
        again = (await status()).counters
        assert (again.tokens, again.searched_tokens, again.cached_tokens) == (44, 42, 20)
        children = await served.executor.ForkKv(pb.ForkKvRequest(handle=hit.output.handle, count=2))
        options = forward_pb2.CreateOptions(fork=True)
        [one, *_] = children.handles
        child = await served.executor.Prefill(pb.PrefillRequest(item=item([1], one, create=options)))
        assert (await status()).counters.sequences_forked == 3
        for each in (hit.output.handle, child.output.handle, *children.handles):
            await served.executor.Release(pb.ReleaseRequest(handle=each, any_version=True))
        await create(served, [250 - each for each in PROMPT], create=BYPASS)
        after = await status()
        assert after.counters.blocks_evicted == 5 - after.blocks.cached > 0
