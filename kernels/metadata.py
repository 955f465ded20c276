"""The functions of a vLLM release that turn lists of ranges into tables for a kernel.

They are Python on the host. One is loaded alone, by itself, out of the release's file; it runs as
it is, and it runs on terms: a comparison of terms is taken both ways, one run for each, so that the
runs together say what the function does for every value of its numbers.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np

from kernels.machine import CannotLift
from kernels.provider import parsed
from spec.term import Term, and_, const, eq, ite, max_, min_, not_, sym, term

FILE = "vllm/v1/attention/backends/utils.py"
# What a builder takes, by the names of its parameters.
RANGES = "mm_prefix_range"
ROWS = ("out", RANGES, "query_start_loc_cpu", "seq_lens_cpu")
LISTED = (RANGES, "num_seqs", "device")
MOST_PATHS = 4096


@dataclass(frozen=True, slots=True)
class Builder:
    """One function: its parameters say what it builds. `node` is its definition."""

    name: str
    parameters: tuple[str, ...]
    node: ast.FunctionDef
    path: Path

    def changed(self, node: ast.FunctionDef) -> Builder:
        return Builder(self.name, self.parameters, node, self.path)


def builders(root: Path) -> list[Builder]:
    """Every module-level function of the release that takes the ranges of requests."""
    path = root / FILE
    if not path.is_file():
        return []
    found = []
    for node in parsed(path).body:
        if isinstance(node, ast.FunctionDef):
            names = tuple(each.arg for each in (*node.args.posonlyargs, *node.args.args))
            if RANGES in names:
                found.append(Builder(node.name, names, node, path))
    return found


def load(builder: Builder, scope: Mapping[str, Any]) -> Callable[..., Any]:
    """The function, with `scope` for the names that it looks up outside itself."""
    names: dict[str, Any] = {"__builtins__": vars(builtins), **scope}
    exec(_code(builder), names)
    return names[builder.name]


@lru_cache(maxsize=64)
def _code(builder: Builder) -> CodeType:
    node = ast.Module([builder.node], [])
    return compile(node, str(builder.path), "exec", __future__.annotations.compiler_flag, True)


@dataclass(frozen=True, slots=True)
class Requests:
    """A batch: the scheduled and the known tokens of each request, and the ranges of some."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    ranges: Mapping[int, tuple[tuple[int, int], ...]]

    def __str__(self) -> str:
        return (f"query_lens={list(self.query_lens)}, seq_lens={list(self.seq_lens)}, "
                f"ranges={ {r: list(each) for r, each in self.ranges.items()} }")


def run_rows(builder: Builder, requests: Requests, out: np.ndarray[Any, Any]) -> int:
    """The real function, which writes `out`, int32 [rows, 2], and gives the rows in use."""
    import torch

    starts = np.concatenate([[0], np.cumsum(requests.query_lens)]).astype(np.int32)
    function = load(builder, {"np": np, "torch": torch})
    return int(function(out, _mutable(requests), torch.from_numpy(starts),
                        torch.tensor(requests.seq_lens, dtype=torch.int32)))


def run_listed(builder: Builder, requests: Requests) -> np.ndarray[Any, Any] | None:
    """The real function: int32 [requests, ranges, 2], or None."""
    import torch

    def async_tensor_h2d(data: Any, dtype: Any, device: Any) -> Any:
        return torch.tensor(data, dtype=dtype, device=device)

    function = load(builder, {"torch": torch, "async_tensor_h2d": async_tensor_h2d})
    made = function(_mutable(requests), len(requests.query_lens), "cpu")
    return None if made is None else made.numpy()


def _mutable(requests: Requests) -> dict[int, list[tuple[int, int]]]:
    return {request: list(each) for request, each in requests.ranges.items()}


class _Choices:
    """The choices of one run: those of `script`, then True where nothing is chosen yet."""

    def __init__(self, script: Sequence[bool]) -> None:
        self.script, self.taken = list(script), {}

    def choose(self, claim: Term) -> bool:
        if claim.op == "const":
            return bool(claim.value)
        if claim.op == "not":
            return not self.choose(claim.args[0])
        if claim not in self.taken:
            free = len(self.taken) >= len(self.script)
            self.taken[claim] = free or self.script[len(self.taken)]
        return self.taken[claim]

    @property
    def condition(self) -> Term:
        return and_(*(claim if choice else not_(claim) for claim, choice in self.taken.items()))

    @property
    def next(self) -> list[bool] | None:
        """The choices of the run after this one; None where every one was made."""
        choices = list(self.taken.values())
        while choices and not choices[-1]:
            choices.pop()
        return [*choices[:-1], False] if choices else None


