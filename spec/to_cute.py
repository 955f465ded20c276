"""A term as a runnable CuTe DSL mask_mod: its source text, and the factory that it defines.

The term is in a kernel's own indices (`frame(formula)`), with every `any` of a constant count.
The text works on int32 scalars, the key first of the vector that FA4 passes.
"""

from __future__ import annotations

import linecache
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from spec.domain import BOTTOM_RIGHT, Frame
from spec.masks import Mask
from spec.term import (
    BOOL,
    OPS,
    Rule,
    SpecError,
    Term,
    const,
    expand,
    fold,
    max_,
    min_,
    postorder,
    rebuild,
    substitute,
    sym,
)
from spec.term import symbols as symbols_of
from spec.term import tables as tables_of
from spec.to_numpy import to_numpy
from spec.to_text import ATOM, COMPARE, PRODUCT, SUM, TERNARY, Piece, call, to_text, wrap
from spec.to_text import RULES as TEXT

COORDINATES: Mapping[str, str] = {
    "b": "batch_idx[0]",
    "h": "head_idx[0]",
    "q_idx": "q_idx[0]",
    "kv_idx": "kv_idx[0]",
    "seqlen_q": "seqlen_info.seqlen_q",
    "seqlen_k": "seqlen_info.seqlen_k",
    "offset_q": "seqlen_info.offset_q",
    "offset_k": "seqlen_info.offset_k",
}
# The text names scalars so where the name of the coordinate is that of an argument.
SCALARS: Mapping[str, str] = {"q_idx": "q", "kv_idx": "kv"}
INT32 = range(-(2**31), 2**31)
DIVISIONS = ("floordiv", "floormod", "truncdiv", "truncmod")
WIDEST = 72

HEAD = """\
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32


def make({parameters}):
    @cute.jit
    def mask_mod(batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
"""
TAIL = """\
        answer = cute.make_rmem_tensor(1, Boolean)
        answer[0] = {answer}
        return answer.load()

    return mask_mod
"""
_numbers = count()


def scalar(node: Term) -> Piece:
    return SCALARS.get(node.value, node.value), ATOM


def literal(node: Term) -> Piece:
    if node.sort == BOOL:
        return f"Boolean({node.value})", ATOM
    if node.value not in INT32:
        raise SpecError(f"{node.value} is not an int32")
    return TEXT["const"](node)


def joined(sign: str) -> Rule:
    def rule(node: Term, *args: Piece) -> Piece:
        return f" {sign} ".join(wrap(arg, ATOM) for arg in args), COMPARE

    return rule


# CuTe's `//` rounds down, as Python's; its `%` has the sign of the dividend, as C's.
def floormod(node: Term, a: Piece, b: Piece) -> Piece:
    return f"{wrap(a, SUM)} - {wrap(a, PRODUCT)} // {wrap(b, ATOM)} * {wrap(b, ATOM)}", SUM


def truncdiv(node: Term, a: Piece, b: Piece) -> Piece:
    divisor = wrap(b, ATOM)
    return f"({wrap(a, SUM)} - {wrap(a, PRODUCT)} % {divisor}) // {divisor}", PRODUCT


def element(node: Term, *index: Piece) -> Piece:
    return f"{node.value}_table[{', '.join(text for text, _ in index)}]", ATOM


def chosen(node: Term, *args: Piece) -> Piece:
    # Of two literals the compiler would not know the type.
    def typed(part: Term, piece: Piece) -> str:
        if part.op == "const" and part.sort != BOOL:
            return f"Int32({piece[0]})"
        return wrap(piece, COMPARE)

    c, a, b = map(typed, node.args, args)
    return f"{a} if {c} else {b}", TERNARY


def unexpanded(node: Term, *_: Any) -> Piece:
    raise SpecError("the number of ranges must be a number here: bind it, as in num_ranges=2")


RULES: Mapping[str, Rule] = {
    **TEXT,
    "const": literal,
    "sym": scalar,
    "floormod": floormod,
    "truncdiv": truncdiv,
    "truncmod": TEXT["floormod"],
    "min": call("cutlass.min"),
    "max": call("cutlass.max"),
    "and": joined("&"),
    "or": joined("|"),
    "not": lambda node, a: (f"~{wrap(a, ATOM)}", ATOM),
    "ite": chosen,
    "read": element,
    "any": unexpanded,
}
assert RULES.keys() == OPS.keys()


