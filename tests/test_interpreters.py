"""Every interpreter gives every operator the meaning that Python's own arithmetic gives it."""

from __future__ import annotations

import itertools
import math
import operator
import time
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import z3
from hypothesis import given, settings

from spec import to_cute, to_flex, to_latex, to_numpy, to_text, to_torch, to_z3
from spec.from_text import from_text
from spec.term import (
    BOOL,
    INT,
    OPS,
    SpecError,
    Term,
    bind,
    const,
    eq,
    expand,
    ite,
    postorder,
    read,
    sym,
)
from tests.examples import EXAMPLES, Example
from tests.examples import TABLES as EXAMPLE_TABLES
from tests.strategies import terms

Interpreter = Callable[[Term, Mapping[str, Any]], Any]


def _truncdiv(a: int, b: int) -> int:
    return math.trunc(Fraction(a, b)) if b else 0


def _floordiv(a: int, b: int) -> int:
    return math.floor(Fraction(a, b)) if b else 0


class Elements:
    """A table for `eval`: `table[i, j]` on nested lists."""

    def __init__(self, entries: Any) -> None:
        self.entries = np.asarray(entries, dtype=object)

    def __getitem__(self, index: Any) -> int:
        return self.entries[index]


FUNCTIONS = {"truncdiv": _truncdiv, "truncmod": lambda a, b: a - b * _truncdiv(a, b)}


def by_python(term: Term, env: Mapping[str, Any]) -> Any:
    """Python's own evaluation of the printed text, one cell at a time."""
    code = compile(to_text.to_text(term), "<term>", "eval")
    tables = {name: Elements(env[name]) for name in EXAMPLE_TABLES}

    def cell(x: Any, y: Any) -> Any:
        return eval(code, {"x": int(x), "y": int(y), **tables, **FUNCTIONS})

    return np.vectorize(cell, otypes=[object])(np.asarray(env["x"]), np.asarray(env["y"]))


def by_numpy(term: Term, env: Mapping[str, Any]) -> Any:
    return to_numpy.to_numpy(term, {name: np.asarray(value) for name, value in env.items()})


def by_torch(term: Term, env: Mapping[str, Any]) -> Any:
    return to_torch.to_torch(term, {k: torch.tensor(v) for k, v in env.items()}).numpy()


def by_flex(term: Term, env: Mapping[str, Any]) -> Any:
    """As a mask_mod that FlexAttention maps over each index, x and y in place of q_idx and kv_idx.

    A mask_mod says True or False: a number is compared with the value that NumPy gives, in place
    of the head.
    """
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    renamed = bind(term, {"x": sym("q_idx"), "y": sym("kv_idx")})
    tables = {name: torch.tensor(env[name]) for name in EXAMPLE_TABLES}
    x, y = torch.broadcast_tensors(torch.tensor(env["x"]), torch.tensor(env["y"]))
    want = torch.tensor(by_numpy(term, env)).broadcast_to(x.shape)
    formula = renamed if term.sort == BOOL else eq(renamed, sym("h"))
    function = to_flex.mask_mod(formula, tables)
    with TransformGetItemToIndex():
        got = torch.vmap(function)(torch.zeros(x.numel()), want.flatten(), x.flatten(), y.flatten())
    got = got.reshape(x.shape).numpy()
    return got if term.sort == BOOL else np.where(got, want.numpy(), np.iinfo(np.int64).min)


def by_z3(term: Term, env: Mapping[str, Any]) -> Any:
    expression = to_z3.to_z3(term)
    for name, entries in EXAMPLE_TABLES.items():
        expression = z3.substitute_funs(expression, _as_function(name, np.asarray(entries)))

    def cell(x: Any, y: Any) -> Any:
        values = (z3.Int("x"), z3.IntVal(int(x))), (z3.Int("y"), z3.IntVal(int(y)))
        value = z3.simplify(z3.substitute(expression, *values))
        return z3.is_true(value) if z3.is_bool(value) else value.as_long()

    return np.vectorize(cell, otypes=[object])(np.asarray(env["x"]), np.asarray(env["y"]))


