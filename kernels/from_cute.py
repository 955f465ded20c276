"""CuTe DSL code to term: the mask that a real mask_mod computes, from what the compiler traced.

`lift` walks the LLVM-dialect IR of `kernels.trace`, one block after the other, with a term for
each word. A branch forks the path and its join merges words by `ite`; a loop is walked as often
as its condition is the constant True. What is not in the tables of operations is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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
)
from kernels.memory import STRUCTURE, on_strides, result_type
from kernels.simplify import ZERO, both, either, negation, span
from kernels.target import Target
from kernels.trace import WORD, Traced, traces
from kernels.walk import POISON, Memory, Path, Strided, Tensor, Walk, kind
from spec.term import FALSE, TRUE, Term, sym

MAX_OPERATIONS = 500_000
SYMBOLIC_LOOP = "a loop whose number of turns is not a constant"
# Attributes that a rule reads, or that say nothing about values.
ATTRIBUTES = frozenset({
    "alignment", "asm_dialect", "asm_string", "constraints", "elem_type", "fastmathFlags", "kind",
    "loop_annotation", "mask", "noWrapFlags", "operandSegmentSizes", "ordering", "overflowFlags",
    "position", "predicate", "rawConstantIndices", "tail_call_kind", "value",
})


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
class Arrival:
    """Control reaching a block."""

    path: Path
    args: tuple[Any, ...]
    memory: Memory
    origin: int


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
    walk = Walk(traced.layout, traced.ranks)
    memory = walk_module(walk, traced.module, arguments(traced))
    words = {k[1]: word for k, word in memory.items() if k[0] == ("out",)}
    return Lifted(
        lanes=tuple(lanes_of(words, traced.lanes)),
        arithmetic=tuple(
            (path, value, width, at) for (value, width), path, at in entries(walk.arithmetic)
        ),
        conditions=tuple((path, claim, at) for claim, path, at in entries(walk.conditions)),
        reads=tuple((path, element, at) for element, path, at in entries(walk.reads)),
        layout=traced.layout,
        inline_ptx=walk.inline_ptx,
        sha=traced.sha,
        operations=walk.operations,
    )


def walk_module(walk: Walk, module: Any, args: tuple[Any, ...]) -> Memory:
    """Walks the one function of `module` that has a body; the memory at its return."""
    from cutlass._mlir import ir

    # Values of the IR are cast when they are read, which ends the process outside a context.
    with module.context, ir.Location.unknown(module.context):
        function = next(
            op.operation
            for op in module.body.operations
            if op.operation.name == "llvm.func" and len(op.operation.regions[0].blocks) > 0
        )
        return walk_blocks(walk, list(function.regions[0].blocks), args)


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


def walk_blocks(walk: Walk, blocks: list[Any], args: tuple[Any, ...]) -> Memory:
    """Every block in reverse postorder, from the arrivals at it; the memory at the return."""
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
                walk.op = blocks[min(pending)].operations[0].operation
                raise walk.refuse(SYMBOLIC_LOOP)
            return walk.memory
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
        op = view.operation
        walk.step(op)
        if walk.operations > MAX_OPERATIONS:
            raise walk.refuse(f"more than {MAX_OPERATIONS} operations: a loop without an end?")
        values = [walk.env[hash(operand)] for operand in op.operands]
        if op.name in LEAVES:
            return LEAVES[op.name](walk, op, values)
        result = evaluate(walk, op, values)
        if len(op.results) > 1:
            raise walk.refuse("more than one result")
        if len(op.results):
            walk.env[hash(op.results[0])] = result
    raise walk.refuse("a block without an end")


def evaluate(walk: Walk, op: Any, values: list[Any]) -> Any:
    if op.name not in STRUCTURE and op.name not in RULES and op.name != "llvm.inline_asm":
        raise walk.refuse("not in the vocabulary")
    if unknown := attribute_names(op) - ATTRIBUTES:
        raise walk.refuse(f"attribute {min(unknown)} is not modelled")
    if op.name in STRUCTURE:
        return STRUCTURE[op.name](walk, op, values)
    if op.name == "llvm.inline_asm":
        return lanewise(walk, op, assembly(walk, op), values)
    return lanewise(walk, op, op.name, values)


def attribute_names(op: Any) -> set[str]:
    """Compilers up to 4.5 list attributes with their values, later ones by name."""
    return {each if isinstance(each, str) else each.name for each in op.attributes}


ASSEMBLY = {"shl.b32 $0, $1, $2;": "shl.b32", "shr.u32 $0, $1, $2;": "shr.u32"}


def assembly(walk: Walk, op: Any) -> str:
    """The rule for a piece of inline PTX."""
    text = op.attributes["asm_string"].value
    if text not in ASSEMBLY:
        raise walk.refuse(f"assembly {text!r} is not in the vocabulary")
    walk.inline_ptx = True
    return ASSEMBLY[text]


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


def without_unsigned_wrap(walk: Walk, rule: str, *operands: Term) -> None:
    """For operands that are not negative, a signed result in range is an unsigned one too."""
    if rule not in ("llvm.add", "llvm.sub", "llvm.mul"):
        raise walk.refuse("a flag against unsigned wrapping")
    a, b = operands
    for value in (a, b):
        walk.needs(negation(value < ZERO) if span(value)[0] < 0 else TRUE)
    if rule == "llvm.sub":
        walk.needs(b <= a)


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
        if way is not FALSE
    ]


def leave(walk: Walk, op: Any, values: list[Any]) -> None:
    return None


LEAVES: Mapping[str, Callable[[Walk, Any, list[Any]], list[Edge] | None]] = {
    "llvm.br": branch,
    "llvm.cond_br": conditional_branch,
    "llvm.return": leave,
}
