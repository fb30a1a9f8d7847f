"""Ranks of one model in threads of this process: what `engine.ranks` is in processes, without starting any."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch.distributed import FileStore, Store

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import Greedy, OutputSpec, Positions, Sample, Span
from ferrum_rpc.engine.assembly.build import build_shared
from ferrum_rpc.engine.assembly.choose import choose
from ferrum_rpc.engine.channel import Channel
from ferrum_rpc.engine.operations import TorchRunner
from ferrum_rpc.engine.ranks.follower import Follower
from ferrum_rpc.engine.ranks.leader import Ranks, RemoteRank
from ferrum_rpc.engine.ranks.links import machine, set_up
from ferrum_rpc.engine.ranks.setup import Setup
from tests.support.kv_world import owned_slots
from tests.support.poison import fill_slots, poison
from tests.support.rows import answered

Stage = Callable[[str], None]


class World:
    """All ranks. ``runner`` is of rank 0, ``followers`` are the others."""

    def __init__(
        self, settings: ModelSettings, stage: Stage | None = None, stages: Mapping[int, Stage] | None = None
    ) -> None:
        """``stages``: what each of the others calls, as ``stage`` is the first's."""
        self._folder = TemporaryDirectory()
        self._place = str(Path(self._folder.name) / "store")
        self._stages = stages or {}
        self._threads: list[threading.Thread] = []
        self.followers: list[Follower] = []
        count = torch.get_num_threads()
        self.runner = build_shared(choose(settings), None, stage, self._assemble)
        torch.set_num_threads(count)

    def _assemble(self, settings: ModelSettings) -> tuple[Ranks, Setup, Store]:
        members = []
        for number in range(1, settings.ranks):
            ours, theirs = socket.socketpair()
            follower = Follower(Channel(theirs), number, FileStore(self._place), self._stages.get(number))
            self.followers.append(follower)
            self._threads.append(threading.Thread(target=follower.run, daemon=True))
            self._threads[-1].start()
            members.append(RemoteRank(number, Channel(ours), f"thread {number}", machine=machine()))
        made = set_up(settings, members, "", FileStore(self._place))
        self.ranks = made[0]
        return made

    def poison(self) -> None:
        """Fill what nobody owns of the blocks of all ranks with NaN."""
        poison(self.runner)
        self.ranks.ask(
            "cache", "read", np.zeros(1, np.int64), 0, self.runner.info.head_dim
        )  # all that was told is done
        free = torch.from_numpy(~owned_slots(self.runner.kv))
        with torch.inference_mode():
            for follower in self.followers:
                fill_slots(follower.phase.kv, free)  # type: ignore[attr-defined]

    def close(self) -> None:
        """End all; raises where a rank does not end."""
        self.runner.close()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        self._folder.cleanup()


PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7]]
DRAWN = Sample(seed=4, top_k=20)


def texts_of(
    runner: TorchRunner,
    steps: int,
    first: int = 0,
    *,
    adapters: tuple[int, ...] = (0, 0, 0),
    drawn: Sample = DRAWN,
) -> list[list[int]]:
    """Three sequences, of which one is ``drawn``: their prompts, then a token a step."""
    texts, fed = [[*prompt] for prompt in PROMPTS], [0] * len(PROMPTS)
    for _ in range(steps):
        spans = []
        for s, (text, at, kind, adapter) in enumerate(
            zip(texts, fed, (Greedy(), drawn, Greedy()), adapters, strict=True)
        ):
            tokens, output = np.array(text[at:], np.int32), OutputSpec(Positions.LAST, kind)
            spans.append(Span(first + s, tokens, at, output, create=at == 0, adapter=adapter))
        for s, columns in enumerate(answered(runner, *spans)):
            fed[s] = len(texts[s])
            texts[s].append(int(columns["token_ids"][0]))
    return texts
