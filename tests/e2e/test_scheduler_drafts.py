"""Speculation in the scheduler: whatever guesses, in whatever company and pool, texts are those of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from clients.scheduler.options import parse
from clients.scheduler.program import serve
from clients.scheduler.text import TokenizerError
from ferrum_rpc.client import Capability, ExecutorClient, Greedy, Sample
from ferrum_rpc.config import ModelSettings
from ferrum_rpc.scheduler.counts import RunCounts
from ferrum_rpc.scheduler.request import Request, RequestEnd
from ferrum_rpc.scheduler.runs import SHORT
from ferrum_rpc.scheduler.speculation import AGAIN, REST, Drafter, DraftModel, Lookup, Speculation, looked_up
from tests.support.scheduling import (
    DEMO,
    SHAPES,
    Watcher,
    assert_nothing_is_left,
    emptied,
    identity,
    of_one,
    one_at_a_time,
    prompts,
    requests,
    schedule,
)
from tests.support.serving import serve_identity, serve_model
from tests.support.states import FREE_TRUNCATION_TOKENS, with_states

NEW_TOKENS = 30
SAMPLED = Sample(0.8, 20, 0.9, seed=3)


class Fortune:
    """Guesses that are right, wrong, or right up to somewhere."""

    def __init__(self, texts: list[list[int]], share: float) -> None:
        self._texts = texts
        self._share = share
        self._dice = random.Random(5)
        self.forgotten: set[int] = set()
        self.longest = 0

    async def draft(self, request: Request, most: int) -> list[int]:
        assert request.owed == 1, "a draft goes on behind the token that is fed with it"
        self.longest = max(self.longest, most)
        at = len(request.generated)
        right = self._texts[request.index][at : at + most]
        return [each if self._dice.random() < self._share else (each + 1) % 256 for each in right]

    async def forget(self, gone: Iterable[Request]) -> None:
        self.forgotten |= {each.index for each in gone}


async def speculate(target: str, work: list[Request], drafter: Drafter | None, **how: Any) -> RunCounts:
    return await schedule(target, work, drafter=drafter, **{"session": True, **how})


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return of_one(lambda served: one_at_a_time(served.target, prompts(12), NEW_TOKENS))


@pytest.mark.parametrize(
    ("share", "shape", "session"),
    [
        (0.0, "a roomy pool", True),
        (0.7, "a roomy pool", False),
        (0.7, "a token a step", True),
        (0.7, "a pool for one, in chunks", True),
        (1.0, "a roomy pool", True),
    ],
)
async def test_texts_depend_neither_on_the_guesses_nor_on_budget_or_pool(expected, share, shape, session) -> None:
    """Drafts go where there is room, and preempt nobody who would not have been without."""
    blocks, budget = SHAPES[shape]
    async with emptied(kv_blocks=max(blocks, 19)) as served:
        work, drafter = requests(prompts(12), NEW_TOKENS), Fortune(expected, share)
        run = await speculate(served.target, work, drafter, budget=budget, session=session)
        assert [each.generated for each in work] == expected
        assert drafter.forgotten == set(range(12))
        if shape == "a roomy pool":
            assert run.drafted > 0 and run.trips + run.accepted == 12 * (NEW_TOKENS - 1) == run.decode_tokens
        if share in (0.0, 1.0):
            assert run.accepted == share * run.drafted
        if share == 1.0:
            assert run.trips < 0.5 * run.decode_tokens


async def test_a_draft_that_is_not_accepted_costs_no_tokens_that_are_fed_again(expected) -> None:
    async with emptied(kv_blocks=512, made=with_states(8)) as served:
        work, drafter = requests(prompts(12), NEW_TOKENS), Fortune(expected, 1.0)
        await speculate(served.target, work, drafter)
        assert [each.generated for each in work] == expected
        assert drafter.longest == FREE_TRUNCATION_TOKENS


@pytest.mark.parametrize(
    ("shape", "session"),
    [("a roomy pool", True), ("a roomy pool", False), ("two items a step", True), ("a pool for three", True)],
)
async def test_texts_do_not_depend_on_which_of_them_come_by_runs(expected, shape, session, monkeypatch) -> None:
    """Some have no guesses and others bad ones, and the faster way is another one each time."""
    dice = random.Random(3)
    monkeypatch.setattr(Speculation, "turn", lambda _: (dice.random() < 0.8, 12))

    class Some(Fortune):
        async def draft(self, request: Request, most: int) -> list[int]:
            return await super().draft(request, most) if request.index % 3 else []

    blocks, budget = SHAPES[shape]
    async with emptied(kv_blocks=blocks) as served:
        work = requests(prompts(12), NEW_TOKENS)
        run = await speculate(served.target, work, Some(expected, 0.5), budget=budget, session=session, run_tokens=5)
        assert [each.generated for each in work] == expected
        assert 0 < run.accepted < run.drafted and run.rebuilds == 0
        assert run.trips + run.accepted < run.decode_tokens, "the others came by runs"


async def test_a_text_with_drafts_does_not_wait_for_a_chain_of_anothers_runs(expected, monkeypatch) -> None:
    """All of a step with drafts wait for its longest run: that is short, and no other one follows it."""
    monkeypatch.setattr(Speculation, "turn", lambda _: (True, 12))

    class OfOne(Fortune):
        async def draft(self, request: Request, most: int) -> list[int]:
            return await super().draft(request, min(most, 1)) if request.index == 0 else []

    async with identity(kv_blocks=512) as served:
        work, watcher = requests(prompts(2), NEW_TOKENS), Watcher()
        work[1].max_new_tokens = 200
        await speculate(served.target, work, OfOne(expected, 1.0), run_tokens=8, watcher=watcher)
        assert work[0].generated == expected[0]
    places = [at for at, (index, _) in enumerate(watcher.tokens) if index == 0]
    between = [after - before - 1 for before, after in pairwise(places)]
    assert max(between[:-2]) <= SHORT, "its last token has no draft"


def test_the_faster_way_is_taken_and_the_other_tried_again() -> None:
    speculation = Speculation(Lookup(), 8, runs=True)
    for tokens in (1, REST - 1):
        assert speculation.turn() == (True, REST)
        speculation.took(1.0, tokens, drafts=True)
    assert speculation.turn() == (False, REST)
    speculation.took(1.0, REST, drafts=False)
    assert speculation.turn() == (False, AGAIN - REST)
    speculation.took(1.0, AGAIN - REST, drafts=False)
    assert speculation.turn() == (True, REST)
    speculation.took(0.1, 1, drafts=True)
    assert speculation.turn() == (False, AGAIN)
    speculation.took(60.0, REST, drafts=False)
    assert speculation.turn() == (True, REST)
    speculation.took(0.1, AGAIN, drafts=True)
    assert speculation.turn() == (False, REST)
    speculation.took(0.1, 1, drafts=False)
    assert speculation.turn() == (True, REST)
    assert Speculation(Lookup(), 8).turn() == (True, None)


async def test_a_request_rests_behind_a_draft_of_which_nothing_was_right() -> None:
    speculation, request = Speculation(Lookup(), 8, runs=True), Request(0, (1, 2, 1, 2, 1), 100)
    await speculation.draft([request], 1000)
    assert request.draft == (2, 1)
    request.generated = [7, 1, 2]
    speculation.verified(request, 2, 0)
    drafts = []
    for _ in range(REST + 1):
        await speculation.draft([request], 1000)
        drafts.append(len(request.draft))
        request.generated.append(1)
    assert not any(drafts[:REST]) and drafts[REST] == 1


async def test_no_draft_comes_before_min_tokens() -> None:
    """It would be verified without the mask that forbids the stops until then."""
    speculation, drafted = Speculation(Lookup(), 8), list[bool]()
    request = Request(0, (1, 2) * 4, 100, min_new_tokens=2)
    for token in (1, 2, 1):
        await speculation.draft([request], 1000)
        drafted.append(bool(request.draft))
        request.generated.append(token)
    assert drafted == [False, False, True]


@pytest.mark.parametrize(
    ("drafts", "sampling"),
    [
        ("lookup", SAMPLED),
        ("a model of its own kind", Greedy()),
        ("the same without runs", Greedy()),
        ("another model", SAMPLED),
    ],
)
async def test_looked_up_and_drawn_up_guesses_change_no_text(drafts: str, sampling: Greedy | Sample) -> None:
    same = drafts in ("a model of its own kind", "the same without runs")
    async with (
        identity(kv_blocks=512) as served,
        serve_identity(kv_blocks=512, positional=same, head_dim=64 if same else 8, block_size=4) as other,
        ExecutorClient(other.target, session=True) as small,
    ):
        plain, work = requests(prompts(6), NEW_TOKENS), requests(prompts(6), NEW_TOKENS)
        await speculate(served.target, plain, None, sampling=sampling)
        info = await small.info()
        if drafts == "the same without runs":
            info = replace(info, capabilities=info.capabilities - {Capability.RUN})
        drafter = Lookup() if drafts == "lookup" else DraftModel(small, info)
        run = await speculate(served.target, work, drafter, sampling=sampling)
        assert [each.generated for each in work] == [each.generated for each in plain]
        assert run.drafted > 0
        if same and isinstance(sampling, Greedy):
            assert run.accepted == run.drafted
        await assert_nothing_is_left(served)
        await assert_nothing_is_left(other)


async def test_a_stop_within_a_draft_ends_the_text_there(expected: list[list[int]]) -> None:
    async with emptied(kv_blocks=512) as served:
        stop = expected[0][7]
        work = requests(prompts(1), NEW_TOKENS)
        await speculate(served.target, work, Fortune(expected, 1.0), stop=frozenset({stop}))
        assert work[0].generated == expected[0][: expected[0].index(stop)] and work[0].ending is RequestEnd.STOP


async def test_a_draft_executor_that_goes_away_leaves_plain_decoding(expected: list[list[int]]) -> None:
    async with identity(kv_blocks=512) as served:
        async with identity(kv_blocks=6, max_context=24) as other, ExecutorClient(other.target) as small:
            work = requests(prompts(12), NEW_TOKENS)
            await speculate(served.target, work, DraftModel(small, await small.info()))
        assert [each.generated for each in work] == expected


def test_what_followed_last_time_is_looked_up() -> None:
    text = [1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3]
    assert looked_up(text, 3) == [4, 9, 2]  # the longest match wins over the latest
    assert looked_up([7, 5, 7, 6, 7], 2) == [6, 7]
    assert looked_up([1, 1, 1], 4) == [1]
    assert looked_up([1, 2, 3], 4) == looked_up([1], 4) == looked_up([], 4) == []


async def test_drafts_grow_while_they_are_right_and_shrink_when_they_are_not() -> None:
    asked: list[int] = []

    class Asked(Lookup):
        async def draft(self, request: Request, most: int) -> list[int]:
            asked.append(most)
            return [0] * most

    speculation, request = Speculation(Asked(), 10), Request(0, (1,), 100)
    for accepted in (4, 8, 3, 0, 1):
        await speculation.draft([request], 1000)
        speculation.verified(request, len(request.draft), accepted)
    assert asked == [4, 8, 10, 4, 1]
    request.generated = [0] * 97
    await speculation.draft([request], 1000)
    await speculation.draft([request], 98)
    assert asked[5:] == [2] and request.draft == ()


@pytest.mark.parametrize("way", ["--speculate", "--draft"])
async def test_the_program_speculates_and_says_what_it_gained(capsys: pytest.CaptureFixture[str], way: str) -> None:
    if not (DEMO / "model.safetensors").is_file():
        pytest.skip("the demo models are not in this checkout")

    def model(name: str) -> ModelSettings:
        return ModelSettings(path=str(DEMO.parent / name), device="cpu", dtype="float32", kv_blocks=256)

    async with serve_model(model("demo")) as served, serve_model(model("demo-draft")) as draft:
        what = ["--target", served.target, "--demo", "--greedy", "--max-new-tokens", "24", "--plain"]
        what += ["--run-tokens", "0"]  # a trip a token, which drafts spare
        plain = await serve(parse(what))
        assert "tokens a trip" not in capsys.readouterr().out
        run = await serve(parse([*what, way, "lookup" if way == "--speculate" else draft.target]))
        assert [each.generated for each in run.requests] == [each.generated for each in plain.requests]
        assert f"{run.accepted} of {run.drafted} tokens accepted" in capsys.readouterr().out
        assert run.steps < plain.steps if way == "--draft" else run.steps <= plain.steps
        for each in (served, draft):
            await assert_nothing_is_left(each)


async def test_a_draft_in_other_tokens_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    async with serve_identity(kv_blocks=64) as served, serve_identity(kv_blocks=64, vocab_size=300) as other:
        with pytest.raises(TokenizerError, match="300"):
            await serve(parse(["--target", served.target, "--draft", other.target, "--plain"]))