def _as_function(name: str, entries: Any) -> tuple[Any, Any]:
    arguments = [z3.Var(axis, z3.IntSort()) for axis in range(entries.ndim)]
    value = z3.IntVal(-999)
    for index in np.ndindex(entries.shape):
        here = z3.And(*(a == i for a, i in zip(arguments, index, strict=True)))
        value = z3.If(here, z3.IntVal(int(entries[index])), value)
    return z3.Function(name, *[z3.IntSort()] * (entries.ndim + 1)), value


INTERPRETERS: Mapping[str, Interpreter] = {
    "python": by_python, "numpy": by_numpy, "torch": by_torch, "flex": by_flex, "z3": by_z3,
}
# Written apart from every rule table.
MEANING: Mapping[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul,
    "floordiv": _floordiv, "floormod": lambda a, b: a - b * _floordiv(a, b),
    "truncdiv": _truncdiv, "truncmod": lambda a, b: math.fmod(a, b) if b else a,
    "min": min, "max": max, "lt": operator.lt, "le": operator.le, "eq": operator.eq,
}
BOX = range(-5, 6)


def test_every_interpreter_has_a_rule_for_every_operator() -> None:
    tables = [
        to_text.RULES, to_latex.RULES, to_numpy.rules({}), to_torch.rules({}), to_flex.rules(()),
        to_z3.RULES, to_cute.RULES,
    ]
    for rules in tables:
        assert rules.keys() == OPS.keys()
    assert len(OPS) <= 20


def test_examples_use_every_operator() -> None:
    assert {t.op for example in EXAMPLES for t in postorder(example.term)} == OPS.keys()


@pytest.mark.parametrize("name", INTERPRETERS)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.text)
def test_interpreters_give_the_value_of_each_example(example: Example, name: str) -> None:
    got = INTERPRETERS[name](example.term, example.env)
    assert np.broadcast_to(got, (3, 3)).tolist() == example.expected


@pytest.mark.parametrize("name", INTERPRETERS)
@pytest.mark.parametrize("op", MEANING)
def test_operators_agree_with_integers_on_a_box(op: str, name: str) -> None:
    defined = name != "python" or not op.startswith("floor")
    pairs = [(a, b) for a, b in itertools.product(BOX, BOX) if b or defined]
    env = {"x": [a for a, _ in pairs], "y": [b for _, b in pairs], **EXAMPLE_TABLES}
    got = INTERPRETERS[name](Term(op, (sym("x"), sym("y"))), env)
    assert list(got) == [MEANING[op](a, b) for a, b in pairs]


@pytest.mark.parametrize("name", INTERPRETERS)
@pytest.mark.parametrize("op", [op for op in MEANING if OPS[op].result == INT])
def test_operators_agree_where_one_side_is_a_number(op: str, name: str) -> None:
    numbers = [-3, 4] if name == "python" and op.startswith("floor") else [-3, 0, 4]
    env = {"x": [a for a in BOX if a or 0 in numbers], **EXAMPLE_TABLES}
    env["y"] = [0] * len(env["x"])
    for number in numbers:
        left = INTERPRETERS[name](Term(op, (const(number), sym("x"))), env)
        right = INTERPRETERS[name](Term(op, (sym("x"), const(number))), env)
        for got, want in (
            (left, [MEANING[op](number, x) for x in env["x"]]),
            (right, [MEANING[op](x, number) for x in env["x"]]),
        ):
            assert np.broadcast_to(got, len(want)).tolist() == want


@settings(max_examples=150, deadline=None)
@given(term=terms())
def test_interpreters_agree_on_random_terms(term: Term) -> None:
    env = {"x": [[-2], [3]], "y": [-1, 0, 4], **EXAMPLE_TABLES}
    want = by_python(term, env).tolist()
    for interpret in (by_numpy, by_torch, by_flex, by_z3):
        assert np.broadcast_to(interpret(term, env), (2, 3)).tolist() == want, interpret.__name__


