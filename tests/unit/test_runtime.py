"""What `ferrum-rpc` decides for its process: environment variables, the event loop, memory that is kept."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from typing import Any

import pytest

from ferrum_rpc.native import cpu
from ferrum_rpc.runtime import (
    MALLOC_VARIABLES,
    POLL_DIRECTLY,
    POLLING_VARIABLE,
    PRIMITIVES,
    PRIMITIVES_VARIABLE,
    SPINS,
    TORCH_VERBOSITY,
    VERBOSITY,
    choose_loop,
    keep_freed_memory,
    openmp_waits,
    polled,
    prepare,
)
from ferrum_rpc.usage import ISA_VARIABLE, ISAS, ConfigError


def test_where_nothing_is_set() -> None:
    environment: dict[str, str] = {}
    assert openmp_waits(environment) == "libgomp's default" and polled(environment) == "by gRPC's event engine"
    prepare(environment)
    assert environment == {
        POLLING_VARIABLE: POLL_DIRECTLY,
        VERBOSITY: "NONE",
        TORCH_VERBOSITY: "ERROR",
        PRIMITIVES_VARIABLE: str(PRIMITIVES),
        "GOMP_SPINCOUNT": str(SPINS),
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    assert str(SPINS) in openmp_waits(environment)
    assert polled(environment) == "by the thread that waits for completions"


@pytest.mark.parametrize("waits", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "0"}], ids=str)
def test_what_is_set_stays(waits: dict[str, str]) -> None:
    environment = {
        POLLING_VARIABLE: "event_engine_listener",
        VERBOSITY: "DEBUG",
        TORCH_VERBOSITY: "INFO",
        PRIMITIVES_VARIABLE: "9",
        "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync",
        **waits,
    }
    before = dict(environment)
    prepare(environment)
    assert environment == before
    assert polled(environment) == f"as {POLLING_VARIABLE} says"


@pytest.mark.parametrize("isa", ISAS)
def test_a_machine_that_is_used_as_a_lesser_one_is_so_to_torch_too(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {ISA_VARIABLE: isa, "ONEDNN_MAX_CPU_ISA": "DEFAULT"}
    prepare(environment)
    of_torch = {"portable": "default", "avx2": "avx2"}.get(isa, "avx512")
    assert environment.get("ATEN_CPU_CAPABILITY") == (None if isa == "amx" else of_torch)
    assert environment["ONEDNN_MAX_CPU_ISA"] == "DEFAULT"  # what is set stays
    monkeypatch.setenv(ISA_VARIABLE, isa)
    hidden = ["amx_tile", "avx512_bf16", "avx512f", "avx2", "fma"]
    assert not {*hidden[: {"portable": 5, "avx2": 3, "avx512_vnni": 2, "avx512": 1, "amx": 0}[isa]]} & cpu.flags()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the sets are those of x86-64")
@pytest.mark.parametrize(("isa", "of_torch"), [("portable", "default"), ("avx2", "avx2")])  # others hide nothing of it
def test_torch_takes_what_is_prepared_for_it(isa: str, of_torch: str) -> None:
    code = """if True:
        from ferrum_rpc.runtime import prepare
        prepare()
        import torch
        print(torch.backends.cpu.get_cpu_capability().lower())
    """
    found, _ = output_of(code, **{ISA_VARIABLE: isa, "ATEN_CPU_CAPABILITY": None, "ONEDNN_MAX_CPU_ISA": None})
    assert found in {"default", of_torch}


def test_an_unknown_instruction_set_is_an_error_that_names_the_known_ones() -> None:
    for isa in ("avx", "AVX2", ""):
        with pytest.raises(ConfigError, match=f"FERRUM_ISA must be one of {', '.join(ISAS)}, not"):
            prepare({ISA_VARIABLE: isa})
    command = [sys.executable, "-m", "ferrum_rpc.cli", "serve", "identity"]
    environment = {**os.environ, ISA_VARIABLE: "avx3"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2 and "did you mean 'avx2'" in done.stderr and "Traceback" not in done.stderr


def output_of(code: str, *arguments: str, **variables: str | None) -> tuple[str, str]:
    """What a process writes to its two streams. A variable that is None is not set."""
    environment = {**os.environ, **variables}
    set_ones = {name: value for name, value in environment.items() if value is not None}
    run = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(run, env=set_ones, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip(), done.stderr


def test_importing_the_library_sets_nothing_and_loads_no_opentelemetry() -> None:
    code = f"""if True:
        import os, sys
        import ferrum_rpc.client, ferrum_rpc.service.server
        print(os.environ.get({POLLING_VARIABLE!r}), any("opentelemetry" in name for name in sys.modules))
    """
    assert output_of(code, **{POLLING_VARIABLE: None})[0] == "None False"


def test_grpc_knows_the_switches() -> None:
    """One that it no longer knows changes nothing any more, and it says so in a line that is easy to miss."""
    switches = f"{POLL_DIRECTLY},-event_engine_that_never_was"
    _, errors = output_of("import grpc; grpc.server(None)", **{POLLING_VARIABLE: switches})
    [unknown] = [line for line in errors.splitlines() if "Unknown experiment" in line]
    assert "event_engine_that_never_was" in unknown


TALKATIVE = """
import socket
from concurrent.futures import ThreadPoolExecutor

