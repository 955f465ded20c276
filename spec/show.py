"""`python -m spec.show NAME`: what a mask means, in words, formula and picture."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from spec.domain import BOTTOM_RIGHT, Table
from spec.environment import (
    as_table,
    counting,
    environment,
    number,
    refuse_unknown,
    sizes,
    truth_table,
)
from spec.from_file import FORMAT, resolve
from spec.masks import MASKS, Mask
from spec.term import SpecError
from spec.to_latex import to_latex
from spec.to_picture import picture, rows, save
from spec.to_text import to_text

HELP = f"""\
NAME is a mask of the catalogue (--list), a composition, or a TOML file that holds one:

  python -m spec.show window
  python -m spec.show window --set window=4 --seqlen-q 8 --seqlen-k 12
  python -m spec.show mm_prefix --set 'ranges=[[2, 5], [8, 9]]' --seqlen-q 12 --seqlen-k 12
  python -m spec.show 'window & document | mm_prefix'
  python -m spec.show 'causal & (kv % 3 == 0)' --png thirds.png --tile 4x4
  python -m spec.show my_mask.toml --json
  python -m spec.show rswa --flex > rswa.py

Values that are not set come from the mask's own example. In a picture rows are queries and columns
keys, in absolute positions; `#` is visible and `.` hidden.

{FORMAT}"""


@dataclass(frozen=True, slots=True)
class Shown:
    """A mask and one sequence to show it on."""

    mask: Mask
    values: Mapping[str, Any]
    seqlen_q: int
    seqlen_k: int

    @property
    def first_q(self) -> int:
        """The position of the first query."""
        return self.seqlen_k - self.seqlen_q

    @property
    def title(self) -> str:
        """The lengths and values on one line."""
        parts = {"seqlen_q": self.seqlen_q, "seqlen_k": self.seqlen_k, **self.values}
        return ", ".join(f"{name} = {value}" for name, value in parts.items())

    def counts(self) -> dict[str, int]:
        """What counts rows of tables: as it is set, else as the tables have it."""
        tables = {name: as_table(self.values[name], table)
                  for name, table in self.mask.tables.items() if name in self.values}
        settled = {name: number(self.mask.params[name], self.values)
                   for name in counting(self.mask) if name in self.values}
        return {**sizes(self.mask, tables), **settled}

    def grid(self) -> Any:
        """Which cells are visible; SpecError where the values do not fit the mask."""
        env = environment(self.mask, self.values, self.seqlen_q, self.seqlen_k)
        return truth_table(self.mask, env)


def shown(
    mask: Mask, values: Mapping[str, Any], seqlen_q: int | None = None, seqlen_k: int | None = None
) -> Shown:
    """`mask` on `values`, and on its example for what they leave out. SpecError for a value that
    the mask has no use for."""
    refuse_unknown(mask, values)
    example = dict(mask.example or composed_example(mask))
    lengths = example.pop("seqlen_q", 8), example.pop("seqlen_k", 8)
    seqlen_q = lengths[0] if seqlen_q is None else seqlen_q
    seqlen_k = lengths[1] if seqlen_k is None else seqlen_k
    left_out = {name: _fit(value, mask.tables.get(name), seqlen_k)
                for name, value in example.items() if name not in values}
    return Shown(mask, {**left_out, **values}, seqlen_q, seqlen_k)


def composed_example(mask: Mask) -> dict[str, Any]:
    """The catalogue's values for the names of a mask that has no example of its own."""
    known: dict[str, Any] = {}
    for entry in MASKS.values():
        known = {**entry.example, **known}
    names = [*mask.params, *mask.tables]
    return {name: known[name] for name in names if name in known}


