"""Which `Loras` a model gets, and why: the CUDA kernels, the C kernel of a CPU, or torch.

Like `fused_ops_choice`, this file can be imported if triton cannot, and the CUDA kernels must agree with torch in a
small step before they are used. That step also compiles what later steps launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final

import torch
from torch import Tensor

from ferrum_rpc.models.adapter_config import LowRank
from ferrum_rpc.models.layout import TensorPlacement
from ferrum_rpc.models.lora import Loras, TorchLoras
from ferrum_rpc.models.native_lora import NativeLoras
from ferrum_rpc.selection import BackendCandidate, Unsuited, select

MIN_CAPABILITY: Final = (8, 0)
"""The first with bfloat16."""

PROBED_RANK: Final = 20
"""More than the kernels multiply at once, and no multiple of it."""

PROBED_ROWS: Final = 150
"""Of two adapters and of none: one large tile and more of an adapter."""

LEAST_TOLERANCE: Final = 2e-5
"""float32 products are three of TF32."""

Table = Mapping[str, TensorPlacement]


def select_loras(
    table: Table,
    dtype: torch.dtype,
    device: torch.device,
    here: Table | None = None,
    *,
    max_rank: int,
    native: bool = True,
) -> tuple[str, Loras]:
    """``(reason, loras)`` of a decoder whose tensors are placed as in ``table``, and those of this rank as in ``here``,
    for adapters of ranks up to ``max_rank``. ``native``: the C kernel may be used."""
    arguments = table, dtype, device, here
    candidates = [BackendCandidate("torch", lambda: TorchLoras(*arguments))]
    if device.type == "cuda":
        reason = "all adapters of a step in two launches a product"
        candidates.insert(0, BackendCandidate("triton", lambda: _triton(*arguments, max_rank), reason))
    elif native:
        reason = "all adapters of a step in one call a product"
        candidates.insert(0, BackendCandidate("native", lambda: NativeLoras(*arguments), reason))
    return select(*candidates, what="adapters", field="adapter_dir")[1:]


def _triton(table: Table, dtype: torch.dtype, device: torch.device, here: Table | None, max_rank: int) -> Loras:
    if find_spec("triton") is None:
        raise Unsuited("it is not installed")
    if torch.version.hip is not None:
        raise Unsuited("the kernels support CUDA, not ROCm")
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise Unsuited(f"the kernels do not support {str(dtype).removeprefix('torch.')}")
    if (capability := torch.cuda.get_device_capability(device)) < MIN_CAPABILITY:
        raise Unsuited("compute capability {}.{} is below {}.{}".format(*capability, *MIN_CAPABILITY))
    from ferrum_rpc.models.triton_lora import TritonLoras

    check_small_steps(table if here is None else here, dtype, device)
    return TritonLoras(table, dtype, device, here, max_rank=max_rank)


def check_small_steps(here: Table, dtype: torch.dtype, device: torch.device) -> None:
    """Raise Unsuited if the kernels differ from torch on a product of any shape in ``here``, in tiles of either
    size."""
    from ferrum_rpc.models.triton_lora import TritonLoras

    shapes: dict[object, dict[str, TensorPlacement]] = {}
    slots: dict[int, dict[str, TensorPlacement]] = {}
    for name, each in here.items():
        if each.adaptable:
            slots.setdefault(each.slot, {})[name] = each
    for slot in slots.values():
        shapes.setdefault(tuple((each.local, each.first) for each in slot.values()), slot)
    tolerance = max(8 * torch.finfo(dtype).eps, LEAST_TOLERANCE)
    for placements in shapes.values():
        expected = _answers(TorchLoras(placements, dtype, device), placements, dtype, device)
        found = _answers(TritonLoras(placements, dtype, device, max_rank=PROBED_RANK), placements, dtype, device)
        error = float(((found - expected).abs() / (1 + expected.abs())).max())
        if not error <= tolerance:  # so that NaN fails too
            raise Unsuited(f"a small step differs from torch's by {error:.1e}, more than {tolerance:.0e}")


def _answers(loras: Loras, placements: Table, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows of one product with two adapters, in a step of few rows and in one of many."""
    generator = torch.Generator().manual_seed(0)
    for number, rank in enumerate((PROBED_RANK, 3), 1):
        modules = [(name.removesuffix(".weight"), each) for name, each in placements.items()]
        adapter = [LowRank(module, rank, 1.0, module, module) for module, _ in modules]
        loras.add(number, loras.changes(adapter))
        for each, (_, placement) in zip(adapter, modules, strict=True):
            size_out, size_in = placement.shape
            a = torch.randn((rank, size_in), generator=generator) / size_in**0.5
            loras.put(number, each, a, torch.randn((size_out, rank), generator=generator) / rank**0.5)
    [change, *_] = loras.changes(adapter)
    x = torch.randn((PROBED_ROWS, change.size_in), generator=generator).to(device, dtype)
    y = torch.randn((PROBED_ROWS, change.size_out), generator=generator).to(device, dtype)
    found = []
    for spans in ([(1, 0, 2), (2, 4, 1), (1, 5, 1)], [(2, 0, 64), (1, 70, 80)]):
        found.append(y.clone())
        loras.step(spans, PROBED_ROWS).add(change.slot, x, found[-1])
    return torch.cat(found).float()
