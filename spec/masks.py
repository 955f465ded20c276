"""The catalogue: every mask once, as data, in absolute coordinates.

`MASKS[name]` is a record; `mask(text)` gives the record of a name or of a composition such as
`"window & document | mm_prefix"`, and `&`, `|`, `~` on records do the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from spec.domain import BOTTOM_RIGHT, PARAMS, TABLES, Frame, Param, Table, used
from spec.from_text import from_text
from spec.term import SpecError, Term, bind, expand, substitute
from spec.to_text import to_text

# Points on which real systems disagree; a record says how it settles those that touch it.
POINTS: Mapping[str, str] = {
    "order": "(causal and window) or range, against (causal or range) and window",
    "window": "a window of W counts the query itself (W keys) or not (W + 1)",
    "side": "a window without causal is symmetric or one-sided",
    "mixed": "which side of the window binds causal and bidirectional sequences of one batch",
    "frame": "the query index is local to the call or absolute",
    "ranges": "range ends, single tokens, overlap, ranges past the cached keys",
    "prefix": "whose prefix, and counted from where",
    "lengths": "more queries than keys",
    "unbounded": "a window of 0, and (-1, -1)",
    "padding": "rows and keys past the end of the sequence, which partial tiles hold",
    "flags": "a mask_mod beside built-in causal and window flags: alone, both, or ignored",
}
EVERY_MASK: Mapping[str, str] = {
    "padding": "no cells of the mask; a kernel hides them by the lengths",
    "flags": "the formula is the whole mask: built-in flags are off",
}


@dataclass(frozen=True, slots=True)
class Mask:
    """One mask. `formula` is True where query position q sees key position kv.

    `params` and `tables` declare what the formula names beyond the coordinates, `assume` what it
    needs besides. `settles` maps a key of POINTS to the choice made. `example` holds the lengths,
    parameters and tables of `picture`: `#` visible, `.` hidden, a row per query.
    """

    name: str
    sentence: str
    formula: Term
    params: Mapping[str, Param]
    tables: Mapping[str, Table]
    assume: tuple[Term, ...]
    settles: Mapping[str, str]
    empty_rows: str
    source: str
    example: Mapping[str, Any]
    picture: str

    def framed(self, frame: Frame = BOTTOM_RIGHT, **constants: int) -> Term:
        """The formula in a kernel's indices; `any` written out where its count is a number."""
        return expand(frame(bind(self.formula, constants)))

    def given(self, tables: tuple[str, ...]) -> Mask:
        """This mask, stated over the tables that a kernel is given instead of its own."""
        known = {**TABLES, **self.tables}
        formula = self.formula
        for name in tables:
            if name in REPRESENTATIONS:
                formula = substitute(formula, dict([REPRESENTATIONS[name]]))
        return self if formula is self.formula else record(
            self, formula=formula, tables=known, params={**PARAMS, **self.params}
        )

    def __and__(self, other: Mask) -> Mask:
        return _join(f"{_atom(self)} & {_atom(other)}", self.formula & other.formula, self, other)

    def __or__(self, other: Mask) -> Mask:
        return _join(f"{_atom(self)} | {_atom(other)}", self.formula | other.formula, self, other)

    def __invert__(self) -> Mask:
        # What a mask settles need not hold where its answer is turned around.
        joined = _join(f"~{_atom(self)}", ~self.formula, self)
        return replace(joined, settles=EVERY_MASK)


def _atom(mask: Mask) -> str:
    return mask.name if mask.name.isidentifier() else f"({mask.name})"


def record(mask: Mask, *, formula: Term, params: Mapping[str, Param],
           tables: Mapping[str, Table], **fields: Any) -> Mask:
    """`mask` with another formula, declaring just the parameters and tables that it names."""
    names, table_names = used(*map(BOTTOM_RIGHT, (formula, *fields.get("assume", mask.assume))))
    looked_at: set[str] = set()
    while pending := (table_names & tables.keys()) - looked_at:
        looked_at |= pending
        for table in pending:
            more = used(*map(BOTTOM_RIGHT, (*tables[table].dims, *tables[table].facts)))
            names, table_names = names | more[0], table_names | more[1]
    for name in sorted(names - params.keys() | table_names - tables.keys()):
        raise SpecError(f"`{name}` is neither a coordinate nor a declared parameter or table")
    return replace(
        mask, formula=formula, params={name: params[name] for name in sorted(names)},
        tables={name: tables[name] for name in sorted(table_names)}, **fields,
    )


