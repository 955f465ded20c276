"""The real code runs in a child: what ends the child is an exception here, and nothing more."""

import os
import time
from dataclasses import replace

import kernels.environment  # noqa: F401  (before cutlass)

# isort: split

import cutlass.cute as cute
import numpy as np
import pytest

from kernels.from_cute import lift
from kernels.run_cute import CannotRun, agree, in_child, run
from kernels.target import Target
from spec.term import sym
from tests.mask_mods_under_test import CASES, answer, fixed
from tests.test_from_cute import cells_of, tables_of

BY_NAME = {case.name: case for case in CASES}
CAUSAL = BY_NAME["causal"]
ZEROS = ("b", "h", "offset_q", "offset_k")


def grid(seqlen_q: int, seqlen_k: int) -> dict[str, np.ndarray]:
    q, kv = (axis.ravel().astype(np.int32) for axis in np.mgrid[:seqlen_q, :seqlen_k])
    same = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, **dict.fromkeys(ZEROS, 0)}
    return {"q_idx": q, "kv_idx": kv, **{k: np.full(len(q), v, np.int32) for k, v in same.items()}}


def test_the_code_itself_runs() -> None:
    visible = run(CAUSAL.target, (), grid(3, 5), {}).reshape(3, 5)
    assert visible.astype(int).tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_a_packed_result_has_a_column_for_each_key() -> None:
    cells = {name: column[::8] for name, column in grid(3, 8).items()}
    visible = run(BY_NAME["packed_causal[8]"].target, (), cells, {})
    assert np.array_equal(visible, run(CAUSAL.target, (), grid(3, 8), {}).reshape(3, 8))


def test_no_cells_are_no_answers() -> None:
    none = {name: column[:0] for name, column in grid(1, 1).items()}
    assert run(CAUSAL.target, (), none, {}).shape == (0,)


def test_tables_are_read_with_their_strides() -> None:
    case = BY_NAME["document"]
    cells, tables = cells_of(case), tables_of(case)
    apart = {"ids": np.repeat(tables["ids"], 2, axis=1)[:, ::2]}
    assert np.array_equal(
        run(case.target, ("ids",), cells, tables), run(case.target, ("ids",), cells, apart)
    )


def test_inline_ptx_is_refused_before_it_runs() -> None:
    case = BY_NAME["packed_limits[32]"]
    with pytest.raises(CannotRun, match="inline PTX"):
        run(case.target, (), cells_of(case), {})
    with pytest.raises(CannotRun, match="inline PTX"):
        agree(lift(case.target), case.target, cells_of(case), {})


@cute.jit
def wild(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return answer(aux_tensors[0][kv_idx[0] * 2**20] < 1)


@cute.jit
def endless(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    total = q_idx[0]
    while total != kv_idx[0]:
        total = total ^ 2
    return answer(total > 0)


def named(mask_mod: object, layout: tuple[str, ...] = ()) -> Target:
    return Target(target="under test", spec="none", make=fixed(mask_mod), layouts=(layout,))


def test_a_crash_of_the_child_is_an_exception() -> None:
    cells = {**grid(1, 1), "kv_idx": np.array([1500], np.int32)}
    with pytest.raises(CannotRun, match="SIGSEGV"):
        run(named(wild, ("prefix_lens",)), ("prefix_lens",), cells, {"prefix_lens": np.zeros(3)})


def test_a_hang_of_the_child_is_an_exception() -> None:
    start = time.monotonic()
    with pytest.raises(CannotRun, match="did not end within 1 s"):
        run(named(endless), (), {**grid(1, 1), "kv_idx": np.array([9], np.int32)}, {}, timeout=1)
    assert time.monotonic() - start < 5


def test_an_exit_and_an_error_of_the_child_are_exceptions() -> None:
    with pytest.raises(CannotRun, match="ended early, with status 3"):
        in_child(lambda: os._exit(3), 10)
    with pytest.raises(CannotRun, match="ZeroDivisionError: integer division"):
        in_child(lambda: divmod(1, 0), 10)
    assert agree(lift(CAUSAL.target), CAUSAL.target, cells_of(CAUSAL), {}).mismatch is None


def test_a_wrong_term_is_told_by_a_cell() -> None:
    lifted = lift(CAUSAL.target)
    strict = sym("kv_idx") < sym("q_idx") + sym("seqlen_k") - sym("seqlen_q")
    wrong = replace(lifted, lanes=(strict,))
    found = agree(wrong, CAUSAL.target, grid(3, 5), {})
    assert found.mismatch is not None
    assert found.mismatch["kv_idx"] == found.mismatch["q_idx"] + 2
    assert (found.mismatch["term"], found.mismatch["code"]) == (False, True)


def test_sides_of_a_comparison_without_a_cell_are_named() -> None:
    assert not agree(lift(CAUSAL.target), CAUSAL.target, grid(3, 5), {}).uncovered
    (missing,) = agree(lift(CAUSAL.target), CAUSAL.target, grid(1, 5), {}).uncovered
    assert missing == "kv_idx <= q_idx + (seqlen_k - seqlen_q): never above"


def test_cells_on_which_the_code_has_no_meaning_are_left_out() -> None:
    case = BY_NAME["divided[symbolic]"]
    cells = cells_of(case)
    found = agree(lift(case.target), case.target, cells, {})
    assert found.left_out == (cells["window"] == 0).sum()
    assert found.cells + found.left_out == len(cells["window"])
    case = BY_NAME["threshold"]
    outside = {**cells_of(case), "kv_idx": np.arange(-2, 11_998, dtype=np.int32)}
    assert agree(lift(case.target), case.target, outside, tables_of(case)).cells == 24
