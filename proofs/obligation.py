"""What is to be shown, and the one door to the solver.

An obligation claims that a Bool term holds for every value of its symbols and tables that meets
the assumptions. `prove` answers with a verdict; only PROVED is green. It first asks whether the
assumptions can be met at all, and it replays every witness in NumPy before it shows it.

Terms are unbounded integers. A claim about machine code is about int32 only together with its
sibling obligation *no-overflow*, which shows that no operation of the code leaves its width.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import z3

from spec.domain import INT32_MAX
from spec.term import Term, and_, eq, expand, postorder, reads, sym, symbols
from spec.to_numpy import to_numpy
from spec.to_z3 import to_z3


class Verdict(enum.Enum):
    """Ordered: the worst of several is the greatest by `rank`."""

    PROVED = "PROVED"
    VACUOUS = "VACUOUS"
    UNKNOWN = "UNKNOWN"
    UNSUPPORTED = "UNSUPPORTED"
    ERROR = "ERROR"
    REFUTED = "REFUTED"


LINEAR, TABLES = "linear integer arithmetic", " with uninterpreted tables"
NON_LINEAR = "non-linear integer arithmetic"


@dataclass(frozen=True, slots=True)
class Mutant:
    """A claim that differs from the obligation's in one place and is false on a known cell."""

    phrase: str
    claim: Term


@dataclass(frozen=True, slots=True)
class Obligation:
    """`claim` holds wherever all of `assumptions` do. `bounds` says over which inputs, in words."""

    target: str
    name: str
    spec: str
    claim: Term
    assumptions: tuple[Term, ...]
    bounds: str
    mutants: tuple[Mutant, ...] = ()
    expected: Verdict = Verdict.PROVED
    layer: str = "mask_mod"
    arch: str = ""
    # Each part of a conjunction is a query of its own: sooner decided where each is hard by itself.
    apart: bool = False

    @property
    def theory(self) -> str:
        """The arithmetic that the solver is asked in: unbounded integers, never machine words."""
        terms = (expand(self.claim), *map(expand, self.assumptions))
        linear = all(map(_is_linear, postorder(*terms)))
        return (LINEAR if linear else NON_LINEAR) + (TABLES if reads(*terms) else "")

    @property
    def id(self) -> str:
        return f"{self.target}:{self.name}:{self.spec}"


def _is_linear(term: Term) -> bool:
    symbolic = [arg.op != "const" for arg in term.args]
    match term.op:
        case "mul":
            return not all(symbolic)
        case "floordiv" | "floormod" | "truncdiv" | "truncmod":
            return not symbolic[1]
    return True


@dataclass(frozen=True, slots=True)
class Witness:
    """Values that meet the assumptions and break the claim. `tables`: name -> index -> value."""

    symbols: Mapping[str, int]
    tables: Mapping[str, Mapping[tuple[int, ...], int]]

    @property
    def env(self) -> dict[str, Any]:
        return {**self.symbols, **{name: _Sparse(rows) for name, rows in self.tables.items()}}


class _Sparse:
    def __init__(self, rows: Mapping[tuple[int, ...], int]) -> None:
        self.rows = rows

    def __getitem__(self, index: Any) -> int:
        parts = index if isinstance(index, tuple) else (index,)
        return self.rows[tuple(int(i) for i in parts)]


@dataclass(frozen=True, slots=True)
class Result:
    obligation: Obligation
    verdict: Verdict
    seconds: float = 0.0
    killed: int = 0
    survivors: tuple[str, ...] = ()
    witness: Witness | None = None
    reason: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def as_expected(self) -> bool:
        return self.verdict is self.obligation.expected


@dataclass(frozen=True, slots=True)
class Limits:
    """`rlimit` is z3's own deterministic count of steps for one query; `timeout` only a backstop,
    in seconds. `smtlib` is a folder that receives each query."""

    rlimit: int = 20_000_000
    timeout: float = 60.0
    smtlib: Path | None = None


_translated: dict[Term, Any] = {}


