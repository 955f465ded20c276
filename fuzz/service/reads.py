"""What is asked of a store. Each function takes an open connection (`Store.reading`) and returns
plain dictionaries with the names of `fuzz.service.schema`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Select, and_, case, func, literal, or_, select

from fuzz.service.schema import (
    DAY,
    MINUTE,
    SUMS,
    TIMES,
    campaigns,
    coverage,
    documents,
    findings,
    history,
    notes,
    paths,
    rates,
    replays,
    runs,
    sightings,
    targets,
    verdicts,
)

Row = dict[str, Any]
# A run that was not heard of for so many seconds has ended without a word.
SILENT = 60
AXES = ("release", "target", "spec", "where", "layout", "flags")
FILTERS = ("state", "kind", "release", "target", "spec", "family")
ORDERS = {
    "last seen": findings.c.last_seen.desc(), "first seen": findings.c.first_seen.desc(),
    "count": findings.c["count"].desc(), "kind": findings.c.kind, "state": findings.c.state,
}


@dataclass(frozen=True, slots=True)
class Page:
    """Some of `total` rows, from the one at `offset` on."""

    rows: list[Row]
    total: int
    offset: int
    limit: int


def _rows(connection: Connection, query: Select[Any]) -> list[Row]:
    return [dict(row) for row in connection.execute(query).mappings()]


def _sums() -> list[Any]:
    return [func.coalesce(func.sum(rates.c[name]), 0).label(name) for name in (*SUMS, *TIMES)]


def _numbers(row: Row) -> Row:
    """PostgreSQL sums whole numbers up as decimals."""
    return {name: float(value) if name in TIMES else int(value) if name in SUMS else value
            for name, value in row.items()}


def all_campaigns(connection: Connection, now: float | None = None) -> list[Row]:
    """Every campaign by name, with `totals`, its last `run` and how many `findings` are in each
    state. `alive`: a process runs it and was heard of lately."""
    now = time.time() if now is None else now
    found = _rows(connection, select(campaigns).order_by(campaigns.c.name))
    for one in found:
        last = all_runs(connection, one["id"], limit=1)
        one["run"] = last[0] if last else None
        one["alive"] = bool(last) and last[0]["ended"] is None and now - last[0]["seen"] < SILENT
        one["totals"] = totals(connection, one["id"])
        one["findings"] = states(connection, one["id"])
    return found


def campaign_of(connection: Connection, name: str) -> Row | None:
    return next((one for one in all_campaigns(connection) if one["name"] == name), None)


def all_runs(connection: Connection, campaign: int | None = None, limit: int = 100) -> list[Row]:
    """The last runs, the latest first."""
    query = select(runs).order_by(runs.c.started.desc(), runs.c.id).limit(limit)
    return _rows(connection, query if campaign is None
                 else query.where(runs.c.campaign == campaign))


def all_targets(connection: Connection, campaign: int | None = None) -> list[Row]:
    query = select(targets).order_by(targets.c.campaign, targets.c.name)
    return _rows(connection, query if campaign is None
                 else query.where(targets.c.campaign == campaign))


def totals(connection: Connection, campaign: int | None = None) -> Row:
    """Sums over all that was stored: launches, sequences, cells, seconds, ..."""
    query = select(*_sums()).where(rates.c.width == DAY)
    if campaign is not None:
        query = query.where(rates.c.campaign == campaign)
    return _numbers(_rows(connection, query)[0])


def rates_over_time(
    connection: Connection, campaign: int | None = None, *, width: int = MINUTE,
    since: float = 0, until: float = 2**62, by: str | None = None,
) -> list[Row]:
    """Sums for each interval of `width` seconds (MINUTE, HOUR or DAY), from the earliest on; `by`
    an axis of paths (AXES) for each value of it. An interval in which nothing ended has no row."""
    group = [rates.c.start] if by is None else [rates.c.start, paths.c[by]]
    query = (select(*group, *_sums()).select_from(rates.join(paths))
             .where(rates.c.width == width, rates.c.start >= since, rates.c.start < until)
             .group_by(*group).order_by(*group))
    if campaign is not None:
        query = query.where(rates.c.campaign == campaign)
    return [_numbers(row) for row in _rows(connection, query)]


def coverage_table(
    connection: Connection, campaign: int | None = None, by: Sequence[str] = AXES
) -> list[Row]:
    """For each combination of the axes in `by`: of how many `combinations` of path and boundary
    class how many were `reached`, and with how many `sequences` (each in several classes)."""
    axes = [paths.c[name] for name in by]
    per = (select(coverage.c.path, coverage.c.boundary, func.sum(coverage.c["count"]).label("n"))
           .group_by(coverage.c.path, coverage.c.boundary))
    if campaign is not None:
        per = per.where(coverage.c.campaign == campaign)
    each = per.subquery()
    query = (select(*axes, func.count().label("combinations"),
                    func.sum(case((each.c.n > 0, 1), else_=0)).label("reached"),
                    func.sum(each.c.n).label("sequences"))
             .select_from(each.join(paths, paths.c.id == each.c.path))
             .group_by(*axes).order_by(*axes))
    counted = ("combinations", "reached", "sequences")
    return [{name: int(value) if name in counted else value for name, value in row.items()}
            for row in _rows(connection, query)]


def boundaries(connection: Connection, campaign: int | None = None, **axes: str) -> list[Row]:
    """The boundary classes, each with its `count` of sequences and when it was `first_seen`, over
    the paths with these values of AXES."""
    query = (select(coverage.c.boundary, func.sum(coverage.c["count"]).label("count"),
                    func.min(coverage.c.first_seen).label("first_seen"))
             .select_from(coverage.join(paths)).group_by(coverage.c.boundary)
             .order_by(coverage.c.boundary))
    if campaign is not None:
        query = query.where(coverage.c.campaign == campaign)
    for name, value in axes.items():
        query = query.where(paths.c[name] == value)
    return [{**row, "count": int(row["count"])} for row in _rows(connection, query)]


def findings_page(
    connection: Connection, filters: Mapping[str, str | Sequence[str]] = {}, *,
    campaign: int | None = None, contains: str = "", order: str = "last seen", offset: int = 0,
    limit: int = 50,
) -> Page:
    """Findings without their documents. `filters` are of FILTERS, one value or several; `contains`
    is looked for in path, region and diagnosis; `order` is one of ORDERS."""
    conditions = [findings.c[name].in_([value] if isinstance(value, str) else list(value))
                  for name, value in filters.items() if value]
    if contains:
        conditions.append(or_(*(findings.c[name].icontains(contains, autoescape=True)
                                for name in ("path", "region", "diagnosis", "fingerprint"))))
    if campaign is not None:
        seen = select(sightings.c.fingerprint).where(sightings.c.campaign == campaign)
        conditions.append(findings.c.fingerprint.in_(seen))
    where = and_(literal(True), *conditions)
    total = connection.execute(select(func.count()).select_from(findings).where(where)).scalar_one()
    query = (select(findings).where(where).order_by(ORDERS[order], findings.c.fingerprint)
             .offset(offset).limit(limit))
    return Page(_rows(connection, query), total, offset, limit)


def choices(connection: Connection, name: str) -> list[Row]:
    """The values that one of FILTERS has among the findings, each with its `count`."""
    column = findings.c[name]
    return _rows(connection, select(column.label("value"), func.count().label("count"))
                 .group_by(column).order_by(column))


def states(connection: Connection, campaign: int | None = None) -> dict[str, int]:
    """How many findings are in each state."""
    query = select(findings.c.state, func.count()).group_by(findings.c.state)
    if campaign is not None:
        query = query.join(sightings).where(sightings.c.campaign == campaign)
    return {state: number for state, number in connection.execute(query)}


def finding_of(connection: Connection, fingerprint: str) -> Row | None:
    """A finding with its `document`, `history`, `replays`, `sightings` by campaign, and
    `relatives`: the same fault in other releases."""
    found = _rows(connection, select(findings).where(findings.c.fingerprint == fingerprint))
    if not found:
        return None
    (one,) = found
    document = select(documents.c.document).where(documents.c.fingerprint == fingerprint)
    one["document"] = connection.execute(document).scalar_one_or_none()
    one["history"] = _rows(connection, select(history).where(
        history.c.fingerprint == fingerprint).order_by(history.c.id))
    one["replays"] = _rows(connection, select(replays).where(
        replays.c.fingerprint == fingerprint).order_by(replays.c.id.desc()).limit(200))
    one["sightings"] = _rows(connection, select(campaigns.c.name, sightings.c["count"],
                                                sightings.c.first_seen, sightings.c.last_seen)
                             .join(campaigns).where(sightings.c.fingerprint == fingerprint)
                             .order_by(campaigns.c.name))
    one["relatives"] = _rows(connection, select(findings).where(
        findings.c.family == one["family"], findings.c.fingerprint != fingerprint,
    ).order_by(findings.c.release))
    return one


def all_documents(connection: Connection, campaign: int | None = None) -> list[Row]:
    """The documents of findings by fingerprint, each with the `state` and `reason` of its own."""
    query = (select(documents.c.document, findings.c.state, findings.c.reason, findings.c.fixed_in)
             .join(findings).order_by(findings.c.fingerprint))
    if campaign is not None:
        seen = select(sightings.c.fingerprint).where(sightings.c.campaign == campaign)
        query = query.where(findings.c.fingerprint.in_(seen))
    return _rows(connection, query)


def all_notes(connection: Connection, campaign: int | None = None, kind: str = "") -> list[Row]:
    """What was skipped, and faults of the machine, the most frequent first."""
    query = select(notes).order_by(notes.c["count"].desc(), notes.c.text)
    if campaign is not None:
        query = query.where(notes.c.campaign == campaign)
    return _rows(connection, query.where(notes.c.kind == kind) if kind else query)


def latest_verdicts(connection: Connection, release: str | None = None) -> list[Row]:
    """The verdict that each obligation had last."""
    last = select(func.max(verdicts.c.id)).group_by(
        verdicts.c.release, verdicts.c.target, verdicts.c.obligation, verdicts.c.arch,
        verdicts.c.spec)
    query = select(verdicts).where(verdicts.c.id.in_(last)).order_by(
        verdicts.c.release, verdicts.c.target, verdicts.c.obligation, verdicts.c.arch)
    return _rows(connection, query if release is None else query.where(
        verdicts.c.release == release))


def verdict_history(
    connection: Connection, release: str, target: str, obligation: str
) -> list[Row]:
    """Every change of an obligation's verdict, the earliest first."""
    return _rows(connection, select(verdicts).where(
        verdicts.c.release == release, verdicts.c.target == target,
        verdicts.c.obligation == obligation).order_by(verdicts.c.id))
