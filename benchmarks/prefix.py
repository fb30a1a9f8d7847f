"""What the prefix cache gains and costs: prompts that begin alike, and misses.

Sides with and without the cache take their rounds in turn, so that ratios are of one run. A round that must find
nothing of earlier ones has a salt of its own. Peers that are installed get the same prompts and the same weights; none
is installed by this program.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from benchmarks import peers
from benchmarks.cases import BLOCK_SIZE, DECODE, IDENTITY, PREFILL, Cell
from benchmarks.compare import Round, contest, median, shares, spread
from benchmarks.engines.grpc import TIMEOUT_S, Client, connected, facts
from benchmarks.engines.process import REFERENCE
from benchmarks.record import Benchmark, Contest, Option, Record
from benchmarks.table import target
from ferrum_rpc.client import CacheMode, ExecutorClient
from ferrum_rpc.client import Sequence as ClientSequence

MODES: Final = {"cache on": CacheMode.DEFAULT, "cache off": CacheMode.BYPASS}
ON, OFF = MODES
LESS_TARGET: Final = 20.0  # tokens computed without the cache, of those with it, at least
MISS_TARGET: Final = 1.01  # step with the cache that finds nothing, of one without it, at most

SEQUENCES: Final = 1000  # of the identity model, which computes next to nothing
FEWER: Final = 48  # of another one
SEEN: Final = Cell(PREFILL, 1, 528, shared=512)  # a prompt, and how much of it is the same in all
CALL_TOKENS: Final = 8192  # of the prompts of a call, at most
MISSES: Final = (Cell(PREFILL, 1, 512), Cell(DECODE, 32, 256))
MISS_ROUNDS: Final = 8
MISS_ROUND_S: Final = 1.0
QUICK_SEEN: Final = Cell(PREFILL, 1, 24, most=4, shared=16)
QUICK_MISSES: Final = (Cell(PREFILL, 1, 24, most=4), Cell(DECODE, 3, 8, most=4))
KV_BLOCKS: Final = 2048
PEER_NAMES: Final = ("vLLM CPU bf16", "OpenVINO GenAI bf16")

Session = tuple[ExecutorClient, int]  # a client, and the size of its model's vocabulary


# --- many prompts that begin alike ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Taken:
    """What ``sequences`` took: ``blocks`` that were in use for them, tokens that were ``computed``, and the
    ``seconds`` of each call."""

    sequences: int
    blocks: int
    computed: int
    seconds: list[float] = field(default_factory=list)


async def feed(
    client: ExecutorClient, prompts: Sequence[list[int]], at_once: int, side: str, salt: bytes
) -> tuple[Taken, list[ClientSequence]]:
    """Sequences of ``prompts``, the first alone and then ``at_once`` in a call, until each has its first token."""
    before = await client.status()
    live = [client.sequence(cache_salt=salt, cache_mode=MODES[side]) for _ in prompts]
    seconds = []
    bounds = [0, *range(1, len(live), at_once), len(live)]
    for first, last in itertools.pairwise(bounds):
        began = time.perf_counter()
        items = [live[index].item(prompts[index]) for index in range(first, last)]
        (await client.forward(items)).all_answers()
        seconds.append(time.perf_counter() - began)
    after = await client.status()
    tokens = after.counters.tokens - before.counters.tokens
    cached = after.counters.cached_tokens - before.counters.cached_tokens
    return Taken(len(live), after.blocks.used - before.blocks.used, tokens - cached, seconds), live


async def crowd(
    client: ExecutorClient, prompts: Sequence[list[int]], at_once: int, rounds: int
) -> dict[str, list[Taken]]:
    """Rounds of both sides in turn. Sequences of a round live at once."""
    taken: dict[str, list[Taken]] = {side: [] for side in MODES}
    for number in range(rounds):
        for side, found in taken.items():
            each, live = await feed(client, prompts, at_once, side, b"crowd %d of %d" % (number, at_once))
            found.append(each)
            await client.release(live)
    return taken


def crowd_rows(model: str, at_once: int, taken: Mapping[str, list[Taken]]) -> list[dict[str, Any]]:
    """Without the cache, of with it: of seconds the median of the rounds."""
    rows: list[dict[str, Any]] = [
        {
            "model": model,
            "prompts a call": at_once,
            "cache": side,
            "sequences": rounds[0].sequences,
            "blocks": max(each.blocks for each in rounds),
            "tokens computed": max(each.computed for each in rounds),
            "seconds": median(sum(each.seconds) for each in rounds),
            "a call, ms": spread([call for each in rounds for call in each.seconds[1:]], digits=3),
            "first call, ms": median(1e3 * each.seconds[0] for each in rounds),
        }
        for side, rounds in taken.items()
    ]
    on, off = rows
    on["blocks without, ×"] = round(off["blocks"] / on["blocks"], 2)
    on["computed without, ×"] = less = round(off["tokens computed"] / on["tokens computed"], 2)
    what = f"{on['sequences']:,} prompts that share 512 tokens, {model}: computed without the prefix cache, of with it"
    on["target"] = target(what, less, LESS_TARGET, unit=" ×")
    without, with_it = ([sum(each.seconds) for each in taken[side]] for side in (OFF, ON))
    on["seconds without, ×"] = shares(without, with_it)
    return rows


# --- a miss -----------------------------------------------------------------------------------------------------------


class Drawing(Client):
    """Feeds other tokens in every round of decode steps: what was fed before would be published already."""

    async def round(self, cell: Cell, number: int, steps: int) -> Round:
        return await super().round(replace(cell, draw=number), number, steps)


async def miss(model: str, at: Session, cell: Cell, rounds: int, round_s: float) -> dict[str, Any]:
    """Steps with the cache that find nothing, and the same without it."""
    client, vocab_size = at
    players = {side: Drawing(client, None, vocab_size, cache_mode=mode) for side, mode in MODES.items()}
    found = await contest(cell, players, OFF, rounds, round_s)
    for player in players.values():
        await player.prepare(Cell(PREFILL, 1, 1))  # forget the sequences
    step_ms = {f"{side}, ms": each["step_ms"] for side, each in found["sides"].items()}
    what = f"{model}, {cell.name} with the prefix cache that finds nothing, of without it"
    standing = target(what, found["ratios"][ON]["median"], MISS_TARGET, least=False)
    return {"model": model, "step": cell.name} | step_ms | {"on in off": found["ratios"][ON], "target": standing}


# --- all of it --------------------------------------------------------------------------------------------------------


async def run(options: argparse.Namespace) -> Record:
    """Measure everything and write the file."""
    quick, rounds = options.quick, options.rounds
    seen, misses = (QUICK_SEEN, QUICK_MISSES) if quick else (SEEN, MISSES)
    here = Contest(options)
    record, rows = here.record, {name: list[dict[str, Any]]() for name in here.record.values["tables"]}
    told = f"of {seen.shared} tokens that are shared and {seen.context - seen.shared} of their own"
    record.values["settings"]["prompts"] = told

    def add(part: str, *found: dict[str, Any]) -> None:
        rows[part] += found
        record.put(part, rows[part])
        print(f"{part}: {len(rows[part])} rows", flush=True)

    async def crowds(model: str, at: Session, at_once: int, sequences: int) -> None:
        prompts = seen.fresh(at[1], at_once, sequences - 1).tolist()
        add("crowds", *crowd_rows(model, at_once, await crowd(at[0], prompts, at_once, rounds)))

    async def misses_of(model: str, at: Session, *cells: Cell) -> None:
        pairs, round_s = (rounds, options.round_seconds) if quick else (MISS_ROUNDS, MISS_ROUND_S)
        for cell in cells:
            add("misses", await miss(model, at, cell, pairs, round_s))

    at_once, sequences = CALL_TOKENS // seen.context, options.sequences
    settings = {"device": "cpu", "threads": options.threads, "lease-ttl-s": TIMEOUT_S}
    blocks = sequences * -(-seen.context // BLOCK_SIZE) + KV_BLOCKS
    async with connected(IDENTITY, settings | {"kv-blocks": blocks}) as (ours, client):
        await crowds(IDENTITY, (client, ours.vocab_size), at_once, sequences)
        await misses_of(IDENTITY, (client, ours.vocab_size), misses[-1])
    async with connected(here.folder, settings | {"kv-blocks": KV_BLOCKS}) as (ours, client):
        at = client, ours.vocab_size
        about = await client.info()
        record.values["sides"][REFERENCE] = facts(REFERENCE, about.device, about.model)
        for each in (1, at_once):
            await crowds(here.model, at, each, min(FEWER, sequences))
        await misses_of(here.model, at, *misses)
        await beside(here, at, seen)
    return record


async def beside(here: Contest, at: Session, seen: Cell) -> None:
    """Ours and a peer, one peer at a time: prompts whose beginning was seen, and prompts of which nothing was."""
    client, vocab_size = at
    for kind in (each for each in peers.PEERS if each.name in PEER_NAMES):
        if not (peers.ENVIRONMENTS / kind.environment).is_dir():
            here.leave_out(kind.name, f"not installed: there is no environment {kind.environment!r}")
            continue
        looking = replace(kind, options={**kind.options, "prefix": True})
        # A salt for each peer: what ours has seen beside another one is not to be found again.
        ours = Client(client, None, vocab_size, cache_salt=kind.name.encode())
        await peers.against(here, (seen, replace(seen, shared=0)), looking, REFERENCE, ours)


BENCHMARK: Final = Benchmark(
    "prefix",
    run,
    (Option("--sequences", SEQUENCES, "whose prompts begin alike", 32),),
    rounds=3,
    round_s=2.0,
)
