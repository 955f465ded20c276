"""Obligations of what a release computes on the host for a mask: metadata, no-overflow.

The real function was run on terms, every way through it, for batches of a few shapes; what it
writes is proved to mean the lists of ranges that it was given, for all numbers. Beside that it runs
on batches that Hypothesis draws: whatever differs there is shown as the smallest case.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import find as find_smallest
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from kernels.machine import CannotLift
from kernels.metadata import (
    LISTED,
    ROWS,
    TABLE_ROWS,
    Builder,
    Requests,
    Run,
    Shape,
    Write,
    builders,
    ends,
    first_row,
    mutants,
    paths,
    query_len,
    run_listed,
    run_rows,
    seq_len,
)
from kernels.provider import Provider
from kernels.run_cute import Agreement
from proofs.checks import REAL, TERM_ONLY, Announce, Options, Row
from proofs.diagnosis import Diagnosis
from proofs.obligation import Mutant, Obligation, Result, Verdict, Witness, prove, range_of
from spec.domain import INT32_MAX
from spec.environment import own_rows
from spec.term import Term, and_, const, eq, iff, implies, ne, not_, or_, sym
from spec.to_numpy import to_numpy

LAYER, NAME = "metadata", "metadata"
# How many ranges each request of a batch has; None where it is left out.
SHAPES = tuple(map(Shape, ((0,), (1,), (2,), (3,), (2, 2), (1, None, 2))))
# A mutant is refuted with these.
FEW_SHAPES = tuple(map(Shape, ((1,), (2,), (1, 1))))
MUTANTS, DRAWN, BATCHES = 16, 300, 40
OFFSET, Q, KV = sym("i"), sym("q"), sym("kv")
STALE = sym("stale_0"), sym("stale_1")
NONE = -1
Pair = tuple[int, int]
Runs = Sequence[tuple[Shape, Run]]
Claim = Callable[[Shape, Run], Term]


@dataclass(frozen=True, slots=True)
class Contract:
    """What a builder of one kind owes: terms for its runs, and numbers for one batch.

    `differs` gives, for a real run on a batch, None or what is wrong with it; `assumed` holds for
    the ranges of one request, in words and as a term.
    """

    spec: str
    claim: Claim
    in_range: Claim
    differs: Callable[[Builder, Requests], str | None]
    gives: Callable[[Builder, Requests], Any]
    at: Callable[[Run, Mapping[str, int], Requests], Any]
    disjoint: bool


def of_rows(shape: Shape, run: Run) -> Term:
    """Each packed row holds the range that its query lies in, or none."""
    requests = range(len(shape.counts))
    total = first_row(len(shape.counts))
    unused = run.used == const(0)
    claims = [or_(eq(run.used, const(0)), eq(run.used, total))]
    for r in requests:
        row = (const(NONE), const(NONE)) if unused else run.row(first_row(r) + OFFSET, STALE)
        scheduled = (const(0) <= OFFSET) & (OFFSET < query_len(r))
        claims += [implies(scheduled, claim) for claim in _right(shape, r, row)]
    return _unraised(run, claims)


def _right(shape: Shape, request: int, row: tuple[Term, Term]) -> Iterator[Term]:
    position = seq_len(request) - query_len(request) + OFFSET
    inside = []
    for k in range(shape.counts[request] or 0):
        start, end = ends(request, k)
        inside.append((start < end) & (start <= position) & (position <= end))
        yield implies(inside[-1], eq(row[0], start) & eq(row[1], end))
    # A range of the query alone shows it what every mask does.
    nothing = [eq(row[0], p) & eq(row[1], p) for p in (const(NONE), position)]
    yield implies(not_(or_(*inside)), or_(*nothing))


def rows_in_range(shape: Shape, run: Run) -> Term:
    """No slice is counted from the end, or passes it; what is written fits an int32."""
    claims = [(const(0) <= run.used) & (run.used <= TABLE_ROWS)]
    for write in run.writes:
        claims += [const(0) <= write.first, const(0) <= write.last, write.last <= TABLE_ROWS]
        claims += [range_of(value, 32) for value in write.value]
    return _unraised(run, claims)


def of_listed(shape: Shape, run: Run) -> Term:
    """Two positions of a request share a row of its table exactly if they share a range."""
    claims = []
    for r, count in enumerate(shape.counts):
        meant = _shared(ends(r, k) for k in range(count or 0))
        given = _shared(run.table[r] if run.table is not None else ())
        claims.append(implies(ne(Q, KV), iff(given, meant)))
    return _unraised(run, claims)


def listed_in_range(shape: Shape, run: Run) -> Term:
    values = {value: None for rows in run.table or () for pair in rows for value in pair}
    return _unraised(run, [range_of(value, 32) for value in values])


def _shared(pairs: Any) -> Term:
    return or_(*((low <= Q) & (Q <= high) & (low <= KV) & (KV <= high) for low, high in pairs))


def _unraised(run: Run, claims: Sequence[Term]) -> Term:
    """Claims apart, so that the solver is asked for one after the other."""
    if run.raised:
        return not_(run.condition)
    return and_(*(implies(run.condition, claim) for claim in claims))


def gives_rows(builder: Builder, requests: Requests) -> np.ndarray[Any, Any]:
    """int64 [queries, 2]: what the rows of a used buffer say; none where it is not to be used."""
    count = sum(requests.query_lens)
    out = np.random.default_rng(3).integers(-9, 99, (count + 2, 2)).astype(np.int32)
    before = out.copy()
    used = run_rows(builder, requests, out)
    if used not in (0, count):
        raise ValueError(f"{used} rows in use, of {count}")
    if (out[count:] != before[count:]).any():
        raise ValueError("rows past the last query are written")
    return out[:count].astype(np.int64) if used else np.full((count, 2), NONE)


def rows_at(run: Run, env: Mapping[str, int], requests: Requests) -> np.ndarray[Any, Any]:
    count = sum(requests.query_lens)
    if not to_numpy(run.used, env):
        return np.full((count, 2), NONE)
    cells = {**env, "i": np.arange(count), "stale_0": np.full(count, -7), "stale_1": -7}
    return np.stack([np.broadcast_to(to_numpy(end, cells), count)
                     for end in run.row(OFFSET, STALE)], axis=-1).reshape(count, 2)


def rows_differ(builder: Builder, requests: Requests) -> str | None:
    got, at = gives_rows(builder, requests), 0
    for r, (length, known) in enumerate(zip(requests.query_lens, requests.seq_lens, strict=True)):
        proper = [row for row in requests.ranges.get(r, ()) if row[0] < row[1]]
        meant = own_rows(np.array(proper).reshape(-1, 2), length, known)
        for i in range(length):
            position, row = known - length + i, got[at + i]
            single = meant[i][0] == NONE and (row == position).all()
            if not single and (row != meant[i]).any():
                return (f"the row of query {position} of request {r} holds {row.tolist()}, "
                        f"its range is {meant[i].tolist()}")
        at += length
    return None


def gives_listed(builder: Builder, requests: Requests) -> list[list[list[int]]]:
    made = run_listed(builder, requests)
    return [[] for _ in requests.query_lens] if made is None else made.tolist()


def listed_at(run: Run, env: Mapping[str, int], requests: Requests) -> list[list[list[int]]]:
    if run.table is None:
        return [[] for _ in requests.query_lens]
    return [[[int(to_numpy(end, env)) for end in pair] for pair in rows] for rows in run.table]


def listed_differ(builder: Builder, requests: Requests) -> str | None:
    for r, rows in enumerate(gives_listed(builder, requests)):
        got, meant = _pairs(rows), _pairs(requests.ranges.get(r, ()))
        if got != meant:
            q, kv = min(got ^ meant)
            return (f"positions {q} and {kv} of request {r} share "
                    f"{'a row' if (q, kv) in got else 'no row'} of the table, and "
                    f"{'a range' if (q, kv) in meant else 'no range'}")
    return None


def _pairs(rows: Any) -> set[Pair]:
    """Positions, in order, that lie in one row."""
    return {(q, kv) for low, high in rows
            for q in range(low, high) for kv in range(q + 1, high + 1)}


CONTRACTS = {
    ROWS: Contract("query_ranges", of_rows, rows_in_range, rows_differ, gives_rows, rows_at, True),
    LISTED: Contract("ranges", of_listed, listed_in_range, listed_differ, gives_listed, listed_at,
                     False),
}


def domain(contract: Contract, shapes: Sequence[Shape]) -> tuple[Term, ...]:
    requests = max(len(shape.counts) for shape in shapes)
    most = [max((shape.counts[r] or 0) for shape in shapes if r < len(shape.counts))
            for r in range(requests)]
    facts = [first_row(requests) <= TABLE_ROWS, TABLE_ROWS <= INT32_MAX,
             const(0) <= Q, Q <= INT32_MAX, const(0) <= KV, KV <= INT32_MAX]
    for r in range(requests):
        facts += [const(0) <= query_len(r), query_len(r) <= seq_len(r), seq_len(r) <= INT32_MAX]
        rows = [ends(r, k) for k in range(most[r])]
        facts += [(const(NONE) <= end) & (end <= INT32_MAX) for row in rows for end in row]
        if contract.disjoint:
            facts += [_disjoint(rows[j], rows[k]) for j in range(len(rows)) for k in range(j)]
    return tuple(facts)


def _disjoint(one: tuple[Term, Term], two: tuple[Term, Term]) -> Term:
    """Ranges of more than one token share no position."""
    return or_(one[1] <= one[0], two[1] <= two[0], one[1] < two[0], two[1] < one[0])


@cache
def batches(disjoint: bool) -> st.SearchStrategy[Requests]:
    """Chunks of prefills, with ranges that end or lie beyond them, touch, or are degenerate."""
    degenerate = st.sampled_from([(NONE, NONE), (0, 0), (2, 2), (4, 3)])

    @st.composite
    def ranges(draw: Any) -> list[Pair]:
        if not disjoint:
            ends_ = st.integers(0, 9)
            return draw(st.lists(st.tuples(ends_, ends_), max_size=3))
        found, after = [], 0
        for gap, more in draw(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)),
                                       max_size=4)):
            found.append((after + gap, after + gap + more))
            after += gap + more + 1
        return draw(st.permutations([*found, *draw(st.lists(degenerate, max_size=2))]))

    tokens = st.integers(0, 7)
    each = st.tuples(tokens, tokens, st.none() | ranges())
    return st.lists(each, min_size=1, max_size=4).map(lambda drawn: Requests(
        tuple(new for new, _, _ in drawn), tuple(new + old for new, old, _ in drawn),
        {r: tuple(rows) for r, (_, _, rows) in enumerate(drawn) if rows is not None},
    ))


def smallest(strategy: st.SearchStrategy[Requests], wrong: Callable[[Requests], bool]
             ) -> Requests | None:
    """The smallest batch that is wrong, None where none was drawn; the same each time."""
    chosen = settings(
        max_examples=DRAWN, derandomize=True, database=None, deadline=None,
        phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck),
    )
    try:
        return find_smallest(strategy, wrong, settings=chosen)
    except NoSuchExample:
        return None


def fault(contract: Contract, builder: Builder, requests: Requests) -> str | None:
    """What is wrong with the real function on a batch, an exception included."""
    try:
        return contract.differs(builder, requests)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@dataclass
class Subject:
    """One builder of one release."""

    target: str
    builder: Builder
    contract: Contract

    def runs(self, builder: Builder, shapes: Sequence[Shape]) -> Runs:
        return [(shape, run) for shape in shapes for run in paths(builder, shape)]

    def bounds(self, overlap: str) -> str:
        shapes = "; ".join(",".join("-" if c is None else str(c) for c in shape.counts) or "none"
                           for shape in SHAPES)
        disjoint = "ranges of a request share no position" if self.contract.disjoint else \
            "ranges may overlap"
        return (f"ranges of each request (- where it is left out): {shapes}; lengths and positions "
                f"<= {INT32_MAX}, lengths exact, {disjoint}{overlap}; integers unbounded as "
                "Python's are")

    def obligation(self, name: str, claim: Term, bounds: str, found: tuple[Mutant, ...] = ()
                   ) -> Obligation:
        return Obligation(
            target=self.target, name=name, spec=self.contract.spec, claim=claim,
            assumptions=domain(self.contract, SHAPES), bounds=bounds, mutants=found, layer=LAYER,
        )


def obligations(subject: Subject, bounds: str) -> Iterator[Obligation]:
    runs = subject.runs(subject.builder, SHAPES)
    for name, claim in ((NAME, subject.contract.claim), ("no-overflow", subject.contract.in_range)):
        meant = and_(*(claim(shape, run) for shape, run in runs))
        found = code_mutants(subject, claim) if name == NAME else narrow(subject, runs)
        yield subject.obligation(name, meant, bounds, found)


def code_mutants(subject: Subject, claim: Claim) -> tuple[Mutant, ...]:
    """Faults in what the function gives, and in its source, each wrong on a batch that it is run
    on."""
    right = subject.runs(subject.builder, FEW_SHAPES)
    found = [found for phrase, wrong in altered(right) if (found := _mutant(
        phrase, claim, wrong, examples(subject.contract.disjoint)))]
    for phrase, wrong in mutants(subject.builder):
        if len(found) == MUTANTS:
            break
        cases = (each for each in examples(subject.contract.disjoint)
                 if fault(subject.contract, wrong, each))
        if (case := next(cases, None)) is None:
            continue
        with suppress(CannotLift):
            made = _mutant(phrase, claim, subject.runs(wrong, FEW_SHAPES), [case])
            found += [made] if made else []
    return tuple(found)


def altered(runs: Runs) -> Iterator[tuple[str, Runs]]:
    """The runs with one fault in all that they give."""
    def each(change: Callable[[Run], Run]) -> Runs:
        return [(shape, change(run)) for shape, run in runs]

    def written(change: Callable[[Write], Write]) -> Runs:
        return each(lambda run: replace(run, writes=tuple(map(change, run.writes))))

    def listed(change: Callable[[Any], Any]) -> Runs:
        return each(lambda run: run if run.table is None else replace(
            run, table=tuple(map(change, run.table))))

    if any(run.writes for _, run in runs):
        yield "each row one later", written(
            lambda w: replace(w, first=w.first + 1, last=w.last + 1))
        yield "the last row not written", written(lambda w: replace(w, last=w.last - 1))
        yield "stale rows kept", each(lambda run: replace(run, writes=run.writes[1:]))
    if any(run.table for _, run in runs):
        yield "each range one longer", listed(lambda rows: tuple((a, b + 1) for a, b in rows))
        yield "the last range lost", listed(lambda rows: rows[:-1])


def _mutant(phrase: str, claim: Claim, runs: Runs, cases: Sequence[Requests]) -> Mutant | None:
    """None where no case shows it wrong."""
    for case in cases:
        if not _holds(case, and_(*(claim(*each) for each in runs if each[0] == _shape(case)))):
            return Mutant(phrase, and_(*(claim(*each) for each in runs)))
    return None


@cache
def examples(disjoint: bool) -> tuple[Requests, ...]:
    """Batches of FEW_SHAPES that meet the assumptions."""
    rng = np.random.default_rng(5)
    drawn = [_batch(rng, shape) for shape in FEW_SHAPES for _ in range(6 * BATCHES)]
    return tuple(each for each in drawn if not disjoint or not _overlaps(each))


def _batch(rng: np.random.Generator, shape: Shape) -> Requests:
    query_lens = tuple(map(int, rng.integers(0, 6, len(shape.counts))))
    known = tuple(length + int(rng.integers(0, 6)) for length in query_lens)
    ranges = {}
    for r, count in enumerate(shape.counts):
        if count is not None:
            starts = rng.integers(NONE, 10, count)
            ranges[r] = tuple((int(a), int(a + rng.integers(-1, 5))) for a in starts)
    return Requests(query_lens, known, ranges)


def _overlaps(requests: Requests) -> bool:
    return any(
        min(a[1], b[1]) >= max(a[0], b[0])
        for rows in requests.ranges.values()
        for proper in [[row for row in rows if row[0] < row[1]]]
        for j, a in enumerate(proper) for b in proper[:j]
    )


def _holds(case: Requests, claim: Term) -> bool:
    """NumPy's word on a claim, for every row and every two positions of one batch."""
    positions = np.arange(max(case.seq_lens) + 2)
    env = {**_shape(case).values(case), "table_rows": sum(case.query_lens), "stale_0": -7,
           "stale_1": -8, "i": positions[:, None], "q": positions[:, None],
           "kv": positions[None, :]}
    return bool(np.all(to_numpy(claim, env)))


