"""Obligations of built-in masks: element-mask, row-limit, ownership, reads-in-bounds, no-overflow.

`apply_mask` is lifted for one thread of a fragment. Where the thread lies in the tile is two
symbols, and so is the query that another lane passes on to each of its rows: *ownership* and
*row-limit* show once, from the thread's number, what these are; *element-mask* then speaks of each
element with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from kernels.block_info import MODES
from kernels.builtin import (
    LANES,
    NUMBERS,
    THREAD,
    VISIBLE,
    Element,
    Fragment,
    Variant,
    knows_dynamic_causal,
    lift,
    run,
)
from kernels.machine import CannotLift
from kernels.provider import Provider
from kernels.run_cute import Agreement, CannotRun, first_difference
from proofs.checks import REAL, Announce, Options, Row
from proofs.mutants import _distinct
from proofs.obligation import (
    LIMIT,
    Limits,
    Mutant,
    Obligation,
    Result,
    UnknownLimit,
    Verdict,
    largest,
    prove,
    range_of,
)
from proofs.tiles import (
    ALL_HEAD_DIMS,
    ALL_PACKS,
    HEAD_DIMS,
    LEFT,
    PACKS,
    RIGHT,
    Disagreement,
    _shown,
    wanted,
)
from proofs.variations import Variation
from spec.domain import BOTTOM_RIGHT, INT32_MAX, PADDING, Q_IDX, SEQLEN_K, SEQLEN_Q
from spec.sample import Array, Batch, evaluate
from spec.term import (
    TRUE,
    Term,
    and_,
    const,
    eq,
    iff,
    implies,
    ite,
    max_,
    ne,
    postorder,
    read,
    substitute,
    sym,
    symbols,
)
from spec.tiles import BUILTIN, KV_IDX, M_BLOCK, N_BLOCK, Tile

LAYER, ARCH, OLD_ARCH, NEW_ARCH = "builtin", "sm_90", "sm_80", "sm_100"
MUTANTS, ELEMENTS = 8, 11
ROW, COL = sym("thread_row"), sym("thread_col")
BATCH, HEAD = sym("batch"), sym("head")
MASK_MOD = "mask_mod"
# The tiles of FA4's SM80 and SM100 kernels.
OLD_TILE, NEW_TILE = Tile(128, 64), Tile(128, 128)
CALLS, FEW_BITS, SAMPLES = 400, 8, 1000
NOT_ON_NEW = "apply_mask_sm100 with a mask_mod: how it wraps indices and packs keys is not modelled"
DIVISION = "fast divisors taken as exact unsigned division"
SHUFFLES = "a word from another lane taken as what that lane computes, all lanes being there"


@dataclass(frozen=True, slots=True)
class Configuration:
    """One mask of one kernel: a mode of `MODES`, or a mask_mod inside, on one tile."""

    mode: str
    tile: Tile
    wrapped: bool = False
    arch: str = ARCH

    @property
    def name(self) -> str:
        wrapped = (",aux" if self.wrapped else "") + (f",{self.arch}" if self.arch != ARCH else "")
        t = self.tile
        return f"{self.mode}[{t.tile_m}x{t.tile_n},pack={t.pack}{wrapped}]"

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Masked with seqlen_k, as the last tile is; and without, as the others are."""
        inside = self.mode == MASK_MOD
        # Without seqlen_k nothing is wrapped, and without a mask as well nothing is done.
        both = (True,) if self.mode == "full" else (True, False)
        mode = "full" if inside else self.mode
        return tuple(
            Variant(mode, self.tile, seqlen, inside, self.wrapped and seqlen, self.arch)
            for seqlen in both
        )