class _Solver:
    """A z3 solver over terms, with a resource limit on each query.

    Each has a context of its own: what was asked before it has no part in its answers.
    """

    def __init__(self, limits: Limits, assumptions: Iterable[Term], *claims: Term) -> None:
        self.context = z3.Context()
        self.solver = z3.SimpleSolver(ctx=self.context)
        self.solver.set("rlimit", limits.rlimit)
        self.solver.set("timeout", int(limits.timeout * 1000))
        self.assumptions = tuple(map(expand, assumptions))
        self.add(*self.assumptions)
        self.bound_reads(*self.assumptions, *claims)

    def add(self, *terms: Term) -> None:
        self.solver.add(*map(self.translated, terms))

    def translated(self, term: Term) -> Any:
        return to_z3(term, _translated).translate(self.context)

    def bound_reads(self, *terms: Term) -> None:
        """An element of an int32 table is an int32."""
        self.add(*(range_of(r, 32) for r in reads(*map(expand, terms))))

    def refute(self, claim: Term, *more: Term) -> z3.CheckSatResult:
        """Leaves the negated claim asserted when the answer is sat; pops it otherwise."""
        self.solver.push()
        self.add(~claim, *more)
        answer = self.solver.check()
        if answer != z3.sat:
            self.solver.pop()
        return answer

    def refute_apart(self, claim: Term) -> z3.CheckSatResult:
        """As `refute`, one part of a conjunction after the other."""
        answers = [z3.unsat]
        for part in claim.args if claim.op == "and" else (claim,):
            answers.append(self.refute(part))
            if answers[-1] == z3.sat:
                return z3.sat
        return z3.unknown if z3.unknown in answers else z3.unsat


def range_of(term: Term, bits: int) -> Term:
    """`term` fits a signed integer of that many bits."""
    return (-(2 ** (bits - 1)) <= term) & (term <= 2 ** (bits - 1) - 1)


def prove(obligation: Obligation, limits: Limits = Limits()) -> Result:
    """Decide `obligation`, then check that each of its mutants is refuted.

    A mutant that the solver fails to refute although NumPy shows it false makes an ERROR: then
    neither can be believed.
    """
    start = time.perf_counter()

    def done(verdict: Verdict, **fields: Any) -> Result:
        return Result(obligation, verdict, time.perf_counter() - start, **fields)

    claim = expand(obligation.claim)
    solver = _Solver(limits, obligation.assumptions, claim, *(m.claim for m in obligation.mutants))
    if limits.smtlib is not None:
        _write_smtlib(limits.smtlib, obligation, solver, claim)
    possible = solver.solver.check()
    if possible == z3.unsat:
        return done(Verdict.VACUOUS, reason="no input meets the assumptions")
    if possible == z3.unknown:
        return done(Verdict.UNKNOWN, reason=solver.solver.reason_unknown())
    answer = solver.refute_apart(claim) if obligation.apart else solver.refute(claim)
    if answer == z3.unknown:
        return done(Verdict.UNKNOWN, reason=solver.solver.reason_unknown())
    if answer == z3.sat:
        witness = _witness(solver, claim)
        if not _breaks(witness, claim, solver.assumptions):
            return done(Verdict.ERROR, reason="z3's witness does not break the claim in NumPy")
        return done(Verdict.REFUTED, witness=witness)
    fates = [(m.phrase, _killed(solver, m)) for m in obligation.mutants]
    killed = sum(fate is True for _, fate in fates)
    survivors = tuple(phrase for phrase, fate in fates if fate is False)
    if survivors:
        return done(Verdict.ERROR, killed=killed, survivors=survivors,
                    reason=f"a mutant was not refuted: {survivors[0]}")
    if given_up := [phrase for phrase, fate in fates if fate is None]:
        return done(Verdict.UNKNOWN, killed=killed,
                    reason=f"the claim holds, but the solver gave up on a mutant: {given_up[0]}")
    return done(Verdict.PROVED, killed=killed)


def _killed(solver: _Solver, mutant: Mutant) -> bool | None:
    """None where the solver gave up."""
    claim = expand(mutant.claim)
    answer = solver.refute(claim)
    if answer != z3.sat:
        return None if answer == z3.unknown else False
    broken = _breaks(_model(solver, claim), claim, solver.assumptions)
    solver.solver.pop()
    return broken


