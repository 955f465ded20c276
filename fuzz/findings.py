"""Findings: what was wrong, as one JSON file each, with a script that replays it alone."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fuzz import case as cases
from fuzz.backends import KINDS, LEAK, LOSS, Wrong
from fuzz.case import Case, CaseError
from fuzz.sequences import Array, expected, pack
from fuzz.state import write
from fuzz.targets import Source, source_from
from kernels.fa4 import Call
from spec.from_file import resolve
from spec.masks import Mask
from spec.to_picture import picture
from spec.to_picture import rows as grid_rows
from spec.to_text import to_text
from spec.versions import versions as installed

SCHEMA = 1
PACKAGES = ("maskproof", "flash-attn-4", "nvidia-cutlass-dsl", "torch", "numpy", "hypothesis")
# Cells of a finding that are listed, and the side of a picture that is still read.
LISTED, WIDEST = 100, 64
# The provider, its mask_mod or nothing, the mask; cpu or an architecture; how a kernel is called.
AXES = ("release", "target", "spec", "where", "layout", "flags")
NEEDED = {"schema", "fingerprint", "kind", "region", "case", "source", "backend", "path"}


class FindingError(Exception):
    """A finding that cannot be read; the message is one line."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What makes two findings one: the same kind of fault in the same region, on the same path."""

    provider: str
    path: str
    kind: str
    region: str

    @property
    def fingerprint(self) -> str:
        return cases.digest(json.dumps([self.provider, self.path, self.kind, self.region]))


def path_of(call: Call, backend: str) -> str:
    """What of a call decides which code runs, in words."""
    where = "cpu" if backend == "cpu" else f"{call.arch} {call.layout}"
    parts = [where, call.mask_mod or "no mask_mod", f"for {call.spec}"]
    return " ".join(parts + [f"with {name}" for name in flags_of(call)])


def axes_of(call: Call, backend: str) -> list[str]:
    """The same as values of AXES."""
    where, layout = ("cpu", "") if backend == "cpu" else (call.arch, call.layout)
    return [call.provider, call.mask_mod or "", call.spec, where, layout,
            ", ".join(flags_of(call))]


def flags_of(call: Call) -> list[str]:
    flags = {
        "causal": call.causal, "dynamic_causal": call.dynamic_causal, "sink": call.sink,
        f"window_size_left {_side(call.window_size_left)}": call.window_size_left is not None,
        f"window_size_right {_side(call.window_size_right)}": call.window_size_right is not None,
    }
    return [name for name, on in flags.items() if on]


def _side(value: int | None) -> str:
    return "none" if value is None else "negative" if value < 0 else "given"


def document(
    signature: Signature, case: Case, found: Wrong | None, text: str, source: Source,
    **more: Any,
) -> dict[str, Any]:
    """A finding as JSON. `found` holds the wrong cells of `case`, `text` says what else is known;
    `more` has backend, device, seed, and how it was found."""
    mask = resolve(case.call.spec)
    return {
        "schema": SCHEMA, "fingerprint": signature.fingerprint, "kind": signature.kind,
        "region": signature.region, "provider": signature.provider, "path": signature.path,
        "text": text, "case": cases.to_json(case), "source": asdict(source),
        "spec": {"name": mask.name, "sentence": mask.sentence, "formula": to_text(mask.formula),
                 "params": dict(case.call.params)},
        **(_shown(mask, case, found) if found is not None and len(found) else {}),
        "versions": versions(), **more,
    }


def _shown(mask: Mask, case: Case, found: Wrong) -> dict[str, Any]:
    """The masks of the first sequence and head that are wrong, and the wrong cells."""
    b, h = int(found.b[0]), int(found.h[0])
    sequence = case.sequences[b]
    q_idx, kv_idx = _part(sequence.seqlen_q, found.q_idx), _part(sequence.seqlen_k, found.kv_idx)
    meant = _grid(mask, case, b, h, q_idx, kv_idx)
    got = meant.copy()
    inside = (found.b == b) & (found.h == h)
    for q, kv, kind in zip(found.q_idx[inside], found.kv_idx[inside], found.kind[inside],
                           strict=True):
        if kind in (LEAK, LOSS) and q in q_idx and kv in kv_idx:
            got[q - q_idx.start, kv - kv_idx.start] = kind == LEAK
    shift = sequence.seqlen_k - sequence.seqlen_q
    drawn = picture(meant, got, first_q=q_idx.start + shift, first_kv=kv_idx.start)
    return {
        "sequence": b, "head": h, "first_q": q_idx.start + shift, "first_kv": kv_idx.start,
        "expected": grid_rows(meant).split("\n"), "got": grid_rows(got).split("\n"),
        "picture": drawn.split("\n"), "wrong_cells": found.total,
        "wrong": [_cell(case, found, i) for i in range(min(len(found), LISTED))],
    }


