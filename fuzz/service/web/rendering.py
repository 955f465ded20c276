"""Templates filled in. All is escaped but pictures of `fuzz.service.web.drawing`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from fuzz.screen import short

HERE = Path(__file__).parent
SECTIONS = (("/", "Overview"), ("/findings", "Findings"), ("/coverage", "Coverage"),
            ("/releases", "Releases"))


def moment(at: float | None) -> Markup:
    """A time that a person and a machine can read."""
    if at is None:
        return Markup("never")
    exact = time.gmtime(at)
    return Markup('<time datetime="{}">{}</time>').format(
        time.strftime("%Y-%m-%dT%H:%M:%SZ", exact), time.strftime("%Y-%m-%d %H:%M", exact))


def ago(at: float) -> Markup:
    text = f"{lasting(time.time() - at)} ago"
    exact = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
    return Markup('<time datetime="{}" title="{}">{}</time>').format(exact, exact, text)


def lasting(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def breakable(text: str) -> Markup:
    """A long name that may be broken behind its slashes, dashes and commas."""
    found = str(escape(text))
    for sign in ("/", ",", "["):
        found = found.replace(sign, f"{sign}<wbr>")
    return Markup(found)


def environment() -> Environment:
    found = Environment(loader=FileSystemLoader(HERE / "templates"), autoescape=True,
                        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    found.filters.update(moment=moment, ago=ago, lasting=lasting, short=short,
                         breakable=breakable)
    return found


TEMPLATES = environment()


def page(
    request: Request, name: str, given: dict[str, Any], *, status: int = 200,
    refresh: int | None = None,
) -> HTMLResponse:
    """A page, which asks for itself again after `refresh` seconds unless a person says no."""
    access = request.app.state.access
    path = request.url.path
    text = TEMPLATES.get_template(name).render({
        "sections": SECTIONS, "here": path, "signed_in": access.signed_in(request),
        "has_token": access.token is not None, "key": access.form_key(request),
        "refresh": None if request.query_params.get("refresh") == "off" else refresh,
        "can_refresh": refresh is not None, "address": path + (
            f"?{request.url.query}" if request.url.query else ""),
        "without_refresh": str(request.url.include_query_params(refresh="off").query),
        "with_refresh": str(request.url.remove_query_params("refresh").query),
        "now": time.time(), **given,
    })
    return HTMLResponse(text.encode("utf-8", "replace"), status)
