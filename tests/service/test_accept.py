"""Drafts that the executor verifies, over the wire: what is emitted, what stays in the cache, what is refused."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from ferrum_rpc.errors import Reason
from ferrum_rpc.executor.v1 import forward_pb2, info_pb2, output_pb2, session_pb2, types_pb2
from ferrum_rpc.wire.rows import rows_from_proto
from ferrum_rpc.wire.tensor import fill_tensor
from tests.service.test_sample import BAD as BAD_SAMPLES
from tests.service.test_sample import sample, tokens_of
from tests.support.raw_session import raw_session
from tests.support.serving import Served, serve_identity
from tests.support.wiring import chosen, full, item, prefill, refused

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = [7, 3, 9, 1]
LAST = 5
TEXT = 40


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    async with serve_identity(kv_blocks=512, max_context=128, positional=True) as served:
        yield served
        await served.check()


def accept(ids: Any = None, probabilities: Any = None, **sampling: Any) -> output_pb2.OutputSpec:
    message = output_pb2.AcceptOutput(sampling=sample(**sampling).sample if sampling else None)
    if ids is not None:
        fill_tensor(message.draft_token_ids, np.asarray(ids, np.uint32))
    if probabilities is not None:
        fill_tensor(message.draft_probabilities, np.asarray(probabilities, np.float32))
    return output_pb2.OutputSpec(accept=message)


async def verify(served: Served, tokens: Sequence[int], handle: types_pb2.KvHandle, **fields: Any) -> Any:
    """The handle, and the tokens."""
    answer = await served.verify(tokens, handle, **fields)
    [block], rows = rows_from_proto(answer.row_blocks), answer.output.rows
    assert (rows.first, rows.count) == (0, block.rows), "rows of rejected tokens came"
    return answer.output.handle, block["token_ids"].tolist()


async def plain(served: Served, output: output_pb2.OutputSpec | None = None) -> list[int]:
    """What single decodes choose behind `PROMPT` and `LAST`."""
    handle, text = await prefill(served, PROMPT), [LAST]
    while len(text) <= TEXT:
        answer = await served.decode(text[-1:], handle, output=output)
        handle = answer.output.handle
        text += chosen(answer)
    await served.release(handle)
    return text[1:]


def wrong(token: int) -> int:
    return (token + 1) % 256


@pytest.mark.parametrize(("how", "right"), [("greedy", 0), ("greedy", 5), ("sampled", 2), ("sampled", 5), ("cold", 2)])
async def test_speculation_emits_what_single_decodes_choose(served: Served, how: str, right: int) -> None:
    """With a draft that is right, wrong, or right at first; penalties count the draft. The cache keeps what was
    accepted, and the version grows by one."""
    sampling = {"greedy": {}, "sampled": {"seed": 4, "presence_penalty": 0.7, "top_p": 0.9, "penalty_from": 2}}
    sampling["cold"] = {"temperature": 0.0, "repetition_penalty": 1.6}
    text = await plain(served, sample(**sampling[how]) if sampling[how] else None)
    handle, emitted = await prefill(served, PROMPT), [LAST]
    while len(emitted) <= TEXT - 5:
        at = len(emitted) - 1
        draft = text[at : at + right] + [wrong(token) for token in text[at + right : at + 5]]
        held, version = handle.seq_len, handle.version
        handle, chosen = await verify(served, [emitted[-1], *draft], handle, output=accept(**sampling[how]))
        assert len(chosen) == right + 1 and (handle.seq_len, handle.version) == (held + right + 1, version + 1)
        emitted += chosen
    assert emitted[1:] == text[: len(emitted) - 1]
    await served.check()


async def test_a_roll_back_goes_first_and_a_single_token_is_a_plain_choice(served: Served) -> None:
    text = await plain(served)
    handle = await prefill(served, [*PROMPT, 99, 98, 97, 96, 95])
    handle, found = await verify(served, [LAST, text[0], 1], handle, truncate_to=4, output=accept())
    assert found == text[:2] and handle.seq_len == 6
    answer = await served.decode([text[1]], handle, output=accept())
    assert chosen(answer) == [text[2]]
    assert answer.output.handle.seq_len == 7
    await served.check()


async def test_drafts_and_plain_items_share_a_step_by_call_and_in_a_session(served: Served) -> None:
    """What is beside a draft changes no token of it, and rows of rejected tokens do not travel."""
    text = await plain(served)
    candidates = np.stack([np.array([token, 3]) for token in text[:3]])
    specs: list[tuple[list[int], output_pb2.OutputSpec]] = [
        ([LAST, *text[:3]], accept()),
        ([LAST], sample(seed=5)),
        ([LAST, 9, 9, 9], accept(seed=5, logprob=True)),
        ([LAST, *text[:2]], full()),
        ([LAST, *text[:3]], accept(candidates, [[0.5, 0.5]] * 3, seed=8, top_k=50)),
        ([LAST, text[0], 1, 1, 1], accept()),
    ]

    async def items(chosen: Sequence[int]) -> list[forward_pb2.ForwardItem]:
        return [item(specs[n][0], await prefill(served, PROMPT), output=specs[n][1]) for n in chosen]

    def said(answer: Any) -> list[tuple[int, list[bytes]]]:
        blocks, found = rows_from_proto(answer.row_blocks), []
        for result in answer.results:
            rows = result.output.rows
            part = blocks[rows.block].cut(rows.first, rows.first + rows.count)
            found.append((result.output.handle.seq_len, [each.tobytes() for each in part.columns.values()]))
        assert sum(block.rows for block in blocks) == sum(each.output.rows.count for each in answer.results)
        return found

    async def send(chosen: Sequence[int]) -> list[tuple[int, list[bytes]]]:
        return said(await served.unified(*await items(chosen)))

    alone = [(await send([n]))[0] for n in range(len(specs))]
    assert [length for length, _ in alone[:1] + alone[5:]] == [8, 6]
    together = [4, 0, 3, 1, 5, 2]
    assert await send(together) == [alone[n] for n in together]
    async with raw_session(served.executor) as session:
        frame = session_pb2.SessionForward(items=await items(together))
        assert said((await session.ask(forward=frame)).forward) == [alone[n] for n in together]


async def test_log_probabilities_are_those_of_the_emitted_tokens(served: Served) -> None:
    handle = await prefill(served, PROMPT)
    text = await plain(served)
    fed = [LAST, *text[:2], wrong(text[2])]
    answer = await served.verify(fed, handle, output=accept(temperature=0.0, logprob=True))
    [block] = rows_from_proto(answer.row_blocks)
    assert block["token_ids"].tolist() == text[:3]
    again = await served.verify(fed[:3], answer.output.handle, truncate_to=4, output=full())
    [rows] = rows_from_proto(again.row_blocks)
    logits = rows["logits"].astype(np.float64)
    expected = logits[range(3), text[:3]] - np.log(np.exp(logits).sum(-1))
    np.testing.assert_allclose(block["logprobs"], expected, atol=1e-4)


async def test_a_replay_emits_what_the_call_emitted_and_keeps_its_tokens() -> None:
    """Rows of others make room in the record; token ids that were chosen stay, beside a changed draft's refusal."""
    async with serve_identity(kv_blocks=64, block_size=4, replay_bytes=512, positional=True) as served:
        handle = await prefill(served, PROMPT)
        ids, odds = [[9, 8], [7, 9], [1, 5]], [[0.75, 0.25]] * 3
        spec = accept(ids, odds, logprob=True)

        def once(output: output_pb2.OutputSpec) -> Any:
            return served.verify([LAST, 9, 7, 5], handle, output=output, request_id="once")

        first, again = [await once(spec) for _ in range(2)]
        assert again.output.replayed and again.row_blocks == first.row_blocks
        tokens = chosen(first)
        other = {"handle": first.output.handle, "output": full(), "request_id": "large"}
        later = await served.decode([1], **other)
        again = await once(spec)
        assert (await served.decode([1], **other)).row_blocks == []
        [block] = rows_from_proto(again.row_blocks)
        assert again.output.replayed and list(block.columns) == ["token_ids"]
        assert block["token_ids"].tolist() == tokens and again.output.handle == first.output.handle
        for changed in (accept(ids, [[0.5, 0.5]] * 3, logprob=True), accept(logprob=True), accept()):
            await refused(once(changed), Reason.REQUEST_ID_REUSED)
        await served.release(later.output.handle)
        assert chosen(await once(spec)) == tokens


