"""Tokens drawn by the executor, over the wire: what they depend on, what a replay draws, what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ferrum_rpc.errors import Reason
from ferrum_rpc.executor.v1 import forward_pb2, output_pb2
from ferrum_rpc.wire.rows import rows_from_proto
from tests.service.test_session import opened
from tests.support.serving import Served
from tests.support.wiring import chosen, full, item, prefill, refused

PROMPT = [7, 3, 9, 1]


def sample(positions: int = 0, bias: dict[int, float] | None = None, **fields: Any) -> output_pb2.OutputSpec:
    biases = [output_pb2.TokenBias(token_id=token, bias=value) for token, value in (bias or {}).items()]
    return output_pb2.OutputSpec(positions=positions, sample=output_pb2.SampleOutput(bias=biases, **fields))


def tokens_of(answer: Any) -> list[list[int]]:
    """Of each item of a batch's answer."""
    return [chosen(answer, result.output) for result in answer.results]


async def batch(served: Served, items: list[forward_pb2.ForwardItem]) -> list[list[int]]:
    answer = await served.unified(*items)
    assert not any(result.HasField("error") for result in answer.results)
    return tokens_of(answer)


async def logits(served: Served) -> np.ndarray:
    answer = await served.prefill(PROMPT, output=full())
    return rows_from_proto(answer.row_blocks)[0]["logits"][0]


async def test_the_largest_numbers_of_the_contract_are_served_and_harm_no_neighbour(served: Served) -> None:
    everything, most = output_pb2.POSITIONS_ALL, 2**32 - 1
    plain = item(PROMPT, output=sample(everything, seed=2**64 - 1))
    large = item(PROMPT, output=sample(everything, seed=2**64 - 1, top_k=most, penalty_from=most))
    [expected] = await batch(served, [plain])
    assert await batch(served, [large, plain]) == [expected, expected]


async def test_a_draw_is_of_its_seed_and_position_whatever_is_beside_it(served: Served) -> None:
    everything = output_pb2.POSITIONS_ALL
    mine = item(PROMPT, output=sample(everything, seed=11))
    [single] = await batch(served, [mine])
    beside = [
        item([5] * 9, output=sample(seed=11)),
        mine,
        item([2], output=full()),
        item(PROMPT[:2], output=sample(seed=1)),
    ]
    assert (await batch(served, beside[:2] + beside[3:]))[1] == single
    pieces, handle = [], None
    async with opened(served) as stream:
        for token in PROMPT:  # the same positions, one by one, in a session
            answer = await stream.forward(item([token], handle, output=sample(seed=11)))
            handle = answer.results[0].output.handle
            pieces += tokens_of(answer)[0]
    assert pieces == single
    assert (await batch(served, [item(PROMPT, output=sample(everything, seed=12))]))[0] != single


async def test_a_biased_draw_has_the_log_probability_of_the_row_as_it_was(served: Served) -> None:
    row = await logits(served)
    liked = {40: 500.0 - row[40], 41: 500.0 - row[41]}
    answer = await served.unified(
        *[item(PROMPT, output=sample(bias=liked, seed=seed, logprob=True)) for seed in range(20)]
    )
    tokens = [token for [token] in tokens_of(answer)]
    assert set(tokens) == {40, 41}
    expected = row - (np.log(np.exp(row.astype(np.float64) - row.max()).sum()) + row.max())
    np.testing.assert_allclose(rows_from_proto(answer.row_blocks)[0]["logprobs"], expected[tokens], atol=1e-4)


async def test_a_replay_draws_what_the_call_drew(served: Served) -> None:
    """With a seed or without."""
    handle = await prefill(served, PROMPT)
    for number, fields in enumerate([{}, {"seed": 3}]):
        sent = {"truncate_to": 4, "request_id": f"r{number}", "output": sample(**fields)}
        first, again = [await served.decode([1], handle, **sent) for _ in range(2)]
        assert again.output.replayed and not first.output.replayed
        assert first.row_blocks == again.row_blocks
        handle = first.output.handle
    await refused(served.decode([1], handle, request_id="r1", output=sample(seed=4)), Reason.REQUEST_ID_REUSED)


