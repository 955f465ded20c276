"""Batches of sequences to try a mask on: small, valid by construction, rich in boundaries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from spec.domain import TABLES, Param, Table
from spec.term import Term, bind
from spec.to_numpy import to_numpy

Array = np.ndarray[Any, Any]
Rng = np.random.Generator
SENTINEL = -1


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences that share one set of tables.

    `cells`: int64 arrays of one shape [n], one entry a cell, by symbol (`b`, `q_idx`, ...).
    `tables`: int32 arrays of the declared dims, whose `num_seqs` is the number of sequences.
    """

    params: Mapping[str, int]
    cells: Mapping[str, Array]
    tables: Mapping[str, Array]

    @property
    def env(self) -> dict[str, Any]:
        return {**self.params, **self.tables, **self.cells}

    def select(self, keep: Array) -> Batch:
        return Batch(self.params, {k: v[keep] for k, v in self.cells.items()}, self.tables)


def batch(
    rng: Rng, params: Mapping[str, Param], tables: Mapping[str, Table], *,
    constants: Mapping[str, int] = {}, assume: tuple[Term, ...] = (), sequences: int = 12,
    longest: int = 20, cells: int = 2048, padding: int = 0,
    vector: int = 1, full: bool = True,
) -> Batch:
    """A random batch of at most `cells` cells on which every one of `assume` holds.

    Lengths reach from 0 to `longest`, with more queries than keys among them; `padding` rows and
    keys past the end of each sequence are cells too. Parameters lie near the lengths or at the
    ends of their ranges. `full` makes one sequence a prefill of the greatest length. A cell is the
    first of `vector` keys. `constants` binds parameters and sizes of tables.
    """
    seqlen_k = rng.integers(0, longest + 1, sequences)
    usual, any_length = rng.integers(0, seqlen_k + 1), rng.integers(0, longest + 1, sequences)
    seqlen_q = np.where(rng.random(sequences) < 0.8, usual, any_length)
    if full:
        seqlen_q[0], seqlen_k[0] = longest, longest
    values = {name: constants.get(name, _parameter(rng, p, longest)) for name, p in params.items()}
    shape = {**values, "num_seqs": sequences, "num_tokens": max(int(seqlen_q.sum()), 1)}
    built = _tables(rng, tables, seqlen_q, seqlen_k, shape, longest)
    at = _cells(rng, seqlen_q, seqlen_k, cells, padding, vector)
    found = Batch({**values, **{k: shape[k] for k in ("num_seqs", "num_tokens")}}, at, built)
    keep = np.ones(len(at["b"]), dtype=bool)
    for fact in assume:
        keep &= np.broadcast_to(to_numpy(fact, _lenient(found.env, built)), keep.shape)
    return found.select(keep)


