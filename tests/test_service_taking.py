"""What has ended comes into the store once, wherever what writes or takes it is cut off."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.service import reads, taking
from fuzz.service.journal import Reader
from fuzz.service.store import Store, StoreError, opened, url_of
from fuzz.service.taking import Taker
from fuzz.state import State, open_state
from tests.service_stores import AXES, a_state, a_taker, ended, finding, saved, take_all

pytest_plugins = ["tests.service_fixtures"]


def left(state: State) -> State:
    """The state as the next process finds it when this one is killed."""
    state.journal.close()
    state.lock.close()
    return open_state(state.folder.parent)


def stored(store: Store) -> dict[str, int]:
    with store.reading() as connection:
        return {**reads.totals(connection), "notes": sum(
            row["count"] for row in reads.all_notes(connection))}


def agrees(store: Store, state: State) -> None:
    """The store has just what the state has."""
    found = stored(store)
    for name in ("launches", "sequences", "cells", "run_seconds"):
        assert found[name] == state.totals.get(name, 0)
    assert found["notes"] == sum(state.totals.get("skipped", {}).values())
    with store.reading() as connection:
        classes = {row["boundary"]: row["count"] for row in reads.boundaries(connection)}
        rows = reads.findings_page(connection).rows
    assert sum(classes.values()) == found["sequences"]
    assert {row["fingerprint"]: row["count"] for row in rows if row["count"]} == (
        state.totals.get("findings", {}))


class Cut(Exception):
    pass


def cut_off(taker: Taker, *, after_commit: bool) -> None:
    """Ends the taker in the midst of a transaction, or just behind one."""
    def broken(*given: object) -> None:
        raise Cut

    where = (Reader, "drop") if after_commit else (taking, "drop_old_rates")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Cut):
        patch.setattr(*where, broken)
        taker.take(1000)


STEPS = st.lists(st.sampled_from(
    ["end", "end", "find", "skip", "compact", "take", "killed", "torn", "cut", "cut behind",
     "another"]), max_size=25)


@given(STEPS)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_entry_is_stored_once(steps: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        state, store = a_state(folder), opened(url_of(None, folder))
        taker = a_taker(folder, state, store)
        one = finding()
        saved(folder, one)
        for n, step in enumerate(steps, 1):
            pending = state.entries > taker.position
            match step:
                case "end":
                    state.begin("k", n, {"add": "of a recipe"})
                    state.end("k", n, ended(n), AXES)
                case "find":
                    state.end("k", n, ended(n, findings={one["fingerprint"]: 1}), AXES)
                case "skip":
                    state.add({"skipped": {"why": n}})
                case "compact":
                    state.compact()
                case "take":
                    taker.take(1000)
                case "killed":
                    state = left(state)
                case "torn":
                    state.journal.write(b'{"end": ["k"')
                    state = left(state)
                case "cut" | "cut behind" if pending:
                    cut_off(taker, after_commit=step == "cut behind")
                    taker = a_taker(folder, state, store)
                case "another":
                    taker = a_taker(folder, state, store)
        take_all(taker)
        assert taker.position == state.entries and not taker.reader.missing
        agrees(store, state)
        store.close()
        state.close()


def test_a_journal_goes_when_the_store_has_it(store: Store, tmp_path: Path) -> None:
    state = a_state(tmp_path)
    taker = a_taker(tmp_path, state, store)
    for n in range(4):
        state.end("k", n, ended(), AXES)
        state.compact()
    state.end("k", 4, ended(), AXES)
    assert len(list((tmp_path / "state").glob("journal-*"))) == 5
    take_all(taker)
    assert [path.name for path in (tmp_path / "state").glob("journal-*")] == [
        state._journal().name]
    agrees(store, state)
    state.close()


def test_a_folder_that_had_no_store_begins_with_one(store: Store, tmp_path: Path) -> None:
    """Launches before are not in it; findings are."""
    one = finding()
    saved(tmp_path, one)
    state = open_state(tmp_path)
    state.end("k", 0, ended())
    state.keep_journals()
    state.keep_journals()
    state.end("k", 1, ended(7), AXES)
    take_all(a_taker(tmp_path, state, store))
    assert stored(store)["sequences"] == 7
    with store.reading() as connection:
        (row,) = reads.findings_page(connection).rows
    assert (row["fingerprint"], row["count"]) == (one["fingerprint"], 0)
    state.close()


def test_what_no_journal_has_any_more_is_said(store: Store, tmp_path: Path) -> None:
    state = a_state(tmp_path)
    state.end("k", 0, ended(1), AXES)
    old = state._journal()
    state.compact()
    old.unlink()
    state.end("k", 1, ended(2), AXES)
    taker = a_taker(tmp_path, state, store)
    take_all(taker)
    assert stored(store)["sequences"] == 2
    with store.reading() as connection:
        (note,) = reads.all_notes(connection, kind="infrastructure")
    assert note["count"] == 1 and "in no journal" in note["text"]
    state.end("k", 2, ended(3), AXES)
    take_all(a_taker(tmp_path, state, store))
    assert stored(store)["sequences"] == 5
    state.close()


def test_an_older_copy_of_a_folder_is_refused(store: Store, tmp_path: Path) -> None:
    state = a_state(tmp_path)
    state.end("k", 0, ended(), AXES)
    take_all(a_taker(tmp_path, state, store))
    with pytest.raises(StoreError, match="an older copy"):
        a_taker(tmp_path, state, store, entries=0)
    state.close()


def test_of_two_that_take_one_is_refused(store: Store, tmp_path: Path) -> None:
    state = a_state(tmp_path)
    first, second = a_taker(tmp_path, state, store), a_taker(tmp_path, state, store)
    state.end("k", 0, ended(3), AXES)
    first.take(1000)
    with pytest.raises(StoreError, match="another process"):
        second.take(1000)
    assert stored(store)["sequences"] == 3
    state.close()


def test_a_finding_whose_file_is_gone_is_said(store: Store, tmp_path: Path) -> None:
    state = a_state(tmp_path)
    state.end("k", 0, ended(findings={"0123": 2}), AXES)
    take_all(a_taker(tmp_path, state, store))
    with store.reading() as connection:
        (note,) = reads.all_notes(connection)
        assert reads.findings_page(connection).total == 0
    assert note["count"] == 2 and "0123" in note["text"]
    state.close()


def test_a_case_that_became_smaller_is_stored(store: Store, tmp_path: Path) -> None:
    one = finding()
    state = a_state(tmp_path)
    taker = a_taker(tmp_path, state, store)
    for text in ("large", "small"):
        saved(tmp_path, {**one, "text": text})
        state.end("k", 0, ended(findings={one["fingerprint"]: 1}), AXES)
        take_all(taker)
    with store.reading() as connection:
        found = reads.finding_of(connection, one["fingerprint"])
        (row,) = reads.all_documents(connection, 1)
    assert found is not None and found["count"] == 2
    assert found["document"]["text"] == row["document"]["text"] == "small"
    assert [row["name"] for row in found["sightings"]] == ["nightly"]
    state.close()


def test_two_folders_of_one_campaign_add_up(store: Store, tmp_path: Path) -> None:
    one = finding()
    for name in ("here", "there"):
        saved(tmp_path / name, one)
        state = a_state(tmp_path / name)
        state.end("k", 0, ended(5, findings={one["fingerprint"]: 1}), AXES)
        take_all(a_taker(tmp_path / name, state, store, run=name))
        state.close()
    assert stored(store)["sequences"] == 10
    with store.reading() as connection:
        (row,) = reads.findings_page(connection).rows
    assert row["count"] == 2


def test_replays_come_with_what_has_ended(store: Store, tmp_path: Path) -> None:
    one = finding()
    saved(tmp_path, one)
    state = a_state(tmp_path)
    replay = {"fingerprint": one["fingerprint"], "release": "vllm-0.33.0", "result": "again",
              "text": "1 of 2 cells are wrong"}
    state.end("k", 0, ended(findings={one["fingerprint"]: 1}), AXES)
    state.add({"replays": 1}, {"replay": replay})
    take_all(a_taker(tmp_path, state, store))
    take_all(a_taker(tmp_path, state, store))
    with store.reading() as connection:
        found = reads.finding_of(connection, one["fingerprint"])
    assert found is not None and found["state"] == "open" and len(found["replays"]) == 1
    state.close()


def test_a_line_of_any_length_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzz.service.journal.PIECE", 64)
    state = a_state(tmp_path)
    for n in range(5):
        state.end("k", n, ended(n, skipped={"x" * 50 * n: 1}), AXES)
    reader = Reader(tmp_path / "state", 0)
    found = []
    while batch := reader.batch():
        found += batch
    assert [entry.n for entry in found] == list(range(5))
    assert [entry.add["sequences"] for entry in found] == list(range(5))
    state.close()


def test_snapshots_of_before_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "snapshot.json").write_text(json.dumps({
        "schema": 1, "journal": 3, "totals": {"launches": 2}, "position": {}, "unfinished": {},
        "seed": 1}))
    state = open_state(tmp_path)
    assert (state.entries, state.stream, state.totals) == (0, "", {"launches": 2})
    state.close()


class Narrow:
    """A journal on a disk that has room for so many bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, line: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self.file.write(line[:self.room])
        self.room -= written
        return written

    def truncate(self, size: int) -> None:
        self.room += os.fstat(self.file.fileno()).st_size - size
        self.file.truncate(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 1, 7, 200, 500])
def test_a_line_that_has_no_room_is_written_when_it_has(tmp_path: Path, room: int) -> None:
    state = a_state(tmp_path)
    state.journal = Narrow(state.journal, room)
    asked: list[OSError] = []

    def waits(error: OSError) -> bool:
        asked.append(error)
        state.journal.room += 50
        return len(asked) < 1000

    state.waits = waits
    for n in range(5):
        state.end("k", n, ended(n), AXES)
    lines = state._journal().read_bytes().splitlines()
    assert [json.loads(line).get("end") for line in lines[1:]] == [["k", n] for n in range(5)]
    assert asked and state.entries == 5
    reader = Reader(tmp_path / "state", 0)
    assert [entry.n for entry in reader.batch()] == list(range(5))
    state.close()


def test_a_full_disk_that_nobody_waits_for_is_an_error(tmp_path: Path) -> None:
    state = a_state(tmp_path)
    state.journal = Narrow(state.journal, 30)
    with pytest.raises(OSError, match="No space left"):
        state.end("k", 0, ended(), AXES)
    state = left(state)
    assert state.entries == 0
    state.end("k", 0, ended(), AXES)
    assert len(Reader(tmp_path / "state", 0).batch()) == 1
    state.close()
