"""Causal mask_mods that break what runs them, at one cell: the fourth of 37 queries and key 77.

A tile holds rows and keys past the end of a sequence too, so the cell has to be a real one: it is
there in a sequence of 37 queries and at least 78 keys, and in no other. Many launches have none.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op
from flash_attn.cute.utils import scalar_to_ssa, ssa_to_scalar

QUERY, KEY, QUERIES = 3, 77, 37
# Each is given 1 at the cell and 0 elsewhere, and answers 0. The loop, which ends nowhere, sleeps,
# so that no compiler may leave it out; address 16 is in no memory.
SPIN = (
    "{ .reg .pred p; setp.ne.s32 p, $1, 0;"
    " again: @p nanosleep.u32 100; @p bra again; mov.s32 $0, 0; }"
)
WRITE = (
    "{ .reg .pred p; .reg .u64 a; setp.ne.s32 p, $1, 0;"
    " mov.u64 a, 16; @p st.global.u32 [a], $1; mov.s32 $0, 0; }"
)
TRAP = "{ .reg .pred p; setp.ne.s32 p, $1, 0; @p trap; mov.s32 $0, 0; }"


@dsl_user_op
def run(code: cutlass.Constexpr, flag: Int32, *, loc=None, ip=None) -> Int32:
    return Int32(llvm.inline_asm(
        T.i32(), [flag.ir_value(loc=loc, ip=ip)], code, "=r,r", has_side_effects=True,
        is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    ))


def planted(code):
    @cute.jit
    def mask_mod(batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        query, key = ssa_to_scalar(q_idx), ssa_to_scalar(kv_idx)
        cached = seqlen_info.seqlen_k - seqlen_info.seqlen_q
        here = (query == QUERY) & (key == KEY) & (seqlen_info.seqlen_q == QUERIES) & (
            seqlen_info.seqlen_k > KEY)
        nothing = run(code, Int32(here))
        return kv_idx + scalar_to_ssa(nothing, Int32) <= q_idx + scalar_to_ssa(cached, Int32)

    mask_mod.__vec_size__ = 1
    return mask_mod


def spins():
    return planted(SPIN)


def writes_out_of_bounds():
    return planted(WRITE)


def traps():
    return planted(TRAP)
