"""Each field of the protocol's request: what it becomes, or the refusal that names it. None is dropped silently."""

from __future__ import annotations

import json
import math
from operator import attrgetter
from typing import Any

import pytest

from ferrum_rpc.client import GrammarKind, Greedy, InvalidRequest, RowLogprobs, Sample
from ferrum_rpc.client.info import ExecutorInfo
from ferrum_rpc.core import DeviceInfo, ModelInfo
from ferrum_rpc.fronts.requests import SERVED, Generation, generation_of
from tests.support.serving import LIMITS

pb = pytest.importorskip("smg_grpc_proto.generated.vllm_engine_pb2", reason="smg-grpc-proto is not installed")

END, VOCABULARY, CONTEXT = 256, 264, 100
MODEL = ModelInfo("m", "a", VOCABULARY, CONTEXT, 1, 8, 1, 1, 8, 1, "f32", "f32", eos_token_ids=(END,))
INFO = ExecutorInfo("", 7, 1, "i", MODEL, 16, 64, LIMITS, frozenset(), DeviceInfo("cpu", "", 0, 1, ""))
PROMPT = [5, 6, 7]
MOST = LIMITS.max_grammar_bytes


class Bytes:
    longest = 1

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Any) -> str:
        return bytes(tokens).decode()


def request(text: str | None = None, prompt: list[int] = PROMPT, stream: bool = False, **sampling: Any) -> Any:
    made = pb.GenerateRequest(request_id="r", stream=stream, sampling_params=pb.SamplingParams(**sampling))
    if text is None:
        made.tokenized.input_ids.extend(prompt)
    else:
        made.text = text
    return made


def read(made: Any, tokenizer: Any = None) -> Generation:
    return generation_of(made, INFO, CONTEXT, tokenizer or Bytes())


def output(**sampling: Any) -> Greedy | Sample:
    return read(request(**sampling)).text.output


# --- every field ------------------------------------------------------------------------------------------------------

REFUSED: dict[str, dict[str, Any]] = {
    "GenerateRequest": {
        "kv_transfer_params": {"remote_host": "h"},
        "kv_transfer_params_json": "{}",
        "mm_inputs": {"im_token_id": 3},
        "extra_mm_inputs": [{"im_token_id": 3}],
        "media_refs": {"items": [{"url": "data:"}]},
    },
    "SamplingParams": {"structural_tag": "{}"},
}
"""A value for each field that is refused."""


@pytest.mark.parametrize("name", REFUSED)
def test_every_field_of_the_protocol_is_either_served_or_refused(name: str) -> None:
    fields = set(pb.DESCRIPTOR.message_types_by_name[name].fields_by_name)
    assert SERVED[name] | REFUSED[name].keys() == fields
    assert SERVED[name].isdisjoint(REFUSED[name])


@pytest.mark.parametrize(("message", "field"), [(message, field) for message in REFUSED for field in REFUSED[message]])
def test_a_field_that_is_not_served_is_refused_by_its_name(message: str, field: str) -> None:
    made = request()
    given = {field: REFUSED[message][field]}
    if message == "SamplingParams":
        given = {"sampling_params": pb.SamplingParams(**given)}
    made.MergeFrom(pb.GenerateRequest(**given))
    with pytest.raises(InvalidRequest, match=f"{field} is not supported") as refusal:
        read(made)
    assert refusal.value.field == field


CHANGES: dict[str, tuple[Any, str, Any]] = {
    "temperature": (0.5, "text.output.temperature", 0.5),
    "top_p": (0.5, "text.output.top_p", 0.5),
    "top_k": (9, "text.output.top_k", 9),
    "min_p": (0.5, "text.output.min_p", 0.5),
    "frequency_penalty": (1.5, "text.output.frequency_penalty", 1.5),
    "presence_penalty": (-1.5, "text.output.presence_penalty", -1.5),
    "repetition_penalty": (1.5, "text.output.repetition_penalty", 1.5),
    "max_tokens": (7, "text.max_tokens", 7),
    "min_tokens": (3, "text.min_tokens", 3),
    "stop": (["a", "b"], "text.stop_strings", ("a", "b")),
    "stop_token_ids": ([9, 3], "text.stop", (3, 9, END)),
    "ignore_eos": (True, "text.stop", ()),
    "n": (4, "n", 4),
    "logprobs": (2, "text.output.logprobs", RowLogprobs(2)),
    "prompt_logprobs": (0, "prompt_logprobs", 0),
    "seed": (-2, "text.output.seed", 2**64 - 2),
    "logit_bias": ({9: 1.5, 3: -2.0}, "text.output.bias", ((3, -2.0), (9, 1.5))),
    "truncate_prompt_tokens": (2, "text.prompt", (6, 7)),
    "json_schema": ("{}", "constraint", (GrammarKind.JSON_SCHEMA, "{}")),
    "regex": ("a+", "constraint", (GrammarKind.REGEX, "a+")),
    "grammar": ('start: "a"', "constraint", (GrammarKind.LARK, 'start: "a"')),
    "json_object": (True, "constraint", (GrammarKind.JSON_SCHEMA, '{"type": "object"}')),
    "choice": ({"choices": ["a", 'b"', "a"]}, "constraint", (GrammarKind.LARK, 'start: CHOICE\nCHOICE: "a" | "b\\""')),
}
"""A value for each field that changes what is computed, and what becomes what."""