def doubled(depth: int) -> Term:
    """A chain that is 2**depth nodes as a tree and 2 * depth as a graph; its value is
    2**depth * x mod 7."""
    term = sym("x")
    for _ in range(depth):
        term = (term + term) % 7
    return term


@pytest.mark.parametrize("evaluate", [
    lambda t: to_numpy.to_numpy(t, {"x": 3}), lambda t: to_torch.to_torch(t, {"x": 3}),
    lambda t: z3.simplify(z3.substitute(to_z3.to_z3(t), (z3.Int("x"), z3.IntVal(3)))).as_long(),
], ids=["numpy", "torch", "z3"])
def test_shared_parts_are_computed_once(evaluate: Callable[[Term], Any]) -> None:
    start = time.perf_counter()
    assert int(evaluate(doubled(400))) == 3 * 2**400 % 7
    assert time.perf_counter() - start < 1


def test_numpy_names_what_has_no_value() -> None:
    with pytest.raises(SpecError, match="no value for 'x'"):
        to_numpy.to_numpy(sym("x"), {})
    with pytest.raises(SpecError, match="no value for table 't'"):
        to_numpy.to_numpy(read("t", 0), {})


@pytest.mark.parametrize("index", [-1, 4])
def test_numpy_reads_no_table_beyond_its_ends(index: int) -> None:
    with pytest.raises(IndexError):
        to_numpy.to_numpy(read("t", sym("x")), {"x": [0, index], "t": np.arange(4)})


def test_small_tables_do_not_wrap() -> None:
    table = np.array([2**31 - 1], dtype=np.int32)
    doubled_entry = read("t", 0) + read("t", 0)
    assert to_numpy.to_numpy(doubled_entry, {"t": table}) == 2**32 - 2
    assert to_torch.to_torch(doubled_entry, {"t": torch.tensor(table)}).item() == 2**32 - 2


def test_any_without_a_number_of_rounds_is_refused() -> None:
    endless = from_text("any(r == x for r in range(n))")
    env = {"n": 1, "x": 0}
    for evaluate in (to_numpy.to_numpy, to_torch.to_torch, lambda term, env: to_z3.to_z3(term)):
        with pytest.raises(SpecError, match="must be a number"):
            evaluate(endless, env)


def test_expand_writes_any_out() -> None:
    text = "any(r + s == x for r in range(2))"
    assert expand(from_text(text)) is from_text("0 + s == x or 1 + s == x")


def test_latex_is_math_that_a_typesetter_accepts() -> None:
    from matplotlib.mathtext import MathTextParser

    parser = MathTextParser("path")
    for example in EXAMPLES:
        parser.parse(f"${to_latex.to_latex(example.term)}$")


@settings(max_examples=60, deadline=None)
@given(term=terms(depth=3))
def test_latex_has_matching_brackets(term: Term) -> None:
    text = to_latex.to_latex(term)
    for opening, closing in (("{", "}"), ("(", ")"), (r"\{", r"\}"), (r"\lfloor", r"\rfloor")):
        assert text.count(opening) == text.count(closing)


def test_latex_puts_parentheses_where_they_change_the_meaning() -> None:
    x, y = sym("x"), sym("y")
    assert to_latex.to_latex(x - (y - 1)) == "x - (y - 1)"
    assert to_latex.to_latex(x * (y + -1)) == r"x \cdot (y + (-1))"
    assert to_latex.to_latex((x < y) & ((y < 0) | (x < 0))) == r"x < y \wedge (y < 0 \vee x < 0)"
    assert to_latex.to_latex(~((x < y) & (y < x))) == r"\neg (x < y \wedge y < x)"
    assert to_latex.to_latex(ite(x < y, x, y) + 1) == (
        r"(x \;\mathrm{if}\; x < y \;\mathrm{else}\; y) + 1"
    )
