"""From a model folder to a loaded model: the only place where checkpoints and decoders meet.

A checkpoint is compared with what the decoder expects before a weight is read, and one error names every mismatch.
Weights are then streamed from the mapped files into the decoder's parameters and converted; quantized matrices are
dequantized one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from ferrum_rpc.errors import InvalidRequest, NotSupported, listed
from ferrum_rpc.models.decoder import SINGLE, Decoder, ParallelContext
from ferrum_rpc.models.fields import MAX_EXPERTS, Fields
from ferrum_rpc.models.fused_ops import FusedOps
from ferrum_rpc.models.layout import EMBEDDING, NOTHING_HELD, Held, embedding_name, head_name, held_parts, layout
from ferrum_rpc.models.linear import LinearFactory, select_linear
from ferrum_rpc.models.native_linear import PairFactory
from ferrum_rpc.models.shard import Shard
from ferrum_rpc.models.spec import ModelSpec
from ferrum_rpc.models.with_images import roots
from ferrum_rpc.native import cpu
from ferrum_rpc.weights.checkpoint import GENERATION_CONFIG, Checkpoint
from ferrum_rpc.weights.joined_experts import single_experts

Progress = Callable[[int, int], None]
"""``progress(bytes read, bytes in total)``, after every tensor."""

DTYPES: Final[dict[str, torch.dtype]] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
READABLE: Final = frozenset(DTYPES.values())


def load_model(
    source: str | Path | Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    *,
    spec: ModelSpec | None = None,
    linear: LinearFactory | None = None,
    head: LinearFactory | None = None,
    ops: FusedOps | None = None,
    parallel: ParallelContext = SINGLE,
    held: Held = NOTHING_HELD,
) -> Decoder:
    """The model of a folder (or of an open checkpoint) in ``dtype`` on ``device``.

    ``spec``: what `read_spec` returned for the checkpoint, if it was called. ``linear``: how matrices are held (None:
    the choice of `select_linear`), ``head``: that of the head (None: as the others). ``ops``: the operations on rows
    (None: the choice of `select_fused_ops`). ``parallel``: which part of the model is loaded, and its neighbours.
    ``held``: the matrices that stay as they are stored (`stored_parts`). Raises what `read_spec` does, and
    InvalidRequest for weights that are not finite.
    """
    checkpoint = source if isinstance(source, Checkpoint) else with_single_experts(Checkpoint.open(source))
    linear = linear or select_linear(device, dtype)[2]
    decoder = Decoder(
        spec or read_spec(checkpoint), dtype, device, linear, ops, head=head, parallel=parallel, held=held
    )
    expected = decoder.expected_tensors()
    total, done = sum(checkpoint.entries[name].nbytes for name in expected), 0
    for name, tensor in checkpoint.weights(expected, dtype, decoder.as_integers()):
        decoder.copy(name, tensor)
        del tensor  # the pages of the file that it reads count as resident
        decoder.settle()
        done += checkpoint.entries[name].nbytes
        if progress is not None:
            progress(done, total)
    return decoder


def with_single_experts(checkpoint: Checkpoint) -> Checkpoint:
    """With a tensor for each matrix of an expert, as a decoder expects them."""
    return replace(checkpoint, entries=single_experts(checkpoint.entries, MAX_EXPERTS))


def stored_parts(checkpoint: Checkpoint, spec: ModelSpec, shard: Shard, bits: Collection[int] = (4, 8)) -> Held:
    """The matrices that our kernel can hold as they are stored, in so many ``bits``."""
    stored = {
        name: entry.encoding.form
        for name, entry in checkpoint.entries.items()
        if entry.encoding is not None and entry.encoding.form is not None and entry.encoding.form.bits in bits
    }
    return held_parts(layout(spec, shard), stored)


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    """The spec of a checkpoint's configuration, after its headers were checked: its sizes are those of real tensors, so
    they may be allocated.

    Raises InvalidRequest for a folder, configuration or set of tensors that is broken, NotSupported for what this
    decoder does not support. As in transformers, a head that differs from tied embeddings is used as a head.
    """
    spec = ModelSpec.from_config(checkpoint.config)
    spec = replace(
        spec,
        roots=roots(spec.architecture, checkpoint.entries.keys(), EMBEDDING),
        eos_token_ids=stops_of(checkpoint) or spec.eos_token_ids,
    )
    if spec.tied_embeddings and _has_own_head(checkpoint, head_name(spec), embedding_name(spec)):
        spec = replace(spec, tied_embeddings=False)
    _check_fit(checkpoint, spec)
    return spec


def stops_of(checkpoint: Checkpoint) -> tuple[int, ...]:
    """The token ids at which generation stops; ``config.json`` often has only the first of them. Empty: there are
    none."""
    return Fields(checkpoint.generation_config, GENERATION_CONFIG).token_ids("eos_token_id")


def _has_own_head(checkpoint: Checkpoint, *names: str) -> bool:
    """``names``: those of the head and the embedding. Whether there is a head that is not a copy of the embedding."""
    head, embedding = (checkpoint.entries.get(name) for name in names)
    if head is None or embedding is None:
        return head is not None
    if (head.dtype, head.shape) != (embedding.dtype, embedding.shape) or head.encoding or embedding.encoding:
        return True
    one, other = (tensor.view(torch.uint8) for _, tensor in checkpoint.tensors(names))
    return not torch.equal(one, other)


def _adds_nothing(checkpoint: Checkpoint, name: str) -> bool:
    """Whether it is a bias of zeros of a quantized matrix: early AutoGPTQ wrote one for each."""
    weight = checkpoint.entries.get(name.removesuffix("bias") + "weight")
    if not name.endswith(".bias") or weight is None or weight.encoding is None:
        return False
    [(_, bias)] = checkpoint.tensors((name,))
    return not bool(bias.to(torch.float32).any())


def _check_fit(checkpoint: Checkpoint, spec: ModelSpec) -> None:
    """Raise unless every expected tensor exists, readable and in its shape, and no unknown tensor does."""
    entries = checkpoint.entries
    expected = {name: placement.shape for name, placement in layout(spec).items()}
    harmless = {head_name(spec)} if spec.tied_embeddings else set()
    drafts = (each.format(layers=len(spec.layers)) for each in spec.roots.drafts)
    elsewhere = (*spec.roots.images, *drafts)
    missing = [name for name in expected if name not in entries]
    extra = [
        name
        for name in entries
        if name not in expected and name not in harmless and not name.startswith(elsewhere)
        if not name.endswith("rotary_emb.inv_freq")
        if not _adds_nothing(checkpoint, name)
    ]
    misshapen = [
        f"{name} {list(entries[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in entries and entries[name].shape != shape
    ]
    problems = [
        listed(kind, names)
        for kind, names in (("missing", missing), ("unexpected", extra), ("misshapen", misshapen))
        if names
    ]
    if problems:
        raise InvalidRequest(
            f"model folder {checkpoint.name!r} does not fit {spec.architecture}: {'; '.join(problems)}", field="model"
        )
    check_readable(checkpoint, expected)


def check_readable(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Raise NotSupported for tensors of an unsupported type."""
    entries = checkpoint.entries
    unreadable = [f"{name} {entries[name].dtype}" for name in names if entries[name].dtype not in READABLE]
    if unreadable:
        raise NotSupported(
            f"model folder {checkpoint.name!r}: {listed('of an unsupported type', unreadable)}", field="model"
        )