def _shape(requests: Requests) -> Shape:
    return Shape(tuple(len(requests.ranges[r]) if r in requests.ranges else None
                       for r in range(len(requests.query_lens))))


def narrow(subject: Subject, runs: Runs) -> tuple[Mutant, ...]:
    """The claim for a buffer or for numbers that are too small."""
    written = [(run, write) for _, run in runs for write in run.writes][:1]
    pairs = [(run, value) for _, run in runs for rows in run.table or () for row in rows
             for value in row if value.op != "const"][-1:]
    return (
        *(Mutant("a buffer of one row less", implies(run.condition, write.last < TABLE_ROWS))
          for run, write in written),
        *(Mutant(f"`{value.value}` in 16 bits", implies(run.condition, range_of(value, 16)))
          for run, value in pairs),
    )


class Disagreement(Exception):
    """The real function and its runs on terms differ."""


def compare(subject: Subject) -> Agreement:
    """The real function beside its runs on terms, on batches of every shape."""
    rng, rows, used = np.random.default_rng(9), 0, 0
    for shape in SHAPES:
        runs = paths(subject.builder, shape)
        for _ in range(BATCHES):
            requests = _batch(rng, shape)
            env = {**shape.values(requests), "table_rows": sum(requests.query_lens) + 2}
            taken = [run for run in runs if to_numpy(run.condition, env)]
            if len(taken) != 1 or taken[0].raised:
                raise Disagreement(f"{len(taken)} ways through it for {requests}")
            got = subject.contract.gives(subject.builder, requests)
            meant = subject.contract.at(taken[0], env, requests)
            if np.asarray(got).tolist() != np.asarray(meant).tolist():
                raise Disagreement(f"the function and its terms differ for {requests}")
            rows += len(meant)
            used += bool(np.size(meant))
    return Agreement(cells=rows, visible=used, left_out=0, uncovered=(), mismatch=None)


