"""Obligations of tile ranges: coverage, interior-unmasked, splits-partition, no-overflow.

One unit is one configuration of a kernel: a mode, a tile, a number of packed heads, with splits or
without. It lifts the real BlockInfo and main loop, compares them with their terms on the CPU, and
proves the claims of `spec.tiles` for every length, window and block of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from kernels.block_info import (
    MODES,
    Range,
    compare,
    compare_alone,
    modes_of,
    range_alone,
    visited,
)
from kernels.machine import CannotLift
from kernels.provider import Provider
from kernels.run_cute import Agreement, CannotRun
from proofs.checks import REAL, Announce, Options, Row
from proofs.mutants import of_faults
from proofs.obligation import (
    LIMIT,
    Limits,
    Mutant,
    Obligation,
    UnknownLimit,
    Verdict,
    largest,
    prove,
    range_of,
)
from proofs.sound import Disagreement, counted, resting, undecided
from proofs.tile_diagnosis import diagnosis
from spec.domain import BOTTOM_RIGHT, SEQLEN_K, SEQLEN_Q
from spec.sample import Array, Batch, evaluate
from spec.term import INT, TRUE, Term, and_, const, implies, postorder, substitute, sym, symbols
from spec.tiles import (
    BUILTIN,
    N_BLOCK,
    SPLIT,
    SPLITS,
    Tile,
    Visit,
    coverage,
    interior_unmasked,
    splits_partition,
)
from spec.to_text import to_text

LAYER, ARCH = "tiles", "sm_90"
MUTANTS = 8
MOST_SPLITS = 256
HEAD_DIMS = (128, 256)
ALL_HEAD_DIMS = (64, 96, 128, 192, 256)
PACKS, ALL_PACKS = (1, 4), (1, 2, 4, 8, 16)
LOW, HIGH = sym("n_block_min"), sym("n_block_max")
LEFT, RIGHT = sym("window_size_left"), sym("window_size_right")
# Blocks of rows and tiles of keys of FA4's SM80 and SM100 kernels.
OTHERS = {"sm_80": Tile(128, 64), "sm_100": Tile(256, 128)}
ALONE = ("each tile of BlockInfo's range taken as visited and masked: how this kernel goes through "
         "them is not lifted")
CELLS = 2500
FEW_BITS = 16


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way in which the SM90 forward kernel is compiled; of another architecture the range
    alone."""

    mode: str
    tile: Tile
    split: bool = False
    overlap: bool = True
    arch: str = ARCH

    @property
    def name(self) -> str:
        split = ",split" if self.split else ""
        overlap = "" if self.overlap else ",no-overlap"
        t = self.tile
        arch = "" if self.arch == ARCH else f",{self.arch}"
        return f"{self.mode}[{t.tile_m}x{t.tile_n},pack={t.pack}{split}{overlap}{arch}]"


def configurations(provider: Provider, *, full: bool = False) -> list[Configuration]:
    """Every configuration that the provider's own choice of tiles gives, each once; packed rows on
    more than the first tile, splits of them, and other architectures, only if `full`."""
    found: dict[Configuration, None] = {}
    for mode in modes_of(provider):
        flags = MODES[mode]
        for head_dim in ALL_HEAD_DIMS if full else HEAD_DIMS:
            chosen = provider.tile_size_sm90(head_dim, head_dim, flags.is_causal, flags.is_local)
            for pack in ALL_PACKS if full else packs(head_dim):
                tile = Tile(chosen.m_block_size, chosen.n_block_size, pack)
                for split in (False, True) if full or pack == PACKS[0] else (False,):
                    found[Configuration(mode, tile, split, chosen.intra_wg_overlap)] = None
    others = [Configuration(mode, replace(tile, pack=pack), arch=arch)
              for arch, tile in OTHERS.items() for mode, flags in MODES.items()
              if not flags.dynamic for pack in ALL_PACKS]
    return [*found, *(others if full else ())]


