"""Run Triton kernels on a CPU: what to set before triton is imported, and what its interpreter does not know yet.

Triton decides when a kernel is defined whether it is compiled or interpreted (``TRITON_INTERPRET``), and its own
library functions are defined when it is imported. So the choice is a process's, and comes first.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def interpret() -> None:
    """Make this process interpret every kernel. Raises RuntimeError where triton was imported to compile them."""
    if "triton" in sys.modules:
        import triton

        if not triton.knobs.runtime.interpret:
            raise RuntimeError("triton was imported before its interpreter was asked for")
    os.environ["TRITON_INTERPRET"] = "1"
    _complete()
    _remember()


def _complete() -> None:
    """Four things that the interpreter of triton 3.6 does not do as its language defines them.

    A scalar is held in an array of one element, which numpy 2.4 no longer converts to an index: no loop with a bound
    from memory runs. bfloat16 is held as the integers of its bits, which its matrix product multiplies as integers.
    float32 becomes bfloat16 by cutting it off, where a GPU rounds to the nearest. And fp8 (e4m3) is rounded wrongly,
    and its NaN is read as a number.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor
    if getattr(patch_tensor, "complete", False):
        return

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def widened(handle: Any) -> npt.NDArray[Any]:
        data: npt.NDArray[Any] = handle.data
        return (data.astype(np.uint32) << 16).view(np.float32) if handle.dtype == tl.bfloat16 else data

    def create_dot(_: Any, a: Any, b: Any, d: Any, *__: Any) -> Any:
        product = np.matmul(widened(a), widened(b), dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    convert_float = interpreter._convert_float

    def convert(data: npt.NDArray[Any], source: Any, target: Any, rounding: Any) -> npt.NDArray[Any]:
        if (source, target) == (tl.float32, tl.float8e4nv):
            return torch.from_numpy(data).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        if (source, target) == (tl.float8e4nv, tl.float32):
            return torch.from_numpy(data).view(torch.float8_e4m3fn).float().numpy()
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert_float(data, source, target, rounding)  # type: ignore[no-any-return]
        bits = data.view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return np.where(np.isnan(data), np.uint32(0x7FC0), rounded).astype(np.uint16)

    # no test is so large that an integer of 32 bits could overflow, and looking at each takes a third of the time
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    patch.complete = True  # type: ignore[attr-defined]
    interpreter._convert_float = convert
    interpreter._patch_lang_tensor = patch
    interpreter.InterpreterBuilder.create_dot = create_dot


def _remember() -> None:
    """Make once what the interpreter of triton 3.6 makes anew: half of its time.

    It replaces the language's functions at every launch and at every call of one kernel function by another: here once,
    for the process interprets whatever it runs. And it makes types of blocks, their shapes and numpy's types for each
    value, though they depend on a few numbers, and broadcasts what has the same shape.
    """
    import triton.language as tl
    from triton.language import semantic
    from triton.runtime import interpreter

    core, patch_lang, numpy_type = tl.core, interpreter._patch_lang, interpreter._get_np_dtype
    if getattr(patch_lang, "once", False):
        return
    patched = set[frozenset[str]]()

    def patch(fn: Any) -> Any:
        known = [value for value in fn.__globals__.values() if value is tl or value is core]
        seen = frozenset(each.__name__ for each in known)
        if seen not in patched:
            patched.add(seen)
            patch_lang(fn)
        return interpreter._LangPatchScope()  # of nothing: nothing is restored

    types = dict[Any, Any]()

    def get_numpy_type(of: Any) -> Any:
        key = type(of), of.name
        if key not in types:
            types[key] = numpy_type(of)
        return types[key]

    blocks = dict[Any, Any]()
    make_block = core.block_type.__init__

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *[each.value if isinstance(each, core.constexpr) else each for each in shape]
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = dict(self.__dict__)
        self.__dict__.update(blocks[key])

    broadcast = semantic.TritonSemantic.broadcast_impl_value

    def same_shape(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        blocks = one.is_block(), other.is_block()
        if blocks == (False, False) or (all(blocks) and one.shape.values == other.shape.values):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    shapes = dict[Any, Any]()
    make_tensor = core.tensor.__init__

    def tensor(self: Any, handle: Any, kind: Any) -> None:
        key = tuple(kind.shape.values) if kind.is_block() else ()
        if key not in shapes:
            make_tensor(self, handle, kind)
            shapes[key] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.numel, self.shape = shapes[key]

    patch.once = True  # type: ignore[attr-defined] - marks that it was patched
    interpreter._patch_lang = patch
    interpreter._get_np_dtype = get_numpy_type
    core.block_type.__init__ = block
    core.tensor.__init__ = tensor
    semantic.TritonSemantic.broadcast_impl_value = same_shape
