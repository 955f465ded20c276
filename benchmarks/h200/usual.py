"""The usual test of an attention kernel: one case a launch, random data, a dense reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.h200.record import Record
from kernels.derived import formula_of, on_device
from kernels.fa4 import Call, Sequences
from spec.to_torch import to_torch

TOLERANCE = 2e-2
DEVICE = "cuda"
TRYING, SECONDS, WARM = 0.3, 2.0, 20


@dataclass(frozen=True, slots=True)
class Case:
    """One sequence, whose lengths and tables lie on the GPU: that is not part of what is timed."""

    on: Any
    queries: int
    keys: int


def cases(source: Any, call: Call, batches: Sequence[Sequences]) -> list[Case]:
    """Every sequence of the batches that has a cell, in any order."""
    layout, found = source.layout(call), []
    for sequences in batches:
        for i in np.flatnonzero(sequences.seqlens_q * sequences.seqlens_k):
            alone = sequences.select([int(i)])
            on = on_device(call, layout, alone, DEVICE)
            found.append(Case(on, int(alone.seqlens_q[0]), int(alone.seqlens_k[0])))
    return [found[i] for i in np.random.default_rng(0).permutation(len(found))]


def dense(q: Any, k: Any, v: Any, visible: Any, scale: float) -> Any:
    """Scores, softmax and average in float32; a row without a visible key gives 0."""
    scores = q @ k.T * scale
    if visible.dim():
        scores = scores.masked_fill(~visible, float("-inf"))
    return scores.softmax(-1).nan_to_num() @ v


def fused(q: Any, k: Any, v: Any, visible: Any, scale: float) -> Any:
    """The same by torch's own function."""
    from torch.nn.functional import scaled_dot_product_attention

    mask = visible if visible.dim() else None
    found = scaled_dot_product_attention(q[None, None], k[None, None], v[None, None], mask,
                                         scale=scale)
    return found[0, 0].nan_to_num()


def at_once(out: Any, expected: Any) -> Any:
    """`torch.allclose`, which waits for the GPU."""
    import torch

    return torch.allclose(out, expected, TOLERANCE, TOLERANCE)


def later(out: Any, expected: Any) -> Any:
    """What `torch.allclose` asks, without waiting."""
    import torch

    return torch.isclose(out, expected, TOLERANCE, TOLERANCE).all()


REFERENCES, CHECKS = (dense, fused), (at_once, later)


def measured(source: Any, call: Call, batches: Sequence[Sequences]) -> Record:
    """The fastest of the variants that agree with themselves, for SECONDS."""
    some = cases(source, call, batches)
    tried = []
    for reference, check in product(REFERENCES, CHECKS):
        timed(source, call, some, reference, check, 0, WARM)
        one = timed(source, call, some, reference, check, TRYING)
        tried.append(({"variant": f"{reference.__name__}, {check.__name__}", **one},
                      reference, check))
    sound = [each for each in tried if each[0]["agree"] == each[0]["cases"]] or tried
    best, reference, check = max(sound, key=lambda each: each[0]["cases_per_second"])
    found = timed(source, call, some, reference, check, SECONDS)
    return {"variant": best["variant"], **found,
            "tried": {each["variant"]: each["cases_per_second"] for each, _, _ in tried}}


def timed(
    source: Any, call: Call, some: list[Case], reference: Callable[..., Any],
    check: Callable[..., Any], seconds: float, least: int = 1,
) -> Record:
    import torch

    term = formula_of(call, some[0].on.tables, source.layout(call))
    longest = max(max(case.queries, case.keys) for case in some)
    numbers = torch.arange(longest, device=DEVICE)
    verdicts, cells, count = [], 0, 0
    torch.cuda.synchronize()
    begin = perf_counter()
    each: Iterator[Case] = cycle(some)
    while count < least or perf_counter() - begin < seconds:
        case = next(each)
        verdicts.append(check(*one(source, call, case, term, numbers, reference)))
        cells, count = cells + case.queries * case.keys, count + 1
    if not isinstance(verdicts[0], bool):
        verdicts = torch.stack(verdicts).tolist()
    torch.cuda.synchronize()
    wall = perf_counter() - begin
    return {"cases": count, "cells": cells, "agree": sum(verdicts), "seconds": wall,
            "cases_per_second": count / wall, "cells_per_second": cells / wall}


def one(
    source: Any, call: Call, case: Case, term: Any, numbers: Any, reference: Callable[..., Any]
) -> tuple[Any, Any]:
    """Output of the kernel and of the reference for one case: float32 [queries, head_dim]."""
    import torch

    queries, keys = case.queries, case.keys
    data = torch.randn(queries + 2 * keys, 1, call.head_dim, dtype=torch.bfloat16, device=DEVICE)
    q, k, v = data.split([queries, keys, keys])
    out = torch.empty_like(q)
    lse = torch.empty(1, queries, dtype=torch.float32, device=DEVICE)
    source.launch(call, case.on, q=q, k=k, v=v, out=out, lse=lse)
    env = {**call.params, **case.on.tables, "b": 0, "h": 0, "seqlen_q": queries, "seqlen_k": keys,
           "offset_q": 0, "offset_k": 0, "q_idx": numbers[:queries, None],
           "kv_idx": numbers[:keys]}
    expected = reference(q[:, 0].float(), k[:, 0].float(), v[:, 0].float(), to_torch(term, env),
                         call.head_dim**-0.5)
    return out[:, 0].float(), expected
