"""Log-probabilities beside tokens and scores of a prompt's own tokens, over the wire: against the model's formula, in
whatever pieces, calls and sizes of answers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from ferrum_rpc.core import RowBlock
from ferrum_rpc.errors import Reason
from ferrum_rpc.executor.v1 import forward_pb2, output_pb2, session_pb2, types_pb2
from ferrum_rpc.wire.rows import rows_from_proto
from tests.service.test_session import opened
from tests.support.identity_oracle import identity_logits
from tests.support.serving import Served, serve_identity
from tests.support.wiring import full, item, prefill, refused, top

PROMPT = [7, 3, 9, 1, 40, 41, 7, 250, 0, 12, 77, 3, 3]
ALL = output_pb2.POSITIONS_ALL


def beside(k: int = 0, ids: tuple[int, ...] = ()) -> output_pb2.RowLogprobs:
    return output_pb2.RowLogprobs(top_k=k, token_ids=ids)


def greedy(k: int = 0, ids: tuple[int, ...] = (), positions: int = 0, **fields: Any) -> output_pb2.OutputSpec:
    return output_pb2.OutputSpec(positions=positions, greedy=output_pb2.GreedyOutput(logprobs=beside(k, ids), **fields))


def sample(k: int = 0, ids: tuple[int, ...] = (), **fields: Any) -> output_pb2.OutputSpec:
    return output_pb2.OutputSpec(sample=output_pb2.SampleOutput(logprobs=beside(k, ids), **fields))


def scores(**fields: Any) -> output_pb2.OutputSpec:
    return output_pb2.OutputSpec(next_token=output_pb2.NextTokenOutput(**fields))


def rows_of(answer: Any, frames: list[session_pb2.SessionRows] | None = None) -> list[RowBlock | None]:
    """Of each item of a batch's answer; None: it has no rows."""
    blocks = rows_from_proto(answer.row_blocks, frames or [])
    outputs = [result.output for result in answer.results]
    assert not any(result.HasField("error") for result in answer.results)
    return [
        blocks[each.rows.block].between(each.rows.first, each.rows.first + each.rows.count)
        if each.HasField("rows")
        else None
        for each in outputs
    ]


async def batch(served: Served, *items: forward_pb2.ForwardItem) -> tuple[Any, list[RowBlock | None]]:
    answer = await served.unified(*items)
    return answer, rows_of(answer)


def truth(tokens: list[int]) -> np.ndarray:
    """Log-probabilities float64 [n, vocabulary] of the row of each token."""
    logits = identity_logits(tokens)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def check(block: RowBlock | None, expected: np.ndarray, k: int, ids: tuple[int, ...], *, logprob: bool) -> None:
    """``expected``: the log-probabilities of the block's rows."""
    assert block is not None
    names = {"logprobs": logprob, "top_token_ids": k, "top_logprobs": k, "selected_logprobs": ids}
    assert set(block.columns) == {"token_ids", *(name for name, there in names.items() if there)}
    if k:
        assert block["top_token_ids"].shape == (len(expected), k)
        order = np.lexsort((np.broadcast_to(np.arange(expected.shape[1]), expected.shape), -expected), axis=-1)
        assert (np.sort(block["top_token_ids"]) == np.sort(order[:, :k])).all()
        found = np.take_along_axis(expected, block["top_token_ids"].astype(int), -1)
        np.testing.assert_allclose(block["top_logprobs"], found, atol=2e-5)
        assert (np.diff(block["top_logprobs"]) <= 0).all()
    if ids:
        np.testing.assert_allclose(block["selected_logprobs"], expected[:, list(ids)], atol=2e-5)
    if logprob:
        found = np.take_along_axis(expected, block["token_ids"].astype(int)[:, None], -1)[:, 0]
        np.testing.assert_allclose(block["logprobs"], found, atol=2e-5)


# --- beside tokens ----------------------------------------------------------------------------------------------------


async def test_each_item_of_a_batch_gets_the_log_probabilities_that_it_asked_for(served: Served) -> None:
    """Of different k, in one step with other kinds; and its tokens are those that it gets without them."""
    asked = [(1, ()), (5, ()), (0, (5, 5, 255)), (1, ()), (8, (3,)), (0, ()), (5, ()), (0, (5, 5, 255))]
    items = [item(PROMPT, output=greedy(k, ids, ALL, logprob=k == 5)) for k, ids in asked]
    hot = {"temperature": 3.0, "seed": 9, "repetition_penalty": 3.0}
    drawn = [item(PROMPT, output=sample(3, (1, 2), **hot)), item(PROMPT, output=sample(**hot))]
    answer, rows = await batch(served, *items, item([4], output=top(2)), *drawn, item([4], output=full()))
    expected = truth(PROMPT)
    for (k, ids), block in zip(asked, rows, strict=False):
        check(block, expected, k, ids, logprob=k == 5)
        assert block is not None and block["token_ids"].tolist() == rows[5]["token_ids"].tolist()  # type: ignore[index]
    first, second = rows[len(items) + 1 : len(items) + 3]
    check(first, expected[-1:], 3, (1, 2), logprob=False)
    check(second, expected[-1:], 0, (), logprob=False)
    assert first is not None and second is not None and first["token_ids"] == second["token_ids"]
    blocks = [result.output.rows.block for result in answer.results]
    same = [[blocks[at] for at, each in enumerate(asked) if each == one] for one in dict.fromkeys(asked)]
    assert all(len(set(each)) == 1 for each in same) and len(answer.row_blocks) == len(same) + 4


