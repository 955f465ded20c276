"""Operations that move words: vectors, register arrays, and the tensors that a mask_mod reads."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kernels.machine import Num, constant, truth
from kernels.simplify import ZERO, plus, times
from kernels.walk import POISON, Pointer, Strided, Tensor, Walk, kind
from spec.term import const, read, substitute, symbols


def result_type(walk: Walk, op: Any) -> tuple[int, int | None]:
    """Width of the result's words and, for a vector, how many there are."""
    return integer_type(walk, str(op.results[0].type))


WORDS = re.compile(r"(?:vector<(\d+)x)?(i(\d+)|f32)>?")


def integer_type(walk: Walk, text: str) -> tuple[int, int | None]:
    """Width and count of words. A float, where they are allowed, is the word of its bits: it can
    be moved, and no more."""
    found = words_type(walk, text)
    return int(found[3] or 32), int(found[1]) if found[1] else None


def element_type(walk: Walk, text: str) -> str:
    return slot(words_type(walk, text)[2])


def slot(element: str) -> str:
    """What a word lies in: a float and an integer of 32 bits may lie in one another's place."""
    return "i32" if element == "f32" else element


def words_type(walk: Walk, text: str) -> re.Match[str]:
    found = WORDS.fullmatch(text)
    if found is None or (found[2] == "f32" and not walk.floats):
        raise walk.refuse(f"type {text} is not an integer")
    return found


def float_bits(value: float) -> int:
    """The bits of a float32, as a signed integer."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


def on_strides(walk: Walk, rule: str, values: list[Any]) -> Strided:
    if rule == "llvm.sext":
        return values[0]
    if rule == "llvm.add":
        return moved_by(strided(walk, values[0]), strided(walk, values[1]))
    if rule == "llvm.mul":
        a, b = sorted((strided(walk, v) for v in values), key=lambda s: set(s.parts) != {None})
        if set(a.parts) == {None}:
            return Strided({k: times(value, a.parts[None]) for k, value in b.parts.items()})
    raise walk.refuse("the stride of an aux tensor is used as a number")


def moved_by(a: Strided, b: Strided) -> Strided:
    keys = [*a.parts, *(k for k in b.parts if k not in a.parts)]
    return Strided({k: plus(a.parts.get(k, ZERO), b.parts.get(k, ZERO)) for k in keys})


def strided(walk: Walk, value: Any) -> Strided:
    return value if isinstance(value, Strided) else Strided({None: walk.number(value)})


def constant_index(walk: Walk, value: Any, what: str) -> int:
    index = walk.number(value)
    if index.op != "const":
        raise walk.refuse(f"{what} is not a constant")
    return index.value


def poison(walk: Walk, op: Any, values: list[Any]) -> Any:
    _, count = result_type(walk, op)
    return POISON if count is None else (POISON,) * count


def literal(walk: Walk, op: Any, values: list[Any]) -> Any:
    width, count = result_type(walk, op)
    value = op.attributes["value"]
    bits = float_bits if words_type(walk, str(op.results[0].type))[2] == "f32" else int
    make = (lambda n: truth(const(n != 0))) if width == 1 else (lambda n: constant(n, width))
    if count is None:
        return make(bits(value.value))
    return tuple(make(bits(n)) for n in value)


def alloca(walk: Walk, op: Any, values: list[Any]) -> Pointer:
    base = ("register", hash(op.results[0]), str(op.attributes["elem_type"].value))
    if any(cell[0] == base for cell in walk.memory):
        raise walk.refuse("a register array in a loop")
    return Pointer(base, Strided({None: ZERO}))


def getelementptr(walk: Walk, op: Any, values: list[Any]) -> Pointer:
    pointer, *dynamic = values
    index, *more = op.attributes["rawConstantIndices"]
    if more or not isinstance(pointer, Pointer):
        raise walk.refuse("more than one step from a pointer")
    step = strided(walk, dynamic[0] if dynamic else constant(index, 64))
    element = slot(str(op.attributes["elem_type"].value))
    expected = held(pointer)
    if element != expected:
        raise walk.refuse(f"steps of {element} in memory of {expected}")
    return replace(pointer, offset=moved_by(pointer.offset, step))


def as_number(walk: Walk, op: Any, values: list[Any]) -> Pointer:
    """An address as an integer, which nothing may be done with but to make it a pointer again."""
    (pointer,) = values
    if not isinstance(pointer, Pointer) or result_type(walk, op) != (64, None):
        raise walk.refuse(f"needs a pointer and 64 bits for it, not {kind(pointer)}")
    return pointer


def as_pointer(walk: Walk, op: Any, values: list[Any]) -> Pointer:
    (pointer,) = values
    if not isinstance(pointer, Pointer):
        raise walk.refuse(f"makes a pointer of {kind(pointer)}")
    return pointer


def held(pointer: Pointer) -> str:
    """The type of the words that a pointer's memory holds."""
    return slot(pointer.base[2]) if len(pointer.base) > 2 else "i32"


def cells(walk: Walk, pointer: Any, count: int, element: str) -> list[tuple[Any, ...]]:
    if not isinstance(pointer, Pointer):
        raise walk.refuse(f"needs a pointer, not {kind(pointer)}")
    if element != held(pointer):
        raise walk.refuse(f"{element} in memory of {held(pointer)}")
    offset = pointer.offset.parts
    if set(offset) != {None} or offset[None].op != "const":
        raise walk.refuse("a register array is indexed by a value that is not a constant")
    return [(pointer.base, offset[None].value + i) for i in range(count)]


