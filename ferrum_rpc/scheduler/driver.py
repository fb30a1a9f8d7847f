"""The loop of one executor: plan, send, take the answers, again.

With runs and followers every request goes at its own pace: a run that ends is followed by the next one, which waits at
the executor, and prompts join in between. `policy` decides which requests without an item in flight are fed. Without
followers, and while drafts are made, a step is one call, whose items are all awaited. The same holds while blocks are
short: nothing more is sent until everything in flight has been answered, and the plan then knows every block.

Refusals are handled by their reason: a refused call is sent again with the same items, an item without blocks preempts
the last request, a lost sequence is computed again, and a request that cannot continue ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as ListOf
from contextlib import asynccontextmanager
from dataclasses import replace

from ferrum_rpc.client import (
    CALLER_ERROR,
    NO_ANSWER,
    NO_CAPACITY,
    OUT_OF_STEP,
    SEQUENCE_GONE,
    TRY_LATER,
    Answer,
    Capability,
    ChainBroken,
    ContextLengthExceeded,
    DeviceLost,
    ExecutorError,
    ExecutorView,
    KvBlocksExhausted,
    KvCorrupt,
    ModelClient,
    RunPace,
    StepFailed,
    StreamToken,
    stream_tokens,
)
from ferrum_rpc.scheduler.counts import RunCounts
from ferrum_rpc.scheduler.patience import ExecutorGone
from ferrum_rpc.scheduler.policy import NO_OTHERS, Budget, PlannedFeed, Pool, StepPlan, arrivals, plan
from ferrum_rpc.scheduler.port import Ahead, ExecutorPort
from ferrum_rpc.scheduler.queues import IN_ORDER, Observer, RequestQueues
from ferrum_rpc.scheduler.request import Request, RequestEnd, Stage
from ferrum_rpc.scheduler.runs import MAX_STOPS, SHORT, Flight, Flights, SentFeed, in_step, lengths, next_due
from ferrum_rpc.scheduler.speculation import Drafter, Speculation

FAILURES_OF_A_REQUEST = 3
LONGEST_DRAFT = 16
PLACES_A_WAITING_RUN = 8
"""For so many places of runs at an executor one more request runs, so that a place that becomes free is taken at once.
The others wait here: there they would wait in the order of their calls, and a new prompt behind all of them."""


class Driver:
    """Runs requests on one ``executor``, the only one of ``client``. ``run_tokens``: the maximum length of a run, 0 for
    single steps; ``max_delay_s``: the longest time that a token may wait for the rest of its run. With ``chains`` the
    next run is sent before the answer of the one before. ``tokens_ahead``: the client asks for tokens ahead of answers.
    With a ``drafter`` runs are for requests without a draft, and
    for all requests while runs are faster. Preempted requests continue with the same bits if the executor promises that
    (``exact_span_tokens``) and their `CacheMode` is BYPASS; otherwise they find most of their tokens in the prefix
    cache."""

    queues: RequestQueues
    _flights: Flights

    def __init__(
        self,
        client: ModelClient,
        executor: ExecutorView,
        *,
        budget: Budget,
        observer: Observer,
        patience_s: float = 30.0,
        drafter: Drafter | None = None,
        run_tokens: int = 0,
        max_delay_s: float | None = None,
        chains: bool = False,
        tokens_ahead: bool = False,
    ) -> None:
        info = executor.info
        self.port = ExecutorPort(client, executor, patience_s=patience_s)
        self._budget = replace(budget, exact=info.limits.exact_span_tokens)
        self._observer = observer
        self.refusal: ExecutorError | None = None
        """If set, no request is admitted until one ends here or `idle` has waited."""
        run_tokens = min(run_tokens, info.limits.max_run_tokens) if Capability.RUN in info.capabilities else 0
        self._run_tokens, self._max_delay_s, self._pace = run_tokens, max_delay_s, RunPace()
        self._chains = run_tokens > 0 and chains and Capability.FOLLOW in info.capabilities
        if self._chains:
            places = info.limits.max_running + info.limits.max_running // PLACES_A_WAITING_RUN
            self._budget = replace(self._budget, running=min(budget.running, max(1, places)))
        self._ahead = tokens_ahead
        self._speculation: Speculation | None = None
        if drafter is not None:
            exact = self._budget.exact  # a draft within it gives the very bits of single decodes
            most = min(info.limits.max_draft_tokens, exact - 1 if exact > 1 else LONGEST_DRAFT)
            if info.limits.free_truncation_tokens is not None:  # what is not accepted costs nothing then
                most = min(most, info.limits.free_truncation_tokens)
            self._speculation = Speculation(drafter, most, runs=run_tokens > 0)
        self._turn: tuple[float, dict[Request, int], bool] | None = None
        self._limit: int | None = None  # tokens of each request by runs, until drafts are considered again
        self._single = False  # the next step is a single one: blocks were short
        self._draining = False  # nothing is sent until everything in flight was answered: blocks are short
        self._scarce: ExecutorError | None = None  # the refusal that says so
        self._run = RunCounts(())
        self._timer: asyncio.TimerHandle | None = None  # of the next runs to send
        self._releases: set[asyncio.Task[None]] = set()
        self.hands_over = False
        self.leaving = False  # requests are about to move away: no runs
        self.goes_on: Callable[[Request], bool] = lambda request: False
        """Whether a request whose text fills the context is to move to an executor with a longer one."""

    async def run(self, requests: ListOf[Request]) -> RunCounts:
        """Run every request to its end. Raises `ExecutorGone`. All sequences are released in every case."""
        run, waiting = RunCounts(requests, len(requests)), sorted(requests, key=IN_ORDER)
        async with self.serving(run, waiting, waiting):
            while run.left:
                if not await self.step():
                    await self.idle()
        return run

    @asynccontextmanager
    async def serving(
        self, run: RunCounts, waiting: list[Request], back: list[Request], *, hands_over: bool = False
    ) -> AsyncIterator[None]:
        """Surrounds the steps of a run and releases all its sequences. ``waiting`` and ``back`` as in `RequestQueues`.
        ``hands_over``: requests move to another executor after their first token."""
        self._run, self.hands_over, began = run, hands_over, time.monotonic()
        self.queues = RequestQueues(self.port.executor.target, run, self._observer, waiting=waiting, back=back)
        self._flights = Flights(self.port, run, self.queues.in_flight, self.queues.changed)
        for request in list(waiting):
            request.arrived = began
            self.admissible(request)
        try:
            await self.port.look()
            self._budget = replace(self._budget, running=min(self._budget.running, self.port.most_sequences))
            yield
        finally:
            run.wall_seconds = time.monotonic() - began
            await self._abandon()
            await self.queues.clear()
            if self._speculation is not None:
                await self._speculation.forget([*self.queues.all, *run.requests])

    async def step(self) -> bool:
        """Send what can be sent, and wait for an answer or another change. False: nothing is in flight, and nothing can
        be done now."""
        acted = False
        if not self._flights or (self._goes_apart and not (self._draining or self._single or self.leaving)):
            acted = await self._plan()
        if not self._flights:
            return acted
        self._follow()
        await self.queues.changed.wait()
        self.queues.changed.clear()
        self._land()
        return True

    async def idle(self) -> None:
        """No request can end here soon: wait, then admit requests again."""
        await self.port.idle(self.refusal)
        self.refusal = None

    def admissible(self, request: Request) -> bool:
        """Whether its prompt fits the context. If not, the request fails here."""
        longest = self.port.max_context
        fits = 1 <= request.known <= longest
        if not fits:
            words = f"the prompt has {request.known} tokens; 1 to {longest} can be served"
            self._fail(request, ContextLengthExceeded(words, metadata={"max_context": longest}))
        return fits

    def take(self, request: Request) -> None:
        """A request is assigned to this executor."""
        ends = tuple(self.port.executor.info.model.eos_token_ids)
        for each in (request, *request.branches):
            if each.stops_of_model:
                each.stops = ends
            if each.output.grammar:
                each.grammar_ends = ends
        self.queues.place(request)

    def has_room(self, request: Request) -> bool:
        """Whether a request may be assigned to this executor now, with those that are assigned already."""
        assigned, pool = [*self.queues.coming, *self.queues.waiting], self.queues.in_flight.free(self.port.pool)
        return not self.refusal and bool(arrivals([request], self.queues.running, assigned, pool, self._budget))

    def rests(self, request: Request) -> bool:
        """Whether a request has nothing in flight, so that it can move."""
        return request.sequence not in self.queues.in_flight

    # --- plans ------------------------------------------------------------------------------------------------------

    @property
    def _goes_apart(self) -> bool:
        """Whether requests go at their own pace: planning does not wait for what is in flight."""
        return self._chains and self._speculation is None

    async def _plan(self) -> bool:
        """Plan for the requests that have nothing in flight, and send that. Returns whether anything was done."""
        queues, in_flight, budget = self.queues, self.queues.in_flight, self._budget
        if not self._flights:
            self._draining = False
            await self._end_turn()
            if self._scarce is not None:
                await self._make_way(self._scarce)
            if self._releases and not self.port.pool.slots:
                await asyncio.wait(self._releases)  # rather than preempt a request that has none yet
            await self._draft()
        running = [each for each in queues.running if self.rests(each)]
        places = budget.at_once - len(queues.running) - len(queues.moving) if self.refusal is None else 0
        waiting = queues.waiting[: max(0, places)]
        if self._flights and not (running or waiting):
            return False
        pool, others = in_flight.free(self.port.pool), NO_OTHERS
        if self._flights:
            busy = [each for each in queues.running if not self.rests(each)]
            others = in_flight.others(pool, busy, budget.headroom, self._flights.prompt_tokens)
        queues.arrived = False
        step = plan(running, waiting, pool, budget, others)
        if self._flights and (step.preempt or step.unservable):
            self._draining = True
            return False
        for request in step.unservable:
            self.give_up(request, pool)
        if step.preempt:
            await asyncio.gather(*(queues.preempt(request) for request in step.preempt))
            step = step.of_those_left()
        if step.feeds:
            self._send(step, pool)
        elif not self._flights and queues.leaving:
            await queues.release()
            await self.port.look()
        else:
            return bool(step.unservable or step.preempt)
        return True

    async def _draft(self) -> None:
        """Have drafts made, if it is their turn."""
        if self._speculation is not None:
            drafts, self._limit = self._speculation.turn()
            if drafts:
                owing = [each for each in self.queues.running if each.owed == 1]
                await self._speculation.draft(owing, self.port.max_context)

    async def _end_turn(self) -> None:
        """Note how fast drafts, or the runs since the last ones, were."""
        turn, self._turn = self._turn, None
        if turn is not None and self._speculation is not None:
            began, known, drafts = turn
            tokens = sum(request.known - was for request, was in known.items())
            self._speculation.took(time.monotonic() - began, tokens / len(known), drafts=drafts)

    def _send(self, step: StepPlan, pool: Pool) -> None:
        """Send the feeds of a plan: those that others can follow in a call each, the rest in one call."""
        single, self._single = self._single or self.leaving, False
        every = len(step.feeds) == len(self.queues.running) and all(feed.request.decodes for feed in step.feeds)
        drafts = any(feed.drafted for feed in step.feeds)
        self.queues.run(step.admitted)
        counts = dict[Request, int]()
        if self._run_tokens and not single and (every or self._goes_apart):
            counts = self._lengths(step, pool, drafts=drafts)
            if self._speculation is not None:
                self._turn = time.monotonic(), {feed.request: feed.request.known for feed in step.feeds}, drafts
        together = list[SentFeed]()
        for feed in step.feeds:
            request, count = feed.request, counts.get(feed.request, 0)
            try:
                if request.sequence is None:
                    request.sequence = self.port.new_sequence(request)
                item = self.port.item(feed, count, self._ahead_of(request, request.known) if count else None)
            except CALLER_ERROR as error:  # found by the client: nothing was sent
                self._fail(request, error)
                continue
            sent = self._flights.sent(feed, item, max(1, count), request.known)
            if self._chains and count and not drafts and item.parent is None:
                self._flights.call([sent])
                self._flights.unfollowed[request] = sent
            else:
                together.append(sent)
        if together:
            self._flights.call(together)
        self._release()

    def _lengths(self, step: StepPlan, pool: Pool, *, drafts: bool) -> dict[Request, int]:
        """Tokens of the runs of a plan. A request whose prompt ends here gets one token, so that it comes at once, and
        a run behind it. With drafts in the step runs are no longer than a round trip, because all wait for it."""
        free = pool.free - sum(pool.growth(feed.request.cached, feed.count + feed.drafted) for feed in step.feeds)
        most = self._most if self._chains else self._run_tokens
        if drafts:
            most = min(most, SHORT, self._steps_a_trip)
        elif not self._goes_apart and self.queues.joining:
            most = min(most, SHORT)
        wanted = dict[Request, int]()
        for feed in step.feeds:
            request = feed.request
            if feed.completes and not feed.drafted and not request.branches and len(request.stops) <= MAX_STOPS:
                more = min(request.chosen_behind(request.known), self.port.max_context - request.known + 1)
                more = min(more, self._limit or more)
                wanted[request] = more - 1 if request.decodes else 0  # behind the token that the plan has
        ends = {each: each.known for each in wanted}
        found = lengths(wanted, ends, most - 1, replace(pool, free=max(0, free)))
        return {each: 1 + found.get(each, 0) for each in wanted}

    def _follow(self) -> None:
        """Send the next run behind each item in flight that has none, once it is time for one of them, unless a new
        plan is needed once those have been answered."""
        stops = self._draining or self._single or self.leaving or (not self._goes_apart and self.queues.joining)
        unfollowed = self._flights.unfollowed
        if self._timer is not None:
            self._timer.cancel()
        if stops or not unfollowed:
            return
        due = min([next_due(sent, self._pace) for sent in unfollowed.values()]) if self._ahead else 0.0
        if due > time.monotonic():
            self._timer = asyncio.get_running_loop().call_at(due, self.queues.changed.set)
            return
        in_flight, wanted, ends = self.queues.in_flight, dict[Request, int](), dict[Request, int]()
        for request, sent in list(unfollowed.items()):
            end = in_flight.end(request)
            more = min(request.chosen_behind(end + 1), self.port.max_context - end)
            if self._limit is not None and self._turn is not None:
                more = min(more, self._turn[1][request] + self._limit - end - 1)
            if more > 0 and self._is_present(sent):
                step = request.step + end + 1 - sent.known  # with which the one in front ends
                follows = self._ahead and sent.item.follows is not None  # else its first step is not known
                wanted[request] = min(more, in_step(step, self._run_tokens)) if follows else more
                ends[request] = end
            else:
                del unfollowed[request]
        room = in_flight.free(self.port.pool)
        for request, count in lengths(wanted, ends, self._most, room).items():
            behind = unfollowed.pop(request).item
            known = ends[request] + 1
            item = self.port.follower(request, behind, known, count, self._ahead_of(request, known))
            self._flights.call([self._flights.sent(PlannedFeed(request, 1), item, count, known)])

    # --- ends -------------------------------------------------------------------------------------------------------

    def _release(self) -> None:
        """Have sequences released in the background."""
        if self.queues.leaving:
            task = asyncio.ensure_future(self.queues.release())
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    async def _abandon(self) -> None:
        """Cancel all calls in flight, and wait for their end and for that of releases."""
        await self._flights.abandon()
        await asyncio.gather(*self._releases, return_exceptions=True)

    def cancel(self, request: Request, ending: RequestEnd) -> None:
        """End a request before its text is complete. Its runs are interrupted, its sequence is released as soon as
        nothing is in flight any more."""
        self._flights.interrupt(request)
        self.queues.end(request, ending)
        self._release()
        self.queues.changed.set()

    # --- answers ----------------------------------------------------------------------------------------------------

    def _land(self) -> None:
        """Take the answers that have come."""
        landed, since, now = self._flights.land(), self._flights.since, time.monotonic()
        if not landed:
            return
        answered, refused = list[tuple[SentFeed, Answer]](), list[tuple[SentFeed, ExecutorError]]()
        for flight in landed:
            if not flight.call.cancelled():
                some = flight.call.result().split(flight.sent)
                answered += some[0]
                refused += some[1]
                self._measure(flight, some[0], now)
        # the others have ended meanwhile, or have lost the sequence
        ours = [each for each in answered if self._is_present(each[0])]
        self._count(answered, now - since)
        self._flights.since = now
        for sent, answer in ours:
            if self._is_present(sent):
                self._fed(sent, answer)
        for sent, error in refused:
            if self._is_present(sent):
                self._was_refused(sent, error)
        self._release()

    @property
    def _most(self) -> int:
        """Maximum tokens of the next run of a request that goes at its own pace. Long ones, if no token has to wait for
        the rest of its run: each run leaves out one step of the others, while the next one is admitted."""
        if self._ahead:
            return self._run_tokens
        return self._pace.tokens(self._run_tokens, chains=True, max_delay_s=self._max_delay_s)

    @property
    def _steps_a_trip(self) -> int:
        """Steps that the executor could run during a round trip."""
        trip_s, step_s = self._pace.trip_s, self._pace.step_s
        return max(1, int(trip_s / step_s)) if trip_s and step_s else SHORT

    def _is_present(self, sent: SentFeed) -> bool:
        request = sent.feed.request
        return request.stage is Stage.RUNNING and request.sequence is sent.sequence

    def _measure(self, flight: Flight, answered: ListOf[tuple[SentFeed, Answer]], now: float) -> None:
        elapsed_s = None if flight.follows else now - flight.began
        for sent, answer in answered[:1]:
            tokens = len(answer.tokens) if sent.item.run is not None else 1
            decodes = all(each.decodes for each in flight.sent)
            self._pace.note(elapsed_s, answer.timing, tokens if decodes else 0)

    def _fed(self, sent: SentFeed, answer: Answer) -> None:
        feed, request = sent.feed, sent.feed.request
        if request.cached_tokens is None:
            request.cached_tokens = answer.cached_tokens
        request.fed(feed.count, answer.length, self._budget.exact)
        request.failures = 0
        request.answered = time.monotonic()
        request.step = 0 if answer.timing is None else answer.timing.step
        if not sent.completes:
            return
        if request.branches:
            self._branch(request)
            return
        if feed.drafted and self._speculation is not None:
            self._speculation.verified(request, feed.drafted, len(answer.tokens) - 1)
        self._chosen(request, list(stream_tokens(answer))[request.known - sent.known :])
        self._flights.take_ahead(request)
        if self.hands_over and request.stage is Stage.RUNNING:
            self.queues.hand_over(request)

    def _branch(self, trunk: Request) -> None:
        """The prompt of several requests is in the cache: each becomes a child of its sequence, which is released once
        all of them have been fed."""
        parent, trunk.sequence = trunk.sequence, None
        assert parent is not None  # noqa: S101 - it was fed just now
        self.queues.end(trunk, RequestEnd.LENGTH)
        children = [each for each in trunk.branches if each.ending is None]
        for request in children:
            request.sequence, request.pieces = parent.child(), trunk.pieces.upto(trunk.cached)
            request.cached = request.computed = trunk.cached
            request.cached_tokens = trunk.cached_tokens
        self.queues.run(children)
        self.queues.share(parent, children)

    def _ahead_of(self, request: Request, known: int) -> Ahead | None:
        """What takes the tokens behind ``known`` ones ahead of their answer. None: they come with it alone, because the
        output asks for log-probabilities."""
        if not self._ahead or request.output.logprob or request.output.logprobs is not None:
            return None
        sequence, longest, run = request.sequence, self.port.max_context + 1, list[int]()

        def take(first: int, tokens: list[int]) -> None:
            """Tokens of the run behind its ``first`` ones. They wait until those before the run are there. The last one
            of a text comes with the answer, and so does what is behind a gap."""
            if first <= len(run):
                run[first : first + len(tokens)] = tokens
            there = request.known
            most = min(request.becomes, longest) - there - 1
            if there < known or most <= 0 or request.sequence is not sequence:
                return
            new = run[there - known :][:most]
            if new and request.stops_at(new[-1], there):
                new.pop()
            last = len(new) - 1
            chosen = [StreamToken(token, more=at < last) for at, token in enumerate(new)]
            if new and request.stage is Stage.RUNNING and self._appended(request, chosen, len(new)):
                self._finish(request, RequestEnd.STOP)
                self.queues.changed.set()

        return take

    def _chosen(self, request: Request, tokens: ListOf[StreamToken]) -> None:
        """Append the next tokens, and end the text if it is complete."""
        stop = next((at for at, each in enumerate(tokens) if request.stops_at(each.token, request.known)), None)
        if stop is not None:
            tokens = tokens[: stop + 1]
        ends = self._appended(request, tokens, len(tokens) if stop is None else stop)
        if request.ending is not None:
            return
        if stop is not None:
            request.stop_token = tokens[stop].token
            self._finish(request, RequestEnd.STOP)
        elif ends:
            self._finish(request, RequestEnd.STOP)
        elif request.wanted <= 0:
            self._finish(request, RequestEnd.LENGTH)
        elif request.known > self.port.max_context:
            self._outgrown(request)

    def _appended(self, request: Request, tokens: ListOf[StreamToken], count: int) -> bool:
        """Append tokens, ``count`` of them to the text. Returns whether what reads them ends the text. An error of
        that, such as a tokenizer's, ends the request, and no other one."""
        try:
            ends = self.queues.tokens(request, tokens, count)
        except Exception as error:
            self._flights.interrupt(request)
            self.queues.end(request, RequestEnd.ERROR, error)
            self.queues.changed.set()
            return False
        if ends:
            self._flights.interrupt(request)
        return ends

    def _was_refused(self, sent: SentFeed, error: ExecutorError) -> None:
        request, follows = sent.feed.request, sent.item.follows is not None
        if isinstance(error, ChainBroken) or (follows and isinstance(error, OUT_OF_STEP + TRY_LATER)):
            return  # planned again, as an item that follows none
        if isinstance(error, NO_CAPACITY) and sent.item.run is not None and "needed_slots" not in error.metadata:
            self._single = True
        elif isinstance(error, NO_CAPACITY + TRY_LATER):
            self._scarce, self._draining = error, True
            if isinstance(error, TRY_LATER):
                self.queues.requeue(request)
        else:
            self.refused(request, error)

    def refused(self, request: Request, error: ExecutorError) -> None:
        """Compute a lost sequence again; retry a few times a failed step, and an item that had no answer although its
        call had one; end the request otherwise. Raises `ExecutorGone` if the device is lost."""
        if isinstance(error, SEQUENCE_GONE + OUT_OF_STEP):
            self._run.rebuilds += 1
            self.queues.requeue(request)
        elif isinstance(error, ContextLengthExceeded):
            self._outgrown(request)
        elif isinstance(error, DeviceLost):
            raise ExecutorGone(error.message)
        elif isinstance(error, (StepFailed, KvCorrupt, *NO_ANSWER)) and request.failures < FAILURES_OF_A_REQUEST:
            request.failures += 1
        else:
            self._fail(request, error)

    async def _make_way(self, error: ExecutorError) -> None:
        """The executor has less room than its last answer said: other callers use it, or it drains. Stop admitting
        until a request ends; if blocks are missing, preempt the last request."""
        self.refusal, self._scarce = error, None
        if isinstance(error, NO_CAPACITY) and self.queues.running:
            await self.queues.preempt(max(self.queues.running, key=IN_ORDER))

    def _outgrown(self, request: Request) -> None:
        if request.cached and self.goes_on(request):
            self.queues.hand_over(request)
        else:
            self._finish(request, RequestEnd.CONTEXT)

    def _finish(self, request: Request, ending: RequestEnd) -> None:
        self.refusal = None
        self.queues.end(request, ending)

    def _fail(self, request: Request, error: ExecutorError) -> None:
        self.queues.end(request, RequestEnd.ERROR, error)

    def give_up(self, request: Request, pool: Pool) -> None:
        """End a request that the whole ``pool`` or the longest context cannot hold."""
        if request.generated:
            self._finish(request, RequestEnd.CONTEXT if request.known > self.port.max_context else RequestEnd.POOL)
        else:
            need = pool.blocks(request.known)
            words = f"the prompt needs {need} blocks of {pool.block_size} tokens; {pool.total} exist"
            self._fail(request, KvBlocksExhausted(words))

    # --- counts -----------------------------------------------------------------------------------------------------

    def _count(self, done: ListOf[tuple[SentFeed, Answer]], seconds: float) -> None:
        """Count the answers that came together. Called before they change the requests."""
        if not done:
            return
        decodes = [(sent, answer) for sent, answer in done if sent.decodes]
        verified = [(sent, answer) for sent, answer in decodes if sent.item.run is None]
        self._run.drafts(
            trips=len(verified),
            drafted=sum(sent.feed.drafted for sent, _ in verified),
            emitted=sum(len(answer.tokens) for _, answer in verified),
        )
        self.port.patience.renew()
        self._run.saw(done[-1][1].pressure)
        timing = done[-1][1].timing
        self._run.step(
            prompt=sum(sent.feed.count for sent, _ in done) - len(decodes),
            decode=sum(len(answer.tokens) for _, answer in decodes),
            sequences=len(done),
            seconds=seconds,
            # runs that end one after the other share steps
            executor_seconds=0.0 if timing is None else min(timing.forward_s, seconds),
        )
