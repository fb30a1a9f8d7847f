"""What a failed step had in its frames is gone before ranks recover: NCCL ends a group only without its graphs."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from torch.distributed import HashStore

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import OutputSpec, Positions, Span, Step
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.ranks.follower import Follower, Phase
from ferrum_rpc.engine.ranks.messages import END
from ferrum_rpc.errors import StepFailed


class Graph:
    """Stands for one."""


@pytest.fixture(autouse=True)
def nothing_is_collected():
    """Cycles stay."""
    gc.disable()
    yield
    gc.enable()


def failing(graphs: list[Any]) -> Any:
    """A part of a step that has a graph in two of its frames, and raises one error because of another."""

    def within(graph: Graph) -> None:
        raise KeyError("missing")

    def run(*_: Any) -> None:
        graph = Graph()
        graphs.append(weakref.ref(graph))
        try:
            within(graph)
        except KeyError as error:
            raise ValueError("a step fails") from error

    return run


def test_of_the_first_rank():
    runner = build_runner(ModelSettings("identity", device="cpu", kv_blocks=8, block_size=4))
    graphs, left = list[Any](), list[Any]()
    compute: Any = runner.compute
    compute.run = failing(graphs)
    compute.recover = lambda: left.append(graphs[0]())
    span = Span(1, np.array([5], np.int32), 0, OutputSpec(Positions.NONE), create=True)
    with runner.context(), pytest.raises(StepFailed) as failed:
        runner.forward(Step((span,)))
    assert left == [None]
    assert failed.value.__cause__ is not None and failed.value.__cause__.__traceback__ is not None, "for the log"


class Channel:
    """To a rank 0 that asks for a step and ends the rank. ``sent``: what the rank reports of it."""

    def __init__(self, answering: tuple[int, ...]) -> None:
        self.requests = iter([(7, answering, "step", ()), (8, (), END, ("over",))])
        self.sent: list[str] = []

    def receive(self) -> Any:
        return next(self.requests)

    def send(self, message: Any) -> None:
        if message[0] != "heartbeat":
            self.sent.append(message[0])

    def close(self) -> None:
        pass


@pytest.mark.parametrize("answering", [(), (1,)])
def test_of_another_rank(answering):
    graphs, channel = list[Any](), Channel(answering)
    follower = Follower(channel, 1, HashStore())
    phase: Any = Phase()
    phase.step = failing(graphs)
    follower.phase = phase
    assert follower.run() == "over"
    assert follower.failed and channel.sent == ["answer" if answering else "failed"]
    assert graphs[0]() is None
