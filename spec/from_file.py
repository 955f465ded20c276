"""A mask of one's own, from a TOML file; and whatever names a mask on a command line.

    name = "strided"
    mask = "causal & (((q - kv) % stride == 0) | (group_ids[q] == group_ids[kv]))"
    assume = ["seqlen_q <= seqlen_k"]
    params.stride = {low = 1, high = 64, meaning = "distance of the keys that are seen"}
    tables.group_ids = {dims = "seqlen_k", facts = [], meaning = "group of each position"}

FORMAT says what each key means.
"""

from __future__ import annotations

import ast
import keyword
import os
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import UnionType
from typing import Any

from spec.domain import COORDINATES, INDICES, INT32_MAX, PARAMS, SIZES, TABLES, Param, Table, table
from spec.from_text import from_text
from spec.masks import EVERY_MASK, MASKS, Mask, mask, record
from spec.term import SpecError

Kind = type | UnionType

# Each key of a file, of a parameter and of a table, with the type of its value.
KEYS: Mapping[str, Kind] = {
    "name": str, "mask": str, "sentence": str, "assume": list, "params": dict, "tables": dict,
    "example": dict,
}
PARAM_KEYS: Mapping[str, Kind] = {"low": int, "high": int, "meaning": str}
TABLE_KEYS: Mapping[str, Kind] = {"dims": str | list, "facts": list, "meaning": str}
KINDS: Mapping[Kind, str] = {
    str: "text", list: "a list of texts", dict: "a table", int: "a whole number",
    str | list: "text, as in 'num_seqs, 2', or a list",
}
FORMAT = """\
A mask of your own is a TOML file. `name` and `mask` are needed, the rest is not:

  name      what reports call it; no name of the catalogue
  mask      where a query sees a key: a formula over positions, and masks of the catalogue, with
            & | ~, and, or, not, comparisons, + - * // %, min, max, table[i, j],
            any(... for r in range(n)), all(...)
  sentence  the same in words
  assume    list of formulas; the proof holds where they do

  [params]  a number of the mask each: NAME = {low = 1, high = 64, meaning = "..."}, both included
  [tables]  an int32 tensor each: NAME = {dims = "num_seqs, 2", facts = ["..."], meaning = "..."}
            dims     its shape, text or a list: numbers, parameters, seqlen_q, seqlen_k, num_seqs
                     (sequences of the batch), num_tokens (its packed rows)
            facts    formulas that whoever builds it guarantees for each sequence b
            meaning  what it holds, in words
  [example] values for the picture: seqlen_q, seqlen_k, parameters, tables (of one sequence)

A formula may name q and kv (absolute positions), b (sequence), h (query head), token (packed row
of the query), seqlen_q, seqlen_k, and what the file or the catalogue declares.
"""


def resolve(text: str) -> Mask:
    """The mask that a command line names: a catalogue name, a composition, or a TOML file."""
    if text not in MASKS and (text.endswith(".toml") or os.path.isfile(text)):
        return from_file(text)
    return _composed(text)


def from_file(path: str | Path) -> Mask:
    """The mask that a file holds. Raises SpecError, one line that begins with the file's name."""
    try:
        return _mask(tomllib.loads(Path(path).read_text()), str(path))
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SpecError(f"{path}: not a TOML file: {error}") from None
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None


