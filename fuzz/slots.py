"""Sequences in memory that processes forked from one another share.

What goes through a pipe is then small: it never has to wait for a reader that is busy, or stuck.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field

import numpy as np

from fuzz.sequences import Sequences

SIZE = 32 * 2**20
ALIGNED = 64


@dataclass(frozen=True, slots=True)
class Place:
    """Where sequences lie: a slot, and of each array its name, dtype, shape and offset."""

    slot: int
    arrays: tuple[tuple[str, str, tuple[int, ...], int], ...]


class TooLarge(Exception):
    """Sequences that do not fit into a slot."""


@dataclass(slots=True)
class Slots:
    """`count` slots of `size` bytes, of which only what is written to takes memory. The process
    that made them says which are free."""

    count: int
    size: int = SIZE
    memory: mmap.mmap = field(init=False)
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.memory = mmap.mmap(-1, self.count * self.size)
        self.free = list(range(self.count))

    def put(self, slot: int, sequences: Sequences) -> Place:
        """Copies the sequences into a slot. Raises TooLarge."""
        arrays = {"/q": sequences.seqlen_q, "/k": sequences.seqlen_k, **sequences.tables}
        placed, at = [], 0
        for name, array in arrays.items():
            if at + array.nbytes > self.size:
                raise TooLarge(f"{len(sequences)} sequences do not fit into {self.size} bytes")
            placed.append((name, array.dtype.str, array.shape, slot * self.size + at))
            at += -(-array.nbytes // ALIGNED) * ALIGNED
        place = Place(slot, tuple(placed))
        for array, there in zip(arrays.values(), self._views(place).values(), strict=True):
            there[...] = array
        return place

    def get(self, place: Place) -> Sequences:
        """The sequences themselves, not copies: they last until the slot is used again."""
        views = self._views(place)
        return Sequences(views.pop("/q"), views.pop("/k"), views)

    def _views(self, place: Place) -> dict[str, np.ndarray]:
        return {
            name: np.frombuffer(self.memory, dtype, int(np.prod(shape)), offset).reshape(shape)
            for name, dtype, shape, offset in place.arrays
        }
