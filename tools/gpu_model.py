"""The model's cells of the GPU check: what graphs change in the answers (nothing) and in time, and the step's targets.

Every cell is a dict with a ``name``, whether it ``passed``, and its figures. A limit is what the weights and the cache
take at the bandwidth that was measured in the same run (the roofline of Williams, Waterman and Patterson, 2009).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from benchmarks.shapes import QWEN3_8B
from benchmarks.shapes import TINY as TINY_MODEL
from ferrum_rpc.attention.staging import Layout, Staging
from ferrum_rpc.attention.torch_paged import TorchPagedAttention
from ferrum_rpc.attention.triton_store import store
from ferrum_rpc.core import TokenRows
from ferrum_rpc.engine.graphs import WORTH_RECORDING
from ferrum_rpc.models.row_ops import TorchRowOps
from tools.gpu_attention import alternate_calls
from tools.gpu_world import LEAD_IN, Step, World, alternate, ratios

Cell = dict[str, Any]

SAME: Final = 2e-2
"""Largest root mean square by which a replayed step may differ from an eager one, in standard deviations: products of
padded batches round otherwise, once a layer, in bfloat16."""


@dataclass(frozen=True, slots=True)
class Size:
    """How large everything is: ``decodes`` are (batch, context, share of the limit to reach)."""

    model: dict[str, Any]
    decodes: tuple[tuple[int, int, float], ...]
    verify: tuple[int, int, int]
    prefill: tuple[int, float]
    stored: tuple[int, ...]
    rounds: int
    steps: int
    lead_in: int = LEAD_IN

    @property
    def blocks(self) -> int:
        """Blocks that the largest cell needs, the null block not counted."""
        most = max(batch * (context + 96) for batch, context, _ in self.decodes)
        return -(-max(2 * most, self.prefill[0] + 64) // 16) + 64  # twice: gRPC and in process


FULL: Final = Size(
    QWEN3_8B, ((1, 1023, 0.85), (64, 2047, 0.80)), (16, 1023, 5), (8192, 0.60), (1, 64, 8192), rounds=5, steps=30
)
TINY: Final = Size(TINY_MODEL, ((1, 20, 0.0), (4, 3, 0.0)), (1, 9, 3), (24, 0.0), (3,), rounds=1, steps=1, lead_in=0)
"""For the interpreter: whether the cells themselves run; its targets are met by anything."""


def parity_cells(world: World, size: Size) -> Iterator[Cell]:
    """Replayed steps against eager ones, over the same cache."""
    cases = [(batch, context, 1) for batch, context, _ in size.decodes]
    batch, context, _ = size.decodes[-1]
    cases += [(batch - 1, context, 1), size.verify]  # padded by a row
    for batch, context, tokens in cases:
        step = Step(world, batch, context, tokens)
        with world.eager():
            hidden, rows = step.run()
            expected, ids = hidden.float(), _ids(rows)
        for _ in range(WORTH_RECORDING if tokens > 1 else 1):
            hidden, rows = step.run()
        error = float((hidden.float() - expected).square().mean().sqrt() / expected.std())
        yield {
            "name": f"graphs against eager: {batch} x {tokens} tokens after {context}",
            "passed": error <= SAME,  # and not where it is NaN
            "error": error,
            "tolerance": SAME,
            "bitwise": torch.equal(hidden.float(), expected),
            "same_tokens": float((_ids(rows) == ids).mean()),
        }
    graphs = world.compute.graphs
    assert graphs is not None
    yield {
        "name": "every shape was recorded",
        "passed": graphs.closed is None and len(graphs.recorded) == len(cases) - 1,
        "recorded": [list(shape) for shape in graphs.recorded],
        "closed": graphs.closed,
    }


def decode_cells(world: World, size: Size, limits: dict[str, float]) -> Iterator[Cell]:
    """Tokens a second with graphs, without, and with torch's own operations between the products."""
    for batch, context, share in size.decodes:
        step = Step(world, batch, context)
        plain = TorchRowOps(world.model.spec, torch.bfloat16)
        graphs, other = world.compute.graphs, world.graphs(batch, context + 128)
        world.model._ops = plain
        step.run()  # recorded with these
        world.model._ops, world.compute.graphs = world.ops, graphs

        def eager(index: int, step: Step = step) -> None:
            with world.eager():
                step.run(index)

        def torch_rows(index: int, step: Step = step, other: Any = other) -> None:
            kept, world.compute.graphs = world.compute.graphs, other
            step.run(index)
            world.compute.graphs = kept

        sides: dict[str, Callable[[int], object]] = {"graphs": step.run, "eager": eager, "torch_rows": torch_rows}
        seconds = alternate(sides, size.rounds, size.steps, size.lead_in)
        best = median(seconds["graphs"])
        moved = world.weight_bytes + batch * (context + 1) * world.token_bytes
        reached = moved / limits["bytes_per_s"] / best
        yield {
            "name": f"decode, batch {batch} @ {context + 1}",
            "passed": reached >= share,
            "share_of_limit": reached,
            "target": share,
            "tokens_per_s": batch / best,
            "limit_tokens_per_s": batch * limits["bytes_per_s"] / moved,
            "bytes": moved,
            "seconds": {side: median(each) for side, each in seconds.items()},
            "eager_over_graphs": ratios(seconds["eager"], seconds["graphs"]),
            "torch_rows_over_graphs": ratios(seconds["torch_rows"], seconds["graphs"]),
        }


