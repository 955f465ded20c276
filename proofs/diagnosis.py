"""Name the fault: the variation of the spec that the code provably equals."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from proofs.obligation import Verdict
from proofs.trial import Trial
from proofs.variations import Variation, variations
from spec.domain import BOTTOM_RIGHT, Frame
from spec.masks import MASKS, Mask
from spec.sample import Batch
from spec.term import Term
from spec.to_text import to_text


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`sentence` for a person; `variation` is the formula that the code equals, as text."""

    sentence: str
    variation: str
    verdict: Verdict


MOST_PROOFS = 24


def diagnose(
    mask: Mask, code: Term, corpus: Sequence[Batch],
    equal: Callable[[Term], Verdict], frame: Frame = BOTTOM_RIGHT,
) -> Diagnosis | None:
    """The most usual variation of `mask`, of one fault or two, that `code` is proved equal to.

    `code` is in a kernel's indices; `equal` proves it equal to a formula in absolute coordinates.
    A candidate must agree on every cell of `corpus` before it is proved. None where nothing fits.
    """
    trial = Trial(code, mask.formula, corpus, frame)
    proofs = 0
    for candidate in _candidates(mask):
        if not trial.agrees(candidate.term):
            continue
        proofs += 1
        verdict = equal(candidate.term)
        if verdict is Verdict.PROVED:
            return Diagnosis(f"equals {candidate.phrase}", to_text(candidate.term), verdict)
        if proofs == MOST_PROOFS:
            return None
    return None


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
