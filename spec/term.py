"""Terms: the one language in which masks, kernels and claims are written.

A term is immutable and interned: building the same term twice gives the same object, so `==` is
identity and costs nothing. `eq(a, b)` builds an equation; a comparison such as `a < b` builds a
term too, and asking a term for its truth value raises.

Sorts are Int (unbounded) and Bool. `OPS` lists every operator. An interpreter is a table with one
rule per operator, `rule(term, *values of the arguments)`, handed to `fold`. Every operator has a
value everywhere: a quotient by zero is 0, and so the remainder is the dividend.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

INT, BOOL = "Int", "Bool"
ANY_SORT = "same"


class SpecError(Exception):
    """A spec, a parameter or a binding that cannot be used; the message is one line."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operator: argument sorts (`...` repeats the last one) and result sort."""

    args: tuple[Any, ...]
    result: str
    meaning: str


OPS: Mapping[str, Op] = {
    "const": Op((), ANY_SORT, "a number, or True / False"),
    "sym": Op((), INT, "a named unknown"),
    "add": Op((INT, INT), INT, "a + b"),
    "sub": Op((INT, INT), INT, "a - b"),
    "mul": Op((INT, INT), INT, "a * b"),
    "floordiv": Op((INT, INT), INT, "quotient rounded down, as Python's a // b"),
    "floormod": Op((INT, INT), INT, "remainder with the sign of b, as Python's a % b"),
    "truncdiv": Op((INT, INT), INT, "quotient rounded to zero, as C's a / b"),
    "truncmod": Op((INT, INT), INT, "remainder with the sign of a, as C's a % b"),
    "min": Op((INT, INT), INT, "the smaller"),
    "max": Op((INT, INT), INT, "the larger"),
    "lt": Op((INT, INT), BOOL, "a < b"),
    "le": Op((INT, INT), BOOL, "a <= b"),
    "eq": Op((INT, INT), BOOL, "a == b"),
    "and": Op((BOOL, ...), BOOL, "all of them"),
    "or": Op((BOOL, ...), BOOL, "at least one of them"),
    "not": Op((BOOL,), BOOL, "not a"),
    "ite": Op((BOOL, ANY_SORT, ANY_SORT), ANY_SORT, "b if a else c"),
    "read": Op((INT, ...), INT, "an element of a named table"),
    "any": Op((INT, BOOL), BOOL, "b for at least one value of the bound index in 0 .. a - 1"),
}
COMMUTES = frozenset({"add", "mul", "min", "max", "eq", "and", "or"})

_interned: WeakValueDictionary[tuple[Any, ...], Term] = WeakValueDictionary()


class Term:
    """One node. `value` is the number, the name of the symbol or table, or the bound index."""

    __slots__ = ("__weakref__", "args", "op", "quantified", "size", "sort", "value")
    op: str
    args: tuple[Term, ...]
    value: Any
    sort: str
    quantified: bool  # an `any` occurs in it
    size: int  # nodes when written out, shared ones as often as they are used

    def __new__(cls, op: str, args: tuple[Term, ...] = (), value: Any = None) -> Term:
        key = (op, args, value, type(value))
        if (known := _interned.get(key)) is not None:
            return known
        sort = _sort_of(op, args, value)
        term = object.__new__(cls)
        quantified = op == "any" or any(arg.quantified for arg in args)
        size = 1 + sum(arg.size for arg in args)
        fields = (args, op, quantified, size, sort, value)
        for name, field in zip(cls.__slots__[1:], fields, strict=True):
            object.__setattr__(term, name, field)
        return _interned.setdefault(key, term)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("terms are immutable")

    def __reduce__(self) -> tuple[Any, ...]:
        return Term, (self.op, self.args, self.value)

    def __bool__(self) -> bool:
        raise TypeError("a term has no truth value: use & | ~ and eq(a, b), or evaluate it")

    def __repr__(self) -> str:
        from spec.to_text import to_text

        return f"Term({to_text(self)!r})" if self.size <= 1000 else f"Term({self.op}, too long)"

    def __add__(self, other: Any) -> Term: return Term("add", (self, term(other)))
    def __radd__(self, other: Any) -> Term: return Term("add", (term(other), self))
    def __sub__(self, other: Any) -> Term: return Term("sub", (self, term(other)))
    def __rsub__(self, other: Any) -> Term: return Term("sub", (term(other), self))
    def __mul__(self, other: Any) -> Term: return Term("mul", (self, term(other)))
    def __rmul__(self, other: Any) -> Term: return Term("mul", (term(other), self))
    def __floordiv__(self, other: Any) -> Term: return Term("floordiv", (self, term(other)))
    def __mod__(self, other: Any) -> Term: return Term("floormod", (self, term(other)))
    def __neg__(self) -> Term: return Term("sub", (const(0), self))
    def __lt__(self, other: Any) -> Term: return Term("lt", (self, term(other)))
    def __le__(self, other: Any) -> Term: return Term("le", (self, term(other)))
    def __gt__(self, other: Any) -> Term: return Term("lt", (term(other), self))
    def __ge__(self, other: Any) -> Term: return Term("le", (term(other), self))
    def __and__(self, other: Term) -> Term: return and_(self, other)
    def __or__(self, other: Term) -> Term: return or_(self, other)
    def __invert__(self) -> Term: return not_(self)


def _sort_of(op: str, args: tuple[Term, ...], value: Any) -> str:
    if op == "const":
        return BOOL if isinstance(value, bool) else INT
    signature = OPS[op].args
    if ... in signature:
        signature = signature[:-1] * len(args)
    if len(signature) != len(args):
        raise SpecError(f"`{op}` takes {len(signature)} arguments, not {len(args)}")
    free = args[1].sort if op == "ite" else ANY_SORT
    for arg, sort in zip(args, signature, strict=True):
        if arg.sort != (sort if sort != ANY_SORT else free):
            raise SpecError(f"`{op}` needs {sort if sort != ANY_SORT else free}, got {arg!r}")
    return OPS[op].result if OPS[op].result != ANY_SORT else free