def to_cute_source(term: Term, tables: Sequence[str] = (), symbols: Sequence[str] = ()) -> str:
    """Python text that defines `make(*symbols)`, which returns a mask_mod.

    `tables` says which table each aux tensor is, `symbols` which names are arguments of `make`,
    Int32 that are known when the kernel runs. Raises SpecError for any other name.
    """
    term = computed(expand(term))
    if term.sort != BOOL:
        raise SpecError("a mask is a truth value")
    for name in sorted(symbols_of(term) - COORDINATES.keys() - set(symbols)):
        raise SpecError(f"{name!r} is neither a coordinate of a kernel nor one of the symbols")
    for name in sorted(tables_of(term) - set(tables)):
        raise SpecError(f"no aux tensor is given for table {name!r}")
    lines, answer = statements(term)
    used = symbols_of(term)
    first = [f"{SCALARS.get(n, n)} = {text}" for n, text in COORDINATES.items() if n in used]
    first += [
        f"{name}_table = aux_tensors[{i}]"
        for i, name in enumerate(tables)
        if name in tables_of(term)
    ]
    body = "".join(f"        {line}\n" for line in first + lines)
    return HEAD.format(parameters=", ".join(symbols)) + body + TAIL.format(answer=answer)


def computed(term: Term) -> Term:
    """`term` without operators on constants alone: the compiler would apply Python's, whose `%`
    is another operator than the one it compiles."""

    def rule(node: Term, *args: Term) -> Term:
        node = rebuild(node, *args)
        if not args or node.op == "read" or any(arg.op != "const" for arg in args):
            return node
        if node.op in DIVISIONS and args[1].value == 0:
            raise SpecError(f"{to_text(node)} divides by zero")
        return const(to_numpy(node, {}).item())

    return fold(term, dict.fromkeys(OPS, rule))


def source(mask: Mask, frame: Frame = BOTTOM_RIGHT, **constants: int) -> str:
    """The text for a mask, over the tables that it reads in the order of its declarations.

    On padded rows and keys, where any answer will do, indices are those of the last row or key.
    """
    term = inside_tables(mask.framed(frame, **constants), mask)
    order = [*mask.tables, *sorted(tables_of(term) - mask.tables.keys())]
    tables = [name for name in order if name in tables_of(term)]
    symbols = sorted(symbols_of(term) - COORDINATES.keys())
    given = [f"  aux_tensors[{i}]: {mask.tables[name].shape}" for i, name in enumerate(tables)]
    fixed = [f"  {name} = {value}, compiled in" for name, value in sorted(constants.items())
             if name in mask.params]
    head = [*textwrap.wrap(f"{mask.name}: {mask.sentence}", WIDEST), *given, *fixed]
    return "".join(f"# {line}\n" for line in head) + to_cute_source(term, tables, symbols)


def inside_tables(term: Term, mask: Mask) -> Term:
    """`term` with every index into a table kept inside it on padded rows and keys too; the same
    on real ones."""
    last = {
        sym("q_idx"): min_(sym("q_idx"), sym("seqlen_q") - 1),
        sym("kv_idx"): min_(sym("kv_idx"), sym("seqlen_k") - 1),
    }

    def kept(node: Term, *args: Term) -> Term:
        node = rebuild(node, *args)
        if node.op != "read":
            return node
        dims = mask.tables[node.value].dims
        pairs = zip(node.args, dims, strict=True)
        return rebuild(node, *(_kept_index(index, dim, last) for index, dim in pairs))

    return fold(term, dict.fromkeys(OPS, kept))


def _kept_index(index: Term, dim: Term, last: Mapping[Term, Term]) -> Term:
    if not {"q_idx", "kv_idx"} & symbols_of(index):
        return index
    index = substitute(index, last)
    if dim.op == "sym" and dim.value in COORDINATES:
        index = min_(index, dim - 1)
    return max_(index, 0)


def statements(term: Term) -> tuple[list[str], str]:
    """Assignments, one for each part that is used again or too long to stand in a line."""
    uses = Counter(
        arg
        for node in postorder(term)
        for i, arg in enumerate(node.args)
        for _ in range(2 if node.op in ("floormod", "truncdiv") else 1)
    )
    names = (name for i in count() if (name := f"part{i}") not in symbols_of(term))
    lines: list[str] = []

    def local(text: str) -> Piece:
        name = next(names)
        lines.append(f"{name} = {text}")
        return name, ATOM

    def kept(rule: Rule) -> Rule:
        def named(node: Term, *args: Piece) -> Piece:
            while len(rule(node, *args)[0]) > WIDEST:
                widest = max(range(len(args)), key=lambda i: len(args[i][0]))
                if args[widest][0].isidentifier():
                    break
                args = (*args[:widest], local(args[widest][0]), *args[widest + 1 :])
            piece = rule(node, *args)
            return local(piece[0]) if node.args and uses[node] > 1 else piece

        return named

    answer, _ = fold(term, {op: kept(rule) for op, rule in RULES.items()})
    return lines, answer


def to_cute(
    term: Term, *, tables: Sequence[str] = (), symbols: Sequence[str] = ()
) -> Callable[[Mapping[str, Any]], Callable[..., Any]]:
    """What `kernels.target.Target` calls `make`: values of the symbols, by name, to a mask_mod."""
    source = to_cute_source(term, tables, symbols)
    file = f"<mask {next(_numbers)}>"
    # The DSL compiles a function from its source, which it asks `inspect` for.
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    scope: dict[str, Any] = {"__name__": file}
    exec(compile(source, file, "exec"), scope)  # noqa: S102
    return lambda values: scope["make"](**values)
