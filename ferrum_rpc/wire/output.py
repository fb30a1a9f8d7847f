"""OutputSpec: the requested content of each row."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ferrum_rpc.core import (
    MAX_BIASES,
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
from ferrum_rpc.errors import InvalidRequest, NotSupported, above
from ferrum_rpc.executor.v1 import info_pb2, output_pb2, types_pb2
from ferrum_rpc.wire.masks import fill_masks, grammar_of_output, masks_from_proto
from ferrum_rpc.wire.tensor import ROW_DTYPE_FROM_PROTO, ROW_DTYPE_TO_PROTO, fill_tensor, tensor_from_proto

_POSITIONS_TO_PROTO: Final[dict[Positions, output_pb2.Positions]] = {
    Positions.LAST: output_pb2.POSITIONS_LAST,
    Positions.ALL: output_pb2.POSITIONS_ALL,
    Positions.NONE: output_pb2.POSITIONS_NONE,
}
_POSITIONS_FROM_PROTO: Final[dict[int, Positions]] = {proto: each for each, proto in _POSITIONS_TO_PROTO.items()}

_GREEDY: Final = Greedy()
_GREEDY_AT: Final[dict[Positions, OutputSpec]] = {each: OutputSpec(each, _GREEDY) for each in Positions}

_FIRST_KINDS: Final = (Greedy, Sample, TopTokens, SelectedTokens, FullLogits, Accept, HiddenStates)
"""Kinds that every executor knows, and refuses if it does not offer them. An older one answers others as `Greedy`."""

_ACCEPT: Final = OutputSpec(Positions.ALL, Accept())

_USUAL: Final = output_pb2.OutputSpec(positions=output_pb2.POSITIONS_LAST, greedy=output_pb2.GreedyOutput())
_USUAL_SPEC: Final = _GREEDY_AT[Positions.LAST]
"""The output of nearly every decode: one comparison detects it, in a quarter of the time of reading field by field."""


def output_to_proto(spec: OutputSpec) -> output_pb2.OutputSpec:
    """Domain to wire."""
    positions = _POSITIONS_TO_PROTO[spec.positions]
    match spec.kind:
        case Greedy(logprob, logprobs) as kind:
            greedy = output_pb2.GreedyOutput(logprob=logprob, logprobs=_logprobs_to_proto(logprobs))
            fill_masks(greedy, kind)
            return output_pb2.OutputSpec(positions=positions, greedy=greedy)
        case Sample() as kind:
            return output_pb2.OutputSpec(positions=positions, sample=_sample_to_proto(kind))
        case TopTokens(k):
            return output_pb2.OutputSpec(positions=positions, top_tokens=output_pb2.TopTokensOutput(k=k))
        case SelectedTokens(token_ids):
            selected = output_pb2.SelectedTokensOutput(token_ids=token_ids)
            return output_pb2.OutputSpec(positions=positions, selected_tokens=selected)
        case FullLogits(dtype):
            full = output_pb2.FullLogitsOutput(dtype=ROW_DTYPE_TO_PROTO[dtype])
            return output_pb2.OutputSpec(positions=positions, full_logits=full)
        case HiddenStates(dtype):
            hidden = output_pb2.HiddenStatesOutput(dtype=ROW_DTYPE_TO_PROTO[dtype])
            return output_pb2.OutputSpec(positions=positions, hidden_states=hidden)
        case NextToken(first_position, following_token, logprobs):
            scores = output_pb2.NextTokenOutput(
                first_position=first_position, following_token=following_token, logprobs=_logprobs_to_proto(logprobs)
            )
            return output_pb2.OutputSpec(next_token=scores)
        case Accept() as kind:
            return output_pb2.OutputSpec(accept=_accept_to_proto(kind))


def needs_of(spec: OutputSpec) -> tuple[info_pb2.Capability, ...]:
    """The capabilities without which an executor would return another answer, or less, instead of a refusal."""
    kind = spec.kind
    needs = [] if isinstance(kind, _FIRST_KINDS) else [capability_of(type(kind))]
    if isinstance(kind, Greedy | Sample | NextToken) and kind.logprobs is not None:
        needs.append(info_pb2.CAPABILITY_ROW_LOGPROBS)
    if isinstance(kind, Greedy | Sample) and kind.row_masks:
        needs.append(info_pb2.CAPABILITY_TOKEN_MASKS)
    if spec.constrained is not None:
        needs.append(info_pb2.CAPABILITY_GRAMMAR)
    return tuple(needs)


def capability_of(kind: type[OutputKind]) -> info_pb2.Capability:
    """The capability of executors that offer this kind."""
    capability: info_pb2.Capability = getattr(info_pb2, f"CAPABILITY_OUTPUT_{kind.field.upper()}")
    return capability


def output_from_proto(spec: output_pb2.OutputSpec, default: Positions) -> OutputSpec:
    """Wire to domain. ``default`` stands for positions that are not set. Raises `InvalidRequest` for what is malformed
    and `NotSupported` for what this executor's capabilities leave out."""
    if spec == _USUAL:
        return _USUAL_SPEC
    if spec.positions == output_pb2.POSITIONS_UNSPECIFIED:
        positions = default
    elif (known := _POSITIONS_FROM_PROTO.get(spec.positions)) is not None:
        positions = known
    else:
        raise InvalidRequest(f"output.positions {spec.positions} is not known", field="output.positions")
    name = spec.WhichOneof("kind")
    if name == "next_token":
        return _next_token_from_proto(spec)
    if name == "top_tokens" and (k := spec.top_tokens.k):
        return _top_tokens(positions, k)
    if name == "accept":
        return _accept_from_proto(spec)
    kind = _GREEDY if name is None else _kind_from_proto(spec, name)
    if kind is _GREEDY:
        return _GREEDY_AT[positions]
    if isinstance(kind, Sample) and kind.mask:
        return OutputSpec(positions, kind, getattr(spec, str(name)).token_mask.data)
    return OutputSpec(positions, kind)


