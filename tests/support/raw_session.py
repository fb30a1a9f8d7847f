"""A session without the client package: frames out, answers by step id. For what a good client would not do."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc

from ferrum_rpc.executor.v1 import forward_pb2, session_pb2, types_pb2


class RawSession:
    """One open stream."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.welcome = session_pb2.SessionWelcome()
        self._steps = itertools.count(1)
        self._writing = asyncio.Lock()  # gRPC takes one message at a time
        self._answers: dict[int, asyncio.Future[session_pb2.SessionResponse]] = {}
        self._reading: asyncio.Task[None] | None = None

    async def open(self, **hello: Any) -> None:
        self._reading = asyncio.create_task(self._read())
        answer = await self.ask(hello=session_pb2.SessionHello(**hello))
        self.welcome = answer.welcome

    async def send(self, **frame: Any) -> tuple[int, asyncio.Future[session_pb2.SessionResponse]]:
        """Write a frame; its step id, and its answer to come. A stream that ends leaves answers cancelled."""
        async with self._writing:
            step = next(self._steps)
            answer = self._answers[step] = asyncio.get_running_loop().create_future()
            await self.call.write(session_pb2.SessionRequest(step_id=step, **frame))
        return step, answer

    async def ask(self, **frame: Any) -> session_pb2.SessionResponse:
        """Write a frame and await its answer."""
        _, answer = await self.send(**frame)
        return await answer

    async def step(self, *items: forward_pb2.ForwardItem) -> list[forward_pb2.ItemResult]:
        """The results of a step."""
        return list((await self.ask(forward=session_pb2.SessionForward(items=items))).forward.results)

    async def release(self, *handles: types_pb2.KvHandle) -> None:
        """Whatever their versions."""
        await self.ask(release=session_pb2.SessionRelease(handles=handles, any_version=True))

    async def close(self) -> None:
        """End the stream and its sequences."""
        await self.ask(close=session_pb2.SessionClose(release_sequences=True))

    async def leave(self) -> None:
        """Hang up without a word."""
        self.call.cancel()
        if self._reading is not None:
            await asyncio.wait([self._reading])

    async def _read(self) -> None:
        try:
            with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                while (message := await self.call.read()) is not grpc.aio.EOF:
                    answer = self._answers.pop(message.step_id, None)
                    if answer is not None and not answer.done():
                        answer.set_result(message)
        finally:
            for each in self._answers.values():
                each.cancel()


@asynccontextmanager
async def raw_session(executor: Any, **hello: Any) -> AsyncIterator[RawSession]:
    """An open session; whoever wants it closed says so."""
    session = RawSession(executor.Session())
    await session.open(**hello)
    try:
        yield session
    finally:
        await session.leave()
