"""The JSON interface under /api, which /api/openapi.json describes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from sqlalchemy.exc import DataError

from fuzz.service import reads
from fuzz.service.records import record_verdicts
from fuzz.service.store import Store
from fuzz.service.triage import TriageError
from fuzz.service.web import queries
from fuzz.service.web.access import Access
from fuzz.service.web.forms import Filter, Fingerprint, Judged, Text
from fuzz.service.web.metrics import exposed

router = APIRouter(prefix="/api")
plain = APIRouter()
Json = dict[str, Any]


class Finding(BaseModel):
    """A finding without its document. Times are seconds since 1970."""

    fingerprint: str
    family: str
    kind: str
    region: str
    release: str
    target: str
    spec: str
    path: str
    diagnosis: str
    state: str
    reason: str
    fixed_in: str
    results: dict[str, bool]
    count: int
    first_seen: int
    last_seen: int


class Findings(BaseModel):
    """A part of a list: `total` match; `after` and `before` ask for the parts next to it."""

    findings: list[Finding]
    total: int
    after: str | None
    before: str | None


class Whole(Finding):
    """A finding with all that is known of it. `edges` say where it came and went."""

    document: Json | None
    history: list[Json]
    replays: list[Json]
    sightings: list[Json]
    relatives: list[Finding]
    releases: list[Json]
    edges: list[str]


class Decided(BaseModel):
    state: str
    reason: str


class Recorded(BaseModel):
    """`changed` verdicts were new, or others than before."""

    changed: int


class Check(BaseModel):
    """What `python -m spec.check --json FILE` writes."""

    results: list[Json]


def store_of(request: Request) -> Store:
    return request.app.state.store


def may_write(request: Request) -> None:
    access: Access = request.app.state.access
    if access.token is None:
        raise HTTPException(403, "nothing can be changed here: it was started without a token")
    if not access.bearer(request):
        raise HTTPException(401, "a token is needed: Authorization: Bearer TOKEN",
                            {"WWW-Authenticate": "Bearer"})


Opened = Annotated[Store, Depends(store_of)]
MayWrite = Depends(may_write)


@router.get("/campaigns", tags=["campaigns"])
def campaigns(store: Opened) -> list[Json]:
    """Every campaign with its sums, its last run, and how many findings are in each state."""
    with store.reading() as connection:
        return reads.all_campaigns(connection)


@router.get("/rates", tags=["campaigns"])
def rates(
    store: Opened, campaign: Text = "", span: Literal["hours", "days", "all"] = "hours",
) -> Json:
    """Sums per second while something ran, for each interval of `width` seconds."""
    with store.reading() as connection:
        width, rows = queries.speeds(connection, number_of(connection, campaign), span)
        return {"width": width, "rates": rows}


@router.get("/coverage", tags=["campaigns"])
def coverage(
    store: Opened, campaign: Text = "",
    by: Annotated[list[Literal["release", "target", "spec", "where", "layout", "flags"]],
                  Query(max_length=6)] = list(reads.AXES),
) -> list[Json]:
    """Of how many combinations of path and boundary class how many were reached."""
    with store.reading() as connection:
        return reads.coverage_table(connection, number_of(connection, campaign), by)


def number_of(connection: Any, campaign: str) -> int | None:
    if not campaign:
        return None
    if (found := reads.campaign_of(connection, campaign)) is None:
        raise HTTPException(404, "there is no such campaign")
    return found["id"]


@router.get("/findings", tags=["findings"])
def findings(store: Opened, given: Annotated[Filter, Query()]) -> Findings:
    """Findings, those seen last first."""
    with store.reading() as connection:
        found = given.slice(connection)
    return Findings(findings=[Finding(**row) for row in found.rows], total=found.total,
                    after=found.after, before=found.before)


@router.get("/findings/{fingerprint}", tags=["findings"])
def finding(store: Opened, fingerprint: Fingerprint) -> Whole:
    """One finding: its document, what became of it, and what each release does about it."""
    with store.reading() as connection:
        found = reads.finding_of(connection, fingerprint)
        if found is None:
            raise HTTPException(404, "there is no such finding")
        releases = queries.releases_of(connection, found)
    good = queries.goodness(releases, by_proof=bool(found["diagnosis"]))
    return Whole(**found, releases=releases, edges=queries.edges_of(good))


@router.post("/findings/{fingerprint}/triage", tags=["findings"], dependencies=[MayWrite])
def judge(store: Opened, fingerprint: Fingerprint, given: Judged) -> Decided:
    """Accepts a finding, sets it aside with a reason, or reopens it."""
    try:
        with store.writing() as connection:
            now = given.carry_out(connection, fingerprint, "API")
    except TriageError as error:
        raise HTTPException(409, str(error)) from None
    if now is None:
        raise HTTPException(404, "there is no such finding")
    return Decided(state=now.state, reason=now.reason)


@router.get("/verdicts", tags=["releases"])
def verdicts(store: Opened, release: Text = "") -> list[Json]:
    """The verdict that each obligation had last."""
    with store.reading() as connection:
        return reads.latest_verdicts(connection, release or None)


@router.post("/verdicts", tags=["releases"], dependencies=[MayWrite])
def record(store: Opened, given: Check) -> Recorded:
    """Stores the verdicts of a check. They are data: nothing in them is looked up or run."""
    import time

    try:
        with store.writing() as connection:
            return Recorded(changed=record_verdicts(
                connection, {"results": given.results}, int(time.time())))
    except (KeyError, TypeError, AttributeError, UnicodeError, DataError):
        raise HTTPException(422, "not what spec.check --json writes") from None


@plain.get("/metrics", include_in_schema=False)
def metrics(store: Opened) -> Response:
    with store.reading() as connection:
        text = exposed(connection)
    return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})
