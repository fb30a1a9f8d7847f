"""The scheduler as a library: submit requests at any time, read their tokens as they are computed.

It drives one executor or several of one model (`Router`), decides what runs in each step and who waits (`policy`), and
divides the executors between tenants (`fairness`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from collections.abc import Sequence as ListOf
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from ferrum_rpc.client import (
    CacheMode,
    ExecutorClient,
    ExecutorError,
    ExecutorInfo,
    ExecutorView,
    GrammarKind,
    Greedy,
    InvalidRequest,
    Positions,
    QueueFull,
    Sample,
)
from ferrum_rpc.client.arguments import as_list, as_number, as_output, as_seconds, as_tokens, creation
from ferrum_rpc.client.fleet import Member, Members
from ferrum_rpc.client.masks import Mask
from ferrum_rpc.client.retry import Deadline
from ferrum_rpc.scheduler.counts import RunCounts
from ferrum_rpc.scheduler.driver import Driver
from ferrum_rpc.scheduler.fairness import FairShares
from ferrum_rpc.scheduler.patience import ExecutorGone
from ferrum_rpc.scheduler.policy import Budget
from ferrum_rpc.scheduler.queues import Observer
from ferrum_rpc.scheduler.request import Request, RequestEnd, Stage
from ferrum_rpc.scheduler.router import Router
from ferrum_rpc.scheduler.speculation import Drafter
from ferrum_rpc.scheduler.stream import TextMatcher, TokenStream
from ferrum_rpc.scheduler.text import Detokenizer

log = logging.getLogger("ferrum_rpc.scheduler")

STEPS_IN_FLIGHT: Final = 64
"""Frames of a session. A frame of runs is in flight until the last of them ends."""

FIRST_PAUSE_S: Final = 0.05
MAX_PAUSE_S: Final = 1.0
"""Between two tries to serve that fail."""

LONGEST_S: Final = 1e8
"""Three years: a longer deadline is none."""

MOST_CHOICES: Final = 128
"""Texts of one prompt."""


def in_a_session(target: str) -> ExecutorClient:
    """A client as the scheduler needs it: many runs in flight, and their tokens ahead of their answers."""
    return ExecutorClient(target, session=True, steps_in_flight=STEPS_IN_FLIGHT, tokens_ahead=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """A text to be written: ``max_tokens`` tokens behind ``prompt``, or fewer.

    ``output``: how each token is chosen, with its seed, masks, penalties and log-probabilities. ``stop``: token ids
    that end the text; None: the model's end-of-sequence tokens. None of them is chosen before ``min_tokens``.
    ``stop_strings`` end it too; they need the scheduler's tokenizer. ``deadline_s``: the text ends where it is so many
    seconds after `Scheduler.submit`. ``tenant`` shares the executors with the other tenants, and leaves some places to
    those that have nothing running; of a tenant's requests, and of all, those of higher ``priority`` go first.
    ``adapter``, ``cache_salt`` and ``cache_mode`` are those of `ExecutorClient.sequence`. Raises `InvalidRequest` for
    its field; what only the executor knows, such as the size of its vocabulary, is found out when the request runs."""

    prompt: ListOf[int]
    max_tokens: int
    output: Greedy | Sample = field(default_factory=Greedy)
    min_tokens: int = 0
    stop: ListOf[int] | None = None
    stop_strings: ListOf[str] = ()
    deadline_s: float | None = None
    priority: int = 0
    tenant: str = ""
    adapter: str = ""
    cache_salt: bytes = b""
    cache_mode: CacheMode = CacheMode.DEFAULT

    def __post_init__(self) -> None:
        def set_to(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        set_to("prompt", tuple(as_tokens(self.prompt, "prompt")))
        set_to("max_tokens", as_number(self.max_tokens, "max_tokens", least=1))
        set_to("min_tokens", as_number(self.min_tokens, "min_tokens", most=self.max_tokens))
        as_output(self.output, Positions.LAST)
        if not isinstance(self.output, Greedy | Sample) or self.output.row_masks:
            raise InvalidRequest("output must be Greedy(...) or Sample(...) with one mask for all rows", field="output")
        if self.stop is not None:
            set_to("stop", tuple(sorted(set(as_tokens(self.stop, "stop", least=0)))))
        if isinstance(self.stop_strings, str):
            raise InvalidRequest("stop_strings must be a list of strings, not one string", field="stop_strings")
        set_to("stop_strings", tuple(as_list(self.stop_strings, "stop_strings")))
        if not all(isinstance(each, str) and each for each in self.stop_strings):
            raise InvalidRequest("stop_strings must be strings that are not empty", field="stop_strings")
        if isinstance(self.deadline_s, int) and self.deadline_s > LONGEST_S:
            set_to("deadline_s", LONGEST_S)
        if self.deadline_s is not None:
            set_to("deadline_s", min(as_seconds(self.deadline_s, "deadline_s"), LONGEST_S))
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise InvalidRequest(f"priority must be an integer, not {self.priority!r:.80}", field="priority")
        if not isinstance(self.tenant, str):
            raise InvalidRequest(f"tenant must be a string, not {self.tenant!r:.80}", field="tenant")
        for name, kind in (("adapter", str), ("cache_salt", bytes), ("cache_mode", CacheMode)):
            if not isinstance(value := getattr(self, name), kind):
                raise InvalidRequest(f"{name} must be {kind.__name__}, not {value!r:.80}", field=name)
        creation(0, "", self.adapter, self.cache_salt, self.cache_mode)


@dataclass(frozen=True, slots=True)
class _Live:
    """A request that has not ended. ``trunk``: the one of which it is a branch, else itself."""

    stream: TokenStream
    trunk: Request
    timer: asyncio.TimerHandle | None


class Scheduler(AbstractAsyncContextManager[Any]):
    """Continuous batching over the executors of one model, for many callers in one event loop.

        async with Scheduler("localhost:50051") as scheduler:
            async with scheduler.submit(TextRequest(prompt=tokens, max_tokens=64)) as stream:
                async for token in stream:
                    ...

    ``targets``: as those of `FleetClient`, or its `Members`, already open. ``prefill``: executors that compute prompts,
    whose sequences then move to the others. ``connect`` makes the client of a target as `in_a_session` does: the next
    run of a text waits at the executor for the present one. ``token_budget``: prompt tokens of a step, so that a long
    prompt delays the other texts by no more than these. ``max_running``: texts at an executor at a time, further ones
    wait; ``max_waiting`` may, then `submit` raises `QueueFull`. ``run_tokens``: the maximum tokens of a round trip, and
    ``max_delay_s`` the longest time that a token may wait for the rest of its run (`RunPace`). ``drafter``: the source
    of drafts, which are used while they are faster than runs. ``tokenizer``: for stop strings and `TokenStream.text`.
    ``weights`` of tenants: 1 by default. ``patience_s``: when no executor makes progress for so long, all requests fail
    with `ExecutorGone`; later ones are served if an executor comes back.

    Leaving the context cancels what has not ended: `drain` first to wait for it. ``close_timeout_s`` bounds that, and
    the release of the sequences after it once more; what a silent executor still holds then ends with its lease.
    """

    def __init__(
        self,
        targets: str | Iterable[str] | Members,
        *,
        prefill: Iterable[str] | Members = (),
        connect: Callable[[str], ExecutorClient] = in_a_session,
        token_budget: int = 512,
        max_running: int = 256,
        max_waiting: int = 4096,
        run_tokens: int = 32,
        max_delay_s: float | None = None,
        drafter: Drafter | None = None,
        tokenizer: Detokenizer | None = None,
        weights: Mapping[str, float] | None = None,
        observer: Observer | None = None,
        patience_s: float = 30.0,
        close_timeout_s: float = 5.0,
    ) -> None:
        for name, value in (("token_budget", token_budget), ("max_running", max_running), ("max_waiting", max_waiting)):
            as_number(value, name, least=1)
        as_number(run_tokens, "run_tokens")
        as_seconds(patience_s, "patience_s")
        if max_delay_s is not None:
            as_seconds(max_delay_s, "max_delay_s")
        shares = weights if isinstance(weights, Mapping) else {} if weights is None else {"": math.nan}
        if not all(isinstance(each, int | float) and 0 < each < math.inf for each in shares.values()):
            raise InvalidRequest(f"weights must be numbers above 0 by tenant, not {weights!r:.80}", field="weights")
        for name, needed, given in (
            ("connect", ("__call__",), connect),
            ("drafter", ("draft", "forget"), drafter),
            ("tokenizer", ("decode",), tokenizer),
            ("observer", ("token", "changed", "executors"), observer),
        ):
            if given is not None and not all(callable(getattr(given, each, None)) for each in needed):
                what = "callable" if needed == ("__call__",) else f"an object with {', '.join(needed)}"
                raise InvalidRequest(f"{name} must be {what}, not {given!r:.80}", field=name)
        self._close_timeout_s = as_seconds(close_timeout_s, "close_timeout_s")
        self._targets, self._prefill_targets, self._connect = targets, prefill, connect
        self._token_budget, self._max_running, self._max_waiting = token_budget, max_running, max_waiting
        self._run_tokens, self._max_delay_s, self._drafter = run_tokens, max_delay_s, drafter
        self._tokenizer, self._weights, self._patience_s = tokenizer, weights or {}, patience_s
        self._observer = observer or Observer()
        self._shares = FairShares()
        self._indexes = itertools.count()
        self._stack = AsyncExitStack()
        self._live: dict[Request, _Live] = {}
        self._closing = True
        self._prefill: Members | None = None
        self._router: Router
        self._members: Members

    # --- its life ---------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Scheduler:
        try:
            self._members = await self._open(self._targets)
            if isinstance(self._prefill_targets, Members) or self._prefill_targets:
                self._prefill = await self._open(self._prefill_targets)
        except BaseException:
            await self._stack.aclose()
            raise
        self._router = Router(
            self._driver, self._members, self._prefill, watcher=_Ends(self), patience_s=self._patience_s
        )
        self._serving = asyncio.create_task(self._serve())
        self._closing = False
        return self

    async def ready(self, *, timeout_s: float | None = None) -> None:
        """Wait until an executor accepts requests, and one accepts prompts if there are executors of their own for
        them. Raises `TransportError`, with what is known of each executor, after ``timeout_s``; None: after the
        scheduler's patience."""
        self._check_open()
        deadline = self._deadline(timeout_s)
        for members in filter(None, (self._members, self._prefill)):
            await members.some(deadline)

    async def info(self, *, timeout_s: float | None = None) -> ExecutorInfo:
        """The description of an executor: all serve the same model, but limits may differ. Waits, and raises, as
        `ready`."""
        await self.ready(timeout_s=timeout_s)
        [member, *_] = await self._members.some(self._deadline(timeout_s))
        return member.info

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline.after(as_seconds(self._patience_s if timeout_s is None else timeout_s, "timeout_s"))

    async def _open(self, targets: str | Iterable[str] | Members) -> Members:
        if isinstance(targets, Members):
            return targets
        return await self._stack.enter_async_context(Members(targets, connect=self._connect))

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what has not ended, release every sequence, and close the connections."""
        self._closing = True
        try:
            for request in list(self._live):
                self._cancel(request)
            async with asyncio.timeout(self._close_timeout_s):
                await self.drain()
        except TimeoutError:
            log.warning("an executor did not answer while the scheduler closed; its sequences end with their lease")
            self._serving.cancel()
            await asyncio.wait({self._serving})
        finally:
            await self._stack.aclose()

    async def drain(self) -> None:
        """Take no more requests, and wait until all have ended."""
        self._closing = True
        self._router.close()
        await asyncio.shield(self._serving)

    async def _serve(self) -> None:
        """Serve until the end. If no executor makes progress, the requests fail, and the next ones are tried again. The
        pause between two tries grows while each fails at once."""
        pause_s = 0.0
        while True:
            began = time.monotonic()
            try:
                await self._router.serve()
                return
            except (ExecutorGone, ExecutorError) as error:
                log.warning("all requests failed: %s", error)
                self._router.fail(error)
            except Exception as error:
                log.exception("all requests failed by an error of the scheduler or of its observer")
                self._router.fail(error)
            for request in list(self._live):  # branches whose prompt was lost
                self._cancel(request)
            pause_s = 0.0 if time.monotonic() - began > MAX_PAUSE_S else min(MAX_PAUSE_S, 2 * pause_s + FIRST_PAUSE_S)
            await asyncio.sleep(pause_s)

    def _driver(self, member: Member, prompts: bool) -> Driver:
        return Driver(
            member.client,
            member,
            budget=budget_of(member, self._token_budget, self._max_running),
            observer=_Ends(self),
            patience_s=self._patience_s,
            drafter=None if prompts else self._drafter,
            run_tokens=0 if prompts else self._run_tokens,
            max_delay_s=self._max_delay_s,
            chains=True,
            tokens_ahead=True,
        )

    # --- masks and grammars -----------------------------------------------------------------------------------------

    async def register_token_mask(self, mask: Mask) -> bytes:
        """Register a mask for the outputs of requests, as `ExecutorClient.register_token_mask`; returns its id. Each
        executor gets it when it is first needed there."""
        return await self._registered(lambda client: client.register_token_mask(mask))

    async def register_grammar(self, kind: GrammarKind, text: str | Mapping[str, Any]) -> bytes:
        """Register a grammar for the outputs of requests, as `ExecutorClient.register_grammar`; returns its id. Each
        executor gets it when it is first needed there. Set ``grammar_from`` to the length of the prompt."""
        return await self._registered(lambda client: client.register_grammar(kind, text))

    async def _registered(self, register: Callable[[ExecutorClient], Awaitable[bytes]]) -> bytes:
        found = b""
        self._check_open()
        for members in filter(None, (self._members, self._prefill)):
            [member, *_] = await members.some(self._deadline(None))
            found = await register(member.client)
        return found

    # --- requests ---------------------------------------------------------------------------------------------------

    @property
    def counts(self) -> RunCounts:
        """Steps, tokens and times so far."""
        return self._router.counts

    @property
    def waiting(self) -> int:
        """Requests that have not begun at an executor, or were preempted."""
        return self._router.waiting

    def submit(self, request: TextRequest) -> TokenStream:
        """Take a request; its tokens come from the stream. Returns at once. Raises `InvalidRequest` for its field, and
        `QueueFull` if too many requests wait."""
        [stream] = self.submit_choices(request, 1)
        return stream

    def submit_choices(self, request: TextRequest, n: int) -> list[TokenStream]:
        """``n`` texts of one prompt, which is computed once. With a seed each text has its own: that of the request,
        and the following numbers."""
        self._check(request, n)
        prompt = tuple(request.prompt)  # a tuple already
        cost = len(prompt) + n * request.max_tokens
        turn = self._shares.turn(request.tenant, cost, self._weight(request.tenant))
        template = partial(
            Request,
            stops=tuple(request.stop or ()),
            stops_of_model=request.stop is None,
            min_new_tokens=request.min_tokens,
            adapter=request.adapter,
            cache_salt=request.cache_salt,
            cache_mode=request.cache_mode,
            priority=request.priority,
            tenant=request.tenant,
            turn=turn,
        )
        choices = [
            template(next(self._indexes), prompt, request.max_tokens, output=_seeded(request.output, number))
            for number in range(n)
        ]
        first = choices[0]
        if n > 1 and len(prompt) > 1:  # the last token is fed to each of them, for its row
            first = template(next(self._indexes), prompt[:-1], 0, branches=tuple(choices))
        streams = [self._stream(each, request, first if first.branches else each) for each in choices]
        self._router.submit(*([first] if first.branches else choices))
        return streams

    def _check_open(self) -> None:
        if self._closing:
            raise RuntimeError("the scheduler is not open: use it as `async with Scheduler(...)`, before it is drained")

    def _check(self, request: TextRequest, n: int) -> None:
        self._check_open()
        if not isinstance(request, TextRequest):
            raise InvalidRequest(f"a request must be a TextRequest, not {request!r:.80}", field="request")
        as_number(n, "n", least=1, most=MOST_CHOICES)
        if request.stop_strings and self._tokenizer is None:
            raise InvalidRequest("stop_strings need a tokenizer of the scheduler", field="stop_strings")
        if self.waiting + n > self._max_waiting:
            raise QueueFull(f"{self.waiting} requests wait already")

    def _stream(self, request: Request, wanted: TextRequest, trunk: Request) -> TokenStream:
        matcher = None
        if self._tokenizer is not None:
            matcher = TextMatcher(self._tokenizer, tuple(wanted.stop_strings))
        stream, timer = TokenStream(request, self._cancel, matcher), None
        request.chosen = stream.add
        if wanted.deadline_s is not None:
            late = partial(self._cancel, request, RequestEnd.DEADLINE)
            timer = asyncio.get_running_loop().call_later(wanted.deadline_s, late)
        self._live[request] = _Live(stream, trunk, timer)
        return stream

    def _cancel(self, request: Request, ending: RequestEnd = RequestEnd.CANCELLED) -> None:
        live = self._live.get(request)
        if live is not None and request.ending is None:
            self._router.cancel(request, ending)
            if all(each.ending is not None for each in live.trunk.branches):
                self._router.cancel(live.trunk, ending)

    def _changed(self, request: Request) -> None:
        """A request has begun, or ended."""
        if request.stage is Stage.RUNNING:
            self._shares.began(request.turn)
        live = self._live.pop(request, None) if request.ending is not None else None
        if live is not None:
            if live.timer is not None:
                live.timer.cancel()
            self._shares.unused(request.tenant, request.wanted, self._weight(request.tenant))
            live.stream.ended()

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)


class _Ends(Observer):
    """Passes the events of requests on to the scheduler and its observer."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def token(self, request: Request, token: int) -> None:
        self._scheduler._observer.token(request, token)

    def changed(self, request: Request) -> None:
        self._scheduler._changed(request)
        self._scheduler._observer.changed(request)

    def executors(self, there: ListOf[tuple[str, str]]) -> None:
        self._scheduler._observer.executors(there)


def budget_of(executor: ExecutorView, tokens: int, running: int) -> Budget:
    """What a step at an executor may have, within its limits: ``tokens`` and ``running`` texts at most."""
    limits = executor.info.limits
    of_caller = limits.max_sequences_per_caller or running
    return Budget(
        tokens=min(tokens, limits.max_batch_tokens),
        items=limits.max_batch_items,
        running=min(running, limits.max_sequences, of_caller),
    )


def _seeded(output: Greedy | Sample, number: int) -> Greedy | Sample:
    """The output of one of several texts."""
    if isinstance(output, Sample) and output.seed is not None and number:
        return replace(output, seed=(output.seed + number) % 2**64)
    return output
