"""Servers for tests: a real port, a real model thread, in this process; and a raw stub to speak to them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import grpc
import structlog
from grpc_health.v1 import health_pb2_grpc

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import Limits
from ferrum_rpc.engine.assembly.build import build_runner, failing_stage
from ferrum_rpc.engine.operations import TorchRunner
from ferrum_rpc.engine.process.parent import Program
from ferrum_rpc.engine.step import Stage
from ferrum_rpc.executor.v1 import executor_control_pb2_grpc, kv_transfer_pb2_grpc, model_executor_pb2_grpc
from ferrum_rpc.failpoints import NO_FAILPOINTS, Failpoints
from ferrum_rpc.service.guard.auth import Security
from ferrum_rpc.service.server import ExecutorServer
from tests.support.calls import Calls
from tests.support.tokens import token_file

LIMITS = Limits(
    max_batch_items=128,
    max_batch_tokens=4096,
    max_top_tokens=256,
    max_selected_tokens=256,
    max_request_bytes=4 << 20,
    max_response_bytes=16 << 20,
    max_sequences=1024,
    max_queued_items=4096,
    max_queued_tokens=1 << 18,
    replay_bytes=1 << 20,
)


@dataclass(slots=True)
class Served(Calls):
    """A running server and ways to it. Touch ``runner`` only while nothing is in flight."""

    server: ExecutorServer
    runner: TorchRunner
    channel: grpc.aio.Channel
    executor: Any
    control: Any
    transfer: Any

    @property
    def target(self) -> str:
        return self.server.target

    @property
    def health(self) -> Any:
        """The stub of the health service."""
        return health_pb2_grpc.HealthStub(self.channel)

    async def between_steps(self, run: Any) -> None:
        """Call ``run(runner)`` in the model thread."""
        from ferrum_rpc.service.asking import between_steps

        await between_steps(self.server.state.engine.submit, run)

    async def check(self) -> None:
        """The cache's books agree, and both floors know the same sequences at the same lengths."""
        records = {
            record.sequence: record.length for record in self.server.state.handles.records() if not record.parked
        }

        def compare(runner: TorchRunner) -> None:
            runner.check()
            state = runner.kv.state()
            assert state.sequences == len(records)
            for sequence, length in records.items():
                assert runner.kv.length(sequence) == length

        await self.between_steps(compare)


class Gate:
    """A stage hook that holds the model thread at a stage until opened."""

    def __init__(self, at: str = "forward") -> None:
        self.at = at
        self.closed = False
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, stage: str) -> None:
        if self.closed and stage == self.at:
            self.reached.set()
            assert self.opened.wait(30)

    @property
    def holds(self) -> bool:
        """Whether a step stands at the gate."""
        return self.closed and self.reached.is_set()

    async def held(self) -> None:
        """Wait until one does."""
        assert await asyncio.to_thread(self.reached.wait, 30), "no step came to the gate"

    async def hold(self, call: Any) -> asyncio.Task[Any]:
        """Start a call and return when its step stands at the gate."""
        self.closed = True
        task = asyncio.ensure_future(call)
        await self.held()
        return task

    def open(self) -> None:
        self.closed = False
        self.opened.set()

    def close(self) -> None:
        """Hold the next step until the gate is opened, as often as a test likes."""
        self.reached.clear()
        self.opened.clear()
        self.closed = True

    @asynccontextmanager
    async def shut(self) -> AsyncIterator[None]:
        """Closed, and open at the end, whatever happened."""
        self.close()
        try:
            yield
        finally:
            self.open()


