"""Tensors of a device that is not there: they compute on the host, and refuse to meet a host's tensor.

What a GPU refuses, or what would make it wait unseen, is an error here: an operation on tensors of both places, an
index of the other place. They say that they lie on torch's device "meta", which every build knows. Tensors are away
within `fake_device` alone, which is a thread's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICE = torch.device("meta")
aten = torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default}
"""The only operations that may have tensors of both places."""


class OnFakeDevice(Tensor):
    """A tensor that says it lies on `DEVICE`; ``inner`` is where it does."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnFakeDevice:
        made = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=0, dtype=inner.dtype, device=DEVICE
        )
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnFakeDevice({self.inner!r})"


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        with _Mode():  # inference mode leaves it whole
            return func.decompose(*args, **kwargs)
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    away = [isinstance(each, OnFakeDevice) for each in tensors]
    if func in COPIES or not tensors:
        target = kwargs.get("device")
        is_away = any(away[:1]) if target is None else torch.device(target) == DEVICE
    else:
        is_away = any(away)
        if is_away and not all(there or not each.dim() for there, each in zip(away, tensors, strict=True)):
            raise RuntimeError(f"{func}: expected all tensors to be on the same device")
    kwargs = dict(kwargs)
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("cpu")
    kwargs.pop("pin_memory", None)
    if func is aten._pin_memory.default:
        return args[0].clone()
    args, kwargs = tree_map_only(OnFakeDevice, lambda each: each.inner, (args, kwargs))
    found = func(*args, **kwargs)
    if func is aten._to_copy.default and found is args[0]:
        found = found.clone()
    return tree_map_only(Tensor, OnFakeDevice, found) if is_away else found


@contextmanager
def fake_device() -> Iterator[torch.device]:
    """The device, for as long as it is there."""
    with _Mode():
        yield DEVICE
