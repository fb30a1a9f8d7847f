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
from typing import Any, Final

from benchmarks import environment
from benchmarks.cells import Cell
from benchmarks.contest import CellResult, Plan, contest, under_roofs
from benchmarks.limits import Machine
from benchmarks.ours import INT8, REFERENCE, Player, Session, Unsupported, open_int8
from benchmarks.peer_process import EAGER, PeerFailed, PeerKind, PeerProcess
from benchmarks.record import Record, model_facts
from benchmarks.suite import add_common, common, described, model
from benchmarks.suite_tables import show
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

ENVIRONMENT: Final = environment.ROOT / ".venv-peers"
REQUIREMENTS: Final = environment.ROOT / "benchmarks" / "peers-requirements.txt"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description="Ours beside other engines.")
    parser.add_argument("--peers", nargs="+", choices=[each.name for each in PEERS], help="(default: all)")
    parser.add_argument("--python", type=Path, help="interpreter that has the peers; nothing is installed then")
    add_common(parser, "peers", rounds=3)
    options = common(parser.parse_args(argv), "peers")
    wanted = options.peers or [each.name for each in PEERS]
    options.peers = [each for each in PEERS if each.name in wanted]
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
    return python, failed


async def run(options: argparse.Namespace, python: Path, failed: dict[str, str]) -> Record:
    """Our server stays up; a peer after the other."""
    folder, config = model(options.quick)
    cells: Sequence[Cell] = options.cells
    record = Record("peers", described(options), options.out)
    left_out = dict(LEFT_OUT)
    results: list[CellResult] = []
    sides: dict[str, Any] = {}
    machine = Machine(options.threads, quick=options.quick)
    async with AsyncExitStack() as stack:
        ours = {REFERENCE: await stack.enter_async_context(Session.open(str(folder), cells, options.threads))}
        if any(kind.rival == INT8 for kind in options.peers):
            try:
                ours[INT8] = await stack.enter_async_context(open_int8(str(folder), cells, options.threads))
            except Unsupported as error:
                left_out[INT8] = str(error)
        sides |= {name: session.facts for name, session in ours.items()}
        record.save(model=model_facts(folder.name, config), sides=sides, not_installed=failed)
        machine.read()
        for kind in options.peers:
            rival = kind.rival if kind.rival in ours else REFERENCE
            try:
                async with PeerProcess.open(kind, str(folder), options.threads, config["vocab_size"], python) as peer:
                    sides[kind.name] = peer.facts
                    for cell in cells:
                        machine.read()
                        results.append(await _beside(cell, rival, ours[rival], kind.name, peer, options))
            except (PeerFailed, Unsupported, OSError) as error:
                left_out[kind.name] = str(error)
            under_roofs(results, cells, config, machine)
            record.save(cells=results, sides=sides, left_out=left_out, limits=machine.limits())
            print(f"{kind.name}: {left_out.get(kind.name, 'done')}", flush=True)
    return record


async def _beside(  # noqa: PLR0917 - called once
    cell: Cell, rival: str, session: Session, name: str, peer: PeerProcess, options: argparse.Namespace
) -> CellResult:
    players: dict[str, Player] = {rival: session, name: peer}
    return await contest(cell, players, rival, Plan(options.rounds, options.round_seconds))


def main(argv: Sequence[str] | None = None) -> None:
    """Install, measure, show, save."""
    options = parse(argv)
    configure_logging(level="warning")
    python, failed = (options.python, {}) if options.python else install()
    for requirement, reason in failed.items():
        print(f"{requirement} is not installed: {reason}")
    record = asyncio.run(run(options, python, failed))
    show(record.values)
    record.tell()


if __name__ == "__main__":
    main()