def _parameter(rng: Rng, param: Param, longest: int) -> int:
    near = int(rng.choice([1, 2, 3, 4, 5, 8, longest // 2, longest - 1, longest, longest + 1]))
    value = near if rng.random() < 0.95 else int(rng.choice([param.low, param.high]))
    return min(max(value, param.low), param.high)


def _cells(
    rng: Rng, seqlen_q: Array, seqlen_k: Array, count: int, padding: int, vector: int
) -> dict[str, Array]:
    """`count` cells of all that there are, or every one of fewer."""
    rows, keys = seqlen_q + padding, -(-(seqlen_k + padding) // vector)
    ends = np.cumsum(rows * keys)
    total = int(ends[-1])
    flat = np.arange(total) if total <= count else np.sort(rng.choice(total, count, replace=False))
    b = np.searchsorted(ends, flat, side="right")
    q_idx, vector_idx = np.divmod(flat - (ends - rows * keys)[b], keys[b])
    offset_q, offset_k = np.cumsum(seqlen_q) - seqlen_q, np.cumsum(seqlen_k) - seqlen_k
    return {
        "b": b, "h": rng.integers(0, 8, len(b)), "q_idx": q_idx, "kv_idx": vector_idx * vector,
        "seqlen_q": seqlen_q[b], "seqlen_k": seqlen_k[b],
        "offset_q": offset_q[b], "offset_k": offset_k[b],
    }


def _ranges(rng: Rng, count: int, length: int) -> Array:
    """`count` rows [first, last]: disjoint, some one token long, some touching, some unused."""
    edges = np.sort(rng.choice(length + 2 * count + 2, 2 * count, replace=False))
    rows = edges.reshape(count, 2) - rng.integers(0, count + 1)
    rows[:, 0] = np.maximum(rows[:, 0], 0)
    rows[:, 1] = np.maximum(rows[:, 1], rows[:, 0])
    single, unused = rng.random((2, count)) < 0.12
    rows[single, 1] = rows[single, 0]
    rows[unused] = SENTINEL
    rows[rows[:, 1] < 0] = SENTINEL
    return rng.permutation(_disjoint(rows))


def _disjoint(rows: Array) -> Array:
    last = -1
    for row in rows:
        if row[0] >= 0:
            row[0] = max(row[0], last + 1)
            row[1] = max(row[1], row[0])
            last = row[1]
    return rows


def _own_rows(ranges: Array, seqlen_q: Array, seqlen_k: Array, tokens: int) -> Array:
    """For each packed query the range that holds it, or the sentinel row."""
    rows = np.full((tokens, 2), SENTINEL)
    token = 0
    for b, (queries, keys) in enumerate(zip(seqlen_q, seqlen_k, strict=True)):
        for q in range(keys - queries, keys):
            for first, last in ranges[b]:
                if first <= q <= last:
                    rows[token] = first, last
            token += 1
    return rows


def _tables(
    rng: Rng, tables: Mapping[str, Table], seqlen_q: Array, seqlen_k: Array,
    shape: Mapping[str, int], longest: int,
) -> dict[str, Array]:
    sequences = len(seqlen_q)
    ranges = np.stack([
        _ranges(rng, shape.get("num_ranges", 3), int(k)) for k in seqlen_k
    ]).astype(np.int32)
    builders: dict[str, Callable[[], Array]] = {
        "ranges": lambda: ranges,
        "query_ranges": lambda: _own_rows(ranges, seqlen_q, seqlen_k, shape["num_tokens"]),
        "cu_seqlens_q": lambda: np.concatenate([[0], np.cumsum(seqlen_q)]),
        "prefix_lens": lambda: rng.integers(0, seqlen_k + 3),
        "dynamic_causal": lambda: rng.integers(0, 2, sequences),
        "document_ids": lambda: np.sort(rng.integers(0, 4, longest + 1)),
    }

    def other(table: Table) -> Array:
        sizes = {**shape, "seqlen_q": longest + 1, "seqlen_k": longest + 1}
        dims = [int(to_numpy(bind(dim, sizes), {})) for dim in table.dims]
        values = [-1, 0, 1, 2, 3, longest // 2, longest]
        return rng.choice(values, dims)

    def built(table: Table) -> Array:
        known = TABLES.get(table.name) == table
        return builders[table.name]() if known else other(table)

    return {name: np.ascontiguousarray(built(table), dtype=np.int32)
            for name, table in tables.items()}


class Lenient:
    """A table that answers any index, with the nearest element that it has."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def __getitem__(self, index: Any) -> Array:
        index = index if isinstance(index, tuple) else (index,)
        return self.array[tuple(
            np.clip(i, 0, size - 1) for i, size in zip(index, self.array.shape, strict=True)
        )]


def _lenient(env: Mapping[str, Any], tables: Mapping[str, Array]) -> dict[str, Any]:
    return {**env, **{name: Lenient(array) for name, array in tables.items()}}


def evaluate(term: Term, at: Batch, memo: dict[Term, Any] | None = None) -> Array:
    """The value of `term` on every cell; a read beyond a table gives its nearest element."""
    value = to_numpy(term, _lenient(at.env, at.tables), memo)
    return np.broadcast_to(value, at.cells["b"].shape)
