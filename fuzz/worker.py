"""A child process that runs cases: it may hang, crash or be killed, and the parent goes on."""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from fuzz.backends import Backend, Broken, Outcome, Refused
from fuzz.sequences import Sequences
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
    """A launch without an outcome: `kind` is hang, crash or skip; `died` if the child is gone."""

    kind: str
    stage: str
    text: str
    died: bool = False


@dataclass(slots=True)
class Worker:
    """One child at a time, started when it is needed and again after it is gone."""

    backend: Backend
    deadlines: Deadlines = Deadlines()
    pid: int = 0
    pipe: Connection | None = None
    stage: str = START
    since: float = 0.0
    restarts: int = field(default=-1)

    def send(self, call: Call, sequences: Sequences) -> None:
        """Starts a launch; `result` has what it comes to."""
        if self.pipe is None:
            self._start()
        assert self.pipe is not None
        self.stage, self.since = START, time.monotonic()
        with suppress(BrokenPipeError, ConnectionResetError):  # `result` says how it ended
            self.pipe.send_bytes(pickle.dumps((call, sequences)))

    def result(self, wait: float = 0.0) -> Outcome | Failure | None:
        """What the launch came to, or None if that is not known after `wait` seconds."""
        assert self.pipe is not None
        until = time.monotonic() + wait
        while True:
            late = self.since + self.deadlines.of(self.stage) - time.monotonic()
            left = max(0.0, min(until - time.monotonic(), late))
            if self.pipe.poll(left):
                if (said := self._received()) is not None:
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
        """A launch from its start to its end; it is given up, and tells nothing, when `over`."""
        self.send(call, sequences)
        while (found := self.result(0.2)) is None:
            if over():
                self.stop()
                return Failure(SKIP, self.stage, "given up", died=True)
        return found

    def _received(self) -> Outcome | Failure | None:
        assert self.pipe is not None
        try:
            what, value = self.pipe.recv()
        except (EOFError, ConnectionResetError, OSError):
            return Failure(CRASH, self.stage, f"the child {self._ending()}", died=True)
        if what == "stage":
            self.stage, self.since = value, time.monotonic()
            return None
        if what == "done":
            return value
        if what == "broken":
            stage = self.stage
            self.stop()
            return Failure(CRASH, stage, value, died=True)
        return Failure(SKIP if what == "refused" else CRASH, self.stage, value)

    def _ending(self) -> str:
        from kernels.run_cute import ending

        assert self.pipe is not None
        _, status = os.waitpid(self.pid, 0)
        self.pipe.close()
        self.pid, self.pipe = 0, None
        return ending(status)

    def stop(self) -> None:
        """Ends the child, whatever it does."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            self._ending()

    def _start(self) -> None:
        self.restarts += 1
        here, there = Pipe()

        def serve() -> None:
            here.close()
            while True:
                _answer(self.backend, there, *pickle.loads(there.recv_bytes()))

        self.pid = forked(serve)
        there.close()
        self.pipe = here


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


def _answer(backend: Backend, pipe: Connection, call: Call, sequences: Sequences) -> None:
    try:
        outcome: Any = backend.check(call, sequences, lambda stage: pipe.send(("stage", stage)))
        pipe.send(("done", outcome))
    except Refused as error:
        pipe.send(("refused", str(error)))
    except Broken as error:
        pipe.send(("broken", one_line(error.args[0])))
    except (BrokenPipeError, EOFError):
        raise
    except Exception as error:
        pipe.send(("raised", one_line(error)))


def one_line(error: BaseException) -> str:
    text = " ".join(COLOUR.sub("", str(error)).split())
    return f"{type(error).__name__}: {text}"[:400]


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
