"""In one sentence, what is wrong with a built-in mask that was refuted: which bound is off, at
which side, and by how many keys.

What random cells suggest is proved. Where nothing is, the sentence says what happens on the witness
alone, and its verdict is UNKNOWN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from proofs.bounds import Bound, bounds, counted, up_to
from proofs.diagnosis import Diagnosis
from proofs.fragment import BATCH, HEAD, Element, Subject
from proofs.obligation import Limits, Obligation, Result, Verdict, Witness, prove
from spec.domain import BOTTOM_RIGHT, PADDING, Q_IDX, SEQLEN_K, SEQLEN_Q
from spec.sample import Array, evaluate
from spec.term import FALSE, TRUE, Term, and_, const, eq, implies, read, reads, substitute, sym
from spec.tiles import BUILTIN, KV_IDX, M_BLOCK
from spec.to_numpy import to_numpy
from spec.to_text import to_text

END = "the end of the sequence"
FLAG = read("dynamic_causal", sym("b"))
LEFT, RIGHT = sym("window_size_left"), sym("window_size_right")


@dataclass(frozen=True, slots=True)
class Kept:
    """A formula in absolute positions, and how many keys past the end count as real; None: all."""

    formula: Term
    end: int | None = 0

    def __str__(self) -> str:
        past = f" + {self.end}" if self.end else ""
        return to_text(self.formula) + ("" if self.end is None else f" and kv < seqlen_k{past}")


@dataclass(frozen=True, slots=True)
class Guess:
    """The code keeps what `lower` has, and nothing that `upper` has not."""

    phrase: str
    lower: Kept
    upper: Kept


def of_element(subject: Subject, result: Result, limits: Limits) -> Diagnosis | None:
    """Of element-mask, where it is refuted."""
    assert result.witness is not None
    if subject.variant.mask_mod:
        return _another_cell(subject, result.witness)
    quick = replace(limits, smtlib=None)
    for guess in guesses(subject):
        claim = between(subject, guess)
        if not evaluate(claim, subject.corpus).all() or not _holds(claim, result.witness):
            continue
        found = prove(subject.obligation("element-mask", claim, apart=True), quick)
        if found.verdict is Verdict.PROVED:
            return Diagnosis(guess.phrase, str(guess.upper), found.verdict)
    return _at_witness(subject, result.witness)


def _holds(claim: Term, witness: Witness) -> bool:
    try:
        return bool(to_numpy(claim, witness.env))
    except KeyError:
        return True  # it does not say what is read


def meant(subject: Subject) -> Kept:
    return Kept(BUILTIN[subject.configuration.mode], 0 if subject.variant.seqlen else None)


def cell(subject: Subject, term: Term, element: Element) -> Term:
    """A term in absolute positions, of an element's cell."""
    at = {Q_IDX: subject.queries[element.row], KV_IDX: subject.key(element)}
    return substitute(BOTTOM_RIGHT(term), at)


def between(subject: Subject, guess: Guess) -> Term:
    """The claim of a guess, of every element of a real row."""
    def inside(element: Element, kept: Kept) -> Term:
        visible = cell(subject, kept.formula, element)
        return visible if kept.end is None else and_(
            visible, subject.key(element) < SEQLEN_K + kept.end)

    lower = guess.lower if guess.lower.end is not None else replace(guess.lower, end=0)
    # Without seqlen_k no visible key lies past it: what is kept there is not asked about.
    if subject.variant.seqlen:
        lower = guess.lower
    return and_(*(implies(subject.queries[e.row] < SEQLEN_Q, and_(
        implies(inside(e, lower), e.kept), implies(e.kept, inside(e, guess.upper))))
        for e in subject.elements))


def guesses(subject: Subject) -> Iterator[Guess]:
    """What the code may mean, the most telling first."""
    whole = meant(subject)
    seen = Seen(subject)
    found = list(bounds(whole.formula))
    for bound in found:
        few, many = seen.off_by(bound)
        for by in {many, -few} - {0}:
            yield _exactly(moved_phrase(bound, by),
                           replace(whole, formula=bound.moved(whole.formula, by)))
    if subject.variant.seqlen:
        few, many = seen.off_by_end()
        for by in {many, -few} - {0}:
            yield _exactly(_end_phrase(by), replace(whole, end=by))
    yield from others(subject, found)
    for bound in found:
        few, many = seen.off_by(bound)
        yield Guess(_roughly(bound, few, many),
                    replace(whole, formula=bound.moved(whole.formula, -few)),
                    replace(whole, formula=bound.moved(whole.formula, many)))
    if subject.variant.seqlen:
        few, many = seen.off_by_end()
        said = " and ".join([*([f"hides {up_to(few)} before"] if few else []),
                             *([f"keeps {up_to(many)} past"] if many else [])])
        yield Guess(f"{said} {END}", replace(whole, end=-few), replace(whole, end=many))


