"""Each rule on machine words, against arithmetic on all pairs of 8-bit words."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kernels.machine import PREDICATES, RULES, Bits, Num, Word, bits_of, constant, number, unsigned
from kernels.simplify import signed_range
from spec.term import Term, sym
from spec.to_numpy import to_numpy

WIDTH = 8
A, B = (axis.ravel() for axis in np.mgrid[-128:128, -128:128])
ENV = {"a": A, "b": B}
UA, UB = A % 256, B % 256
CONSTANTS = (-128, -8, -3, -2, -1, 0, 1, 2, 3, 7, 8, 15, 127)


@dataclass
class Noted:
    """Where every noted value fits and every noted claim holds."""

    holds: np.ndarray = field(default_factory=lambda: np.ones(len(A), bool))

    def fits(self, value: Term, width: int) -> None:
        low, high = signed_range(width)
        self.holds &= (low <= of(value)) & (of(value) <= high)

    def needs(self, claim: Term) -> None:
        self.holds &= of(claim)


def of(term: Term) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.broadcast_to(to_numpy(term, ENV), len(A))


def signed(values: np.ndarray, width: int = WIDTH) -> np.ndarray:
    return (values + (1 << width - 1)) % (1 << width) - (1 << width - 1)


def trunc_quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    b = np.where(b == 0, 1, b)
    return np.trunc(a / b).astype(int)


def shifted(a: np.ndarray, by: np.ndarray, left: bool) -> np.ndarray:
    """By an amount of 8 or more, nothing is left."""
    amount = np.clip(by, 0, 40)
    return np.where(by >= WIDTH, 0, a << amount if left else a >> amount)


FLOOR_BY = np.where(UB == 0, 1, UB)
MEANINGS: dict[str, np.ndarray] = {
    "llvm.add": A + B,
    "llvm.sub": A - B,
    "llvm.mul": A * B,
    "llvm.sdiv": trunc_quotient(A, B),
    "llvm.srem": A - B * trunc_quotient(A, B),
    "llvm.udiv": UA // FLOOR_BY,
    "llvm.urem": UA % FLOOR_BY,
    "llvm.and": A & B,
    "llvm.or": A | B,
    "llvm.xor": A ^ B,
    "llvm.shl": shifted(UA, UB, left=True),
    "llvm.lshr": shifted(UA, UB, left=False),
    "llvm.ashr": A >> np.clip(UB, 0, 7),
    "shl.b32": shifted(UA, UB, left=True),
    "shr.u32": shifted(UA, UB, left=False),
}
# What LLVM leaves without a meaning, and a rule must therefore note.
MEANINGLESS: dict[str, np.ndarray] = {
    "llvm.sdiv": (B == 0) | (A == -128) & (B == -1),
    "llvm.srem": (B == 0) | (A == -128) & (B == -1),
    "llvm.udiv": B == 0,
    "llvm.urem": B == 0,
    "llvm.shl": UB >= WIDTH,
    "llvm.lshr": UB >= WIDTH,
    "llvm.ashr": UB >= WIDTH,
}
WRAPS = {"llvm.add", "llvm.sub", "llvm.mul", "llvm.shl"}


def as_number(name: str) -> Word:
    return Num(sym(name), WIDTH)


def as_bits(name: str) -> Word:
    return Bits(bits_of(as_number(name)))


FORMS: dict[str, Callable[[str], Word]] = {"number": as_number, "bits": as_bits}


def check(rule: str, a: Word, b: Word, where: np.ndarray) -> None:
    noted = Noted()
    result = RULES[rule](noted, a, b)
    expected = signed(MEANINGS[rule])
    kept = where & noted.holds
    assert np.array_equal(of(number(result))[kept], expected[kept])
    assert np.array_equal(of(unsigned(result))[kept], (expected % 256)[kept])
    if rule in MEANINGLESS:
        assert not (kept & MEANINGLESS[rule]).any()
    elif rule not in WRAPS:
        assert noted.holds.all()


@pytest.mark.parametrize("rule", MEANINGS)
@pytest.mark.parametrize("form", FORMS)
def test_a_rule_is_the_machine_operation(rule: str, form: str) -> None:
    check(rule, FORMS[form]("a"), as_number("b"), np.ones(len(A), bool))
    check(rule, as_number("a"), FORMS[form]("b"), np.ones(len(A), bool))
    for value in CONSTANTS:
        check(rule, FORMS[form]("a"), constant(value, WIDTH), value == B)
        check(rule, constant(value, WIDTH), FORMS[form]("b"), value == A)


@pytest.mark.parametrize("rule", ["llvm.add", "llvm.sub", "llvm.mul"])
def test_a_wrapping_rule_notes_exactly_what_wraps(rule: str) -> None:
    noted = Noted()
    RULES[rule](noted, as_number("a"), as_number("b"))
    assert np.array_equal(noted.holds, signed(MEANINGS[rule]) == MEANINGS[rule])


ORDERS: tuple[Any, ...] = (
    A == B, A != B, A < B, A <= B, A > B, A >= B, UA < UB, UA <= UB, UA > UB, UA >= UB,
)  # fmt: skip


@pytest.mark.parametrize("predicate", range(len(PREDICATES)))
@pytest.mark.parametrize("form", FORMS)
def test_a_predicate_is_the_machine_comparison(predicate: int, form: str) -> None:
    expected = ORDERS[predicate]
    for other in FORMS.values():
        assert np.array_equal(of(PREDICATES[predicate](FORMS[form]("a"), other("b"))), expected)
    for value in CONSTANTS:
        term = PREDICATES[predicate](FORMS[form]("a"), constant(value, WIDTH))
        assert np.array_equal(of(term)[value == B], expected[value == B])


@pytest.mark.parametrize("form", FORMS)
def test_a_change_of_width_is_the_machine_one(form: str) -> None:
    noted, word = Noted(), FORMS[form]("a")
    assert np.array_equal(of(number(RULES["llvm.sext"](noted, word, width=16))), A)
    assert np.array_equal(of(number(RULES["llvm.zext"](noted, word, width=16))), UA)
    assert np.array_equal(of(number(RULES["llvm.trunc"](noted, word, width=4))), signed(A, 4))
    assert noted.holds.all()


@pytest.mark.parametrize("first", FORMS)
@pytest.mark.parametrize("second", FORMS)
def test_a_selection_takes_one_word(first: str, second: str) -> None:
    condition = RULES["llvm.icmp"](Noted(), as_number("a"), as_number("b"), predicate=2)
    chosen = RULES["llvm.select"](Noted(), condition, FORMS[first]("a"), FORMS[second]("b"))
    assert np.array_equal(of(number(chosen)), np.minimum(A, B))
    assert np.array_equal(of(unsigned(chosen)), np.where(A < B, UA, UB))
