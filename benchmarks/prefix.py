"""What the prefix cache gains and costs: prompts that begin alike, a conversation, misses, and its books.

One server with the identity model and one with the shape that is timed, each in a process of its own; this process is
their scheduler, in a session. Sides with and without the cache take their rounds in turn, so that ratios are of one
run: without it a sequence is made with `CacheMode.BYPASS`. A round that must find nothing of earlier ones has a salt of
its own. Peers that are installed get the same prompts and the same weights, and look for prompts that they have seen
as well; none is installed by this program. The books of the cache are kept by a `KvManager` in this process, without a
model.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import prefix_tables
from benchmarks.cases import BLOCK_SIZE, DECODE, IDENTITY, PREFILL, SEED, Cell
from benchmarks.compare import Figures, Round, Unsupported, contest
from benchmarks.engines.grpc import TIMEOUT_S, Client, executor
from benchmarks.engines.process import REFERENCE, PeerProcess
from benchmarks.peers import ENVIRONMENTS, PEERS
from benchmarks.record import Contest, Record, finish, out_of, read_options
from ferrum_rpc.client import CacheMode, ExecutorClient
from ferrum_rpc.client import Sequence as ClientSequence
from ferrum_rpc.core import PREFIX
from ferrum_rpc.kv.manager import KvManager

MODES: Final = {"cache on": CacheMode.DEFAULT, "cache off": CacheMode.BYPASS}
ON, OFF = MODES
LESS_TARGET: Final = 20.0
"""Tokens computed without the cache, of those with it, at least."""

MISS_TARGET: Final = 1.01
"""Step with the cache that finds nothing, of one without it, at most."""

BOOKS_TARGET: Final = 0.05
"""Of a decode step of the timed shape at b32: the books of a step of `LIVE` sequences, at most."""

SEQUENCES: Final = 1000
SEEN: Final = Cell(PREFILL, 1, 528, shared=512)
QUICK_SEEN: Final = Cell(PREFILL, 1, 24, most=4, shared=16)
"""A prompt, and how much of it is the same in all."""

CALL_TOKENS: Final = 8192
"""Of the prompts of a call, at most."""

ALONE: Final = 200
"""Sequences, where a call has one prompt."""

SAMPLE: Final = 16
"""Sequences of a round without the cache, of a model for which all would take too long."""

TURNS: Final = 20
QUICK_TURNS: Final = 4
TURN: Final = 24
"""Tokens that a turn of the conversation adds."""

DECODED: Final = Cell(DECODE, 32, 256)
MISSES: Final = ((Cell(PREFILL, 1, 512), 8), (DECODED, 8))
QUICK_DECODED: Final = Cell(DECODE, 3, 8, most=4)
QUICK_MISSES: Final = ((Cell(PREFILL, 1, 24, most=4), 2), (QUICK_DECODED, 2))
"""Cells, and pairs of rounds of each."""

MISS_ROUND_S: Final = 1.0
KV_BLOCKS: Final = 2048
PEER_NAMES: Final = ("vLLM CPU bf16", "OpenVINO GenAI bf16")


Session = tuple[ExecutorClient, int]
"""A client, and the size of its model's vocabulary."""


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
    client: ExecutorClient, prompts: Sequence[list[int]], at_once: int, rounds: int, sample: int | None = None
) -> dict[str, list[Taken]]:
    """Rounds of both sides in turn. All of ``prompts`` are a round, and its sequences live at once. With a ``sample``
    the rounds share them, those with the cache live until the last round ends, and without it a round takes so many."""
    taken: dict[str, list[Taken]] = {side: [] for side in MODES}
    share = len(prompts) if sample is None else -(-len(prompts) // rounds)
    kept: list[ClientSequence] = []
    for number in range(rounds):
        start = 0 if sample is None else number * share
        salt = b"crowd %d of %d" % (0 if sample else number, at_once)
        for side, most in ((ON, share), (OFF, sample or share)):
            found, live = await feed(client, prompts[start : start + share][:most], at_once, side, salt)
            taken[side].append(found)
            if sample is None or side == OFF:
                await client.release(live)
            else:
                kept += live
    await client.release(kept)
    return taken


def crowd_figures(model: str, at_once: int, sequences: int, taken: Mapping[str, list[Taken]]) -> dict[str, Any]:
    """Of ``sequences`` prompts, as many as were ``measured`` or more: what those took, in proportion. ``first_ms``: of
    the first call, one prompt that nothing of was seen; ``call_ms``: of the others. ``times_seconds``: seconds of a
    sequence without the cache over those with it, by rounds."""
    sides: dict[str, Any] = {}
    for side, rounds in taken.items():
        measured = sum(each.sequences for each in rounds)
        seconds = [sum(each.seconds) for each in rounds]
        calls = [call for each in rounds for call in each.seconds[1:]]
        p10, median, p90 = np.percentile(np.array(calls) * 1e3, (10, 50, 90)).round(3).tolist()
        sides[side] = {
            "measured": measured,
            "blocks": round(sequences * sum(each.blocks for each in rounds) / measured),
            "computed": round(sequences * sum(each.computed for each in rounds) / measured),
            "seconds": round(sequences * sum(seconds) / measured, 3),
            "first_ms": round(1e3 * rounds[0].seconds[0], 3),
            "call_ms": {"median": median, "p10": p10, "p90": p90},
        }
    without, with_it = (np.array([sum(each.seconds) / each.sequences for each in taken[side]]) for side in (OFF, ON))
    times = (without / with_it).round(3).tolist()
    on, off = sides[ON], sides[OFF]
    return {
        "model": model,
        "at_once": at_once,
        "sequences": sequences,
        "sides": sides,
        "times_blocks": round(off["blocks"] / on["blocks"], 2),
        "times_computed": round(off["computed"] / on["computed"], 2),
        "times_seconds": {"median": float(np.median(times)), "low": min(times), "high": max(times)},
        "target": LESS_TARGET if sequences >= SEQUENCES else None,
    }


# --- a conversation ---------------------------------------------------------------------------------------------------


async def talk(client: ExecutorClient, tokens: Sequence[int], side: str, salt: bytes) -> list[tuple[int, float]]:
    """Turns of a new sequence each, with all that was said before and `TURN` tokens more; the one before it is
    released. Tokens that were computed, and seconds to the first token."""
    found = []
    for end in range(TURN, len(tokens) + 1, TURN):
        async with client.sequence(cache_salt=salt, cache_mode=MODES[side]) as sequence:
            began = time.perf_counter()
            answer = await sequence.prefill(tokens[:end])
            found.append((end - answer.cached_tokens, time.perf_counter() - began))
    return found


async def conversation(at: Session, length: int, rounds: int) -> dict[str, Any]:
    """Rounds of both sides in turn, of so many turns."""
    client, vocab_size = at
    talks: dict[str, list[list[tuple[int, float]]]] = {side: [] for side in MODES}
    for number in range(rounds):
        [said] = Cell(PREFILL, 1, length * TURN).fresh(vocab_size, number, 0).tolist()
        for side, each in talks.items():
            each.append(await talk(client, said, side, b"talk %d" % number))
    found = turns(talks)
    return {"turns": found, "talk": talk_figures(found)}


def turns(taken: Mapping[str, list[list[tuple[int, float]]]]) -> list[dict[str, Any]]:
    """Of each turn: tokens that it has and that are ``new``, what can be found least is ``to_compute`` (a block that
    was full in part is computed again), what was ``computed`` at most, and milliseconds with the cache and without."""
    found = []
    for index in range(len(taken[ON][0])):
        before = index * TURN
        ms = {side: float(np.median([1e3 * talk[index][1] for talk in talks])) for side, talks in taken.items()}
        found.append(
            {
                "turn": index + 1,
                "tokens": before + TURN,
                "new": TURN,
                "to_compute": TURN + before % BLOCK_SIZE,
                "computed": max(talk[index][0] for talk in taken[ON]),
                "on_ms": round(ms[ON], 3),
                "off_ms": round(ms[OFF], 3),
            }
        )
    return found


def talk_figures(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All turns together. ``of_to_compute``: tokens computed, of those that had to be."""
    sums = {name: sum(each[name] for each in found) for name in ("tokens", "new", "to_compute", "computed")}
    ms = {name: round(sum(each[name] for each in found), 1) for name in ("on_ms", "off_ms")}
    return {**sums, **ms, "turns": len(found), "of_to_compute": round(sums["computed"] / sums["to_compute"], 3)}


# --- a miss -----------------------------------------------------------------------------------------------------------


class Drawing(Client):
    """Feeds other tokens in every round of decode steps: what was fed before would be published already."""

    async def round(self, cell: Cell, number: int, steps: int) -> Round:
        """As a client."""
        return await super().round(replace(cell, draw=number), number, steps)


async def miss(model: str, at: Session, cell: Cell, rounds: int, round_s: float) -> Figures:
    """Steps with the cache that find nothing, beside the same without it. ``ratio``: of the pairs of rounds."""
    client, vocab_size = at
    players = {side: Drawing(client, None, vocab_size, cache_mode=mode) for side, mode in MODES.items()}
    found = await contest(cell, players, OFF, rounds, round_s)
    for player in players.values():
        await player.prepare(Cell(PREFILL, 1, 1))  # forget the sequences
    step_ms = {side: each["step_ms"] for side, each in found["sides"].items()}
    names = ("cell", "steps", "disturbed")
    return (
        {"model": model}
        | {each: found[each] for each in names}
        | {
            "step_ms": step_ms,
            "ratio": found["ratios"][ON],
            "target": MISS_TARGET,
        }
    )


# --- the books --------------------------------------------------------------------------------------------------------

LIVE: Final = 256
BOOK_STEPS: Final = 2 * BLOCK_SIZE
"""Each sequence begins a block twice, and fills and publishes two."""

BOOK_ROUNDS: Final = 20


@dataclass(frozen=True, slots=True)
class Size:
    """``live`` sequences of ``length`` tokens, a multiple of a block's, and ``cached`` blocks that none of them holds:
    as many as are begun in a round, or more."""

    length: int
    cached: int
    live: int = LIVE


SIZES: Final = (
    *(Size(length, 1000) for length in (256, 4096)),
    *(Size(4096, cached) for cached in (10_000, 100_000, 1_000_000)),
)
QUICK_SIZES: Final = (Size(16, 100, 4), Size(64, 1000, 4))


class Books:
    """A `KvManager` without a free block: whatever a sequence begins takes the place of a cached block."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self._generator = np.random.default_rng(SEED)
        blocks = size.live * size.length // BLOCK_SIZE + size.cached
        self._manager = KvManager(1 + blocks, BLOCK_SIZE)
        for number in range(size.live):
            self._make(number, size.length)
        rest = size.cached
        for number in itertools.count(size.live):
            if not rest:
                break
            took = min(rest, 256)
            self._make(number, took * BLOCK_SIZE)
            self._manager.release(number)
            rest -= took

    def round(self) -> list[float]:
        """Seconds of each of `BOOK_STEPS` decode steps of all sequences, from their length on."""
        manager, size = self._manager, self.size
        fed = self._generator.integers(0, 1 << 16, (BOOK_STEPS, size.live, 1), dtype=np.int32)
        step_s = []
        for index, tokens in enumerate(fed):
            began = time.perf_counter()
            opened = [manager.reserve(each, size.length + index, 1) for each in range(size.live)]
            for reservation, token in zip(opened, tokens, strict=True):
                manager.commit(reservation, token)
            step_s.append(time.perf_counter() - began)
        for each in range(size.live):
            manager.truncate(each, size.length)
        return step_s

    def _make(self, number: int, length: int) -> None:
        reservation = self._manager.reserve(number, 0, length, create=True, prefix=PREFIX)
        self._manager.commit(reservation, self._generator.integers(0, 1 << 16, length, dtype=np.int32))


def books(sizes: Sequence[Size], rounds: int) -> list[dict[str, Any]]:
    """Rounds of all sizes in turn. ``per_sequence_us``: of a sequence and step, the mean of a round, the median of the
    rounds; ``of_first``: in that of the first size, by rounds; ``step_ms`` of all sequences, and ``longest_ms``: of the
    step in which all begin a block, or publish one."""
    sides = [Books(size) for size in sizes]
    taken: list[list[list[float]]] = [[] for _ in sides]
    for _ in range(1 + rounds):
        for side, found in zip(sides, taken, strict=True):
            found.append(side.round())
    return [book_figures(size, found[1:], taken[0][1:]) for size, found in zip(sizes, taken, strict=True)]


def book_figures(size: Size, rounds: Sequence[list[float]], first: Sequence[list[float]]) -> dict[str, Any]:
    """Of one size."""
    means, others = np.mean(rounds, axis=1), np.mean(first, axis=1)
    return {
        "live": size.live,
        "length": size.length,
        "cached": size.cached,
        "per_sequence_us": round(1e6 * float(np.median(means)) / size.live, 3),
        "of_first": round(float(np.median(means / others)), 3),
        "step_ms": round(1e3 * float(np.median(means)), 4),
        "longest_ms": round(1e3 * float(np.median(np.max(rounds, axis=1))), 4),
    }


def share(found: Sequence[Mapping[str, Any]], decode: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The books again, with what they are of the decode step of a model: ``of_step``."""
    step_ms = decode["step_ms"][ON]["median"]
    return [{**each, "of_step": round(each["step_ms"] / step_ms, 4), "target": BOOKS_TARGET} for each in found]


# --- all of it --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def served(model: str, blocks: int, threads: int) -> AsyncIterator[Session]:
    """A server, and a session with it."""
    settings = {"device": "cpu", "threads": threads, "kv-blocks": blocks, "lease-ttl-s": TIMEOUT_S}
    async with (
        executor(model, settings) as ours,
        ExecutorClient(ours.target, session=True, timeout_s=TIMEOUT_S) as client,
    ):
        yield client, ours.vocab_size


async def run(options: argparse.Namespace) -> Record:
    """Measure everything and write the file."""
    here = Contest(options, "prefix", "qwen3-0.6b")
    record, seen, rounds, threads = here.record, options.seen, options.rounds, options.threads
    told = {"shared": seen.shared, "own": seen.context - seen.shared, "sequences": options.sequences, "sample": SAMPLE}
    record.values["settings"] |= told
    record.save(books=(found := books(options.sizes, BOOK_ROUNDS)), crowds=[], misses=[], turns=[])
    print("books: done", flush=True)
    at_once = CALL_TOKENS // seen.context

    async def crowds(model: str, at: Session, most: int, sample: int | None = None) -> None:
        prompts = seen.fresh(at[1], most, options.sequences - 1).tolist()
        if most == 1:
            prompts = prompts[:ALONE]
        taken = await crowd(at[0], prompts, most, rounds, sample)
        record.values["crowds"].append(crowd_figures(model, most, options.sequences, taken))
        record.save()
        print(f"{model}: {options.sequences} prompts, {most} at once: done", flush=True)

    async def misses(model: str, at: Session, cell: Cell, pairs: int) -> None:
        record.values["misses"].append(await miss(model, at, cell, pairs, options.miss_s))
        record.save()
        print(f"{model}: {cell.name}: done", flush=True)

    blocks = options.sequences * -(-seen.context // BLOCK_SIZE) + KV_BLOCKS
    async with served(IDENTITY, blocks, threads) as at:
        await crowds(IDENTITY, at, at_once)
        await misses(IDENTITY, at, *options.misses[-1])
    async with served(here.folder, KV_BLOCKS, threads) as at:
        name = record.values["model"]["name"]
        device = (await at[0].info()).device
        choices = [choice for choice, _ in device.choices]
        record.values["sides"][REFERENCE] = {"name": REFERENCE, "threads": device.threads, "choices": choices}
        for most in (1, at_once):
            await crowds(name, at, most, SAMPLE)
        record.save(**await conversation(at, options.turns, rounds))
        for cell, pairs in options.misses:
            await misses(name, at, cell, pairs)
        record.save(books=share(found, record.values["misses"][-1]))
        await beside(here, at)
    return record


async def beside(here: Contest, at: Session) -> None:
    """Ours and a peer, one peer at a time: prompts whose beginning was seen, and prompts of which nothing was."""
    options, left_out = here.options, here.record.values["left_out"]
    client, vocab_size = at
    for kind in (each for each in PEERS if each.name in PEER_NAMES):
        home = (options.installed or ENVIRONMENTS).resolve() / kind.environment
        if not home.is_dir():
            left_out[kind.name] = f"not installed: there is no environment {kind.environment!r}"
            continue
        looking = replace(kind, options={**kind.options, "prefix": True})
        # A salt for each peer: what ours has seen beside another one is not to be found again.
        ours = Client(client, None, vocab_size, cache_salt=kind.name.encode())
        async with AsyncExitStack() as its:
            opening = PeerProcess.open(looking, here.folder, options.threads, vocab_size, home)
            if peer := await here.open(its, kind.name, opening):
                try:
                    await here.play(options.cells, {REFERENCE: ours, kind.name: peer})
                except Unsupported as error:  # it ended between two rounds
                    left_out[kind.name] = str(error)
        here.record.save(limits=here.machine.limits())
    here.record.save()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prefix", description="What the prefix cache gains and costs."
    )
    parser.add_argument("--sequences", type=int, help=f"whose prompts begin alike (default: {SEQUENCES})")
    parser.add_argument("--installed", type=Path, help="folder of the peers' environments (default: .venv-peers)")
    options = read_options(parser, argv, rounds=3, round_s=2.0)
    quick = options.quick
    options.sequences = options.sequences or (32 if quick else SEQUENCES)
    options.seen, options.misses = (QUICK_SEEN, QUICK_MISSES) if quick else (SEEN, MISSES)
    options.sizes, options.miss_s = (QUICK_SIZES, options.round_seconds) if quick else (SIZES, MISS_ROUND_S)
    options.turns = QUICK_TURNS if quick else TURNS
    options.cells = (options.seen, replace(options.seen, shared=0))
    options.out = out_of(options, "prefix")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, show, save."""
    finish(run(parse(argv)), prefix_tables.show_all)


if __name__ == "__main__":
    main()
