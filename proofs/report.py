"""Rows of a check as records, which is what JSON holds, as JUnit XML, and as words and pictures.

A record says all that is shown of a row. It comes out of the cache as it went in, `cached` apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from proofs.checks import Row
from proofs.counterexample import Counterexample
from proofs.obligation import Verdict
from spec.to_picture import picture
from spec.to_text import to_text
from spec.versions import versions as installed

PACKAGES = ("maskproof", "z3-solver", "flash-attn-4", "nvidia-cutlass-dsl", "torch", "numpy")
Record = dict[str, Any]
INCOMPLETE = ("UNKNOWN", "UNSUPPORTED", "VACUOUS", "ERROR")


def versions() -> dict[str, str]:
    return installed(PACKAGES)


def exit_status(records: Sequence[Record]) -> int:
    """1 for a fault, 3 for anything undecided, 0 where every verdict is the expected one."""
    verdicts = [(one["verdict"], one["expected"]) for one in records]
    if any(v == "REFUTED" and e != "REFUTED" for v, e in verdicts):
        return 1
    if any(e == "REFUTED" and v == "PROVED" for v, e in verdicts):
        return 1
    return 3 if any(v in INCOMPLETE for v, _ in verdicts) else 0


def to_json(records: Sequence[Record], seconds: float) -> dict[str, Any]:
    return {
        "schema": 1, "versions": versions(), "seconds": round(seconds, 3), "results": list(records),
    }


def record(row: Row, source: str = "") -> Record:
    """All that is shown of a row. `source` holds the arguments of `proofs.replay.visible` that find
    its target again, for a test that is ready to paste."""
    result, obligation = row.result, row.result.obligation
    return {
        "target": obligation.target,
        "layer": obligation.layer,
        "arch": obligation.arch,
        "obligation": obligation.name,
        "spec": obligation.spec,
        "verdict": result.verdict.value,
        "expected": obligation.expected.value,
        "cached": False,
        "replayed": row.replayed,
        "compared": None if row.compared is None else {
            "cells": row.compared.cells, "visible": row.compared.visible,
            "uncovered": list(row.compared.uncovered),
        },
        "theory": obligation.theory,
        "bounds": obligation.bounds,
        "assumptions": [to_text(a) for a in obligation.assumptions],
        "seconds": round(result.seconds, 6),
        "mutants": {"killed": result.killed, "total": result.killed + len(result.survivors)},
        "witness": witness(row),
        "diagnosis": None if row.diagnosis is None else {
            "sentence": row.diagnosis.sentence, "variation": row.diagnosis.variation,
            "verdict": row.diagnosis.verdict.value,
        },
        "reason": result.reason,
        "extra": dict(result.extra),
        "fa4": row.fa4,
        "explanation": explain(row, source) if result.verdict is Verdict.REFUTED else "",
    }


def witness(row: Row) -> dict[str, Any] | None:
    """The values that break a claim; `code` and `spec` say what each answers, where that is it."""
    if (found := row.counterexample) is not None:
        return {
            **found.cell, "tables": {k: v.tolist() for k, v in found.tables.items()},
            "code": found.code, "spec": found.spec,
        }
    if (found := row.result.witness) is None:
        return None
    tables = {
        f"{name}[{', '.join(map(str, index))}]": value
        for name, elements in found.tables.items() for index, value in elements.items()
    }
    return {**found.symbols, "tables": tables}


def to_junit(records: Sequence[Record], seconds: float) -> str:
    """JUnit XML: a failure for a fault, an error for what is undecided."""
    suite = ElementTree.Element("testsuite", name="maskproof", tests=str(len(records)),
                                time=f"{seconds:.3f}")
    counts = {"failure": 0, "error": 0}
    for one in records:
        case = ElementTree.SubElement(
            suite, "testcase", classname=one["target"], time=f"{one['seconds']:.6f}",
            name=f"{one['obligation']} {one['spec']}",
        )
        if one["verdict"] != one["expected"]:
            kind = "error" if one["verdict"] in INCOMPLETE else "failure"
            counts[kind] += 1
            ElementTree.SubElement(case, kind, message=headline(one)).text = str(one["witness"])
    suite.set("failures", str(counts["failure"]))
    suite.set("errors", str(counts["error"]))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)


def headline(one: Record) -> str:
    said = one["diagnosis"]["sentence"] if one["diagnosis"] else one["reason"]
    return f"{one['verdict']}{f': {said}' if said else ''}"


def explain(row: Row, source: str = "") -> str:
    """A refutation for a person: diagnosis, witness, picture, and a test that fails today."""
    result, obligation = row.result, row.result.obligation
    expected = " (as expected)" if result.as_expected else ""
    lines = [f"{obligation.target} {obligation.name} {obligation.spec}: REFUTED{expected}"]
    if row.diagnosis is not None:
        lines += [f"  diagnosis: {row.diagnosis.sentence} ({row.diagnosis.verdict.value})",
                  f"    formula: {row.diagnosis.variation}"]
    elif obligation.name == "equals-spec" and not result.as_expected:
        lines.append("  diagnosis: none; no variation of the spec by one or two faults equals it")
    if result.reason:
        lines.append(f"  {result.reason}")
    found = row.counterexample
    if found is None:
        lines.append(f"  witness: {_values(witness(row) or {})}")
        return "\n".join(lines)
    lines += ["  " + line for line in _cell(found)]
    if row.picture is not None:
        shown = row.picture
        given = f", {values}" if (values := _values(shown.values)) else ""
        lines.append(f"  the masks of one sequence{given}:")
        lines += ["    " + line for line in picture(
            shown.expected, shown.got, first_q=shown.first_q
        ).splitlines()]
    if source and not result.as_expected:
        lines += ["  a test that fails today:", "", reproduction(row, source)]
    return "\n".join(lines)


def _cell(found: Counterexample) -> list[str]:
    q = found.cell["q_idx"] + found.cell["seqlen_k"] - found.cell["seqlen_q"]
    seen = {True: "visible", False: "hidden"}
    return [
        f"witness: query {q} (q_idx {found.cell['q_idx']}), key {found.cell['kv_idx']}: "
        f"the spec says {seen[found.spec]}, the code {seen[found.code]}",
        f"  {_values({**found.cell, 'tables': {k: v.tolist() for k, v in found.tables.items()}})}",
    ]


HIDDEN_WHEN_ZERO = ("h", "offset_q", "offset_k")


def _values(values: Mapping[str, Any]) -> str:
    tables = values.get("tables", {})
    plain = {k: v for k, v in values.items()
             if k not in ("tables", "code", "spec") and (v or k not in HIDDEN_WHEN_ZERO)}
    return ", ".join(f"{k}={v}" for k, v in {**plain, **tables}.items())


def reproduction(row: Row, source: str) -> str:
    """A pytest, ready to paste, that runs the real mask_mod on the witness."""
    found, obligation = row.counterexample, row.result.obligation
    assert found is not None
    name = "".join(c if c.isalnum() else "_" for c in obligation.target).strip("_").lower()
    tables = {k: v.tolist() for k, v in found.tables.items()}
    return f'''\
from proofs.replay import visible


def test_{name}():
    """{obligation.spec}: this cell must be {"visible" if found.spec else "hidden"}."""
    cell = {dict(found.cell)!r}
    tables = {tables!r}
    assert visible({source}, cell=cell, tables=tables) is {found.spec}
'''