def configurations(provider: Provider, *, full: bool = False) -> list[Configuration]:
    """Every configuration that the provider's own choice of tiles gives, each once; unless `full`
    one of them with a mask_mod."""
    found: dict[Configuration, None] = {}
    modes = [m for m, flags in MODES.items() if not flags.dynamic or knows_dynamic_causal(provider)]
    for mode in (*modes, MASK_MOD):
        flags = MODES["full" if mode == MASK_MOD else mode]
        few = 1 if mode == MASK_MOD else None
        for head_dim in ALL_HEAD_DIMS if full else HEAD_DIMS[:few]:
            chosen = provider.tile_size_sm90(head_dim, head_dim, flags.is_causal, flags.is_local)
            for pack in ALL_PACKS if full else PACKS[:few]:
                tile = Tile(chosen.m_block_size, chosen.n_block_size, pack)
                for wrapped in _wrapped(mode, full):
                    found[Configuration(mode, tile, wrapped)] = None
    others = [
        Configuration(mode, replace(tile, pack=pack), mode == MASK_MOD, arch)
        for arch, tile in ((OLD_ARCH, OLD_TILE), (NEW_ARCH, NEW_TILE))
        for mode in (*modes, MASK_MOD) if mode == MASK_MOD or not MODES[mode].dynamic
        for pack in ALL_PACKS
    ]
    return [*found, *(others if full else ())]


def _wrapped(mode: str, full: bool) -> tuple[bool, ...]:
    """A mask_mod reads aux tensors, and then FA4 wraps its indices; one that reads none is rare."""
    if mode != MASK_MOD:
        return (False,)
    return (True, False) if full else (True,)


