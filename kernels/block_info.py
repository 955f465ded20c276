"""Which tiles of keys FA4 visits for a block of rows, as terms: `BlockInfo` and the main loop."""

from __future__ import annotations

import ast
import functools
import mmap
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import kernels.environment  # noqa: F401  (before cutlass)

# isort: split
import cutlass.cute as cute
import numpy as np
from cutlass import Int32
from cutlass.cute.runtime import from_dlpack

from kernels.from_cute import entries, walk_module
from kernels.machine import CannotLift, Num
from kernels.main_loop import Flags, main_loop, record
from kernels.provider import Provider, parsed
from kernels.run_cute import Agreement, first_difference, in_child
from kernels.trace import descriptor, guarded, lines_kept
from kernels.walk import Tensor, Walk
from spec.term import Term, const, read, substitute, sym
from spec.tiles import Tile, Visit


@dataclass(frozen=True, slots=True)
class Mode:
    """How a kernel is compiled: FA4's flags, which window sides are numbers, and whether a tensor
    says for each sequence if it is causal."""

    is_causal: bool = False
    is_local: bool = False
    left: bool = False
    right: bool = False
    dynamic: bool = False


MODES: Mapping[str, Mode] = {
    "full": Mode(),
    "causal": Mode(is_causal=True),
    "local": Mode(is_local=True, left=True, right=True),
    "local-left": Mode(is_local=True, left=True),
    "local-right": Mode(is_local=True, right=True),
    "dynamic_causal": Mode(is_causal=True, dynamic=True),
    "dynamic_causal-local": Mode(is_local=True, left=True, right=True, dynamic=True),
}

NUMBERS = ("seqlen_q", "seqlen_k", "m_block", "split_idx", "num_splits", "window_size_left",
           "window_size_right", "psc")
TURNS = tuple(f"turn_{i}" for i in range(4))
PSC = {sym("psc"): read("dynamic_causal", sym("b"))}


@dataclass(frozen=True, slots=True)
class Range:
    """The tiles [low, high) of a block of rows, and what they depend on: see `Lifted`."""

    low: Term
    high: Term
    visits: tuple[Visit, ...]
    arithmetic: tuple[tuple[Term, Term, int, str], ...]
    conditions: tuple[tuple[Term, Term, str], ...]
    operations: int

    def map(self, change: Callable[[Term], Term]) -> Range:
        """The same with every term of its tiles changed."""
        visits = tuple(
            replace(v, n_block=change(v.n_block), taken=change(v.taken),
                    count=v.count if v.count is None else change(v.count))
            for v in self.visits
        )
        return replace(self, low=change(self.low), high=change(self.high), visits=visits)


@dataclass(frozen=True, slots=True)
class SeqlenInfo:
    """What BlockInfo asks of FA4's SeqlenInfoQK."""

    seqlen_q: Any
    seqlen_k: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise CannotLift(f"seqlen_info.{name}: not modelled: it depends on the launch")


def block_info(provider: Provider, mode: Mode, tile: Tile, split: bool, given: Mapping[str, Any]
               ) -> Any:
    cls = provider.module("block_info").BlockInfo
    # Elsewhere the main loop says for each range how many splits there are.
    whole = {"num_splits": given["num_splits"]} if "num_splits" in cls.__dataclass_fields__ else {}
    return cls(
        tile.tile_m, tile.tile_n, mode.is_causal, mode.is_local, split,
        given["window_size_left"] if mode.left else None,
        given["window_size_right"] if mode.right else None,
        qhead_per_kvhead_packgqa=tile.pack, **whole,
    )


def visited(provider: Provider, mode: Mode, tile: Tile, split: bool, overlap: bool) -> Range:
    """What the main loop of the SM90 forward kernel visits. `overlap` is its `intra_wg_overlap`.

    Where no SM90 kernel splits keys, a range with splits is BlockInfo's alone, without visits.
    """
    work, visits_of = _work(provider, mode, tile, split, overlap)
    (low, high, *rest), walk = lifted(work)
    made = visits_of()
    visits, counts = [], iter(rest[len(made):])
    turns = iter(TURNS)
    for one, n_block in zip(made, rest, strict=False):
        loops = one.count is not None
        visits.append(Visit(
            n_block, one.masked, one.seqlen, turn=sym(next(turns)) if loops else None,
            count=next(counts) if loops else None,
            taken=low < high if split else const(True),
        ))
    return _range(walk, low, high, tuple(visits))


