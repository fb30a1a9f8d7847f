"""The client for programs without asyncio. tools/generate_sync.py makes it of the async one: do not edit.

    from ferrum_rpc.client.sync import ExecutorClient

    with ExecutorClient("localhost:50051") as client, client.sequence() as sequence:
        for token in sequence.generate(b"In the beginning", max_tokens=64):
            print(token)

Same methods, arguments, answers and errors, described there. An open client has an event loop in a thread of its own:
threads may share it, each waits for its own calls, and on one sequence there is one call at a time.
``on_lease_trouble`` is called in that thread. Ctrl-C cancels the call that waits, and leaving the ``with`` releases
what is left.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

from ferrum_rpc.client import client as async_client
from ferrum_rpc.client import sequence as async_sequence
from ferrum_rpc.client.background import (
    ClientFacade,
    Facade,
    blocking,
    constructor_of,
    iterating,
    making,
    passing,
    unwrapped,
)
from ferrum_rpc.client.executor_view import ExecutorView
from ferrum_rpc.client.lease import LeaseState
from ferrum_rpc.core.info import Pressure
from ferrum_rpc.core.items import HandleRef
from ferrum_rpc.errors import ExecutorError


class Sequence(Facade[async_sequence.Sequence]):
    __doc__ = async_sequence.Sequence.__doc__

    @property
    def length(self) -> int:
        """L, the tokens in the cache. The last sampled token is not among them until it is fed."""
        return self._async.length

    @property
    def version(self) -> int:
        """The version of the last answer; 0 before the first."""
        return self._async.version

    @property
    def handle(self) -> HandleRef | None:
        """The handle of the last answer; None before the first."""
        return self._async.handle

    @property
    def tokens(self) -> list[int]:
        """The tokens in the cache, for a sequence made with ``keep_tokens``. A copy."""
        return self._async.tokens

    @property
    def released(self) -> bool:
        """Whether it was released by this program."""
        return self._async.released

    @property
    def in_doubt(self) -> bool:
        """Whether a call failed with an unknown outcome. Making the same call again settles it."""
        return self._async.in_doubt

    @property
    def owner(self) -> ExecutorView | None:
        """The executor that has it. None: nothing was fed yet."""
        return self._async.owner

    prefill = blocking(async_sequence.Sequence.prefill)
    decode = blocking(async_sequence.Sequence.decode)
    verify = blocking(async_sequence.Sequence.verify)
    stream = iterating(async_sequence.Sequence.stream)
    generate = iterating(async_sequence.Sequence.generate)
    item = passing(async_sequence.Sequence.item)
    truncate = blocking(async_sequence.Sequence.truncate)

    def fork(self, count: int = 1, at: int | None = None, *, timeout_s: float | None = None) -> list[Self]:
        """``count`` new sequences that share this one's cache up to length ``at`` (default: all of it) until they
        diverge. This one does not change. Release each child like any other sequence."""
        return [
            type(self)(each, self._background)
            for each in self._background.run(self._async.fork(count, at, timeout_s=timeout_s))
        ]

    def child(self, at: int | None = None) -> Self:
        """A new sequence that begins with this one's cache up to length ``at`` (default: all of it), as of `fork`, but
        created in the step that first feeds it: nothing is sent before. Children that are first fed by items of one
        `ExecutorClient.forward` share a step, also with their parent.

        If this sequence has changed by then, the child's first call raises `SequenceVersionMismatch`. This one is busy
        for that step, and a child's own call waits while another one makes a child of it. Raises
        `TruncateBeyondLength`. If the executor does not support this, the child's first call raises `NotSupported`; use
        `fork` then."""
        return type(self)(self._async.child(at), self._background)

    reserve = blocking(async_sequence.Sequence.reserve)
    park = blocking(async_sequence.Sequence.park)
    export_to = blocking(async_sequence.Sequence.export_to)
    import_from = blocking(async_sequence.Sequence.import_from)
    rebuild = blocking(async_sequence.Sequence.rebuild)
    release = blocking(async_sequence.Sequence.release)


class ExecutorClient(ClientFacade[async_client.ExecutorClient]):
    __doc__ = async_client.ExecutorClient.__doc__

    @constructor_of(async_client.ExecutorClient)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(async_client.ExecutorClient(*args, **kwargs))

    @property
    def pressure(self) -> Pressure | None:
        """How full the executor was in the last answer of any call. None before the first."""
        return self._async.pressure

    @property
    def lease(self) -> LeaseState | None:
        """The lease of the client's sequences. None before the first sequence, after the lease was lost and until the
        next sequence, and if the executor offers none."""
        return self._async.lease

    @property
    def executors(self) -> list[ExecutorView]:
        """The executor as known without a call: a list of one, empty until `info` or another call was answered. A
        restarted process at the same target is another executor."""
        return self._async.executors

    info = blocking(async_client.ExecutorClient.info)
    status = blocking(async_client.ExecutorClient.status)
    health = blocking(async_client.ExecutorClient.health)
    warmup = blocking(async_client.ExecutorClient.warmup)
    reset = blocking(async_client.ExecutorClient.reset)
    drain = blocking(async_client.ExecutorClient.drain)
    list_sequences = blocking(async_client.ExecutorClient.list_sequences)
    activity = blocking(async_client.ExecutorClient.activity)
    load_adapter = blocking(async_client.ExecutorClient.load_adapter)
    unload_adapter = blocking(async_client.ExecutorClient.unload_adapter)
    list_adapters = blocking(async_client.ExecutorClient.list_adapters)
    watch_prefixes = iterating(async_client.ExecutorClient.watch_prefixes)
    acquire_lease = blocking(async_client.ExecutorClient.acquire_lease)
    keep_alive = blocking(async_client.ExecutorClient.keep_alive)
    revoke_lease = blocking(async_client.ExecutorClient.revoke_lease)
    sequence = making(Sequence, async_client.ExecutorClient.sequence)
    register_token_mask = blocking(async_client.ExecutorClient.register_token_mask)
    register_grammar = blocking(async_client.ExecutorClient.register_grammar)
    forward = blocking(async_client.ExecutorClient.forward)
    batch_prefill = blocking(async_client.ExecutorClient.batch_prefill)
    batch_decode = blocking(async_client.ExecutorClient.batch_decode)

    def truncate(
        self, rollbacks: Iterable[tuple[Sequence, int]], *, timeout_s: float | None = None
    ) -> list[ExecutorError | None]:
        """Roll back many sequences, each to its own length: ``results[i]`` is None on success, or the `ExecutorError`
        that `Sequence.truncate` would raise. In a session they are one frame, else a call each. After an unknown
        outcome, making the same call again settles it."""
        return self._background.run(self._async.truncate(unwrapped(rollbacks), timeout_s=timeout_s))

    def release(self, sequences: Iterable[Sequence]) -> list[ExecutorError | None]:
        """Free many sequences: ``results[i]`` is None if the sequence is free (also if it was before), or the
        `ExecutorError` that `Sequence.release` would raise. Bounded and completed as that is."""
        return self._background.run(self._async.release(unwrapped(sequences)))

    score = blocking(async_client.ExecutorClient.score)