def _mask(given: Mapping[str, Any], path: str) -> Mask:
    _typed(given, KEYS, {"name", "mask"}, "the file")
    if not given["name"].strip() or not given["name"].isprintable():
        raise SpecError(f"{given['name']!r} cannot be the name of a mask")
    if given["name"].strip() in MASKS:
        raise SpecError(f"the catalogue has a mask {given['name'].strip()!r}: choose another name")
    params = {name: _param(name, field) for name, field in given.get("params", {}).items()}
    tables = {name: _table(name, field) for name, field in given.get("tables", {}).items()}
    base = _composed(given["mask"], params, tables)
    assume = [from_text(text) for text in _texts(given.get("assume", []), "assume")]
    found = record(
        base, formula=base.formula, name=given["name"], source=path,
        sentence=given.get("sentence", f"A query sees a key where {given['mask']}."),
        assume=tuple(dict.fromkeys((*base.assume, *assume))), picture="",
        example=given.get("example", {}),
        params={**PARAMS, **base.params, **params}, tables={**TABLES, **base.tables, **tables},
    )
    for name in sorted(params.keys() - found.params.keys() | tables.keys() - found.tables.keys()):
        raise SpecError(f"`{name}` is declared and not used")
    shown = ["seqlen_q", "seqlen_k", *found.params, *found.tables]
    for name in found.example.keys() - {*shown, "cu_seqlens_q"}:
        raise SpecError(f"'example' has an unknown name {name!r}; it may have {', '.join(shown)}")
    return found


def _composed(
    text: str, params: Mapping[str, Param] = {}, tables: Mapping[str, Table] = {}
) -> Mask:
    """`mask(text)`; what a mask settles need not hold where its answer is turned around."""
    found = mask(text, params, tables)
    return replace(found, settles=EVERY_MASK) if _turns_around(text) else found


def _turns_around(text: str) -> bool:
    nodes = ast.walk(ast.parse(text.strip(), mode="eval"))
    turned = [node for node in nodes
              if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.Invert)]
    return any(isinstance(name, ast.Name) and name.id in MASKS
               for node in turned for name in ast.walk(node))


def _typed(given: Any, keys: Mapping[str, Kind], needed: set[str], where: str) -> None:
    if not isinstance(given, dict):
        raise SpecError(f"{where} must be a table with {', '.join(keys)}")
    for key, value in given.items():
        if key not in keys:
            raise SpecError(f"{where} has an unknown key {key!r}; it may have {', '.join(keys)}")
        if not isinstance(value, keys[key]) or isinstance(value, bool):
            raise SpecError(f"{key!r} of {where} must be {KINDS[keys[key]]}, not {value!r}")
    for key in sorted(needed - given.keys()):
        raise SpecError(f"{where} lacks {key!r}")


def _texts(given: list[Any], where: str) -> tuple[str, ...]:
    if not all(isinstance(text, str) for text in given):
        raise SpecError(f"{where!r} must be a list of texts")
    return tuple(given)


def _named(name: str) -> None:
    if not name.isidentifier() or keyword.iskeyword(name):
        raise SpecError(f"{name!r} cannot be a name")
    if name in COORDINATES | INDICES | SIZES:
        raise SpecError(f"{name!r} is a coordinate and cannot be declared")


def _param(name: str, given: Any) -> Param:
    _named(name)
    _typed(given, PARAM_KEYS, {"low", "high"}, f"the parameter {name!r}")
    if not -INT32_MAX - 1 <= given["low"] <= given["high"] <= INT32_MAX:
        raise SpecError(f"low and high of {name!r} must be 32-bit numbers with low <= high")
    return Param(name, given["low"], given["high"], given.get("meaning", ""))


def _table(name: str, given: Any) -> Table:
    _named(name)
    _typed(given, TABLE_KEYS, {"dims"}, f"the table {name!r}")
    facts = _texts(given.get("facts", []), "facts")
    return table(name, _dims(name, given["dims"]), facts, given.get("meaning", ""))


def _dims(name: str, given: str | list[Any]) -> str:
    parts = given.split(",") if isinstance(given, str) else given
    if any(isinstance(part, bool) or not isinstance(part, str | int) for part in parts):
        raise SpecError(f"'dims' of the table {name!r} must be a list of texts and whole numbers")
    dims = [str(part).strip() for part in parts]
    if not all(dims) or not dims:
        raise SpecError(f"'dims' of the table {name!r} has an empty dimension")
    return ", ".join(dims)
