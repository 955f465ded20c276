"""The cause of a finding on a longer sequence than its smallest case, which may be two cells."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from spec.environment import environment, truth_table
from spec.from_text import from_text
from spec.masks import MASKS
from spec.show import shown
from spec.term import SpecError
from spec.to_picture import rows

# The sequence that is shown, and the texts of formulas that are taken from a document.
QUERIES, KEYS = 12, 18
LONGEST, LARGE_NUMBER = 4000, re.compile(r"\d{5}")


def longer(document: Mapping[str, Any]) -> dict[str, Any] | None:
    """`expected` and `got` like those of a finding, with `title`: the mask and what a proof says
    that the code computes in its place, on the catalogue's example; None where nothing says."""
    try:
        diagnosis, name = document["diagnosis"], document["case"]["call"]["spec"]
        if diagnosis["verdict"] != "PROVED":
            return None
        return _pair(str(name), str(diagnosis["variation"]))
    except (KeyError, TypeError):
        return None


@lru_cache(256)
def _pair(name: str, variation: str) -> dict[str, Any] | None:
    mask = MASKS.get(name)
    if mask is None or len(variation) > LONGEST or LARGE_NUMBER.search(variation):
        return None
    try:
        example = shown(mask, {}, QUERIES, KEYS)
        env = environment(mask, example.values, QUERIES, KEYS)
        meant = truth_table(mask, env)
        got = truth_table(replace(mask, formula=from_text(variation)), env)
    except (SpecError, ArithmeticError, LookupError, TypeError, ValueError):
        return None
    if (meant == got).all():
        return None
    return {"expected": rows(meant).split("\n"), "got": rows(got).split("\n"),
            "first_q": example.first_q, "first_kv": 0, "title": example.title}
