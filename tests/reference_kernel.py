"""A plain attention kernel in place of FA4's, with faults to plant: what `Reader` reads from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernels.derived import formula_of
from kernels.fa4 import BATCHED, PAGED, VARLEN, Call, Resident, Sequences
from spec.domain import TABLES
from spec.from_file import resolve
from spec.sample import batch
from spec.to_torch import to_torch

Weights = torch.Tensor


def sampled(call: Call, seed: int, longest: int = 40, sequences: int = 6) -> Sequences:
    """Sequences as `spec.sample` draws them, with the tables that the spec reads."""
    mask = resolve(call.spec)
    rng = np.random.default_rng(seed)
    constants = {**call.params, **({"num_ranges": 3} if "num_ranges" in mask.params else {})}
    drawn = batch(rng, mask.params, {**mask.tables, "cu_seqlens_q": TABLES["cu_seqlens_q"]},
                  constants=constants, sequences=sequences, longest=longest, cells=1 << 22)
    lengths = np.zeros((2, sequences), np.int32)
    for side, name in enumerate(("seqlen_q", "seqlen_k")):
        lengths[side][drawn.cells["b"]] = drawn.cells[name]
    # Sequences without a cell have lengths that only the packed rows tell.
    starts = drawn.tables["cu_seqlens_q"]
    lengths[0] = np.diff(starts)
    if mask.assume:
        lengths[1] = np.maximum(lengths[1], lengths[0])
    tables = {k: v for k, v in drawn.tables.items() if k in mask.tables}
    return Sequences(lengths[0], lengths[1], tables)


@dataclass
class Kernel:
    """Attention in float32. `mask` may change a sequence's visible cells [heads, q, kv], `weigh`
    its unnormalised weights, and `spoil` what was written."""

    mask: Callable[[int, torch.Tensor], torch.Tensor] = lambda b, visible: visible
    weigh: Callable[[int, torch.Tensor], torch.Tensor] = lambda b, weights: weights
    spoil: Callable[[dict[str, torch.Tensor]], None] = lambda given: None
    fa4: str = "the reference kernel"

    def layout(self, call: Call) -> tuple[str, ...]:
        """It has no mask_mod, and so no aux tensors."""
        return ()

    def launch(self, call: Call, on: Resident, **given: Any) -> None:
        term = formula_of(call, on.tables)
        lengths = zip(on.sequences.seqlens_q.tolist(), on.sequences.seqlens_k.tolist(), strict=True)
        row, key = 0, 0
        for b, (queries, keys) in enumerate(lengths):
            env = {
                **call.params, **on.tables, "b": b, "seqlen_q": queries, "seqlen_k": keys,
                "h": torch.arange(call.q_heads)[:, None, None],
                "q_idx": torch.arange(queries)[:, None], "kv_idx": torch.arange(keys),
                "offset_q": row, "offset_k": key,
            }
            if queries:
                self._sequence(call, b, queries, keys, row, key, to_torch(term, env), given)
            row, key = row + queries, key + keys
        self.spoil(given)

    def _sequence(
        self, call: Call, b: int, queries: int, keys: int, row: int, key: int,
        visible: torch.Tensor, given: dict[str, Any],
    ) -> None:
        visible = visible.broadcast_to(call.q_heads, queries, keys).clone()
        if call.layout == PAGED:
            used = -(-keys // call.page_size)
            where = given["page_table"][b, :used].long()
            k, v = (given[name][where].flatten(0, 1)[:keys] for name in ("k", "v"))
        elif call.layout == VARLEN:
            k, v = (given[name][key : key + keys] for name in ("k", "v"))
        else:
            k, v = (given[name][b, :keys] for name in ("k", "v"))
        rows = slice(row, row + queries)
        q = given["q"][b, :queries] if call.layout == BATCHED else given["q"][rows]
        ratio = call.q_heads // call.kv_heads
        k, v = (each.float().repeat_interleave(ratio, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.float(), k) * call.head_dim**-0.5
        if call.softcap:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        weights = self.weigh(b, scores.exp() * self.mask(b, visible))
        total = weights.sum(-1)
        if call.sink:
            total = total + given["sink"].float().exp()[:, None]
        out = torch.einsum("hqk,khd->qhd", weights, v) / total.clamp(min=1e-9).T[..., None]
        if call.layout == BATCHED:
            given["out"][b, :queries] = out.to(given["out"].dtype)
            given["lse"][b, :, :queries] = total.log()
        else:
            given["out"][rows] = out.to(given["out"].dtype)
            given["lse"][:, rows] = total.log()