def const(value: int | bool) -> Term:
    return Term("const", (), value if isinstance(value, bool) else int(value))


TRUE, FALSE = const(True), const(False)


def sym(name: str) -> Term:
    return Term("sym", (), name)


def bound(name: str) -> Term:
    """The index of an enclosing `any_(name, ...)`; its name space is apart from that of `sym`."""
    return Term("sym", (), "%" + name)


def term(value: Any) -> Term:
    return value if isinstance(value, Term) else const(value)


def eq(a: Any, b: Any) -> Term: return Term("eq", (term(a), term(b)))
def ne(a: Any, b: Any) -> Term: return not_(eq(a, b))
def min_(a: Any, b: Any) -> Term: return Term("min", (term(a), term(b)))
def max_(a: Any, b: Any) -> Term: return Term("max", (term(a), term(b)))
def truncdiv(a: Any, b: Any) -> Term: return Term("truncdiv", (term(a), term(b)))
def truncmod(a: Any, b: Any) -> Term: return Term("truncmod", (term(a), term(b)))
def not_(a: Term) -> Term: return Term("not", (a,))
def ite(c: Term, a: Any, b: Any) -> Term: return Term("ite", (c, term(a), term(b)))
def read(table: str, *index: Any) -> Term: return Term("read", tuple(map(term, index)), table)
def implies(a: Term, b: Term) -> Term: return or_(not_(a), b)
def iff(a: Term, b: Term) -> Term: return ite(a, b, not_(b))
def and_(*args: Term) -> Term: return _flat("and", args, TRUE)
def or_(*args: Term) -> Term: return _flat("or", args, FALSE)


def _flat(op: str, args: tuple[Term, ...], empty: Term) -> Term:
    flat = [part for arg in args for part in (arg.args if arg.op == op else (arg,))]
    return empty if not flat else flat[0] if len(flat) == 1 else Term(op, tuple(flat))


def any_(index: str, count: Any, body: Term) -> Term:
    """True where `body` holds for at least one value of `bound(index)` in 0 .. count - 1."""
    if any(t.op == "any" and t.value == index for t in postorder(body)):
        raise SpecError(f"index {index!r} is bound twice")
    if index in symbols(body):
        raise SpecError(f"{index!r} is an unknown and an index")
    return Term("any", (term(count), body), index)


def all_(index: str, count: Any, body: Term) -> Term:
    return not_(any_(index, count, not_(body)))


def postorder(*roots: Term, known: Container[Term] = ()) -> Iterator[Term]:
    """Every distinct node once, arguments before the node that uses them; nothing of a `known`
    node."""
    seen: set[Term] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node
        elif node not in seen and node not in known:
            seen.add(node)
            stack.append((node, True))
            stack.extend((arg, False) for arg in reversed(node.args) if arg not in seen)


Rule = Callable[..., Any]


def fold(root: Term, rules: Mapping[str, Rule], memo: dict[Term, Any] | None = None) -> Any:
    """The value of `root`; every distinct node is computed once. `memo` carries over values."""
    memo = {} if memo is None else memo
    for node in postorder(root, known=memo):
        memo[node] = rules[node.op](node, *[memo[arg] for arg in node.args])
    return memo[root]


def rebuild(node: Term, *args: Term) -> Term:
    """`node` with other arguments."""
    if args == node.args:
        return node
    if node.op in ("and", "or"):
        return _flat(node.op, args, TRUE if node.op == "and" else FALSE)
    return Term(node.op, args, node.value)


_REBUILD: Mapping[str, Rule] = dict.fromkeys(OPS, rebuild)


def substitute(root: Term, replacement: Mapping[Term, Term]) -> Term:
    """`root` with each key replaced by its value; what was put in is not looked at again."""
    if not replacement:
        return root
    return fold(root, _REBUILD, dict(replacement))


def bind(root: Term, values: Mapping[str, Any]) -> Term:
    """`root` with symbols, by name, replaced by terms or numbers."""
    return substitute(root, {sym(name): term(value) for name, value in values.items()})


def _number(count: Term) -> int | None:
    match count.op, [_number(arg) for arg in count.args]:
        case "const", _:
            return count.value
        case "add", [int() as a, int() as b]:
            return a + b
        case "sub", [int() as a, int() as b]:
            return a - b
    return None


MOST_NODES = 200_000


def expand(root: Term) -> Term:
    """`root` with every `any` of a constant count written out."""
    return _expanded(root) if root.quantified else root


@lru_cache(maxsize=1024)
def _expanded(root: Term) -> Term:
    def rule(node: Term, *args: Term) -> Term:
        if node.op != "any" or (count := _number(args[0])) is None:
            return rebuild(node, *args)
        if count * args[1].size > MOST_NODES:
            raise SpecError(f"any(... for {node.value} in range({count})) is too long to write out")
        index = bound(node.value)
        return or_(*(substitute(args[1], {index: const(i)}) for i in range(count)))

    return fold(root, dict.fromkeys(OPS, rule))


def symbols(*roots: Term) -> set[str]:
    """Names of the free symbols."""
    return {t.value for t in postorder(*roots) if t.op == "sym" and t.value[0] != "%"}


def tables(*roots: Term) -> set[str]:
    """Names of the tables that are read."""
    return {t.value for t in postorder(*roots) if t.op == "read"}


def reads(*roots: Term) -> list[Term]:
    return [t for t in postorder(*roots) if t.op == "read"]
