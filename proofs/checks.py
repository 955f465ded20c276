"""Targets in, rows of a report out: lift, compare with the real code, prove, replay, diagnose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kernels.from_cute import CannotLift, lift
from kernels.run_cute import Agreement, CannotRun, agree
from kernels.target import Target
from proofs.counterexample import Counterexample, Picture, counterexample
from proofs.diagnosis import Diagnosis, diagnose
from proofs.mask_mod import Subject, branches_agree, obligations, representation
from proofs.obligation import (
    Limits,
    Obligation,
    Result,
    UnknownLimit,
    Verdict,
    prove,
)
from proofs.replay import visible_key
from proofs.sound import Disagreement, counted
from spec.masks import Mask
from spec.sample import Array, Batch
from spec.term import and_, reads, sym

# Cells on which term and code are compared, and the fewest that say anything.
CELLS, FEWEST = 16_000, 1_000
REAL, TERM_ONLY = "real code", "term only"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report. `replayed` says what a witness, or else the term, was compared with;
    `compared` is the outcome of the term's comparison on random cells."""

    result: Result
    replayed: str | None = None
    compared: Agreement | None = None
    counterexample: Counterexample | None = None
    picture: Picture | None = None
    diagnosis: Diagnosis | None = None
    fa4: str = ""


@dataclass(frozen=True, slots=True)
class Options:
    limits: Limits = field(default_factory=Limits)
    obligations: tuple[str, ...] = ()
    # Compares with the real code, and explains refutations that are expected too.
    thorough: bool = True
    constants: Mapping[str, int] = field(default_factory=dict)


Announce = Callable[[str], None]


def check(
    targets: Sequence[Target], resolve: Callable[[str], Mask], options: Options = Options(),
    announce: Announce = lambda text: None,
) -> Iterator[Row]:
    """Every obligation of `targets`, one row each, as they are decided."""
    subjects: list[Subject] = []
    sound: list[Subject] = []
    for target in targets:
        announce(target.target)
        subject = _subject(target, resolve, options)
        if isinstance(subject, Row):
            yield subject
            continue
        rows = list(_of_target(subject, options, announce))
        yield from (replace(row, fa4=target.fa4) for row in rows)
        subjects.append(subject)
        if _sound(rows):
            sound.append(subject)
    if options.obligations and "branches-agree" not in options.obligations:
        return
    # That branches agree is claimed of code whose integers and reads are what terms say they are.
    for obligation in (*branches_agree(sound), *_representations(subjects)):
        announce(f"{obligation.target} {obligation.name}")
        yield Row(counted(prove(obligation, options.limits)))


def _representations(subjects: Sequence[Subject]) -> list[Obligation]:
    given = [s for s in subjects if "query_ranges" in s.lifted.layout]
    families = dict.fromkeys(s.target.target.split("[")[0] for s in given if not s.target.expected)
    return [obligation for family in families for obligation in representation(family)]


def _subject(target: Target, resolve: Callable[[str], Mask], options: Options) -> Subject | Row:
    mask = resolve(target.spec)
    if target.unsupported is not None:
        return failed(target, mask, Verdict.UNSUPPORTED, target.unsupported)
    try:
        lifted, again = lift(target), lift(target)
    except CannotLift as error:
        return failed(target, mask, Verdict.UNSUPPORTED, str(error))
    if lifted.lanes != again.lanes:
        return failed(target, mask, Verdict.UNSUPPORTED,
                      "the factory gives other code each time it is called")
    constants = {**target.constants, **options.constants}
    return Subject(target, lifted, mask, constants, options.limits)


def failed(target: Target, mask: Mask, verdict: Verdict, reason: str) -> Row:
    """A row for a target of which nothing can be said."""
    nothing = Obligation(
        target=target.target, name="equals-spec", spec=mask.name, claim=sym("?") < 0,
        assumptions=(), bounds="none",
        expected=Verdict(target.expected.get("equals-spec", "PROVED")),
    )
    return Row(Result(nothing, verdict, reason=reason))


def _of_target(subject: Subject, options: Options, announce: Announce) -> Iterator[Row]:
    replayed, compared = None, None
    if options.thorough:
        announce(f"{subject.target.target} on the CPU")
        try:
            compared = compare_with_code(subject)
            replayed = REAL if compared is not None and compared.cells >= FEWEST else TERM_ONLY
        except Disagreement as error:
            yield failed(subject.target, subject.mask, Verdict.ERROR, str(error))
            return
    try:
        made = obligations(subject, options.obligations)
    except UnknownLimit as error:
        for name in options.obligations or subject.obliged:
            row = failed(subject.target, subject.mask, Verdict.UNKNOWN, f"resource limit: {error}")
            named = replace(row.result.obligation, name=name)
            yield Row(replace(row.result, obligation=named), replayed, compared)
        return
    results = []
    for obligation in made:
        announce(f"{subject.target.target} {obligation.name}")
        results.append(counted(prove(obligation, options.limits)))
    for result in results:
        if _is(result, "equals-spec", Verdict.PROVED) and (why := void(subject, results, options)):
            result = replace(result, verdict=Verdict.UNKNOWN, killed=0, reason=why)
        explained = options.thorough or not result.as_expected
        if result.verdict is Verdict.REFUTED and explained:
            yield replace(_refuted(subject, result, replayed, options), compared=compared)
        else:
            yield Row(result, replayed, compared)


