"""One leaked key at 147,456 keys: the read-out sees it, and the usual test does not."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from benchmarks.h200.inputs import UPSTREAM, V33, random_data
from benchmarks.h200.record import Record
from kernels.fa4 import Call, Sequences, provider, resident
from kernels.readout import Reader
from spec.domain import BOTTOM_RIGHT
from spec.from_file import resolve

KEYS, QUERIES, HEADS = 147_456, 2048, 8
RIGHT = "causal"
TOLERANCE = 2e-2
# Rows of the reference that are computed at once: 256 MiB of scores.
ROWS = 256


@dataclass(frozen=True, slots=True)
class Leak:
    """The last chunk of a prefill of so many keys, in one row of which the next key is visible."""

    keys: int = KEYS

    @property
    def query(self) -> int:
        """The position of the query that sees the key after it."""
        return self.keys - 100

    @property
    def row(self) -> int:
        return self.query - (self.keys - QUERIES)

    @property
    def mask(self) -> str:
        return f"{RIGHT} or q == {self.query} and kv == {self.query + 1}"

    @property
    def sequences(self) -> Sequences:
        return Sequences(np.array([QUERIES], np.int32), np.array([self.keys], np.int32))


def run(options: Any) -> Record:
    leak = Leak()
    return {
        "keys": leak.keys, "queries": QUERIES, "query": leak.query, "tolerance": TOLERANCE,
        "providers": {name: of_provider(name, leak) for name in (V33, UPSTREAM)},
    }


def of_provider(name: str, leak: Leak) -> Record:
    """The read-out of the leaky kernel and of the right one, and the usual test of the leaky."""
    call = Call(provider=name, spec=RIGHT, mask_mod=f"generated/{leak.mask}", kv_heads=HEADS,
                q_heads=HEADS)
    with provider(name) as source:
        reader = Reader(source)
        found = {}
        for which, text in (("leaky", leak.mask), ("right", RIGHT)):
            one = replace(call, mask_mod=f"generated/{text}")
            reader.read(one, leak.sequences)  # compiles
            reading = reader.read(one, leak.sequences)
            found[which] = {
                "cells": reading.cells, "counts": dict(reading.counts),
                "wrong": [asdict(each) for each in reading.wrong],
                "seconds": reading.kernel_seconds + reading.compare_seconds,
            }
        found["usual"] = usual(source, replace(call, kv_heads=1, q_heads=1), leak)
    print(name, found, flush=True)
    return found


def usual(source: Any, call: Call, leak: Leak) -> Record:
    """Random data through the leaky kernel, beside a dense float32 reference of the right mask."""
    import torch

    on = resident(leak.sequences, call.params, "cuda")
    given = random_data(call, leak.sequences)
    source.launch(call, on, **given)
    out = given["out"][:, 0].float()
    expected = reference(given, leak.keys)
    off = (out - expected).abs()
    return {
        "rows": len(out), "agrees": torch.allclose(out, expected, TOLERANCE, TOLERANCE),
        "largest_difference": float(off.max()), "in_the_leaked_row": float(off[leak.row].max()),
        "largest_output": float(expected.abs().max()),
    }


def reference(given: dict[str, Any], keys: int) -> Any:
    """Dense attention in float32 under the right mask, a block of rows at a time: [rows, dim]."""
    import torch

    from spec.to_torch import to_torch

    k, v = (given[name][given["page_table"][0].long()].flatten(0, 1)[:keys, 0].float()
            for name in ("k", "v"))
    q = given["q"][:, 0].float() * given["q"].shape[-1] ** -0.5
    rows, found = len(q), []
    formula = resolve(RIGHT).framed(BOTTOM_RIGHT)
    for first in range(0, rows, ROWS):
        q_idx = torch.arange(first, min(first + ROWS, rows), device=q.device)[:, None]
        visible = to_torch(formula, {
            "q_idx": q_idx, "kv_idx": torch.arange(keys, device=q.device), "seqlen_q": rows,
            "seqlen_k": keys})
        scores = (q[first : first + ROWS] @ k.T).masked_fill(~visible, float("-inf"))
        found.append(scores.softmax(-1) @ v)
    return torch.cat(found)
