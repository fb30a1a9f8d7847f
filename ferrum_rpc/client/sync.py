"""The client for programs without asyncio. tools/generate_sync.py makes it of the async one: do not edit.

    from ferrum_rpc.client.sync import ExecutorClient

    with ExecutorClient("localhost:50051") as client, client.sequence() as sequence:
        for token in sequence.generate(b"In the beginning", max_tokens=64):
            print(token)

Same methods, arguments, answers and errors. An open client has an event loop in a thread of its own: threads may share
it, each waits for its own calls, and on one sequence there is one call at a time. ``on_lease_trouble`` is called in
that thread. Ctrl-C cancels the call that waits, and leaving the ``with`` releases what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import grpc

from ferrum_rpc.client import client as async_client
from ferrum_rpc.client import sequence as async_sequence
from ferrum_rpc.client.answer import Answer
from ferrum_rpc.client.arguments import GREEDY, Output, Tokens
from ferrum_rpc.client.background import ClientFacade, Facade, unwrapped
from ferrum_rpc.client.channel import KEEPALIVE_TIME_S, KEEPALIVE_TIMEOUT_S, ChannelOption
from ferrum_rpc.client.client import CacheMode
from ferrum_rpc.client.feeder import NO_ROWS
from ferrum_rpc.client.info import ExecutorInfo, ExecutorState, ExecutorStatus, Health, SequenceInfo, WarmupReport
from ferrum_rpc.client.lease import Lease, LeasePolicy, LeaseState, LeaseTrouble
from ferrum_rpc.client.policy import ResendPolicy
from ferrum_rpc.client.sampling import Sampling
from ferrum_rpc.client.session import STEPS_IN_FLIGHT
from ferrum_rpc.client.state import Item
from ferrum_rpc.core import HandleRef, Pressure
from ferrum_rpc.errors import ExecutorError


class Sequence(Facade[async_sequence.Sequence]):
    """One sequence in the executor's KV cache. Made by `ExecutorClient.sequence`; starts empty.

    A context manager: leaving it releases the sequence, on errors and cancellation too. One call at a time;
    a second one raises `SequenceMisuseError` before anything is sent, and so does an argument that cannot be meant,
    with `InvalidRequest` and its ``field``. Calls raise the `ExecutorError` of the executor's reason; after any error
    the sequence is as it was before the call, except that a long `prefill` keeps the chunks that went through, and
    except where the fate is unknown (`TransportError`, `DeadlineExceeded`, cancellation): then making the same call
    again is safe and settles it, because it carries the same request id.
    """

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
        """Whether a call failed and may have run. The same call made again settles it."""
        return self._async.in_doubt

    def prefill(
        self, tokens: Tokens, output: Output = GREEDY, *, chunk: int | None = None, timeout_s: float | None = None
    ) -> Answer:
        """Feed a prompt, or the next part of one. L becomes L + n.

        A prompt longer than ``chunk`` tokens (default: what the executor takes in one call) goes in several calls that
        ask for no rows but in the last; with positions ALL every chunk is asked, and the answer holds all n rows.
        ``timeout_s`` bounds the whole. If a chunk fails, the ones before it stay; calling again with the same tokens
        goes on where it stopped.

        Raises `KvBlocksExhausted`, `ContextLengthExceeded`, `QueueFull`, `InvalidRequest` and the other refusals."""
        return self._background.run(self._async.prefill(tokens, output, chunk=chunk, timeout_s=timeout_s))

    def decode(
        self, token: int, output: Output = GREEDY, *, truncate_to: int | None = None, timeout_s: float | None = None
    ) -> Answer:
        """Feed one token, after rolling back to ``truncate_to`` where given. L becomes L + 1."""
        return self._background.run(self._async.decode(token, output, truncate_to=truncate_to, timeout_s=timeout_s))

    def verify(
        self, tokens: Tokens, output: Output = GREEDY, *, truncate_to: int | None = None, timeout_s: float | None = None
    ) -> Answer:
        """Feed m draft tokens in one step and return m rows: row i stands at length L + i + 1. L becomes L + m; roll
        back what is rejected with `truncate`, or with ``truncate_to`` of the next call, which costs no round trip."""
        return self._background.run(self._async.verify(tokens, output, truncate_to=truncate_to, timeout_s=timeout_s))

    def generate(
        self,
        tokens: Tokens,
        *,
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: Iterable[int] | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[int]:
        """Feed ``tokens`` (a prompt, or what goes on from here), then every token that is chosen, and yield those:
        ``for token in sequence.generate(prompt, max_tokens=64)``.

        It ends after ``max_tokens`` (None: no bound), before a token of ``stop`` (default: the model's end-of-sequence
        tokens), which is not yielded, or where the context is full. ``sampling``: how tokens are chosen; None takes the
        best one. A sampled text depends on its seed and on nothing that runs beside it. ``timeout_s``: of each step.

        L counts all but the last token that was yielded, which is not fed yet. So a stream may be left or closed
        (``close``) anywhere, and `generate` from that token goes on. An error or a cancellation in a step leaves what
        the step's own call would; where its fate is unknown, going on in this way settles it."""
        return self._background.each(
            self._async.generate(tokens, max_tokens=max_tokens, sampling=sampling, stop=stop, timeout_s=timeout_s)
        )

    def item(self, tokens: Tokens, output: Output = GREEDY, *, truncate_to: int | None = None) -> Item:
        """A work item for `ExecutorClient.forward` and the other batch calls, on the sequence as it is now. Nothing is
        sent. A kind alone stands for the last position."""
        return self._async.item(tokens, output, truncate_to=truncate_to)

    def truncate(self, length: int, *, timeout_s: float | None = None) -> Pressure:
        """Roll back to ``length`` ≤ L tokens. Raises `TruncateBeyondLength` where that would grow it."""
        return self._background.run(self._async.truncate(length, timeout_s=timeout_s))

    def fork(self, count: int = 1, at: int | None = None, *, timeout_s: float | None = None) -> list[Sequence]:
        """``count`` new sequences that share this one's cache up to length ``at`` (default: all of it) until they
        diverge. This one does not change. Each child is released like any other sequence."""
        return [
            Sequence(each, self._background)
            for each in self._background.run(self._async.fork(count, at, timeout_s=timeout_s))
        ]

    def reserve(self, tokens: int, *, timeout_s: float | None = None) -> Pressure:
        """Hold blocks for ``tokens`` tokens beyond L, so that they cannot fail for lack of them. Raises
        `KvBlocksExhausted`. Doing it twice is doing it once."""
        return self._background.run(self._async.reserve(tokens, timeout_s=timeout_s))

    def rebuild(
        self, tokens: Tokens | None = None, output: Output = NO_ROWS, *, timeout_s: float | None = None
    ) -> Answer:
        """Make it anew: feed ``tokens`` (default: the ones kept with ``keep_tokens``) to a new sequence and go on with
        that. The cure for `InstanceMismatch`, `HandleUnknown`, `HandleReleased` and `LeaseExpired`; decoding then
        goes on with the same tokens. Whatever is left of the old sequence is released.

        Pieces longer than ``limits.exact_span_tokens`` are fed as they were, the rest in pieces of that many: on the
        same build with the same choices the cache is the same to the last bit. Where that limit is 0 it is so within
        rounding, and everything goes in pieces as large as the executor takes."""
        return self._background.run(self._async.rebuild(tokens, output, timeout_s=timeout_s))

    def release(self) -> None:
        """Free it, at whatever version it stands. What is gone already (restarted executor, expired lease, released)
        counts as released. Doing it twice is doing it once. Bounded by the client's ``release_timeout_s``, and carried
        through when the caller is cancelled meanwhile."""
        self._background.run(self._async.release())


