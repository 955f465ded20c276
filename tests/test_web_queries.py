"""Lists of findings by key, rates while something ran, and what releases are known to do."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from sqlalchemy import update

from fuzz.service import reads
from fuzz.service.records import GONE, happened, record_replay, record_verdicts
from fuzz.service.schema import findings
from fuzz.service.store import Store
from fuzz.service.triage import SetAside
from fuzz.service.web import queries
from fuzz.service.web.forms import Filter
from tests.service_stores import AXES, a_state, a_taker, ended, take_all
from tests.web_stores import Served, many, stored

pytest_plugins = ["tests.service_fixtures", "tests.web_fixtures"]


@pytest.mark.parametrize("order", queries.ORDERS)
def test_every_part_of_a_list_comes_once_and_in_order(store: Store, order: str) -> None:
    for i in range(23):
        name = stored(store, 1000 + i // 5, region=f"region {i}")
        with store.writing() as connection:
            connection.execute(update(findings).where(findings.c.fingerprint == name)
                               .values(count=i % 3))
    seen, after, pages = [], "", []
    while True:
        with store.reading() as connection:
            part = queries.findings_slice(connection, {}, order=order, after=after, limit=5)
        assert part.total == 23
        seen += part.rows
        pages.append(part)
        if part.after is None:
            break
        after = part.after
    keys = [(row[order], row["fingerprint"]) for row in seen]
    assert keys == sorted(keys, reverse=True) and len(set(keys)) == 23 and len(pages) == 5
    assert pages[0].before is None
    for earlier, later in zip(pages, pages[1:], strict=False):
        with store.reading() as connection:
            back = queries.findings_slice(connection, {}, order=order, before=later.before,
                                          limit=5)
        assert back.rows == earlier.rows
        assert (back.before is None) == (earlier is pages[0]) and back.after == earlier.after


def test_a_list_is_of_what_was_asked_for(store: Store) -> None:
    names = {stored(store, kind=kind, region=region) for kind in ("leak", "loss")
             for region in ("50% of rows", "a_b")}
    assert len(names) == 4

    def asked(**given: str) -> list[str]:
        with store.reading() as connection:
            return [row["kind"] + row["region"]
                    for row in Filter(**given).slice(connection).rows]

    assert sorted(asked(kind="leak")) == ["leak50% of rows", "leaka_b"]
    assert asked(kind="leak", contains="A_B") == ["leaka_b"]
    assert len(asked(contains="50%")) == 2 and asked(contains="5%0") == []
    assert asked(contains="_c") == [] and asked(release="none") == []
    with store.writing() as connection:
        name = next(iter(names))
        happened(connection, name, SetAside("wontfix", "so"), 2000, "test")
    assert len(asked(state="new")) == 3 and len(asked(state="wontfix")) == 1


def test_100_000_findings_are_turned_over_quickly(small: Served) -> None:
    """A page takes 0.1 s and a search for text 0.2 s on two cores that others use as well; the
    bound leaves room for slower ones."""
    many(small.store, 100_000)
    asked = ["/findings", "/findings?state=open", "/findings?kind=leak&release=vllm-0.30.0",
             "/findings?contains=region+96", "/findings?order=count", "/findings?spec=rswa",
             "/api/findings?limit=200"]
    page, times = small.ask("/findings"), {}
    for _ in range(3):
        link = re.search(r'rel="next" href="([^"]+)"', page.text)
        assert link
        asked.append(link[1].replace("&amp;", "&"))
        page = small.ask(asked[-1])
    asked.append("/findings?after=5001-z")  # the end of the list
    for path in asked:
        each = []
        for _ in range(3):
            begun = time.perf_counter()
            answer = small.ask(path)
            each.append(time.perf_counter() - begun)
            assert answer.status == 200
        times[path] = round(min(each), 3)
    assert max(times.values()) < 1.0, times
    assert "100,000" in page.text


def test_rates_count_only_time_in_which_something_ran(tmp_path: Path, store: Store) -> None:
    state = a_state(tmp_path / "a")
    taker = a_taker(tmp_path / "a", state, store, now=6000, started=6000)
    for n in range(3):
        state.end("key", n, ended(number=4), on=AXES)
    taken = take_all(taker, now=6030)
    taker.say(6030, ended=6030, because="over")
    state.close()
    assert taken
    with store.reading() as connection:
        (total,) = reads.rates_over_time(connection, width=86400)
        ran = queries.awake(connection, None, 0, 9000)
        pace = queries.pace(connection, None, now=9000)
        width, rows = queries.speeds(connection, None, "all", now=9000)
    assert total["sequences"] == 12 and ran == [(6000.0, 6030.0)]
    assert not pace["lately"] and pace["sequences"] == pytest.approx(12 / 30)
    speeds = {row["start"]: row["sequences"] for row in rows}
    ended_at = total["start"]
    assert width == 86400 and speeds == {0: 0, ended_at: 12}
    assert next(row["awake"] for row in rows if not row["start"]) == 30


def test_intervals_do_not_overlap() -> None:
    assert queries.overlap([(0, 10), (20, 30)], 5, 25) == 10
    assert queries.overlap([], 0, 10) == 0


def test_edges_are_where_releases_differ() -> None:
    known = {"vllm-0.9.0": True, "vllm-0.10.0": False, "vllm-0.11.0": False, "vllm-0.33.0": True}
    assert queries.edges_of(known) == [
        "broken in vllm-0.10.0: vllm-0.9.0 is the last good release that is known",
        "fixed in vllm-0.33.0: vllm-0.11.0 is the last bad release that is known"]
    assert queries.edges_of({"vllm-0.9.0": False}) == []


def test_a_release_is_judged_by_replay_then_finding_then_proof(store: Store) -> None:
    name = stored(store, release="vllm-0.24.0")
    check = {"results": [
        {"target": f"vllm-{version}/rswa", "obligation": "equals-spec", "spec": "rswa",
         "verdict": verdict} for version, verdict in
        (("0.24.0", "PROVED"), ("0.25.1", "PROVED"), ("0.26.0", "UNKNOWN"))]}
    with store.writing() as connection:
        record_verdicts(connection, check, 1000)
        record_replay(connection, name, "vllm-0.33.0", GONE, "0 of 2 cells are wrong", 1000)
    with store.reading() as connection:
        found = reads.finding_of(connection, name)
        assert found
        rows = queries.releases_of(connection, found)
    assert [row["release"] for row in rows] == [
        "vllm-0.24.0", "vllm-0.25.1", "vllm-0.26.0", "vllm-0.33.0"]
    assert queries.goodness(rows, by_proof=True) == {
        "vllm-0.24.0": False, "vllm-0.25.1": True, "vllm-0.33.0": True}
    assert queries.goodness(rows, by_proof=False) == {"vllm-0.24.0": False, "vllm-0.33.0": True}


def test_the_matrix_has_a_row_for_each_obligation(store: Store) -> None:
    check = {"results": [
        {"target": f"{release}/rswa", "obligation": one, "spec": "rswa", "verdict": "PROVED"}
        for release in ("vllm-0.9.0", "vllm-0.10.0") for one in ("equals-spec", "no-overflow")]}
    with store.writing() as connection:
        record_verdicts(connection, check, 1000)
    with store.reading() as connection:
        releases, rows = queries.matrix(connection)
    assert releases == ["vllm-0.9.0", "vllm-0.10.0"]
    assert [(row["target"], row["obligation"], len(row["by"])) for row in rows] == [
        ("rswa", "equals-spec", 2), ("rswa", "no-overflow", 2)]
