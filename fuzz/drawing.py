"""Launches, drawn by processes of their own while others run them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from fuzz import recipe as recipes_of
from fuzz.backends import Capacity
from fuzz.boundaries import counts
from fuzz.case import CaseError, digest
from fuzz.recipe import Recipe, expand_recipe
from fuzz.sequences import Sequences
from fuzz.slots import Place, Slots, TooLarge
from fuzz.strategies import Space, recipes
from fuzz.worker import Process, one_line

# Recipes that Hypothesis draws at once.
BLOCK = 24
# Processes that may end, one after the other, over the same launch.
MOST_DEATHS = 3


class CannotDraw(Exception):
    """A launch that cannot be drawn, for a fault of the strategies."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The n-th launch of a campaign. `counts` says how many sequences are in each class."""

    n: int
    space: Space
    recipe: Recipe
    sequences: Sequences
    place: Place
    counts: dict[str, int]


@dataclass(slots=True)
class Plan:
    """What says which launch is the n-th: `spaces` are taken in turn, and recipes are drawn from
    `key`."""

    spaces: list[Space]
    key: str
    capacity: Capacity
    blocks: dict[tuple[int, int], list[Recipe]] = field(default_factory=dict)

    def recipe(self, n: int, known: Any = None) -> Recipe:
        """The recipe that is `known` of the n-th launch, or else the one that is drawn."""
        with suppress(CaseError):
            return recipes_of.from_json(known)
        block, item = divmod(n // len(self.spaces), BLOCK)
        which = n % len(self.spaces)
        found = self._block(which, block)
        # The first that is drawn is the plainest: not every space begins with it.
        return found[(item + which) % len(found)]

    def sequences(self, n: int, recipe: Recipe) -> Sequences:
        space = self.spaces[n % len(self.spaces)]
        return expand_recipe(
            recipe, space.mask, most_cells=self.capacity.cells, most_each=self.capacity.each,
            constants=space.constants,
        )

    def _block(self, which: int, block: int) -> list[Recipe]:
        key = which, block
        if key not in self.blocks:
            if len(self.blocks) > 2 * len(self.spaces):
                self.blocks.clear()
            salt = int(digest(f"{self.key} {which} {block}"), 16)
            strategy = recipes(self.spaces[which], self.capacity.sequences)
            self.blocks[key] = drawn(strategy, salt, BLOCK)
        return self.blocks[key]


def drawn(strategy: Any, salt: int, count: int) -> list[Any]:
    """`count` examples, the same for the same `salt`."""
    found: list[Any] = []

    @seed(salt)
    @settings(max_examples=count, database=None, deadline=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))
    @given(strategy)
    def collect(one: Any) -> None:
        found.append(one)

    collect()
    return found


@dataclass(slots=True)
class Asked:
    """A launch that was asked for: `drawn` is what is known of it so far, `deaths` counts the
    processes that ended over it."""

    n: int
    known: Any
    slot: int
    drawn: Any = None
    deaths: int = 0


@dataclass(slots=True)
class Drawers:
    """`count` processes that draw; launches come back in the order in which they were asked for.

    Each takes a slot until it is given back by `release`."""

    plan: Plan
    slots: Slots
    count: int
    asked: deque[Asked] = field(default_factory=deque)
    processes: list[Process] = field(default_factory=list)
    busy: dict[int, Asked] = field(default_factory=dict)

    @property
    def pipes(self) -> list[Connection]:
        return [self.processes[i].pipe for i in self.busy]

    def room(self) -> bool:
        """Whether a launch may be asked for now, and would be drawn at once."""
        return bool(self.slots.free) and len(self.busy) < self.count

    def ask(self, n: int, known: Any = None) -> None:
        asked = Asked(n, known, self.slots.free.pop())
        self.asked.append(asked)
        self._give(asked)

    def _give(self, asked: Asked) -> None:
        i = next(i for i in range(self.count) if i not in self.busy)
        if i == len(self.processes):
            self.processes.append(Process(self._serve))
        self.busy[i] = asked
        with suppress(BrokenPipeError, ConnectionResetError):  # `collect` sees that it is gone
            self.processes[i].pipe.send((asked.n, asked.known, asked.slot))

    def collect(self) -> None:
        """Takes what is drawn by now. Raises CannotDraw."""
        for i, asked in list(self.busy.items()):
            process = self.processes[i]
            if not process.pipe.poll():
                continue
            del self.busy[i]
            try:
                kind, asked.drawn = process.pipe.recv()
            except (EOFError, ConnectionResetError):
                asked.deaths += 1
                if asked.deaths >= MOST_DEATHS:
                    raise CannotDraw(f"launch {asked.n}: processes that draw it end") from None
                process.stop()
                self.processes[i] = Process(self._serve)
                self._give(asked)
                continue
            if kind == "raised":
                raise CannotDraw(f"launch {asked.n}: {asked.drawn}")

    def next(self) -> Launch | None:
        """The launch that was asked for first, if it is drawn."""
        if not self.asked or self.asked[0].drawn is None:
            return None
        asked = self.asked.popleft()
        recipe, place, counted = asked.drawn
        space = self.plan.spaces[asked.n % len(self.plan.spaces)]
        return Launch(asked.n, space, recipe, self.slots.get(place), place, counted)

    def release(self, launch: Launch) -> None:
        self.slots.free.append(launch.place.slot)

    def stop(self) -> None:
        for process in self.processes:
            process.stop()

    def _serve(self, pipe: Connection) -> None:
        while True:
            try:
                said = "drawn", self._drawn(*pipe.recv())
            except EOFError:
                return
            except Exception as error:
                said = "raised", one_line(error)
            pipe.send(said)

    def _drawn(self, n: int, known: Any, slot: int) -> tuple[Recipe, Place, dict[str, int]]:
        recipe = self.plan.recipe(n, known)
        space = self.plan.spaces[n % len(self.plan.spaces)]
        for sequences in _fewer(self.plan.sequences(n, recipe), space):
            with suppress(TooLarge):
                place = self.slots.put(slot, sequences)
                return recipe, place, counts(space.mask, recipe.call, sequences)
        raise TooLarge("one sequence is too large for a slot")


def _fewer(sequences: Sequences, space: Space) -> Iterator[Sequences]:
    """The sequences, and the first half of them, and so on."""
    yield sequences
    while len(sequences) > 1:
        sequences = sequences.take(slice(0, len(sequences) // 2), space.mask)
        yield sequences
