"""`ferrum-rpc serve` that notes when each stage of a BatchDecode begins. Started by `benchmarks.profile`.

The server's files stay as they are: this wraps the seams between its floors before it starts. A mark costs 0.1 µs, and
its clock (CLOCK_MONOTONIC) is one for all processes of the machine, so that marks of both ends make one timeline. What
happens in every layer is summed up for each step instead: a timeline of it would be longer than the step.

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
inside: list[tuple[int, dict[str, float]]] = []
"""When each step began, and microseconds of it by what was called within."""


def mark(stage: str) -> None:
    """A stage begins, and the one before ends."""
    marks.append((stage, perf_counter_ns()))


def around(owner: Any, name: str, before: str | None, after: str | None) -> None:
    """Mark when ``owner.name`` is entered and left."""
    original: Callable[..., Any] = getattr(owner, name)

    @wraps(original)
    def marked(*arguments: Any, **named: Any) -> Any:
        if before is not None:
            mark(before)
        try:
            return original(*arguments, **named)
        finally:
            if after is not None:
                mark(after)

    setattr(owner, name, marked)


def around_async(owner: Any, name: str, before: str, after: str) -> None:
    """The same of a coroutine function."""
    original: Callable[..., Any] = getattr(owner, name)

    @wraps(original)
    async def marked(*arguments: Any, **named: Any) -> Any:
        mark(before)
        try:
            return await original(*arguments, **named)
        finally:
            mark(after)

    setattr(owner, name, marked)


def summed(owner: Any, name: str, label: str) -> None:
    """Add up what the calls of ``owner.name`` take in each step."""
    original: Callable[..., Any] = getattr(owner, name)

    @wraps(original)
    def timed(*arguments: Any, **named: Any) -> Any:
        began = perf_counter_ns()
        try:
            return original(*arguments, **named)
        finally:
            spent = inside[-1][1]
            spent[label] = spent.get(label, 0.0) + (perf_counter_ns() - began) / 1e3

    setattr(owner, name, timed)


def begin_step(owner: Any, name: str) -> None:
    """A step begins with every call of ``owner.name``."""
    original: Callable[..., Any] = getattr(owner, name)

    @wraps(original)
    def noted(*arguments: Any, **named: Any) -> Any:
        inside.append((perf_counter_ns(), {}))
        return original(*arguments, **named)

    setattr(owner, name, noted)


def watch_grpc() -> None:
    """Where grpc.aio calls the (de)serializers and the handler of `METHOD`."""
    plain = grpc.unary_unary_rpc_method_handler

    def handler(behavior: Any, request_deserializer: Any = None, response_serializer: Any = None) -> Any:
        if getattr(behavior, "__name__", "") != METHOD:
            return plain(behavior, request_deserializer, response_serializer)

        def parse(data: bytes) -> Any:
            mark("server: parse the request")
            request = request_deserializer(data)
            mark("server: grpc.aio starts the handler")
            return request

        async def answer(request: Any, context: Any) -> Any:
            mark("server: items from protobuf")
            response = await behavior(request, context)
            mark("server: handler returns to grpc.aio")
            return response

        def serialize(response: Any) -> bytes:
            mark("server: serialize the answer")
            data: bytes = response_serializer(response)
            mark("wire: answer")
            return data

        return plain(answer, parse, serialize)

    grpc.unary_unary_rpc_method_handler = handler


def watch_floors() -> None:
    """The seams between service, engine and runner."""
    from ferrum_rpc.engine import build
    from ferrum_rpc.engine.runner import TorchRunner
    from ferrum_rpc.engine.thread import ModelThread
    from ferrum_rpc.service import executor
    from ferrum_rpc.service.forward import ForwardCall

    around_async(executor, "ForwardCall", "server: admit", "server: results to protobuf")
    around(ModelThread, "submit", "server: submit", "hand-over: loop to model thread")
    around(ModelThread, "_begin", "model thread: gather the step", None)
    around(TorchRunner, "finish", None, "model thread: account for the step")
    begin_step(TorchRunner, "begin")
    around(ModelThread, "_deliver", "hand-over: model thread to loop", None)
    around(ForwardCall, "_commit", "server: commit handles, replay log", "server: wake the handler")
    around(executor, "fill_results", None, "server: pressure, timing, answer message")
    plain = build.build_runner

    def marked(config: Any, progress: Any, _: Any) -> TorchRunner:
        runner = plain(config, progress, lambda stage: mark(f"model thread: {stage}"))
        summed(type(runner.attention), "plan", "attention plan")
        summed(type(runner.attention), "write", "cache write")
        summed(type(runner.attention), "attend", "attention")
        summed(type(runner.model), "logits", "logits")
        return runner

    build.build_runner = marked  # type: ignore[assignment]


def main() -> None:
    """Wrap, serve, and write the marks at the end."""
    from ferrum_rpc import cli

    target = Path(sys.argv[1])
    watch_grpc()
    watch_floors()
    try:
        cli.main(sys.argv[2:])
    finally:
        target.write_text(json.dumps({"marks": marks, "inside": inside}), encoding="utf-8")


if __name__ == "__main__":
    main()
