"""Our own FA4 mask_mods, each the shortest code for its spec, and faulty ancestors of them.

`TARGETS` lists every branch with the spec that it is held to. The faulty ones reproduce faults that
releases shipped; a check that does not refute them is broken.

`q_idx` counts from the first query of the call, `kv_idx` from the first key of the sequence;
aux tensors are int32. `query_ranges[token, 2]` holds the inclusive ends of the range that the query
of a packed row lies in, or (-1, -1); `cu_seqlens_q[b + 1]` the packed row of each sequence's first
query; `ranges[b, i, 2]` every range of a sequence; `prefix_lens[b]` and `window[1]` are R-SWA's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import kernels.environment  # noqa: F401  (before a factory imports the compiler)
from kernels.target import Target

MaskMod = Callable[..., Any]


def mm_prefix(window: Any = None, *, clamp: bool = False, local_q: bool = False,
              clamp_row: bool = True) -> MaskMod:
    """(causal and window) or the query's own range; with `clamp`, the range cut to the window.

    `window` is the number of keys seen, the query's own counted; None for no window. `local_q`
    (q_idx taken as absolute) and `clamp_row=False` (no care for padded rows) make known-bad twins.
    """
    import cutlass
    import cutlass.cute as cute
    from cutlass import Int32
    from flash_attn.cute.utils import scalar_to_ssa, ssa_to_scalar

    @cute.jit
    def mask_mod(batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        query_ranges, cu_seqlens_q = aux_tensors
        row = ssa_to_scalar(q_idx)
        if cutlass.const_expr(clamp_row):
            # A padded row has no table row of its own: it reads the last one, and an empty
            # sequence at the front of the batch the first.
            row = cutlass.min(row, seqlen_info.seqlen_q - 1)
        token = cu_seqlens_q[batch_idx[0]] + row
        if cutlass.const_expr(clamp_row):
            token = cutlass.max(token, 0)
        first = scalar_to_ssa(query_ranges[token, 0], Int32)
        last = scalar_to_ssa(query_ranges[token, 1], Int32)
        q = q_idx
        if cutlass.const_expr(not local_q):
            q = q_idx + scalar_to_ssa(seqlen_info.seqlen_k - seqlen_info.seqlen_q, Int32)
        past = kv_idx <= q
        same_range = (first <= kv_idx) & (kv_idx <= last)
        if cutlass.const_expr(window is not None):
            near = q - kv_idx < scalar_to_ssa(Int32(window), Int32)
            past = past & near
            if cutlass.const_expr(clamp):
                same_range = same_range & near
        return past | same_range

    mask_mod.__vec_size__ = 1
    return mask_mod


def mm_prefix_listed(num_ranges: int, window: Any = None, *, local_q: bool = False) -> MaskMod:
    """As `mm_prefix`, given every range of the sequence; `num_ranges` is compiled in."""
    import cutlass
    import cutlass.cute as cute
    from cutlass import Int32
    from flash_attn.cute.utils import scalar_to_ssa

    @cute.jit
    def mask_mod(batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        ranges, b = aux_tensors[0], batch_idx[0]
        q = q_idx
        if cutlass.const_expr(not local_q):
            q = q_idx + scalar_to_ssa(seqlen_info.seqlen_k - seqlen_info.seqlen_q, Int32)
        keep = kv_idx <= q
        if cutlass.const_expr(window is not None):
            keep = keep & (q - kv_idx < scalar_to_ssa(Int32(window), Int32))
        for r in cutlass.range_constexpr(num_ranges):
            first = scalar_to_ssa(ranges[b, r, 0], Int32)
            last = scalar_to_ssa(ranges[b, r, 1], Int32)
            keep = keep | ((first <= q) & (q <= last) & (first <= kv_idx) & (kv_idx <= last))
        return keep

    return mask_mod


def rswa() -> MaskMod:
    """Causal, and either inside the sequence's prefix or among the last `window` keys."""
    import cutlass.cute as cute
    from cutlass import Int32
    from flash_attn.cute.utils import scalar_to_ssa

    @cute.jit
    def mask_mod(batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        prefix = scalar_to_ssa(aux_tensors[0][batch_idx[0]], Int32)
        window = scalar_to_ssa(aux_tensors[1][0], Int32)
        q = q_idx + scalar_to_ssa(seqlen_info.seqlen_k - seqlen_info.seqlen_q, Int32)
        return (kv_idx <= q) & ((kv_idx < prefix) | (q - kv_idx < window))

    return mask_mod


ROWS = (("query_ranges", "cu_seqlens_q"),)
LISTED = (("ranges",),)
RANGES = 3


def _own(name: str, spec: str, make: Callable[[Mapping[str, Any]], MaskMod], *,
         symbols: tuple[str, ...] = (), layouts: tuple[tuple[str, ...], ...] = ROWS,
         constants: Mapping[str, int] = {}, **expected: str) -> Target:
    return Target(
        target=f"maskproof/{name}", spec=spec, make=make, symbols=symbols, layouts=layouts,
        constants=constants, expected={k.replace("_", "-"): v for k, v in expected.items()},
    )


TARGETS: tuple[Target, ...] = (
    _own("mm_prefix[window]", "mm_prefix", lambda at: mm_prefix(at["window"]), symbols=("window",)),
    _own("mm_prefix[no-window]", "mm_prefix_no_window", lambda at: mm_prefix()),
    _own("mm_prefix[clamp]", "mm_prefix_clamped", lambda at: mm_prefix(at["window"], clamp=True),
         symbols=("window",)),
    _own(f"mm_prefix[window,ranges={RANGES}]", "mm_prefix",
         lambda at: mm_prefix_listed(RANGES, at["window"]), symbols=("window",), layouts=LISTED,
         constants={"num_ranges": RANGES}),
    _own("rswa", "rswa", lambda at: rswa(), layouts=(("prefix_lens", "window"),)),
    _own("known-bad/no-window-term", "mm_prefix", lambda at: mm_prefix(), equals_spec="REFUTED"),
    _own("known-bad/chunk-local-q", "mm_prefix_no_window", lambda at: mm_prefix(local_q=True),
         equals_spec="REFUTED"),
    _own(f"known-bad/no-window-term,chunk-local-q[ranges={RANGES}]", "mm_prefix",
         lambda at: mm_prefix_listed(RANGES, local_q=True), layouts=LISTED,
         constants={"num_ranges": RANGES}, equals_spec="REFUTED"),
    _own("known-bad/unclamped-lookup", "mm_prefix",
         lambda at: mm_prefix(at["window"], clamp_row=False), symbols=("window",),
         reads_in_bounds="REFUTED"),
)
