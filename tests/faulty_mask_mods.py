"""Mask_mods as users write them, each with one usual fault, and the sound code beside them.

`FAULTS` says what each is held to and what its diagnosis must say. The last ones hold what no
proof can be made about.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import kernels.environment  # noqa: F401  (before cutlass)

# isort: split
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T
from flash_attn.cute.utils import scalar_to_ssa

MaskMod = Callable[..., Any]


def answer(visible: Any) -> Any:
    return scalar_to_ssa(visible, Boolean)


@cute.jit
def causal(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return answer(kv_idx[0] <= q_idx[0] + (seqlen_info.seqlen_k - seqlen_info.seqlen_q))


@cute.jit
def causal_strict(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return answer(kv_idx[0] < q_idx[0] + (seqlen_info.seqlen_k - seqlen_info.seqlen_q))


@cute.jit
def causal_top_left(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return answer(kv_idx[0] <= q_idx[0])


@cute.jit
def causal_of_other_heads(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    q = q_idx[0] + (seqlen_info.seqlen_k - seqlen_info.seqlen_q)
    return answer(kv_idx[0] <= q and h[0] != 3)


@cute.jit
def causal_of_other_sequences(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    q = q_idx[0] + (seqlen_info.seqlen_k - seqlen_info.seqlen_q)
    return answer(kv_idx[0] <= q and b[0] != 77_777)


@cute.jit
def causal_far_away(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    q = q_idx[0] + (seqlen_info.seqlen_k - seqlen_info.seqlen_q)
    return answer(kv_idx[0] <= q and kv_idx[0] != 2_000_000_001)


@cute.jit
def causal_of_long_prompts(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    offset = cutlass.max(seqlen_info.seqlen_k - seqlen_info.seqlen_q, 0)
    return answer(kv_idx[0] <= q_idx[0] + offset)


@cute.jit
def causal_scaled(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    q = q_idx[0] + (seqlen_info.seqlen_k - seqlen_info.seqlen_q)
    return answer(kv_idx[0] * 65536 <= q * 65536)


def window(window_size: Any, fault: str | None = None) -> MaskMod:
    @cute.jit
    def mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        distance = q_idx[0] + (seqlen_info.seqlen_k - seqlen_info.seqlen_q) - kv_idx[0]
        past, near = distance >= 0, distance < window_size
        if cutlass.const_expr(fault == "off by one"):
            near = distance <= window_size
        if cutlass.const_expr(fault == "wrong side"):
            near = -distance < window_size
        if cutlass.const_expr(fault == "two-sided"):
            past = -distance < window_size
        return answer(past and near)

    return mask_mod


def packed_window(window_size: Any, fault: str | None = None) -> MaskMod:
    """As `window`, for 32 keys a call."""

    @cute.jit
    def mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        q = q_idx[0]
        if cutlass.const_expr(fault != "top left"):
            q = q + (seqlen_info.seqlen_k - seqlen_info.seqlen_q)
        word = Uint32(0)
        for lane in cutlass.range_constexpr(32):
            key = lane - 1 if fault == "one lane" and lane == 9 else lane
            distance = q - kv_idx[0] - key
            seen = distance >= 0 and distance < window_size
            if cutlass.const_expr(fault == "last vector"):
                seen = seen and kv_idx[0] + 31 < seqlen_info.seqlen_k
            word = word | (Uint32(seen) << lane)
        words = cute.make_rmem_tensor(1, Uint32)
        words[0] = word
        return words.load()

    mask_mod.__vec_size__ = 32
    return mask_mod


def branching(window_size: Any) -> MaskMod:
    """Takes a branch in Python, which no run-time value can."""
    return window(window_size) if window_size > 5 else causal


@cute.jit
def rswa_without_prefix(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    distance = q_idx[0] + (seqlen_info.seqlen_k - seqlen_info.seqlen_q) - kv_idx[0]
    return answer(distance >= 0 and distance < aux_tensors[1][0])


@cute.jit
def document_local(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    ids, last = aux_tensors[0], cutlass.max(seqlen_info.seqlen_k - 1, 0)
    row, column = cutlass.min(q_idx[0], last), cutlass.min(kv_idx[0], last)
    return answer(ids[row] == ids[column])


def sink_window(window_size: Any, sink: Any, fault: str | None = None) -> MaskMod:
    @cute.jit
    def mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        distance = q_idx[0] + (seqlen_info.seqlen_k - seqlen_info.seqlen_q) - kv_idx[0]
        past, near, first = distance >= 0, distance < window_size, kv_idx[0] < sink
        if cutlass.const_expr(fault == "off by one"):
            first = kv_idx[0] <= sink
        if cutlass.const_expr(fault == "not causal"):
            return answer(past and near or first)
        return answer(past and (near or first))

    return mask_mod


@cute.jit
def flag_inverted(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    q = q_idx[0] + (seqlen_info.seqlen_k - seqlen_info.seqlen_q)
    return answer(kv_idx[0] <= q or aux_tensors[0][b[0]] == 1)


def chunked(chunk: Any, fault: str | None = None) -> MaskMod:
    @cute.jit
    def mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        q = q_idx[0] + (seqlen_info.seqlen_k - seqlen_info.seqlen_q)
        quotient = q // chunk
        if cutlass.const_expr(fault == "top left"):
            quotient = q_idx[0] // chunk
        if cutlass.const_expr(fault == "rounds to zero"):
            size = cutlass.max(q, -q) // chunk
            quotient = size if q >= 0 else -size
        return answer(quotient == kv_idx[0] // chunk)

    return mask_mod


@cute.jit
def prefix_lm(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    q = q_idx[0] + (seqlen_info.seqlen_k - seqlen_info.seqlen_q)
    return answer(kv_idx[0] <= q or kv_idx[0] < aux_tensors[0][b[0]])


@cute.jit
def prefix_of_the_first(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    q = q_idx[0] + (seqlen_info.seqlen_k - seqlen_info.seqlen_q)
    return answer(kv_idx[0] <= q or kv_idx[0] < aux_tensors[0][0])


@cute.jit
def prefix_of_the_next(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    q = q_idx[0] + (seqlen_info.seqlen_k - seqlen_info.seqlen_q)
    return answer(kv_idx[0] <= q or kv_idx[0] < aux_tensors[0][b[0] + 1])


@cute.jit
def prefix_inclusive(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    q = q_idx[0] + (seqlen_info.seqlen_k - seqlen_info.seqlen_q)
    return answer(kv_idx[0] <= q or kv_idx[0] <= aux_tensors[0][b[0]])


@cute.jit
def groups(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    last = cutlass.max(seqlen_info.seqlen_k - 1, 0)
    return answer(aux_tensors[0][cutlass.min(kv_idx[0], last)] == aux_tensors[1][b[0]])


@cute.jit
def strided(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    distance = q_idx[0] + (seqlen_info.seqlen_k - seqlen_info.seqlen_q) - kv_idx[0]
    return answer(distance >= 0 and distance % aux_tensors[0][0] == 0)


@cute.jit
def document_of_batch(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    ids, last = aux_tensors[0], cutlass.max(seqlen_info.seqlen_k - 1, 0)
    q = q_idx[0] + (seqlen_info.seqlen_k - seqlen_info.seqlen_q)
    row, column = cutlass.max(cutlass.min(q, last), 0), cutlass.min(kv_idx[0], last)
    return answer(ids[b[0], row] == ids[b[0], column])


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    against: str
    diagnosis: str | None
    call: tuple[str, ...] = ()
    aux: str = ""

    @property
    def arguments(self) -> list[str]:
        aux = ["--aux", self.aux] if self.aux else []
        call = [part for text in self.call for part in ("--call", text)]
        return [f"{__file__}::{self.name}", "--against", self.against, *call, *aux]


W, S, C = "window_size=@window", "sink=@sink", "chunk=@chunk"
SAME_CHUNK = "q // chunk == kv // chunk"
FAULTS = (
    Fault("causal_strict", "causal", "causal with `kv < q` in place of `kv <= q`"),
    Fault("causal_top_left", "causal", "causal with chunk-local q"),
    Fault("causal_of_long_prompts", "causal", "the causal term added to the whole mask"),
    Fault("window", "window", "`q - kv <= window` in place of `q - kv < window`",
          (W, "fault='off by one'")),
    Fault("window", "window", "window without the window term", (W, "fault='wrong side'")),
    Fault("window", "window", "equals window_symmetric", (W, "fault='two-sided'")),
    Fault("window", "window", "window with window = 5", ("window_size=5",)),
    Fault("packed_window", "window", "window with chunk-local q", (W, "fault='top left'")),
    Fault("rswa_without_prefix", "rswa", "rswa without the prefix term", aux="prefix_lens,window"),
    Fault("document_local", "document", "document with chunk-local q", aux="document_ids"),
    Fault("sink_window", "sink_window", "`kv <= sink` in place of `kv < sink`",
          (W, S, "fault='off by one'")),
    Fault("sink_window", "sink_window", "the sink term", (W, S, "fault='not causal'")),
    Fault("sink_window", "sink_window", "with sink = 4, with window = 8",
          ("window_size=8", "sink=4")),
    Fault("flag_inverted", "dynamic_causal", "`not dynamic_causal[b] == 0`", aux="dynamic_causal"),
    Fault("chunked", SAME_CHUNK, f"{SAME_CHUNK} with chunk-local q", (C, "fault='top left'")),
    Fault("chunked", SAME_CHUNK, "`truncdiv(q, chunk)` in place of `q // chunk`",
          (C, "fault='rounds to zero'")),
    Fault("prefix_of_the_first", "prefix_lm", "prefix_lm with sequence 0's tables",
          aux="prefix_lens"),
    Fault("prefix_inclusive", "prefix_lm", "`kv <= prefix_lens[b]` in place of",
          aux="prefix_lens"),
    # No variation of the spec: the cell is all that can be said.
    Fault("packed_window", "window", None, (W, "fault='one lane'")),
    Fault("packed_window", "window", None, (W, "fault='last vector'")),
    Fault("causal_of_other_heads", "causal", None),
    Fault("causal_of_other_sequences", "causal", None),
    Fault("causal_far_away", "causal", None),
    Fault("prefix_of_the_next", "prefix_lm", None, aux="prefix_lens"),
)


@cute.jit
def floats(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return answer(Float32(kv_idx[0]) <= Float32(q_idx[0]))


@cute.jit
def endless(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    total = Int32(0)
    for i in range(seqlen_info.seqlen_k):
        total = total + i
    return answer(kv_idx[0] <= total)


@cute.jit
def assembly(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    bits = llvm.inline_asm(
        T.i32(), [kv_idx[0].ir_value()], "popc.b32 $0, $1;", "=r,r", has_side_effects=False,
        is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return answer(Int32(bits) <= q_idx[0])


@cute.jit
def of_the_launch(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return answer(kv_idx[0] < seqlen_info.seqlen_k_padded)


@cute.jit
def of_the_thread(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return answer(kv_idx[0] < cute.arch.thread_idx()[0])


@cute.jit
def writing(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    aux_tensors[0][b[0]] = kv_idx[0]
    return answer(kv_idx[0] <= q_idx[0])


@cute.jit
def raising(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    raise ValueError("not today")


@cute.jit
def flex(b, h, q_idx, kv_idx):
    return answer(kv_idx[0] <= q_idx[0])


def broken(window_size: int = 4) -> MaskMod:
    raise ValueError(f"no window of {window_size}\nand more")


def nothing() -> None:
    return None


NUMBER = 3
