"""In one sentence, what is wrong with a range of tiles that was refuted: at which bound of the mask
keys are left out or not masked, how many, and which change of the range would be right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kernels.block_info import Range
from proofs.bounds import Bound, bounds, up_to
from proofs.diagnosis import Diagnosis
from proofs.obligation import LIMIT, Limits, Result, UnknownLimit, Verdict, Witness, largest, prove
from spec.domain import BOTTOM_RIGHT, SEQLEN_K
from spec.sample import evaluate
from spec.term import Term, and_, postorder, substitute, sym
from spec.tiles import BUILTIN, KV_IDX, N_BLOCK, SPLIT, SPLITS, coverage, interior_unmasked
from spec.to_numpy import to_numpy

if TYPE_CHECKING:
    from proofs.tiles import Stated, Subject

LEFT, RIGHT = sym("window_size_left"), sym("window_size_right")
# Changes of the range that are tried with the solver, of those that random cells allow.
MOST_PROOFS = 12


def diagnosis(
    subject: Subject, stated: Stated, beside: Sequence[Stated], result: Result, limits: Limits
) -> Diagnosis | None:
    """Of an obligation of `proofs.tiles`; None where it is not refuted, or nothing can be said.
    `beside` are the others of the same range, which a change of it must not break."""
    if result.verdict is not Verdict.REFUTED or result.witness is None:
        return None
    quick = replace(limits, smtlib=None)
    name = result.obligation.name
    at = None if subject.configuration.split else _at_bound(subject, name, quick)
    claims = [stated, *(s for s in beside if s is not stated and s.range is stated.range)]
    fix = next(fixes(claims, result.witness, quick), None)
    said = at or _on_witness(subject, stated, result.witness)
    if said is None and fix is None:
        return None
    sentence = "; ".join([*([said] if said else []), *([f"it holds with {fix}"] if fix else [])])
    return Diagnosis(sentence, fix or name, Verdict.PROVED if at or fix else Verdict.UNKNOWN)


def _at_bound(subject: Subject, name: str, limits: Limits) -> str | None:
    """At which bound the claim fails: with how many keys fewer, or more, inside it, it holds."""
    formula = BUILTIN[subject.configuration.mode]
    for bound in bounds(formula):
        if (by := _least(subject, name, bound, limits)) is not None:
            if name == "coverage":
                return (f"{up_to(by)} on the {bound.side}, at {bound.name}, "
                        f"{'lies' if by == 1 else 'lie'} in no tile that is visited")
            return (f"a tile without an element mask holds {up_to(by)} "
                    f"on the {bound.side} of {bound.name}")
    if name == "coverage" and (by := _least(subject, name, None, limits)) is not None:
        return f"{up_to(by)} before the end of the sequence lie in no tile that is visited"
    return None


def _least(subject: Subject, name: str, bound: Bound | None, limits: Limits) -> int | None:
    """The fewest keys by which the bound has to be moved; None where that does not help."""
    formula, tile = BUILTIN[subject.configuration.mode], subject.tile
    far = 2 * (tile.tile_m + tile.tile_n)
    by = far - sym(LIMIT)
    if name == "coverage":
        visible = subject.visible if bound is None else BOTTOM_RIGHT(bound.moved(formula, -by))
        if bound is None:
            visible = and_(visible, KV_IDX < SEQLEN_K - by)
        claim = coverage(visible, tile, subject.range.visits)
    elif name == "interior-unmasked" and bound is not None:
        claim = interior_unmasked(
            BOTTOM_RIGHT(bound.moved(formula, by)), tile, subject.range.visits)
    else:
        return None
    try:
        found = largest(claim, subject.assumptions, limits, top=far)
    except UnknownLimit:
        return None
    return None if found is None else far - found


def fixes(claims: Sequence[Stated], witness: Witness, limits: Limits) -> Iterator[str]:
    """Changes of the range in one place with which all claims are proved; the first is refuted."""
    refuted, *_ = claims
    tried = 0
    for phrase, range_ in changes(refuted.range):
        made = [replace(each.obligation, claim=each.claim(range_), mutants=()) for each in claims]
        if not to_numpy(made[0].claim, witness.env) or not all(
                evaluate(o.claim, each.corpus).all()
                for o, each in zip(made, claims, strict=True)):
            continue
        if all(prove(o, limits).verdict is Verdict.PROVED for o in made):
            yield phrase
        if (tried := tried + 1) == MOST_PROOFS:
            return


def changes(range_: Range) -> Iterator[tuple[str, Range]]:
    """Ends and turns one off, a min for a max, a window one off, a mask more."""
    from proofs.tiles import off_by_one, put, with_visit, with_visits

    yield from off_by_one(range_)
    yield from with_visits(range_)
    for name, bound in (("n_block_min", range_.low), ("n_block_max", range_.high)):
        for node in postorder(bound):
            for phrase, other in _others(node):
                yield f"{phrase} in {name}", put(range_, bound, substitute(bound, {node: other}))
    for i, visit in enumerate(range_.visits):
        if not (visit.masked and visit.seqlen):
            yield f"a mask in visit {i}", with_visit(
                range_, i, replace(visit, masked=True, seqlen=True))


def _others(node: Term) -> Iterator[tuple[str, Term]]:
    if node.op in ("min", "max"):
        other = "max" if node.op == "min" else "min"
        yield f"`{other}` for `{node.op}`", Term(other, node.args)
    if node in (LEFT, RIGHT):
        yield f"`{node.value} + 1` for `{node.value}`", node + 1
        yield f"`{node.value} - 1` for `{node.value}`", node - 1


def _on_witness(subject: Subject, stated: Stated, witness: Witness) -> str | None:
    """What happens to the tile of the witness, or to the split."""
    env = witness.env

    def value(term: Term) -> int:
        return int(to_numpy(term, env))

    range_ = stated.range
    if stated.obligation.name == "splits-partition":
        low, high = value(range_.low), value(range_.high)
        whole = f"the whole range is {value(subject.whole.low)} to {value(subject.whole.high)}"
        following = substitute(range_.low, {SPLIT: SPLIT + 1})
        last = value(SPLITS) - 1
        after = f", the next begins at {value(following)}" if value(SPLIT) < last else ""
        end = value(substitute(range_.high, {SPLIT: SPLITS - 1}))
        return (f"on the witness split {value(SPLIT)} is tiles {low} to {high}{after}, "
                f"the last ends at {end}, and {whole}, ends exclusive")
    if stated.obligation.name == "coverage":
        visits = [i for i, visit in enumerate(range_.visits) if value(visit.hits(N_BLOCK))]
        if len(visits) > 1:
            return f"on the witness visits {' and '.join(map(str, visits))} take the same tile"
        if subject.configuration.split and not visits:
            return f"on the witness tile {value(N_BLOCK)} of a split's part is not visited"
        last = value((SEQLEN_K - 1) // subject.tile.tile_n)
        if value(range_.high) - 1 > max(last, 0):
            return (f"on the witness tiles up to {value(range_.high) - 1} are visited, "
                    f"though {last} is the last that holds a key")
    return None
