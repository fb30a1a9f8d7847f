"""The last server of revision 2, as recorded: what it makes of each addition of revision 3, and what this version's
client makes of it.

A server ignores fields that it does not know, `needs` among them. So where it answers something else than was asked
for, its capabilities must have said so. docs/contract.md has the same as a table.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio

from ferrum_rpc.client import (
    Accept,
    ExecutorClient,
    GrammarKind,
    Greedy,
    HiddenStates,
    NextToken,
    RowLogprobs,
    Run,
    Sample,
)
from ferrum_rpc.errors import NotSupported, Reason
from ferrum_rpc.executor.v1 import forward_pb2, info_pb2, output_pb2, session_pb2, types_pb2
from ferrum_rpc.wire.rows import rows_from_proto
from ferrum_rpc.wire.status import error_from_rpc, error_from_status
from tests.support.clients import BOTH_WAYS, answers
from tests.support.identity_oracle import identity_logits
from tests.support.process import Dialled, dial
from tests.support.proxy import proxied
from tests.support.raw_session import raw_session
from tests.support.recorded import recorded
from tests.support.serving import serve_identity
from tests.support.wiring import item, pb, prefill

PROMPT = [3, 1, 4]
WORDS = types_pb2.Tensor(dtype=types_pb2.D_TYPE_I32, shape=[8], data=(1 << 9).to_bytes(32, "little"))
"""Allows token 9 only."""

ADDED = range(info_pb2.CAPABILITY_OUTPUT_NEXT_TOKEN, info_pb2.CAPABILITY_STEP_FRAMES + 1)
OFFERED_SINCE = {
    info_pb2.CAPABILITY_OUTPUT_SAMPLE,
    info_pb2.CAPABILITY_OUTPUT_ACCEPT,
    info_pb2.CAPABILITY_OUTPUT_HIDDEN_STATES,
    info_pb2.CAPABILITY_TOKEN_MASKS,
    info_pb2.CAPABILITY_PENALTIES,
}
"""In the contract of revision 2, and NOT_SUPPORTED by its server."""

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def target(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """The address of the older server, as it was recorded in this test."""
    async with recorded(2, request.node.name) as target:
        yield target


@pytest_asyncio.fixture(loop_scope="module")
async def dialled(target: str) -> AsyncIterator[Dialled]:
    async with dial(target) as dialled:
        yield dialled


@pytest_asyncio.fixture(loop_scope="module", params=[False, True], ids=["unary", "session"])
async def client(target: str, request: pytest.FixtureRequest) -> AsyncIterator[ExecutorClient]:
    async with ExecutorClient(target, session=request.param) as client:
        yield client


def greedy(tokens: list[int], count: int) -> list[int]:
    """What the model goes on with, by the oracle."""
    found = list(tokens)
    for _ in range(count):
        found.append(int(identity_logits(found, [len(found) - 1])[0].argmax()))
    return found[len(tokens) :]


def chosen(answer: Any) -> list[int]:
    [output] = [each.output for each in answer.results]
    rows = rows_from_proto(answer.row_blocks)[output.rows.block]["token_ids"]
    return rows[output.rows.first : output.rows.first + output.rows.count].tolist()


async def one(dialled: Dialled, *args: Any, **fields: Any) -> Any:
    """The answer to one item."""
    return await dialled.executor.UnifiedForward(pb.UnifiedForwardRequest(items=[item(*args, **fields)]))


async def reason(dialled: Dialled, *args: Any, **fields: Any) -> Reason | None:
    """What refuses one item."""
    return error_from_status((await one(dialled, *args, **fields)).results[0].error).reason


# --- what a scheduler's author can rely on ----------------------------------------------------------------------------


async def test_its_capabilities_and_its_revision_say_what_it_lacks(dialled: Dialled) -> None:
    info = await dialled.executor.GetInfo(pb.GetInfoRequest())
    assert info.schema_revision == 2
    assert not {*ADDED, *OFFERED_SINCE} & set(info.capabilities)
    limits = info.limits
    assert not any((limits.max_run_tokens, limits.max_running, limits.max_followers, limits.max_token_masks))
    async with raw_session(dialled.executor) as stream:
        assert stream.welcome.schema_revision == 2


NEXT = output_pb2.OutputSpec(next_token=output_pb2.NextTokenOutput())
BESIDE = output_pb2.OutputSpec(greedy=output_pb2.GreedyOutput(logprobs=output_pb2.RowLogprobs(top_k=3)))
INLINE = output_pb2.OutputSpec(greedy=output_pb2.GreedyOutput(token_mask=WORDS))
GRAMMAR = output_pb2.OutputSpec(greedy=output_pb2.GreedyOutput(grammar_id=b"\x01" * 32, grammar_from=3))
ROW_MASKS = output_pb2.OutputSpec(greedy=output_pb2.GreedyOutput(row_mask_ids=[b"\x01" * 32]))


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"run": forward_pb2.Run(max_tokens=4), "request_id": "run"}, id="run"),
        pytest.param({"output": NEXT}, id="next_token"),
        pytest.param({"output": BESIDE}, id="logprobs"),
        pytest.param({"output": INLINE}, id="token_mask"),
        pytest.param({"output": ROW_MASKS}, id="row_mask_ids"),
        pytest.param({"output": GRAMMAR}, id="grammar_id"),
        pytest.param({"needs": [*ADDED, 999]}, id="needs"),
    ],
)
async def test_what_it_does_not_see_is_a_plain_step(dialled: Dialled, fields: dict[str, Any]) -> None:
    """One greedy token of the last row and nothing else, whatever `needs` says. A run's answer has no `run_end`."""
    answer = await one(dialled, PROMPT, **{"needs": list(ADDED), **fields})
    [output] = [each.output for each in answer.results]
    assert chosen(answer) == greedy(PROMPT, 1) and output.handle.seq_len == len(PROMPT)
    assert not output.run_end and not output.HasField("run_cause") and not answer.results[0].item_index
    [block] = answer.row_blocks
    assert [field.name for field, _ in block.tokens.ListFields()] == ["token_ids"]
    await dialled.executor.Release(pb.ReleaseRequest(handle=output.handle))


