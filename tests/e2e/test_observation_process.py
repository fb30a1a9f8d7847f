"""`ferrum-rpc serve` with a metrics port and a collector that is not there."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess

import pytest

from tests.e2e.test_serve_process import SERVE
from tests.exposition import fetch, problems, series, value
from tests.faults.process import dial, serving
from tests.wiring import pb, prefill


async def test_a_process_serves_its_metrics_and_ends_well_without_a_collector() -> None:
    flags = ("--metrics-port", "0", "--otel-endpoint", "http://127.0.0.1:9")
    async with serving(*flags) as process:
        (url,) = [each["url"] for each in process.events if each["event"] == "metrics_enabled"]
        async with dial(process.target) as client:
            handle = await prefill(client, [1, 2, 3])
            text = await asyncio.to_thread(fetch, url)
            await client.executor.Release(pb.ReleaseRequest(handle=handle))
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
def test_what_cannot_be_observed_is_said_at_the_start(flags: tuple[str, ...], what: str) -> None:
    command = (*SERVE, "identity", "--port", "0", "--metrics-port", "0", "--log-format", "json", *flags)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    event = json.loads(done.stderr.splitlines()[-1])
    assert event["event"] == "startup_failed" and what in event["error"] and event["action"]
    assert "Traceback" not in done.stderr
