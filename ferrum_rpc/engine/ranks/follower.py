"""A rank other than rank 0: it carries out rank 0's requests in order, until the connection ends.

One thread reads requests and carries out at once those that end a wait, one sends heartbeats, and the caller's thread
carries out all others. A failure is reported, and all requests up to the next `renew` are skipped; rank 0 restores
state after that.

The accepted requests depend on the phase of the start. Each phase is a class with its state, whose methods without an
underscore are the requests: `Started`, `Prepared` (the choices are made), `WithWeights` (weights and groups), `Working`
(the cache).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final, cast

import torch
from torch.distributed import Store

from ferrum_rpc.attention.geometry import BatchGeometry, Int64Array
from ferrum_rpc.core import Rows
from ferrum_rpc.distributed.group import GroupAborted
from ferrum_rpc.engine.adapters import Adapters
from ferrum_rpc.engine.assembly.choose import Choices, choose
from ferrum_rpc.engine.channel import Channel
from ferrum_rpc.engine.compute import AdaptedRows, clear_frames
from ferrum_rpc.engine.cuda.select import record_on_ranks, stage_compute
from ferrum_rpc.engine.memory import used_memory
from ferrum_rpc.engine.ranks.images import FollowingImages
from ferrum_rpc.engine.ranks.messages import ABORT, END, END_S, HEARTBEAT_S
from ferrum_rpc.engine.ranks.placing import cuda_devices
from ferrum_rpc.engine.ranks.setup import CUDA, Groups, Setup, make_cache, make_slots
from ferrum_rpc.engine.ranks.states import FollowingSlots, StepNumbers
from ferrum_rpc.errors import DeviceLost, ExecutorError, StepFailed
from ferrum_rpc.kv.store import Saved
from ferrum_rpc.models.base import Model
from ferrum_rpc.models.lora import AdaptableModel
from ferrum_rpc.sampling.rows import RowRequest

Stage = Callable[[str], None]


AFTER_FAILURE: Final = ("halt", "renew", "adapter", "states", "images", "cache")
"""Requests that a rank carries out even after a failure. Those for adapters are independent of steps, and those for
states and their images are of slots whose content the failed step did not change. Blocks of the cache that are written
are of no step, or are new to a step that is undone."""


class Follower:
    """Rank ``number``. ``stage`` is called with ``plan``, ``forward`` and ``select`` before each of these, and may
    raise, for tests and failpoints. Groups are joined through ``store``. The current ``phase`` carries out rank 0's
    requests; a phase that a request returns is the next one."""

    def __init__(self, channel: Channel, number: int, store: Store, stage: Stage | None = None) -> None:
        self._channel, self._number = channel, number
        self.store, self.reach = store, stage or (lambda _: None)
        self.groups: Groups | None = None
        self.device = torch.device("cpu")
        self.phase: Phase = Started(self)
        self.failed = False
        self.epoch = 0
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._ended = threading.Event()
        self._why = ""

    def run(self) -> str:
        """Run until rank 0 ends this rank, or is gone. Returns the error, if any."""
        threads = [threading.Thread(target=each, daemon=True) for each in (self._listen, self._send_heartbeats)]
        for thread in threads:
            thread.start()
        try:
            with torch.inference_mode():
                while (message := self._queue.get()) is not None:
                    self._obey(*message)
        finally:
            self._ended.set()
            for thread in threads:  # the threads must end before the interpreter
                thread.join(END_S)
            if self.groups is not None:
                self.groups.close()
            self._channel.close()
        return self._why

    def _obey(self, serial: int, answering: Sequence[int], method: str, arguments: tuple[Any, ...]) -> None:
        """Carry out a request, and answer if this rank is to answer."""
        answers = self._number in answering
        answer: Any = None
        if self.failed and method not in AFTER_FAILURE:
            answer = GroupAborted("a step before it failed")
        else:
            try:
                answer = getattr(self.phase, method)(*arguments)
            except (torch.AcceleratorError, DeviceLost):  # what follows would be wrong: rank 0 notices that this ends
                raise
            except Exception as error:
                clear_frames(error)  # the answer refers to them, and this frame to the answer
                answer = error
                self.failed = True
                self._abort()
                if not isinstance(error, GroupAborted) and not answers:
                    self._report("failed", method, f"{type(error).__name__}: {error}", self.epoch)
        if isinstance(answer, Phase):
            self.phase, answer = answer, answer.facts
        if answers:
            self._report("answer", serial, answer)

    def _abort(self) -> None:
        if self.groups is not None:
            self.groups.abort()

    def _report(self, *message: Any) -> None:
        with contextlib.suppress(OSError):  # rank 0 is gone, as `_listen` reads
            self._channel.send(message)

    def _listen(self) -> None:
        try:
            while (message := self._channel.receive())[2] != END:
                if message[2] == ABORT:
                    self._abort()
                else:
                    self._queue.put(message)
            [self._why] = message[3]
        except (EOFError, OSError):
            self._why = "rank 0 is gone"
            self._abort()
        self._queue.put(None)

    def _send_heartbeats(self) -> None:
        while not self._ended.wait(HEARTBEAT_S):
            self._report("heartbeat", *used_memory(self.device))


class Phase:
    """A phase of a rank's start. ``facts``: the answer to the request that led here."""

    facts: Any = None


