"""Small mask_mods that differ from each other in one thing, for the keys that they are kept under.

Each maker gives a new function: FA4 writes the hash of a callable into the callable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kernels.environment  # noqa: F401  (before cutlass)

# isort: split
import cutlass
import cutlass.cute as cute
from cutlass import Int32

MaskMod = Callable[..., Any]
Labelled = tuple[str, Callable[[], MaskMod | None]]

# A mask_mod reads it while it is traced; `_with_global` sets it.
reach = 3


def fits(parameter: str) -> bool:
    """Whether these functions are what a parameter of that name is called with."""
    return parameter == "mask_mod"


def _filled(vector: Any, value: Any) -> Any:
    """`value` in every lane of a vector as long as `vector`."""
    one = cute.make_rmem_tensor(1, Int32)
    one[0] = Int32(value)
    lanes = cute.size(vector.shape)
    return one.load() if lanes == 1 else one.load().broadcast_to((lanes,))


def _with_closure(width: int) -> MaskMod:
    @cute.jit
    def mask_mod(batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        far = width
        if cutlass.const_expr(aux_tensors is not None and len(aux_tensors) > 0):
            table = aux_tensors[0]
            index = (batch_idx[0],) + (0,) * (cute.rank(table) - 1)
            far = Int32(table[index]) + width
        return kv_idx <= q_idx + _filled(q_idx, far)

    return mask_mod


def _other_code(width: int) -> MaskMod:
    @cute.jit
    def mask_mod(batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        return kv_idx >= q_idx + _filled(q_idx, width)

    return mask_mod


def _with_default(width: int) -> MaskMod:
    @cute.jit
    def mask_mod(
        batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors, far: cutlass.Constexpr = width
    ):
        return kv_idx <= q_idx + _filled(q_idx, far)

    return mask_mod


def _with_global(width: int) -> MaskMod:
    global reach
    reach = width

    @cute.jit
    def mask_mod(batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        return kv_idx <= q_idx + _filled(q_idx, reach)

    return mask_mod


def _two(name: str, maker: Callable[[int], MaskMod]) -> tuple[Labelled, Labelled]:
    return (f"a mask_mod with {name} 3", lambda: maker(3)), \
        (f"a mask_mod with {name} 5", lambda: maker(5))


BASE: Labelled = ("a mask_mod that reads a closure value", lambda: _with_closure(3))

# The parts of a mask_mod that decide what is traced, in words, with two values of each or more.
PARTS: dict[str, tuple[str, tuple[Labelled, ...]]] = {
    "code": ("the source of {}", (
        ("None", lambda: None), BASE, ("a mask_mod of other code", lambda: _other_code(3)))),
    "closure": ("a closure value of {}", _two("closure value", _with_closure)),
    "default": ("a default argument of {}", _two("default argument", _with_default)),
    "global": ("a module global that {} reads", _two("module global", _with_global)),
}


def marked(mark: str) -> tuple[Labelled, ...]:
    """One mask_mod, with an attribute that FA4 asks for and without."""
    def make(value: Any) -> MaskMod:
        function = _with_closure(3)
        if value is not None:
            setattr(function, mark, value)
        return function

    def label(value: Any) -> str:
        return f"a mask_mod without {mark}" if value is None else f"a mask_mod with {mark}={value}"

    return tuple((label(value), lambda value=value: make(value)) for value in (None, 1, 2))