def others(subject: Subject, found: Sequence[Bound]) -> Iterator[Guess]:
    """Bounds that are missing or exchanged, and flags that are not read."""
    whole = meant(subject)
    for bound in found:
        yield _exactly(f"has no bound on the {bound.side}: {bound.name} is missing",
                       replace(whole, formula=bound.dropped(whole.formula)))
    if subject.variant.seqlen:
        yield _exactly(f"has no bound at {END}", replace(whole, end=None))
    if len(subject.windows) == 2:
        swapped = substitute(whole.formula, {LEFT: RIGHT, RIGHT: LEFT})
        yield _exactly("has the window's sides exchanged", replace(whole, formula=swapped))
    if subject.variant.flags.dynamic:
        for value, kind in ((0, "bidirectional"), (1, "causal")):
            told = substitute(whole.formula, {FLAG: const(value)})
            yield _exactly(f"takes every sequence for {kind}: dynamic_causal is not read",
                           replace(whole, formula=told))
    yield _exactly("hides nothing", Kept(TRUE, None))
    yield _exactly("hides everything", Kept(FALSE, None))


def _exactly(phrase: str, kept: Kept) -> Guess:
    return Guess(phrase, kept, kept)


def moved_phrase(bound: Bound, by: int) -> str:
    if by > 0:
        return f"keeps {counted(by)} too many on the {bound.side} of {bound.name}"
    return f"hides {counted(-by)} too many on the {bound.side}, at {bound.name}"


def _end_phrase(by: int) -> str:
    return f"keeps {counted(by)} past {END}" if by > 0 else f"hides {counted(-by)} before {END}"


def _roughly(bound: Bound, few: int, many: int) -> str:
    parts = [*([f"keeps {up_to(many)} too many on the {bound.side} of"] if many else []),
             *([f"hides {up_to(few)} too many on the {bound.side}, at"] if few else [])]
    return f"{' and '.join(parts)} {bound.name}"


class Seen:
    """What random cells show: elements of real rows that are hidden and visible, or kept and
    hidden."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.memo = subject, {}
        whole = meant(subject)
        kept = self.each(lambda e: e.kept)
        row = self.each(lambda e: subject.queries[e.row] < SEQLEN_Q)
        real = self.each(lambda e: subject.key(e) < SEQLEN_K)
        visible = self.each(lambda e: cell(subject, whole.formula, e))
        inside = visible & real if subject.variant.seqlen else visible
        self.lost, self.leaked = row & visible & real & ~kept, row & kept & ~inside

    def each(self, term: Callable[[Element], Term]) -> Array:
        return np.stack([evaluate(term(e), self.subject.corpus, self.memo)
                         for e in self.subject.elements], axis=-1)

    def off_by(self, bound: Bound) -> tuple[int, int]:
        """How many keys too few inside the bound are kept, and how many too many beyond it."""
        return self._off(self.each(lambda e: cell(self.subject, bound.margin, e)))

    def off_by_end(self) -> tuple[int, int]:
        return self._off(self.each(lambda e: SEQLEN_K - 1 - self.subject.key(e)))

    def _off(self, margin: Array) -> tuple[int, int]:
        few = int(np.where(self.lost, margin + 1, 0).max(initial=0))
        return max(few, 0), max(int(np.where(self.leaked, -margin, 0).max(initial=0)), 0)


def _at_witness(subject: Subject, witness: Witness) -> Diagnosis | None:
    """What happens to the first element that is wrong there."""
    whole = meant(subject)

    def value(term: Term) -> int:
        return int(to_numpy(term, witness.env))

    for element in subject.elements:
        if value(subject.masks([element])):
            continue
        q, kv = value(subject.queries[element.row]), value(subject.key(element))
        margins = [(value(cell(subject, b.margin, element)), f"{b.name} on the {b.side}")
                   for b in bounds(whole.formula)]
        if subject.variant.seqlen:
            margins.append((value(SEQLEN_K - 1 - subject.key(element)), END))
        if value(element.kept):
            beyond = [f"{counted(-by)} beyond {name}" for by, name in margins if by < 0]
            said = f"on the witness keeps key {kv} of query {q}, {' and '.join(beyond)}"
        else:
            near = min(margins, default=(0, ""))
            inside = f"{counted(near[0] + 1)} inside {near[1]}"
            said = f"on the witness hides key {kv} of query {q}, {inside}"
        return Diagnosis(said, str(whole), Verdict.UNKNOWN)
    return None


def _another_cell(subject: Subject, witness: Witness) -> Diagnosis | None:
    """Which cell the mask_mod is asked about in place of an element's own."""
    env = witness.env
    for element in subject.elements:
        if to_numpy(subject.masks([element]), env):
            continue
        own = next(iter(reads(subject.visible(element))))
        asked = [load for load in reads(element.kept) if load.value == own.value]
        if not asked:
            return Diagnosis("the mask_mod is not asked about an element", to_text(element.kept),
                             Verdict.UNKNOWN)
        pairs = zip(("sequence", "head", "query", "key"), own.args, asked[0].args, strict=True)
        wrong = [f"{name} {int(to_numpy(got, env))} in place of {int(to_numpy(meant_, env))}"
                 for name, meant_, got in pairs if to_numpy(got, env) != to_numpy(meant_, env)]
        said = f"on the witness the mask_mod is asked about {' and '.join(wrong)}" if wrong else \
            "on the witness the mask_mod's answer is not what becomes of the element"
        return Diagnosis(said, to_text(asked[0]), Verdict.UNKNOWN)
    return None


