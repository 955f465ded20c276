"""Obligations of built-in masks: element-mask, row-limit, ownership, reads-in-bounds, no-overflow.

`apply_mask` is lifted for one thread of a fragment: *ownership* and *row-limit* show once, from the
thread's number, where it lies in the tile and what other lanes pass on to it; *element-mask* then
speaks of each element with that.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kernels.block_info import MODES
from kernels.builtin import (
    LANES,
    NUMBERS,
    THREAD,
    VISIBLE,
    Batch,
    Element,
    Fragment,
    knows_dynamic_causal,
    lift,
    run,
)
from kernels.machine import CannotLift
from kernels.provider import Provider
from kernels.run_cute import Agreement, CannotRun, first_difference
from proofs.checks import REAL, Announce, Options, Row
from proofs.element_diagnosis import diagnosis
from proofs.fragment import (
    BATCH,
    DIVISION,
    HEAD,
    LAYER,
    MASK_MOD,
    SHUFFLES,
    Configuration,
    Subject,
    calls,
    wrapped,
    wrapping,
)
from proofs.mutants import of_faults
from proofs.obligation import (
    Limits,
    Mutant,
    Obligation,
    Result,
    UnknownLimit,
    Verdict,
    prove,
    range_of,
)
from proofs.sound import Disagreement, counted, resting, undecided
from proofs.tiles import ALL_HEAD_DIMS, ALL_PACKS, HEAD_DIMS, packs, wanted
from spec.domain import INT32_MAX, PADDING, SEQLEN_K, SEQLEN_Q
from spec.sample import Array, evaluate
from spec.term import TRUE, Term, and_, const, eq, implies, read, substitute, sym, symbols
from spec.tiles import M_BLOCK, Tile

OLD_ARCH, NEW_ARCH = "sm_80", "sm_100"
# The tiles of FA4's SM80 and SM100 kernels.
OLD_TILE, NEW_TILE = Tile(128, 64), Tile(128, 128)
CALLS, FEW_BITS, MUTANTS, ELEMENTS = 400, 8, 8, 11
NOT_ON_NEW = "apply_mask_sm100 with a mask_mod: how it wraps indices and packs keys is not modelled"


def configurations(provider: Provider, *, full: bool = False) -> list[Configuration]:
    """Every configuration that the provider's own choice of tiles gives, each once; unless `full`
    heads are packed on the first tile alone, and a mask_mod is on one."""
    found: dict[Configuration, None] = {}
    modes = [m for m, flags in MODES.items() if not flags.dynamic or knows_dynamic_causal(provider)]
    for mode in (*modes, MASK_MOD):
        flags = MODES["full" if mode == MASK_MOD else mode]
        few = 1 if mode == MASK_MOD else None
        for head_dim in ALL_HEAD_DIMS if full else HEAD_DIMS[:few]:
            chosen = provider.tile_size_sm90(head_dim, head_dim, flags.is_causal, flags.is_local)
            for pack in ALL_PACKS if full else packs(head_dim)[:few]:
                tile = Tile(chosen.m_block_size, chosen.n_block_size, pack)
                for reads_aux in _wrapped(mode, full):
                    found[Configuration(mode, tile, reads_aux)] = None
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


def lifted(
    provider: Provider, configuration: Configuration, target: str, limits: Limits
) -> list[Subject]:
    found: list[Subject] = []
    longest = INT32_MAX
    for variant in configuration.variants:
        fragment = lift(provider, variant)
        found.append(Subject(target, configuration, variant, fragment, limits, longest))
        longest = found[-1].limit
    return found


def _rows(
    subjects: Sequence[Subject], compared: Sequence[Agreement], limits: Limits
) -> Iterator[Row]:
    shown = None
    for i, subject in enumerate(subjects):
        agreement = compared[i] if compared else None
        made = list(obligations(subject, first=subject.thread != shown))
        shown = subject.thread
        replayed = REAL if agreement is not None else None
        yield from (row_of(subject, proved(o, limits), replayed, agreement, limits) for o in made)


def of_configuration(
    provider: Provider, configuration: Configuration, options: Options = Options()
) -> list[Row]:
    """The rows of one unit. The provider is served."""
    target = f"{provider.name}/{LAYER}/{configuration.name}"
    if configuration.arch == NEW_ARCH and configuration.mode == MASK_MOD:
        return [failed(target, configuration, Verdict.UNSUPPORTED, NOT_ON_NEW)]
    try:
        subjects = lifted(provider, configuration, target, options.limits)
        compared = compare_with_code(provider, subjects) if options.thorough else []
        rows = list(_rows(subjects, compared, options.limits))
    except CannotLift as refusal:
        return [failed(target, configuration, Verdict.UNSUPPORTED, str(refusal))]
    except UnknownLimit as error:
        return [failed(target, configuration, Verdict.UNKNOWN, f"resource limit: {error}")]
    except Disagreement as error:
        return [failed(target, configuration, Verdict.ERROR, str(error))]
    names = {row.result.obligation.name for row in rows}
    needed = ("no-overflow", *(name for name in OF_THREAD if name in names))
    results = resting([row.result for row in rows], dict.fromkeys(OF_ELEMENTS, needed))
    return wanted([replace(row, result=result, fa4=provider.name)
                   for row, result in zip(rows, results, strict=True)], options)


def row_of(
    subject: Subject, result: Result, replayed: str | None, compared: Agreement | None,
    limits: Limits,
) -> Row:
    why = diagnosis(subject, result, limits) if result.verdict is Verdict.REFUTED else None
    return Row(counted(result), replayed, compared, diagnosis=why)


# What is shown of elements rests on what is shown of the thread.
OF_THREAD, OF_ELEMENTS = ("ownership", "row-limit", "wrapped-index"), (
    "element-mask", "reads-in-bounds")


def proved(obligation: Obligation, limits: Limits) -> Result:
    """As `prove`; what many masks on one tile have in common is proved once in a process."""
    if obligation.name not in OF_THREAD or limits.smtlib is not None:
        return prove(obligation, limits)
    found = _once(replace(obligation, target="", arch=""), limits)
    return replace(found, obligation=obligation)


@functools.cache
def _once(obligation: Obligation, limits: Limits) -> Result:
    return prove(obligation, limits)


def compare_with_code(provider: Provider, subjects: Sequence[Subject]) -> list[Agreement]:
    """Runs the real method on random threads and blocks beside the terms of each subject."""
    batches, expected = zip(*map(_batch, subjects), strict=True)
    try:
        got = run(provider, batches)
    except CannotRun as error:
        raise Disagreement(f"the real code did not run on the CPU: {error}") from None
    for batch, meant, kept in zip(batches, expected, got, strict=True):
        if (mismatch := first_difference(batch.columns, meant, kept)) is not None:
            raise Disagreement(f"the real code and its terms differ at {mismatch}")
    return [Agreement(cells=meant.size, visible=int(meant.sum()), left_out=0, uncovered=(),
                      mismatch=None) for meant in expected]


def _batch(subject: Subject) -> tuple[Batch, Array]:
    """Random calls, and what the terms say that each element is."""
    at = calls(np.random.default_rng(13), subject, CALLS)
    at = at.select(at.cells["seqlen_k"] > 0)
    words = np.zeros((len(at.cells["b"]), LANES), np.int32)
    for word, lane in subject.fragment.lanes.items():
        words[:, lane] = at.cells[word.value]
    table = at.tables.get(VISIBLE, np.zeros((1, 1, 1, 1), np.int32))
    memo: dict[Term, Any] = {}
    expected = np.stack([evaluate(e.kept, at, memo) for e in subject.fragment.elements], axis=-1)
    return Batch(subject.variant, {n: at.cells[n] for n in NUMBERS}, table, words), expected


def failed(target: str, configuration: Configuration, verdict: Verdict, reason: str) -> Row:
    return Row(undecided(target, "element-mask", configuration.mode, verdict, reason,
                         layer=LAYER, arch=configuration.arch))


def rows(provider: Provider, options: Options = Options(), announce: Announce = lambda text: None,
         *, full: bool = False) -> Iterator[Row]:
    with provider.served():
        for configuration in configurations(provider, full=full):
            announce(f"{provider.name}/{LAYER}/{configuration.name}")
            yield from of_configuration(provider, configuration, options)

