"""A term evaluated on torch tensors, in 64-bit integers, on whatever device they are on."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import and_, or_
from typing import Any

import torch

from spec.term import OPS, Rule, SpecError, Term, expand, fold
from spec.to_numpy import unexpanded


def choose(c: Any, a: Any, b: Any) -> Any:
    """`a` where `c`, else `b`. Constants stay Python numbers, so each part may be either."""
    if isinstance(c, torch.Tensor):
        return torch.where(c, a, b)
    return a if c else b


def floored(a: Any, b: Any) -> Any:
    """The quotient rounded down, 0 where `b` is 0."""
    return choose(b == 0, 0, a // choose(b == 0, 1, b))


def truncated(a: Any, b: Any) -> Any:
    """The quotient rounded to zero, 0 where `b` is 0."""
    quotient = floored(abs(a), abs(b))
    return choose((a < 0) != (b < 0), -quotient, quotient)


def rules(env: Mapping[str, Any]) -> Mapping[str, Rule]:
    """Term to torch, over `env`."""
    def symbol(node: Term) -> Any:
        if node.value[0] == "%":
            unexpanded(node)
        if node.value not in env:
            raise SpecError(f"no value for {node.value!r}")
        value = env[node.value]
        return value.long() if isinstance(value, torch.Tensor) else int(value)

    def element(node: Term, *index: Any) -> Any:
        if node.value not in env:
            raise SpecError(f"no value for table {node.value!r}")
        return env[node.value][index].long()

    return {
        "const": lambda node: node.value,
        "sym": symbol,
        "add": lambda node, a, b: a + b,
        "sub": lambda node, a, b: a - b,
        "mul": lambda node, a, b: a * b,
        "floordiv": lambda node, a, b: floored(a, b),
        "floormod": lambda node, a, b: a - b * floored(a, b),
        "truncdiv": lambda node, a, b: truncated(a, b),
        "truncmod": lambda node, a, b: a - b * truncated(a, b),
        "min": lambda node, a, b: choose(a < b, a, b),
        "max": lambda node, a, b: choose(a < b, b, a),
        "lt": lambda node, a, b: a < b,
        "le": lambda node, a, b: a <= b,
        "eq": lambda node, a, b: a == b,
        "and": lambda node, *args: reduce(and_, args),
        "or": lambda node, *args: reduce(or_, args),
        "not": lambda node, a: choose(a, False, True),
        "ite": lambda node, c, a, b: choose(c, a, b),
        "read": element,
        "any": unexpanded,
    }


assert rules({}).keys() == OPS.keys()


def to_torch(term: Term, env: Mapping[str, Any]) -> torch.Tensor:
    """The value of `term`: int64 or bool, of the shape that the symbols' tensors broadcast to.

    `env`: symbol -> int or integer tensor (any broadcastable shapes); table -> tensor with one
    axis an index. Every branch of an `ite` is computed, so a table must hold whatever either side
    reads. As everywhere in torch, a negative index counts from the end of the table.
    """
    return torch.as_tensor(fold(expand(term), rules(env)))