def store(walk: Walk, op: Any, values: list[Any]) -> None:
    value, pointer = values
    words = value if isinstance(value, tuple) else (value,)
    if isinstance(pointer, Pointer) and pointer.base[0] == "table":
        raise walk.refuse("writes to an aux tensor")
    element = element_type(walk, str(op.operands[0].type))
    for cell, word in zip(cells(walk, pointer, len(words), element), words, strict=True):
        walk.memory[cell] = word


def load(walk: Walk, op: Any, values: list[Any]) -> Any:
    (pointer,) = values
    _, count = result_type(walk, op)
    held_type = element_type(walk, str(op.results[0].type))
    if isinstance(pointer, Pointer) and pointer.base[0] == "table":
        if (held_type := words_type(walk, str(op.results[0].type))[2]) != "i32":
            raise walk.refuse(f"{held_type} from an aux tensor: tables hold int32")
        words = tuple(element(walk, pointer, i) for i in range(count or 1))
    else:
        words = tuple(
            walk.memory.get(cell, POISON) for cell in cells(walk, pointer, count or 1, held_type)
        )
    return words[0] if count is None else words


def element(walk: Walk, pointer: Pointer, step: int) -> Num:
    """The element that a pointer into a table names, by its logical indices: the offset is linear
    in the strides, with index d the coefficient of stride d and the last index the rest."""
    k = pointer.base[1]
    parts = pointer.offset.parts
    if any(stride is not None and stride[0] != k for stride in parts):
        raise walk.refuse("the stride of another aux tensor in an index")
    outer = [parts.get((k, d), ZERO) for d in range(walk.ranks[k] - 1)]
    value = read(walk.layout[k], *outer, plus(parts.get(None, ZERO), const(step)))
    walk.loads(value)
    return Num(value, 32)


def extractvalue(walk: Walk, op: Any, values: list[Any]) -> Any:
    (tensor,) = values
    if not isinstance(tensor, Tensor):
        raise walk.refuse(f"needs a tensor, not {kind(tensor)}")
    position = (*tensor.part, *op.attributes["position"])
    if str(op.results[0].type).startswith("!llvm.struct"):
        return Tensor(tensor.base, position)
    if position == (0,):
        return Pointer(tensor.base, Strided({None: ZERO}))
    if position[:2] == (1, 1) and tensor.base[0] == "table":
        if result_type(walk, op) != (64, None):
            raise walk.refuse("a stride of fewer than 64 bits, whose products may wrap")
        dim = position[2] if len(position) > 2 else 0
        return Strided({(tensor.base[1], dim): const(1)})
    raise walk.refuse("the shape of an aux tensor is used")


def extractelement(walk: Walk, op: Any, values: list[Any]) -> Any:
    vector, index = values
    return vector[constant_index(walk, index, "the index into a vector")]


def insertelement(walk: Walk, op: Any, values: list[Any]) -> Any:
    vector, value, index = values
    place = constant_index(walk, index, "the index into a vector")
    return (*vector[:place], value, *vector[place + 1 :])


FULL_WARP, LAST_LANE = -1, 31


def shuffle(walk: Walk, op: Any, values: list[Any]) -> Num:
    """What another lane of the warp holds: a symbol of its own, defined beside the walk.

    Lanes differ in `walk.thread` alone, so the word of the source lane is the same term with that
    lane's thread for it. All lanes of the warp have to be there.
    """
    threads, value, source, control = values
    lanes = constant_index(walk, threads, "the set of lanes")
    lane = constant_index(walk, source, "the lane that is read")
    segment, last = divmod(constant_index(walk, control, "the clamp of a shuffle"), 256)
    width = LAST_LANE + 1 - segment
    if walk.thread is None or "idx" not in str(op.attributes["kind"]):
        raise walk.refuse("a shuffle where no thread is known, or of another kind than idx")
    if lanes != FULL_WARP or last != LAST_LANE or width & (width - 1) or not 0 <= lane < width:
        raise walk.refuse("a shuffle of a part of a warp, or past its segment")
    if walk.thread.value in symbols(*walk.path):
        raise walk.refuse("a shuffle that some lanes do not reach")
    there = walk.thread - walk.thread % width + lane
    return Num(walk.shuffled(substitute(walk.number(value), {walk.thread: there}), lane), 32)


def shufflevector(walk: Walk, op: Any, values: list[Any]) -> Any:
    both_vectors = values[0] + values[1]
    return tuple(POISON if i < 0 else both_vectors[i] for i in op.attributes["mask"])


STRUCTURE: Mapping[str, Callable[[Walk, Any, list[Any]], Any]] = {
    "llvm.mlir.constant": literal,
    "llvm.mlir.poison": poison,
    "llvm.mlir.undef": poison,
    "llvm.alloca": alloca,
    "llvm.getelementptr": getelementptr,
    "llvm.ptrtoint": as_number,
    "llvm.inttoptr": as_pointer,
    "llvm.store": store,
    "llvm.load": load,
    "llvm.extractvalue": extractvalue,
    "llvm.extractelement": extractelement,
    "llvm.insertelement": insertelement,
    "llvm.shufflevector": shufflevector,
    "nvvm.shfl.sync": shuffle,
}