from ferrum_rpc import cli


def make_grpc_write(_):
    import grpc, trustme

    made = trustme.CA().issue_cert("localhost")
    pair = [(made.private_key_pem.bytes(), made.cert_chain_pems[0].bytes())]
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials(pair))
    server.start()
    with socket.create_connection(("127.0.0.1", port)) as peer:
        peer.sendall(b"this is no handshake" * 10)
        while peer.recv(100):
            pass
    server.stop(None).wait()
    return 0


cli._run = make_grpc_write
cli.main(["status"])
"""


@pytest.mark.parametrize(("said", "writes"), [(None, False), ("INFO", True)])
def test_a_failed_handshake_writes_no_line_of_grpcs_between_ours(said: str | None, writes: bool) -> None:
    _, errors = output_of(TALKATIVE, **{VERBOSITY: said})
    assert ("andshake" in errors) is writes and bool(errors) is writes


@pytest.mark.parametrize(
    ("choice", "module"), [("auto", "uvloop"), ("uvloop", "uvloop"), ("asyncio", "asyncio.unix_events")]
)
def test_the_loop_that_was_asked_for_is_made(choice: Any, module: str) -> None:
    loop = choose_loop(choice).make()
    try:
        assert type(loop).__module__ == module
    finally:
        loop.close()


def test_without_uvloop_auto_is_asyncio_and_asking_for_it_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str, *rest: Any) -> None:
        assert name == "uvloop"

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    assert choose_loop("auto").name == choose_loop("asyncio").name == "asyncio"
    with pytest.raises(ConfigError, match=r"pip install .*uvloop"):
        choose_loop("uvloop")


FAULTS_OF_TWENTY_ANSWERS = """
import os, resource
from ferrum_rpc.runtime import keep_freed_memory
if os.environ.get("KEEP"):
    keep_freed_memory()
def answer():
    return len(bytearray(b"rows") * (2 << 20)) + len(bytearray(b"rows") * (2 << 20))
answer()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    answer()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


UNSET: dict[str, str | None] = dict.fromkeys(MALLOC_VARIABLES)
OF_GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another libc keeps memory in its own way")


@OF_GLIBC
def test_freed_memory_of_an_answers_size_costs_no_page_faults() -> None:
    kept, _ = output_of(FAULTS_OF_TWENTY_ANSWERS, **UNSET | {"KEEP": "1"})
    not_kept, _ = output_of(FAULTS_OF_TWENTY_ANSWERS, **UNSET | {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)})
    assert int(kept) * 10 < int(not_kept)


MIB_LEFT_OF_A_BURST = """
import os, sys, time
from ferrum_rpc.runtime import keep_freed_memory
if os.environ.get("KEEP"):
    keep_freed_memory()
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20
before = resident()
burst = [bytes(16 << 10) for _ in range(4096)]
del burst[:-1]  # the last one lies above what was freed
until = time.monotonic() + float(sys.argv[1])
while resident() - before > 16 and time.monotonic() < until:
    time.sleep(0.01)
print(resident() - before)
"""


@OF_GLIBC
@pytest.mark.parametrize(("keep", "patience_s"), [("1", "30"), ("", "0")], ids=["asked to", "as it is"])
def test_what_lies_free_below_a_block_in_use_is_given_back(keep: str, patience_s: str) -> None:
    left, _ = output_of(MIB_LEFT_OF_A_BURST, patience_s, **UNSET | {"KEEP": keep})
    assert (int(left) <= 16) == bool(keep)


@pytest.mark.parametrize("name", MALLOC_VARIABLES)
def test_the_operators_own_setting_is_left_alone(name: str) -> None:
    assert keep_freed_memory({name: "1"}) == f"as {name} says"
