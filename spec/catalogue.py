"""`python -m spec.catalogue > docs/catalogue.md`: the formal spec that a person reads."""

from __future__ import annotations

import sys

import numpy as np

from spec.domain import BOTTOM_RIGHT
from spec.environment import own_rows, truth_table
from spec.masks import MASKS, POINTS, REPRESENTATIONS, Mask
from spec.show import sections, shown
from spec.to_latex import to_latex
from spec.to_picture import picture
from spec.to_text import to_text

REGENERATE = "python -m spec.catalogue > docs/catalogue.md"

INTRO = f"""\
<!-- Generated: {REGENERATE} -->
# The catalogue of masks

This is the formal spec: what each attention mask means, once. The formulas are the objects that
the proofs use; this page is printed from them.

**Coordinates.** `q` is the position of a query and `kv` the position of a key in the whole
sequence, both from 0. `b` is the sequence, `h` the query head, `seqlen_q` the number of queries
of this call and `seqlen_k` the number of keys. `token` is the row of the query in a batch whose
sequences are laid end to end.

**Frame.** A kernel counts queries from the first of this call, `q_idx`, and keys from the first
key, `kv_idx`. {BOTTOM_RIGHT.phrase[0].upper()}{BOTTOM_RIGHT.phrase[1:]} ("bottom-right"), and
kv = kv_idx. With more queries than keys the first positions are negative.

**Visible.** A formula is true where the query sees the key; the cell is then *visible*, else
*hidden*. In a picture rows are queries, columns are keys, `#` is visible and `.` hidden.

**Formulas** are Python expressions over whole numbers. `//` rounds down and `%` is its remainder
(by zero the quotient is 0); `and` binds tighter than `or`; `any(... for r in range(n))` is true
where one r at least makes it true; `table[i, j]` is an element of a table. Below each formula
stands the same in mathematical notation.

**Parameters and tables** hold 32-bit integers. A parameter has a range, both ends included. The
facts below a table are what whoever builds it guarantees for the rows of a sequence `b`.

**Your own mask** is a composition of these with `&`, `|` and `~`, or a file:
[own-masks.md](own-masks.md).
"""

OVERLAPPING = [[1, 3], [2, 5]]


def catalogue() -> str:
    """The whole page, in Markdown."""
    parts = [INTRO, _points(), "## Masks\n", _contents(), *map(_mask, MASKS.values()),
             _representations()]
    return "\n".join(parts)


def _points() -> str:
    lines = [
        "## Disputed points\n",
        "Real systems disagree on these. Each mask says how it settles those that touch it.\n",
        "| point | dispute |", "|---|---|",
    ]
    return "\n".join(lines + [f"| {key} | {text} |" for key, text in POINTS.items()]) + "\n"


def _contents() -> str:
    lines = [f"| [{name}](#{name}) | {mask.sentence} |" for name, mask in MASKS.items()]
    return "\n".join(["| mask | meaning |", "|---|---|", *lines]) + "\n"


def _fenced(text: str, kind: str = "") -> str:
    return f"```{kind}\n{text}\n```"


def _mask(mask: Mask) -> str:
    item = shown(mask, {})
    parts = [f"### {mask.name}", mask.sentence]
    for title, lines in sections(mask):
        if title == "formula":
            parts += [_fenced(lines[0]), _fenced(to_latex(mask.formula), "math")]
        elif title in ("empty rows", "source"):
            parts.append(f"**{title.capitalize()}:** {lines[0]}.")
        elif title != "position":
            parts += [f"**{title.capitalize()}:**", "\n".join(map(_item, lines))]
    parts += [f"**Picture** of {item.title}:", _fenced(picture(item.grid(), first_q=item.first_q))]
    return "\n\n".join(parts) + "\n"


def _item(line: str) -> str:
    """A line of a section as a list item; what it declares, and every fact, in code type."""
    indent = "  " if line.startswith(" ") else ""
    head, colon, rest = line.strip().partition(": ")
    return f"{indent}- `{head}`{colon}{rest}"


def _representations() -> str:
    parts = [
        "## Representations",
        "A kernel may be given another table than the one a mask is stated over. Each of these is "
        "proved to mean the same under the facts of its tables.",
    ]
    for table, (term, instead) in REPRESENTATIONS.items():
        parts += [f"### {table}", "In place of", _fenced(to_text(term)),
                  f"a kernel that is given `{table}` computes", _fenced(to_text(instead)),
                  _fenced(to_latex(instead), "math")]
    parts += [
        "For each query `query_ranges` holds the range that the query lies in, or (-1, -1). Where "
        "ranges overlap the two differ: by the list a query sees every range that holds it, by its "
        f"own row only one. With ranges {OVERLAPPING}, the list expected and the own row got:",
        _fenced(_overlap()),
    ]
    return "\n\n".join(parts) + "\n"


def _overlap() -> str:
    """The list of ranges against the own row, where ranges break their promise not to overlap."""
    mask, length = MASKS["same_range"], 6
    ranges = np.array([OVERLAPPING])
    env = {
        "seqlen_q": length, "seqlen_k": length, "b": 0, "num_ranges": len(OVERLAPPING),
        "q_idx": np.arange(length)[:, None], "kv_idx": np.arange(length)[None, :],
        "ranges": ranges, "query_ranges": own_rows(ranges[0], length, length),
        "cu_seqlens_q": np.array([0, length]),
    }
    return picture(truth_table(mask, env), truth_table(mask.given(("query_ranges",)), env))


if __name__ == "__main__":
    sys.stdout.write(catalogue())
