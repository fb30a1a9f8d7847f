"""A scheduler on `ferrum_rpc.client`: continuous batching over one executor or a fleet. Loads no torch, no server code.

    async with Scheduler("localhost:50051") as scheduler:
        async for token in scheduler.submit(TextRequest(prompt=tokens, max_tokens=64)):
            ...

scheduler.py    the public interface: requests in, streams of tokens out
stream.py       the tokens of one text, and what ends it
fairness.py     turns of tenants
request.py      a request: what is known of it, what it owes, its sequence
policy.py       pure: what runs in the next step, who is admitted, who is preempted
runs.py         what is in flight, and the lengths of runs
speculation.py  guesses of what comes next, from the text itself or a smaller model
patience.py     how long an executor that refuses calls is waited for
queues.py       who waits, who runs and who moves with one executor
port.py         one executor: how full it is, work items, and calls until they are answered
driver.py       turns plans into calls, and answers into tokens
router.py       a driver at each of several executors, and the sequences that move between them
text.py         text of tokens while it grows
counts.py       what the run was like
"""

from ferrum_rpc.scheduler.counts import RunCounts
from ferrum_rpc.scheduler.driver import Driver
from ferrum_rpc.scheduler.patience import ExecutorGone
from ferrum_rpc.scheduler.policy import Budget
from ferrum_rpc.scheduler.queues import Observer
from ferrum_rpc.scheduler.request import Request, RequestEnd, Stage
from ferrum_rpc.scheduler.router import Router
from ferrum_rpc.scheduler.scheduler import STEPS_IN_FLIGHT, Scheduler, TextRequest, budget_of, in_a_session
from ferrum_rpc.scheduler.speculation import Drafter, DraftModel, Lookup, looked_up
from ferrum_rpc.scheduler.stream import TextMatcher, TokenStream
from ferrum_rpc.scheduler.text import REPLACEMENT, Detokenizer, TextStream

__all__ = [
    "REPLACEMENT",
    "STEPS_IN_FLIGHT",
    "Budget",
    "Detokenizer",
    "DraftModel",
    "Drafter",
    "Driver",
    "ExecutorGone",
    "Lookup",
    "Observer",
    "Request",
    "RequestEnd",
    "Router",
    "RunCounts",
    "Scheduler",
    "Stage",
    "TextMatcher",
    "TextRequest",
    "TextStream",
    "TokenStream",
    "budget_of",
    "in_a_session",
    "looked_up",
]