class Started(Phase):
    """The process runs, without any choices."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower

    def devices(self) -> list[str]:
        """The CUDA devices that this process sees."""
        return cuda_devices()

    def prepare(self, setup: Setup) -> Phase:
        """Make the choices for its part."""
        if threading.current_thread() is threading.main_thread():  # this process is ours
            torch.set_num_threads(setup.threads)
        self._follower.device = device = setup.device
        if device.type == CUDA:  # Triton launches on the current device of its thread, whatever tensors it is given
            torch.cuda.set_device(device)
        return Prepared(self._follower, setup, choose(setup.settings, rank=setup.number, device=device))


@dataclass(slots=True, eq=False)
class Prepared(Phase):
    """The choices for its part are made."""

    follower: Follower
    setup: Setup
    choices: Choices

    def load(self) -> Phase:
        """Join the groups, and read its part of the weights."""
        self.follower.groups = groups = Groups(self.setup, self.follower.store)
        model, _ = self.choices.load(None, groups.parallel(self.setup))
        return WithWeights(self.follower, self.setup, self.choices, groups, model)


@dataclass(slots=True, eq=False)
class WithWeights(Phase):
    """Its part of the weights is loaded, and its groups are joined."""

    follower: Follower
    setup: Setup
    choices: Choices
    groups: Groups
    model: Model

    def equip(self, blocks: int, block_size: int, slots: int) -> Phase:
        """Make the cache, with ``slots`` for recurrent states. Returns the bytes of a block."""
        return Working(self, blocks, block_size, slots)


class Working(Phase):
    """It computes its part of each step."""

    def __init__(self, loaded: WithWeights, blocks: int, block_size: int, slots: int) -> None:
        self._follower, self._setup, self._groups = loaded.follower, loaded.setup, loaded.groups
        self._reach = loaded.follower.reach
        self.model = loaded.model
        self.kv, attention = make_cache(loaded.choices, self.model, blocks, block_size)
        part = self._groups.part(self._setup, self.model.info("").vocab_size)
        self.compute = stage_compute(self.model, attention, part=part)
        self.facts = self.kv.block_bytes
        made = make_slots(loaded.choices, slots)
        self.slots = None if made is None else FollowingSlots(made)
        self._images = None if self.slots is None else FollowingImages(self.slots)
        self._adapters: Adapters | None = None
        self._saved: dict[int, Saved] = {}

    def take_adapters(self, fingerprint: bytes) -> None:
        """Prepare for adapters of the model with this fingerprint."""
        settings = self._setup.settings
        assert settings.adapter_dir is not None  # noqa: S101 - or not asked
        limits = settings.max_adapter_rank, settings.adapter_memory
        _, self.compute.loras = cast(AdaptableModel, self.model).take_adapters(limits[0])
        self._adapters = Adapters(settings.adapter_dir, self.compute.loras, fingerprint, *limits)

    def adapter(self, method: str, *arguments: Any) -> Any:
        """Call a method of `Adapters`. Its error is an answer and does not fail a step."""
        try:
            if method == "read":
                self._reach("adapter")
            return getattr(self._adapters, method)(*arguments)
        except ExecutorError as error:
            return error
        except Exception as error:
            self.compute.recover()
            why = getattr(error, "strerror", None) or type(error).__name__
            return StepFailed(f"the load of an adapter failed ({why}); nothing changed")

    def record(self, *limits: int) -> None:
        """Capture steps together with all ranks; see `record_on_ranks`."""
        record_on_ranks(self.compute, *limits)

    def halt(self) -> None:
        """Answer once no step is in progress here."""

    def renew(self, epoch: int, masks: Sequence[tuple[bytes, bytes]]) -> None:
        """Clear a failure, and set exactly these ``masks``."""
        self.compute.forget_graphs()
        self._groups.renew(epoch)
        self.compute.recover()
        self.compute.masks.replace(masks)
        self._follower.failed, self._follower.epoch = False, epoch

    def step(
        self,
        packed: Int64Array,
        geometry: BatchGeometry,
        requests: Sequence[RowRequest],
        adapted: Sequence[AdaptedRows],
        numbers: StepNumbers | None,
    ) -> list[Rows] | None:
        """Compute its part of a step and of the requested rows. Returns the rows if its stage has them."""
        rows = None
        self._reach("plan")
        states = self.slots.begin(numbers) if self.slots is not None and numbers is not None else None
        self._reach("forward")
        hidden = self.compute.run(packed, geometry, self.compute.adapters_at(adapted, len(packed)), states=states)
        if requests and self._setup.shard.last:
            self._reach("select")
            rows = self.compute.rows(hidden, requests)
        self.compute.mark().wait()  # an error of the device fails this step
        self._groups.check()
        return rows

    def change_masks(self, added: Sequence[tuple[bytes, bytes]], dropped: Sequence[bytes]) -> None:
        """See `Masks.change`."""
        self.compute.change_masks(added, dropped)

    def save(self, number: int, slots: Int64Array) -> None:
        """See `KvStore.save`. As many are kept as steps may be in flight."""
        self._saved[number] = self.kv.save(slots)
        while len(self._saved) > self._setup.settings.pipeline_parallel:
            del self._saved[min(self._saved)]

    def restore(self, number: int) -> None:
        """See `KvStore.restore`; does nothing if the step had not arrived yet."""
        if (saved := self._saved.pop(number, None)) is not None:
            self.kv.restore(saved)

    def states(self, method: str, *arguments: Any) -> None:
        """Do what a method of `FollowingSlots` does. Raises DeviceLost if it fails, for rank 0 relies on the content of
        the slots."""
        try:
            getattr(self.slots, method)(*arguments)
        except Exception as error:
            raise DeviceLost(f"a slot for recurrent states could not be changed ({type(error).__name__})") from error

    def images(self, method: str, *arguments: Any) -> Any:
        """Do what a method of `FollowingImages` does. Its error is an answer and does not fail a step."""
        try:
            if method != "close":
                self._reach("images")
            return getattr(self._images, method)(*arguments)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            return StepFailed(f"states could not be moved ({type(error).__name__}); nothing changed")

    def cache(self, method: str, *arguments: Any) -> Any:
        """Do what a method of `KvStore` does, after a failed step too: what is imported meanwhile, or comes from the
        second tier, is of no step. Raises DeviceLost if a write fails, for rank 0 relies on the content of the blocks
        and waits for no answer."""
        try:
            return getattr(self.kv, method)(*arguments)
        except Exception as error:
            if not method.startswith("write"):
                raise
            raise DeviceLost(f"blocks of the cache could not be written ({type(error).__name__})") from error
