"""What a model is, in 32 bytes: two executors with the same one compute the same K and V of the same tokens.

It is computed once, when a model is loaded. Moved caches and hashes of prefixes are only good for the model that made
them; this is how they know it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from hashlib import sha256
from typing import Any, Final

import torch
from torch import Tensor

from ferrum_rpc.models.identity import IdentityConfig
from ferrum_rpc.weights.checkpoint import Checkpoint

SAMPLES: Final = 16
SAMPLE_BYTES: Final = 256


def of_checkpoint(
    checkpoint: Checkpoint, names: Iterable[str], dtype: torch.dtype, quantize: str, variant: str = ""
) -> bytes:
    """SHA-256 over the configuration, over name, dtype, shape and a sample of the bytes of each of the tensors
    ``names``, and over what is made of them: the dtype that they are computed in, how they are rounded, and which
    ``variant`` of several that one configuration describes.

    A sample is 16 pieces of 256 bytes, spread evenly over the tensor from its first byte to its last; a tensor of up to
    4,096 bytes is taken whole. Of a quantized matrix each stored part is sampled. How tensors are spread over files
    does not matter.
    """
    tensors = {
        name: (str(tensor.dtype), [*tensor.shape], _sample(tensor)) for name, tensor in checkpoint.stored({*names})
    }
    return _digest(checkpoint.config, sorted(tensors.items()), str(dtype), quantize, *([variant] if variant else []))


def of_identity(config: IdentityConfig) -> bytes:
    """SHA-256 over the configuration of the identity model."""
    return _digest("identity", asdict(config))


def _digest(*parts: Any) -> bytes:
    return sha256(json.dumps(parts, sort_keys=True).encode()).digest()


def _sample(tensor: Tensor) -> str:
    """SHA-256, in hex, of a sample of the tensor's bytes."""
    content = tensor.reshape(-1).view(torch.uint8)
    last = len(content) - SAMPLE_BYTES
    pieces = [content]
    if len(content) > SAMPLES * SAMPLE_BYTES:
        starts = [last * index // (SAMPLES - 1) for index in range(SAMPLES)]
        pieces = [content[start : start + SAMPLE_BYTES] for start in starts]
    return sha256(b"".join([each.numpy().tobytes() for each in pieces])).hexdigest()
