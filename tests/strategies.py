"""Hypothesis strategies: random terms over all operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from spec.term import (
    BOOL,
    Term,
    and_,
    any_,
    bound,
    const,
    eq,
    ite,
    max_,
    min_,
    not_,
    or_,
    read,
    sym,
    truncdiv,
    truncmod,
)

Draw = Callable[[st.SearchStrategy[Any]], Any]
NAMES = ("x", "y")
TABLES = {"t": (4,), "u": (3, 2)}
PAIRS: dict[str, Callable[[Term, Term], Term]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "min": min_, "max": max_,
}
DIVISIONS: dict[str, Callable[[Term, Term], Term]] = {
    "floordiv": lambda a, b: a // b, "floormod": lambda a, b: a % b,
    "truncdiv": truncdiv, "truncmod": truncmod,
}
COMPARISONS: dict[str, Callable[[Term, Term], Term]] = {
    "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "eq": eq,
}


@st.composite
def terms(draw: Draw, sort: str = BOOL, depth: int = 4) -> Term:
    """A term over NAMES and TABLES that has a value everywhere: no division by zero, and no read
    beyond a table."""
    return _bool(draw, depth, ()) if sort == BOOL else _int(draw, depth, ())


def _int(draw: Draw, depth: int, indices: tuple[str, ...]) -> Term:
    kinds = ["const", "sym"] + ["pair", "division", "ite", "read"] * (depth > 0)
    match draw(st.sampled_from(kinds)):
        case "const":
            return const(draw(st.integers(-9, 9)))
        case "sym":
            name = draw(st.sampled_from([*NAMES, *("%" + index for index in indices)]))
            return bound(name[1:]) if name[0] == "%" else sym(name)
        case "pair":
            make = PAIRS[draw(st.sampled_from(sorted(PAIRS)))]
            return make(_int(draw, depth - 1, indices), _int(draw, depth - 1, indices))
        case "division":
            make = DIVISIONS[draw(st.sampled_from(sorted(DIVISIONS)))]
            by = draw(st.integers(-5, 5).filter(bool))
            size = max_(_int(draw, depth - 1, indices), 1)
            return make(_int(draw, depth - 1, indices), draw(st.sampled_from([const(by), size])))
        case "ite":
            return ite(_bool(draw, depth - 1, indices), _int(draw, depth - 1, indices),
                       _int(draw, depth - 1, indices))
    table = draw(st.sampled_from(sorted(TABLES)))
    return read(table, *(_int(draw, depth - 1, indices) % size for size in TABLES[table]))


def _bool(draw: Draw, depth: int, indices: tuple[str, ...]) -> Term:
    kinds = ["const"] + ["compare", "and", "or", "not", "ite", "any"] * (depth > 0)
    match draw(st.sampled_from(kinds)):
        case "const":
            return const(draw(st.booleans()))
        case "compare":
            make = COMPARISONS[draw(st.sampled_from(sorted(COMPARISONS)))]
            return make(_int(draw, depth - 1, indices), _int(draw, depth - 1, indices))
        case "and" | "or" as op:
            count = draw(st.integers(2, 3))
            make = and_ if op == "and" else or_
            return make(*(_bool(draw, depth - 1, indices) for _ in range(count)))
        case "not":
            return not_(_bool(draw, depth - 1, indices))
        case "ite":
            return ite(*(_bool(draw, depth - 1, indices) for _ in range(3)))
    index = f"r{len(indices)}"
    body = _bool(draw, depth - 1, (*indices, index))
    return any_(index, draw(st.integers(0, 3)), body)


