"""Checks of the client's arguments, before a sequence is claimed or a byte is sent.

An invalid argument raises `InvalidRequest` with the name of its field in the contract, as the executor's refusal of
that field does.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ferrum_rpc.core import (
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
    Run,
    Sample,
    SelectedTokens,
    TopTokens,
)
from ferrum_rpc.core.check import check_run
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.executor.v1 import forward_pb2

Tokens = Iterable[int] | npt.NDArray[np.integer]
"""Token ids: any iterable of ints, or an integer array [n]."""

Output = OutputSpec | OutputKind | Positions
"""What to return: a whole `OutputSpec`; only a kind (`Greedy()`, `TopTokens(8)`), at the call's usual positions; or
only positions, of `Greedy()`. With `Positions.NONE` the answer has no rows."""

MOST: Final = 2**32 - 1
"""The contract's numbers are unsigned 32-bit integers."""

GREEDY: Final = Greedy()
"""The default output of every call."""

NO_ROWS: Final = OutputSpec(Positions.NONE, GREEDY)

_LAST_GREEDY: Final = OutputSpec(Positions.LAST, GREEDY)


class CacheMode(enum.Enum):
    """How a new sequence uses the prefix cache; the values are those of the protos."""

    DEFAULT = 0
    READ_WRITE = 1
    READ_ONLY = 2
    BYPASS = 3


def creation(
    reserve_tokens: int, lease_id: str, adapter: str, cache_salt: bytes, cache_mode: CacheMode
) -> forward_pb2.CreateOptions:
    """The options of a new sequence. Raises `InvalidRequest`."""
    try:
        return forward_pb2.CreateOptions(
            lease_id=lease_id,
            adapter=adapter,
            cache_salt=cache_salt,
            cache_mode=None if cache_mode is CacheMode.DEFAULT else f"CACHE_MODE_{CacheMode(cache_mode).name}",
            reserve_tokens=as_number(reserve_tokens, "create.reserve_tokens"),
        )
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"invalid options of a sequence: {error}", field="create") from None


def as_tokens(tokens: Tokens, field: str = "token_ids", *, least: int = 1) -> list[int]:
    """Token ids as a list of Python ints. Raises `InvalidRequest` for fewer than ``least`` (0 or 1), negative ones,
    bools and other types."""
    listed: list[int]
    if type(tokens) is list and len(tokens) == 1 and type(token := tokens[0]) is int and 0 <= token <= MOST:
        return [token]  # the most frequent case, in a quarter of the time
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise InvalidRequest(f"{field}: must be integers [n], not {tokens.dtype} {[*tokens.shape]}", field=field)
        listed = tokens.tolist()
    elif isinstance(tokens, str):
        raise InvalidRequest(f"{field} must be token ids, not text: encode it with the model's tokenizer", field=field)
    else:
        given = as_list(tokens, field)
        try:
            listed = list(map(operator.index, given))
        except TypeError as error:
            raise InvalidRequest(f"{field}: token ids must be integers: {error}", field=field) from None
        if bool in map(type, given):
            raise InvalidRequest(f"{field}: token ids must be integers, not bools", field=field)
    if not listed:
        if least == 0:
            return listed
        raise InvalidRequest(f"{field}: at least one token is needed", field=field)
    if min(listed) < 0 or max(listed) > MOST:
        wrong = min(listed) if min(listed) < 0 else max(listed)
        raise InvalidRequest(f"{field}: token ids must be 0 to {MOST}, not {wrong}", field=field)
    return listed


def as_number(value: int, field: str, *, least: int = 0, most: int = MOST) -> int:
    """An integer of at least ``least`` that fits the contract's numbers. Raises `InvalidRequest`."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        raise InvalidRequest(f"{field} must be an integer from {least} to {most}, not {value!r}", field=field)
    return number


def as_optional(value: int | None, field: str, *, least: int = 0) -> int | None:
    """As `as_number`, or None."""
    return None if value is None else as_number(value, field, least=least)


def as_seconds(value: float, field: str) -> float:
    """A time of at least 0. Raises `InvalidRequest`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise InvalidRequest(f"{field} must be a number of seconds, at least 0, not {value!r}", field=field)
    return float(value)


def as_list(values: Iterable[Any], field: str) -> list[Any]:
    """The elements of an iterable. Raises `InvalidRequest` for anything else."""
    try:
        each = iter(values)
    except TypeError:
        raise InvalidRequest(f"{field}: must be a list, not {type(values).__name__}", field=field) from None
    return list(each)


