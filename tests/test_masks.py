"""The catalogue: every record is complete, and its parts agree with each other."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from spec.domain import CHUNK_LOCAL, PARAMS, TABLES, used
from spec.environment import as_table, environment, truth_table
from spec.from_text import from_text
from spec.masks import MASKS, POINTS, REPRESENTATIONS, WORDS, Mask, find, mask
from spec.show import shown
from spec.term import SpecError, postorder
from spec.to_picture import rows
from spec.to_text import to_text

ALL = pytest.mark.parametrize("entry", MASKS.values(), ids=MASKS)
LENGTHS = {"seqlen_q", "seqlen_k"}


def on(entry: Mask, seqlen_q: int = 6, seqlen_k: int = 8, **values: Any) -> Any:
    return shown(entry, values, seqlen_q, seqlen_k).grid()


@ALL
def test_every_field_is_filled(entry: Mask) -> None:
    assert MASKS[entry.name] is entry
    assert entry.name.isidentifier()
    for text in (entry.sentence, entry.empty_rows, entry.source, entry.picture):
        assert text.strip()
    assert entry.sentence.endswith(".")
    assert entry.example.keys() == LENGTHS | entry.params.keys() - {"num_ranges"} | (
        entry.tables.keys()
    )


@ALL
def test_declarations_are_what_the_formula_names(entry: Mask) -> None:
    names, tables = used(entry.formula, *entry.assume)
    facts = [part for name in tables for part in (*TABLES[name].dims, *TABLES[name].facts)]
    assert entry.tables == {name: TABLES[name] for name in tables}
    assert entry.params == {name: PARAMS[name] for name in names | used(*facts)[0]}


@ALL
def test_settled_points_are_points(entry: Mask) -> None:
    assert entry.settles.keys() <= POINTS.keys()


@ALL
def test_a_mask_with_positions_says_which(entry: Mask) -> None:
    names, _ = used(entry.formula)
    moves = any(t.op == "sym" and t.value == "q" for t in postorder(entry.formula))
    assert ("frame" in entry.settles) == moves
    assert ("window" in entry.settles) == ("window" in names)


def test_every_point_is_settled_by_some_mask() -> None:
    assert {point for entry in MASKS.values() for point in entry.settles} == POINTS.keys()


@ALL
def test_the_picture_is_the_interpretation(entry: Mask) -> None:
    assert rows(shown(entry, {}).grid()) == entry.picture


@ALL
def test_formulas_round_trip(entry: Mask) -> None:
    assert from_text(to_text(entry.formula)) is entry.formula


@pytest.mark.parametrize("entry", [m for m in MASKS.values() if not m.assume],
                         ids=lambda entry: entry.name)
def test_empty_rows_are_where_the_record_says(entry: Mask) -> None:
    grid = on(entry, seqlen_q=9, seqlen_k=5)
    empty = ~grid.any(axis=1)
    if entry.empty_rows.startswith("with seqlen_q > seqlen_k"):
        assert empty.tolist() == [True] * 4 + [False] * 5
    elif entry.empty_rows.startswith("only with seqlen_k = 0"):
        assert not empty.any()


def by_hand(name: str, q: int, kv: int, v: dict[str, Any]) -> bool:
    """Each mask once more, in plain Python over one cell."""
    past = kv <= q
    near = q - kv < v["window"]
    both = near and kv - q < v["window"]
    image = any(a <= q <= b and a <= kv <= b for a, b in v["ranges"])
    flag = v["dynamic_causal"] == 0
    meaning = {
        "full": True, "causal": past, "window": past and near, "window_symmetric": both,
        "same_range": image, "mm_prefix": past and near or image,
        "mm_prefix_no_window": past or image, "mm_prefix_clamped": near and (past or image),
        "dynamic_causal": past or flag, "dynamic_causal_window": both if flag else past and near,
        "rswa": past and (kv < v["prefix_lens"] or near),
        "prefix_lm": past or kv < v["prefix_lens"],
        "document": v["document_ids"][q] == v["document_ids"][kv] if q >= 0 else False,
        "chunked_local": past and q // v["chunk"] == kv // v["chunk"],
        "sink_window": past and (kv < v["sink"] or near),
    }
    return meaning[name]


VALUES = {
    "window": [1, 3, 100], "chunk": [1, 4], "sink": [0, 2],
    "prefix_lens": [0, 4, 99], "dynamic_causal": [0, 1],
    "ranges": [[], [[2, 4]], [[6, 20], [0, 3], [5, 5], [-1, -1]]],
}


@ALL
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(1, 1), (3, 7), (8, 8), (7, 3)])
def test_masks_mean_what_plain_python_says(entry: Mask, seqlen_q: int, seqlen_k: int) -> None:
    if entry.assume and seqlen_q > seqlen_k:
        return
    names = [name for name in VALUES if name in entry.params or name in entry.tables]
    base = {**{name: choices[0] for name, choices in VALUES.items()},
            "document_ids": [i * i % 3 for i in range(seqlen_k)]}
    for choice in itertools.product(*(VALUES[name] for name in names)):
        values = {**base, **dict(zip(names, choice, strict=True))}
        given = {k: v for k, v in values.items() if k in entry.params or k in entry.tables}
        got = truth_table(entry, environment(entry, given, seqlen_q, seqlen_k))
        want = [[bool(by_hand(entry.name, i + seqlen_k - seqlen_q, j, values))
                 for j in range(seqlen_k)] for i in range(seqlen_q)]
        assert got.tolist() == want, values


@pytest.mark.parametrize("left, right", [*itertools.combinations(MASKS, 2)])
def test_composition_is_cell_by_cell(left: str, right: str) -> None:
    a, b = MASKS[left], MASKS[right]
    known = shown(a & b, {}, 6, 8).values

    def seen(entry: Mask) -> Any:
        names = entry.params.keys() | entry.tables.keys()
        values = {name: value for name, value in known.items() if name in names}
        return truth_table(entry, environment(entry, values, 6, 8))

    assert (seen(a & b) == seen(a) & seen(b)).all()
    assert (seen(a | b) == seen(a) | seen(b)).all()
    assert (seen(~a) == ~seen(a)).all()
    assert (seen(~(a & ~b)) == ~(seen(a) & ~seen(b))).all()


@pytest.mark.parametrize("text", [
    "window & document | mm_prefix", "~causal", "~(causal | document)", "(window | rswa) & ~full",
])
def test_text_and_operators_compose_alike(text: str) -> None:
    made = eval(text, {"__builtins__": {}}, dict(MASKS))
    read = mask(text)
    assert read.formula is made.formula
    assert (read.params, read.tables, set(read.assume)) == (
        made.params, made.tables, set(made.assume)
    )
    assert mask(made.name).formula is made.formula


def test_a_composition_takes_comparisons_and_catalogue_parameters() -> None:
    made = mask("window & (kv % chunk == 0)")
    assert made.params.keys() == {"window", "chunk"}
    assert made.assume == ()


@pytest.mark.parametrize("text, why", [
    ("windo", "did you mean 'window'?"), ("zzz", "it has full, causal"),
    ("causal & windo", "did you mean 'window'?"),
    ("kv <= qq", "`qq` is neither a coordinate nor a declared"),
    ("kv <= lens[b]", "`lens` is neither a coordinate nor a declared"),
])
def test_unknown_names_are_one_line(text: str, why: str) -> None:
    with pytest.raises(SpecError) as caught:
        mask(text)
    assert why in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_find_is_the_catalogue() -> None:
    assert find("causal") is mask("causal") is MASKS["causal"]


def test_the_window_counts_the_query_itself() -> None:
    assert on(MASKS["window"], 8, 8, window=3).sum(axis=1).tolist() == [1, 2, 3, 3, 3, 3, 3, 3]


def test_frames_differ_only_where_keys_are_cached() -> None:
    causal = MASKS["causal"]
    for seqlen_q, seqlen_k in ((4, 4), (3, 5)):
        env = environment(causal, {}, seqlen_q, seqlen_k)
        same = (truth_table(causal, env) == truth_table(causal, env, CHUNK_LOCAL)).all()
        assert same == (seqlen_q == seqlen_k)


@pytest.mark.parametrize("name", [n for n, m in MASKS.items() if "ranges" in m.tables])
@pytest.mark.parametrize("ranges", VALUES["ranges"])
def test_a_representation_means_the_same(name: str, ranges: Any) -> None:
    entry = MASKS[name]
    given = entry.given(("query_ranges", "cu_seqlens_q"))
    assert given.tables.keys() == {"query_ranges", "cu_seqlens_q"}
    for lengths in ((8, 8), (3, 8), (8, 3)):
        assert (on(entry, *lengths, ranges=ranges) == on(given, *lengths, ranges=ranges)).all()


def test_given_tables_that_replace_nothing_change_nothing() -> None:
    assert MASKS["rswa"].given(("query_ranges", "prefix_lens")) is MASKS["rswa"]
    assert REPRESENTATIONS.keys() <= TABLES.keys()


def test_words_name_parts_of_the_catalogue() -> None:
    parts = {t for entry in MASKS.values() for t in postorder(entry.formula)}
    parts |= {instead for _, instead in REPRESENTATIONS.values()}
    assert WORDS.keys() <= parts


@ALL
def test_flex_attention_gets_the_same_mask(entry: Mask) -> None:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, create_mask

    from spec.to_flex import to_flex

    item = shown(entry, {})
    values = {name: torch.as_tensor(as_table(value, entry.tables[name]))
              if name in entry.tables else value for name, value in item.values.items()}
    lengths = {"seqlen_q": item.seqlen_q, "seqlen_k": item.seqlen_k}
    mask_mod = to_flex(entry, **lengths, **values)
    seen = create_mask(mask_mod, 1, 1, *lengths.values(), device="cpu")[0, 0].numpy()
    assert rows(seen) == entry.picture
    blocks = create_block_mask(mask_mod, 1, 1, *lengths.values(), device="cpu", BLOCK_SIZE=2)
    assert blocks.to_dense().shape[-2:] == tuple((n + 1) // 2 for n in lengths.values())


@ALL
def test_flex_mask_mods_can_be_traced(entry: Mask) -> None:
    import torch
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch.fx.experimental.proxy_tensor import make_fx

    from spec.to_flex import to_flex

    item = shown(entry, {})
    values = {name: torch.as_tensor(as_table(value, entry.tables[name]))
              if name in entry.tables else value for name, value in item.values.items()}
    mask_mod = to_flex(entry, seqlen_q=item.seqlen_q, seqlen_k=item.seqlen_k, **values)

    def indexed(*indices: Any) -> Any:
        with TransformGetItemToIndex():
            return mask_mod(*indices)

    first, last = (torch.tensor(i, dtype=torch.int32) for i in (0, item.seqlen_k - 1))
    trace = make_fx(indexed, tracing_mode="symbolic", _allow_non_fake_inputs=True)
    graph = trace(first, first, first, last)
    assert bool(graph(first, first, first, last)) == (entry.picture.split("\n")[0][-1] == "#")


@pytest.mark.parametrize("values, why", [
    ({}, "no value for 'window'"), ({"window": 0}, "window=0 is outside 1"),
    ({"window": 2, "chunk": 1}, "window has no parameter or table 'chunk'"),
])
def test_flex_refuses_wrong_values(values: dict[str, int], why: str) -> None:
    from spec.to_flex import to_flex

    with pytest.raises(SpecError, match=why):
        to_flex(MASKS["window"], seqlen_q=4, seqlen_k=4, **values)


def test_flex_refuses_a_parameter_that_divides_and_is_zero() -> None:
    from spec.to_flex import mask_mod

    formula = from_text("kv // chunk == 0")
    assert mask_mod(formula, {"chunk": 2})(0, 0, 0, 1)
    with pytest.raises(SpecError, match="chunk is 0 and divides"):
        mask_mod(formula, {"chunk": 0})


def test_torch_gives_the_same_mask() -> None:
    import torch

    from spec.to_torch import to_torch

    for entry in MASKS.values():
        item = shown(entry, {})
        env = environment(entry, item.values, item.seqlen_q, item.seqlen_k)
        tensors = {name: torch.as_tensor(value) for name, value in env.items()}
        seen = to_torch(entry.framed(**item.counts()), tensors)
        shape = item.seqlen_q, item.seqlen_k
        assert rows(np.broadcast_to(seen.numpy(), shape)) == entry.picture
