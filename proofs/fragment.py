"""One call of a built-in `apply_mask`, lifted for a thread: its symbols, facts and cells.

Where the thread lies in the tile is two symbols, and so is the query that another lane passes on to
each of its rows; `facts` is what is shown once of them, from the thread's number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kernels.builtin import VISIBLE, Element, Fragment, Variant
from kernels.machine import CannotLift
from proofs.obligation import LIMIT, Limits, Obligation, UnknownLimit, largest, range_of
from proofs.tiles import LEFT, RIGHT
from spec.domain import BOTTOM_RIGHT, INT32_MAX, Q_IDX, SEQLEN_K, SEQLEN_Q
from spec.sample import Array, Batch, evaluate
from spec.term import (
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
)
from spec.tiles import BUILTIN, KV_IDX, M_BLOCK, N_BLOCK, Tile

LAYER, ARCH = "builtin", "sm_90"
ROW, COL = sym("thread_row"), sym("thread_col")
BATCH, HEAD = sym("batch"), sym("head")
MASK_MOD = "mask_mod"
SAMPLES = 1000
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
