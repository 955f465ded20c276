"""A campaign: launches drawn and run until the time is over, whatever becomes of each of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from fuzz import recipe as recipes_of
from fuzz.backends import Backend, Outcome
from fuzz.boundaries import counts
from fuzz.case import CaseError, digest
from fuzz.findings import path_of
from fuzz.investigate import Investigator
from fuzz.recipe import Recipe, expand_recipe
from fuzz.sequences import Sequences
from fuzz.state import State, merge
from fuzz.strategies import Space, recipes
from fuzz.worker import SKIP, Failure, Worker

INTERRUPTED, FIRST = "interrupted", "the first finding"
# Recipes that Hypothesis draws at once.
BLOCK = 24
# Seconds that a running launch is waited for when the time is over, and that an investigation may
# go on; what comes after takes less than the rest of the ten that there are.
GRACE = 3.0
# A launch with which this many campaigns ended is not begun again.
MOST_TIMES = 2
# Launches of a space that are passed over after many failures of it in a row.
LONGEST_REST = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What ends a campaign: `until` is on `time.monotonic`'s clock."""

    seed: int
    until: float
    launches: int | None = None
    stop_on_first: bool = False


@dataclass(frozen=True, slots=True)
class Launch:
    n: int
    space: Space
    recipe: Recipe
    sequences: Sequences


@dataclass(frozen=True, slots=True)
class Progress:
    """What a person sees of a running campaign."""

    totals: Mapping[str, Any]
    now: Mapping[str, Any]
    seconds: float
    findings: int
    doing: str = ""


