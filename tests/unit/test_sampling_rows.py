"""Rows from logits, bit for bit: order among ties, packing of kinds, and slices of the head that leave no seam."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace
from itertools import accumulate, repeat

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ferrum_rpc.core import (
    FullLogits,
    Greedy,
    HiddenStates,
    NextToken,
    OutputKind,
    RowBlock,
    RowDType,
    RowLogprobs,
    Rows,
    Sample,
    SelectedTokens,
    TopTokens,
)
from ferrum_rpc.sampling import rows as sampling_rows
from ferrum_rpc.sampling.draw import PARAMS_DTYPE
from ferrum_rpc.sampling.rows import HEAD_ROWS, RowRequest
from ferrum_rpc.sampling.samplers import TorchSampler
from ferrum_rpc.sampling.top import top_tokens, top_tokens_queued

INF = math.inf


def select_rows(hidden, requests, head, largest=None) -> list[Rows]:
    return sampling_rows.select_rows(hidden, [RowRequest(*each) for each in requests], head, largest)


def expected_order(row: np.ndarray) -> list[int]:
    """Ids by falling logit, then rising id, as the contract says it. -0.0 equals 0.0."""
    return np.argsort(-row, kind="stable").tolist()


def check_top(logits: torch.Tensor, k: int) -> None:
    values, ids = top_tokens(logits, k)
    if not logits.isnan().any():
        queued = top_tokens_queued(logits, k)
        assert torch.equal(queued[0].view(torch.int32), values.view(torch.int32)) and torch.equal(queued[1], ids)
    assert (values.dtype, ids.dtype) == (torch.float32, torch.int64)
    assert values.shape == ids.shape == (len(logits), k)
    for row, value, chosen in zip(logits.numpy(), values.numpy(), ids.tolist(), strict=True):
        assert chosen == expected_order(row)[:k]
        assert value.view(np.uint32).tolist() == row[chosen].view(np.uint32).tolist()


class Head:
    """A head that looks rows up: hidden row r is the number r. Its rows cannot depend on their neighbours."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        self.calls: list[int] = []

    @property
    def hidden(self) -> torch.Tensor:
        return torch.arange(len(self.table), dtype=torch.float32)[:, None]

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(hidden))
        return self.table.index_select(0, hidden[:, 0].to(torch.int64))