class _Unknown:
    """Part of a stand-in: whatever it does not have is named."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise CannotLift(f"{type(self).__name__.strip('_').lower()}.{name}: not modelled")


@dataclass(frozen=True, slots=True, eq=False)
class _Truth:
    """A comparison of terms; to ask whether it holds is to choose."""

    term: Term
    paths: _Choices

    def __bool__(self) -> bool:
        return self.paths.choose(self.term)


@dataclass(frozen=True, slots=True, eq=False)
class _Number(_Unknown):
    """An unbounded integer, as Python's are."""

    term: Term
    paths: _Choices

    def _made(self, made: Term) -> _Number:
        return _Number(made, self.paths)

    def _asked(self, claim: Term) -> _Truth:
        return _Truth(claim, self.paths)

    def __add__(self, other: Any) -> _Number: return self._made(self.term + _term(other))
    def __radd__(self, other: Any) -> _Number: return self._made(_term(other) + self.term)
    def __sub__(self, other: Any) -> _Number: return self._made(self.term - _term(other))
    def __rsub__(self, other: Any) -> _Number: return self._made(_term(other) - self.term)
    def __lt__(self, other: Any) -> _Truth: return self._asked(self.term < _term(other))
    def __le__(self, other: Any) -> _Truth: return self._asked(self.term <= _term(other))
    def __gt__(self, other: Any) -> _Truth: return self._asked(self.term > _term(other))
    def __ge__(self, other: Any) -> _Truth: return self._asked(self.term >= _term(other))
    def __eq__(self, other: Any) -> Any: return self._asked(eq(self.term, _term(other)))
    def __ne__(self, other: Any) -> Any: return self._asked(not_(eq(self.term, _term(other))))
    def __bool__(self) -> bool: return self.paths.choose(not_(eq(self.term, const(0))))

    def __index__(self) -> int:
        raise CannotLift("a symbolic number is used as a plain one")

    __hash__ = None  # type: ignore[assignment]


def _term(value: Any) -> Term:
    if isinstance(value, _Number):
        return value.term
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return term(int(value))
    raise CannotLift(f"a number beside a {type(value).__name__}")


def _extreme(of: Callable[..., Any], meant: Callable[[Any, Any], Term]) -> Callable[..., Any]:
    """`min` or `max`, of terms too; what is not a list of numbers goes to the real one."""
    def extreme(*values: Any, **options: Any) -> Any:
        numbers = [each for each in values if isinstance(each, _Number)]
        if not numbers or options:
            return of(*values, **options)
        return _Number(reduce(meant, map(_term, values)), numbers[0].paths)

    return extreme


def _integer(value: Any) -> Any:
    return value if isinstance(value, _Number) else int(value)


NUMERIC = {"int": _integer, "max": _extreme(max, max_), "min": _extreme(min, min_)}


@dataclass(frozen=True, slots=True)
class _Tensor(_Unknown):
    """An int32 tensor of one dimension on the CPU."""

    items: tuple[Any, ...]

    def __getitem__(self, index: int) -> Any:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)

    def numpy(self) -> _Tensor:
        return self


@dataclass(frozen=True, slots=True)
class Write:
    """Rows `first` to `last`, exclusive, of the table are set to `value`."""

    first: Term
    last: Term
    value: tuple[Term, Term]


@dataclass(frozen=True, slots=True)
class _Rows(_Unknown):
    """The table [rows, 2] that is written, `rows` of them there."""

    rows: _Number
    writes: list[Write] = field(default_factory=list)

    @property
    def shape(self) -> tuple[Any, int]:
        return self.rows, 2

    def __setitem__(self, index: Any, value: Any) -> None:
        if not isinstance(index, slice) or index.step is not None or index.stop is None:
            raise CannotLift("the table is written otherwise than in a slice of rows")
        pair = value if isinstance(value, tuple) else (value, value)
        if len(pair) != 2:
            raise CannotLift(f"a row of {len(pair)} numbers")
        first = const(0) if index.start is None else _term(index.start)
        self.writes.append(Write(first, _term(index.stop), (_term(pair[0]), _term(pair[1]))))


