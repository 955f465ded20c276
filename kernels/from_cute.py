"""CuTe DSL code to term: the mask that a real mask_mod computes, from what the compiler traced.

`lift` walks the LLVM-dialect IR of `kernels.trace`, one block after the other, with a term for
each word. A branch forks the path and its join merges words by `ite`; a loop is walked as often
as its condition is the constant True. What is not in the tables of operations is refused by name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kernels.machine import (
    RULES,
    Bits,
    CannotLift,
    Num,
    Word,
    bits_of,
    constant,
    equal,
    merged,
    number,
    truth,
)
from kernels.simplify import ZERO, both, either, negation, plus, signed_range, span, times
from kernels.target import Target
from kernels.trace import WORD, Traced, traces
from spec.term import TRUE, Term, const, read, sym

MAX_OPERATIONS = 500_000
SYMBOLIC_LOOP = "a loop whose number of turns is not a constant"
ATTRIBUTES = frozenset(
    "alignment asm_dialect asm_string constraints elem_type fastmathFlags isExact mask "
    "operandSegmentSizes ordering overflowFlags position predicate rawConstantIndices "
    "tail_call_kind value noWrapFlags loop_annotation".split()
)


@dataclass(frozen=True, slots=True)
class Lifted:
    """A mask_mod as terms.

    Lane l of `lanes` is whether the key kv_idx + l is visible, provided that every term of
    `arithmetic` fits the signed integers of its width, and every claim of `conditions` holds,
    wherever its path is taken. Entries are (path, term, width, location), (path, claim, location)
    and, for every element that is loaded, (path, read, location). Arithmetic on the strides of
    a table is not among them: it cannot leave 64 bits where the read is inside the table.
    """

    lanes: tuple[Term, ...]
    arithmetic: tuple[tuple[Term, Term, int, str], ...]
    conditions: tuple[tuple[Term, Term, str], ...]
    reads: tuple[tuple[Term, Term, str], ...]
    layout: tuple[str, ...]
    inline_ptx: bool
    sha: str
    operations: int


@dataclass(frozen=True, slots=True)
class Strided:
    """An index into memory: terms times strides of one table; the key None is the rest."""

    parts: Mapping[tuple[int, int] | None, Term]


@dataclass(frozen=True, slots=True)
class Pointer:
    """`base`: ("register", id), ("table", k) or ("out",)."""

    base: tuple[Any, ...]
    offset: Strided


@dataclass(frozen=True, slots=True)
class Tensor:
    base: tuple[Any, ...]


POISON = object()
Path = tuple[Term, ...]
Memory = dict[tuple[Any, ...], Any]


@dataclass(frozen=True, slots=True)
class Arrival:
    """Control reaching a block."""

    path: Path
    args: tuple[Any, ...]
    memory: Memory
    origin: int


@dataclass(slots=True)
class Walk:
    """The state of one walk."""

    layout: tuple[str, ...]
    ranks: tuple[int, ...]
    env: dict[int, Any] = field(default_factory=dict)
    path: Path = ()
    memory: Memory = field(default_factory=dict)
    op: Any = None
    arithmetic: dict[tuple[Term, int], list[tuple[Path, str]]] = field(default_factory=dict)
    conditions: dict[Term, list[tuple[Path, str]]] = field(default_factory=dict)
    reads: dict[Term, list[tuple[Path, str]]] = field(default_factory=dict)
    operations: int = 0
    inline_ptx: bool = False

    def fits(self, value: Term, width: int) -> None:
        (low, high), (least, most) = span(value), signed_range(width)
        if low < least or high > most:
            self._note(self.arithmetic, (value, width))

    def needs(self, claim: Term) -> None:
        if claim is not TRUE:
            self._note(self.conditions, claim)

    def loads(self, element: Term) -> None:
        self._note(self.reads, element)

    def _note(self, notes: dict[Any, list[tuple[Path, str]]], what: Any) -> None:
        paths = notes.setdefault(what, [])
        if not any(set(path) <= set(self.path) for path, _ in paths):
            paths.append((self.path, location(self.op)))

    def refuse(self, reason: str) -> CannotLift:
        name = self.op.name if self.op is not None else "function"
        return CannotLift(f"{location(self.op)}: {name}: {reason}")

    def number(self, value: Any) -> Term:
        if isinstance(value, Num | Bits):
            return number(value)
        raise self.refuse(f"needs an integer, not {kind(value)}")


def kind(value: Any) -> str:
    if value is POISON:
        return "a value that was never set"
    return {Strided: "a stride", Pointer: "a pointer", tuple: "a vector", Tensor: "a tensor"}.get(
        type(value), type(value).__name__
    )


LOCATION = re.compile(r'"([^"]+\.py)":(\d+):')


def location(op: Any) -> str:
    found = LOCATION.search(str(op.location)) if op is not None else None
    return f"{os.path.basename(found[1])}:{found[2]}" if found else "unknown"


def lift(target: Target) -> Lifted:
    """The term of a target, for the first of its layouts that its code fits."""
    if target.unsupported:
        raise CannotLift(target.unsupported)
    refusals: list[CannotLift] = []
    for traced in traces(target):
        try:
            if isinstance(traced, CannotLift):
                raise traced
            return lift_traced(traced)
        except CannotLift as refusal:
            refusals.append(refusal)
    raise refusals[0]


def lift_traced(traced: Traced) -> Lifted:
    from cutlass._mlir import ir

    context = traced.module.context
    # Values of the IR are cast when they are read, which ends the process outside a context.
    with context, ir.Location.unknown(context):
        function = next(
            op.operation
            for op in traced.module.body.operations
            if op.operation.name == "llvm.func" and len(op.operation.regions[0].blocks) > 0
        )
        walk = Walk(traced.layout, traced.ranks)
        words = walk_blocks(walk, list(function.regions[0].blocks), arguments(traced))
    return Lifted(
        lanes=tuple(lanes_of(words, traced.lanes)),
        arithmetic=tuple((p, value, width, at) for (value, width), p, at in entries(walk.arithmetic)),
        conditions=tuple((p, claim, at) for claim, p, at in entries(walk.conditions)),
        reads=tuple((p, element, at) for element, p, at in entries(walk.reads)),
        layout=traced.layout,
        inline_ptx=walk.inline_ptx,
        sha=traced.sha,
        operations=walk.operations,
    )


def entries(notes: Mapping[Any, list[tuple[Path, str]]]) -> Iterator[tuple[Any, Term, str]]:
    for what, paths in notes.items():
        for path, at in paths:
            yield what, both(path), at


def arguments(traced: Traced) -> tuple[Any, ...]:
    tables = [Tensor(("table", k)) for k in range(len(traced.layout))]
    return (Tensor(("out",)), *tables, *(Num(sym(name), 32) for name in traced.names))


def lanes_of(words: Mapping[int, Word], count: int) -> Iterator[Term]:
    if count == 1:
        yield negation(equal(words[0], constant(0, words[0].width)))
        return
    for lane in range(count):
        yield bits_of(words[lane // WORD])[lane % WORD]


def walk_blocks(walk: Walk, blocks: list[Any], args: tuple[Any, ...]) -> dict[int, Word]:
    """Every block in reverse postorder, from the arrivals at it; the output words at the return."""
    order = reverse_postorder(blocks)
    pending = {0: [Arrival((), args, {}, -1)]}
    entered: dict[int, Path] = {}
    while pending:
        index = min(pending, key=order.__getitem__)
        arrival = join(walk, pending.pop(index))
        again = arrival.origin >= 0 and order[arrival.origin] >= order[index]
        if again and set(arrival.path) != set(entered[index]):
            raise walk.refuse(SYMBOLIC_LOOP)
        entered[index] = arrival.path
        walk.path, walk.memory = arrival.path, arrival.memory
        if (edges := walk_block(walk, blocks[index], arrival.args)) is None:
            if pending:
                raise walk.refuse(SYMBOLIC_LOOP)
            return {k[1]: word for k, word in walk.memory.items() if k[0] == ("out",)}
        for successor, path, values in edges:
            memory = dict(walk.memory) if len(edges) > 1 else walk.memory
            target = next(i for i, block in enumerate(blocks) if block == successor)
            pending.setdefault(target, []).append(Arrival(path, values, memory, index))
    raise walk.refuse("no return is reached")


def reverse_postorder(blocks: list[Any]) -> dict[int, int]:
    following = [
        [next(i for i, b in enumerate(blocks) if b == s) for s in terminator(block).successors]
        for block in blocks
    ]
    done: list[int] = []
    seen = {0}
    stack = [(0, iter(following[0]))]
    while stack:
        index, rest = stack[-1]
        if (step := next((s for s in rest if s not in seen), None)) is None:
            done.append(stack.pop()[0])
        else:
            seen.add(step)
            stack.append((step, iter(following[step])))
    return {index: place for place, index in enumerate(reversed(done))}


def terminator(block: Any) -> Any:
    return block.operations[len(block.operations) - 1].operation


def join(walk: Walk, arrivals: list[Arrival]) -> Arrival:
    first, *others = arrivals
    for other in others:
        shared = tuple(c for c in first.path if c in other.path)
        here = both(c for c in first.path if c not in shared)
        there = both(c for c in other.path if c not in shared)
        reached = either((here, there))
        path = shared if reached is TRUE else (*shared, reached)
        args = tuple(
            join_values(walk, here, a, b) for a, b in zip(first.args, other.args, strict=True)
        )
        memory = {
            cell: join_values(walk, here, value, other.memory[cell])
            for cell, value in first.memory.items()
            if cell in other.memory
        }
        first = Arrival(path, args, memory, max(first.origin, other.origin))
    return first


def join_values(walk: Walk, condition: Term, a: Any, b: Any) -> Any:
    if a == b:
        return a
    if isinstance(a, tuple) and isinstance(b, tuple):
        return tuple(join_values(walk, condition, x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Num | Bits) and isinstance(b, Num | Bits):
        return merged(condition, a, b)
    if POISON in (a, b):
        return POISON
    raise walk.refuse(f"two paths meet with {kind(a)} and {kind(b)}")


Edge = tuple[Any, Path, tuple[Any, ...]]


def walk_block(walk: Walk, block: Any, args: tuple[Any, ...]) -> list[Edge] | None:
    """Runs a block; the edges that leave it, or None at the return."""
    parameters = list(block.arguments)
    if len(parameters) != len(args):
        raise walk.refuse(f"{len(parameters)} arguments where {len(args)} were expected")
    walk.env.update((hash(p), value) for p, value in zip(parameters, args, strict=True))
    for view in block.operations:
        op = walk.op = view.operation
        walk.operations += 1
        if walk.operations > MAX_OPERATIONS:
            raise walk.refuse(f"more than {MAX_OPERATIONS} operations: a loop without an end?")
        values = [walk.env[hash(operand)] for operand in op.operands]
        if op.name in LEAVES:
            return LEAVES[op.name](walk, op, values)
        result = evaluate(walk, op, values)
        if len(op.results):
            walk.env[hash(op.results[0])] = result
    raise walk.refuse("a block without an end")


def evaluate(walk: Walk, op: Any, values: list[Any]) -> Any:
    if unknown := set(op.attributes) - ATTRIBUTES:
        raise walk.refuse(f"attribute {min(unknown)} is not modelled")
    if op.name in STRUCTURE:
        return STRUCTURE[op.name](walk, op, values)
    if op.name in RULES:
        return lanewise(walk, op, op.name, values)
    raise walk.refuse("not in the vocabulary")


def result_type(walk: Walk, op: Any) -> tuple[int, int | None]:
    """Width of the result's words and, for a vector, how many there are."""
    return integer_type(walk, str(op.results[0].type))


