"""A real mask_mod, compiled by the compiler's host JIT into a function over arrays of cells."""

from fuzz.backends import Refused
from kernels import run_cute
from kernels.machine import CannotLift
from kernels.run_cute import Kernel
from kernels.target import Target
from kernels.trace import traces


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
            return run_cute.compiled(target, traced.layout), traced.layout, traced.lanes
    if refusals[0].startswith("trace: "):
        raise RuntimeError(refusals[0])
    raise Refused(refusals[0])


def warm_up() -> None:
    """Loads compiler and FA4, which takes seconds, so that processes forked later need not."""
    from kernels.mask_mods import TARGETS

    compiled(next(target for target in TARGETS if target.spec == "rswa"))
