"""What a request may ask, checked: the filters of a list, and decisions about a finding."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl, urlencode

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from sqlalchemy import Connection

from fuzz.service.records import happened
from fuzz.service.triage import Accepted, Event, Reopened, SetAside, Triage
from fuzz.service.web.queries import CURSOR, EQUAL, Slice, findings_slice

# PostgreSQL has no place for a NUL; half a surrogate pair is no text to pydantic.
Text = Annotated[str, StringConstraints(max_length=200, pattern=r"^[^\x00]*$")]
Cursor = Annotated[str, StringConstraints(pattern=rf"^({CURSOR.pattern})?$")]
Fingerprint = Annotated[str, StringConstraints(max_length=40, pattern=r"^[0-9A-Za-z_-]+$")]
State = Literal["", "new", "open", "fixed", "regressed", "infrastructure", "wontfix"]
Decision = Literal["accept", "wontfix", "infrastructure", "reopen"]


class Filter(BaseModel):
    """Which findings, in which order, and which part of the list. Empty values ask for nothing."""

    model_config = ConfigDict(extra="forbid")

    state: State = ""
    kind: Text = ""
    release: Text = ""
    target: Text = ""
    spec: Text = ""
    family: Text = ""
    campaign: Text = ""
    contains: Text = ""
    order: Literal["last_seen", "first_seen", "count"] = "last_seen"
    after: Cursor = ""
    before: Cursor = ""
    limit: Annotated[int, Field(ge=1, le=200)] = 50

    def slice(self, connection: Connection) -> Slice:
        given = self.model_dump()
        return findings_slice(
            connection, {name: given[name] for name in EQUAL}, campaign=self.campaign,
            contains=self.contains, order=self.order, after=self.after, before=self.before,
            limit=self.limit)

    def query(self, **other: Any) -> str:
        """The same list as the query of an address, but for `other`."""
        given = {**self.model_dump(exclude_defaults=True), **other}
        return urlencode({name: value for name, value in given.items() if value})


class PageFilter(Filter):
    """The same of a page, which may be told to stay as it is."""

    refresh: Literal["", "off"] = ""


class Judged(BaseModel):
    """A decision about a finding. All but accept need a reason; `by` is who decided."""

    model_config = ConfigDict(extra="forbid")

    decision: Decision
    reason: Annotated[str, StringConstraints(
        max_length=2000, pattern=r"^[^\x00]*$")] = ""
    by: Annotated[str, StringConstraints(max_length=60, pattern=r"^[^\x00]*$")] = ""

    @property
    def event(self) -> Event:
        if self.decision == "accept":
            return Accepted()
        if self.decision == "reopen":
            return Reopened(self.reason)
        return SetAside(self.decision, self.reason)

    def carry_out(self, connection: Connection, fingerprint: str, where: str) -> Triage | None:
        """The finding's state afterwards; None where there is no such finding. Raises
        TriageError."""
        who = f"{self.by.strip()} ({where})" if self.by.strip() else where
        return happened(connection, fingerprint, self.event, int(time.time()), who)


def fields(body: bytes) -> dict[str, str]:
    """A form's fields, each once."""
    try:
        return dict(parse_qsl(body.decode("ascii"), keep_blank_values=True, max_num_fields=20))
    except (UnicodeDecodeError, ValueError):
        return {}
