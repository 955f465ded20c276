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
from spec.term import SpecError, Term
from spec.to_numpy import to_numpy
from spec.to_text import to_text


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`sentence` for a person; `variation` is the formula that the code equals, as text."""

    sentence: str
    variation: str
    verdict: Verdict


MOST_PROOFS = 64


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
    for candidate in _candidates(mask):
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


def _candidates(mask: Mask) -> Iterator[Variation]:
    single = variations(mask.formula)
    for one in single:
        yield Variation(f"{mask.name} {one.phrase}", one.term, one.cost)
    for other in MASKS.values():
        if set(other.params) <= set(mask.params) and set(other.tables) <= set(mask.tables):
            yield Variation(other.name, other.formula, 0)
    order = heapq.merge(*(_second(one) for one in single), key=lambda pair: pair[1].cost)
    for first, second in order:
        phrases = sorted((first, second.phrase), key=lambda p: not p.startswith("without"))
        yield Variation(f"{mask.name} {', '.join(phrases)}", second.term, second.cost)


def _second(first: Variation) -> Iterator[tuple[str, Variation]]:
    for second in variations(first.term):
        yield first.phrase, Variation(second.phrase, second.term, first.cost + second.cost)