@lru_cache(maxsize=256)
def _top_tokens(positions: Positions, k: int) -> OutputSpec:
    """One object for all items with the same output: it is created once, and compared by identity."""
    return OutputSpec(positions, TopTokens(k))


def _kind_from_proto(spec: output_pb2.OutputSpec, kind: str) -> OutputKind:
    match kind:
        case "greedy":
            return _greedy_from_proto(spec.greedy)
        case "sample":
            return _sample_from_proto(spec.sample, "output.sample")
        case "top_tokens":
            raise InvalidRequest("top_tokens.k must be at least 1", field="output.top_tokens.k")
        case "selected_tokens":
            token_ids = tuple(spec.selected_tokens.token_ids)
            if not token_ids:
                raise InvalidRequest("selected_tokens names no token", field="output.selected_tokens.token_ids")
            return SelectedTokens(token_ids)
        case "full_logits":
            return FullLogits(_row_dtype(spec.full_logits.dtype, kind))
        case "hidden_states":
            return HiddenStates(_row_dtype(spec.hidden_states.dtype, kind))
        case _:
            capability = f"OUTPUT_{kind.upper()}"
            raise NotSupported(f"output `{kind}` is not offered (capability {capability})", field=f"output.{kind}")


def _row_dtype(dtype: types_pb2.DType, kind: str) -> RowDType:
    known = RowDType.F32 if dtype == types_pb2.D_TYPE_UNSPECIFIED else ROW_DTYPE_FROM_PROTO.get(dtype)
    if known is None:
        raise InvalidRequest(f"{kind}.dtype must be F32, BF16 or F16", field=f"output.{kind}.dtype")
    return known


def _sample_to_proto(kind: Sample) -> output_pb2.SampleOutput:
    message = output_pb2.SampleOutput(
        temperature=kind.temperature,
        top_k=kind.top_k,
        top_p=kind.top_p,
        min_p=kind.min_p,
        bias=[output_pb2.TokenBias(token_id=token_id, bias=value) for token_id, value in kind.bias],
        seed=kind.seed,
        logprob=kind.logprob,
        logprobs=_logprobs_to_proto(kind.logprobs),
    )
    fill_masks(message, kind)
    if kind.penalised:
        message.repetition_penalty = kind.repetition_penalty
        message.presence_penalty, message.frequency_penalty = kind.presence_penalty, kind.frequency_penalty
        message.penalty_from = kind.penalty_from
    return message


def _greedy_from_proto(message: output_pb2.GreedyOutput) -> Greedy | Sample:
    """A penalty, a mask or a grammar makes it a `Sample` at temperature 0."""
    logprobs = _logprobs_from_proto(message.logprobs) if message.HasField("logprobs") else None
    penalty = message.repetition_penalty if message.HasField("repetition_penalty") else 1.0
    mask, row_masks = masks_from_proto(message, "output.greedy")
    grammar, grammar_from = grammar_of_output(message, "output.greedy")
    if penalty != 1.0 or mask or row_masks or grammar:
        _check_repetition(penalty, "output.greedy.repetition_penalty")
        return Sample(
            temperature=0.0,
            repetition_penalty=penalty,
            logprob=message.logprob,
            logprobs=logprobs,
            mask=mask,
            row_masks=row_masks,
            grammar=grammar,
            grammar_from=grammar_from,
        )
    return Greedy(message.logprob, logprobs) if message.logprob or logprobs is not None else _GREEDY