INTEGER = re.compile(r"(?:vector<(\d+)x)?i(\d+)>?")


def integer_type(walk: Walk, text: str) -> tuple[int, int | None]:
    if (found := INTEGER.fullmatch(text)) is None:
        raise walk.refuse(f"type {text} is not an integer")
    return int(found[2]), int(found[1]) if found[1] else None


def lanewise(walk: Walk, op: Any, rule: str, values: list[Any]) -> Any:
    width, count = result_type(walk, op)
    options: dict[str, int] = {}
    if rule == "llvm.icmp":
        options["predicate"] = op.attributes["predicate"].value
    if rule in ("llvm.sext", "llvm.zext", "llvm.trunc"):
        options["width"] = width
    if any(isinstance(value, Strided) for value in values):
        return on_strides(walk, rule, values)
    if count is None:
        return apply(walk, op, rule, values, options)
    rows = zip(*(v if isinstance(v, tuple) else (v,) * count for v in values), strict=True)
    return tuple(apply(walk, op, rule, list(row), options) for row in rows)


def apply(walk: Walk, op: Any, rule: str, words: list[Any], options: dict[str, int]) -> Word:
    if wrong := [word for word in words if not isinstance(word, Num | Bits)]:
        raise walk.refuse(f"needs integers, not {kind(wrong[0])}")
    if "overflowFlags" in op.attributes and op.attributes["overflowFlags"].value & NO_UNSIGNED_WRAP:
        without_unsigned_wrap(walk, rule, *map(number, words))
    return RULES[rule](walk, *words, **options)