@dataclass(frozen=True, slots=True)
class _Listed(_Unknown):
    """A tensor that was made of nested lists; only its shape may change."""

    data: Any

    def view(self, *shape: int) -> _Listed:
        pairs = np.empty(len(self.pairs), object)
        pairs[:] = self.pairs
        if shape[-1:] != (2,) or int(np.prod(shape[:-1])) != len(pairs):
            raise CannotLift(f"{len(pairs)} pairs as {list(shape)}")
        return _Listed(pairs.reshape(shape[:-1]).tolist())

    @property
    def pairs(self) -> list[tuple[Any, Any]]:
        found: list[tuple[Any, Any]] = []

        def collect(data: Any) -> None:
            for each in data:
                found.append(each) if isinstance(each, tuple) else collect(each)

        collect(self.data)
        return found


class _Torch(_Unknown):
    int32 = "int32"


@dataclass(frozen=True, slots=True)
class Shape:
    """How many ranges each request of a batch has; None for one that the dict leaves out."""

    counts: tuple[int | None, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Symbols of `Requests.query_lens`, then of `seq_lens`, then the ends of each range."""
        each = range(len(self.counts))
        return (*(query_len(r).value for r in each), *(seq_len(r).value for r in each),
                *(end.value for r, count in enumerate(self.counts) for k in range(count or 0)
                  for end in ends(r, k)))

    def values(self, requests: Requests) -> dict[str, int]:
        """The symbols' values for a batch of this shape."""
        flat = [end for r, count in enumerate(self.counts) if count
                for row in requests.ranges[r] for end in row]
        numbers = (*requests.query_lens, *requests.seq_lens, *flat)
        return dict(zip(self.names, numbers, strict=True))


def query_len(request: int) -> Term:
    return sym(f"query_len_{request}")


def seq_len(request: int) -> Term:
    return sym(f"seq_len_{request}")


def ends(request: int, index: int) -> tuple[Term, Term]:
    return sym(f"start_{request}_{index}"), sym(f"end_{request}_{index}")


def first_row(request: int) -> Term:
    """The packed row of a request's first query."""
    return reduce(lambda sum_, r: sum_ + query_len(r), range(request), const(0))


TABLE_ROWS = sym("table_rows")


@dataclass(frozen=True, slots=True)
class Run:
    """One way through the function: where `condition` holds it does this.

    `used` is the number of rows that it gives, `writes` what it wrote; or `table` the pairs of each
    request, None where it gives none. `raised` is the exception that ended it.
    """

    condition: Term
    used: Term = const(0)
    writes: tuple[Write, ...] = ()
    table: tuple[tuple[tuple[Term, Term], ...], ...] | None = None
    raised: str = ""

    def row(self, index: Term, before: tuple[Term, Term]) -> tuple[Term, Term]:
        """What a row of the table holds afterwards."""
        first, last = before
        for write in self.writes:
            inside = (write.first <= index) & (index < write.last)
            first, last = ite(inside, write.value[0], first), ite(inside, write.value[1], last)
        return first, last


def paths(builder: Builder, shape: Shape) -> list[Run]:
    """Every run of the function on a batch of that shape. Raises CannotLift."""
    run = {ROWS: _path_of_rows, LISTED: _path_of_listed}.get(builder.parameters)
    if run is None:
        raise CannotLift(f"{builder.name}: parameters {', '.join(builder.parameters)}")
    return list(_explored(builder, shape, run))


def _explored(builder: Builder, shape: Shape, run: Callable[..., Run]) -> Iterator[Run]:
    script: list[bool] | None = []
    for _ in range(MOST_PATHS):
        if script is None:
            return
        chosen = _Choices(script)
        try:
            yield run(builder, shape, chosen)
        except CannotLift:
            raise
        except AssertionError as error:
            yield Run(chosen.condition, raised=type(error).__name__)
        except Exception as error:
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise CannotLift(f"{builder.name}: {said}") from None
        script = chosen.next
    raise CannotLift(f"{builder.name}: more than {MOST_PATHS} ways through it")


def _ranges(shape: Shape, chosen: _Choices) -> dict[int, list[tuple[_Number, ...]]]:
    return {r: [tuple(_Number(end, chosen) for end in ends(r, k)) for k in range(count)]
            for r, count in enumerate(shape.counts) if count is not None}


def _path_of_rows(builder: Builder, shape: Shape, chosen: _Choices) -> Run:
    each = range(len(shape.counts))
    starts = tuple(_Number(first_row(r), chosen) for r in range(len(shape.counts) + 1))
    out = _Rows(_Number(TABLE_ROWS, chosen))
    lens = _Tensor(tuple(_Number(seq_len(r), chosen) for r in each))
    function = load(builder, {**NUMERIC, "np": _Unknown(), "torch": _Torch()})
    used = function(out, _ranges(shape, chosen), _Tensor(starts), lens)
    return Run(chosen.condition, _term(used), tuple(out.writes))


def _path_of_listed(builder: Builder, shape: Shape, chosen: _Choices) -> Run:
    def async_tensor_h2d(data: Any, dtype: Any, device: Any) -> _Listed:
        if dtype != _Torch.int32:
            raise CannotLift(f"a table of {dtype}")
        return _Listed(data)

    scope = {**NUMERIC, "torch": _Torch(), "async_tensor_h2d": async_tensor_h2d}
    made = load(builder, scope)(_ranges(shape, chosen), len(shape.counts), None)
    if made is None:
        return Run(chosen.condition)
    if not isinstance(made, _Listed) or len(made.data) != len(shape.counts):
        raise CannotLift(f"{builder.name}: it gives no row for each request")
    table = tuple(tuple((_term(a), _term(b)) for a, b in rows) for rows in made.data)
    return Run(chosen.condition, table=table)


def mutants(builder: Builder) -> Iterator[tuple[str, Builder]]:
    """The function with one fault in one place: an end moved, a clamp or a statement dropped."""
    body = ast.Module(builder.node.body, [])
    for at, node in enumerate(ast.walk(body)):
        for phrase, change in _faults(node):
            changed = copy.deepcopy(builder.node)
            _replace(changed, list(ast.walk(ast.Module(changed.body, [])))[at], change)
            ast.fix_missing_locations(changed)
            yield f"line {node.lineno}: {phrase}", builder.changed(changed)


Change = Callable[[Any], ast.AST]


def _faults(node: ast.AST) -> Iterator[tuple[str, Change]]:
    match node:
        case ast.Call(func=ast.Name(id="max" | "min" as name), args=[_, _]):
            yield f"without {name}", lambda found: found.args[0]
            other = "min" if name == "max" else "max"
            yield f"{other} for {name}", lambda found: ast.Call(
                ast.Name(other, ast.Load()), found.args, [])
        case ast.BinOp(op=ast.Add() | ast.Sub(), right=ast.Constant(value=1)):
            yield f"`{ast.unparse(node.left)}` for `{ast.unparse(node)}`", lambda found: found.left
        case ast.BinOp(op=ast.Sub(), right=ast.Name()):
            yield f"`{ast.unparse(node.left)}` for `{ast.unparse(node)}`", lambda found: found.left
        case ast.Compare(ops=[ast.GtE() | ast.Gt() as op]):
            strict = ast.Gt() if isinstance(op, ast.GtE) else ast.GtE()
            yield f"`{ast.unparse(node)}` off by one", lambda found: ast.Compare(
                found.left, [strict], found.comparators)
        case ast.Assign(targets=[ast.Subscript()]):
            yield f"without `{ast.unparse(node)}`", lambda found: ast.Pass()
        case ast.Tuple(elts=[ast.Constant(value=0), ast.Constant(value=0)]):
            yield "(0, 1) for (0, 0)", lambda found: ast.Tuple(
                [ast.Constant(0), ast.Constant(1)], ast.Load())
        case ast.Compare(ops=[ast.Eq()]):
            yield f"True for `{ast.unparse(node)}`", lambda found: ast.Constant(True)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            yield f"`{ast.unparse(left)}` for `{ast.unparse(node)}`", lambda found: found.left
            yield f"`{ast.unparse(right)}` for `{ast.unparse(node)}`", lambda found: found.right
        case ast.Tuple(elts=[_, _], ctx=ast.Load()):
            yield f"`{ast.unparse(node)}` the other way round", lambda found: ast.Tuple(
                found.elts[::-1], ast.Load())


def _replace(tree: ast.AST, old: ast.AST, change: Change) -> None:
    class Put(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            if node is old:
                return ast.copy_location(change(node), node)
            return self.generic_visit(node)

    Put().visit(tree)
