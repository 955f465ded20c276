"""What follows from a call and its tables: the formula to hold it against, and `query_ranges`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from kernels.ahead import launch
from kernels.fa4 import Call, Resident, Sequences, resident
from spec.domain import BOTTOM_RIGHT
from spec.from_file import resolve
from spec.term import Term, symbols
from spec.to_triton import tables_of

OWN_ROWS = "query_ranges"
BLOCK = 256


def formula_of(call: Call, tables: Mapping[str, Any], layout: tuple[str, ...] = ()) -> Term:
    """The spec of a call in a kernel's indices.

    It speaks of `query_ranges` where the kernel is given these, by `layout`, the names of its aux
    tensors, or where there are no `ranges`.
    """
    ranges = tables.get("ranges")
    own_rows = OWN_ROWS in layout or ranges is None and OWN_ROWS in tables
    return _formula(call.spec, own_rows, None if ranges is None else int(ranges.shape[1]))


@lru_cache(maxsize=1024)
def _formula(spec: str, own_rows: bool, num_ranges: int | None) -> Term:
    mask = resolve(spec)
    if own_rows:
        mask = mask.given((OWN_ROWS,))
    counts = {"num_ranges": num_ranges} if num_ranges is not None else {}
    return mask.framed(BOTTOM_RIGHT, **counts)


@lru_cache(maxsize=1024)
def differs_by_head(term: Term) -> bool:
    """Whether a formula speaks of heads."""
    return "h" in symbols(term)


def is_derived(call: Call, tables: Mapping[str, Any], layout: tuple[str, ...]) -> bool:
    """Whether `query_ranges` are needed, and have to be made from `ranges`."""
    if OWN_ROWS in tables or "ranges" not in tables:
        return False
    return OWN_ROWS in layout or OWN_ROWS in tables_of(formula_of(call, tables))


def on_device(
    call: Call, layout: tuple[str, ...], sequences: Sequences, device: str,
    more: Mapping[str, Any] = {},
    finish: Callable[[Mapping[str, Any], Mapping[str, Any]], None] | None = None,
) -> Resident:
    """As `resident`, with `query_ranges` where they follow from `ranges` and are read."""
    if not is_derived(call, sequences.tables, layout):
        return resident(sequences, call.params, device, more, finish)
    import torch

    own = torch.empty(max(sequences.rows, 1), 2, dtype=torch.int32, device=device)

    def finish_with(tables: Mapping[str, Any], here: Mapping[str, Any]) -> None:
        if finish:
            finish({**tables, OWN_ROWS: own}, here)

    on = resident(sequences, call.params, device, more, finish_with)
    place_own_rows(on, own)
    return replace(on, tables={**on.tables, OWN_ROWS: own})


def place_own_rows(on: Resident, own: Any) -> None:
    """Writes `query_ranges`: int32 [rows, 2], of each packed query the longest of the `ranges` of
    its sequence that holds it, the first among equals, or (-1, -1). Without a query it is one row
    that nobody reads."""
    from kernels.comparison import place_ranges

    ranges = on.tables["ranges"]
    launch(
        place_ranges, len(on.sequences), own, ranges, on.cu_seqlens_q, on.seqlens_k,
        int(np.shape(ranges)[1]), BLOCK=BLOCK,
    )