BAD = {
    "temperature": [{"temperature": -0.1}, {"temperature": math.nan}, {"temperature": math.inf}],
    "top_p": [{"top_p": 0.0}, {"top_p": 1.01}, {"top_p": math.nan}, {"top_p": -1.0}],
    "min_p": [{"min_p": -0.1}, {"min_p": 1.1}, {"min_p": math.nan}],
    "repetition_penalty": [{"repetition_penalty": each} for each in (0.0, -1.0, math.nan, math.inf)],
    "presence_penalty": [{"presence_penalty": math.nan}, {"presence_penalty": -math.inf}],
    "frequency_penalty": [{"frequency_penalty": math.inf}],
    "bias": [
        {"bias": {1: math.nan}},
        {"bias": {1: math.inf}},
        {"bias": {1 << 20: 1.0}},
        {"bias": dict.fromkeys(range(513), 1.0)},
    ],
}


async def test_a_bad_spec_is_refused_by_its_field_and_changes_nothing(served: Served) -> None:
    handle = await prefill(served, PROMPT)
    for field, specs in BAD.items():
        for fields in specs:
            error = await refused(served.decode([1], handle, output=sample(**fields)), Reason.INVALID_REQUEST)
            assert error.field == f"output.sample.{field}", fields
    await served.decode([1], handle)


async def test_as_many_biases_as_an_item_may_have_fit_a_call(served: Served) -> None:
    bias = {token: -1000.0 for token in range(256) if token != 77}
    items = [item(PROMPT, output=sample(bias=bias | {77: 1000.0})) for _ in range(8)]
    assert await batch(served, items) == [[77]] * 8


def penalised(row: np.ndarray, history: list[int], start: int, repetition: float, each: tuple[float, float]) -> int:
    """The token that is best by the definition; ``each``: presence and frequency."""
    presence, frequency = each
    row = row.astype(np.float64)
    for token in set(history):
        row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
    for token in history[start:]:
        row[token] -= frequency
    for token in set(history[start:]):
        row[token] -= presence
    return int(row.argmax())


async def test_penalties_count_what_the_sequence_holds_after_roll_backs_and_forks(served: Served) -> None:
    """What was taken back does not count, nor what a call that was refused would have fed."""
    spec = {"temperature": 0.0, "repetition_penalty": 1.7, "presence_penalty": 0.4, "frequency_penalty": 0.3}
    held, start = [5, 9, 9, 40], 2

    async def check(handle: Any, truncate_to: int | None, fed: list[int]) -> Any:
        """Feed ``fed`` with rows and with penalties, each from the same place; returns the handle."""
        del held[len(held) if truncate_to is None else truncate_to :]
        sent = item(fed, handle, truncate_to=truncate_to, output=full(positions=output_pb2.POSITIONS_ALL))
        raw = await served.unified(sent)
        rows = rows_from_proto(raw.row_blocks)[0]["logits"]
        drawn = sample(output_pb2.POSITIONS_ALL, penalty_from=start, **spec)
        again = item(fed, raw.results[0].output.handle, truncate_to=len(held), output=drawn)
        answer = await served.unified(again)
        expected = []
        for row, token in zip(rows, fed, strict=True):
            held.append(token)
            expected.append(penalised(row, held, start, 1.7, (0.4, 0.3)))
        assert tokens_of(answer) == [expected]
        return answer.results[0].output.handle

    handle = await prefill(served, held)
    handle = await check(handle, None, [7, 40, 7])
    handle = await check(handle, 5, [9, 1, 1, 1])
    await refused(served.decode([77], handle, truncate_to=99), Reason.TRUNCATE_BEYOND_LENGTH)
    handle = await check(handle, None, [2])
    fork = await served.fork(handle, count=1, at_length=6)
    parent = list(held)
    del held[6:]
    await check(fork.handles[0], None, [60, 61])
    held[:] = parent
    await check(handle, None, [3, 3])


async def test_a_greedy_penalty_is_a_sample_at_temperature_nothing(served: Served) -> None:
    greedy = output_pb2.OutputSpec(greedy=output_pb2.GreedyOutput(repetition_penalty=5.0, logprob=True))
    same = sample(temperature=0.0, repetition_penalty=5.0, logprob=True)
    first, second = await batch(served, [item(PROMPT, output=greedy), item(PROMPT, output=same)])
    assert first == second
    assert first == [penalised(await logits(served), PROMPT, 4, 5.0, (0.0, 0.0))]