EMPTY_ROWS = "a row without a visible key gives output 0 and LSE -inf"
NEVER_EMPTY = "only with seqlen_k = 0; then the row gives output 0 and LSE -inf"
NEGATIVE_EMPTY = (
    "with seqlen_q > seqlen_k the first seqlen_q - seqlen_k rows, which give output 0 and LSE -inf"
)
BLANK = Mask("", "", from_text("True"), {}, {}, (), {}, EMPTY_ROWS, "", {}, "")


def _join(name: str, formula: Term, *masks: Mask) -> Mask:
    """A composition: the parts' declarations together; a name declared in two ways is an error."""
    merged: dict[str, Any] = {}
    for mask in masks:
        for key, value in [*mask.params.items(), *mask.tables.items()]:
            if merged.setdefault(key, value) != value:
                raise SpecError(f"`{key}` is declared in two ways by the parts of {name}")
    return record(
        BLANK, formula=formula, name=name, sentence=f"A query sees a key where {name}.",
        params={k: v for k, v in merged.items() if isinstance(v, Param)},
        tables={k: v for k, v in merged.items() if isinstance(v, Table)},
        assume=tuple(dict.fromkeys(a for mask in masks for a in mask.assume)),
        settles={k: v for mask in masks for k, v in mask.settles.items()},
    )


W_KEYS = {
    "window": "W keys: the query itself and the W - 1 before it",
    "unbounded": "a window of 0 is refused; (-1, -1) is the mask without its window term",
}
BOTH_SIDES = "symmetric: W - 1 keys on either side of the query"
ABSOLUTE = "absolute: q = q_idx + seqlen_k - seqlen_q, so the last query stands at the last key"
RANGES = (
    "ends are inclusive and absolute and may lie past the cached keys; a range of one token adds "
    "nothing to a mask in which a token sees itself; ranges do not overlap"
)
MORE_QUERIES = "with seqlen_q > seqlen_k the first rows have negative positions and see no past"

RANGE_TERM = from_text(
    "any(ranges[b, r, 0] <= q and q <= ranges[b, r, 1]"
    " and ranges[b, r, 0] <= kv and kv <= ranges[b, r, 1] for r in range(num_ranges))"
)
OWN_RANGE_TERM = from_text("query_ranges[token, 0] <= kv and kv <= query_ranges[token, 1]")

# What a kernel may be given, in place of which term. Each is proved to mean the same.
REPRESENTATIONS: Mapping[str, tuple[Term, Term]] = {"query_ranges": (RANGE_TERM, OWN_RANGE_TERM)}

# What an engineer calls the parts of a formula.
WORDS: Mapping[Term, str] = {
    from_text("kv <= q"): "causal term",
    from_text("q - kv < window"): "window term",
    from_text("kv - q < window"): "window's future side",
    from_text("kv < prefix_lens[b]"): "prefix term",
    from_text("kv < sink"): "sink term",
    from_text("document_ids[q] == document_ids[kv]"): "document term",
    from_text("q // chunk == kv // chunk"): "chunk term",
    from_text("dynamic_causal[b] == 0"): "per-sequence flag",
    RANGE_TERM: "range term",
    OWN_RANGE_TERM: "range term",
}


MASKS: dict[str, Mask] = {}


def _mask(name: str, sentence: str, text: str, *, settles: Mapping[str, str], source: str,
          example: Mapping[str, Any], picture: str, assume: tuple[str, ...] = (),
          empty_rows: str = EMPTY_ROWS) -> None:
    MASKS[name] = record(
        BLANK, formula=from_text(text, lambda part: find(part).formula), params=PARAMS,
        tables=TABLES, name=name, sentence=sentence, assume=tuple(map(from_text, assume)),
        settles={**settles, **EVERY_MASK}, source=source, empty_rows=empty_rows, example=example,
        picture="\n".join(picture.split()),
    )


def find(name: str) -> Mask:
    """The record of a catalogue name; SpecError names the closest one."""
    if name in MASKS:
        return MASKS[name]
    import difflib

    close = difflib.get_close_matches(name, MASKS, 1)
    raise SpecError(
        f"no mask {name!r} in the catalogue" + (f"; did you mean {close[0]!r}?" if close else
                                                f"; it has {', '.join(MASKS)}")
    )


