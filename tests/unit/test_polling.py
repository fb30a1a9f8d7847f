"""A program's sockets are read by the thread that waits, unless somebody said otherwise; a library says nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ferrum_rpc.polling import OFF, VARIABLE, poll_directly, polled


def test_nobody_said_anything():
    environment: dict[str, str] = {}
    assert polled(environment) == "by gRPC's event engine"
    poll_directly(environment)
    assert environment == {VARIABLE: OFF}
    assert polled(environment) == "by the thread that waits for completions"


def test_somebody_did():
    environment = {VARIABLE: "event_engine_listener"}
    poll_directly(environment)
    assert environment == {VARIABLE: "event_engine_listener"}
    assert polled(environment) == f"as {VARIABLE} says"


@pytest.mark.parametrize("module", ["ferrum_rpc.client", "ferrum_rpc.service.server"])
def test_importing_the_library_says_nothing(module):
    code = f"import os, {module}; print(os.environ.get({VARIABLE!r}))"
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None"


@pytest.mark.parametrize(("experiments", "unknown"), [(OFF, False), (OFF + ",-event_engine_that_never_was", True)])
def test_grpc_knows_the_switches(experiments, unknown):
    """One that it no longer knows changes nothing any more, and it says so in a line that is easy to miss."""
    code = "import grpc; grpc.server(None)"
    environment = os.environ | {VARIABLE: experiments}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ("Unknown experiment" in done.stderr) is unknown
