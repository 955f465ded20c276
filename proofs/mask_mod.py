"""The obligations of a mask_mod: equals-spec, no-overflow, reads-in-bounds, branches-agree; and of
the tables that it is given: representation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kernels.from_cute import Lifted
from kernels.target import Target
from proofs.mutants import of_claims, of_formula
from proofs.obligation import LIMIT, Limits, Obligation, Verdict, largest, range_of
from spec.domain import (
    BOTTOM_RIGHT,
    INT32_MAX,
    PADDING,
    PARAMS,
    SEQLEN_K,
    SEQLEN_Q,
    SIZES,
    TABLES,
    Param,
    Table,
    guarantees,
    lengths,
)
from spec.from_text import from_text
from spec.masks import OWN_RANGE_TERM, RANGE_TERM, Mask
from spec.sample import Batch, batch, evaluate
from spec.term import (
    TRUE,
    SpecError,
    Term,
    and_,
    bind,
    bound,
    const,
    eq,
    expand,
    iff,
    implies,
    read,
    reads,
    substitute,
    sym,
    symbols,
)

EQUALITY_MUTANTS, OTHER_MUTANTS = 12, 4
# A proof for shorter sequences than this says too little: parameters are then bounded as well, and
# code that overflows even so is wrong.
SHORT = 2**24


@dataclass(frozen=True)
class Subject:
    """A lifted mask_mod beside the mask it is held to, both in one set of symbols."""

    target: Target
    lifted: Lifted
    stated: Mask
    constants: Mapping[str, int]
    limits: Limits

    @cached_property
    def mask(self) -> Mask:
        return self.stated.given(self.lifted.layout)

    @cached_property
    def scalars(self) -> frozenset[str]:
        """Tables of one element that hold a parameter of the spec, as window[1] does."""
        return frozenset(self.lifted.layout) & self.params.keys() - self.mask.tables.keys()

    @cached_property
    def tables(self) -> dict[str, Table]:
        """Every other table that code or spec reads, with what its builder guarantees."""
        known = {**TABLES, **self.mask.tables}
        names = {*self.mask.tables, *self.lifted.layout} - self.scalars
        for name in sorted(names - known.keys()):
            raise SpecError(f"table {name!r} is neither in the catalogue nor declared by the spec")
        return {name: known[name] for name in sorted(names)}

    @cached_property
    def params(self) -> dict[str, Param]:
        wanted = set(self.target.symbols) | set(self.lifted.layout)
        return {**{n: p for n, p in PARAMS.items() if n in wanted}, **self.mask.params}

    def plain(self, term: Term) -> Term:
        """`term` of the code in the spec's symbols: `window[0]` is `window`; constants bound."""
        scalars = {r: sym(r.value) for r in reads(term) if r.value in self.scalars}
        return expand(bind(substitute(term, scalars), self.constants))

    @cached_property
    def lanes(self) -> tuple[Term, ...]:
        return tuple(map(self.plain, self.lifted.lanes))

    def spec_lanes(self, formula: Term) -> tuple[Term, ...]:
        """A formula in absolute coordinates, for the key of each lane."""
        framed = expand(bind(BOTTOM_RIGHT(formula), self.constants))
        kv = sym("kv_idx")
        return tuple(
            substitute(framed, {kv: kv + lane}) if lane else framed
            for lane in range(len(self.lanes))
        )

    @property
    def aligned(self) -> Term:
        """A packed mask_mod is called on aligned vectors of keys: tiles are multiples of them."""
        return eq(sym("kv_idx") % len(self.lanes), 0)

    @cached_property
    def _given(self) -> tuple[Term, ...]:
        """What callers, builders and the kernel guarantee."""
        aligned = (self.aligned,) if len(self.lanes) > 1 else ()
        # SeqlenInfoQK.create of flash-attn-4 reads offset_q from the table of the same batch.
        packed = "cu_seqlens_q" in self.tables and "offset_q" in symbols(*self.lanes)
        offset = (eq(sym("offset_q"), read("cu_seqlens_q", sym("b"))),) if packed else ()
        # Packed rows and keys are counted in int32.
        starts = tuple(
            (0 <= sym(start)) & (sym(start) + length <= INT32_MAX)
            for start, length in (("offset_q", SEQLEN_Q), ("offset_k", SEQLEN_K))
            if start in symbols(*self.lanes, *self.in_range)
        )
        given = guarantees(self.params, self.tables, self.constants, BOTTOM_RIGHT)
        return (*aligned, *offset, *starts, *given)

    def _domain(self, limit: Term | int, padded: bool) -> tuple[Term, ...]:
        capped = tuple(sym(p) <= limit for p in sorted(self._carried[1]))
        return (*lengths(limit, padded), *self._given, *capped)

    @cached_property
    def _carried(self) -> tuple[int, frozenset[str]]:
        """N, and the parameters and sizes that have to be bounded by it too, so that the code does
        not overflow."""
        sizes = symbols(*(dim for table in self.tables.values() for dim in table.dims)) & SIZES
        called = symbols(*self.in_range) & {"b", "h", "offset_q", "offset_k"}
        free = frozenset(self.params.keys() - self.constants.keys()) | sizes | called
        for capped in (frozenset(), free):
            n = sym(LIMIT)
            domain = (*lengths(n, True), *self._given, *self._called(padded=True),
                      *(sym(p) <= n for p in sorted(capped)))
            found = largest(and_(*self.in_range), domain, self.limits)
            if found is not None and found >= SHORT:
                return found, capped
        return SHORT, capped

    @property
    def limit(self) -> int:
        """N: the most tokens of one sequence for which no operation of the code overflows, or
        SHORT where that is less: then no-overflow is refuted."""
        return self._carried[0]

    @cached_property
    def in_range(self) -> tuple[Term, ...]:
        """Every operation of the code, and its two indices, stay within their width, and every
        operation is defined: no division by zero, no shift beyond the word."""
        last = sym("kv_idx") + (len(self.lanes) - 1)
        steps = [(path, range_of(value, bits)) for path, value, bits, _ in self.lifted.arithmetic]
        defined = [(path, claim) for path, claim, _ in self.lifted.conditions]
        return (range_of(sym("q_idx"), 32), range_of(last, 32),
                *self._on_paths([*steps, *defined]))

    @cached_property
    def in_bounds(self) -> tuple[Term, ...]:
        """Every element that the code reads is one that the table has, an index at a time."""
        return self._on_paths([
            (path, (0 <= index) & (index < dim))
            for path, load, _ in self.lifted.reads
            for index, dim in zip(load.args, self._dims(load.value), strict=True)
            if not index.op == dim.op == "const" or not 0 <= index.value < dim.value
        ])

    def _dims(self, table: str) -> tuple[Term, ...]:
        return (const(1),) if table in self.scalars else self.tables[table].dims

    def _on_paths(self, claims: Sequence[tuple[Term, Term]]) -> tuple[Term, ...]:
        """Each claim where its path is taken, in the spec's symbols; the same claim once."""
        guarded = (claim if path is TRUE else implies(path, claim) for path, claim in claims)
        return tuple(dict.fromkeys(map(self.plain, guarded)))

    @cached_property
    def real(self) -> tuple[Term, ...]:
        """Assumptions of an equality: every real cell."""
        return (*self._domain(self.limit, False), *self._called(padded=False))

    @cached_property
    def padded(self) -> tuple[Term, ...]:
        return (*self._domain(self.limit, True), *self._called(padded=True))

    def _called(self, padded: bool) -> tuple[Term, ...]:
        """The mask's own assumptions; for padded cells too, those that speak of no cell."""
        needs = (BOTTOM_RIGHT(bind(a, self.constants)) for a in self.mask.assume)
        return tuple(n for n in needs if not (padded and symbols(n) & {"q_idx", "kv_idx"}))

    @cached_property
    def corpus(self) -> tuple[Batch, ...]:
        return self.batches(self.real, 0)

    @cached_property
    def edges(self) -> tuple[Batch, ...]:
        """Padded cells of short sequences, and cells at the ends of every range."""
        return (*self.batches(self.padded, 3), *extremes(self))

    def batches(self, assume: tuple[Term, ...], padding: int) -> tuple[Batch, ...]:
        rng = np.random.default_rng(20)
        shapes = ((4, 3), (8, 6), (12, 20), (12, 20), (12, 20), (8, 40))
        return tuple(
            self.batch(rng, assume, sequences=sequences, longest=longest, cells=1500,
                       padding=padding)
            for sequences, longest in shapes
        )

    def batch(self, rng: np.random.Generator, assume: tuple[Term, ...], **shape: Any) -> Batch:
        """A random batch of this subject's parameters and tables; see `spec.sample.batch`."""
        vector = len(self.lanes)
        if vector > 1:
            shape["longest"] += 2 * vector
        return batch(rng, self.params, self.tables, constants=self.constants, assume=assume,
                     vector=vector, **shape)

    @property
    def obliged(self) -> tuple[str, ...]:
        """Names of the obligations that its code has: one without reads has none in bounds."""
        reading = ("reads-in-bounds",) if self.in_bounds else ()
        return ("equals-spec", "no-overflow", *reading)

    @property
    def bounds(self) -> str:
        fixed = [f"{k}={v}" for k, v in self.constants.items()]
        capped = [f"{name} <= N" for name in sorted(self._carried[1])]
        free = [f"{p} symbolic" for p in self.params if p not in self.constants]
        lanes = [f"{len(self.lanes)} keys a call"] if len(self.lanes) > 1 else []
        return ", ".join([f"N = {self.limit}", *free, *capped, *fixed, *lanes])

    def equality(self, spec: Sequence[Term], **fields: Any) -> Obligation:
        """That the code's lanes are `spec`, on every real cell."""
        kv, keys = sym("kv_idx"), sym("seqlen_k")
        claim = and_(*(
            implies(kv + lane < keys, iff(a, b)) if lane else iff(a, b)
            for lane, (a, b) in enumerate(zip(self.lanes, spec, strict=True))
        ))
        return self.obligation("equals-spec", claim, self.real, **fields)

    def obligation(
        self, name: str, claim: Term, assumptions: tuple[Term, ...], **fields: Any
    ) -> Obligation:
        expected = Verdict(self.target.expected.get(name, "PROVED"))
        return Obligation(
            target=self.target.target, name=name, spec=self.mask.name, claim=claim,
            assumptions=assumptions, bounds=self.bounds, expected=expected, **fields,
        )