async def test_a_child_that_is_made_in_the_step_verifies_a_draft_too() -> None:
    """The parent stays as it is; the recorded tokens stay, too."""
    async with serve_identity(kv_blocks=64, block_size=4, replay_bytes=8, positional=True) as served:
        text, handle = await plain(served), await prefill(served, [*PROMPT, 50, 51])
        fork = forward_pb2.CreateOptions(fork=True)
        draft = [LAST, *text[:2], wrong(text[2]), 1, 1, 1]
        sent = item(draft, handle, truncate_to=4, output=accept(), create=fork, request_id="child")
        for replayed in (False, True):
            answer = await served.unified(sent)
            output = answer.results[0].output
            assert tokens_of(answer) == [text[:3]]
            assert (output.handle.seq_len, output.replayed) == (7, replayed)
        assert (await verify(served, [text[2]], output.handle, output=accept()))[1] == text[3:4]
        handle, _ = await verify(served, [LAST, 1], handle, output=accept())
        assert handle.seq_len >= 7
        await served.check()


IDS = [[9, 1], [8, 2]]
ODDS = [[0.5, 0.5], [0.25, 0.75]]
DRAFT = [LAST, 9, 2]


def tensor(dtype: types_pb2.DType, shape: list[int], data: bytes) -> types_pb2.Tensor:
    return types_pb2.Tensor(dtype=dtype, shape=shape, data=data)


def raw(name: str, value: types_pb2.Tensor) -> output_pb2.OutputSpec:
    spec = accept(IDS, ODDS, seed=1)
    getattr(spec.accept, name).CopyFrom(value)
    return spec


