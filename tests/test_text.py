"""Terms and their text: interned, immutable, and printed so that they read back."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given, settings

from spec.from_text import from_text
from spec.term import (
    BOOL,
    FALSE,
    INT,
    TRUE,
    SpecError,
    Term,
    and_,
    any_,
    bind,
    bound,
    const,
    eq,
    expand,
    or_,
    read,
    substitute,
    sym,
    symbols,
    tables,
)
from spec.to_text import to_text
from tests.examples import EXAMPLES, Example
from tests.strategies import terms

X, Y = sym("x"), sym("y")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.text)
def test_printing_an_example_round_trips(example: Example) -> None:
    assert from_text(to_text(example.term), sort=example.sort) is example.term


@settings(max_examples=500, deadline=None)
@given(term=terms(BOOL))
def test_printing_round_trips(term: Term) -> None:
    assert from_text(to_text(term)) is term


@settings(max_examples=200, deadline=None)
@given(term=terms(INT))
def test_printing_numbers_round_trips(term: Term) -> None:
    assert from_text(to_text(term), sort=INT) is term


@pytest.mark.parametrize("text, printed", [
    ("q>=kv", "kv <= q"),
    ("q > kv", "kv < q"),
    ("q != kv", "not q == kv"),
    ("0 <= q < kv", "0 <= q and q < kv"),
    ("(q < 1) & (kv < 1) | ~(q < kv)", "q < 1 and kv < 1 or not q < kv"),
    ("(q - (kv - 1)) < 2", "q - (kv - 1) < 2"),
    ("((q - kv) - 1) < 2", "q - kv - 1 < 2"),
    ("(q < 1 and kv < 1) and kv < 2", "q < 1 and kv < 1 and kv < 2"),
    ("max(q, kv, 3) == 1", "max(max(q, kv), 3) == 1"),
    ("- q < 1", "0 - q < 1"),
    ("(-2) * q < 1", "-2 * q < 1"),
    ("q - -2 < 1", "q - -2 < 1"),
    ("(q if q < kv else kv) < 3", "(q if q < kv else kv) < 3"),
])
def test_text_has_one_printed_form(text: str, printed: str) -> None:
    assert to_text(from_text(text)) == printed


@pytest.mark.parametrize("text, why", [
    ("", "invalid syntax"),
    ("kv <= ", "invalid syntax"),
    ("kv <=\n q", "invalid syntax"),
    ("(" * 300, "parentheses"),
    ("kv <= q\x00", "null"),
    ("not " * 5000 + "True", "nested"),
    ("kv", "`kv` stands where True or False is needed"),
    ("kv + 1", "True or False is needed here"),
    ("(kv < q) + 1 < 2", "a number is needed here"),
    ("q - kv < 3 & kv <= q", "put each comparison in parentheses"),
    ("kv <= q and 3", "True or False is needed here"),
    ("kv in q", "In is not part of the language"),
    ("q / kv < 2", "BinOp is not part of the language"),
    ("q ** 2 < 4", "BinOp is not part of the language"),
    ("q < 1.5", "Constant is not part of the language"),
    ("q < 'a'", "Constant is not part of the language"),
    ("f(q) < 1", "Call is not part of the language"),
    ("truncdiv(q, 1, 2) < 1", "Call is not part of the language"),
    ("min(q) < 1", "Call is not part of the language"),
    ("min(q, key=kv) < 1", "Call is not part of the language"),
    ("min(*q) < 1", "Call is not part of the language"),
    ("q.x < 1", "Attribute is not part of the language"),
    ("t[1:2] < 1", "Slice is not part of the language"),
    ("t[()] < 1", "a table needs an index"),
    ("any(r < q for r in t)", "write any(... for r in range(count))"),
    ("any(r < q for r in range(1, 3))", "write any(... for r in range(count))"),
    ("any(r < q for r in range(3) if r < 1)", "write any(... for r in range(count))"),
    ("any(any(r < q for r in range(2)) for r in range(2))", "bound twice"),
    ("(lambda: 0) < 1", "Lambda is not part of the language"),
    ("[q] < 1", "List is not part of the language"),
    ("__import__('os').system('false') < 1", "Call is not part of the language"),
])
def test_text_errors_are_one_line(text: str, why: str) -> None:
    with pytest.raises(SpecError) as caught:
        from_text(text)
    assert why in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_errors_give_the_column() -> None:
    with pytest.raises(SpecError, match=r"cannot parse 'q / 2': .* \(column 13\)"):
        from_text("kv <= q and q / 2 < 1")


def test_the_same_term_is_the_same_object() -> None:
    assert X + 1 is sym("x") + const(1)
    assert and_(X < Y, Y < X) is ((X < Y) & (Y < X))
    assert X + Y is not Y + X
    same, other = X + 1, X + 2
    assert (same == X + 1) is True
    assert (same == other) is False
    assert const(True) is not const(1)
    assert const(False) is not const(0)
    assert len({X + 1, X + 1, X + 2}) == 2


def test_copies_are_the_same_object() -> None:
    term = from_text("any(t[r] <= x for r in range(3)) or x < -2")
    assert pickle.loads(pickle.dumps(term)) is term
    assert copy.deepcopy(term) is term


def test_eq_builds_an_equation() -> None:
    assert eq(X, 1).op == "eq"
    assert eq(X, 1).sort == BOOL


def test_a_term_has_no_truth_value() -> None:
    for term in (X < 1, X, TRUE):
        with pytest.raises(TypeError, match="no truth value"):
            bool(term)
    with pytest.raises(TypeError):
        _ = X < 1 and X < 2  # type: ignore[operator]


def test_terms_are_immutable() -> None:
    with pytest.raises(AttributeError):
        X.value = "y"


def test_sorts_are_checked() -> None:
    with pytest.raises(SpecError, match="needs Int"):
        Term("add", (X, X < 1))
    with pytest.raises(SpecError, match="needs Bool"):
        Term("and", (X, X < 1))
    with pytest.raises(SpecError, match="needs Bool"):
        Term("ite", (X < 1, X < 1, X))
    with pytest.raises(SpecError, match="takes 2 arguments"):
        Term("add", (X,))
    assert Term("ite", (X < 1, X < 1, X < 2)).sort == BOOL


def test_connectives_are_flat_and_have_units() -> None:
    a, b, c = X < 1, X < 2, X < 3
    assert (a & b) & c is a & (b & c) is and_(a, b, c)
    assert (a | b) | c is a | (b | c) is or_(a, b, c)
    assert and_() is TRUE
    assert or_() is FALSE
    assert and_(a) is a


def test_an_index_is_no_unknown() -> None:
    some = any_("r", 3, bound("r") < sym("n"))
    assert symbols(some) == {"n"}
    assert bind(some, {"r": 5}) is some
    assert symbols(from_text("any(r < n for r in range(3)) and r < n")) == {"n", "r"}
    with pytest.raises(SpecError, match="an unknown and an index"):
        any_("r", 3, bound("r") < sym("r"))


def test_substitution_is_simultaneous() -> None:
    assert bind(X - Y, {"x": Y, "y": X}) is Y - X
    assert substitute(X + 1, {X: X + 1}) is X + 1 + 1
    assert tables(expand(any_("r", 2, read("t", bound("r")) < X))) == {"t"}
