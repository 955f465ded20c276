"""Where masks live: coordinates and frames, parameters and their ranges, tables and their facts.

Formulas use absolute coordinates only: `q` and `kv` are token positions in the whole sequence,
`b` is the sequence, `h` the query head, and `token` the packed row of the query in a batch whose
sequences are laid end to end. A frame says, once, what these are in a kernel's own indices
(`q_idx` counts from the first query of this call, `kv_idx` from the first key).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spec.from_text import from_text
from spec.term import INT, SpecError, Term, bind, sym, symbols, tables
from spec.to_text import to_text

INT32_MAX = 2**31 - 1
# The largest tile side FA4 chooses: a partial tile calls the mask_mod on up to 255 rows or keys
# past the end of the sequence.
PADDING = 256


@dataclass(frozen=True, slots=True)
class Param:
    """An integer parameter of a mask; both bounds are inclusive."""

    name: str
    low: int
    high: int
    meaning: str

    def check(self, value: int) -> int:
        if not self.low <= value <= self.high:
            raise SpecError(f"{self.name}={value} is outside {self.low} .. {self.high}")
        return value


@dataclass(frozen=True, slots=True)
class Table:
    """A named int32 tensor that a mask or a mask_mod reads.

    `dims` is its shape in symbols; `facts` is what its builder guarantees of the rows that a query
    of sequence `b` may meet, in the symbols of a formula.
    """

    name: str
    dims: tuple[Term, ...]
    facts: tuple[Term, ...]
    meaning: str

    @property
    def shape(self) -> str:
        return f"{self.name}[{', '.join(map(to_text, self.dims))}]"


def table(name: str, dims: str, facts: tuple[str, ...], meaning: str) -> Table:
    """`dims` is text, separated by commas: `"num_seqs, num_ranges, 2"`."""
    sizes = tuple(from_text(dim, sort=INT) for dim in dims.split(","))
    return Table(name, sizes, tuple(map(from_text, facts)), meaning)


@dataclass(frozen=True, slots=True)
class Frame:
    """What the absolute coordinates are, in a kernel's own indices."""

    name: str
    phrase: str
    q: Term
    kv: Term = sym("kv_idx")
    token: Term = from_text("cu_seqlens_q[b] + q_idx", sort=INT)

    def __call__(self, formula: Term) -> Term:
        return bind(formula, {"q": self.q, "kv": self.kv, "token": self.token})


Q_IDX, SEQLEN_Q, SEQLEN_K = sym("q_idx"), sym("seqlen_q"), sym("seqlen_k")
BOTTOM_RIGHT = Frame(
    "bottom_right",
    "the last query stands at the last key: q = q_idx + seqlen_k - seqlen_q",
    Q_IDX + (SEQLEN_K - SEQLEN_Q),
)
CHUNK_LOCAL = Frame("chunk_local", "q counts from the first query of this call", Q_IDX)

COORDINATES = frozenset({"q", "kv", "b", "h", "token", "seqlen_q", "seqlen_k"})
INDICES = frozenset({"q_idx", "kv_idx", "offset_q", "offset_k"})
SIZES = frozenset({"num_seqs", "num_tokens"})
LENGTHS = frozenset({"seqlen_q", "seqlen_k"})

PARAMS: Mapping[str, Param] = {
    p.name: p
    for p in (
        Param("window", 1, INT32_MAX, "keys that a query sees, itself counted"),
        Param("chunk", 1, INT32_MAX, "tokens of one chunk"),
        Param("sink", 0, INT32_MAX, "first keys that every query sees"),
        Param("num_ranges", 0, 1024, "rows of the list of ranges"),
    )
}

TABLES: Mapping[str, Table] = {
    t.name: t
    for t in (
        table(
            "ranges",
            "num_seqs, num_ranges, 2",
            (
                "all(0 <= ranges[b, r, 0] and ranges[b, r, 0] <= ranges[b, r, 1]"
                " or ranges[b, r, 0] == -1 and ranges[b, r, 1] == -1 for r in range(num_ranges))",
                # Rows of one token, with which some builders fill up, may repeat.
                "all(all(r == s or ranges[b, r, 0] == ranges[b, r, 1]"
                " or ranges[b, s, 0] == ranges[b, s, 1]"
                " or ranges[b, r, 1] < ranges[b, s, 0] or ranges[b, s, 1] < ranges[b, r, 0]"
                " for s in range(num_ranges)) for r in range(num_ranges))",
            ),
            "first and last position, both inclusive, of each range of a sequence, or (-1, -1); "
            "ranges of more than one token are disjoint",
        ),
        table(
            "query_ranges",
            "num_tokens, 2",
            (
                "0 <= query_ranges[token, 0] and query_ranges[token, 0] <= query_ranges[token, 1]"
                " or query_ranges[token, 0] == -1 and query_ranges[token, 1] == -1",
            ),
            "first and last position of the range that holds the query of a row, or (-1, -1)",
        ),
        table(
            "cu_seqlens_q",
            "num_seqs + 1",
            (
                "0 <= cu_seqlens_q[b]",
                "cu_seqlens_q[b + 1] == cu_seqlens_q[b] + seqlen_q",
                "cu_seqlens_q[b + 1] <= num_tokens",
            ),
            "packed row of the first query of each sequence, then the number of rows",
        ),
        table(
            "prefix_lens", "num_seqs", ("0 <= prefix_lens[b]",), "length of each sequence's prefix"
        ),
        table(
            "dynamic_causal",
            "num_seqs",
            ("0 <= dynamic_causal[b] and dynamic_causal[b] <= 1",),
            "1 where the sequence is causal, 0 where it is bidirectional",
        ),
        table("document_ids", "seqlen_k", (), "document of each position"),
    )
}


def used(*formulas: Term) -> tuple[set[str], set[str]]:
    """Names of the parameters and of the tables in `formulas`."""
    return symbols(*formulas) - COORDINATES - SIZES - INDICES, tables(*formulas)


def lengths(limit: Term | int, padded: bool) -> tuple[Term, ...]:
    """The cells of one call: every query and key of a sequence of up to `limit` tokens, or, when
    `padded`, also the rows and keys past its end on which a partial tile calls the mask_mod."""
    extra = f" + {PADDING}" if padded else ""
    cells = (
        "0 <= b and b < num_seqs", "0 <= h", "0 <= seqlen_q", "0 <= seqlen_k",
        f"0 <= q_idx and q_idx < seqlen_q{extra}", f"0 <= kv_idx and kv_idx < seqlen_k{extra}",
    )
    return (*map(from_text, cells), SEQLEN_Q <= limit, SEQLEN_K <= limit,
            sym("num_seqs") < INT32_MAX)


def guarantees(
    params: Mapping[str, Param], tables: Mapping[str, Table], constants: Mapping[str, int],
    frame: Frame,
) -> tuple[Term, ...]:
    """What callers and builders guarantee of parameters and tables, in a kernel's indices."""
    found = [from_text(f"{p.low} <= {p.name} and {p.name} <= {p.high}")
             for p in params.values() if p.name not in constants]
    for t in tables.values():
        found += [fact for fact in t.facts]
        found += [1 <= dim for dim in t.dims if dim.op == "sym" and dim.value in SIZES | LENGTHS]
        found += [dim <= INT32_MAX for dim in t.dims if dim.op == "sym" and dim.value in SIZES]
    return tuple(dict.fromkeys(frame(bind(fact, constants)) for fact in found))