async def test_what_it_refuses(dialled: Dialled) -> None:
    """A follower and a fork in the step are encoded so that it cannot take them for something else."""
    handle = await prefill(dialled, PROMPT)
    future = types_pb2.KvHandle(id=handle.id, seq_len=len(PROMPT) + 1, version=handle.version + 1)
    feed = forward_pb2.Follow(feed_chosen=True)
    assert await reason(dialled, [], future, follow=feed, request_id="a") is Reason.INVALID_REQUEST
    follow = forward_pb2.Follow()
    assert await reason(dialled, [7], future, follow=follow, request_id="b") is Reason.SEQUENCE_VERSION_MISMATCH
    unborn = types_pb2.KvHandle(seq_len=len(PROMPT), version=1)
    behind = forward_pb2.Follow(creation="made")
    assert await reason(dialled, [7], unborn, follow=behind, request_id="c") is Reason.INVALID_REQUEST
    fork = forward_pb2.CreateOptions(fork=True)
    assert await reason(dialled, [7], handle, create=fork) is Reason.INVALID_REQUEST
    for kind in (
        {"sample": output_pb2.SampleOutput(seed=5)},
        {"hidden_states": output_pb2.HiddenStatesOutput(dtype=types_pb2.D_TYPE_F32)},
        {"greedy": output_pb2.GreedyOutput(token_mask_id=b"\x01" * 32)},
        {"greedy": output_pb2.GreedyOutput(repetition_penalty=1.5)},
    ):
        assert await reason(dialled, [7], handle, output=output_pb2.OutputSpec(**kind)) is Reason.NOT_SUPPORTED
    for accept in (output_pb2.AcceptOutput(), output_pb2.AcceptOutput(sampling=output_pb2.SampleOutput(seed=5))):
        draft = output_pb2.OutputSpec(accept=accept)
        assert await reason(dialled, [7, 8], handle, output=draft) is Reason.NOT_SUPPORTED
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await dialled.executor.RegisterTokenMask(pb.RegisterTokenMaskRequest(words=WORDS))
    assert error_from_rpc(refused.value).reason is Reason.NOT_SUPPORTED
    assert chosen(await one(dialled, [7], handle)) == greedy([*PROMPT, 7], 1), "none of it has changed the sequence"


async def test_what_it_makes_of_a_sessions_frames(dialled: Dialled) -> None:
    """`apart`, `tokens`, `release` in the step and a fork's lease are not seen; a frame of an unknown kind ends the
    stream."""
    async with raw_session(dialled.executor, tokens=True) as stream:
        other = (await dialled.executor.AcquireLease(pb.AcquireLeaseRequest())).lease_id
        items = [item(PROMPT), item(PROMPT, run=forward_pb2.Run(max_tokens=3), request_id="in a frame")]
        answer = await stream.ask(forward=session_pb2.SessionForward(items=items, apart=True))
        assert answer.WhichOneof("frame") == "forward" and not answer.forward.more
        first, second = (each.output.handle for each in answer.forward.results)
        frame = session_pb2.SessionForward(items=[item([7], first)], release=[second])
        first = (await stream.ask(forward=frame)).forward.results[0].output.handle
        assert (await one(dialled, [7], second)).results[0].HasField("output"), "it was not released"
        fork = session_pb2.SessionFork(handle=first, count=1, lease_id=other)
        [child] = (await stream.ask(fork=fork)).handles.results
        await dialled.executor.RevokeLease(pb.RevokeLeaseRequest(lease_id=other))
        assert (await one(dialled, [7], child.handle)).results[0].HasField("output"), "it has its parent's lease"
        _, never = await stream.send(reserve=session_pb2.SessionReserve(handle=first, tokens=9))
        with pytest.raises(asyncio.CancelledError):  # the stream ends without an answer
            await never
        assert await stream.call.code() is grpc.StatusCode.INVALID_ARGUMENT


