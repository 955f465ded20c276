"""A suite of known issues: findings that a `pr` run is quiet about, each for one release.

It is JSON, written by `python -m fuzz.campaign export FILE --known SUITE.json` and kept beside the
code. A fault counts as known in a release, and on an architecture, where the suite lists it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz.findings import FindingError, checked, save
from fuzz.service.records import family_of
from fuzz.service.triage import FIXED

SCHEMA = 1


class SuiteError(Exception):
    """A suite that cannot be read; the message is one line."""


@dataclass(frozen=True, slots=True)
class Issue:
    """A known finding: its state in the store, why, and the document that replays it."""

    state: str
    reason: str
    document: Mapping[str, Any]

    @property
    def fingerprint(self) -> str:
        return self.document["fingerprint"]

    @property
    def release(self) -> str:
        return self.document["case"]["call"]["provider"]


def load(path: Path) -> tuple[Issue, ...]:
    """Raises SuiteError."""
    try:
        given = json.loads(path.read_text())
    except OSError as error:
        raise SuiteError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise SuiteError(f"{path}: not a suite of known issues: {error}") from None
    if not isinstance(given, dict) or given.get("schema") != SCHEMA:
        raise SuiteError(f"{path}: not a suite of known issues of schema {SCHEMA}")
    try:
        return load_rows(given.get("known", []))
    except SuiteError as error:
        raise SuiteError(f"{path}: {error}") from None


def load_rows(rows: Iterable[Any]) -> tuple[Issue, ...]:
    """The issues that the rows of a suite are. Raises SuiteError."""
    found = []
    for i, one in enumerate(rows):
        try:
            checked(one["document"])
            found.append(Issue(str(one.get("state", "")), str(one.get("reason", "")),
                               one["document"]))
        except (FindingError, KeyError, TypeError) as error:
            raise SuiteError(f"known issue {i + 1}: {error}") from None
    return tuple(found)


def to_json(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The suite of the rows of `reads.all_documents`: everything but what is fixed."""
    return {"schema": SCHEMA, "known": [
        {"state": row["state"], "reason": row["reason"], "document": row["document"]}
        for row in rows if row["state"] != FIXED]}


def save_fixed(folder: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes the findings that are fixed as files, which `pr` takes as its `regressions`."""
    (folder / "state").mkdir(parents=True, exist_ok=True)
    for row in rows:
        if row["state"] == FIXED:
            save(folder, row["document"])


def is_known(
    document: Mapping[str, Any], suite: Iterable[Issue], baseline: Collection[str] = ()
) -> bool:
    """Whether the suite lists the finding, for its own release or for one of `baseline`."""
    releases = {document["case"]["call"]["provider"], *baseline}
    family = family_of(document)
    return any(issue.fingerprint == document["fingerprint"]
               or issue.release in releases and family_of(issue.document) == family
               for issue in suite)
