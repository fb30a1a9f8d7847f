"""Speculation against the exact target distribution: whatever the draft, the tokens are those of plain draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ferrum_rpc.core import Accept, Greedy, MaskRows, RowBlock, RowKind, Rows, Sample
from ferrum_rpc.sampling.accept import Draft, accepted
from ferrum_rpc.sampling.rows import RowRequest
from ferrum_rpc.wire.masks import pack_mask
from tests.numerics.test_draws import FILTERS, check_counts, probabilities
from tests.support.draws import logits
from tests.support.rows import columns_of, counted, selected, tokens_of

VOCABULARY = 24
COUNT = 2000
"""Items of a step: so many seeds."""


def verified(rows, kinds, drafts, sampler, *, start=3, history=None, words_of=lambda draft: None):
    """What drafts of N tokens emit on the same ``rows`` [N + 1, V], each with its own kind; as lists of tokens.
    ``words_of``: the masks of a draft's rows by its grammar."""
    width, requests, fed = len(rows), [], []
    for index, (kind, draft) in enumerate(zip(kinds, drafts, strict=True)):
        fed.append(np.array([1, *draft], np.int32))
        past, told = None, {"draft": Draft.of(kind, fed[-1]), "words": words_of(draft)}
        if history is not None:
            past = counted(np.array([*history, *draft], np.int32), start + 1, kind.choice.penalty_from)
        requests.append(RowRequest(index * width, width, kind.choice, start + 1, past, **told))
    kept, left = accepted(fed, selected(rows.repeat(len(kinds), 1), requests, sampler), range(len(kinds)))
    answers = [*map(tokens_of, left)]
    assert [kept[index] for index in range(len(kinds))] == [*map(len, answers)]
    assert left[0].block.rows == sum(map(len, answers)), "rows of rejected tokens left"
    return answers


def check(tokens, expected):
    """That they have this distribution."""
    check_counts(np.bincount(tokens, minlength=VOCABULARY), expected)


def drawn_from(q, rng, count):
    """``count`` drafts from q [N, k], as indices of candidates [count, N]."""
    return np.stack([rng.choice(q.shape[1], count, p=row / row.sum()) for row in q.astype(np.float64)], -1)


@pytest.mark.parametrize(
    ("sparse", "quality", "how"),
    [(True, "bad", how) for how in FILTERS]
    + [(*draft, how) for draft in ((True, "good"), (False, "good"), (False, "bad")) for how in FILTERS[::5]],
    ids=str,
)
def test_emitted_tokens_have_the_distribution_of_plain_draws(sampler, how, sparse, quality):
    """The first token of all items, and the second of those whose first draft token was accepted: both have the row's
    own distribution. A bad draft is drawn from what has little to do with it, and a sparse one says from what."""
    rng = np.random.default_rng(7)
    rows = logits(3, VOCABULARY, seed=3)
    exact = np.stack([probabilities(row, **how) for row in rows])
    k = 6 if sparse else VOCABULARY
    order = np.argsort(-exact[:2] if quality == "good" else rng.random((2, VOCABULARY)), -1)
    ids = order[:, :k].astype(np.uint32)
    q = (np.take_along_axis(exact[:2], order, -1) if quality == "good" else rng.random((2, VOCABULARY)))[:, :k] + 0.02
    q = (q / q.sum(-1, keepdims=True)).astype(np.float32)
    picks = drawn_from(q, rng, COUNT)
    drafts = np.take_along_axis(ids, picks.T, -1).T
    kinds = [
        Accept(Sample(seed=seed, **how), ids, q) if sparse else Accept(Sample(seed=seed, **how))
        for seed in range(COUNT)
    ]
    answers = verified(rows, kinds, drafts.tolist(), sampler)
    for at in range(3):
        check([answer[at] for answer in answers if len(answer) > at], exact[at])
    share = np.mean([len(answer) > 1 for answer in answers])
    chance = np.minimum(exact[0][ids[0]], q[0]).sum() if sparse else (exact[0][ids[0]] * q[0]).sum()
    assert abs(share - chance) < 5 * math.sqrt(chance * (1 - chance) / COUNT) + 1e-3, (share, chance)


