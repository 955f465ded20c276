"""Name the fault: the variation of the spec that the code provably equals."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from proofs.obligation import Result, Verdict, Witness
from proofs.trial import Trial
from proofs.variations import Variation, variations
from spec.masks import MASKS, Mask
from spec.sample import Batch
from spec.term import INT, SpecError, Term, bind, postorder, symbols
from spec.to_numpy import to_numpy
from spec.to_text import to_text


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`sentence` for a person; `variation` is the formula that the code equals, as text."""

    sentence: str
    variation: str
    verdict: Verdict


MOST_PROOFS = 64
# Constants of the code that are tried for a parameter.
MOST_NUMBERS = 24


def diagnose(
    mask: Mask, code: Term, corpus: Sequence[Batch], equal: Callable[[Term], Result],
    framed: Callable[[Term], Term],
) -> Diagnosis | None:
    """The most usual variation of `mask`, of one fault or two, that `code` is proved equal to.

    `framed` puts a formula into the kernel's indices, in which `code` is; `equal` proves the two
    equal. A candidate must agree on every cell of `corpus`, and on every witness that turned an
    earlier one away, before it is proved. None where nothing fits.
    """
    trial = Trial(code, mask.formula, corpus)
    witnesses: list[Witness] = []
    for candidate in _candidates(mask, code):
        if not trial.agrees(candidate.term) or any(
            _differs(witness, code, framed(candidate.term)) for witness in witnesses
        ):
            continue
        result = equal(candidate.term)
        if result.verdict is Verdict.PROVED:
            sentence = f"equals {candidate.phrase}"
            return Diagnosis(sentence, to_text(candidate.term), result.verdict)
        if result.witness is None or len(witnesses) == MOST_PROOFS:
            return None
        witnesses.append(result.witness)
    return None


def _differs(witness: Witness, code: Term, other: Term) -> bool:
    """Whether the two differ there; False where the witness does not say what is read."""
    try:
        return bool(to_numpy(code, witness.env) != to_numpy(other, witness.env))
    except (KeyError, SpecError):
        return False


def _candidates(mask: Mask, code: Term) -> Iterator[Variation]:
    numbers = _numbers(code)

    def single(formula: Term) -> list[Variation]:
        found = [*variations(formula), *_fixed(mask, formula, numbers)]
        return sorted(found, key=lambda v: v.cost)

    def second(first: Variation) -> Iterator[tuple[str, Variation]]:
        for found in single(first.term):
            yield first.phrase, Variation(found.phrase, found.term, first.cost + found.cost)

    ones = single(mask.formula)
    for one in ones:
        yield Variation(f"{mask.name} {one.phrase}", one.term, one.cost)
    for other in MASKS.values():
        if set(other.params) <= set(mask.params) and set(other.tables) <= set(mask.tables):
            yield Variation(other.name, other.formula, 0)
    for first, two in heapq.merge(*map(second, ones), key=lambda pair: pair[1].cost):
        phrases = sorted((first, two.phrase), key=lambda p: not p.startswith("without"))
        yield Variation(f"{mask.name} {', '.join(phrases)}", two.term, two.cost)


def _numbers(code: Term) -> list[int]:
    """The smallest constants of the code, with their neighbours."""
    found = {t.value + by for t in postorder(code) if t.op == "const" and t.sort == INT
             for by in (-1, 0, 1)}
    return sorted(found, key=abs)[:MOST_NUMBERS]


def _fixed(mask: Mask, formula: Term, numbers: Sequence[int]) -> Iterator[Variation]:
    """A parameter that the code has as a number."""
    counts = symbols(*(t.args[0] for t in postorder(formula) if t.op == "any"))
    for name in sorted((mask.params.keys() & symbols(formula)) - counts):
        for value in numbers:
            if mask.params[name].low <= value <= mask.params[name].high:
                yield Variation(f"with {name} = {value}", bind(formula, {name: value}), 1)
