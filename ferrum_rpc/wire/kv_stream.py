"""Caches on their way between executors: layouts and chunks, as messages and back, and files of such messages.

A part is one tensor of a chunk: K, V, and of a cache in 8 bits what they are multiplied with.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from hmac import compare_digest
from typing import Any, BinaryIO, ClassVar, Final

import numpy as np

from ferrum_rpc.core import CreateOptions, ModelInfo, StateRows, StateTensors, TokenArray
from ferrum_rpc.core.check import check_vocabulary
from ferrum_rpc.errors import InvalidRequest, KvCorrupt, LayoutMismatch, NotSupported
from ferrum_rpc.executor.v1 import kv_transfer_pb2, types_pb2
from ferrum_rpc.wire.framing import framed_chunk
from ferrum_rpc.wire.items import options_from_proto
from ferrum_rpc.wire.state_stream import RowTensor, row_tensors
from ferrum_rpc.wire.tensor import DTYPE_BY_NAME, NUMPY_BY_DTYPE

FILE_MAGIC: Final = b"ferrum-rpc kv\x00\x00\x01"
"""What a client's file of a sequence begins with. The frames of an export follow, as a `FrameFile` has them."""

SIZE_BYTES: Final = 4

PARTS: Final = ("keys", "values", "key_scales", "value_scales")
ROWS: Final = "latents"
"""What a chunk calls rows that are keys and values at once."""

OF_K_AND_V: Final = ("layers", "kv_heads", "head_dim", "dtype")
"""Fields of a layout without a list of tensors."""

UNKNOWN_BYTES: Final = 8

ROUNDED: Final = (types_pb2.D_TYPE_I8, types_pb2.D_TYPE_F8_E4M3)
"""Caches that have scales."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """What every cache of a model is made of, or of a model with an adapter. ``shapes``: KV heads and their width, of
    each layer that keeps K and V; ``dtype``: one of the contract's. ``states``: what other layers keep of a sequence.
    ``latent``: a token has one row in place of K and V. With either, or if shapes differ, the contract has a list of
    tensors."""

    model_fingerprint: bytes
    shapes: tuple[tuple[int, int], ...]
    dtype: types_pb2.DType
    adapter: str = ""
    states: StateTensors | None = None
    latent: bool = False

    @classmethod
    def of(cls, model: ModelInfo, adapter: str = "", fingerprint: bytes = b"") -> CacheLayout:
        """That of the model that is loaded, with an adapter where there is one, and then with its ``fingerprint``.
        Raises `NotSupported` for a cache that the contract cannot say."""
        dtype = DTYPE_BY_NAME.get(model.kv_dtype)
        if dtype is None:
            raise NotSupported(f"a cache of {model.kv_dtype} cannot be moved")
        layers = model.layers - (0 if model.states is None else model.states.layers)
        shapes = model.kv_shapes or (model.kv_shape(0),) * layers
        return cls(fingerprint or model.fingerprint, shapes, dtype, adapter, model.states, model.latent)

    @property
    def layers(self) -> int:
        """Those that keep K and V."""
        return len(self.shapes)

    @property
    def kinds(self) -> dict[tuple[int, int], int]:
        """The shapes that there are, in the order of the first layers that have them, with the numbers of layers."""
        return Counter(self.shapes)

    def names(self, layer: int) -> tuple[str, ...]:
        """Of the tensors of a chunk of a layer. If shapes differ, those of the first one end in ``.1``, and so on."""
        if self.latent:
            return (ROWS,)
        names, kinds = PARTS if self.dtype in ROUNDED else PARTS[:2], [*self.kinds]
        number = kinds.index(self.shapes[layer]) + 1
        return names if len(kinds) == 1 else tuple([f"{name}.{number}" for name in names])

    @property
    def token_tensors(self) -> frozenset[str]:
        """The names of the tensors of all layers."""
        return frozenset(name for shape in self.kinds for name in self.names(self.shapes.index(shape)))

    @property
    def by_name(self) -> bool:
        """Whether chunks name their tensors."""
        return self.states is not None or self.latent or len(self.kinds) > 1

    @property
    def state_tensors(self) -> dict[str, RowTensor]:
        """Tensors of the whole sequence, by name."""
        return {} if self.states is None else row_tensors(self.states)

    def parts(self, layer: int, tokens: int) -> Iterator[tuple[str, types_pb2.DType, tuple[int, ...], int]]:
        """Of each tensor of a chunk of so many tokens of a layer: its field or name, type, shape and bytes."""
        shape: tuple[int, ...] = (tokens, *self.shapes[layer])
        for index, name in enumerate(self.names(layer)):
            dtype = self.dtype if index < 2 else types_pb2.D_TYPE_F32
            extents = shape if index < 2 else shape[:2]
            yield name, dtype, extents, math.prod(extents) * NUMPY_BY_DTYPE[dtype].itemsize

    def row_bytes(self, rows: StateRows) -> int:
        """Bytes of rows of one of them."""
        return rows.rows * self.state_tensors[rows.name].row_bytes

    def chunk_bytes(self, layer: int, tokens: int) -> int:
        """Bytes of the tensors of a chunk of a layer."""
        return sum(size for *_, size in self.parts(layer, tokens))

    @property
    def widest_bytes(self) -> int:
        """Bytes of a token in the layer that keeps the most."""
        return max(self.chunk_bytes(self.shapes.index(shape), 1) for shape in self.kinds)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all layers."""
        return sum(count * self.chunk_bytes(self.shapes.index(shape), 1) for shape, count in self.kinds.items())

    def _fields(self) -> dict[str, Any]:
        """What says of a layout which caches it is of."""
        of_all = (0, 0, 0, types_pb2.D_TYPE_UNSPECIFIED) if self.by_name else (self.layers, *self.shapes[0], self.dtype)
        shape = dict(zip(OF_K_AND_V, of_all, strict=True))
        fields = {"model_fingerprint": self.model_fingerprint, **shape, "adapter": self.adapter}
        return {**fields, "tensors": self.tensors}

    @property
    def tensors(self) -> list[types_pb2.KvTensor]:
        """Those that a layout lists; none if K and V are alike in all layers of the model."""
        if not self.by_name:
            return []
        tensors = [
            types_pb2.KvTensor(name=name, dtype=dtype, shape=extents[1:], layers=count)
            for shape, count in self.kinds.items()
            for name, dtype, extents, _ in self.parts(self.shapes.index(shape), 1)
        ]
        for name, dtype, of_a_row in self.state_tensors.values():
            tensors.append(types_pb2.KvTensor(name=name, dtype=dtype, shape=of_a_row))
        return tensors

    def to_proto(self, tokens: TokenArray, block_size: int, first_token: int) -> kv_transfer_pb2.KvLayout:
        """As the first frame of an export has it."""
        return kv_transfer_pb2.KvLayout(
            seq_len=len(tokens),
            token_ids=tokens.tolist(),
            block_size=block_size,
            first_token=first_token,
            **self._fields(),
        )

    def check(self, layout: kv_transfer_pb2.KvLayout) -> None:
        """Raise `LayoutMismatch` unless a cache of that layout is one of this."""
        differs = {name: value for name, value in self._fields().items() if getattr(layout, name) != value}
        if differs:
            reported = {name: _reported(value) for name, value in differs.items()}
            raise LayoutMismatch(
                f"the cache is another model's or laid out otherwise: {', '.join(differs)}",
                field="header.layout",
                metadata={"differs": ",".join(differs), **reported},
            )