def _fit(value: Any, table: Table | None, seqlen_k: int) -> Any:
    """An example's entry per position, stretched to other lengths."""
    per_position = table is not None and [to_text(dim) for dim in table.dims] == ["seqlen_k"]
    if per_position and isinstance(value, list) and value:
        return [value[i * len(value) // seqlen_k] for i in range(seqlen_k)]
    return value


def sections(mask: Mask) -> list[tuple[str, list[str]]]:
    """What a person reads about `mask`, as titles and lines; an empty part is left out."""
    tables = []
    for table in mask.tables.values():
        tables.append(f"{table.shape}: {table.meaning}".rstrip(": "))
        tables += [f"    {to_text(fact)}" for fact in table.facts]
    params = [f"{p.name} in {p.low} .. {p.high}: {p.meaning}".rstrip(": ")
              for p in mask.params.values()]
    found = [
        ("formula", [to_text(mask.formula)]),
        ("position", [BOTTOM_RIGHT.phrase]),
        ("assumes", [to_text(fact) for fact in mask.assume]),
        ("parameters", params),
        ("tables", tables),
        ("settles", [f"{point}: {choice}" for point, choice in mask.settles.items()]),
        ("empty rows", [mask.empty_rows]),
        ("source", [mask.source] if mask.source else []),
    ]
    return [(title, lines) for title, lines in found if lines]


def document(item: Shown) -> dict[str, Any]:
    """All of it as one JSON document."""
    mask = item.mask
    return {
        "schema": 1, "name": mask.name, "sentence": mask.sentence,
        "formula": to_text(mask.formula), "latex": to_latex(mask.formula),
        "assumptions": [to_text(fact) for fact in mask.assume],
        "params": {p.name: {"low": p.low, "high": p.high, "meaning": p.meaning}
                   for p in mask.params.values()},
        "tables": {t.name: {"dims": [to_text(dim) for dim in t.dims], "meaning": t.meaning,
                            "facts": [to_text(fact) for fact in t.facts]}
                   for t in mask.tables.values()},
        "settles": dict(mask.settles), "empty_rows": mask.empty_rows, "source": mask.source,
        "seqlen_q": item.seqlen_q, "seqlen_k": item.seqlen_k, "values": dict(item.values),
        "picture": rows(item.grid()).split("\n"),
    }


class Parser(argparse.ArgumentParser):
    """One line on standard error for bad usage, where argparse prints several."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"spec.show: {message}\n")


def parser() -> Parser:
    """The options of the command."""
    found = Parser(
        prog="python -m spec.show", description=__doc__.split(": ", 1)[1], epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("name", nargs="?", metavar="NAME", help="the mask to show")
    found.add_argument("--list", action="store_true", help="list the catalogue")
    found.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="values",
                       help="value of a parameter or table")
    found.add_argument("--seqlen-q", type=int, metavar="N", help="number of queries")
    found.add_argument("--seqlen-k", type=int, metavar="N", help="number of keys")
    found.add_argument("--png", metavar="FILE", help="save the picture as PNG")
    found.add_argument("--svg", metavar="FILE", help="save the picture as SVG")
    found.add_argument("--tile", metavar="MxN", help="draw the kernel's tiles in PNG and SVG")
    form = found.add_mutually_exclusive_group()
    form.add_argument("--latex", action="store_true", help="print only the formula, as LaTeX")
    form.add_argument("--cute", action="store_true", help="print only a CuTe DSL mask_mod")
    form.add_argument("--flex", action="store_true", help="print only a FlexAttention mask_mod")
    form.add_argument("--json", action="store_true", help="print one JSON document")
    return found


def setting(text: str) -> tuple[str, Any]:
    """`window=4` or `ranges=[[2, 5]]` as a name and a value."""
    name, _, value = text.partition("=")
    try:
        return name.strip(), ast.literal_eval(value.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise SpecError(f"--set {text}: write name=number or 'name=[[2, 5]]'") from None


def tile(text: str | None) -> tuple[int, int] | None:
    """`128x64` as queries and keys."""
    if text is None:
        return None
    found = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", text)
    if not found:
        raise SpecError(f"--tile {text}: write queries x keys, as in 128x128")
    return int(found[1]), int(found[2])


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, or 2 with one line on standard error."""
    args = parser().parse_args(argv)
    try:
        status = run(args)
        sys.stdout.flush()
    except SpecError as error:
        print(f"spec.show: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # `head` has read enough. Python would flush, and fail, once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def run(args: argparse.Namespace) -> int:
    """Print what was asked for; SpecError for input that cannot be used."""
    if args.list:
        width = max(map(len, MASKS))
        _print([f"{name:{width}}  {mask.sentence}" for name, mask in MASKS.items()])
        return 0
    if args.name is None:
        raise SpecError("name a mask, or --list the catalogue; --help has examples")
    if args.tile and not (args.png or args.svg):
        raise SpecError("--tile is drawn in a picture: add --png FILE or --svg FILE")
    item = shown(resolve(args.name), dict(map(setting, args.values)), args.seqlen_q, args.seqlen_k)
    for path, suffix in ((args.png, ".png"), (args.svg, ".svg")):
        if path is not None:
            _save(item, path, suffix, tile(args.tile))
    if args.latex:
        print(to_latex(item.mask.formula))
    elif args.flex:
        from spec.to_flex import source

        print(source(item.mask.formula, sentence=item.mask.sentence), end="")
    elif args.cute:
        from spec.to_cute import source as cute_source

        counts = item.counts()
        for name in sorted({*counting(item.mask)} - counts.keys()):
            raise SpecError(f"--cute writes each turn of `any` out: --set {name}=NUMBER")
        print(cute_source(item.mask, **counts), end="")
    elif args.json:
        print(json.dumps(document(item), indent=2))
    else:
        asked = bool(args.values) or (args.seqlen_q, args.seqlen_k) != (None, None)
        _report(item, _grid(item, must=asked))
        _print([f"saved {path}" for path in (args.png, args.svg) if path is not None])
    return 0


def _save(item: Shown, path: str, suffix: str, tiles: tuple[int, int] | None) -> None:
    if not path.endswith(suffix):
        raise SpecError(f"{path}: the name of a {suffix[1:].upper()} file ends in {suffix}")
    save(path, item.grid(), title=f"{item.mask.name}: {item.title}", first_q=item.first_q,
         tile=tiles)


def _grid(item: Shown, must: bool) -> str:
    """The text picture, or, unless the user asked for this very one, why there is none."""
    try:
        grid = item.grid()
    except SpecError as error:
        if must:
            raise
        return f"no picture: {error}"
    try:
        return picture(grid, first_q=item.first_q)
    except SpecError as error:
        return f"no picture: {error}"


def _report(item: Shown, drawn: str) -> None:
    _print([item.mask.name], "bold")
    _print([item.mask.sentence, ""])
    for title, lines in sections(item.mask):
        for label, line in zip([title, *[""] * len(lines)], lines, strict=False):
            _print([f"{label:12}{line}"])
    _print(["", item.title], "bold")
    _print([drawn])


def _print(lines: list[str], style: str = "") -> None:
    if not lines:
        return
    if not sys.stdout.isatty():
        print("\n".join(lines))
        return
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    console.print("\n".join(lines), style=style, markup=False)


if __name__ == "__main__":
    sys.exit(main())