OF_THE_TEXT = {"skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"}
"""The router makes the text of the token ids."""

AS_IT_IS = {"grammar_from_first_token"}


def test_every_served_field_of_sampling_is_tried_here() -> None:
    assert CHANGES.keys() | OF_THE_TEXT | AS_IT_IS == SERVED["SamplingParams"]


@pytest.mark.parametrize("field", CHANGES)
def test_a_field_changes_what_it_says_and_nothing_without_it(field: str) -> None:
    given, name, expected = CHANGES[field]
    found = attrgetter(name)
    other = {"json_schema": '{"a": 1}'} if field == "json_object" else {"regex": "x"}
    assert found(read(request(**{field: given}))) == expected != found(read(request(**other)))


@pytest.mark.parametrize("field", sorted(OF_THE_TEXT | AS_IT_IS))
def test_fields_of_the_text_leave_the_tokens_as_they_are(field: str) -> None:
    assert read(request(**{field: True})) == read(request())


def test_the_rest_of_a_request() -> None:
    made = request(stream=True)
    made.data_parallel_rank = 0
    found = read(made)
    assert (found.request_id, found.stream, found.n) == ("r", True, 1)
    assert found.text.prompt == tuple(PROMPT)
    assert read(request("héy")).text.prompt == tuple("héy".encode())


# --- defaults ---------------------------------------------------------------------------------------------------------


def test_a_request_without_parameters_has_the_protocols_defaults() -> None:
    made = pb.GenerateRequest()
    made.tokenized.input_ids.extend(PROMPT)
    found = read(made)
    assert found.text.output == Sample(penalty_from=3)
    assert found.text.max_tokens == CONTEXT - len(PROMPT)
    assert (found.text.stop, found.text.stop_strings, found.n) == ((END,), (), 1)
    assert (found.top_logprobs, found.prompt_logprobs, found.constraint) == (None, None, None)
    full = read(request(prompt=[1] * CONTEXT))
    assert full.text.max_tokens == 1


def test_temperature_0_is_greedy_and_keeps_penalties_and_biases() -> None:
    assert output(temperature=0.0, top_p=0.3, seed=4) == Greedy()
    assert output(temperature=0.0, logprobs=0) == Greedy(logprob=True)
    assert output(temperature=0.0, logprobs=5) == Greedy(logprob=True, logprobs=RowLogprobs(5))
    penalised = output(temperature=0.0, presence_penalty=1.0)
    assert penalised == Sample(temperature=0.0, presence_penalty=1.0, penalty_from=3)
    assert output(temperature=0.0, logit_bias={3: 1.0}) == Sample(temperature=0.0, bias=((3, 1.0),), penalty_from=3)


def test_a_grammar_begins_behind_the_prompt() -> None:
    found = read(request(regex="a"))
    constrained = found.constrained(b"g" * 32)
    assert (constrained.output.grammar, constrained.output.grammar_from) == (b"g" * 32, 3)
    assert constrained.prompt == found.text.prompt


def test_ebnf_becomes_lark() -> None:
    found = read(request(grammar='root ::= "ab"')).constraint
    assert found == (GrammarKind.LARK, 'start: r0\nr0: "a" "b"')


def test_all_log_probabilities_are_those_of_the_vocabulary() -> None:
    assert LIMITS.max_top_tokens < VOCABULARY
    with pytest.raises(InvalidRequest, match="sample logprobs of 264, which is greater than max allowed: 256"):
        read(request(logprobs=-1))


