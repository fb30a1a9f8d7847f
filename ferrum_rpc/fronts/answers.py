"""Tokens as messages of the protocol.

As in vLLM, the tokens of a message are those that are new since the last one, and a stop token is one of them. The
last message of a text repeats the tokens of the message before it if the text is streamed, and has all of them if not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from ferrum_rpc.client import Answer, StreamToken
from ferrum_rpc.fronts.requests import Generation
from ferrum_rpc.scheduler import RequestEnd, TokenStream

FINISH_REASONS: Final = {
    RequestEnd.STOP: "stop",
    RequestEnd.LENGTH: "length",
    RequestEnd.CONTEXT: "length",
    RequestEnd.POOL: "length",
    RequestEnd.CANCELLED: "abort",
    RequestEnd.DEADLINE: "abort",
}
"""A text that ended with an error has a status in place of a reason."""


class ChoiceMessages:
    """Makes the messages of one of the texts of a request. ``scores``: those of the prompt, if they are wanted."""

    def __init__(self, generation: Generation, index: int, stream: TokenStream, scores: PromptScores | None) -> None:
        self._generation = generation
        self._index = index
        self._stream = stream
        self._scores = scores
        self._begun = False
        self._last: list[StreamToken] = []

    def chunk(self, tokens: list[StreamToken]) -> Any:
        """The message of new tokens, of which there is at least one."""
        first, self._begun, self._last = not self._begun, True, tokens
        return pb.GenerateResponse(
            chunk=pb.GenerateStreamChunk(
                **self._figures(tokens),
                token_ids=[each.token for each in tokens],
                input_logprobs=self._scores.message if first and self._scores is not None else None,
            )
        )

    def collect(self, tokens: list[StreamToken]) -> None:
        """Keep new tokens for the last message."""
        self._last = [*self._last, *tokens]

    def complete(self) -> Any:
        """The last message: the text has ended."""
        return pb.GenerateResponse(
            complete=pb.GenerateComplete(
                **self._figures(self._last),
                output_ids=[each.token for each in self._last],
                finish_reason=FINISH_REASONS.get(self._stream.end or RequestEnd.CANCELLED, "error"),
                input_logprobs=None if self._scores is None else self._scores.message,
                **self._matched(),
            )
        )

    def _figures(self, tokens: list[StreamToken]) -> dict[str, Any]:
        """What both kinds of messages have."""
        wanted = self._generation.top_logprobs
        return {
            "prompt_tokens": len(self._generation.text.prompt),
            "completion_tokens": len(tokens),
            "cached_tokens": self._stream.cached_tokens if self._scores is None else self._scores.cached_tokens,
            "index": self._index,
            "output_logprobs": None if wanted is None or not tokens else _output_logprobs(tokens, wanted),
        }

    def _matched(self) -> dict[str, Any]:
        if self._stream.end is not RequestEnd.STOP:
            return {}
        stop = self._stream.stop
        if isinstance(stop, str):
            return {"matched_stop_str": stop}
        return {"matched_token_id": stop} if stop in self._generation.stop_token_ids else {}


def _output_logprobs(tokens: Sequence[StreamToken], top: int) -> Any:
    found = pb.OutputLogProbs(
        token_ids=[each.token for each in tokens], token_logprobs=[each.logprob or 0.0 for each in tokens]
    )
    for each in tokens if top else ():
        if each.top_logprobs is not None:
            ids, values = each.top_logprobs
            found.top_logprobs.add(token_ids=ids.tolist(), values=values.tolist())
    return found


class PromptScores(NamedTuple):
    """The log-probabilities of a prompt, and how many of its tokens were cached before they were computed."""

    message: Any
    cached_tokens: int


def prompt_scores(prompt: Sequence[int], scores: Answer | None, top: int) -> PromptScores:
    """The scores of a prompt. The first token has none. ``scores``: those of the others; None if there are no others.
    ``top``: the log-probabilities of so many other tokens at each position."""
    return PromptScores(_input_logprobs(prompt, scores, top), 0 if scores is None else scores.cached_tokens)


def _input_logprobs(prompt: Sequence[int], scores: Answer | None, top: int) -> Any:
    found = pb.InputLogProbs(token_ids=prompt)
    found.token_logprobs.add()
    if top:
        found.top_logprobs.add()
    if scores is None:
        return found
    for value in scores.logprobs.tolist():
        found.token_logprobs.add(value=value)
    if top:
        ids, values = scores.top_logprobs
        for row_ids, row_values in zip(ids, values, strict=True):
            found.top_logprobs.add(token_ids=row_ids.tolist(), values=row_values.tolist())
    return found