async def test_ties_stand_by_rising_id(served: Served) -> None:
    """The identity model's rows are zero from its hidden size on."""
    _, [block] = await batch(served, item([5], output=greedy(200)))
    assert block is not None
    logprobs, ids = block["top_logprobs"][0], block["top_token_ids"][0].astype(int)
    pairs = list(pairwise(zip(-logprobs, ids, strict=True)))
    assert all(one < other for one, other in pairs) and sum(one[0] == other[0] for one, other in pairs) > 100


async def test_large_ones_come_in_row_frames(served: Served) -> None:
    items = [item(PROMPT, output=greedy(7, (2,) * 9, ALL, logprob=True)), item(PROMPT, output=greedy(3, (), ALL))]
    items.append(item(PROMPT, output=scores(logprobs=beside(7, (2,)))))
    frames: list[session_pb2.SessionRows] = []
    async with opened(served, inline_bytes=16) as stream:
        await stream.step(*items)
        while (response := await stream.read()).WhichOneof("frame") == "rows":
            frames.append(response.rows)
    assert {each.field for each in frames if each.block == 0} == {3, 4, 5}
    framed, (_, whole) = rows_of(response.forward, frames), await batch(served, *items)
    for one, other in zip(framed, whole, strict=True):
        assert one is not None and other is not None and list(one.columns) == list(other.columns)
        assert all((one[name] == other[name]).all() for name in one.columns)


async def test_a_replay_has_them_and_other_ones_are_another_call(served: Served) -> None:
    for number, (spec, other) in enumerate(
        [(greedy(3, (4,)), greedy(2, (4,))), (scores(following_token=1, logprobs=beside(2)), scores(following_token=2))]
    ):
        handle = await prefill(served, PROMPT)
        sent = item([1, 2], handle, request_id=f"r{number}", output=spec)
        (first, rows), (again, recorded) = await batch(served, sent), await batch(served, sent)
        assert again.results[0].output.replayed and first.row_blocks == again.row_blocks
        assert recorded[0] is not None and rows[0] is not None and recorded[0].nbytes == rows[0].nbytes
        changed = item([1, 2], handle, request_id=f"r{number}", output=other)
        [result] = (await served.unified(changed)).results
        assert "REQUEST_ID_REUSED" in str(result.error)


async def test_masked_tokens_and_accepted_drafts_have_those_of_the_row_as_the_model_gave_it(served: Served) -> None:
    masked = output_pb2.GreedyOutput(logprob=True, logprobs=beside(3, (8,)))
    masked.token_mask.dtype, masked.token_mask.data = types_pb2.D_TYPE_I32, (1 << 77).to_bytes(32, "little")
    masked.token_mask.shape.append(8)
    _, [block] = await batch(served, item(PROMPT, output=output_pb2.OutputSpec(greedy=masked)))
    assert block is not None and block["token_ids"].tolist() == [77]
    check(block, truth(PROMPT)[-1:], 3, (8,), logprob=True)
    draft = [50, int(truth([*PROMPT[:4], 50])[4].argmax()), 9, 9]
    choice = output_pb2.SampleOutput(temperature=0, logprobs=beside(2))
    spec = output_pb2.OutputSpec(accept=output_pb2.AcceptOutput(sampling=choice))
    answer = await served.verify(draft, await prefill(served, PROMPT[:4]), output=spec)
    rows = answer.output.rows
    assert rows.count >= 2
    [block] = rows_from_proto(answer.row_blocks)
    expected = truth([*PROMPT[:4], *draft])[4:][: rows.count]
    check(block.between(rows.first, rows.first + rows.count), expected, 2, (), logprob=False)


