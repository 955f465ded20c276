"""A term in z3: unbounded integers, tables as uninterpreted functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import z3

from spec.term import OPS, Rule, Term, expand, fold
from spec.to_numpy import unexpanded


def _number(b: Any) -> bool:
    return z3.is_int_value(b) and b.as_long() != 0


def _floordiv(a: Any, b: Any) -> Any:
    # z3's `/` rounds so that the remainder is not negative: down for a positive divisor only.
    if _number(b):
        return a / b if b.as_long() > 0 else (-a) / (-b)
    return z3.If(b == 0, 0, z3.If(b > 0, a / b, (-a) / (-b)))


def _truncdiv(a: Any, b: Any) -> Any:
    size, by = z3.If(a >= 0, a, -a), z3.If(b >= 0, b, -b)
    if _number(b):
        by = z3.IntVal(abs(b.as_long()))
        negative = a < 0 if b.as_long() > 0 else a > 0
    else:
        negative = (a < 0) != (b < 0)
    quotient = size / by if _number(b) else z3.If(by == 0, 0, size / by)
    return z3.If(negative, -quotient, quotient)


def _read(node: Term, *index: Any) -> Any:
    sorts = [z3.IntSort()] * (len(index) + 1)
    return z3.Function(node.value, *sorts)(*index)


RULES: Mapping[str, Rule] = {
    "const": lambda node: z3.BoolVal(node.value) if node.sort == "Bool" else z3.IntVal(node.value),
    "sym": lambda node: z3.Int(node.value),
    "add": lambda node, a, b: a + b,
    "sub": lambda node, a, b: a - b,
    "mul": lambda node, a, b: a * b,
    "floordiv": lambda node, a, b: _floordiv(a, b),
    "floormod": lambda node, a, b: a - b * _floordiv(a, b),
    "truncdiv": lambda node, a, b: _truncdiv(a, b),
    "truncmod": lambda node, a, b: a - b * _truncdiv(a, b),
    "min": lambda node, a, b: z3.If(a <= b, a, b),
    "max": lambda node, a, b: z3.If(a >= b, a, b),
    "lt": lambda node, a, b: a < b,
    "le": lambda node, a, b: a <= b,
    "eq": lambda node, a, b: a == b,
    "and": lambda node, *args: z3.And(*args),
    "or": lambda node, *args: z3.Or(*args),
    "not": lambda node, a: z3.Not(a),
    "ite": lambda node, c, a, b: z3.If(c, a, b),
    "read": _read,
    "any": unexpanded,
}
assert RULES.keys() == OPS.keys()


def to_z3(term: Term, memo: dict[Term, Any] | None = None) -> Any:
    """The z3 expression of `term`. `memo` carries translated nodes from call to call.

    Division by zero is unconstrained in z3; a claim about code must exclude it.
    """
    return fold(expand(term), RULES, memo)