def _part(length: int, wrong: Array) -> range:
    """Indices that fit a picture, with a wrong one among them."""
    if length <= WIDEST:
        return range(length)
    start = min(max(int(wrong.min()) - WIDEST // 2, 0), length - WIDEST)
    return range(start, start + WIDEST)


def _grid(mask: Mask, case: Case, b: int, h: int, q_idx: range, kv_idx: range) -> Array:
    at = {"q_idx": np.array(q_idx)[:, None], "kv_idx": np.array(kv_idx)[None, :]}
    shape = len(q_idx), len(kv_idx)
    cells = {name: np.broadcast_to(value, shape).reshape(-1)
             for name, value in {**at, "b": np.array(b), "h": np.array(h)}.items()}
    packed = pack(mask, case.sequences)
    return expected(mask, case.call.params, packed, cells).reshape(shape).copy()


def _cell(case: Case, found: Wrong, i: int) -> dict[str, Any]:
    b, q, kv = int(found.b[i]), int(found.q_idx[i]), int(found.kv_idx[i])
    shift = case.sequences[b].seqlen_k - case.sequences[b].seqlen_q
    return {"sequence": b, "head": int(found.h[i]), "q_idx": q, "kv_idx": kv, "q": q + shift,
            "kind": KINDS[found.kind[i]]}


def versions() -> dict[str, str]:
    return installed(PACKAGES)


def file_of(folder: Path, fingerprint: str) -> Path:
    return folder / f"finding-{fingerprint}.json"


SCRIPT = '''\
"""{title}

Needs maskproof, and nothing of the folder that it was found in: python {name}
"""

import json
import sys

from fuzz.replay import replay_document

FINDING = json.loads({text!r})

if __name__ == "__main__":
    sys.exit(replay_document(FINDING))
'''


def save(folder: Path, finding: Mapping[str, Any]) -> Path:
    """Writes the finding, its shell line and its script; the script first."""
    path = file_of(folder, finding["fingerprint"])
    script = folder / "state" / f"replay-{finding['fingerprint']}.py"
    whole = {**finding, "replay": f"python -m fuzz.replay {shlex.quote(str(path))}",
             "script": f"python {shlex.quote(str(script))}"}
    title = f"{finding['kind']}: {finding['path']}, {finding['region']}."
    write(script, SCRIPT.format(title=title.replace("\\", "/").replace('"', "'"),
                                name=script.name, text=json.dumps(finding)))
    write(path, json.dumps(whole, indent=1) + "\n")
    return path


def load(path: Path) -> dict[str, Any]:
    """A finding that was saved. Raises FindingError, one line that begins with the file's name."""
    try:
        given = json.loads(path.read_text())
    except OSError as error:
        raise FindingError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise FindingError(f"{path}: not a finding: {error}") from None
    try:
        checked(given)
    except FindingError as error:
        raise FindingError(f"{path}: {error}") from None
    return given


def checked(given: Any) -> tuple[Case, Source, Signature]:
    """What a finding is about. Raises FindingError."""
    if not isinstance(given, dict) or "fingerprint" not in given:
        raise FindingError("not a finding")
    if given.get("schema") != SCHEMA:
        raise FindingError(f"a finding of schema {given.get('schema')!r}; "
                           f"this version reads {SCHEMA}")
    if missing := sorted(NEEDED - given.keys()):
        raise FindingError(f"a finding without {missing[0]!r}")
    try:
        case, source = cases.from_json(given["case"]), source_from(given["source"])
    except (CaseError, TypeError, AttributeError) as error:
        raise FindingError(f"a finding with a bad case or source: {error}") from None
    signature = Signature(given.get("provider", ""), given["path"], given["kind"], given["region"])
    return case, source, signature


def stored(folder: Path) -> dict[str, dict[str, Any]]:
    """Every finding of a folder by fingerprint. Raises FindingError for one that is corrupt."""
    found = [load(path) for path in sorted(folder.glob("finding-*.json"))]
    return {finding["fingerprint"]: finding for finding in found}
