"""A GenerateRequest of the protocol as a request of the scheduler.

Every field is served or refused by its name; a field of a newer version of the protocol is refused too. What a request
gets wrong is said in the words of vLLM, which clients of the router may know.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from ferrum_rpc.client import ExecutorInfo, Greedy, InvalidRequest, RowLogprobs, Sample
from ferrum_rpc.fronts.grammars import Constraint, constraint_of
from ferrum_rpc.scheduler import Detokenizer, TextRequest

SERVED: Final = {
    "GenerateRequest": {
        "request_id",
        "tokenized",
        "text",
        "sampling_params",
        "stream",
        "data_parallel_rank",
    },
    "SamplingParams": {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "max_tokens",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "n",
        "logprobs",
        "prompt_logprobs",
        "seed",
        "logit_bias",
        "truncate_prompt_tokens",
        "json_schema",
        "regex",
        "grammar",
        "json_object",
        "choice",
        # of the text, which the router makes of the token ids
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        # as the executor's grammars are
        "grammar_from_first_token",
    },
}
"""The fields that are served, by their message. The others are refused if they are set."""

MOST_TEXTS: Final = 128
MAX_REQUEST_ID: Final = 1024
MAX_STOPS: Final = 128
MAX_STOP_CHARACTERS: Final = 1024
"""Of stop strings, which are looked for after each token."""

ALL: Final = -1
"""Of log-probabilities: those of the whole vocabulary. Of ``truncate_prompt_tokens``: as many as the context has."""


class TextTokenizer(Detokenizer, Protocol):
    """The tokenizer of the model, for prompts that come as text and for stop strings. ``longest``: characters of its
    longest token."""

    longest: int

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A request for ``n`` texts of one prompt. ``text`` has no grammar yet: `constrained` adds the one of
    ``constraint``. ``top_logprobs``: of each token, the log-probabilities of so many others; None: none at all.
    ``prompt_logprobs``: the same of the prompt. ``stop_token_ids`` are those that the request names, which the answer
    reports; the model's own are not reported."""

    request_id: str
    text: TextRequest
    n: int
    stream: bool
    top_logprobs: int | None
    prompt_logprobs: int | None
    constraint: Constraint | None
    stop_token_ids: frozenset[int]

    def constrained(self, grammar: bytes) -> TextRequest:
        """The text's request, with a registered grammar."""
        output = replace(self.text.output, grammar=grammar, grammar_from=len(self.text.prompt))
        return replace(self.text, output=output)


def generation_of(
    request: Any, info: ExecutorInfo, max_context: int, tokenizer: TextTokenizer | None, tenant: str = ""
) -> Generation:
    """A ``GenerateRequest`` for a model whose longest context is ``max_context``. Raises `InvalidRequest` for a value
    that is invalid or not supported."""
    refuse_unserved(request)
    if (characters := len(request.request_id)) > MAX_REQUEST_ID:
        raise _wrong("request_id", f"must have at most {MAX_REQUEST_ID} characters, got {characters}")
    sampling = request.sampling_params
    refuse_unserved(sampling)
    if request.HasField("data_parallel_rank") and request.data_parallel_rank != 0:
        raise _wrong("data_parallel_rank", f"must be 0, got {request.data_parallel_rank}")
    prompt = _prompt(request, sampling, info, max_context, tokenizer)
    max_tokens = sampling.max_tokens if sampling.HasField("max_tokens") else max(1, max_context - len(prompt))
    if max_tokens < 1:
        raise _wrong("max_tokens", f"must be at least 1, got {max_tokens}")
    if sampling.min_tokens > max_tokens:
        raise _wrong("min_tokens", f"must be less than or equal to max_tokens={max_tokens}, got {sampling.min_tokens}")
    if "" in sampling.stop:
        raise InvalidRequest("stop cannot contain an empty string.", field="stop")
    if len(sampling.stop) > MAX_STOPS:
        raise _wrong("stop", f"must have at most {MAX_STOPS} strings, got {len(sampling.stop)}")
    if (longest := max(map(len, sampling.stop), default=0)) > MAX_STOP_CHARACTERS:
        raise _wrong("stop", f"must have at most {MAX_STOP_CHARACTERS} characters each, got {longest}")
    if sampling.stop and tokenizer is None:
        raise InvalidRequest("stop is not supported by this worker: it has no tokenizer", field="stop")
    if sampling.n > MOST_TEXTS:
        raise _wrong("n", f"must be at most {MOST_TEXTS}, got {sampling.n}")
    _check_vocabulary("stop_token_ids", sampling.stop_token_ids, info)
    stop_token_ids = frozenset(sampling.stop_token_ids)
    ends = stop_token_ids if sampling.ignore_eos else stop_token_ids.union(info.model.eos_token_ids)
    top_logprobs = _logprobs("logprobs", "sample", sampling, info)
    constraint = constraint_of(sampling, info.limits.max_grammar_bytes)
    text = TextRequest(
        prompt=prompt,
        max_tokens=max_tokens,
        output=_output(sampling, len(prompt), top_logprobs, info),
        min_tokens=sampling.min_tokens,
        stop=sorted(ends),
        stop_strings=tuple(sampling.stop),
        tenant=tenant,
    )
    return Generation(
        request_id=request.request_id,
        text=text,
        n=max(1, sampling.n),
        stream=request.stream,
        top_logprobs=top_logprobs,
        prompt_logprobs=_logprobs("prompt_logprobs", "prompt", sampling, info),
        constraint=constraint,
        stop_token_ids=stop_token_ids,
    )


def refuse_unserved(message: Any) -> None:
    """Raise `InvalidRequest` for a field of a message that is set and not served."""
    served = SERVED[message.DESCRIPTOR.name]
    for field, _ in message.ListFields():
        if field.name not in served:
            raise InvalidRequest(f"{field.name} is not supported by this worker", field=field.name)


