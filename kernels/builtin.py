"""FA4's `AttentionMask.apply_mask` on SM90, SM80, SM100 as terms: which elements it keeps.

The real method runs inside a trace on a fragment whose elements are told apart by their value, for
a run-time thread, block, lengths and windows. An element is kept where it has its own value in the
end. Beside it stand the coordinates that the compiler's layout of the accumulator gives it.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import kernels.environment  # noqa: F401  (before cutlass)

# isort: split
import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
import cutlass.utils.hopper_helpers as hopper
import numpy as np
from cutlass import Float32, Int32, Uint32, Uint64
from cutlass._mlir.dialects import arith
from cutlass.cute.nvgpu import tcgen05
from cutlass.cute.runtime import from_dlpack
from cutlass.cutlass_dsl import CuTeDSL

from kernels.block_info import MODES, PSC, Mode, SeqlenInfo
from kernels.from_cute import entries, walk_module
from kernels.machine import CannotLift, Num
from kernels.memory import float_bits
from kernels.provider import Provider
from kernels.run_cute import in_child
from kernels.simplify import same
from kernels.trace import descriptor, guarded, lines_kept
from kernels.walk import Tensor, Walk
from spec.term import Term, const, substitute, sym
from spec.tiles import Tile

NUMBERS = ("thread", "m_block", "n_block", "seqlen_q", "seqlen_k", "window_size_left",
           "window_size_right", "psc", "batch", "head")
THREAD = sym("thread")
VISIBLE = "visible"
MOST_ELEMENTS = 1024
WARP_GROUP, ROWS_OF_GROUP = 128, 64


@dataclass(frozen=True, slots=True)
class Variant:
    """How `apply_mask` is called: for a mode or with a mask_mod inside, and whether keys past the
    end are to be hidden. `wrapped` gives it FA4's fast divisors for the indices of aux tensors."""

    mode: str
    tile: Tile
    seqlen: bool
    mask_mod: bool = False
    wrapped: bool = False
    arch: str = "sm_90"

    @property
    def flags(self) -> Mode:
        return MODES[self.mode]

    @property
    def threads(self) -> int:
        groups = self.tile.tile_m // ROWS_OF_GROUP if self.arch == "sm_90" else 1
        return WARP_GROUP * groups


@dataclass(frozen=True, slots=True)
class Element:
    """One element of a thread's fragment: where it lies in the tile, and whether it is kept."""

    row: Term
    col: Term
    kept: Term


@dataclass(frozen=True, slots=True)
class Fragment:
    """The elements of one thread; the rest is as in `Lifted`. `shuffles` says what each word that
    comes from another lane is, in that lane's terms, and `lanes` which lane of four it is."""

    elements: tuple[Element, ...]
    arithmetic: tuple[tuple[Term, Term, int, str], ...]
    conditions: tuple[tuple[Term, Term, str], ...]
    reads: tuple[tuple[Term, Term, str], ...]
    shuffles: Mapping[Term, Term]
    lanes: Mapping[Term, int]
    operations: int


class ExactDivisor:
    """FA4's fast divisor taken as what it computes: an exact unsigned division."""

    def __init__(self, divisor: Any) -> None:
        self.divisor = Int32(divisor)

    def __rdivmod__(self, dividend: Any) -> tuple[Any, Any]:
        words = (Int32(dividend).ir_value(), self.divisor.ir_value())
        return Int32(arith.divui(*words)), Int32(arith.remui(*words))


