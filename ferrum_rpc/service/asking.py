"""Waiting for the engine's answer to work that is no caller's transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from ferrum_rpc.core import Span, SpanOutcome
from ferrum_rpc.engine.api import Operation, Submission
from ferrum_rpc.errors import ExecutorError

Result = TypeVar("Result")

Submit = Callable[[Submission | Operation], None]
"""`Engine.submit`."""


async def between_steps(submit: Submit, run: Callable[[Any], Result]) -> Result:
    """Run it in the engine, and wait for what it returns. Raises what it refuses."""
    result: Result = await _answer(submit, partial(Operation, run))
    if isinstance(result, ExecutorError):
        raise result
    return result


async def in_a_step(submit: Submit, spans: Sequence[Span]) -> tuple[SpanOutcome, ...]:
    """Run the spans in one step, and wait for their outcomes."""
    outcomes: tuple[SpanOutcome, ...] = await _answer(submit, partial(Submission, tuple(spans)))
    return outcomes


async def _answer(submit: Submit, work: Callable[[Callable[..., None]], Submission | Operation]) -> Any:
    """Submit the work, which takes a function that is called with its answer, and wait for that."""
    done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    submit(work(lambda answer, *_: None if done.done() else done.set_result(answer)))
    return await done
