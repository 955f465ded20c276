"""The mask_mods inside released vLLM wheels."""

from __future__ import annotations

import functools

import pytest

from proofs.checks import REAL, Row, check
from proofs.obligation import Verdict
from proofs.replay import gather
from proofs.report import exit_status, record
from proofs.test_own_mask_mods import assert_well_compared
from spec.masks import mask

pytestmark = pytest.mark.releases
LONGEST = 2**31 - 258
NEWEST = "0.33.0"
# A per-request table of ranges without and with a window, then rows for each query.
RIGHT = ("0.25.1", "0.27.1", "0.28.0", "0.30.0", "0.32.0", NEWEST)


@functools.cache
def rows_of(version: str) -> tuple[Row, ...]:
    with gather(vllm=version) as targets:
        return tuple(check(targets, mask))


def verdicts(version: str) -> dict[tuple[str, str, str], Verdict]:
    return {
        (o.target.removeprefix(f"vllm-{version}/"), o.name, o.spec): row.result.verdict
        for row in rows_of(version) if (o := row.result.obligation)
    }


@pytest.mark.parametrize("version", RIGHT)
def test_a_release_is_proved(version: str) -> None:
    rows = rows_of(version)
    assert [r.result for r in rows if not r.result.as_expected] == []
    assert exit_status(list(map(record, rows))) == 0
    for row in rows:
        result = row.result
        if result.verdict is Verdict.PROVED:
            assert result.killed == len(result.obligation.mutants) >= 1
        if result.obligation.name == "equals-spec":
            assert len(result.obligation.mutants) >= 8
            assert row.replayed == REAL
            assert_well_compared(row)


def test_every_branch_of_the_newest_release_has_every_obligation() -> None:
    found = {(target, name) for target, name, _ in verdicts(NEWEST)}
    branches = ("mm_prefix[window]", "mm_prefix[no-window]", "mm_prefix[clamp]", "rswa")
    for target in branches:
        assert {(target, "equals-spec"), (target, "no-overflow"),
                (target, "reads-in-bounds")} <= found
    agreements = [spec for _, name, spec in verdicts(NEWEST) if name == "branches-agree"]
    assert len(agreements) == 3
    meant = [v for (_, name, _), v in verdicts(NEWEST).items() if name == "representation"]
    assert meant == [Verdict.PROVED, Verdict.REFUTED]


def test_proofs_of_the_newest_release_reach_nearly_every_int32_length() -> None:
    for row in rows_of(NEWEST):
        bounds = row.result.obligation.bounds
        if bounds.startswith("N = "):
            assert int(bounds.split(",")[0].removeprefix("N = ")) >= LONGEST


def test_the_first_release_is_refuted_and_its_two_faults_are_named() -> None:
    rows = [r for r in rows_of("0.24.0") if r.result.obligation.name == "equals-spec"]
    assert rows and exit_status(list(map(record, rows_of("0.24.0")))) == 1
    for row in rows:
        assert row.result.verdict is Verdict.REFUTED
        assert row.replayed == REAL
        assert row.diagnosis is not None and row.diagnosis.verdict is Verdict.PROVED
        assert row.diagnosis.sentence == (
            "equals mm_prefix without the window term, with chunk-local q"
        )
