"""States that move, of a model shared by ranks: images are those of one rank, whatever the number of ranks.

Each rank has a snapshot of its own slot. What changes slots runs on all ranks in the same order, so every snapshot is
of the same content. Rank 0 puts the rows of ranks together as the whole model has them, and cuts those that arrive.

A snapshot has one count of folded tokens for each layer. After a failed step ranks may have different counts, until
the next step of the sequence. Such a slot has no image: the tokens since the checkpoint are fed again elsewhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ferrum_rpc.attention.recurrent import RecurrentSlot
from ferrum_rpc.core import StateLengths, StateRows, StateTensors
from ferrum_rpc.engine.ranks.leader import Answer, Ranks
from ferrum_rpc.engine.ranks.states import FollowingSlots, SlotNumbers
from ferrum_rpc.engine.state_images import Content, SlotImages, SlotSnapshot, Snapshot, write_rows
from ferrum_rpc.models.matrices import Channels
from ferrum_rpc.models.parts.recurrent import convolved
from ferrum_rpc.models.shard import Shard


class RowsOfRanks:
    """How so many ``ranks`` share rows of these ``tensors``: whole rows of states, and of all others some columns."""

    def __init__(self, tensors: StateTensors, ranks: int) -> None:
        shape = tensors.shape
        self._heads, self._each = shape.value_heads, shape.value_heads // ranks
        gates = Channels(shape.value_heads), Channels(shape.value_heads)
        parts: dict[str, tuple[Channels, ...]] = {"channels": convolved(shape), "gates": gates}
        shards = [Shard(rank, ranks) for rank in range(ranks)]
        self._columns = {name: [_columns(each, shard) for shard in shards] for name, each in parts.items()}
        self._width = {name: sum(each.size for each in rows) for name, rows in parts.items()}

    def of(self, rank: int, rows: StateRows) -> StateRows:
        """Those of them of which the rank has a part, as rows of its own."""
        if rows.tensor != "states":
            return rows
        first, last = (self._heads_before(rank, each) for each in (rows.first, rows.first + rows.rows))
        return rows._replace(first=first, rows=last - first)

    def cut(self, rank: int, rows: StateRows, content: Content) -> bytes:
        """The rank's part of their ``content``."""
        whole = content.reshape(rows.rows, -1)
        if rows.tensor == "states":
            part: Content = whole[self._own_heads(rank, rows)]
        else:
            part = np.concatenate([whole[:, each] for each in self._bytes(rank, rows.tensor, whole.shape[1])], 1)
        return part.tobytes()

    def join(self, rows: StateRows, row_bytes: int, parts: Mapping[int, Content]) -> Content:
        """The rows, of the ``parts`` of the ranks that have any. Where ranks have the same, the last one's count."""
        joined = np.empty((rows.rows, row_bytes), np.uint8)
        for rank, part in parts.items():
            if rows.tensor == "states":
                joined[self._own_heads(rank, rows)] = part.reshape(-1, row_bytes)
                continue
            own, behind = part.reshape(rows.rows, -1), 0
            for place in self._bytes(rank, rows.tensor, row_bytes):
                count = place.stop - place.start
                joined[:, place] = own[:, behind : behind + count]
                behind += count
        return joined.reshape(-1)

    def _own_heads(self, rank: int, rows: StateRows) -> npt.NDArray[np.bool_]:
        own: npt.NDArray[np.bool_] = np.arange(rows.first, rows.first + rows.rows) % self._heads // self._each == rank
        return own

    def _bytes(self, rank: int, tensor: str, row_bytes: int) -> list[slice]:
        """Of a row of the whole model, what the rank has, in its own order."""
        size = row_bytes // self._width[tensor]
        return [slice(first * size, end * size) for first, end in self._columns[tensor][rank]]

    def _heads_before(self, rank: int, row: int) -> int:
        layer, head = divmod(row, self._heads)
        return layer * self._each + min(max(head - rank * self._each, 0), self._each)