def prompt_of(tokenized: Any, info: ExecutorInfo, max_context: int) -> list[int]:
    """The token ids of ``TokenizedInput``. Raises `InvalidRequest`."""
    return _checked_prompt(tokenized.input_ids, info, max_context)


def _prompt(
    request: Any, sampling: Any, info: ExecutorInfo, max_context: int, tokenizer: TextTokenizer | None
) -> list[int]:
    tokens: Sequence[int] = request.tokenized.input_ids
    if request.WhichOneof("input") == "text":
        tokens = _encoded(request.text, max_context, tokenizer)
    if sampling.HasField("truncate_prompt_tokens"):
        most = sampling.truncate_prompt_tokens
        if most != ALL and not 1 <= most <= max_context:
            raise _wrong("truncate_prompt_tokens", f"must be {ALL} or from 1 to {max_context}, got {most}")
        tokens = tokens[-(max_context if most == ALL else most) :]
    return _checked_prompt(tokens, info, max_context)


def _encoded(text: str, max_context: int, tokenizer: TextTokenizer | None) -> list[int]:
    if tokenizer is None:
        raise InvalidRequest("text is not supported by this worker: it has no tokenizer", field="text")
    if len(text) > (most := max_context * tokenizer.longest):
        words = f"The decoder prompt ({len(text)} characters) is longer than the maximum model length of {max_context}"
        raise InvalidRequest(f"{words} tokens, which are at most {most} characters.", field="text")
    return tokenizer.encode(text)


def _checked_prompt(tokens: Sequence[int], info: ExecutorInfo, max_context: int) -> list[int]:
    if not tokens:
        raise InvalidRequest("The decoder prompt cannot be empty", field="input_ids")
    if len(tokens) > max_context:
        words = f"The decoder prompt (length {len(tokens)}) is longer than the maximum model length of {max_context}."
        raise InvalidRequest(words, field="input_ids")
    if (largest := max(tokens)) >= info.model.vocab_size:
        raise InvalidRequest(f"Token id {largest} is out of vocabulary", field="input_ids")
    return list(tokens)


def _output(sampling: Any, prompt: int, top_logprobs: int | None, info: ExecutorInfo) -> Greedy | Sample:
    temperature = sampling.temperature if sampling.HasField("temperature") else 1.0
    top_p = sampling.top_p or 1.0
    repetition = sampling.repetition_penalty or 1.0
    _check_range("temperature", temperature, "must be non-negative", 0 <= temperature < math.inf)
    _check_range("top_p", top_p, "must be in (0, 1]", 0 < top_p <= 1)
    _check_range("min_p", sampling.min_p, "must be in [0, 1]", 0 <= sampling.min_p <= 1)
    _check_range("repetition_penalty", repetition, "must be greater than zero", 0 < repetition < math.inf)
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(sampling, name)
        _check_range(name, value, "must be in [-2, 2]", -2 <= value <= 2)
    bias = tuple(sorted(sampling.logit_bias.items()))
    _check_bias(bias, info)
    penalised = repetition != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
    logprobs = RowLogprobs(top_logprobs) if top_logprobs else None
    if temperature == 0 and not penalised and not bias:
        return Greedy(logprob=top_logprobs is not None, logprobs=logprobs)
    return Sample(
        temperature=temperature,
        top_k=min(sampling.top_k, info.model.vocab_size),
        top_p=top_p,
        min_p=sampling.min_p,
        bias=bias,
        seed=sampling.seed % 2**64 if sampling.HasField("seed") else None,
        logprob=top_logprobs is not None,
        logprobs=logprobs,
        repetition_penalty=repetition,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        penalty_from=prompt,  # the text's own tokens alone
    )


def _check_bias(bias: tuple[tuple[int, float], ...], info: ExecutorInfo) -> None:
    size = info.model.vocab_size
    foreign = [token for token, _ in bias if not 0 <= token < size]
    if foreign:
        words = f"token_id(s) {foreign} in logit_bias contain out-of-vocab token ids. Vocabulary size: {size}"
        raise InvalidRequest(words, field="logit_bias")
    for token, value in bias:
        _check_range("logit_bias", value, f"of token {token} must be in [-100, 100]", -100 <= value <= 100)
    if (most := info.limits.max_biases) and len(bias) > most:
        raise _wrong("logit_bias", f"must have at most {most} tokens, got {len(bias)}")


def _logprobs(name: str, kind: str, sampling: Any, info: ExecutorInfo) -> int | None:
    if not sampling.HasField(name):
        return None
    count = getattr(sampling, name)
    if count < ALL:
        raise _wrong(name, f"must be non-negative or {ALL}, got {count}")
    wanted, most = info.model.vocab_size if count == ALL else count, info.limits.max_top_tokens
    if wanted > most:
        words = f"Requested {kind} logprobs of {wanted}, which is greater than max allowed: {most}"
        raise InvalidRequest(words, field=name)
    return wanted


def _check_vocabulary(name: str, tokens: Sequence[int], info: ExecutorInfo) -> None:
    most = info.limits.max_stop_tokens
    if most and len(tokens) > most:
        raise _wrong(name, f"must have at most {most} tokens, got {len(tokens)}")
    foreign = sorted(token for token in tokens if token >= info.model.vocab_size)
    if foreign:
        raise _wrong(name, f"must be token ids below {info.model.vocab_size}, got {foreign[0]}")


def _check_range(name: str, value: float, rule: str, holds: bool) -> None:
    if not holds:
        raise _wrong(name, f"{rule}, got {value:g}")


def _wrong(name: str, words: str) -> InvalidRequest:
    return InvalidRequest(f"{name} {words}.", field=name)
