"""Effective masks beside the real `AttentionMask.apply_mask`, executed on the CPU.

The flags of a compiled kernel are given to the real method, on one small tile, with a table of
random bits in place of the mask_mod; each real cell is to be kept where the effective mask says so.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kernels.block_info import MODES, Mode
from kernels.builtin import NUMBERS, VISIBLE, Variant, lift, run
from kernels.builtin import Batch as Calls
from kernels.dispatch import Compiled, Effective, bounded
from kernels.machine import CannotLift
from kernels.provider import Provider
from kernels.run_cute import CannotRun
from proofs.sound import Disagreement
from spec.domain import BOTTOM_RIGHT
from spec.sample import Array, Batch, evaluate
from spec.term import Term, read, sym
from spec.tiles import Tile

TILE = Tile(64, 16)
CALLS, LANES, SEQUENCES, CELLS = 400, 32, 4, 80
LEFT, RIGHT = "window_size_left", "window_size_right"


def mode_of(how: Compiled) -> str | None:
    """The mode of `kernels.builtin` that has the flags; None where it has none."""
    wanted = Mode(how.is_causal, how.is_local, how.is_local and how.window_size_left is not None,
                  how.is_local and how.window_size_right is not None,
                  how.dynamic_causal is not None and (how.is_causal or how.is_local))
    return next((name for name, mode in MODES.items() if mode == wanted), None)


def agrees(provider: Provider, one: Effective) -> int | None:
    """Real cells on which the real method keeps what the effective mask says; None where it cannot
    run here. Raises Disagreement on the first difference."""
    mode = mode_of(one.compiled)
    if mode is None or not _is_served(provider):
        return None
    return _agrees(provider, mode, one.compiled.mask_mod is not None, with_windows(one))


def _is_served(provider: Provider) -> bool:
    """Another FA4 may be served in its place, where its own does not import."""
    try:
        file = provider.module("mask").__file__
    except CannotLift:
        return False
    return file is not None and Path(file).resolve().parent == provider.folder.resolve()


def with_windows(one: Effective) -> Term | None:
    """The effective mask, over the windows of the kernel's own arguments."""
    how, mask = one.compiled, one.mask
    if mask is None:
        return None
    named = replace(how, **{side: None if getattr(how, side) is None else sym(side)
                            for side in (LEFT, RIGHT)})
    return bounded(named, one.reads)


@functools.cache
def _agrees(provider: Provider, mode: str, mask_mod: bool, mask: Term | None) -> int | None:
    variant = Variant(mode, TILE, seqlen=True, mask_mod=mask_mod)
    at, table = calls(np.random.default_rng(3))
    try:
        fragment = lift(provider, variant)
        (got,) = run(provider, [Calls(variant, {name: at.cells[name] for name in NUMBERS}, table,
                                      np.zeros((CALLS, LANES), np.int32))])
    except (CannotLift, CannotRun):
        return None
    count = 0
    for i, element in enumerate(fragment.elements):
        cells = {"q_idx": at.cells["m_block"] * TILE.tile_m + evaluate(element.row, at),
                 "kv_idx": at.cells["n_block"] * TILE.tile_n + evaluate(element.col, at)}
        here = Batch({}, {**at.cells, **cells}, at.tables)
        real = (cells["q_idx"] < at.cells["seqlen_q"]) & (cells["kv_idx"] < at.cells["seqlen_k"])
        meant = evaluate(_table() if mask is None else BOTTOM_RIGHT(mask), here)
        if (wrong := np.flatnonzero(real & (got[:, i] != meant))).size:
            values = {name: int(column[wrong[0]]) for name, column in here.cells.items()}
            raise Disagreement(f"apply_mask of {mode} keeps another cell at {values}")
        count += int(real.sum())
    return count


def _table() -> Term:
    index = [sym(name) for name in ("batch", "head", "q_idx", "kv_idx")]
    return ~(read(VISIBLE, *index) <= 0)


def calls(rng: np.random.Generator) -> tuple[Batch, Array]:
    """Random threads, tiles, lengths and windows; and a mask_mod's bits [b, h, q, kv]."""
    def number(high: int) -> Array:
        return rng.integers(0, high, CALLS)

    b = number(SEQUENCES)
    tables: Mapping[str, Any] = {
        "dynamic_causal": rng.integers(0, 2, SEQUENCES).astype(np.int32),
        VISIBLE: rng.integers(0, 2, (SEQUENCES, 1, 2 * TILE.tile_m, CELLS)).astype(np.int32),
    }
    cells = {
        "thread": number(128), "m_block": number(2), "n_block": number(4), "b": b, "batch": b,
        "head": np.zeros(CALLS, np.int64), "seqlen_q": 1 + number(2 * TILE.tile_m),
        "seqlen_k": 1 + number(CELLS), "psc": tables["dynamic_causal"][b],
        LEFT: number(12), RIGHT: number(12),
    }
    return Batch({}, cells, tables), tables[VISIBLE]
