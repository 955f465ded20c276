"""Terms as a person would write them: constructors that drop what decides nothing.

Each returns a term equal to the plain one wherever symbols and table elements are int32, which is
what a mask_mod is given. Constants go to the right, comparisons to `<` and `<=`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from weakref import WeakKeyDictionary

from spec.term import BOOL, FALSE, TRUE, Term, and_, const, eq, max_, min_, or_
from spec.term import ite as ite_term
from spec.term import not_ as not_term
from spec.term import truncdiv as truncdiv_term
from spec.term import truncmod as truncmod_term

Span = tuple[int, int]
ZERO = const(0)


def signed_range(width: int) -> Span:
    return -(1 << width - 1), (1 << width - 1) - 1


INT32 = signed_range(32)
_spans: WeakKeyDictionary[Term, Span] = WeakKeyDictionary()


def span(value: Term) -> Span:
    """Bounds on an Int term."""
    if (known := _spans.get(value)) is None:
        known = _spans[value] = _span(value)
    return known


def _span(value: Term) -> Span:
    if value.op == "const":
        return value.value, value.value
    if value.op == "ite":
        condition, wrapped, plain = value.args
        if condition is (plain < ZERO) and wrapped.op == "add" and wrapped.args[0] is plain:
            # A word read as unsigned.
            return 0, max(span(plain)[1], number_of(wrapped.args[1]) - 1)
        (a, b), (c, d) = span(wrapped), span(plain)
        return min(a, c), max(b, d)
    if value.op not in _SPANS:
        return INT32
    return _SPANS[value.op](*[span(arg) for arg in value.args])


def _product_span(a: Span, b: Span) -> Span:
    corners = [x * y for x in a for y in b]
    return min(corners), max(corners)


def _quotient_span(a: Span, b: Span) -> Span:
    if b[0] > 0:
        corners = [x // y for x in a for y in b]
        return min(corners), max(corners) + (a[0] < 0)
    largest = max(abs(a[0]), abs(a[1])) + 1
    return -largest, largest


def _floormod_span(a: Span, b: Span) -> Span:
    return min(b[0] + 1, 0), max(b[1] - 1, 0)


def _truncmod_span(a: Span, b: Span) -> Span:
    largest = max(abs(b[0]), abs(b[1]), 1) - 1
    return (-largest if a[0] < 0 else 0), (largest if a[1] > 0 else 0)


_SPANS: Mapping[str, Callable[[Span, Span], Span]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": _product_span,
    "min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "floordiv": _quotient_span,
    "truncdiv": _quotient_span,
    "floormod": _floormod_span,
    "truncmod": _truncmod_span,
}


def number_of(value: Term) -> int | None:
    """The number that a constant Int term is."""
    return value.value if value.op == "const" else None


def both(args: Iterable[Term]) -> Term:
    """The conjunction, without repeated or constant parts."""
    return _junction(args, "and", TRUE, FALSE, and_)


def either(args: Iterable[Term]) -> Term:
    """The disjunction, without repeated or constant parts."""
    return _junction(args, "or", FALSE, TRUE, or_)


def _junction(
    args: Iterable[Term], op: str, unit: Term, zero: Term, make: Callable[..., Term]
) -> Term:
    parts: dict[Term, None] = {}
    for arg in args:
        parts.update(dict.fromkeys(arg.args if arg.op == op else (arg,)))
    parts.pop(unit, None)
    if zero in parts or any(negation(part) in parts for part in parts):
        return zero
    return make(*parts)


def negation(a: Term) -> Term:
    match a.op:
        case "const":
            return const(not a.value)
        case "not":
            return a.args[0]
        case "lt":
            return a.args[1] <= a.args[0]
        case "le":
            return a.args[1] < a.args[0]
        case _:
            return not_term(a)


def exclusive(a: Term, b: Term) -> Term:
    """True where exactly one of two truth values is."""
    return choose(a, negation(b), b)


def same(a: Term, b: Term) -> Term:
    if a.op == "const":
        a, b = b, a
    (low_a, high_a), (low_b, high_b) = span(a), span(b)
    if a is b:
        return TRUE
    if high_a < low_b or high_b < low_a or (a.op == b.op == "const"):
        return FALSE
    if a.op == "ite" and b.op == "const":
        return choose(a.args[0], same(a.args[1], b), same(a.args[2], b))
    return eq(a, b)


def less(a: Term, b: Term) -> Term:
    return _ordered(a, b, Term.__lt__, strict=True)


def at_most(a: Term, b: Term) -> Term:
    return _ordered(a, b, Term.__le__, strict=False)


def _ordered(a: Term, b: Term, make: Callable[[Term, Term], Term], strict: bool) -> Term:
    (low_a, high_a), (low_b, high_b) = span(a), span(b)
    if a is b:
        return const(not strict)
    if high_a < low_b or (not strict and high_a <= low_b):
        return TRUE
    if high_b < low_a or (strict and high_b <= low_a):
        return FALSE
    # What the spans leave open, the constant side of a clamp does not decide.
    if b.op == "const" and _is_clamp(a):
        return _ordered(a.args[0], b, make, strict)
    if a.op == "const" and _is_clamp(b):
        return _ordered(a, b.args[0], make, strict)
    return make(a, b)


def _is_clamp(a: Term) -> bool:
    return a.op in ("min", "max") and a.args[1].op == "const"


def choose(c: Term, a: Term, b: Term) -> Term:
    """`a` where `c` holds, else `b`."""
    if c.op == "const":
        return a if c.value else b
    if a is b:
        return a
    if c.op == "not":
        return choose(c.args[0], b, a)
    if a.sort == BOOL:
        return _choose_bool(c, a, b)
    if c.op in ("lt", "le") and c.args in ((a, b), (b, a)):
        x, y = (b, a) if a.op == "const" else (a, b)
        return min_(x, y) if c.args == (a, b) else max_(x, y)
    if b.op == "truncdiv" and a is plus(b, const(-1)) and c is rounds_down(*b.args):
        return floordiv(*b.args)
    if b.op == "truncdiv" and a is plus(b, const(1)) and rounds_up(c, *b.args):
        return floordiv(plus(b.args[0], minus(b.args[1], const(1))), b.args[1])
    return ite_term(c, a, b)


def _choose_bool(c: Term, a: Term, b: Term) -> Term:
    if a is TRUE or a is c:
        return either((c, b))
    if a is FALSE:
        return both((negation(c), b))
    if b is FALSE or b is c:
        return both((c, a))
    if b is TRUE:
        return either((negation(c), a))
    shared = [part for part in conjuncts(a) if part in conjuncts(b)]
    if shared:
        a, b = (both(p for p in conjuncts(x) if p not in shared) for x in (a, b))
        return both((*shared, choose(c, a, b)))
    return ite_term(c, a, b)


def conjuncts(a: Term) -> tuple[Term, ...]:
    return a.args if a.op == "and" else (a,)


def rounds_down(a: Term, b: Term) -> Term:
    """Where the floor of a / b is below C's quotient, in the form that the compiler writes."""
    inexact = negation(same(a, times(truncdiv_term(a, b), b)))
    return both((inexact, exclusive(less(a, ZERO), less(b, ZERO))))


