"""What ends with a request, without an executor."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ferrum_rpc.scheduler.counts import RunCounts
from ferrum_rpc.scheduler.queues import Observer, end
from ferrum_rpc.scheduler.request import Request, RequestEnd


class Told(Observer):
    """The requests that changed, in their order."""

    def __init__(self) -> None:
        self.indices: list[int] = []

    def changed(self, request: Request) -> None:
        self.indices.append(request.index)


@pytest.mark.parametrize("ending", RequestEnd)
def test_a_prompt_that_fails_or_is_cancelled_ends_the_texts_that_continue_it(ending: RequestEnd) -> None:
    """Its end by length is that it was fed, and they go on; one that is over keeps its own end."""
    over, *others = (Request(at, (1, 2, 3), 10) for at in range(3))
    over.ending = RequestEnd.STOP
    run, told = RunCounts(left=3), Told()
    end(replace(others[0], index=99, branches=(over, *others)), ending, None, run, told)
    goes_on = ending is RequestEnd.LENGTH
    assert over.ending is RequestEnd.STOP
    assert [each.ending for each in others] == [None if goes_on else ending] * 2
    assert (told.indices, run.left) == (([99], 2) if goes_on else ([99, 1, 2], 0))
