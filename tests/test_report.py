"""What a check leaves behind: JSON, JUnit XML, SMT-LIB, and words for a person."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import z3

from proofs.obligation import Verdict
from spec.check import main
from spec.masks import MASKS, mask
from tests.faulty_mask_mods import FAULTS, Fault

OFF_BY_ONE = next(f for f in FAULTS if "fault='off by one'" in f.call)
STRICT = next(f for f in FAULTS if f.name == "causal_strict")
RESULT_KEYS = {
    "target", "layer", "obligation", "spec", "verdict", "expected", "cached", "replayed", "theory",
    "bounds", "assumptions", "seconds", "mutants", "witness", "diagnosis",
}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every output of the bare command."""
    folder = tmp_path_factory.mktemp("own")
    outputs = ["--json", str(folder / "a.json"), "--junit", str(folder / "a.xml")]
    assert main([*outputs, "--smtlib", str(folder / "queries")]) == 0
    return folder


def document(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "a.json").read_text())


def test_the_document_has_the_promised_fields(own: Path) -> None:
    found = document(own)
    assert set(found) == {"schema", "versions", "seconds", "results"} and found["schema"] == 1
    assert {"z3-solver", "flash-attn-4", "nvidia-cutlass-dsl"} <= found["versions"].keys()
    assert isinstance(found["seconds"], float)
    for row in found["results"]:
        assert row.keys() >= RESULT_KEYS
        assert row["verdict"] in Verdict.__members__ and row["expected"] in Verdict.__members__
        assert row["cached"] is False and row["layer"] == "mask_mod"
        assert row["replayed"] in ("real code", "term only", None)
        assert row["theory"] and row["bounds"] and row["assumptions"]
        assert row["mutants"].keys() == {"killed", "total"}


def test_every_proof_has_mutants_and_kills_them(own: Path) -> None:
    for row in document(own)["results"]:
        if row["verdict"] == "PROVED":
            killed, total = row["mutants"]["killed"], row["mutants"]["total"]
            assert killed == total >= (8 if row["obligation"] == "equals-spec" else 1)


def test_a_variation_is_text_that_parses(own: Path) -> None:
    told = [row["diagnosis"] for row in document(own)["results"]
            if row["obligation"] == "equals-spec" and row["diagnosis"]]
    assert told
    for diagnosis in told:
        assert diagnosis["verdict"] == "PROVED"
        assert mask(diagnosis["variation"]).formula not in {m.formula for m in MASKS.values()}


def test_junit_counts_what_is_not_as_expected(own: Path, tmp_path: Path) -> None:
    suite = ElementTree.parse(own / "a.xml").getroot()
    assert len(suite) == int(suite.attrib["tests"]) == len(document(own)["results"])
    assert (suite.attrib["failures"], suite.attrib["errors"]) == ("0", "0")

    file = tmp_path / "fault.xml"
    assert main([*STRICT.arguments, "--junit", str(file)]) == 1
    suite = ElementTree.parse(file).getroot()
    (failure,) = suite.iter("failure")
    assert suite.attrib["failures"] == "1" and "`kv < q`" in failure.attrib["message"]

    assert main(["--rlimit", "1", "--junit", str(file)]) == 3
    suite = ElementTree.parse(file).getroot()
    assert int(suite.attrib["errors"]) == len(suite) == len(list(suite.iter("error")))


def test_each_query_answers_as_the_verdict_says(own: Path) -> None:
    rows = document(own)["results"]
    files = sorted((own / "queries").glob("*.smt2"))
    assert len(files) == len(rows)
    proved = 0
    for file in files:
        solver = z3.Solver()
        solver.from_file(str(file))
        proved += solver.check() == z3.unsat
        assert file.read_text().startswith("; maskproof/")
    assert proved == sum(row["verdict"] == "PROVED" for row in rows)


def said(capsys: pytest.CaptureFixture[str], fault: Fault) -> str:
    assert main(fault.arguments) == 1
    return capsys.readouterr().out


def test_a_refutation_is_told_to_a_person(capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, OFF_BY_ONE)
    assert "diagnosis: equals window with `q - kv <= window` in place of" in out
    assert "the spec says hidden, the code visible" in out
    assert "cells differ" in out and "+" in out
    assert "a test that fails today:" in out
    assert out.rstrip().splitlines()[-1].startswith("1 REFUTED, 1 PROVED; ")


def test_a_head_that_decides_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert "h=3," in said(capsys, next(f for f in FAULTS if f.name == "causal_of_other_heads"))
    assert "h=" not in said(capsys, STRICT).split("a test that fails")[0].split("witness:")[1]


def test_a_wide_vector_of_keys_does_not_lose_its_refutation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = said(capsys, next(f for f in FAULTS if "fault='one lane'" in f.call))
    assert re.search(r"key (9|41): the spec says (hidden|visible), the code", out)


def test_what_a_proof_rests_on_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"{STRICT.arguments[0]}", "--against", "kv < q"]) == 0
    out = capsys.readouterr().out
    assert "proved in linear integer arithmetic" in out and "N = 2147483392" in out
    assert "0 <= q_idx and q_idx < seqlen_q" in out


def test_an_expected_refutation_that_is_not_explained_claims_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--fast"]) == 0
    assert "diagnosis: none" not in capsys.readouterr().out


def test_a_plain_output_has_no_colours(capsys: pytest.CaptureFixture[str]) -> None:
    assert "\x1b" not in said(capsys, STRICT)
