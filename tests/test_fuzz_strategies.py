"""Cases and recipes: valid by construction, rich in boundaries, and the same as the spec says."""

from __future__ import annotations

import collections

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz import boundaries, strategies
from fuzz.backends import CpuBackend
from fuzz.case import Case, Sequence, canonical, check, check_sequence, from_text
from fuzz.drawing import drawn
from fuzz.recipe import expand_recipe, from_json, to_json
from fuzz.sequences import expected, for_kernel, grid, pack, unpack
from fuzz.shrink import widened
from fuzz.strategies import Space, cases, choices_of, recipes
from kernels.fa4 import Call
from spec.environment import environment, own_rows, truth_table
from spec.from_file import from_file
from spec.masks import MASKS, mask

NAMES = sorted(MASKS)
DOMAIN = {"q_heads": boundaries.RATIOS, "page_size": boundaries.PAGES,
          "num_splits": boundaries.SPLITS}
FEW = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


def space_of(text: str, **fields: object) -> Space:
    return Space(call=Call(provider="upstream", spec=text), mask=mask(text), domain=DOMAIN,
                 **{"longest": 200, **fields})


@pytest.fixture(autouse=True)
def nothing_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def reject() -> None:
        raise AssertionError("a case that is not valid by construction")

    monkeypatch.setattr(strategies, "reject", reject)


@pytest.mark.parametrize("name", [*NAMES, "window & document | mm_prefix"])
def test_a_case_is_valid_and_its_text_reads_back(name: str) -> None:
    @FEW
    @given(cases(space_of(name)))
    def holds(case: Case) -> None:
        check(case)
        assert from_text(canonical(case)) == case
        assert canonical(from_text(canonical(case))) == canonical(case)

    holds()


@pytest.mark.parametrize("name", NAMES)
def test_the_choices_of_a_case_lead_to_it(name: str) -> None:
    @FEW
    @given(cases(space_of(name)))
    def holds(case: Case) -> None:
        space = widened(space_of(name), case)
        made = iter(choices_of(space, case))

        def choose(low: int, high: int, at: object = (), known: object = None) -> int:
            assert next(made) == strategies.PLAIN
            value = next(made)
            assert low <= value <= high
            return value

        assert strategies._case(choose, space, None) == case
        assert next(made, None) is None

    holds()


@pytest.mark.parametrize("name", NAMES)
def test_bulk_and_drawn_sequences_mean_what_the_spec_says(name: str) -> None:
    space = space_of(name, longest=40)
    for recipe in drawn(recipes(space, 8), 3, 6):
        assert from_json(to_json(recipe)) == recipe
        at = expand_recipe(recipe, space.mask)
        parts = unpack(space.mask, at)
        got = np.concatenate([np.zeros(0, bool), *(
            expected(space.mask, recipe.call.params, at, {**cells, "h": cells["b"]})
            for cells in grid(at))])
        meant = [truth_table(space.mask, environment(
            space.mask, {**recipe.call.params, **s.tables}, s.seqlen_q, s.seqlen_k)).reshape(-1)
            for s in parts]
        assert np.array_equal(got, np.concatenate([np.zeros(0, bool), *meant]))
        if len(at):
            again = pack(space.mask, parts)
            assert unpack(space.mask, again) == parts
            assert (again.seqlen_q == at.seqlen_q).all()


@pytest.mark.parametrize("name", NAMES)
def test_every_sequence_of_a_recipe_is_valid(name: str) -> None:
    space = space_of(name)
    for recipe in drawn(recipes(space, 48), 1, 6):
        at = expand_recipe(recipe, space.mask, most_cells=2**18, most_each=2**14)
        assert int(at.cells.sum()) <= 2**18
        for sequence in unpack(space.mask, at):
            check_sequence(space.mask, recipe.call.params, sequence)


@pytest.mark.parametrize("name", NAMES)
def test_every_sequence_of_a_recipe_can_be_shrunk(name: str) -> None:
    space = space_of(name)
    for recipe in drawn(recipes(space, 48), 2, 8):
        for sequence in unpack(space.mask, expand_recipe(recipe, space.mask)):
            case = Case(recipe.call, (sequence,))
            assert choices_of(widened(space, case), case)


