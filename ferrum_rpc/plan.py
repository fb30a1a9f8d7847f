"""`ferrum-rpc plan`: whether a model fits a memory, from its configuration and the headers of its files.

It makes the choices that `serve` makes with the same settings, for this machine or, with a given memory, for a GPU that
is not in it. No weight is read.
"""

from __future__ import annotations

import dataclasses
import json
import sys

from ferrum_rpc.building import planned
from ferrum_rpc.config import ServeSettings
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.terminal import columns, hanging, wrap

EXIT_FITS, EXIT_TOO_LARGE = 0, 2


def plan(settings: ServeSettings, memory: int | None, *, as_json: bool) -> int:
    """Print the plan for ``memory`` bytes (None: what is free here). Exit status 2 if it does not fit. Raises
    `ExecutorError` for a folder that cannot be served."""
    _, made = planned(settings, memory, elsewhere=True)
    from ferrum_rpc.engine.assembly.plan import MemoryPlan, gib

    def lines(made: MemoryPlan) -> list[tuple[str, str, str]]:
        sequences = f"{made.full_sequences:,.1f} sequences of {made.max_context:,} tokens"
        estimate = ", an estimate" if made.estimated else ""
        weights = made.dtype if made.quantize == "none" else f"{made.quantize}, the rest {made.dtype}"
        slots = f"{made.state_slots:,} slots of {gib(made.state_bytes)}, one for each live sequence"
        left, others = made.memory_bytes - made.all_bytes, made.others.ranks
        alone = "what follows is of the first of them" + (", until all" if others else " alone")
        return [
            ("memory", gib(made.memory_bytes), f"on {made.device}"),
            *([("ranks", str(made.ranks), alone)] if made.ranks > 1 else []),
            ("weights", gib(made.weights_bytes), f"{made.architecture}, {weights}"),
            *([("adapters", gib(made.adapters_bytes), "--adapter-memory")] if made.adapters_bytes else []),
            ("activations", gib(made.activations_bytes), f"of a step of {made.step_tokens:,} tokens{estimate}"),
            *([("sampling", gib(made.sampling_bytes), "of its rows")] if made.sampling_bytes else []),
            *([("reserve", gib(made.reserve_bytes), "context, workspaces, graphs")] if made.reserve_bytes else []),
            ("kv cache", gib(made.kv_bytes), f"{made.kv_blocks:,} blocks of {made.block_size} tokens: {made.reason}"),
            ("", "", f"{made.kv_tokens:,} tokens of {made.kv_bytes_per_token:,} bytes ({made.kv_dtype}), {sequences}"),
            *([("states", gib(made.slots_bytes), slots)] if made.state_slots else []),
            *([("all", gib(made.all_bytes), f"of {1 + others} ranks on this machine")] if others else []),
            ("left", gib(max(0, left)), "it does not fit" if left < 0 else ""),
        ]

    if not made.memory_bytes:
        raise InvalidRequest("the free memory is unknown: set it, as in --memory 16GiB", field="memory")
    if as_json:
        facts = dataclasses.asdict(made)
        facts["others"] = made.others._asdict()
        for name in (
            "kv_tokens",
            "kv_bytes",
            "slots_bytes",
            "full_sequences",
            "total_bytes",
            "all_bytes",
            "fits",
            "advice",
        ):
            facts[name] = getattr(made, name)
        print(json.dumps(facts))
    else:
        width = columns(sys.stdout)
        for name, size, text in lines(made):
            print(*hanging(f"{name:<12} {size:>11}   ", text, width), sep="\n")
        if made.advice:
            print(*wrap(made.advice, width), sep="\n")
    return EXIT_FITS if made.fits else EXIT_TOO_LARGE
