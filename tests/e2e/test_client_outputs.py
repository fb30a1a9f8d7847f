"""Drafts, scores, log-probabilities and token masks through the client: what they give, and what the client keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ferrum_rpc.client import (
    Accept,
    Capability,
    ExecutorError,
    FullLogits,
    Greedy,
    InvalidRequest,
    NextToken,
    NoSuchRowsError,
    OutputSpec,
    Positions,
    RowLogprobs,
    Sample,
)
from ferrum_rpc.client import masks as client_masks
from ferrum_rpc.errors import TokenMaskUnknown
from ferrum_rpc.wire.items import handle_to_proto
from tests.support.clients import BOTH_WAYS, PROMPT, answers, connected, text
from tests.support.identity_oracle import OracleConfig, identity_logits
from tests.support.wiring import messages, release

# --- drafts -----------------------------------------------------------------------------------------------------------


@BOTH_WAYS
@pytest.mark.parametrize("sampling", [None, Sample(seed=9, top_p=0.9)], ids=["greedy", "sampled"])
async def test_a_sequence_knows_what_it_holds_after_every_draft(session: bool, sampling: Sample | None) -> None:
    async with connected(session, max_context=256) as (_, client):
        assert Capability.OUTPUT_ACCEPT in (await client.info()).capabilities
        plain = await text(client, PROMPT, 40, sampling or Greedy(), stop=())
        sequence = client.sequence(keep_tokens=True)
        emitted = [(await sequence.prefill(PROMPT, sampling or OutputSpec())).token]
        for right in (0, 3, 1, 4, 2, 0, 4, 3):
            at = len(emitted)
            draft = [*plain[at : at + right], *[(token + 1) % 256 for token in plain[at + right : at + 5]]]
            if right % 2:
                answer = await sequence.verify([emitted[-1], *draft], Accept(sampling))
            else:
                [answer] = await client.forward([sequence.item([emitted[-1], *draft], Accept(sampling))])
            emitted += answer.tokens.tolist()
            assert sequence.tokens == [*PROMPT, *emitted[:-1]] and sequence.length == answer.length
            assert len(answer.tokens) == right + 1
        assert emitted == plain[: len(emitted)]
        [branch] = await sequence.fork()
        assert branch.tokens == sequence.tokens
        assert (await branch.decode(emitted[-1], sampling or OutputSpec())).token == plain[len(emitted)]


async def test_a_sequence_that_is_lost_behind_a_draft_is_rebuilt_without_its_rejected_tokens() -> None:
    async with connected(session=False) as (served, client):
        plain = await text(client, PROMPT, 30, stop=())
        sequence = client.sequence(rebuild=True)
        await sequence.prefill(PROMPT)
        answer = await sequence.verify([*plain[:3], 1, 1, 1], Accept())
        assert answer.tokens.tolist() == plain[1:4]
        await release(served, handle_to_proto(sequence.handle))
        answer = await sequence.verify([*plain[3:7], 1], Accept())
        assert answer.tokens.tolist() == plain[4:8]
        assert sequence.tokens == [*PROMPT, *plain[:7]]


@pytest.mark.parametrize(
    ("arrays", "field"),
    [
        (([[1, 2]], [[0.5]]), "output.accept.draft_probabilities"),
        (([[1, 2]],), "output.accept.draft_probabilities"),
        ((None, [[1.0]]), "output.accept.draft_probabilities"),
        (([1, 2], [0.5, 0.5]), "output.accept.draft_token_ids"),
        (([[1, 2], [1]], [[0.5, 0.5]]), "output.accept.draft_token_ids"),
        (([[1.5]], [[1.0]]), "output.accept.draft_token_ids"),
        (([[-1]], [[1.0]]), "output.accept.draft_token_ids"),
        (([[1 << 32]], [[1.0]]), "output.accept.draft_token_ids"),
        (([[1]], [["much"]]), "output.accept.draft_probabilities"),
    ],
)
def test_arrays_that_do_not_agree_are_refused_where_they_are_given(arrays: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Accept(Sample(), *arrays)
    assert refused.value.field == field


def test_what_describes_a_draft_can_be_any_array() -> None:
    made = Accept(None, np.array([[3, 4]], np.int64), [[0.25, 0.75]])
    assert made == Accept(None, [[3, 4]], np.array([[0.25, 0.75]])) and hash(made) == hash(made)
    assert made.draft_token_ids.tolist() == [[3, 4]] and made.draft_probabilities.tolist() == [[0.25, 0.75]]


async def test_what_cannot_be_meant_is_refused_before_anything_is_sent() -> None:
    async with connected(session=False) as (_, client):
        sequence = client.sequence(keep_tokens=True)
        await sequence.prefill(PROMPT)
        for call, field in (
            (lambda: sequence.prefill([1, 2], Accept()), "output"),
            (lambda: sequence.rebuild(output=Accept()), "output"),
            (lambda: sequence.rebuild(output=NextToken()), "output"),
            (lambda: sequence.verify([1, 2], OutputSpec(Positions.LAST, Accept())), "output.positions"),
            (lambda: sequence.verify([1, 2], Accept(7)), "output"),
            (lambda: sequence.verify([1, 2], Accept(Sample(top_p="much"))), "output.accept.sampling.top_p"),
            (lambda: client.score([], 1), "token_ids"),
            (lambda: client.score([5], 1), "first"),
            (lambda: client.score([5, 6], 0), "first"),
            (lambda: client.score([5, 6], 2), "first"),
        ):
            with pytest.raises(InvalidRequest) as refused:
                await call()
            assert refused.value.field == field
        assert sequence.length == len(PROMPT) and not sequence.in_doubt


# --- scores and log-probabilities -------------------------------------------------------------------------------------

SCORED = [(7 * at * at) % 256 for at in range(50)]


def truth() -> np.ndarray:
    """Log-probabilities float64 [n, V] of the row of each token of the text."""
    logits = identity_logits(SCORED, None, OracleConfig(positional=True))
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@BOTH_WAYS
@pytest.mark.parametrize("first", [1, 2, 16, 17, 33, 49])
async def test_a_texts_scores_come_as_if_in_one_call(session: bool, first: int) -> None:
    async with connected(session, max_batch_tokens=16) as (_, client):
        answer = await client.score(SCORED, first, logprobs=RowLogprobs(2, (SCORED[0],)))
        assert answer.tokens.tolist() == SCORED[first:]
        rows = truth()[first - 1 : -1]
        np.testing.assert_allclose(answer.logprobs, rows[np.arange(len(rows)), SCORED[first:]], atol=2e-5)
        best = answer.top_logprobs
        np.testing.assert_allclose(best.logprobs, np.take_along_axis(rows, best.token_ids.astype(int), -1), atol=2e-5)
        np.testing.assert_allclose(best.logprobs[:, 0], rows.max(-1), atol=2e-5)
        np.testing.assert_allclose(answer.selected_logprobs, rows[:, SCORED[:1]], atol=2e-5)
        assert (await client.status()).pressure.sequences == 0


@BOTH_WAYS
async def test_a_sequence_that_was_scored_goes_on(session: bool) -> None:
    """In chunks of the caller's, with what follows, and from a length that it has already."""
    async with connected(session, max_batch_tokens=16) as (_, client), client.sequence() as sequence:
        await sequence.prefill(SCORED[:20])
        answer = await sequence.prefill(SCORED[20:45], NextToken(30, SCORED[45]), chunk=4)
        assert answer.tokens.tolist() == SCORED[31:46]
        np.testing.assert_allclose(answer.logprobs, truth()[np.arange(30, 45), SCORED[31:46]], atol=2e-5)
        decoded = await sequence.decode(SCORED[45], Greedy(True, RowLogprobs(3)))
        assert decoded.token == decoded.top_logprobs.token_ids[0, 0] == truth()[45].argmax()
        assert decoded.logprobs[0] == decoded.top_logprobs.logprobs[0, 0]


