"""Every kind of mask_mod lifts unchanged, and its term is what the compiled code computes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import kernels.environment  # noqa: F401  (before cutlass)

# isort: split
import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T
from flash_attn.cute.utils import get_batch_from_cu_tensor, scalar_to_ssa

from kernels import machine
from kernels.from_cute import CannotLift, Lifted, lift
from kernels.run_cute import Agreement, agree
from kernels.target import Target
from spec.to_numpy import to_numpy
from spec.to_text import to_text
from tests.mask_mods_under_test import CASES, Case, answer, fixed, shift_cases, shifted_by_ptx

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
        bits = np.broadcast_to(to_numpy(term, {"q_idx": amounts}), amounts.shape)
        for amount, bit in zip(amounts, bits, strict=True):
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


RULES = dict(machine.RULES)


def by(rule: str) -> Callable[..., Any]:
    return RULES[rule]


# Rule -> another meaning that a reader could take for it, and a case that tells them apart.
FAULTS: dict[str, tuple[Callable[..., Any], str]] = {
    "llvm.add": (by("llvm.sub"), "causal"),
    "llvm.sub": (by("llvm.add"), "causal"),
    "llvm.mul": (by("llvm.add"), "block_diagonal"),
    "llvm.sdiv": (machine._signed_division(machine.floordiv), "block_diagonal"),
    "llvm.srem": (machine._signed_division(machine.floormod), "mini_causal"),
    "llvm.udiv": (by("llvm.sdiv"), "unsigned_groups"),
    "llvm.urem": (by("llvm.srem"), "unsigned_groups"),
    "llvm.and": (by("llvm.or"), "sliding_window"),
    "llvm.or": (by("llvm.xor"), "listed_ranges"),
    "llvm.xor": (by("llvm.or"), "bit_tricks"),
    "llvm.shl": (by("llvm.ashr"), "packed_causal[8]"),
    "llvm.lshr": (by("llvm.shl"), "bit_of_word"),
    "llvm.ashr": (by("llvm.lshr"), "bit_tricks"),
    "llvm.icmp": (lambda n, a, b, **kind: by("llvm.icmp")(n, b, a, **kind), "causal"),
    "llvm.select": (lambda n, c, a, b: by("llvm.select")(n, c, b, a), "block_diagonal"),
    "llvm.sext": (by("llvm.zext"), "long_products"),
    "llvm.zext": (by("llvm.sext"), "summed_words"),
    "llvm.trunc": (lambda n, a, width: machine.Bits(machine.bits_of(a)[-width:]), "long_products"),
    "shl.b32": (by("shr.u32"), "packed_window[64]"),
    "shr.u32": (by("shl.b32"), "packed_limits[8]"),
}


def test_every_rule_has_a_planted_fault() -> None:
    assert FAULTS.keys() == machine.RULES.keys()


def goes_red(case: Case) -> bool:
    """Whether the comparison with the code, or with the scalar twin, finds a fault."""
    try:
        if case.twin is None:
            return compared(case, lift(case.target)).mismatch is not None
        test_a_packed_form_is_its_scalar_twin(case)
    except (AssertionError, CannotLift):
        return True
    return False


@pytest.mark.parametrize("rule", FAULTS)
def test_a_fault_in_a_rule_is_found(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, name = FAULTS[rule]
    assert not goes_red(BY_NAME[name])
    monkeypatch.setitem(machine.RULES, rule, fault)
    assert goes_red(BY_NAME[name])


NEIGHBOURS = (1, 0, 3, 2, 5, 4, 7, 6, 9, 8)


@pytest.mark.parametrize("predicate", range(10))
def test_a_fault_in_a_predicate_is_found(
    predicate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = list(machine.PREDICATES)
    table[predicate] = table[NEIGHBOURS[predicate]]
    monkeypatch.setattr(machine, "PREDICATES", tuple(table))
    names = ("document", "causal", "flagged", "nested", "block_causal", "unsigned_order")
    assert any(goes_red(BY_NAME[name]) for name in names)


def target(mask_mod: Any, **fields: Any) -> Target:
    return Target(target="under test", spec="none", make=fixed(mask_mod), **fields)


def test_a_lifted_term_reads_as_a_person_would_write_it() -> None:
    def text(name: str) -> str:
        return to_text(lift(BY_NAME[name].target).lanes[0])

    assert text("block_diagonal") == "q_idx // 5 == kv_idx // 5"
    assert text("mini_causal") == "truncmod(kv_idx, 5) <= truncmod(q_idx, 5)"
    assert text("causal") == "kv_idx <= q_idx + (seqlen_k - seqlen_q)"
    assert text("packed_causal[4]") == "kv_idx <= q_idx + (seqlen_k - seqlen_q)"
    assert text("nested") == (
        "kv_idx <= max(min(q_idx, seqlen_q - 1), 0)"
        " and max(min(q_idx, seqlen_q - 1), 0) - kv_idx < window or kv_idx == seqlen_k - 1"
    )


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


def test_a_division_notes_what_it_needs() -> None:
    lifted = lift(BY_NAME["divided[symbolic]"].target)
    claims = {to_text(claim) for _, claim, _ in lifted.conditions}
    assert "not window == 0" in claims
    assert "-2147483648 < q_idx or not window == -1" in claims


@cute.jit
def floats(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return q_idx.to(Float32) * scalar_to_ssa(Float32(0.5), Float32) < kv_idx.to(Float32)


@cute.jit
def thread(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return answer(kv_idx[0] < cute.arch.thread_idx()[0])


@cute.jit
def open_loop(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    total = Int32(0)
    for i in range(q_idx[0]):
        total = total + i
    return answer(total < kv_idx[0])


@cute.jit
def searched(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return answer(get_batch_from_cu_tensor(q_idx[0], aux_tensors[0]) == b[0])


@cute.jit
def indexed_register(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    cells = cute.make_rmem_tensor(4, Int32)
    for i in cutlass.range_constexpr(4):
        cells[i] = q_idx[0] + i
    return answer(cells[kv_idx[0]] < kv_idx[0])


@cute.jit
def shape_used(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return answer(kv_idx[0] < aux_tensors[0].shape[0])


@cute.jit
def stride_used(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return answer(kv_idx[0] < Int32(aux_tensors[0].stride[0]))


@cute.jit
def writing(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    aux_tensors[0][0] = q_idx[0]
    return answer(kv_idx[0] < q_idx[0])


@cute.jit
def unmodelled(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return answer(kv_idx[0] < seqlen_info.num_n_blocks)


@cute.jit
def unset(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    cells = cute.make_rmem_tensor(2, Int32)
    return answer(cells[0] < kv_idx[0])


@cute.jit
def number_returned(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return 1


@cute.jit
def no_table(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return answer(aux_tensors[0][kv_idx[0]] < 1)


def population(value: Any) -> Any:
    return Int32(llvm.inline_asm(T.i32(), [Int32(value).ir_value()], "popc.b32 $0, $1;", "=r,r"))


@cute.jit
def other_assembly(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return answer(population(q_idx[0]) < kv_idx[0])


@cute.jit
def odd_width(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return kv_idx <= q_idx


odd_width.__vec_size__ = 12

ONE, TWO = (("prefix_lens",),), (("query_ranges",),)
REFUSED: dict[str, tuple[Any, tuple[tuple[str, ...], ...], str]] = {
    "floats": (floats, (), "type f32 is not an integer"),
    "thread": (thread, (), "nvvm.read.ptx.sreg.tid.x: not in the vocabulary"),
    "open_loop": (open_loop, (), "a loop whose number of turns is not a constant"),
    "searched": (searched, ONE, "the shape of an aux tensor is used"),
    "indexed_register": (indexed_register, (), "indexed by a value that is not a constant"),
    "shape_used": (shape_used, ONE, "the shape of an aux tensor is used"),
    "stride_used": (stride_used, TWO, "the stride of an aux tensor is used as a number"),
    "writing": (writing, ONE, "writes to an aux tensor"),
    "unmodelled": (unmodelled, (), "seqlen_info.num_n_blocks: not modelled"),
    "unset": (unset, (), "a value that was never set"),
    "number_returned": (number_returned, (), "a mask_mod returns a cute.TensorSSA"),
    "no_table": (no_table, (), "no aux tensor was given"),
    "other_assembly": (other_assembly, (), "assembly 'popc.b32 $0, $1;' is not in the vocabulary"),
    "odd_width": (odd_width, (), "__vec_size__=12"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused_by_name(name: str) -> None:
    mask_mod, layouts, reason = REFUSED[name]
    with pytest.raises(CannotLift) as refusal:
        lift(target(mask_mod, layouts=layouts))
    message = str(refusal.value)
    assert reason in message
    assert "\n" not in message and "\x1b" not in message


def test_a_refusal_says_where() -> None:
    with pytest.raises(CannotLift, match=r"^test_from_cute\.py:\d+: nvvm\.read\.ptx"):
        lift(target(thread))


def test_an_unsupported_target_is_not_traced() -> None:
    with pytest.raises(CannotLift, match="parameter 'sinks' is not known"):
        lift(target(None, unsupported="parameter 'sinks' is not known"))


def test_a_refusal_leaves_the_compiler_usable() -> None:
    for mask_mod in (unmodelled, number_returned, floats):
        with pytest.raises(CannotLift):
            lift(target(mask_mod))
    assert lift(BY_NAME["causal"].target).lanes == lift(BY_NAME["causal"].target).lanes
