"""Claims about a kernel that computes a mask in tiles, from the mask's term alone.

A kernel computes `tile_m` packed rows at a time against tiles of `tile_n` keys. With `pack` query
heads to a key head, packed row `row` is query `row // pack`. Tiles of keys that it never visits
have to be hidden, and what it does not mask element by element has to be visible. Whatever the
mask, those are the claims below; they hold for each block of rows, `m_block`, on its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spec.domain import Q_IDX, SEQLEN_K, SEQLEN_Q
from spec.from_text import from_text
from spec.term import (
    TRUE,
    Term,
    and_,
    eq,
    implies,
    max_,
    min_,
    not_,
    or_,
    substitute,
    sym,
)

ROW, KV_IDX, M_BLOCK, N_BLOCK = sym("row"), sym("kv_idx"), sym("m_block"), sym("n_block")
SPLIT, SPLITS = sym("split_idx"), sym("num_splits")
NO_SPLITS = {SPLIT: Term("const", (), 0), SPLITS: Term("const", (), 1)}

# What the built-in flags of FA4 mean, in absolute positions. Windows are distances, both ends
# inclusive; a side that a mode does not name has no bound.
BUILTIN: Mapping[str, Term] = {
    "full": TRUE,
    "causal": from_text("kv <= q"),
    "local": from_text("q - kv <= window_size_left and kv - q <= window_size_right"),
    "local-left": from_text("q - kv <= window_size_left"),
    "local-right": from_text("kv - q <= window_size_right"),
    "dynamic_causal": from_text("kv <= q or dynamic_causal[b] == 0"),
    "dynamic_causal-local": from_text(
        "q - kv <= window_size_left and (dynamic_causal[b] == 0 and kv - q <= window_size_right"
        " or not dynamic_causal[b] == 0 and kv <= q)"
    ),
}


@dataclass(frozen=True, slots=True)
class Tile:
    tile_m: int
    tile_n: int
    pack: int = 1

    @property
    def query(self) -> Term:
        """The query of packed row `row`."""
        return ROW if self.pack == 1 else ROW // self.pack

    def rows(self, m_block: Term = M_BLOCK) -> tuple[Term, ...]:
        """`row` lies in a block of rows, and is the query `q_idx`."""
        first, first_of_query = m_block * self.tile_m, Q_IDX * self.pack
        packed = (
            (eq(ROW, Q_IDX),) if self.pack == 1
            else (first_of_query <= ROW, ROW < first_of_query + self.pack)
        )
        return (first <= ROW, ROW < first + self.tile_m, *packed)

    def keys(self, n_block: Term = N_BLOCK) -> tuple[Term, ...]:
        """`kv_idx` lies in a tile of keys."""
        first = n_block * self.tile_n
        return (first <= KV_IDX, KV_IDX < first + self.tile_n)

    @property
    def domain(self) -> tuple[Term, ...]:
        """A real row of the block `m_block`."""
        return (0 <= M_BLOCK, 0 <= Q_IDX, Q_IDX < SEQLEN_Q, *self.rows())


@dataclass(frozen=True, slots=True)
class Visit:
    """Tiles that a kernel computes: `n_block`, where `taken`; for each `turn` of 0 .. count - 1.

    `masked` says that each element is masked as the kernel was told, `seqlen` that keys past the
    end of the sequence are too. A visit that is no loop has neither turn nor count.
    """

    n_block: Term
    masked: bool
    seqlen: bool
    taken: Term = TRUE
    turn: Term | None = None
    count: Term | None = None

    def terms(self) -> tuple[Term, ...]:
        return (self.n_block, self.taken, *((self.count,) if self.count is not None else ()))

    @property
    def happens(self) -> Term:
        if self.turn is None or self.count is None:
            return self.taken
        return and_(0 <= self.turn, self.turn < self.count, self.taken)

    @property
    def first(self) -> Term:
        return self.n_block if self.turn is None else substitute(
            self.n_block, {self.turn: Term("const", (), 0)}
        )

    def hits(self, n_block: Term) -> Term:
        """Tile `n_block` is among them. Tiles go down by one each turn; `steps` claims it."""
        hit = and_(self.happens, eq(self.n_block, n_block))
        return hit if self.turn is None else substitute(hit, {self.turn: self.first - n_block})

    @property
    def steps(self) -> Term:
        return TRUE if self.turn is None else eq(self.n_block, self.first - self.turn)


def coverage(visible: Term, tile: Tile, visits: Sequence[Visit]) -> Term:
    """Every visible cell lies in a tile that is visited, once.

    `visible` is the mask in a kernel's indices. Loops go down by one tile a turn and stay at or
    above tile 0; no visit is past the last tile that holds a key.
    """
    hits = [visit.hits(N_BLOCK) for visit in visits]
    twice = [and_(a, b) for i, a in enumerate(hits) for b in hits[:i]]
    cell = and_(0 <= KV_IDX, KV_IDX < SEQLEN_K, *tile.keys(), visible)
    loops = [v for v in visits if v.turn is not None]
    return and_(
        implies(cell, or_(*hits)),
        *(not_(pair) for pair in twice),
        *(visit.steps for visit in loops),
        *(implies(visit.happens, 0 <= visit.n_block) for visit in loops),
        *(implies(visit.happens, (visit.n_block <= 0) | (visit.n_block * tile.tile_n < SEQLEN_K))
          for visit in visits),
    )


def interior_unmasked(visible: Term, tile: Tile, visits: Sequence[Visit]) -> Term:
    """No tile keeps a hidden cell: where nothing is masked every cell is visible, and where
    seqlen_k is not looked at no visible cell lies past it."""
    claims = []
    for visit in visits:
        cell = and_(visit.happens, *tile.keys(visit.n_block))
        inside = KV_IDX < SEQLEN_K
        if not visit.masked:
            claims.append(implies(cell, and_(visible, inside)))
        elif not visit.seqlen:
            claims.append(implies(and_(cell, visible), inside))
    return and_(*claims)


def splits_partition(low: Term, high: Term, whole_low: Term, whole_high: Term) -> Term:
    """The ranges [low, high) of splits 0 .. num_splits - 1 partition [whole_low, whole_high).

    The first begins at its low end, each ends where the next begins, cut at the high end, and the
    last ends there. A range that ends before it begins is empty.
    """
    def at(term: Term, split: Term) -> Term:
        return substitute(term, {SPLIT: split})

    last = SPLITS - 1
    return and_(
        eq(at(low, Term("const", (), 0)), whole_low),
        implies(SPLIT < last, eq(max_(high, whole_low), max_(min_(at(low, SPLIT + 1), whole_high),
                                                             whole_low))),
        eq(max_(at(high, last), whole_low), max_(whole_high, whole_low)),
        whole_low <= low,
        high <= max_(whole_high, whole_low),
    )
