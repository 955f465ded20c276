"""What a journal has for a store: entries that add to the totals, in order, with their numbers."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Bytes that are read at once.
PIECE = 2**22
NAME = re.compile(r"journal-(\d+)\.jsonl")


@dataclass(frozen=True, slots=True)
class Entry:
    """The `n`-th entry that added something: what it added, when, on which path (AXES) if it was on
    one, and what it said beside that."""

    n: int
    at: int
    add: dict[str, Any]
    on: list[str] | None
    said: dict[str, Any]


@dataclass(slots=True)
class Reader:
    """Reads the journals in `folder` from the entry `position` on, while another process writes
    them. `missing` counts entries that no journal has any more."""

    folder: Path
    position: int
    number: int = -1
    offset: int = 0
    at: int = 0  # the number of the next entry at `offset`
    missing: int = 0
    firsts: dict[int, int] = field(default_factory=dict)

    def oldest(self) -> int:
        """The number of the first entry that a journal has; all before are in the store."""
        return min((self.firsts[number] for number in self._journals()), default=0)

    def batch(self) -> list[Entry]:
        """The next entries, or none if there are none as yet."""
        found: list[Entry] = []
        while not found:
            journals = self._journals()
            if self.number not in journals and not self._begin(journals):
                return []
            later = [number for number in journals if number > self.number]
            size = self.offset
            found = self._read()
            if self.offset == size:  # all is read, and nothing more comes where there is a later
                if not later:
                    return found
                self._enter(min(later))
        self.position = found[-1].n + 1
        return found

    def sync(self) -> None:
        """Returns when what was read is on disk, and so outlives the machine."""
        with suppress(FileNotFoundError):
            file = os.open(self._path(self.number), os.O_RDONLY)
            try:
                os.fdatasync(file)
            finally:
                os.close(file)

    def drop(self) -> None:
        """Removes the journals before the one that is read: all of them are in the store."""
        for number in self._journals():
            if number < self.number:
                self._path(number).unlink(missing_ok=True)
                self.firsts.pop(number, None)

    def _journals(self) -> list[int]:
        names = (NAME.fullmatch(path.name) for path in self.folder.iterdir())
        found = sorted(int(match[1]) for match in names if match)
        return [number for number in found if self._first(number) is not None]

    def _path(self, number: int) -> Path:
        return self.folder / f"journal-{number}.jsonl"

    def _first(self, number: int) -> int | None:
        """The number of a journal's first entry, which is its first line."""
        if number not in self.firsts:
            try:
                with self._path(number).open("rb") as file:
                    line = file.readline()
            except FileNotFoundError:
                return None
            if not line.endswith(b"\n") or (first := json.loads(line).get("first")) is None:
                return None
            self.firsts[number] = first
        return self.firsts[number]

    def _begin(self, journals: list[int]) -> bool:
        """At the journal that holds the entry `position`, if there is one."""
        before = [number for number in journals if self.firsts[number] <= self.position]
        if not journals:
            return False
        self._enter(max(before) if before else journals[0])
        return True

    def _enter(self, number: int) -> None:
        self.number, self.offset, self.at = number, 0, self.firsts[number]
        if self.at > self.position:
            self.missing += self.at - self.position
            self.position = self.at

    def _read(self) -> list[Entry]:
        with self._path(self.number).open("rb") as file:
            file.seek(self.offset)
            piece = file.read(PIECE)
            while piece and b"\n" not in piece and (more := file.read(PIECE)):
                piece += more
        whole = piece[:piece.rfind(b"\n") + 1]
        self.offset += len(whole)
        found = []
        for line in whole.splitlines():
            if b'"add":' not in line or "add" not in (entry := json.loads(line)):
                continue
            if self.at >= self.position:
                found.append(Entry(self.at, entry["at"], entry["add"], entry.get("on"),
                                   entry.get("said", {})))
            self.at += 1
        return found