def choose_dtype(
    requested: str,
    checkpoint: torch.dtype,
    device: torch.device,
    ours: Callable[[torch.device], PairFactory | None] | None = None,
) -> tuple[torch.dtype, str]:
    """The dtype to compute in, and why. ``requested``: ``auto`` or one of `DTYPES`. ``ours``: finds products of
    bfloat16 that the model can use although the CPU has no instruction for it. By AVX2 they are 2.3, 1.3, 1.1 and 0.93
    times as fast as oneDNN's of float32 at 1, 8, 32 and 512 rows, and half as large.

    Raises InvalidRequest for another name. float16 is never chosen on a CPU: measured 6 times slower than bfloat16.
    """
    if requested != "auto":
        if requested not in DTYPES:
            raise InvalidRequest(f"dtype must be one of auto, {', '.join(DTYPES)}, not {requested!r}", field="dtype")
        return DTYPES[requested], "requested"
    stored = str(checkpoint).removeprefix("torch.")
    if device.type != "cpu":
        here = device.type == "cuda" and torch.cuda.is_available()
        if checkpoint == torch.bfloat16 and here and not torch.cuda.is_bf16_supported(False):
            return torch.float16, "the checkpoint is bfloat16 and the device has no instructions for it"
        if checkpoint in (torch.bfloat16, torch.float16, torch.float32):
            return checkpoint, f"the checkpoint is {stored}"
        return torch.float32, f"the checkpoint is {stored}"
    if checkpoint != torch.bfloat16:
        return torch.float32, f"the checkpoint is {stored}, and on a CPU only bfloat16 is faster than float32"
    instruction = cpu.bfloat16() if torch._C._has_mkldnn else None
    if instruction is not None:
        return torch.bfloat16, f"the checkpoint is bfloat16 and the CPU has {instruction}"
    if ours is not None and (made := ours(device)) is not None:
        return torch.bfloat16, f"the checkpoint is bfloat16 and our kernels multiply it in {made.isa}"
    return torch.float32, "the checkpoint is bfloat16 and the CPU has no bfloat16 matrix instructions"