def of_builder(target: str, builder: Builder, options: Options = Options()) -> list[Row]:
    """The rows of one unit."""
    start = time.perf_counter()
    contract = CONTRACTS.get(builder.parameters)
    if contract is None:
        known = " or ".join(", ".join(each) for each in CONTRACTS)
        return [failed(target, Verdict.UNSUPPORTED,
                       f"parameters {', '.join(builder.parameters)}, not {known}")]
    subject = Subject(target, builder, contract)
    wrong = smallest(batches(True), lambda each: fault(contract, builder, each) is not None)
    if wrong is not None:
        return [refuted(subject, wrong, time.perf_counter() - start)]
    try:
        bounds = subject.bounds(_overlap(subject))
        compared = compare(subject) if options.thorough else None
        made = [o for o in obligations(subject, bounds)
                if not options.obligations or o.name in options.obligations]
    except CannotLift as refusal:
        return [failed(target, Verdict.UNKNOWN, f"right for {DRAWN} batches that were drawn, which "
                       f"is no proof; its source is not understood: {refusal}")]
    except Disagreement as error:
        return [failed(target, Verdict.ERROR, str(error))]
    proved = [_shown(prove(o, options.limits)) for o in made]
    return [_explained(subject, result, compared) for result in proved]


def _shown(result: Result) -> Result:
    if result.verdict is Verdict.PROVED and not result.killed:
        return replace(result, verdict=Verdict.UNKNOWN,
                       reason="the claim holds, but no mutant was found that is wrong")
    return result


