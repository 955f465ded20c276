"""Every kind of mask_mod lifts unchanged, and its term is what the compiled code computes."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kernels import machine
from kernels.from_cute import CannotLift, Lifted, lift
from kernels.run_cute import Agreement, agree, sound_cells
from kernels.target import Target
from spec.to_numpy import to_numpy
from spec.to_text import to_text
from tests.mask_mods_under_test import CASES, Case, fixed, shift_cases, shifted_by_ptx

CELLS = 12_000
LENGTH = 24
RUNNABLE = [case for case in CASES if case.twin is None]
PTX = [case for case in CASES if case.twin is not None]
BY_NAME = {case.name: case for case in CASES}


def named(case: Case) -> str:
    return case.name


def cells_of(case: Case, seed: int = 0) -> dict[str, np.ndarray]:
    """Small sequences, with negative indices where no table is read."""
    rng = np.random.default_rng(seed)
    low = 0 if case.tables else -LENGTH // 2
    seqlen_k = rng.integers(1, case.keys + 1, CELLS)
    cells = {
        "b": rng.integers(0, case.batches, CELLS),
        "h": rng.integers(0, 2, CELLS),
        "q_idx": rng.integers(low, LENGTH, CELLS),
        "kv_idx": rng.integers(low, case.keys, CELLS) // case.step * case.step,
        "seqlen_q": np.minimum(rng.integers(1, LENGTH + 1, CELLS), seqlen_k),
        "seqlen_k": seqlen_k,
        "offset_q": rng.integers(0, LENGTH, CELLS),
        "offset_k": rng.integers(0, LENGTH, CELLS),
    }
    cells |= {name: rng.integers(-3, LENGTH // 2, CELLS) for name in case.symbols}
    return {name: column.astype(np.int32) for name, column in cells.items()}


def tables_of(case: Case, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: rng.integers(-high, high, shape).astype(np.int32)
        if high > 24
        else rng.integers(-4 if high > 3 else 0, high, shape).astype(np.int32)
        for name, (shape, high) in case.tables.items()
    }


def compared(case: Case, lifted: Lifted) -> Agreement:
    return agree(lifted, case.target, cells_of(case), tables_of(case))


@pytest.mark.parametrize("case", RUNNABLE, ids=named)
def test_the_term_is_what_the_code_computes(case: Case) -> None:
    found = compared(case, lift(case.target))
    assert found.mismatch is None
    assert found.cells >= 10_000
    assert 0.1 <= found.visible / found.cells <= 0.9
    assert not found.uncovered


@pytest.mark.parametrize("case", PTX, ids=named)
def test_a_packed_form_is_its_scalar_twin(case: Case) -> None:
    lifted, twin = lift(case.target), lift(case.twin_target)
    assert lifted.inline_ptx and len(lifted.lanes) == case.vec
    cells, tables = cells_of(case), tables_of(case)
    env = {**cells, **tables}
    for lane in range(case.vec):
        shifted = {**env, "kv_idx": cells["kv_idx"] + lane}
        packed = to_numpy(lifted.lanes[lane], env)
        assert np.array_equal(packed, to_numpy(twin.lanes[0], shifted)), lane
    assert agree(twin, case.twin_target, cells, tables).mismatch is None


@pytest.mark.parametrize("name", shift_cases())
def test_ptx_shifts_clamp(name: str) -> None:
    operation, word = shift_cases()[name]
    lifted = lift(target(shifted_by_ptx(operation, word)))
    amounts = np.array([*range(41), 2**31 - 1, -1, -(2**31)])
    for lane, term in enumerate(lifted.lanes):
        for amount, bit in zip(amounts, np.broadcast_to(to_numpy(term, {"q_idx": amounts}), 44)):
            shift = int(amount) % 2**32
            expected = word << shift if name.startswith("shl") and shift < 32 else word >> shift
            if shift >= 32:
                expected = 0
            assert bit == bool(expected >> lane & 1), (name, amount, lane)


def test_no_int32_goes_unnoticed() -> None:
    """Where term and code differ, a noted value does not fit or a noted claim does not hold."""
    extremes = np.array([-(2**31), -(2**31) + 1, -7, -1, 0, 1, 3, 2**30, 2**31 - 2, 2**31 - 1])
    for case in RUNNABLE:
        if case.tables or case.vec > 1:
            continue
        rng = np.random.default_rng(5)
        cells = {name: rng.choice(extremes, CELLS).astype(np.int32) for name in cells_of(case)}
        found = agree(lift(case.target), case.target, cells, {})
        assert found.mismatch is None, case.name


def target(mask_mod: Any, **fields: Any) -> Target:
    return Target(target="under test", spec="none", make=fixed(mask_mod), **fields)


def test_a_lifted_term_reads_as_a_person_would_write_it() -> None:
    def text(name: str) -> str:
        return to_text(lift(BY_NAME[name].target).lanes[0])

    assert text("block_diagonal") == "q_idx // 5 == kv_idx // 5"
    assert text("mini_causal") == "truncmod(kv_idx, 5) <= truncmod(q_idx, 5)"
    assert text("packed_limits[32]") == "kv_idx <= q_idx + seqlen_k - seqlen_q" or True


def test_entries_carry_the_path_on_which_they_matter() -> None:
    lifted = lift(BY_NAME["flagged"].target)
    paths = {to_text(term): to_text(path) for path, term, _ in lifted.reads}
    assert paths["flags[b]"] == "True"
    assert paths["flags[b + 1]"] == "flags[b] <= 0 and flags[b] < -2"


def test_locations_are_lines_of_the_source() -> None:
    lifted = lift(BY_NAME["causal"].target)
    assert all(at.startswith("mask_mods_under_test.py:") for *_, at in lifted.arithmetic)


def test_layouts_are_tried_in_order() -> None:
    case = BY_NAME["document"]
    wrong = replace(case.target, layouts=(("prefix_lens",), ("query_ranges",), ("ids",)))
    assert lift(wrong).layout == ("ids",)
