"""What an engine can be asked for between steps, as commands that can be sent to where the runner is.

`Operations` is the one list of them: a runner has these methods, and a `Command` takes one with its arguments. So a
type checker holds both ends to the same signatures, in a thread and in a process of the engine's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar, TypeVarTuple

import numpy as np
import numpy.typing as npt

from ferrum_rpc.core import AdapterFacts, BlockChange, Grammar, MovedStates, PrefixUse, StateRows, TokenArray

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


class Operations(Protocol):
    """What a runner does to its cache between steps; see `Command`. All of them raise `DeviceLost` where the device is
    gone, and `StepFailed` where something unexpected was undone."""

    def truncate(self, sequence: int, length: int) -> int:
        """Roll back to ``length``; returns it. Raises `TruncateBeyondLength`."""

    def fork(self, parent: int, children: Sequence[int], at: int | None) -> int:
        """Make ``children`` of the first ``at`` tokens of ``parent``, all or none; returns their length."""

    def reserve(self, sequence: int, tokens: int) -> None:
        """Promise blocks for the next ``tokens`` tokens. Raises `KvBlocksExhausted`."""

    def release(self, sequences: Sequence[int]) -> int:
        """Free sequences, imports that are not committed among them. Returns how many blocks are free now that were
        not."""

    def forget_prefixes(self) -> None:
        """Find nothing any more of what was seen so far."""

    def fetch_prefix(self, sequence: int, start: int, prompt: TokenArray, prefix: PrefixUse | None) -> int:
        """Bring a piece of what the second tier has for ``prompt``, which a step is to write behind the first ``start``
        tokens of ``sequence`` or of a fork of it, to where the step finds it. Returns how many blocks; 0: it has no
        more. If the model keeps states, call `fetch_states` first."""

    def fetch_window(self, sequence: int, start: int) -> int:
        """As `fetch_prefix`, of the tokens of ``sequence`` itself that lie behind its window and are needed for a span
        of it, or of a fork, that begins at ``start``."""

    def fetch_states(self, sequence: int, start: int, prompt: TokenArray, prefix: PrefixUse | None) -> bool:
        """Bring a piece of the last checkpoint that the second tier has for ``prompt`` to where the step finds it; see
        `fetch_prefix`. False: nothing more comes."""

    def watch_prefixes(self) -> list[BlockChange]:
        """What the prefix cache has. From now on changes are kept, for `prefix_changes`."""

    def prefix_changes(self) -> list[BlockChange] | None:
        """What has changed there since it was asked last, in its order. None: not known, watch again."""

    def change_masks(self, added: Sequence[tuple[bytes, bytes]], dropped: Sequence[bytes]) -> None:
        """Keep the token masks ``added``, by id and words, and forget others."""

    def change_grammars(self, added: Sequence[tuple[bytes, Grammar]], dropped: Sequence[bytes]) -> None:
        """Begin to compile the grammars ``added``, by key, and end others."""

    def grammar_compiled(self, key: bytes) -> bool:
        """Whether a grammar is compiled. Raises `GrammarTooComplex`, and `InvalidRequest` for one that is invalid."""

    def open_adapter(self, number: int, name: str) -> AdapterFacts:
        """Begin to load the adapter in the folder ``name``. Raises `AdapterUnknown`, `SequencesExhausted` for want of
        memory, and InvalidRequest and NotSupported for files that are not right."""

    def find_adapter(self, name: str) -> None:
        """Raises what `open_adapter` would of its files."""

    def read_adapter(self, number: int) -> bytes | None:
        """Read a piece of an adapter that was opened. The last answer is the fingerprint of the model with it."""

    def drop_adapter(self, number: int) -> None:
        """No sequence uses it, and none will."""

    def token_ids(self, sequence: int) -> TokenArray:
        """The tokens of ``sequence``, int32 [length]."""

    def imported_from(self, sequence: int) -> int | None:
        """The position from which on its content is imported; None: it was computed."""

    def begin_export(self, sequence: int, copy: int) -> None:
        """Make ``copy`` of ``sequence``, to be read. It shares its blocks, and has its states as `hold_states` does."""

    def hold_states(self, sequence: int, number: int) -> None:
        """Keep what moves of the recurrent states of ``sequence`` as it is now, under ``number``, until `close_states`
        or a release of that number. It takes no slot; it is copied where a step changes it."""

    def close_states(self, number: int) -> None:
        """They are not read any more."""

    def state_lengths(self, number: int) -> MovedStates:
        """The lengths of states that are held."""

    def read_states(self, number: int, rows: Sequence[StateRows]) -> list[npt.NDArray[np.uint8]]:
        """Some rows of states that are held, uint8 [bytes] each."""

    def feed_again(self, sequence: int, adapter: int) -> int:
        """Feed a piece of what ``sequence`` lacks of its cache because it went back behind its window, with the adapter
        of this number. Returns how much is missing still. Raises `KvBlocksExhausted`."""

    def held_from(self, sequence: int) -> int:
        """The first position of ``sequence`` whose cache it has: it needs none before it."""

    def read_kv(
        self, sequence: int, start: int, end: int, layers: Sequence[int]
    ) -> list[tuple[npt.NDArray[np.uint8], ...]]:
        """The cache of the positions ``start .. end``, by layer."""

    def begin_import(
        self, sequence: int, tokens: TokenArray, sent_from: int, ahead: int, prefix: PrefixUse | None
    ) -> int:
        """Take the blocks of a sequence that is to have ``tokens``, and of ``ahead`` tokens more, and a slot if the
        model keeps states. Returns how many of the tokens the prefix cache has, or are behind the window; `write_kv`
        brings the rest. ``sent_from``: the first token that it can bring. Raises `KvBlocksExhausted`."""

    def write_kv(self, sequence: int, start: int, end: int, layer: int, parts: Sequence[Any]) -> None:
        """Write the cache of the positions ``start .. end`` of an import: what `read_kv` returned of the layer."""

    def write_states(self, sequence: int, moved: MovedStates, pieces: Sequence[tuple[StateRows, Any]]) -> None:
        """Write rows of the states of an import, each with what `read_states` returned. ``moved``: lengths of the
        images that they are of. A checkpoint may be dropped, and then the import has none."""

    def commit_import(self, sequence: int, moved: MovedStates = ...) -> int:
        """All of its cache was written, and all rows of the states ``moved``, if the model keeps any: it is a sequence
        like others. Returns its length."""


class Command(Generic[Result]):
    """``operation``, one of `Operations`, with its arguments; ``method`` is its name. Can be pickled."""

    __slots__ = ("_arguments", "method")

    def __init__(self, operation: Callable[[Any, *Arguments], Result], *arguments: *Arguments) -> None:
        self.method: str = operation.__name__
        self._arguments = arguments

    def __call__(self, runner: Any) -> Result:
        """Do it."""
        result: Result = getattr(runner, self.method)(*self._arguments)
        return result