def obligations(subject: Subject, names: Sequence[str] = ()) -> list[Obligation]:
    made = {"equals-spec": equals_spec, "no-overflow": no_overflow,
            "reads-in-bounds": reads_in_bounds}
    return [made[name](subject) for name in subject.obliged if not names or name in names]


def equals_spec(subject: Subject) -> Obligation:
    """On every real cell the code's answer is the mask's."""
    formula = subject.mask.formula
    mutants = of_formula(
        formula, lambda term: subject.equality(subject.spec_lanes(term)).claim, subject.corpus,
        EQUALITY_MUTANTS,
    )
    return subject.equality(subject.spec_lanes(formula), mutants=mutants)


def no_overflow(subject: Subject) -> Obligation:
    """No operation of the code leaves its width, on padded rows and keys too."""
    claims = subject.in_range
    mutants = of_claims(claims, subject.edges, OTHER_MUTANTS)
    return subject.obligation("no-overflow", and_(*claims), subject.padded, mutants=mutants)


def reads_in_bounds(subject: Subject) -> Obligation:
    """Every aux load falls inside its table, on padded rows and keys too."""
    claims = subject.in_bounds
    mutants = of_claims(claims, subject.edges, OTHER_MUTANTS)
    return subject.obligation("reads-in-bounds", and_(*claims), subject.padded, mutants=mutants)


