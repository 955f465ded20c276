"""A term becomes CuTe code, and the code, lifted and executed, is the term."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from kernels.from_cute import lift
from kernels.run_cute import run
from kernels.target import Target
from spec.masks import MASKS
from spec.term import (
    FALSE,
    OPS,
    TRUE,
    SpecError,
    Term,
    any_,
    bound,
    const,
    eq,
    expand,
    ite,
    max_,
    min_,
    read,
    sym,
    truncdiv,
    truncmod,
)
from spec.to_cute import RULES, source, to_cute, to_cute_source
from spec.to_numpy import to_numpy

CELLS = 10_000
Q, KV, W = sym("q_idx"), sym("kv_idx"), sym("window")
TABLES = ("ranges", "ids")

TERMS: dict[str, Term] = {
    "const": TRUE & (const(-3) < Q) | FALSE,
    "sym": sym("b") + sym("h") + sym("seqlen_q") < sym("offset_q") + sym("offset_k"),
    "add": Q + KV <= W,
    "sub": 3 - Q - (KV - W) <= -2,
    "mul": Q * KV < W * -2,
    "floordiv": eq(Q // W, KV // -3),
    "floormod": eq(Q % W, KV % -3),
    "truncdiv": eq(truncdiv(Q, W), truncdiv(KV - 1, -3)),
    "truncmod": eq(truncmod(Q, W), truncmod(KV - 1, -3)),
    "min": min_(Q, W) <= min_(KV, 2),
    "max": max_(Q, W) <= max_(KV, 2),
    "lt": Q < KV,
    "le": Q <= KV,
    "eq": eq(Q, KV),
    "and": (Q <= KV) & (KV < W) & (Q < 3),
    "or": (Q <= KV) | (KV < W) | (Q < 3),
    "not": ~((Q <= KV) & ~eq(KV, W)),
    "ite": ite(Q < KV, ite(KV < W, 5, -5), W) <= ite(eq(Q, W), KV, 3),
    "read": read("ranges", sym("b"), 1, const(0)) <= read("ids", read("ids", sym("h"))),
    "any": any_("r", 2, read("ranges", sym("b"), bound("r"), 1) <= Q - bound("r")),
    "constants": eq(truncmod(const(-7), const(2)) + truncdiv(-7, 2), Q + const(-7) % 2 * 2),
    "choice of truths": ite(Q < KV, Q < W, ~(KV < W)),
    "shared": eq((Q + KV) % 5, truncdiv(Q + KV, 5)) | (Q + KV < 0),
}


def target(term: Term, symbols: tuple[str, ...] = ("window",)) -> Target:
    return Target(
        target="generated",
        spec="none",
        make=to_cute(term, tables=TABLES, symbols=symbols),
        symbols=symbols,
        layouts=(TABLES,),
        ranks={"ids": 1},
    )


def environment() -> Mapping[str, Any]:
    rng = np.random.default_rng(3)
    names = ("q_idx", "kv_idx", "seqlen_q", "seqlen_k", "offset_q", "offset_k")
    cells = {name: rng.integers(-9, 10, CELLS) for name in names}
    cells["window"] = rng.choice([-4, -3, -2, -1, 1, 2, 3, 7], CELLS)
    cells |= {name: rng.integers(0, 3, CELLS) for name in ("b", "h")}
    tables = {"ranges": rng.integers(-9, 10, (3, 2, 2)), "ids": rng.integers(0, 5, 5)}
    return {name: array.astype(np.int32) for name, array in {**cells, **tables}.items()}


ENV = environment()


def value(term: Term) -> np.ndarray:
    return np.broadcast_to(to_numpy(term, ENV), CELLS)


def test_every_operator_has_a_term() -> None:
    assert OPS.keys() <= TERMS.keys()
    assert RULES.keys() == OPS.keys()


@pytest.mark.parametrize("name", TERMS)
def test_generated_code_is_the_term(name: str) -> None:
    made, expected = target(TERMS[name]), value(TERMS[name])
    assert np.array_equal(run(made, TABLES, ENV, ENV), expected)
    assert np.array_equal(value(lift(made).lanes[0]), expected)
    assert 0 < expected.sum() < CELLS


@pytest.mark.parametrize("name", ["floordiv", "floormod", "truncdiv", "truncmod", "min", "shared"])
def test_lifting_undoes_generating(name: str) -> None:
    assert lift(target(TERMS[name])).lanes[0] is expand(TERMS[name])


@pytest.mark.parametrize("name", MASKS)
def test_every_mask_of_the_catalogue_is_code(name: str) -> None:
    mask = MASKS[name]
    constants = {"num_ranges": 2} if "num_ranges" in mask.params else {}
    assert max(map(len, source(mask, **constants).splitlines())) <= 100
    term = mask.framed(**constants)
    tables = tuple(mask.tables)
    symbols = tuple(sorted(mask.params.keys() - constants.keys()))
    made = Target(
        target=name,
        spec=name,
        make=to_cute(term, tables=tables, symbols=symbols),
        symbols=symbols,
        layouts=(tables,),
    )
    assert lift(made).layout == tables


def test_the_text_reads_as_a_person_would_write_it() -> None:
    assert to_cute_source((KV <= Q) & (Q - KV < W), symbols=["window"]) == '''\
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32


def make(window):
    @cute.jit
    def mask_mod(batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        q = q_idx[0]
        kv = kv_idx[0]
        answer = cute.make_rmem_tensor(1, Boolean)
        answer[0] = (kv <= q) & (q - kv < window)
        return answer.load()

    return mask_mod
'''


def test_shared_parts_are_computed_once() -> None:
    term = Q
    for _ in range(40):
        term = term + term
    text = to_cute_source(term % 3 < KV)
    assert len(text.splitlines()) < 70
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("term", "message"),
    [
        (Q + KV, "a mask is a truth value"),
        (sym("chunk") > Q, "'chunk' is neither a coordinate"),
        (read("other", Q) < KV, "no aux tensor is given for table 'other'"),
        (Q < 2**31, "2147483648 is not an int32"),
        (eq(const(7) // 0, Q), "7 // 0 divides by zero"),
        (any_("r", W, bound("r") < Q), "bind it, as in num_ranges=2"),
    ],
)
def test_what_has_no_code_is_one_line(term: Term, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        to_cute_source(term, TABLES, ["window"])