def test_penalties_and_biases_make_the_target_and_count_the_draft(sampler):
    """Row 1 is penalised for the draft token before it, whether or not it repeats the history's."""
    rng = np.random.default_rng(1)
    how = {"repetition_penalty": 1.5, "presence_penalty": 0.6, "frequency_penalty": 0.4, "bias": ((4, 1.0), (5, -2.0))}
    rows, history = logits(2, VOCABULARY, seed=5), [2, 2, 9, 1]
    ids = np.array([[4, 2, 9, 11]], np.uint32)
    q = np.array([[0.4, 0.3, 0.2, 0.1]], np.float32)
    drafts = np.take_along_axis(ids, drawn_from(q, rng, COUNT).T, -1).T.tolist()
    kinds = [Accept(Sample(seed=seed, penalty_from=1, **how), ids, q) for seed in range(COUNT)]
    answers = verified(rows, kinds, drafts, sampler, history=history)

    def target(row, held):
        row = row.double().numpy().copy()
        row[4] += 1.0
        row[5] -= 2.0
        for token in set(held):
            row[token] = row[token] / 1.5 if row[token] > 0 else row[token] * 1.5
        for token in held[1:]:
            row[token] -= 0.4
        for token in set(held[1:]):
            row[token] -= 0.6
        return torch.from_numpy(row).softmax(-1).numpy()

    check([answer[0] for answer in answers], target(rows[0], history))
    for draft in ids[0].tolist():
        seconds = [answer[1] for answer in answers if len(answer) > 1 and answer[0] == draft]
        check(seconds, target(rows[1], [*history, draft]))


ENDS = 3
"""Token of the toy grammar that may follow any other."""


def may_follow(before):
    """The tokens that the toy grammar allows behind these: a function of the last one."""
    last = before[-1] if before else 7
    return (np.arange(VOCABULARY) % 4 == last % 4) | (np.arange(VOCABULARY) == ENDS)


def words_by_grammar(draft):
    """The masks of a draft's rows, none behind a token that is not allowed, as the engine gives them."""
    found = [pack_mask(may_follow(()))]
    for at, token in enumerate(draft):
        if not may_follow(draft[:at])[token]:
            break
        found.append(pack_mask(may_follow(draft[: at + 1])))
    return MaskRows(np.stack([np.frombuffer(each, np.int32) for each in found]), 0, len(found))


@pytest.mark.parametrize(("sparse", "how"), [(False, FILTERS[0]), (False, FILTERS[5]), (True, FILTERS[5])], ids=str)
def test_by_a_grammar_the_tokens_have_the_distribution_of_masked_draws(sampler, how, sparse):
    """Drafts that the grammar allows and others, of tokens that the model prefers: the first token of all has the
    first row's masked distribution, and the second that of the row masked behind the first."""
    rng, count = np.random.default_rng(11), 2 * COUNT
    rows = logits(3, VOCABULARY, seed=8)
    best = np.argsort(-rows[:2].numpy(), -1).astype(np.uint32)
    first = best[0][np.argsort(~may_follow([])[best[0]], kind="stable")]
    k, allowed = 9, may_follow([]).sum()
    ids = np.stack([np.append(first[:5], first[allowed : allowed + 4]), best[1][:k]])
    q = rng.random((2, k)) + 0.1
    q = (q / q.sum(-1, keepdims=True)).astype(np.float32)
    drafts = np.take_along_axis(ids, drawn_from(q, rng, count).T, -1).T.tolist()
    samples = [Sample(seed=seed, **how) for seed in range(count)]
    kinds = [Accept(each, ids, q) if sparse else Accept(each) for each in samples]
    answers = verified(rows, kinds, drafts, sampler, words_of=words_by_grammar)

    def target(row, before):
        masked = rows[row].where(torch.from_numpy(may_follow(before)), -torch.inf)
        return probabilities(masked, **how)

    check([answer[0] for answer in answers], target(0, []))
    seconds = {first: [answer[1] for answer in answers if len(answer) > 1 and answer[0] == first] for first in ids[0]}
    assert not any(seconds[token] for token in first[allowed : allowed + 4])
    compared = [token for token, found in seconds.items() if len(found) > 100]
    assert compared
    for token in compared:
        check(seconds[token], target(1, [token]))
    for answer in answers:
        assert all(may_follow(answer[:at])[token] for at, token in enumerate(answer))


def test_greedy_drafts_by_a_grammar_are_greedy_masked_steps(sampler):
    rng, rows = np.random.default_rng(2), logits(4, VOCABULARY, seed=6)
    plain = []
    for row in rows.numpy():
        plain.append(int(np.where(may_follow(plain), row, -np.inf).argmax()))
    drafts = [
        [token if rng.random() < 0.7 else int(rng.integers(VOCABULARY)) for token in plain[:3]] for _ in range(300)
    ]
    answers = verified(rows, [Accept(Sample(0.0))] * 300, drafts, sampler, words_of=words_by_grammar)
    for draft, answer in zip(drafts, answers, strict=True):
        right = next((at for at in range(3) if draft[at] != plain[at]), 3)
        assert answer == plain[: right + 1]
    assert {len(answer) for answer in answers} == {1, 2, 3, 4}


