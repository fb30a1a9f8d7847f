"""The loop: plan, forward, sample, again.

Each plan is one forward call. Refusals are handled by their reason: a refused call is sent again with the same items,
an item without blocks preempts the youngest request, a lost sequence is computed again, and a request that cannot
continue ends. `policy` decides which requests run.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as ListOf
from contextlib import asynccontextmanager
from dataclasses import replace

from ferrum_rpc.client import (
    SEQUENCE_GONE,
    Answer,
    CacheMode,
    Capability,
    ChainBroken,
    ContextLengthExceeded,
    DeadlineExceeded,
    DeviceLost,
    ExecutorError,
    ExecutorView,
    Greedy,
    Item,
    KvCorrupt,
    ModelClient,
    Run,
    Sample,
    StepFailed,
)
from ferrum_rpc.scheduler.counts import RunCounts
from ferrum_rpc.scheduler.policy import Budget, PlannedFeed, Pool, StepPlan, arrivals, plan
from ferrum_rpc.scheduler.port import ExecutorPort
from ferrum_rpc.scheduler.queues import Observer, RequestQueues
from ferrum_rpc.scheduler.refusals import NO_ROOM, NOT_NOW, OUT_OF_STEP, ExecutorGone
from ferrum_rpc.scheduler.request import Request, RequestEnd, Stage
from ferrum_rpc.scheduler.runs import MAX_STOPS, SHORT, Chain, Flight
from ferrum_rpc.scheduler.speculation import Drafter, Speculation

FAILURES_OF_A_REQUEST = 3
LONGEST_DRAFT = 16


class Driver:
    """Runs requests on one ``executor``, the only one of ``client``. ``stop_tokens`` end a text and are not part of it.
    ``run_tokens``: the maximum length of a run, 0 for single steps. With ``chains`` the next run is sent before the
    answer of the one before. With a ``drafter`` runs are for requests without a draft, and for all requests while runs
    are faster. Preempted requests continue with the same bits if the executor promises that (``exact_span_tokens``) and
    ``cache_mode`` is BYPASS; otherwise they find most of their tokens in the prefix cache."""

    queues: RequestQueues

    def __init__(
        self,
        client: ModelClient,
        executor: ExecutorView,
        *,
        budget: Budget,
        sampling: Greedy | Sample,
        stop_tokens: frozenset[int],
        observer: Observer,
        patience_s: float = 30.0,
        drafter: Drafter | None = None,
        run_tokens: int = 0,
        chains: bool = False,
        cache_mode: CacheMode = CacheMode.DEFAULT,
    ) -> None:
        info = executor.info
        self.port = ExecutorPort(client, executor, sampling=sampling, cache_mode=cache_mode, patience_s=patience_s)
        self._budget = replace(budget, exact=info.limits.exact_span_tokens)
        self._stops = tuple(sorted(stop_tokens))
        self._observer = observer
        self.refusal: ExecutorError | None = None
        """If set, no request is admitted until one ends here or `idle` has waited."""
        offered = Capability.RUN in info.capabilities and len(stop_tokens) <= MAX_STOPS
        self._run_tokens = min(run_tokens, info.limits.max_run_tokens) if offered else 0
        self._chains = chains and Capability.FOLLOW in info.capabilities
        self._speculation: Speculation | None = None
        if drafter is not None:
            exact = self._budget.exact  # a draft within it gives the very bits of single decodes
            most = min(info.limits.max_draft_tokens, exact - 1 if exact > 1 else LONGEST_DRAFT)
            self._speculation = Speculation(drafter, most, runs=self._run_tokens > 0)
        self._single = False  # the next step is a single one: blocks were short
        self._steps_a_trip = 1
        self._run = RunCounts(())
        self.hands_over = False
        self.leaving = False  # requests are about to move away: no runs
        self.goes_on: Callable[[Request], bool] = lambda request: False
        """Whether a request whose text fills the context is to move to an executor with a longer one."""

    async def run(self, requests: ListOf[Request]) -> RunCounts:
        """Run every request to its end. Raises `ExecutorGone`. All sequences are released in every case."""
        run, waiting = RunCounts(requests), deque(requests)
        async with self.serving(run, waiting, waiting):
            while run.left:
                if not await self.step():
                    await self.idle()
        return run

    @asynccontextmanager
    async def serving(
        self, run: RunCounts, waiting: deque[Request], back: deque[Request], *, hands_over: bool = False
    ) -> AsyncIterator[None]:
        """Surrounds the steps of a run and releases all its sequences. ``waiting`` and ``back`` as in `RequestQueues`.
        ``hands_over``: requests move to another executor after their first token."""
        self._run, self.hands_over, began = run, hands_over, time.monotonic()
        self.queues = RequestQueues(self.port.executor.target, run, self._observer, waiting=waiting, back=back)
        for request in list(waiting):
            request.arrived = began
            self.admissible(request)
        try:
            await self.port.look()
            yield
        finally:
            run.wall_seconds = time.monotonic() - began
            await self.queues.clear()
            if self._speculation is not None:
                await self._speculation.forget(run.requests)

    async def step(self) -> bool:
        """Run one step, or one sequence of runs. False: nothing can be done now."""
        queues, pool, speculation, limit = self.queues, self.port.pool, self._speculation, None
        began = time.monotonic()
        if speculation is not None:
            drafts, limit = speculation.turn()
            if drafts:
                await speculation.draft([each for each in queues.running if each.owed == 1], self.port.max_context)
        places = self._budget.at_once - len(queues.running) - len(queues.moving) if self.refusal is None else 0
        queues.arrived = False
        step = plan(queues.running, list(queues.waiting)[: max(0, places)], pool, self._budget)
        for request in step.unservable:
            self.give_up(request, pool)
        await asyncio.gather(*(queues.preempt(request) for request in step.preempt))
        if step.feeds:
            single, self._single = self._single or self.leaving, False
            runs, known = not single and self._may_run(step), sum(feed.request.known for feed in step.feeds)
            drafts = any(feed.drafted for feed in step.feeds)
            if drafts or not runs or not await self._decode(step, pool, limit):
                await self._forward(step, pool if drafts and runs else None)
            if speculation is not None and runs:
                tokens = sum(feed.request.known for feed in step.feeds) - known
                speculation.took(time.monotonic() - began, tokens / len(step.feeds), drafts=drafts)
        elif queues.leaving:
            await queues.release()
            await self.port.look()
        else:
            return bool(step.unservable or step.preempt)
        return True

    async def idle(self) -> None:
        """No request can end here soon: wait, then admit requests again."""
        await self.port.idle(self.refusal)
        self.refusal = None

    def admissible(self, request: Request) -> bool:
        """Whether its prompt fits the context. If not, the request fails here."""
        fits = 1 <= request.known <= self.port.max_context
        if not fits:
            self._fail(request, f"the prompt has {request.known} tokens; 1 to {self.port.max_context} can be served")
        return fits

    def has_room(self, request: Request) -> bool:
        """Whether a request may be assigned to this executor now, with those that are assigned already."""
        beside = [*self.queues.coming, *self.queues.waiting]
        return not self.refusal and bool(arrivals([request], self.queues.running, beside, self.port.pool, self._budget))

    async def _forward(self, step: StepPlan, pool: Pool | None) -> None:
        """Run one step. With a ``pool``, requests without a draft get short runs, no longer than a round trip, because
        all wait for the same answer."""
        self.queues.run(step.admitted)
        runs = dict[Request, Run]()
        if pool is not None:
            chain = Chain(pool, min(self._run_tokens, SHORT, self._steps_a_trip), self.port.max_context)
            chain.fed([feed for feed in step.feeds if feed.drafted])
            found = chain.extend([feed.request for feed in step.feeds if not feed.drafted])
            runs = {request: Run(count, self._stops) for request, count in found.items()}
        items = [self.port.item(feed, run=runs.get(feed.request)) for feed in step.feeds]
        began = time.monotonic()
        results, _ = await asyncio.gather(self.port.send(items, self._run), self.queues.release())
        answered, refused = results.split(step.feeds)
        self._count(answered, time.monotonic() - began, runs)
        for feed, answer in answered:
            self._fed(feed, answer)
        scarce: ExecutorError | None = None
        for feed, error in refused:
            if isinstance(error, NO_ROOM) and feed.request in runs:
                self._single = True
            elif isinstance(error, NO_ROOM + NOT_NOW):
                scarce = error
                if isinstance(error, NOT_NOW):
                    self.queues.requeue(feed.request)
            else:
                self.refused(feed.request, error)
        if scarce is not None:
            await self._make_way(scarce)

    # --- several tokens a trip --------------------------------------------------------------------------------------

    def _may_run(self, step: StepPlan) -> bool:
        """Whether every running request decodes in this step, and runs are on."""
        decodes = all(feed.request.decodes for feed in step.feeds)
        return self._run_tokens > 0 and decodes and len(step.feeds) == len(self.queues.running)

    async def _decode(self, step: StepPlan, pool: Pool, limit: int | None) -> bool:
        """Decode by runs, each followed by the next, until all texts are complete or ``limit`` tokens longer, or
        something else must be planned. In a session the runs of each request are independent of the others'. Sequences
        are released once none of their items is in flight. False: there are no blocks for runs."""
        most = min(self._run_tokens, SHORT) if self.queues.joining else self._run_tokens
        chain = Chain(pool, most, self.port.max_context, limit)
        ways = [deque([flight]) for flight in self._launch(chain, [feed.request for feed in step.feeds])]
        if not ways:
            return False
        releasing, began = asyncio.ensure_future(self.queues.release()), time.monotonic()
        try:
            while ways:
                if self._chains:
                    self._follow(chain, ways)
                await asyncio.wait([way[0].call for way in ways], return_when=asyncio.FIRST_COMPLETED)
                landed = [way for way in ways if way[0].call.done()]
                began = self._landed(chain, [way[0] for way in landed], began)
                for way in landed:
                    way.popleft()
                ways = [way for way in ways if way]
            return True
        finally:
            calls = [flight.call for way in ways for flight in way]
            for call in calls:
                call.cancel()
            await asyncio.gather(releasing, *calls, return_exceptions=True)

    def _follow(self, chain: Chain, ways: Iterable[deque[Flight]]) -> None:
        """Send the next run behind each run that has none, unless a new plan is needed once the runs in flight have
        ended."""
        for way in ways:
            if len(way) == 1 and not (chain.broken or self._single or self.leaving or self.queues.joining):
                items = {feed.request: item for feed, item in way[0].items}
                going = [request for request in items if request.stage is Stage.RUNNING]
                way.extend(self._launch(chain, going, items))

    def _launch(
        self, chain: Chain, requests: Iterable[Request], behind: Mapping[Request, Item] | None = None
    ) -> list[Flight]:
        """Send the next runs of requests, ``behind`` their items in flight if they have any."""
        items = list[tuple[PlannedFeed, Item]]()
        for request, count in chain.extend(requests).items():
            feed, follows = PlannedFeed(request, 1), None if behind is None else behind[request]
            items.append((feed, self.port.item(feed, run=Run(count, self._stops), follows=follows)))
        ways = [[each] for each in items] if self._chains else [items] if items else []
        return [
            Flight(way, asyncio.ensure_future(self.port.send([item for _, item in way], self._run))) for way in ways
        ]

    def _landed(self, chain: Chain, flights: Iterable[Flight], began: float) -> float:
        """Take the tokens of runs that were answered. Refused ones are planned again, as a single step if blocks are
        short. Returns the time."""
        now, found = time.monotonic(), [flight.call.result().split(flight.items) for flight in flights]
        answered = [each for part, _ in found for each in part]
        refused = [each for _, part in found for each in part]
        if answers := [answer for _, answer in answered]:
            self._note(answers, now - began, decode=sum(len(each.tokens) for each in answers))
        # one that is not in ``running`` ended with the run before, or has moved to another executor
        for (feed, _), answer in answered:
            if feed.request in self.queues.running:
                self._fed(feed, answer)
        for (feed, item), error in refused:
            if feed.request not in self.queues.running:
                continue
            if isinstance(error, NO_ROOM + NOT_NOW):
                self._single = True
            elif isinstance(error, ChainBroken) or (item.follows is not None and isinstance(error, OUT_OF_STEP)):
                chain.broken = True
            else:
                self.refused(feed.request, error)
        return now

    # --- what an answer means ---------------------------------------------------------------------------------------

    def _fed(self, feed: PlannedFeed, answer: Answer) -> None:
        request, completes = feed.request, feed.completes
        request.fed(feed.count, answer.length, self._budget.exact)
        request.failures = 0
        if not completes:
            return
        if feed.drafted and self._speculation is not None:
            self._speculation.verified(request, feed.drafted, len(answer.tokens) - 1)
        self._chosen(request, answer)
        if self.hands_over and request.stage is Stage.RUNNING:
            self.queues.hand_over(request)

    def _chosen(self, request: Request, answer: Answer) -> None:
        """Append the next tokens, and end the text if it is complete."""
        for token in answer.tokens.tolist():
            if token in self._stops:
                self._finish(request, RequestEnd.STOP)
                return
            self.queues.token(request, token)
        if len(request.generated) >= request.max_new_tokens:
            self._finish(request, RequestEnd.LENGTH)
        elif request.known > self.port.max_context:
            self._outgrown(request)

    def refused(self, request: Request, error: ExecutorError) -> None:
        """Compute a lost sequence again, retry a failed step a few times, and end the request otherwise. Raises
        `ExecutorGone` if the device is lost."""
        if isinstance(error, SEQUENCE_GONE + OUT_OF_STEP):
            self._run.rebuilds += 1
            self.queues.requeue(request)
        elif isinstance(error, ContextLengthExceeded):
            self._outgrown(request)
        elif isinstance(error, DeviceLost):
            raise ExecutorGone(error.message)
        elif isinstance(error, StepFailed | DeadlineExceeded | KvCorrupt) and request.failures < FAILURES_OF_A_REQUEST:
            request.failures += 1
        else:
            self._fail(request, error.message)

    async def _make_way(self, error: ExecutorError) -> None:
        """The executor has less room than its last answer said: other callers use it, or it drains. Stop admitting
        until a request ends; if blocks are missing, preempt the youngest request."""
        self.refusal = error
        if isinstance(error, NO_ROOM) and self.queues.running:
            await self.queues.preempt(max(self.queues.running, key=lambda each: each.index))

    def _outgrown(self, request: Request) -> None:
        if request.cached and self.goes_on(request):
            self.queues.hand_over(request)
        else:
            self._finish(request, RequestEnd.CONTEXT)

    def _finish(self, request: Request, ending: RequestEnd) -> None:
        self.refusal = None
        self.queues.end(request, ending)

    def _fail(self, request: Request, error: str) -> None:
        self.queues.end(request, RequestEnd.ERROR, error)

    def give_up(self, request: Request, pool: Pool) -> None:
        """End a request that the whole ``pool`` or the longest context cannot hold."""
        if request.generated:
            self._finish(request, RequestEnd.CONTEXT if request.known > self.port.max_context else RequestEnd.POOL)
        else:
            need = pool.blocks(request.known)
            self._fail(request, f"the prompt needs {need} blocks of {pool.block_size} tokens; {pool.total} exist")

    def _count(self, done: ListOf[tuple[PlannedFeed, Answer]], seconds: float, runs: Collection[Request]) -> None:
        """Count a step. Called before its answers change the requests."""
        if not done:
            return
        decodes = [(feed, answer) for feed, answer in done if feed.request.decodes]
        verified = [(feed, answer) for feed, answer in decodes if feed.request not in runs]
        self._run.drafts(
            trips=len(verified),
            drafted=sum(feed.drafted for feed, _ in verified),
            emitted=sum(len(answer.tokens) for _, answer in verified),
        )
        timing = done[0][1].timing
        if timing is not None and not runs:
            away = seconds - timing.forward_s
            self._steps_a_trip = max(1, int(away / timing.forward_s)) if timing.forward_s else SHORT
        self._note(
            [answer for _, answer in done],
            seconds,
            prompt=sum(feed.count for feed, _ in done) - len(decodes),
            decode=sum(len(answer.tokens) for _, answer in decodes),
        )

    def _note(self, answers: ListOf[Answer], seconds: float, *, decode: int, prompt: int = 0) -> None:
        """Count the answers of a trip."""
        self.port.patience.renew()
        self._run.saw(answers[-1].pressure)
        timing = answers[-1].timing
        self._run.step(
            prompt=prompt,
            decode=decode,
            sequences=len(answers),
            seconds=seconds,
            # runs that end one after the other share steps
            executor_seconds=0.0 if timing is None else min(timing.forward_s, seconds),
        )
