"""One cell on which code and spec differ, in the shortest sequence, and a picture of the fault."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from proofs.mask_mod import Subject
from proofs.obligation import Witness
from spec.sample import Array, Batch, evaluate
from spec.term import Term, bind, sym, symbols
from spec.to_numpy import to_numpy

# From this length on a picture shows a fault well; beyond WIDEST it is no longer read.
READABLE, WIDEST = 10, 64
LARGEST_TABLE = 1e6


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
