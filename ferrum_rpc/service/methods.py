"""The table of every method: one look into a dictionary finds a call's handler, checked and guarded.

The generated code offers each method to a grpc server twice, as registered and through a generic handler. grpc.aio
waits for registered methods with an accept of each and an `asyncio.wait` over them all, for every call: with thirty
methods that is 45 us of the event loop's time, and a third of what a flood of reset streams costs. So the server knows
of a single generic handler, this one. That every handler comes through here is also what makes default deny sure: a
method that somebody adds later is parsed and guarded without knowing it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import grpc

from ferrum_rpc.errors import NotSupported
from ferrum_rpc.service.calls import UNKNOWN_METHOD, CallLog, Context
from ferrum_rpc.service.decoding import parsing
from ferrum_rpc.service.guard import Guard

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class MethodTable(grpc.GenericRpcHandler):
    """A grpc server as far as registering is concerned, and the generic handler that a real one asks. Without a
    ``guard`` anybody may call; a method that nobody registered is refused like any other call."""

    def __init__(self, calls: CallLog, guard: Guard | None) -> None:
        async def refuse(_: Any, context: Context) -> None:
            await calls.refuse(UNKNOWN_METHOD, context, NotSupported("the executor has no such method"))

        self._calls = calls
        self._guard = guard
        self._handlers: dict[str, Handler] = {}
        unknown: Handler = grpc.stream_stream_rpc_method_handler(refuse)  # whatever kind of call it is
        self._unknown: Handler = unknown if guard is None else guard.wrap(unknown, "", UNKNOWN_METHOD)

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The handlers by path, ``/package.Service/Method``."""
        return self._handlers

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """As `grpc.aio.Server.add_generic_rpc_handlers`: the generated code's hold what comes registered besides."""

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Handler]) -> None:
        """As `grpc.aio.Server.add_registered_method_handlers`."""
        for name, each in method_handlers.items():
            method = f"{service_name}/{name}"
            handler = parsing(each, method, self._calls)
            if self._guard is not None:
                handler = self._guard.wrap(handler, service_name, method)
            self._handlers[f"/{method}"] = handler

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler:
        """The handler of a method; one that refuses where there is none."""
        return self._handlers.get(handler_call_details.method, self._unknown)
