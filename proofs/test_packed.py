"""Packed mask_mods: each of their keys is answered as a scalar one answers it."""

from __future__ import annotations

import pytest

from kernels.from_cute import lift
from kernels.target import Target
from proofs.checks import REAL, TERM_ONLY, Row, check
from proofs.obligation import Obligation, Verdict, prove
from spec.domain import lengths
from spec.masks import mask
from spec.term import and_, eq, iff, implies, substitute, sym
from tests.mask_mods_under_test import CASES, Case, packed_causal, packed_limits

FEW = 2**20
WINDOW = ("window",)


def rows_of(target: Target) -> dict[str, Row]:
    return {r.result.obligation.name: r for r in check([target], mask)}


@pytest.mark.parametrize("keys", [2, 8, 32, 64, 128])
def test_bits_put_together_one_by_one_are_the_causal_mask(keys: int) -> None:
    target = Target(target="packed", spec="causal", make=lambda at: packed_causal(keys))
    rows = rows_of(target)
    assert {r.result.verdict for r in rows.values()} == {Verdict.PROVED}
    assert rows["equals-spec"].result.killed >= 8
    assert rows["equals-spec"].replayed == REAL


@pytest.mark.parametrize("keys", [8, 32, 128])
@pytest.mark.parametrize("wider", [0, 1])
def test_runs_of_ones_made_by_ptx_shifts_are_the_window_or_are_not(keys: int, wider: int) -> None:
    target = Target(
        target="packed", spec="window", symbols=WINDOW,
        make=lambda at: packed_limits(keys, at["window"] + wider),
    )
    rows = rows_of(target)
    assert rows["no-overflow"].result.verdict is Verdict.PROVED
    equality = rows["equals-spec"]
    assert equality.replayed == TERM_ONLY
    assert equality.result.verdict is (Verdict.REFUTED if wider else Verdict.PROVED)
    if wider:
        assert equality.diagnosis is not None and equality.counterexample is not None
        assert "<= window" in equality.diagnosis.sentence


# Bits of a loaded word at a symbolic place are compared on cells instead: see test_from_cute.
TWINS = [case for case in CASES if case.twin and "bits" not in case.tables]


@pytest.mark.parametrize("case", TWINS, ids=lambda case: case.name)
def test_code_that_no_cpu_runs_is_proved_equal_to_its_scalar_twin(case: Case) -> None:
    packed, twin = lift(case.target), lift(case.twin_target)
    kv = sym("kv_idx")
    lanes = [substitute(twin.lanes[0], {kv: kv + lane}) for lane in range(len(packed.lanes))]
    defined = [
        implies(path, (-(2 ** (bits - 1)) <= term) & (term < 2 ** (bits - 1)))
        for lifted in (packed, twin) for path, term, bits, _ in lifted.arithmetic
    ] + [implies(path, claim) for lifted in (packed, twin) for path, claim, _ in lifted.conditions]
    claim = and_(*(iff(a, b) for a, b in zip(packed.lanes, lanes, strict=True)))
    assume = (*lengths(FEW, False), eq(kv % case.step, 0), *defined)
    result = prove(Obligation(target=case.name, name="twin", spec=case.name, claim=claim,
                              assumptions=assume, bounds=f"N = {FEW}"))
    assert result.verdict is Verdict.PROVED, result.reason
    wrong = and_(*(iff(a, b) for a, b in zip(packed.lanes, reversed(lanes), strict=True)))
    assert prove(Obligation(target=case.name, name="twin", spec=case.name, claim=wrong,
                            assumptions=assume, bounds="")).verdict is Verdict.REFUTED
