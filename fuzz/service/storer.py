"""A process that takes what ends into the store, beside the one that runs the campaign.

The campaign never waits for a database: while the store is away, what ends stays in the journal,
the campaign says so once, and pauses when too much is kept.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from sqlalchemy import URL

from fuzz.service.journal import Reader
from fuzz.service.store import Store, StoreError, opened
from fuzz.service.taking import About, Taker, begun
from fuzz.state import State
from fuzz.worker import Process, one_line

# Seconds between two looks at the journal, at a store that is away, and two signs of life.
LOOK, RETRY, ALIVE = 0.5, 1.0, 15.0
# Seconds after which a process that says nothing waits for a store that does not answer.
SILENT = 45.0
# Launches that are kept for a store that is away before the campaign pauses: about 200 MB.
BACKLOG = 100_000


@dataclass(slots=True)
class Storer:
    """The process, seen from the campaign. `says` is told once when the store goes away, and when
    it is back."""

    about: About
    url: URL
    state: State
    says: Callable[[str], None]
    backlog: int = BACKLOG
    process: Process | None = None
    position: int = field(init=False)
    away: str = ""
    pausing: bool = False
    because: str | None = None
    ended: bool = False
    started: float = 0.0
    heard: float = 0.0

    def __post_init__(self) -> None:
        self.position = Reader(self.state.folder, 0).oldest()

    def start(self) -> None:
        self.started = self.heard = time.monotonic()
        self.about = replace(self.about, entries=self.state.entries)
        self.process = Process(self._serve)
        if self.because is not None:
            self._send(self.because)

    @property
    def kept(self) -> int:
        """Launches and the like that are not in the store, as far as is known."""
        return max(self.state.entries - self.position, 0)

    def listen(self) -> None:
        """Takes note of what the process said, and starts another if it is gone."""
        try:
            while self.process is not None and self.process.pipe.poll():
                self._heard(*self.process.pipe.recv())
        except (EOFError, ConnectionResetError, OSError):
            self._gone()
        if self.process is None and time.monotonic() - self.started > RETRY:
            self.start()
        if time.monotonic() - self.heard > SILENT:
            self._is_away("it does not answer")

    def paused(self) -> bool:
        """Whether nothing new is to begin: too much is kept."""
        self.listen()
        if self.pausing and self.kept <= self.backlog // 2:
            self.pausing = False
            self.says(f"the campaign goes on; {self.kept} launches are not yet in the store")
        elif not self.pausing and self.kept > self.backlog:
            self.pausing = True
            self.says(f"the campaign pauses: {self.kept} launches are not yet in the store")
        return self.pausing

    def finish(self, because: str, seconds: float) -> bool:
        """Ends the process when all is stored, or after `seconds`; says which it was. What is not
        stored stays in the journal for the next start."""
        self.because = because
        self._send(because)
        until = time.monotonic() + seconds
        while not self.ended and time.monotonic() < until:
            self.listen()
            if self.process is not None and not self.ended:
                self.process.pipe.poll(0.1)
            else:
                time.sleep(0.02)
        if self.process is not None:
            self.process.stop()
            self.process = None
        if not self.ended:
            self.says(f"{self.kept} launches are not in the store: the next start stores them")
        return self.ended

    def _send(self, text: str) -> None:
        with suppress(BrokenPipeError, ConnectionResetError, OSError):  # `listen` sees that
            if self.process is not None:
                self.process.pipe.send(text)

    def _is_away(self, why: str) -> None:
        if why != self.away:
            self.says(f"the store is away ({why}); what ends is kept in the journal")
        self.away = why

    def _heard(self, what: str, value: Any) -> None:
        self.heard = time.monotonic()
        if what == "away":
            self._is_away(value)
            return
        if self.away:
            self.says("the store is back")
            self.away = ""
        self.position = value
        self.ended = what == "ended"

    def _gone(self) -> None:
        if self.process is not None:
            self.process.stop()
            self.process = None

    def _serve(self, pipe: Connection) -> None:
        _Serving(self.about, self.url, pipe).run()


@dataclass(slots=True)
class _Serving:
    """What the process does until the campaign is over and all is stored."""

    about: About
    url: URL
    pipe: Connection
    store: Store | None = None
    taker: Taker | None = None
    because: str | None = None
    heard: float = 0.0
    was_away: str = ""
    read: int = 0  # entries that were in the journal, for sure

    def run(self) -> None:
        while True:
            try:
                did = self._step()
            except Exception as error:
                self._away(str(error) if isinstance(error, StoreError) else one_line(error))
                did = False
            done = self.because is not None and not did and self.taker is not None
            if done and self._end(self.taker):
                return
            if not did:
                self._wait(LOOK if self.taker is not None else RETRY)

    def _step(self) -> bool:
        """Takes a batch; whether there was one."""
        if self.taker is None:
            self.store = opened(self.url)
            about = replace(self.about, entries=max(self.about.entries, self.read))
            self.taker = begun(about, self.store, time.time(), self.was_away)
            self.was_away, self.heard = "", 0.0
        if self.taker.take(time.time()):
            self.read = max(self.read, self.taker.position)
            self.pipe.send(("stored", self.taker.position))
            return True
        if time.monotonic() - self.heard > ALIVE:
            self.taker.say(time.time())
            self.heard = time.monotonic()
            self.pipe.send(("stored", self.taker.position))
        return False

    def _end(self, taker: Taker | None) -> bool:
        """Writes down that the campaign has ended; it ended before this was asked for, and so
        nothing comes after what was read last."""
        assert taker is not None
        try:
            if taker.take(time.time()):
                return False
            taker.say(time.time(), ended=int(time.time()), because=self.because)
        except Exception as error:
            self._away(one_line(error))
            return False
        self.pipe.send(("ended", taker.position))
        return True

    def _away(self, text: str) -> None:
        if self.store is not None:
            self.store.close()
        self.store = self.taker = None
        self.was_away = text
        self.pipe.send(("away", text))

    def _wait(self, seconds: float) -> None:
        if self.because is None and self.pipe.poll(seconds):
            try:
                self.because = self.pipe.recv()
            except EOFError:
                os._exit(0)
        elif self.because is not None:
            time.sleep(0.05 if self.taker is not None else seconds)
