"""Returned rows: blocks of packed columns, and the part of a block that answers one span."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy.typing as npt


class RowKind(enum.Enum):
    """What a block of rows holds. ``field``: the contract's name of the kind. ``columns``: the contract's names of its
    tensors; the first ``required`` of them are always there, each of the others if it was requested."""

    TOKENS = ("tokens", ("token_ids", "logprobs", "top_token_ids", "top_logprobs", "selected_logprobs"), 1)
    """Chosen or scored tokens: ``token_ids`` uint32 [R]; ``logprobs`` float32 [R] of them; ``top_token_ids`` uint32
    [R, k] and ``top_logprobs`` float32 [R, k] of the k best; ``selected_logprobs`` float32 [R, n] of n ids."""
    TOP_TOKENS = ("top_tokens", ("token_ids", "logits", "logsumexp"), 3)
    """``token_ids`` uint32 [R, k], ``logits`` float32 [R, k], ``logsumexp`` float32 [R]."""
    SELECTED_TOKENS = ("selected_tokens", ("logits", "logsumexp"), 2)
    """``logits`` float32 [R, n] of the n requested ids, ``logsumexp`` float32 [R]."""
    LOGITS = ("logits", ("logits",), 1)
    """``logits`` [R, V]: float32, float16, or bfloat16 as raw uint16 (numpy has no bfloat16)."""

    HIDDEN_STATES = ("hidden_states", ("hidden_states",), 1)
    """``hidden_states`` [R, hidden size], of the types of ``logits``."""

    def __init__(self, field: str, columns: tuple[str, ...], required: int) -> None:
        self.field = field
        self.columns = columns
        self.required = required


@dataclass(frozen=True, slots=True, eq=False)
class RowBlock:
    """Rows of one kind from one step, packed: spans that requested the same kind share the block. ``columns``:
    C-ordered arrays of R rows each, by name, in the order of the kind; those that are optional may be missing.
    ``nbytes``: the bytes of all rows, which every one of its spans asks for."""

    kind: RowKind
    columns: dict[str, npt.NDArray[Any]]
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", sum([column.nbytes for column in self.columns.values()]))  # it is frozen

    @classmethod
    def of(cls, kind: RowKind, *arrays: npt.NDArray[Any]) -> RowBlock:
        """A block of the kind's first columns, in their order."""
        return cls(kind, dict(zip(kind.columns, arrays, strict=False)))

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self.columns[name]

    @property
    def rows(self) -> int:
        """R."""
        return len(self.columns[self.kind.columns[0]])

    def bytes_of(self, count: int) -> int:
        """Bytes of so many of its rows."""
        return self.nbytes // self.rows * count

    def between(self, first: int, last: int) -> RowBlock:
        """A view of the rows ``first .. last``."""
        return RowBlock(self.kind, {name: column[first:last] for name, column in self.columns.items()})

    def cut(self, first: int, last: int) -> RowBlock:
        """A copy of the rows ``first .. last``."""
        return RowBlock(self.kind, {name: column[first:last].copy() for name, column in self.columns.items()})


class Rows(NamedTuple):
    """The rows ``first .. first + count`` of a block: the answer to one span."""

    block: RowBlock
    first: int
    count: int  # type: ignore[assignment] # in place of the method of tuples

    @property
    def nbytes(self) -> int:
        """Bytes of these rows."""
        return self.block.bytes_of(self.count)

    def detached(self) -> Rows:
        """A copy of these rows, in a block of their own."""
        return Rows(self.block.cut(self.first, self.first + self.count), 0, self.count)
