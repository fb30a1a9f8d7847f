"""`ferrum-rpc serve` as a process, and the programs that ask it. Restarts and ports are promises (tests/faults)."""

from __future__ import annotations

import asyncio
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
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hyperframe.frame import Frame, SettingsFrame

from ferrum_rpc.client import ExecutorClient
from tests.support.commands import run
from tests.support.exposition import fetch, problems, series, value
from tests.support.process import Dialled, dial, serving, started
from tests.support.serving import serve_identity
from tests.support.wiring import item, pb, prefill, release

SERVE = (sys.executable, "-m", "ferrum_rpc.cli", "serve")


async def prefilling(client: Dialled) -> None:
    """Wait until a prefill has come."""
    while not any(each.method.endswith("/Prefill") for each in (await client.status()).methods):
        pass


async def test_sigterm_finishes_the_call_in_flight_says_not_serving_and_exits_0() -> None:
    """With the event loop that is not the default, which promise R5 has."""
    async with serving("--max-batch-tokens", "8192", "--grace-s", "2", "--event-loop", "asyncio") as process:
        choices = {each.get("choice"): each.get("reason") for each in process.events}
        assert "event loop asyncio" in choices
        assert choices["sockets"] == "read by the thread that waits for completions"
        async with dial(process.target) as client:
            watch = client.health.Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            running = asyncio.ensure_future(client.executor.Prefill(pb.PrefillRequest(item=item([5] * 8192))))
            await prefilling(client)
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
        await prefilling(client)
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
    async with serve_identity() as served:
        call = reflection_pb2_grpc.ServerReflectionStub(served.channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        names = {each.name for each in (await call.read()).list_services_response.service}
        call.cancel()
    own = {f"ferrum_rpc.executor.v1.{each}" for each in ("ModelExecutor", "KvTransfer", "ExecutorControl")}
    assert names >= own | {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


async def refused(*arguments: str) -> list[dict[str, Any]]:
    """The events of a server that does not start. The last one says why and what to do."""
    process = await started(["serve", *arguments, "--port", "0", "--log-format", "json"], fresh=True)
    assert await process.ended() == 1
    assert process.events[-1]["event"] == "startup_failed" and process.events[-1]["action"]
    assert "Traceback" not in "".join(process.other_lines)
    return process.events


async def test_a_model_that_cannot_be_served_says_why_and_exits_1(tmp_path: Path) -> None:
    [event] = await refused(str(tmp_path))  # nothing was bound
    assert "config.json" in event["error"] and str(tmp_path) in event["error"]


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


async def test_an_executor_that_drains_is_not_ready_and_lives(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving() as process, dial(process.target) as client:
        handle = await prefill(client, [1, 2])
        assert await run(process.target, "drain", "--grace-s", "60") == 0
        capsys.readouterr()
        for form, says in (((), "{}\n"), (("--json",), '{{"status": "{}"}}\n')):
            for flags, status, said in (((), 1, "NOT_SERVING"), (("--live",), 0, "SERVING")):
                assert await run(process.target, "health", *form, *flags) == status
                assert capsys.readouterr().out == says.format(said)
        await release(client, handle)
        assert await process.ended() == 0


async def test_a_server_whose_log_nobody_reads_any_more_still_drains_and_exits_0() -> None:
    """A log line is no reason to stop: the reader of standard error is gone, and every line fails."""
    async with serving() as process:
        async with dial(process.target) as client:
            process.stop_reading()
            handle = await prefill(client, [1, 2])
            process.signal(signal.SIGTERM)
            watch = client.health.Watch(health_pb2.HealthCheckRequest())
            while (await watch.read()).status != health_pb2.HealthCheckResponse.NOT_SERVING:
                pass
            await release(client, handle)
        assert await process.ended() == 0


# --- metrics and traces -----------------------------------------------------------------------------------------------


async def test_a_process_serves_its_metrics_and_ends_well_without_a_collector() -> None:
    flags = ("--metrics-port", "0", "--otel-endpoint", "http://127.0.0.1:9")
    async with serving(*flags) as process:
        (url,) = [each["url"] for each in process.events if each["event"] == "metrics_enabled"]
        async with dial(process.target) as client:
            handle = await prefill(client, [1, 2, 3])
            text = await asyncio.to_thread(fetch, url)
            await release(client, handle)
        assert problems(text) == []
        found = series(text)
        assert value(found, "ferrum_sequences") == 1
        assert value(found, "ferrum_executor_state", state="serving") == 1
        assert value(found, "process_resident_memory_bytes") > 0
        process.signal(signal.SIGTERM)
        assert await process.ended() == 0
        assert (await process.event("trace_export_failed"))["action"]  # as JSON, like every other line


@pytest.mark.parametrize(
    ("flags", "what"),
    [(("--otel-endpoint", "nonsense"), "http://collector:4318"), (("--metrics-host", "192.0.2.1"), "192.0.2.1")],
)
async def test_what_cannot_be_observed_is_said_at_the_start(flags: tuple[str, ...], what: str) -> None:
    assert what in (await refused("identity", "--metrics-port", "0", *flags))[-1]["error"]
