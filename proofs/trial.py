"""Formulas tried on cells, fast: the sieve before the solver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spec.domain import BOTTOM_RIGHT, Frame
from spec.sample import Array, Batch, Lenient, evaluate
from spec.term import Rule, Term, fold, postorder
from spec.term import tables as tables_of
from spec.to_numpy import rules, to_numpy

# Cells on which candidates are tried first: enough to turn nearly all of them away.
FEW = 192


class Sieve:
    """The values of formulas in absolute coordinates on a corpus.

    `any` runs along an axis of its own, so that variations of one formula share the values of every
    subterm that they have in common.
    """

    def __init__(self, formula: Term, corpus: Sequence[Batch], frame: Frame = BOTTOM_RIGHT) -> None:
        self.shapes = [at.cells["b"].shape for at in corpus]
        self.rules = [_rules(at, frame, formula) for at in corpus]
        self.memos: list[dict[Term, Any]] = [{} for _ in corpus]
        for table, memo in zip(self.rules, self.memos, strict=True):
            fold(formula, table, memo)

    def value(self, formula: Term, batch: int) -> Array:
        memo = dict(self.memos[batch])
        return np.broadcast_to(fold(formula, self.rules[batch], memo), self.shapes[batch])

    def values(self, formula: Term) -> Array:
        return np.concatenate([self.value(formula, i) for i in range(len(self.shapes))])


class Trial:
    """The answers of code on a corpus, and whether a formula gives the same."""

    def __init__(
        self, code: Term, formula: Term, corpus: Sequence[Batch], frame: Frame = BOTTOM_RIGHT
    ) -> None:
        whole = Sieve(formula, corpus, frame)
        answers = [evaluate(code, at) for at in corpus]
        few = [_telling(got, whole.value(formula, i)) for i, got in enumerate(answers)]
        chosen = [at.select(keep) for at, keep in zip(corpus, few, strict=True)]
        self.answers = [*(got[keep] for got, keep in zip(answers, few, strict=True)), *answers]
        self.sieve = Sieve(formula, [*chosen, *corpus], frame)

    def agrees(self, candidate: Term) -> bool:
        return all(
            np.array_equal(self.sieve.value(candidate, i), got)
            for i, got in enumerate(self.answers)
        )


def _telling(got: Array, meant: Array) -> Array:
    """Cells that tell candidates apart: where code and spec differ, and some of either answer."""
    kinds = (np.flatnonzero(kind) for kind in (got != meant, got, ~got))
    return np.concatenate([cells[:: max(1, len(cells) // FEW)] for cells in kinds])


def _any_axis(node: Term, count: Array, body: Array) -> Array:
    return body[: int(count)].any(axis=0) if body.ndim > 1 else body & (count > 0)


def _rules(at: Batch, frame: Frame, formula: Term) -> Mapping[str, Rule]:
    """NumPy's rules in absolute coordinates on `at`; a bound index is an array of its own axis."""
    tables = {name: Lenient(array) for name, array in at.tables.items()}
    # One row more than the formula has: a variation may count one range too many.
    bound = {
        "%" + node.value: np.arange(to_numpy(node.args[0], at.params) + 1)[:, None]
        for node in postorder(formula) if node.op == "any"
    }
    places = {
        name: evaluate(term, at)
        for name, term in (("q", frame.q), ("kv", frame.kv), ("token", frame.token))
        if tables_of(term) <= at.tables.keys()
    }
    return {**rules({**at.env, **tables, **bound, **places}), "any": _any_axis}
