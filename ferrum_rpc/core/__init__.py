"""The words that every floor shares: pure data, no behaviour worth mocking.

Everything the executor does is one primitive: a *step*, a list of *spans* that run in one forward pass. "Prefill" and
"decode" are words of the wire and of metrics; here there are only spans. This package imports nothing of the project
but its errors and no torch, so that the service floor, the wire floor and the engine can all speak it.

Shapes use these letters: T tokens of a step, R rows that were asked for, V vocabulary, k candidates of a row.
"""

from ferrum_rpc.core.info import (
    NO_KERNELS,
    AdapterFacts,
    AttentionSpec,
    BlockChange,
    CacheState,
    DeviceInfo,
    Limits,
    ModelInfo,
    Pressure,
    RankState,
)
from ferrum_rpc.core.items import ANYBODY, Caller, CreateOptions, Follow, HandleRef, ItemAnswer, ItemOutcome, WorkItem
from ferrum_rpc.core.outputs import (
    Accept,
    FullLogits,
    Greedy,
    HiddenStates,
    NextToken,
    OutputKind,
    OutputSpec,
    Positions,
    RowDType,
    RowLogprobs,
    Sample,
    SelectedTokens,
    TopTokens,
)
from ferrum_rpc.core.rows import RowBlock, RowKind, Rows
from ferrum_rpc.core.steps import (
    PREFIX,
    PrefixUse,
    Run,
    RunEnd,
    RunEnded,
    Span,
    SpanOutcome,
    SpanResult,
    Step,
    StepResult,
    StepTiming,
    TokenArray,
    named,
)

__all__ = [
    "ANYBODY",
    "NO_KERNELS",
    "PREFIX",
    "Accept",
    "AdapterFacts",
    "AttentionSpec",
    "BlockChange",
    "CacheState",
    "Caller",
    "CreateOptions",
    "DeviceInfo",
    "Follow",
    "FullLogits",
    "Greedy",
    "HandleRef",
    "HiddenStates",
    "ItemAnswer",
    "ItemOutcome",
    "Limits",
    "ModelInfo",
    "NextToken",
    "OutputKind",
    "OutputSpec",
    "Positions",
    "PrefixUse",
    "Pressure",
    "RankState",
    "RowBlock",
    "RowDType",
    "RowKind",
    "RowLogprobs",
    "Rows",
    "Run",
    "RunEnd",
    "RunEnded",
    "Sample",
    "SelectedTokens",
    "Span",
    "SpanOutcome",
    "SpanResult",
    "Step",
    "StepResult",
    "StepTiming",
    "TokenArray",
    "TopTokens",
    "WorkItem",
    "named",
]