def listed_tensors(model: ModelInfo) -> list[types_pb2.KvTensor]:
    """Those that layouts of a model's caches list; none if its caches cannot be moved."""
    try:
        return CacheLayout.of(model).tensors
    except NotSupported:
        return []


def widest_bytes(layout: kv_transfer_pb2.KvLayout) -> int:
    """Bytes of a token in the layer that keeps the most, according to the tensors of a layout; 0: it lists none. Those
    of one layer have names with the same end. Numbers of a type that is not known count as `UNKNOWN_BYTES`."""
    found = Counter[str]()
    for each in layout.tensors:
        if each.layers:
            size = NUMPY_BY_DTYPE[each.dtype].itemsize if each.dtype in NUMPY_BY_DTYPE else UNKNOWN_BYTES
            found[each.name.partition(".")[2]] += math.prod(each.shape) * size
    return max(found.values(), default=0)


def _reported(value: Any) -> Any:
    """A field's value as metadata have it."""
    if isinstance(value, list):
        return ",".join(each.name for each in value)
    return value.hex() if isinstance(value, bytes) else value


def tokens_from_proto(layout: kv_transfer_pb2.KvLayout, model: ModelInfo) -> TokenArray:
    """The tokens of a sequence that is to be imported, int32 [1 or more]. Raises `InvalidRequest`."""
    count = len(layout.token_ids)
    if not count or layout.seq_len != count:
        raise InvalidRequest(f"seq_len is {layout.seq_len}, and there are {count} token ids", field="header.layout")
    if count > model.max_context:
        raise InvalidRequest(
            f"{count} tokens exceed the context of {model.max_context}",
            field="header.layout.token_ids",
            metadata={"max_context": model.max_context},
        )
    tokens = np.fromiter(layout.token_ids, np.int64, count)
    check_vocabulary(int(tokens.max()), "token ids", "header.layout.token_ids", model)
    return tokens.astype(np.int32)


def import_options(header: kv_transfer_pb2.ImportKvHeader) -> CreateOptions:
    """What holds for the sequence of an import. Raises `InvalidRequest` and `NotSupported`."""
    if header.create.fork:
        raise InvalidRequest("an import must not be a fork", field="header.create.fork")
    options = options_from_proto(header.create)
    if options.adapter not in ("", header.layout.adapter):
        message = "the cache was computed with another adapter than `create` names"
        raise InvalidRequest(message, field="header.create.adapter")
    return replace(options, adapter=header.layout.adapter)