NO_UNSIGNED_WRAP = 2


def without_unsigned_wrap(walk: Walk, rule: str, a: Term, b: Term) -> None:
    """For operands that are not negative, a signed result in range is an unsigned one too."""
    for value in (a, b):
        walk.needs(negation(value < ZERO) if span(value)[0] < 0 else TRUE)
    if rule == "llvm.sub":
        walk.needs(b <= a)


def on_strides(walk: Walk, rule: str, values: list[Any]) -> Strided:
    if rule == "llvm.sext":
        return values[0]
    a, b = (strided(walk, value) for value in values)
    if rule == "llvm.add":
        return Strided({k: plus(a.parts.get(k, ZERO), b.parts.get(k, ZERO)) for k in a.parts | b.parts})
    if rule == "llvm.mul":
        if set(b.parts) != {None}:
            a, b = b, a
        if set(b.parts) == {None}:
            return Strided({k: times(value, b.parts[None]) for k, value in a.parts.items()})
    raise walk.refuse("the stride of an aux tensor is used as a number")


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
    make = (lambda n: truth(const(n != 0))) if width == 1 else (lambda n: constant(n, width))
    if count is None:
        return make(int(value.value))
    return tuple(make(int(n)) for n in value)


def alloca(walk: Walk, op: Any, values: list[Any]) -> Pointer:
    constant_index(walk, values[0], "the size of a register array")
    return Pointer(("register", hash(op), str(op.attributes["elem_type"].value)), Strided({None: ZERO}))


