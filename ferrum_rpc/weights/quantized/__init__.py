"""Checkpoints whose matrices are stored in few bits: one file for each scheme, and the table of them.

``quantization_config`` names the scheme; each of its keys is honoured, known to change no number, or refused. The
tensors show which matrices are quantized, and the configuration must agree. A scheme makes one entry of the parts of
each matrix, with the shape that follows from theirs, so that mismatches are refused before anything is allocated.
Activations are not quantized here, even if the configuration has scales for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from ferrum_rpc.errors import NotSupported
from ferrum_rpc.models.fields import Fields
from ferrum_rpc.weights.entries import TensorEntry
from ferrum_rpc.weights.quantized import awq, bitsandbytes, compressed_tensors, fp8, gptq, mxfp4
from ferrum_rpc.weights.quantized.stored import QuantizedTensors

SECTION: Final = "quantization_config"

Scheme = Callable[[Fields, QuantizedTensors], None]
"""Reads its section of the configuration, and adds the parts of each matrix to `QuantizedTensors`."""

SCHEMES: Final[dict[str, Scheme]] = {
    "awq": awq.read,
    "bitsandbytes": bitsandbytes.read,
    "compressed-tensors": compressed_tensors.read,
    "fp8": fp8.read,
    "gptq": gptq.read,
    "mxfp4": mxfp4.read,
}
"""By ``quant_method``."""


def decoded_entries(config: Mapping[str, object], entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """``entries`` unchanged if ``config`` has no quantization; else with one for each matrix, in the order of their
    bytes. Raises NotSupported for a scheme that is not supported, InvalidRequest for parts that do not fit.
    """
    section = Fields(config).table(SECTION)
    if section is None:
        return entries
    method = section.text("quant_method", "")
    if method not in SCHEMES:
        raise NotSupported(
            f"{SECTION}.quant_method: {method[:80]!r} is not supported; supported: {', '.join(SCHEMES)}, GGUF; "
            "serve such a checkpoint of the model, or one in bfloat16",
            field=SECTION,
        )
    stored = QuantizedTensors(entries)
    SCHEMES[method](section, stored)
    return stored.decoded()
