"""One sequence, from values that a person gives: checked, and as arrays for `to_numpy`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from spec.domain import BOTTOM_RIGHT, INT32_MAX, TABLES, Frame, Param, Table
from spec.masks import Mask
from spec.term import SpecError, Term, bind, expand, postorder, symbols
from spec.to_numpy import to_numpy
from spec.to_text import to_text

Array = np.ndarray[Any, Any]

# A whole grid is computed at once, in arrays of 8 bytes a cell.
MOST_CELLS = 2**24
# Of a longer formula a person reads what it means.
LONGEST_FACT = 120


def environment(
    mask: Mask, values: Mapping[str, Any], seqlen_q: int, seqlen_k: int
) -> dict[str, Any]:
    """The values of every name in `mask`'s formula on each cell of one sequence.

    `values`: an int for each parameter; for each table its entries for this sequence, as nested
    lists (`ranges=[[2, 5]]`, `prefix_lens=3`), or the whole table with its leading axis of one
    sequence. Counts of rows follow from the tables, `cu_seqlens_q` from `seqlen_q`, and
    `query_ranges` from `ranges`. Raises SpecError, one line that says what to do.
    """
    if min(seqlen_q, seqlen_k) < 0 or seqlen_q * seqlen_k > MOST_CELLS:
        raise SpecError(
            f"seqlen_q={seqlen_q} and seqlen_k={seqlen_k} must not be negative, "
            f"nor their product above {MOST_CELLS}"
        )
    given = dict(values)
    if "query_ranges" in mask.tables and "ranges" in given:
        ranges = given["ranges"] if "ranges" in mask.tables else given.pop("ranges")
        rows = own_rows(as_table(ranges, TABLES["ranges"])[0], seqlen_q, seqlen_k)
        given.setdefault("query_ranges", rows)
    refuse_unknown(mask, given)
    arrays = {name: as_table(given[name], table)
              for name, table in mask.tables.items() if name in given}
    arrays.setdefault("cu_seqlens_q", np.array([0, seqlen_q]))
    env: dict[str, Any] = {
        "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "b": 0, "h": 0, "num_seqs": 1,
        "num_tokens": int(arrays["cu_seqlens_q"][-1]), **sizes(mask, arrays),
        "q_idx": np.arange(seqlen_q)[:, None], "kv_idx": np.arange(seqlen_k)[None, :], **arrays,
    }
    for name, param in mask.params.items():
        if name in given or name not in env:
            env[name] = number(param, given)
        else:
            param.check(env[name])
    _check(mask, env)
    return env


def truth_table(mask: Mask, env: Mapping[str, Any], frame: Frame = BOTTOM_RIGHT) -> Array:
    """Whether query `i` sees key `j`, as a bool array [seqlen_q, seqlen_k]."""
    counts = {name: int(env[name]) for name in mask.params}
    try:
        seen = to_numpy(mask.framed(frame, **counts), env)
    except IndexError as error:
        raise SpecError(f"{mask.name} reads a table beyond its ends: {error}") from None
    return np.broadcast_to(seen, (env["seqlen_q"], env["seqlen_k"]))


def sizes(mask: Mask, arrays: Mapping[str, Any]) -> dict[str, int]:
    """What the shapes of tables say: `num_ranges` is the length of the second axis of `ranges`."""
    return {
        dim.value: int(size)
        for name in mask.tables if name in arrays
        for dim, size in zip(mask.tables[name].dims, np.shape(arrays[name]), strict=False)
        if dim.op == "sym" and dim.value in mask.params
    }


def counting(mask: Mask) -> list[str]:
    """The parameters that say how often an `any` of `mask`, or of what it rests on, repeats."""
    facts = [fact for table in mask.tables.values() for fact in table.facts]
    counts = [node.args[0] for node in postorder(mask.formula, *mask.assume, *facts)
              if node.op == "any"]
    return sorted(symbols(*counts) & mask.params.keys())


def own_rows(ranges: Array, seqlen_q: int, seqlen_k: int) -> Array:
    """For each query the longest of `ranges` that holds it, or (-1, -1): `query_ranges`."""
    rows = np.full((seqlen_q, 2), -1)
    positions = np.arange(seqlen_q) + seqlen_k - seqlen_q
    for first, last in sorted(ranges.tolist(), key=lambda row: row[1] - row[0]):
        rows[(first <= positions) & (positions <= last)] = first, last
    return rows


def refuse_unknown(mask: Mask, names: Iterable[str]) -> None:
    """SpecError for a name that `mask` has no use for."""
    known = [*mask.params, *mask.tables]
    derived = {"cu_seqlens_q", *(["ranges"] if "query_ranges" in mask.tables else [])}
    for name in sorted({*names} - {*known, *derived}):
        has = f"it has {', '.join(known)}" if known else "it has none"
        raise SpecError(f"{mask.name} has no parameter or table {name!r}; {has}")


def number(param: Param, values: Mapping[str, Any]) -> int:
    """The value of `param`, checked."""
    if param.name not in values:
        raise SpecError(
            f"no value for {param.name} ({param.meaning or 'a parameter'}): "
            f"set {param.name} to a number in {param.low} .. {param.high}"
        )
    value = values[param.name]
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise SpecError(f"{param.name} must be a whole number, not {value!r}")
    return param.check(int(value))


def as_table(value: Any, table: Table) -> Array:
    """`value` as an array with as many axes as `table` has dimensions."""
    try:
        array = np.asarray(value)
    except ValueError:
        raise SpecError(f"{table.name} has rows of different lengths: {value!r}") from None
    if array.size == 0 and array.ndim <= len(table.dims):
        fixed = [dim.value if dim.op == "const" else 0 for dim in table.dims[1:]]
        array = np.zeros((1 if _per_sequence(table) else 0, *fixed), dtype=np.int64)
    if array.dtype.kind not in "biu" or (abs(array) > INT32_MAX).any():
        raise SpecError(f"{table.name} must hold 32-bit whole numbers, not {value!r}")
    if array.ndim == len(table.dims) - 1 and _per_sequence(table):
        array = array[None]
    if array.ndim != len(table.dims):
        raise SpecError(f"{table.name} needs the shape of {table.shape}, not that of {value!r}")
    return array.astype(np.int64)


def _per_sequence(table: Table) -> bool:
    return table.dims[0].op == "sym" and table.dims[0].value == "num_seqs"


def _check(mask: Mask, env: Mapping[str, Any]) -> None:
    for name, table in mask.tables.items():
        if name not in env:
            raise SpecError(
                f"no value for the table {table.shape} ({table.meaning or 'undocumented'}): "
                f"set {name} to a {'list' if len(table.dims) > _per_sequence(table) else 'number'}"
            )
        need = tuple(int(to_numpy(dim, env)) for dim in table.dims)
        if need != env[name].shape:
            raise SpecError(f"{table.shape} needs the shape {list(need)} here, "
                            f"not {list(env[name].shape)}: set {name} or the lengths to fit")
    for fact in mask.assume:
        if not _holds(fact, env):
            raise SpecError(f"{mask.name} assumes `{to_text(fact)}`, which these values violate")
    for table in mask.tables.values():
        for fact in table.facts:
            if not _holds(fact, env):
                raise SpecError(_broken(table, to_text(fact), env[table.name]))


def _broken(table: Table, fact: str, array: Array) -> str:
    if table == TABLES["ranges"] and (pair := _overlapping(array[0].tolist())):
        return f"ranges overlap: {pair[0]} and {pair[1]}; those of more than one token may not"
    if len(fact) > LONGEST_FACT and table.meaning:
        return f"the values of {table.name} are not what it must hold: {table.meaning}"
    return (f"{table.name} ({table.meaning or 'a table'}) must satisfy `{fact}`, "
            "which these values violate")


def _overlapping(ranges: list[list[int]]) -> tuple[list[int], list[int]] | None:
    several = [row for row in ranges if row[0] < row[1]]
    pairs = ((a, b) for i, a in enumerate(several) for b in several[i + 1:])
    return next(((a, b) for a, b in pairs if a[0] <= b[1] and b[0] <= a[1]), None)


def _holds(fact: Term, env: Mapping[str, Any]) -> bool:
    counts = {name: env[name] for name in symbols(fact) if isinstance(env.get(name), int)}
    try:
        return bool(to_numpy(expand(BOTTOM_RIGHT(bind(fact, counts))), env).all())
    except IndexError:
        return False
