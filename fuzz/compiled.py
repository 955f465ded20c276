"""A real mask_mod, compiled by the compiler's host JIT into a function over arrays of cells."""

from collections.abc import Callable
from typing import Any

import kernels.environment  # noqa: F401  (before cutlass)

# isort: split
import cutlass.cute as cute
import numpy as np
from cutlass import Int32

from fuzz.backends import Refused
from fuzz.sequences import Array
from kernels.machine import CannotLift
from kernels.target import Target
from kernels.trace import COORDINATES, call, descriptor, rank, traces

Kernel = Callable[[Array, Array, list[Array], int], None]


def compiled(target: Target) -> tuple[Kernel, tuple[str, ...], int]:
    """The mask_mod as a function `(out, columns, aux, count)`, the layout that its code fits, and
    the number of keys it answers for at once. Raises Refused where it cannot run here."""
    refusals = []
    for traced in traces(target):
        if isinstance(traced, CannotLift):
            refusals.append(str(traced))
        elif "llvm.inline_asm" in str(traced.module):
            raise Refused("holds inline PTX, which has no CPU form")
        else:
            return _host(target, traced.layout), traced.layout, traced.lanes
    if refusals[0].startswith("trace: "):
        raise RuntimeError(refusals[0])
    raise Refused(refusals[0])


def warm_up() -> None:
    """Loads compiler and FA4, which takes seconds, so that processes forked later need not."""
    from kernels.mask_mods import TARGETS

    compiled(next(target for target in TARGETS if target.spec == "rswa"))


def _host(target: Target, layout: tuple[str, ...]) -> Kernel:
    names = COORDINATES + target.symbols

    def one_cell(out: Any, inputs: list[Any], i: Any) -> None:
        columns, *aux = inputs
        values = {name: columns[k, i] for k, name in enumerate(names)}
        mask_mod = target.make({name: values[name] for name in target.symbols})
        for j, (word, _) in enumerate(call(target, mask_mod, aux, values)):
            out[i, j] = Int32(word)

    @cute.jit
    def host(out: cute.Tensor, inputs: list, count: Int32):
        for i in range(count):
            one_cell(out, inputs, i)

    def arguments(out: Array, columns: Array, aux: list[Array], count: int) -> tuple[Any, ...]:
        return descriptor(out), [descriptor(array) for array in (columns, *aux)], Int32(count)

    tables = [np.zeros((2,) * rank(target, name), dtype=np.int32) for name in layout]
    columns = np.zeros((len(names), 2), dtype=np.int32)
    function = cute.compile(host, *arguments(np.zeros((1, 1), dtype=np.int32), columns, tables, 0))

    def kernel(out: Array, columns: Array, aux: list[Array], count: int) -> None:
        function(*arguments(out, columns, aux, count))

    return kernel
