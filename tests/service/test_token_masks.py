"""Token masks over the wire: registered, named, evicted, of each row, and what is refused."""

from __future__ import annotations

import asyncio
from itertools import product
from typing import Any

import numpy as np

from ferrum_rpc.errors import Reason
from ferrum_rpc.executor.v1 import forward_pb2, info_pb2, output_pb2, types_pb2
from ferrum_rpc.wire.masks import id_of, pack_mask, words_to_proto
from ferrum_rpc.wire.rows import rows_from_proto
from ferrum_rpc.wire.status import error_from_status
from tests.service.test_session import opened
from tests.support.inside import recorded, uses
from tests.support.process import dial, serving
from tests.support.serving import Served, gated, serve_identity
from tests.support.wiring import chosen, full, item, pb, prefill, refused, until

ALL = output_pb2.POSITIONS_ALL
I8, I32 = types_pb2.D_TYPE_I8, types_pb2.D_TYPE_I32
PROMPT = [7, 3, 9, 1]
VOCAB = 256


def words(*allowed: int) -> bytes:
    mask = np.zeros(VOCAB, bool)
    mask[list(allowed)] = True
    return pack_mask(mask)


def greedy(positions: int = 0, **fields: Any) -> output_pb2.OutputSpec:
    return output_pb2.OutputSpec(positions=positions, greedy=output_pb2.GreedyOutput(**fields))


def sample(positions: int = 0, **fields: Any) -> output_pb2.OutputSpec:
    return output_pb2.OutputSpec(positions=positions, sample=output_pb2.SampleOutput(**fields))


def registering(content: bytes, sha256: bytes | None = None) -> pb.RegisterTokenMaskRequest:
    sha256 = id_of(content) if sha256 is None else sha256
    return pb.RegisterTokenMaskRequest(words=words_to_proto(content), sha256=sha256)


async def register(executor: Any, *allowed: int) -> bytes:
    answer = await executor.RegisterTokenMask(registering(words(*allowed)))
    assert answer.token_mask_id == id_of(words(*allowed))
    return answer.token_mask_id


async def batch(executor: Any, items: list[Any], **fields: Any) -> list[Any]:
    """Of each item its tokens, or its error."""
    answer = await executor.UnifiedForward(pb.UnifiedForwardRequest(items=items, **fields))
    return [
        error_from_status(each.error) if each.HasField("error") else chosen(answer, each.output)
        for each in answer.results
    ]


async def rows_of(executor: Any, tokens: list[int]) -> np.ndarray:
    answer = await executor.UnifiedForward(pb.UnifiedForwardRequest(items=[item(tokens, output=full(positions=ALL))]))
    return rows_from_proto(answer.row_blocks)[0]["logits"]


def best(row: np.ndarray, *allowed: int) -> int:
    return max(sorted(allowed), key=lambda token: row[token])


async def play(executor: Any) -> list[Any]:
    """Every way to name a mask, beside items without one."""
    rows = await rows_of(executor, PROMPT)
    one, two = await register(executor, 5, 77, 200), await register(executor, 8, 9)
    inline = words_to_proto(words(30, 31))
    items = [
        item(PROMPT, output=greedy(token_mask_id=one)),
        item(PROMPT),
        item(PROMPT, output=greedy(token_mask=inline, logprob=True)),
        item(PROMPT, output=sample(token_mask_id=two, temperature=0.0, bias=[{"token_id": 40, "bias": 1e9}])),
        item(PROMPT, output=greedy(ALL, row_mask_ids=[one, b"", two, one])),
        item(PROMPT, output=sample(ALL, seed=3)),
        item(PROMPT, output=sample(ALL, seed=3, row_mask_ids=[two, b"", b"", one])),
        item(PROMPT, output=greedy(token_mask_id=id_of(words(30, 31)))),
    ]
    found = await batch(executor, items)
    last = rows[-1]
    assert found[:5] == [
        [best(last, 5, 77, 200)],
        [int(last.argmax())],
        [best(last, 30, 31)],
        [best(last, 8, 9)],
        [best(rows[0], 5, 77, 200), int(rows[1].argmax()), best(rows[2], 8, 9), best(rows[3], 5, 77, 200)],
    ]
    assert found[5:] == [found[5], [found[6][0], *found[5][1:3], found[6][3]], found[2]]
    assert found[6][0] in {8, 9} and found[6][3] in {5, 77, 200}
    assert await batch(executor, [items[5]]) == [found[5]]
    return found