def random_table(rows: int, vocab: int, seed: int = 0, *, ties: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if ties:
        return torch.randint(-3, 3, (rows, vocab), generator=generator).to(torch.float32)
    return torch.randn((rows, vocab), generator=generator) * 4


def check_rows(rows: Rows, kind: OutputKind, logits: torch.Tensor) -> None:
    """``rows`` answer ``kind`` for ``logits`` [count, V], each computed by itself from the definition."""
    assert rows.count == len(logits)
    block = rows.block.cut(rows.first, rows.first + rows.count)
    exact = logits.numpy()
    logsumexp = logits.double().logsumexp(-1).numpy()
    match kind:
        case Greedy(logprob, beside):
            assert block["token_ids"].dtype == np.uint32
            assert block["token_ids"].tolist() == [expected_order(row)[0] for row in exact]
            check_logprobs(block, exact - logsumexp[:, None], logprob, beside)
        case TopTokens(k):
            assert block["token_ids"].dtype == np.uint32
            assert block["token_ids"].tolist() == [expected_order(row)[:k] for row in exact]
            assert np.array_equal(block["logits"], np.take_along_axis(exact, block["token_ids"].astype(np.int64), -1))
            np.testing.assert_allclose(block["logsumexp"], logsumexp, rtol=1e-5, atol=1e-5)
        case SelectedTokens(ids):
            assert np.array_equal(block["logits"], exact[:, list(ids)])
            np.testing.assert_allclose(block["logsumexp"], logsumexp, rtol=1e-5, atol=1e-5)
        case FullLogits(dtype):
            torch_dtype = {RowDType.F32: torch.float32, RowDType.BF16: torch.bfloat16, RowDType.F16: torch.float16}
            raw = logits.to(torch_dtype[dtype])
            assert block["logits"].shape == logits.shape
            assert block["logits"].tobytes() == raw.contiguous().view(torch.uint8).numpy().tobytes()
            assert block["logits"].itemsize == dtype.itemsize


def check_logprobs(block: RowBlock, expected: np.ndarray, logprob: bool, beside: RowLogprobs | None) -> None:
    """``block`` has the log-probabilities that were asked for, and no others, of rows that are ``expected`` [R, V]."""
    beside = beside or RowLogprobs()
    columns = {"logprobs": block["token_ids"][:, None]} if logprob else {}
    if beside.top_k:
        assert block["top_token_ids"].tolist() == [expected_order(row)[: beside.top_k] for row in expected]
        columns["top_logprobs"] = block["top_token_ids"]
    if beside.token_ids:
        columns["selected_logprobs"] = np.tile(beside.token_ids, (len(expected), 1))
    assert set(block.columns) == {"token_ids", *columns} | ({"top_token_ids"} if beside.top_k else set())
    for name, tokens in columns.items():
        wanted = np.take_along_axis(expected, tokens.astype(np.int64), -1)
        assert block[name].dtype == np.float32
        np.testing.assert_allclose(block[name].reshape(wanted.shape), wanted, rtol=1e-5, atol=1e-5)


# --- the k largest ----------------------------------------------------------------------------------------------------

TIED = {
    "all equal": [2.0] * 9,
    "all minus infinity": [-INF] * 9,
    "falling, in pairs": [4.0, 4.0, 3.0, 3.0, 2.0, 2.0],
    "rising, in pairs": [2.0, 2.0, 3.0, 3.0, 4.0, 4.0],
    "zeros of both signs": [-0.0, 0.0, -0.0, 0.0, 1.0, -1.0],
    "zeros of both signs below the top": [7.0, 0.0, -0.0, 0.0, -0.0],
    "minus infinity among numbers": [-INF, 1.0, -INF, 2.0, -INF, 1.0],
    "infinity": [INF, 1.0, INF, -INF, 1.0],
    "neighbouring floats": [1.0, np.nextafter(np.float32(1), np.float32(2)), 1.0, 0.99999994],
    "smallest and largest": [1e-45, -1e-45, 3.4e38, -3.4e38, 0.0, 1e-45, 3.4e38, -3.4e38],
    "one": [4.0],
}


@pytest.mark.parametrize("name", TIED)
def test_ties_stand_by_rising_id_at_every_k(name: str) -> None:
    row = torch.tensor([TIED[name]], dtype=torch.float32)
    for k in range(1, row.shape[1] + 1):
        check_top(row, k)


def test_ties_in_a_vocabulary_of_152k() -> None:
    table = torch.randn((2, 151_936), generator=torch.Generator().manual_seed(3)).to(torch.bfloat16).float()
    table[1] = -INF
    table[1, [9, 77_777, 151_935]] = 1.5
    for k in (50, 1024):
        check_top(table, k)


@given(
    rows=hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.integers(1, 24)),
        elements=st.one_of(
            st.sampled_from([0.0, -0.0, 1.0, -1.0, -INF, INF, 0.5]), st.floats(allow_nan=False, width=32)
        ),
    ),
    data=st.data(),
)
def test_any_row_is_in_the_order_of_the_contract(rows: np.ndarray, data: st.DataObject) -> None:
    check_top(torch.from_numpy(rows), data.draw(st.integers(1, rows.shape[1])))