def packs(head_dim: int) -> tuple[int, ...]:
    """How many heads are packed on the tile of a head_dim, unless every number is asked for."""
    return PACKS if head_dim == HEAD_DIMS[0] else PACKS[:1]


@dataclass(frozen=True)
class Subject:
    """One configuration, lifted. `whole` is the range without splits."""

    target: str
    configuration: Configuration
    range: Range
    whole: Range
    limits: Limits

    @property
    def tile(self) -> Tile:
        return self.configuration.tile

    @cached_property
    def visible(self) -> Term:
        return BOTTOM_RIGHT(BUILTIN[self.configuration.mode])

    @cached_property
    def windows(self) -> tuple[Term, ...]:
        flags = MODES[self.configuration.mode]
        return (*((LEFT,) if flags.left else ()), *((RIGHT,) if flags.right else ()))

    def domain(self, limit: Term) -> tuple[Term, ...]:
        """Lengths and windows up to `limit`; the block of rows has a real one."""
        sizes = (SEQLEN_Q, SEQLEN_K, *self.windows)
        return (*((0 <= s) & (s <= limit) for s in sizes), *self.tile.domain)

    @cached_property
    def splits(self) -> tuple[Term, ...]:
        if not self.configuration.split:
            return ()
        return (0 <= SPLIT, SPLIT < SPLITS, SPLITS <= MOST_SPLITS)

    @cached_property
    def in_range(self) -> tuple[Term, ...]:
        """No operation leaves its width or is undefined, wherever it is done."""
        turns = {v.turn: v.happens for v in self.range.visits if v.turn is not None}

        def done(path: Term, term: Term) -> Term:
            used = [happens for turn, happens in turns.items()
                    if turn.value in symbols(term)]
            return and_(path, *used)

        steps = [implies(done(path, value), range_of(value, width))
                 for path, value, width, _ in self.range.arithmetic]
        defined = [implies(done(path, claim), claim) for path, claim, _ in self.range.conditions]
        return tuple(dict.fromkeys([*steps, *defined]))

    @cached_property
    def limit(self) -> int:
        """The largest length and window for which nothing overflows."""
        whole = replace(self, range=self.whole, configuration=replace(
            self.configuration, split=False)) if self.configuration.split else self
        found = largest(and_(*whole.in_range), whole.domain(sym(LIMIT)), self.limits)
        if found is None:
            raise UnknownLimit("operations overflow for every length")
        return found

    @cached_property
    def assumptions(self) -> tuple[Term, ...]:
        return (*self.domain(const(self.limit)), *self.splits)

    @cached_property
    def bounds(self) -> str:
        windows = [f"0 <= {w.value} <= N" for w in self.windows]
        splits = [f"1 <= num_splits <= {MOST_SPLITS}, symbolic"] if self.configuration.split else []
        alone = [ALONE] if self.configuration.arch != ARCH else []
        return ", ".join([f"N = {self.limit}", "seqlen_q and seqlen_k <= N", *windows, *splits,
                          "blocks of rows that hold a real row", *alone])

    @cached_property
    def corpus(self) -> Batch:
        found = cells(np.random.default_rng(5), self.tile, CELLS)
        keep = np.logical_and.reduce([evaluate(a, found) for a in self.assumptions])
        return found.select(keep)

    def obligation(self, name: str, claim: Term, **fields: Any) -> Obligation:
        return Obligation(
            target=self.target, name=name, spec=self.configuration.mode, claim=claim,
            bounds=self.bounds, layer=LAYER, arch=self.configuration.arch,
            **{"assumptions": self.assumptions, **fields},
        )