async def test_masks_leave_their_tokens_and_touch_no_other_item(served: Served) -> None:
    await play(served.executor)
    there = {mask_id for mask_id, _ in served.runner.compute.masks.all()}
    assert there == {id_of(words(*each)) for each in ((5, 77, 200), (8, 9), (30, 31))}
    assert len(served.server.state.masks) == 3
    info = await served.info()
    assert info_pb2.CAPABILITY_TOKEN_MASKS in info.capabilities and info.limits.max_token_masks == 2048
    await served.check()


async def test_an_engine_in_a_process_of_its_own_answers_the_same(served: Served) -> None:
    flags = ("--kv-blocks", "64", "--block-size", "4", "--max-context", "128", "--max-token-masks", "4")
    async with serving("--engine", "process", *flags) as server, dial(server.target) as dialled:
        there = await play(dialled.executor)
        assert there == await play(served.executor)
        for number in range(40):  # ten times as many as it holds, each used once and gone
            allowed = (number, number + 50)
            [[token]] = await batch(
                dialled.executor, [item(PROMPT, output=greedy(token_mask=words_to_proto(words(*allowed))))]
            )
            assert token in allowed
        [gone] = await batch(dialled.executor, [item(PROMPT, output=greedy(token_mask_id=id_of(words(0, 50))))])
        assert gone.reason is Reason.TOKEN_MASK_UNKNOWN
        assert await play(dialled.executor) == there


async def test_the_least_recently_used_mask_goes_and_its_next_item_is_refused() -> None:
    async with serve_identity(max_token_masks=2) as served:
        ask = served.executor
        first, second = await register(ask, 1), await register(ask, 2)
        handle = await prefill(served, PROMPT, output=greedy(token_mask_id=first))
        third = await register(ask, 3)
        for _ in range(2):
            call = ask.Decode(pb.DecodeRequest(item=item([1], handle, output=greedy(token_mask_id=second))))
            error = await refused(call, Reason.TOKEN_MASK_UNKNOWN)
            assert (error.field, error.metadata["token_mask_id"]) == ("output.token_mask_id", second.hex())
        row_masks = greedy(ALL, row_mask_ids=[first, second])
        call = ask.ForwardVerify(pb.ForwardVerifyRequest(item=item([1, 1], handle, output=row_masks)))
        assert (await refused(call, Reason.TOKEN_MASK_UNKNOWN)).field == "output.row_mask_ids"
        assert await batch(ask, [item([1], handle, output=greedy(token_mask_id=third))]) == [[3]]
        assert await register(ask, 2) == second
        await served.check()
        assert len(served.server.state.masks) == 2


async def test_what_a_call_in_flight_names_does_not_go() -> None:
    """However many are registered while it waits for its step."""
    async with gated(max_token_masks=2) as (served, gate):
        ask = served.executor
        masks = [await register(ask, number) for number in (1, 2)]
        busy = await gate.hold(ask.Prefill(pb.PrefillRequest(item=item(PROMPT))))
        named = [item(PROMPT, output=greedy(token_mask_id=mask)) for mask in masks]
        waiting = asyncio.ensure_future(batch(ask, named))
        await until(lambda: bool(served.server.state.engine.queued_items))
        error = await refused(ask.RegisterTokenMask(registering(words(3))), Reason.QUEUE_FULL)
        assert error.retry_after_s
        [full] = await batch(ask, [item(PROMPT, output=greedy(token_mask=words_to_proto(words(3))))])
        assert full.reason is Reason.QUEUE_FULL
        gate.open()
        await busy
        assert await waiting == [[1], [2]]
        assert await register(ask, 3)
        await served.check()


BAD = {
    "an id of 31 bytes": ("token_mask_id", {"token_mask_id": bytes(31)}),
    "a row's id of 33 bytes": ("row_mask_ids", {"row_mask_ids": [bytes(33)]}),
    "two ways at once": ("token_mask_id", {"token_mask_id": bytes(32), "row_mask_ids": [b""]}),
    "both of one mask": ("token_mask_id", {"token_mask_id": bytes(32), "token_mask": types_pb2.Tensor()}),
    "words without a type": ("token_mask", {"token_mask": types_pb2.Tensor(shape=[8], data=bytes(32))}),
    "words of bytes": ("token_mask", {"token_mask": types_pb2.Tensor(dtype=I8, shape=[32], data=bytes(32))}),
    "a shape unlike the bytes": ("token_mask", {"token_mask": types_pb2.Tensor(dtype=I32, shape=[8], data=bytes(31))}),
    "too few words": ("", {"token_mask": words_to_proto(b"\xff" * 28)}),
    "too many words": ("", {"token_mask": words_to_proto(b"\xff" * 36)}),
    "no token": ("", {"token_mask": words_to_proto(bytes(32))}),
    "a mask too many": ("", {"row_mask_ids": [b"", b""]}),
}


