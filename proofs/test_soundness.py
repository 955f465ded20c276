"""A fault planted in our own tables turns the checks red: none can be proved away."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

import proofs.mask_mod
import proofs.obligation
from kernels import machine
from kernels.from_cute import Lifted
from kernels.mask_mods import TARGETS
from kernels.target import Target
from proofs.checks import Options, check, void
from proofs.mask_mod import Subject, obligations
from proofs.obligation import Limits, Obligation, Verdict, prove
from proofs.report import exit_status, record
from spec import to_z3
from spec.domain import BOTTOM_RIGHT, SEQLEN_K, SEQLEN_Q
from spec.from_text import from_text
from spec.masks import mask
from spec.term import TRUE, eq, reads, sym
from spec.to_text import to_text
from tests.faulty_mask_mods import causal_scaled
from tests.mask_mods_under_test import causal

BY_NAME = {t.target.removeprefix("maskproof/"): t for t in TARGETS}
CLAMP, LISTED = BY_NAME["mm_prefix[clamp]"], BY_NAME["mm_prefix[window,ranges=3]"]


def verdicts(*targets) -> dict[tuple[str, str], Verdict]:
    """By target and obligation; what does not depend on the code is left out."""
    return {
        (o.target, o.name): row.result.verdict for row in check(targets, mask)
        if (o := row.result.obligation).name != "representation"
    }


@pytest.fixture
def fresh_z3(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing translated before the fault, nothing of the fault afterwards."""
    monkeypatch.setattr(proofs.obligation, "_translated", {})
    yield


SWAPPED = {
    "add": "sub", "sub": "add", "min": "max", "max": "min", "lt": "le", "le": "lt", "and": "or",
    "or": "and",
}


@pytest.mark.parametrize("op", SWAPPED)
def test_a_wrong_rule_for_z3_leaves_no_clean_result(
    op: str, monkeypatch: pytest.MonkeyPatch, fresh_z3: None
) -> None:
    monkeypatch.setitem(to_z3.RULES, op, to_z3.RULES[SWAPPED[op]])
    assert set(verdicts(CLAMP).values()) - {Verdict.PROVED}


@pytest.mark.parametrize("op", ["not", "ite", "read", "const", "sym", "eq"])
def test_a_rule_for_z3_that_forgets_its_arguments_leaves_no_clean_result(
    op: str, monkeypatch: pytest.MonkeyPatch, fresh_z3: None
) -> None:
    wrong = {
        "not": lambda node, a: a,
        "ite": lambda node, c, a, b: a,
        "read": lambda node, *index: to_z3.z3.Int(node.value),
        "const": lambda node: to_z3.z3.BoolVal(True) if node.sort == "Bool" else to_z3.z3.IntVal(7),
        "sym": lambda node: to_z3.z3.Int("q_idx"),
        "eq": lambda node, a, b: a <= b,
    }
    monkeypatch.setitem(to_z3.RULES, op, wrong[op])
    found = verdicts(CLAMP, LISTED)
    assert set(found.values()) - {Verdict.PROVED}