@cute.jit
def any_mask_mod(batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
    """Any mask at all: a table of every cell."""
    cell = aux_tensors[0][batch_idx[0], head_idx[0], q_idx[0], kv_idx[0]]
    answer = cute.make_rmem_tensor(1, cutlass.Boolean)
    answer[0] = cell != 0
    return answer.load()


def _warp_groups(tile: Tile) -> Any:
    """How FA4's SM90 kernel multiplies queries and keys."""
    major = cute.nvgpu.OperandMajorMode.K
    return hopper.make_trivial_tiled_mma(
        cutlass.BFloat16, cutlass.BFloat16, major, major, Float32,
        atom_layout_mnk=(tile.tile_m // ROWS_OF_GROUP, 1, 1), tiler_mn=(ROWS_OF_GROUP, tile.tile_n),
    )


def _warps(tile: Tile) -> Any:
    """How its SM80 kernel does, with four warps."""
    warps = WARP_GROUP // 32
    return cute.make_tiled_mma(
        cute.nvgpu.warp.MmaF16BF16Op(cutlass.BFloat16, Float32, (16, 8, 16)), (warps, 1, 1),
        permutation_mnk=(warps * 16, 16, 16),
    )


def _tensor_memory(tile: Tile, thread: Any) -> tuple[Any, Any]:
    """How its SM100 kernel does, and loads a thread's part out of tensor memory."""
    major = cute.nvgpu.OperandMajorMode.K
    shape = (tile.tile_m, tile.tile_n)
    tiled = blackwell.make_trivial_tiled_mma(
        cutlass.BFloat16, cutlass.BFloat16, major, major, Float32, tcgen05.CtaGroup.ONE, shape
    )
    start = cute.make_ptr(Float32, 0, cute.AddressSpace.tmem, assumed_align=16)
    layout = tiled.make_fragment_C(tiled.partition_shape_C(shape)).layout
    accumulator = cute.make_tensor(start, layout)[(None, None), 0, 0]
    atom = cute.make_copy_atom(tcgen05.copy.Ld32x32bOp(tcgen05.copy.Repetition(32)), Float32)
    return tiled.get_slice(0), tcgen05.make_tmem_copy(atom, accumulator).get_slice(thread)


@contextmanager
def architecture(arch: str) -> Iterator[None]:
    """Inside, the compiler takes the instructions of `arch`."""
    settings = CuTeDSL._get_dsl().envar
    before = settings.arch
    settings.arch = ARCHITECTURES.get(arch, before)
    try:
        yield
    finally:
        settings.arch = before


# The SM80 kernel's instructions are among those of the architecture that is set.
ARCHITECTURES = {"sm_100": "sm_100a"}
TILED_MMA = {"sm_90": _warp_groups, "sm_80": _warps}


def layout(tile: Tile, arch: str, number: Any) -> tuple[Any, Any, Any]:
    """A thread's part of the accumulator, the coordinates of its elements, and on SM100 its load
    from tensor memory. Inside a trace."""
    cells = cute.make_identity_tensor((tile.tile_m, tile.tile_n))
    if arch == "sm_100":
        thread, load = _tensor_memory(tile, number)
        return thread, load.partition_D(thread.partition_C(cells)[(None, None), 0, 0]), load
    thread = TILED_MMA[arch](tile).get_slice(number)
    return thread, thread.partition_C(cells), None


def apply(provider: Provider, variant: Variant, given: Mapping[str, Any], table: Any) -> Any:
    """A fragment after `apply_mask`. Inside a trace."""
    tile, flags = variant.tile, variant.flags
    thread, places, load = layout(tile, variant.arch, given["thread"])
    fragment = cute.make_rmem_tensor(
        places.shape if load is not None
        else thread.partition_shape_C((tile.tile_m, tile.tile_n)), Float32
    )
    for i in range(cute.size(fragment.shape)):
        fragment[i] = Float32(i + 1)
    mask = provider.module("mask").AttentionMask(
        tile.tile_m, tile.tile_n, SeqlenInfo(given["seqlen_q"], given["seqlen_k"]),
        given["window_size_left"] if flags.left else None,
        given["window_size_right"] if flags.right else None, tile.pack,
        **({"dynamic_causal": given["psc"]} if flags.dynamic else {}),
    )
    inside = {}
    if variant.mask_mod:
        inside["mask_mod"] = any_mask_mod
        inside |= _aux(provider.module("utils"), table)
    if variant.wrapped:
        inside["fastdiv_mods"] = tuple(
            ExactDivisor(given[name]) for name in ("seqlen_q", "seqlen_k")
        )
    method = mask.apply_mask
    if variant.arch == "sm_100":
        method, inside["thr_tmem_load"] = mask.apply_mask_sm100, load
    method(
        fragment, batch_idx=given["batch"], head_idx=given["head"], m_block=given["m_block"],
        n_block=given["n_block"], thr_mma=thread, mask_seqlen=variant.seqlen,
        mask_causal=flags.is_causal, mask_local=flags.is_local, **inside,
    )
    return fragment


def _aux(utils: Any, table: Any) -> Mapping[str, Any]:
    """The table as FA4 hands it to a mask_mod: in a record of its own, or in a plain list."""
    if hasattr(utils, "AuxData"):
        return {"aux_data": utils.AuxData(tensors=[table])}
    return {"aux_tensors": [table]}


def traced(provider: Provider, variant: Variant, lines: AbstractContextManager[None]) -> Any:
    """The IR of `apply`; inside `lines_kept` with the place of each operation."""

    @cute.jit(preprocess=False)
    def host(out: cute.Tensor, table: cute.Tensor, numbers: list):
        given = dict(zip(NUMBERS, numbers, strict=True))
        fragment = apply(provider, variant, given, table)
        for i in range(cute.size(fragment.shape)):
            out[i] = fragment[i]

    out = from_dlpack(np.zeros(MOST_ELEMENTS, np.float32))
    table = descriptor(np.zeros((2, 2, 2, 2), np.int32))
    numbers = [Int32(0)] * len(NUMBERS)
    with lines, architecture(variant.arch):
        return guarded(
            lambda: cute.compile(host, out, table, numbers, no_jit_engine=True), (VISIBLE,)
        ).ir_module


@functools.cache
def places(tile: Tile, arch: str) -> tuple[tuple[Term, Term], ...]:
    """Where the elements of a thread lie in the tile: row and column of each, in THREAD."""
    count: list[int] = []

    @cute.jit(preprocess=False)
    def host(out: cute.Tensor, number: Int32):
        _, coordinates, _ = layout(tile, arch, number)
        count.append(cute.size(coordinates.shape))
        for i in range(count[-1]):
            out[2 * i], out[2 * i + 1] = coordinates[i]

    out = from_dlpack(np.zeros(2 * MOST_ELEMENTS, np.int32))
    with architecture(arch):
        module = cute.compile(host, out, Int32(0), no_jit_engine=True).ir_module
    walk = Walk((), ())
    memory = walk_module(walk, module, (Tensor(("out",)), Num(THREAD, 32)))
    row_and_column = ((memory[("out",), 2 * i], memory[("out",), 2 * i + 1])
                      for i in range(count[-1]))
    return tuple((walk.number(row), walk.number(column)) for row, column in row_and_column)


OUT = ("out", "fragment", "f32")


def lift(provider: Provider, variant: Variant) -> Fragment:
    """The fragment of any thread. The provider is served."""
    if variant.flags.dynamic and not knows_dynamic_causal(provider):
        raise CannotLift("AttentionMask has no dynamic_causal")
    try:
        return _lift(provider, variant, nullcontext())
    except CannotLift:
        # To keep lines takes twice the time, and only a refusal shows them.
        return _lift(provider, variant, lines_kept())


def _lift(provider: Provider, variant: Variant, lines: AbstractContextManager[None]) -> Fragment:
    walk = Walk((VISIBLE,), (4,), floats=True, thread=THREAD)
    arguments = (Tensor(OUT), Tensor(("table", 0)), *(Num(sym(name), 32) for name in NUMBERS))
    memory = walk_module(walk, traced(provider, variant, lines), arguments)
    return Fragment(
        elements=tuple(
            Element(row, col, _psc(same(walk.number(memory[OUT, i]), const(float_bits(i + 1)))))
            for i, (row, col) in enumerate(places(variant.tile, variant.arch))
        ),
        arithmetic=tuple((_psc(path), _psc(value), width, at)
                         for (value, width), path, at in entries(walk.arithmetic)),
        conditions=tuple((_psc(path), _psc(claim), at)
                         for claim, path, at in entries(walk.conditions)),
        reads=tuple((_psc(path), element, at) for element, path, at in entries(walk.reads)),
        shuffles={word: definition for word, (definition, _) in walk.shuffles.items()},
        lanes={word: lane for word, (_, lane) in walk.shuffles.items()},
        operations=walk.operations,
    )


def knows_dynamic_causal(provider: Provider) -> bool:
    return "dynamic_causal" in provider.module("mask").AttentionMask.__dataclass_fields__


def _psc(term: Term) -> Term:
    return substitute(term, PSC)


LANES = 4  # that hold one row
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Batch:
    """Calls of the real method: an int32 array [calls] for each of NUMBERS, the mask of
    `any_mask_mod` [b, h, q, kv], and the word of each lane of a row, `words` [calls, LANES]."""

    variant: Variant
    columns: Mapping[str, Array]
    table: Array
    words: Array


def run(provider: Provider, batches: Sequence[Batch]) -> list[Array]:
    """Whether each element is kept, by the real method on this CPU: of each batch [calls,
    elements].

    Inline PTX and shuffles have no CPU form: the first is replaced by the same shift, the second
    by `words`.
    """
    outs = [_shared(len(batch.words), elements(batch.variant)) for batch in batches]

    def execute() -> None:
        for batch, out in zip(batches, outs, strict=True):
            _execute(provider, batch, out)

    in_child(execute, 120)
    return [out == np.arange(1, out.shape[1] + 1, dtype=np.float32) for out in outs]


def _shared(rows: int, columns: int) -> Array:
    """Floats that a forked process writes for this one."""
    return np.frombuffer(mmap.mmap(-1, 4 * rows * columns), np.float32).reshape(rows, columns)


def _execute(provider: Provider, batch: Batch, out: Array) -> None:
    variant = batch.variant
    numbers = np.ascontiguousarray(
        np.stack([np.asarray(batch.columns[n], np.int32) for n in NUMBERS]))
    count = out.shape[1]

    def one_call(out: Any, arrays: list[Any], i: Any) -> None:
        columns, table, words = arrays
        given = {name: columns[k, i] for k, name in enumerate(NUMBERS)}
        with _for_cpu(provider, [words[i, lane] for lane in range(LANES)]):
            fragment = apply(provider, variant, given, table)
        for j in range(count):
            out[i, j] = fragment[j]

    @cute.jit
    def host(out: cute.Tensor, arrays: list, calls: Int32):
        for i in range(calls):
            one_call(out, arrays, i)

    arrays = [descriptor(numbers), descriptor(np.ascontiguousarray(batch.table, np.int32)),
              descriptor(np.ascontiguousarray(batch.words, np.int32))]
    arguments = (descriptor(out), arrays, Int32(len(out)))
    with architecture(variant.arch):
        cute.compile(host, *arguments)(*arguments)


def elements(variant: Variant) -> int:
    """Elements of a thread's fragment."""
    return variant.tile.tile_m * variant.tile.tile_n // variant.threads


@contextmanager
def _for_cpu(provider: Provider, limits: list[Any]) -> Iterator[None]:
    """Inside, what only a GPU runs is replaced in FA4's `utils`."""
    utils = provider.module("utils")
    forms = {
        "shr_u32": lambda value, shift: _shifted(value, shift, lambda v, n: v >> n),
        "shl_u32": lambda value, shift: _shifted(value, shift, lambda v, n: v << n),
        "shuffle_sync": lambda value, offset, width: sum(
            (limit * Int32(offset == lane) for lane, limit in enumerate(limits)), Int32(0)
        ),
    }
    kept = {name: getattr(utils, name) for name in forms}
    try:
        for name, form in forms.items():
            setattr(utils, name, form)
        yield
    finally:
        for name, form in kept.items():
            setattr(utils, name, form)


def _shifted(value: Any, shift: Any, by: Callable[[Any, Any], Any]) -> Any:
    """A shift as PTX has it: zero from 32 on."""
    wide = by(Uint64(Uint32(value)), Uint64(cutlass.min(Uint32(shift), Uint32(32))))
    return Uint32(wide & Uint64(0xFFFFFFFF))
