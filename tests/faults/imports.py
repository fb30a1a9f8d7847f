"""R32: what a caller imports harms nobody else, whatever it is and however far it travels."""

from __future__ import annotations

import random
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.errors import Reason
from ferrum_rpc.executor.v1 import forward_pb2, kv_transfer_pb2, types_pb2
from ferrum_rpc.service.guard.auth import Security
from ferrum_rpc.wire.rows import rows_from_proto
from tests.faults.figures import Figures, at_least, at_most, exactly
from tests.faults.prefixes import ERROR, MODELS
from tests.faults.sizes import Size
from tests.support.serving import Served, serve_model
from tests.support.tokens import write_tokens
from tests.support.transfers import BYPASS, brought, chunks_of, exported, header, imported, sealed
from tests.support.wiring import full, item, pb, prefill, refusal, release

kt = kv_transfer_pb2
CALLERS: Final = {"attacker": "", "victim": "", "mover": " trusted"}
BLOCK: Final = 4
BLOCKS: Final = 96
TOKENS: Final = 6 * BLOCK
MORE: Final = 2 * BLOCK
CACHED: Final = forward_pb2.CreateOptions()
READ_ONLY: Final = forward_pb2.CreateOptions(cache_mode=forward_pb2.CACHE_MODE_READ_ONLY)


def swapped(chunk: kt.KvChunk) -> None:
    """K in place of V, of another prompt too."""
    chunk.keys.data, chunk.values.data = chunk.values.data, chunk.keys.data