@pytest.mark.parametrize("op", ["llvm.add", "llvm.sub", "llvm.and", "llvm.or"])
def test_a_wrong_rule_of_the_lifter_is_an_error(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = {"llvm.add": "llvm.sub", "llvm.sub": "llvm.add", "llvm.and": "llvm.or",
               "llvm.or": "llvm.and"}
    monkeypatch.setitem(machine.RULES, op, machine.RULES[swapped[op]])
    assert set(verdicts(CLAMP).values()) == {Verdict.ERROR}


def test_contradictory_assumptions_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = proofs.mask_mod.lengths
    monkeypatch.setattr(proofs.mask_mod, "lengths", lambda *a: (*honest(*a), sym("b") < 0))
    found = verdicts(CLAMP)
    assert Verdict.PROVED not in found.values()
    assert Verdict.VACUOUS in found.values()


def test_an_assumption_that_hides_a_fault_lets_its_known_bad_twin_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = proofs.mask_mod.lengths
    monkeypatch.setattr(
        proofs.mask_mod, "lengths", lambda *a: (*honest(*a), eq(SEQLEN_Q, SEQLEN_K))
    )
    rows = list(check([BY_NAME["known-bad/chunk-local-q"]], mask))
    assert any(r.result.verdict is Verdict.PROVED and not r.result.as_expected for r in rows)
    assert exit_status(list(map(record, rows))) == 1


ALLOWED = {
    "0 <= b and b < num_seqs", "0 <= h", "0 <= seqlen_q", "0 <= seqlen_k",
    "0 <= q_idx and q_idx < seqlen_q", "0 <= kv_idx and kv_idx < seqlen_k",
    "seqlen_q <= 2147483392", "seqlen_k <= 2147483392", "num_seqs < 2147483647",
    "1 <= window and window <= 2147483647", "1 <= num_seqs", "num_seqs <= 2147483647",
    "1 <= num_tokens", "num_tokens <= 2147483647", "0 <= prefix_lens[b]",
    "0 <= cu_seqlens_q[b]", "cu_seqlens_q[b + 1] <= num_tokens",
    "cu_seqlens_q[b + 1] == cu_seqlens_q[b] + seqlen_q",
}


def test_an_equality_assumes_no_more_than_this(own_rows) -> None:
    for row in own_rows:
        obligation = row.result.obligation
        if obligation.name == "equals-spec" and obligation.expected is Verdict.PROVED:
            rest = {to_text(a) for a in obligation.assumptions} - ALLOWED
            facts = {text for text in rest if "ranges[" in text}
            capped = {text for text in rest if text.endswith(" <= 2147483392")}
            assert rest == facts | capped, obligation.id
            assert not capped or "known-bad" in obligation.target


def test_a_starved_solver_knows_nothing() -> None:
    rows = list(check([CLAMP], mask, Options(Limits(rlimit=1))))
    assert {r.result.verdict for r in rows} == {Verdict.UNKNOWN}
    assert exit_status(list(map(record, rows))) == 3


def obligation(claim: str, *assumptions: str, **fields) -> Obligation:
    return Obligation(target="t", name="n", spec="s", claim=from_text(claim), bounds="any",
                      assumptions=tuple(map(from_text, assumptions)), **fields)


def test_verdicts_of_small_claims() -> None:
    assert prove(obligation("q < q + 1")).verdict is Verdict.PROVED
    refuted = prove(obligation("q < kv", "0 <= q"))
    assert refuted.verdict is Verdict.REFUTED
    assert refuted.witness is not None
    assert refuted.witness.symbols["q"] >= max(0, refuted.witness.symbols["kv"])
    assert prove(obligation("q < q", "q < 0", "0 < q")).verdict is Verdict.VACUOUS


def test_a_mutant_that_survives_makes_an_error() -> None:
    mutant = proofs.obligation.Mutant("no fault at all", TRUE)
    result = prove(obligation("q < q + 1", mutants=(mutant,)))
    assert result.verdict is Verdict.ERROR
    assert result.survivors == ("no fault at all",)


def test_an_equality_of_code_that_overflows_is_not_proved() -> None:
    """q * 65536 wraps from 2**15 tokens on: the terms are equal, the machine's words are not."""
    target = Target(target="overflowing", spec="causal", make=lambda at: causal_scaled)
    found = verdicts(target)
    assert found["overflowing", "no-overflow"] is Verdict.REFUTED
    assert found["overflowing", "equals-spec"] is Verdict.UNKNOWN


def test_an_equality_that_rests_on_reads_outside_a_table_is_not_proved() -> None:
    """Row num_tokens of the table does not exist, whatever code and spec make of it."""
    beyond = from_text("kv <= q or query_ranges[num_tokens, 0] == kv")
    held = dataclasses.replace(
        mask("mm_prefix_no_window").given(("query_ranges",)), formula=beyond, name="beyond"
    )
    code = BOTTOM_RIGHT(beyond)
    lifted = Lifted((code,), (), (), ((TRUE, reads(code)[0], "here"),), ("query_ranges",), False,
                    "", 1)
    target = Target(target="beyond", spec="beyond", make=lambda at: None)
    subject = Subject(target, lifted, held, {}, Limits())
    results = [prove(o) for o in obligations(subject)]
    assert {r.obligation.name: r.verdict for r in results} == {
        "equals-spec": Verdict.PROVED, "no-overflow": Verdict.PROVED,
        "reads-in-bounds": Verdict.REFUTED,
    }
    assert void(subject, results, Options()) is not None


def test_a_fast_check_asks_too_whether_real_reads_are_inside_their_tables() -> None:
    beyond = from_text("kv <= q or query_ranges[num_tokens, 0] == kv")
    held = dataclasses.replace(
        mask("mm_prefix_no_window").given(("query_ranges",)), formula=beyond, name="beyond"
    )
    code = BOTTOM_RIGHT(beyond)
    lifted = Lifted((code,), (), (), ((TRUE, reads(code)[0], "here"),), ("query_ranges",), False,
                    "", 1)
    target = Target(target="beyond", spec="beyond", make=lambda at: None)
    subject = Subject(target, lifted, held, {}, Limits())
    fast = ("equals-spec", "no-overflow")
    results = [prove(o) for o in obligations(subject, fast)]
    assert [r.verdict for r in results] == [Verdict.PROVED, Verdict.PROVED]
    assert void(subject, results, Options(obligations=fast)) is not None


def test_a_proof_without_a_mutant_is_not_shown_as_proved() -> None:
    """Lengths that no sampled batch has leave nothing to show a mutant wrong on."""
    far = dataclasses.replace(mask("causal"), assume=(from_text("seqlen_k == 100000"),))
    target = dataclasses.replace(BY_NAME["mm_prefix[no-window]"], target="far", spec="causal",
                                 make=lambda at: causal, layouts=())
    rows = {r.result.obligation.name: r.result for r in check([target], lambda text: far)}
    assert rows["equals-spec"].verdict is Verdict.UNKNOWN
    assert "no cell was found" in rows["equals-spec"].reason


@pytest.mark.parametrize("top", [0, 1, 5, 1000, 2**31 - 1])
def test_the_largest_number_is_found_wherever_it_lies(top: int) -> None:
    near = {base + by for base in (0, top, top // 2, top // 4, top // 3) for by in range(-70, 71)}
    for edge in (e for e in near if -1 <= e <= top):
        asked: list[int] = []

        def holds(value: int, edge: int = edge, asked: list[int] = asked) -> bool:
            assert 0 <= value <= top
            asked.append(value)
            return value <= edge

        assert proofs.obligation._last(holds, top) == (None if edge < 0 else edge)
        assert len(asked) <= 2 * top.bit_length() + 40
