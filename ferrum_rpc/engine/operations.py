"""What a runner does to its cache between steps, in the same queue: integer operations, and cache that moves.

An operation changes everything or nothing. All but a release of other sequences wait until no step is under way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import structlog
import torch

from ferrum_rpc.attention.backend import AttentionBackend
from ferrum_rpc.core import (
    AdapterFacts,
    BlockChange,
    DeviceInfo,
    Grammar,
    ModelInfo,
    MovedStates,
    PrefixUse,
    StateRows,
    TokenArray,
)
from ferrum_rpc.device import DEVICE_ERRORS, check_device
from ferrum_rpc.engine.adapters import Adapters
from ferrum_rpc.engine.compute import Compute
from ferrum_rpc.engine.grammars.constraints import Constraints
from ferrum_rpc.engine.states import States
from ferrum_rpc.engine.step import Stage, StepRunner
from ferrum_rpc.errors import DeviceLost, ExecutorError, NotSupported, StepFailed
from ferrum_rpc.kv.manager import KvManager
from ferrum_rpc.kv.sequence import KvMisuse, Reservation
from ferrum_rpc.kv.store import KvStore
from ferrum_rpc.kv.tiers import BlockFiles
from ferrum_rpc.models.base import Model

log = structlog.get_logger("ferrum_rpc.engine")

NO_STATES: Final = MovedStates()

FETCH_BYTES: Final = 16 << 20
"""What one operation reads of the second tier, at most, but for one block: a step waits for it."""


class TorchRunner(StepRunner):
    """A `Runner`: steps of one model over one paged cache, and operations on it between them."""

    def __init__(
        self,
        model: Model,
        kv: KvManager,
        store: KvStore,
        attention: AttentionBackend,
        *,
        info: ModelInfo,
        device: DeviceInfo,
        stage: Stage | None = None,
        compute: Compute | None = None,
        depth: int = 1,
        tier: BlockFiles | None = None,
        adapters: Adapters | None = None,
        constraints: Constraints | None = None,
        states: States | None = None,
        max_tokens: int = sys.maxsize,
    ) -> None:
        compute = Compute(model, attention) if compute is None else compute
        super().__init__(
            kv,
            store,
            compute,
            stage=stage,
            depth=depth,
            tier=tier,
            constraints=constraints,
            states=states,
            max_tokens=max_tokens,
        )
        self.info = info
        self.device = device
        self.model = model
        self.attention = attention
        self._imports: dict[int, tuple[Reservation, TokenArray]] = {}
        self._adapters = adapters

    def truncate(self, sequence: int, length: int) -> int:
        with self._operation("truncate", stage="truncate"):
            self.kv.truncate(sequence, length)
            if self.states is not None:
                self.states.truncate(sequence, length)
        return length

    def fork(self, parent: int, children: Sequence[int], at: int | None) -> int:
        made: list[int] = []
        with self._operation("fork"):
            if self.states is not None:
                self.states.pool.require(len(children))
            try:
                for child in children:
                    if self._stage is not None:
                        self._stage("fork")
                    self.kv.fork(parent, child, at)
                    made.append(child)
                    if self.states is not None:
                        self.states.fork(parent, child, self.kv.length(child))
            except BaseException:
                for child in made:
                    self.kv.release(child, publish=False)
                    if self.states is not None:
                        self.states.release(child)
                if made:  # a truncation to where it stands gives back the spare that its shared block needed
                    self.kv.truncate(parent, self.kv.length(parent))
                raise
            if self.constraints is not None:
                self.constraints.fork(parent, children)
        return self.kv.length(parent) if at is None else at

    def reserve(self, sequence: int, tokens: int) -> None:
        with self._operation("reserve_kv", stage="reserve_kv"):
            self.kv.ensure_capacity(sequence, tokens)

    def release(self, sequences: Sequence[int]) -> int:
        settle = not self._taken().isdisjoint(sequences)
        with self._operation("release", stage="release", settle=settle):
            free = self.kv.free_blocks
            if self.constraints is not None:
                self.constraints.forget(sequences)
            for sequence in sequences:
                unfinished = self._imports.pop(sequence, None)
                if unfinished is None:
                    self.kv.release(sequence)
                else:
                    self.kv.rollback(unfinished[0])
                if self.states is not None:
                    self.states.release(sequence)
            return self.kv.free_blocks - free

    def forget_prefixes(self) -> None:
        with self._operation("change of the prefix cache"):
            self.kv.prefixes.forget()
            if self.states is not None:
                self.states.forget_checkpoints()
            if self._tier is not None:
                self._tier.clear()

    def fetch_prefix(self, sequence: int, start: int, prompt: TokenArray, prefix: PrefixUse | None) -> int:
        if self._tier is None:
            return 0
        with self._operation("read of the second tier"):
            reach = None
            if self.states is not None:
                reach, _ = self.kv.reach(sequence, start, prompt, prefix, self.states.has_checkpoint)
                if not reach:
                    return 0
            return self._fetch(partial(self.kv.fetch, sequence, start, prompt, prefix, reach=reach))

    def fetch_window(self, sequence: int, start: int) -> int:
        if self._tier is None:
            return 0
        with self._operation("read of the second tier"):
            return self._fetch(partial(self.kv.fetch_window, sequence, start))

    def _fetch(self, fetch: Callable[..., list[tuple[int, bytes]]]) -> int:
        """Have blocks of the second tier in the prefix cache, with their content. Returns how many."""
        try:
            fetched = fetch(max_blocks=max(1, FETCH_BYTES // self.store.block_bytes))
            self._save_leaving()
            if fetched:
                self.store.write_blocks(*zip(*fetched, strict=True))
        except BaseException:
            self.kv.prefixes.forget()  # some may lack their content
            raise
        return len(fetched)

    def fetch_states(self, sequence: int, start: int, prompt: TokenArray, prefix: PrefixUse | None) -> bool:
        states, files = self.states, self.checkpoint_files
        if states is None or files is None:
            return False
        with self._operation("read of the second tier"):
            in_memory = states.has_checkpoint
            reach, key = self.kv.reach(sequence, start, prompt, prefix, lambda each: in_memory(each) or each in files)
            return reach > 0 and not in_memory(key) and files.read(key)

    def watch_prefixes(self) -> list[BlockChange]:
        return self.kv.prefixes.watch()

    def prefix_changes(self) -> list[BlockChange] | None:
        return self.kv.prefixes.take_changes()

    def change_masks(self, added: Sequence[tuple[bytes, bytes]], dropped: Sequence[bytes]) -> None:
        with self._operation("change of masks", settle=False):
            self.compute.change_masks(added, dropped)

    def change_grammars(self, added: Sequence[tuple[bytes, Grammar]], dropped: Sequence[bytes]) -> None:
        with self._operation("change of grammars", settle=False):
            self._known_constraints.change(added, dropped)

    def grammar_compiled(self, key: bytes) -> bool:
        with self._operation("compilation of a grammar", settle=False):
            return self._known_constraints.compiled(key)

    @property
    def _known_constraints(self) -> Constraints:
        if self.constraints is None:
            raise NotSupported("the executor offers no grammars")
        return self.constraints

    def open_adapter(self, number: int, name: str) -> AdapterFacts:
        with self._operation("load of an adapter", settle=False):
            return self._known_adapters.open(number, name)

    def find_adapter(self, name: str) -> None:
        with self._operation("look for an adapter", settle=False):
            self._known_adapters.find(name)

    def read_adapter(self, number: int) -> bytes | None:
        with self._operation("load of an adapter", stage="adapter", settle=False):
            return self._known_adapters.read(number)

    def drop_adapter(self, number: int) -> None:
        with self._operation("end of an adapter"):
            self._known_adapters.drop(number)

    @property
    def _known_adapters(self) -> Adapters:
        if self._adapters is None:
            raise NotSupported("the executor has no --adapter-dir")
        return self._adapters

    # --- moving sequences, a piece at a time between steps ----------------------------------------------------------

    def token_ids(self, sequence: int) -> TokenArray:
        with self._operation("export", settle=False):
            return self.kv.tokens(sequence).copy()

    def imported_from(self, sequence: int) -> int | None:
        with self._operation("export", settle=False):
            return self.kv.imported_from(sequence)

    def begin_export(self, sequence: int, copy: int) -> None:
        with self._operation("export", stage="fork"):
            self.kv.fork(sequence, copy)
            if self.states is not None:
                try:
                    self.states.hold(sequence, copy)
                except BaseException:
                    self.kv.release(copy, publish=False)
                    raise

    def hold_states(self, sequence: int, number: int) -> None:
        with self._operation("export", stage="export"):
            self._known_states.hold(sequence, number)

    def close_states(self, number: int) -> None:
        with self._operation("export", settle=False):
            self._known_states.close(number)

    def state_lengths(self, number: int) -> MovedStates:
        with self._operation("export", settle=False):
            return self._known_states.lengths(number)

    def read_states(self, number: int, rows: Sequence[StateRows]) -> list[npt.NDArray[np.uint8]]:
        with self._operation("export", stage="export"):
            return self._known_states.read(number, rows)

    def feed_again(self, sequence: int, adapter: int) -> int:
        with self._operation("export", stage="export"):
            length, feeding = self.kv.length(sequence), self.window_feeding
            fed = feeding is not None and feeding.feed_to({sequence: (length, adapter)})
            missing = self.kv.missing(sequence, length)
            if missing and not fed:
                raise self.kv.refusal(sequence, length)
            return missing

    def held_from(self, sequence: int) -> int:
        with self._operation("export", settle=False):
            return self.kv.held_from(sequence)

    def read_kv(
        self, sequence: int, start: int, end: int, layers: Sequence[int]
    ) -> list[tuple[npt.NDArray[np.uint8], ...]]:
        with self._operation("export", stage="export", settle=False):
            slots = self.kv.slots(sequence, start, end)
            return [self.store.read(slots, layer, self.info.kv_shape(layer)[1]) for layer in layers]

    def begin_import(
        self, sequence: int, tokens: TokenArray, sent_from: int, ahead: int, prefix: PrefixUse | None
    ) -> int:
        with self._operation("import", stage="import"):
            count, reserve = len(tokens), self.kv.reserve
            taken = reserve(sequence, 0, count, True, ahead, prefix=prefix, prompt=tokens, sent_from=sent_from)
            try:
                self._save_leaving()
                if self.states is not None:
                    self.states.begin_import(sequence, taken.cached, taken.checkpoint)
            except BaseException:
                self.kv.rollback(taken)
                raise
            self._imports[sequence] = taken, tokens
        return taken.cached

    def write_kv(self, sequence: int, start: int, end: int, layer: int, parts: Sequence[Any]) -> None:
        with self._operation("import", stage="import", settle=False):
            if start < self._imports[sequence][0].cached:
                raise KvMisuse(f"position {start} is in a block of the prefix cache")
            self.store.write(self.kv.slots(sequence, start, end), layer, self.info.kv_shape(layer)[1], parts)

    def write_states(self, sequence: int, moved: MovedStates, pieces: Sequence[tuple[StateRows, Any]]) -> None:
        with self._operation("import", stage="import"):
            found = self._imports[sequence][0].cached
            for rows, data in pieces:
                self._known_states.write(sequence, found, moved, rows, data)

    def commit_import(self, sequence: int, moved: MovedStates = NO_STATES) -> int:
        with self._operation("import", stage="import"):
            taken, tokens = self._imports[sequence]
            length = self.kv.commit(taken, tokens)
            del self._imports[sequence]
            if self.states is not None:
                self.states.commit_import(sequence, taken.cached, moved)
        return length

    @property
    def _known_states(self) -> States:
        if self.states is None:
            raise NotSupported("the model keeps no states")
        return self.states

    @contextmanager
    def _operation(self, name: str, *, stage: str = "", settle: bool = True) -> Iterator[None]:
        """What an operation runs in. An unexpected error becomes `StepFailed`: the cache's calls change everything or
        nothing. ``settle``: the steps under way are finished first."""
        try:
            if settle:
                self._settle()
            if stage and self._stage is not None:
                self._stage(stage)
            yield
        except ExecutorError:
            raise
        except DEVICE_ERRORS as error:
            raise DeviceLost(f"the device failed during a {name}") from error
        except Exception as error:
            try:
                check_device()
            except torch.AcceleratorError:
                raise DeviceLost(f"the device failed during a {name}") from error
            log.exception("operation_failed", operation=name, action="report this stack trace: it is a bug")
            raise StepFailed(f"the {name} failed ({type(error).__name__}); nothing changed") from error