def chunk_to_proto(  # noqa: PLR0917
    layout: CacheLayout, layer: int, first_token: int, tokens: int, parts: tuple[Any, ...], crc32c: int
) -> bytes:
    """The frame of an export with a chunk of so many tokens. ``parts``: uint8 [bytes] each."""
    named = [
        (name, dtype, shape, data.data)
        for (name, dtype, shape, _), data in zip(layout.parts(layer, tokens), parts, strict=True)
    ]
    return framed_chunk(layer, first_token, named, crc32c, by_name=layout.by_name)


def rows_to_proto(tensor: RowTensor, first: int, data: Any, crc32c: int) -> bytes:
    """The frame of an export with rows of a tensor of the sequence, from the ``first`` on. ``data``: uint8 [bytes]."""
    named = [(tensor.name, tensor.dtype, (len(data) // tensor.row_bytes, *tensor.shape), data.data)]
    return framed_chunk(0, 0, named, crc32c, by_name=True, first_row=first)


def remote_chunk_to_proto(  # noqa: PLR0917
    layout: CacheLayout, layer: int, first_token: int, tokens: int, remote: kv_transfer_pb2.KvRemote, crc32c: int
) -> bytes:
    """The same of a chunk whose data are read from elsewhere."""
    chunk = kv_transfer_pb2.KvChunk(layer=layer, first_token=first_token, crc32c=crc32c, remote=remote)
    for name, dtype, shape, _ in layout.parts(layer, tokens):
        getattr(chunk, name).MergeFrom(types_pb2.Tensor(dtype=dtype, shape=shape))
    return kv_transfer_pb2.ExportKvResponse(chunk=chunk).SerializeToString()


def chunk_from_proto(layout: CacheLayout, layer: int, chunk: kv_transfer_pb2.KvChunk) -> tuple[int, tuple[bytes, ...]]:
    """How many tokens a chunk of ``layer`` has, and its parts, which are empty where they are to be read from
    elsewhere. Raises `InvalidRequest` where they are not what the layout says."""
    by_name, elsewhere, names = layout.by_name, chunk.HasField("remote"), layout.names(layer)
    if by_name and [each.tensor for each in chunk.parts] != [*names]:
        raise InvalidRequest(f"a chunk of layer {layer} must have the parts {', '.join(names)}", field="chunk.parts")
    if by_name and elsewhere:
        raise InvalidRequest("the data of such a cache must be in its chunks", field="chunk.remote")
    tensors = [each.data for each in chunk.parts] if by_name else [getattr(chunk, name) for name in names]
    tokens = tensors[0].shape[0] if tensors[0].shape else 0
    if not tokens:
        raise InvalidRequest("a chunk must have tokens", field="chunk.keys")
    found = []
    for tensor, (name, dtype, shape, stored) in zip(tensors, layout.parts(layer, tokens), strict=True):
        data, size = tensor.data, 0 if elsewhere else stored
        if tensor.dtype != dtype or tuple(tensor.shape) != shape or len(data) != size:
            raise InvalidRequest(
                f"{name} of a chunk are {size} bytes of shape {[*shape]}, not {len(data)} of {[*tensor.shape]}",
                field=f"chunk.{name}",
            )
        found.append(data)
    if elsewhere and chunk.remote.size != (expected := layout.chunk_bytes(layer, tokens)):
        raise InvalidRequest(
            f"the tensors of a chunk are {expected} bytes, not {chunk.remote.size}", field="chunk.remote.size"
        )
    return tokens, tuple(found)


class FrameFile:
    """The frames of an export in a file, one behind the other: each has its length in `SIZE_BYTES` (little endian)
    before it, and its seal of ``SEAL_BYTES`` behind it. Called by one thread at a time."""

    SEAL_BYTES: ClassVar[int] = 0

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell, self.close = file.seek, file.tell, file.close

    def append(self, frames: Iterable[bytes]) -> None:
        """Write frames. Raises OSError."""
        write, at = self._file.write, self._file.tell()
        for frame in frames:
            write(len(frame).to_bytes(SIZE_BYTES, "little"))
            write(frame)
            write(self._seal(at, frame))
            at += SIZE_BYTES + len(frame) + self.SEAL_BYTES
        self._file.flush()

    def next(self, most: int) -> list[bytes]:
        """The next frames, of about ``most`` bytes; none at the end. Raises OSError and `KvCorrupt`."""
        frames, read, at = list[bytes](), 0, self._file.tell()
        left = os.fstat(self._file.fileno()).st_size - at
        while read < most and left > 0:
            size = int.from_bytes(self._file.read(SIZE_BYTES), "little")
            if (whole := SIZE_BYTES + size + self.SEAL_BYTES) > left:
                raise KvCorrupt("the file ends within a frame")
            frame, seal = self._file.read(size), self._file.read(self.SEAL_BYTES)
            if not compare_digest(seal, self._seal(at, frame)):
                raise KvCorrupt("a frame is not what was written")
            frames.append(frame)
            at, read, left = at + whole, read + size, left - whole
        return frames

    def _seal(self, at: int, frame: bytes) -> bytes:
        """What shows that this frame was written at this place."""
        return b""
