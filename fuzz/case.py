"""A case: one call, and the sequences that it is given, as canonical JSON and checked.

A sequence brings its lengths and, of each table that its mask is stated over, its own entries:
`ranges=((2, 5),)`, `prefix_lens=3`. What a kernel is given beside them (`cu_seqlens_q`,
`query_ranges`) follows from these.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from typing import Any

import numpy as np

from kernels.fa4 import Call
from spec.domain import BOTTOM_RIGHT, INT32_MAX, TABLES, Table
from spec.environment import as_table, own_rows, sizes
from spec.from_file import resolve
from spec.masks import Mask
from spec.term import SpecError, Term, bind, expand, sym
from spec.to_numpy import to_numpy
from spec.to_text import to_text

SCHEMA = 1
DERIVED = ("cu_seqlens_q", "query_ranges")
NUM_SEQS = sym("num_seqs")


class CaseError(Exception):
    """A case that cannot be used; the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """One sequence: `tables` holds its entries of each table, an int or nested tuples of ints."""

    seqlen_q: int
    seqlen_k: int
    tables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return self.seqlen_q * self.seqlen_k


@dataclass(frozen=True, slots=True)
class Case:
    call: Call
    sequences: tuple[Sequence, ...]


def stated(mask: Mask) -> dict[str, Table]:
    """The tables of which each sequence brings its own entries."""
    found = {name: t for name, t in mask.tables.items() if name not in DERIVED}
    if "query_ranges" in mask.tables:
        found.setdefault("ranges", TABLES["ranges"])
    return dict(sorted(found.items()))


def is_shared(table: Table) -> bool:
    """Whether all sequences of one call look at the same entries."""
    return table.dims[0] is not NUM_SEQS


def free_params(mask: Mask, constants: Mapping[str, int] = {}) -> list[str]:
    """The parameters that a call chooses; counts of rows follow from the tables."""
    return [name for name in mask.params if name not in constants and name != "num_ranges"]


def to_json(case: Case) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "call": {**asdict(case.call), "params": dict(case.call.params)},
        "sequences": [
            {"seqlen_q": s.seqlen_q, "seqlen_k": s.seqlen_k,
             "tables": {name: _listed(value) for name, value in s.tables.items()}}
            for s in case.sequences
        ],
    }


def canonical(case: Case) -> str:
    """The one text of a case: equal cases have equal texts."""
    return json.dumps(to_json(case), sort_keys=True, separators=(",", ":"))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def from_text(text: str) -> Case:
    try:
        return from_json(json.loads(text))
    except ValueError as error:
        raise CaseError(f"a case is JSON: {error}") from None


def from_json(given: Any) -> Case:
    """The case that parsed JSON holds, checked. Raises CaseError."""
    if not isinstance(given, dict):
        raise CaseError("a case is an object with schema, call and sequences")
    if given.get("schema") != SCHEMA:
        raise CaseError(f"a case of schema {given.get('schema')!r}; this version reads {SCHEMA}")
    if unknown := sorted(given.keys() - {"schema", "call", "sequences"}):
        raise CaseError(f"a case has no field {unknown[0]!r}")
    if not isinstance(sequences := given.get("sequences"), list):
        raise CaseError("`sequences` of a case must be a list")
    call = call_from(given.get("call"))
    case = Case(call, tuple(_sequence(i, one) for i, one in enumerate(sequences)))
    check(case)
    return case


def call_from(given: Any) -> Call:
    """The call that an object of JSON describes. Raises CaseError."""
    if not isinstance(given, dict):
        raise CaseError("`call` of a case must be an object")
    kinds = {f.name: str(f.type) for f in fields(Call)}
    for name, value in given.items():
        if name not in kinds:
            raise CaseError(f"a call has no field {name!r}")
        if not _fits(value, kinds[name]):
            raise CaseError(f"{name!r} of a call cannot be {value!r}")
    for name in ("provider", "spec"):
        if name not in given:
            raise CaseError(f"a call needs {name!r}")
    return Call(**given)


def _fits(value: Any, kind: str) -> bool:
    if value is None:
        return "None" in kind
    if isinstance(value, bool):
        return "bool" in kind
    if isinstance(value, int):
        return "int" in kind and "Mapping" not in kind and abs(value) <= INT32_MAX
    if isinstance(value, float):
        return kind.startswith("float") and isfinite(value)
    if isinstance(value, str):
        return kind.startswith("str")
    return "Mapping" in kind and isinstance(value, dict) and all(
        isinstance(k, str) and _is_int32(v) for k, v in value.items())