def _sample_from_proto(message: output_pb2.SampleOutput, field: str) -> Sample:
    temperature = message.temperature if message.HasField("temperature") else 1.0
    top_p = message.top_p if message.HasField("top_p") else 1.0
    repetition = message.repetition_penalty if message.HasField("repetition_penalty") else 1.0
    if not 0.0 <= temperature < math.inf:
        raise InvalidRequest(f"temperature must be at least 0, not {temperature}", field=f"{field}.temperature")
    if not 0.0 < top_p <= 1.0:
        raise InvalidRequest(f"top_p must be above 0 and at most 1, not {top_p}", field=f"{field}.top_p")
    if not 0.0 <= message.min_p <= 1.0:
        raise InvalidRequest(f"min_p must be 0 to 1, not {message.min_p}", field=f"{field}.min_p")
    _check_repetition(repetition, f"{field}.repetition_penalty")
    for name in ("presence_penalty", "frequency_penalty"):
        if not math.isfinite(value := getattr(message, name)):
            raise InvalidRequest(f"{name} must be a finite number, not {value}", field=f"{field}.{name}")
    if len(message.bias) > MAX_BIASES:
        raise above("max_biases", MAX_BIASES, len(message.bias), "biases", f"{field}.bias")
    bias = tuple([(each.token_id, each.bias) for each in message.bias])
    if not all(math.isfinite(value) for _, value in bias):
        raise InvalidRequest("a bias must be a finite number; masks forbid tokens", field=f"{field}.bias")
    return Sample(
        temperature,
        message.top_k,
        top_p,
        message.min_p,
        bias,
        message.seed if message.HasField("seed") else None,
        message.logprob,
        repetition,
        message.presence_penalty,
        message.frequency_penalty,
        message.penalty_from,
        _logprobs_from_proto(message.logprobs) if message.HasField("logprobs") else None,
        *masks_from_proto(message, field),
        *grammar_of_output(message, field),
    )


def _next_token_from_proto(spec: output_pb2.OutputSpec) -> OutputSpec:
    if spec.positions != output_pb2.POSITIONS_UNSPECIFIED:
        raise InvalidRequest("positions must not be set: next_token defines them", field="output.positions")
    message = spec.next_token
    following = message.following_token if message.HasField("following_token") else None
    kind = NextToken(message.first_position, following, _logprobs_from_proto(message.logprobs))
    return OutputSpec(Positions.ALL, kind)


def _logprobs_to_proto(logprobs: RowLogprobs | None) -> output_pb2.RowLogprobs | None:
    if logprobs is None:
        return None
    return output_pb2.RowLogprobs(top_k=logprobs.top_k, token_ids=logprobs.token_ids)


def _logprobs_from_proto(message: output_pb2.RowLogprobs) -> RowLogprobs | None:
    """None if it requests nothing."""
    logprobs = RowLogprobs(message.top_k, tuple(message.token_ids))
    return logprobs if logprobs.top_k or logprobs.token_ids else None


def _accept_to_proto(kind: Accept) -> output_pb2.AcceptOutput:
    message = output_pb2.AcceptOutput()
    if kind.sampling is not None:
        message.sampling.CopyFrom(_sample_to_proto(kind.sampling))
    if kind.candidates:
        fill_tensor(message.draft_token_ids, kind.draft_token_ids)
        fill_tensor(message.draft_probabilities, kind.draft_probabilities)
    return message


def _accept_from_proto(spec: output_pb2.OutputSpec) -> OutputSpec:
    """Its rows are those of all positions until it is known how many were accepted."""
    message, field = spec.accept, "output.accept"
    if spec.positions != output_pb2.POSITIONS_UNSPECIFIED:
        raise InvalidRequest(
            "positions must not be set: accept returns the tokens that it emits", field="output.positions"
        )
    sampling = _sample_from_proto(message.sampling, f"{field}.sampling") if message.HasField("sampling") else None
    ids = _draft_tensor(message, "draft_token_ids", np.dtype(np.uint32))
    probabilities = _draft_tensor(message, "draft_probabilities", np.dtype(np.float32))
    if sampling is None and ids is None and probabilities is None:
        return _ACCEPT
    return OutputSpec(Positions.ALL, Accept(sampling, ids, probabilities), message.sampling.token_mask.data)


def _draft_tensor(message: output_pb2.AcceptOutput, name: str, dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
    """One that was sent."""
    if not message.HasField(name):
        return None
    field = f"output.accept.{name}"
    try:
        array = tensor_from_proto(getattr(message, name))
    except InvalidRequest as error:
        raise InvalidRequest(f"{name}: {error.message}", field=field) from None
    if array.dtype != dtype:
        raise InvalidRequest(f"{name} is a tensor of {'U32' if dtype.kind == 'u' else 'F32'}", field=field)
    return array


def _check_repetition(penalty: float, field: str) -> None:
    if not 0.0 < penalty < math.inf:
        raise InvalidRequest(f"repetition_penalty must be above 0, not {penalty}", field=field)