def getelementptr(walk: Walk, op: Any, values: list[Any]) -> Pointer:
    pointer, *dynamic = values
    (index,) = list(op.attributes["rawConstantIndices"])
    step = strided(walk, dynamic[0] if dynamic else constant(index, 64))
    element = str(op.attributes["elem_type"].value)
    expected = pointer.base[2] if pointer.base[0] == "register" else "i32"
    if element != expected:
        raise walk.refuse(f"steps of {element} in memory of {expected}")
    offset = pointer.offset
    parts = {
        k: plus(offset.parts.get(k, ZERO), step.parts.get(k, ZERO)) for k in offset.parts | step.parts
    }
    return replace(pointer, offset=Strided(parts))


def cells(walk: Walk, pointer: Any, count: int, width: int) -> list[tuple[Any, ...]]:
    if not isinstance(pointer, Pointer):
        raise walk.refuse(f"needs a pointer, not {kind(pointer)}")
    element = pointer.base[2] if pointer.base[0] == "register" else "i32"
    if element != f"i{width}":
        raise walk.refuse(f"i{width} in memory of {element}")
    offset = pointer.offset.parts
    if set(offset) != {None} or offset[None].op != "const":
        raise walk.refuse("a register array is indexed by a value that is not a constant")
    return [(pointer.base, offset[None].value + i) for i in range(count)]


