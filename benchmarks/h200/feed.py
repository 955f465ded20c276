"""Processes that draw batches and hand them over in shared memory, as those of a campaign do."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as List
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from multiprocessing.connection import Connection, wait

from fuzz.drawing import drawn
from fuzz.recipe import expand_recipe
from fuzz.sequences import Sequences as Arrays
from fuzz.sequences import for_kernel
from fuzz.slots import Place, Slots
from fuzz.strategies import MOST_ROWS, Space, recipes
from fuzz.worker import Process
from kernels.fa4 import Sequences

BLOCK, EACH = 24, 2  # recipes that are drawn together, and slots of a process


@dataclass(slots=True)
class Feed:
    """`processes` that draw batches of `count` sequences for the spaces, forked as this is made.

    Hypothesis draws recipes, which are expanded, packed and written to a slot. A batch is only
    valid until its slot is given back.
    """

    spaces: List[Space]
    count: int
    processes: int
    size: int = 16 << 20
    slots: Slots = field(init=False)
    children: list[Process] = field(init=False)
    out: dict[int, int] = field(default_factory=dict)  # child -> batches that it owes

    def __post_init__(self) -> None:
        self.slots = Slots(self.processes * EACH, self.size)
        self.children = [Process(partial(self._serve, i)) for i in range(self.processes)]

    def ask(self, which: int) -> None:
        """Has every slot filled for one space."""
        assert not self.waiting
        for i in range(self.processes):
            for j in range(EACH):
                self._ask(i, which, EACH * i + j)

    def _ask(self, i: int, which: int, slot: int) -> None:
        self.children[i].pipe.send((which, slot))
        self.out[i] = self.out.get(i, 0) + 1

    @property
    def waiting(self) -> int:
        return sum(self.out.values())

    def ready(self) -> list[tuple[int, int, int, Sequences]]:
        """Child, space, slot and sequences of batches that are drawn by now; waits for one."""
        pipes = {self.children[i].pipe: i for i, owed in self.out.items() if owed}
        found = []
        for pipe in wait(list(pipes)):
            which, place = pipe.recv()  # type: ignore[union-attr]
            i = pipes[pipe]  # type: ignore[index]
            self.out[i] -= 1
            if isinstance(place, str):
                raise RuntimeError(place)
            arrays = self.slots.get(place)
            found.append((i, which, place.slot, Sequences(
                arrays.seqlen_q, arrays.seqlen_k, arrays.tables)))
        return found

    def again(self, i: int, which: int, slot: int) -> None:
        """Gives a slot back, to be filled again."""
        self._ask(i, which, slot)

    def drain(self) -> None:
        while self.waiting:
            self.ready()

    def stop(self) -> None:
        for child in self.children:
            with suppress(ProcessLookupError):
                child.stop()

    def _serve(self, i: int, pipe: Connection) -> None:
        """In child `i`: draws what it is asked for; its numbers are its own."""
        batches = [self._batches(which, i) for which in range(len(self.spaces))]
        while True:
            try:
                which, slot = pipe.recv()
            except EOFError:
                return
            try:
                said: Place | str = self.slots.put(slot, next(batches[which]))
            except Exception as error:  # noqa: BLE001  the parent raises it
                said = f"{type(error).__name__}: {error}"
            pipe.send((which, said))

    def _batches(self, which: int, i: int) -> Iterator[Arrays]:
        space = self.spaces[which]
        for block in count():
            salt = block * self.processes + i
            for recipe in drawn(recipes(space, self.count), salt, BLOCK):
                expanded = expand_recipe(
                    replace(recipe, longest=space.longest), space.mask, constants=space.constants)
                packed = for_kernel(
                    space.mask, expanded, space.call.params, (), {"num_ranges": MOST_ROWS})
                yield Arrays(packed.seqlens_q, packed.seqlens_k, packed.tables)
