"""A runner of a model with recurrent layers that runs its steps as on a GPU: its integers are staged, the jobs of the
kernel among them, and steps of a known shape are replayed. The C kernel stands for that of the GPU: it takes the same
jobs, and has the same bits in either way."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ferrum_rpc.attention import native_recurrent
from ferrum_rpc.attention.recurrent import RecurrentInputs, RecurrentKernels
from ferrum_rpc.attention.recurrent_steps import RecurrentStore
from ferrum_rpc.core import RecurrentShape
from ferrum_rpc.engine.cuda.select import select_compute
from ferrum_rpc.engine.operations import TorchRunner
from ferrum_rpc.engine.state_images import SlotImages
from ferrum_rpc.engine.states import States
from tests.support.fixtures import PlannedTorch
from tests.support.rerun import Rerun

VERIFY_TOKENS = 4
MAX_SPANS = 4


def in_c(shape: RecurrentShape, taps: Tensor, jobs: Tensor, inputs: RecurrentInputs) -> Tensor:
    """`RecurrentKernels.step`."""
    lanes = native_recurrent.lanes(shape, taps.dtype, inputs.channels.dtype)
    known = jobs.numpy().copy()  # C says in its jobs what it has folded, and a kernel of a GPU does not
    known = known[known[:, 0] != 0]  # C does not take jobs that do nothing
    if not len(known):
        return inputs.channels.new_empty((len(inputs.channels), shape.value_heads, shape.value_dim))
    return native_recurrent.step(shape, lanes, taps, known, inputs)


def chunk_in_c(shape: RecurrentShape, taps: Tensor, inputs: RecurrentInputs, state: Tensor) -> Tensor:
    """`RecurrentKernels.chunk`."""
    lanes = native_recurrent.lanes(shape, taps.dtype, inputs.channels.dtype)
    return native_recurrent.chunk(shape, lanes, taps, inputs, state)


def as_on_a_gpu(plain: TorchRunner, stage: Any) -> tuple[TorchRunner, Rerun]:
    """The same model and blocks, and as many slots, without a step so far; and what replays its steps."""
    model: Any = plain.model
    assert plain.states is not None
    slots = RecurrentStore(
        model.recurrent_shapes[0],
        len(model.recurrent_shapes),
        plain.states.pool.total,
        dtype=model.dtype,
        device=model.device,
        kernels=RecurrentKernels(in_c, chunk_in_c),
    )
    capture, size, blocks = Rerun(), plain.kv.block_size, plain.kv.total_blocks
    options: Any = {"graphs": "auto", "max_sequences": MAX_SPANS, "verify_tokens": VERIFY_TOKENS, "states": slots}
    options |= {"block_size": size, "blocks_per_sequence": blocks}
    with plain.context():
        attention: Any = PlannedTorch(model.attention_specs, plain.store.keys, plain.store.values)
        _, compute = select_compute(model, attention, capture=capture, **options)
    assert plain.info.states is not None
    states = States(slots, SlotImages(plain.info.states), size, plain.kv.checkpoint_key)
    given: Any = {"info": plain.info, "device": plain.device, "stage": stage, "compute": compute, "states": states}
    return TorchRunner(model, plain.kv, plain.store, attention, **given), capture
