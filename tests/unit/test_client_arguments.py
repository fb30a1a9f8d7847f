"""What a program hands to the client by mistake is refused by name, before anything is sent."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from ferrum_rpc.client import (
    Accept,
    FullLogits,
    Greedy,
    HandleRef,
    NextToken,
    OutputSpec,
    Positions,
    RowLogprobs,
    Run,
    Sample,
    SelectedTokens,
    TopTokens,
)
from ferrum_rpc.client.arguments import MOST, as_list, as_number, as_output, as_run, as_tokens
from ferrum_rpc.client.state import SequenceState
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.executor.v1 import forward_pb2


@pytest.mark.parametrize(
    "tokens",
    [[1, 2], (1, 2), range(1, 3), b"\x01\x02", {1: "", 2: ""}, (each for each in (1, 2)), [np.int64(1), np.uint8(2)]]
    + [np.array([1, 2], dtype) for dtype in (np.int64, np.uint32, np.uint8)],
)
def test_tokens_may_come_as_anything_that_holds_integers(tokens: Any) -> None:
    listed = as_tokens(tokens)
    assert listed == [1, 2]
    assert {type(each) for each in listed} == {int}


WRONG_TOKENS: list[Any] = [
    *([], [1, -1], [1, MOST + 1], [1.0], [1, True], [np.True_], "12", ["1"], None, 7),
    *(np.array(each) for each in ([[1, 2]], 1, [1.0], [True], [1, None])),
    np.array([], np.int64),
]


@pytest.mark.parametrize("wrong", WRONG_TOKENS, ids=repr)
def test_what_is_no_list_of_tokens_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="token_ids") as refused:
        as_tokens(wrong)
    assert refused.value.field == "token_ids"


def test_the_error_of_a_programs_own_iterator_is_its_own() -> None:
    def broken() -> Any:
        yield 1
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        as_tokens(broken())


def test_a_number_has_the_range_of_the_contract() -> None:
    assert [as_number(each, "n") for each in (0, MOST, np.int32(5))] == [0, MOST, 5]
    for wrong in (-1, MOST + 1, 1.0, True, "1", None, [1]):
        with pytest.raises(InvalidRequest, match="n must be an integer from 0") as refused:
            as_number(wrong, "n")  # type: ignore[arg-type]
        assert refused.value.field == "n"
    with pytest.raises(InvalidRequest, match="from 1"):
        as_number(0, "count", least=1)


def test_what_is_no_list_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="items: must be a list, not int"):
        as_list(3, "items")  # type: ignore[arg-type]


def test_a_kind_alone_stands_at_the_usual_positions_and_positions_alone_are_those_of_greedy() -> None:
    assert as_output(TopTokens(4), Positions.ALL) == OutputSpec(Positions.ALL, TopTokens(4))
    spec = OutputSpec(Positions.NONE, Greedy())
    assert as_output(spec, Positions.ALL) is spec
    assert as_output(NextToken(), Positions.LAST) == OutputSpec(Positions.ALL, NextToken())
    assert [as_output(each, Positions.LAST) for each in Positions] == [OutputSpec(each, Greedy()) for each in Positions]


WRONG_OUTPUTS: list[tuple[Any, str]] = [
    (SelectedTokens([1, 2]), "output.selected_tokens.token_ids"),  # type: ignore[arg-type]
    (SelectedTokens(()), "output.selected_tokens.token_ids"),
    (SelectedTokens((1, -1)), "output.selected_tokens.token_ids"),
    (SelectedTokens((1.5,)), "output.selected_tokens.token_ids"),  # type: ignore[arg-type]
    (TopTokens(0), "output.top_tokens.k"),
    (TopTokens(-1), "output.top_tokens.k"),
    (TopTokens(True), "output.top_tokens.k"),
    (TopTokens(2.0), "output.top_tokens.k"),  # type: ignore[arg-type]
    (Greedy(logprobs=5), "output.greedy.logprobs"),  # type: ignore[arg-type]
    (Greedy(logprobs=RowLogprobs(-1)), "output.greedy.logprobs.top_k"),
    (Greedy(logprobs=RowLogprobs(1, [2])), "output.greedy.logprobs"),  # type: ignore[arg-type]
    (Sample(logprobs=RowLogprobs(0, (-2,))), "output.sample.logprobs.token_ids"),
    (Sample(bias=((32, "1"),)), "output.sample.bias.bias"),  # type: ignore[arg-type]
    (Sample(bias=((-1, 1.0),)), "output.sample.bias.token_id"),
    (Accept(Sample(bias={32: 1.0})), "output.accept.sampling.bias"),  # type: ignore[arg-type]
    (NextToken(-1), "output.next_token.first_position"),
    (NextToken(0, 1 << 32), "output.next_token.following_token"),
    (NextToken(logprobs=RowLogprobs(True)), "output.next_token.logprobs.top_k"),
    (OutputSpec(Positions.LAST, NextToken()), "output.positions"),
    (Greedy, "output"),
    (Greedy(1), "output"),  # type: ignore[arg-type]
    (FullLogits("f32"), "output"),  # type: ignore[arg-type]
    ("greedy", "output"),
    (None, "output"),
    (OutputSpec("all", Greedy()), "output.positions"),  # type: ignore[arg-type]
    (OutputSpec(Positions.ALL, "greedy"), "output"),  # type: ignore[arg-type]
    (OutputSpec(Positions.ALL, Positions.NONE), "output"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("output", "field"), WRONG_OUTPUTS, ids=repr)
def test_what_is_no_output_is_refused_by_name(output: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        as_output(output, Positions.LAST)
    assert refused.value.field == field


def test_a_bias_that_is_no_list_of_pairs_is_refused_with_what_is_expected() -> None:
    for wrong in ({32: 1.0}, "32", None, [(32, 1.0, 2)], ((32,),), (32, 1.0)):
        says = rf"must be a tuple of pairs .*\(\(32, 1\.0\),\), not {re.escape(repr(wrong))}"
        with pytest.raises(InvalidRequest, match=says) as refused:
            as_output(Sample(bias=wrong), Positions.LAST)  # type: ignore[arg-type]
        assert refused.value.field == "output.sample.bias"
    for right in (((32, 1.0),), ((32, -1),), ()):
        assert as_output(Sample(bias=right), Positions.LAST).kind == Sample(bias=right)


def test_the_stop_ids_of_a_run_are_token_ids() -> None:
    last = OutputSpec()
    assert as_run(Run(2, [np.int64(5)]), last) == Run(2, (5,))  # type: ignore[arg-type]
    assert as_run(Run(2, []), last) == as_run(Run(2), last) == Run(2)  # type: ignore[arg-type]
    for wrong in ("\n", 7, None, (-1,), ("a",)):
        with pytest.raises(InvalidRequest) as refused:
            as_run(Run(2, wrong), last)  # type: ignore[arg-type]
        assert refused.value.field == "run.stop_token_ids"
    with pytest.raises(InvalidRequest, match="not 2") as refused:
        as_run(2, last)  # type: ignore[arg-type]
    assert refused.value.field == "run"


def test_neither_handle_nor_item_prints_what_would_let_another_use_the_sequence() -> None:
    secret = b"0123456789abcdef"
    handle = HandleRef(secret, 7, 3)
    state = SequenceState(forward_pb2.CreateOptions(), handle=handle)
    item = state.item(1, [1, 2, 3], OutputSpec())
    assert repr(handle) == "HandleRef(seq_len=7, version=3)"
    assert repr(item) == "<Item of 3 tokens at 7>"
    for shown in (repr(handle), repr(item), f"{[handle, item]}"):
        assert secret.decode() not in shown
        assert item.request_id not in shown
