"""The trace: the real mask_mod, called by a small host function, as LLVM-dialect IR.

No GPU and no execution engine is used. Lengths, indices, symbols and the strides of the aux
tensors stay run-time values, so the IR holds for all of them.
"""

import hashlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import kernels.environment  # noqa: F401  (before cutlass)

# isort: split
import cutlass
import cutlass.cute as cute
import numpy as np
from cutlass import Int32, Uint32
from cutlass.cute.runtime import from_dlpack
from cutlass.cutlass_dsl import CuTeDSL

from kernels.machine import CannotLift
from kernels.target import Target
from spec.domain import PARAMS, TABLES

COORDINATES = ("b", "h", "q_idx", "kv_idx", "seqlen_q", "seqlen_k", "offset_q", "offset_k")
WORD = 32
MAX_LANES = 1024


@dataclass(frozen=True, slots=True)
class SeqlenInfo:
    """What a mask_mod may ask of FA4's `SeqlenInfoQK`; the rest depends on tiles and launches."""

    seqlen_q: Any
    seqlen_k: Any
    offset_q: Any
    offset_k: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise CannotLift(f"seqlen_info.{name}: not modelled: it depends on the launch")


@dataclass(frozen=True, slots=True)
class Traced:
    """`module` holds one host function whose arguments are the output words, one descriptor for
    each table of `layout`, then an int32 for each of `names`."""

    module: Any
    layout: tuple[str, ...]
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    lanes: int
    sha: str


def rank(target: Target, table: str) -> int:
    """Dimensions of a table; a parameter of the spec is given as a table of one element."""
    if table in target.ranks:
        return target.ranks[table]
    if table in TABLES:
        return len(TABLES[table].dims)
    if table in PARAMS:
        return 1
    raise CannotLift(f"table {table}: no such table in the spec")


def call(
    target: Target, mask_mod: Any, aux: list[Any], values: Mapping[str, Any]
) -> list[tuple[Any, int]]:
    """The mask_mod on one query and its `__vec_size__` keys, as FA4 calls it: result words, each
    with the number of keys it answers for. Inside a trace."""
    vec = lanes(mask_mod)
    keys = cute.make_rmem_tensor(vec, Int32)
    for lane in range(vec):
        keys[lane] = values["kv_idx"] + lane if lane else values["kv_idx"]
    answer = mask_mod(
        _vector(values["b"], vec),
        _vector(values["h"], vec),
        _vector(values["q_idx"], vec),
        keys.load(),
        SeqlenInfo(*(values[name] for name in COORDINATES[4:])),
        aux or None,
    )
    if not isinstance(answer, cute.TensorSSA):
        kind = type(answer).__name__
        raise CannotLift(f"result: a mask_mod returns a cute.TensorSSA, not {kind}")
    if vec == 1:
        return [(Int32(cutlass.Boolean(answer[0])), 1)]
    return [(Uint32(answer[i]), min(vec, WORD)) for i in range(-(-vec // WORD))]


def lanes(mask_mod: Any) -> int:
    vec = getattr(mask_mod, "__vec_size__", 1)
    if not isinstance(vec, int) or not 1 <= vec <= MAX_LANES or (vec % WORD and WORD % vec):
        raise CannotLift(f"__vec_size__={vec!r}: FA4 takes divisors and multiples of {WORD}")
    return vec


def _vector(value: Any, vec: int) -> Any:
    one = cute.make_rmem_tensor(1, Int32)
    one[0] = value
    return one.load() if vec == 1 else one.load().broadcast_to((vec,))


def descriptor(array: Any) -> Any:
    """A table as a mask_mod gets it: strides known when it runs, the last one 1."""
    return from_dlpack(array).mark_layout_dynamic(leading_dim=array.ndim - 1)


def traces(target: Target) -> Iterator[Traced | CannotLift]:
    """A trace, or the reason that there is none, for each layout that the target may have."""
    for layout in target.layouts or ((),):
        try:
            yield trace(target, layout)
        except CannotLift as refusal:
            yield refusal


def trace(target: Target, layout: tuple[str, ...]) -> Traced:
    names = COORDINATES + target.symbols
    found: list[Any] = []

    @cute.jit(preprocess=False)
    def host(out: cute.Tensor, inputs: list):
        aux, numbers = inputs[: len(layout)], inputs[len(layout) :]
        values = dict(zip(names, numbers, strict=True))
        mask_mod = target.make({name: values[name] for name in target.symbols})
        found.append(mask_mod)
        for i, (word, _) in enumerate(call(target, mask_mod, aux, values)):
            out[i] = word

    out = from_dlpack(np.zeros(MAX_LANES // WORD, np.int32))
    ranks = tuple(rank(target, name) for name in layout)
    inputs = [descriptor(np.zeros((2,) * dims, np.int32)) for dims in ranks]
    inputs += [Int32(0)] * len(names)
    with lines_kept():
        compiled = guarded(lambda: cute.compile(host, out, inputs, no_jit_engine=True), layout)
    return Traced(
        compiled.ir_module, layout, ranks, names, lanes(found[-1]), source_sha(found[-1])
    )


def in_trace(work: Callable[[Mapping[str, Any]], Any], symbols: tuple[str, ...]) -> None:
    """Does `work` with run-time Int32 for `symbols`; what it raises is raised as it is."""
    raised: list[BaseException] = []

    @cute.jit(preprocess=False)
    def host(numbers: list):
        try:
            work(dict(zip(symbols, numbers, strict=True)))
        except Exception as error:
            raised.append(error)

    cute.compile(host, [Int32(0)] * len(symbols), no_jit_engine=True)
    if raised:
        raise raised[0]


@contextmanager
def lines_kept() -> Iterator[None]:
    """Inside, the IR keeps the file and line of what it was traced from."""
    settings = CuTeDSL._get_dsl().envar
    before, settings.lineinfo = settings.lineinfo, True
    try:
        yield
    finally:
        settings.lineinfo = before


def guarded(trace_it: Callable[[], Any], layout: tuple[str, ...]) -> Any:
    """What `trace_it` returns; an error of the traced code as one line."""
    try:
        return trace_it()
    except Exception as error:
        cause = error
        while not isinstance(cause, CannotLift) and (inner := cause.__cause__ or cause.__context__):
            cause = inner
        if isinstance(cause, CannotLift):
            raise cause from None
        said = f"{type(cause).__name__}: {first_line(cause)}"
        raise CannotLift(f"trace: {said}{_hint(said, layout)}") from None


def _hint(said: str, layout: tuple[str, ...]) -> str:
    """What a person can do about the usual errors of a trace."""
    if "NoneType" in said and not layout:
        return " (no aux tensor was given: name them with --aux)"
    if said.startswith("IndexError") and layout:
        return f" (it was given {len(layout)} aux tensors: name each with --aux)"
    if "Boolean" in said or "dynamic expression" in said.lower():
        return " (a factory that branches on a number in Python needs the number, not a symbol)"
    return ""


COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def first_line(error: BaseException) -> str:
    """The first line that says something: a line that ends in a colon goes on in the next."""
    lines = [line.strip() for line in COLOUR.sub("", str(error)).splitlines() if line.strip()]
    text = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
    return text or "no message"


def source_sha(mask_mod: Any) -> str:
    function = inspect.unwrap(mask_mod)
    try:
        text = inspect.getsource(function).encode()
    except (OSError, TypeError):
        text = function.__code__.co_code
    return hashlib.sha256(text).hexdigest()
