"""`make bench-peers`: ours beside every other engine that runs on this machine, one peer at a time, in one run.

Like beside like: a peer with 8-bit weights is measured against ours with 8-bit weights, the others against bfloat16.

The peers live in an environment of their own (``.venv-peers``, from ``benchmarks/peers-requirements.txt``). Each gets
the same weights and the same tokens as our server, and its rounds alternate with the server's: A B A B for every cell.
A peer that cannot be installed, started or driven is named with the reason, and the others go on.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from benchmarks import tables
from benchmarks.compare import Unsupported
from benchmarks.engines.grpc import INT8, Session, open_int8
from benchmarks.engines.process import REFERENCE, PeerKind, PeerProcess
from benchmarks.machine import ROOT
from benchmarks.record import Record
from benchmarks.suite import EAGER, Contest, add_options, fill
from ferrum_rpc.logs import configure_logging

SPINS: Final = {"GOMP_SPINCOUNT": "300000"}
"""llama.cpp meets at an OpenMP barrier after every operation, a thousand times a step: it gets libgomp's own default,
spelled out (the number is libgomp's), or each barrier would put its threads to sleep."""

PEERS: Final = (
    EAGER,
    PeerKind("transformers static, compiled", "hf", {"cache": "static"}),
    PeerKind("transformers continuous batching", "hf_continuous"),
    PeerKind("llama.cpp bf16", "llama_cpp_peer", {"type": "bf16"}, SPINS),
    PeerKind("llama.cpp Q8_0", "llama_cpp_peer", {"type": "q8_0"}, SPINS, rival=INT8),
)
LEFT_OUT: Final = {
    "OpenVINO GenAI": "its converter, optimum-intel 2.2.0, requires transformers < 5.6, and 5.23.0 is measured here",
}
"""Why a peer that one would look for is not among them."""

ENVIRONMENT: Final = ROOT / ".venv-peers"
REQUIREMENTS: Final = ROOT / "benchmarks" / "peers-requirements.txt"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description="Ours beside other engines.")
    parser.add_argument("--peers", nargs="+", choices=[each.name for each in PEERS], help="(default: all)")
    parser.add_argument("--python", type=Path, help="interpreter that has the peers; nothing is installed then")
    add_options(parser)
    options = fill(parser.parse_args(argv), "peers", rounds=3)
    options.peers = [each for each in PEERS if each.name in (options.peers or [each.name])]
    return options


def install() -> tuple[Path, dict[str, str]]:
    """The peers' interpreter, and what could not be installed, with the last line of why. Requirements go one by one:
    a compiler that is not there costs its peer only. Those that are there already cost a second."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
    failed = {}
    for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        print(f"installing {line} into {ENVIRONMENT.name}", flush=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", line]
        if line.startswith("llama-cpp-python"):
            command += ["--no-binary", "llama-cpp-python"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            failed[line] = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            print(f"{line} is not installed: {failed[line]}")
    return python, failed


async def run(options: argparse.Namespace, python: Path, failed: dict[str, str]) -> Record:
    """Our servers stay up; a peer after the other."""
    here = Contest(options, "peers", "qwen3-0.6b")
    cells, threads = options.cells, options.threads
    here.record.values["left_out"] |= LEFT_OUT
    async with AsyncExitStack() as stack:
        ours = {REFERENCE: await here.open(stack, REFERENCE, Session.open(here.folder, cells, threads))}
        if any(kind.rival == INT8 for kind in options.peers):
            ours[INT8] = await here.open(stack, INT8, open_int8(here.folder, cells, threads))
        here.record.save(not_installed=failed)
        for kind in options.peers:
            rival = kind.rival if ours.get(kind.rival) else REFERENCE
            async with AsyncExitStack() as its:
                opening = PeerProcess.open(kind, here.folder, threads, here.config["vocab_size"], python)
                side, peer = ours[rival], await here.open(its, kind.name, opening)
                if side and peer:
                    try:
                        await here.play(cells, {rival: side, kind.name: peer}, rival)
                    except Unsupported as error:  # it ended between two rounds
                        here.record.values["left_out"][kind.name] = str(error)
            here.record.save(limits=here.machine.limits())
    return here.record


def main(argv: Sequence[str] | None = None) -> None:
    """Install, measure, show, save."""
    options = parse(argv)
    configure_logging(level="warning")
    python, failed = (options.python, {}) if options.python else install()
    record = asyncio.run(run(options, python, failed))
    tables.show_suite(record.values)
    record.tell()


if __name__ == "__main__":
    main()