def extremes(subject: Subject) -> tuple[Batch, ...]:
    """Cells at the ends of every range: lengths of 0, 1 and N, their first and last padded rows."""
    n, last = subject.limit, INT32_MAX
    ends = np.array([0, 1, PADDING - 1])
    found = []
    for seqlen_q in (0, 1, n):
        at = np.meshgrid(
            np.concatenate([ends, seqlen_q + ends, seqlen_q - ends]), np.array([0, 1, n]),
            np.concatenate([ends, n + ends, n - ends]), np.array([1, 2, n, last]), indexing="ij",
        )
        q_idx, seqlen_k, kv_idx, param = (axis.ravel() for axis in at)
        zero = np.zeros_like(q_idx)
        cells = {"b": zero, "h": zero, "q_idx": q_idx, "kv_idx": kv_idx, "seqlen_k": seqlen_k,
                 "seqlen_q": zero + seqlen_q, "offset_q": zero + last - seqlen_q,
                 "offset_k": last - seqlen_k,
                 **{name: param for name in subject.params if name not in subject.constants}}
        tables = {name: np.array([0, 1, n - 1]).reshape(-1, *[1] * (len(table.dims) - 1))
                  for name, table in subject.tables.items()}
        tables["cu_seqlens_q"] = np.array([last - seqlen_q, last])
        sizes = {"num_seqs": 1, "num_tokens": last, **subject.constants}
        edge = Batch(sizes, cells, tables)
        keep = np.logical_and.reduce([evaluate(fact, edge) for fact in subject.padded])
        found.append(edge.select(keep))
    return tuple(found)


# Where two branches of one factory must give the same mask: over the list of ranges, and over the
# query's own row.
AGREEMENTS: tuple[tuple[str, str, str, str, str], ...] = (
    ("mm_prefix", "mm_prefix_no_window", "where window >= seqlen_k",
     "seqlen_k <= window", "seqlen_k <= window"),
    ("mm_prefix_clamped", "mm_prefix_no_window", "where window >= seqlen_k",
     "seqlen_k <= window", "seqlen_k <= window"),
    ("mm_prefix_clamped", "mm_prefix", "where no range reaches window or more keys back",
     "not any(ranges[b, r, 0] <= q and q <= ranges[b, r, 1] and window <= q - ranges[b, r, 0]"
     " for r in range(num_ranges))",
     "query_ranges[token, 0] < 0 or q - query_ranges[token, 0] < window"),
)


