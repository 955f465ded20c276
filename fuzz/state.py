"""What a campaign knows, on disk: a journal of launches, written before each one runs.

`DIR/state/` holds a snapshot and a journal of what came after it. Each entry is one line, appended
by one write; a line that was cut off by the end of the process is ignored. A launch that was begun
and not ended is given back at the next start.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1
COMPACT = 4 * 2**20


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
    campaign; `unfinished` are launches that were begun only, with how often."""

    folder: Path
    totals: dict[str, Any] = field(default_factory=dict)
    position: dict[str, int] = field(default_factory=dict)
    unfinished: dict[str, dict[str, Any]] = field(default_factory=dict)
    seed: int | None = None
    number: int = 0
    journal: Any = None
    lock: Any = None

    def begin(self, key: str, n: int, recipe: Any) -> None:
        self._write({"begin": [key, n], "recipe": recipe})

    def end(self, key: str, n: int, add: Mapping[str, Any]) -> None:
        self._write({"end": [key, n], "add": add})
        if self.journal.tell() > COMPACT:
            self.compact()

    def cancel(self, key: str, n: int) -> None:
        """The launch was given up for no fault of its own, and stays unfinished."""
        self._write({"cancel": [key, n]})

    def add(self, more: Mapping[str, Any]) -> None:
        self._write({"add": more})

    def take_seed(self, wanted: int | None) -> int:
        """The seed that was asked for, or else the one that this folder began with."""
        if wanted is None:
            wanted = self.seed if self.seed is not None else int.from_bytes(os.urandom(4), "big")
        if wanted != self.seed:
            self._write({"seed": wanted})
        return wanted

    def compact(self) -> None:
        """The journal becomes part of the snapshot; a kill at any moment loses nothing."""
        snapshot = {"schema": SCHEMA, "journal": self.number + 1, "totals": self.totals,
                    "position": self.position, "unfinished": self.unfinished, "seed": self.seed}
        write(self.folder / "snapshot.json", json.dumps(snapshot))
        old = self._journal()
        self.number += 1
        self._open()
        old.unlink(missing_ok=True)

    def close(self) -> None:
        self.compact()
        self.journal.close()
        self.lock.close()

    def _write(self, entry: dict[str, Any]) -> None:
        self.journal.write(json.dumps(entry, separators=(",", ":")).encode() + b"\n")
        os.fdatasync(self.journal.fileno())
        self._apply(entry)

    def _apply(self, entry: Mapping[str, Any]) -> None:
        if "seed" in entry:
            self.seed = entry["seed"]
        if "begin" in entry:
            key, n = entry["begin"]
            name = f"{key}:{n}"
            times = self.unfinished.get(name, {}).get("times", 0) + 1
            self.unfinished[name] = {"key": key, "n": n, "times": times, "recipe": entry["recipe"]}
            self.position[key] = max(self.position.get(key, 0), n + 1)
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


def write(path: Path, text: str) -> None:
    """The whole file or nothing of it."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    os.replace(new, path)


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
    if state._journal().exists():
        whole = state._journal().read_bytes()
        lines = whole.split(b"\n")
        for line in lines[:-1]:
            state._apply(json.loads(line))
        if lines[-1]:  # cut off: it never counted
            os.truncate(state._journal(), len(whole) - len(lines[-1]))
    return state
