"""`ferrum-rpc serve` as a process, and the programs that ask it. Restarts and ports are promises (tests/faults)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hyperframe.frame import Frame, SettingsFrame

from ferrum_rpc.client import ExecutorClient
from tests.faults.process import dial, serving
from tests.wiring import item, pb

SERVE = (sys.executable, "-m", "ferrum_rpc.cli", "serve")


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_sigterm_finishes_the_call_in_flight_says_not_serving_and_exits_0(loop: str) -> None:
    async with serving("--max-batch-tokens", "8192", "--grace-s", "2", "--event-loop", loop) as process:
        choices = {each.get("choice"): each.get("reason") for each in process.events}
        assert f"event loop {loop}" in choices
        assert choices["sockets"] == "read by the thread that waits for completions"
        async with dial(process.target) as client:
            health: Any = health_pb2_grpc.HealthStub(client.channel)
            watch = health.Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            running = asyncio.ensure_future(client.executor.Prefill(pb.PrefillRequest(item=item([5] * 8192))))
            status = pb.GetStatusRequest()
            prefill_name = "ferrum_rpc.executor.v1.ModelExecutor/Prefill"
            while prefill_name not in {each.method for each in (await client.executor.GetStatus(status)).methods}:
                pass
            process.signal(signal.SIGTERM)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert (await running).output.handle.seq_len == 8192
        assert await process.ended() == 0
        assert process.count("stopped") == 1


async def test_a_second_sigterm_ends_it_at_once() -> None:
    async with (
        serving(
            "--max-batch-tokens", "65536", "--max-request-bytes", "1MiB", "--identity-max-context", "65536"
        ) as process,
        dial(process.target) as client,
    ):
        running = asyncio.ensure_future(client.executor.Prefill(pb.PrefillRequest(item=item([5] * 60000))))
        while not any(
            each.method.endswith("Prefill") for each in (await client.executor.GetStatus(pb.GetStatusRequest())).methods
        ):
            pass
        process.signal(signal.SIGTERM)
        await process.event("draining")
        process.signal(signal.SIGTERM)
        assert await process.ended() == 128 + signal.SIGTERM
        with pytest.raises(grpc.aio.AioRpcError):
            await running


async def streams_offered(target: str) -> int | None:
    """SETTINGS_MAX_CONCURRENT_STREAMS of the server's first frame."""
    host, _, port = target.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SettingsFrame(0).serialize())
    frame, length = Frame.parse_frame_header(memoryview(await reader.readexactly(9)))
    frame.parse_body(memoryview(await reader.readexactly(length)))
    writer.close()
    assert isinstance(frame, SettingsFrame)
    return frame.settings.get(SettingsFrame.MAX_CONCURRENT_STREAMS)


async def test_few_streams_are_enough_for_a_client_with_a_session() -> None:
    async with serving("--max-streams", "5") as process:
        assert await streams_offered(process.target) == 5
        async with ExecutorClient(process.target, session=True) as client:
            sequences = [client.sequence() for _ in range(64)]
            await asyncio.gather(*[each.prefill([1, 2, 3]) for each in sequences])
            assert {each.length for each in sequences} == {3}
            methods = {each.method.rpartition("/")[2]: each.calls for each in (await client.status()).methods}
            assert methods["GetInfo"] == 1  # 64 callers wanted to know; one asked


async def test_reflection_lists_every_service() -> None:
    async with serving() as process, dial(process.target) as client:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(client.channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        names = {each.name for each in (await call.read()).list_services_response.service}
        call.cancel()
    package = "ferrum_rpc.executor.v1"
    assert names >= {
        f"{package}.ModelExecutor",
        f"{package}.KvTransfer",
        f"{package}.ExecutorControl",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }


@pytest.mark.parametrize(("model", "what"), [("no/such/folder", "No such file or directory"), (".", "config.json")])
def test_a_model_that_cannot_be_served_says_why_and_exits_1(model: str, what: str, tmp_path: Path) -> None:
    path = tmp_path if model == "." else tmp_path / model
    command = (*SERVE, str(path), "--port", "0", "--log-format", "json")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    events = [json.loads(line) for line in done.stderr.splitlines()]
    assert len(events) == 1, "what was chosen for nothing is not said"
    assert events[-1]["event"] == "startup_failed" and what in events[-1]["error"] and str(path) in events[-1]["error"]
    assert events[-1]["action"]
    assert "listening" not in {each["event"] for each in events}  # nothing was bound, and torch not loaded for it
    assert "Traceback" not in done.stderr


def on_a_terminal(width: int, *arguments: str, until: str = "") -> tuple[int, str]:
    """Exit status of a program whose standard streams are a terminal, and what it wrote; Ctrl-C once ``until`` was."""
    reads, writes = os.openpty()
    termios.tcsetwinsize(writes, (30, width))
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), writes)
    environment = {**os.environ, "TERM": "dumb"}
    command = (*SERVE, *arguments)
    with (
        subprocess.Popen(command, **streams, env=environment, start_new_session=True) as it,
        open(reads, "rb") as screen,
    ):  # type: ignore[call-overload]
        os.close(writes)
        wrote = b""
        with suppress(OSError):  # the end of a terminal
            while data := os.read(screen.fileno(), 4096):
                wrote += data
                if until and until.encode() in wrote:
                    it.send_signal(signal.SIGINT)
                    until = ""
    return it.returncode, wrote.decode().replace("\r\n", "\n")


