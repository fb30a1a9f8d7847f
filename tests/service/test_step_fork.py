"""Children made in the step that feeds them: one call for what took a ForkKv and a forward."""

from __future__ import annotations

import asyncio

import pytest

from ferrum_rpc.errors import Reason
from ferrum_rpc.executor.v1 import forward_pb2, output_pb2, types_pb2
from ferrum_rpc.wire.status import error_from_status
from tests.service.test_run import SAMPLE, read_parts, running, single_decodes, stepping
from tests.service.test_session import opened
from tests.support.inside import set_stage
from tests.support.serving import Served, gated, serve_identity
from tests.support.wiring import chosen, item, pb, prefill, reason_of, refused, until

PROMPT = [3, 1, 4, 1, 5, 9, 2]
FORK = forward_pb2.CreateOptions(fork=True)


def child(tokens: list[int], parent: types_pb2.KvHandle, **fields: object) -> forward_pb2.ForwardItem:
    return item(tokens, parent, **{"create": FORK, "output": SAMPLE, **fields})


@pytest.mark.parametrize("length", [4, 6, 7])
async def test_one_parent_is_forked_often_and_fed_in_one_step(served: Served, length: int) -> None:
    """With a block that is full, one that is not, and with all of it."""
    parent = await prefill(served, PROMPT)
    steps = served.server.state.engine.counters.steps
    items = [
        child([11], parent, truncate_to=length),
        item([12], parent, output=SAMPLE),
        child([13, 14], parent, truncate_to=length),
        child([11], parent),
    ]
    answer = await served.unified(*items)
    assert served.server.state.engine.counters.steps == steps + 1
    assert served.server.state.counters.tokens_truncated == 0  # a child is cut, its parent is not
    texts = [[*PROMPT[:length], 11], [*PROMPT, 12], [*PROMPT[:length], 13, 14], [*PROMPT, 11]]
    handles = [each.output.handle for each in answer.results]
    assert [(each.seq_len, each.version) for each in handles] == [(length + 1, 1), (8, 2), (length + 2, 1), (8, 1)]
    assert handles[1].id == parent.id and len({each.id for each in handles}) == 4
    for text, result in zip(texts, answer.results, strict=True):
        assert chosen(answer, result.output) == (await single_decodes(served, text, 1))
    for handle, text in zip(handles, texts, strict=True):  # they share nothing that one of them writes
        on = await served.decode([7], handle, output=SAMPLE)
        assert chosen(on) == await single_decodes(served, [*text, 7], 1)
    await served.check()
    for record in served.server.state.handles.records():
        await served.release(types_pb2.KvHandle(id=record.id), any_version=True)
    assert served.server.state.engine.cache.free_blocks == served.server.state.engine.cache.total_blocks


async def test_children_run_and_have_their_parents_lease(served: Served) -> None:
    lease = await served.acquire()
    parent = await prefill(served, PROMPT, create=forward_pb2.CreateOptions(lease_id=lease.lease_id))
    run = running([9], parent, most=5, create=FORK)
    answer = await served.unified(run, child([9], parent))
    expected = await single_decodes(served, [*PROMPT, 9], 5)
    assert chosen(answer, answer.results[0].output) == expected
    assert chosen(answer, answer.results[1].output) == expected[:1]
    again = await served.unified(run)
    assert again.results[0].output.replayed
    assert again.results[0].output.handle == answer.results[0].output.handle
    released = await served.revoke(lease.lease_id)
    assert released.released_sequences == 3
    await served.check()


async def test_a_parent_stays_as_it_is_until_its_children_are_made() -> None:
    async with gated() as (served, gate):
        parent = await prefill(served, PROMPT)
        held = await gate.hold(served.unified(child([1], parent)))
        await refused(served.decode([1], parent), Reason.SEQUENCE_BUSY)
        gate.open()
        await held
        await served.decode([1], parent)
        stale = (await served.unified(child([1], parent))).results[0]
        assert reason_of(stale) is Reason.SEQUENCE_VERSION_MISMATCH
        await served.check()