def as_output(output: Output, positions: Positions) -> OutputSpec:
    """A kind stands at the call's usual ``positions``, `NextToken` and `Accept` at all; positions alone are those of
    `Greedy()`. Raises `InvalidRequest` for what is no output."""
    if output is GREEDY and positions is Positions.LAST:
        return _LAST_GREEDY
    if isinstance(output, Positions):
        return OutputSpec(output, GREEDY)
    if isinstance(output, NextToken | Accept):
        positions = Positions.ALL
    spec = output if isinstance(output, OutputSpec) else OutputSpec(positions, output)
    if not isinstance(spec.positions, Positions):
        raise InvalidRequest(f"positions must be one of Positions, not {spec.positions!r}", field="output.positions")
    kind: object = spec.kind
    match kind:
        case Greedy(logprob=bool(), logprobs=logprobs):
            _check_logprobs(logprobs, "output.greedy.logprobs")
            _check_masks(kind, "output.greedy")
        case NextToken(first_position, following_token, logprobs):
            if spec.positions is not Positions.ALL:
                raise InvalidRequest("positions must not be set: NextToken defines them", field="output.positions")
            as_number(first_position, "output.next_token.first_position")
            as_optional(following_token, "output.next_token.following_token")
            _check_logprobs(logprobs, "output.next_token.logprobs")
        case FullLogits(dtype=RowDType()) | HiddenStates(dtype=RowDType()):
            pass
        case Sample():
            _check_sample(kind, "output.sample")
        case Accept(sampling=None | Sample() as sampling):
            if spec.positions is not Positions.ALL:
                raise InvalidRequest(
                    "positions must not be set: Accept() returns the tokens that it emits", field="output.positions"
                )
            if sampling is not None:
                _check_sample(sampling, "output.accept.sampling")
        case TopTokens(k):
            as_number(k, "output.top_tokens.k", least=1)
        case SelectedTokens(tuple() as token_ids):
            as_tokens(token_ids, "output.selected_tokens.token_ids")
        case SelectedTokens(token_ids):
            raise InvalidRequest(
                f"SelectedTokens takes a tuple of token ids, not {type(token_ids).__name__}",
                field="output.selected_tokens.token_ids",
            )
        case _:
            raise InvalidRequest(
                f"an output must be an OutputSpec, Greedy(), Sample(...), TopTokens(k), SelectedTokens((id, ...)), "
                f"FullLogits(), HiddenStates(), NextToken(), Accept(...) or one of Positions, not {kind!r}",
                field="output",
            )
    return spec


def as_run(run: Run, output: OutputSpec) -> Run:
    """Raise `InvalidRequest` for anything but a run, and for an output that chooses no next token."""
    if not isinstance(run, Run):
        raise InvalidRequest(f"a run must be Run(max_tokens, (stop id, ...)), not {run!r}", field="run")
    stops = run.stop_token_ids
    if type(stops) is not tuple or stops:
        stops = tuple(as_tokens(stops, "run.stop_token_ids", least=0))
    found = Run(as_number(run.max_tokens, "run.max_tokens", least=1), stops)
    check_run(found, output)
    return found


def _check_sample(sample: Sample, field: str) -> None:
    """Raise `InvalidRequest` for values that the contract's fields cannot hold; the executor checks the rest."""
    _check_masks(sample, "output.sample")
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        _check_float(getattr(sample, name), f"{field}.{name}")
    for name in ("top_k", "penalty_from"):
        as_number(getattr(sample, name), f"{field}.{name}")
    if not isinstance(sample.logprob, bool):
        raise InvalidRequest(f"logprob must be a bool, not {sample.logprob!r}", field=f"{field}.logprob")
    if sample.seed is not None:
        as_number(sample.seed, f"{field}.seed", most=2**64 - 1)
    _check_logprobs(sample.logprobs, f"{field}.logprobs")
    if not isinstance(sample.bias, tuple | list):  # not a mapping either: an output is a value that can be compared
        raise _wrong_bias(sample.bias, field)
    for pair in sample.bias:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise _wrong_bias(sample.bias, field)
        as_number(pair[0], f"{field}.bias.token_id")
        _check_float(pair[1], f"{field}.bias.bias")


def _wrong_bias(bias: object, field: str) -> InvalidRequest:
    return InvalidRequest(
        f"bias must be a tuple of pairs (token id, what is added to its logit), as in ((32, 1.0),), not {bias!r:.80}",
        field=f"{field}.bias",
    )


def _check_logprobs(logprobs: object, field: str) -> None:
    if logprobs is None:
        return
    if not isinstance(logprobs, RowLogprobs) or not isinstance(logprobs.token_ids, tuple):
        raise InvalidRequest(f"logprobs must be None or RowLogprobs(k, (id, ...)), not {logprobs!r}", field=field)
    as_number(logprobs.top_k, f"{field}.top_k")
    if logprobs.token_ids:
        as_tokens(logprobs.token_ids, f"{field}.token_ids")


def _check_masks(kind: Greedy | Sample, field: str) -> None:
    masks = kind.row_masks
    if (
        not isinstance(kind.mask, bytes)
        or not isinstance(masks, tuple)
        or not all(isinstance(each, bytes) for each in masks)
    ):
        raise InvalidRequest(
            "`mask` must be an id from register_token_mask, and `row_masks` a tuple of such ids",
            field=f"{field}.token_mask_id",
        )
    if not isinstance(kind.grammar, bytes):
        raise InvalidRequest("`grammar` must be an id from register_grammar", field=f"{field}.grammar_id")
    as_number(kind.grammar_from, f"{field}.grammar_from")
    if kind.grammar and (kind.mask or masks):
        raise InvalidRequest("a grammar stands in place of masks", field=f"{field}.grammar_id")
    if kind.grammar_from and not kind.grammar:
        raise InvalidRequest("grammar_from is for a grammar", field=f"{field}.grammar_from")


def _check_float(value: float, field: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{field} must be a number, not {value!r}", field=field)
