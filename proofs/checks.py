"""Targets in, rows of a report out: lift, compare with the real code, prove, replay, diagnose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kernels.from_cute import CannotLift, lift
from kernels.run_cute import Agreement, CannotRun, agree
from kernels.target import Target
from proofs.diagnosis import Diagnosis, diagnose
from proofs.mask_mod import Subject, branches_agree, obligations, representation
from proofs.obligation import (
    Limits,
    Obligation,
    Result,
    UnknownLimit,
    Verdict,
    Witness,
    prove,
)
from proofs.replay import visible_key
from spec.masks import Mask
from spec.sample import Array, Batch, evaluate
from spec.term import Term, and_, bind, reads, sym, symbols
from spec.to_numpy import to_numpy

CELLS = 16_000
REAL, TERM_ONLY = "real code", "term only"
LAYER = "mask_mod"


@dataclass(frozen=True, slots=True)
class Counterexample:
    """One cell on which code and spec differ. `cell` holds its coordinates and the parameters,
    `tables` what is read."""

    cell: Mapping[str, int]
    tables: Mapping[str, Array]
    code: bool
    spec: bool


@dataclass(frozen=True, slots=True)
class Picture:
    """Both masks of one sequence, bool [seqlen_q, seqlen_k]; `first_q` is the first query's
    position, `values` the parameters and what the tables hold for the sequence."""

    values: Mapping[str, Any]
    expected: Array
    got: Array
    first_q: int


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
        if any(_is(row.result, "no-overflow", Verdict.PROVED) for row in rows):
            sound.append(subject)
    if options.obligations and "branches-agree" not in options.obligations:
        return
    # That branches agree is claimed of code that does not overflow; what does is UNKNOWN already.
    for obligation in (*branches_agree(sound), *_representations(subjects)):
        announce(f"{obligation.target} {obligation.name}")
        yield Row(prove(obligation, options.limits))


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
            replayed = REAL if compared is not None else TERM_ONLY
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
        results.append(prove(obligation, options.limits))
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


def void(subject: Subject, results: Sequence[Result], options: Options) -> str | None:
    """Why an equality that is proved in unbounded integers, with a value for every read, says
    nothing of the code; None where it does."""
    verdicts = {result.obligation.name: result.verdict for result in results}
    if verdicts.get("no-overflow") is not Verdict.PROVED:
        return "equal in unbounded integers, but no-overflow is not proved"
    bounds = verdicts.get("reads-in-bounds", Verdict.PROVED)
    if bounds is not Verdict.PROVED and _only_padded(subject, options) is None:
        return "equal where every read is inside its table, which is not proved"
    return None


class Disagreement(Exception):
    """The real code and the term lifted from it differ: nothing that follows can be believed."""


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


def counterexample(
    subject: Subject, witness: Witness | None
) -> tuple[Counterexample | None, Picture | None]:
    """A cell of the shortest sequence found on which the code is wrong; and the sequence, still
    short, that shows most of the fault. The solver's `witness` serves where none is found."""
    rng = np.random.default_rng(5)
    assume = tuple(fact for fact in subject.real if fact is not subject.aligned)
    by_head = "h" in symbols(*subject.lanes)
    smallest: Counterexample | None = None
    best: tuple[float, Picture] | None = None
    for longest in (1, 2, 3, 4, 5, 6, 8, 10, 20):
        for sequences in (1,) * (20 if longest == READABLE else 6) + (2, 2, 2, 8):
            at = subject.batch(rng, assume, sequences=sequences, longest=longest, cells=900,
                               full=False)
            if not by_head:
                at.cells["h"][:] = 0
            got, meant, defined = answers(subject, at)
            wrong = np.flatnonzero((got != meant) & defined)
            # A query before the first key is a strange place to show a fault, if there is another.
            plain = wrong[at.cells["seqlen_q"][wrong] <= at.cells["seqlen_k"][wrong]]
            wrong = plain if len(plain) or longest < READABLE else wrong
            if not len(wrong):
                continue
            cell = int(wrong[at.cells["h"][wrong].argmin()])
            if smallest is None:
                smallest = _counterexample(subject, at, cell)
            if max(at.cells["seqlen_q"][cell], at.cells["seqlen_k"][cell]) > WIDEST:
                continue
            shown = _picture(subject, at, cell)
            if best is None or _telling(shown) > best[0]:
                best = _telling(shown), shown
        if best is not None and longest >= READABLE:
            break
    return smallest or _from_solver(subject, witness), best[1] if best is not None else None


def answers(subject: Subject, at: Batch) -> tuple[Array, Array, Array]:
    """What code and spec say of each key, be it of any lane; and whether the code is defined on
    its vector: no operation overflows, and every read is inside its table."""
    lane = at.cells["kv_idx"] % len(subject.lanes)
    vector = Batch(at.params, {**at.cells, "kv_idx": at.cells["kv_idx"] - lane}, at.tables)
    memo: dict[Term, Array] = {}
    claims = (*subject.in_range, *subject.in_bounds)
    defined = np.logical_and.reduce([evaluate(claim, vector, memo) for claim in claims])
    lanes = [evaluate(term, vector, memo) for term in subject.lanes]
    spec = subject.spec_lanes(subject.mask.formula)[0]
    got = np.take_along_axis(np.stack(lanes), lane[None], axis=0)[0]
    return got, evaluate(spec, at), defined