def test_a_kernel_is_given_what_the_spec_speaks_of() -> None:
    space = space_of("mm_prefix", longest=40)
    for recipe in drawn(recipes(space, 8), 3, 6):
        at = expand_recipe(recipe, space.mask)
        rows = ("query_ranges", "cu_seqlens_q")
        found = for_kernel(space.mask, at, recipe.call.params, rows, {"num_ranges": 8})
        assert found.tables.keys() == {*rows, "ranges"}
        assert all(array.dtype == np.int32 for array in found.tables.values())
        assert found.tables["ranges"].shape == (len(at), 8, 2)
        own = [own_rows(found.tables["ranges"][b], int(at.seqlen_q[b]), int(at.seqlen_k[b]))
               for b in range(len(at))]
        told = found.tables["query_ranges"][:int(at.seqlen_q.sum())]
        assert np.array_equal(told, np.concatenate([np.zeros((0, 2), int), *own]))


@pytest.mark.parametrize("name", ["mm_prefix", "rswa", "dynamic_causal_window"])
def test_recipes_reach_every_boundary_class(name: str) -> None:
    space = space_of(name, longest=512)
    total: dict[str, int] = {}
    fields = collections.defaultdict(set)
    for recipe in drawn(recipes(space, 192), 7, 200):
        at = expand_recipe(recipe, space.mask, most_cells=2**21, most_each=2**17)
        total = boundaries.merged(total, boundaries.counts(space.mask, recipe.call, at))
        for field in DOMAIN:
            fields[field].add(getattr(recipe.call, field))
    assert {key: n for key, n in total.items() if n == 0} == {}
    assert len(total) >= 33
    assert fields["page_size"] == set(boundaries.PAGES)
    assert fields["num_splits"] == set(boundaries.SPLITS)
    assert len(fields["q_heads"]) >= 12


@pytest.mark.parametrize("wanted", [
    *boundaries.LENGTH_CLASSES, *boundaries.RANGE_CLASSES, "window of one",
    "window is all keys, by one",
])
def test_cases_reach_every_boundary_class(wanted: str) -> None:
    assert BY_CLASS[wanted] > 0


def _by_class() -> dict[str, int]:
    space = space_of("mm_prefix", longest=512)
    total: dict[str, int] = {}
    for case in drawn(cases(space), 5, 1500):
        found = boundaries.counts(space.mask, case.call, pack(space.mask, case.sequences))
        total = boundaries.merged(total, found)
    return total


BY_CLASS = _by_class()


def test_a_table_of_ones_own_is_drawn_within_its_facts(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "grouped.toml"
    path.write_text(
        'name = "grouped"\nmask = "causal & (groups[b, 0] <= kv)"\n'
        'tables.groups = {dims = "num_seqs, 2", facts = ["0 <= groups[b, 0]"]}\n')
    own = from_file(path)
    monkeypatch.undo()  # a fact that only its author knows may reject
    space = Space(call=Call(provider="upstream", spec=str(path)), mask=own, longest=30)
    for case in drawn(cases(space), 1, 20):
        check(case)
    for recipe in drawn(recipes(space, 50), 1, 5):
        at = expand_recipe(recipe, own)
        assert 0 < len(at) and (at.tables["groups"][:, 0] >= 0).all()


@given(st.integers(0, 9), st.integers(0, 9))
def test_documents_are_one_table_for_all_sequences(first: int, second: int) -> None:
    ids = (0, 0, 1, 1, 1, 2, 3, 3, 3)
    parts = [Sequence(seqlen_q=n, seqlen_k=n, tables={"document_ids": ids[:n]})
             for n in (first, second)]
    document = mask("document")
    assert unpack(document, pack(document, parts)) == tuple(parts)


def test_no_strategy_names_a_release_or_a_fault() -> None:
    import inspect

    from fuzz import recipe

    for module in (strategies, recipe, boundaries):
        text = inspect.getsource(module)
        assert not any(word in text for word in ("vllm", "known-bad", "0.24", "local_q"))


def test_the_domain_of_the_cpu_has_every_ratio() -> None:
    assert CpuBackend({}).domain(Call(provider="upstream", spec="causal"))["q_heads"] == tuple(
        range(1, 17))