def rounds_up(c: Term, a: Term, b: Term) -> bool:
    """Whether `c` is where the ceiling of a / b, for a number b above 0, is over C's quotient."""
    inexact = negation(same(a, times(truncdiv_term(a, b), b)))
    wanted = {inexact, at_most(ZERO, a)} - {TRUE}
    return (number_of(b) or 0) > 0 and set(conjuncts(c)) == wanted


def plus(a: Term, b: Term) -> Term:
    if a.op == "const":
        a, b = b, a
    x, y = number_of(a), number_of(b)
    if x is not None and y is not None:
        return const(x + y)
    if y == 0:
        return a
    return a - const(-y) if y is not None and y < 0 else a + b


def minus(a: Term, b: Term) -> Term:
    x, y = number_of(a), number_of(b)
    if a is b:
        return ZERO
    if y is not None:
        return const(x - y) if x is not None else plus(a, const(-y))
    if b.op == "mul" and b.args[0].op in ("floordiv", "truncdiv"):
        quotient, divisor = b.args
        if quotient.args == (a, divisor):
            return a % divisor if quotient.op == "floordiv" else truncmod_term(a, divisor)
    return a - b


def times(a: Term, b: Term) -> Term:
    if a.op == "const":
        a, b = b, a
    x, y = number_of(a), number_of(b)
    if x is not None and y is not None:
        return const(x * y)
    if y == 0:
        return ZERO
    return a if y == 1 else a * b


def _is_remainder(a: Term, divisor: int) -> bool:
    low, high = span(a)
    return low >= 0 and high < divisor


def floordiv(a: Term, b: Term) -> Term:
    x, y = number_of(a), number_of(b)
    if y and x is not None:
        return const(x // y)
    if y is not None and _is_remainder(a, y):
        return ZERO
    inner = number_of(a.args[1]) if a.op == "floordiv" else None
    if y is not None and inner is not None and min(inner, y) > 0:
        return floordiv(a.args[0], const(inner * y))
    if a.op == "sub" and a.args[1].op == "truncmod" and a.args[1].args == (a.args[0], b):
        return truncdiv_term(a.args[0], b)
    return a if y == 1 else a // b


def floormod(a: Term, b: Term) -> Term:
    x, y = number_of(a), number_of(b)
    if y and x is not None:
        return const(x % y)
    if y is not None and _is_remainder(a, y):
        return a
    return ZERO if y == 1 else a % b


def truncdiv(a: Term, b: Term) -> Term:
    x, y = number_of(a), number_of(b)
    if y and x is not None:
        return const(abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1))
    return a if y == 1 else truncdiv_term(a, b)


def truncmod(a: Term, b: Term) -> Term:
    x, y = number_of(a), number_of(b)
    if y and x is not None:
        return minus(a, times(truncdiv(a, b), b))
    return ZERO if y == 1 else truncmod_term(a, b)
