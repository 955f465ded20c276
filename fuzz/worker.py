"""A child process that runs cases: it may hang, crash or be killed, and the parent goes on."""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import signal
import time
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from fuzz.backends import Announce, Backend, Broken, Outcome, Refused
from fuzz.sequences import Sequences
from fuzz.slots import Place, Slots
from kernels.fa4 import Call

START = "start"
HANG, CRASH, SKIP = "hang", "crash", "skip"
COLOUR = re.compile(r"\x1b\[[\d;]*m")
SET_PARENT_DEATH_SIGNAL = 1


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds for each stage of a launch."""

    compile: float = 120.0
    run: float = 30.0

    def of(self, stage: str) -> float:
        return self.compile if stage in (START, "compile") else self.run


@dataclass(frozen=True, slots=True)
class Failure:
    """A launch without an outcome: `kind` is hang, crash or skip; `died` if the child is gone, and
    with it whatever else it was given."""

    kind: str
    stage: str
    text: str
    died: bool = False


class Process:
    """A child that serves a pipe, in silence, and ends with its parent."""

    def __init__(self, serve: Callable[[Connection], None]) -> None:
        self.pipe, there = Pipe()

        def work() -> None:
            self.pipe.close()
            serve(there)

        self.pid = forked(work)
        there.close()

    def ending(self) -> str:
        """How it ended; waits until it has."""
        from kernels.run_cute import ending

        _, status = os.waitpid(self.pid, 0)
        self.pipe.close()
        return ending(status)

    def stop(self) -> str:
        """Ends it, whatever it does."""
        os.kill(self.pid, signal.SIGKILL)
        return self.ending()


@dataclass(slots=True)
class Worker:
    """One child at a time, started when it is needed and again after it is gone. Launches are
    answered in the order in which they were sent; a back end may have several of them at once."""

    backend: Backend
    deadlines: Deadlines = Deadlines()
    slots: Slots = field(default_factory=lambda: Slots(8))
    process: Process | None = None
    stage: str = START
    since: float = 0.0
    sent: int = 0
    restarts: int = field(default=-1)
    own: int = field(init=False)

    def __post_init__(self) -> None:
        self.own = self.slots.free.pop()

    @property
    def pid(self) -> int:
        return self.process.pid if self.process else 0

    def send(self, call: Call, place: Place) -> None:
        """Starts a launch; `result` has what it comes to."""
        if self.process is None:
            self._start()
        assert self.process is not None
        if not self.sent:
            self.stage, self.since = START, time.monotonic()
        self.sent += 1
        with suppress(BrokenPipeError, ConnectionResetError):  # `result` says how it ended
            self.process.pipe.send_bytes(pickle.dumps((call, place)))

    def result(self, wait: float = 0.0) -> Outcome | Failure | None:
        """What the first launch came to of those that were sent, or None if that is not known
        after `wait` seconds."""
        assert self.process is not None and self.sent
        until = time.monotonic() + wait
        while True:
            late = self.since + self.deadlines.of(self.stage) - time.monotonic()
            left = max(0.0, min(until - time.monotonic(), late))
            if self.process.pipe.poll(left):
                if (said := self._received()) is not None:
                    self.sent = max(self.sent - 1, 0)
                    return said
            elif late <= 0:
                seconds = self.deadlines.of(self.stage)
                self.stop()
                return Failure(HANG, self.stage, f"did not end within {seconds:g} s", died=True)
            elif time.monotonic() >= until:
                return None

    def run(
        self, call: Call, sequences: Sequences, over: Callable[[], bool] = lambda: False
    ) -> Outcome | Failure:
        """A launch from its start to its end, when no other is under way; it is given up, and
        tells nothing, when `over`."""
        assert not self.sent
        self.send(call, self.slots.put(self.own, sequences))
        while (found := self.result(0.2)) is None:
            if over():
                self.stop()
                return Failure(SKIP, self.stage, "given up", died=True)
        return found

    def _received(self) -> Outcome | Failure | None:
        assert self.process is not None
        try:
            what, value = self.process.pipe.recv()
        except (EOFError, ConnectionResetError, OSError):
            ending = self.process.ending()
            self.process, self.sent = None, 0
            return Failure(CRASH, self.stage, f"the child {ending}", died=True)
        self.since = time.monotonic()
        if what == "stage":
            self.stage = value
            return None
        if what == "done":
            return value
        if what == "broken":
            stage = self.stage
            self.stop()
            return Failure(CRASH, stage, value, died=True)
        return Failure(SKIP if what == "refused" else CRASH, self.stage, value)

    def stop(self) -> None:
        """Ends the child, whatever it does."""
        if self.process is not None:
            self.process.stop()
        self.process, self.sent = None, 0

    def _start(self) -> None:
        self.restarts += 1
        self.process = Process(self._serve)

    def _serve(self, pipe: Connection) -> None:
        begun: deque[Callable[[], tuple[str, Any]]] = deque()
        while True:
            if begun and (len(begun) >= self.backend.depth or not pipe.poll()):
                pipe.send(begun.popleft()())
            else:
                call, place = pickle.loads(pipe.recv_bytes())
                begun.append(_begun(self.backend, call, self.slots.get(place),
                                    lambda stage: pipe.send(("stage", stage))))


def _begun(
    backend: Backend, call: Call, sequences: Sequences, announce: Announce
) -> Callable[[], tuple[str, Any]]:
    """Starts a launch; what is returned waits for it and says what it came to."""
    started = _answer(lambda: backend.start(call, sequences, announce))
    if started[0] != "done":
        return lambda: started
    return lambda: _answer(started[1])


_held: list[BaseException] = []


def _answer(ask: Callable[[], Any]) -> tuple[str, Any]:
    try:
        return "done", ask()
    except Refused as error:
        return "refused", str(error)
    except Broken as error:
        # What it holds on to may end this process when it goes, before anything is said.
        _held.append(error)
        return "broken", one_line(error.args[0])
    except (BrokenPipeError, EOFError):
        raise
    except Exception as error:
        return "raised", one_line(error)


def forked(work: Callable[[], None]) -> int:
    """A child that does `work` in silence, and ends with it or with its parent."""
    with warnings.catch_warnings():
        # The threads that Python warns of belong to libraries that the child does not call.
        warnings.simplefilter("ignore", DeprecationWarning)
        if pid := os.fork():
            return pid
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _end_with_parent()
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        work()
    finally:
        os._exit(0)


def one_line(error: BaseException) -> str:
    text = " ".join(COLOUR.sub("", str(error)).split())
    return f"{type(error).__name__}: {text}"[:400]


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