@dataclass(frozen=True)
class Subject:
    """One call of `apply_mask`, lifted. Terms of `fragment` are in the thread's number; those of
    `plain` in ROW and COL, where the first element of the thread lies in the tile."""

    target: str
    configuration: Configuration
    variant: Variant
    fragment: Fragment
    limits: Limits
    # No length above this one is asked for.
    longest: int = INT32_MAX

    @property
    def tile(self) -> Tile:
        return self.variant.tile

    @cached_property
    def place(self) -> Mapping[Term, Term]:
        """Where the first element lies. On SM100 each thread has a whole row."""
        first = self.fragment.elements[0]
        return {first.row: ROW, **({first.col: COL} if first.col.op != "const" else {})}

    def plain(self, term: Term) -> Term:
        """`term` in the symbols of the thread's place, of its queries and of remainders."""
        placed = substitute(term, self.place)
        return substitute(substitute(placed, self.quotients), self.remainders)

    @cached_property
    def quotients(self) -> Mapping[Term, Term]:
        """Query and head of a packed row, as the code computes them, in the row's query."""
        found: dict[Term, Term] = {}
        pack = const(self.tile.pack)
        for row, query in self.queries.items() if self.tile.pack > 1 else ():
            first = M_BLOCK * self.tile.tile_m
            for packed in (first + row, row + first):
                for op in ("truncdiv", "floordiv"):
                    found[Term(op, (packed, pack))] = query
                for op in ("truncmod", "floormod"):
                    found[Term(op, (packed, pack))] = packed - query * self.tile.pack
        return found

    @cached_property
    def remainders(self) -> Mapping[Term, Term]:
        """A symbol for each index that is wrapped by a length, of which `facts` says enough."""
        parts = [*(e.kept for e in self.fragment.elements), *(r for _, r, _ in self.fragment.reads)]
        placed = [substitute(substitute(part, self.place), self.quotients) for part in parts]
        found = dict.fromkeys(node for node in postorder(*placed) if wrapped_by(node) is not None)
        return {node: sym(f"wrapped_{i}") for i, node in enumerate(found)}

    @cached_property
    def elements(self) -> tuple[Element, ...]:
        return tuple(Element(self.plain(e.row), self.plain(e.col), self.plain(e.kept))
                     for e in self.fragment.elements)

    @cached_property
    def rows(self) -> tuple[Term, ...]:
        """The rows of a thread, in the order of its elements."""
        base = {self.fragment.elements[0].row: ROW}
        return tuple(dict.fromkeys(substitute(e.row, base) for e in self.fragment.elements))

    @cached_property
    def queries(self) -> Mapping[Term, Term]:
        """The query of each row: a symbol of its own where heads are packed."""
        packed = {row: M_BLOCK * self.tile.tile_m + row for row in self.rows}
        if self.tile.pack == 1:
            return packed
        return {row: sym(f"query_{i}") for i, row in enumerate(self.rows)}

    @cached_property
    def facts(self) -> tuple[Term, ...]:
        """What ownership and row-limit show."""
        where = (0 <= ROW, COL >= 0, COL <= 6, eq(COL % 2, 0),
                 *(row < self.tile.tile_m for row in self.rows),
                 *(wrapping(*wrapped_by(node), symbol)
                   for node, symbol in self.remainders.items()))
        if self.tile.pack == 1:
            return where
        pack = self.tile.pack
        packed = ((q * pack, M_BLOCK * self.tile.tile_m + row) for row, q in self.queries.items())
        limits = zip(self.fragment.shuffles, self.queries.values(), strict=False)
        return (*where, *((low <= at) & (at < low + pack) for low, at in packed),
                *(eq(word, query) for word, query in limits))

    @property
    def thread(self) -> Any:
        """All that ownership and row-limit are about."""
        return [(e.row, e.col) for e in self.fragment.elements], [*self.fragment.shuffles.items()]

    @cached_property
    def windows(self) -> tuple[Term, ...]:
        flags = self.variant.flags
        return (*((LEFT,) if flags.left else ()), *((RIGHT,) if flags.right else ()))

    def domain(self, limit: Term) -> tuple[Term, ...]:
        """Tiles that a kernel visits, of sequences and windows up to `limit`."""
        tile = self.tile
        least = 1 if self.variant.wrapped else 0
        heads = (0 <= BATCH, 0 <= HEAD, HEAD <= 1023) if self.variant.mask_mod else ()
        return (
            0 <= SEQLEN_Q, SEQLEN_Q <= limit, least <= SEQLEN_K, SEQLEN_K <= limit,
            *((0 <= w) & (w <= limit) for w in self.windows), *heads,
            0 <= M_BLOCK, M_BLOCK * tile.tile_m < SEQLEN_Q * tile.pack,
            -limit <= N_BLOCK * tile.tile_n,
            (N_BLOCK <= 0) | (N_BLOCK * tile.tile_n < SEQLEN_K),
        )

    @cached_property
    def in_range(self) -> tuple[Term, ...]:
        steps = [implies(path, range_of(value, width))
                 for path, value, width, _ in self.fragment.arithmetic]
        defined = [implies(path, claim) for path, claim, _ in self.fragment.conditions]
        return tuple(dict.fromkeys(map(self.plain, [*steps, *defined])))

    @cached_property
    def limit(self) -> int:
        """The largest length and window for which nothing overflows."""
        assumed = (*self.domain(sym(LIMIT)), *self.facts)
        found = largest(and_(*self.in_range), assumed, self.limits, top=self.longest)
        if found is None:
            raise UnknownLimit("operations overflow for every length")
        return found

    @cached_property
    def assumptions(self) -> tuple[Term, ...]:
        return (*self.domain(const(self.limit)), *self.facts)

    @property
    def bounds(self) -> str:
        windows = [f"0 <= {w.value} <= N" for w in self.windows]
        least = ["seqlen_k >= 1, for it is a divisor"] if self.variant.wrapped else []
        named = [DIVISION] if self.variant.wrapped else []
        named += [SHUFFLES] if self.fragment.shuffles else []
        return ", ".join([f"N = {self.limit}", "seqlen_q and seqlen_k <= N", *windows, *least,
                          f"every thread of {self.variant.threads}", *named])

    @property
    def spec(self) -> str:
        past = " & kv < seqlen_k" if self.variant.seqlen else ""
        return f"{self.configuration.mode}{past}"

    def key(self, element: Element) -> Term:
        return max_(N_BLOCK, 0) * self.tile.tile_n + element.col

    def visible(self, element: Element) -> Term:
        """What the spec says of an element's cell."""
        q, kv = self.queries[element.row], self.key(element)
        if self.variant.mask_mod:
            head = HEAD * self.tile.pack
            if self.tile.pack > 1:
                head = head + (M_BLOCK * self.tile.tile_m + element.row - q * self.tile.pack)
            return ne(read(VISIBLE, BATCH, head, q, kv), 0)
        return substitute(BOTTOM_RIGHT(BUILTIN[self.configuration.mode]), {Q_IDX: q, KV_IDX: kv})

    def masks(self, elements: Sequence[Element]) -> Term:
        """Each element of a real row is kept exactly where its cell is visible and its key real.

        Where seqlen_k is not looked at, the tiles have no visible cell past it
        (`interior-unmasked`): there it is enough that nothing hidden is kept.
        """
        return and_(*(implies(self.queries[e.row] < SEQLEN_Q, self._kept_right(e))
                      for e in elements))

    def _kept_right(self, e: Element) -> Term:
        visible, real = self.visible(e), self.key(e) < SEQLEN_K
        if self.variant.seqlen:
            return iff(e.kept, and_(visible, real))
        return and_(implies(e.kept, visible), implies(and_(visible, real), e.kept))

    @cached_property
    def corpus(self) -> Batch:
        found = calls(np.random.default_rng(3), self, SAMPLES)
        keep = np.logical_and.reduce([evaluate(a, found) for a in self.assumptions])
        return found.select(keep)

    def obligation(self, name: str, claim: Term, **fields: Any) -> Obligation:
        made = {"assumptions": self.assumptions, "bounds": self.bounds, "spec": self.spec, **fields}
        return Obligation(target=self.target, name=name, claim=claim, layer=LAYER,
                          arch=self.variant.arch, **made)


