"""What is generated from a mask equals the mask; what is generated from a fault is named."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from kernels.load import load
from proofs.checks import REAL, Row, check
from proofs.generated import constants_of, target
from proofs.obligation import Verdict
from proofs.variations import variations
from spec.masks import MASKS, Mask
from spec.to_cute import source

STATED = {
    **MASKS,
    **{f"{name} over query_ranges": mask.given(("query_ranges", "cu_seqlens_q"))
       for name, mask in MASKS.items() if "ranges" in mask.tables},
}


def rows_of(mask: Mask, formula, name: str) -> list[Row]:
    made = target(mask, formula, name, constants_of(mask))
    return list(check([made], lambda text: mask))


@pytest.mark.parametrize("name", STATED)
def test_a_generated_mask_mod_equals_its_mask(name: str) -> None:
    mask = STATED[name]
    rows = rows_of(mask, mask.formula, f"generated/{name}")
    verdicts = {r.result.obligation.name: r.result for r in rows}
    assert verdicts["equals-spec"].verdict is Verdict.PROVED, verdicts["equals-spec"].reason
    mutants = verdicts["equals-spec"].obligation.mutants
    assert verdicts["equals-spec"].killed == len(mutants) >= (1 if name == "full" else 8)
    assert verdicts["no-overflow"].verdict is Verdict.PROVED


@pytest.mark.parametrize("name", STATED)
def test_the_text_of_a_generated_mask_mod_passes_every_check(name: str, tmp_path: Path) -> None:
    """What `spec.show --cute` prints is safe to paste: padded rows read inside the tables too."""
    mask, file = STATED[name], tmp_path / "generated.py"
    file.write_text(source(mask, **constants_of(mask)))
    free = sorted(mask.params.keys() - constants_of(mask).keys())
    loaded = load(f"{file}::make", [f"{p}=@{p}" for p in free], spec=mask.name,
                  layouts=(tuple(mask.tables),))
    made = dataclasses.replace(loaded, constants=constants_of(mask))
    for row in check([made], lambda text: mask):
        if row.result.obligation.name != "representation":
            assert row.result.verdict is Verdict.PROVED, row.result.obligation.id
            bounds = row.result.obligation.bounds
            assert int(bounds.split(",")[0].removeprefix("N = ")) >= 2**31 - 258


def faults(count: int) -> list[tuple[str, int]]:
    return [(name, seed) for seed in range(count // len(MASKS) + 1) for name in MASKS][:count]


@pytest.mark.parametrize(("name", "seed"), faults(200))
def test_a_fault_is_diagnosed_by_a_proved_variation(name: str, seed: int) -> None:
    """One fault or two, drawn at random; the diagnosis need not be the same words, only right."""
    mask, draw = MASKS[name], random.Random(seed * 1009 + len(name))
    formula = draw.choice(variations(mask.formula)).term
    if seed % 2:
        formula = draw.choice(variations(formula)).term
    rows = {r.result.obligation.name: r for r in rows_of(mask, formula, f"fault/{name}/{seed}")}
    row = rows["equals-spec"]
    if row.result.verdict is Verdict.PROVED:
        return  # the variation happens to be the same function
    assert row.result.verdict is Verdict.REFUTED, row.result.reason
    reads = rows.get("reads-in-bounds")
    if reads is None or reads.result.verdict is Verdict.PROVED:
        assert row.replayed == REAL
    assert row.diagnosis is not None and row.diagnosis.verdict is Verdict.PROVED