# The files of the kernels whose main loop is not lifted, and the rows of a block in their words.
KERNELS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "sm_80": ("flash_fwd.py", "FlashAttentionForwardSm80", ("self.tile_m",)),
    "sm_100": ("flash_fwd_sm100.py", "FlashAttentionForwardSm100",
               ("self.cta_tiler[0]", "self.cta_tiler[0] * self.cta_group_size")),
}
FLAGS_OF_SM90 = ["self.is_causal", "self.is_local", "window_size_left", "window_size_right"]
PACKED = "self.qhead_per_kvhead if const_expr(self.pack_gqa) else 1"


@functools.cache
def made_alike(provider: Provider, arch: str) -> None:
    """Makes sure that another kernel makes its BlockInfo as SM90's does, and asks it for ranges of
    this file's form; raises CannotLift."""
    file, name, rows = KERNELS[arch]
    cls = next((n for n in parsed(provider.folder / file).body
                if isinstance(n, ast.ClassDef) and n.name == name), None)
    if cls is None:
        raise CannotLift(f"{file} has no class {name}")
    calls = [n for n in ast.walk(cls)
             if isinstance(n, ast.Call) and ast.unparse(n.func) == "BlockInfo"]
    if len(calls) != 1:
        raise CannotLift(f"{name} makes BlockInfo {len(calls)} times")
    given = list(map(ast.unparse, calls[0].args))
    named = {each.arg: ast.unparse(each.value) for each in calls[0].keywords}
    if len(given) != 7 or given[0] not in rows or [*given[2:4], *given[5:]] != FLAGS_OF_SM90 or \
            named.get("qhead_per_kvhead_packgqa") != PACKED:
        raise CannotLift(f"{name} makes BlockInfo in another way than is known")


def range_alone(provider: Provider, mode: Mode, tile: Tile, arch: str) -> Range:
    """The range that BlockInfo gives a kernel whose main loop is not lifted, without splits: one
    visit for each of its tiles, masked."""
    made_alike(provider, arch)
    (low, high), walk = lifted(_alone(provider, mode, tile, False))
    turn = sym(TURNS[0])
    every = Visit(high - 1 - turn, True, True, turn=turn, count=high - low)
    return _range(walk, low, high, (every,))


def compare_alone(
    provider: Provider, mode: Mode, tile: Tile, columns: Mapping[str, np.ndarray[Any, Any]],
    range_: Range, value: Callable[[Term], np.ndarray[Any, Any]],
) -> Agreement:
    """As `compare`, of a range of `range_alone`."""
    return _compared(_alone(provider, mode, tile, False), columns, [range_.low, range_.high], value)


Work = Callable[[Mapping[str, Any]], list[Any]]


def _alone(provider: Provider, mode: Mode, tile: Tile, split: bool) -> Work:
    """BlockInfo's range as a function of numbers."""
    def work(given: Mapping[str, Any]) -> list[Any]:
        info = block_info(provider, mode, tile, split, given)
        seqlen = SeqlenInfo(given["seqlen_q"], given["seqlen_k"])
        return list(info.get_n_block_min_max(
            seqlen, given["m_block"], given["split_idx"], given["num_splits"]
        ))

    return work


def _work(
    provider: Provider, mode: Mode, tile: Tile, split: bool, overlap: bool
) -> tuple[Work, Callable[[], list[Any]]]:
    """The real main loop as a function of numbers, and what it last visited."""
    loop = main_loop(provider)
    if mode.dynamic and not loop.knows_dynamic_causal:
        raise CannotLift("main loop: it reads no flag per sequence")
    if split and not loop.drops_empty_splits:
        return _alone(provider, mode, tile, split), lambda: []
    made: list[Any] = [[]]

    def work(given: Mapping[str, Any]) -> list[Any]:
        info = block_info(provider, mode, tile, split, given)
        seqlen = SeqlenInfo(given["seqlen_q"], given["seqlen_k"])
        flags = Flags(mode.is_causal, mode.is_local, split, overlap, tile.tile_n,
                      True if mode.dynamic else None)
        stand_ins = {**given, "seqlen": seqlen, "block_info": info}
        recorder = record(loop, flags, [given[turn] for turn in TURNS], stand_ins)
        made[:] = [recorder.visits]
        if recorder.range is None:
            raise CannotLift("main loop: no range was reported")
        counts = [v.count for v in recorder.visits if v.count is not None]
        return [*recorder.range, *(v.n_block for v in recorder.visits), *counts]

    return work, lambda: made[0]


def _range(walk: Walk, low: Term, high: Term, visits: tuple[Visit, ...]) -> Range:
    return Range(
        low, high, visits,
        arithmetic=tuple((_psc(path), _psc(value), width, at)
                         for (value, width), path, at in entries(walk.arithmetic)),
        conditions=tuple((_psc(path), _psc(claim), at)
                         for claim, path, at in entries(walk.conditions)),
        operations=walk.operations,
    )