F32, U32, F16 = types_pb2.D_TYPE_F32, types_pb2.D_TYPE_U32, types_pb2.D_TYPE_F16
BAD: dict[str, list[output_pb2.OutputSpec]] = {
    "accept.draft_token_ids": [
        accept(IDS[:1], ODDS[:1], seed=1),  # of one token only
        accept(IDS + IDS, ODDS + ODDS, seed=1),
        accept([[9, 1], [8, 256]], ODDS, seed=1),
        accept([[9, 9], [8, 2]], ODDS, seed=1),
        accept([[9, 1], [8, 3]], ODDS, seed=1),  # the draft's own token is missing
        accept([[9, 1], [8, 3]], ODDS),
        accept([[*range(65)]] * 2, [[1 / 65] * 65] * 2, seed=1),
        raw("draft_token_ids", tensor(F32, [2, 2], bytes(16))),
        raw("draft_token_ids", tensor(U32, [2, 2], bytes(15))),
        raw("draft_token_ids", tensor(U32, [4], bytes(16))),
        raw("draft_token_ids", tensor(U32, [2, 0], b"")),
        raw("draft_token_ids", types_pb2.Tensor()),
    ],
    "accept.draft_probabilities": [
        accept(IDS, None, seed=1),
        accept(None, ODDS, seed=1),
        accept(IDS, [[0.5, 0.25, 0.25]] * 2, seed=1),
        accept(IDS, [[0.5, math.nan], [0.5, 0.5]], seed=1),
        accept(IDS, [[0.5, -0.1], [0.5, 0.5]], seed=1),
        accept(IDS, [[0.5, math.inf], [0.5, 0.5]], seed=1),
        accept(IDS, [[0.6, 0.6], [0.5, 0.5]], seed=1),
        accept(IDS, [[0.5, 0.5], [0.25, 0.25]], seed=1),  # a q that was cut, and not divided by its sum
        accept(IDS, [[0.5, 0.5], [1e-6, 1e-6]], seed=1),
        accept(IDS, [[0.5, 0.4989], [0.5, 0.5]], seed=1),
        accept(IDS, [[0.5, 0.5], [0.5, 0.49]]),
        accept(IDS, [[0.5, 0.5], [1.0, 0.0]], seed=1),  # it cannot have been drawn
        raw("draft_probabilities", tensor(F16, [2, 2], bytes(8))),
        raw("draft_probabilities", tensor(U32, [2, 2], bytes(16))),
    ],
    "positions": [
        output_pb2.OutputSpec(positions=each, accept=output_pb2.AcceptOutput())
        for each in (output_pb2.POSITIONS_LAST, output_pb2.POSITIONS_ALL, output_pb2.POSITIONS_NONE, 77)
    ],
    **{f"accept.sampling.{field}": [accept(**each) for each in specs] for field, specs in BAD_SAMPLES.items()},
}


async def test_a_bad_spec_is_refused_by_its_field_and_changes_nothing(served: Served) -> None:
    handle = await prefill(served, PROMPT)
    for field, specs in BAD.items():
        for number, spec in enumerate(specs):
            error = await refused(served.verify(DRAFT, handle, output=spec), Reason.INVALID_REQUEST)
            assert error.field == f"output.{field}", number
    good = accept(IDS, [[0.5, 0.5004], [0.6, 0.3995]], seed=1)  # rounded
    handle, _ = await verify(served, DRAFT, handle, output=good)
    await served.check()


async def test_the_refusal_of_a_cut_draft_says_what_is_to_be_done(served: Served) -> None:
    handle = await prefill(served, PROMPT)
    cut = accept(IDS, [[0.5, 0.5], [0.25, 0.25]], seed=1)
    error = await refused(served.verify(DRAFT, handle, output=cut), Reason.INVALID_REQUEST)
    assert "draft token 1 sum to 0.5" in error.message and "by its sum" in error.message
    tokens = accept(IDS, np.array([[0.5, 0.5], [0.25, 0.25]]) / [[1.0], [0.5]], seed=1)
    await verify(served, DRAFT, handle, output=tokens)


async def test_a_draft_goes_on_with_a_sequence_and_has_a_limit(served: Served) -> None:
    info = await served.info()
    assert info_pb2.CAPABILITY_OUTPUT_ACCEPT in info.capabilities
    most = info.limits.max_draft_tokens
    assert most >= 16 and info.limits.max_draft_candidates >= 16
    for output in (accept(), accept(IDS[:1], ODDS[:1])):
        assert (await refused(served.prefill([1, 2], output=output), Reason.INVALID_REQUEST)).field == "handle"
    handle = await prefill(served, PROMPT)
    error = await refused(served.verify([1] * (most + 2), handle, output=accept()), Reason.INVALID_REQUEST)
    assert error.field == "token_ids" and error.number("max_draft_tokens") == most
    handle, _ = await verify(served, [1] * (most + 1), handle, output=accept())
