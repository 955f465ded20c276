"""What has ended, taken from a journal into the store: each launch once, whatever is killed.

A transaction adds the entries of a batch up and moves the stream's `position` behind them. Whoever
takes next begins at the position that is in the store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, case, select, update

from fuzz.findings import FindingError, file_of, load
from fuzz.service.journal import Entry, Reader
from fuzz.service.records import (
    LONGEST_NOTE,
    drop_old_rates,
    happened,
    path_id,
    record_finding,
    record_replay,
)
from fuzz.service.schema import (
    KEPT,
    SUMS,
    TIMES,
    campaigns,
    coverage,
    findings,
    notes,
    rates,
    runs,
    sightings,
    streams,
    targets,
)
from fuzz.service.store import INSERTS, Store, StoreError, upsert
from fuzz.service.triage import Seen, Tracked
from fuzz.state import merge

NOTES = ("skipped", "infrastructure")
UNSAID = "it ended without a word"


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """A process and its campaign. `reachable` has the axes of each path that is drawn for, with
    the names of its boundary classes."""

    name: str
    mode: str
    file: Mapping[str, Any]
    tracked: Sequence[str]
    targets: Sequence[Mapping[str, Any]]
    reachable: Sequence[tuple[Sequence[str], Sequence[str]]]
    run: str
    started: int
    stream: str
    entries: int
    folder: Path
    facts: Mapping[str, Any] = field(default_factory=dict)  # columns of runs


@dataclass(slots=True)
class Taker:
    """Takes what ends in one folder. Make one with `begun`."""

    about: About
    store: Store
    campaign: int
    reader: Reader
    documents: dict[str, tuple[int, int]] = field(default_factory=dict)
    paths: dict[tuple[str, ...], int] = field(default_factory=dict)
    missing: int = 0

    @property
    def position(self) -> int:
        """How many entries are in the store."""
        return self.reader.position

    def take(self, now: float) -> int:
        """Stores the next entries there are; returns how many. Raises Away: then none is stored,
        and this taker is of no more use."""
        entries = self.reader.batch()
        if not entries:
            return 0
        self.reader.sync()
        with self.store.writing() as connection:
            self._move(connection, entries)
            self._add(connection, entries)
            if lost := self.reader.missing - self.missing:
                text = f"{lost} launches that had ended are in no journal of {self.about.folder}"
                self._note(connection, {("infrastructure", text): (lost, int(now), int(now))})
            drop_old_rates(connection, now)
        self.missing = self.reader.missing
        self.reader.drop()
        return len(entries)

    def say(self, now: float, **columns: Any) -> None:
        """Writes what has become of the process, which is heard of now."""
        with self.store.writing() as connection:
            connection.execute(update(runs).where(runs.c.id == self.about.run).values(
                seen=int(now), **columns))

    def _move(self, connection: Connection, entries: Sequence[Entry]) -> None:
        """Moves the position from the first of `entries` to behind the last."""
        held = connection.execute(select(streams.c.position).where(
            streams.c.id == self.about.stream).with_for_update()).scalar_one()
        if held + self.reader.missing - self.missing != entries[0].n:
            raise StoreError(f"{self.about.folder}: another process stores what ends here")
        connection.execute(update(streams).where(streams.c.id == self.about.stream).values(
            position=entries[-1].n + 1))

    def _add(self, connection: Connection, entries: Sequence[Entry]) -> None:
        added = Sums()
        for entry in entries:
            path = None if entry.on is None else self._path(connection, tuple(entry.on))
            added.add(entry, path)
        whose = {"campaign": self.campaign}
        upsert(connection, rates, [
            {**whose, "width": width, "start": start, "path": path,
             **{name: sums.get(name, 0) for name in (*SUMS, *TIMES)}}
            for (width, start, path), sums in added.rates.items()], add=(*SUMS, *TIMES))
        upsert(connection, coverage, [
            {**whose, "path": path, "boundary": name, "count": count, "first_seen": at}
            for (path, name), (count, at) in added.coverage.items()],
            add=("count",), least=("first_seen",))
        self._note(connection, added.notes)
        for name, seen in added.findings.items():
            self._saw(connection, name, seen)
        for entry in entries:
            if (replay := entry.said.get("replay")) is not None:
                self.document(connection, replay["fingerprint"], entry.at)
                record_replay(connection, **replay, at=entry.at)

    def _path(self, connection: Connection, axes: tuple[str, ...]) -> int:
        if axes not in self.paths:
            self.paths[axes] = path_id(connection, axes)
        return self.paths[axes]

    def _note(self, connection: Connection, found: Mapping[Any, tuple[int, int, int]]) -> None:
        upsert(connection, notes, [
            {"campaign": self.campaign, "kind": kind, "text": text, "count": count,
             "first_seen": first, "last_seen": last}
            for (kind, text), (count, first, last) in found.items()],
            add=("count",), least=("first_seen",), most=("last_seen",))

    def _saw(self, connection: Connection, name: str, seen: Seeing) -> None:
        """Counts a finding, whose document was saved before the entries that count it."""
        self.document(connection, name, seen.first)
        known = connection.execute(select(findings.c.release).where(
            findings.c.fingerprint == name)).scalar_one_or_none()
        if known is None:
            lost = f"finding {name} was seen, and its file is gone"
            self._note(connection, {("infrastructure", lost): (seen.count, seen.first, seen.last)})
            return
        connection.execute(update(findings).where(findings.c.fingerprint == name).values({
            "count": findings.c["count"] + seen.count,
            "last_seen": greatest(findings.c.last_seen, seen.last)}))
        upsert(connection, sightings, [
            {"campaign": self.campaign, "fingerprint": name, "count": seen.count,
             "first_seen": seen.first, "last_seen": seen.last}],
            add=("count",), least=("first_seen",), most=("last_seen",))
        happened(connection, name, Seen(known), seen.last)

    def document(self, connection: Connection, name: str, at: int) -> None:
        """Stores a finding's file, if it is another than before."""
        path = file_of(self.about.folder, name)
        try:
            stat = path.stat()
            state = stat.st_mtime_ns, stat.st_size
            if self.documents.get(name) == state:
                return
            record_finding(connection, load(path), at)
            upsert(connection, sightings, [
                {"campaign": self.campaign, "fingerprint": name, "count": 0, "first_seen": at,
                 "last_seen": at}])
        except (FindingError, FileNotFoundError):
            return
        self.documents[name] = state


