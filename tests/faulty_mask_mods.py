"""Mask_mods as users write them, each with one usual fault, and sound ones beside them.

`FAULTS` says what each is held to and what words the diagnosis must contain.
"""

from __future__ import annotations

from dataclasses import dataclass

import kernels.environment  # noqa: F401  (before cutlass)
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32
from flash_attn.cute.utils import scalar_to_ssa


def answer(visible):
    return scalar_to_ssa(visible, Boolean)


@cute.jit
def causal(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    q = q_idx[0] + (seqlen_info.seqlen_k - seqlen_info.seqlen_q)
    return answer(kv_idx[0] <= q)


@cute.jit
def causal_strict(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    q = q_idx[0] + (seqlen_info.seqlen_k - seqlen_info.seqlen_q)
    return answer(kv_idx[0] < q)


@cute.jit
def causal_top_left(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return answer(kv_idx[0] <= q_idx[0])


def window(window_size, fault=None):
    @cute.jit
    def mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        distance = q_idx[0] + (seqlen_info.seqlen_k - seqlen_info.seqlen_q) - kv_idx[0]
        near = distance < window_size
        if cutlass.const_expr(fault == "off by one"):
            near = distance <= window_size
        if cutlass.const_expr(fault == "wrong side"):
            near = -distance < window_size
        past = distance >= 0
        if cutlass.const_expr(fault == "two-sided"):
            past = -distance < window_size
        return answer(past and near)

    return mask_mod


def packed_window(window_size, fault=None):
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
            if cutlass.const_expr(fault == "tail"):
                seen = seen and kv_idx[0] + 31 < seqlen_info.seqlen_k
            word = word | (Uint32(seen) << lane)
        words = cute.make_rmem_tensor(1, Uint32)
        words[0] = word
        return words.load()

    mask_mod.__vec_size__ = 32
    return mask_mod


@cute.jit
def rswa_without_prefix(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    distance = q_idx[0] + (seqlen_info.seqlen_k - seqlen_info.seqlen_q) - kv_idx[0]
    return answer(distance >= 0 and distance < aux_tensors[1][0])


@cute.jit
def document_local(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    ids, last = aux_tensors[0], cutlass.max(seqlen_info.seqlen_k - 1, 0)
    row, column = cutlass.min(q_idx[0], last), cutlass.min(kv_idx[0], last)
    return answer(ids[row] == ids[column])


def sink_window(window_size, sink, fault=None):
    @cute.jit
    def mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        distance = q_idx[0] + (seqlen_info.seqlen_k - seqlen_info.seqlen_q) - kv_idx[0]
        first = kv_idx[0] < sink
        if cutlass.const_expr(fault == "off by one"):
            first = kv_idx[0] <= sink
        near = distance < window_size
        if cutlass.const_expr(fault == "sink not causal"):
            return answer(distance >= 0 and near or first)
        return answer(distance >= 0 and (near or first))

    return mask_mod


@cute.jit
def flag_inverted(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    q = q_idx[0] + (seqlen_info.seqlen_k - seqlen_info.seqlen_q)
    return answer(kv_idx[0] <= q or aux_tensors[0][b[0]] == 1)


def chunked(chunk, fault=None):
    @cute.jit
    def mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        q, kv = q_idx[0] + (seqlen_info.seqlen_k - seqlen_info.seqlen_q), kv_idx[0]
        if cutlass.const_expr(fault == "local"):
            return answer(kv <= q and q_idx[0] // chunk == kv // chunk)
        if cutlass.const_expr(fault == "rounded to zero"):
            # The quotient as C has it, for a position before the first key too.
            size = cutlass.max(q, -q) // chunk
            quotient = size if q >= 0 else -size
            return answer(kv - chunk < q and quotient == kv // chunk)
        return answer(kv <= q and q // chunk == kv // chunk)

    return mask_mod


@cute.jit
def prefix_of_first(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    q = q_idx[0] + (seqlen_info.seqlen_k - seqlen_info.seqlen_q)
    return answer(kv_idx[0] <= q or kv_idx[0] < aux_tensors[0][0])


@cute.jit
def prefix_inclusive(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    q = q_idx[0] + (seqlen_info.seqlen_k - seqlen_info.seqlen_q)
    return answer(kv_idx[0] <= q or kv_idx[0] <= aux_tensors[0][b[0]])


@cute.jit
def prefix_and(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    q = q_idx[0] + (seqlen_info.seqlen_k - seqlen_info.seqlen_q)
    return answer(kv_idx[0] <= q and kv_idx[0] < aux_tensors[0][b[0]])


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    against: str
    words: tuple[str, ...]
    call: tuple[str, ...] = ()
    aux: str = ""


W = "window_size=@window"
FAULTS = (
    Fault("causal_strict", "causal", ("",)),
    Fault("causal_top_left", "causal", ("",)),
    Fault("window", "window", ("",), (W, "fault='off by one'")),
    Fault("window", "window", ("",), (W, "fault='wrong side'")),
    Fault("window", "window", ("",), (W, "fault='two-sided'")),
    Fault("window", "window", ("",), ("window_size=5",)),
    Fault("packed_window", "window", ("",), (W,)),
    Fault("packed_window", "window", ("",), (W, "fault='top left'")),
    Fault("packed_window", "window", ("",), (W, "fault='one lane'")),
    Fault("packed_window", "window", ("",), (W, "fault='tail'")),
    Fault("rswa_without_prefix", "rswa", ("",), aux="prefix_lens,window"),
    Fault("document_local", "document", ("",), aux="document_ids"),
    Fault("sink_window", "sink_window", ("",), (W, "sink=@sink", "fault='off by one'")),
    Fault("sink_window", "sink_window", ("",), (W, "sink=@sink", "fault='sink not causal'")),
    Fault("sink_window", "sink_window", ("",), (W, "sink=4")),
    Fault("flag_inverted", "dynamic_causal", ("",), aux="dynamic_causal"),
    Fault("chunked", "chunked_local", ("",), ("chunk=@chunk",)),
    Fault("chunked", "chunked_local", ("",), ("chunk=@chunk", "fault='local'")),
    Fault("chunked", "chunked_local", ("",), ("chunk=@chunk", "fault='rounded to zero'")),
    Fault("prefix_of_first", "prefix_lm", ("",), aux="prefix_lens"),
    Fault("prefix_inclusive", "prefix_lm", ("",), aux="prefix_lens"),
    Fault("prefix_and", "prefix_lm", ("",), aux="prefix_lens"),
)
