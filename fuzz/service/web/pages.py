"""The pages that a person reads."""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from pydantic import ValidationError

from fuzz.findings import SCRIPT
from fuzz.service import reads
from fuzz.service.reports import WORDS
from fuzz.service.triage import INFRASTRUCTURE, LIVE, NEW, STATES, WONT_FIX, TriageError
from fuzz.service.web import drawing, queries
from fuzz.service.web.access import COOKIE, SIGNED_IN
from fuzz.service.web.api import Opened, number_of
from fuzz.service.web.forms import Fingerprint, Judged, PageFilter, Text, fields
from fuzz.service.web.longer import longer
from fuzz.service.web.rendering import page

router = APIRouter(include_in_schema=False)
Axis = Literal["release", "target", "spec", "where", "layout", "flags"]
GROUPS: Mapping[str, tuple[str, ...]] = {
    "mask": ("spec",), "release and mask": ("release", "spec"), "everything": reads.AXES}
SET_ASIDE = {WONT_FIX: "Set aside: it is not to be fixed",
             INFRASTRUCTURE: "Set aside: the machine is at fault"}
# Rows of the table of releases on one page.
MOST = 1000
PROVED = "PROVED"
# Seconds before a wrong token is answered.
WRONG = 0.5


@router.get("/")
def overview(
    request: Request, store: Opened, span: Literal["hours", "days", "all"] = "hours",
    campaign: Text = "",
) -> Response:
    now = time.time()
    with store.reading() as connection:
        number = number_of(connection, campaign)
        every = reads.all_campaigns(connection)
        for one in every:
            one["pace"] = queries.pace(connection, one["id"], now)
        width, rows = queries.speeds(connection, number, span, now)
        shown = {
            "campaigns": every, "pace": queries.pace(connection, number, now),
            "to_look_at": sum(count for state, count in reads.states(connection, number).items()
                              if state in LIVE),
            "runs": reads.all_runs(connection, number, limit=12),
            "notes": reads.all_notes(connection, number)[:20],
            "latest": queries.findings_slice(connection, {}, campaign=campaign, limit=6).rows,
        }
        shown["documents"] = queries.documents_of(connection, shown["latest"])
    names = {one["id"]: one["name"] for one in every}
    machines = [one["run"] for one in every if one["alive"]]
    return page(request, "overview.html", {
        **shown, "names": names, "machines": machines, "span": span, "campaign": campaign,
        "width": width, "plots": _plots(rows, width), "rates": rows,
        "thumbnail": drawing.thumbnail}, refresh=20)


def _plots(rows: list[reads.Row], width: int) -> list[tuple[str, list[str], Any]]:
    """Title, names of the lines, picture."""
    def line(name: str, times: float = 1.0) -> list[tuple[float, float]]:
        return [(row["start"], row[name] * times) for row in rows]

    kinds: list[tuple[str, dict[str, list[tuple[float, float]]], str]] = [
        ("Sequences per second", {"sequences/s": line("sequences")}, ""),
        ("Cells per second", {"cells/s": line("cells")}, ""),
        ("Share of the time",
         {"compiling": line("compile_seconds", 100), "running": line("run_seconds", 100)}, "%"),
    ]
    return [(title, list(some), drawing.plot(some, width, unit)) for title, some, unit in kinds]


@router.get("/findings")
def findings(request: Request, store: Opened, given: Annotated[PageFilter, Query()]) -> Response:
    with store.reading() as connection:
        found = given.slice(connection)
        shown = queries.documents_of(connection, found.rows)
        choices = {name: reads.choices(connection, name)
                   for name in ("state", "kind", "release", "spec")}
        campaigns = queries.campaign_names(connection)
    return page(request, "findings.html", {
        "found": found, "given": given, "choices": choices, "campaigns": campaigns,
        "documents": shown, "thumbnail": drawing.thumbnail,
        "counts": {row["value"]: row["count"] for row in choices["state"]}, "states": STATES,
    }, refresh=30)


@router.get("/findings/{fingerprint}")
def finding(request: Request, store: Opened, fingerprint: Fingerprint) -> Response:
    return _finding(request, store, fingerprint)


def _finding(
    request: Request, store: Opened, fingerprint: str, told: str = "", status: int = 200,
    reason: str = "",
) -> HTMLResponse:
    with store.reading() as connection:
        if (found := reads.finding_of(connection, fingerprint)) is None:
            raise HTTPException(404, "There is no such finding.")
        releases = queries.releases_of(connection, found)
    document = found["document"] if isinstance(found["document"], dict) else {}
    good = queries.goodness(releases, by_proof=bool(found["diagnosis"]))
    wider = longer(document)
    bisected = [edge.get("sentence", "") for edge in _dict(document, "bisect").get("edges", ())
                if isinstance(edge, dict)]
    return page(request, "finding.html", {
        "one": found, "document": document, "words": WORDS.get(found["kind"], ""),
        "picture": drawing.mask_picture(document), "wider": wider,
        "wider_picture": drawing.mask_picture(wider) if wider else None,
        "spec": _dict(document, "spec"),
        "diagnosis": _dict(document, "diagnosis"), "case": _dict(document, "case"),
        "releases": releases, "good": good, "bisected": bisected,
        "edges": queries.edges_of(good), "replay": _replay(found, document),
        "text_picture": "\n".join(map(str, document.get("picture") or ())),
        "told": told, "reason": reason, "decisions": _decisions(found["state"]),
        "as_json": lambda given: json.dumps(given, indent=1, ensure_ascii=False),
    }, status=status)


