"""What a run came to, for machines that read JUnit XML or SARIF 2.1.0, and as a step summary.

A finding is new, or regressed: it was to be gone; both are failures. Known ones are listed, and
fail nothing. Whatever a finding holds is text here, and never markup.
"""

from __future__ import annotations

import html
import importlib.metadata
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

Document = Mapping[str, Any]
NEW, REGRESSED, KNOWN = "new", "regressed", "known"
NAME = "maskproof"
SCHEMA = ("https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/"
          "sarif-schema-2.1.0.json")
FINGERPRINT = "maskproof/v1"
# What of a step summary is shown whole, and how much text of one field; a summary has 1 MiB.
SHOWN, LISTED, LONGEST = 20, 200, 1000
# What XML 1.0 and terminals have no place for.
CONTROL = re.compile("[^\t\n\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
MARKUP = re.compile(r"([\\`*_{}\[\]()#+\-.!|~=:])")
WORDS: Mapping[str, str] = {
    "leak": "a key is seen that the mask hides", "loss": "a key is hidden that the mask shows",
    "double": "a key is counted more than once", "empty-row": "a row without a key is not zero",
    "lse": "the logarithm of the sum is not that of the visible keys",
    "unwritten": "a row is not written", "nan": "a row is not a number",
    "overrun": "a table or an output is touched past its end",
    "numerics": "random data give another result than a reference",
    "hang": "a launch does not end", "crash": "a launch ends its process",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A finding, whether it is NEW, REGRESSED or KNOWN, and why a known one is."""

    document: Document
    state: str
    reason: str = ""

    @property
    def fails(self) -> bool:
        return self.state != KNOWN

    def text(self, name: str) -> str:
        return clean(str(self.document.get(name) or ""))

    @property
    def fingerprint(self) -> str:
        return self.text("fingerprint")

    @property
    def replay(self) -> str:
        """One line of the shell."""
        line = f"python -m fuzz.replay {shlex.quote(f'finding-{self.fingerprint}.json')}"
        return self.text("replay").replace("\n", " ") or line

    @property
    def cause(self) -> str | None:
        said = self.document.get("diagnosis") or {}
        return clean(said["sentence"]) if said.get("sentence") else None

    @property
    def since(self) -> list[str]:
        """Where it came and went, as `fuzz.bisect` says."""
        said = self.document.get("bisect") or {}
        return [clean(edge["sentence"]) for edge in said.get("edges", ())]

    @property
    def picture(self) -> str:
        return clean("\n".join(self.document.get("picture") or ()))


def entries(
    new: Iterable[Document], regressed: Iterable[Document] = (), known: Iterable[Document] = (),
    reasons: Mapping[str, str] = {},
) -> list[Entry]:
    """Findings in the order in which they matter; `reasons` by fingerprint."""
    found = [(one, state) for state, some in ((NEW, new), (REGRESSED, regressed), (KNOWN, known))
             for one in some]
    return [Entry(one, state, reasons.get(one["fingerprint"], "")) for one, state in found]


def clean(text: str) -> str:
    """The text, with a sign in place of each character that XML has no place for."""
    return CONTROL.sub("\ufffd", text)


def headline(one: Entry) -> str:
    cause = f": {one.cause}" if one.cause else ""
    return _line(f"{one.text('kind')} ({one.text('region')}) in {one.text('path')}{cause}")


def _line(text: str) -> str:
    return " ".join(text.split())[:LONGEST]


def _whole(one: Entry) -> str:
    """All that a person needs, as plain text."""
    parts = [f"{one.text('kind')}: {one.text('path')}", f"  {one.text('region')}", one.text("text"),
             f"cause: {one.cause}" if one.cause else "", *one.since, one.picture, one.replay]
    return "\n".join(part for part in parts if part)


def to_junit(found: Sequence[Entry], seconds: float = 0.0) -> str:
    """JUnit XML: a failure for each new or regressed finding; known ones are skipped."""
    failures = sum(one.fails for one in found)
    suite = ElementTree.Element(
        "testsuite", name=f"{NAME} fuzz", tests=str(len(found)), failures=str(failures),
        errors="0", skipped=str(len(found) - failures), time=f"{seconds:.3f}")
    for one in found:
        case = ElementTree.SubElement(
            suite, "testcase", classname=_line(one.text("path")), time="0",
            name=_line(f"{one.text('kind')}: {one.text('region')} [{one.fingerprint}]"))
        if one.fails:
            told = ElementTree.SubElement(case, "failure", type=_line(one.text("kind")),
                                          message=f"{one.state}: {headline(one)}")
            told.text = _whole(one)
        else:
            ElementTree.SubElement(case, "skipped", message=_line(
                f"known: {clean(one.reason)}" if one.reason else "known"))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def to_sarif(found: Sequence[Entry], root: Path | None = None) -> str:
    """A SARIF 2.1.0 log: a rule for each kind of finding, a result for each; those that are known
    are suppressed. Files of mask_mods below `root` are named from there on."""
    kinds = list(dict.fromkeys(one.text("kind") for one in found))
    log = {
        "$schema": SCHEMA, "version": "2.1.0",
        "runs": [{
            "tool": {"driver": {"name": NAME, "version": _version(),
                                "rules": [_rule(kind) for kind in kinds]}},
            "automationDetails": {"id": f"{NAME}/fuzz/"}, "columnKind": "unicodeCodePoints",
            "results": [_result(one, kinds.index(one.text("kind")), root) for one in found],
        }],
    }
    return json.dumps(log, indent=1) + "\n"


def _version() -> str:
    try:
        return importlib.metadata.version(NAME)
    except importlib.metadata.PackageNotFoundError:
        return "0"


def _rule(kind: str) -> dict[str, Any]:
    return {
        "id": kind, "name": kind,
        "shortDescription": {"text": WORDS.get(kind, f"a finding of the kind {kind}")},
        "help": {"text": "The finding's replay line runs its case again; `python -m fuzz.bisect` "
                         "names the release in which it came."},
        "defaultConfiguration": {"level": "error"},
    }


def _result(one: Entry, rule: int, root: Path | None) -> dict[str, Any]:
    given: dict[str, Any] = {
        "ruleId": one.text("kind"), "ruleIndex": rule, "kind": "fail",
        "level": "error" if one.fails else "note",
        # A link of SARIF's begins with "](", which no text of a finding is to make.
        "message": {"text": f"{headline(one)}\n{one.replay}".replace("](", "] (")},
        "locations": [{
            "physicalLocation": {"artifactLocation": _artifact(one, root),
                                 "region": {"startLine": 1}},
            "logicalLocations": [{"fullyQualifiedName": _line(one.text("path")),
                                  "kind": "function"}],
        }],
        "partialFingerprints": {FINGERPRINT: one.fingerprint},
        "properties": {"state": one.state, "region": one.text("region"),
                       "provider": one.text("provider"), "replay": one.replay},
    }
    if not one.fails:
        given["suppressions"] = [{"kind": "external", "status": "accepted",
                                  **({"justification": clean(one.reason)} if one.reason else {})}]
    return given


def _artifact(one: Entry, root: Path | None) -> dict[str, str]:
    """The file that the mask_mod is in, where it is a person's own; or else the finding's."""
    targets = (one.document.get("source") or {}).get("targets") or ()
    path = Path(clean(targets[0]).partition("::")[0]) if targets and "::" in targets[0] else \
        Path(f"finding-{one.fingerprint}.json")
    if root is not None and path.is_relative_to(root):
        path = path.relative_to(root)
    if path.is_absolute():
        return {"uri": f"file://{quote(str(path))}"}
    return {"uri": quote(path.as_posix()), "uriBaseId": "%SRCROOT%"}


def to_markdown(found: Sequence[Entry]) -> str:
    """A step summary: what is new with picture, cause and replay line; what is known in a table."""
    failing, known = ([one for one in found if one.fails is fails] for fails in (True, False))
    counts = [f"{sum(one.state == state for one in found)} {state}"
              for state in (NEW, REGRESSED, KNOWN)]
    parts = [f"## Attention masks: {', '.join(counts)}", "" if failing else "Nothing new.\n"]
    parts += [_section(one) for one in failing[:SHOWN]]
    if len(failing) > SHOWN:
        parts += [f"### {len(failing) - SHOWN} more", "", *_table(failing[SHOWN:]), ""]
    if known:
        parts += [f"<details><summary>{len(known)} known</summary>", "", *_table(known), "",
                  "</details>", ""]
    return "\n".join(parts).rstrip() + "\n"


def _section(one: Entry) -> str:
    cause = markdown(one.cause) if one.cause else "not known"
    lines = [f"### {markdown(one.text('kind'))}: {markdown(one.text('region'))}", "",
             f"{one.state.capitalize()} in {markdown(one.text('path'))}; "
             f"{markdown(one.text('text'))}.", "", f"Cause: {cause}", ""]
    for sentence in one.since:
        lines += [f"{markdown(sentence)}", ""]
    if one.picture:
        lines += [_block(one.picture), ""]
    return "\n".join([*lines, _block(one.replay, "sh"), ""])


def _table(some: Sequence[Entry]) -> list[str]:
    rows = [f"| {markdown(one.text('kind'))} | {markdown(one.text('path'))} | "
            f"{markdown(one.text('region'))} | {markdown(clean(one.reason))} |"
            for one in some[:LISTED]]
    more = [f"\n{len(some) - LISTED} more are not listed."] if len(some) > LISTED else []
    return ["| kind | path | region | why it is known |", "| --- | --- | --- | --- |", *rows, *more]


def markdown(text: str) -> str:
    """One line of text that no Markdown or HTML is read in."""
    escaped = html.escape(MARKUP.sub(r"\\\1", _line(text)), quote=False)
    return escaped.replace("@", "&#64;")


def _block(text: str, language: str = "text") -> str:
    """A block of code, fenced by more ticks than it holds."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
