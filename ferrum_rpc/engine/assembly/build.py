"""From a description to a runner: choose, load, size the cache, and say why.

Called in the model thread. The one place that puts models, weights, cache and attention together.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple, cast

import torch
from torch.distributed import Store

from ferrum_rpc.attention.backend import AttentionBackend
from ferrum_rpc.attention.recurrent import STEP_TOKENS
from ferrum_rpc.attention.recurrent_steps import RecurrentStore, slot_bytes
from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import DeviceInfo, ModelInfo
from ferrum_rpc.engine.adapters import Adapters
from ferrum_rpc.engine.assembly.check import rounding_error
from ferrum_rpc.engine.assembly.choose import ROUNDED, Choices, choose
from ferrum_rpc.engine.assembly.loading import Progress
from ferrum_rpc.engine.assembly.measure import largest_counts, measure_step
from ferrum_rpc.engine.assembly.plan import announce, mib
from ferrum_rpc.engine.assembly.size import (
    LargestStep,
    adapter_bytes,
    make_plan,
    size_cache,
    size_states,
    step_bytes,
)
from ferrum_rpc.engine.assembly.source import QUANTIZE_NONE, Reasons
from ferrum_rpc.engine.compute import Compute
from ferrum_rpc.engine.cuda.compute import StagedCompute
from ferrum_rpc.engine.cuda.first_steps import run_first_steps
from ferrum_rpc.engine.cuda.select import (
    graphs_chosen,
    obstacle,
    select_compute,
    select_depth,
    stage_compute,
    warn_of_torch,
)
from ferrum_rpc.engine.grammars.constraints import Constraints
from ferrum_rpc.engine.grammars.pool import GrammarPool
from ferrum_rpc.engine.grammars.starter import NoGrammars
from ferrum_rpc.engine.memory import free_memory, total_memory
from ferrum_rpc.engine.operations import TorchRunner
from ferrum_rpc.engine.ranks.adapters import RankedAdapters
from ferrum_rpc.engine.ranks.compute import RankedCompute, RankedStore
from ferrum_rpc.engine.ranks.images import RankedImages
from ferrum_rpc.engine.ranks.leader import Ranks
from ferrum_rpc.engine.ranks.links import assemble
from ferrum_rpc.engine.ranks.setup import Groups, Setup, make_cache, make_slots
from ferrum_rpc.engine.ranks.states import RankedSlots
from ferrum_rpc.engine.ranks.world import ranks_here
from ferrum_rpc.engine.state_images import SlotImages, numbers_bytes
from ferrum_rpc.engine.states import States
from ferrum_rpc.engine.step import Stage
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.failpoints import Failpoint, Failpoints
from ferrum_rpc.install import install
from ferrum_rpc.kv.manager import KvManager
from ferrum_rpc.kv.store import KvStore
from ferrum_rpc.kv.tiers import BlockFiles
from ferrum_rpc.models.base import Model
from ferrum_rpc.models.lora import AdaptableModel, Loras
from ferrum_rpc.native import library
from ferrum_rpc.weights.checkpoint import inside


def build_runner(
    config: ModelSettings,
    progress: Progress | None = None,
    stage: Stage | None = None,
    largest: LargestStep | None = None,
) -> TorchRunner:
    """Load the model and make its runner. ``largest``: the largest step; if it is given, the memory plan is logged.
    Raises typed errors that say what to do; if the weights do not fit the memory, before anything is loaded."""
    choices = choose(config)
    if choices.device.type == "cuda":
        warn_of_torch()
    if largest is not None:
        here = None if choices.device.type == "cuda" else ranks_here(config)
        announce(make_plan(choices, largest, free_memory(choices.device), here))
    if config.ranks > 1:
        return build_shared(choices, progress, stage, largest=largest)
    loaded = choices.load(progress)
    with torch.inference_mode():
        return _assemble(choices, *loaded, stage, largest=largest)


def build_shared(
    choices: Choices,
    progress: Progress | None = None,
    stage: Stage | None = None,
    assemble: Callable[[ModelSettings], tuple[Ranks, Setup, Store]] = assemble,
    largest: LargestStep | None = None,
) -> TorchRunner:
    """As `build_runner`, for a model that ranks share. This process is rank 0, and ``choices`` are its own."""
    ranks, setup, store = assemble(choices.config)
    try:
        torch.set_num_threads(setup.threads)
        loading = ranks.order("load")
        ranks.groups = groups = ranks.unless_lost(lambda: Groups(setup, store))
        loaded = choices.load(progress, groups.parallel(setup))
        ranks.collect(loading)
        with torch.inference_mode():
            return _assemble(choices, *loaded, stage, Sharing(ranks, setup, groups), largest=largest)
    except BaseException as error:
        ranks.close(str(error))
        raise


class Sharing(NamedTuple):
    """The other ranks of a model, the part that this one has, and the groups that it belongs to."""

    ranks: Ranks
    setup: Setup
    groups: Groups


def _assemble(
    choices: Choices,
    model: Model,
    loaded: Reasons,
    stage: Stage | None,
    sharing: Sharing | None = None,
    *,
    largest: LargestStep | None,
) -> TorchRunner:
    """Make the cache, what computes over it, and the runner of both. ``loaded``: the choices that were made while the
    weights were loaded. ``largest``: None for the default step."""
    config, device, cuda = choices.config, choices.device, choices.device.type == "cuda"
    largest = largest or LargestStep()
    info, reasons = _describe(choices, model), [*choices.reasons, *loaded]
    blocks, slots, store, attention = _make_cache(choices, model, info, reasons, sharing, largest=largest)
    rounded = config.kv_dtype in ROUNDED
    if rounded and not sharing:
        of_keys, of_values, tokens = rounding_error(model, attention, store, info.max_context)
        changed = f"rounding changes keys by {of_keys:.2%} and values by {of_values:.2%}"
        reasons.append((f"kv_dtype={config.kv_dtype}", f"requested; {changed} (root mean square, {tokens} tokens)"))
    tier = None if config.kv_tier_dir is None else _tier(config.kv_tier_dir, config, info, store)
    loras, adapters = None, None
    if config.adapter_dir is not None:
        loras, adapters = _adapters(config, model, info.fingerprint, reasons, sharing)
    window = choices.window
    if window is not None:
        reasons.append((f"kv_window={window.tokens}", "every layer has a window; blocks behind it are given up"))
    kv = KvManager(blocks + 1, config.block_size, config.block_order, info.fingerprint, window)
    states = None
    if slots is not None and info.states is not None:
        images = SlotImages(info.states)
        if sharing:
            images = RankedImages(info.states, ranks=sharing.ranks, shard=sharing.setup.shard)
        states = States(slots, images, config.block_size, kv.checkpoint_key)
    info, pool = _grammars(choices, info, reasons)
    compute, depth = Compute(model, attention, loras), 1
    blocks_per_sequence = min(blocks, -(-info.max_context // config.block_size))
    if sharing:
        own = stage_compute(model, attention, loras, sharing.groups.part(sharing.setup, info.vocab_size))
        compute = RankedCompute(own, sharing.ranks, sharing.setup.shard, kv.counts)
        depth = config.pipeline_parallel
        reasons += [*_say_ranks(config, sharing), *_record(compute, own, config, sharing.setup, blocks_per_sequence)]
        sharing.ranks.start_liveness_checks()
    reasons += choices.source.check(model, compute, store, info.max_context)
    if cuda and not sharing:
        choice, compute = select_compute(
            model,
            attention,
            graphs=config.cuda_graphs,
            max_sequences=config.max_sequences,
            blocks_per_sequence=blocks_per_sequence,
            block_size=config.block_size,
            verify_tokens=config.verify_tokens,
            loras=loras,
            states=slots,
        )
        overlap, depth = select_depth(compute, config.overlap, states=states is not None)
        reasons += choice, overlap
    reasons += [(f"sampling={compute.sampler.name}", compute.sampler.reason)] if cuda else []
    return TorchRunner(
        model,
        kv,
        store,
        attention,
        info=info,
        device=DeviceInfo(
            kind=device.type,
            name=torch.cuda.get_device_name(device) if cuda else _cpu_name(),
            memory_bytes=torch.cuda.mem_get_info(device)[1] if cuda else total_memory(),
            threads=torch.get_num_threads(),
            attention_backend=choices.attention[0],
            choices=tuple(reasons),
            exact_span_tokens=compute.exact_span_tokens,
            free_truncation_tokens=STEP_TOKENS if states is not None or kv.has_window else None,
            checkpoint_tokens=0 if states is None else states.checkpoint_tokens,
            window_tokens=None if window is None else window.kept,
        ),
        stage=stage,
        compute=compute,
        depth=depth,
        tier=tier,
        adapters=adapters,
        constraints=None if pool is None else Constraints(pool, kv.tokens),
        states=states,
        max_tokens=largest.tokens,
    )


def _grammars(choices: Choices, info: ModelInfo, reasons: Reasons) -> tuple[ModelInfo, GrammarPool | None]:
    """The processes of grammars, if the model has a tokenizer and tokens that end a text."""
    config = choices.config
    tokenizer = inside(_folder(config), "tokenizer.json") if choices.facts.numbers else None
    ends = [token for token in info.eos_token_ids if token < info.vocab_size]
    if not config.max_grammars or tokenizer is None or not ends:
        return info, None
    if importlib.util.find_spec("llguidance") is None:
        reasons.append(("grammars=off", f"llguidance is not installed: {install('grammar')}"))
        return info, None
    pool = GrammarPool(tokenizer, info.vocab_size, ends, config.grammar_memory)
    try:
        pool.check()
    except NoGrammars as error:
        pool.close()
        reasons.append(("grammars=off", f"{tokenizer.name}: {error}"))
        return info, None
    reasons.append(("grammars=llguidance", f"{tokenizer.name}; a process of {mib(config.grammar_memory)} for each"))
    return replace(info, tokenizer_sha256=sha256(tokenizer.read_bytes()).digest()), pool


def _describe(choices: Choices, model: Model) -> ModelInfo:
    """What a scheduler must know about the served model."""
    config, facts = choices.config, choices.facts
    info = replace(
        model.info(config.name or facts.name),
        max_context=choices.max_context,
        kv_bytes_per_token=choices.slot_bytes_of_all,
        state_bytes=choices.state_bytes_of_all,
        states=choices.state_tensors,
        kv_shapes=choices.kv_shapes,
        fingerprint=choices.source.fingerprint(),
    )
    if config.kv_dtype in ROUNDED:
        info = replace(info, kv_dtype=config.kv_dtype)
    if facts.quantized != QUANTIZE_NONE:
        info = replace(info, weight_dtype=facts.quantized)
    if facts.numbers and not config.name:
        info = replace(info, folder=str(_folder(config)))
    return info


def _folder(config: ModelSettings) -> Path:
    where = Path(config.path).absolute()
    return where if where.is_dir() else where.parent


def _make_cache(
    choices: Choices,
    model: Model,
    info: ModelInfo,
    reasons: Reasons,
    sharing: Sharing | None,
    *,
    largest: LargestStep,
) -> tuple[int, RecurrentStore | None, KvStore, AttentionBackend]:
    """Returns the number of blocks (without the null block), the slots for states, if the model has any, the blocks'
    tensors, and what reads and writes them."""
    config, device = choices.config, choices.device
    block_bytes = choices.slot_bytes * config.block_size
    step = step_bytes(choices, largest)
    if step.total and not sharing and config.kv_blocks is None and config.kv_memory is None:
        _, attention = make_cache(choices, model, 2, config.block_size)
        states = make_slots(choices, len(largest_counts(info.max_context, largest)))
        step = step.at_least(measure_step(choices, stage_compute(model, attention), largest, states))
        del attention, states
    left = max(0, free_memory(device) // (sharing.setup.sharers if sharing else 1) - adapter_bytes(config))
    slots = size_states(config, choices.state_bytes, left, step)
    blocks, reason = size_cache(config, block_bytes, info.max_context, left, step, states=slots * choices.state_bytes)
    reasons.append((f"kv_blocks={blocks} ({mib(blocks * block_bytes)})", reason))
    make: Callable[..., KvStore] = KvStore
    if sharing:
        heads = [each.kv_heads for each in choices.facts.all_layers]
        make = partial(RankedStore, ranks=sharing.ranks, shard=sharing.setup.shard, kv_heads=heads, slots=slots)
    try:
        store, attention = make_cache(choices, model, blocks + 1, config.block_size, make)
        states = make_slots(choices, slots, partial(RankedSlots, ranks=sharing.ranks) if sharing else RecurrentStore)
    except RuntimeError as error:  # torch has no narrower class for "out of memory" on a CPU
        raise InvalidRequest(
            f"a KV cache of {blocks} blocks{f' and {slots} slots' if slots else ''} does not fit the memory; "
            "lower --kv-memory or --kv-blocks",
            field="kv_memory",
        ) from error
    if states is not None:
        reasons.append(_say_slots(choices, slots))
    if device.type == "cpu":
        for buffer in (*store.buffers, *(states.buffers[:1] if states else ())):
            library.prefer_huge_pages(buffer)
    return blocks, states, store, attention


def _say_slots(choices: Choices, slots: int) -> tuple[str, str]:
    layers, dtype = choices.facts.recurrent, choices.facts.dtype
    states, journal = slot_bytes(layers[0], len(layers), dtype)
    parts = f"{mib(states)} of states and up to {mib(journal)} of journal each"
    reason = "requested" if choices.config.state_slots is not None else "half of the cache's memory"
    return f"state_slots={slots} ({mib(slots * choices.state_bytes)})", f"{reason}; {parts}"


def _say_ranks(config: ModelSettings, sharing: Sharing) -> list[tuple[str, str]]:
    setup, chosen = sharing.setup, list[tuple[str, str]]()
    for name, count in (("tensor_parallel", config.tensor_parallel), ("pipeline_parallel", config.pipeline_parallel)):
        if count > 1:
            chosen.append((f"{name}={count}", "requested"))
    threads = f"of {config.ranks} ranks, {setup.neighbours} on this machine"
    return [*chosen, (f"rank_transport={setup.transport}", setup.reason), (f"threads={setup.threads}", threads)]


def _record(
    compute: RankedCompute, own: Compute, config: ModelSettings, setup: Setup, blocks_per_sequence: int
) -> list[tuple[str, str]]:
    """On GPUs run the first steps on all ranks, and capture steps if possible. Returns choices and reasons."""
    if setup.settings.device == "cpu" and not setup.recordable:
        return []
    run_first_steps(compute, config.block_size, blocks_per_sequence)
    why = obstacle(own, config.cuda_graphs)
    if why is None and not setup.recordable:
        why = f"rows of {setup.transport} pass through the hosts' memory"
    chosen = "cuda_graphs=off", why or ""
    if why is None:
        compute.record(config.max_sequences, blocks_per_sequence, config.verify_tokens)
        assert isinstance(own, StagedCompute) and own.graphs is not None  # noqa: S101 - or that has raised
        chosen = graphs_chosen(own.graphs, adapters=own.loras is not None)
    return [chosen, ("overlap=off", "ranks wait for each other within a step")]


def _adapters(
    config: ModelSettings, model: Model, fingerprint: bytes, reasons: Reasons, sharing: Sharing | None
) -> tuple[Loras, Adapters]:
    """What loads the adapters of a folder."""
    assert config.adapter_dir is not None  # noqa: S101 - the caller looked
    # `choose` has refused all other models
    reason, loras = cast(AdaptableModel, model).take_adapters(config.max_adapter_rank)
    reasons.append((f"adapters={loras.name}", reason))
    made = Adapters if sharing is None else partial(RankedAdapters, ranks=sharing.ranks)
    return loras, made(config.adapter_dir, loras, fingerprint, config.max_adapter_rank, config.adapter_memory)


def _tier(folder: Path, config: ModelSettings, info: ModelInfo, store: KvStore) -> BlockFiles:
    """The second tier, in a folder for the block format of this model."""
    what: tuple[object, ...] = info.fingerprint, info.kv_dtype, config.block_size, store.block_bytes
    if info.states is not None:
        what += (info.states,)
    if config.ranks > 1:  # a block has what each rank has, one after the other
        what += config.tensor_parallel, config.pipeline_parallel
    name = sha256(repr(what).encode()).hexdigest()
    try:
        states = 0 if info.states is None else info.state_bytes + numbers_bytes(info.states.layers)
        return BlockFiles(folder / name[:32], config.kv_tier_bytes, store.block_bytes, states)
    except OSError as error:
        raise InvalidRequest(f"kv_tier_dir {folder}: {error.strerror or error}", field="kv_tier_dir") from error
    except ValueError as error:
        raise InvalidRequest(f"{error}; raise --kv-tier-bytes", field="kv_tier_bytes") from error


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "cpu"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "cpu")


POINT_OF_STAGE: Final = {
    "plan": Failpoint.AFTER_RESERVE,
    "forward": Failpoint.BEFORE_FORWARD,
    "select": Failpoint.AFTER_FORWARD,
    "commit": Failpoint.BEFORE_COMMIT,
    "truncate": Failpoint.TRUNCATE,
    "fork": Failpoint.FORK,
    "release": Failpoint.RELEASE,
    "reserve_kv": Failpoint.RESERVE,
    "export": Failpoint.EXPORT,
    "import": Failpoint.IMPORT,
}
"""The failpoints by stage: each is between the previous stage and this one."""


def failing_stage(failpoints: Failpoints) -> Stage:
    """A stage hook that reaches the failpoints."""

    def stage(name: str) -> None:
        point = POINT_OF_STAGE.get(name)
        if point is not None:
            failpoints.reach(point, out_of_memory=torch.OutOfMemoryError)

    return stage
