"""R15, of adapters: what comes and goes by the thousand leaves nothing, and nobody beside it notices."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from ferrum_rpc.errors import Reason
from ferrum_rpc.executor.v1 import executor_control_pb2 as control_pb
from ferrum_rpc.executor.v1 import forward_pb2, types_pb2
from ferrum_rpc.models.spec import ModelSpec
from ferrum_rpc.wire.rows import rows_from_proto
from tests.faults.figures import Figures, at_least, at_most, exactly
from tests.faults.sizes import Size
from tests.support.adapters import Weights, make_adapter
from tests.support.process import ROOT, Dialled, dialled
from tests.support.wiring import GREEDY, item, pb, prefill, refusal, release

MODEL: Final = "demo-draft"
STAYS: Final = "stays"
COMING: Final = {"one": 4, "two": 16}
"""Those that come and go, with their ranks."""

PROMPT: Final = list(b"In the beginning was")
TOKENS: Final = 6
"""Of a text that is compared."""

NOISE_BYTES: Final = 512 << 10
"""As of R15's calls."""

WARM_CYCLES, WARM_ROUNDS = 30, 10
"""At least, of a round, and rounds at most. oneDNN keeps what it has compiled for each number of rows, and a few cycles
do not meet them all: where it computes the products in float32, the next 20 added up to 7 MB after 5 cycles, and 2 MB
after 60 on a busy machine. So rounds are made until one adds little; with a leak none does."""

MEASURED_ROUNDS: Final = 3
"""At most: a number of rows that warm-up has not met adds 2 MB to one round, a leak adds to each."""

SETTLED_S: Final = 5.0
"""Within this a file or a connection that is being closed is."""

CYCLE_BYTES: Final = 1 << 10
"""A cycle makes a sequence, whose end is remembered for a while. The smaller adapter takes 36 KiB."""


async def r15_adapters_come_and_go(size: Size) -> Figures:
    """Two adapters are loaded, used, asked to go while they are used, and unloaded, over and over, while sequences of
    another adapter and of none are decoded. Every text beside the one that was made before."""
    seen: Counter[str] = Counter()
    bound = NOISE_BYTES + CYCLE_BYTES * size.adapter_cycles
    with tempfile.TemporaryDirectory() as folder:
        for seed, (name, rank) in enumerate({STAYS: 8, **COMING}.items()):
            config = json.loads((ROOT / "ferrum_rpc_demo" / MODEL / "config.json").read_text())
            make_adapter(Path(folder) / name, Weights(ModelSpec.from_config(config)), r=rank, seed=seed, size=2.0)
        flags = ("--adapter-dir", folder, "--replay-bytes", "64KiB", "--max-sequences", "64")
        async with dialled(*flags, model=MODEL, kv_blocks=256, fresh=size.absolute) as (server, client):
            texts = await _texts(client)
            async with _beside(client, texts, seen):
                for _ in range(WARM_ROUNDS):
                    cold = server.rss_bytes()
                    await _cycles(client, texts, seen, max(WARM_CYCLES, size.adapter_cycles // 10))
                    warm, handles = server.rss_bytes(), server.descriptors()
                    if warm - cold < NOISE_BYTES // 2:
                        break
                for _ in range(MEASURED_ROUNDS):
                    seen.clear()
                    await _cycles(client, texts, seen, size.adapter_cycles)
                    settled = await server.settled_rss_bytes()
                    grown, warm = max(0, settled - warm), settled
                    if grown <= bound:
                        break
                opened, _ = await server.settled_descriptors(handles, SETTLED_S)
            await _unload(client, STAYS)
            loaded = await client.control.ListAdapters(control_pb.ListAdaptersRequest())
            held = sum(await client.held()) + len(loaded.adapters)
    return Figures(
        "Nothing leaks: adapters that come and go",
        at_least("cycles of loading and unloading", seen["cycles"], size.adapter_cycles),
        at_least("texts decoded meanwhile, of another adapter and of none", seen["beside"], size.adapter_cycles),
        exactly("texts that were other than before", seen["wrong"], 0),
        at_least("adapters that were not unloaded while they were used", seen["in use"], size.adapter_cycles),
        at_least("adapters that were unknown once they had gone", seen["gone"], size.adapter_cycles),
        exactly("sequences, blocks and adapters left", held, 0),
        at_most("descriptors left", opened - handles, 0),
        at_most("memory that cycles after warm-up took", grown, bound, "bytes"),
        facts={"rss bytes": warm, "grown": grown, "seen": dict(seen)},
    )


async def _load(client: Dialled, name: str) -> None:
    await client.control.LoadAdapter(control_pb.LoadAdapterRequest(name=name))


async def _unload(client: Dialled, name: str) -> None:
    await client.control.UnloadAdapter(control_pb.UnloadAdapterRequest(name=name))


async def _texts(client: Dialled) -> dict[str, list[int]]:
    """What each adapter makes of the prompt, and the plain model. Leaves `STAYS` loaded."""
    made = {}
    for name in ("", STAYS, *COMING):
        if name:
            await _load(client, name)
        made[name], handle = await _text(client, await _created(client, name))
        await release(client, handle)
    for name in COMING:
        await _unload(client, name)
    assert len({tuple(text) for text in made.values()}) == len(made), "adapters that say the same show nothing"
    return made


async def _created(client: Dialled, adapter: str) -> types_pb2.KvHandle:
    """A sequence with all of the prompt but its last token."""
    return await prefill(client, PROMPT[:-1], create=forward_pb2.CreateOptions(adapter=adapter))


async def _text(client: Dialled, handle: types_pb2.KvHandle) -> tuple[list[int], types_pb2.KvHandle]:
    """The prompt's continuation. Calls have no request ids: nothing is recorded, and memory is not for that."""
    tokens, made, cut = PROMPT[-1:], list[int](), {"truncate_to": len(PROMPT) - 1}
    while len(made) < TOKENS:
        request = pb.DecodeRequest(item=item(tokens, handle, output=GREEDY, **cut))
        answer = await client.executor.Decode(request)
        [block] = rows_from_proto(answer.row_blocks)
        tokens = [int(block["token_ids"][answer.output.rows.first])]
        handle, made, cut = answer.output.handle, made + tokens, {}
    return made, handle


@asynccontextmanager
async def _beside(client: Dialled, texts: dict[str, list[int]], seen: Counter[str]) -> AsyncIterator[None]:
    """Two sequences that live on and are decoded all the while."""

    async def decode(name: str) -> None:
        handle = await _created(client, name)
        while not done:
            text, handle = await _text(client, handle)
            seen["wrong"] += text != texts[name]
            seen["beside"] += 1
        await release(client, handle)

    done = False
    tasks = [asyncio.create_task(decode(name)) for name in ("", STAYS)]
    try:
        yield
    finally:
        done = True
        await asyncio.gather(*tasks)


async def _cycles(client: Dialled, texts: dict[str, list[int]], seen: Counter[str], count: int) -> None:
    async def cycle(name: str) -> None:
        await _load(client, name)
        text, handle = await _text(client, await _created(client, name))
        seen["wrong"] += text != texts[name]
        in_use = await refusal(_unload(client, name))
        await release(client, handle)
        await _unload(client, name)
        gone = await refusal(_created(client, name))
        seen["in use"] += in_use is not None and in_use.reason is Reason.ADAPTER_IN_USE
        seen["gone"] += gone is not None and gone.reason is Reason.ADAPTER_UNKNOWN
        seen["cycles"] += 1

    async def turns(name: str) -> None:
        for _ in range(-(-count // len(COMING))):
            await cycle(name)

    await asyncio.gather(*[turns(name) for name in COMING])
