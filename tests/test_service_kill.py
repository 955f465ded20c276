"""Whatever is killed, locked, restarted or full, the store has what the campaign has, once."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL

from fuzz import campaign as command
from fuzz import run
from fuzz.findings import stored
from fuzz.service import reads, store, storer
from fuzz.service.store import opened, url_of
from fuzz.state import open_state
from tests import postgres
from tests.test_fuzz_isolation import alive, children
from tests.test_service_campaign import until

pytest_plugins = ["tests.service_fixtures"]

FILE = """
[campaign]
name = "killed"
backend = "cpu"
seed = 5
deadline = 5
store = "{store}"
{more}
[[target]]
names = ["known-bad/chunk-local-q", "rswa"]
"""


def written(folder: Path, url: URL, more: str = 'budget = "300s"') -> Path:
    path = folder / "campaign.toml"
    path.write_text(FILE.format(store=url.render_as_string(hide_password=False), more=more))
    return path


@contextmanager
def started(path: Path) -> Iterator[int]:
    """A campaign in a process of its own, which writes to `said`; killed at the end at the
    latest. It is forked from this one, which has imported everything."""
    pid = os.fork()
    if pid == 0:
        try:
            said = os.open(path.parent / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            sys.stdout = sys.stderr = os.fdopen(said, "w", buffering=1)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, run.INTERRUPT)
            os._exit(command.main(["run", str(path)]))
        finally:
            os._exit(99)
    try:
        yield pid
    finally:
        if not over(pid):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


OVER: dict[int, int] = {}


def over(pid: int) -> bool:
    """Whether it has ended; its exit status is in OVER then."""
    if pid not in OVER:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            OVER[pid] = os.waitstatus_to_exitcode(status)
    return pid in OVER


def said(path: Path) -> str:
    found = path.parent / "said"
    return found.read_text() if found.exists() else ""


def entries(path: Path) -> int:
    """Launches that ended, as the journals there are say."""
    folder = path.parent / "findings/state"
    return sum(one.read_bytes().count(b'{"end"') for one in folder.glob("journal-*"))


def whole(path: Path, url: URL, launches: int = 2) -> None:
    """Runs a few more launches to the end, and compares the store with the folder."""
    path.write_text(path.read_text().replace('budget = "300s"', f"launches = {launches}\n"
                                             'budget = "100s"'))
    with started(path) as pid:
        until(lambda: over(pid), 110)
    assert OVER[pid] == 1, said(path)
    assert "not in the store" not in said(path).splitlines()[-1]
    assert "older copy" not in said(path) and "Error" not in said(path)
    agrees(path, url)


def agrees(path: Path, url: URL) -> None:
    folder = path.parent / "findings"
    state = open_state(folder)
    totals = json.loads(json.dumps(state.totals))
    state.close()
    found = opened(url)
    try:
        with found.reading() as connection:
            sums = reads.totals(connection)
            rows = reads.findings_page(connection, limit=1000).rows
            classes = reads.boundaries(connection)
            notes = {kind: sum(row["count"] for row in reads.all_notes(connection, kind=kind))
                     for kind in ("skipped", "infrastructure")}
            documents = {row["document"]["fingerprint"]: row["document"]
                         for row in reads.all_documents(connection)}
            begun = reads.all_runs(connection)
    finally:
        found.close()
    # An entry of what went wrong ends a launch that did not run.
    ran = sum(one["launches"] for one in totals["paths"].values())
    assert sums["launches"] == ran
    for name in ("sequences", "cells", "wrong_cells", "kernels"):
        assert sums[name] == totals[name], name
    assert {row["fingerprint"]: row["count"] for row in rows if row["count"]} == (
        totals["findings"])
    assert {row["boundary"]: row["count"] for row in classes} == summed(totals["classes"])
    assert notes["infrastructure"] == sum(totals.get("infrastructure", {}).values())
    assert documents == stored(folder)
    assert all(row["ended"] is not None for row in begun)


def summed(classes: dict[str, dict[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for counts in classes.values():
        for name, count in counts.items():
            found[name] = found.get(name, 0) + count
    return found


def kill_a_child(pid: int, rng: random.Random) -> None:
    if found := children(pid):
        os.kill(rng.choice(found), signal.SIGKILL)


def rounds(path: Path, url: URL, count: int, more: Callable[[random.Random], None] | None) -> None:
    """Starts the campaign again and again; kills children, server and at last the parent at random
    times."""
    rng = random.Random(17)
    for _ in range(count):
        with started(path) as pid:
            before = entries(path)
            until(lambda: entries(path) != before or over(pid), 60)  # noqa: B023
            assert not over(pid), said(path)
            for _ in range(rng.randint(0, 3)):
                time.sleep(rng.uniform(0, 0.5))
                if more is not None and rng.random() < 0.4:
                    more(rng)
                else:
                    kill_a_child(pid, rng)
            time.sleep(rng.uniform(0, 0.7))
            left = children(pid)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            OVER[pid] = -9
        until(lambda: not any(map(alive, left)), 10)  # noqa: B023
    whole(path, url)


def test_kill_9_of_anything_loses_and_doubles_nothing(url: URL, tmp_path: Path) -> None:
    rounds(written(tmp_path, url), url, 2, None)


@pytest.mark.skipif(bool(postgres.MISSING), reason=str(postgres.MISSING))
def test_kill_9_of_the_server_loses_and_doubles_nothing(
    server: postgres.Server, tmp_path: Path
) -> None:
    url = url_of(server.fresh(), tmp_path)
    rounds(written(tmp_path, url), url, 2, lambda rng: crashed(server, rng))


@pytest.mark.slow
def test_kill_9_in_many_rounds(url: URL, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """50 rounds of each store; of PostgreSQL the server, too."""
    server = request.getfixturevalue("server") if url.get_backend_name() != "sqlite" else None
    rounds(written(tmp_path, url), url, 50,
           None if server is None else lambda rng: crashed(server, rng))


def crashed(server: postgres.Server, rng: random.Random) -> None:
    server.stop(rng.choice([signal.SIGKILL, signal.SIGINT]))
    time.sleep(rng.uniform(0, 0.3))
    server.start()


def test_a_locked_file_is_waited_for_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too much that is not stored ends new launches until it is."""
    monkeypatch.setattr(store, "PATIENCE", 0.3)
    url = url_of(None, tmp_path / "findings")
    path = written(tmp_path, url, 'backlog = 6\nbudget = "300s"')
    with started(path) as pid:
        until(lambda: entries(path) >= 1)
        lock = sqlite3.connect(url.database, isolation_level=None)
        lock.execute("BEGIN IMMEDIATE")
        until(lambda: "the campaign pauses" in said(path))
        time.sleep(1.0)
        paused = entries(path)
        time.sleep(1.5)
        assert entries(path) == paused
        lock.execute("ROLLBACK")
        lock.close()
        until(lambda: "the campaign goes on" in said(path))
        until(lambda: entries(path) > paused)
        os.kill(pid, signal.SIGINT)
        until(lambda: over(pid))
    text = said(path)
    assert text.count("the store is away") == 1 and "database is locked" in text
    assert text.count("the store is back") == 1
    whole(path, url)
    found = opened(url)
    with found.reading() as connection:
        assert "locked" in reads.all_notes(connection, kind="store")[0]["text"]
    found.close()