def mask(
    text: str, params: Mapping[str, Param] | None = None, tables: Mapping[str, Table] | None = None
) -> Mask:
    """The record that a catalogue name or a composition in the text form means.

    A composition may name parameters and tables of the catalogue and those declared here, as a
    file of one's own does (`spec.from_file`). Raises SpecError.
    """
    if text.strip().isidentifier():
        return find(text.strip())
    parts: list[Mask] = []

    def lookup(name: str) -> Term:
        parts.append(find(name))
        return parts[-1].formula

    formula = from_text(text, lookup)
    joined = _join(text.strip(), parts[0].formula, *parts) if parts else BLANK
    return record(
        joined, formula=formula, params={**PARAMS, **joined.params, **(params or {})},
        tables={**TABLES, **joined.tables, **(tables or {})}, name=text.strip(),
        sentence=f"A query sees a key where {text.strip()}.",
    )


SIX = {"seqlen_q": 6, "seqlen_k": 6}
CHUNK_OF_4 = {"seqlen_q": 4, "seqlen_k": 8}

_mask(
    "full", "Every query sees every key.", "True",
    settles={}, source="Attention Is All You Need (Vaswani et al. 2017), section 3.2.1",
    empty_rows=NEVER_EMPTY, example={"seqlen_q": 2, "seqlen_k": 4},
    picture="#### ####",
)
_mask(
    "causal", "A query sees the keys at or before its own position.", "kv <= q",
    settles={"frame": ABSOLUTE, "lengths": MORE_QUERIES}, empty_rows=NEGATIVE_EMPTY,
    source="Attention Is All You Need (Vaswani et al. 2017), section 3.2.3; bottom-right alignment "
    "as flash-attention@2.1 and later",
    example=CHUNK_OF_4,
    picture="#####... ######.. #######. ########",
)
_mask(
    "window", "A query sees the last W keys up to and including its own position.",
    "causal & (q - kv < window)",
    settles={**W_KEYS, "frame": ABSOLUTE, "lengths": MORE_QUERIES},
    empty_rows=NEGATIVE_EMPTY,
    source="Mistral 7B (Jiang et al. 2023), section 2; sliding_window W is "
    "window_size=(W - 1, 0) of flash-attention",
    example={**CHUNK_OF_4, "window": 3},
    picture="..###... ...###.. ....###. .....###",
)
_mask(
    "window_symmetric", "A query sees the keys less than W positions away, before and after it.",
    "q - kv < window and kv - q < window",
    settles={**W_KEYS, "side": BOTH_SIDES, "frame": ABSOLUTE},
    source="Longformer (Beltagy et al. 2020), section 3.1; window_size=(W - 1, W - 1) of "
    "flash-attention",
    example={**CHUNK_OF_4, "window": 2},
    picture="...###.. ....###. .....### ......##",
)
_mask(
    "same_range", "A query sees the keys that lie in a range that holds the query too.",
    to_text(RANGE_TERM), settles={"ranges": RANGES, "frame": ABSOLUTE},
    source="the bidirectional part of mm_prefix",
    example={**SIX, "ranges": [[0, 1], [3, 5]]},
    picture="##.... ##.... ...... ...### ...### ...###",
)
_mask(
    "mm_prefix",
    "A query sees the last W keys up to its own position, and every key of the range (an image, "
    "say) that it lies in.",
    "window | same_range",
    settles={"order": "(causal and window) or range: a range is not cut by the window",
             **W_KEYS, "ranges": RANGES, "frame": ABSOLUTE, "lengths": MORE_QUERIES},
    source="vllm@0.33.0:_make_mm_prefix_mask_mod, branch with a window",
    example={"seqlen_q": 8, "seqlen_k": 8, "window": 2, "ranges": [[2, 5]]},
    picture="#....... ##...... .#####.. ..####.. ..####.. ..####.. .....##. ......##",
)
_mask(
    "mm_prefix_no_window",
    "A query sees the keys up to its own position, and every key of the range that it lies in.",
    "causal | same_range",
    settles={"ranges": RANGES, "frame": ABSOLUTE, "lengths": MORE_QUERIES},
    source="vllm@0.33.0:_make_mm_prefix_mask_mod, branch without a window",
    example={"seqlen_q": 5, "seqlen_k": 8, "ranges": [[2, 5]]},
    picture="######.. ######.. ######.. #######. ########",
)
_mask(
    "mm_prefix_clamped",
    "As mm_prefix, but of its own range a query sees no key W or more positions back.",
    "window | same_range & (q - kv < window)",
    settles={"order": "(causal or range) and window, on the past side only: the window does not "
             "cut a range's future keys",
             **W_KEYS, "ranges": RANGES, "frame": ABSOLUTE, "lengths": MORE_QUERIES},
    source="vllm@0.33.0:_make_mm_prefix_mask_mod, branch with the range clamped to the window",
    example={"seqlen_q": 8, "seqlen_k": 8, "window": 3, "ranges": [[1, 6]]},
    picture="#....... #######. #######. .######. ..#####. ...####. ....###. .....###",
)
_mask(
    "dynamic_causal", "Causal or bidirectional, by a flag for each sequence.",
    "causal | (dynamic_causal[b] == 0)",
    settles={"mixed": "the flag alone decides; no window", "frame": ABSOLUTE},
    source="vllm@0.33.0:FlashAttentionImpl.forward, causal given as a tensor",
    example={**CHUNK_OF_4, "dynamic_causal": 0},
    picture="######## ######## ######## ########",
)
_mask(
    "dynamic_causal_window",
    "A sliding window, one-sided in causal sequences and two-sided in the others.",
    "window | (dynamic_causal[b] == 0) & window_symmetric",
    settles={"mixed": "one-sided for causal sequences, symmetric for the others",
             **W_KEYS, "side": BOTH_SIDES, "frame": ABSOLUTE},
    source="vllm@0.33.0:FlashAttentionImpl.forward, causal given as a tensor on a windowed layer",
    example={**CHUNK_OF_4, "window": 2, "dynamic_causal": 0},
    picture="...###.. ....###. .....### ......##",
)
_mask(
    "rswa",
    "A query sees, up to its own position, the whole prefix of its sequence and the last W keys.",
    "causal & (kv < prefix_lens[b] or q - kv < window)",
    settles={**W_KEYS, "prefix": "per sequence, in absolute positions", "frame": ABSOLUTE,
             "lengths": MORE_QUERIES},
    empty_rows=NEGATIVE_EMPTY, source="vllm@0.33.0:_make_rswa_mask_mod",
    example={"seqlen_q": 5, "seqlen_k": 8, "window": 2, "prefix_lens": 2},
    picture="####.... ##.##... ##..##.. ##...##. ##....##",
)
_mask(
    "prefix_lm",
    "A query sees the whole prefix of its sequence, and the keys up to its own position.",
    "causal | (kv < prefix_lens[b])",
    settles={"prefix": "per sequence, in absolute positions", "frame": ABSOLUTE},
    source="T5 (Raffel et al. 2020), section 3.2.1",
    example={**SIX, "prefix_lens": 3},
    picture="###... ###... ###... ####.. #####. ######",
)
_mask(
    "document", "A query sees the keys of its own document.",
    "document_ids[q] == document_ids[kv]", assume=("seqlen_q <= seqlen_k",),
    settles={"frame": ABSOLUTE, "lengths": "not defined: every position needs a document"},
    empty_rows="none: a query sees itself",
    source="packing of several documents into one sequence (Krell et al. 2021), section 3",
    example={**SIX, "document_ids": [0, 0, 1, 1, 1, 2]},
    picture="##.... ##.... ..###. ..###. ..###. .....#",
)
_mask(
    "chunked_local",
    "A query sees, up to its own position, the keys of its own chunk of the sequence.",
    "causal & (q // chunk == kv // chunk)",
    settles={"frame": ABSOLUTE, "lengths": MORE_QUERIES}, empty_rows=NEGATIVE_EMPTY,
    source="Llama 4 (Meta 2025), attention_chunk_size; chunks begin at position 0",
    example={**SIX, "chunk": 4},
    picture="#..... ##.... ###... ####.. ....#. ....##",
)
_mask(
    "sink_window",
    "A query sees, up to its own position, the first s keys and the last W keys.",
    "causal & (kv < sink or q - kv < window)",
    settles={**W_KEYS, "frame": ABSOLUTE, "lengths": MORE_QUERIES},
    empty_rows=NEGATIVE_EMPTY, source="StreamingLLM (Xiao et al. 2024), section 3.2",
    example={**CHUNK_OF_4, "window": 2, "sink": 1},
    picture="#..##... #...##.. #....##. #.....##",
)