async def test_a_bad_spec_is_refused_by_its_field_and_changes_nothing(served: Served) -> None:
    handle = await prefill(served, PROMPT)
    kinds = {"greedy": greedy, "sample": sample}
    for (name, (field, fields)), (kind, make) in product(BAD.items(), kinds.items()):
        error = await refused(served.decode([1], handle, output=make(**fields)), Reason.INVALID_REQUEST)
        wanted = f"output.{kind}.{field}" if field else f"output.{next(iter(fields))}"
        assert error.field == wanted
        if name.endswith("words"):
            assert error.metadata == {"words": "8", "vocab_size": "256"}
    assert not len(served.server.state.masks)
    await served.decode([1], handle)


async def test_a_wrong_number_of_row_masks_is_refused_whatever_the_positions(served: Served) -> None:
    mask = await register(served.executor, 4)
    for positions, tokens, masks in ((0, 3, 3), (ALL, 3, 2), (ALL, 3, 4), (output_pb2.POSITIONS_NONE, 3, 1)):
        spec = greedy(positions, row_mask_ids=[mask] * masks)
        [error] = await batch(served.executor, [item([1] * tokens, output=spec)])
        assert (error.reason, error.field) == (Reason.INVALID_REQUEST, "output.row_mask_ids"), (positions, masks)
    assert await batch(served.executor, [item([1, 2, 3], output=greedy(row_mask_ids=[mask]))]) == [[4]]


async def test_registering_refuses_what_is_no_mask_and_a_wrong_hash(served: Served) -> None:
    for request, field in (
        (registering(words(1), id_of(words(2))), "sha256"),
        (registering(words(1), b""), "sha256"),
        (registering(words()), "words"),
        (registering(words(1) * 2), "words"),
        (pb.RegisterTokenMaskRequest(sha256=id_of(b"")), "words"),
    ):
        assert (await refused(served.executor.RegisterTokenMask(request), Reason.INVALID_REQUEST)).field == field
    assert not len(served.server.state.masks)


async def test_bits_beyond_the_vocabulary_are_ignored() -> None:
    async with serve_identity(vocab_size=250) as served:
        content = bytearray(pack_mask(np.arange(250) == 7))
        content[-1] = 0xFC
        mask = (await served.executor.RegisterTokenMask(registering(bytes(content)))).token_mask_id
        assert await batch(served.executor, [item(PROMPT, output=greedy(token_mask_id=mask))]) == [[7]]


async def test_a_refused_item_registers_nothing_and_its_neighbours_run(served: Served) -> None:
    handle = await prefill(served, PROMPT)
    stale = types_pb2.KvHandle(id=handle.id, seq_len=4, version=handle.version + 1)
    ok, inline = words_to_proto(words(11)), words_to_proto(words(12))
    items = [
        item(PROMPT, output=greedy(token_mask=ok)),
        item([1], stale, output=greedy(token_mask=inline)),
        item(PROMPT, output=greedy(token_mask_id=bytes(32))),
        item(PROMPT),
    ]
    found = await batch(served.executor, items)
    assert found[0] == [11] and len(found[3]) == 1
    assert [each.reason for each in found[1:3]] == [Reason.SEQUENCE_VERSION_MISMATCH, Reason.TOKEN_MASK_UNKNOWN]
    assert len(served.server.state.masks) == 1
    [error] = await batch(served.executor, [item(PROMPT, output=greedy(token_mask_id=id_of(words(12))))])
    assert error.reason is Reason.TOKEN_MASK_UNKNOWN
    before = len(served.server.state.handles)
    good = [item([1], handle, output=greedy(token_mask=ok)), item(PROMPT, output=greedy(token_mask_id=bytes(32)))]
    await refused(batch(served.executor, good, all_or_nothing=True), Reason.TOKEN_MASK_UNKNOWN)
    assert len(served.server.state.handles) == before
    assert await batch(served.executor, good[:1], all_or_nothing=True) == [[11]]
    assert not any(uses(served.server.state.masks))
    await served.check()


