"""R27: a prefix is shared only by those who may, and who finds one gets what computing it would have given."""

from __future__ import annotations

import random
from typing import Any, Final

import numpy as np

from ferrum_rpc.client import CacheMode, ExecutorClient, FullLogits
from ferrum_rpc.config import ModelSettings
from tests.faults.figures import Figures, at_least, at_most, exactly
from tests.faults.models import DEMO, Model
from tests.faults.sizes import Size
from tests.support.grammars import MODEL
from tests.support.serving import serve_model

TENANTS: Final = (b"", b"one", b"another")
LONGEST: Final = 160
TIMED: Final = 512
ERROR: Final = 1e-4
"""Of logits, in their standard deviations: what float32 in another order of sums may differ by."""

ROUNDED_ERROR: Final = 5e-3
"""Over a cache in 8 bits: a number that lies between two may then be rounded the other way."""

MODELS: Final[dict[str, dict[str, Any]]] = {
    "identity": {"path": "identity", "identity_positional": True},
    "demo, float32": {"path": str(MODEL), "dtype": "float32"},
    "demo, float32, cache in int8": {"path": str(MODEL), "dtype": "float32", "kv_dtype": "int8"},
}
BITS: Final = "identity"
"""Fed in pieces that give the bits of single tokens, here a hit has the very bits of a miss."""


async def r27_a_prefix_is_shared_by_those_who_may(size: Size, model: Model | None = None) -> Figures:
    """Tenants whose prompts have beginnings in common feed them in random pieces; each row beside that of the same
    tokens without the cache, and what was found beside what the tenant itself has fed. Then how long prompts take that
    another has seen, that nobody has, and that the tenant has."""
    errors, wrong_bits, foreign, hits = {False: 0.0, True: 0.0}, 0, 0, 0
    models = {"": model.settings | {"dtype": "float32"}} if model else MODELS
    for name, settings in models.items():
        rounded = "kv_dtype" in settings
        async with (
            serve_model(ModelSettings(device="cpu", kv_blocks=4096, block_size=4, **settings)) as served,
            ExecutorClient(served.target) as client,
        ):
            exact = (await client.info()).limits.exact_span_tokens
            dice, fed = random.Random(27), {tenant: list[list[int]]() for tenant in TENANTS}
            trunk = [dice.randrange(250) for _ in range(LONGEST)]
            for _ in range(size.shared_prompts):
                tenant = dice.choice(TENANTS)
                prompt = trunk[: dice.randrange(LONGEST)] + [dice.randrange(250) for _ in range(dice.randint(2, 40))]
                piece = exact if name == BITS else dice.choice((16, 33, len(prompt)))
                async with (
                    client.sequence(cache_salt=tenant) as one,
                    client.sequence(cache_mode=CacheMode.BYPASS) as other,
                ):
                    answer = await one.prefill(prompt, FullLogits(), chunk=piece)
                    expected = (await other.prefill(prompt, FullLogits(), chunk=piece)).logits
                found = answer.cached_tokens
                hits += found > 0
                own = max((_common(prompt, each) for each in fed[tenant]), default=0)
                foreign += found > own
                fed[tenant].append(prompt)
                error = float(np.abs(answer.logits - expected).max() / expected.std())
                errors[rounded] = max(errors[rounded], error)
                wrong_bits += name == BITS and answer.logits.tobytes() != expected.tobytes()
            await served.check()
    seconds = await _timed(size.timed_prompts, model or DEMO)
    unseen = min(seconds["nobody's"])  # of the quickest: what else runs here only adds
    others, own_s = (min(seconds[name]) / unseen for name in ("another's", "own"))
    return Figures(
        "A prefix is shared only by those who may",
        at_most("largest error of a row behind a hit, in standard deviations", errors[False], ERROR),
        *([] if model else [at_most("the same over a cache in 8 bits", errors[True], ROUNDED_ERROR)]),
        *([] if model else [exactly("rows with other bits, where pieces give those of single tokens", wrong_bits, 0)]),
        exactly("tokens found that the tenant had not fed", foreign, 0),
        at_least("hits", hits, size.shared_prompts // 4),
        at_least("time of a prompt that another has seen, of one that nobody has", others, 0.7, "x"),
        at_most("time of a prompt that the tenant has seen, of the same: the clock would show it", own_s, 0.5, "x"),
        facts={"prompts": size.shared_prompts * len(models), "timed": size.timed_prompts},
    )


def _common(one: list[int], other: list[int]) -> int:
    """Tokens that two prompts begin with alike."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


async def _timed(count: int, model: Model) -> dict[str, list[float]]:
    """Seconds of forward passes, in turn."""
    seconds: dict[str, list[float]] = {"nobody's": [], "another's": [], "own": []}
    dice = random.Random(270)
    async with (
        serve_model(model.config(dtype="float32", kv_blocks=8192)) as served,
        ExecutorClient(served.target) as client,
    ):

        async def prefill(tokens: list[int], salt: bytes) -> float:
            async with client.sequence(cache_salt=salt) as sequence:
                return (await sequence.prefill(tokens)).timing.forward_s

        for _ in range(count):
            seen, unseen = ([dice.randrange(250) for _ in range(TIMED)] for _ in range(2))
            await prefill(seen, b"victim")
            turns = {"nobody's": (unseen, b"attacker"), "another's": (seen, b"attacker"), "own": (seen, b"victim")}
            for name in dice.sample(sorted(turns), len(turns)):
                seconds[name].append(await prefill(*turns[name]))
    return seconds
