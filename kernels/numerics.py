"""Kernels on random data against a float32 reference: what a read-out of the mask cannot see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.derived import formula_of, on_device
from kernels.fa4 import (
    BATCHED,
    PAGED,
    VARLEN,
    Call,
    Fa4Error,
    Resident,
    Sequences,
    shapes,
    supported,
)  # fmt: skip

# The numeric oracle, as largest absolute difference: outputs are averages of standard normal
# values, rounded to 8 bits (11 in float16) as the weights before them are.
OUT_TOLERANCE = {"bf16": 2e-2, "fp16": 4e-3}
NUMERIC_LSE_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Numerics:
    """Random data against a float32 reference: the largest absolute differences."""

    rows: int
    out: float
    lse: float
    tolerance: float
    lse_tolerance: float
    worst_sequence: int

    @property
    def agrees(self) -> bool:
        return self.out <= self.tolerance and self.lse <= self.lse_tolerance


def measure(
    source: Any, device: str, call: Call, sequences: Sequences, seed: int = 0
) -> Numerics:
    """Random Q, K and V against a float32 reference: what a read-out cannot see."""
    import torch

    if reason := supported(call):
        raise Fa4Error(reason)
    noise = torch.Generator(device).manual_seed(seed)
    on = on_device(call, source.layout(call), sequences, device)
    given = {
        name: torch.empty(shape, dtype=dtype, device=device)
        for name, (shape, dtype) in shapes(call, sequences).items()
    }
    for name in sorted({"q", "k", "v", "sink"} & given.keys()):
        given[name].normal_(generator=noise)
    if call.layout == PAGED:
        n, width = given["page_table"].shape
        mixed = torch.randperm(len(given["k"]), generator=noise, device=device)
        given["page_table"] = mixed[: n * width].view(n, width).int()
    given["out"].fill_(float("nan"))
    given["lse"].fill_(float("nan"))
    source.launch(call, on, **given)
    found = [_difference(call, on, given, b) for b in range(len(sequences))]
    out = [each for each, _ in found]
    return Numerics(
        sequences.rows, max(out, default=0.0), max((lse for _, lse in found), default=0.0),
        OUT_TOLERANCE[call.dtype], NUMERIC_LSE_TOLERANCE,
        int(np.argmax(out)) if out else -1,
    )


def _difference(
    call: Call, on: Resident, given: Mapping[str, Any], b: int
) -> tuple[float, float]:
    """How far output and LSE of one sequence lie from a float32 reference."""
    import torch

    from spec.to_torch import to_torch

    queries, keys = int(on.sequences.seqlens_q[b]), int(on.sequences.seqlens_k[b])
    if not queries:
        return 0.0, 0.0
    q, out, k, v, lse = (each.float() for each in _of_sequence(call, on, given, b, queries, keys))
    device, ratio = q.device, call.q_heads // call.kv_heads
    first_q, first_k = int(on.sequences.seqlens_q[:b].sum()), int(on.sequences.seqlens_k[:b].sum())
    env = {
        **call.params, **on.tables, "b": torch.tensor(b, device=device),
        "h": torch.arange(call.q_heads, device=device)[:, None, None],
        "q_idx": torch.arange(queries, device=device)[:, None],
        "kv_idx": torch.arange(keys, device=device), "seqlen_q": queries, "seqlen_k": keys,
        "offset_q": first_q if call.layout != BATCHED else 0,
        "offset_k": first_k if call.layout == VARLEN else 0,
    }
    visible = to_torch(formula_of(call, on.tables), env).to(device)
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(ratio, 1)) * call.head_dim**-0.5
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if call.sink:
        sink = given["sink"].float()[:, None, None].expand(-1, queries, 1)
        scores = torch.cat([scores, sink], -1)
    expected_lse = torch.logsumexp(scores, -1) if scores.shape[-1] else torch.full(
        (call.q_heads, queries), float("-inf"), device=device
    )
    weights = torch.nan_to_num(torch.exp(scores - expected_lse[..., None]))[..., :keys]
    expected = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(ratio, 1))
    off_lse = torch.where(lse == expected_lse, 0.0, (lse - expected_lse).abs())
    return _largest((out - expected).abs()), _largest(off_lse)


def _largest(values: Any) -> float:
    """NaN counts as infinite."""
    import torch

    return float(torch.nan_to_num(values, nan=float("inf")).max()) if values.numel() else 0.0


def _of_sequence(
    call: Call, on: Resident, given: Mapping[str, Any], b: int, queries: int, keys: int
) -> tuple[Any, Any, Any, Any, Any]:
    """q, out, k, v [tokens, heads, dim] and LSE [heads, tokens] of one sequence."""
    q, k, v, out, lse = (given[name] for name in ("q", "k", "v", "out", "lse"))
    if call.layout == BATCHED:
        return q[b, :queries], out[b, :queries], k[b, :keys], v[b, :keys], lse[b, :, :queries]
    first = int(on.sequences.seqlens_q[:b].sum())
    rows = slice(first, first + queries)
    if call.layout == PAGED:
        place = given["page_table"][b].long()
        k, v = (each[place].flatten(0, 1)[:keys] for each in (k, v))
    else:
        first = int(on.sequences.seqlens_k[:b].sum())
        k, v = (each[first : first + keys] for each in (k, v))
    return q[rows], out[rows], k, v, lse[:, rows]
