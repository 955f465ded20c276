"""What the pages ask of a store beyond `fuzz.service.reads`: findings by key instead of by offset,
rates while something ran, and what is known of a finding release by release."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, and_, func, literal, or_, select, tuple_

from fuzz.service import reads
from fuzz.service.reads import Row
from fuzz.service.schema import (
    DAY,
    HOUR,
    MINUTE,
    campaigns,
    documents,
    findings,
    history,
    runs,
    sightings,
)
from fuzz.service.triage import NEW, REGRESSED

# Columns by which findings are listed, the largest value first, and then by fingerprint.
ORDERS = {name: findings.c[name] for name in ("last_seen", "first_seen", "count")}
EQUAL = ("state", "kind", "release", "target", "spec", "family")
CURSOR = re.compile(r"(\d{1,18})-([0-9a-zA-Z_-]{1,40})")
# The interval and the seconds of time that a plot shows; 0 is all there is.
SPANS = {"hours": (MINUTE, 3 * HOUR), "days": (HOUR, 14 * DAY), "all": (DAY, 0)}


@dataclass(frozen=True, slots=True)
class Slice:
    """Findings, how many match in all, and the cursors of those before and after, if any."""

    rows: list[Row]
    total: int
    before: str | None
    after: str | None


def cursor(row: Mapping[str, Any], order: str) -> str:
    return f"{row[order]}-{row['fingerprint']}"


def findings_slice(
    connection: Connection, equal: Mapping[str, str], *, campaign: str = "", contains: str = "",
    order: str = "last_seen", after: str = "", before: str = "", limit: int = 50,
) -> Slice:
    """Findings that have the values of `equal`, after or before a cursor of the same order."""
    conditions = [findings.c[name] == value for name, value in equal.items() if value]
    if contains:
        conditions.append(or_(*(findings.c[name].icontains(contains, autoescape=True)
                                for name in ("path", "region", "diagnosis", "fingerprint"))))
    if campaign:
        seen = select(sightings.c.fingerprint).join(campaigns).where(campaigns.c.name == campaign)
        conditions.append(findings.c.fingerprint.in_(seen))
    where = and_(literal(True), *conditions)
    total = connection.execute(select(func.count()).select_from(findings).where(where)).scalar_one()

    key = ORDERS[order], findings.c.fingerprint
    query = select(findings).where(where).limit(limit + 1)
    if found := CURSOR.fullmatch(before or after):
        at = tuple_(literal(int(found[1])), literal(found[2]))
        query = query.where(tuple_(*key) > at if before else tuple_(*key) < at)
    query = query.order_by(*((one.asc() if before else one.desc()) for one in key))
    rows = [dict(row) for row in connection.execute(query).mappings()]
    more, rows = len(rows) > limit, rows[:limit]
    if before:
        rows.reverse()
    first, last = (cursor(rows[0], order), cursor(rows[-1], order)) if rows else (None, None)
    return Slice(rows, total, first if (more if before else bool(after)) else None,
                 last if before or more else None)


def campaign_names(connection: Connection) -> list[str]:
    return list(connection.execute(select(campaigns.c.name).order_by(campaigns.c.name)).scalars())


def documents_of(connection: Connection, rows: Iterable[Row]) -> dict[str, Row]:
    names = [row["fingerprint"] for row in rows]
    query = select(documents.c.fingerprint, documents.c.document).where(
        documents.c.fingerprint.in_(names))
    return {name: document for name, document in connection.execute(query)}


def awake(connection: Connection, campaign: int | None, since: float, now: float
          ) -> list[tuple[float, float]]:
    """When something ran, as intervals that do not overlap, in order."""
    query = select(runs).where(runs.c.seen >= since).order_by(runs.c.started)
    if campaign is not None:
        query = query.where(runs.c.campaign == campaign)
    found: list[tuple[float, float]] = []
    for row in connection.execute(query).mappings():
        runs_now = row["ended"] is None and now - row["seen"] < reads.SILENT
        start, end = float(row["started"]), now if runs_now else float(row["ended"] or row["seen"])
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def overlap(intervals: Iterable[tuple[float, float]], start: float, end: float) -> float:
    return sum(max(min(b, end) - max(a, start), 0.0) for a, b in intervals)


def speeds(
    connection: Connection, campaign: int | None, span: str, now: float | None = None
) -> tuple[int, list[Row]]:
    """The interval's width, and for each interval in which something ran: `start`, the seconds
    `awake`, and each sum of rates divided by these."""
    now = time.time() if now is None else now
    width, shown = SPANS[span]
    since = now - shown if shown else 0
    ran = awake(connection, campaign, since, now)
    sums = {row["start"]: row for row in reads.rates_over_time(
        connection, campaign, width=width, since=since - width)}
    found = []
    for start in sorted({*sums, *_starts(ran, since, width)}):
        seconds = max(overlap(ran, start, start + width), 1.0 if start in sums else 0.0)
        if seconds:
            row = sums.get(start, {})
            found.append({"start": start, "awake": seconds, **{
                name: row.get(name, 0) / seconds for name in (*reads.SUMS, *reads.TIMES)}})
    return width, found


def _starts(intervals: Iterable[tuple[float, float]], since: float, width: int) -> set[int]:
    return {start for a, b in intervals
            for start in range(int(max(a, since) // width) * width, int(b) + 1, width)}


def pace(connection: Connection, campaign: int | None, now: float | None = None) -> Row:
    """Sums per second of the time in which something ran: over the last five minutes where it
    runs, else over all; `lately` says which."""
    now = time.time() if now is None else now
    ran = awake(connection, campaign, 0, now)
    seconds, sums = sum(b - a for a, b in ran), reads.totals(connection, campaign)
    recent = int(now - 5 * MINUTE) // MINUTE * MINUTE
    lately = bool(ran) and ran[-1][1] >= now
    if lately:
        rows = reads.rates_over_time(connection, campaign, width=MINUTE, since=recent)
        sums = {name: sum(row[name] for row in rows) for name in sums}
        seconds = overlap(ran, recent, now)
    return {"lately": lately, **{name: value / max(seconds, 1.0) for name, value in sums.items()}}


def edges_of(known: Mapping[str, bool]) -> list[str]:
    """Where a fault came and went, of releases of which it is known whether they are good."""
    order = sorted(known, key=version)
    return [f"{'fixed' if known[after] else 'broken'} in {after}: {before} is the last "
            f"{'bad' if known[after] else 'good'} release that is known"
            for before, after in zip(order, order[1:], strict=False)
            if known[before] != known[after]]


def releases_of(connection: Connection, finding: Row) -> list[Row]:
    """What each release is known to do about a finding: `passed` from its last replay, `verdict`
    and `diagnosis` of the obligation of that name, `fingerprint` of the same fault found there."""
    name = finding["target"].partition("/")[2]
    own = {row["release"]: row["fingerprint"] for row in [finding, *finding["relatives"]]}
    proved = {row["release"]: row for row in reads.latest_verdicts(connection)
              if name and row["target"].partition("/")[2] == name
              and row["obligation"] == "equals-spec" and row["spec"] == finding["spec"]}
    every = sorted({*own, *proved, *finding["results"]}, key=version)
    return [{"release": one, "passed": finding["results"].get(one),
             "verdict": proved[one]["verdict"] if one in proved else "",
             "diagnosis": proved[one]["diagnosis"] if one in proved else "",
             "fingerprint": own.get(one)} for one in every]


def goodness(rows: Iterable[Row], *, by_proof: bool) -> dict[str, bool]:
    """Which releases are known to be good or bad: by a replay, else since it was found there, else
    `by_proof`, which tells only of a fault that a proof explains."""
    found = {}
    for row in rows:
        if row["passed"] is not None:
            found[row["release"]] = bool(row["passed"])
        elif row["fingerprint"]:
            found[row["release"]] = False
        elif by_proof and row["verdict"] in ("PROVED", "REFUTED"):
            found[row["release"]] = row["verdict"] == "PROVED"
    return found


def version(release: str) -> tuple[tuple[int, ...], str]:
    return tuple(map(int, re.findall(r"\d+", release))), release


def matrix(connection: Connection) -> tuple[list[str], list[Row]]:
    """The releases, and for each obligation of a target the verdict that it had last in each."""
    rows: dict[tuple[str, str, str], dict[str, Row]] = {}
    releases = set()
    for one in reads.latest_verdicts(connection):
        target = one["target"].removeprefix(f"{one['release']}/")
        rows.setdefault((target, one["obligation"], one["arch"]), {})[one["release"]] = one
        releases.add(one["release"])
    return sorted(releases, key=version), [
        {"target": target, "obligation": obligation, "arch": arch, "by": by}
        for (target, obligation, arch), by in rows.items()]


def news(connection: Connection, above: int, limit: int = 100) -> list[Row]:
    """Findings that became new or regressed, by the number of that change."""
    query = (select(history.c.id, history.c.at, history.c.after, history.c.reason,
                    findings, documents.c.document)
             .join(findings, findings.c.fingerprint == history.c.fingerprint)
             .outerjoin(documents, documents.c.fingerprint == history.c.fingerprint)
             .where(history.c.id > above, history.c.after.in_([NEW, REGRESSED]))
             .order_by(history.c.id).limit(limit))
    return [dict(row) for row in connection.execute(query).mappings()]


def last_change(connection: Connection) -> int:
    return connection.execute(select(func.coalesce(func.max(history.c.id), 0))).scalar_one()