# --- scores of the item's own tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("chunk", "first"), [(1, 0), (3, 1), (3, 5), (7, 12), (7, 99), (len(PROMPT), 0)])
async def test_scores_are_the_same_in_whatever_pieces(served: Served, chunk: int, first: int) -> None:
    """Each chunk names the next one's first token; the rest of a step does not matter."""
    expected, handle, found = truth(PROMPT), None, []
    following: list[int] = [*PROMPT[1:], 99]
    for start in range(0, len(PROMPT), chunk):
        part = PROMPT[start : start + chunk]
        next_token = following[start + len(part) - 1]
        spec = scores(first_position=first, following_token=next_token, logprobs=beside(4, (6,)))
        answer, [block, _, _] = await batch(
            served, item(part, handle, output=spec), item([2], output=full()), item([9, 9], output=scores())
        )
        handle = answer.results[0].output.handle
        rows = max(0, start + len(part) - max(first, start))
        assert (block is None) == (rows == 0)
        if block is not None:
            check(block, expected[start + len(part) - rows :][:rows], 4, (6,), logprob=True)
            found += block["token_ids"].tolist()
    assert found == following[first:]


async def test_an_item_that_scores_nothing_runs_and_has_no_rows(served: Served) -> None:
    answer, rows = await batch(
        served,
        item([5], output=scores()),
        item([5, 6, 7], output=scores(first_position=2)),
        item([5, 6, 7], output=scores(first_position=3, following_token=1)),
    )
    assert rows == [None, None, None] and not answer.row_blocks
    assert [each.output.handle.seq_len for each in answer.results] == [1, 3, 3]
    again = await served.decode([8], answer.results[0].output.handle)
    assert again.output.handle.seq_len == 2


async def test_scores_of_a_verify_and_after_a_roll_back_count_positions_of_the_sequence(served: Served) -> None:
    handle = await prefill(served, PROMPT)
    spec = scores(first_position=6, following_token=4)
    answer = await served.verify([50, 51, 52], handle, truncate_to=5, output=spec)
    [block] = rows_from_proto(answer.row_blocks)
    assert block["token_ids"].tolist() == [52, 4]
    check(block, truth([*PROMPT[:5], 50, 51, 52])[6:], 0, (), logprob=True)


# --- refusals ---------------------------------------------------------------------------------------------------------

BAD = {
    "greedy.logprobs.top_k": [greedy(257), greedy(1 << 31)],
    "greedy.logprobs.token_ids": [greedy(0, (256,)), greedy(1, (1,) * 257), greedy(0, (1 << 31,))],
    "sample.logprobs.top_k": [sample(257)],
    "sample.logprobs.token_ids": [sample(0, (3, 256))],
    "next_token.logprobs.top_k": [scores(logprobs=beside(257))],
    "next_token.logprobs.token_ids": [scores(logprobs=beside(0, (256,))), scores(logprobs=beside(0, (1,) * 257))],
    "next_token.following_token": [scores(following_token=256), scores(following_token=(1 << 32) - 1)],
    "positions": [
        output_pb2.OutputSpec(positions=each, next_token=output_pb2.NextTokenOutput()) for each in (1, 2, 3, 9)
    ],
}


async def test_a_bad_spec_is_refused_by_its_field_and_changes_nothing(served: Served) -> None:
    handle = await prefill(served, PROMPT)
    for field, specs in BAD.items():
        for spec in specs:
            error = await refused(served.decode([1], handle, output=spec), Reason.INVALID_REQUEST)
            assert error.field == f"output.{field}", spec
    await served.decode([1], handle)


async def test_nothing_asked_for_is_nothing_extra(served: Served) -> None:
    _, [plain, empty] = await batch(served, item(PROMPT), item(PROMPT, output=greedy()))
    assert plain is not None and empty is not None and list(plain.columns) == list(empty.columns) == ["token_ids"]


async def test_answers_and_calls_are_bounded() -> None:
    """By the bytes of the rows, of the rows alone that are scored; and by the ids of a call."""
    async with serve_identity(max_response_bytes=4096, max_selected_tokens=64, kv_blocks=512) as served:
        fits, long = greedy(9, (1, 2), ALL, logprob=True), [3] * 44  # 88 bytes a row, 256 the item
        await served.prefill(long[:-1], output=fits)
        await refused(served.prefill(long, output=fits), Reason.OUTPUT_TOO_LARGE)
        handle = await prefill(served, [1] * 400)
        for first, fields in ((750, {}), (360, {"truncate_to": 10})):
            spec = scores(first_position=first, following_token=1, logprobs=beside(8))
            answer = await served.prefill([2] * 400, handle, output=spec, **fields)
            assert answer.output.rows.count == 50
            handle = answer.output.handle
        large = scores(first_position=700, logprobs=beside(8))
        await refused(served.prefill([2] * 400, handle, output=large), Reason.OUTPUT_TOO_LARGE)
        items = [item([1, 2], output=greedy(0, tuple(range(64))), request_id="x" * 100) for _ in range(128)]
        await refused(served.unified(*items), Reason.INVALID_REQUEST)