@asynccontextmanager
async def serve_model(
    config: ModelSettings,
    *,
    stage: Stage | None = None,
    failpoints: Failpoints = NO_FAILPOINTS,
    security: Security | None = None,
    tokens: Sequence[str] = (),
    program: Program | None = None,
    made: Callable[[Any], Any] = lambda runner: runner,
    park_dir: Path | None = None,
    nixl_agent: Callable[[str], Any] | None = None,
    host: str = "127.0.0.1",
    **limits: int,
) -> AsyncIterator[Served]:
    """Serve ``config`` on a free port with `LIMITS`, changed by ``limits``. ``tokens``: the lines of a file of tokens,
    without which nobody is served: see `Served.by`. ``program``: the engine is a process that has its own ``config``
    and ``stage``, and ``Served.runner`` is only described. ``made`` changes the runner before it is served."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    stage = failing_stage(failpoints) if failpoints.rules else stage
    build = program or (lambda: made(build_runner(config, stage=stage)))
    with token_file(*tokens) if tokens else nullcontext() as file:
        server = ExecutorServer(
            build,
            replace(LIMITS, **limits),
            park_dir=park_dir,
            nixl_agent=nixl_agent,
            failpoints=failpoints,
            security=security or Security(tokens=file),
            host=host,
        )
        await server.start()
        try:
            runner: Any = await server.ready()
            options = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
            async with grpc.aio.insecure_channel(server.target, options=options) as channel:
                yield Served(
                    server,
                    runner,
                    channel,
                    model_executor_pb2_grpc.ModelExecutorStub(channel),
                    executor_control_pb2_grpc.ExecutorControlStub(channel),
                    kv_transfer_pb2_grpc.KvTransferStub(channel),
                )
        finally:
            await server.stop(grace_s=5)


@asynccontextmanager
async def serve_identity(
    *,
    kv_blocks: int = 256,
    block_size: int = 4,
    stage: Stage | None = None,
    failpoints: Failpoints = NO_FAILPOINTS,
    security: Security | None = None,
    tokens: Sequence[str] = (),
    max_context: int | None = None,
    block_order: tuple[int, ...] | None = None,
    kv_dtype: Literal["auto", "int8"] = "auto",
    park_dir: Path | None = None,
    nixl_agent: Callable[[str], Any] | None = None,
    program: Callable[[ModelSettings], Program | None] = lambda config: None,
    made: Callable[[Any], Any] = lambda runner: runner,
    host: str = "127.0.0.1",
    **options: Any,
) -> AsyncIterator[Served]:
    """Serve the identity model. ``options`` that are limits change `LIMITS`, the others go to `IdentityConfig`.
    ``tokens``, ``program``, ``made``: see `serve_model`."""
    limits = {name: options.pop(name) for name in list(options) if name in Limits.__dataclass_fields__}
    config = ModelSettings(
        path="identity",
        device="cpu",
        kv_blocks=kv_blocks,
        block_size=block_size,
        max_context=max_context,
        block_order=block_order,
        kv_dtype=kv_dtype,
        **{f"identity_{name}": value for name, value in options.items()},
    )
    about: Any = {"stage": stage, "failpoints": failpoints, "security": security, "program": program(config)}
    about |= {"park_dir": park_dir, "nixl_agent": nixl_agent, "tokens": tokens, "host": host, "made": made}
    async with serve_model(config, **about, **limits) as served:
        yield served


@asynccontextmanager
async def gated(at: str = "forward", **options: Any) -> AsyncIterator[tuple[Served, Gate]]:
    """Serve the identity model with a gate at a stage."""
    gate = Gate(at)
    async with serve_identity(stage=gate, **options) as served:
        yield served, gate


class Loading:
    """A server whose model is there when ``go`` is set."""

    def __init__(self, port: int) -> None:
        self.go = threading.Event()
        self.server = ExecutorServer(self._build, LIMITS, port=port)

    def _build(self) -> Any:
        assert self.go.wait(30)
        return build_runner(ModelSettings("identity", device="cpu", kv_blocks=64, block_size=4))


@asynccontextmanager
async def loading(port: int = 0) -> AsyncIterator[Loading]:
    """A server that loads its model until the test lets it go on, or ends."""
    made = Loading(port)
    await made.server.start()
    try:
        yield made
    finally:
        made.go.set()
        await made.server.ready()
        await made.server.stop(grace_s=5)