def test_what_cannot_be_stored_at_the_end_is_stored_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "PATIENCE", 0.3)
    monkeypatch.setattr("fuzz.service.running.DRAIN", 2.0)
    url = url_of(None, tmp_path / "findings")
    opened(url).close()
    lock = sqlite3.connect(url.database, isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    path = written(tmp_path, url, "launches = 4\nbudget = \"100s\"")
    with started(path) as pid:
        until(lambda: over(pid))
    assert "4 launches are not in the store: the next start stores them" in said(path)
    lock.close()
    (path.parent / "said").unlink()
    whole(path, url)


def test_a_store_that_does_not_answer_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storer, "SILENT", 2.0)
    monkeypatch.setattr(storer, "ALIVE", 0.5)
    url = url_of(None, tmp_path / "findings")
    path = written(tmp_path, url)
    with started(path) as pid:
        until(lambda: entries(path) >= 1)
        for child in children(pid):
            os.kill(child, signal.SIGSTOP)
        until(lambda: "away (it does not answer)" in said(path))
        for child in children(pid):
            os.kill(child, signal.SIGCONT)
        until(lambda: "the store is back" in said(path))
        os.kill(pid, signal.SIGINT)
        until(lambda: over(pid))
    whole(path, url)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.getuid() or not shutil.which("mount") or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder],
            capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_is_waited_for(small_disk: Path, tmp_path: Path) -> None:
    """The folder and its store are on it: both wait, and go on when there is room."""
    path = tmp_path / "campaign.toml"
    findings = small_disk / "findings"
    url = url_of(None, findings)
    path.write_text(FILE.format(store=url.database, more='budget = "300s"').replace(
        "deadline", f'findings = "{findings}"\ndeadline'))
    (tmp_path / "findings").symlink_to(findings)
    with started(path) as pid:
        until(lambda: entries(path) >= 2)
        until(lambda: stuck(path, small_disk))
        assert not over(pid)
        before = entries(path)
        (small_disk / "ballast").unlink()
        until(lambda: entries(path) > before + 2)
        os.kill(pid, signal.SIGINT)
        until(lambda: over(pid))
    assert said(path).count("the disk is full") == 1
    whole(path, url)


def stuck(path: Path, disk: Path) -> bool:
    """Takes all room there is, what others gave back, too; whether nothing ends any more."""
    filled(disk / "ballast")
    before = entries(path)
    time.sleep(1.5)
    return entries(path) == before and "the disk is full" in said(path)


def filled(path: Path) -> None:
    with path.open("ab", buffering=0) as file:
        for size in (2**16, 2**10, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:
                pass


def test_a_full_store_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that may not grow answers as one on a full disk."""
    prepare, limit = store._prepare, tmp_path / "limit"

    def limited(connection: Any, more: Any) -> None:
        prepare(connection, more)
        if limit.exists():
            connection.execute("PRAGMA max_page_count = 1")

    monkeypatch.setattr(store, "_prepare", limited)
    monkeypatch.setattr(storer, "RETRY", 0.2)
    url = url_of(None, tmp_path / "findings")
    limit.touch()
    path = written(tmp_path, url)
    with started(path) as pid:
        until(lambda: "the store is away" in said(path) and entries(path) >= 3)
        limit.unlink()
        until(lambda: "the store is back" in said(path))
        os.kill(pid, signal.SIGINT)
        until(lambda: over(pid))
    assert "database or disk is full" in said(path)
    whole(path, url)