async def test_where_blocks_run_short_nothing_is_left_of_a_child() -> None:
    async with serve_identity(kv_blocks=4, block_size=4) as served:
        parent = await prefill(served, PROMPT)
        free = served.server.state.engine.cache.free_blocks
        items = [child([1], parent), child([2] * 20, parent)]
        answer = await served.unified(*items)
        assert answer.results[0].output.handle.seq_len == 8
        assert reason_of(answer.results[1]) is Reason.KV_BLOCKS_EXHAUSTED
        await served.release(answer.results[0].output.handle)
        await refused(served.unified(*items, all_or_nothing=True), Reason.KV_BLOCKS_EXHAUSTED)
        await served.check()
        assert served.server.state.engine.cache.free_blocks == free
        await served.decode([1], parent)


async def test_a_step_that_fails_leaves_no_children() -> None:
    async with serve_identity() as served:
        parent = await prefill(served, PROMPT)
        free = served.server.state.engine.cache.free_blocks

        def fail(stage: str) -> None:
            if stage == "select":
                raise RuntimeError("as asked")

        set_stage(served.runner, fail)
        answer = await served.unified(child([1], parent), item([2], parent))
        assert set(map(reason_of, answer.results)) == {Reason.STEP_FAILED}
        set_stage(served.runner, None)
        await served.check()
        assert served.server.state.engine.cache.free_blocks == free
        assert len(served.server.state.handles) == 1


async def test_a_bad_fork_is_refused_by_its_field(served: Served) -> None:
    orphan = (await served.unified(item([1], create=FORK))).results[0]
    assert error_from_status(orphan.error).field == "create.fork"
    parent = await prefill(served, PROMPT)
    beyond = (await served.unified(child([1], parent, truncate_to=8))).results[0]
    assert reason_of(beyond) is Reason.TRUNCATE_BEYOND_LENGTH
    other = item([1], parent, create=forward_pb2.CreateOptions(reserve_tokens=1), output=output_pb2.OutputSpec())
    assert error_from_status((await served.unified(other)).results[0].error).field == "create"
    await served.unified(item([1], parent))  # it is free again


async def test_of_forks_that_are_apart_the_first_passes() -> None:
    """Each is a call of its own, and the parent is busy until the first is over: its run too."""
    async with stepping(2) as (served, steps), opened(served) as stream:
        parent = await stream.prefill(PROMPT)
        forks = [running([number], parent, most=5, create=FORK) for number in range(3)]
        await stream.step(*forks, apart=True)
        await steps.held()
        await refused(served.decode([1], parent), Reason.SEQUENCE_BUSY)
        steps.free()
        found = {result.item_index: result for part in (await read_parts(stream))[0] for result in part.results}
        assert [reason_of(found[each]) for each in (1, 2)] == [Reason.SEQUENCE_BUSY] * 2
        assert found[0].output.handle.seq_len == len(PROMPT) + 5
        together = await stream.forward(*[running([number], parent, most=5, create=FORK) for number in range(3)])
        assert [each.output.handle.seq_len for each in together.results] == [len(PROMPT) + 5] * 3
        await served.check()


async def test_a_cancelled_call_that_repeats_another_frees_its_parents_after_its_own_step() -> None:
    """It waits for the other one no more: nobody wants its answer."""
    async with stepping(2) as (served, steps):
        parent, other = await prefill(served, PROMPT), await prefill(served, PROMPT)
        state = served.server.state
        run = running([9], other, most=10)
        first = asyncio.ensure_future(served.executor.Decode(pb.DecodeRequest(item=run)))
        await steps.held()
        both = asyncio.ensure_future(served.unified(run, child([7], parent, request_id="child")))
        await until(lambda: state.engine.queued_items == 1)
        steps.allow(1)
        await until(lambda: state.engine.queued_items == 0)
        await steps.held()
        both.cancel()
        await until(lambda: served.server.calls.in_flight == 1)
        steps.allow(1)
        await until(lambda: len(state.handles) == 3)
        assert not first.done() and not state.handles.live[parent.id].busy
        steps.free()
        await first
        await served.check()
