"""Our own mask_mods equal their specs, and their known-bad twins do not."""

from __future__ import annotations

import pytest

from kernels.mask_mods import TARGETS
from proofs.checks import REAL, TERM_ONLY, Row
from proofs.obligation import Verdict

LONGEST = 2**31 - 258


def of(rows: list[Row], name: str, obligation: str) -> Row:
    return next(r for r in rows if r.result.obligation.target == f"maskproof/{name}"
                and r.result.obligation.name == obligation)


def test_every_verdict_is_the_expected_one(own_rows: list[Row]) -> None:
    assert [r.result for r in own_rows if not r.result.as_expected] == []


@pytest.mark.parametrize("name", [t.target for t in TARGETS])
def test_each_target_has_every_obligation(own_rows: list[Row], name: str) -> None:
    had = {r.result.obligation.name for r in own_rows if r.result.obligation.target == name}
    assert {"equals-spec", "no-overflow", "reads-in-bounds"} <= had


def test_every_mutant_of_every_proof_is_refuted(own_rows: list[Row]) -> None:
    for row in own_rows:
        result = row.result
        if result.verdict is Verdict.PROVED:
            wanted = 8 if result.obligation.name == "equals-spec" else 1
            assert result.killed == len(result.obligation.mutants) >= wanted, result.obligation.id


def test_proofs_reach_sequences_of_nearly_every_int32_length(own_rows: list[Row]) -> None:
    for row in own_rows:
        bounds = row.result.obligation.bounds
        if bounds.startswith("N = "):
            assert int(bounds.split(",")[0].removeprefix("N = ")) >= LONGEST


def test_every_term_was_compared_with_the_real_code(own_rows: list[Row]) -> None:
    for row in own_rows:
        if row.result.obligation.name == "equals-spec":
            assert row.replayed == REAL, row.result.obligation.id
            assert_well_compared(row)


def assert_well_compared(row: Row) -> None:
    """On many cells, of both kinds, on both sides of every comparison and at equality."""
    assert row.compared is not None and row.compared.mismatch is None
    assert row.compared.cells >= 10_000
    assert 0.1 <= row.compared.visible / row.compared.cells <= 0.9
    assert tuple(row.compared.uncovered) == ()


@pytest.mark.parametrize(("twin", "obligation", "sentence"), [
    ("known-bad/no-window-term", "equals-spec", "equals mm_prefix without the window term"),
    ("known-bad/chunk-local-q", "equals-spec", "equals mm_prefix_no_window with chunk-local q"),
    ("known-bad/no-window-term,chunk-local-q[ranges=3]", "equals-spec",
     "equals mm_prefix without the window term, with chunk-local q"),
    ("known-bad/unclamped-lookup", "reads-in-bounds",
     "reads past the end of a table on padded rows or keys only; clamp the index"),
])
def test_a_known_bad_twin_is_diagnosed(
    own_rows: list[Row], twin: str, obligation: str, sentence: str
) -> None:
    row = of(own_rows, twin, obligation)
    assert row.result.verdict is Verdict.REFUTED
    assert row.diagnosis is not None and row.diagnosis.verdict is Verdict.PROVED
    assert row.diagnosis.sentence == sentence


def test_a_range_row_means_the_list_only_where_ranges_are_disjoint(own_rows: list[Row]) -> None:
    proved, refuted = (r.result for r in own_rows if r.result.obligation.name == "representation")
    assert (proved.verdict, refuted.verdict) == (Verdict.PROVED, Verdict.REFUTED)
    assert refuted.witness is not None
    i, j = refuted.witness.symbols["i"], refuted.witness.symbols["j"]
    rows = refuted.witness.tables["ranges"]
    b = refuted.witness.symbols["b"]
    assert i != j
    assert rows[b, i, 0] <= rows[b, j, 1] and rows[b, j, 0] <= rows[b, i, 1], "they overlap"


def test_a_witness_of_an_equality_replays_on_the_real_code(own_rows: list[Row]) -> None:
    for row in own_rows:
        result = row.result
        if result.verdict is Verdict.REFUTED and result.obligation.name == "equals-spec":
            assert row.replayed == REAL
            assert row.counterexample is not None
            assert row.counterexample.code != row.counterexample.spec
        elif result.verdict is Verdict.REFUTED and result.obligation.name != "representation":
            assert row.replayed == TERM_ONLY