# More tokens than this are not run.
MOST_TOKENS = 100_000


def _explained(subject: Subject, result: Result, compared: Agreement | None) -> Row:
    """A witness of the solver's is run on the real function."""
    if result.verdict is not Verdict.REFUTED or result.witness is None:
        return Row(result, REAL, compared)
    cases = [case for shape in SHAPES if (case := _case(shape, result.witness)) is not None]
    said = [text for case in cases if (text := fault(subject.contract, subject.builder, case))]
    if said:
        diagnosis = Diagnosis(said[0], subject.contract.spec, Verdict.PROVED)
        return Row(result, REAL, compared, diagnosis=diagnosis)
    if result.obligation.name == NAME and len(cases) == len(SHAPES):
        return failed(result.obligation.target, Verdict.ERROR,
                      f"the real function is right for the solver's witness: {cases[0]}")
    return Row(result, TERM_ONLY, compared)


def _case(shape: Shape, witness: Witness) -> Requests | None:
    """The batch of that shape that a witness holds, unless it is too long to run."""
    values = witness.symbols
    if not values.keys() >= set(shape.names):
        return None
    requests = range(len(shape.counts))
    lengths = [tuple(values[of(r).value] for r in requests) for of in (query_len, seq_len)]
    last = max(values[end.value] for r in requests for k in range(shape.counts[r] or 0)
               for end in ends(r, k)) if any(shape.counts) else 0
    if max(sum(lengths[0]), last) > MOST_TOKENS:
        return None
    return Requests(lengths[0], lengths[1], {
        r: tuple((values[a.value], values[b.value]) for k in range(count)
                 for a, b in [ends(r, k)])
        for r, count in enumerate(shape.counts) if count is not None
    })