def _dict(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    return document[name] if isinstance(document.get(name), dict) else {}


def _replay(found: reads.Row, document: Mapping[str, Any]) -> str:
    line = document.get("replay")
    name = shlex.quote(f"finding-{found['fingerprint']}.json")
    return " ".join(line.split()) if isinstance(line, str) and line else \
        f"python -m fuzz.replay {name}"


def _decisions(state: str) -> list[tuple[str, str]]:
    found = [("accept", "Accept: it is to be fixed")] if state == NEW else []
    found += [(name, text) for name, text in SET_ASIDE.items() if state != name]
    return found if state in LIVE else [*found, ("reopen", "Reopen: look into it again")]


@router.post("/findings/{fingerprint}/triage")
async def judge(request: Request, store: Opened, fingerprint: Fingerprint) -> Response:
    access, given = request.app.state.access, fields(await request.body())
    if access.token is None:
        raise HTTPException(403, "Nothing can be changed here: it was started without a token.")
    if not access.is_form_key(request, given.pop("key", "")):
        raise HTTPException(403, "Sign in with the token first, then send the form again.")
    try:
        judged = Judged(**given)
    except ValidationError as error:
        first = error.errors()[0]
        raise HTTPException(422, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None

    def carry_out() -> Any:
        with store.writing() as connection:
            return judged.carry_out(connection, fingerprint, "dashboard")

    try:
        now = await run_in_threadpool(carry_out)
    except TriageError as error:
        return await run_in_threadpool(_finding, request, store, fingerprint,
                                       f"Nothing was changed: {error}.", 409, judged.reason)
    if now is None:
        raise HTTPException(404, "There is no such finding.")
    return RedirectResponse(f"/findings/{fingerprint}#history", 303)


@router.get("/findings/{fingerprint}/{file}")
def download(store: Opened, fingerprint: Fingerprint, file: str) -> Response:
    """The finding as a file that `fuzz.replay` takes, or as a script that needs nothing else."""
    with store.reading() as connection:
        found = reads.finding_of(connection, fingerprint)
    document = found and found["document"]
    if not isinstance(document, dict) or file not in ("finding.json", "replay.py"):
        raise HTTPException(404, "There is no such file.")
    text, kind = json.dumps(document, indent=1) + "\n", "application/json"
    name = f"finding-{fingerprint}.json"
    if file == "replay.py":
        title = f"{found['kind']}: {found['path']}, {found['region']}."
        name, kind = f"replay-{fingerprint}.py", "text/x-python"
        title = title.replace("\\", "/").replace('"', "'")
        text = SCRIPT.format(title=title, name=name, text=json.dumps(document))
    return Response(text.encode("utf-8", "replace"), headers={
        "Content-Type": f"{kind}; charset=utf-8",
        "Content-Disposition": f'attachment; filename="{name}"'})


@router.get("/coverage")
def coverage(
    request: Request, store: Opened, campaign: Text = "",
    by: Literal["mask", "release and mask", "everything"] = "release and mask",
    release: Text | None = None, target: Text | None = None, spec: Text | None = None,
    where: Text | None = None, layout: Text | None = None, flags: Text | None = None,
) -> Response:
    given = {"release": release, "target": target, "spec": spec, "where": where,
             "layout": layout, "flags": flags}
    chosen = {name: value for name, value in given.items() if value is not None}
    with store.reading() as connection:
        number = number_of(connection, campaign)
        rows = reads.coverage_table(connection, number, GROUPS[by])
        classes = reads.boundaries(connection, number, **chosen) if chosen else []
        campaigns = queries.campaign_names(connection)
    return page(request, "coverage.html", {
        "rows": rows, "axes": GROUPS[by], "by": by, "groups": list(GROUPS), "classes": classes,
        "chosen": chosen, "campaign": campaign, "campaigns": campaigns,
        "reached": sum(row["reached"] for row in rows),
        "combinations": sum(row["combinations"] for row in rows)}, refresh=60)


@router.get("/releases")
def releases(
    request: Request, store: Opened, target: Text = "", show: Literal["all", "wrong"] = "all",
) -> Response:
    with store.reading() as connection:
        names, rows = queries.matrix(connection)
    rows = [row for row in rows if target.lower() in row["target"].lower()
            and (show == "all" or any(one["verdict"] != PROVED for one in row["by"].values()))]
    return page(request, "releases.html", {
        "releases": names, "rows": rows[:MOST], "total": len(rows), "target": target,
        "show": show})


@router.get("/sign-in")
def sign_in_form(request: Request, then: Text = "/") -> Response:
    return page(request, "sign_in.html", {"then": inside(then), "told": ""})


@router.post("/sign-in")
async def sign_in(request: Request) -> Response:
    access, given = request.app.state.access, fields(await request.body())
    then = inside(given.get("then", "/"))
    if not access.is_token(given.get("token", "").strip()):
        await asyncio.sleep(WRONG)
        return page(request, "sign_in.html", {"then": then, "told": "That is not the token."},
                    status=403)
    answer = RedirectResponse(then, 303)
    answer.set_cookie(COOKIE, access.session(), max_age=SIGNED_IN, httponly=True,
                      samesite="strict", secure=access.secure)
    return answer


@router.post("/sign-out")
async def sign_out(request: Request) -> Response:
    if not request.app.state.access.is_form_key(
            request, fields(await request.body()).get("key", "")):
        raise HTTPException(403, "Only who is signed in can sign out.")
    answer = RedirectResponse("/", 303)
    answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return answer


def inside(address: str) -> str:
    """An address of this dashboard, and never of another place."""
    is_path = address.startswith("/") and not address.startswith(("//", "/\\"))
    return address if is_path and address.isascii() and address.isprintable() else "/"
