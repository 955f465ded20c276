"""Thousands of sequences as arrays: what one launch is given, and what a kernel reads of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Any

import numpy as np

from fuzz.case import CaseError, Sequence, is_shared, stated
from kernels import fa4
from spec.domain import BOTTOM_RIGHT, Table
from spec.masks import Mask
from spec.term import bind, symbols
from spec.to_numpy import to_numpy

Array = np.ndarray[Any, Any]
SENTINEL = -1
# Arrays of one piece stay in the cache of a core.
PIECE = 2**16


@dataclass(frozen=True, slots=True)
class Sequences:
    """`seqlen_q`, `seqlen_k`: int64 [n]. `tables`: int32 arrays by name; the first axis is the
    sequence, but for tables that all sequences share."""

    seqlen_q: Array
    seqlen_k: Array
    tables: Mapping[str, Array]

    def __len__(self) -> int:
        return len(self.seqlen_q)

    @property
    def cells(self) -> Array:
        return self.seqlen_q * self.seqlen_k

    def padded(self, count: int, mask: Mask) -> Sequences:
        """With empty sequences behind, as many as `count` in all."""
        kinds, more = stated(mask), max(count - len(self), 0)
        tables = {name: array if is_shared(kinds[name]) else np.concatenate(
                      [array, np.full((more, *array.shape[1:]), SENTINEL, dtype=np.int32)])
                  for name, array in self.tables.items()}
        return Sequences(np.pad(self.seqlen_q, (0, more)), np.pad(self.seqlen_k, (0, more)), tables)

    def take(self, which: Any, mask: Mask) -> Sequences:
        """Some of the sequences, by indices or by a bool for each."""
        kinds = stated(mask)
        tables = {name: array if is_shared(kinds[name]) else array[which]
                  for name, array in self.tables.items()}
        return Sequences(self.seqlen_q[which], self.seqlen_k[which], tables)


def pack(mask: Mask, sequences: List[Sequence]) -> Sequences:
    """Sequences as arrays; fewer ranges than the most are filled up with (-1, -1) rows."""
    kinds = stated(mask)
    tables = {name: _packed(table, [s.tables[name] for s in sequences])
              for name, table in kinds.items()}
    lengths = np.array([(s.seqlen_q, s.seqlen_k) for s in sequences], dtype=np.int64)
    return Sequences(lengths[:, 0], lengths[:, 1], tables)


def _packed(table: Table, values: List[Any]) -> Array:
    own_axes = len(table.dims) - (not is_shared(table))
    parts = []
    for value in values:
        part = np.array(value, dtype=np.int32)
        if part.ndim < own_axes:  # no rows: the sizes of a row are lost
            inner = table.dims[len(table.dims) - own_axes + 1:]
            part = part.reshape(0, *(dim.value if dim.op == "const" else 0 for dim in inner))
        parts.append(part)
    shape = tuple(max(sizes) for sizes in zip(*(p.shape for p in parts), strict=True))
    if not is_shared(table):
        whole = np.full((len(parts), *shape), SENTINEL, dtype=np.int32)
        for i, part in enumerate(parts):
            whole[(i, *map(slice, part.shape))] = part
        return whole
    whole = np.zeros(shape, dtype=np.int32)
    for part in parts:
        whole[tuple(map(slice, part.shape))] = part
    if any((whole[tuple(map(slice, part.shape))] != part).any() for part in parts):
        raise CaseError(f"all sequences of one call share {table.name}, and these differ in it")
    return whole


def unpack(mask: Mask, packed: Sequences, which: List[int] | None = None) -> tuple[Sequence, ...]:
    """The sequences one by one. Unused rows at the end of a list of ranges are left away."""
    chosen = range(len(packed)) if which is None else which
    return tuple(_one(mask, packed, int(i)) for i in chosen)


def _one(mask: Mask, packed: Sequences, i: int) -> Sequence:
    lengths = {"seqlen_q": int(packed.seqlen_q[i]), "seqlen_k": int(packed.seqlen_k[i])}
    tables: dict[str, Any] = {}
    for name, table in stated(mask).items():
        array = packed.tables[name] if is_shared(table) else packed.tables[name][i]
        if is_shared(table):
            need = [bind(dim, lengths) for dim in table.dims]
            array = array[tuple(slice(None if symbols(d) else int(to_numpy(d, {}))) for d in need)]
        if name == "ranges":
            used = np.flatnonzero(array[:, 0] != SENTINEL)
            array = array[: int(used[-1]) + 1 if len(used) else 0]
        tables[name] = _tuples(array.tolist())
    return Sequence(**lengths, tables=tables)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def num_ranges(packed: Sequences) -> int:
    return packed.tables["ranges"].shape[1] if "ranges" in packed.tables else 0


def given(
    packed: Sequences, names: tuple[str, ...], params: Mapping[str, int],
    constants: Mapping[str, int] = {},
) -> dict[str, Array]:
    """The aux tensors of a kernel by name: tables, and parameters as tables of one element."""
    found = {}
    for name in names:
        if name in packed.tables:
            found[name] = packed.tables[name]
        elif name == "cu_seqlens_q":
            found[name] = np.concatenate([[0], np.cumsum(packed.seqlen_q)])
        elif name == "query_ranges":
            found[name] = query_ranges(packed)
        else:
            found[name] = np.array([params[name]])
    rows = constants.get("num_ranges", 0)
    if "ranges" in found and found["ranges"].shape[1] < rows:
        short = rows - found["ranges"].shape[1]
        found["ranges"] = np.pad(found["ranges"], ((0, 0), (0, short), (0, 0)),
                                 constant_values=SENTINEL)
    return {name: np.ascontiguousarray(array, dtype=np.int32) for name, array in found.items()}


def for_kernel(
    mask: Mask, packed: Sequences, params: Mapping[str, int], layout: tuple[str, ...],
    constants: Mapping[str, int] = {},
) -> fa4.Sequences:
    """The same sequences as a kernel call takes them, with the tables of `layout` and the mask."""
    names = tuple(dict.fromkeys((*layout, *packed.tables)))
    lengths = (packed.seqlen_q.astype(np.int32), packed.seqlen_k.astype(np.int32))
    return fa4.Sequences(*lengths, given(packed, names, params, constants))


def query_ranges(packed: Sequences) -> Array:
    """For each packed query the longest range that holds it, or (-1, -1); one row at least."""
    b = np.repeat(np.arange(len(packed)), packed.seqlen_q)
    start = np.cumsum(packed.seqlen_q) - packed.seqlen_q
    q = np.arange(len(b)) - start[b] + (packed.seqlen_k - packed.seqlen_q)[b]
    rows = np.full((max(len(b), 1), 2), SENTINEL, dtype=np.int32)
    longest = np.full(len(b), -1)
    for r in range(num_ranges(packed)):
        first, last = packed.tables["ranges"][b, r].T.astype(np.int64)
        better = (first <= q) & (q <= last) & (last - first > longest)
        longest[better] = (last - first)[better]
        rows[: len(b)][better] = packed.tables["ranges"][b, r][better]
    return rows


def grid(packed: Sequences, vector: int = 1) -> Iterator[dict[str, Array]]:
    """Every cell in pieces, int64 `b`, `q_idx`, `kv_idx`; a cell is the first of `vector` keys."""
    wide = -(-packed.seqlen_k // vector)
    count = packed.seqlen_q * wide
    ends = np.cumsum(count)
    total = int(ends[-1]) if len(ends) else 0
    for low in range(0, total, PIECE):
        high = min(low + PIECE, total)
        here = np.clip(ends, low, high) - np.clip(ends - count, low, high)
        b = np.repeat(np.arange(len(packed)), here)
        q_idx, at = np.divmod(np.arange(low, high) - (ends - count)[b], wide[b])
        yield {"b": b, "q_idx": q_idx, "kv_idx": at * vector}


def expected(
    mask: Mask, params: Mapping[str, int], packed: Sequences, cells: Mapping[str, Array]
) -> Array:
    """Whether each cell is visible, by the spec in NumPy. `cells` has b, q_idx, kv_idx and h."""
    count = {"num_ranges": num_ranges(packed)} if "num_ranges" in mask.params else {}
    env: dict[str, Any] = {
        **params, **cells, **located(packed, cells["b"]), "num_seqs": len(packed),
        "num_tokens": int(packed.seqlen_q.sum()),
        **given(packed, tuple(mask.tables), params),
    }
    seen = to_numpy(mask.framed(BOTTOM_RIGHT, **count), env)
    return np.broadcast_to(seen, cells["q_idx"].shape)


def located(packed: Sequences, b: Array) -> dict[str, Array]:
    """The lengths and offsets of the sequence that each cell is of."""
    offset_q, offset_k = (np.cumsum(x) - x for x in (packed.seqlen_q, packed.seqlen_k))
    return {"seqlen_q": packed.seqlen_q[b], "seqlen_k": packed.seqlen_k[b],
            "offset_q": offset_q[b], "offset_k": offset_k[b]}