class ExecutorClient(ClientFacade):
    """A connection to one executor, for one scheduler. A context manager.

    ``target``: ``host:port`` or ``unix:path``. ``timeout_s``: the deadline of every call that is not given one of its
    own; None waits for ever. ``credentials``: TLS, from `tls`; None is plain text. ``token``:
    sent as ``authorization: Bearer``. ``channel_options`` replace gRPC options of the same name. ``resend``: what to do
    when the fate of a call is unknown. ``release_timeout_s`` bounds what leaving a sequence, or the client, may take.

    ``lease``: the lease that its sequences live with, acquired with the first of them and renewed in the background;
    None: they live while they are used (the executor's idle time-out). ``on_lease_trouble`` is called in the event loop
    when renewals begin to fail, and when the lease is lost with its sequences; the next sequence then gets a new one.
    ``client_name`` names the client in the executor's lists and logs (default: host and process id).
    ``session``: requests go as frames of one stream, ``steps_in_flight`` at most at a time (the executor may grant
    fewer, further ones wait), which costs less than a unary call each. Calls that are ready at the same time share a
    frame. Executors without sessions get unary calls.
    ``keepalive_time_s``, ``keepalive_timeout_s``: a peer that is dead or hangs is noticed within twice their sum.

    Leaving the client releases the sequences that are still live. Every call raises the `ExecutorError` that the
    executor's reason stands for, or `TransportError` where there is no answer: `Draining` where the executor had
    said before that it was draining.
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
        keepalive_time_s: float = KEEPALIVE_TIME_S,
        keepalive_timeout_s: float = KEEPALIVE_TIMEOUT_S,
    ) -> None:
        super().__init__(
            async_client.ExecutorClient(
                target,
                timeout_s=timeout_s,
                channel_options=channel_options,
                credentials=credentials,
                token=token,
                resend=resend,
                release_timeout_s=release_timeout_s,
                lease=lease,
                client_name=client_name,
                on_lease_trouble=on_lease_trouble,
                session=session,
                steps_in_flight=steps_in_flight,
                keepalive_time_s=keepalive_time_s,
                keepalive_timeout_s=keepalive_timeout_s,
            ),
            None,
        )

    @property
    def pressure(self) -> Pressure | None:
        """How full the executor was in the last answer, of whatever call. None before the first."""
        return self._async.pressure

    @property
    def lease(self) -> LeaseState | None:
        """The lease that the client's sequences live with. None before the first sequence, after the lease was lost and
        until the next sequence, and where the executor offers none."""
        return self._async.lease

    def info(self, *, timeout_s: float | None = None) -> ExecutorInfo:
        """What the executor is: model, cache, limits, capabilities. Asked once per life of the executor. While
        the model loads it waits; `Starting` at the end of the timeout. Raises `NotSupported` where it needs newer
        clients."""
        return self._background.run(self._async.info(timeout_s=timeout_s))

    def status(self, *, timeout_s: float | None = None) -> ExecutorStatus:
        """How it is doing right now: state, pressure, counters."""
        return self._background.run(self._async.status(timeout_s=timeout_s))

    def health(self, service: str = "", *, timeout_s: float | None = None) -> Health:
        """The standard health check of a service; of the whole server without a name."""
        return self._background.run(self._async.health(service, timeout_s=timeout_s))

    def warmup(self, batch_size: int = 0, prefill_tokens: int = 0, *, timeout_s: float | None = None) -> WarmupReport:
        """Run steps of typical shapes, so that the first caller does not pay for them. 0: the executor's defaults."""
        return self._background.run(self._async.warmup(batch_size, prefill_tokens, timeout_s=timeout_s))

    def reset(self, *, instance_id: str = "", timeout_s: float | None = None) -> int:
        """Release every sequence of every caller; returns how many. ``instance_id`` (from `info`) guards against
        hitting a restarted executor."""
        return self._background.run(self._async.reset(instance_id=instance_id, timeout_s=timeout_s))

    def drain(self, grace_s: float | None = None, *, timeout_s: float | None = None) -> ExecutorState:
        """Ask it to take no new sequences and to finish the ones it owns within ``grace_s`` seconds."""
        return self._background.run(self._async.drain(grace_s, timeout_s=timeout_s))

    def list_sequences(self, *, timeout_s: float | None = None) -> list[SequenceInfo]:
        """The live sequences of every caller, oldest first, for an operator. One that begins or ends meanwhile may be
        in the list or not."""
        return self._background.run(self._async.list_sequences(timeout_s=timeout_s))

    def acquire_lease(
        self, ttl_s: float | None = None, *, client_name: str = "", timeout_s: float | None = None
    ) -> Lease:
        """A lease for ``ttl_s`` seconds (default: the executor's), for `sequence` with its ``lease_id``. The caller
        renews and revokes it; the client's own lease needs none of this. Raises `SequencesExhausted` where there are
        too many."""
        return self._background.run(self._async.acquire_lease(ttl_s, client_name=client_name, timeout_s=timeout_s))

    def keep_alive(self, lease_id: str, *, timeout_s: float | None = None) -> float:
        """Renew a lease; returns for how many seconds. Raises `LeaseExpired`, `LeaseUnknown`, or `InstanceMismatch`
        after a restart of the executor."""
        return self._background.run(self._async.keep_alive(lease_id, timeout_s=timeout_s))

    def revoke_lease(self, lease_id: str, *, timeout_s: float | None = None) -> int:
        """End a lease and free its sequences; returns how many. Raises as `keep_alive`."""
        return self._background.run(self._async.revoke_lease(lease_id, timeout_s=timeout_s))

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

        ``keep_tokens``: remember what was fed, so that `Sequence.rebuild` needs no tokens. ``rebuild``: on a lost
        sequence (executor restarted, lease expired, reset) do that by itself and go on; implies ``keep_tokens``. Batch
        calls do not rebuild: their caller plans. The others are the contract's ``CreateOptions``: blocks to hold beyond
        the prompt, a lease, an adapter by name, a salt that keeps cached prefixes apart, and how to use them."""
        return Sequence(
            self._async.sequence(
                keep_tokens=keep_tokens,
                rebuild=rebuild,
                reserve_tokens=reserve_tokens,
                lease_id=lease_id,
                adapter=adapter,
                cache_salt=cache_salt,
                cache_mode=cache_mode,
            ),
            self._background,
        )

    def truncate(
        self, rollbacks: Iterable[tuple[Sequence, int]], *, timeout_s: float | None = None
    ) -> list[ExecutorError | None]:
        """Roll back many sequences, each to a length of its own: ``results[i]`` is None where that is done, or the
        `ExecutorError` that `Sequence.truncate` would raise. In a session they are one frame, else a call each. After
        an unknown fate the same call settles it."""
        return self._background.run(self._async.truncate(unwrapped(rollbacks), timeout_s=timeout_s))

    def release(self, sequences: Iterable[Sequence]) -> list[ExecutorError | None]:
        """Free many sequences: ``results[i]`` is None where it is free (also where it was before), or the
        `ExecutorError` that `Sequence.release` would raise. Bounded and carried through as that is."""
        return self._background.run(self._async.release(unwrapped(sequences)))

    def forward(
        self, items: Iterable[Item], *, all_or_nothing: bool = False, timeout_s: float | None = None
    ) -> list[Answer | ExecutorError]:
        """Any mix of prefills, chunks, decodes and verifies (`Sequence.item`) in one forward pass.

        ``results[i]`` answers ``items[i]``: an `Answer`, or the `ExecutorError` of this item alone, returned and not
        raised. With ``all_or_nothing`` a refusal of one is raised for all. Errors of the whole call (`QueueFull`,
        `Draining`, `TransportError`, …) are raised; sending the same items again is then safe."""
        return self._background.run(self._async.forward(items, all_or_nothing=all_or_nothing, timeout_s=timeout_s))

    def batch_prefill(
        self, items: Iterable[Item], *, all_or_nothing: bool = False, timeout_s: float | None = None
    ) -> list[Answer | ExecutorError]:
        """As `forward`, for items that start sequences or feed chunks."""
        return self._background.run(
            self._async.batch_prefill(items, all_or_nothing=all_or_nothing, timeout_s=timeout_s)
        )

    def batch_decode(
        self, items: Iterable[Item], *, all_or_nothing: bool = False, timeout_s: float | None = None
    ) -> list[Answer | ExecutorError]:
        """As `forward`, for items of one token on sequences that exist."""
        return self._background.run(self._async.batch_decode(items, all_or_nothing=all_or_nothing, timeout_s=timeout_s))
