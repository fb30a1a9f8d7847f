"""Token masks by the client: registered once, found again where the executor has let them go, cut with the prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ferrum_rpc.client import ExecutorClient, FullLogits, Greedy, OutputSpec, Positions, Sample, sync
from ferrum_rpc.client import masks as client_masks
from ferrum_rpc.errors import ExecutorError, InvalidRequest, TokenMaskUnknown
from tests.serving import serve_identity
from tests.wiring import messages

VOCAB = 256
PROMPT = [7, 3, 9, 1]
both = pytest.mark.parametrize("session", [False, True], ids=["unary", "session"])


def allow(*tokens: int) -> np.ndarray:
    mask = np.zeros(VOCAB, bool)
    mask[list(tokens)] = True
    return mask


@both
async def test_masks_by_bools_and_by_words_choose_from_what_they_allow(session: bool) -> None:
    async with serve_identity() as served, ExecutorClient(served.target, session=session) as client:
        mask = await client.register_token_mask(allow(5, 77, 200))
        words = np.frombuffer(np.packbits(allow(5, 77, 200), bitorder="little").tobytes(), np.int32)
        sent = messages(client)
        assert await client.register_token_mask(words) == mask and not sent
        async with client.sequence() as sequence:
            row = (await sequence.prefill(PROMPT, FullLogits())).logits[0]
            best = max((5, 77, 200), key=lambda token: row[token])
            for kind in (Greedy(mask=mask), Sample(0.0, mask=mask), Sample(0.0, mask=mask, bias=((6, 1e6),))):
                assert (await sequence.decode(1, kind, truncate_to=3)).token == best
            drawn = [token async for token in sequence.generate([1], max_tokens=20, output=Sample(mask=mask, seed=2))]
            assert set(drawn) <= {5, 77, 200} and len(drawn) == 20


@both
async def test_masks_that_went_are_registered_again_and_a_program_sees_nothing(session: bool) -> None:
    async with serve_identity(max_token_masks=2) as served, ExecutorClient(served.target, session=session) as client:
        masks = [await client.register_token_mask(allow(number)) for number in range(6)]
        sent = messages(client)
        sequences = [client.sequence() for _ in range(2)]
        for number, mask in enumerate(masks):  # each is gone when its turn comes
            for sequence in sequences:
                assert (await sequence.prefill([1], Greedy(mask=mask))).token == number
        assert [type(each).__name__ for each in sent].count("RegisterTokenMaskRequest") == 4 + 2
        results = await client.forward(
            [sequences[0].item([1], Greedy(mask=masks[0])), sequences[1].item([1], Sample(mask=masks[1]))]
        )
        assert [each.token for each in results if not isinstance(each, ExecutorError)] == [0, 1]
        results = await client.forward(
            [sequences[0].item([1], Greedy(mask=masks[2])), sequences[1].item([1])], all_or_nothing=True
        )
        assert not isinstance(results[0], ExecutorError) and results[0].token == 2
        spec = OutputSpec(Positions.ALL, Greedy(row_masks=(masks[4], b"", masks[5])))
        answer = await sequences[0].verify([1, 2, 3], spec)
        assert answer.tokens[[0, 2]].tolist() == [4, 5]
        assert [each.length for each in sequences] == [11, 8]


async def test_a_mask_that_the_client_does_not_know_is_the_programs_to_register(monkeypatch: Any) -> None:
    async with serve_identity(max_token_masks=1) as served, ExecutorClient(served.target) as client:
        sequence = client.sequence()
        with pytest.raises(TokenMaskUnknown) as caught:
            await sequence.prefill(PROMPT, Greedy(mask=bytes(32)))
        assert caught.value.metadata["token_mask_id"] == bytes(32).hex()
        monkeypatch.setattr(client_masks, "KNOWN_BYTES", 64)  # two masks
        masks = [await client.register_token_mask(allow(number)) for number in range(3)]
        await sequence.prefill(PROMPT, Greedy(mask=masks[1]))
        with pytest.raises(TokenMaskUnknown):
            await sequence.decode(1, Greedy(mask=masks[0]))
        [bad, good] = await client.forward(
            [sequence.item([1], Greedy(mask=masks[0])), client.sequence().item([1], Greedy(mask=masks[2]))]
        )
        assert isinstance(bad, TokenMaskUnknown) and not isinstance(good, ExecutorError) and good.token == 2


async def test_row_masks_go_with_the_chunks_of_their_prompt() -> None:
    async with serve_identity() as served, ExecutorClient(served.target) as client:
        masks = [await client.register_token_mask(allow(number)) for number in range(10)]
        async with client.sequence() as sequence:
            everything = OutputSpec(Positions.ALL, Greedy(row_masks=tuple(masks)))
            assert (await sequence.prefill(range(10), everything, chunk=3)).tokens.tolist() == list(range(10))
            one = OutputSpec(Positions.LAST, Sample(row_masks=(masks[4],)))
            assert (await sequence.prefill(range(10), one, chunk=4)).token == 4
            for spec in (everything, OutputSpec(Positions.LAST, Greedy(row_masks=tuple(masks[:2])))):
                with pytest.raises(InvalidRequest) as caught:
                    await sequence.prefill(range(9), spec, chunk=4)
                assert caught.value.field == "output.row_mask_ids"
            assert sequence.length == 20


async def test_what_is_no_mask_is_refused_by_name() -> None:
    async with serve_identity() as served, ExecutorClient(served.target) as client:
        for wrong in (
            np.zeros((2, 2), bool),
            np.zeros(8, np.int64),
            [1, 2],
            "abc",
            allow(),
            allow(1)[:200],
            allow(1)[1:30],
        ):
            with pytest.raises(InvalidRequest) as caught:
                await client.register_token_mask(wrong)
            assert caught.value.field == "words"
        assert not len(served.server.state.masks)
        for kind in (Greedy(mask="x"), Sample(mask=None), Greedy(row_masks=[b""]), Sample(row_masks=(1,))):
            with pytest.raises(InvalidRequest) as caught:
                await client.sequence().prefill(PROMPT, kind)
            assert "token_mask_id" in str(caught.value.field)


async def test_a_client_without_asyncio_registers_too() -> None:
    import asyncio

    async with serve_identity() as served:

        def run() -> int:
            with sync.ExecutorClient(served.target) as client, client.sequence() as sequence:
                mask = client.register_token_mask(allow(3, 4))
                return sequence.prefill(PROMPT, Greedy(mask=mask)).token

        assert await asyncio.to_thread(run) in {3, 4}
