"""Sequences to read out, drawn without the fuzzer, and random data for kernels."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kernels.fa4 import PAGED, Call, Sequences, shapes
from spec.from_file import resolve

UPSTREAM, V24, V33 = "upstream", "vllm-0.24.0", "vllm-0.33.0"
RANGES = 4
FIXED = {"window": 129, "chunk": 100, "sink": 5, "num_ranges": RANGES}


def params_of(spec: str) -> dict[str, int]:
    return {name: value for name, value in FIXED.items() if name in resolve(spec).params}


def drawn(seed: int, spec: str, count: int, longest: int, *, ranges: int = RANGES) -> Sequences:
    """`count` sequences of up to `longest` keys, half of them whole prefills, with the tables that
    the spec reads."""
    rng, mask = np.random.default_rng(seed), resolve(spec)
    seqlens_k = rng.integers(0, longest + 1, count)
    seqlens_q = np.where(
        rng.random(count) < 0.5, rng.integers(0, seqlens_k + 1), np.minimum(seqlens_k, 1))
    more = rng.random(count) < (0 if mask.assume else 0.05)
    seqlens_q = np.where(more, rng.integers(0, longest // 2 + 1, count), seqlens_q)
    tables: dict[str, Any] = {}
    if "ranges" in mask.tables:
        edges = np.sort(rng.integers(0, longest + 40, (count, 2 * ranges)), axis=1)
        rows = (edges + np.arange(2 * ranges)).reshape(count, ranges, 2)
        rows[rng.random((count, ranges)) < 0.3] = -1
        tables["ranges"] = rows
    if "prefix_lens" in mask.tables:
        tables["prefix_lens"] = rng.integers(0, seqlens_k + 3)
    if "dynamic_causal" in mask.tables:
        tables["dynamic_causal"] = rng.integers(0, 2, count)
    if "document_ids" in mask.tables:
        tables["document_ids"] = np.sort(rng.integers(0, 6, longest + 1))
    given = {name: np.ascontiguousarray(table, np.int32) for name, table in tables.items()}
    return Sequences(seqlens_q.astype(np.int32), seqlens_k.astype(np.int32), given)


def random_data(call: Call, sequences: Sequences, seed: int = 0) -> dict[str, Any]:
    """The tensors of a launch on the GPU: standard normal Q, K and V; pages in random order."""
    import torch

    noise = torch.Generator("cuda").manual_seed(seed)
    given = {name: torch.empty(shape, dtype=dtype, device="cuda")
             for name, (shape, dtype) in shapes(call, sequences).items()}
    for name in sorted({"q", "k", "v"} & given.keys()):
        given[name].normal_(generator=noise)
    if call.layout == PAGED:
        n, width = given["page_table"].shape
        mixed = torch.randperm(len(given["k"]), generator=noise, device="cuda")
        given["page_table"] = mixed[: n * width].view(n, width).int()
    return given


def ahead(jobs: Sequence[Callable[[], None]], processes: int = 16) -> None:
    """Does jobs that compile, into the caches on disk, in processes forked from this one, which
    must not have used CUDA. What does not compile says so again when it is run."""
    children = []
    for i in range(processes):
        if (child := os.fork()) == 0:
            for job in jobs[i::processes]:
                try:
                    job()
                except Exception as error:  # noqa: BLE001
                    print(f"compiling: {type(error).__name__}: {str(error)[-300:]}", flush=True)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
