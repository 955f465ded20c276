"""One schema in SQLite and PostgreSQL: made by migrations, read and written in transactions."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import URL, insert, text

from fuzz.service import reads
from fuzz.service.exporting import everything
from fuzz.service.records import (
    AGAIN,
    FAILED,
    GONE,
    drop_old_rates,
    family_of,
    happened,
    path_id,
    record_finding,
    record_replay,
    record_verdicts,
)
from fuzz.service.schema import (
    DAY,
    HOUR,
    KEPT,
    MINUTE,
    campaigns,
    metadata,
    notes,
    rates,
)
from fuzz.service.store import Away, Store, StoreError, opened, upsert, url_of
from fuzz.service.triage import Accepted, SetAside, TriageError
from tests.service_stores import (
    AXES,
    a_state,
    a_taker,
    ended,
    finding,
    saved,
    take_all,
)

pytest_plugins = ["tests.service_fixtures"]


def test_the_migrations_make_the_schema(store: Store) -> None:
    with store.reading() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []


def test_a_store_is_opened_again_and_by_many_at_once(url: URL) -> None:
    opened(url).close()
    failed: list[BaseException] = []

    def again() -> None:
        try:
            opened(url).close()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=again) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_many_make_the_tables_at_once(url: URL) -> None:
    done: list[Store] = []
    threads = [threading.Thread(target=lambda: done.append(opened(url))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 3
    for one in done:
        one.close()


def test_a_store_of_a_later_version_is_left_alone(store: Store) -> None:
    with store.writing() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(StoreError, match="made by a later version"):
        opened(store.url)


@pytest.mark.parametrize(("given", "message"), [
    ("mysql://here/x", "a path, sqlite:///PATH or postgresql://"),
    ("://x", "no URL"),
    ("sqlite://", "a path is missing"),
])
def test_a_url_that_names_no_store_is_said(given: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=message):
        url_of(given, tmp_path)


def test_a_password_is_not_shown(tmp_path: Path) -> None:
    url = url_of("postgresql://me:secret@127.0.0.1:1/x", tmp_path)
    with pytest.raises(Away) as told:
        opened(url)
    assert "secret" not in str(told.value) and "\n" not in str(told.value)


def test_a_file_that_is_no_store_is_said(tmp_path: Path) -> None:
    (tmp_path / "store.sqlite").write_text("not a database " * 100)
    with pytest.raises(StoreError, match="not a database"):
        opened(url_of(None, tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(Away, match="unable to open"):
        opened(url_of(None, tmp_path / "file"))


def test_what_fails_inside_is_not_written(store: Store) -> None:
    def row(name: str) -> dict[str, object]:
        return {"name": name, "mode": "batch", "file": {}, "tracked": [], "created": 1}

    with pytest.raises(ZeroDivisionError), store.writing() as connection:
        connection.execute(insert(campaigns).values(row("lost")))
        raise ZeroDivisionError
    with store.writing() as connection:
        connection.execute(insert(campaigns).values(row("kept")))
    with store.reading() as connection:
        assert [one["name"] for one in reads.all_campaigns(connection)] == ["kept"]


def test_upserts_add_put_and_keep_the_ends(store: Store) -> None:
    with store.writing() as connection:
        connection.execute(insert(campaigns).values(
            name="c", mode="batch", file={}, tracked=[], created=1))

    def note(count: int, first: int, last: int) -> None:
        row = {"campaign": 1, "kind": "skipped", "text": "why", "count": count,
               "first_seen": first, "last_seen": last}
        with store.writing() as connection:
            upsert(connection, notes, [row], add=("count",), least=("first_seen",),
                   most=("last_seen",))

    note(1, 5, 6)
    note(2, 3, 4)
    note(4, 9, 9)
    with store.reading() as connection:
        (row,) = reads.all_notes(connection)
    assert (row["count"], row["first_seen"], row["last_seen"]) == (7, 3, 9)


def test_a_path_has_one_number(store: Store) -> None:
    with store.writing() as connection:
        first = path_id(connection, AXES)
        assert path_id(connection, AXES) == first
        assert path_id(connection, [*AXES[:-1], "causal"]) != first


def test_a_finding_is_stored_once_and_brought_up_to_date(store: Store) -> None:
    one = finding()
    small = {**one, "diagnosis": {"sentence": "equals causal"}}
    with store.writing() as connection:
        record_finding(connection, one, 10)
        record_finding(connection, small, 20)
    with store.reading() as connection:
        found = reads.finding_of(connection, one["fingerprint"])
        assert reads.finding_of(connection, "nothing") is None
    assert found is not None and found["document"] == json.loads(json.dumps(small))
    assert (found["diagnosis"], found["state"], found["first_seen"]) == ("equals causal", "new", 10)
    assert [(row["before"], row["after"]) for row in found["history"]] == [("", "new")]


def test_the_same_fault_in_two_releases_is_one_family(store: Store) -> None:
    here, there = finding(), finding(release="vllm-0.32.0")
    other = finding(region="inside causal term")
    assert family_of(here) == family_of(there) != family_of(other)
    with store.writing() as connection:
        for one in (here, there, other):
            record_finding(connection, one, 10)
    with store.reading() as connection:
        found = reads.finding_of(connection, here["fingerprint"])
    assert found is not None
    assert [row["fingerprint"] for row in found["relatives"]] == [there["fingerprint"]]


def seen(store: Store, folder: Path, *documents: dict[str, object]) -> None:
    """Has a campaign see findings."""
    state = a_state(folder)
    for one in documents:
        saved(folder, one)
        state.end("k", 0, ended(findings={one["fingerprint"]: 1}), AXES)
    take_all(a_taker(folder, state, store))
    state.close()


def test_a_finding_closes_by_replays_and_comes_back(store: Store, tmp_path: Path) -> None:
    one = finding()
    name = one["fingerprint"]
    seen(store, tmp_path / "f", one)
    with store.writing() as connection:
        assert record_replay(connection, "nothing", "vllm-0.33.0", GONE, "", 11) is None
        assert record_replay(connection, name, "vllm-0.33.0", FAILED, "no", 11) is None
        states = [record_replay(connection, name, "vllm-0.33.0", result, "", 12)
                  for result in (AGAIN, GONE, AGAIN)]
        record_replay(connection, name, "vllm-0.33.0", AGAIN, "still", 15)
    assert [found.state for found in states if found] == ["open", "fixed", "regressed"]
    with store.reading() as connection:
        found = reads.finding_of(connection, name)
    assert found is not None
    assert [row["after"] for row in found["history"]] == ["new", "open", "fixed", "regressed"]
    assert [row["result"] for row in found["replays"]] == [AGAIN, GONE, AGAIN, FAILED]
    last = found["replays"][0]
    assert (last["count"], last["since"], last["at"], last["text"]) == (2, 12, 15, "still")
    with store.writing() as connection, pytest.raises(TriageError, match="reason"):
        happened(connection, name, SetAside("wontfix", " "), 13)
    with store.writing() as connection:
        assert happened(connection, "nothing", Accepted(), 13) is None
        now = happened(connection, name, SetAside("wontfix", "padding"), 13, "me")
    assert now is not None and (now.state, now.reason) == ("wontfix", "padding")


def test_a_finding_closes_when_a_bad_release_is_tracked_no_more(
    store: Store, tmp_path: Path
) -> None:
    one = finding()
    name = one["fingerprint"]
    saved(tmp_path, one)
    state = a_state(tmp_path)
    both = ["vllm-0.33.0", "vllm-0.34.0"]
    a_taker(tmp_path, state, store, tracked=both)
    with store.writing() as connection:
        record_replay(connection, name, both[0], AGAIN, "", 11)
        now = record_replay(connection, name, both[1], GONE, "", 12)
    assert now is not None and now.state == "open"
    a_taker(tmp_path, state, store, tracked=both[1:])
    with store.reading() as connection:
        found = reads.finding_of(connection, name)
    assert found is not None and (found["state"], found["fixed_in"]) == ("fixed", both[1])
    state.close()


def test_findings_come_in_pages_with_filters(store: Store) -> None:
    kinds = ("leak", "loss", "hang")
    with store.writing() as connection:
        for i in range(30):
            record_finding(connection, finding(kinds[i % 3], f"region {i} 100%_"), 100 + i)
    with store.reading() as connection:
        page = reads.findings_page(connection, offset=20, limit=20)
        assert (page.total, len(page.rows), page.offset) == (30, 10, 20)
        assert [row["last_seen"] for row in page.rows] == list(range(109, 99, -1))
        some = reads.findings_page(connection, {"kind": ("leak", "loss"), "state": "new"})
        assert some.total == 20 and {row["kind"] for row in some.rows} == {"leak", "loss"}
        assert reads.findings_page(connection, contains="REGION 7 ").total == 1
        assert reads.findings_page(connection, contains="100%_").total == 30
        assert reads.findings_page(connection, contains="1%0").total == 0
        assert reads.findings_page(connection, {"state": "fixed"}).total == 0
        assert reads.findings_page(connection, campaign=1).total == 0
        by_kind = reads.findings_page(connection, order="kind").rows
        assert [row["kind"] for row in by_kind] == sorted(row["kind"] for row in by_kind)
        assert reads.choices(connection, "kind") == [
            {"value": kind, "count": 10} for kind in sorted(kinds)]
        assert reads.states(connection) == {"new": 30}


def check(verdict: str, sentence: str | None = None) -> dict[str, object]:
    row = {"target": "vllm-0.33.0/rswa", "obligation": "equals-spec", "arch": "sm_90",
           "spec": "rswa", "verdict": verdict,
           "diagnosis": None if sentence is None else {"sentence": sentence}}
    return {"schema": 1, "results": [row, {**row, "obligation": "no-overflow", "arch": None,
                                           "verdict": "PROVED", "diagnosis": None}]}


def test_a_verdict_is_stored_when_it_changes(store: Store) -> None:
    with store.writing() as connection:
        assert record_verdicts(connection, check("PROVED"), 1) == 2
        assert record_verdicts(connection, check("PROVED"), 2) == 0
        assert record_verdicts(connection, check("REFUTED", "no window"), 3) == 1
        assert record_verdicts(connection, check("REFUTED", "no window term"), 4) == 1
    with store.reading() as connection:
        last = reads.latest_verdicts(connection, "vllm-0.33.0")
        rows = reads.verdict_history(connection, "vllm-0.33.0", "vllm-0.33.0/rswa", "equals-spec")
        assert reads.latest_verdicts(connection, "vllm-0.32.0") == []
    assert [row["verdict"] for row in last] == ["REFUTED", "PROVED"]
    assert [(row["at"], row["verdict"]) for row in rows] == [
        (1, "PROVED"), (3, "REFUTED"), (4, "REFUTED")]


def test_rates_are_kept_by_minute_hour_and_day(store: Store, tmp_path: Path) -> None:
    state = a_state(tmp_path)
    taker = a_taker(tmp_path, state, store)
    at = 20_000 * DAY
    state._write({"end": ["k", 0], "add": ended(2), "on": AXES})
    for number, moment in ((1, at), (2, at + 61), (4, at + HOUR), (8, at + DAY)):
        line = {"end": ["k", 0], "add": ended(number), "on": AXES, "at": moment}
        state.journal.write(json.dumps(line).encode() + b"\n")
        state._apply(line)
    taker.take(at + DAY)
    with store.reading() as connection:
        days = reads.rates_over_time(connection, 1, width=DAY, until=at + 2 * DAY)
        hours = reads.rates_over_time(connection, width=HOUR, since=at, until=at + DAY)
        minutes = reads.rates_over_time(connection, width=MINUTE, since=at + DAY - 60,
                                        until=at + 2 * DAY, by="release")
        whole = reads.totals(connection, 1)
    assert [(row["start"], row["sequences"]) for row in days] == [(at, 7), (at + DAY, 8)]
    assert [row["launches"] for row in hours] == [2, 1]
    # Minutes of the day before are part of its hours only.
    assert [(row["release"], row["cells"]) for row in minutes] == [("vllm-0.33.0", 80)]
    assert (whole["launches"], whole["sequences"], whole["cells"]) == (5, 17, 170)
    assert whole["run_seconds"] == 1.25 and isinstance(whole["cells"], int)
    state.close()


def test_coverage_knows_what_was_not_reached(store: Store, tmp_path: Path) -> None:
    state = a_state(tmp_path)
    state.end("k", 0, ended(3), AXES)
    state.end("k", 1, ended(4), [*AXES[:-1], "causal"])
    take_all(a_taker(tmp_path, state, store))
    with store.reading() as connection:
        table = reads.coverage_table(connection, 1)
        classes = reads.boundaries(connection, 1, flags="")
        by_spec = reads.coverage_table(connection, by=("spec",))
    assert [(row["flags"], row["reached"], row["combinations"], row["sequences"])
            for row in table] == [("", 1, 3, 3), ("causal", 1, 2, 4)]
    assert {row["boundary"]: row["count"] for row in classes} == {
        "prefill": 3, "decode": 0, "no key": 0}
    assert [row["first_seen"] is None for row in classes] == [True, True, False]
    assert by_spec == [{"spec": "rswa", "combinations": 5, "reached": 2, "sequences": 7}]
    state.close()


def test_the_campaigns_are_listed_with_what_they_did(store: Store, tmp_path: Path) -> None:
    state = a_state(tmp_path)
    state.end("k", 0, ended(3), AXES)
    taker = a_taker(tmp_path, state, store)
    take_all(taker)
    with store.reading() as connection:
        (one,) = reads.all_campaigns(connection, now=1010)
        (old,) = reads.all_campaigns(connection, now=5000)
    assert one["alive"] and not old["alive"] and one["totals"]["sequences"] == 3
    taker.say(1020, ended=1020, because="done")
    a_taker(tmp_path, state, store, 1030, run="run-2", started=1030)
    a_taker(tmp_path, state, store, 1040, run="run-3", started=1040)
    with store.reading() as connection:
        assert reads.campaign_of(connection, "nothing") is None
        rows = reads.all_runs(connection, 1)
        assert [(row["id"], row["ended"], row["because"]) for row in rows] == [
            ("run-3", None, ""), ("run-2", 1030, "it ended without a word"),
            ("run-1", 1020, "done")]
        assert [row["name"] for row in reads.all_targets(connection, 1)] == ["vllm-0.33.0/rswa"]
        whole = everything(connection)
    assert json.loads(json.dumps(whole)) == whole
    assert len(whole["runs"]) == 3 and whole["campaigns"][0]["tracked"] == ["vllm-0.33.0"]
    state.close()


def test_a_day_of_launches_is_small(tmp_path: Path) -> None:
    """A year of campaigns on 60 paths that never rest, and what a further day adds."""
    found = opened(url_of(None, tmp_path))
    path = tmp_path / "store.sqlite"
    with found.writing() as connection:
        connection.execute(insert(campaigns).values(
            name="c", mode="batch", file={}, tracked=[], created=1))
        ids = [path_id(connection, [*AXES[:-1], f"flag {i}"]) for i in range(60)]

    def month(first: int, days: int) -> None:
        sums = {"launches": 10**5, "sequences": 10**8, "cells": 10**12, "kernel_seconds": 1e4}
        now = first + days * DAY
        rows = [{"campaign": 1, "width": width, "start": start, "path": one, **sums}
                for width, kept in KEPT.items() for one in ids
                for start in range(max(first, now - (kept or 2**40)), now, width)]
        with found.writing() as connection:
            drop_old_rates(connection, now)
            upsert(connection, rates, rows)
        with found.engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")

    month(0, 30)
    before = path.stat().st_size
    month(30 * DAY, 30)
    after = path.stat().st_size
    found.close()
    assert before < 3e6 and (after - before) / 30 < 10_000, (before, after)
