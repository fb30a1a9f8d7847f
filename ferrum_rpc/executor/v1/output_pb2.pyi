from ferrum_rpc.executor.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Positions(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POSITIONS_UNSPECIFIED: _ClassVar[Positions]
    POSITIONS_LAST: _ClassVar[Positions]
    POSITIONS_ALL: _ClassVar[Positions]
    POSITIONS_NONE: _ClassVar[Positions]
POSITIONS_UNSPECIFIED: Positions
POSITIONS_LAST: Positions
POSITIONS_ALL: Positions
POSITIONS_NONE: Positions

class OutputSpec(_message.Message):
    __slots__ = ("positions", "greedy", "sample", "top_tokens", "selected_tokens", "full_logits", "accept", "hidden_states", "next_token")
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    GREEDY_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SELECTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FULL_LOGITS_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
    NEXT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    positions: Positions
    greedy: GreedyOutput
    sample: SampleOutput
    top_tokens: TopTokensOutput
    selected_tokens: SelectedTokensOutput
    full_logits: FullLogitsOutput
    accept: AcceptOutput
    hidden_states: HiddenStatesOutput
    next_token: NextTokenOutput
    def __init__(self, positions: _Optional[_Union[Positions, str]] = ..., greedy: _Optional[_Union[GreedyOutput, _Mapping]] = ..., sample: _Optional[_Union[SampleOutput, _Mapping]] = ..., top_tokens: _Optional[_Union[TopTokensOutput, _Mapping]] = ..., selected_tokens: _Optional[_Union[SelectedTokensOutput, _Mapping]] = ..., full_logits: _Optional[_Union[FullLogitsOutput, _Mapping]] = ..., accept: _Optional[_Union[AcceptOutput, _Mapping]] = ..., hidden_states: _Optional[_Union[HiddenStatesOutput, _Mapping]] = ..., next_token: _Optional[_Union[NextTokenOutput, _Mapping]] = ...) -> None: ...

class GreedyOutput(_message.Message):
    __slots__ = ("token_mask_id", "repetition_penalty", "logprob", "logprobs", "token_mask", "row_mask_ids", "grammar_id", "grammar_from")
    TOKEN_MASK_ID_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_MASK_FIELD_NUMBER: _ClassVar[int]
    ROW_MASK_IDS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_ID_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FROM_FIELD_NUMBER: _ClassVar[int]
    token_mask_id: bytes
    repetition_penalty: float
    logprob: bool
    logprobs: RowLogprobs
    token_mask: _types_pb2.Tensor
    row_mask_ids: _containers.RepeatedScalarFieldContainer[bytes]
    grammar_id: bytes
    grammar_from: int
    def __init__(self, token_mask_id: _Optional[bytes] = ..., repetition_penalty: _Optional[float] = ..., logprob: bool = ..., logprobs: _Optional[_Union[RowLogprobs, _Mapping]] = ..., token_mask: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., row_mask_ids: _Optional[_Iterable[bytes]] = ..., grammar_id: _Optional[bytes] = ..., grammar_from: _Optional[int] = ...) -> None: ...

class RowLogprobs(_message.Message):
    __slots__ = ("top_k", "token_ids")
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    top_k: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, top_k: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SampleOutput(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "bias", "token_mask_id", "seed", "logprob", "penalty_from", "logprobs", "token_mask", "row_mask_ids", "grammar_id", "grammar_from")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_MASK_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    PENALTY_FROM_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_MASK_FIELD_NUMBER: _ClassVar[int]
    ROW_MASK_IDS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_ID_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FROM_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    bias: _containers.RepeatedCompositeFieldContainer[TokenBias]
    token_mask_id: bytes
    seed: int
    logprob: bool
    penalty_from: int
    logprobs: RowLogprobs
    token_mask: _types_pb2.Tensor
    row_mask_ids: _containers.RepeatedScalarFieldContainer[bytes]
    grammar_id: bytes
    grammar_from: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., bias: _Optional[_Iterable[_Union[TokenBias, _Mapping]]] = ..., token_mask_id: _Optional[bytes] = ..., seed: _Optional[int] = ..., logprob: bool = ..., penalty_from: _Optional[int] = ..., logprobs: _Optional[_Union[RowLogprobs, _Mapping]] = ..., token_mask: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., row_mask_ids: _Optional[_Iterable[bytes]] = ..., grammar_id: _Optional[bytes] = ..., grammar_from: _Optional[int] = ...) -> None: ...

class TokenBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class TopTokensOutput(_message.Message):
    __slots__ = ("k",)
    K_FIELD_NUMBER: _ClassVar[int]
    k: int
    def __init__(self, k: _Optional[int] = ...) -> None: ...

class SelectedTokensOutput(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class FullLogitsOutput(_message.Message):
    __slots__ = ("dtype",)
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    dtype: _types_pb2.DType
    def __init__(self, dtype: _Optional[_Union[_types_pb2.DType, str]] = ...) -> None: ...

class AcceptOutput(_message.Message):
    __slots__ = ("sampling", "draft_token_ids", "draft_probabilities")
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    sampling: SampleOutput
    draft_token_ids: _types_pb2.Tensor
    draft_probabilities: _types_pb2.Tensor
    def __init__(self, sampling: _Optional[_Union[SampleOutput, _Mapping]] = ..., draft_token_ids: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., draft_probabilities: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ...) -> None: ...

class NextTokenOutput(_message.Message):
    __slots__ = ("first_position", "following_token", "logprobs")
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    FOLLOWING_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    first_position: int
    following_token: int
    logprobs: RowLogprobs
    def __init__(self, first_position: _Optional[int] = ..., following_token: _Optional[int] = ..., logprobs: _Optional[_Union[RowLogprobs, _Mapping]] = ...) -> None: ...

class HiddenStatesOutput(_message.Message):
    __slots__ = ("dtype",)
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    dtype: _types_pb2.DType
    def __init__(self, dtype: _Optional[_Union[_types_pb2.DType, str]] = ...) -> None: ...

class RowBlock(_message.Message):
    __slots__ = ("tokens", "top_tokens", "selected_tokens", "logits", "hidden_states")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SELECTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGITS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
    tokens: TokenRows
    top_tokens: TopTokenRows
    selected_tokens: SelectedTokenRows
    logits: LogitRows
    hidden_states: HiddenStateRows
    def __init__(self, tokens: _Optional[_Union[TokenRows, _Mapping]] = ..., top_tokens: _Optional[_Union[TopTokenRows, _Mapping]] = ..., selected_tokens: _Optional[_Union[SelectedTokenRows, _Mapping]] = ..., logits: _Optional[_Union[LogitRows, _Mapping]] = ..., hidden_states: _Optional[_Union[HiddenStateRows, _Mapping]] = ...) -> None: ...

class TokenRows(_message.Message):
    __slots__ = ("token_ids", "logprobs", "top_token_ids", "top_logprobs", "selected_logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SELECTED_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _types_pb2.Tensor
    logprobs: _types_pb2.Tensor
    top_token_ids: _types_pb2.Tensor
    top_logprobs: _types_pb2.Tensor
    selected_logprobs: _types_pb2.Tensor
    def __init__(self, token_ids: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., logprobs: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., top_token_ids: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., top_logprobs: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., selected_logprobs: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ...) -> None: ...

class TopTokenRows(_message.Message):
    __slots__ = ("token_ids", "logits", "logsumexp")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGITS_FIELD_NUMBER: _ClassVar[int]
    LOGSUMEXP_FIELD_NUMBER: _ClassVar[int]
    token_ids: _types_pb2.Tensor
    logits: _types_pb2.Tensor
    logsumexp: _types_pb2.Tensor
    def __init__(self, token_ids: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., logits: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., logsumexp: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ...) -> None: ...

class SelectedTokenRows(_message.Message):
    __slots__ = ("logits", "logsumexp")
    LOGITS_FIELD_NUMBER: _ClassVar[int]
    LOGSUMEXP_FIELD_NUMBER: _ClassVar[int]
    logits: _types_pb2.Tensor
    logsumexp: _types_pb2.Tensor
    def __init__(self, logits: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., logsumexp: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ...) -> None: ...

class LogitRows(_message.Message):
    __slots__ = ("logits",)
    LOGITS_FIELD_NUMBER: _ClassVar[int]
    logits: _types_pb2.Tensor
    def __init__(self, logits: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ...) -> None: ...

class HiddenStateRows(_message.Message):
    __slots__ = ("hidden_states",)
    HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
    hidden_states: _types_pb2.Tensor
    def __init__(self, hidden_states: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ...) -> None: ...

class RowRange(_message.Message):
    __slots__ = ("block", "first", "count")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    block: int
    first: int
    count: int
    def __init__(self, block: _Optional[int] = ..., first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...