def wrapped_by(node: Term) -> tuple[Term, Term] | None:
    """Index and length, where `node` is the index modulo the length as the compiled code has it:
    an unsigned remainder, read as a signed integer."""
    if node.op != "ite" or node.args[1].op != "floormod" or node.args[1].args[1].op == "const":
        return None
    remainder = node.args[1]
    number, length = (a.args[2] if a.op == "ite" else a for a in remainder.args)
    unsigned_ones = (read_unsigned(number), read_unsigned(length))
    if any(a not in (plain, wide) for a, plain, wide in
           zip(remainder.args, (number, length), unsigned_ones, strict=True)) or node is not (
               read_signed(remainder)):
        raise CannotLift("a remainder by a length in another form than is known")
    return number, length


def read_unsigned(value: Term) -> Term:
    return ite(value < 0, value + 2**32, value)


def read_signed(value: Term) -> Term:
    return ite(value < 2**31, value, value - 2**32)


def wrapped(number: Term, length: Term) -> Term:
    return read_signed(read_unsigned(number) % read_unsigned(length))


def wrapping(number: Term, length: Term, index: Term) -> Term:
    """What is used of an index that is wrapped: in the sequence, and the same for a real one."""
    return and_(implies(0 < length, and_(0 <= index, index < length)),
                implies(and_(0 <= number, number < length), eq(index, number)))


