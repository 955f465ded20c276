"""Mutants: variations that a cell shows to be wrong; a proof that passes them is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from proofs.obligation import Mutant
from proofs.trial import Sieve
from proofs.variations import Variation, variations
from spec.sample import Array, Batch, evaluate
from spec.term import Term

# Variations that are tried for each mutant that is wanted; and again, others, where too few of
# them are wrong.
TRIED, PASSES = 8, 4


def of_formula(
    formula: Term, claim: Callable[[Term], Term], corpus: Sequence[Batch], count: int
) -> tuple[Mutant, ...]:
    """At most `count` mutants of a mask in absolute coordinates, each different from it on a cell
    of `corpus` and different from the others; `claim(variation)` is the mutant's claim."""
    sieve = Sieve(formula, corpus)
    meant = sieve.values(formula)
    found = _distinct(variations(formula), lambda v: sieve.values(v.term) == meant, count)
    return tuple(Mutant(v.phrase, claim(v.term)) for v in found)


def of_claims(claims: Sequence[Term], corpus: Sequence[Batch], count: int) -> tuple[Mutant, ...]:
    """At most `count` mutants of claims in a kernel's indices: each is one claim with one
    variation, false on a cell of `corpus`, on a set of cells that no other mutant has."""
    memos: list[dict[Term, Any]] = [{} for _ in corpus]

    def holds(variation: Variation) -> Array:
        return np.concatenate([
            evaluate(variation.term, at, memo) for at, memo in zip(corpus, memos, strict=True)
        ])

    wrong = [v for claim in claims for v in variations(claim, absolute=False)]
    return tuple(Mutant(v.phrase, v.term) for v in _distinct(wrong, holds, count))


def of_faults(
    tried: Iterable[tuple[str, Term]], corpus: Batch, count: int
) -> tuple[Mutant, ...]:
    """At most `count` mutants: claims of code with a fault, each false on cells of its own."""
    memo: dict[Term, Any] = {}
    wrong = [Variation(phrase, claim, 0) for phrase, claim in tried]
    found = _distinct(wrong, lambda v: evaluate(v.term, corpus, memo), count)
    return tuple(Mutant(v.phrase, v.term) for v in found)


def _distinct(
    tried: Sequence[Variation], holds: Callable[[Variation], Array], count: int
) -> list[Variation]:
    """`count` variations that do not always hold, each on cells of its own, spread over all."""
    known: dict[bytes, Variation] = {}
    step = max(1, len(tried) // (count * TRIED))
    for start in range(min(step, PASSES)):
        for variation in tried[start::step]:
            cells = holds(variation)
            if not cells.all():
                known.setdefault(np.packbits(cells).tobytes(), variation)
        if len(known) >= count:
            break
    found = list(known.values())
    return [found[i * len(found) // count] for i in range(count)] if len(found) > count else found