def _sequence(at: int, given: Any) -> Sequence:
    where = f"sequence {at}"
    if not isinstance(given, dict) or given.keys() != {"seqlen_q", "seqlen_k", "tables"}:
        raise CaseError(f"{where} must have seqlen_q, seqlen_k and tables, and nothing else")
    for name in ("seqlen_q", "seqlen_k"):
        if not _is_int32(given[name]) or given[name] < 0:
            raise CaseError(f"{name} of {where} cannot be {given[name]!r}")
    if not isinstance(given["tables"], dict):
        raise CaseError(f"tables of {where} must be an object")
    tables = {name: _nested(value, f"{name} of {where}") for name, value in given["tables"].items()}
    return Sequence(seqlen_q=given["seqlen_q"], seqlen_k=given["seqlen_k"], tables=tables)


def _nested(value: Any, where: str) -> Any:
    if isinstance(value, list):
        return tuple(_nested(part, where) for part in value)
    if not _is_int32(value):
        raise CaseError(f"{where} holds {value!r}, which is not a 32-bit whole number")
    return value


def _is_int32(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= INT32_MAX


def _listed(value: Any) -> Any:
    return [_listed(part) for part in value] if isinstance(value, tuple) else value


def check(case: Case) -> Mask:
    """The mask of a case whose values it admits. Raises CaseError, one line."""
    try:
        mask = resolve(case.call.spec)
        _check_params(mask, case.call.params)
        if not case.sequences:
            raise CaseError("a case needs a sequence at least")
        for i, sequence in enumerate(case.sequences):
            try:
                check_sequence(mask, case.call.params, sequence)
            except SpecError as error:
                raise CaseError(f"sequence {i}: {error}") from None
    except SpecError as error:
        raise CaseError(str(error)) from None
    return mask


def _check_params(mask: Mask, params: Mapping[str, int]) -> None:
    wanted = free_params(mask)
    for name in params:
        if name not in wanted:
            raise CaseError(f"{mask.name} has no parameter {name!r}")
    for name in wanted:
        if name not in params:
            raise CaseError(f"no value for {name} of {mask.name}")
        mask.params[name].check(params[name])


def check_sequence(mask: Mask, params: Mapping[str, int], sequence: Sequence) -> None:
    """Raises SpecError for a sequence that the mask's assumptions or its tables' facts exclude."""
    need = stated(mask)
    for name in sorted(sequence.tables.keys() ^ need.keys()):
        verb = "lacks" if name in need else "has no use for"
        raise SpecError(f"{verb} the table {name}")
    for name, value in sequence.tables.items():
        deep = len(need[name].dims) - (not is_shared(need[name]))
        if not _is_deep(value, deep):
            kind = f"a list {deep} deep" if deep else "a number"
            raise SpecError(f"{name} of one sequence is {kind}, not {_listed(value)}")
    env = _environment(mask, params, sequence)
    for name in need:
        wanted = tuple(int(to_numpy(dim, env)) for dim in need[name].dims)
        if env[name].shape != wanted:
            raise SpecError(f"{need[name].shape} needs the shape {list(wanted)}, "
                            f"not {list(env[name].shape)}")
    facts = [(fact, f"{mask.name} assumes") for fact in mask.assume]
    facts += [(fact, f"{name} must satisfy") for name, t in {**mask.tables, **need}.items()
              for fact in t.facts]
    for fact, who in facts:
        if not _holds(fact, env):
            raise SpecError(f"{who} `{to_text(fact)}`")


def _is_deep(value: Any, deep: int) -> bool:
    if isinstance(value, tuple):
        return deep > 0 and all(_is_deep(part, deep - 1) for part in value)
    return deep == 0


def _environment(mask: Mask, params: Mapping[str, int], sequence: Sequence) -> dict[str, Any]:
    need = stated(mask)
    arrays = {name: as_table(value, need[name]) for name, value in sequence.tables.items()}
    if "ranges" in arrays and arrays["ranges"].size == 0:
        arrays["ranges"] = np.zeros((1, 0, 2), dtype=np.int64)
    queries = sequence.seqlen_q
    if "query_ranges" in mask.tables:
        arrays["query_ranges"] = own_rows(arrays["ranges"][0], queries, sequence.seqlen_k)
    counted = sizes(mask, arrays)
    if "ranges" in arrays:
        counted["num_ranges"] = arrays["ranges"].shape[1]
    for name, value in counted.items():
        if name in mask.params:
            mask.params[name].check(value)
    return {
        "seqlen_q": queries, "seqlen_k": sequence.seqlen_k, "b": 0, "h": 0, "kv_idx": 0,
        "q_idx": np.arange(queries), "num_seqs": 1, "num_tokens": queries,
        "cu_seqlens_q": np.array([0, queries]), **params, **counted, **arrays,
    }


def _holds(fact: Term, env: Mapping[str, Any]) -> bool:
    counts = {name: value for name, value in env.items() if isinstance(value, int)}
    try:
        return bool(to_numpy(expand(BOTTOM_RIGHT(bind(fact, counts))), env).all())
    except IndexError:
        return False
