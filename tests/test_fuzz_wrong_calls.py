"""Wrong calls of kernels, met on random sequences, come down to a few queries and keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fuzz.backends import KINDS, LEAK, LOSS
from fuzz.case import Case
from fuzz.recipe import LENGTHS, PLACES, SHAPES, Recipe, expand_recipe
from fuzz.regions import regions
from fuzz.sequences import Sequences, expected, for_kernel, grid, pack, unpack
from fuzz.shrink import Shrunk, shrink
from fuzz.strategies import Space
from fuzz.targets import FLAGS, beside, built_in, in_turn
from kernels.fa4 import BATCHED, PAGED, VARLEN, Call, Resident
from kernels.mask_mods import TARGETS
from kernels.readout import Reader
from spec.from_file import resolve
from spec.masks import Mask
from tests.reference_kernel import Kernel

# What kernels make of calls that are wrong: another mask than the spec.
READS = {
    "upstream/built-in/known-bad/window -1, right 0": "causal & ~causal",
    "upstream/built-in/known-bad/dynamic_causal alone": "full",
    "upstream/built-in/known-bad/dynamic_causal_window, causal": "window",
    "maskproof/rswa beside causal=True": "causal",
    "maskproof/mm_prefix[window] beside causal=True": "causal",
    "maskproof/mm_prefix[clamp] beside causal=True": "causal",
}
OWN = {target.target: target for target in TARGETS}
CALLED = {**built_in(OWN), **beside(OWN)}


def first_call(name: str, layout: str) -> Call:
    return next(call for _, call in in_turn([CALLED[name]], gpu=True) if call.layout == layout)


def drawn_for(space: Space, call: Call, seed: int) -> Sequences:
    recipe = Recipe(
        call=call, seed=seed, count=60, longest=300, edge=128, rows=3, lengths=(1,) * len(LENGTHS),
        shapes=(1,) * len(SHAPES), places=(1,) * len(PLACES),
    )
    return expand_recipe(recipe, space.mask, most_cells=2**18, most_each=2**14,
                         constants=space.constants)


def faults(reads: Mask, space: Space, call: Call, at: Sequences) -> dict[tuple[str, str], int]:
    """Kind and region of each fault, and a sequence that shows it."""
    found: dict[tuple[str, str], int] = {}
    for cells in grid(at):
        cells["h"] = np.zeros_like(cells["b"])
        meant, got = (expected(each, call.params, at, cells) for each in (space.mask, reads))
        wrong = {name: column[meant != got] for name, column in cells.items()}
        kinds = np.where(got[meant != got], LEAK, LOSS)
        for b, kind, region in zip(
            wrong["b"], kinds, regions(space.mask, call.params, at, wrong), strict=True
        ):
            found.setdefault((KINDS[kind], region), int(b))
    return found


def shrunk(name: str, layout: str, seed: int) -> Iterator[Shrunk]:
    """The cases of all faults that one launch shows, each made small."""
    target, call = CALLED[name], first_call(name, layout)
    space = Space(call=call, mask=resolve(target.spec),
                  constants={**target.constants, **call.params})
    free = {p: 5 + 40 * seed for p in space.mask.params if p == "window" and p not in call.params}
    call, reads = replace(call, params={**call.params, **free}), resolve(READS[name])
    at = drawn_for(space, call, seed)
    for fault, b in faults(reads, space, call, at).items():
        def fails(case: Case, fault: tuple[str, str] = fault) -> bool:
            return fault in faults(reads, space, case.call, pack(space.mask, case.sequences))

        yield shrink(space, Case(call, unpack(space.mask, at, [b])), fails, 15)


LOADED = {"known-bad/paged, head dim 96"}


def test_all_flags_that_are_wrong_are_here() -> None:
    """But for what is not wrong in a mask: there keys are loaded wrongly."""
    bad = {name for name in FLAGS if name.startswith("known-bad/")} - LOADED
    assert bad == {name.partition("built-in/")[2] for name in READS if "built-in/" in name}


@pytest.mark.parametrize("name", READS)
def test_a_wrong_call_shrinks_from_wherever_it_is_met(name: str) -> None:
    """With the numbers that the first kernel of a layout has compiled in."""
    layouts = (PAGED, VARLEN, BATCHED, PAGED, VARLEN)
    met = [found for seed, layout in enumerate(layouts) for found in shrunk(name, layout, seed)]
    assert len(met) >= 3
    for found in met:
        (one,) = found.case.sequences
        assert found.finished and found.calls < 500
        assert one.seqlen_q <= 4 and one.seqlen_k <= 8


class Reads(Kernel):
    """The plain kernel, which applies another mask than it is told."""

    spec: str

    def launch(self, call: Call, on: Resident, **given: Any) -> None:
        super().launch(replace(call, spec=self.spec), on, **given)


@pytest.mark.parametrize("name", READS)
def test_the_smallest_case_of_a_wrong_call_reads_back_as_wrong(name: str) -> None:
    found, *_ = shrunk(name, PAGED, 1)
    kernel = Reads()
    for kernel.spec, wrong in ((READS[name], True), (found.case.call.spec, False)):
        call = replace(found.case.call, head_dim=16, head_dim_v=16, page_size=16,
                       dynamic_causal=False)
        at = for_kernel(resolve(call.spec), pack(resolve(call.spec), found.case.sequences),
                        call.params, ())
        assert (Reader(kernel, device="cpu").read(call, at).total > 0) == wrong
