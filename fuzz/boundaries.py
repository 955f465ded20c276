"""Where masks break: lengths that cases lie at, and classes that a sequence is counted in."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fuzz.sequences import Array, Sequences, num_ranges
from kernels.fa4 import Call
from spec.masks import Mask

# Sides of the tiles that FA4 and its relatives choose, and of pages.
TILES = (64, 80, 96, 128, 176, 192)
# What fields of a call may be, the plainest first; a back end takes those that it can run.
RATIOS = tuple(range(1, 17))
PAGES = (128, 1, 16, 64, 256)
SPLITS = (1, 2, 3, 4, 8, 64, 0)
SMALL = (0, 1, 2, 3, 4, 8, 16, 32)
BEYOND = 256  # how far past the cached keys a range may end here


def edges(longest: int, *more: int) -> tuple[int, ...]:
    """Numbers up to about `longest` at which something changes, each with its neighbours."""
    multiples = {tile * k for tile in (*TILES, *more) if tile > 0
                 for k in range(1, min(longest // tile, 8) + 1)}
    ends = {longest // tile * tile for tile in TILES}
    near = {e + by for e in multiples | ends | {longest} | set(more) for by in (-1, 0, 1)}
    return tuple(sorted(n for n in near | set(SMALL) if 0 <= n <= longest + 1))


LENGTH_CLASSES = (
    "one query", "no key", "more queries than keys", "prefill", "chunk", "short", "page end",
    *(f"tile {tile}{by:+d}" for tile in TILES for by in (-1, 0, 1)),
)
RANGE_CLASSES = (
    "no range", "range of one token", "ranges touch", "range crosses the chunk",
    "range crosses a tile", "range crosses a page", "range ends past the keys",
    "range before the chunk", "range holds the chunk",
)


def classes(mask: Mask, call: Call, at: Sequences) -> dict[str, Array]:
    """The boundary classes that can be told for this mask, and the sequences [n] in each."""
    found = _lengths(call, at)
    if "ranges" in at.tables:
        found |= _ranges(call, at)
    if "prefix_lens" in at.tables:
        found |= _prefixes(at)
    if "dynamic_causal" in at.tables:
        flag = at.tables["dynamic_causal"] != 0
        found |= {"causal sequence": flag, "bidirectional sequence": ~flag,
                  "flags mixed": np.full(len(at), flag.any() and not flag.all())}
    if "window" in mask.params and "window" in call.params:
        found |= _window(call.params["window"], at)
    return found


def counts(mask: Mask, call: Call, at: Sequences) -> dict[str, int]:
    return {name: int(which.sum()) for name, which in classes(mask, call, at).items()}


def _lengths(call: Call, at: Sequences) -> dict[str, Array]:
    q, k = at.seqlen_q, at.seqlen_k
    found = {
        "one query": q == 1, "no key": k == 0, "more queries than keys": q > k,
        "prefill": (q == k) & (q > 1), "chunk": (1 < q) & (q < k), "short": (q > 0) & (k < 9),
        "page end": (k > 0) & (k % call.page_size == 0),
        "prefill and decode mixed": np.full(len(at), (q == 1).any() and (q > 1).any()),
    }
    for tile in TILES:
        for by in (-1, 0, 1):
            found[f"tile {tile}{by:+d}"] = (k > 1) & (np.abs(k - by) % tile == 0) & (k != by)
    return found


def _ranges(call: Call, at: Sequences) -> dict[str, Array]:
    n, chunk = len(at), at.seqlen_k - at.seqlen_q
    names = RANGE_CLASSES
    found: dict[str, Array] = {name: np.zeros(n, dtype=bool) for name in names}
    rows = at.tables["ranges"].astype(np.int64)
    used = rows[..., 0] >= 0
    found["no range"] = ~used.any(axis=1) if num_ranges(at) else np.ones(n, dtype=bool)
    for r in range(num_ranges(at)):
        first, last, is_range = rows[:, r, 0], rows[:, r, 1], used[:, r]
        held = {
            "range of one token": first == last,
            "range crosses the chunk": (0 < chunk) & (first < chunk) & (chunk <= last),
            "range crosses a tile": np.logical_or.reduce(
                [first // tile < last // tile for tile in TILES]),
            "range crosses a page": first // call.page_size < last // call.page_size,
            "range ends past the keys": last >= at.seqlen_k,
            "range before the chunk": last < chunk,
            "range holds the chunk": (first <= chunk) & (last >= at.seqlen_k - 1)
                                     & (at.seqlen_q > 0),
            "ranges touch": ((rows[..., 0] == last[:, None] + 1) & used).any(axis=1),
        }
        for name, holds in held.items():
            found[name] |= is_range & holds
    return found


def _prefixes(at: Sequences) -> dict[str, Array]:
    prefix, chunk = at.tables["prefix_lens"], at.seqlen_k - at.seqlen_q
    return {
        "no prefix": prefix == 0, "prefix of one": prefix == 1,
        "prefix ends at the chunk": np.abs(prefix - chunk) <= 1,
        "prefix ends inside the chunk": (chunk < prefix) & (prefix < at.seqlen_k),
        "prefix holds all keys": prefix >= at.seqlen_k,
    }


def _window(window: int, at: Sequences) -> dict[str, Array]:
    n = len(at)
    return {
        "window of one": np.full(n, window == 1),
        "window shorter than the keys": window < at.seqlen_k,
        "window is all keys, by one": np.abs(window - at.seqlen_k) <= 1,
        "window beyond the keys": window > at.seqlen_k + 1,
        "window at a tile": np.full(n, any(abs(window - t * k) <= 1 for t in TILES
                                           for k in range(1, 9))),
    }


def merged(total: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
    return {name: total.get(name, 0) + more.get(name, 0) for name in {**total, **more}}
