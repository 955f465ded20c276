"""Whether five points tell what a block is, mask by mask: sampling-sound, no-overflow.

FA4 classifies a block by five cells of a mask_mod that sets `use_fast_sampling`. That is sound
where five visible points mean that every cell of the block is visible, and five hidden ones that
none is. Where it is not sound for every window, the smallest window from which on it is is found.

A mask_mod is taken as the spec that it is proved equal to. Five ranges stand for any number: each
point is visible by one range at most, and a cell that is visible though no point is, by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from kernels.machine import CannotLift
from kernels.provider import Provider
from kernels.run_cute import Agreement, CannotRun
from kernels.sampling import POINTS, Points, compare, points, switched_on
from kernels.vllm import CLAMP, WINDOW
from proofs.checks import REAL, Announce, Options, Row
from proofs.diagnosis import Diagnosis
from proofs.mutants import of_faults
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
from proofs.sound import Disagreement, counted, resting, undecided
from proofs.tiles import ALL_HEAD_DIMS, HEAD_DIMS, wanted
from spec.domain import (
    BOTTOM_RIGHT,
    Q_IDX,
    SEQLEN_K,
    SEQLEN_Q,
    Param,
    guarantees,
    lengths,
)
from spec.masks import Mask, find
from spec.sample import Batch, batch, evaluate
from spec.term import (
    Term,
    and_,
    bind,
    const,
    expand,
    implies,
    or_,
    substitute,
    sym,
)
from spec.tiles import KV_IDX, M_BLOCK, N_BLOCK, Tile

LAYER, ARCH = "sampling", "sm_90"
WINDOWED = sym("window")
# No window above this one is asked for: it is longer than any two tiles.
LONG_WINDOW = 2048
FEW_BITS = 16
CONSTANTS = {"num_ranges": POINTS}


@dataclass(frozen=True, slots=True)
class Configuration:
    mask: str
    tile: Tile

    @property
    def name(self) -> str:
        return f"{self.mask}[{self.tile.tile_m}x{self.tile.tile_n}]"


def configurations(provider: Provider, *, full: bool = False) -> list[Configuration]:
    """The masks for which a vLLM switches sampling on, on the tiles that FA4 chooses."""
    tiles = dict.fromkeys(
        Tile(chosen.m_block_size, chosen.n_block_size)
        for head_dim in (ALL_HEAD_DIMS if full else HEAD_DIMS)
        for chosen in (provider.tile_size_sm90(head_dim, head_dim, False, False),)
    )
    masks = [name for factory, names in switched_on(provider).items()
             for name in _masks(factory, names)]
    return [Configuration(mask, tile) for mask in masks for tile in tiles]


def _masks(factory: str, parameters: frozenset[str]) -> Iterator[str]:
    if "mm_prefix" in factory:
        yield "mm_prefix_no_window"
        if WINDOW in parameters:
            yield "mm_prefix"
        if CLAMP in parameters:
            yield "mm_prefix_clamped"
    elif "rswa" in factory:
        yield "rswa"


@dataclass(frozen=True)
class Subject:
    target: str
    mask: Mask
    tile: Tile
    points: Points
    limits: Limits

    def visible(self, q_idx: Term, kv_idx: Term) -> Term:
        formula = expand(BOTTOM_RIGHT(bind(self.mask.formula, CONSTANTS)))
        return substitute(formula, {Q_IDX: q_idx, KV_IDX: kv_idx})

    def sound(self, cells: Sequence[tuple[Term, Term]]) -> Term:
        """The points are real; all visible, the cell is; all hidden, it is hidden."""
        seen = [self.visible(q, kv) for q, kv in cells]
        cell = self.visible(Q_IDX, KV_IDX)
        real = (and_(0 <= q, q < SEQLEN_Q, 0 <= kv, kv < SEQLEN_K) for q, kv in cells)
        return and_(*real, implies(and_(*seen), cell), implies(cell, or_(*seen)))

    @property
    def params(self) -> dict[str, Param]:
        return {k: p for k, p in self.mask.params.items() if k not in CONSTANTS}

    def domain(self, limit: Term) -> tuple[Term, ...]:
        """A real cell of a block."""
        t = self.tile
        first, key = M_BLOCK * t.tile_m, N_BLOCK * t.tile_n
        given = guarantees(self.mask.params, self.mask.tables, CONSTANTS, BOTTOM_RIGHT)
        return (
            *lengths(limit, False), *map(expand, given), 0 <= M_BLOCK, 0 <= N_BLOCK,
            first <= Q_IDX, first + t.tile_m > Q_IDX, key <= KV_IDX, key + t.tile_n > KV_IDX,
        )

    @cached_property
    def in_range(self) -> Term:
        return and_(*dict.fromkeys(implies(path, range_of(value, width))
                                   for path, value, width, _ in self.points.arithmetic))

    @cached_property
    def limit(self) -> int:
        found = largest(self.in_range, self.domain(sym(LIMIT)), self.limits)
        if found is None:
            raise UnknownLimit("operations overflow for every length")
        return found

    @cached_property
    def corpus(self) -> Batch:
        rng = np.random.default_rng(4)
        found = batch(rng, self.params, self.mask.tables, constants=CONSTANTS, longest=400,
                      cells=4000)
        at = {**found.cells, "m_block": found.cells["q_idx"] // self.tile.tile_m,
              "n_block": found.cells["kv_idx"] // self.tile.tile_n}
        at |= {name: rng.integers(1, 300, len(at["b"])) for name in self.params}
        return Batch(found.params, at, found.tables)

    def obligation(self, name: str, claim: Term, **fields: Any) -> Obligation:
        made = {"spec": self.mask.name, **fields}
        free = [f"{name} symbolic" for name in self.params]
        ranges = ["any number of ranges"] if "ranges" in self.mask.tables else []
        bounds = ", ".join([f"N = {self.limit}", "seqlen_q and seqlen_k <= N", *free, *ranges,
                            "the mask_mod taken as its spec"])
        return Obligation(
            target=self.target, name=name, claim=claim, layer=LAYER, arch=ARCH, bounds=bounds,
            assumptions=self.domain(const(self.limit)), **made,
        )

    def smallest_window(self) -> int | None:
        """The window from which on sampling is sound, where it is for some."""
        wide = LONG_WINDOW - sym(LIMIT)
        assumed = (*self.domain(const(self.limit)), wide <= WINDOWED)
        found = largest(self.sound(self.points.cells), assumed, self.limits, top=LONG_WINDOW - 1)
        return None if found is None else LONG_WINDOW - found


def never_sound(subject: Subject, options: Options) -> Diagnosis:
    """That no smallest window up to LONG_WINDOW makes it sound, by one above it where it is not."""
    claim = implies(LONG_WINDOW <= WINDOWED, subject.sound(subject.points.cells))
    found = prove(subject.obligation("sampling-sound", claim), replace(options.limits, smtlib=None))
    beyond = found.witness.symbols["window"] if found.witness is not None else None
    return Diagnosis(
        f"five points are not enough for every window >= {LONG_WINDOW}, nor from a smaller one on: "
        f"they are not for a window of {beyond}", f"not for every window >= {LONG_WINDOW}",
        Verdict.PROVED if found.verdict is Verdict.REFUTED else Verdict.UNKNOWN)


def faults(subject: Subject) -> Iterator[tuple[str, Term]]:
    """Points that are left out or moved."""
    cells = subject.points.cells
    for i, (q, kv) in enumerate(cells):
        others = [*cells[:i], *cells[i + 1:]]
        yield f"without point {i}", subject.sound(others)
        yield f"point {i} a row lower", subject.sound([*others, (q + 1, kv)])
        yield f"point {i} a key later", subject.sound([*others, (q, kv + 1)])


def sampling_sound(subject: Subject) -> Obligation:
    return subject.obligation("sampling-sound", subject.sound(subject.points.cells),
                              mutants=of_faults(faults(subject), subject.corpus, 4))


def sound_from(subject: Subject, window: int) -> Obligation:
    """Sound from a window on; of one key less it is not."""
    claim = subject.sound(subject.points.cells)
    less = Mutant(f"window >= {window - 1}", implies(window - 1 <= WINDOWED, claim))
    return subject.obligation(
        "sampling-sound", implies(window <= WINDOWED, claim), mutants=(less,),
        spec=f"{subject.mask.name} where window >= {window}",
    )


def no_overflow(subject: Subject) -> Obligation:
    values = [v for _, v, _, _ in subject.points.arithmetic]
    mutants = tuple(Mutant(f"an index in {FEW_BITS} bits", range_of(v, FEW_BITS))
                    for v in dict.fromkeys(values) if v in (M_BLOCK * subject.tile.tile_m,
                                                            N_BLOCK * subject.tile.tile_n))
    return subject.obligation("no-overflow", subject.in_range, mutants=mutants)


def of_configuration(
    provider: Provider, configuration: Configuration, options: Options = Options()
) -> list[Row]:
    """The rows of one unit. The provider is served."""
    target = f"{provider.name}/{LAYER}/{configuration.name}"
    mask = find(configuration.mask)
    try:
        chosen = points(provider, configuration.tile)
        subject = Subject(target, mask, configuration.tile, chosen, options.limits)
        compared = compare_with_code(provider, subject) if options.thorough else None
        found = list(_decided(subject, options))
    except CannotLift as refusal:
        return [failed(target, mask, Verdict.UNSUPPORTED, str(refusal))]
    except UnknownLimit as error:
        return [failed(target, mask, Verdict.UNKNOWN, f"resource limit: {error}")]
    except Disagreement as error:
        return [failed(target, mask, Verdict.ERROR, str(error))]
    replayed = REAL if compared is not None else None
    return wanted([replace(row, replayed=replayed, compared=compared, fa4=provider.name)
                   for row in found], options)


def _decided(subject: Subject, options: Options) -> Iterator[Row]:
    overflow = counted(prove(no_overflow(subject), options.limits))
    yield Row(overflow)

    def resting_on_it(result: Result) -> Result:
        return list(resting([overflow, counted(result)], RESTS_ON))[-1]

    result = prove(sampling_sound(subject), options.limits)
    if result.verdict is not Verdict.REFUTED or "window" not in subject.params:
        yield Row(resting_on_it(result))
        return
    window = subject.smallest_window()
    if window is None:
        yield Row(result, diagnosis=never_sound(subject, options))
        return
    sound = resting_on_it(prove(sound_from(subject, window), options.limits))
    yield Row(result, diagnosis=Diagnosis(
        f"five points are enough for every window >= {window}, and not for {window - 1}",
        f"window >= {window}", sound.verdict))
    yield Row(sound)


RESTS_ON = {"sampling-sound": ("no-overflow",)}


def compare_with_code(provider: Provider, subject: Subject) -> Agreement:
    """Runs the real statements on random blocks beside their terms."""
    rng = np.random.default_rng(8)
    count, tile = 2000, subject.tile
    m_block, n_block = rng.integers(0, 4, count), rng.integers(0, 4, count)
    at = {
        "b": np.zeros(count, int), "tidx": rng.integers(0, POINTS, count), "m_block": m_block,
        "n_block": n_block, "seqlen_q": m_block * tile.tile_m + rng.integers(1, 300, count),
        "seqlen_k": n_block * tile.tile_n + rng.integers(1, 300, count),
    }
    known = Batch({}, at, {})
    try:
        found = compare(provider, tile, at, lambda term: evaluate(term, known))
    except CannotRun as error:
        raise Disagreement(f"the real code did not run on the CPU: {error}") from None
    if found.mismatch is not None:
        raise Disagreement(f"the real code and its terms differ at {dict(found.mismatch)}")
    return found


def failed(target: str, mask: Mask, verdict: Verdict, reason: str) -> Row:
    return Row(undecided(target, "sampling-sound", mask.name, verdict, reason, layer=LAYER,
                         arch=ARCH))


def rows(provider: Provider, options: Options = Options(), announce: Announce = lambda text: None,
         *, full: bool = False) -> Iterator[Row]:
    with provider.served():
        for configuration in configurations(provider, full=full):
            announce(f"{provider.name}/{LAYER}/{configuration.name}")
            yield from of_configuration(provider, configuration, options)