# --- this version's client --------------------------------------------------------------------------------------------


async def test_the_client_works_with_it(client: ExecutorClient) -> None:
    expected, info = greedy(PROMPT, 12), await client.info()
    assert (info.limits.free_truncation_tokens, info.limits.checkpoint_tokens, info.model.state_bytes) == (None, 0, 0)
    async with client.sequence(keep_tokens=True) as sequence:
        assert [each async for each in sequence.generate(PROMPT, max_tokens=8, stop=())] == expected[:8]
        again = sequence.generate([expected[7]], max_tokens=4, stop=())
        assert [each async for each in again] == expected[8:]
        await sequence.truncate(len(PROMPT))
        await sequence.reserve(20)
        [branch] = await sequence.fork()
        found = answers(await client.forward([sequence.item([expected[0]]), branch.item([7])]))
        assert [each.token for each in found] == [expected[1], *greedy([*PROMPT, 7], 1)]
        assert (await sequence.verify(expected[1:3])).tokens.tolist() == expected[2:4]
        await sequence.rebuild()
        answer = await sequence.decode(expected[3])
        assert (answer.token, answer.recomputed_tokens, answer.pressure.total_slots) == (expected[4], 0, 0)
        assert await client.truncate([(sequence, 3), (branch, 3)]) == [None, None]
        assert await client.release([sequence, branch]) == [None, None]


@pytest.mark.parametrize(
    "output",
    [
        Sample(seed=5),
        Accept(),
        HiddenStates(),
        NextToken(),
        Greedy(logprobs=RowLogprobs(2)),
        Greedy(mask=b"\x01" * 32),
        Greedy(row_masks=(b"\x01" * 32,)),
        Greedy(grammar=b"\x01" * 32, grammar_from=3),
        Sample(grammar=b"\x01" * 32),
    ],
    ids=lambda each: type(each).__name__,
)
async def test_the_client_refuses_what_it_would_not_see(client: ExecutorClient, output: Any) -> None:
    async with client.sequence() as sequence:
        answer = await sequence.prefill(PROMPT)
        with pytest.raises(NotSupported):
            await sequence.verify([7], output) if output == Accept() else await sequence.decode(7, output)
        assert sequence.handle == answer.handle and not sequence.in_doubt
        assert (await sequence.decode(answer.token)).token == greedy(PROMPT, 2)[1]


async def test_the_client_refuses_runs_followers_masks_and_scores(client: ExecutorClient) -> None:
    async with client.sequence() as sequence:
        answer = await sequence.prefill(PROMPT)
        first = sequence.item([answer.token])
        for call in (
            sequence.decode(answer.token, run=Run(4)),
            client.forward([sequence.item([answer.token], run=Run(4))]),
            client.forward([first, sequence.item(follows=first)]),
            client.register_token_mask(np.ones(256, np.bool_)),
            client.register_grammar(GrammarKind.REGEX, "a"),
            client.score(PROMPT),
        ):
            with pytest.raises(NotSupported):
                await call
        assert sequence.handle == answer.handle and not sequence.in_doubt
        assert (await sequence.decode(answer.token)).token == greedy(PROMPT, 2)[1]


@BOTH_WAYS
@pytest.mark.parametrize(
    "asked",
    [{"run": Run(4)}, {"output": Greedy(logprobs=RowLogprobs(2))}, {"output": NextToken()}],
    ids=["run", "logprobs", "next_token"],
)
async def test_the_client_looks_again_when_an_older_one_takes_a_newer_ones_place(target, session, asked) -> None:
    """A deployment that is rolled back: what the client knew of the newer one holds no more."""
    async with (
        serve_identity() as newer,
        proxied(newer.target) as proxy,
        ExecutorClient(proxy.target, session=session) as client,
    ):
        await client.sequence().prefill(PROMPT, **asked)
        proxy.lead_to(target)
        async with client.sequence() as sequence:
            with pytest.raises(NotSupported):
                await sequence.prefill(PROMPT, **asked)
            assert sequence.handle is None and not sequence.in_doubt
            assert [each async for each in sequence.generate(PROMPT, max_tokens=4, stop=())] == greedy(PROMPT, 4)


@BOTH_WAYS
async def test_a_stream_looks_again_too(target: str, session: bool) -> None:
    async with (
        serve_identity() as newer,
        proxied(newer.target) as proxy,
        ExecutorClient(proxy.target, session=session) as client,
    ):
        for upstream in (newer.target, target):
            proxy.lead_to(upstream)
            stream = client.sequence().generate(PROMPT, max_tokens=9, stop=())
            assert [each async for each in stream] == greedy(PROMPT, 9)
