"""Every output kind and every kind of rows is known wherever it must be: a kind that one place lacks fails here."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch

from ferrum_rpc.client.answer import Answer, NoSuchRowsError
from ferrum_rpc.client.arguments import as_output
from ferrum_rpc.client.info import Capability
from ferrum_rpc.core import (
    Accept,
    CreateOptions,
    FullLogits,
    Greedy,
    HandleRef,
    HiddenStates,
    NextToken,
    OutputKind,
    OutputSpec,
    Positions,
    Pressure,
    RowBlock,
    RowDType,
    RowKind,
    RowLogprobs,
    Rows,
    Sample,
    SelectedTokens,
    TopTokens,
    WorkItem,
)
from ferrum_rpc.core.check import ANSWER_OVERHEAD, answer_bytes
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.executor.v1 import output_pb2
from ferrum_rpc.sampling.rows import RowRequest, select_rows
from ferrum_rpc.wire.info import CAPABILITIES
from ferrum_rpc.wire.output import capability_of, needs_of, output_from_proto, output_to_proto
from ferrum_rpc.wire.rows import Extent, fill_block, rows_from_proto
from tests.support.rows import counted

EXAMPLES: list[Any] = [
    Greedy(),
    Greedy(logprob=True, logprobs=RowLogprobs(2, (5, 3))),
    Sample(0.5, 3, 0.5, 0.25, ((3, 1.5),), 7, logprob=True, penalty_from=2, presence_penalty=0.5),
    TopTokens(3),
    SelectedTokens((4, 1)),
    FullLogits(),
    FullLogits(RowDType.BF16),
    Accept(),
    Accept(Sample(seed=1), [[4, 5], [6, 7]], [[0.25, 0.75], [1.0, 0.0]]),
    HiddenStates(),
    HiddenStates(RowDType.F16),
    NextToken(),
    NextToken(3, 9, RowLogprobs(1)),
]
"""Of every kind, with its fields set."""

ACCESSORS = {
    RowKind.TOKENS: "tokens",
    RowKind.TOP_TOKENS: "top_tokens",
    RowKind.SELECTED_TOKENS: "selected",
    RowKind.LOGITS: "logits",
    RowKind.HIDDEN_STATES: "hidden_states",
}
"""Of an `Answer`."""

VOCABULARY, WIDTH = 12, 8


def name_of(kind: Any) -> str:
    return type(kind).__name__


def spec_of(kind: Any) -> OutputSpec:
    return OutputSpec(Positions.ALL, kind)


def test_every_kind_has_an_example() -> None:
    assert {type(each) for each in EXAMPLES} == {*get_args(OutputKind)}


def test_the_contract_has_these_kinds_and_no_others() -> None:
    fields = [each.name for each in output_pb2.OutputSpec.DESCRIPTOR.oneofs_by_name["kind"].fields]
    assert fields == [kind.field for kind in get_args(OutputKind)]
    messages = {each.name: each.message_type for each in output_pb2.RowBlock.DESCRIPTOR.oneofs_by_name["kind"].fields}
    assert {name: [*message.fields_by_name] for name, message in messages.items()} == {
        kind.field: [*kind.columns] for kind in RowKind
    }


@pytest.mark.parametrize("kind", EXAMPLES, ids=name_of)
def test_the_wire_has_it_both_ways(kind: Any) -> None:
    message = output_to_proto(spec_of(kind))
    assert message.WhichOneof("kind") == kind.field
    assert output_from_proto(message, Positions.ALL) == spec_of(kind)


@pytest.mark.parametrize("kind", EXAMPLES, ids=name_of)
def test_the_client_takes_it_and_names_it(kind: Any) -> None:
    assert as_output(kind, Positions.ALL) == spec_of(kind)
    with pytest.raises(InvalidRequest, match=rf"{type(kind).__name__}\("):
        as_output("of no kind", Positions.ALL)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", get_args(OutputKind))
def test_a_capability_offers_it(kind: Any) -> None:
    assert capability_of(kind) in CAPABILITIES
    assert Capability(capability_of(kind)).name == f"OUTPUT_{kind.field.upper()}"


@pytest.mark.parametrize("kind", EXAMPLES, ids=name_of)
def test_what_an_older_executor_would_take_for_greedy_names_what_it_needs(kind: Any) -> None:
    """Executors that do not know ``needs`` know the kinds up to hidden_states."""
    numbers = {name: field.number for name, field in output_pb2.OutputSpec.DESCRIPTOR.fields_by_name.items()}
    later = numbers[kind.field] > numbers["hidden_states"]
    assert (capability_of(type(kind)) in needs_of(spec_of(kind))) == later


class Whatever:
    """Of `ModelInfo` and `Limits`, large numbers."""

    vocab_size, hidden_size = VOCABULARY, WIDTH

    def __getattr__(self, name: str) -> int:
        return 1 << 20


@pytest.mark.parametrize("kind", EXAMPLES, ids=name_of)
def test_its_rows_are_of_the_kind_and_the_size_that_it_says(kind: Any) -> None:
    whatever: Any = Whatever()
    tokens = np.array([1, 4, 6], np.int32)
    item = WorkItem(1, None, tokens, None, spec_of(kind), "", CreateOptions())
    bound = answer_bytes(item, whatever, whatever)
    hidden = torch.randn(3, WIDTH)
    weights = torch.randn(WIDTH, VOCABULARY)
    asked = kind.choice if isinstance(kind, Accept) else kind
    request = RowRequest(0, 3, asked, 3, counted(np.arange(5, dtype=np.int32), 3), tokens)
    [rows] = select_rows(hidden, [request], lambda rows: rows @ weights)
    assert rows.block.kind is kind.rows and rows.count == 3
    assert rows.nbytes == 3 * spec_of(kind).row_bytes(VOCABULARY, WIDTH)
    assert bound == ANSWER_OVERHEAD + spec_of(kind).row_count(3, 0) * rows.nbytes // 3


BLOCKS = [
    RowBlock(kind, {name: np.arange(6, dtype=np.float32).reshape(3, 2) for name in columns})
    for kind in RowKind
    for columns in sorted({kind.columns[: kind.required], kind.columns}, key=len)
]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda each: f"{each.kind.field} {len(each.columns)}")
def test_rows_are_read_as_they_were_written(block: RowBlock) -> None:
    message = output_pb2.RowBlock()
    fill_block(message, Extent(block, 1, 3, 0))
    [read] = rows_from_proto([message])
    assert read.kind is block.kind and [*read.columns] == [*block.columns]
    assert all(np.array_equal(read[name], block[name][1:3]) for name in block.columns)


def answered_with(kind: RowKind) -> list[str]:
    names = [each.__name__ for each in get_args(OutputKind) if each.rows is kind]
    assert names, "no output is answered with them"
    return names


@pytest.mark.parametrize("kind", RowKind)
def test_an_answer_with_other_rows_names_what_they_answer_and_what_to_ask_with(kind: RowKind) -> None:
    block = RowBlock(kind, {name: np.zeros((1, 1), np.uint32) for name in kind.columns})
    answer = Answer(HandleRef(b"", 1, 1), Rows(block, 0, 1), Pressure(1, 1, 1, 0, 0, 1))
    assert len(getattr(answer, ACCESSORS[kind])) >= 1
    for other in ACCESSORS.keys() - {kind}:
        with pytest.raises(NoSuchRowsError) as refusal:
            getattr(answer, ACCESSORS[other])
        holds, _, ask_with = str(refusal.value).partition("ask with")
        assert all(name in holds for name in answered_with(kind))
        assert all(name in ask_with for name in answered_with(other))
