"""The engine's loop: take submissions that have arrived, claim a step of them, run it, answer.

Submissions that arrive while a step runs form the next step (natural batching: no timer, no delay when idle). A
submission is a batch of a caller: it is never split, and never begins before an older one of the same caller. Its point
of no return is the claim: cancelled before it, nothing happened; after it, the step completes. `engine.backlog` chooses
between several callers.

A runner may have two steps in flight (``depth``). Then the next one is claimed and begun shortly before the device has
finished the previous one (`engine.overlap`), if there is work by then; answers are sent while the device computes. The
loop does not wait for more work: without any, the step in flight is finished and answered at once. Steps are finished
in the order in which they were begun.

If the model's layers are in stages, the next step is begun as soon as there is one, because the first stage idles until
then; and the waiting work is divided into as many steps as there are stages, which would otherwise be one.

A submission that follows a run waits for its end here, and is part of the very next step (`engine.chains`).

Submissions whose rows are constrained by grammars wait for their masks before they wait for a step (`engine.aside`).

The loop handles spans and callables, without torch, handles and the wire; its subclasses receive work and deliver
answers (`engine.thread`, `engine.process`). Runs continue from step to step by themselves (`engine.runs`). Thread-local
device state (inference mode, streams) is entered through the runner's ``context``.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from functools import partial
from queue import Empty
from typing import Any, Final, Protocol

from ferrum_rpc.core import LATE, CacheState, RankState, SpanOutcome, SpanResult, Step, StepTiming
from ferrum_rpc.engine.api import EngineCounters, Finished, Interrupt, Operation, Runner, Submission, ended, lost
from ferrum_rpc.engine.aside import Aside
from ferrum_rpc.engine.backlog import Backlog
from ferrum_rpc.engine.behind import Behind
from ferrum_rpc.engine.chains import Chains
from ferrum_rpc.engine.overlap import LOOK_S, Overlap
from ferrum_rpc.engine.places import Places
from ferrum_rpc.engine.runs import Running, Runs
from ferrum_rpc.errors import DeadlineExceeded, DeviceLost, ExecutorError, StepFailed

MASKS_S: Final = 0.001
"""How long the loop waits for masks without a look at its inbox, if it has nothing else to do."""

Work = Submission | Operation | Interrupt | None
"""What an inbox holds; None asks the loop to end when it has done what came before."""


class Inbox(Protocol):
    """The queue of arriving work. Only the loop reads it while it runs."""

    def get(self, block: bool = True, timeout: float | None = None) -> Work:
        """The next item. Waits for it if asked to, at most for so many seconds. Raises `Empty` if there is none."""

    def empty(self) -> bool:
        """Whether nothing waits."""


class EngineLoop(ABC):
    """``build`` is called in the loop's thread, because device contexts belong to a thread. ``on_ready(runner)`` and
    ``on_failed(error)`` are delivered as answers are; ``lock`` guards the states of work against concurrent
    cancellation. Both on `time.monotonic`: ``busy_since``: the start of the step in flight, 0 while the loop waits;
    ``waiting_since``: when the runner's device began the oldest step in flight, 0 if it has none."""

    busy_since: float = 0.0
    waiting_since: float = 0.0

    def __init__(
        self,
        build: Callable[[], Runner],
        *,
        inbox: Inbox,
        lock: AbstractContextManager[object],
        max_step_items: int,
        max_step_tokens: int,
        max_running: int = 1,
        on_ready: Callable[[Runner], object],
        on_failed: Callable[[BaseException], object],
    ) -> None:
        self._build = build
        self._inbox = inbox
        self._lock = lock
        self._max_step_items = max_step_items
        self._max_step_tokens = max_step_tokens
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._backlog = Backlog(max_step_items, max_step_tokens)
        self._aside = Aside(self._backlog.add)
        self._behind = Behind()
        self._places = Places(max_running)
        self._runs = Runs(self._places)
        self._chains = Chains(self._places)
        self._early: deque[Work] = deque()  # what was taken from the inbox while a step was finished
        self._under_way: deque[tuple[list[Running], list[Submission], Any]] = deque()  # with what `begin` returned
        self._following: Sequence[Running] = ()  # those of the step in flight that the next one continues already
        self._overlap = Overlap()
        self._failure: BaseException | None = None
        self._loading = True
        self._find_ranks: Callable[[], Sequence[RankState]] = tuple
        self.counters = EngineCounters()
        self.cache = CacheState(block_size=0, total_blocks=0, free_blocks=0, sequences=0)

    # --- what subclasses do -----------------------------------------------------------------------------------------

    @abstractmethod
    def _deliver(self, finished: Finished) -> None:
        """Have all of it called where the callers live, in one go: 256 completions cost 2 µs that way and 266 µs one by
        one."""

    @abstractmethod
    def _cancelled(self, work: Submission | Operation) -> bool:
        """Whether it was cancelled; then the loop drops it. Called with the lock held."""

    @abstractmethod
    def _claimed(self, work: Submission | Operation) -> None:
        """Mark it as claimed, so that it can no longer be cancelled. Called with the lock held."""

    @abstractmethod
    def _on_step_done(self, step: StepTiming, waits: Sequence[float]) -> None:
        """Delivered after a step's answers: its timing, and the seconds that each submission in it had waited."""

    # --- the loop ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            runner = self._build()
            self._loading = False
            with closing(runner), runner.context():
                self.cache = runner.cache_state()
                self._find_ranks = runner.ranks
                self._deliver([partial(self._on_ready, runner)])
                self._serve(runner)
        except BaseException as error:
            if self._failure is None:
                self._broken(error, [])

    def _serve(self, runner: Runner) -> None:
        stopping = False
        constraints = runner.constraints
        while not stopping or self._has_work():
            if self._under_way and not self._next_is_due(runner):
                self._deliver(self._finish(runner))
                continue
            finished: Finished = []
            stopping |= self._drain_inbox(runner, finished, wait=not self._has_work())
            if self._behind:
                self._feed_again(runner, finished)
            going: list[Running] = []
            if constraints is not None and self._aside:
                self._aside.pass_on(constraints)
            share = self._share(runner) if runner.in_stages else None
            if self._runs.ready:
                may_go_on = constraints.may_go_on if constraints is not None and constraints.any_slow else None
                going = self._runs.take(time.monotonic(), share, may_go_on)
                self._end_runs(runner, finished)
            chained = self._chains.take_next()
            following = self._may_follow(runner) if self._under_way else []
            claimed = chained + self._claim(
                runner, finished, None if share is None else share - len(going) - len(chained)
            )
            if finished:
                self.cache = runner.cache_state()
                self._deliver(finished)
            if going or claimed or following:
                self._begin(runner, going, claimed, following)
            elif constraints is not None and (self._aside or self._runs.ready):  # nothing else to do
                constraints.wait(LOOK_S if self._under_way else MASKS_S)
                self.busy_since = time.monotonic()

    def _has_work(self) -> bool:
        """Whether a step is under way, or something waits for one."""
        return bool(
            self._backlog
            or self._early
            or self._under_way
            or self._runs.ready
            or self._chains.next
            or self._places
            or self._aside
            or self._behind
        )

    def _next_is_due(self, runner: Runner) -> bool:
        """Whether to look for more work before the oldest step is finished. False as soon as that is ready."""
        in_stages = runner.in_stages
        if len(self._under_way) >= runner.depth:
            return False
        *_, oldest = self._under_way[0]
        while not runner.ready(oldest):
            if in_stages or self._overlap.due(time.monotonic()):
                there = bool(self._backlog or self._early or self._runs.ready or self._chains.next)
                there = there or not self._inbox.empty()
                if there or not in_stages:
                    return there or bool(self._may_follow(runner))
            time.sleep(LOOK_S)
        return False

    def _may_follow(self, runner: Runner) -> list[Running]:
        """The runs of the step in flight whose next step may begin now. None, if a submission ends with that step and
        another one follows it: that one would lose a step."""
        if not runner.follows or len(self._under_way) != 1:
            return []
        [(going, claimed, _)] = self._under_way
        following = self._runs.may_follow(going, claimed, time.monotonic())
        if following and self._chains:
            going_on = {each.call.work for each in following}
            ending = {each.call.work for each in going}.union(claimed) - going_on
            if any(map(self._chains.waits_for, ending)):
                return []
        return following

    def _share(self, runner: Runner) -> int:
        """Tokens of the next step if the waiting work and the runs are divided into as many steps as stages."""
        tokens = len(self._runs.ready) + len(self._chains.next) + self._backlog.tokens + self._places.tokens
        for going, claimed, _ in self._under_way:
            tokens += len(going) + sum([work.tokens for work in claimed])
        return max(1, -(-tokens // runner.depth))

    def _drain_inbox(self, runner: Runner, finished: Finished, *, wait: bool) -> bool:
        """Take what has arrived; run operations at once. True: the thread was asked to stop."""
        stopping = False
        try:
            while wait or self._early or not self._inbox.empty():
                if wait:
                    self.busy_since = 0.0
                work = self._wait(runner) if wait else self._early.popleft() if self._early else self._inbox.get()
                if wait:
                    self.busy_since = time.monotonic()
                    wait = False
                if work is None:
                    stopping = True
                elif isinstance(work, Submission):
                    if work.behind is not None:
                        self._follow(work, finished)
                    elif runner.constraints is None or not self._aside.waits(work, runner.constraints):
                        self._backlog.add(work)
                elif isinstance(work, Interrupt):
                    if work.work is not None:
                        work.work.interrupts.setdefault(work.index, work.error)
                elif self._claim_one(work):
                    finished.append(self._operate(runner, work))
        except BaseException:
            self._deliver(finished)  # what was done before the thread broke was done
            raise
        return stopping

    def _take_followers(self, finished: Finished) -> None:
        """Have the followers that have arrived wait, before what they follow is over. The rest keeps its order."""
        while not self._inbox.empty():
            work = self._inbox.get()
            if isinstance(work, Submission) and work.behind is not None:
                self._follow(work, finished)
            else:
                self._early.append(work)

    def _follow(self, work: Submission, finished: Finished) -> None:
        """Have a follower wait for what it follows, or hand it back."""
        if not self._chains.add(work) and self._claim_one(work):
            finished.append(work.hand_back)

    def _wait(self, runner: Runner) -> Work:
        """Wait for the next work. Raises `DeviceLost` if the runner is lost meanwhile."""
        while True:
            try:
                return self._inbox.get(timeout=runner.look_every_s)
            except Empty:
                runner.check_alive()

    def _claim_one(self, work: Submission | Operation) -> bool:
        with self._lock:
            if self._cancelled(work):
                return False
            self._claimed(work)
            return True

    def _operate(self, runner: Runner, operation: Operation) -> Callable[[], object]:
        try:
            return partial(operation.done, operation.run(runner))
        except BaseException as error:
            if isinstance(error, ExecutorError) and not isinstance(error, DeviceLost):
                return partial(operation.refuse, error)
            self._broken(error, [partial(operation.refuse, lost(error))])
            raise

    def _claim(self, runner: Runner, finished: Finished, share: int | None) -> list[Submission]:
        """The next step's submissions, in the backlog's order, up to the step's budget, and until it has its ``share``
        of the tokens that wait. Those for which tokens must be fed again wait for that."""
        claimed: list[Submission] = []
        items = tokens = 0
        now = time.monotonic()
        places, backlog, feeding = self._places, self._backlog, runner.feeding
        is_over = partial(self._is_over, now, finished)
        with self._lock:
            self._give_places(is_over)
            while share is None or tokens < share:
                if (work := backlog.first()) is None:
                    break
                if is_over(work):
                    backlog.take(counted=False)
                    if work.placed:
                        places.free(work, work.runs)
                    continue
                if feeding is not None and not work.fed and self._behind.waits(work, feeding):
                    self._behind.add(backlog.take(counted=False))
                    continue
                if work.runs and not work.placed and not places.may_begin(work):
                    places.add(backlog.take(counted=False))
                    self._give_places(is_over)
                    continue
                if claimed and (
                    items + len(work.spans) > self._max_step_items or tokens + work.tokens > self._max_step_tokens
                ):
                    break
                self._claimed(work)
                items += len(work.spans)
                tokens += work.tokens
                if work.runs and not work.placed:
                    places.hold(work)
                claimed.append(backlog.take())
        return claimed

    def _feed_again(self, runner: Runner, finished: Finished) -> None:
        """Feed a piece of what a submission waits for. Once it is complete, it waits for a step again."""
        assert runner.feeding is not None  # noqa: S101 - or nothing would wait
        behind = self._behind
        with self._lock:
            work = behind.first(partial(self._is_over, time.monotonic(), finished))
        if work is None:
            return
        self.busy_since = time.monotonic()
        try:
            if behind.feed(runner.feeding):
                self._backlog.add(behind.pop())
        except StepFailed as error:
            behind.pop()
            if self._claim_one(work):
                self._over(work, (error,) * len(work.spans), None, finished)
            else:
                with self._lock:
                    self._drop_followers(work, finished)
        except BaseException as error:
            self._broken(error, finished)
            raise

    def _give_places(self, is_over: Callable[[Submission], bool]) -> None:
        """Have those that waited for places and get them now wait for their callers' turns again: a step is shared by
        what callers had of steps, and not by what they waited for. Called with the lock held."""
        places = self._places
        while places and (work := places.first(is_over)) is not None:
            places.hold(work)
            work.placed = True
            self._backlog.add(places.take(work))

    def _is_over(self, now: float, finished: Finished, work: Submission) -> bool:
        """Whether what waits was cancelled, or is refused: its deadline has passed, or all of it was interrupted.
        Called with the lock held, once where it is."""
        if self._cancelled(work):
            self._drop_followers(work, finished)
            return True
        late: ExecutorError | None = work.interrupts.get(None)
        if work.deadline is not None and now >= work.deadline:
            late = DeadlineExceeded("the deadline passed before the step began; nothing happened")
        if late is None:
            return False
        self._claimed(work)
        self._drop_followers(work, finished)
        finished.append(partial(work.refuse, late))
        return True

    def _drop_followers(self, work: Submission, finished: Finished) -> None:
        """Hand back what follows a submission that is over without an outcome to follow. Called with the lock held."""
        work.over = True
        for each in self._chains.take(work) if self._chains else ():
            if not self._cancelled(each):
                self._claimed(each)
                finished.append(each.hand_back)

    def _over(
        self, work: Submission, outcomes: Sequence[SpanOutcome], timing: StepTiming | None, finished: Finished
    ) -> None:
        """Answer a submission. What follows it begins with the next step, or is handed back, before its answer."""
        work.over = True
        if self._chains:
            now = time.monotonic()
            with self._lock:
                for each in self._chains.take(work):
                    if self._cancelled(each):
                        continue
                    self._claimed(each)
                    if (cause := each.interrupts.get(None)) is not None:
                        finished.append(partial(each.refuse, cause))
                    elif self._chains.begin(each, outcomes, now):
                        assert each.begins is not None  # noqa: S101 - it has ``behind``
                        finished.append(each.begins)
                    else:
                        finished.append(each.hand_back)
        finished.append(partial(work.done, tuple(outcomes), timing))

    def _begin(self, runner: Runner, going: list[Running], claimed: list[Submission], following: list[Running]) -> None:
        """Begin their step, or answer it if it cannot be begun; then those that are ``following`` the step in flight
        begin when that has ended."""
        spans = [each.span for each in going] if going else []
        stops: tuple[tuple[int, ...], ...] = ()
        if following:
            spans = [each.following() for each in following] + spans
            stops = tuple([each.run.stop_token_ids for each in following])
        atomic: list[range] = []
        for work in claimed:
            if work.all_or_nothing:
                atomic.append(range(len(spans), len(spans) + len(work.spans)))
            spans += work.spans
        idle = not self._under_way
        began = time.monotonic()
        if idle:
            self.busy_since = began  # another's time begins when the one before it has ended
        try:
            pending = runner.begin(Step(tuple(spans), tuple(atomic), stops))
        except BaseException as error:
            self.cache = runner.cache_state()
            self._deliver(self._refused(runner, error, going, claimed))
            if following:
                self._deliver(self._finish(runner))
            return
        self._overlap.begun(began, time.monotonic(), idle=idle)
        if following:
            going, self._following = following + going, following
        self._under_way.append((going, claimed, pending))
        if idle and runner.on_device:
            self.waiting_since = time.monotonic()

    def _finish(self, runner: Runner) -> Finished:  # noqa: PLR0915 - once a step: a call costs time
        """The answers of the oldest step in flight."""
        going, claimed, pending = self._under_way.popleft()
        following, self._following = self._following, ()
        turn = self._overlap.turn
        try:
            result = runner.finish(pending)
        except BaseException as error:
            return self._refused(runner, error, going, claimed)
        finally:
            self.busy_since = time.monotonic()
            if runner.on_device:
                self.waiting_since = self.busy_since if self._under_way else 0.0
            self._overlap.finished(self.busy_since)
            self.cache = runner.cache_state()
        ran = tokens = cached = recomputed = rows = 0
        spans = [each.span for each in going] if going else []
        for work in claimed:
            spans += work.spans
        for span, outcome in zip(spans, result.outcomes, strict=True):
            if isinstance(outcome, SpanResult) and outcome is not LATE:
                ran += 1
                tokens += len(span.tokens)
                cached += outcome.cached_tokens
                recomputed += outcome.recomputed_tokens
                if (answer := outcome.rows) is not None:
                    rows += answer.count
        finished: Finished = []
        if rows:  # else there is nothing to follow
            self._take_followers(finished)
        counters = self.counters
        if ran:
            counters.steps += 1
            counters.tokens += tokens
            counters.searched_tokens += result.tokens_searched
            counters.cached_tokens += cached
            counters.recomputed_tokens += recomputed
            counters.rows += rows
            counters.blocks_copied += result.blocks_copied
            counters.forward_s += result.forward_s
        tokens -= cached  # what was computed
        waits: list[float] = []
        for each, outcome in zip(going, result.outcomes, strict=False):
            if each.call.timing.step != counters.steps:  # once for all runs of a call
                queue_s, forward_s = each.call.timing.queue_s, each.call.timing.forward_s + result.forward_s
                each.call.timing = StepTiming(counters.steps, ran, tokens, queue_s, forward_s)
            self._runs.stepped(each, outcome)
        first = len(going)
        for work in claimed:
            last = first + len(work.spans)
            timing = None
            if ran:
                timing = StepTiming(counters.steps, ran, tokens, turn - work.arrived, result.forward_s)
                waits.append(timing.queue_s)
            if not work.runs or not self._runs.begun(work, result.outcomes[first:last], timing):
                self._over(work, result.outcomes[first:last], timing, finished)
            first = last
        if following:
            self._runs.leave_out(following)
        if self._runs.calls or counters.running:
            self._end_runs(runner, finished)
        if ran:
            step = StepTiming(counters.steps, ran, tokens, 0.0, result.forward_s)
            finished.append(partial(self._on_step_done, step, waits))
        return finished

    def _end_runs(self, runner: Runner, finished: Finished) -> None:
        """The answers of runs that are over, and what the others have chosen."""
        for call in self._runs.calls:
            if call.chosen:
                assert call.work.on_tokens is not None  # noqa: S101 - or there were none
                finished.append(partial(call.work.on_tokens, call.chosen))
                call.chosen = []
        ended, over = self._runs.take_ended()
        if ended:
            runner.end_hold(ended)
            self.cache = runner.cache_state()
        for call in over:
            self._over(call.work, call.outcomes, call.timing, finished)
        self.counters.running = self._places.count

    def _refused(
        self, runner: Runner, error: BaseException, going: Sequence[Running], claimed: Sequence[Submission]
    ) -> Finished:
        """The answers of a step that was rolled back. Any other failure ends the loop."""
        if isinstance(error, StepFailed):
            finished: Finished = []
            for work in claimed:
                self._runs.refused(work)
                self._over(work, (error,) * len(work.spans), None, finished)
            for each in going:
                self._runs.stepped(each, error)
            self._end_runs(runner, finished)
            return finished
        self._broken(error, [partial(work.refuse, lost(error)) for work in claimed])
        raise error

    def _broken(self, error: BaseException, answers: Finished) -> None:
        """End the loop and all work in flight. ``on_failed`` is delivered before the answers, so that the server's
        state has changed when callers are answered."""
        self._failure = error
        cut_off = [work for _, claimed, _ in self._under_way for work in claimed]
        cut_off += [call.work for call in self._runs.calls] + self._chains.take_next()
        self._under_way.clear()
        self.counters.running = 0
        answers += [partial(work.refuse, lost(error)) for work in cut_off]
        self._deliver([partial(self._on_failed, error), *answers])

    def _refuse_rest(self) -> None:
        """After the loop has ended, answer queued and later work, so that no caller waits for ever."""
        error = ended(self._failure)
        refused: Finished = []
        try:
            while True:
                work: Work
                if self._chains:
                    work = self._chains.pop()
                elif self._places:
                    work = self._places.pop()
                elif self._aside:
                    work = self._aside.pop()
                elif self._behind:
                    work = self._behind.pop()
                elif self._backlog:
                    work = self._backlog.take(counted=False)
                else:
                    work = self._early.popleft() if self._early else self._inbox.get(block=False)
                if isinstance(work, Submission | Operation) and self._claim_one(work):
                    refused.append(partial(work.refuse, error))
        except Empty:
            self._deliver(refused)