def prefill_cell(world: World, size: Size, limits: dict[str, float]) -> Cell:
    """One prompt, one row."""
    tokens, share = size.prefill
    spec = world.model.spec
    step = Step(world, 1, 0, tokens, room=1)
    [seconds] = alternate({"": step.run}, size.rounds, 1, size.lead_in).values()
    head = 2 * spec.vocab_size * spec.hidden_size * (1 + spec.tied_embeddings)
    products = tokens * (world.weight_bytes - head)  # two operations for each weight, of two bytes
    attention = 4 * (tokens * (tokens + 1) / 2) * spec.heads * spec.head_dim * spec.layers
    reached = (products + attention) / limits["operations_per_s"] / median(seconds)
    return {
        "name": f"prefill of {tokens}",
        "passed": reached >= share,
        "share_of_limit": reached,
        "target": share,
        "tokens_per_s": tokens / median(seconds),
        "seconds": seconds,
        "operations": products + attention,
    }


def store_cells(world: World, size: Size) -> Iterator[Cell]:
    """The store kernel against two ``index_copy_`` calls, from a fused projection."""
    spec = world.model.spec
    keys, values = world.store.keys[:1], world.store.values[:1]
    oracle = TorchPagedAttention(world.model.attention_specs[:1], keys, values)
    for tokens in size.stored:
        heads = spec.heads + 2 * spec.kv_heads
        fused = torch.randn(tokens, heads, spec.head_dim, dtype=torch.bfloat16, device=world.device)
        key, value = fused[:, spec.heads : spec.heads + spec.kv_heads], fused[:, spec.heads + spec.kv_heads :]
        slots = 16 + torch.randperm(16 * world.blocks, device=world.device)[:tokens]

        def ours(key: Tensor = key, value: Tensor = value, slots: Tensor = slots) -> Tensor:
            store(keys[0], values[0], slots, key, value)
            return slots

        def theirs(key: Tensor = key, value: Tensor = value, slots: Tensor = slots) -> Tensor:
            oracle.write(0, slots, key, value)
            return slots

        theirs()
        expected = keys[0].flatten(0, 1)[slots], values[0].flatten(0, 1)[slots]
        fused.mul_(2)
        ours()
        found = keys[0].flatten(0, 1)[slots], values[0].flatten(0, 1)[slots]
        same = all(torch.equal(a, 2 * b) for a, b in zip(found, expected, strict=True))
        seconds = alternate_calls(world.device, {"ours": ours, "index_copy": theirs}, size.rounds)
        over = median(ratios(seconds["ours"], seconds["index_copy"]))
        yield {
            "name": f"store of {tokens} tokens",
            "passed": same and (over <= 1.0 or world.device.type != "cuda"),
            "same": same,
            "over_index_copy": over,
            "seconds": {side: median(each) for side, each in seconds.items()},
        }


def staging_cell(world: World, size: Size) -> Cell:
    """A step's integers in one copy against an array at a time."""
    device, rows = world.device, 64
    arrays = [np.arange(rows, dtype=np.int64)] * 3 + [np.arange(1000, dtype=np.int32)] * 3
    layout = Layout(tuple((each.dtype.type, each.size) for each in arrays))
    staging = Staging(device)
    sections = staging.open(layout)
    staging.send(layout, arrays)
    same = all(np.array_equal(a.cpu().numpy(), b) for a, b in zip(sections, arrays, strict=True))

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def together(_: int) -> None:
        staging.send(layout, arrays)
        wait()

    def apart(_: int) -> None:
        for each in arrays:
            torch.from_numpy(each).to(device)
        wait()

    seconds = alternate({"together": together, "apart": apart}, size.rounds, 10 * size.steps)
    over = median(ratios(seconds["together"], seconds["apart"]))
    return {
        "name": "staging in one copy",
        "passed": same and (over <= 1.0 or device.type != "cuda"),
        "same": same,
        "over_single_copies": over,
        "seconds": {side: median(each) for side, each in seconds.items()},
    }


def _ids(rows: Any) -> Any:
    found = []
    for each in rows:
        assert isinstance(each.block, TokenRows)
        found.append(each.block.token_ids[each.first : each.first + each.count])
    return np.concatenate(found)