@dataclass(slots=True)
class Seeing:
    """How often a finding was seen, first and last."""

    count: int
    first: int
    last: int


@dataclass(slots=True)
class Sums:
    """Entries added up: by interval and path, by path and boundary class, by note, by finding."""

    rates: dict[tuple[int, int, int], dict[str, Any]] = field(default_factory=dict)
    coverage: dict[tuple[int, str], tuple[int, int | None]] = field(default_factory=dict)
    notes: dict[tuple[str, str], tuple[int, int, int]] = field(default_factory=dict)
    findings: dict[str, Seeing] = field(default_factory=dict)

    def add(self, entry: Entry, path: int | None) -> None:
        at = entry.at
        if path is not None:
            sums = {name: entry.add[name] for name in (*SUMS, *TIMES) if name in entry.add}
            for width in KEPT:
                merge(self.rates.setdefault((width, at - at % width, path), {}), sums)
            for counts in entry.add.get("classes", {}).values():
                for name, count in counts.items():
                    total, first = self.coverage.get((path, name), (0, None))
                    first = first if first is not None or not count else at
                    self.coverage[path, name] = total + count, first
        for kind in NOTES:
            for text, count in entry.add.get(kind, {}).items():
                key = kind, text[:LONGEST_NOTE]
                total, first, _ = self.notes.get(key, (0, at, at))
                self.notes[key] = total + count, first, at
        for name, count in entry.add.get("findings", {}).items():
            seen = self.findings.setdefault(name, Seeing(0, at, at))
            seen.count, seen.last = seen.count + count, at


def greatest(column: Any, value: int) -> Any:
    return case((column > value, column), else_=value)


def begun(about: About, store: Store, now: float, was_away: str = "") -> Taker:
    """Writes down that a process runs a campaign, and why the store `was_away` before, if it was.
    Raises Away or StoreError."""
    with store.writing() as connection:
        campaign = _campaign(connection, about, now)
        position = _stream(connection, about, campaign)
        if position > about.entries:
            raise StoreError(
                f"{about.folder}: the store has {position} entries of it and it has only "
                f"{about.entries}, so it is an older copy: use a new folder")
        _run(connection, about, campaign, now)
        taker = Taker(about, store, campaign, Reader(about.folder / "state", position))
        for axes, names in about.reachable:
            path = taker._path(connection, tuple(axes))
            upsert(connection, coverage, [
                {"campaign": campaign, "path": path, "boundary": name, "count": 0}
                for name in names])
        for path in sorted(about.folder.glob("finding-*.json")):
            name = path.stem.removeprefix("finding-")
            taker.document(connection, name, int(path.stat().st_mtime))
        if was_away:
            taker._note(connection, {("store", was_away[:LONGEST_NOTE]): (1, int(now), int(now))})
    return taker


def _campaign(connection: Connection, about: About, now: float) -> int:
    values = {"mode": about.mode, "file": dict(about.file), "tracked": sorted(about.tracked)}
    before = connection.execute(select(campaigns.c.tracked).where(
        campaigns.c.name == about.name)).scalar_one_or_none()
    new = INSERTS[connection.dialect.name](campaigns).values(
        name=about.name, created=about.started, **values)
    connection.execute(new.on_conflict_do_update(index_elements=["name"], set_=values))
    number = connection.execute(select(campaigns.c.id).where(
        campaigns.c.name == about.name)).scalar_one()
    upsert(connection, targets, [{"campaign": number, **one} for one in about.targets],
           put=("release", "spec", "source"))
    if before is not None and before != values["tracked"]:
        for name in connection.execute(select(sightings.c.fingerprint).where(
                sightings.c.campaign == number)).scalars().all():
            happened(connection, name, Tracked(), int(now))
    return number


def _stream(connection: Connection, about: About, campaign: int) -> int:
    upsert(connection, streams, [{"id": about.stream, "campaign": campaign,
                                  "folder": str(about.folder.absolute()), "position": 0}],
           put=("campaign", "folder"))
    return connection.execute(select(streams.c.position).where(
        streams.c.id == about.stream)).scalar_one()


def _run(connection: Connection, about: About, campaign: int, now: float) -> None:
    """Of the processes in one folder the one before has ended, if this one has the folder."""
    connection.execute(update(runs).where(
        runs.c.stream == about.stream, runs.c.ended.is_(None), runs.c.id != about.run,
    ).values(ended=runs.c.seen, because=UNSAID))
    upsert(connection, runs, [{"id": about.run, "campaign": campaign, "stream": about.stream,
                               "started": about.started, "seen": int(now), **about.facts}],
           most=("seen",))