def _is(result: Result, name: str, verdict: Verdict) -> bool:
    return result.obligation.name == name and result.verdict is verdict


def _sound(rows: Sequence[Row]) -> bool:
    """No overflow, and no read of a real cell outside its table."""
    read = [row for row in rows if row.result.obligation.name == "reads-in-bounds"]
    return any(_is(row.result, "no-overflow", Verdict.PROVED) for row in rows) and all(
        row.result.verdict is Verdict.PROVED or row.diagnosis is not None for row in read
    )


def void(subject: Subject, results: Sequence[Result], options: Options) -> str | None:
    """Why an equality that is proved in unbounded integers, with a value for every read, says
    nothing of the code; None where it does."""
    verdicts = {result.obligation.name: result.verdict for result in results}
    if verdicts.get("no-overflow") is not Verdict.PROVED:
        return "equal in unbounded integers, but no-overflow is not proved"
    inside = "reads-in-bounds" not in subject.obliged or (
        verdicts.get("reads-in-bounds") is Verdict.PROVED
        or _only_padded(subject, options) is not None
    )
    if not inside:
        return "equal where every read is inside its table, which is not proved"
    return None


def compare_with_code(subject: Subject) -> Agreement | None:
    """Runs the real mask_mod on random cells, inside and around the spec's domain; None where it
    holds inline PTX, which no CPU runs."""
    at = cells_for_code(subject, CELLS)
    tables = {**at.tables, **_scalars(subject, at.params)}
    try:
        found = agree(subject.lifted, subject.target, at.cells, tables)
    except CannotRun as error:
        if subject.lifted.inline_ptx:
            return None
        raise Disagreement(f"the real code did not run on the CPU: {error}") from None
    if found.mismatch is not None:
        raise Disagreement(f"the real code and its term differ at {dict(found.mismatch)}")
    return found


def cells_for_code(subject: Subject, count: int) -> Batch:
    """Random cells for the real code, padded ones included. Code and term have to agree outside
    the spec's domain too: run-time numbers pass the ends of their ranges, and some elements of the
    tables are off by a little."""
    rng = np.random.default_rng(11)
    at = subject.batch(rng, (), sequences=128, longest=24, cells=count, padding=3)
    size = len(at.cells["b"])
    free = {
        name: np.full(size, subject.constants[name]) if name in subject.constants
        else rng.integers(subject.params[name].low - 2, 27, size)
        for name in subject.target.symbols
    }
    return Batch(at.params, {**at.cells, **free}, _disturbed(rng, subject, at.tables))


def _disturbed(rng: np.random.Generator, subject: Subject, tables: Mapping[str, Array]) -> Any:
    """Every table but those whose elements are part of an index into another."""
    inner = {t.value for load in reads(*subject.lanes) for arg in load.args for t in reads(arg)}
    return {
        name: array if name in inner
        else array + rng.integers(-4, 5, array.shape) * (rng.random(array.shape) < 0.1)
        for name, array in tables.items()
    }


def _scalars(subject: Subject, params: Mapping[str, int]) -> dict[str, Array]:
    return {name: np.array([params[name]], dtype=np.int32) for name in subject.scalars}


def _refuted(subject: Subject, result: Result, replayed: str | None, options: Options) -> Row:
    if result.obligation.name == "equals-spec":
        cell, picture = counterexample(subject, result.witness)
        try:
            told = _replay(subject, cell) if cell is not None and replayed == REAL else TERM_ONLY
        except Disagreement as error:
            return failed(subject.target, subject.mask, Verdict.ERROR, str(error))
        return Row(result, told, counterexample=cell, picture=picture,
                   diagnosis=_diagnose(subject, options))
    if result.obligation.name == "reads-in-bounds":
        return Row(result, TERM_ONLY, diagnosis=_only_padded(subject, options))
    return Row(result, TERM_ONLY)


def _diagnose(subject: Subject, options: Options) -> Diagnosis | None:
    quick = replace(options.limits, smtlib=None)
    return diagnose(
        subject.mask, subject.lanes[0], subject.corpus,
        lambda formula: prove(subject.equality(subject.spec_lanes(formula)), quick),
        lambda formula: subject.spec_lanes(formula)[0],
    )


def _only_padded(subject: Subject, options: Options) -> Diagnosis | None:
    """Reads that leave a table only on rows or keys past the end of the sequence."""
    real = subject.obligation("reads-in-bounds", and_(*subject.in_bounds), subject.real)
    verdict = prove(real, replace(options.limits, smtlib=None)).verdict
    if verdict is not Verdict.PROVED:
        return None
    return Diagnosis(
        "reads past the end of a table on padded rows or keys only; clamp the index",
        "q_idx < seqlen_q and kv_idx < seqlen_k", verdict,
    )


def _replay(subject: Subject, found: Counterexample) -> str:
    """Asks the real code for the cell; what it answers must be what its term does."""
    tables = {**found.tables, **_scalars(subject, found.cell)}
    try:
        answer = visible_key(subject.target, subject.lifted, found.cell, tables)
    except CannotRun:
        return TERM_ONLY
    if answer != found.code:
        raise Disagreement(f"the real code answers otherwise than its term at {dict(found.cell)}")
    return REAL