def _overlap(subject: Subject) -> str:
    """What becomes of ranges that overlap, which no list may hold."""
    if not subject.contract.disjoint:
        return ""
    builder = subject.builder
    found = smallest(batches(False), lambda each: _overlaps(each) and
                     fault(subject.contract, builder, each) is not None)
    if found is None:
        return ""
    return f" (a precondition: for {found} {fault(subject.contract, builder, found)})"


def refuted(subject: Subject, wrong: Requests, seconds: float) -> Row:
    made = subject.obligation(NAME, const(True), subject.bounds(""))
    case: Any = {"query_lens": list(wrong.query_lens), "seq_lens": list(wrong.seq_lens),
                 "ranges": {r: list(rows) for r, rows in wrong.ranges.items()}}
    said = fault(subject.contract, subject.builder, wrong)
    return Row(
        Result(made, Verdict.REFUTED, seconds, witness=Witness(case, {})), REAL,
        diagnosis=Diagnosis(f"in the smallest case {said}", subject.contract.spec, Verdict.PROVED),
    )


def failed(target: str, verdict: Verdict, reason: str) -> Row:
    nothing = Obligation(target=target, name=NAME, spec="ranges", claim=sym("?") < 0,
                         assumptions=(), bounds="none", layer=LAYER)
    return Row(Result(nothing, verdict, reason=reason))


def rows(provider: Provider, options: Options = Options(), announce: Announce = lambda text: None
         ) -> Iterator[Row]:
    """Of the vLLM that the provider's FA4 is a part of; none where it is a part of none."""
    roots = [parent.parent for parent in provider.folder.parents if parent.name == "vllm"]
    try:
        found = builders(roots[0]) if roots else []
    except CannotLift as refusal:
        yield failed(f"{provider.name}/{LAYER}", Verdict.UNSUPPORTED, str(refusal))
        return
    for builder in found:
        target = f"{provider.name}/{LAYER}/{builder.name}"
        announce(f"{target} {NAME}")
        yield from of_builder(target, builder, options)