def _columns(parts: Sequence[Channels], shard: Shard) -> list[tuple[int, int]]:
    """Which columns a rank has of parts that lie side by side, in its own order: the first ones, and the ends."""
    columns, behind = list[tuple[int, int]](), 0
    for part in parts:
        first, end = shard.share(part)
        columns.append((behind + first, behind + end))
        behind += part.size
    return columns


class RankedSnapshot(Snapshot):
    """Snapshots of a slot on all ranks: this one's ``own``, and on the others those of this ``number``."""

    def __init__(self, own: SlotSnapshot, number: int, images: RankedImages) -> None:
        self.lengths = own.lengths
        self._own, self._number, self._images = own, number, images

    def read(self, rows: StateRows) -> Content:
        if rows.tensor == "lengths":
            return self._own.read(rows)
        return self._images.read(self._own, self._number, rows)

    def close(self) -> None:
        self._own.close()
        self._images.close(self._number)


class RankedImages(SlotImages):
    """Images on rank 0."""

    def __init__(self, tensors: StateTensors, *, ranks: Ranks, shard: Shard) -> None:
        super().__init__(tensors)
        self._ranks, self._count = ranks, shard.ranks
        self._rows = RowsOfRanks(tensors, shard.ranks)
        self._numbers = itertools.count(1)

    def snapshot(self, slot: RecurrentSlot) -> Snapshot | None:
        number = next(self._numbers)
        try:
            others = self._ranks.ask("images", "hold", number, SlotNumbers(slot.number, slot.length, slot.floor))
        except BaseException:
            self.close(number)  # others than the rank that failed have one
            raise
        made = RankedSnapshot(SlotSnapshot(slot), number, self)
        if all(each == made.lengths for each in others):
            return made
        made.close()
        return None

    def read(self, own: SlotSnapshot, number: int, rows: StateRows) -> Content:
        """Rows of the snapshots of this number."""
        parts = self._parts(rows)
        answers = [
            self._ranks.order("images", "read", number, part, to=[rank])[0] for rank, part in parts.items() if rank
        ]
        found = [own.read(parts[0])] if 0 in parts else []
        found += self._ranks.collect(answers)
        return self._rows.join(rows, self.row_bytes[rows.tensor], dict(zip(parts, found, strict=True)))

    def close(self, number: int) -> None:
        """The others' snapshots of this number are not read any more."""
        self._ranks.send("images", "close", number)

    def write(self, slot: RecurrentSlot, lengths: StateLengths, rows: StateRows, data: Content | bytes) -> None:
        content, answers = np.frombuffer(data, np.uint8), list[Answer]()
        if len(content) != (size := rows.rows * self.row_bytes[rows.tensor]):
            raise ValueError(f"{rows.rows} rows of {rows.tensor} have {size} bytes, not {len(content)}")
        for rank, part in self._parts(rows).items():
            own = self._rows.cut(rank, rows, content)
            if rank:
                answers += self._ranks.order("images", "write", slot.number, lengths, part, own, to=[rank])
            else:
                super().write(slot, lengths, part, own)
        self._ranks.collect(answers)

    def _parts(self, rows: StateRows) -> dict[int, StateRows]:
        """Which rows each rank has of these, if any."""
        parts = {rank: self._rows.of(rank, rows) for rank in range(self._count)}
        return {rank: part for rank, part in parts.items() if part.rows}


class FollowingImages:
    """Images of the ``slots`` of another rank."""

    def __init__(self, slots: FollowingSlots) -> None:
        self._slots = slots
        self._held: dict[int, SlotSnapshot] = {}

    def hold(self, number: int, slot: SlotNumbers) -> StateLengths:
        """Keep what a slot has now for `read`, until `close`. Returns its lengths here."""
        self._held[number] = made = SlotSnapshot(self._slots.slot(slot))
        return made.lengths

    def read(self, number: int, rows: StateRows) -> Content:
        """Rows of its own."""
        return self._held[number].read(rows)

    def close(self, number: int) -> None:
        """It is not read any more. Does nothing if it is not there."""
        if (held := self._held.pop(number, None)) is not None:
            held.close()

    def write(self, slot: int, lengths: StateLengths, rows: StateRows, data: bytes) -> None:
        """See `write_rows`."""
        write_rows(self._slots.store.slots[slot], lengths, rows, data)
