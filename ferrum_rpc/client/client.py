"""`ExecutorClient`: a connection to one executor."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from collections.abc import Sequence as ListOf
from functools import partial
from typing import Any

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest

from ferrum_rpc.client.answer import Answer
from ferrum_rpc.client.arguments import CacheMode, as_number, creation
from ferrum_rpc.client.batches import forward_at, release_at, truncate_at
from ferrum_rpc.client.channel import (
    KEEPALIVE_TIME_S,
    KEEPALIVE_TIMEOUT_S,
    ChannelOption,
    keepalive_options,
    open_channel,
)
from ferrum_rpc.client.connection import Connection
from ferrum_rpc.client.context import Context
from ferrum_rpc.client.encryption import ask_who_accepts
from ferrum_rpc.client.executor_view import ExecutorView
from ferrum_rpc.client.info import (
    Activity,
    AdapterInfo,
    CallerActivity,
    ExecutorInfo,
    ExecutorState,
    ExecutorStatus,
    Health,
    SequenceInfo,
    SlowCall,
    WarmupReport,
)
from ferrum_rpc.client.lease import Lease, LeasePolicy, Leases, LeaseState, LeaseTrouble
from ferrum_rpc.client.masks import Mask
from ferrum_rpc.client.model_client import ModelClient
from ferrum_rpc.client.owner import Owner
from ferrum_rpc.client.prefixes import PrefixEvents, watch_prefixes
from ferrum_rpc.client.retry import NEVER_RESEND, ResendPolicy
from ferrum_rpc.client.sender import Sender
from ferrum_rpc.client.sequence import Sequence, sender_of
from ferrum_rpc.client.session.transport import STEPS_IN_FLIGHT, SessionTransport
from ferrum_rpc.client.state import Item, SequenceState
from ferrum_rpc.client.transport import Feed, Transport
from ferrum_rpc.core import GrammarKind, Pressure
from ferrum_rpc.core.check import check_limit
from ferrum_rpc.errors import ExecutorError
from ferrum_rpc.executor.v1 import executor_control_pb2
from ferrum_rpc.wire.info import duration, from_proto


class ExecutorClient(ModelClient):
    """A connection to one executor, for one scheduler. An async context manager.

    ``target``: ``host:port`` or ``unix:path``. ``timeout_s``: the default deadline of a call; None waits for ever.
    ``credentials``: TLS, from `tls`; None is plain text. ``token``: sent as ``authorization: Bearer``.
    ``channel_options`` replace gRPC options of the same name. ``resend``: when to resend calls with an unknown outcome.
    ``release_timeout_s`` limits the time to leave a sequence, or the client.

    ``lease``: the policy of the lease of its sequences, acquired with the first of them and renewed in the background;
    None: sequences end after the executor's idle time-out. ``on_lease_trouble`` is called in the event loop when
    renewals begin to fail, and when the lease is lost with its sequences; the next sequence then gets a new one.
    ``client_name`` names the client in the executor's lists and logs (default: host and process id).
    ``session``: requests are frames of one stream, at most ``steps_in_flight`` at a time (the executor may grant fewer;
    further ones wait), which costs less than unary calls. Calls that are ready at the same time share a frame.
    Executors without sessions get unary calls. ``tokens_ahead``: the executor reports the tokens of runs as they are
    chosen, ahead of the runs' answers, to the ``on_tokens`` of their items (`Sequence.item`).
    ``keepalive_time_s``, ``keepalive_timeout_s``: a peer that is dead or hangs is detected within twice their sum.

    Leaving the client releases the sequences that are still live. Every call raises the `ExecutorError` of the
    executor's reason, or `TransportError` if there is no answer (`Draining` if the executor had reported before that it
    was draining).
    """

    def __init__(
        self,
        target: str,
        *,
        timeout_s: float | None = 60.0,
        channel_options: Iterable[ChannelOption] = (),
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
        resend: ResendPolicy = ResendPolicy(),
        release_timeout_s: float = 5.0,
        lease: LeasePolicy | None = LeasePolicy(),
        client_name: str = "",
        on_lease_trouble: Callable[[LeaseTrouble], None] | None = None,
        session: bool = False,
        steps_in_flight: int = STEPS_IN_FLIGHT,
        tokens_ahead: bool = False,
        keepalive_time_s: float = KEEPALIVE_TIME_S,
        keepalive_timeout_s: float = KEEPALIVE_TIMEOUT_S,
    ) -> None:
        self.target = target
        self._way = "session" if session else "unary"
        options = (*keepalive_options(keepalive_time_s, keepalive_timeout_s), *channel_options)
        metadata = () if token is None else (("authorization", f"Bearer {token}"),)

        def connect() -> Connection:
            channel = open_channel(target, credentials, options)
            context = Context(
                channel,
                target=target,
                metadata=metadata,
                resend=resend,
                timeout_s=timeout_s,
                encrypted=credentials is not None,
                again=partial(ask_who_accepts, target, credentials, options),
            )
            leases = Leases(context, lease, client_name=client_name, on_trouble=on_lease_trouble)
            transport = Transport(context)
            if session:
                transport = SessionTransport(context, leases, steps_in_flight, tokens_ahead=tokens_ahead)
            return Connection(context, leases, transport, release_timeout_s)

        self._connect = connect
        self._opened: Connection | None = None

    def __repr__(self) -> str:
        return f"<ExecutorClient {self.target} {self._way}: {'not open' if self._opened is None else 'open'}>"

    async def __aenter__(self) -> ExecutorClient:
        if self._opened is not None:
            raise RuntimeError("this client is open already")
        self._opened = self._connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Release the sequences that are still live, end the session and the lease, then close the connection. Bounded
        by ``release_timeout_s``."""
        connection, self._opened = self._opened, None
        if connection is not None:
            await connection.close()

    @property
    def pressure(self) -> Pressure | None:
        """How full the executor was in the last answer of any call. None before the first."""
        return None if self._opened is None else self._opened.context.pressure

    @property
    def lease(self) -> LeaseState | None:
        """The lease of the client's sequences. None before the first sequence, after the lease was lost and until the
        next sequence, and if the executor offers none."""
        return None if self._opened is None else self._opened.leases.state

    # --- the executor -----------------------------------------------------------------------------------------------

    @property
    def executors(self) -> list[ExecutorView]:
        """The executor as known without a call: a list of one, empty until `info` or another call was answered. A
        restarted process at the same target is another executor."""
        executor = None if self._opened is None else self._opened.executor
        return [] if executor is None else [executor]

    async def info(self, *, timeout_s: float | None = None) -> ExecutorInfo:
        """The executor's model, cache, limits and capabilities. Requested once per life of the executor. Waits while
        the model loads, and raises `Starting` at the end of the timeout. Raises `NotSupported` if the executor needs
        newer clients."""
        return await self._context.info(self._context.deadline(timeout_s))

    async def status(self, *, timeout_s: float | None = None) -> ExecutorStatus:
        """The executor's present state, pressure and counters."""
        return await self._context.status(self._context.deadline(timeout_s))

    async def health(self, service: str = "", *, timeout_s: float | None = None) -> Health:
        """The standard health check of a service; without a name, of the whole server. `LIVENESS`: whether process and
        device work, also while the executor loads or drains."""
        context, message = self._context, HealthCheckRequest(service=service)
        response = await context.call(context.health.Check, message, context.deadline(timeout_s), NEVER_RESEND)
        return Health(response.status)

    async def warmup(
        self, batch_size: int = 0, prefill_tokens: int = 0, *, timeout_s: float | None = None
    ) -> WarmupReport:
        """Run steps of typical shapes, so that the first caller does not wait for them. 0: the executor's defaults."""
        message = executor_control_pb2.WarmupRequest(
            batch_size=as_number(batch_size, "batch_size"), prefill_tokens=as_number(prefill_tokens, "prefill_tokens")
        )
        deadline = self._context.deadline(timeout_s)
        response = await self._context.call(self._context.control.Warmup, message, deadline, NEVER_RESEND)
        return from_proto(WarmupReport, response, pressure=self._context.note_pressure(response.pressure))

    async def reset(self, *, instance_id: str = "", timeout_s: float | None = None) -> int:
        """Release every sequence of every caller; returns how many. ``instance_id`` (from `info`) guards against
        hitting a restarted executor."""
        message = executor_control_pb2.ResetRequest(instance_id=instance_id)
        deadline = self._context.deadline(timeout_s)
        response = await self._context.call(self._context.control.Reset, message, deadline, NEVER_RESEND)
        self._context.note_pressure(response.pressure)
        return response.released_sequences

    async def drain(self, grace_s: float | None = None, *, timeout_s: float | None = None) -> ExecutorState:
        """Make the executor refuse new sequences and serve owned ones for up to ``grace_s`` seconds."""
        message = executor_control_pb2.DrainRequest()
        if grace_s is not None:
            message.grace.CopyFrom(duration(grace_s))
        deadline = self._context.deadline(timeout_s)
        response = await self._context.call(self._context.control.Drain, message, deadline, NEVER_RESEND)
        self._context.draining = True
        return ExecutorState(response.state)

    async def list_sequences(self, *, timeout_s: float | None = None) -> list[SequenceInfo]:
        """The live sequences of every caller, oldest first, for an operator. The list may or may not include one that
        begins or ends meanwhile."""
        deadline, found = self._context.deadline(timeout_s), list[SequenceInfo]()
        request = executor_control_pb2.ListSequencesRequest()
        while True:
            page = await self._context.call(self._context.control.ListSequences, request, deadline, NEVER_RESEND)
            found += [from_proto(SequenceInfo, each, length=each.seq_len) for each in page.sequences]
            if not page.next_page_token:
                return found
            request = executor_control_pb2.ListSequencesRequest(page_token=page.next_page_token)

    async def activity(self, *, timeout_s: float | None = None) -> Activity:
        """What each caller holds, and the slowest calls of the last minute, for an operator. Raises `NotSupported` for
        executors of schema revision 7 and before."""
        request = executor_control_pb2.GetActivityRequest()
        deadline = self._context.deadline(timeout_s)
        answer = await self._context.call(self._context.control.GetActivity, request, deadline, NEVER_RESEND)
        return Activity(
            tuple(from_proto(CallerActivity, each) for each in answer.callers),
            tuple(from_proto(SlowCall, each) for each in answer.slowest_calls),
        )

    async def load_adapter(self, name: str, *, timeout_s: float | None = None) -> AdapterInfo:
        """Load an adapter from the executor's adapter folder, for `sequence`; no effect if it is loaded. Raises
        `AdapterUnknown`, `SequencesExhausted` if there is no capacity, and `InvalidRequest` and `NotSupported` for
        invalid files."""
        message = executor_control_pb2.LoadAdapterRequest(name=name)
        deadline = self._context.deadline(timeout_s)
        response = await self._context.call(self._context.control.LoadAdapter, message, deadline, NEVER_RESEND)
        return from_proto(AdapterInfo, response.adapter, nbytes=response.adapter.bytes)

    async def unload_adapter(self, name: str, *, timeout_s: float | None = None) -> None:
        """Unload an adapter. Raises `AdapterUnknown`, and `AdapterInUse` while sequences use it."""
        message = executor_control_pb2.UnloadAdapterRequest(name=name)
        deadline = self._context.deadline(timeout_s)
        await self._context.call(self._context.control.UnloadAdapter, message, deadline, NEVER_RESEND)

    async def list_adapters(self, *, timeout_s: float | None = None) -> list[AdapterInfo]:
        """The loaded adapters, in the order of loading."""
        message = executor_control_pb2.ListAdaptersRequest()
        deadline = self._context.deadline(timeout_s)
        response = await self._context.call(self._context.control.ListAdapters, message, deadline, NEVER_RESEND)
        return [from_proto(AdapterInfo, each, nbytes=each.bytes) for each in response.adapters]

    def watch_prefixes(self, *, patience_s: float = 60.0) -> AsyncGenerator[PrefixEvents, None]:
        """The contents of the executor's prefix cache, then its changes, for a `PrefixIndex`, until the caller stops
        reading. After a lost connection the stream continues, after a restart it begins anew. Raises the last error if
        the executor cannot be reached for ``patience_s`` seconds, `NotSupported` if it offers no events, and the
        executor's refusals."""
        return watch_prefixes(self._context, patience_s)

    # --- leases of the caller's own ---------------------------------------------------------------------------------

    async def acquire_lease(
        self, ttl_s: float | None = None, *, client_name: str = "", timeout_s: float | None = None
    ) -> Lease:
        """A lease for ``ttl_s`` seconds (default: the executor's), for `sequence` with its ``lease_id``. You renew and
        revoke it yourself, unlike the client's own lease. Raises `SequencesExhausted` if there are too many."""
        return await self._connection.leases.acquire_lease(ttl_s, client_name, self._context.deadline(timeout_s))

    async def keep_alive(self, lease_id: str, *, timeout_s: float | None = None) -> float:
        """Renew a lease; returns its lifetime in seconds. Raises `LeaseExpired`, `LeaseUnknown`, or `InstanceMismatch`
        after a restart of the executor."""
        return await self._connection.leases.renew_lease(lease_id, self._context.deadline(timeout_s))

    async def revoke_lease(self, lease_id: str, *, timeout_s: float | None = None) -> int:
        """End a lease and free its sequences; returns their number. Raises as `keep_alive`."""
        return await self._connection.leases.revoke_lease(lease_id, self._context.deadline(timeout_s))

    # --- sequences --------------------------------------------------------------------------------------------------

    def sequence(
        self,
        *,
        keep_tokens: bool = False,
        rebuild: bool = False,
        reserve_tokens: int = 0,
        lease_id: str = "",
        adapter: str = "",
        cache_salt: bytes = b"",
        cache_mode: CacheMode = CacheMode.DEFAULT,
    ) -> Sequence:
        """A new, empty sequence. Nothing is sent until it is fed.

        ``keep_tokens``: keep the tokens that were fed, so that `Sequence.rebuild` needs none. ``rebuild``: rebuild a
        lost sequence (executor restarted, lease expired, reset) automatically and continue; implies ``keep_tokens``.
        Batch calls do not rebuild. The other options are the contract's ``CreateOptions``: blocks to reserve beyond the
        prompt, a lease, an adapter by name, a salt that separates cached prefixes, and the use of the prefix cache.
        """
        create = creation(reserve_tokens, lease_id, adapter, cache_salt, cache_mode)
        connection = self._connection
        info = connection.context.known_info
        limits = None if info is None else info.limits
        check_limit(limits, "max_cache_salt_bytes", len(create.cache_salt), "bytes of a salt", "create.cache_salt")
        check_limit(limits, "max_name_bytes", len(create.adapter.encode()), "bytes of a name", "create.adapter")
        state = SequenceState(create, tokens=[] if keep_tokens or rebuild else None, rebuilds=rebuild)
        return Sequence(Sender(state, Owner(connection, state)))

    async def register_token_mask(self, mask: Mask, *, timeout_s: float | None = None) -> bytes:
        """Register a mask of allowed tokens: bools [V], or int32 or uint32 words [ceil(V / 32)], bit t % 32 of word
        t / 32 for token t. Returns the id, for ``Greedy(mask=...)``, ``Sample(mask=...)`` and their ``row_masks``.

        A mask that this client has registered before costs no call. The executor keeps `limits.max_token_masks` and
        evicts the least recently used; the client registers evicted ones again if they are among the last 64 MiB of
        words that it registered. Raises `InvalidRequest` for a mask of another vocabulary or without any token,
        `QueueFull` if calls in flight use all masks that the executor can keep."""
        return await self._connection.masks.register(mask, self._context.deadline(timeout_s))

    async def register_grammar(
        self, kind: GrammarKind, text: str | Mapping[str, Any], *, timeout_s: float | None = None
    ) -> bytes:
        """Register a grammar: a JSON schema (its text, or as a mapping), a regular expression, or a context-free
        grammar in Lark. Returns the id, for ``Greedy(grammar=..., grammar_from=...)`` and ``Sample``, where
        ``grammar_from`` is the position at which the constrained text begins, such as the length of the prompt.

        A grammar that this client has registered before costs no call. The executor keeps `limits.max_grammars` and
        evicts the least recently used; the client registers evicted ones again. Raises `NotSupported` if the executor
        offers none, `InvalidRequest` for an invalid grammar, `GrammarTooComplex` for one that exceeds the limits of
        time and memory, `QueueFull` if calls in flight use all grammars that the executor can keep."""
        return await self._connection.grammars.register(kind, text, self._context.deadline(timeout_s))

    # --- inside -----------------------------------------------------------------------------------------------------

    def _batch(
        self, feed: Feed, items: ListOf[Item], all_or_nothing: bool, timeout_s: float | None
    ) -> Awaitable[list[Answer | ExecutorError]]:
        connection = self._connection
        deadline = connection.context.deadline(timeout_s)
        return forward_at(connection, feed, items, deadline, all_or_nothing=all_or_nothing)

    def _truncate(
        self, pairs: ListOf[tuple[Sequence, int]], timeout_s: float | None
    ) -> Awaitable[list[ExecutorError | None]]:
        senders = [(sender_of(each), length) for each, length in pairs]
        return truncate_at(self._connection, senders, self._context.deadline(timeout_s))

    def _release(self, sequences: ListOf[Sequence]) -> Awaitable[list[ExecutorError | None]]:
        return release_at(self._connection, list(map(sender_of, sequences)))

    @property
    def _context(self) -> Context:
        return self._connection.context

    @property
    def _connection(self) -> Connection:
        if self._opened is None:
            raise RuntimeError("this client is not open: use it as `async with ExecutorClient(...) as client`")
        return self._opened


def connection_of(client: ExecutorClient) -> Connection:
    """The connection of an open client, for the fleet that drives it."""
    return client._connection