async def test_a_replay_needs_no_mask_and_an_inline_one_is_the_same_content() -> None:
    async with serve_identity(max_token_masks=1) as served:
        ask, handle = served.executor, await prefill(served, PROMPT)
        inline = words_to_proto(words(21, 22))
        request = item([1], handle, request_id="r", output=sample(seed=1, token_mask=inline))
        first = await ask.Decode(pb.DecodeRequest(item=request))
        await register(ask, 1)
        for output in (sample(seed=1, token_mask=inline), sample(seed=1, token_mask_id=id_of(words(21, 22)))):
            again = await ask.Decode(pb.DecodeRequest(item=item([1], handle, request_id="r", output=output)))
            assert again.output.replayed and again.row_blocks == first.row_blocks
        other = sample(seed=1, token_mask_id=id_of(words(1)))
        call = ask.Decode(pb.DecodeRequest(item=item([1], handle, request_id="r", output=other)))
        await refused(call, Reason.REQUEST_ID_REUSED)
        entries = recorded(served.server.state.replay)
        assert not any(getattr(part, "words", b"") for entry in entries for part in entry.fingerprint)


async def test_another_callers_mask_is_as_unknown_as_none() -> None:
    async with serve_identity(max_token_masks=8, tokens=("alice a", "bob b")) as served:
        alice, bob = served.by("a"), served.by("b")
        mask, errors = await register(alice.executor, 1), []
        for unknown in (mask, bytes(32)):
            call = bob.prefill(PROMPT, output=greedy(token_mask_id=unknown))
            error = await refused(call, Reason.TOKEN_MASK_UNKNOWN)
            errors.append((error.message, error.field, error.metadata.keys()))
        assert errors[0] == errors[1]
        await alice.prefill(PROMPT, output=greedy(token_mask_id=mask))


async def test_a_follower_keeps_its_mask_while_it_waits() -> None:
    async with gated(max_token_masks=2) as (served, gate), opened(served) as stream:
        ask = served.executor
        mask, next_mask = await register(ask, 40), await register(ask, 41)
        await gate.hold(stream.step(item(PROMPT, request_id="made", output=greedy(token_mask_id=mask))))
        made, follow = types_pb2.KvHandle(seq_len=4, version=1), forward_pb2.Follow(feed_chosen=True, creation="made")
        await stream.step(item([], made, follow=follow, request_id="f", output=greedy(token_mask_id=next_mask)))
        await until(lambda: sum(uses(served.server.state.masks)) == 2)
        await refused(ask.RegisterTokenMask(registering(words(1))), Reason.QUEUE_FULL)
        gate.open()
        for token in (40, 41):
            answer = (await stream.read()).forward
            assert chosen(answer, answer.results[0].output) == [token]
        await stream.call.done_writing()
        assert await register(ask, 1)


async def test_drafts_are_verified_under_masks_of_their_rows(served: Served) -> None:
    """Row i of [last, d0 … dN-1] takes mask i: what a mask forbids is not accepted, and what follows is allowed."""
    ask = served.executor
    masks = [await register(ask, *allowed) for allowed in ((10, 11), (20, 21), (30, 31), (40, 41))]
    seen = set()
    for draft in ([10, 20, 30], [10, 99, 30], [99, 20, 30], [11, 21, 31]):
        for fields in (
            {"row_mask_ids": masks},
            {"row_mask_ids": masks, "temperature": 0.0},
            {"token_mask_id": masks[0]},
        ):
            handle = await prefill(served, PROMPT)
            how = output_pb2.AcceptOutput(sampling=output_pb2.SampleOutput(seed=8, **fields))
            verified = item([1, *draft], handle, output=output_pb2.OutputSpec(accept=how))
            [emitted] = await batch(ask, [verified])
            allowed = [{10, 11}] * 4 if "token_mask_id" in fields else [{10, 11}, {20, 21}, {30, 31}, {40, 41}]
            assert all(token in each for token, each in zip(emitted, allowed, strict=False)), (draft, fields, emitted)
            assert emitted[:-1] == draft[: len(emitted) - 1]
            seen.add(len(emitted))
    assert len(seen) > 1
    inline = output_pb2.AcceptOutput(sampling=output_pb2.SampleOutput(token_mask=words_to_proto(words(77))))
    handle = await prefill(served, PROMPT)
    verified = item([1, 77, 77], handle, output=output_pb2.OutputSpec(accept=inline), request_id="r")
    assert await batch(ask, [verified]) == await batch(ask, [verified]) == [[77, 77, 77]]
    handle = await prefill(served, PROMPT)
    short = output_pb2.AcceptOutput(sampling=output_pb2.SampleOutput(row_mask_ids=masks[:2]))
    [error] = await batch(ask, [item([1, 2, 3], handle, output=output_pb2.OutputSpec(accept=short))])
    assert (error.reason, error.field) == (Reason.INVALID_REQUEST, "output.row_mask_ids")