def branches_agree(subjects: Sequence[Subject]) -> list[Obligation]:
    """For each pair of branches of one factory that must agree under a condition: that they do."""
    found = []
    for one_spec, other_spec, words, over_list, over_row in AGREEMENTS:
        for one in (s for s in subjects if s.mask.name == one_spec):
            for other in (s for s in subjects if s.mask.name == other_spec and _siblings(one, s)):
                where = over_row if "query_ranges" in one.lifted.layout else over_list
                found.append(_same_branch(one, other, words, from_text(where)))
    return found


def _siblings(one: Subject, other: Subject) -> bool:
    return (one.lifted.layout == other.lifted.layout and one.constants == other.constants
            and len(one.lanes) == len(other.lanes)
            and one.target.target.split("[")[0] == other.target.target.split("[")[0])


def _same_branch(one: Subject, other: Subject, words: str, where: Term) -> Obligation:
    condition = BOTTOM_RIGHT(bind(where, one.constants))
    shorter = min((one, other), key=lambda s: s.limit)
    assume = tuple(dict.fromkeys((*one.real, *other.real, *shorter.real, condition)))

    agreement = [iff(one.lanes[0], other.lanes[0])]
    mutants = of_claims(agreement, one.batches(assume, 0), OTHER_MUTANTS)
    name = other.target.target.removeprefix(one.target.target.split("[")[0])
    return Obligation(
        target=one.target.target, name="branches-agree", spec=f"{name} {words}",
        claim=one.equality(other.lanes).claim, assumptions=assume, mutants=mutants,
        bounds=f"{shorter.bounds}, {words}",
    )


def representation(target: str) -> list[Obligation]:
    """The query's own row means the same as the list of ranges, for any number of them.

    Row i of the list is the one that the own row was copied from, where it was; row j is any. That
    no quantifier is left is exact: a range that query and key share is a j, and a visible key in
    the own row is in range i.
    """
    i, j, inside = sym("i"), sym("j"), "0 <= {0} and {0} < num_ranges"
    body = RANGE_TERM.args[1]

    def at(row: Term) -> Term:
        return substitute(body, {bound(RANGE_TERM.value): row})

    holds = "ranges[b, {0}, 0] <= q and q <= ranges[b, {0}, 1]"
    own = from_text(
        "query_ranges[token, 0] == ranges[b, i, 0] and query_ranges[token, 1] == ranges[b, i, 1]"
        f" and {holds.format('i')} or query_ranges[token, 0] == -1 and query_ranges[token, 1] == -1"
        f" and not ({holds.format('i')}) and not ({holds.format('j')})"
    )
    disjoint = from_text("i == j or ranges[b, i, 1] < ranges[b, j, 0]"
                         " or ranges[b, j, 1] < ranges[b, i, 0]")
    row = "0 <= ranges[b, {0}, 0] and ranges[b, {0}, 0] <= ranges[b, {0}, 1]"
    domain = (
        *(from_text(text.format(index)) for text in (inside, row) for index in "ij"),
        from_text("0 <= kv and 0 <= b and 0 <= token"), own,
    )

    def claim(row: Term) -> Term:
        return implies(at(j), row) & implies(row, at(i))

    corpus = _representation_corpus((*domain, disjoint))
    mutants = of_claims(claim(OWN_RANGE_TERM).args, corpus, OTHER_MUTANTS)
    made = {"target": target, "name": "representation", "claim": claim(OWN_RANGE_TERM),
            "bounds": "any number of ranges, any positions"}
    return [
        Obligation(**made, spec="query_ranges for disjoint ranges", mutants=mutants,
                   assumptions=(*domain, disjoint)),
        Obligation(**made, spec="query_ranges for ranges that overlap", assumptions=domain,
                   expected=Verdict.REFUTED),
    ]


def _representation_corpus(assume: tuple[Term, ...]) -> tuple[Batch, ...]:
    rng = np.random.default_rng(7)
    wanted = {name: TABLES[name] for name in ("ranges", "query_ranges", "cu_seqlens_q")}
    found = batch(rng, {}, wanted, constants={"num_ranges": 3}, cells=4000)
    size = len(found.cells["b"])
    cells = {
        **found.cells, "i": rng.integers(0, 3, size), "j": rng.integers(0, 3, size),
        **{name: evaluate(term, found) for name, term in (
            ("q", BOTTOM_RIGHT.q), ("kv", BOTTOM_RIGHT.kv), ("token", BOTTOM_RIGHT.token))},
    }
    everywhere = Batch({**found.params, "num_ranges": 3}, cells, found.tables)
    return (everywhere.select(np.logical_and.reduce([evaluate(a, everywhere) for a in assume])),)