def _from_solver(subject: Subject, witness: Witness | None) -> Counterexample | None:
    """The solver's witness with whole tables, where they are small enough to hold."""
    if witness is None:
        return None
    sizes = {**subject.constants, **witness.symbols}
    tables = {}
    for name, table in subject.tables.items():
        shape = tuple(int(to_numpy(bind(dim, sizes), {})) for dim in table.dims)
        if np.prod(shape, dtype=float) > LARGEST_TABLE:
            return None
        tables[name] = np.zeros(shape, dtype=np.int32)
        for index, value in witness.tables.get(name, {}).items():
            if all(0 <= i < size for i, size in zip(index, shape, strict=True)):
                tables[name][index] = value
    names = {"b", "h", "q_idx", "kv_idx", "seqlen_q", "seqlen_k", "offset_q", "offset_k",
             *subject.params}
    cell = {name: sizes.get(name, 0) for name in sorted(names)}
    keys = len(subject.lanes)
    for kv in range(cell["kv_idx"], min(cell["kv_idx"] + keys, cell["seqlen_k"])):
        cell["kv_idx"] = kv
        at = Batch(sizes, {name: np.array([value]) for name, value in cell.items()}, tables)
        (got,), (meant,), (defined,) = answers(subject, at)
        if got != meant and defined:
            return Counterexample(cell, tables, bool(got), bool(meant))
    return None


LARGEST_TABLE = 1e6


# From this length on a picture shows a fault well; beyond WIDEST it is no longer read.
READABLE, WIDEST = 10, 64


def _telling(shown: Picture) -> float:
    """Leaks and losses both, more queries than one, and not nearly everything wrong."""
    leaked = int((shown.got & ~shown.expected).sum())
    lost = int((shown.expected & ~shown.got).sum())
    share = (leaked + lost) / shown.expected.size
    both = leaked > 0 and lost > 0
    return 2 * both + (len(shown.got) > 3) + (share < 0.5) + shown.got.size / 1000


def _numbers(subject: Subject, at: Batch, cell: int) -> dict[str, int]:
    return {
        **{name: int(column[cell]) for name, column in at.cells.items()},
        **{name: value for name, value in at.params.items() if name in subject.params},
    }


def _counterexample(subject: Subject, at: Batch, cell: int) -> Counterexample:
    """The cell with what decides it: its own sequence alone, where that shows the fault too."""
    chosen = at.select(np.array([cell]))
    for shown in (_alone(subject, chosen), chosen):
        (got,), (meant,), (defined,) = answers(subject, shown)
        if got != meant and defined and all(evaluate(f, shown).all() for f in subject.real):
            break
    return Counterexample(_numbers(subject, shown, 0), shown.tables, bool(got), bool(meant))


def _alone(subject: Subject, at: Batch) -> Batch:
    """The one cell of `at` in a batch that holds nothing but its sequence."""
    b, rows = int(at.cells["b"][0]), int(at.cells["seqlen_q"][0])
    starts = at.tables.get("cu_seqlens_q")
    first = int(starts[b]) if starts is not None else 0
    tables = {}
    for name, array in at.tables.items():
        size = subject.tables[name].dims[0]
        if name == "cu_seqlens_q":
            tables[name] = np.array([0, rows], dtype=np.int32)
        elif size is sym("num_seqs"):
            tables[name] = array[b:b + 1]
        elif size is sym("num_tokens"):
            tables[name] = array[first:first + max(rows, 1)]
        else:
            tables[name] = array
    zero = np.zeros(1, dtype=np.int64)
    cells = {**at.cells, "b": zero, "offset_q": zero, "offset_k": zero}
    return Batch({**at.params, "num_seqs": 1, "num_tokens": max(rows, 1)}, cells, tables)


def _picture(subject: Subject, at: Batch, cell: int) -> Picture:
    one = _numbers(subject, at, cell)
    b = one["b"]
    q_idx, kv_idx = np.indices((one["seqlen_q"], one["seqlen_k"]))
    grid = {name: np.full(q_idx.shape, one[name]) for name in at.cells}
    whole = Batch(at.params, {**grid, "q_idx": q_idx, "kv_idx": kv_idx}, at.tables)
    values = {name: one[name] for name in subject.params}
    tables = {
        name: array[b].tolist() for name, array in at.tables.items()
        if subject.tables[name].dims[0] is sym("num_seqs")
    }
    if "query_ranges" in at.tables:
        start = int(at.tables["cu_seqlens_q"][b])
        own = at.tables["query_ranges"][start:start + one["seqlen_q"]]
        tables["ranges of the queries"] = sorted({tuple(r) for r in own.tolist() if r[0] >= 0})
    got, meant, _ = answers(subject, whole)
    return Picture({**values, **tables}, meant, got, one["seqlen_k"] - one["seqlen_q"])


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