def test_on_a_terminal_it_says_on_one_screen_what_serves_and_what_to_type() -> None:
    width = 60
    status, wrote = on_a_terminal(width, "identity", "--port", "0", "--kv-blocks", "64", until="stop it")
    assert status == 0
    begin, screen = wrote.split("\n", 1)
    assert begin.startswith("listening on 127.0.0.1:") and begin.endswith(", loading the model ...")
    screen, _, later = screen.partition("Ctrl-C")
    assert len(screen.splitlines()) <= 24
    target = begin.split()[2].rstrip(",")
    for words in ("serves identity", f"  address  {target}", "cpu: ", "attention=", f" top --target {target}"):
        assert words in screen
    assert "draining: grace 30 s" in later and "stopped: " in later
    assert all(len(line) <= width for line in wrote.splitlines() if "ferrum-rpc " not in line)
    assert '{"' not in wrote


def test_on_a_terminal_a_folder_that_is_not_there_is_all_that_is_said(tmp_path: Path) -> None:
    status, wrote = on_a_terminal(200, str(tmp_path / "no" / "such" / "folder"))
    why = f"model folder {tmp_path}/no/such/folder: No such file or directory"
    assert (status, wrote) == (1, f"ferrum-rpc serve: {why}\n")


async def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "ferrum_rpc.cli", *arguments)
    return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, check=False)


async def test_info_status_health_and_generate_ask_a_running_server() -> None:
    async with serving() as process:
        flags = ("--target", process.target)
        assert (await ask("health", *flags)).stdout == "SERVING\n"
        info = json.loads((await ask("info", "--json", *flags)).stdout)
        assert info["model"]["name"] == "identity" and "REPLAY" in info["capabilities"]
        generated = await ask("generate", "abc", "--max-new-tokens", "5", *flags)
        assert generated.returncode == 0 and generated.stdout.endswith("\n")
        status = json.loads((await ask("status", "--json", *flags)).stdout)
        assert status["state"] == "SERVING" and status["counters"]["sequences_released"] >= 1
        target = process.target
    gone = await ask("health", "--target", target, "--timeout", "2", "--json")
    assert gone.returncode == 1
    assert gone.stderr.startswith(f"ferrum-rpc health: TRANSPORT: cannot reach an executor at {target}: ")
    assert len(gone.stderr.splitlines()) == 1 and len(gone.stderr) < 160, "gRPC's chain of reasons is left out"
    assert not gone.stdout


async def test_an_executor_that_drains_is_not_ready_and_lives() -> None:
    async with serving() as process:
        flags = ("--target", process.target)
        async with dial(process.target) as client:
            handle = (await client.executor.Prefill(pb.PrefillRequest(item=item([1, 2])))).output.handle
            assert (await ask("drain", "--grace-s", "60", *flags)).returncode == 0
            for form, says in (((), "{}\n"), (("--json",), '{{"status": "{}"}}\n')):
                asked = [ask("health", *form, *flags), ask("health", "--live", *form, *flags)]
                ready, live = await asyncio.gather(*asked)
                assert (ready.stdout, ready.returncode) == (says.format("NOT_SERVING"), 1)
                assert (live.stdout, live.returncode) == (says.format("SERVING"), 0)
            await client.executor.Release(pb.ReleaseRequest(handle=handle))
        assert await process.ended() == 0


async def test_a_server_whose_log_nobody_reads_any_more_still_drains_and_exits_0() -> None:
    """A log line is no reason to stop: the reader of standard error is gone, and every line fails."""
    async with serving() as process:
        async with dial(process.target) as client:
            process.stop_reading()
            handle = (await client.executor.Prefill(pb.PrefillRequest(item=item([1, 2])))).output.handle
            process.signal(signal.SIGTERM)
            health: Any = health_pb2_grpc.HealthStub(client.channel)
            watch = health.Watch(health_pb2.HealthCheckRequest())
            while (await watch.read()).status != health_pb2.HealthCheckResponse.NOT_SERVING:
                pass
            await client.executor.Release(pb.ReleaseRequest(handle=handle))
        assert await process.ended() == 0
