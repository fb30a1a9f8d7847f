"""The life of a rank that is not the first: it does what rank 0 says, in that order, until there is no rank 0.

One thread reads what comes and does at once what ends a wait, one says that the process lives, and the caller's does
all the rest. What fails is told, and everything up to the next `renew` is skipped: what rank 0 then puts back stands
behind it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from ferrum_rpc.attention.geometry import BatchGeometry, Int64Array
from ferrum_rpc.core import Rows
from ferrum_rpc.distributed.group import GroupAborted
from ferrum_rpc.engine.adapters import Adapters
from ferrum_rpc.engine.assembly.choose import Choices, choose
from ferrum_rpc.engine.compute import AdaptedRows, Compute
from ferrum_rpc.engine.cuda.select import record_on_ranks, stage_compute
from ferrum_rpc.engine.memory import used_memory
from ferrum_rpc.engine.ranks.compute import at_hand
from ferrum_rpc.engine.ranks.messages import ABORT, BEAT_S, END, END_S, Channel
from ferrum_rpc.engine.ranks.placing import CUDA, cuda_devices
from ferrum_rpc.engine.ranks.setup import Groups, Setup, make_cache
from ferrum_rpc.errors import ExecutorError, StepFailed
from ferrum_rpc.kv.store import KvStore, Saved
from ferrum_rpc.models.base import Model
from ferrum_rpc.models.lora import AdaptableModel
from ferrum_rpc.sampling.rows import RowRequest

Stage = Callable[[str], None]


AFTER_FAILURE: Final = ("halt", "renew", "adapter")
"""What a rank does though something failed. What is done of an adapter has nothing to do with any step."""


class Follower:
    """Its methods without an underscore are what rank 0 may ask for. ``stage`` is called with ``plan``, ``forward`` and
    ``select`` before it does that, and may raise, for tests and failpoints. ``store`` is where groups are joined."""

    def __init__(self, line: Channel, store: Store, stage: Stage | None = None) -> None:
        self._line, self._rendezvous, self._stage = line, store, stage
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._failed = False
        self._ended = threading.Event()
        self._groups: Groups | None = None
        self._setup: Setup | None = None
        self._choices: Choices | None = None
        self._model: Model | None = None
        self._kv: KvStore | None = None
        self._compute: Compute | None = None
        self._adapters: Adapters | None = None
        self._saved: dict[int, Saved] = {}
        self._depth = 1
        self._epoch = 0
        self._why = ""
        self._device = torch.device("cpu")

    def run(self) -> str:
        """Until rank 0 ends this, or is gone. Returns what went wrong, if anything did."""
        threads = [threading.Thread(target=each, daemon=True) for each in (self._listen, self._beat)]
        for thread in threads:
            thread.start()
        try:
            with torch.inference_mode():
                while (message := self._queue.get()) is not None:
                    self._obey(*message)
        finally:
            self._ended.set()
            for thread in threads:  # the interpreter must not end under them
                thread.join(END_S)
            if self._groups is not None:
                self._groups.close()
            self._line.close()
        return self._why

    # --- what rank 0 asks for ---------------------------------------------------------------------------------------

    def devices(self) -> list[str]:
        """The CUDA devices that this process sees."""
        return cuda_devices()

    def prepare(self, setup: Setup) -> None:
        """Choose how its part is computed."""
        if threading.current_thread() is threading.main_thread():  # this process is ours
            torch.set_num_threads(setup.threads)
        if setup.settings.device == CUDA:
            self._device = torch.device(CUDA, setup.seat % torch.cuda.device_count())
            torch.cuda.set_device(self._device)
        self._setup, self._depth = setup, setup.settings.pipeline_parallel
        self._choices = choose(setup.settings, rank=setup.number)

    def load(self) -> None:
        """Find the others, and read its part of the weights."""
        assert self._choices is not None and self._setup is not None  # noqa: S101 - prepared before
        self._groups = Groups(self._setup, self._rendezvous)
        self._model, _ = self._choices.load(None, self._groups.parallel(self._setup))

    def equip(self, blocks: int, block_size: int) -> int:
        """Make the cache. Returns the bytes of a block."""
        assert self._choices is not None and self._model is not None  # noqa: S101 - set up before
        assert self._setup is not None and self._groups is not None  # noqa: S101
        self._kv, attention = make_cache(self._choices, self._model, blocks, block_size)
        part = self._groups.part(self._setup, self._model.info("").vocab_size)
        self._compute = stage_compute(self._model, attention, part=part)
        return self._kv.block_bytes

    def take_adapters(self, fingerprint: bytes) -> None:
        """Be ready for adapters of the model with this fingerprint."""
        assert self._setup is not None and self._compute is not None  # noqa: S101 - equipped before
        settings = self._setup.settings
        assert settings.adapter_dir is not None  # noqa: S101 - or not asked
        _, self._compute.loras = cast(AdaptableModel, self._model).take_adapters()
        limits = settings.max_adapter_rank, settings.adapter_memory
        self._adapters = Adapters(settings.adapter_dir, self._compute.loras, fingerprint, *limits)

    def adapter(self, method: str, *arguments: Any) -> Any:
        """Do what a method of `Adapters` does. What it raises is an answer: no step has failed by it."""
        try:
            if method == "read":
                self._reach("adapter")
            return getattr(self._adapters, method)(*arguments)
        except ExecutorError as error:
            return error
        except Exception as error:
            why = getattr(error, "strerror", None) or type(error).__name__
            return StepFailed(f"the load of an adapter failed ({why}); nothing changed")

    def record(self, spans: int, blocks: int) -> None:
        """Record decode steps, as all ranks do at once; see `record_on_ranks`."""
        assert self._compute is not None  # noqa: S101 - equipped before
        record_on_ranks(self._compute, spans, blocks)

    def halt(self) -> None:
        """Answered once nothing is under way here."""

    def renew(self, epoch: int) -> None:
        """Forget what failed."""
        assert self._groups is not None and self._compute is not None  # noqa: S101 - there was a step
        self._compute.forget_graphs()
        self._groups.renew(epoch)
        self._failed, self._epoch = False, epoch

    def step(
        self,
        packed: Int64Array,
        geometry: BatchGeometry,
        requests: Sequence[RowRequest],
        adapted: Sequence[AdaptedRows],
    ) -> list[Rows] | None:
        """Its part of a step, and of the rows that are wanted of it; these, where its stage has them."""
        assert self._compute is not None and self._setup is not None and self._groups is not None  # noqa: S101
        rows = None
        self._reach("plan")
        self._reach("forward")
        hidden = self._compute.run(packed, geometry, self._compute.adapters_at(adapted, len(packed)))
        if requests and self._setup.shard.last:
            self._reach("select")
            rows = self._compute.rows(hidden, at_hand(requests, self._compute))
        self._compute.mark().wait()  # what fails on a device fails this step
        self._groups.check()
        return rows

    def save(self, number: int, slots: Int64Array) -> None:
        """See `KvStore.save`. As many are kept as there may be steps under way."""
        self._saved[number] = self._cache.save(self._at_hand(slots))
        while len(self._saved) > self._depth:
            del self._saved[min(self._saved)]

    def restore(self, number: int) -> None:
        """See `KvStore.restore`; nothing, where the step had not come here yet."""
        if (saved := self._saved.pop(number, None)) is not None:
            self._cache.restore(saved)

    def copy_blocks(self, pairs: Int64Array) -> None:
        """See `KvStore.copy_blocks`."""
        self._cache.copy_blocks(self._at_hand(pairs))

    def read(self, slots: Int64Array, layer: int, width: int) -> Any:
        """See `KvStore.read`."""
        return self._cache.read(self._at_hand(slots), layer, width)

    def write(self, slots: Int64Array, layer: int, width: int, parts: Any) -> None:
        """See `KvStore.write`."""
        self._cache.write(self._at_hand(slots), layer, width, parts)

    def read_block(self, block: int) -> Any:
        """See `KvStore.read_block`."""
        return self._cache.read_block(block)

    def write_block(self, block: int, content: bytes) -> None:
        """See `KvStore.write_block`."""
        self._cache.write_block(block, content)

    # --- inside -----------------------------------------------------------------------------------------------------

    @property
    def _cache(self) -> KvStore:
        assert self._kv is not None  # noqa: S101
        return self._kv

    def _at_hand(self, integers: Int64Array) -> Tensor:
        assert self._compute is not None  # noqa: S101 - equipped before
        return self._compute.to_device(integers)[0]

    def _reach(self, stage: str) -> None:
        if self._stage is not None:
            self._stage(stage)

    def _obey(self, serial: int, method: str, arguments: tuple[Any, ...]) -> None:
        """Do what was asked for, and answer where there is a ``serial``."""
        answer: Any = None
        if self._failed and method not in AFTER_FAILURE:
            answer = GroupAborted("a step before it failed")
        else:
            try:
                answer = getattr(self, method)(*arguments)
            except torch.AcceleratorError:  # every later call would fail too: rank 0 hears of this process's end
                raise
            except Exception as error:
                answer = error
                self._failed = True
                if self._groups is not None:
                    self._groups.abort()
                if not isinstance(error, GroupAborted) and not serial:
                    self._tell("failed", method, f"{type(error).__name__}: {error}", self._epoch)
        if serial:
            self._tell("answer", serial, answer)

    def _tell(self, *message: Any) -> None:
        with contextlib.suppress(OSError):  # it is gone, as `_listen` reads
            self._line.send(*message)

    def _listen(self) -> None:
        try:
            while (message := self._line.receive())[1] != END:
                if message[1] == ABORT:
                    if self._groups is not None:
                        self._groups.abort()
                else:
                    self._queue.put(message)
            [self._why] = message[2]
        except (EOFError, OSError):
            self._why = "rank 0 is gone"
            if self._groups is not None:
                self._groups.abort()
        self._queue.put(None)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            self._tell("beat", *used_memory(self._device))