# --- what is wrong, in the words of the protocol's own engine ---------------------------------------------------------

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1.0}, "temperature must be non-negative, got -1."),
    ({"temperature": math.nan}, "temperature must be non-negative, got nan."),
    ({"temperature": math.inf}, "temperature must be non-negative, got inf."),
    ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5."),
    ({"top_p": math.nan}, r"top_p must be in \(0, 1\], got nan."),
    ({"min_p": -0.5}, r"min_p must be in \[0, 1\], got -0.5."),
    ({"presence_penalty": 3.0}, r"presence_penalty must be in \[-2, 2\], got 3."),
    ({"frequency_penalty": math.nan}, r"frequency_penalty must be in \[-2, 2\], got nan."),
    ({"repetition_penalty": -1.0}, "repetition_penalty must be greater than zero, got -1."),
    ({"max_tokens": 0}, "max_tokens must be at least 1, got 0."),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens must be less than or equal to max_tokens=4, got 5."),
    ({"stop": ["a", ""]}, "stop cannot contain an empty string."),
    ({"stop": ["a"] * 129}, "stop must have at most 128 strings, got 129."),
    ({"stop": ["a" * 1025]}, "stop must have at most 1024 characters each, got 1025."),
    ({"stop_token_ids": [264]}, "stop_token_ids must be token ids below 264, got 264."),
    ({"stop_token_ids": range(260)}, "stop_token_ids must have at most 256 tokens, got 260."),
    ({"n": 129}, "n must be at most 128, got 129."),
    ({"logprobs": -2}, "logprobs must be non-negative or -1, got -2."),
    ({"logprobs": 257}, "Requested sample logprobs of 257, which is greater than max allowed: 256"),
    ({"prompt_logprobs": 257}, "Requested prompt logprobs of 257, which is greater than max allowed: 256"),
    ({"logit_bias": {264: 1.0}}, r"token_id\(s\) \[264\] in logit_bias contain out-of-vocab .* Vocabulary size: 264"),
    ({"logit_bias": {-1: 1.0}}, r"token_id\(s\) \[-1\] in logit_bias contain out-of-vocab token ids"),
    ({"logit_bias": {3: 101.0}}, r"logit_bias of token 3 must be in \[-100, 100\], got 101."),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be -1 or from 1 to 100, got 0."),
    ({"json_schema": "{"}, "json_schema is not JSON"),
    ({"json_schema": "[]"}, "json_schema must be an object"),
    ({"choice": {"choices": []}}, "choice must be a list of texts that are not empty"),
    ({"choice": {"choices": ["a", ""]}}, "choice must be a list of texts that are not empty"),
    ({"grammar": "root ::= other"}, "the rule 'other' is not defined"),
    ({"json_schema": json.dumps("s" * MOST)}, f"json_schema must have at most {MOST} bytes, got"),
    ({"choice": {"choices": ["é" * MOST]}}, f"choice must have at most {MOST} bytes, got"),
    ({"json_schema": '{"items":' * 9000 + "{}" + "}" * 9000}, "json_schema is nested too deeply"),
    ({"grammar": f"root ::= {'(' * 9000}{')' * 9000}"}, "grammar is nested too deeply"),
]


@pytest.mark.parametrize(("sampling", "words"), WRONG, ids=[" ".join(sampling) for sampling, _ in WRONG])
def test_a_wrong_value_is_refused_in_the_engines_words(sampling: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        read(request(**sampling))


def test_wrong_prompts_are_refused_in_the_engines_words() -> None:
    for prompt, words in (
        ([], "The decoder prompt cannot be empty"),
        ([1] * 101, r"The decoder prompt \(length 101\) is longer than the maximum model length of 100."),
        ([1, 264], "Token id 264 is out of vocabulary"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            read(request(prompt=prompt))
    with pytest.raises(InvalidRequest, match="cannot be empty"):
        read(pb.GenerateRequest())
    with pytest.raises(InvalidRequest, match=r"\(101 characters\) is longer than the maximum .* of 100 tokens"):
        read(request("x" * 101))
    for field, value, words in (
        ("request_id", "r" * 1025, "request_id must have at most 1024 characters, got 1025"),
        ("data_parallel_rank", 1, r"data_parallel_rank must be 0, got 1\."),
    ):
        made = request()
        setattr(made, field, value)
        with pytest.raises(InvalidRequest, match=words):
            read(made)


def test_a_prompt_is_cut_at_its_beginning() -> None:
    assert len(read(request(prompt=[1] * 150, truncate_prompt_tokens=-1)).text.prompt) == CONTEXT
    assert read(request(prompt=[1, 2], truncate_prompt_tokens=5)).text.prompt == (1, 2)
