"""What a campaign knows, on disk: a journal of launches, each of them written before it runs.

`DIR/state/` holds a snapshot and a journal of what came after it. Each entry is one line, appended
by one write; a line that was cut off by the end of the process is ignored. A launch that was begun
and not ended is given back at the next start. What a process wrote outlives it; what is to outlive
the machine has to be on disk, which `Syncer` sees to while the campaign goes on.

Where a store takes what has ended (`keep_journals`), a journal stays until the store drops it. It
begins with the number of its first entry that adds something.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fuzz.worker import Process

SCHEMA = 1
COMPACT = 4 * 2**20
FULL = (errno.ENOSPC, errno.EDQUOT)


class StateError(Exception):
    """A folder that cannot be used; the message is one line."""


def merge(total: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Adds up numbers of the same name, in dictionaries of any depth."""
    for name, value in more.items():
        if isinstance(value, Mapping):
            merge(total.setdefault(name, {}), value)
        else:
            total[name] = total.get(name, 0) + value


@dataclass(slots=True)
class State:
    """`totals` are sums over every launch that has ended; `position[key]` is the next launch of a
    campaign; `unfinished` are launches that were begun only, with how often they ran; `entries`
    counts what was added to the totals. `waits` is asked whether to try again on a full disk."""

    folder: Path
    totals: dict[str, Any] = field(default_factory=dict)
    position: dict[str, int] = field(default_factory=dict)
    unfinished: dict[str, dict[str, Any]] = field(default_factory=dict)
    seed: int | None = None
    number: int = 0
    entries: int = 0
    stream: str = ""  # names the folder's entries in a store, if one takes them
    waits: Callable[[OSError], bool] = lambda error: False
    journal: Any = None
    lock: Any = None

    def begin(self, key: str, n: int, recipe: Any) -> None:
        """The launch is to run, as soon as this is on disk."""
        self._write({"begin": [key, n], "recipe": recipe}, wait=False)

    def run(self, key: str, n: int, *, wait: bool) -> None:
        """The launch runs from now on; `wait` until that is on disk, too."""
        self._write({"run": [key, n]}, wait=wait)

    def end(
        self, key: str, n: int, add: Mapping[str, Any], on: list[str] | None = None
    ) -> None:
        """The launch is over; `on` are the axes of its call (`fuzz.findings.axes_of`)."""
        entry = {"end": [key, n], "add": add}
        self._write(entry if on is None else {**entry, "on": on}, wait=False)
        if self.journal.tell() > COMPACT:
            self.patiently(self.compact)

    def cancel(self, key: str, n: int) -> None:
        """The launch was given up for no fault of its own, and stays unfinished."""
        self._write({"cancel": [key, n]}, wait=False)

    def add(self, more: Mapping[str, Any], said: Mapping[str, Any] | None = None) -> None:
        """Adds to the totals; `said` is for a store only."""
        self._write({"add": more} if said is None else {"add": more, "said": said})

    def take_seed(self, wanted: int | None) -> int:
        """The seed that was asked for, or else the one that this folder began with."""
        if wanted is None:
            wanted = self.seed if self.seed is not None else int.from_bytes(os.urandom(4), "big")
        if wanted != self.seed:
            self._write({"seed": wanted})
        return wanted

    def keep(self, what: Mapping[str, Any]) -> None:
        """A line for a person to look into, in `unexplained.jsonl`."""
        def append() -> None:
            with (self.folder / "unexplained.jsonl").open("a") as file:
                file.write(json.dumps(what) + "\n")

        self.patiently(append)

    def compact(self) -> None:
        """The journal becomes part of the snapshot; a kill at any moment loses nothing."""
        snapshot = {"schema": SCHEMA, "journal": self.number + 1, "totals": self.totals,
                    "position": self.position, "unfinished": self.unfinished, "seed": self.seed,
                    "entries": self.entries, "stream": self.stream}
        if self.stream:
            os.fdatasync(self.journal.fileno())
        write(self.folder / "snapshot.json", json.dumps(snapshot))
        old = self._journal()
        self.number += 1
        self._open()
        if not self.stream:
            old.unlink(missing_ok=True)

    def keep_journals(self) -> None:
        """From now on a journal stays until the store has all of it."""
        if not self.stream:
            self.stream = uuid.uuid4().hex
            self.compact()
            for path in self.folder.glob("journal-*.jsonl"):
                if path != self._journal():
                    path.unlink()

    def close(self) -> None:
        self.compact()
        self.journal.close()
        self.lock.close()

    def _write(self, entry: dict[str, Any], *, wait: bool = True) -> None:
        if "add" in entry:
            entry["at"] = int(time.time())
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        self.patiently(lambda: self._append(line))
        if wait:
            os.fdatasync(self.journal.fileno())
        self._apply(entry)

    def _append(self, line: bytes) -> None:
        """The whole line or, on a full disk, nothing of it."""
        end = self.journal.tell()
        try:
            if self.journal.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._journal()))
        except OSError:
            self.journal.truncate(end)
            self.journal.seek(end)
            raise

    def patiently(self, act: Callable[[], Any]) -> Any:
        """Does it again as long as the disk is full and `waits` says so."""
        while True:
            try:
                return act()
            except OSError as error:
                if error.errno not in FULL or not self.waits(error):
                    raise

    def _apply(self, entry: Mapping[str, Any]) -> None:
        if "seed" in entry:
            self.seed = entry["seed"]
        if "add" in entry:
            self.entries += 1
        if "begin" in entry:
            key, n = entry["begin"]
            name = f"{key}:{n}"
            times = self.unfinished.get(name, {}).get("times", 0)
            self.unfinished[name] = {"key": key, "n": n, "times": times, "recipe": entry["recipe"]}
            self.position[key] = max(self.position.get(key, 0), n + 1)
        if "run" in entry:
            self.unfinished[":".join(map(str, entry["run"]))]["times"] += 1
        if "cancel" in entry:
            self.unfinished[":".join(map(str, entry["cancel"]))]["times"] = 0
        if "end" in entry:
            self.unfinished.pop(f"{entry['end'][0]}:{entry['end'][1]}", None)
        merge(self.totals, entry.get("add", {}))

    def _journal(self) -> Path:
        return self.folder / f"journal-{self.number}.jsonl"

    def _open(self) -> None:
        if self.journal is not None:
            self.journal.close()
        self.journal = self._journal().open("ab", buffering=0)
        if self.stream and not self.journal.tell():
            self._write({"first": self.entries}, wait=False)


