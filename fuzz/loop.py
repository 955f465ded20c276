"""A campaign: launches drawn and run until the time is over, whatever becomes of each of them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from typing import Any

from fuzz import recipe as recipes_of
from fuzz.backends import Backend, Outcome
from fuzz.case import digest
from fuzz.drawing import Drawers, Launch, Plan
from fuzz.findings import axes_of, path_of
from fuzz.investigate import Investigator
from fuzz.schedule import Schedule
from fuzz.state import State, Syncer, merge
from fuzz.strategies import Space
from fuzz.worker import SKIP, Failure, Worker

INTERRUPTED, FIRST, DONE = "interrupted", "the first finding", "all launches are done"
# Launches that are drawn before they can be run, for each that runs.
AHEAD = 8
# Seconds after which it is asked again which kernels are compiled by now.
LOOK = 0.25
# Seconds that a running launch is waited for when the time is over, and that an investigation may
# go on; what comes after takes less than the rest of the ten that there are.
GRACE = 3.0
# A launch with which this many campaigns ended is not begun again.
MOST_TIMES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What ends a campaign: `until` is on `time.monotonic`'s clock."""

    seed: int
    until: float
    launches: int | None = None
    stop_on_first: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """What a person sees of a running campaign."""

    totals: Mapping[str, Any]
    now: Mapping[str, Any]
    seconds: float
    findings: int
    doing: str = ""