@BOTH_WAYS
async def test_items_of_a_batch_score_beside_others(session: bool) -> None:
    async with connected(session) as (_, client):
        asked = (
            (SCORED[:6], NextToken()),
            (SCORED[:1], Sample(seed=1, logprobs=RowLogprobs(0, (4, 9)))),
            (SCORED[:1], NextToken()),
        )
        first, second, third = answers(await client.forward([client.sequence().item(*each) for each in asked]))
        assert first.tokens.tolist() == SCORED[1:6]
        np.testing.assert_allclose(second.selected_logprobs, truth()[:1, [4, 9]], atol=2e-5)
        assert third.rows is None and third.length == 1
        with pytest.raises(NoSuchRowsError, match="without rows"):
            _ = third.logprobs


# --- masks: registered once, found again where the executor has let them go, cut with the prompt ----------------------


def allow(*tokens: int) -> np.ndarray:
    mask = np.zeros(256, bool)
    mask[list(tokens)] = True
    return mask


@BOTH_WAYS
async def test_masks_by_bools_and_by_words_choose_from_what_they_allow(session: bool) -> None:
    async with connected(session) as (_, client):
        mask = await client.register_token_mask(allow(5, 77, 200))
        words = np.frombuffer(np.packbits(allow(5, 77, 200), bitorder="little").tobytes(), np.int32)
        sent = messages(client)
        assert await client.register_token_mask(words) == mask and not sent
        async with client.sequence() as sequence:
            row = (await sequence.prefill([7, 3, 9, 1], FullLogits())).logits[0]
            best = max((5, 77, 200), key=lambda token: row[token])
            for kind in (Greedy(mask=mask), Sample(0.0, mask=mask), Sample(0.0, mask=mask, bias=((6, 1e6),))):
                assert (await sequence.decode(1, kind, truncate_to=3)).token == best
        drawn = await text(client, [1], 20, Sample(mask=mask, seed=2))
        assert set(drawn) <= {5, 77, 200} and len(drawn) == 20


