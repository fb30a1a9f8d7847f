"""The scheduler of `gpu_wire`: one BatchDecode a step over TCP. A line on its input is a round, answered by a line of
JSON: seconds of each step, from the first byte of the request to the last row and handle at hand.
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from typing import Any

import grpc
import numpy as np

from ferrum_rpc.core import OutputSpec, Positions
from ferrum_rpc.executor.v1 import forward_pb2, model_executor_pb2, model_executor_pb2_grpc
from ferrum_rpc.wire.output import output_to_proto
from ferrum_rpc.wire.rows import rows_from_proto

PREFILL_TOKENS = 8192
"""Tokens of a prefill call."""


def main() -> None:
    """Prefill, then a round for each line."""
    target = sys.argv[1]
    batch, context, steps, lead_in, vocabulary = map(int, sys.argv[2:7])
    random = np.random.default_rng(3)
    channel = grpc.insecure_channel(target, options=[("grpc.max_send_message_length", -1)])
    stub: Any = model_executor_pb2_grpc.ModelExecutorStub(channel)
    handles = _prefill(stub, random.integers(0, vocabulary, (batch, context)).tolist(), context)
    greedy = output_to_proto(OutputSpec())
    for _ in sys.stdin:
        seconds = []
        for index in range(lead_in + steps):
            began = time.perf_counter()
            items = [
                forward_pb2.ForwardItem(
                    item_id=number,
                    handle=handle,
                    token_ids=[int(random.integers(vocabulary))],
                    truncate_to=context if index == 0 else None,
                    output=greedy,
                    request_id=uuid.uuid4().hex,
                )
                for number, handle in enumerate(handles)
            ]
            response = stub.BatchDecode(model_executor_pb2.BatchDecodeRequest(items=items))
            handles = _handles(response)
            rows_from_proto(response.row_blocks)
            seconds.append(time.perf_counter() - began)
        print(json.dumps(seconds[lead_in:]), flush=True)


def _prefill(stub: Any, prompts: list[list[int]], context: int) -> list[Any]:
    handles = []
    at_once = max(1, PREFILL_TOKENS // context)
    for first in range(0, len(prompts), at_once):
        items = [
            forward_pb2.ForwardItem(
                item_id=number,
                token_ids=prompts[number],
                output=output_to_proto(OutputSpec(Positions.NONE)),
            )
            for number in range(first, min(first + at_once, len(prompts)))
        ]
        handles += _handles(stub.BatchPrefill(model_executor_pb2.BatchPrefillRequest(items=items)))
    return handles


def _handles(response: Any) -> list[Any]:
    for result in response.results:
        if not result.HasField("output"):
            raise RuntimeError(f"refused: {result.error.message}")
    return [result.output.handle for result in response.results]


if __name__ == "__main__":
    main()
