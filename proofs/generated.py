"""Mask_mods generated from a formula: the text the compiler traces is written by `spec.to_cute`."""

from __future__ import annotations

from collections.abc import Mapping

from kernels.target import Target
from spec.domain import BOTTOM_RIGHT, COORDINATES, INDICES
from spec.masks import Mask
from spec.term import Term, bind, expand, symbols
from spec.term import tables as tables_of
from spec.to_cute import inside_tables, to_cute

RANGES = 2


def constants_of(mask: Mask) -> dict[str, int]:
    """Counts have to be compiled in; every other parameter stays symbolic."""
    return {"num_ranges": RANGES} if "num_ranges" in mask.params else {}


def target(mask: Mask, formula: Term, name: str, constants: Mapping[str, int]) -> Target:
    """A target whose code is `formula`, in absolute coordinates, held to `mask`. Code for the
    mask's own formula stays inside its tables on padded rows and keys, too."""
    code = expand(bind(BOTTOM_RIGHT(formula), constants))
    if formula is mask.formula:
        code = inside_tables(code, mask)
    tables = tuple(sorted(tables_of(code)))
    free = tuple(sorted(symbols(code) - COORDINATES - INDICES))
    return Target(
        target=name, spec=mask.name, make=to_cute(code, tables=tables, symbols=free), symbols=free,
        layouts=(tables,), constants=constants,
        ranks={t.name: len(t.dims) for t in mask.tables.values()},
    )
