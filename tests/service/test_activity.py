"""What an operator is shown of callers: what each holds, and which calls were slow."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc

from ferrum_rpc.errors import Reason
from ferrum_rpc.executor.v1 import executor_control_pb2, session_pb2, types_pb2
from ferrum_rpc.service.guard.auth import Security
from tests.faults.raw_session import raw_session
from tests.serving import Gate, Served, serve_identity
from tests.wiring import item, pb, refused, until


async def test_an_operator_sees_what_callers_hold_and_which_calls_were_slow(tmp_path: Path) -> None:
    (tokens := tmp_path / "tokens").write_text("alice secret-a\nbob secret-b\nops secret-o operator\n")
    gate = Gate("forward")
    async with serve_identity(stage=gate, security=Security(tokens=tokens)) as served:

        def of(name: str) -> Any:
            return {"metadata": (("authorization", f"Bearer secret-{name}"),)}

        async def activity() -> Any:
            return await served.control.GetActivity(executor_control_pb2.GetActivityRequest(), **of("o"))

        assert not (await activity()).callers
        await served.executor.AcquireLease(pb.AcquireLeaseRequest(), **of("b"))
        prompts = pb.BatchPrefillRequest(items=[item([1] * 20), item([2])])
        calls = [served.executor.BatchPrefill(prompts, **of(name)) for name in ("a", "b")]
        first = await gate.hold(calls[0])
        await until(lambda: len(served.server.state.quotas.holding()) == 2 and served.server.calls.in_flight == 2)
        held = {each.identity: each for each in (await activity()).callers}
        assert (held["alice"].items, held["bob"].items, held["bob"].leases) == (2, 2, 1)
        gate.open()
        await asyncio.gather(first, calls[1])
        unknown = pb.PrefillRequest(item=item([1], handle=types_pb2.KvHandle(id=b"?")))
        wrong = served.executor.Prefill(unknown, **of("b"))
        await refused(wrong, Reason.INVALID_REQUEST, grpc.StatusCode.INVALID_ARGUMENT)
        found = await activity()
        held = {each.identity: (each.sequences, each.blocks, each.items) for each in found.callers}
        assert held == {"alice": (2, 6, 0), "bob": (2, 6, 0)}
        slow = [(each.method.rpartition("/")[2], each.identity, each.code) for each in found.slowest_calls]
        assert sorted(slow[:2]) == [("BatchPrefill", name, "OK") for name in ("alice", "bob")]
        assert ("Prefill", "bob", "INVALID_ARGUMENT") in slow
        times = [each.elapsed.ToNanoseconds() for each in found.slowest_calls]
        assert times == sorted(times, reverse=True) and times[-1] > 0
        request = executor_control_pb2.GetActivityRequest()
        await refused(
            served.control.GetActivity(request, **of("a")), Reason.PERMISSION_DENIED, grpc.StatusCode.PERMISSION_DENIED
        )


async def test_frames_of_a_session_are_among_the_slowest_calls(served: Served) -> None:
    async with raw_session(served.executor) as session:
        await session.ask(forward=session_pb2.SessionForward(items=[item([1, 2])]))
        both = session_pb2.SessionForward(items=[item([1])], apart=True, all_or_nothing=True)
        assert (await session.ask(forward=both)).HasField("error")
        found = (await served.control.GetActivity(executor_control_pb2.GetActivityRequest())).slowest_calls
    codes = sorted(each.code for each in found if each.method.endswith("/Session"))
    assert codes == ["INVALID_ARGUMENT", "OK"]