def test_a_guessed_draft_changes_no_token_of_a_seed(sampler):
    """Nor does what follows the last accepted token depend on anything but the plain draws."""
    rows = logits(5, VOCABULARY, seed=9)
    plain = [tokens_of(selected(rows, [RowRequest(0, 5, Sample(seed=seed), 4)], sampler)[0]) for seed in range(50)]
    rng = np.random.default_rng(0)
    for right in range(5):
        drafts = [[*row[:right], *rng.integers(0, VOCABULARY, 4 - right)] for row in plain]
        answers = verified(rows, [Accept(Sample(seed=seed)) for seed in range(50)], drafts, sampler)
        for answer, row in zip(answers, plain, strict=True):
            assert right < len(answer) and answer == row[: len(answer)]


def test_the_token_behind_an_accepted_draft_is_the_plain_one(sampler):
    rows = logits(2, VOCABULARY, seed=9)
    for seed in range(50):
        [plain] = selected(rows[1:], [RowRequest(0, 1, Sample(seed=seed), 5)], sampler)
        best = int(rows[0].argmax())
        kind = Accept(Sample(seed=seed), [[best]], [[1e-3]])  # accepted whenever p is larger
        [answer] = verified(rows, [kind], [[best]], sampler)
        assert answer == [best, *tokens_of(plain)]


def test_what_is_beside_a_draft_changes_nothing(sampler):
    """Other drafts, of other widths, and other kinds: each row is chosen by itself."""
    rng = np.random.default_rng(3)
    rows = logits(40, VOCABULARY, seed=2)
    kinds, fed = [], []
    for index in range(8):
        k = index % 3 * 2
        draft = rng.integers(0, VOCABULARY, 4)
        ids = np.stack([rng.permutation(VOCABULARY)[: k or 1] for _ in draft]).astype(np.uint32)
        ids[:, 0] = np.where((ids == draft[:, None]).any(-1), ids[:, 0], draft)
        q = np.full(ids.shape, 1 / ids.shape[1], np.float32)
        kinds.append(Accept(Sample(seed=index, top_p=0.9), ids, q) if k else Accept(Sample(seed=index)))
        fed.append(np.array([0, *draft], np.int32))

    def answers(chosen):
        table = torch.cat([rows[5 * index : 5 * index + 5] for index in chosen])
        requests = [
            RowRequest(5 * place, 5, kinds[index].choice, 7, draft=Draft.of(kinds[index], fed[index]))
            for place, index in enumerate(chosen)
        ]
        return [*map(tokens_of, selected(table, requests, sampler))]

    alone = [answers([index])[0] for index in range(8)]
    assert answers(range(8)) == alone
    assert answers([5, 2, 7]) == [alone[5], alone[2], alone[7]]


@pytest.mark.parametrize("row", ["nan", "infinite", "greedy"])
def test_rows_that_are_not_drawn_take_the_arg_max(sampler, row):
    rows = logits(2, VOCABULARY, seed=1)
    temperature = 0.0 if row == "greedy" else 1.0
    if row != "greedy":
        rows[0, 7] = {"nan": math.nan, "infinite": math.inf}[row]
    best = int(rows[0].argmax())
    for draft in (best, (best + 1) % VOCABULARY):
        kind = Accept(Sample(temperature, seed=1), [[draft, (best + 2) % VOCABULARY]], [[0.5, 0.5]])
        [answer] = verified(rows, [kind], [[draft]], sampler)
        assert answer[0] == best and len(answer) == 1 + (draft == best)


def test_rows_of_rejected_tokens_leave_the_blocks_that_others_share():
    block = RowBlock.of(RowKind.TOKENS, np.arange(10, dtype=np.uint32), np.arange(10, dtype=np.float32) / 10)
    other = RowBlock.of(RowKind.TOKENS, np.arange(3, dtype=np.uint32))
    rows = [Rows(block, 0, 1), Rows(block, 1, 4), None, Rows(other, 0, 1), Rows(block, 5, 3), Rows(block, 8, 2)]
    fed = [np.array(each) for each in ([0], [0, 1, 9, 3], [0], [0], [0, 9, 9], [0, 8])]
    kept, left = accepted(fed, rows, [1, 4, 5])
    assert kept == {1: 2, 4: 1, 5: 2}
    assert left[2] is None and left[3] is rows[3]
    found = [columns_of(each) for each in left if each is not None]
    assert [each["token_ids"].tolist() for each in found] == [[0], [1, 2], [0], [5], [8, 9]]
    assert np.allclose(found[1]["logprobs"], [0.1, 0.2])
    assert left[0].block is left[1].block and left[0].block.rows == 6


def test_a_greedy_draft_is_the_arg_max_and_shares_its_pass():
    assert Accept().choice == Greedy() and Draft.of(Accept(), np.zeros(3, np.int32)) is None
