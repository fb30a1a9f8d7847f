"""Large answers of a session in parts: a client that waits for a small one should not wait behind megabytes."""

from __future__ import annotations

from collections.abc import Iterator

from ferrum_rpc.executor.v1 import session_pb2


def row_parts(response: session_pb2.SessionResponse, most: int) -> Iterator[session_pb2.SessionResponse]:
    """The row frames of a large answer, each of ``most`` bytes of rows or of one row; takes their bytes out of it."""
    for index, block in enumerate(response.forward.row_blocks):
        rows = getattr(block, block.WhichOneof("kind"))
        for field, tensor in rows.ListFields():
            data = tensor.data
            if len(data) <= most:
                continue
            tensor.ClearField("data")
            count = tensor.shape[0]
            row_bytes = len(data) // count
            together = max(1, most // row_bytes)
            for first in range(0, count, together):
                last = min(first + together, count)
                part = session_pb2.SessionRows(block=index, first=first, field=field.number)
                part.rows.dtype = tensor.dtype
                part.rows.shape.extend((last - first, *tensor.shape[1:]))
                part.rows.data = data[first * row_bytes : last * row_bytes]
                yield session_pb2.SessionResponse(step_id=response.step_id, rows=part)