@dataclass(slots=True)
class Campaign:
    """`spaces` are taken in turn. `now` sums up this run, `state.totals` all of the folder."""

    spaces: list[Space]
    settings: Settings
    state: State
    workers: list[Worker]
    investigator: Investigator
    show: Callable[[Progress], None] = lambda progress: None
    interrupted: Callable[[], bool] = lambda: False
    now: dict[str, Any] = field(default_factory=dict)
    busy: dict[int, Launch] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    launched: int = 0
    ahead: Launch | None = None
    upcoming: int = 0
    key: str = ""
    before: int = 0  # findings that the folder held
    stopped: str = ""
    failures: dict[int, int] = field(default_factory=dict)
    resting: dict[int, int] = field(default_factory=dict)
    entered: set[int] = field(default_factory=set)
    blocks: dict[tuple[int, int], list[Recipe]] = field(default_factory=dict)

    def run(self) -> str:
        """Until something ends it; says what. Every child is gone then."""
        self.key = campaign_key(self.spaces, self.settings.seed, self.workers[0].backend)
        self.before = len(self.investigator.known)
        self.investigator.announce = lambda text: self._show(text)
        try:
            pending = self._launches()
            while not self._ended() or self.busy:
                self._step(pending)
                self._show()
        except KeyboardInterrupt:
            self.stopped = INTERRUPTED
        finally:
            self._cancel()
            for worker in self.workers:
                worker.stop()
        return self.stopped

    def _ended(self) -> bool:
        if not self.stopped:
            if self.interrupted():
                self.stopped = INTERRUPTED
            elif time.monotonic() >= self.settings.until:
                self.stopped = "the time is over"
            elif self.settings.launches is not None and self.launched >= self.settings.launches:
                self.stopped = "all launches are done"
            elif self.settings.stop_on_first and len(self.investigator.known) > self.before:
                self.stopped = FIRST
        return bool(self.stopped)

    def _step(self, pending: Iterator[Launch]) -> None:
        for i, worker in enumerate(self.workers):
            if i not in self.busy and not self._ended():
                launch, self.ahead = self.ahead or next(pending), None
                self._begin(i, worker, launch)
        if self.ahead is None and not self._ended():
            self.ahead = next(pending)  # drawn while the children work
        if self._ended() and (time.monotonic() > self.settings.until + GRACE
                              or self.stopped in (INTERRUPTED, FIRST)):
            self._cancel()
            return
        pipes = [self.workers[i].pipe for i in self.busy]
        wait([pipe for pipe in pipes if pipe is not None], timeout=0.2)
        for i in list(self.busy):
            if (result := self.workers[i].result()) is not None:
                # It has the kernel compiled, if it is still there, and nothing else to do.
                self.investigator.worker = self.workers[i]
                self._end(self.busy.pop(i), result)

    def _cancel(self) -> None:
        """Gives up what runs; the next start begins it again."""
        for i, launch in self.busy.items():
            self.workers[i].stop()
            self.state.cancel(self.key, launch.n)
        self.busy.clear()

    def _begin(self, i: int, worker: Worker, launch: Launch) -> None:
        self.state.begin(self.key, launch.n, recipes_of.to_json(launch.recipe))
        self.launched += 1
        self.busy[i] = launch
        worker.send(launch.recipe.call, launch.sequences)

    def _end(self, launch: Launch, result: Outcome | Failure) -> None:
        call, at = launch.recipe.call, launch.sequences
        add: dict[str, Any] = {"launches": 1}
        if isinstance(result, Failure) and result.kind == SKIP:
            add |= {"skipped": {result.text: 1}}
        else:
            name = path_of(call, self.workers[0].backend.name)
            add |= {"sequences": len(at),
                    "classes": {name: counts(launch.space.mask, call, at)}}
            if isinstance(result, Outcome):
                add |= {"cells": result.cells, "wrong_cells": result.wrong.total,
                        "compile_seconds": result.compile_seconds,
                        "run_seconds": result.run_seconds, "kernels": result.kernels}
            self._rest(launch, isinstance(result, Failure))
            if isinstance(result, Failure) or result.wrong.total:
                add |= self.investigator.look_into(launch.space, call, at, result, launch.n)
        merge(self.now, add)
        self.state.end(self.key, launch.n, add)

    def _rest(self, launch: Launch, failed: bool) -> None:
        """Calls that hang or crash again and again leave the time to the others."""
        which = launch.n % len(self.spaces)
        self.failures[which] = self.failures.get(which, 0) + 1 if failed else 0
        self.resting[which] = min(2 ** self.failures[which], LONGEST_REST) - 1 if failed else 0

    def _next(self) -> int:
        """The number of the next launch, of a space that is not at rest and whose kernel is there,
        if there is one."""
        n = max(self.upcoming, self.state.position.get(self.key, 0))
        count = len(self.spaces)
        open_to = [self._is_open(which) for which in range(count)]
        for _ in range(LONGEST_REST * count):
            which = n % count
            if not self.resting.get(which, 0) and (open_to[which] or not any(open_to)):
                break
            self.resting[which] = max(self.resting.get(which, 0) - 1, 0)
            n += 1
        self.upcoming = n + 1
        self.entered.add(n % count)
        return n

    def _is_open(self, which: int) -> bool:
        """Not where a kernel has to be waited for, nor a new one when they took too much time."""
        backend = self.workers[0].backend
        if which in self.entered or not self.entered:
            return True
        share = self.now.get("compile_seconds", 0.0) / (time.monotonic() - self.started)
        return share <= backend.capacity.compiling * len(self.workers) and backend.ready(
            self.spaces[which].call)

    def _launches(self) -> Iterator[Launch]:
        """Those that were begun and not ended, then new ones."""
        for item in list(self.state.unfinished.values()):
            if item["key"] != self.key:
                continue
            if item["times"] >= MOST_TIMES:
                # Whatever it does to this process, it does not do it a third time.
                gone = {"infrastructure": {f"launch {item['n']} ended the campaign "
                                           f"{item['times']} times": 1}}
                merge(self.now, gone)
                self.state.end(self.key, item["n"], gone)
                continue
            yield self._launch(item["n"], item["recipe"])
        while True:
            yield self._launch(self._next())

    def _launch(self, n: int, known: Any = None) -> Launch:
        """The n-th launch: the recipe that is `known` of it, or else the one that is drawn."""
        space = self.spaces[n % len(self.spaces)]
        block, item = divmod(n // len(self.spaces), BLOCK)
        capacity = self.workers[0].backend.capacity
        try:
            recipe = recipes_of.from_json(known)
        except CaseError:
            which = n % len(self.spaces)
            drawn = self._block(which, block)
            # The first that is drawn is the plainest: not every space begins with it.
            recipe = drawn[(item + which) % len(drawn)]
        sequences = expand_recipe(
            recipe, space.mask, most_cells=capacity.cells, most_each=capacity.each,
            constants=space.constants,
        )
        return Launch(n, space, recipe, sequences)

    def _block(self, which: int, block: int) -> list[Recipe]:
        key = which, block
        if key not in self.blocks:
            if len(self.blocks) > 2 * len(self.spaces):
                self.blocks.clear()
            capacity = self.workers[0].backend.capacity
            salt = int(digest(f"{self.key} {which} {block}"), 16)
            self.blocks[key] = drawn(recipes(self.spaces[which], capacity.sequences), salt, BLOCK)
        return self.blocks[key]

    def _show(self, doing: str = "") -> None:
        seconds = time.monotonic() - self.started
        findings = len(self.investigator.known)
        self.show(Progress(self.state.totals, self.now, seconds, findings, doing))


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


def campaign_key(spaces: list[Space], salt: int, backend: Backend) -> str:
    """What says which launch is the n-th: a campaign with the same key goes on where it was."""
    what = [repr((space.call, sorted(space.constants.items()), sorted(space.domain.items()),
                  space.longest)) for space in spaces]
    return digest(repr((what, salt, backend.name, asdict(backend.capacity))))
