"""The calls that a campaign makes: which mask_mods, beside which flags, as which kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.backends import CpuBackend
from fuzz.bound import Bound
from fuzz.case import Case, Sequence, canonical
from fuzz.case import from_text as from_text_case
from fuzz.gpu import LEAST, GpuBackend
from fuzz.recipe import Recipe
from fuzz.recipe import from_json as recipe_from
from fuzz.recipe import to_json as recipe_to
from fuzz.sequences import pack
from fuzz.strategies import Space, recipes
from fuzz.targets import (
    BESIDE,
    FLAGS,
    VARIANTS,
    WRONG,
    TargetError,
    _past,
    beside,
    built_in,
    chosen,
    in_turn,
    mask_mods,
    within_causal,
)  # fmt: skip
from kernels.fa4 import BATCHED, MANY, PAGED, VARLEN, Call, compile_key
from kernels.mask_mods import TARGETS
from spec.domain import BOTTOM_RIGHT
from spec.from_file import resolve
from spec.from_text import from_text
from spec.masks import MASKS
from spec.sample import batch, evaluate
from spec.term import Term, and_, any_, ite, not_, or_
from spec.to_numpy import to_numpy
from tests.reference_kernel import Kernel

OWN = {target.target: target for target in TARGETS}
RSWA = "maskproof/rswa"
WITHIN = {"causal", "window", "rswa", "chunked_local", "sink_window"}


@pytest.mark.parametrize("spec", MASKS)
def test_a_spec_is_within_causal_just_if_no_sampled_query_sees_a_later_key(spec: str) -> None:
    mask, rng, later = MASKS[spec], np.random.default_rng(5), 0
    for _ in range(8):
        counts = {"num_ranges": 3} if "num_ranges" in mask.params else {}
        at = batch(rng, mask.params, mask.tables, assume=tuple(map(BOTTOM_RIGHT, mask.assume)),
                   constants=counts)
        seen = evaluate(mask.framed(BOTTOM_RIGHT, **counts), at)
        q = at.cells["q_idx"] + at.cells["seqlen_k"] - at.cells["seqlen_q"]
        later += int((seen & (at.cells["kv_idx"] > q)).sum())
    assert within_causal(spec) == (later == 0) == (spec in WITHIN)


@pytest.mark.parametrize(("spec", "within"), [
    ("window & document", True), ("rswa | sink_window", True), ("~(full & ~causal)", True),
    ("causal | document", False), ("~causal", False), ("document", False),
])
def test_compositions_are_within_causal_where_their_structure_shows_it(
    spec: str, within: bool
) -> None:
    assert within_causal(spec) == within


ATOMS = ("kv <= q", "kv < q", "q < kv", "q <= kv", "q == kv", "kv == q", "kv < 2", "q < 1", "True",
         "False")


def formulas() -> st.SearchStrategy[Term]:
    atoms = st.sampled_from([from_text(text) for text in ATOMS])
    return st.recursive(atoms, lambda part: st.one_of(
        st.tuples(part, part).map(lambda two: and_(*two)),
        st.tuples(part, part).map(lambda two: or_(*two)),
        part.map(not_), st.tuples(part, part, part).map(lambda three: ite(*three)),
        st.tuples(st.integers(0, 2), part).filter(lambda two: not two[1].quantified)
        .map(lambda two: any_("r", *two)),
    ), max_leaves=5)


@settings(max_examples=400, deadline=None)
@given(formulas(), st.booleans())
def test_what_the_structure_shows_holds_on_every_cell(term: Term, value: bool) -> None:
    q, kv = np.arange(-2, 4)[:, None], np.arange(4)[None, :]
    holds = np.broadcast_to(to_numpy(term, {"q": q, "kv": kv}), (6, 4)) == value
    if _past(term, value):
        assert not (holds & (kv > q)).any()


def test_every_mask_mod_can_be_called_beside_causal() -> None:
    found = beside(OWN)
    assert found.keys() == {name + BESIDE for name in OWN}
    for name, target in found.items():
        base = OWN[name.removesuffix(BESIDE)]
        redundant = base.spec in WITHIN
        assert target.expected == {**base.expected, **({} if redundant else WRONG)}
        for (_, call), (_, plain) in zip(
            in_turn([target], gpu=True), in_turn([base], gpu=True), strict=True
        ):
            assert call == replace(plain, causal=True)


def test_calls_beside_a_flag_are_chosen_where_it_is_redundant_or_where_they_are_named() -> None:
    found = {**OWN, **built_in(OWN), **beside(OWN)}
    every = chosen(found, (), ())
    assert [name for name in every if BESIDE in name] == [RSWA + BESIDE]
    for text in ("rswa beside causal=True", "mm_prefix[window] beside causal=True",
                 "built-in/known-bad/dynamic_causal_window, causal"):
        (name,) = chosen(found, [text], ())
        assert name.partition("/")[2] == text
    with pytest.raises(TargetError):
        chosen(OWN, ["rswa beside causal=True"], ())


def test_nothing_that_cannot_be_called_gets_a_flag() -> None:
    never = replace(OWN[RSWA], unsupported="no such thing")
    assert beside({RSWA: never, "masks.py::mine": OWN[RSWA]}) == {}


def test_a_mask_mod_is_found_by_the_name_that_calls_have_for_it() -> None:
    targets = {**beside({RSWA: OWN[RSWA]}), **built_in(OWN)}
    assert [*mask_mods(targets)] == [RSWA]
    assert {call.mask_mod for _, call in in_turn(targets.values(), gpu=True)} == {RSWA, None}


def test_the_cpu_refuses_flags() -> None:
    ((_, call),) = in_turn(beside({RSWA: OWN[RSWA]}).values(), gpu=False)
    assert "act on a GPU only" in str(CpuBackend(OWN).refuses(call))


@pytest.mark.parametrize("layout", [PAGED, VARLEN, BATCHED])
def test_the_first_kernel_of_a_layout_shows_a_window_on_few_keys(layout: str) -> None:
    number = next(number for fields, number in VARIANTS if fields.get("layout", PAGED) == layout)
    assert 2 <= number <= 4


def test_flags_that_are_wrong_differ_from_those_that_are_right() -> None:
    right = [flags(5) | {"spec": spec} for name, (spec, flags) in FLAGS.items()
             if not name.startswith("known-bad/")]
    for name, (spec, flags) in FLAGS.items():
        assert (flags(5) | {"spec": spec} in right) != name.startswith("known-bad/")


class Beside(Kernel):
    """A kernel that takes what `reading` says of a mask_mod beside `causal=True`."""

    reading: str = "mask_mod"

    def mask_mod(self, call: Call) -> tuple[Any, tuple[str, ...]]:
        return None, ("prefix_lens", "window")

    def compile(self, call: Call, sequences: int) -> None:
        pass

    def launch(self, call: Call, on: Any, **given: Any) -> None:
        spec = {"mask_mod": call.spec, "flag": "causal", "both": f"causal & {call.spec}"}
        params = {name: int(value) for name, value in on.scalars.items()}
        super().launch(replace(call, spec=spec[self.reading], params=params), on, **given)


@pytest.mark.parametrize(("reading", "wrong"), [("mask_mod", False), ("both", False),
                                                ("flag", True)])
def test_a_redundant_flag_is_wrong_where_a_kernel_ignores_the_mask_mod(
    reading: str, wrong: bool
) -> None:
    from kernels.readout import Reader

    targets = {RSWA: OWN[RSWA], **beside({RSWA: OWN[RSWA]})}
    kernel = Beside()
    kernel.reading = reading
    device = GpuBackend(targets)
    device.readers["upstream"] = Reader(Bound(kernel, targets), device="cpu")
    (_, call), *_ = in_turn([targets[RSWA + BESIDE]], gpu=True)
    small = replace(call, params={"window": 2}, head_dim=16, head_dim_v=16, page_size=16,
                    kv_heads=2, q_heads=2)
    some = [Sequence(seqlen_q=q, seqlen_k=k, tables={"prefix_lens": 1})
            for q, k in ((5, 9), (1, 4))]
    found = device.check(small, pack(resolve("rswa"), some), lambda stage: None)
    assert (found.wrong.total > 0) == wrong


@pytest.mark.parametrize("layout", [PAGED, VARLEN, BATCHED])
def test_there_are_calls_for_few_and_for_many_sequences(layout: str) -> None:
    calls = [call for _, call in in_turn([OWN[RSWA]], gpu=True) if call.layout == layout]
    assert any(call.few for call in calls)
    assert layout == BATCHED or not all(call.few for call in calls)
    keys = {compile_key(call, MANY + (not call.few)) for call in calls}
    assert len(keys) == len(calls)


@pytest.mark.parametrize("few", [False, True])
def test_what_is_drawn_for_few_sequences_stays_few(few: bool) -> None:
    call = Call(provider="upstream", spec="causal", few=few)
    space = Space(call=call, mask=resolve("causal"))

    @settings(max_examples=10, deadline=None)
    @given(recipes(space, 4096))
    def holds(recipe: Recipe) -> None:
        assert recipe.call.few == few and recipe.count == (MANY if few else 4096)
        assert recipe_from(recipe_to(recipe)) == recipe

    holds()


def test_a_case_says_whether_it_is_for_few() -> None:
    one = Sequence(seqlen_q=2, seqlen_k=3)
    for few in (False, True):
        case = Case(Call(provider="upstream", spec="causal", few=few), (one,))
        assert from_text_case(canonical(case)) == case


def test_few_sequences_are_filled_up_only_where_a_call_is_for_many() -> None:
    call, mask = Call(provider="upstream", spec="causal"), resolve("causal")
    device, source = GpuBackend(OWN), Bound(Beside(), OWN)
    for count in (0, 2):
        some = pack(mask, [Sequence(seqlen_q=2, seqlen_k=3)] * 2).take(slice(0, count), mask)
        assert len(device._given(source, call, some)) == LEAST > MANY
        assert len(device._given(source, replace(call, few=True), some)) == max(count, 1)


def test_a_gpu_takes_calls_beside_a_flag_alone() -> None:
    device = GpuBackend(beside({RSWA: OWN[RSWA]}))
    ((_, call), *_) = in_turn(device.targets.values(), gpu=True)
    assert device.refuses(call) is None