def store(walk: Walk, op: Any, values: list[Any]) -> None:
    value, pointer = values
    words = value if isinstance(value, tuple) else (value,)
    if isinstance(pointer, Pointer) and pointer.base[0] == "table":
        raise walk.refuse("writes to an aux tensor")
    width, _ = integer_type(walk, str(op.operands[0].type))
    for cell, word in zip(cells(walk, pointer, len(words), width), words, strict=True):
        walk.memory[cell] = word


def load(walk: Walk, op: Any, values: list[Any]) -> Any:
    (pointer,) = values
    width, count = result_type(walk, op)
    if isinstance(pointer, Pointer) and pointer.base[0] == "table":
        if width != 32:
            raise walk.refuse(f"i{width} from an aux tensor: tables hold int32")
        words = tuple(element(walk, pointer, i) for i in range(count or 1))
    else:
        words = tuple(
            walk.memory.get(cell, POISON) for cell in cells(walk, pointer, count or 1, width)
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
    position = list(op.attributes["position"])
    if not isinstance(tensor, Tensor):
        raise walk.refuse(f"needs a tensor, not {kind(tensor)}")
    if position == [0]:
        return Pointer(tensor.base, Strided({None: ZERO}))
    if position[:2] == [1, 1] and tensor.base[0] == "table":
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


def shufflevector(walk: Walk, op: Any, values: list[Any]) -> Any:
    both_vectors = values[0] + values[1]
    return tuple(POISON if i < 0 else both_vectors[i] for i in op.attributes["mask"])


ASSEMBLY = {"shl.b32 $0, $1, $2;": "shl.b32", "shr.u32 $0, $1, $2;": "shr.u32"}


def inline_asm(walk: Walk, op: Any, values: list[Any]) -> Any:
    text = op.attributes["asm_string"].value
    if text not in ASSEMBLY:
        raise walk.refuse(f"assembly {text!r} is not in the vocabulary")
    walk.inline_ptx = True
    return lanewise(walk, op, ASSEMBLY[text], values)


STRUCTURE: Mapping[str, Callable[[Walk, Any, list[Any]], Any]] = {
    "llvm.mlir.constant": literal,
    "llvm.mlir.poison": poison,
    "llvm.mlir.undef": poison,
    "llvm.alloca": alloca,
    "llvm.getelementptr": getelementptr,
    "llvm.store": store,
    "llvm.load": load,
    "llvm.extractvalue": extractvalue,
    "llvm.extractelement": extractelement,
    "llvm.insertelement": insertelement,
    "llvm.shufflevector": shufflevector,
    "llvm.inline_asm": inline_asm,
}


def branch(walk: Walk, op: Any, values: list[Any]) -> list[Edge]:
    return [(op.successors[0], walk.path, tuple(values))]


def conditional_branch(walk: Walk, op: Any, values: list[Any]) -> list[Edge]:
    (condition,) = bits_of(values[0])
    _, taken, _ = list(op.attributes["operandSegmentSizes"])
    ways = (
        (op.successors[0], condition, tuple(values[1 : 1 + taken])),
        (op.successors[1], negation(condition), tuple(values[1 + taken :])),
    )
    if any(way in walk.path for _, way, _ in ways):
        ways = tuple(way for way in ways if way[1] in walk.path)
    return [
        (block, walk.path if way is TRUE or way in walk.path else (*walk.path, way), args)
        for block, way, args in ways
        if way is not const(False)
    ]


def leave(walk: Walk, op: Any, values: list[Any]) -> None:
    return None


LEAVES: Mapping[str, Callable[[Walk, Any, list[Any]], list[Edge] | None]] = {
    "llvm.br": branch,
    "llvm.cond_br": conditional_branch,
    "llvm.return": leave,
}
