"""What is written into a store, inside a transaction of `Store.writing`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, and_, delete, insert, select, update

from fuzz.case import digest
from fuzz.findings import AXES
from fuzz.service.schema import (
    KEPT,
    campaigns,
    documents,
    findings,
    history,
    paths,
    rates,
    replays,
    sightings,
    verdicts,
)
from fuzz.service.store import INSERTS, upsert
from fuzz.service.triage import Event, Replayed, Triage, after
from fuzz.targets import provider_of

LONGEST_NOTE = 500
AGAIN, GONE, FAILED = "again", "gone", "could not run"


def path_id(connection: Connection, axes: Sequence[str]) -> int:
    """The number of a path, which gets one if it has none."""
    values = dict(zip(AXES, axes, strict=True))
    query = select(paths.c.id).where(*(paths.c[name] == value for name, value in values.items()))
    found = connection.execute(query).scalar_one_or_none()
    if found is None:
        new = INSERTS[connection.dialect.name](paths).values(values)
        connection.execute(new.on_conflict_do_nothing(index_elements=AXES))
        found = connection.execute(query).scalar_one()
    return found


def family_of(document: Mapping[str, Any]) -> str:
    """The same for one fault on one architecture in several releases."""
    provider = document.get("provider", "")
    path = document["path"].replace(f"{provider}/", "") if provider else document["path"]
    return digest(json.dumps([path, document["kind"], document["region"]]))


def record_finding(connection: Connection, document: Mapping[str, Any], at: int) -> None:
    """A finding as fuzz.run writes it: a new one, or what is known of one by now."""
    name, call = document["fingerprint"], document["case"]["call"]
    said = {"diagnosis": (document.get("diagnosis") or {}).get("sentence", "")}
    new = INSERTS[connection.dialect.name](findings).values(
        fingerprint=name, family=family_of(document), kind=document["kind"],
        region=document["region"], path=document["path"],
        release=document.get("provider") or call["provider"], target=call.get("mask_mod") or "",
        spec=call["spec"], state=Triage().state, results={}, first_seen=at, last_seen=at, **said,
    )
    made = connection.execute(new.on_conflict_do_nothing(index_elements=["fingerprint"]).returning(
        findings.c.fingerprint)).one_or_none()
    if made is not None:
        connection.execute(insert(history).values(
            fingerprint=name, at=at, before="", after=Triage().state, reason="found", who=""))
    else:
        connection.execute(update(findings).where(findings.c.fingerprint == name).values(**said))
    whole = dict(document)
    upsert(connection, documents, [{"fingerprint": name, "digest": digest(json.dumps(whole)),
                                    "document": whole}], put=("digest", "document"))


def tracked_of(connection: Connection, fingerprint: str) -> list[str]:
    """The releases that the campaigns which saw a finding track."""
    query = select(campaigns.c.tracked).join(sightings).where(
        sightings.c.fingerprint == fingerprint)
    return sorted({release for found in connection.execute(query).scalars() for release in found})


def happened(
    connection: Connection, fingerprint: str, event: Event, at: int, who: str = ""
) -> Triage | None:
    """Brings a finding into the state that follows from an event, and notes a change in its
    history; None where there is no such finding. Raises TriageError."""
    columns = findings.c.state, findings.c.reason, findings.c.fixed_in, findings.c.results
    row = connection.execute(select(*columns).where(
        findings.c.fingerprint == fingerprint).with_for_update()).one_or_none()
    if row is None:
        return None
    before = Triage(*row)
    now = after(before, event, tracked_of(connection, fingerprint))
    if now != before:
        connection.execute(update(findings).where(findings.c.fingerprint == fingerprint).values(
            state=now.state, reason=now.reason, fixed_in=now.fixed_in, results=dict(now.results)))
    if (now.state, now.reason) != (before.state, before.reason):
        connection.execute(insert(history).values(
            fingerprint=fingerprint, at=at, before=before.state, after=now.state,
            reason=now.reason, who=who))
    return now


def record_replay(
    connection: Connection, fingerprint: str, release: str, result: str, text: str, at: int
) -> Triage | None:
    """What a replay on a release came to: AGAIN, GONE or FAILED, which changes no state. None where
    there is no such finding."""
    known = select(findings.c.fingerprint).where(findings.c.fingerprint == fingerprint)
    if connection.execute(known).one_or_none() is None:
        return None
    last = connection.execute(
        select(replays.c.id, replays.c.result).where(
            replays.c.fingerprint == fingerprint, replays.c.release == release)
        .order_by(replays.c.id.desc()).limit(1)).one_or_none()
    if last is not None and last.result == result:
        connection.execute(update(replays).where(replays.c.id == last.id).values({
            "text": text, "count": replays.c["count"] + 1, "at": at}))
    else:
        connection.execute(insert(replays).values({
            "fingerprint": fingerprint, "release": release, "result": result, "text": text,
            "count": 1, "since": at, "at": at}))
    if result == FAILED:
        return None
    return happened(connection, fingerprint, Replayed(release, result == GONE), at)


def record_verdicts(connection: Connection, report: Mapping[str, Any], at: int) -> int:
    """The results of a check (`spec.check --json`): a row for each verdict that is not the one
    before. Returns how many these were."""
    changed = 0
    for one in report["results"]:
        key = {"release": provider_of(one["target"]), "target": one["target"],
               "obligation": one["obligation"], "arch": one.get("arch") or "",
               "spec": one["spec"] or ""}
        diagnosis = one.get("diagnosis") or {}
        said = (one["verdict"], diagnosis.get("sentence", ""))
        last = connection.execute(
            select(verdicts.c.verdict, verdicts.c.diagnosis)
            .where(and_(*(verdicts.c[name] == value for name, value in key.items())))
            .order_by(verdicts.c.id.desc()).limit(1)).one_or_none()
        if last is None or tuple(last) != said:
            connection.execute(insert(verdicts).values(
                **key, verdict=said[0], diagnosis=said[1], at=at))
            changed += 1
    return changed


def drop_old_rates(connection: Connection, now: float) -> None:
    """Drops intervals that are part of longer ones and older than they are kept."""
    for width, kept in KEPT.items():
        if kept is not None:
            connection.execute(delete(rates).where(
                rates.c.width == width, rates.c.start < int(now) - kept))
