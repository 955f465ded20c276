"""Where a fault lies, in words: which parts of the formula hold on the wrong cells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fuzz.sequences import Array, Sequences, given, located, num_ranges
from spec.domain import BOTTOM_RIGHT
from spec.masks import WORDS, Mask
from spec.sample import Lenient
from spec.term import BOOL, Term, bind, expand
from spec.to_numpy import to_numpy
from spec.to_text import to_text

COMPARISONS = ("lt", "le", "eq", "any")
WHOLE_ROW, BEHIND = "whole rows", "behind the last row"


def parts(formula: Term) -> list[Term]:
    """The named parts of a formula, and its comparisons beside them, from left to right."""
    if formula in WORDS or formula.op in COMPARISONS:
        return [formula]
    found = [part for arg in formula.args if arg.sort == BOOL for part in parts(arg)]
    return list(dict.fromkeys(found))


def words(part: Term) -> str:
    return WORDS.get(part) or f"`{to_text(part)}`"


def regions(
    mask: Mask, params: Mapping[str, int], packed: Sequences, cells: Mapping[str, Array]
) -> list[str]:
    """For each cell (`b`, `q_idx`, `kv_idx`, `h`) which parts of the formula hold there; of a row
    as a whole (`kv_idx` -1), or what lies behind all rows (`b` -1), just that."""
    texts = np.array(_regions(mask, params, packed, {
        name: np.maximum(column, 0) for name, column in cells.items()}), dtype=object)
    texts[cells["kv_idx"] < 0] = WHOLE_ROW
    texts[cells["b"] < 0] = BEHIND
    return list(texts)


def _regions(
    mask: Mask, params: Mapping[str, int], packed: Sequences, cells: Mapping[str, Array]
) -> list[str]:
    named = parts(mask.formula)
    if not named or not len(cells["b"]):
        return [mask.name] * len(cells["b"])
    count = {"num_ranges": num_ranges(packed)} if "num_ranges" in mask.params else {}
    env: dict[str, Any] = {
        **params, **cells, **located(packed, cells["b"]),
        **{name: Lenient(array)
           for name, array in given(packed, tuple(mask.tables), params).items()},
    }
    holds = np.stack([
        np.broadcast_to(to_numpy(expand(BOTTOM_RIGHT(bind(part, count))), env), cells["b"].shape)
        for part in named
    ], axis=1)
    kinds, which = np.unique(holds, axis=0, return_inverse=True)
    texts = [_said(named, kind) for kind in kinds]
    return [texts[i] for i in which.reshape(-1)]


def _said(named: list[Term], holds: Array) -> str:
    groups = {"inside": [], "outside": []}
    for part, held in zip(named, holds, strict=True):
        groups["inside" if held else "outside"].append(words(part))
    return ", ".join(f"{where} {' and '.join(found)}" for where, found in groups.items() if found)
