"""An event loop in a thread of its own, and the parts of the generated facade `client.sync`.

The facade has no protocol of its own: each of its calls runs the async client's call in that loop and waits for it.
Several threads may share a client, and a program with a running loop of its own (a notebook) may use one.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractAsyncContextManager
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

from ferrum_rpc.client.context import closed

Result = TypeVar("Result")
Made = TypeVar("Made")
Arguments = ParamSpec("Arguments")


class Client(AbstractAsyncContextManager[object], Protocol):
    """An async client."""

    async def close(self) -> None:
        """Release what is live, and end it."""


Async = TypeVar("Async", bound=AbstractAsyncContextManager[object])
Async_co = TypeVar("Async_co", bound=AbstractAsyncContextManager[object], covariant=True)
AsyncClient_co = TypeVar("AsyncClient_co", bound=Client, covariant=True)


class Background:
    """A thread that runs an event loop until `stop`. It is a daemon, so a program that does not stop it can end."""

    def __init__(self) -> None:
        self._stopping = asyncio.Event()
        self._lock = threading.Lock()
        self._stopped = False
        started: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main(started)), name="ferrum_rpc client", daemon=True
        )
        self._thread.start()
        self._loop = started.result()

    @property
    def is_this_thread(self) -> bool:
        """Whether the caller runs in the loop's own thread, which cannot wait for the loop."""
        return threading.current_thread() is self._thread

    async def _main(self, started: Future[asyncio.AbstractEventLoop]) -> None:
        started.set_result(asyncio.get_running_loop())
        await self._stopping.wait()

    def run(self, call: Awaitable[Result]) -> Result:
        """Run ``call`` and return its result, from any thread but the loop's own. A thread that is interrupted
        meanwhile (Ctrl-C) cancels the call, waits for its end, and then raises the interruption."""
        ended: Future[Result] = Future()
        tasks: list[asyncio.Task[Result]] = []

        async def called() -> Result:
            return await call

        def over(task: asyncio.Task[Result]) -> None:
            if task.cancelled():
                ended.set_exception(closed())
            elif (error := task.exception()) is not None:
                ended.set_exception(error)
            else:
                ended.set_result(task.result())

        def begin() -> None:
            tasks.append(self._loop.create_task(called()))
            tasks[0].add_done_callback(over)

        def cancel() -> None:
            tasks[0].cancel()  # begun by now: callbacks run in their order

        with self._lock:
            refused = self._stopped or self.is_this_thread
            if not refused:
                self._loop.call_soon_threadsafe(begin)
        if refused:
            if isinstance(call, Coroutine):
                call.close()
            raise RuntimeError(
                "this client is closed"
                if self._stopped
                else "a callback of the client runs in its event loop and cannot wait for that loop"
            )
        try:
            return ended.result()
        except BaseException:
            if not ended.done():
                self._loop.call_soon_threadsafe(cancel)
                wait([ended])
            raise

    def each(self, stream: AsyncGenerator[Result, None]) -> Iterator[Result]:
        """The items of a stream, which is closed if the caller stops early."""
        try:
            while True:
                try:
                    item = self.run(anext(stream))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            # In the loop's own thread (garbage collection) the loop closes the stream by itself.
            if not self._stopped and not self.is_this_thread:
                self.run(stream.aclose())

    def stop(self) -> None:
        """End the loop; calls that still run there end with `TransportError`. Idempotent."""
        with self._lock:
            if not self._stopped:
                self._stopped = True
                self._loop.call_soon_threadsafe(self._stopping.set)
        if not self.is_this_thread:
            self._thread.join()


def unwrapped(values: Any) -> Any:
    """A batch of the facade's sequences, or of tuples with them, converted for the async client, which refuses anything
    else."""
    if isinstance(values, tuple):
        return tuple(map(unwrapped, values))
    if isinstance(values, Facade):
        return values._async
    return [unwrapped(each) for each in values] if isinstance(values, Iterable) else values


class Facade(Generic[Async_co]):
    """An object of the async client, and the loop in which it runs."""

    def __init__(self, of: Async_co, background: Background | None) -> None:
        self._async: Async_co = of
        self._opened = background

    def __repr__(self) -> str:
        return repr(self._async)

    @property
    def _background(self) -> Background:
        if self._opened is None:
            raise RuntimeError(f"this client is not open: use it as `with {type(self).__name__}(...) as client`")
        return self._opened

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._background.run(self._async.__aexit__(*error))


def blocking(
    method: Callable[Concatenate[Async, Arguments], Awaitable[Result]],
) -> Callable[Concatenate[Facade[Async], Arguments], Result]:
    """The facade's method for one of the async client."""

    @functools.wraps(method)
    def run(self: Facade[Async], /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return self._background.run(method(self._async, *args, **kwargs))

    return run


def iterating(
    method: Callable[Concatenate[Async, Arguments], AsyncGenerator[Result, None]],
) -> Callable[Concatenate[Facade[Async], Arguments], Iterator[Result]]:
    """The facade's method for a stream of the async client."""

    @functools.wraps(method)
    def each(self: Facade[Async], /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Iterator[Result]:
        return self._background.each(method(self._async, *args, **kwargs))

    return each


def passing(
    method: Callable[Concatenate[Async, Arguments], Result],
) -> Callable[Concatenate[Facade[Async], Arguments], Result]:
    """The facade's method for one that waits for nothing."""

    @functools.wraps(method)
    def run(self: Facade[Async], /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return method(self._async, *args, **kwargs)

    return run


def making(
    facade: Callable[[Result, Background], Made], method: Callable[Concatenate[Async, Arguments], Result]
) -> Callable[Concatenate[Facade[Async], Arguments], Made]:
    """The facade's method for one that makes a sequence."""

    @functools.wraps(method)
    def make(self: Facade[Async], /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Made:
        return facade(method(self._async, *args, **kwargs), self._background)

    return make


def constructor_of(
    made: Callable[Arguments, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, Arguments], None]]:
    """The arguments of the async client's constructor."""
    return functools.wraps(made.__init__)


class ClientFacade(Facade[AsyncClient_co]):
    """A client with a loop of its own while it is open."""

    def __init__(self, of: AsyncClient_co) -> None:
        super().__init__(of, None)

    def __enter__(self) -> Self:
        if self._opened is not None:
            raise RuntimeError("this client is open already")
        background = Background()
        try:
            background.run(self._async.__aenter__())
        except BaseException:
            background.stop()
            raise
        self._opened = background
        self._forgotten = weakref.finalize(self, _end, background, self._async)  # at the program's end at the latest
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the sequences that are still live, end the session and the lease, close the connection, and end the
        event loop. Bounded by ``release_timeout_s``."""
        background, self._opened = self._opened, None
        if background is not None:
            self._forgotten.detach()
            _end(background, self._async)


def _end(background: Background, client: Client) -> None:
    """Close a client, then its loop. A loop that ended before the client's calls would leave their answers to the
    loops of other clients: grpc.aio reads the answers of all loops in any of them, and complains of a closed one."""
    try:
        if not background.is_this_thread:  # else its end is not awaited: garbage is collected in any thread
            background.run(client.close())
    finally:
        background.stop()
