"""Formulas as Triton code give what NumPy gives, on the table of examples and on random terms."""

from __future__ import annotations

import linecache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from spec.from_text import from_text
from spec.term import BOOL, OPS, SpecError, Term, any_, bind, const, eq, sym
from spec.to_numpy import to_numpy
from spec.to_triton import RULES, SPANS, fits_int32, numbers_of, to_triton, to_triton_source
from tests.examples import EXAMPLES, Example
from tests.strategies import terms

KERNEL = """\
import triton
import triton.language as tl


@triton.jit
def run(
    out, q, kv, numbers, of_row: tl.constexpr, visible: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    zero = tl.zeros((1, 1), tl.int64)
    none = tl.zeros((ROWS,), tl.int64)
    query = tl.load(q + tl.arange(0, ROWS))
    known = of_row(none, query, none, none, none, none, numbers)
    seen = visible(zero, tl.load(kv + column), known)
    tl.store(out + row * COLUMNS + column, tl.broadcast_to(seen, (ROWS, COLUMNS)).to(tl.int8))
"""
ROWS, COLUMNS = 4, 4


def evaluated(term: Term, env: dict[str, Any]) -> np.ndarray[Any, Any]:
    """A formula over x (down) and y (across), of up to 4 values each, through the interpreter."""
    linecache.cache["<run>"] = len(KERNEL), None, KERNEL.splitlines(keepends=True), "<run>"
    scope: dict[str, Any] = {"__name__": "run"}
    exec(compile(KERNEL, "<run>", "exec"), scope)  # noqa: S102
    x, y = np.ravel(env["x"]), np.ravel(env["y"])
    term = bind(term, {"x": sym("q_idx"), "y": sym("kv_idx")})
    tables = {
        name: torch.tensor(value, dtype=torch.int32)
        for name, value in env.items() if name not in ("x", "y")
    }
    padded = [torch.tensor(np.resize(each, 4), dtype=torch.int64) for each in (x, y)]
    out = torch.zeros(ROWS, COLUMNS, dtype=torch.int8)
    numbers = torch.tensor([*numbers_of(term, tables), 0], dtype=torch.int64)
    scope["run"][(1,)](out, *padded, numbers, *to_triton(term), ROWS, COLUMNS)
    return out.numpy()[: len(x), : len(y)] != 0


def test_every_operator_has_a_rule() -> None:
    assert RULES.keys() == SPANS.keys() == OPS.keys()


@pytest.mark.parametrize("text, fits", [
    ("kv_idx <= q_idx + seqlen_k - seqlen_q", True), ("q_idx - kv_idx < window", True),
    ("query_ranges[cu_seqlens_q[b] + q_idx, 0] <= kv_idx", True), ("q_idx // chunk == 0", True),
    ("q_idx * kv_idx > 0", False), ("prefix_lens[b] + 1 > kv_idx", False),
    ("kv_idx % window == 0", False), ("q_idx + other < kv_idx", False),
])
def test_what_may_leave_int32_is_known(text: str, fits: bool) -> None:
    assert fits_int32(from_text(text), {"window": 2**31 - 1, "chunk": 7}) == fits


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.text)
def test_examples_have_their_values(example: Example) -> None:
    for value in {*np.ravel(example.expected).tolist()}:
        if example.sort == BOOL:
            assert np.array_equal(evaluated(example.term, dict(example.env)), example.expected)
        else:
            got = evaluated(eq(example.term, int(value)), dict(example.env))
            assert np.array_equal(got, np.array(example.expected) == value)


@given(terms(BOOL))
@settings(max_examples=60, deadline=None)
def test_random_terms_agree_with_numpy(term: Term) -> None:
    env = {"x": [[-7], [0], [3], [8]], "y": [-3, -1, 2, 5], "t": [5, -7, 0, 2],
           "u": [[1, 4], [6, 6], [-1, -1]]}
    try:
        expected = to_numpy(term, {k: np.array(v) for k, v in env.items()})
    except (IndexError, SpecError):
        return
    assert np.array_equal(evaluated(term, env), np.broadcast_to(expected, (4, 4)))


def test_arithmetic_is_of_64_bits() -> None:
    term = from_text("x * x * x > 0")
    assert evaluated(term, {"x": [[2_000_000]], "y": [0]}).tolist() == [[True]]


def test_a_read_outside_its_table_is_no_read() -> None:
    term = from_text("t[x] == 0")
    assert evaluated(term, {"x": [[-1], [3]], "y": [0], "t": [5, 6, 7]}).all()


def test_what_has_no_meaning_here_is_refused() -> None:
    with pytest.raises(SpecError, match="truth value"):
        to_triton_source(sym("x"))
    with pytest.raises(SpecError, match="number of ranges"):
        to_triton_source(any_("r", sym("n"), eq(sym("x"), const(0))))
    with pytest.raises(SpecError, match="no value for 'window'"):
        numbers_of(from_text("q_idx - kv_idx < window"), {})
    with pytest.raises(SpecError, match="contiguous int32"):
        numbers_of(from_text("t[q_idx] == 0"), {"t": torch.zeros(3, dtype=torch.int64)})