def _breaks(witness: Witness, claim: Term, assumptions: tuple[Term, ...]) -> bool:
    """NumPy's word on a model of z3's. Where the two disagree on an index, the element that NumPy
    asks for is none that z3 chose, and nothing is broken."""
    memo: dict[Term, Any] = {}
    env = witness.env
    try:
        return bool(to_numpy(and_(*assumptions), env, memo)) and not to_numpy(claim, env, memo)
    except KeyError:
        return False


SMALL = (2, 3, 4, 5, 6, 8, 12, 16, 32, 64, 256, 4096)


def _witness(solver: _Solver, claim: Term) -> Witness:
    """A model with small numbers where there is one; `claim` is already refuted."""
    names = symbols(claim, *solver.assumptions)
    values = [*map(sym, sorted(names)), *reads(claim)]
    best = _model(solver, claim)
    for limit in SMALL:
        solver.solver.push()
        solver.add(*((-limit <= v) & (v <= limit) for v in values))
        found = solver.solver.check() == z3.sat
        if found:
            best = _model(solver, claim)
        solver.solver.pop()
        if found:
            break
    return best


def _model(solver: _Solver, claim: Term) -> Witness:
    model = solver.solver.model()
    terms = (claim, *solver.assumptions)

    def value(term: Term) -> int:
        return model.eval(solver.translated(term), model_completion=True).as_long()

    tables: dict[str, dict[tuple[int, ...], int]] = {}
    for r in reads(*terms):
        tables.setdefault(r.value, {})[tuple(value(i) for i in r.args)] = value(r)
    return Witness({name: value(sym(name)) for name in sorted(symbols(*terms))}, tables)


def _write_smtlib(folder: Path, obligation: Obligation, solver: _Solver, claim: Term) -> None:
    """The query as it is stated, before the solver has simplified any of it."""
    folder.mkdir(parents=True, exist_ok=True)
    name = "".join(c if c.isalnum() or c in ".-" else "_" for c in obligation.id)
    stated = z3.Solver(ctx=solver.context)
    bounds = (range_of(r, 32) for r in reads(*solver.assumptions, claim))
    stated.add(*map(solver.translated, (*solver.assumptions, *bounds, ~claim)))
    head = f"; {obligation.id}\n; unsat = proved\n; {obligation.bounds}\n"
    (folder / f"{name[:180]}.smt2").write_text(head + stated.to_smt2())


# No name of a spec can be the same.
LIMIT = "?N"


def largest(
    claim: Term, assumptions: Iterable[Term], limits: Limits, symbol: str = LIMIT,
    top: int = INT32_MAX,
) -> int | None:
    """The largest value of `symbol`, up to `top`, for which the claim holds; None if there is none.

    The claim must hold for every smaller value where it holds for one, as it does where `symbol`
    only bounds lengths from above. Raises UnknownLimit where the solver gives up.
    """
    solver = _Solver(limits, assumptions, claim)

    def holds(value: int) -> bool:
        answer = solver.refute(claim, eq(sym(symbol), value))
        if answer == z3.unknown:
            raise UnknownLimit(solver.solver.reason_unknown())
        if answer == z3.sat:
            solver.solver.pop()
        return answer == z3.unsat

    return _last(holds, top)


class UnknownLimit(Exception):
    """The solver gave up while the largest bound was sought."""


def _last(holds: Callable[[int], bool], top: int) -> int | None:
    """The largest number up to `top` that `holds`; None if 0 does not.

    Looked for close to `top`, its half, its quarter and so on first: there a product by a power of
    two leaves its width, give or take a tile.
    """
    low, high = top, top + 1
    while not holds(low):
        if low == 0:
            return None
        low, high = low // 2, low
    step, below, above = 1, low, high
    while high - low > 1 and 2 * step < above - below:
        for probe in (below + step, above - step) if step == 1 else (above - step,):
            if low < probe < high:
                low, high = (probe, high) if holds(probe) else (low, probe)
        step *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