@pytest.mark.parametrize("vocab", [1, 2, 31, 32, 33, 1000, 32_000, 151_936])
def test_greedy_ties_go_to_the_lowest_id(vocab: int) -> None:
    table = torch.full((6, vocab), -1.0)
    table[1, vocab // 3 :] = 2.0
    table[2, [vocab // 2, vocab - 1]] = 7.0
    table[3] = -INF
    table[4, :: max(1, vocab // 5)] = 0.0
    table[5] = 0.0
    table[5, : vocab // 2] = -0.0
    head = Head(table)
    for kind in (Greedy(), Greedy(logprob=True)):
        [rows] = select_rows(head.hidden, [(0, 6, kind)], head)
        assert rows.block["token_ids"].tolist() == table.numpy().argmax(-1).tolist()  # numpy: the first of the largest
        assert rows.block["token_ids"].tolist() == [0, vocab // 3, vocab // 2, 0, 0, 0]


# --- packing ----------------------------------------------------------------------------------------------------------

KINDS: list[OutputKind] = [
    Greedy(),
    Greedy(logprob=True),
    Greedy(logprobs=RowLogprobs(3)),
    Greedy(logprob=True, logprobs=RowLogprobs(12, (4, 4, 0))),
    Greedy(logprobs=RowLogprobs(0, (4, 2))),
    TopTokens(1),
    TopTokens(5),
    TopTokens(12),
    SelectedTokens((3, 0, 11, 3)),
    SelectedTokens((0,)),
    FullLogits(),
    FullLogits(RowDType.BF16),
    FullLogits(RowDType.F16),
]


def requests_of(*asked: tuple[int, OutputKind, int]) -> list[tuple[int, int, OutputKind]]:
    """Each has a count, a kind, and how many rows nobody wants behind it."""
    firsts = accumulate((count + gap for count, _, gap in asked), initial=0)
    return [(first, count, kind) for first, (count, kind, _) in zip(firsts, asked, strict=False)]


def test_every_kind_in_one_step_gets_its_own_rows_and_kinds_share_a_block() -> None:
    kinds = [*KINDS, *KINDS[::-1], FullLogits()]
    requests = requests_of(*((1 + index % 4, kind, 2) for index, kind in enumerate(kinds)))
    head = Head(random_table(requests[-1][0] + requests[-1][1] + 2, 12))
    answers = select_rows(head.hidden, requests, head)
    for (first, count, kind), rows in zip(requests, answers, strict=True):
        check_rows(rows, kind, head.table[first : first + count])
    assert head.calls == [sum(count for _, count, _ in requests)], "one head product, without the rows nobody wants"
    for kind in KINDS:
        same = [rows for (_, _, other), rows in zip(requests, answers, strict=True) if other == kind]
        assert len({id(rows.block) for rows in same}) == 1
        assert [rows.first for rows in same] == np.cumsum([0] + [rows.count for rows in same])[:-1].tolist()
    assert len({id(rows.block) for rows in answers}) == len(KINDS)


def test_rows_of_all_tokens_in_order_need_no_gather() -> None:
    head = Head(random_table(7, 8))
    seen: list[torch.Tensor] = []
    hidden = head.hidden

    def watching(rows: torch.Tensor) -> torch.Tensor:
        seen.append(rows)
        return head(rows)

    select_rows(hidden, requests_of((3, Greedy(), 0), (4, Greedy(), 0)), watching)
    assert seen[0] is hidden


@given(asked=st.lists(st.integers(1, 9), min_size=1, max_size=5), skipped=st.booleans(), mixed=st.booleans())
def test_the_largest_alone_are_asked_for_where_nobody_wants_more(asked: list[int], skipped: bool, mixed: bool) -> None:
    """In slices, and with the answers that the logits give."""
    head = Head(random_table(sum(asked) + 1, 12, ties=True))
    kinds = [Greedy()] * (len(asked) - 1) + [Greedy(logprob=mixed)]
    requests = [(first + skipped, *rest) for first, *rest in requests_of(*zip(asked, kinds, repeat(0)))]
    sizes: list[int] = []

    def largest(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return head(hidden).argmax(dim=-1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ferrum_rpc.sampling.rows.HEAD_ROWS", 4)
        answers = select_rows(head.hidden, requests, head, largest)
    assert not sizes if mixed else (sum(sizes) == sum(asked) and max(sizes) <= 4)
    for (first, count, kind), rows in zip(requests, answers, strict=True):
        check_rows(rows, kind, head.table[first : first + count])


def test_hidden_states_do_not_go_through_the_head() -> None:
    head, hidden = Head(random_table(9, 12)), torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
    hidden[:, 0] = torch.arange(9)
    kinds = [HiddenStates(), Greedy(), HiddenStates(RowDType.F16), HiddenStates()]
    requests = list(zip((6, 0, 3, 1), (3, 1, 2, 2), kinds, strict=True))
    answers = select_rows(hidden, requests, head)
    assert head.calls == [1]
    check_rows(answers[1], Greedy(), head.table[:1])
    assert answers[0].block is answers[3].block
    for (first, count, kind), rows in zip(requests, answers, strict=True):
        if isinstance(kind, HiddenStates):
            found = rows.block.between(rows.first, rows.first + count)["hidden_states"]
            expected = hidden[first : first + count].to(torch.float16 if kind.dtype is RowDType.F16 else torch.float32)
            assert found.dtype == expected.numpy().dtype and np.array_equal(found, expected.numpy())
    [rows] = select_rows(hidden, [(0, 9, HiddenStates(RowDType.BF16))], head)
    assert rows.block["hidden_states"].tobytes() == hidden.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    hidden.zero_()
    assert rows.block["hidden_states"].any(), "the next step's rows are written over these"


def scores(table: torch.Tensor, asked: list[tuple[int, int, NextToken]]) -> list[Rows]:
    """Answers to requests that score token (5 · row) mod V of each row; each head call sees `HEAD_ROWS` at most."""
    head, vocab = Head(table), table.shape[1]
    requests = [
        RowRequest(first, count, kind, scored=5 * np.arange(first, first + count, dtype=np.int32) % vocab)
        for first, count, kind in asked
    ]
    answers = sampling_rows.select_rows(head.hidden, requests, head)
    assert max(head.calls) <= sampling_rows.HEAD_ROWS and sum(head.calls) == sum(count for _, count, _ in asked)
    for (first, count, kind), rows in zip(asked, answers, strict=True):
        assert rows.count == count
        block = rows.block.cut(rows.first, rows.first + count)
        assert block["token_ids"].tolist() == (5 * np.arange(first, first + count) % vocab).tolist()
        expected = table[first : first + count].double().log_softmax(-1).numpy()
        check_logprobs(block, expected, True, kind.logprobs)
    return answers


def test_scores_share_a_block_where_they_ask_for_the_same_columns() -> None:
    kinds = [NextToken(), NextToken(7, 3), NextToken(logprobs=RowLogprobs(2)), NextToken(0, 1, RowLogprobs(2))]
    answers = scores(random_table(20, 12), [(5 * at, 5, kind) for at, kind in enumerate(kinds)])
    assert answers[0].block is answers[1].block is not answers[2].block is answers[3].block


def test_scores_of_a_long_prompt_go_through_the_head_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 8192 if HEAD_ROWS <= 256 else 32 * HEAD_ROWS
    scores(random_table(rows, 12), [(0, rows - 1, NextToken(logprobs=RowLogprobs(2, (3,))))])
    monkeypatch.setattr(sampling_rows, "HEAD_ROWS", 4)
    scores(random_table(23, 12, ties=True), [(11, 6, NextToken()), (1, 9, NextToken(3, 4)), (20, 3, NextToken())])


# --- slices of the head -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "rows"),
    [*((kind, 2 * HEAD_ROWS + 77) for kind in KINDS), (KINDS[1], HEAD_ROWS), (KINDS[1], HEAD_ROWS + 1)],
    ids=str,
)
def test_a_sliced_head_is_bitwise_the_whole_one(kind: OutputKind, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    head = Head(random_table(rows, 12, ties=rows % 2 == 0))
    [sliced] = select_rows(head.hidden, [(0, rows, kind)], head)
    assert sum(head.calls) == rows
    assert max(head.calls) <= HEAD_ROWS
    assert len(head.calls) == -(-rows // HEAD_ROWS)
    monkeypatch.setattr("ferrum_rpc.sampling.rows.HEAD_ROWS", 10**9)
    [whole] = select_rows(head.hidden, [(0, rows, kind)], head)
    assert head.calls[-1] == rows
    assert list(sliced.block.columns) == list(whole.block.columns)
    for one, other in zip(sliced.block.columns.values(), whole.block.columns.values(), strict=True):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    check_rows(sliced, kind, head.table)


@pytest.mark.parametrize("kind", [FullLogits(), TopTokens(3)], ids=str)
def test_a_slice_of_logits_is_gone_before_the_next_is_computed(kind: OutputKind) -> None:
    """All rows of a long prompt are in memory once at most: in the answer. ``live`` has those of the head."""
    live, table = [], random_table(4 * HEAD_ROWS + 3, 12)

    def head(hidden: torch.Tensor) -> torch.Tensor:
        assert not [each for each in live if each() is not None]
        rows = table.numpy()[hidden[:, 0].numpy().astype(np.int64)]
        live.append(weakref.ref(rows))
        return torch.from_numpy(rows)

    hidden = torch.arange(len(table), dtype=torch.float32)[:, None]
    requests = [(0, 2, TopTokens(2)), (2, len(table) - 2, kind)]  # the few of a slice do not hold the whole slice
    for (first, count, each), rows in zip(requests, select_rows(hidden, requests, head), strict=True):
        check_rows(rows, each, table[first : first + count])
    assert len(live) == 5


@given(
    head_rows=st.integers(1, 12),
    asked=st.lists(st.tuples(st.integers(1, 9), st.sampled_from(KINDS), st.integers(0, 3)), min_size=1, max_size=8),
    order=st.randoms(use_true_random=False),
)
def test_wherever_slices_fall_every_request_gets_its_rows(head_rows, asked, order) -> None:
    requests, rows = requests_of(*asked), sum(count + gap for count, _, gap in asked)
    head = Head(random_table(rows, 12, seed=rows, ties=rows % 2 == 0))
    order.shuffle(requests)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ferrum_rpc.sampling.rows.HEAD_ROWS", head_rows)
        answers = select_rows(head.hidden, requests, head)
    assert max(head.calls) <= head_rows
    for (start, count, kind), rows in zip(requests, answers, strict=True):
        check_rows(rows, kind, head.table[start : start + count])


def test_a_row_of_minus_infinity_but_for_one_token_is_certain() -> None:
    table = torch.full((1, 50), -INF)
    table[0, 31] = -7.25
    head = Head(table)
    greedy, top, selected = select_rows(
        head.hidden, [(0, 1, Greedy(logprob=True)), (0, 1, TopTokens(3)), (0, 1, SelectedTokens((31, 2)))], head
    )
    assert (greedy.block["token_ids"].tolist(), greedy.block["logprobs"].tolist()) == ([31], [0.0])
    assert top.block["token_ids"].tolist() == [[31, 0, 1]]
    assert top.block["logits"].tolist() == [[-7.25, -INF, -INF]]
    assert (selected.block["logits"].tolist(), selected.block["logsumexp"].tolist()) == ([[-7.25, -INF]], [-7.25])


def test_large_logits_do_not_overflow_the_logsumexp() -> None:
    head = Head(torch.tensor([[1e4, 1e4, -1e4]]))
    [rows] = select_rows(head.hidden, [(0, 1, Greedy(logprob=True))], head)
    np.testing.assert_allclose(rows.block["logprobs"], [-math.log(2)], atol=1e-3)


# --- draws ------------------------------------------------------------------------------------------------------------


def test_draws_of_all_seeds_share_a_block_and_each_has_its_own_seed_position_and_bias(monkeypatch) -> None:
    """Between rows of other kinds, and where a slice of the head ends within an item."""
    monkeypatch.setattr(sampling_rows, "HEAD_ROWS", 3)
    head = Head(random_table(16, 50))
    hot = Sample(temperature=1.3, top_k=20, top_p=0.9, min_p=0.01, seed=2**64 - 1, bias=((7, 30.0), (3, 30.0)))
    beside = replace(hot, logprob=True, logprobs=RowLogprobs(4, (9,)))
    kinds = [Greedy(), Sample(seed=5), hot, FullLogits(), Sample(seed=5, logprob=True), Sample(temperature=0, seed=1)]
    kinds.append(beside)
    firsts, counts, positions = (0, 1, 4, 8, 9, 11, 12), (1, 3, 4, 1, 2, 5, 4), (0, 40, 50, 0, 2**31, 60, 5)
    answers = select_rows(head.hidden, list(zip(firsts, counts, kinds, positions, strict=True)), head)
    assert answers[1].block is answers[2].block is answers[5].block is not answers[4].block
    for first, count, kind, position, rows in zip(firsts, counts, kinds, positions, answers, strict=True):
        logits = head.table[first : first + count]
        if not isinstance(kind, Sample):
            check_rows(rows, kind, logits)
            continue
        draws = np.array(
            [(kind.seed, position + i, kind.temperature, kind.top_p, kind.min_p, kind.top_k) for i in range(count)],
            PARAMS_DTYPE,
        )
        biased = logits.clone()
        for token, value in kind.bias:
            biased[:, token] += value
        block = rows.block.cut(rows.first, rows.first + rows.count)
        tokens = TorchSampler().draw(biased, draws)
        assert block["token_ids"].tolist() == tokens.tolist()
        if kind.bias:
            assert set(tokens.tolist()) == {3, 7}
        check_logprobs(block, logits.double().log_softmax(-1).numpy(), kind.logprob, kind.logprobs)


def test_without_a_seed_every_draw_is_another() -> None:
    head = Head(torch.zeros(40, 1000))
    taken = [select_rows(head.hidden, [(0, 40, Sample(), 0)], head)[0].block["token_ids"].tolist() for _ in range(2)]
    assert taken[0] != taken[1] and len(set(taken[0])) > 30
