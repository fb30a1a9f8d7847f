"""The contract's arithmetic with verifiable numbers: lengths, versions, rows and sharing, against a numpy oracle."""

from __future__ import annotations

import numpy as np
import pytest

from ferrum_rpc.executor.v1 import output_pb2, types_pb2
from ferrum_rpc.models.identity import IdentityConfig
from ferrum_rpc.wire.rows import float_rows, rows_from_proto
from tests.identity_oracle import identity_logits
from tests.serving import Served
from tests.wiring import full, item, pb, prefill, top

ALL = output_pb2.POSITIONS_ALL
NONE = output_pb2.POSITIONS_NONE
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


def oracle(tokens: list[int], positions: list[int]) -> np.ndarray:
    return identity_logits(tokens, positions, IdentityConfig())


def close(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= 2e-5 * expected.std()


def logits(answer) -> np.ndarray:
    [block] = rows_from_proto(answer.row_blocks)
    return float_rows(block["logits"])


async def test_prefill_returns_the_last_row_and_length_n(served: Served) -> None:
    answer = await served.executor.Prefill(pb.PrefillRequest(item=item(PROMPT, output=full())))
    assert (answer.output.handle.seq_len, answer.output.handle.version) == (9, 1)
    close(logits(answer), oracle(PROMPT, [8]))


@pytest.mark.parametrize("split", range(1, len(PROMPT)))
async def test_a_chunked_prompt_gives_the_rows_of_the_whole_at_every_split(served: Served, split: int) -> None:
    first = await served.executor.Prefill(pb.PrefillRequest(item=item(PROMPT[:split], output=full(positions=ALL))))
    second = pb.PrefillRequest(item=item(PROMPT[split:], first.output.handle, output=full(positions=ALL)))
    rows = np.concatenate([logits(first), logits(await served.executor.Prefill(second))])
    close(rows, oracle(PROMPT, list(range(9))))


async def test_a_chunk_without_rows_returns_none(served: Served) -> None:
    answer = await served.executor.Prefill(pb.PrefillRequest(item=item(PROMPT, output=full(positions=NONE))))
    assert not answer.row_blocks and not answer.output.HasField("rows")
    assert answer.output.handle.seq_len == 9


async def test_verify_rows_stand_at_length_plus_i_plus_1_and_truncate_to_rolls_back_in_the_same_call(
    served: Served,
) -> None:
    handle = await prefill(served, PROMPT)
    draft = [8, 9, 7, 9]
    answer = await served.executor.ForwardVerify(pb.ForwardVerifyRequest(item=item(draft, handle, output=full())))
    assert answer.output.handle.seq_len == 13
    close(logits(answer), oracle(PROMPT + draft, [9, 10, 11, 12]))
    redo = item([3, 2], answer.output.handle, truncate_to=10, output=full())
    answer = await served.executor.ForwardVerify(pb.ForwardVerifyRequest(item=redo))
    assert answer.output.handle.seq_len == 12
    close(logits(answer), oracle([*PROMPT, 8, 3, 2], [10, 11]))


async def test_truncate_and_redo_is_a_fresh_sequence_with_and_without_sharing(served: Served) -> None:
    handle = await prefill(served, PROMPT)
    [child] = (await served.executor.ForkKv(pb.ForkKvRequest(handle=handle))).handles
    for each in (handle, child):
        cut = await served.executor.TruncateKv(pb.TruncateKvRequest(handle=each, length=6))
        assert (cut.handle.seq_len, cut.handle.version) == (6, each.version + 1)
        redo = await served.executor.Prefill(pb.PrefillRequest(item=item([7, 7, 7], cut.handle, output=full())))
        close(logits(redo), oracle([*PROMPT[:6], 7, 7, 7], [8]))
    await served.check()


async def test_forks_diverge_without_seeing_each_other(served: Served) -> None:
    handle = await prefill(served, PROMPT)
    fork = await served.executor.ForkKv(pb.ForkKvRequest(handle=handle, count=3, at_length=7))
    assert [child.seq_len for child in fork.handles] == [7, 7, 7]
    assert fork.pressure.sequences == 4
    items = [item([10 + index], child, output=full()) for index, child in enumerate(fork.handles)]
    answer = await served.executor.BatchDecode(pb.BatchDecodeRequest(items=[*items, item([20], handle, output=full())]))
    rows = logits(answer)
    for index in range(3):
        close(rows[index : index + 1], oracle([*PROMPT[:7], 10 + index], [7]))
    close(rows[3:], oracle([*PROMPT, 20], [9]))
    await served.check()


async def test_a_mixed_batch_runs_as_one_forward_and_each_item_gets_what_it_asked_for(served: Served) -> None:
    decoding, verifying = await prefill(served, PROMPT), await prefill(served, PROMPT[:4])
    selected = output_pb2.OutputSpec(selected_tokens=output_pb2.SelectedTokensOutput(token_ids=[5, 200, 0]))
    logprob = output_pb2.OutputSpec(greedy=output_pb2.GreedyOutput(logprob=True))
    items = [
        item([6], decoding, output=top(4)),
        item([8, 8], verifying, output=full(types_pb2.D_TYPE_BF16, ALL)),
        item([1, 2, 3]),
        item([4, 4], output=selected),
        item([2, 2, 2], output=logprob),
        item([9] * 6, output=full(positions=NONE)),
    ]
    answer = await served.executor.UnifiedForward(pb.UnifiedForwardRequest(items=items))
    assert answer.timing.step_sequences == 6 and answer.timing.step_tokens == 17
    outputs = [result.output for result in answer.results]
    assert [output.handle.seq_len for output in outputs] == [10, 6, 3, 2, 3, 6]
    assert not outputs[5].HasField("rows")
    blocks = rows_from_proto(answer.row_blocks)
    assert len(blocks) == 5  # nobody ships what he did not ask for

    expected = oracle([*PROMPT, 6], [9])[0]
    rows = blocks[outputs[0].rows.block]
    best = np.argsort(-expected, kind="stable")[:4]
    assert rows["token_ids"][0].tolist() == best.tolist()
    close(rows["logits"][0], expected[best])
    assert rows["logsumexp"][0] == pytest.approx(np.log(np.exp(expected.astype(np.float64)).sum()), rel=1e-5)

    rows = float_rows(blocks[outputs[1].rows.block]["logits"])
    np.testing.assert_allclose(rows, oracle([*PROMPT[:4], 8, 8], [4, 5]), rtol=2**-8, atol=1e-6)
    assert outputs[1].rows.count == 2

    assert blocks[outputs[2].rows.block]["token_ids"].tolist() == [int(oracle([1, 2, 3], [2]).argmax())]
    expected = oracle([4, 4], [1])[0]
    close(blocks[outputs[3].rows.block]["logits"][0], expected[[5, 200, 0]])
    expected = oracle([2, 2, 2], [2])[0].astype(np.float64)
    rows = blocks[outputs[4].rows.block]
    assert rows["logprobs"][0] == pytest.approx(expected.max() - np.log(np.exp(expected).sum()), rel=1e-5)


async def test_argmax_ties_go_to_the_lowest_id_and_top_tokens_are_ordered(served: Served) -> None:
    # The identity model has 32 channels for 256 words: logits 32..255 are exactly zero, a great tie.
    answer = await served.executor.Prefill(pb.PrefillRequest(item=item([77], output=top(256))))
    [rows] = rows_from_proto(answer.row_blocks)
    expected = oracle([77], [0])[0]
    order = sorted(range(256), key=lambda token: (-expected[token], token))
    assert rows["token_ids"][0].tolist() == order
    zeros = [token for token in rows["token_ids"][0].tolist() if token >= 32]
    assert zeros == sorted(zeros)


async def test_every_answer_tells_the_pressure_truly(served: Served) -> None:
    answer = await served.executor.Prefill(pb.PrefillRequest(item=item([1] * 9)))
    assert (answer.pressure.free_blocks, answer.pressure.total_blocks, answer.pressure.block_size) == (61, 64, 4)
    reserve = await served.executor.ReserveKv(pb.ReserveKvRequest(handle=answer.output.handle, tokens=20))
    assert reserve.pressure.free_blocks == 56
    assert reserve.handle == answer.output.handle
    released = await served.executor.Release(pb.ReleaseRequest(handle=reserve.handle))
    assert (released.pressure.free_blocks, released.pressure.sequences) == (64, 0)
