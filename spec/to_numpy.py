"""The reference interpreter: a term evaluated on NumPy arrays, in 64-bit integers.

Values stay below 2**63 for every term over int32 inputs that multiplies at most two of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from spec.term import OPS, Rule, SpecError, Term, expand, fold


def unexpanded(node: Term, *_: Any) -> Any:
    raise SpecError("the number of ranges must be a number here, as in --bind num_ranges=2")


def floored(a: Any, b: Any) -> Any:
    """Rounded down; 0 where b is 0, so that every operator has a value everywhere."""
    return np.where(b == 0, 0, np.floor_divide(a, np.where(b == 0, 1, b)))


def truncated(a: Any, b: Any) -> Any:
    quotient = floored(np.abs(a), np.abs(b))
    return np.where((np.asarray(a) < 0) ^ (np.asarray(b) < 0), -quotient, quotient)


def rules(env: Mapping[str, Any]) -> Mapping[str, Rule]:
    def symbol(node: Term) -> Any:
        if node.value not in env:
            if node.value[0] == "%":
                unexpanded(node)
            raise SpecError(f"no value for {node.value!r}")
        return np.asarray(env[node.value], dtype=np.int64)

    def element(node: Term, *index: Any) -> Any:
        if node.value not in env:
            raise SpecError(f"no value for table {node.value!r}")
        table = env[node.value]
        # NumPy would count a negative index from the end.
        if isinstance(table, np.ndarray) and any(np.min(i, initial=0) < 0 for i in index):
            raise IndexError(f"{node.value} is read at a negative index")
        return np.asarray(table[tuple(np.broadcast_arrays(*index))], dtype=np.int64)

    return {
        "const": lambda node: np.asarray(node.value),
        "sym": symbol,
        "add": lambda node, a, b: a + b,
        "sub": lambda node, a, b: a - b,
        "mul": lambda node, a, b: a * b,
        "floordiv": lambda node, a, b: floored(a, b),
        "floormod": lambda node, a, b: a - b * floored(a, b),
        "truncdiv": lambda node, a, b: truncated(a, b),
        "truncmod": lambda node, a, b: a - b * truncated(a, b),
        "min": lambda node, a, b: np.minimum(a, b),
        "max": lambda node, a, b: np.maximum(a, b),
        "lt": lambda node, a, b: a < b,
        "le": lambda node, a, b: a <= b,
        "eq": lambda node, a, b: a == b,
        "and": lambda node, *args: _all(args),
        "or": lambda node, *args: _any(args),
        "not": lambda node, a: ~a,
        "ite": lambda node, c, a, b: np.where(c, a, b),
        "read": element,
        "any": unexpanded,
    }


def _all(args: tuple[Any, ...]) -> Any:
    value = args[0]
    for arg in args[1:]:
        value = value & arg
    return value


def _any(args: tuple[Any, ...]) -> Any:
    value = args[0]
    for arg in args[1:]:
        value = value | arg
    return value


assert rules({}).keys() == OPS.keys()


def to_numpy(
    term: Term, env: Mapping[str, Any], memo: dict[Term, Any] | None = None
) -> np.ndarray[Any, Any]:
    """The value of `term`: int64 or bool, of the shape that the symbols' arrays broadcast to.

    `env`: symbol -> integers (any broadcastable shapes); table -> array with one axis an index.
    Every branch of an `ite` is computed, so a table must hold whatever either side reads.
    Raises SpecError for a name without a value and IndexError for a read beyond a table.
    """
    return fold(expand(term), rules(env), memo)
