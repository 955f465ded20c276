"""Records beside those of an earlier check, and of several releases beside each other."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from proofs.obligation import Verdict

Record = dict[str, Any]
RANKS = {verdict.value: rank for rank, verdict in enumerate(Verdict)}
DECIDED = ("PROVED", "REFUTED")
RELEASE = re.compile(r"(vllm-[\w.+-]+|flash-attn-4-[\w.+-]+)/")


def name(one: Record) -> tuple[str, ...]:
    """What makes two records ones of the same obligation."""
    return tuple(str(one.get(field, "")) for field in
                 ("target", "layer", "arch", "obligation", "spec"))


def against(records: Sequence[Record], known: Iterable[Record]) -> tuple[list[Record], list[str]]:
    """The records that are new, or worse than what is known of them, and lines that say what came
    of the others. Verdicts are as good as their place in `Verdict`, and nothing is worse than none
    where there was one."""
    before = {name(one): one["verdict"] for one in known}
    told, lines = [], []
    for one in records:
        was, now = before.pop(name(one), None), one["verdict"]
        if now == one["expected"]:
            if was is not None and RANKS.get(was, 0) > RANKS[now]:
                lines.append(f"became right: {one['target']} {one['obligation']}: {was} before")
            told.append(one)
        elif was is None or now != was and (RANKS[now] > RANKS.get(was, 0)
                                            or one["expected"] == "REFUTED"
                                            or was in DECIDED and now not in DECIDED):
            lines.append(f"{'new' if was is None else 'worse'}: {one['target']} "
                         f"{one['obligation']}: {now}{f', {was} before' if was else ''}")
            told.append(one)
        else:
            lines.append(f"known: {one['target']} {one['obligation']}: {now}")
    checked = {(one["target"].partition("/")[0], one["layer"]) for one in records}
    gone = [key for key in before if (key[0].partition("/")[0], key[1]) in checked]
    lines += [f"no longer checked: {target} {obligation}" for target, _, _, obligation, _ in gone]
    return told, lines


MATRIX = """\
# Releases

Obligations of released versions: a row for each, a column for each release.
"""


def matrix(records: Sequence[Record]) -> str:
    """Releases by obligations, with verdict and diagnosis: Markdown."""
    releases: dict[str, None] = {}
    rows: dict[tuple[str, str], dict[str, Record]] = {}
    for one in records:
        match = RELEASE.match(one["target"])
        release = match[1] if match else "own"
        target = one["target"][match.end():] if match else one["target"]
        releases[release] = None
        rows.setdefault((target, one["obligation"]), {})[release] = one
    head = ["target", "obligation", *releases]
    lines = [MATRIX, _line(head), _line(["---"] * len(head))]
    for (target, obligation), by in rows.items():
        lines.append(_line([target, obligation, *(_cell(by.get(each)) for each in releases)]))
    return "\n".join(lines) + "\n"


def _cell(one: Record | None) -> str:
    if one is None:
        return ""
    said = one["diagnosis"]["sentence"] if one["diagnosis"] else one["reason"]
    return f"{one['verdict']}{f': {said}' if said and one['verdict'] != 'PROVED' else ''}"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


HEAD = """\
# Refuted obligations of released versions

Every obligation that was refuted, with what breaks it, what a GPU showed of it where one was asked,
and the command that shows it again.
"""


def wrong(one: Record) -> bool:
    """Whether a record is of an obligation of a release that was refuted and was not to be."""
    return bool(RELEASE.match(one["target"])) and one["verdict"] == "REFUTED" != one["expected"]


def digest(one: Record) -> str:
    """Equal for records that claim the same of the same code, whatever their witness."""
    said = one["diagnosis"] or {"sentence": "", "variation": ""}
    parts = [one["target"], one["obligation"], one["spec"], said["sentence"], said["variation"]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def refutations(records: Sequence[Record], seen: Record | None = None) -> str:
    """Every obligation of a release that was refuted and was not to be: Markdown. `seen` is what
    was read out of kernels, by default the section `confirm` of SEEN."""
    parts, told = [HEAD], sightings(read_out() if seen is None else seen)
    for one in filter(wrong, records):
        release = one["target"].partition("/")[0]
        where = f"--vllm {release.removeprefix('vllm-')}" if release.startswith("vllm-") \
            else "--flash-attn"
        parts += [f"## {one['target']} {one['obligation']}\n", "```", one["explanation"], "```\n",
                  *told.get(digest(one), ()),
                  f"`python -m spec.check {where} --layer {one['layer']}`\n"]
    if len(parts) == 1:
        parts.append("There are none.\n")
    return "\n".join(parts)


SEEN = Path(__file__).resolve().parent.parent / "benchmarks" / "h200.json"


def read_out() -> Record:
    """What is recorded of masks that were read out of kernels on a GPU, where that record is."""
    try:
        return json.loads(SEEN.read_text()).get("confirm", {})
    except (OSError, ValueError):
        return {}


def sightings(seen: Record) -> dict[str, list[str]]:
    """A paragraph for each claim that a GPU was asked about, by the claim's digest."""
    return {one["digest"]: [f"Seen on an {seen['gpu']}, {seen['date']}: {one['said']}.\n"]
            for one in seen.get("claims", ()) if one.get("said")}
