"""Recipes: a few numbers that Hypothesis draws, from which NumPy makes thousands of sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from fuzz.boundaries import BEYOND, TILES
from fuzz.case import CaseError, call_from, stated
from fuzz.sequences import SENTINEL, Array, Sequences, given
from kernels.fa4 import Call
from spec.domain import BOTTOM_RIGHT, Table
from spec.masks import Mask
from spec.sample import Lenient
from spec.term import Term, bind, expand
from spec.to_numpy import to_numpy

Rng = np.random.Generator

# What the weights of a recipe are of.
LENGTHS = ("little", "at the edge", "at a tile", "any", "at a page")
SHAPES = ("prefill", "decode", "few queries", "chunk", "chunk at a tile", "more queries")
PLACES = ("anywhere", "chunk", "last key", "past the keys", "tile", "page", "window")
SPANS = (0, 0, 1, 2, 3, 7, 31, 63, 127, 200)
UNUSED, TOUCHING = 0.12, 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """`count` sequences of up to `longest` keys for `call`. `lengths`, `shapes` and `places` are
    weights of LENGTHS, SHAPES and PLACES; `edge` is a length that many lie at; `rows` is how many
    ranges a sequence has at most."""

    call: Call
    seed: int
    count: int
    longest: int
    edge: int
    rows: int
    lengths: tuple[int, ...]
    shapes: tuple[int, ...]
    places: tuple[int, ...]


def to_json(recipe: Recipe) -> dict[str, Any]:
    return {**asdict(recipe), "call": {**asdict(recipe.call), "params": dict(recipe.call.params)}}


def from_json(given: Any) -> Recipe:
    """The recipe that parsed JSON holds. Raises CaseError."""
    names = {f.name for f in fields(Recipe)}
    if not isinstance(given, dict) or given.keys() != names:
        raise CaseError("not a recipe of this version")
    values = {name: tuple(value) if isinstance(value, list) else value
              for name, value in given.items()}
    return Recipe(**{**values, "call": call_from(given["call"])})


def expand_recipe(
    recipe: Recipe, mask: Mask, *, most_cells: int = 2**62, most_each: int = 2**62,
    constants: Mapping[str, int] = {},
) -> Sequences:
    """The sequences of a recipe: at most `most_cells` cells in all, and `most_each` in one."""
    rng = np.random.default_rng(recipe.seed)
    seqlen_k = _keys(rng, recipe)
    seqlen_q = _queries(rng, recipe, seqlen_k)
    seqlen_q = np.minimum(seqlen_q, np.maximum(most_each // np.maximum(seqlen_k, 1), 1))
    tables = {name: _entries(rng, recipe, table, seqlen_q, seqlen_k, constants)
              for name, table in stated(mask).items()}
    found = Sequences(seqlen_q, seqlen_k, tables)
    kept = _admitted(mask, recipe.call.params, found)
    kept &= np.cumsum(np.where(kept, found.cells, 0)) <= most_cells
    return found.take(np.flatnonzero(kept), mask)


def _mixed(rng: Rng, weights: tuple[int, ...], values: list[Array]) -> Array:
    """Each entry from one of `values`, by weight."""
    share = np.array(weights, dtype=float)
    kind = rng.choice(len(values), len(values[0]), p=share / share.sum())
    return np.choose(kind, values)


def _near_multiple(rng: Rng, n: int, side: int | Array, most: int | Array) -> Array:
    times = rng.integers(0, np.maximum(np.asarray(most) // side, 1) + 1, n)
    return np.maximum(times * side + rng.integers(-1, 2, n), 0)


def _keys(rng: Rng, recipe: Recipe) -> Array:
    n, longest = recipe.count, recipe.longest
    tile = rng.choice(TILES, n)
    keys = _mixed(rng, recipe.lengths, [
        rng.integers(0, min(longest, 12) + 1, n),
        np.full(n, recipe.edge) + rng.integers(-1, 2, n),
        _near_multiple(rng, n, tile, longest),
        rng.integers(0, longest + 1, n),
        _near_multiple(rng, n, recipe.call.page_size, longest),
    ])
    return np.clip(keys, 0, longest).astype(np.int64)


def _queries(rng: Rng, recipe: Recipe, keys: Array) -> Array:
    n = recipe.count
    tile = rng.choice(TILES, n)
    queries = _mixed(rng, recipe.shapes, [
        keys,
        np.ones(n, dtype=np.int64),
        np.minimum(rng.integers(1, 9, n), keys),
        rng.integers(0, keys + 1),
        np.minimum(_near_multiple(rng, n, tile, keys), keys),
        keys + np.where(rng.random(n) < 0.5, 1, rng.integers(1, recipe.longest + 2, n)),
    ])
    return np.clip(queries, 0, recipe.longest).astype(np.int64)


def _entries(
    rng: Rng, recipe: Recipe, table: Table, seqlen_q: Array, seqlen_k: Array,
    constants: Mapping[str, int],
) -> Array:
    n, most = recipe.count, recipe.longest
    if table.name == "ranges":
        return _ranges(rng, recipe, seqlen_q, seqlen_k)
    if table.name == "prefix_lens":
        return _positions(rng, recipe, seqlen_q, seqlen_k).astype(np.int32)
    if table.name == "dynamic_causal":
        return (rng.random(n) < rng.choice([0.1, 0.5, 0.9])).astype(np.int32)
    sizes = {"seqlen_q": most, "seqlen_k": most, "num_seqs": n, "num_ranges": recipe.rows,
             "num_tokens": int(seqlen_q.sum()), **recipe.call.params, **constants}
    shape = [int(to_numpy(bind(dim, sizes), {})) for dim in table.dims]
    if table.name == "document_ids":
        steps = rng.random(shape) < rng.choice([0.01, 0.1, 0.5])
        return np.cumsum(steps, axis=-1).astype(np.int32)
    return rng.choice([-1, 0, 1, 2, 3, most // 2, most], shape).astype(np.int32)


def _positions(rng: Rng, recipe: Recipe, seqlen_q: Array, seqlen_k: Array) -> Array:
    """Positions where something changes, one for each sequence, none of them negative."""
    n = recipe.count
    chunk = np.maximum(seqlen_k - seqlen_q, 0)
    window = min(recipe.call.params.get("window", 1), recipe.longest)
    found = _mixed(rng, recipe.places, [
        rng.integers(0, seqlen_k + 1),
        chunk + rng.integers(-1, 2, n),
        seqlen_k + rng.integers(-2, 1, n),
        seqlen_k + rng.integers(0, 4, n) * rng.choice([1, BEYOND // 4], n),
        _near_multiple(rng, n, rng.choice(TILES, n), seqlen_k),
        _near_multiple(rng, n, recipe.call.page_size, seqlen_k),
        seqlen_k - window + rng.integers(-1, 2, n),
    ])
    return np.clip(found, 0, seqlen_k + BEYOND)


def _ranges(rng: Rng, recipe: Recipe, seqlen_q: Array, seqlen_k: Array) -> Array:
    """[n, rows, 2]: around the places of the recipe; disjoint, some touching, in any order."""
    n, rows = recipe.count, recipe.rows
    if rows == 0:
        return np.zeros((n, 0, 2), dtype=np.int32)
    span = rng.choice(SPANS, (n, rows))
    at = np.stack([_positions(rng, recipe, seqlen_q, seqlen_k) for _ in range(rows)], axis=1)
    first = np.sort(np.maximum(at - rng.integers(0, span + 1), 0), axis=1)
    found = np.empty((n, rows, 2), dtype=np.int64)
    end = np.full(n, -1)
    touch = rng.random((n, rows)) < TOUCHING
    touch[:, 0] = False
    for r in range(rows):
        start = np.where(touch[:, r], end + 1, np.maximum(first[:, r], end + 1))
        end = start + span[:, r]
        found[:, r, 0], found[:, r, 1] = start, end
    far = found[..., 1] > (seqlen_k + BEYOND)[:, None]
    found[far | (rng.random((n, rows)) < UNUSED)] = SENTINEL
    order = rng.random((n, rows)).argsort(axis=1)
    return np.take_along_axis(found, order[..., None], axis=1).astype(np.int32)


def _admitted(mask: Mask, params: Mapping[str, int], found: Sequences) -> Array:
    """The sequences on which every assumption of the mask and every fact of its tables holds."""
    n = len(found)
    b = np.arange(n)
    kept = np.ones(n, dtype=bool)
    for fact in dict.fromkeys(_facts(mask)):
        tables = {name: Lenient(array)
                  for name, array in given(found, tuple(mask.tables), params).items()}
        env: dict[str, Any] = {
            **params, **tables, "b": b, "h": 0, "q_idx": 0, "kv_idx": 0, "num_seqs": n,
            "seqlen_q": found.seqlen_q, "seqlen_k": found.seqlen_k,
            "num_tokens": int(found.seqlen_q.sum()),
        }
        count = {"num_ranges": found.tables["ranges"].shape[1]} if "ranges" in found.tables else {}
        kept &= np.broadcast_to(to_numpy(expand(BOTTOM_RIGHT(bind(fact, count))), env), n)
    return kept


def _facts(mask: Mask) -> list[Term]:
    """What is not so by construction: assumptions, and facts of tables unknown here."""
    known = {"ranges", "prefix_lens", "dynamic_causal", "document_ids", "cu_seqlens_q",
             "query_ranges"}
    return [*mask.assume, *(fact for name, t in mask.tables.items() if name not in known
                            for fact in t.facts)]
