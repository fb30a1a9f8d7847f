"""`ferrum-rpc serve` that notes when each stage of a BatchDecode begins. Started by `benchmarks.profile`.

The server's files stay as they are: this wraps the seams between its floors before it starts. A mark costs 0.1 µs, and
its clock (CLOCK_MONOTONIC) is one for all processes of the machine, so that marks of both ends make one timeline.

    python -m benchmarks.profile_server MARKS.json serve identity ...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import grpc

METHOD = "BatchDecode"

marks: list[tuple[str, int]] = []


def mark(stage: str | None) -> None:
    """A stage begins, and the one before ends; none: nothing does."""
    if stage is not None:
        marks.append((stage, perf_counter_ns()))


def marked(original: Callable[..., Any], before: str | None, after: str | None) -> Callable[..., Any]:
    """A function that marks when it is entered and left."""

    @wraps(original)
    def called(*arguments: Any, **named: Any) -> Any:
        mark(before)
        try:
            return original(*arguments, **named)
        finally:
            mark(after)

    return called


def watch_grpc() -> None:
    """Where grpc.aio calls the (de)serializers and the handler of `METHOD`."""
    plain = grpc.unary_unary_rpc_method_handler

    def handler(behavior: Any, request_deserializer: Any = None, response_serializer: Any = None) -> Any:
        if getattr(behavior, "__name__", "") != METHOD:
            return plain(behavior, request_deserializer, response_serializer)

        async def answer(request: Any, context: Any) -> Any:
            mark("server: items from protobuf")
            response = await behavior(request, context)
            mark("server: handler returns to grpc.aio")
            return response

        parse = marked(request_deserializer, "server: parse the request", "server: grpc.aio starts the handler")
        serialize = marked(response_serializer, "server: serialize the answer", "wire: answer")
        return plain(answer, parse, serialize)

    grpc.unary_unary_rpc_method_handler = handler


def watch_floors() -> None:
    """The seams between service, engine and runner."""
    from ferrum_rpc.engine.assembly import build
    from ferrum_rpc.engine.operations import TorchRunner
    from ferrum_rpc.engine.thread import ModelThread
    from ferrum_rpc.service import executor
    from ferrum_rpc.service.forward import ForwardCall

    plain_runner, plain_await = build.build_runner, ForwardCall.__await__

    def runner(config: Any, progress: Any, _: Any, largest: Any) -> TorchRunner:
        return plain_runner(config, progress, lambda stage: mark(f"model thread: {stage}"), largest)

    def ended(self: ForwardCall) -> Any:
        answer = yield from plain_await(self)
        mark("server: results to protobuf")
        return answer

    seams: tuple[tuple[Any, str, str | None, str | None], ...] = (
        (ForwardCall, "__init__", "server: admit", None),
        (ModelThread, "submit", "server: submit", "hand-over: loop to model thread"),
        (ModelThread, "_begin", "model thread: gather the step", None),
        (TorchRunner, "finish", None, "model thread: account for the step"),
        (ModelThread, "_deliver", "hand-over: model thread to loop", None),
        (ForwardCall, "_commit", "server: commit handles, replay log", "server: wake the handler"),
        (executor, "fill_results", None, "server: pressure, timing, answer message"),
    )
    for owner, name, before, after in seams:
        setattr(owner, name, marked(getattr(owner, name), before, after))
    ForwardCall.__await__ = ended  # type: ignore[method-assign, assignment]
    build.build_runner = runner  # type: ignore[assignment]


if __name__ == "__main__":
    from ferrum_rpc import cli

    watch_grpc()
    watch_floors()
    try:
        cli.main(sys.argv[2:])
    finally:
        Path(sys.argv[1]).write_text(json.dumps(marks), encoding="utf-8")
