"""From a description to a runner: load, size the cache, choose backends, and say why.

Called in the model thread. The one place that puts models, weights, cache and attention together.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from ferrum_rpc.attention.backend import select_backend
from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import NO_KERNELS, DeviceInfo
from ferrum_rpc.engine.compute import Compute
from ferrum_rpc.engine.cuda.select import select_compute, select_depth
from ferrum_rpc.engine.kv_rounding import INT8, cache_layers, check_kv_dtype, rounding_error
from ferrum_rpc.engine.loading import Progress, choose_dtype, load_model, read_spec
from ferrum_rpc.engine.memory import available_memory, total_memory
from ferrum_rpc.engine.runner import Stage, TorchRunner
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.failpoints import Failpoint, Failpoints
from ferrum_rpc.kv.manager import KvManager
from ferrum_rpc.kv.store import KvStore
from ferrum_rpc.models.base import Model
from ferrum_rpc.models.fused_ops_choice import select_fused_ops
from ferrum_rpc.models.identity import IdentityConfig, IdentityModel
from ferrum_rpc.models.linear import select_bytes, select_linear
from ferrum_rpc.native import library
from ferrum_rpc.weights.checkpoint import Checkpoint

IDENTITY: Final = "identity"
QUANTIZE_NONE: Final = "none"
QUANTIZE_INT8: Final = "int8"
CPU_SHARE: Final = 0.25
CPU_MOST: Final = 4 << 30
CUDA_SHARE: Final = 0.85


def build_runner(config: ModelSettings, progress: Progress | None = None, stage: Stage | None = None) -> TorchRunner:
    """Load the model and make its runner. Raises typed errors that say what to do."""
    choices: list[tuple[str, str]] = []
    device = _choose_device(config.device, choices)
    check_kv_dtype(config.kv_dtype, device)
    if device.type == "cpu":
        _check_kernels(choices)
    model = _load(config, device, choices, progress)
    with torch.inference_mode():
        return _assemble(config, model, device, choices, stage)


def _assemble(
    config: ModelSettings, model: Model, device: torch.device, choices: list[tuple[str, str]], stage: Stage | None
) -> TorchRunner:
    info = model.info(config.name or Path(config.path).name)
    if config.quantize == QUANTIZE_INT8:
        info = replace(info, weight_dtype=QUANTIZE_INT8)
    if config.path != IDENTITY and not config.name:
        info = replace(info, folder=str(Path(config.path).absolute()))
    if config.max_context is not None:
        most = info.max_context
        info = replace(info, max_context=min(most, config.max_context))
        reason = "requested" if config.max_context <= most else f"{config.max_context} requested, the model has no more"
        choices.append((f"max_context={info.max_context}", reason))
    layers, rounded = cache_layers(model, config.kv_dtype), config.kv_dtype == INT8
    if rounded:
        info = replace(info, kv_dtype=INT8, kv_bytes_per_token=sum(layer.slot_bytes for layer in layers))
    blocks = _size_cache(config, info.kv_bytes_per_token, info.max_context, device, choices)
    try:
        store = KvStore(layers, blocks + 1, config.block_size, device)
    except RuntimeError as error:  # torch has no narrower class for "out of memory" on a CPU
        raise InvalidRequest(
            f"a KV cache of {blocks} blocks does not fit the memory; lower --kv-memory or --kv-blocks",
            field="kv_memory",
        ) from error
    if device.type == "cpu":
        for buffer in store.buffers:
            library.prefer_huge_pages(buffer)
    name, reason, factory = select_backend(device, model.attention_specs, model.dtype, config.attention, rounded)
    choices.append((f"attention={name}", reason))
    attention = factory(model.attention_specs, store.keys, store.values)
    if rounded:
        of_keys, of_values, tokens = rounding_error(model, attention, store, info.max_context)
        changed = f"rounding changes keys by {of_keys:.2%} and values by {of_values:.2%}"
        choices.append((f"kv_dtype={INT8}", f"requested; {changed} (root mean square, {tokens} tokens)"))
    compute, depth = Compute(model, attention), 1
    cuda = device.type == "cuda"
    if cuda:
        choice, compute = select_compute(
            model,
            attention,
            graphs=config.cuda_graphs,
            max_sequences=config.max_sequences,
            blocks_per_sequence=min(blocks, -(-info.max_context // config.block_size)),
        )
        overlap, depth = select_depth(compute, config.overlap)
        choices += (choice, overlap, (f"sampling={compute.sampler.name}", compute.sampler.reason))
    return TorchRunner(
        model,
        KvManager(blocks + 1, config.block_size, config.block_order),
        store,
        attention,
        info=info,
        device=DeviceInfo(
            kind=device.type,
            name=torch.cuda.get_device_name(device) if cuda else _cpu_name(),
            memory_bytes=torch.cuda.mem_get_info(device)[1] if cuda else total_memory(),
            threads=torch.get_num_threads(),
            attention_backend=name,
            choices=tuple(choices),
            exact_span_tokens=compute.exact_span_tokens,
        ),
        stage=stage,
        compute=compute,
        depth=depth,
    )


def _choose_device(requested: str, choices: list[tuple[str, str]]) -> torch.device:
    available = torch.cuda.is_available()
    if requested == "cuda" and not available:
        raise InvalidRequest("device cuda was asked for and torch finds no CUDA device", field="device")
    if requested != "auto":
        reason = "requested"
    else:
        reason = "a CUDA device is there" if available else "torch finds no CUDA device"
    kind = requested if requested != "auto" else ("cuda" if available else "cpu")
    choices.append((f"device={kind}", reason))
    return torch.device(kind)


def _check_kernels(choices: list[tuple[str, str]]) -> None:
    """Say it once where the C library is not there: every part that would use it has a slower way, and takes it."""
    try:
        library.load()
    except OSError as error:
        choices.append((NO_KERNELS, f"torch computes everything, more slowly. The C library: {error}"))


def _load(
    config: ModelSettings, device: torch.device, choices: list[tuple[str, str]], progress: Progress | None
) -> Model:
    if config.path == IDENTITY:
        if config.quantize != QUANTIZE_NONE:
            raise InvalidRequest("the identity model has no weights to be rounded", field="quantize")
        choices.append(("dtype=float32", "the identity model has no other"))
        return IdentityModel(_identity(config), device)
    checkpoint = Checkpoint.open(config.path)
    dtype, reason = choose_dtype(config.dtype, checkpoint.dtype, device)
    choices.append((f"dtype={str(dtype).removeprefix('torch.')}", reason))
    spec = read_spec(checkpoint)
    reason, ops = select_fused_ops(spec, dtype, device)
    choices.append((f"rows={ops.name}", reason))
    if config.quantize == QUANTIZE_INT8:
        rounding = select_bytes(device, dtype)
        model = load_model(checkpoint, dtype, device, progress, spec=spec, linear=rounding, ops=ops)
        reason = f"requested; rounding the weights changed them by {rounding.error:.2%} (root mean square)"
        choices.append(("quantize=int8", reason))
        return model
    linear, why, factory = select_linear(device, dtype)
    choices.append((f"linear={linear}", why))
    return load_model(checkpoint, dtype, device, progress, spec=spec, linear=factory, ops=ops)


def _identity(config: ModelSettings) -> IdentityConfig:
    prefix = "identity_"
    given = {name.removeprefix(prefix): value for name, value in vars(config).items() if name.startswith(prefix)}
    return IdentityConfig(**given)


def _size_cache(
    config: ModelSettings, bytes_per_token: int, max_context: int, device: torch.device, choices: list[tuple[str, str]]
) -> int:
    """Blocks of the cache, the null block not counted."""
    bytes_per_block = bytes_per_token * config.block_size
    if config.kv_blocks is not None:
        choices.append((f"kv_blocks={config.kv_blocks}", "requested"))
        return config.kv_blocks
    if config.kv_memory is not None:
        budget, reason = config.kv_memory, "requested"
    elif device.type == "cuda":
        budget = int(torch.cuda.mem_get_info(device)[0] * CUDA_SHARE)
        reason = f"{CUDA_SHARE:.0%} of the device memory that the weights left"
    else:
        budget = min(int(available_memory() * CPU_SHARE), CPU_MOST)
        reason = f"{CPU_SHARE:.0%} of the free memory, at most {CPU_MOST >> 30} GiB"
    useful = config.max_sequences * -(-max_context // config.block_size)
    blocks = min(budget // bytes_per_block, useful)
    if blocks == useful:
        reason += f"; {config.max_sequences} sequences of {max_context} tokens need no more"
        if config.kv_memory is not None:
            reason = f"{config.kv_memory / 2**20:.0f} MiB {reason}"
    if blocks < 1:
        raise InvalidRequest(
            f"kv memory of {budget} bytes holds no block of {bytes_per_block} bytes; raise --kv-memory",
            field="kv_memory",
        )
    choices.append((f"kv_blocks={blocks} ({blocks * bytes_per_block / 2**20:.0f} MiB)", reason))
    return blocks


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
}
"""By stage: the point stands between the stage before and this one."""


def failing_stage(failpoints: Failpoints) -> Stage:
    """A stage hook that reaches the points."""

    def stage(name: str) -> None:
        point = POINT_OF_STAGE.get(name)
        if point is not None:
            failpoints.reach(point, out_of_memory=torch.OutOfMemoryError)

    return stage