@BOTH_WAYS
async def test_masks_that_went_are_registered_again_and_a_program_sees_nothing(session: bool) -> None:
    async with connected(session, max_token_masks=2) as (_, client):
        masks = [await client.register_token_mask(allow(number)) for number in range(6)]
        sent = messages(client)
        sequences = [client.sequence() for _ in range(2)]
        for number, mask in enumerate(masks):  # each is gone when its turn comes
            for sequence in sequences:
                assert (await sequence.prefill([1], Greedy(mask=mask))).token == number
        assert [type(each).__name__ for each in sent].count("RegisterTokenMaskRequest") == 4 + 2
        items = [sequences[0].item([1], Greedy(mask=masks[0])), sequences[1].item([1], Sample(mask=masks[1]))]
        assert [each.token for each in answers(await client.forward(items))] == [0, 1]
        items = [sequences[0].item([1], Greedy(mask=masks[2])), sequences[1].item([1])]
        assert answers(await client.forward(items, all_or_nothing=True))[0].token == 2
        spec = OutputSpec(Positions.ALL, Greedy(row_masks=(masks[4], b"", masks[5])))
        answer = await sequences[0].verify([1, 2, 3], spec)
        assert answer.tokens[[0, 2]].tolist() == [4, 5]
        assert [each.length for each in sequences] == [11, 8]


async def test_a_mask_that_the_client_does_not_know_is_the_programs_to_register(monkeypatch: Any) -> None:
    async with connected(session=False, max_token_masks=1) as (_, client):
        sequence = client.sequence()
        with pytest.raises(TokenMaskUnknown) as caught:
            await sequence.prefill(PROMPT, Greedy(mask=bytes(32)))
        assert caught.value.metadata["token_mask_id"] == bytes(32).hex()
        monkeypatch.setattr(client_masks, "KNOWN_BYTES", 64)  # two masks
        masks = [await client.register_token_mask(allow(number)) for number in range(3)]
        await sequence.prefill(PROMPT, Greedy(mask=masks[1]))
        with pytest.raises(TokenMaskUnknown):
            await sequence.decode(1, Greedy(mask=masks[0]))
        [bad, good] = await client.forward(
            [sequence.item([1], Greedy(mask=masks[0])), client.sequence().item([1], Greedy(mask=masks[2]))]
        )
        assert isinstance(bad, TokenMaskUnknown) and not isinstance(good, ExecutorError) and good.token == 2


async def test_row_masks_go_with_the_chunks_of_their_prompt() -> None:
    async with connected(session=False) as (_, client):
        masks = [await client.register_token_mask(allow(number)) for number in range(10)]
        async with client.sequence() as sequence:
            everything = OutputSpec(Positions.ALL, Greedy(row_masks=tuple(masks)))
            assert (await sequence.prefill(range(10), everything, chunk=3)).tokens.tolist() == list(range(10))
            one = OutputSpec(Positions.LAST, Sample(row_masks=(masks[4],)))
            assert (await sequence.prefill(range(10), one, chunk=4)).token == 4
            for spec in (everything, OutputSpec(Positions.LAST, Greedy(row_masks=tuple(masks[:2])))):
                with pytest.raises(InvalidRequest) as caught:
                    await sequence.prefill(range(9), spec, chunk=4)
                assert caught.value.field == "output.row_mask_ids"
            assert sequence.length == 20


async def test_what_is_no_mask_is_refused_by_name() -> None:
    async with connected(session=False) as (served, client):
        wrong = (np.zeros((2, 2), bool), np.zeros(8, np.int64), [1, 2], "abc", allow(), allow(1)[:200], allow(1)[1:30])
        for mask in wrong:
            with pytest.raises(InvalidRequest) as caught:
                await client.register_token_mask(mask)
            assert caught.value.field == "words"
        assert not len(served.server.state.masks)
        for kind in (Greedy(mask="x"), Sample(mask=None), Greedy(row_masks=[b""]), Sample(row_masks=(1,))):
            with pytest.raises(InvalidRequest) as caught:
                await client.sequence().prefill(PROMPT, kind)
            assert "token_mask_id" in str(caught.value.field)