class Syncer:
    """A process that waits for the disk, which may take seconds where others write, too."""

    def __init__(self) -> None:
        self.process = Process(_sync)
        self.path: Path | None = None

    @property
    def pipe(self) -> Connection:
        return self.process.pipe

    def ask(self, state: State) -> None:
        """`done` is to say when all that `state` has written by now is on disk."""
        assert self.path is None
        self.path = state._journal()
        self._send()

    def done(self) -> bool:
        """Whether it is. Raises StateError where it cannot be."""
        if self.path is None or not self.pipe.poll():
            return False
        try:
            error = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.stop()
            self.process = Process(_sync)
            self._send()
            return False
        if error:
            raise StateError(f"{self.path}: {error}")
        self.path = None
        return True

    def _send(self) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # `done` sees that it is gone
            self.pipe.send(self.path)

    def stop(self) -> None:
        self.process.stop()


def _sync(pipe: Connection) -> None:
    while True:
        path, error = pipe.recv(), None
        try:
            file = os.open(path, os.O_RDONLY)
            os.fdatasync(file)
            os.close(file)
        except FileNotFoundError:  # it has become part of the snapshot, which is on disk
            pass
        except OSError as told:
            error = told.strerror
        pipe.send(error)


def write(path: Path, text: str) -> None:
    """The whole file or nothing of it, on disk."""
    new = path.with_name(f".{path.name}.new")
    try:
        with new.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def open_state(findings: Path) -> State:
    """The state in a findings folder, for this process alone. Raises StateError."""
    folder = findings / "state"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("a")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        state = _read(folder)
        state.lock = lock
        state._open()
    except BlockingIOError:
        raise StateError(f"{findings}: another campaign is using this folder") from None
    except OSError as error:
        raise StateError(f"{error.filename or findings}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(f"{folder}: not the state of a campaign ({error}): move it away") from None
    return state


def _read(folder: Path) -> State:
    state = State(folder)
    if (path := folder / "snapshot.json").exists():
        known = json.loads(path.read_text())
        if known.get("schema") != SCHEMA:
            raise ValueError(f"schema {known.get('schema')!r} instead of {SCHEMA}")
        state.totals, state.position = known["totals"], known["position"]
        state.unfinished, state.seed = known["unfinished"], known["seed"]
        state.number = known["journal"]
        state.entries, state.stream = known.get("entries", 0), known.get("stream", "")
    if state._journal().exists():
        whole = state._journal().read_bytes()
        lines = whole.split(b"\n")
        for line in lines[:-1]:
            state._apply(json.loads(line))
        if lines[-1]:  # cut off: it never counted
            os.truncate(state._journal(), len(whole) - len(lines[-1]))
    return state