def of_rows(subject: Subject, made: Obligation, limits: Limits) -> Diagnosis | None:
    """Of row-limit: which query is passed on to a row in place of its own."""
    rows = list(dict.fromkeys(e.row for e in subject.fragment.elements))
    first, pack = M_BLOCK * subject.tile.tile_m, subject.tile.pack
    tried = [(f"a row is given the query of {counted(by, 'row')} {where}",
              [(first + row + sign * by) // pack for row in rows])
             for by in (1, 2, 4, 8) for where, sign in (("below", 1), ("above", -1))]
    tried.append(("packed rows are taken for queries: their number is not divided by the heads",
                  [first + row for row in rows]))
    tried += [(f"a row is given the query of another row of its thread, {i} further on",
               [(first + row) // pack for row in [*rows[i:], *rows[:i]]])
              for i in range(1, len(rows))]
    for phrase, queries in tried:
        words = subject.fragment.shuffles.values()
        claim = and_(*(eq(word, q) for word, q in zip(words, queries, strict=True)))
        if evaluate(claim, subject.corpus).all() and _proved(replace(made, claim=claim), limits):
            return Diagnosis(phrase, to_text(queries[0]), Verdict.PROVED)
    return None


def of_reads(subject: Subject, made: Obligation, limits: Limits) -> Diagnosis | None:
    """Of reads-in-bounds: the one index that leaves its range."""
    pack, past = subject.tile.pack, 0 if subject.variant.wrapped else PADDING - 1

    def inside(load: Term) -> Mapping[str, Term]:
        sequence, head, query, key = load.args
        first = HEAD * pack
        return {"sequence": eq(sequence, BATCH), "head": (first <= head) & (head < first + pack),
                "query": (0 <= query) & (query < SEQLEN_Q + past),
                "key": (0 <= key) & (key < SEQLEN_K + past)}

    for name in ("sequence", "head", "query", "key"):
        claim = subject.plain(and_(*(
            implies(path, and_(*(part for other, part in inside(load).items() if other != name)))
            for path, load, _ in subject.fragment.reads)))
        if evaluate(claim, subject.corpus).all() and _proved(replace(made, claim=claim), limits):
            return Diagnosis(f"the mask_mod is asked about a {name} that does not exist, and all "
                             "else exists", f"any {name}", Verdict.PROVED)
    return None


def _proved(obligation: Obligation, limits: Limits) -> bool:
    bare: Any = replace(obligation, mutants=())
    return prove(bare, replace(limits, smtlib=None)).verdict is Verdict.PROVED


def diagnosis(subject: Subject, result: Result, limits: Limits) -> Diagnosis | None:
    """Of a refuted obligation of `proofs.builtin`, where there is one."""
    match result.obligation.name:
        case "element-mask":
            return of_element(subject, result, limits)
        case "row-limit":
            return of_rows(subject, result.obligation, limits)
        case "reads-in-bounds":
            return of_reads(subject, result.obligation, limits)
    return None