def cells(rng: np.random.Generator, tile: Tile, count: int) -> Batch:
    """Random cells in blocks of rows, with windows, splits and turns of loops."""
    def number(*choices: int) -> Array:
        near = rng.integers(0, 3 * max(tile.tile_m, tile.tile_n), count)
        return np.where(rng.random(count) < 0.3, rng.choice(choices, count), near)

    m_block = rng.integers(0, 4, count)
    row = m_block * tile.tile_m + rng.integers(0, tile.tile_m, count)
    q_idx = row // tile.pack
    kv_idx = number(0, tile.tile_n - 1, tile.tile_n)
    splits = rng.integers(1, 9, count)
    lengths = {
        "seqlen_q": q_idx + 1 + number(0, 1),
        "seqlen_k": np.maximum(kv_idx + rng.integers(-tile.tile_n, 3 * tile.tile_n, count), 0),
    }
    at = {
        "b": rng.integers(0, 8, count), "m_block": m_block, "row": row, "q_idx": q_idx,
        "kv_idx": kv_idx, "n_block": kv_idx // tile.tile_n, **lengths,
        "window_size_left": number(0, 1, tile.tile_n), "psc": rng.integers(0, 2, count),
        "window_size_right": number(0, 1, tile.tile_n), "num_splits": splits,
        "split_idx": rng.integers(0, splits), "n_block_min": rng.integers(0, 4, count),
        "n_block_max": rng.integers(-1, 8, count),
        **{f"turn_{i}": rng.integers(0, 5, count) for i in range(4)},
    }
    return Batch({}, at, {"dynamic_causal": rng.integers(0, 2, 8).astype(np.int32)})


Claim = Callable[[Range], Term]


def code_mutants(
    tried: Iterator[tuple[str, Range]], claim: Claim, corpus: Batch
) -> tuple[Mutant, ...]:
    """Faults in the code under proof, each of which breaks the claim on cells of its own."""
    return of_faults(((phrase, claim(range_)) for phrase, range_ in tried), corpus, MUTANTS)


def faults(range_: Range) -> Iterator[tuple[str, Range]]:
    """The range with one bound off by one, or a min for a max, or another fault in one term."""
    yield from off_by_one(range_)
    for name, bound in (("n_block_min", range_.low), ("n_block_max", range_.high)):
        for old in postorder(bound):
            for wrong in wrongly(old):
                phrase = f"{name} with `{to_text(wrong)[:60]}` for `{to_text(old)[:60]}`"
                yield phrase, put(range_, bound, substitute(bound, {old: wrong}))
    yield from with_visits(range_)
    for i, visit in enumerate(range_.visits):
        if visit.masked:
            yield f"visit {i} without a mask", with_visit(
                range_, i, replace(visit, masked=False, seqlen=False))
        if visit.seqlen:
            yield f"visit {i} without seqlen_k", with_visit(range_, i, replace(visit, seqlen=False))


def with_visits(range_: Range) -> Iterator[tuple[str, Range]]:
    """The range with one visit that takes other tiles."""
    for i, visit in enumerate(range_.visits):
        if visit.count is not None:
            for phrase, by in (("more", 1), ("less", -1)):
                yield f"loop {i} a turn {phrase}", with_visit(
                    range_, i, replace(visit, count=visit.count + by))
        yield f"visit {i} a tile lower", with_visit(
            range_, i, replace(visit, n_block=visit.n_block - 1))


def with_visit(range_: Range, i: int, visit: Visit) -> Range:
    return replace(range_, visits=(*range_.visits[:i], visit, *range_.visits[i + 1:]))


def off_by_one(range_: Range) -> Iterator[tuple[str, Range]]:
    """The range with one end off: of splits, an overlap or a gap."""
    for name, bound in (("n_block_min", range_.low), ("n_block_max", range_.high)):
        for phrase, wrong in (("one higher", bound + 1), ("one lower", bound - 1)):
            yield f"{name} {phrase}", put(range_, bound, wrong)


def put(range_: Range, old: Term, new: Term) -> Range:
    return range_.map(lambda term: substitute(term, {old: new}))