def _psc(term: Term) -> Term:
    return substitute(term, PSC)


MOST_NUMBERS = 32


def traced(work: Work, names: tuple[str, ...], lines: AbstractContextManager[None]) -> Any:
    """The IR of `work`, which gives numbers from those of `names`; inside `lines_kept` with the
    place of each operation."""

    @cute.jit(preprocess=False)
    def host(out: cute.Tensor, numbers: list):
        for i, value in enumerate(work(dict(zip(names, numbers, strict=True)))):
            out[i] = Int32(value)

    out = from_dlpack(np.zeros(MOST_NUMBERS, np.int32))
    with lines:
        return guarded(
            lambda: cute.compile(host, out, [Int32(0)] * len(names), no_jit_engine=True), ()
        )


def lifted(work: Work, names: tuple[str, ...] = (*NUMBERS, *TURNS)) -> tuple[list[Term], Walk]:
    """The numbers that `work` gives, as terms in `names`."""
    try:
        return _lifted(work, names, nullcontext())
    except CannotLift:
        # To keep lines takes time, and only a refusal shows them.
        return _lifted(work, names, lines_kept())


def _lifted(
    work: Work, names: tuple[str, ...], lines: AbstractContextManager[None]
) -> tuple[list[Term], Walk]:
    walk = Walk((), ())
    arguments = (Tensor(("out",)), *(Num(sym(name), 32) for name in names))
    memory = walk_module(walk, traced(work, names, lines).ir_module, arguments)
    words = {key[1]: word for key, word in memory.items() if key[0] == ("out",)}
    return [_psc(walk.number(words[i])) for i in range(len(words))], walk


def modes_of(provider: Provider) -> list[str]:
    """The modes that the provider's main loop has."""
    dynamic = main_loop(provider).knows_dynamic_causal
    return [name for name, mode in MODES.items() if dynamic or not mode.dynamic]


def has_splits(provider: Provider) -> bool:
    """Whether the provider's SM90 forward kernel splits the keys of a block of rows."""
    return main_loop(provider).drops_empty_splits


def compare(
    provider: Provider, mode: Mode, tile: Tile, split: bool, overlap: bool,
    columns: Mapping[str, np.ndarray[Any, Any]], range_: Range,
    value: Callable[[Term], np.ndarray[Any, Any]],
) -> Agreement:
    """Runs the real code on `columns`, an int32 array for each of NUMBERS and TURNS, and compares
    what it gives with the terms, whose values `value` knows."""
    work, _ = _work(provider, mode, tile, split, overlap)
    counts = [v.count for v in range_.visits if v.count is not None]
    terms = [range_.low, range_.high, *(v.n_block for v in range_.visits), *counts]
    return _compared(work, columns, terms, value)


def _compared(
    work: Work, columns: Mapping[str, np.ndarray[Any, Any]], terms: Sequence[Term],
    value: Callable[[Term], np.ndarray[Any, Any]],
) -> Agreement:
    expected = np.stack([np.broadcast_to(value(t), len(columns["b"])) for t in terms], axis=-1)
    got = run(work, columns, len(terms))
    return Agreement(
        cells=expected.size, visible=0, left_out=0, uncovered=(),
        mismatch=first_difference(columns, expected, got),
    )


def run(
    work: Callable[[Mapping[str, Any]], list[Any]], columns: Mapping[str, np.ndarray[Any, Any]],
    width: int, names: tuple[str, ...] = (*NUMBERS, *TURNS),
) -> np.ndarray[Any, Any]:
    """The numbers that `work` gives for those of `names`, compiled for this CPU: int32
    [cells, width]."""
    table = np.ascontiguousarray(np.stack([np.asarray(columns[n], np.int32) for n in names]))
    shared = mmap.mmap(-1, 4 * width * table.shape[1])
    out = np.frombuffer(shared, np.int32).reshape(-1, width)

    def one_cell(out: Any, table: Any, i: Any) -> None:
        given = {name: table[k, i] for k, name in enumerate(names)}
        for j, value in enumerate(work(given)):
            out[i, j] = Int32(value)

    @cute.jit
    def host(out: cute.Tensor, table: cute.Tensor, count: Int32):
        for i in range(count):
            one_cell(out, table, i)

    def execute() -> None:
        arguments = (descriptor(out), descriptor(table), Int32(len(out)))
        cute.compile(host, *arguments)(*arguments)

    in_child(execute, 60)
    return out