@dataclass(slots=True)
class Loop:
    """`spaces` are taken in turn. `now` sums up this run, `state.totals` all of the folder. The
    workers share slots, of which drawn launches take what is left; `drawing` processes draw."""

    spaces: list[Space]
    settings: Settings
    state: State
    workers: list[Worker]
    investigator: Investigator
    show: Callable[[Progress], None] = lambda progress: None
    interrupted: Callable[[], bool] = lambda: False
    drawing: int = 1
    paused: Callable[[], bool] = lambda: False  # whether nothing new is to begin for now
    now: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    stopped: str = ""
    before: int = 0  # findings that the folder held
    key: str = field(init=False)
    drawers: Drawers = field(init=False)
    syncer: Syncer = field(init=False)
    # Launches that are written down, those of them that are on their way to the disk, and those
    # that are there, and may run.
    written: list[Launch] = field(default_factory=list)
    syncing: list[Launch] = field(default_factory=list)
    waiting: deque[Launch] = field(default_factory=deque)
    # Of each worker what it was given, the first of which it is at.
    busy: list[deque[Launch]] = field(init=False)
    # What went wrong and is looked into when its worker has nothing else to do.
    wrong: list[deque[tuple[Launch, Outcome | Failure]]] = field(init=False)
    # Launches that share the blame for the end of a child, to be run one at a time.
    alone: deque[Launch] = field(default_factory=deque)
    blamed: list[int] = field(default_factory=list)
    death: str = ""
    shared: list[Any] = field(default_factory=list)  # their recipes
    launched: int = 0
    upcoming: int = 0
    schedule: Schedule = field(init=False)
    ready: list[bool] = field(init=False)
    again: set[str] = field(default_factory=set)  # what another campaign began and did not end
    looked: float = 0.0

    def __post_init__(self) -> None:
        backend = self.workers[0].backend
        self.key = campaign_key(self.spaces, self.settings.seed, backend)
        plan = Plan(self.spaces, self.key, backend.capacity)
        self.drawers = Drawers(plan, self.workers[0].slots, self.drawing)
        self.busy = [deque() for _ in self.workers]
        self.wrong = [deque() for _ in self.workers]
        self.ready = [False] * len(self.spaces)
        # The next start goes on behind the space that had the last turn.
        self.upcoming = self.state.position.get(self.key, 0)
        self.schedule = Schedule(len(self.spaces), (self.upcoming - 1) % len(self.spaces))

    def run(self) -> str:
        """Until something ends it; says what. Every child is gone then. Raises CannotDraw."""
        self.before = len(self.investigator.known)
        self.investigator.announce = lambda text: self._show(text)
        self.syncer = Syncer()
        self.again = set(self.state.unfinished)
        try:
            pending = self._pending()
            while not self._ended() or self._is_busy():
                self._step(pending)
                self._show()
        except KeyboardInterrupt:
            self.stopped = INTERRUPTED
        finally:
            self._cancel()
            self.drawers.stop()
            self.syncer.stop()
            for worker in self.workers:
                worker.stop()
        return self.stopped

    def _is_busy(self) -> bool:
        """Whether launches run, or may still do so."""
        left = [self.written, self.syncing, self.waiting] if self.stopped == DONE else []
        return any([*self.busy, *self.wrong, self.alone, *left])

    def _ended(self) -> bool:
        if self.stopped in ("", DONE):
            if self.interrupted():
                self.stopped = INTERRUPTED
            elif self.settings.stop_on_first and len(self.investigator.known) > self.before:
                self.stopped = FIRST
            elif time.monotonic() >= self.settings.until:
                self.stopped = "the time is over"
            elif self.settings.launches is not None and self.launched >= self.settings.launches:
                self.stopped = DONE
        return bool(self.stopped)

    def _step(self, pending: Iterator[tuple[int, Any]]) -> None:
        if not self._ended() and not self.paused():
            self._ask(pending)
            self._write_down()
        self._hand_out()
        if self._ended() and (time.monotonic() > self.settings.until + GRACE
                              or self.stopped in (INTERRUPTED, FIRST)):
            self._cancel()
            return
        pipes = [worker.process.pipe for worker in self.workers if worker.process and worker.sent]
        trouble = any(wrong and not busy for wrong, busy in zip(self.wrong, self.busy, strict=True))
        pipes += [*self.drawers.pipes, self.syncer.pipe]
        wait(pipes, timeout=0 if trouble else 0.2)
        self.drawers.collect()
        self._sync()
        for i, worker in enumerate(self.workers):
            while self.busy[i] and (result := worker.result()) is not None:
                self._came(i, result)
            if self.wrong[i] and not self.busy[i]:
                # Its worker has the kernel, if it is still there, and nothing else to do.
                self.investigator.worker = worker
                self._look_into(*self.wrong[i].popleft())

    def _ask(self, pending: Iterator[tuple[int, Any]]) -> None:
        """Has the next launches drawn, while there is room for them."""
        most = AHEAD * sum(worker.backend.depth for worker in self.workers)
        while self.drawers.room() and len(self.drawers.asked) < most:
            left = self.settings.launches
            if left is not None and self.launched + len(self.drawers.asked) >= left:
                return
            if (asked := next(pending)) is None:
                return
            self.drawers.ask(*asked)

    def _write_down(self) -> None:
        left = self.settings.launches
        while (left is None or self.launched < left) and (launch := self.drawers.next()):
            self.state.begin(self.key, launch.n, recipes_of.to_json(launch.recipe))
            self.launched += 1
            self.written.append(launch)

    def _sync(self) -> None:
        """Launches may run when what says so is on disk; meanwhile more are written down."""
        if self.syncer.done():
            self.waiting.extend(self.syncing)
            self.syncing = []
        if self.written and not self.syncing:
            self.syncing, self.written = self.written, []
            self.syncer.ask(self.state)

    def _hand_out(self) -> None:
        for i, worker in enumerate(self.workers):
            depth = 1 if self.blamed else worker.backend.depth
            while len(self.busy[i]) < depth and not self.wrong[i]:
                if (launch := self._next_launch()) is None:
                    return
                # What ended a campaign, or its machine, is known to have when it does so again.
                self.state.run(self.key, launch.n, wait=f"{self.key}:{launch.n}" in self.again)
                self.busy[i].append(launch)
                worker.send(launch.recipe.call, launch.place)

    def _next_launch(self) -> Launch | None:
        if self._ended() and self.stopped != DONE:
            return None
        launches = self.alone if self.blamed else self.waiting
        return launches.popleft() if launches else None

    def _cancel(self) -> None:
        """Gives up what runs, or is still to be looked into; the next start begins it again."""
        for busy, worker in zip(self.busy, self.workers, strict=True):
            if busy:
                worker.stop()
        launches = [launch for busy in self.busy for launch in busy]
        wrong = [launch for each in self.wrong for launch, _ in each]
        for launch in (*launches, *wrong, *self.alone):
            self.state.cancel(self.key, launch.n)
        for each in (*self.busy, *self.wrong, self.alone):
            each.clear()

    def _came(self, i: int, result: Outcome | Failure) -> None:
        """A result of the first launch that worker `i` was given."""
        died = isinstance(result, Failure) and result.died
        if died and len(self.busy[i]) > 1:
            self.death = f"{result.kind} ({result.text})"
            self.blamed = [launch.n for launch in self.busy[i]]
            self.shared = [recipes_of.to_json(launch.recipe) for launch in self.busy[i]]
            for launch in self.busy[i]:
                self.state.cancel(self.key, launch.n)
            self.alone.extend(self.busy[i])
            self.busy[i].clear()
            return
        launch = self.busy[i].popleft()
        if launch.n in self.blamed:
            self._was_alone(launch, died)
        failed = isinstance(result, Failure)
        if not (failed and result.kind == SKIP):
            which = launch.n % len(self.spaces)
            self.schedule.learned(which, failed=failed, new=not failed and self._is_new(launch))
        if failed and result.kind != SKIP or not failed and result.wrong.total:
            self.wrong[i].append((launch, result))
        else:
            self._end(launch, result, {})

    def _was_alone(self, launch: Launch, died: bool) -> None:
        """One of those that share a blame has been run alone."""
        if died:
            self.death = ""
        self.blamed.remove(launch.n)
        if not self.blamed and self.death:
            gone = {"infrastructure": {f"{self.death}: it did not happen again": 1}}
            merge(self.now, gone)
            self.state.add(gone)
            self.state.keep({"text": self.death, "under way": self.shared})
            self.death = ""

    def _look_into(self, launch: Launch, result: Outcome | Failure) -> None:
        more = self.investigator.look_into(
            launch.space, launch.recipe.call, launch.sequences, result, launch.n)
        for text in more["infrastructure"]:
            self.state.keep({"text": text, "under way": [recipes_of.to_json(launch.recipe)]})
        self._end(launch, result, more)

    def _end(self, launch: Launch, result: Outcome | Failure, more: Mapping[str, Any]) -> None:
        add: dict[str, Any] = {"launches": 1, **more}
        if isinstance(result, Failure) and result.kind == SKIP:
            add |= {"skipped": {result.text: 1}}
        else:
            name = path_of(launch.recipe.call, self.workers[0].backend.name)
            cells = result.cells if isinstance(result, Outcome) else 0
            add |= {"sequences": len(launch.sequences), "classes": {name: launch.counts},
                    "paths": {name: {"launches": 1, "sequences": len(launch.sequences),
                                     "cells": cells}}}
        if isinstance(result, Outcome):
            add |= {"cells": result.cells, "wrong_cells": result.wrong.total,
                    "compile_seconds": result.compile_seconds, "run_seconds": result.run_seconds,
                    "kernel_seconds": result.kernel_seconds, "kernels": result.kernels}
        merge(self.now, add)
        self.state.end(self.key, launch.n, add,
                       axes_of(launch.recipe.call, self.workers[0].backend.name))
        self.drawers.release(launch)

    def _is_new(self, launch: Launch) -> bool:
        """Whether it met a boundary class of its path for the first time."""
        name = path_of(launch.recipe.call, self.workers[0].backend.name)
        known = self.state.totals.get("classes", {}).get(name, {})
        return any(count and not known.get(each) for each, count in launch.counts.items())

    def _pending(self) -> Iterator[tuple[int, Any]]:
        """Launches that were begun and not ended, with their recipes, then new ones; None where
        there is none as yet."""
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
            yield item["n"], item["recipe"]
        while True:
            n = self._next()
            yield n if n is None else (n, None)

    def _next(self) -> int | None:
        """The number of the next launch, of a space whose kernel is there, or None while none is.
        Numbers that belong to other spaces are left out."""
        self._look()
        if (which := self.schedule.next(self.ready)) is None:
            return None
        count = len(self.spaces)
        n = self.upcoming + (which - self.upcoming) % count
        self.upcoming = n + 1
        return n

    def _look(self) -> None:
        """Which kernels need not be compiled first; what is ready stays so."""
        if all(self.ready) or time.monotonic() < self.looked + LOOK:
            return
        self.looked = time.monotonic()
        backend = self.workers[0].backend
        for which, space in enumerate(self.spaces):
            self.ready[which] = self.ready[which] or backend.ready(space.call)

    def _show(self, doing: str = "") -> None:
        seconds = time.monotonic() - self.started
        findings = len(self.investigator.known)
        self.show(Progress(self.state.totals, self.now, seconds, findings, doing))


def campaign_key(spaces: list[Space], salt: int, backend: Backend) -> str:
    """What says which launch is the n-th: a campaign with the same key goes on where it was."""
    what = [repr((space.call, sorted(space.constants.items()), sorted(space.domain.items()),
                  space.longest, *([sorted(space.ranges.items())] if space.ranges else [])))
            for space in spaces]
    return digest(repr((what, salt, backend.name, asdict(backend.capacity))))