def wrongly(node: Term) -> Iterator[Term]:
    """The usual faults at one node of an index."""
    match node.op:
        case "min" | "max":
            yield Term("max" if node.op == "min" else "min", node.args)
            yield from node.args
        case "const" if node.sort == INT and node.value > 0:
            yield node + 1
            yield node - 1
        case "floordiv":
            yield node + 1
        case "sym":
            yield node + 1
            yield node - 1


def no_overflow(subject: Subject) -> Obligation:
    claims = subject.in_range
    values = list(dict.fromkeys(value for _, value, _, _ in subject.range.arithmetic))
    # Where no operation on a length can overflow, the end of the range shows what would.
    sized = [v for v in values if symbols(v) & {"seqlen_k", "m_block"}] or [subject.range.high]
    # A mutant in products of symbols takes the solver longer than it is worth.
    some = [v for v in sized if "num_splits" not in symbols(v)] or sized
    some = some[:: max(1, len(some) // 4)]
    mutants = tuple(
        Mutant(f"`{to_text(v)[:60]}` in {FEW_BITS} bits", range_of(v, FEW_BITS)) for v in some[:4]
    )
    return subject.obligation("no-overflow", and_(*claims), mutants=mutants)


@dataclass(frozen=True)
class Stated:
    """An obligation, and its claim of another range in place of its own."""

    obligation: Obligation
    range: Range
    claim: Claim
    corpus: Batch


def stated(
    subject: Subject, name: str, range_: Range, claim: Claim, corpus: Batch,
    tried: Iterator[tuple[str, Range]], **fields: Any,
) -> Stated:
    made = subject.obligation(name, claim(range_), mutants=code_mutants(tried, claim, corpus),
                              **fields)
    return Stated(made, range_, claim, corpus)


def covers(subject: Subject) -> Stated:
    """Without splits: every visible cell is visited once."""
    def claim(range_: Range) -> Term:
        return coverage(subject.visible, subject.tile, range_.visits)

    return stated(subject, "coverage", subject.range, claim, subject.corpus,
                  faults(subject.range))


def interior(subject: Subject) -> Stated:
    def claim(range_: Range) -> Term:
        return interior_unmasked(subject.visible, subject.tile, range_.visits)

    return stated(subject, "interior-unmasked", subject.range, claim, subject.corpus,
                  faults(subject.range))


def obligations(subject: Subject) -> Iterator[Stated]:
    if subject.configuration.split:
        yield from split_obligations(subject)
    else:
        yield covers(subject)
        if subject.configuration.arch == ARCH:
            yield interior(subject)
    yield Stated(no_overflow(subject), subject.range, lambda range_: TRUE, subject.corpus)


def split_obligations(subject: Subject) -> Iterator[Stated]:
    """Splits partition the range; and each visits its own part, which is any part of it.

    The ends of a split's part are symbols in the second and third claim: what the first has shown
    of them is assumed.
    """
    whole = subject.whole

    def partition(range_: Range) -> Term:
        return splits_partition(range_.low, range_.high, whole.low, whole.high)

    # On products of symbols the solver may give up on other mutants than these.
    yield stated(subject, "splits-partition", subject.range, partition, subject.corpus,
                 off_by_one(subject.range))
    if not subject.range.visits:
        return
    ends = {subject.range.low: LOW, subject.range.high: HIGH}
    part = subject.range.map(lambda term: substitute(term, ends))
    inside = (whole.low <= LOW, HIGH <= whole.high, LOW < HIGH)
    assumed = (*subject.domain(const(subject.limit)), *inside)
    keep = np.logical_and.reduce([evaluate(a, subject.corpus) for a in inside])
    corpus = subject.corpus.select(keep)

    def own(range_: Range) -> Term:
        return and_(
            coverage((LOW <= N_BLOCK) & (N_BLOCK < HIGH), subject.tile, range_.visits),
            *(implies(v.happens, (LOW <= v.n_block) & (v.n_block < HIGH)) for v in range_.visits),
        )

    def hidden(range_: Range) -> Term:
        return interior_unmasked(subject.visible, subject.tile, range_.visits)

    for name, claim in (("coverage", own), ("interior-unmasked", hidden)):
        yield stated(subject, name, part, claim, corpus, faults(part), assumptions=assumed)


def lifted(provider: Provider, configuration: Configuration) -> tuple[Range, Range]:
    """The configuration's range and visits, and the same range without splits."""
    c = configuration
    mode = MODES[c.mode]
    if c.arch != ARCH:
        alone = range_alone(provider, mode, c.tile, c.arch)
        return alone, alone
    whole = visited(provider, mode, c.tile, False, c.overlap)
    if not c.split:
        return whole, whole
    return visited(provider, mode, c.tile, True, c.overlap), whole


def of_configuration(
    provider: Provider, configuration: Configuration, options: Options = Options()
) -> list[Row]:
    """The rows of one unit. The provider is served."""
    target = f"{provider.name}/{LAYER}/{configuration.name}"
    try:
        range_, whole = lifted(provider, configuration)
    except CannotLift as refusal:
        return [failed(target, configuration, Verdict.UNSUPPORTED, str(refusal))]
    subject = Subject(target, configuration, range_, whole, options.limits)
    try:
        compared = compare_with_code(provider, subject) if options.thorough else None
        made = list(obligations(subject))
        results = [counted(prove(each.obligation, options.limits)) for each in made]
        why = [diagnosis(subject, each, made, result, options.limits)
               for each, result in zip(made, results, strict=True)]
    except UnknownLimit as error:
        return [failed(target, configuration, Verdict.UNKNOWN, f"resource limit: {error}")]
    except Disagreement as error:
        return [failed(target, configuration, Verdict.ERROR, str(error))]
    replayed = REAL if compared is not None else None
    sound = resting(results, rests_on(configuration))
    return wanted([Row(result, replayed, compared, diagnosis=said, fa4=provider.name)
                   for result, said in zip(sound, why, strict=True)], options)


def rests_on(configuration: Configuration) -> dict[str, tuple[str, ...]]:
    """A claim about a part of the range is about the range where the parts are what they are
    taken for."""
    of_part = ("no-overflow", *(("splits-partition",) if configuration.split else ()))
    return {"coverage": of_part, "interior-unmasked": of_part, "splits-partition": ("no-overflow",)}


def wanted(rows: Sequence[Row], options: Options) -> list[Row]:
    """Those of the obligations that were asked for; all were proved, for some rest on others."""
    return [row for row in rows
            if not options.obligations or row.result.obligation.name in options.obligations]


def compare_with_code(provider: Provider, subject: Subject) -> Agreement:
    """Runs the real BlockInfo and main loop on random numbers beside their terms."""
    at = cells(np.random.default_rng(9), subject.tile, 2000)
    table = at.tables["dynamic_causal"]
    columns = {**at.cells, "psc": table[at.cells["b"]]}
    c = subject.configuration

    def value(term: Term) -> Array:
        return evaluate(term, at)

    try:
        found = compare_alone(
            provider, MODES[c.mode], c.tile, columns, subject.range, value
        ) if c.arch != ARCH else compare(
            provider, MODES[c.mode], c.tile, c.split, c.overlap, columns, subject.range, value)
    except CannotRun as error:
        raise Disagreement(f"the real code did not run on the CPU: {error}") from None
    if found.mismatch is not None:
        raise Disagreement(f"the real code and its terms differ at {dict(found.mismatch)}")
    return found


def failed(target: str, configuration: Configuration, verdict: Verdict, reason: str) -> Row:
    return Row(undecided(target, "coverage", configuration.mode, verdict, reason, layer=LAYER,
                         arch=configuration.arch))


def rows(provider: Provider, options: Options = Options(), announce: Announce = lambda text: None,
         *, full: bool = False) -> Iterator[Row]:
    with provider.served():
        for configuration in configurations(provider, full=full):
            announce(f"{provider.name}/{LAYER}/{configuration.name}")
            yield from of_configuration(provider, configuration, options)