def all_ones(chunk: kt.KvChunk) -> None:
    """Under which the identity model says 0, and no error comes."""
    for each in (chunk.keys, chunk.values):
        each.data = np.ones(len(each.data) // 4, np.float32).tobytes()


def not_a_number(chunk: kt.KvChunk) -> None:
    chunk.values.data = np.full(len(chunk.values.data) // 4, np.nan, np.float32).tobytes()


class Tally:
    """What happened over all rounds."""

    def __init__(self) -> None:
        self.error = 0.0
        self.rows = self.wrong = self.foreign = self.own = self.harmed = self.refused = self.shared = 0


class Callers:
    """The callers of one process, and the texts that the attacker has imported or computed from that."""

    def __init__(self, served: Served, expected: dict[tuple[int, ...], np.ndarray], tally: Tally) -> None:
        self.served, self.tally = served, tally
        self.attacker, self.victim, self.mover = (served.by(name) for name in CALLERS)
        self._expected = expected

    async def row(self, side: Served, text: Sequence[int], create: forward_pb2.CreateOptions) -> tuple[np.ndarray, int]:
        """The row behind a text, of a sequence that is released then, and how much of the text was found."""
        request = pb.PrefillRequest(item=item([*text, 1], output=full(), create=create))
        answer = await side.executor.Prefill(request)
        await release(side, answer.output.handle)
        return rows_from_proto(answer.row_blocks)[0]["logits"], answer.output.cached_tokens

    async def expected(self, text: Sequence[int]) -> np.ndarray:
        key = tuple(text)
        if key not in self._expected:
            self._expected[key], _ = await self.row(self.victim, text, BYPASS)
        return self._expected[key]

    async def differs(self, row: np.ndarray, text: Sequence[int]) -> float:
        """In standard deviations of the row that is right."""
        expected = await self.expected(text)
        error = float(np.abs(row - expected).max() / expected.std())
        return error if np.isfinite(error) else np.inf

    async def hold(self, texts: Iterable[Sequence[int]], known: int = 0) -> None:
        """Another caller prompts with each: the rows are those of the text, of which no more than ``known`` tokens were
        found, those that it has fed itself."""
        for text in texts:
            row, found = await self.row(self.victim, text, READ_ONLY)
            error = await self.differs(row, text)
            self.tally.rows += 1
            self.tally.error = max(self.tally.error, error)
            self.tally.wrong += error > ERROR
            self.tally.foreign += max(0, found - known)

    async def own(self, texts: Iterable[Sequence[int]]) -> None:
        """The attacker gets what it made itself."""
        for text in texts:
            row, found = await self.row(self.attacker, text, READ_ONLY)
            self.tally.own += found >= len(text) - len(text) % BLOCK
            self.tally.harmed += await self.differs(row, text) > ERROR

    async def forged(
        self, text: Sequence[int], other: Sequence[int], forge: Callable[[kt.KvChunk], None], name: str
    ) -> types_pb2.KvHandle:
        """Import the cache of another prompt, changed, under the tokens of this text. The checksums are right."""
        handle = await prefill(self.attacker, other, create=BYPASS)
        frames = await exported(self.attacker, handle)
        await release(self.attacker, handle)
        layout, chunks = frames[0].layout, chunks_of(frames)
        del layout.token_ids[:]
        layout.token_ids.extend(text)
        for chunk in chunks:
            forge(chunk)
        return await self._imported(self.attacker, layout, map(sealed, chunks), name)

    async def moved(self, side: Served, handle: types_pb2.KvHandle, name: str) -> types_pb2.KvHandle:
        """Export a sequence and import it again."""
        frames = await exported(side, handle)
        return await self._imported(side, frames[0].layout, chunks_of(frames), name)

    @staticmethod
    async def _imported(side: Served, layout: kt.KvLayout, chunks: Iterable[kt.KvChunk], name: str) -> Any:
        first = header(layout, name, cache_mode=forward_pb2.CACHE_MODE_UNSPECIFIED)
        return (await imported(side, first, *brought(chunks))).handle

    async def drive_out(self) -> None:
        """All that is published goes to the second tier."""
        hogs = [await prefill(self.victim, [5] * (BLOCKS // 2 * BLOCK), create=BYPASS) for _ in range(2)]
        await release(self.victim, *hogs)


@asynccontextmanager
async def callers(
    model: dict[str, Any], folder: Path, expected: dict[tuple[int, ...], np.ndarray], tally: Tally
) -> AsyncIterator[Callers]:
    tokens = write_tokens(folder, *[f"{name} {name}{role}" for name, role in CALLERS.items()])
    config = ModelSettings(
        device="cpu", kv_blocks=BLOCKS, block_size=BLOCK, kv_tier_dir=folder / "tier", **{**model, "kv_dtype": "auto"}
    )
    async with serve_model(config, security=Security(tokens=tokens), caller_share=1.0) as served:
        yield Callers(served, expected, tally)
        await served.check()


async def r32_an_import_harms_nobody_else(size: Size, seed: int = 32) -> Figures:
    """Under a prompt's tokens a caller imports swapped, all-ones and NaN K and V. Then it goes on behind them, forks,
    hits its own prompt, exports and imports again; everything gives way to the second tier, and the process is started
    again. Behind each step another caller prompts with all these texts; in the end it publishes the first itself."""
    tally, dice = Tally(), random.Random(seed)
    for place, (name, model) in enumerate(MODELS.items()):
        if "kv_dtype" in model:  # the chunks that are forged here are of float32
            continue
        for number in range(size.poisoned_imports):
            forge = (swapped, all_ones)[(place + number) % 2]
            with tempfile.TemporaryDirectory() as folder:
                start = partial(callers, model, Path(folder), {}, tally)
                await _round(start, forge, f"{name} {number}", dice, tally)
    imports = 2 * size.poisoned_imports
    return Figures(
        "What is imported harms nobody else",
        exactly("rows of another caller that differ", tally.wrong, 0),
        at_most("largest error of such a row, in standard deviations", tally.error, ERROR),
        exactly("tokens that another caller has found", tally.foreign, 0),
        exactly("imports of NaN that were not refused", imports - tally.refused, 0),
        exactly("own texts that their caller has not found", 12 * imports - tally.own, 0),
        at_least("rows that are wrong for the caller who imported", tally.harmed, 12 * imports),
        exactly("prompts of `trusted` callers that others have not found", 2 * imports - tally.shared, 0),
        facts={"imports": imports, "rows compared": tally.rows},
    )


async def _round(
    start: Callable[[], AbstractAsyncContextManager[Callers]],
    forge: Callable[[kt.KvChunk], None],
    name: str,
    dice: random.Random,
    tally: Tally,
) -> None:
    def draw(count: int) -> list[int]:
        return [dice.randrange(250) for _ in range(count)]

    prompt, other, honest = draw(TOKENS), draw(TOKENS), draw(TOKENS)
    texts = [prompt]
    async with start() as each:
        error = await refusal(each.forged(prompt, other, not_a_number, f"{name} nan"))
        tally.refused += error is not None and error.reason is Reason.KV_CORRUPT and "not_finite" in error.metadata
        await each.hold(texts)
        attacker = each.attacker
        handle = await each.forged(prompt, other, forge, name)
        await each.hold(texts)

        async def fed(begun: types_pb2.KvHandle | None, before: list[int]) -> types_pb2.KvHandle:
            """Feed more tokens behind a sequence, or a new one with those ``before``; others prompt with all of it."""
            more = draw(MORE)
            texts.append([*before, *more])
            tokens = [*more, 3] if begun else [*before, *more, 3]
            grown = await prefill(attacker, tokens, handle=begun)
            await each.hold(texts)
            return grown

        grown = await fed(handle, prompt)
        fork = pb.ForkKvRequest(handle=grown, at_length=TOKENS)
        [child] = (await attacker.executor.ForkKv(fork)).handles
        child = await fed(child, prompt)
        hit = await fed(None, prompt)
        again = await each.moved(attacker, child, f"{name} again")
        again = await fed(again, [*texts[-2], 3])
        await release(attacker, grown, child, hit, again)
        await each.hold(texts)
        await each.drive_out()
        await each.hold(texts)
        await each.own(texts[:4])
        await each.drive_out()
        await each.own(texts[:4])

        handle = await prefill(each.mover, honest, create=BYPASS)
        handle = await each.moved(each.mover, handle, f"{name} honest")
        await release(each.mover, handle)
        await _is_shared(each, honest)
    async with start() as each:
        await each.hold(texts)
        await each.own(texts[:4])
        await _is_shared(each, honest)
        await each.row(each.victim, prompt, CACHED)
        await each.hold(texts, known=TOKENS)  # what the attacker computed stands behind what is everybody's now
        row, found = await each.row(each.attacker, prompt, READ_ONLY)
        tally.wrong += found < TOKENS or await each.differs(row, prompt) > ERROR  # what was computed comes first


async def _is_shared(each: Callers, text: Sequence[int]) -> None:
    row, found = await each.row(each.victim, text, READ_ONLY)
    each.tally.shared += found == TOKENS and await each.differs(row, text) <= ERROR