def calls(rng: np.random.Generator, subject: Subject, count: int) -> Batch:
    """Random threads, blocks, lengths and windows, with the symbols that follow from them."""
    tile = subject.tile

    def number(*choices: int) -> Array:
        near = rng.integers(0, 2 * max(tile.tile_m, tile.tile_n), count)
        return np.where(rng.random(count) < 0.2, rng.choice(choices, count), near)

    m_block = rng.integers(0, 3, count)
    n_block = rng.integers(-2, 3, count)
    first = m_block * tile.tile_m // tile.pack
    at = {
        "thread": rng.integers(0, subject.variant.threads, count), "m_block": m_block,
        "n_block": n_block, "seqlen_q": first + 1 + number(0, 1),
        "seqlen_k": np.maximum(n_block, 0) * tile.tile_n + number(1, tile.tile_n),
        "window_size_left": number(0, 1), "window_size_right": number(0, 1),
        "batch": rng.integers(0, 2, count), "head": rng.integers(0, 2, count),
        "b": rng.integers(0, 8, count),
    }
    tables = {"dynamic_causal": rng.integers(0, 2, 8).astype(np.int32)}
    at["psc"] = tables["dynamic_causal"][at["b"]]
    if subject.variant.mask_mod:
        tables[VISIBLE] = rng.integers(0, 2, (2, 2 * tile.pack, 700, 700)).astype(np.int32)
    known = Batch({}, at, tables)
    element = subject.fragment.elements[0]
    more = {"thread_row": evaluate(element.row, known), "thread_col": evaluate(element.col, known)}
    more |= {word.value: evaluate(d, known) for word, d in subject.fragment.shuffles.items()}
    known = Batch({}, {**at, **more}, tables)
    if tile.pack > 1:
        more |= {q.value: evaluate((M_BLOCK * tile.tile_m + row) // tile.pack, known)
                 for row, q in subject.queries.items()}
        known = Batch({}, {**at, **more}, tables)
    more |= {r.value: evaluate(node, known) for node, r in subject.remainders.items()}
    return Batch({}, {**at, **more}, tables)


def faults(subject: Subject) -> Iterator[tuple[str, Term]]:
    """Claims of code that is wrong in one place, of a few elements."""
    elements = subject.elements
    few = slice(None, None, max(1, len(elements) // ELEMENTS))

    def claim(wrong: Sequence[Element]) -> Term:
        return subject.masks(wrong[few])

    for symbol in sorted({s for e in elements[few] for s in symbols(e.kept)} & OFF_BY_ONE):
        for by in (1, -1):
            off = {sym(symbol): sym(symbol) + by}
            wrong = [replace(e, kept=substitute(e.kept, off)) for e in elements[few]]
            yield f"{symbol} off by {by}", subject.masks(wrong)
    flag = read("dynamic_causal", sym("b"))
    for value in (0, 1) if subject.variant.flags.dynamic else ():
        told = [replace(e, kept=substitute(e.kept, {flag: const(value)})) for e in elements[few]]
        yield f"the flag of every sequence taken as {value}", subject.masks(told)
    groups = zip(elements, [*elements[4:], *elements[:4]], strict=True)
    yield "columns of the next group", claim([replace(e, col=to.col) for e, to in groups])
    yield "columns without gaps", claim(
        [replace(e, col=elements[0].col + (i // 4 * 2 + i % 2)) for i, e in enumerate(elements)])
    other_row = dict(zip(subject.rows, reversed(subject.rows), strict=True))
    yield "rows exchanged", claim([replace(e, row=other_row[e.row]) for e in elements])
    yield "the last element always kept", subject.masks([replace(elements[-1], kept=TRUE)])
    yield "the first element never kept", subject.masks([replace(elements[0], kept=~TRUE)])


OFF_BY_ONE = {"seqlen_q", "seqlen_k", "window_size_left", "window_size_right", "m_block", "n_block",
              "shuffled_0", "thread_row", "thread_col", "head"}


def of_faults(tried: Iterator[tuple[str, Term]], corpus: Batch, count: int) -> tuple[Mutant, ...]:
    memo: dict[Term, Any] = {}
    wrong = [Variation(phrase, claim, 0) for phrase, claim in tried]
    return tuple(Mutant(v.phrase, v.term)
                 for v in _distinct(wrong, lambda v: evaluate(v.term, corpus, memo), count))


def element_mask(subject: Subject) -> Obligation:
    return subject.obligation(
        "element-mask", subject.masks(subject.elements), apart=not subject.variant.mask_mod,
        mutants=of_faults(faults(subject), subject.corpus, MUTANTS),
    )


def no_overflow(subject: Subject) -> Obligation:
    values = [v for _, v, _, _ in subject.fragment.arithmetic]
    some = map(subject.plain, values[:: max(1, len(values) // 8)])
    tried = ((f"an index in {FEW_BITS} bits", range_of(v, FEW_BITS)) for v in some)
    mutants = of_faults(tried, subject.corpus, 3)
    return subject.obligation("no-overflow", and_(*subject.in_range), mutants=mutants)


def reads_in_bounds(subject: Subject) -> Obligation:
    """A mask_mod is called on cells of the sequence and on padded ones, as its own proof assumes;
    where indices are wrapped, on cells of the sequence alone."""
    tile = subject.tile
    past = 0 if subject.variant.wrapped else PADDING - 1

    def claim(fragment: Fragment, q_past: int, k_past: int) -> Term:
        cells = []
        for path, load, _ in fragment.reads:
            batch, head, q, kv = load.args
            cells.append(implies(path, and_(
                0 <= q, q < SEQLEN_Q + q_past, 0 <= kv, kv < SEQLEN_K + k_past, eq(batch, BATCH),
                HEAD * tile.pack <= head, head < HEAD * tile.pack + tile.pack,
            )))
        return subject.plain(and_(*cells))

    short = (("rows inside the sequence", -1, past), ("keys inside the sequence", past, -1))
    if not subject.variant.wrapped:
        short = (("rows inside the sequence", 0, past), ("keys inside the sequence", past, 0))
    mutants = of_faults(((phrase, claim(subject.fragment, q, k)) for phrase, q, k in short),
                        subject.corpus, 2)
    return subject.obligation("reads-in-bounds", claim(subject.fragment, past, past),
                              mutants=mutants)


def row_limit(subject: Subject) -> Obligation:
    """The word that another lane passes on to a row is the query of that row."""
    def claim(shift: int, rows: Sequence[Term]) -> Term:
        return and_(*(
            eq(word, (M_BLOCK * subject.tile.tile_m + row + shift) // subject.tile.pack)
            for word, row in zip(subject.fragment.shuffles.values(), rows, strict=True)
        ))

    rows = list(dict.fromkeys(e.row for e in subject.fragment.elements))
    wrong = (("the row above", claim(-1, rows)), ("the row below", claim(1, rows)),
             ("rows exchanged", claim(0, rows[::-1])))
    return subject.obligation(
        "row-limit", claim(0, rows), spec="(m_block * tile_m + row) // pack",
        assumptions=(*threads(subject), 0 <= M_BLOCK),
        bounds=f"every thread of {subject.variant.threads}, every block of rows, {SHUFFLES}",
        mutants=of_faults(iter(wrong), subject.corpus, 3),
    )


def wrapped_index(subject: Subject) -> Obligation:
    """A remainder as the code computes it is what `wrapping` says, for any index and length."""
    number, length = sym("number"), sym("length")

    def claim(index: Term) -> Term:
        return wrapping(number, length, index)

    right = wrapped(number, length)
    wrong = (("one higher", right + 1), ("not wrapped", number))
    return subject.obligation(
        "wrapped-index", claim(right), spec="number mod length", bounds=f"any int32, {DIVISION}",
        assumptions=(range_of(number, 32), range_of(length, 32)),
        mutants=tuple(Mutant(phrase, claim(index)) for phrase, index in wrong),
    )


def threads(subject: Subject) -> tuple[Term, ...]:
    return (0 <= THREAD, THREAD < subject.variant.threads)


def ownership(subject: Subject) -> Obligation:
    """Elements lie inside the tile, each cell is one thread's one element, and what the other
    obligations take for granted of a thread's first element holds."""
    tile, elements = subject.tile, subject.fragment.elements
    rows_apart = subject.variant.arch != NEW_ARCH
    groups = subject.variant.threads // 128
    repeats = tile.tile_m // 64 // groups

    def claim(elements: Sequence[Element]) -> Term:
        return and_(*(part for i, e in enumerate(elements) for part in (
            0 <= e.row, e.row < tile.tile_m, 0 <= e.col, e.col < tile.tile_n,
            eq(owner(e, groups), THREAD) if rows_apart else eq(e.row, THREAD),
            eq(register(e, repeats), i) if rows_apart else eq(e.col, i),
        )), 0 <= elements[0].col, elements[0].col <= 6, eq(elements[0].col % 2, 0))

    swapped = [replace(e, row=other.row) for e, other in
               zip(elements, [*elements[2:], *elements[:2]], strict=True)]
    shifted = [replace(e, col=e.col + 1) for e in elements]
    wrong = (("rows exchanged", claim(swapped)), ("columns one higher", claim(shifted)))
    return subject.obligation(
        "ownership", claim(elements), spec="accumulator of the instruction set",
        assumptions=threads(subject), bounds=f"every thread of {subject.variant.threads}",
        mutants=of_faults(iter(wrong), subject.corpus, 2),
    )


def owner(e: Element, groups: int) -> Term:
    """The thread that the instruction set gives a cell of the accumulator to: four warps have 16
    rows each, and every group of four warps 64 rows at a time."""
    group = e.row // 64 * 128 if groups > 1 else const(0)
    return group + e.row % 64 // 16 * 32 + e.row % 8 * 4 + e.col % 8 // 2


def register(e: Element, repeats: int) -> Term:
    """Which of that thread's elements it is, where it has `repeats` times 16 rows of a warp."""
    again = e.row // 64 * 4 if repeats > 1 else const(0)
    return e.col // 8 * (4 * repeats) + again + e.row % 16 // 8 * 2 + e.col % 2


def obligations(subject: Subject, first: bool) -> Iterator[Obligation]:
    if first:
        yield ownership(subject)
        if subject.fragment.shuffles:
            yield row_limit(subject)
        if subject.remainders:
            yield wrapped_index(subject)
    yield no_overflow(subject)
    if subject.fragment.reads:
        yield reads_in_bounds(subject)
    yield element_mask(subject)


def of_configuration(
    provider: Provider, configuration: Configuration, options: Options = Options()
) -> list[Row]:
    """The rows of one unit. The provider is served."""
    target = f"{provider.name}/{LAYER}/{configuration.name}"
    if configuration.arch == NEW_ARCH and configuration.mode == MASK_MOD:
        return [failed(target, configuration, Verdict.UNSUPPORTED, NOT_ON_NEW)]
    rows: list[Row] = []
    longest, shown = INT32_MAX, None
    for variant in configuration.variants:
        try:
            fragment = lift(provider, variant)
            subject = Subject(target, configuration, variant, fragment, options.limits, longest)
            longest = subject.limit
            compared = compare_with_code(provider, subject) if options.thorough else None
            made = list(obligations(subject, first=subject.thread != shown))
            shown = subject.thread
        except CannotLift as refusal:
            return [failed(target, configuration, Verdict.UNSUPPORTED, str(refusal))]
        except UnknownLimit as error:
            return [failed(target, configuration, Verdict.UNKNOWN, f"resource limit: {error}")]
        except Disagreement as error:
            return [failed(target, configuration, Verdict.ERROR, str(error))]
        replayed = REAL if compared is not None else None
        rows += [Row(_shown(prove(o, options.limits)), replayed, compared, fa4=provider.name)
                 for o in made]
    return wanted(list(_sound(rows)), options)


RESTS_ON = ("no-overflow", "ownership", "row-limit", "wrapped-index")


def _sound(rows: Sequence[Row]) -> Iterator[Row]:
    """What is shown of elements rests on what is shown of the thread, and on no overflow."""
    missing = [r.result.obligation.name for r in rows if r.result.obligation.name in RESTS_ON
               and r.result.verdict is not Verdict.PROVED]
    for row in rows:
        result = row.result
        if (result.verdict is Verdict.PROVED and missing
                and result.obligation.name in ("element-mask", "reads-in-bounds")):
            why = f"shown in unbounded integers, but {missing[0]} is not proved"
            row = replace(row, result=replace(result, verdict=Verdict.UNKNOWN, killed=0,
                                              reason=why))
        yield row


def compare_with_code(provider: Provider, subject: Subject) -> Agreement:
    """Runs the real method on random threads and blocks beside its terms."""
    at = calls(np.random.default_rng(13), subject, CALLS)
    at = at.select(at.cells["seqlen_k"] > 0)
    words = np.zeros((len(at.cells["b"]), LANES), np.int32)
    for word, lane in subject.fragment.lanes.items():
        words[:, lane] = at.cells[word.value]
    table = at.tables.get(VISIBLE, np.zeros((1, 1, 1, 1), np.int32))
    memo: dict[Term, Any] = {}
    expected = np.stack([evaluate(e.kept, at, memo) for e in subject.fragment.elements], axis=-1)
    try:
        got = run(provider, subject.variant, {n: at.cells[n] for n in NUMBERS}, table, words)
    except CannotRun as error:
        raise Disagreement(f"the real code did not run on the CPU: {error}") from None
    mismatch = first_difference({n: at.cells[n] for n in NUMBERS}, expected, got)
    if mismatch is not None:
        raise Disagreement(f"the real code and its terms differ at {mismatch}")
    return Agreement(cells=expected.size, visible=int(expected.sum()), left_out=0, uncovered=(),
                     mismatch=None)


def failed(target: str, configuration: Configuration, verdict: Verdict, reason: str) -> Row:
    nothing = Obligation(target=target, name="element-mask", spec=configuration.mode,
                         claim=sym("?") < 0, assumptions=(), bounds="none", layer=LAYER, arch=ARCH)
    return Row(Result(nothing, verdict, reason=reason))


def rows(provider: Provider, options: Options = Options(), announce: Announce = lambda text: None,
         *, full: bool = False) -> Iterator[Row]:
    with provider.served():
        for configuration in configurations(provider, full=full):
            announce(f"{provider.name}/{LAYER}/{configuration.name}")
            yield from of_configuration(provider, configuration, options)

